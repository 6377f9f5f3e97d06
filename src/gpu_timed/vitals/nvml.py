"""What NVML tells of one card's state: clocks, why they are low, power, temperature.

Public names of ``nvidia-ml-py`` (12 to 13.615 seen), which is an extra: ``pynvml.nvmlInit`` … as used below, and the
values of ``nvmlReturn_t`` and of the clocks event reasons, which are NVML's ABI (``nvml.h``). The reads used here take
1 to 2 µs each on an H200 with driver 580, with the interpreter let go; total energy takes 3.4 ms, and is read by
:func:`read_energy_mj` only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from gpu_timed.record import Measured, Missing

REASONS: Final = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""``nvmlClocksEventReason…``, by bit."""
_SM_CLOCK: Final = 1
"""``NVML_CLOCK_SM``."""
_GPU_SENSOR: Final = 0
"""``NVML_TEMPERATURE_GPU``."""
_NO_ANSWER: Final = frozenset({2, 3, 4, 13})
"""``INVALID_ARGUMENT`` (a MIG instance's handle), ``NOT_SUPPORTED``, ``NO_PERMISSION``, ``FUNCTION_NOT_FOUND``."""
_NOT_INSTALLED: Final = Missing("no_nvml", "nvidia-ml-py is not installed: pip install 'gpu-timed[nvml]'")
_PATIENCE: Final = 5


class Reading(NamedTuple):
    """What one look at a card has shown; units as in :class:`~gpu_timed.record.Vitals`."""

    sm_clock_mhz: Measured
    sm_clock_max_mhz: Measured
    throttle: tuple[str, ...] | Missing
    power_w: float | Missing
    temperature_c: Measured


def nothing(reason: Missing) -> Reading:
    """Return a reading that shows nothing, for one *reason*."""
    return Reading(reason, reason, reason, reason, reason)


class Nvml:
    """NVML, open until it is closed. Made and used on one thread. Raises nothing.

    ``absent`` says why it cannot be asked, None if it can.
    """

    def __init__(self) -> None:
        self.absent: Missing | None = None
        self._pynvml: Any = None
        try:
            pynvml = importlib.import_module("pynvml")
        except ImportError:
            self.absent = _NOT_INSTALLED
            return
        except Exception as error:  # noqa: BLE001 - there, and broken
            self.absent = Missing("no_nvml", _words(error))
            return
        try:
            pynvml.nvmlInit()
            self._pynvml = pynvml
        except Exception as error:  # noqa: BLE001 - no driver, another package of that name …
            self.absent = Missing("no_nvml", _words(error))

    def card(self, uuid: str) -> Card | Missing:
        """Return the card, or MIG instance, whose UUID is *uuid*, whatever its prefix.

        A runtime need not know whether its device is a MIG instance: ``GPU-`` or ``MIG-`` before the digits may be
        a guess, and the digits are not.
        """
        if self.absent is not None:
            return self.absent
        digits = uuid.partition("-")[2] or uuid
        last = ""
        for name in dict.fromkeys((uuid, f"GPU-{digits}", f"MIG-{digits}")):
            try:
                return Card(self._pynvml, self._pynvml.nvmlDeviceGetHandleByUUID(name), name)
            except Exception as error:  # noqa: BLE001 - not found, or the device is lost
                last = _words(error)
        return Missing("not_found", f"NVML knows no {uuid} ({last})")

    def close(self) -> None:
        """Undo what opening did. NVML counts: another user of it in this process is not disturbed."""
        if self._pynvml is not None:
            try:
                self._pynvml.nvmlShutdown()
            except Exception:  # noqa: BLE001, S110 - there is nothing left to do
                pass
            self._pynvml, self.absent = None, Missing("no_nvml", "closed")


class Card:
    """One device of NVML's. ``uuid`` is as NVML writes it."""

    def __init__(self, pynvml: Any, handle: Any, uuid: str) -> None:
        self.uuid = uuid
        self._pynvml = pynvml
        self._handle = handle
        self._failures = 0
        handles = [handle]
        if uuid.startswith("MIG-"):  # most of what is asked here is known of the whole card only
            try:
                handles.append(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle))
            except Exception:  # noqa: BLE001, S110 - then what the instance itself answers must do
                pass

        def question(convert: Callable[[int], Any], *names: str, more: tuple[Any, ...] = ()) -> _Question:
            return _Question(convert, [_way(pynvml, name, held, more) for held in handles for name in names])

        self._questions = (
            question(int, "nvmlDeviceGetClockInfo", more=(_SM_CLOCK,)),
            question(in_words, "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
            question(_watts, "nvmlDeviceGetPowerUsage"),
            question(int, "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV", more=(_GPU_SENSOR,)),
        )
        self._highest: Measured = question(int, "nvmlDeviceGetMaxClockInfo", more=(_SM_CLOCK,)).ask()

    @property
    def lost(self) -> bool:
        """Whether it has failed so often in a row that it should not be asked again."""
        return self._failures >= _PATIENCE

    def read(self) -> Reading:
        """Look at it. What has no answer is Missing; nothing is raised."""
        clock, throttle, power, temperature = found = [question.ask() for question in self._questions]
        absent = [one.reason for one in found if isinstance(one, Missing)]
        self._failures = self._failures + 1 if len(absent) == len(found) and "nvml_error" in absent else 0
        return Reading(clock, self._highest, throttle, power, temperature)

    def energy_mj(self) -> Measured:
        """Return the energy used since the driver was loaded, in millijoules. Slow: see :func:`read_energy_mj`."""
        found: Measured = _Question(
            int, [_way(self._pynvml, "nvmlDeviceGetTotalEnergyConsumption", self._handle, ())]
        ).ask()
        return found


def read_energy_mj(device_uuid: str) -> Measured:
    """Return the energy that a device has used since the driver was loaded, in millijoules. Raises nothing.

    **It takes 3.4 ms on an H200**, a thousand times what a clock costs: never once for each call. It is for the
    difference of two readings around a long run. A MIG instance has none of its own: ``Missing("unsupported")``.
    """
    nvml = Nvml()
    try:
        card = nvml.card(device_uuid)
        return card if isinstance(card, Missing) else card.energy_mj()
    finally:
        nvml.close()


def in_words(bits: int) -> tuple[str, ...]:
    """Return the names of the clocks event reasons in *bits*; one that is not known, as ``unknown_0x…``."""
    known = tuple(name for bit, name in REASONS.items() if bits & bit)
    rest = bits & ~sum(REASONS)
    return (*known, f"unknown_{rest:#x}") if rest else known


class _Question:
    """One question, with the ways to ask it: the first that answers is kept."""

    def __init__(self, convert: Callable[[int], Any], ways: list[Callable[[], int]]) -> None:
        self._convert = convert
        self._ways = ways
        self._answered = False
        self._absent = Missing("unsupported")

    def ask(self) -> Any:
        while self._ways:
            try:
                found = self._convert(self._ways[0]())
            except Exception as error:  # noqa: BLE001 - NVMLError, or what a strange driver brings about
                if self._answered or not _is_final(error):
                    return Missing("nvml_error", _words(error))
                self._absent = Missing("unsupported", _words(error))
                del self._ways[0]
            else:
                self._answered = True
                return found
        return self._absent


def _way(pynvml: Any, name: str, handle: Any, more: tuple[Any, ...]) -> Callable[[], int]:
    return lambda: getattr(pynvml, name)(handle, *more)


def _is_final(error: Exception) -> bool:
    return isinstance(error, AttributeError) or getattr(error, "value", None) in _NO_ANSWER


def _watts(milliwatts: int) -> float:
    return milliwatts / 1e3


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
