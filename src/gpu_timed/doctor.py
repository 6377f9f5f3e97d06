"""The doctor: :func:`diagnose` looks at everything between a call and its span's arrival, and says what it found."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from gpu_timed import assembly, current
from gpu_timed._version import VERSION
from gpu_timed.clocks import cuda_devices, cuda_driver
from gpu_timed.diagnosis import caches, clock, devices, limits, peaks, process, variables, versions, vitals
from gpu_timed.diagnosis.verdict import verdict
from gpu_timed.errors import ConfigurationError, DeviceFault
from gpu_timed.export import otel_environment, otlp, probe
from gpu_timed.findings import SECTIONS, Diagnosis, Finding, Inventory, Level, Section, Source
from gpu_timed.kernel_caches import looking
from gpu_timed.kernel_caches.places import surroundings
from gpu_timed.settings import Settings
from gpu_timed.vitals import glance
from gpu_timed.warmth import cuda_modules
from gpu_timed.warmth.probes import NOT_NEEDED

_SECTION_S: Final = 30.0
"""Seconds a section may take: making a context on a machine with many GPUs takes several."""
_LONGEST_S: Final = 600.0


def diagnose(
    *, measure: bool = False, send: bool = False, endpoint: str | None = None, timeout_s: float = 5.0
) -> Diagnosis:
    """Look at this process and its machine, and say whether calls are measured and delivered, and if not, why.

    By itself this only looks: it initialises no device, puts nothing on any stream, and sends nothing, so it
    can be called inside a running service. ``gpu-timed doctor`` measures and sends.

    Args:
        measure: Measure the clock of device 0, and of every other device that this process uses, on a stream
            of its own. **Makes a context on device 0 where the process has none**, and initialises CUDA, which
            does not survive a fork. Not while a graph is being captured.
        send: Send one test span by the exporter that ``configure(exporter="otlp")`` would use. The
            application's provider is not touched.
        endpoint: Where to, such as ``http://localhost:4318``; else ``OTEL_EXPORTER_OTLP_*`` says it.
        timeout_s: Seconds that the receiver may take.

    Returns:
        The findings, by section, and a verdict. What fails is a finding; it is not raised.

    Raises:
        ConfigurationError: An argument cannot be used.
    """
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not 0 < timeout_s <= _LONGEST_S:
        raise ConfigurationError(f"timeout_s must be a number greater than 0 and at most 600, not {timeout_s!r}.")
    if endpoint is not None:
        if not send:
            raise ConfigurationError("endpoint= needs send=True: without it nothing is sent.")
        if not isinstance(endpoint, str):
            raise ConfigurationError(f"endpoint= must be a text, not {endpoint!r}.")
        otlp.traces_url(endpoint)
    library = cuda_devices.load()
    look = functools.cache(lambda: cuda_devices.inventory(library, initialise=measure))
    return examine(
        {
            "versions": lambda: _versions(library),
            "devices": lambda: _devices(library, look),
            "clock": lambda: _clock(library, look, measure=measure),
            "vitals": lambda: _vitals(look),
            "export": lambda: _export(send=send, endpoint=endpoint, timeout_s=timeout_s),
            "settings": lambda: variables.findings(os.environ, current.held_settings()),
            "process": _process,
            "hooks": hooks,
            "caches": _caches,
            "targets": _targets,
        },
        {"export": timeout_s + _SECTION_S},
    )


def examine(sources: dict[str, Source], limits: dict[str, float] | None = None) -> Diagnosis:
    """Ask every source for its findings, and draw the verdict. A source that fails is a finding.

    Args:
        sources: By section; what is not in :data:`gpu_timed.findings.SECTIONS` is not asked.
        limits: Seconds that a section may take, where that is not :data:`_SECTION_S`.
    """
    sections = tuple(
        Section(name, _within(sources[name], (limits or {}).get(name, _SECTION_S)))
        for name in SECTIONS
        if name in sources
    )
    return Diagnosis(VERSION, sections, verdict(sections))


def hooks() -> Iterator[Finding]:
    """Report what watches for cold calls: each probe attached, waiting for its runtime, or without its hook."""
    state = current.probes()
    if not state:
        yield Finding("probes", "note", "nothing is watched yet: probes are attached with the first recorded call")
        return
    for name, said in state.items():
        if said == "attached":
            yield Finding(name, "ok", f"{name}: attached")
        elif said == "waiting":
            yield Finding(name, "ok", f"{name}: waits until its runtime is imported")
        elif said == cuda_modules.OFF:
            yield Finding(name, "ok", f"{name}: off; module_loads=True (GPU_TIMED_MODULE_LOADS=1) tells what is loaded")
        elif said.startswith(cuda_modules.REFUSED):
            why = said.removeprefix(cuda_modules.REFUSED)
            yield Finding(name, "warning", f"{name}: CUDA modules that are loaded in a call are not told: {why}")
        elif name in NOT_NEEDED:
            yield Finding(name, "note", f"{name}: {said}: what it would see is not told")
        else:
            yield Finding(name, "warning", f"{name}: {said}: calls in which nothing was seen are unknown, not warm")


def _targets() -> Iterator[Finding]:
    yield from process.targets(current.process_state())
    for attempt in current.targets():
        state = attempt.state
        level: Level = "warning" if state.status in ("missing", "refused") else "ok"
        yield Finding(f"target.{state.target}", level, f"target {state.target}: {state.detail}")


def _caches() -> Iterable[Finding]:
    around = surroundings(os.environ, driver=cuda_driver.device_present())
    return caches.findings(looking.look(around, only_in_use=True))


def _versions(library: Any) -> Iterable[Finding]:
    return versions.findings(
        VERSION,
        driver_version=cuda_devices.driver_version(),
        driver_cuda=cuda_devices.driver_cuda(library),
        device_present=cuda_driver.device_present(),
    )


def _devices(library: Any, look: Callable[[], Inventory]) -> Iterator[Finding]:
    yield from devices.findings(look(), os.environ, driver_present=library is not None)
    yield from peaks.findings(look(), assembly.peak_book())


def _clock(library: Any, look: Callable[[], Inventory], *, measure: bool) -> Iterator[Finding]:
    yield clock.host(time.perf_counter_ns)
    yield from clock.known(current.floors())
    if not measure:
        yield Finding(
            "not_measured",
            "note",
            "not measured: diagnose(measure=True) or `gpu-timed doctor` does it, with marks on a stream of its own",
        )
        return
    found = look().devices
    if not found:
        yield Finding("no_device", "note", "there is no device whose clock could be measured")
    for device in found:
        if device.index and not device.in_use:  # no context on a device that is not in use, but for device 0
            text = f"device {device.index} is not in use by this process: neither opened nor measured"
            yield Finding(f"skipped.{device.index}", "note", text, values={"device": device.index})
            continue
        try:
            with cuda_devices.bench(library, device.index) as bench:
                measured = list(clock.findings(bench))
            yield Finding(f"open.{device.index}", "ok", f"device {device.index} can be opened by this process")
            yield from measured
        except DeviceFault as fault:
            yield Finding(
                f"device.{device.index}",
                "problem",
                f"device {device.index} cannot be used by this process: {fault}",
                "look at nvidia-smi: it may be out of memory, broken, or exclusively another process's",
                {"device": device.index, "error": str(fault)},
            )


def _process() -> list[Finding]:
    state, held = current.process_state(), current.held_settings() or Settings()
    return [
        *process.findings(state),
        *process.unmatched_modes(state, held.mode),
        *limits.findings(current.limits()),
    ]


def _vitals(look: Callable[[], Inventory]) -> Iterator[Finding]:
    found = look().devices
    states, absent = glance.look([*(device.uuid for device in found), None])
    held = current.held_settings() or Settings()
    seen = [vitals.Seen(one.index, one.uuid, state) for one, state in zip(found, states, strict=False)]
    yield from vitals.findings(seen, states[-1], absent, switched_on=held.vitals and held.vitals_interval_s > 0)


def _export(*, send: bool, endpoint: str | None, timeout_s: float) -> Iterator[Finding]:
    yield from otel_environment.provider_findings(os.environ)
    if send:
        yield probe.send(endpoint, os.environ, timeout_s)
    else:
        yield Finding("send", "note", "sending a test span was not tried", values={"answer": "not_tried"})


def _within(source: Source, limit_s: float) -> tuple[Finding, ...]:
    """Collect the findings of *source* on a thread that is left behind when time is up. Never raises."""
    found: list[Finding] = []
    done = threading.Event()

    def run() -> None:
        try:
            found.extend(source())
        except Exception as error:  # noqa: BLE001 - shown in place of the section
            found.append(_failed(error))
        finally:
            done.set()

    thread = threading.Thread(target=run, name="gpu_timed-doctor", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads: unbounded, then
        run()
    if done.wait(limit_s):
        return tuple(found)
    late = Finding(
        "timed_out",
        "problem",
        f"this section did not finish within {limit_s:g} s",
        "the device or the receiver hangs: look at nvidia-smi, and at the address spans are sent to",
    )
    return (*found, late)


def _failed(error: Exception) -> Finding:
    return Finding(
        "failed",
        "problem",
        f"this could not be examined ({type(error).__name__}: {error})",
        "please report it, with this line",
        {"error": type(error).__name__},
    )
