"""The ``cuda_event`` clock: pairs of CUDA events on raw streams, and their place on the host's axis.

Costs, resolution and what breaks a capture were measured on an H200 (torch 2.11, driver 580): recording
2.1 to 2.4 µs, event resolution 32 ns, a record between two host reads 7.2 µs wide.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from gpu_timed.bounds import Limit, fullest
from gpu_timed.clocks import cuda_driver as driver
from gpu_timed.clocks.cuda_floor import NOT_YET, Floor
from gpu_timed.clocks.timeline import Timeline
from gpu_timed.errors import DeviceFault
from gpu_timed.ports import NOT_GIVEN, DeviceInfo, Place, Position
from gpu_timed.ports import Mark as AnyMark
from gpu_timed.record import Missing

_GROW: Final = 32
POOL_LIMIT: Final = 65_536
"""Events of a device that are kept for re-use."""
_ANCHOR_EVERY_NS: Final = 1_000_000_000
_ANCHOR_TRIALS: Final = 3
_ANCHOR_LIMIT_NS: Final = 500_000
_RESOLUTION_NS: Final = 500
"""What NVIDIA documents for an event's time stamp ("around 0.5 microseconds"); 32 ns was seen."""
_LATENCY_UNMEASURED_NS: Final = 20_000
"""Stands for the submission latency until an anchor has measured it (5 to 9 µs seen): the lower bound must hold."""
_FLOAT32_ULP: Final = 2.0**-23

CAPTURED: Final = Missing("captured")


class CudaMark:
    """An event, and the device whose pool it goes back to."""

    __slots__ = ("handle", "pool")

    def __init__(self, handle: int, pool: _Device) -> None:
        self.handle = handle
        self.pool = pool


