"""A CUDA context that dies under open spans: each driver call refused, by each code that says so.

A make-believe driver refuses one function, or everything from the first call of that function on, as a driver does
whose context was destroyed, whose process is ending or whose device met an illegal address. Then: the call returned its
own value or raised its own exception, every span was told, with a true time or why there is none, nothing hangs,
nothing but the fault is counted, and once the driver is well again spans are measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from test_diagnosis_parts import FakeDriver
from test_faults import LONG_S, ORDINARY, OWN, VALUE, Own

from gpu_timed import current, flush, gpu_timed
from gpu_timed.clocks.cuda_event import CudaEventClock
from gpu_timed.clocks.host import HostClock
from gpu_timed.ports import Place
from gpu_timed.record import Missing
from gpu_timed.testing import capture

CODES = {
    "INVALID_VALUE": 1,
    "OUT_OF_MEMORY": 2,
    "NOT_INITIALIZED": 3,
    "DEINITIALIZED": 4,
    "NO_DEVICE": 100,
    "INVALID_CONTEXT": 201,
    "INVALID_HANDLE": 400,
    "ILLEGAL_ADDRESS": 700,
    "CONTEXT_IS_DESTROYED": 709,
    "ASSERT": 710,
    "LAUNCH_FAILED": 719,
    "SYSTEM_NOT_READY": 802,
    "STREAM_CAPTURE_UNSUPPORTED": 900,
    "STREAM_CAPTURE_INVALIDATED": 901,
    "UNKNOWN": 999,
}
"""``CUresult``, by the driver API reference."""
ALIVE = {"cuGetErrorName", "cuThreadExchangeStreamCaptureMode"}
"""Functions that need no context: they go on answering."""


class Dying(FakeDriver):
    """A driver that refuses, once told to: one *function*, or from its next call on whatever needs a context."""

    def __init__(self) -> None:
        super().__init__(started=True)
        self.references = 1
        self.function, self.code, self.spreads = "", 0, False
        self.refused = 0
        self.names: dict[str, None] = {}

    def __getattr__(self, name: str) -> Any:
        inner = super().__getattr__(name)

        def call(*arguments: Any) -> int:
            self.names[name] = None
            dead = self.spreads and self.refused and name not in ALIVE
            if self.code and (name == self.function or dead):
                self.refused += 1
                return self.code
            return int(inner(*arguments))

        return call

    def do_cuStreamIsCapturing(self, stream: int, status: Any) -> None:  # noqa: N802
        status._obj.value = 0

    def do_cuEventCreate(self, where: Any, flags: int) -> int:  # noqa: N802
        return self.make("event", where) or 0 if self.pushed > 0 else CODES["INVALID_CONTEXT"]

    def do_cuStreamCreate(self, where: Any, flags: int) -> int:  # noqa: N802
        return self.make("stream", where) or 0 if self.pushed > 0 else CODES["INVALID_CONTEXT"]

    def do_cuCtxSynchronize(self) -> None:  # noqa: N802
        pass


class Here:
    """Everything goes to one stream of one device."""

    def __init__(self, driver: Dying) -> None:
        self.clock = CudaEventClock(driver)  # type: ignore[arg-type]
        self.place = Place(self.clock, 0, 5)

    def locate(self, launch: Any = None) -> Place:
        return self.place

    def device_of(self, value: Any) -> int | None:
        return None


@contextlib.contextmanager
def dying() -> Iterator[tuple[Dying, Here]]:
    """Measure by a make-believe driver that is well."""
    driver = Dying()
    here = Here(driver)
    with current.device(here, HostClock()):  # type: ignore[arg-type]
        yield driver, here


def call(sync: Any, *, raises: bool = False) -> object:
    """Make a call with another inside; return its value, or its exception."""
    inner = gpu_timed(name="inner", sync=sync)(lambda: None)

    @gpu_timed(name="outer", sync=sync)
    def outer() -> object:
        inner()
        if raises:
            raise OWN
        return VALUE

    try:
        return outer()
    except Own as own:
        return own


def functions_called() -> list[str]:
    """Return the driver's functions that a process calls from its first span on."""
    with dying() as (driver, _), capture():
        for sync in ("boundary", "deferred", "device"):
            call(sync)
        flush(LONG_S)
    return list(driver.names)


def test_the_functions_are_those_that_are_called() -> None:
    """What is struck below is all that the clock asks of a driver for spans on one stream."""
    assert set(functions_called()) == {*FUNCTIONS, *ALIVE} - {"cuGetErrorName"}


FUNCTIONS = (
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxGetState",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxSynchronize",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventElapsedTime",
    "cuStreamCreate",
    "cuStreamIsCapturing",
)


ASKED = {
    "boundary": {"cuEventSynchronize", "cuEventElapsedTime"},
    "deferred": {"cuEventQuery", "cuEventElapsedTime"},
    "device": {"cuCtxSynchronize", "cuEventSynchronize", "cuEventElapsedTime"},
}
"""What a span cannot have its time without, beside its marks, by its policy."""


def reason(function: str, sync: str, code: int) -> str:
    """Return why a span has no device time when *function* alone is refused; nothing where it may have one."""
    if function == "cuEventRecord":
        if 900 <= code < 910:
            return "captured"
        return "mark_failed" if code in (CODES["INVALID_CONTEXT"], CODES["INVALID_HANDLE"]) else "device_error"
    return "device_error" if function in ASKED[sync] else ""


@pytest.mark.parametrize("fresh", [True, False], ids=["at first", "later"])
@pytest.mark.parametrize("spreads", [False, True], ids=["alone", "all"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_context_that_dies_is_never_felt(function: str, spreads: bool, fresh: bool) -> None:
    """Under each policy, by each code, in the first span of a process and in a later one."""
    for (name, code), sync in ((each, sync) for each in CODES.items() for sync in ("boundary", "deferred", "device")):
        with dying() as (driver, _):
            if not fresh:
                call(sync)
                flush(LONG_S)
            counted = current.ledger().snapshot()
            driver.function, driver.code, driver.spreads = function, code, spreads
            raises = sync == "deferred"
            with capture() as records:
                outcome = call(sync, raises=raises)
                assert flush(LONG_S).pending == 0
            problem = (name, sync, records)
            assert outcome is (OWN if raises else VALUE), problem
            assert [record.name for record in records] == ["inner", "outer"], problem
            for record in records:
                assert isinstance(record.device_ns, Missing) or 0 < record.device_ns < LONG_S * 1e9, problem
            expected = "" if fresh or spreads else reason(function, sync, code)
            if expected:
                assert {record.device_ns.reason for record in records} == {expected}, problem
                done = sync != "deferred" and function == "cuEventElapsedTime"  # what is waited for was done by then
                if expected == "device_error":
                    assert {record.status for record in records} == {"ok" if done else "error"}, problem
                details = {record.device_ns.detail for record in records}
                assert details == {"" if expected == "captured" else f"CUDA_ERROR_{code}"}, problem
            now = current.ledger().snapshot()
            new = {kind for kind, count in now.items() if count > counted.get(kind, 0)} - ORDINARY
            assert new <= {"device_error", "mark_failed"}, problem
            if expected == "mark_failed":
                assert now["mark_failed"] - counted.get("mark_failed", 0) == len(records), problem
            driver.code = 0
            with capture() as records:
                assert call(sync) is VALUE
            assert all(isinstance(record.device_ns, int) for record in records), (name, sync, records)
