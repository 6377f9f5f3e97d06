"""The machine's state: whether clocks, throttling and power can be read, and what they are now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from gpu_timed.findings import Finding
from gpu_timed.record import Missing, Vitals

_CROWDED: Final = 1.0
"""Load for each CPU above which threads wait for one."""


class Seen(NamedTuple):
    """One device, and its state as far as it could be read."""

    number: int
    """Its index."""
    uuid: str | None
    vitals: Vitals


def findings(devices: Sequence[Seen], host: Vitals, absent: Missing | None, *, switched_on: bool) -> Iterator[Finding]:
    """Report the state of *devices* and of the *host*.

    Args:
        devices: Those that the process sees.
        host: A reading of the host alone.
        absent: Why NVML cannot be asked, None if it can.
        switched_on: Whether spans carry any of it.
    """
    if not switched_on:
        text = "spans carry no clocks, throttling, power or load: vitals are switched off"
        yield Finding("off", "note", text, "set vitals=True, and vitals_interval_s above 0")
    if absent is not None:
        fix = "pip install 'gpu-timed[nvml]'" if "not installed" in absent.detail else ""
        text = f"NVML cannot be asked ({_reason(absent)}): spans carry the host's load, and nothing of the GPU's state"
        yield Finding("nvml", "note", text, fix, {"absent": _reason(absent)})
    else:
        yield Finding("nvml", "ok", "NVML answers", values={"absent": None})
        for device in devices:
            yield _device(device)
    yield _host(host)


def _device(seen: Seen) -> Finding:
    held = seen.vitals
    values = {
        "index": seen.number,
        "uuid": seen.uuid,
        "sm_clock_mhz": _value(held.sm_clock_mhz),
        "sm_clock_max_mhz": _value(held.sm_clock_max_mhz),
        "throttle_reasons": None if isinstance(held.throttle, Missing) else list(held.throttle),
        "power_w": _value(held.power_w),
        "temperature_c": _value(held.temperature_c),
    }
    key = f"device.{seen.number}"
    asked = (held.sm_clock_mhz, held.throttle, held.power_w, held.temperature_c)
    reasons = [value for value in asked if isinstance(value, Missing)]
    if len(reasons) == len(asked):
        text = f"{seen.number}: NVML tells nothing of {seen.uuid or 'a device without a UUID'} ({_reason(reasons[0])})"
        return Finding(key, "note", text, values=values)
    throttle = "unknown" if isinstance(held.throttle, Missing) else ", ".join(held.throttle) or "none"
    text = (
        f"{seen.number}: {seen.uuid}: SM clock {_shown(held.sm_clock_mhz)} of {_shown(held.sm_clock_max_mhz)} MHz, "
        f"held by: {throttle}, {_shown(held.power_w)} W, {_shown(held.temperature_c)} °C"
    )
    return Finding(key, "note" if held.slowed else "ok", text, values=values)


def _host(host: Vitals) -> Finding:
    values = {"host_load": _value(host.host_load), "cpus_allowed": _value(host.cpus_allowed)}
    text = f"load {_shown(host.host_load)} for each CPU, {_shown(host.cpus_allowed)} CPUs for this process"
    crowded = not isinstance(host.host_load, Missing) and host.host_load > _CROWDED
    if crowded:
        text += ": launches wait for a CPU, and host times are long"
    return Finding("host", "note" if crowded else "ok", text, values=values)


def _value(value: float | Missing) -> float | None:
    return None if isinstance(value, Missing) else round(value, 3)


def _shown(value: float | Missing) -> str:
    return "unknown" if isinstance(value, Missing) else f"{value:.4g}"


def _reason(absent: Missing) -> str:
    return absent.detail or absent.reason