class _Device:
    """What is kept for one device: free events, an anchor stream, and the timeline."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.free: list[CudaMark] = []
        self.made = self.destroyed = 0
        self.lock = threading.RLock()
        self.timeline = Timeline()
        self.anchor_stream = 0
        self.floor: Floor | None = None
        self.epoch: CudaMark | None = None
        self.epoch_ns = 0
        self.anchored_at = 0
        self.latency_ns = _LATENCY_UNMEASURED_NS
        self.info: DeviceInfo | None = None


class CudaEventClock:
    """Marks are CUDA events, recorded by the driver on raw streams. One instance serves all runtimes."""

    name = "cuda_event"
    in_order = True

    def __init__(self, library: ctypes.CDLL, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.cuda_library = library
        self._now_ns = now_ns
        self._record = library.cuEventRecord
        self._is_capturing = library.cuStreamIsCapturing
        self._devices: dict[int, _Device] = {}
        self._lock = threading.RLock()

    # -- placing marks: the hot path ------------------------------------------------------------------

    def mark(self, place: Place, values: Any = NOT_GIVEN, since: AnyMark | None = None) -> CudaMark | Missing:  # noqa: ARG002
        """Record a pooled event on the stream of *place*."""
        try:
            mark = self._devices[place.device].free.pop()
        except (KeyError, IndexError):
            if self._grow(place.device) is None:
                return Missing("mark_failed", "no active context on this device, or no event to be had in it")
            return self.mark(place)
        code = self._record(mark.handle, place.stream)
        if not code:
            return mark
        device = mark.pool
        if code in (driver.INVALID_CONTEXT, driver.INVALID_HANDLE):
            # This thread has no context yet, or that of another device, and the default stream is its
            # context's own: record under the device's primary context, which is active already.
            with self._context(device):
                code = self._record(mark.handle, place.stream)
            if code == driver.SUCCESS:
                return mark
        device.free.append(mark)
        if 900 <= code < 910:  # noqa: PLR2004 - cudaErrorStreamCapture*: the stream is being captured
            return CAPTURED
        name = driver.error_name(self.cuda_library, code)
        sticky = code in (driver.INVALID_CONTEXT, driver.INVALID_HANDLE)
        return Missing("mark_failed" if sticky else "device_error", name)

    def is_capturing(self, place: Place) -> bool:
        """Return whether *place* is in a capture; an answer that is an error counts as yes."""
        status = ctypes.c_int()
        code = self._is_capturing(place.stream, ctypes.byref(status))
        if code == driver.INVALID_CONTEXT:
            return False  # a thread without a context is capturing nothing
        return code != driver.SUCCESS or status.value != 0

    # -- asking ---------------------------------------------------------------------------------------

    def is_done(self, mark: AnyMark) -> bool:
        """Return whether the event has happened. Raises DeviceFault on an error of the device."""
        code = self.cuda_library.cuEventQuery(_handle(mark))
        if code == driver.SUCCESS:
            return True
        if code == driver.NOT_READY:
            return False
        raise self._fault(code)

    def wait(self, mark: AnyMark) -> None:
        """Block until the event has happened. Raises DeviceFault on an error of the device."""
        code = self.cuda_library.cuEventSynchronize(_handle(mark))
        if code != driver.SUCCESS:
            raise self._fault(code)

    def wait_device(self, place: Place) -> None:
        """Synchronise the whole device.

        Like ``torch.cuda.synchronize``, and unlike everything else here, this cannot be hidden from a
        capture in another thread: the driver refuses it and ends that capture (error 900, seen in
        relaxed mode too). It is done only where the user chose ``sync="device"``.
        """
        device = self._devices.get(place.device) or self._grow(place.device)
        if device is None:
            return
        with self._context(device):
            code = self.cuda_library.cuCtxSynchronize()
        if code != driver.SUCCESS:
            raise self._fault(code)

    def elapsed_ns(self, start: AnyMark, end: AnyMark) -> int:
        """Return nanoseconds from *start* to *end*; the driver gives float32 milliseconds."""
        return round(self._elapsed_ms(_handle(start), _handle(end)) * 1e6)

    def position(self, start: AnyMark, elapsed_ns: int, called_ns: int, seen_ns: int) -> Position:
        """Place *start* by the device's timeline, which learns from this very span as well."""
        assert isinstance(start, CudaMark)  # noqa: S101 - our own marks come back to us
        device = start.pool
        with device.lock:
            if device.epoch is None or self._now_ns() - device.anchored_at > _ANCHOR_EVERY_NS:
                self._anchor(device)
            if device.floor is not None:
                device.floor.learn(elapsed_ns)
            if device.epoch is None:  # no anchor to be had: the order of events still says this much
                slack = max(0, seen_ns - elapsed_ns - called_ns)
                return Position(called_ns + slack // 2, slack // 2 + _RESOLUTION_NS, False, device.latency_ns)
            since_epoch = self._elapsed_ms(device.epoch.handle, start.handle)
            stamp = device.epoch_ns + round(since_epoch * 1e6)
            latency = device.latency_ns
            host_ns, half, fault = device.timeline.span(stamp, elapsed_ns, called_ns, seen_ns + _RESOLUTION_NS)
            if fault:
                device.anchored_at -= _ANCHOR_EVERY_NS  # pin it anew with the next span
        rounding = _RESOLUTION_NS + math.ceil(abs(since_epoch) * 1e6 * _FLOAT32_ULP)
        return Position(host_ns, half + rounding, fault=fault, latency_ns=latency)

    def floor_ns(self, place: Place) -> int | Missing:
        """Return what an empty pair of marks reads at the least, measured with the first anchor; asks no device."""
        device = self._devices.get(place.device)
        return NOT_YET if device is None or device.floor is None else device.floor.ns

    def floors(self) -> dict[int, int]:
        """Return the floors that are known so far, in nanoseconds, by index of the device; asks no device."""
        found = {index: device.floor.ns for index, device in list(self._devices.items()) if device.floor is not None}
        return {index: floor for index, floor in found.items() if isinstance(floor, int)}

    def limits(self) -> Iterator[Limit]:
        """Say how many events there are and lie ready, of the device with the most."""
        devices = list(self._devices.values())
        out = fullest(device.made - device.destroyed - len(device.free) for device in devices)
        yield Limit(
            "events_ready",
            POOL_LIMIT,
            fullest(len(device.free) for device in devices),
            sum(device.destroyed for device in devices),
            f"CUDA events of a device ready for re-use; {out:,} more are in use",
        )

    def release(self, *marks: AnyMark) -> None:
        """Put events back into their device's pool."""
        for mark in marks:
            assert isinstance(mark, CudaMark)  # noqa: S101 - our own marks come back to us
            device = mark.pool
            if len(device.free) < POOL_LIMIT:
                device.free.append(mark)
            else:
                with device.lock:
                    device.destroyed += 1
                self.cuda_library.cuEventDestroy_v2(mark.handle)

    def describe(self, place: Place) -> DeviceInfo:
        """Return index, UUID and name of the device, asked once."""
        device = self._devices.get(place.device)
        if device is not None and device.info is not None:
            return device.info
        uuid, name = driver.describe(self.cuda_library, place.device)
        unknown = Missing("not_initialised")
        info = DeviceInfo(place.device, uuid or unknown, name or unknown)
        if device is not None:
            device.info = info
        return info

    def close(self) -> None:
        """Destroy the events and streams that are not in use. For a clock that is not the process's own."""
        with self._lock:
            for device in self._devices.values():
                with self._context(device):
                    for mark in (*device.free, *([device.epoch] if device.epoch else [])):
                        self.cuda_library.cuEventDestroy_v2(mark.handle)
                    if device.floor is not None:
                        device.floor.close()
                    if device.anchor_stream:
                        self.cuda_library.cuStreamDestroy_v2(device.anchor_stream)
            self._devices.clear()

    @contextlib.contextmanager
    def unhindered(self) -> Iterator[None]:
        """Ask in relaxed capture mode, restored afterwards."""
        mode = ctypes.c_int(driver.RELAXED)
        reference = ctypes.byref(mode)
        exchange = self.cuda_library.cuThreadExchangeStreamCaptureMode
        exchange(reference)
        try:
            yield
        finally:
            exchange(reference)

    # -- inside ---------------------------------------------------------------------------------------

    def _elapsed_ms(self, start: int, end: int) -> float:
        result = ctypes.c_float()
        code = self.cuda_library.cuEventElapsedTime(ctypes.byref(result), start, end)
        if code != driver.SUCCESS:
            raise self._fault(code)
        return result.value

    def _fault(self, code: int) -> DeviceFault:
        return DeviceFault(driver.error_name(self.cuda_library, code))

    @contextlib.contextmanager
    def _context(self, device: _Device) -> Iterator[None]:
        pushed = self.cuda_library.cuCtxPushCurrent_v2(device.context) == driver.SUCCESS
        try:
            yield
        finally:
            if pushed:
                self.cuda_library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _grow(self, index: int) -> _Device | None:
        """Return the device with free events in its pool, if its context is active."""
        with self._lock:
            device = self._devices.get(index)
            context = driver.primary_context(self.cuda_library, index)
            if context is None:
                return None
            if device is not None and device.context == context and device.free:
                return device  # another thread has filled it while this one waited for the lock
            if device is None or device.context != context:  # new, or reset by the application
                device = self._devices[index] = _Device(context)
            with self._context(device):
                made = [driver.create_event(self.cuda_library) for _ in range(_GROW)]
            handles = [handle for handle in made if handle]
            with device.lock:
                device.made += len(handles)
            device.free.extend(CudaMark(handle, device) for handle in handles)
            return device if handles else None  # other threads may have taken them by now

    def _anchor(self, device: _Device) -> None:
        """Pin the timeline anew: a fresh epoch event, bracketed between two host reads a few times over."""
        now_ns = self._now_ns
        if not device.anchor_stream:
            with self._context(device):
                device.anchor_stream = driver.create_stream(self.cuda_library)
                if not device.anchor_stream:
                    return  # and not on stream 0, where the application may be
                device.floor = Floor(self.cuda_library)
        latencies: list[int] = []
        for _ in range(_ANCHOR_TRIALS):
            mark = self._take(device)
            before = now_ns()
            code = self._record(mark.handle, device.anchor_stream)
            placed = now_ns()
            if code != driver.SUCCESS:  # positions stay as well known as they were
                device.free.append(mark)
                return
            while not self.is_done(mark):
                if now_ns() - before > _ANCHOR_LIMIT_NS:
                    # The anchor stream shares a hardware queue with busy work, or the device hangs: not now.
                    device.free.append(mark)
                    device.anchored_at = now_ns()
                    return
            after = now_ns()
            if device.epoch is not None:
                device.epoch_ns += round(self._elapsed_ms(device.epoch.handle, mark.handle) * 1e6)
                device.free.append(device.epoch)
            device.epoch = mark
            latencies.append(after - placed)
            device.timeline.not_before(device.epoch_ns, before)
            device.timeline.not_after(device.epoch_ns, after)
        device.timeline.settle()
        device.latency_ns = sorted(latencies)[len(latencies) // 2]
        if device.floor is not None:
            device.floor.measure(device.anchor_stream, now_ns)
        device.anchored_at = now_ns()

    def _take(self, device: _Device) -> CudaMark:
        try:
            return device.free.pop()
        except IndexError:
            with self._context(device):
                handle = driver.create_event(self.cuda_library)
            if not handle:
                raise DeviceFault("no event could be created") from None
            device.made += 1  # under the device's lock
            return CudaMark(handle, device)


def _handle(mark: AnyMark) -> int:
    assert isinstance(mark, CudaMark)  # noqa: S101 - our own marks come back to us
    return mark.handle
