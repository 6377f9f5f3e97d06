"""A device made of arithmetic: it can be late, wrong, broken or captured, and it needs no GPU.

It is both the clock and the locator of a make-believe runtime with any number of devices and streams.
Published for users' tests through :mod:`gpu_timed.testing`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from gpu_timed.bounds import Limit
from gpu_timed.clocks.host import HostClock
from gpu_timed.clocks.timeline import Timeline
from gpu_timed.errors import DeviceFault
from gpu_timed.ports import NOT_GIVEN, DeviceInfo, Launch, Place, Position, limits_of
from gpu_timed.ports import Mark as AnyMark
from gpu_timed.record import Missing

_ANCHOR_EVERY_NS: Final = 1_000_000_000


class FakeHost:
    """A host clock that stands still until it is told to move. Nanoseconds."""

    def __init__(self, start_ns: int = 1_000_000_000) -> None:
        self._now = start_ns
        self._lock = threading.RLock()

    def now_ns(self) -> int:
        """Return the time shown."""
        return self._now

    def unix_ns(self) -> int:
        """Return the same time on a make-believe realtime axis."""
        return self._now + 1_700_000_000_000_000_000

    def advance(self, duration_ns: int) -> None:
        """Let *duration_ns* pass."""
        with self._lock:
            self._now += duration_ns

    def advance_to(self, moment_ns: int) -> None:
        """Let time pass until *moment_ns*, if that lies ahead."""
        with self._lock:
            self._now = max(self._now, moment_ns)


class _RealHost:
    now_ns = staticmethod(time.perf_counter_ns)
    unix_ns = staticmethod(time.time_ns)

    def advance(self, duration_ns: int) -> None:
        """Spend *duration_ns* on the calling thread."""
        self.advance_to(self.now_ns() + duration_ns)

    def advance_to(self, moment_ns: int) -> None:
        time.sleep(max(0, moment_ns - self.now_ns()) / 1e9)


class FakeMark:
    """A mark of the fake device; ``at_ns`` is host time, None while its stream is held."""

    __slots__ = ("at_ns", "device")

    def __init__(self, device: int) -> None:
        self.device = device
        self.at_ns: int | None = None


class _Stream:
    def __init__(self) -> None:
        self.ready_at = 0
        self.held: list[int | FakeMark] | None = None


class FakeDevice:
    """A make-believe GPU runtime.

    ``launch(duration_ns)`` queues work on the current stream and returns at once, as a kernel launch
    does. With ``realtime=False`` (the default) the host's clock is a :class:`FakeHost` in ``.host_clock``:
    nothing takes time but what the test says, and every number comes out exact. With ``realtime=True``
    the fake work takes real time on the real clock.

    Args:
        realtime: Run on the machine's own clock.
        launch_latency_ns: From queueing to the earliest start on an idle stream.
        lateness_ns: How long after the end of work the host can first see it.
        skew_ns: Distance between device time and host time.
        drift_ppm: How much faster the device's clock runs than the host's, in parts per million.
        floor_ns: How long the device takes over a mark: an empty pair reads so much, and a pair around queued work
            so much more than the work.
    """

    name = "fake"
    in_order = True

    def __init__(
        self,
        *,
        realtime: bool = False,
        launch_latency_ns: int = 0,
        lateness_ns: int = 0,
        skew_ns: int = 123_456_789,
        drift_ppm: float = 0.0,
        floor_ns: int = 0,
    ) -> None:
        self.host_clock: Any = _RealHost() if realtime else FakeHost()
        self.host = HostClock(self.host_clock.now_ns, self.host_clock.unix_ns)
        self.launch_latency_ns = launch_latency_ns
        self.lateness_ns = lateness_ns
        self.marks_in_use = 0
        self._floor = floor_ns
        self._origin = self.host_clock.now_ns()
        self._skew = skew_ns
        self._rate = 1 + drift_ppm * 1e-6
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._places: dict[tuple[int, int], Place] = {}
        self._timelines: dict[int, Timeline] = {}
        self._anchored_at: dict[int, int] = {}
        self._broken: str | None = None
        self._absent: Missing | None = None
        self._captured: set[tuple[int, int]] = set()
        self._current = threading.local()
        self._lock = threading.RLock()

    # -- what a test does to it -----------------------------------------------------------------------

    def launch(self, duration_ns: int) -> None:
        """Queue *duration_ns* of work on the current stream, as an asynchronous kernel launch."""
        if self._broken is not None:
            raise RuntimeError(self._broken)
        with self._lock:
            if self._where() not in self._captured:
                self._put(self._stream(), duration_ns)

    @contextlib.contextmanager
    def use(self, *, device: int | None = None, stream: int | None = None) -> Iterator[None]:
        """Make *device* or *stream* the current one of this thread."""
        before = self._where()
        self._current.where = (before[0] if device is None else device, before[1] if stream is None else stream)
        try:
            yield
        finally:
            self._current.where = before

    def set_device(self, device: int) -> None:
        """Change this thread's current device, for good."""
        self._current.where = (device, self._where()[1])

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let nothing on the current stream begin until the block ends: the device is late."""
        stream = self._stream()
        with self._lock:
            stream.held = []
        try:
            yield
        finally:
            with self._lock:
                waiting, stream.held = stream.held, None
                for item in waiting or ():
                    self._put(stream, item)

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the current stream: work put on it does not run."""
        where = self._where()
        self._captured.add(where)
        try:
            yield
        finally:
            self._captured.discard(where)

    def break_down(self, error: str = "CUDA_ERROR_ILLEGAL_ADDRESS") -> None:
        """Put every device into an error state for good, as an illegal access does."""
        self._broken = error

    def disappear(self, reason: str = "not_initialised") -> None:
        """Answer every question for a place with ``Missing(reason)``."""
        self._absent = Missing(reason)

    def appear(self) -> None:
        """Undo :meth:`disappear`."""
        self._absent = None

    def synchronize(self) -> None:
        """Wait for the current stream, as user code does."""
        self._wait_until(self._stream().ready_at)

    def run_dry(self) -> None:
        """Let time pass until every stream that is not held has finished, and the host can see it."""
        last = max((stream.ready_at for stream in list(self._streams.values())), default=0)
        self._wait_until(last + self.lateness_ns)

    # -- Locator --------------------------------------------------------------------------------------

    def locate(self, launch: Launch | None = None) -> Place | Missing:
        """Return the current place, or that of *launch*: its stream of the current device."""
        if self._absent is not None:
            return self._absent
        where = self._where()
        if launch is not None:
            if launch.absent is not None:
                return launch.absent
            where = (where[0], where[1] if launch.stream is None else launch.stream)
        if where in self._captured:
            return Missing("captured")
        return self._places.setdefault(where, Place(self, *where))

    def device_of(self, value: Any) -> int | None:
        """Return ``value.fake_device`` where there is one. Nothing is asked of what answers to any name."""
        has = hasattr(type(value), "fake_device") or "fake_device" in getattr(value, "__dict__", ())
        return value.fake_device if has else None

    # -- Clock ----------------------------------------------------------------------------------------

    def mark(self, place: Place, values: Any = NOT_GIVEN, since: AnyMark | None = None) -> FakeMark | Missing:  # noqa: ARG002
        """Place a mark behind the work queued so far."""
        if self._broken is not None:
            return Missing("device_error", self._broken)
        mark = FakeMark(place.device)
        with self._lock:
            self.marks_in_use += 1
            self._put(self._stream((place.device, place.stream)), mark)
        return mark

    def is_capturing(self, place: Place) -> bool:
        """Return whether *place* is being captured."""
        return (place.device, place.stream) in self._captured

    def is_done(self, mark: AnyMark) -> bool:
        """Return whether the mark was reached, and the host can see it."""
        self._check()
        at = _fake(mark).at_ns
        return at is not None and bool(self.host_clock.now_ns() >= at + self.lateness_ns)

    def wait(self, mark: AnyMark) -> None:
        """Block until the mark is reached; the fake host's clock moves there."""
        while not self.is_done(mark):
            at = _fake(mark).at_ns
            if at is not None:
                self.host_clock.advance_to(at + self.lateness_ns)
            elif isinstance(self.host_clock, FakeHost):
                raise DeviceFault("the stream is held and nothing would ever release it")
            else:
                time.sleep(0.0005)

    def wait_device(self, place: Place) -> None:
        """Block until every stream of the device has run dry."""
        self._check()
        for (device, _), stream in list(self._streams.items()):
            if device == place.device:
                self._wait_until(stream.ready_at + self.lateness_ns)

    def elapsed_ns(self, start: AnyMark, end: AnyMark) -> int:
        """Return device nanoseconds between two marks that were reached."""
        first, last = _fake(start), _fake(end)
        if first.device != last.device:
            raise DeviceFault("CUDA_ERROR_INVALID_HANDLE")
        if not (self.is_done(first) and self.is_done(last)):
            raise DeviceFault("CUDA_ERROR_NOT_READY")
        return self._stamp(last) - self._stamp(first)

    def position(self, start: AnyMark, elapsed_ns: int, called_ns: int, seen_ns: int) -> Position:
        """Place a mark by a timeline, exactly as the real clock does."""
        mark = _fake(start)
        with self._lock:
            timeline = self._timelines.setdefault(mark.device, Timeline())
            now = self.host_clock.now_ns()
            if now - self._anchored_at.get(mark.device, now - 2 * _ANCHOR_EVERY_NS) > _ANCHOR_EVERY_NS:
                stamp = self._device_time(now)
                timeline.not_before(stamp, now - 3_000)
                timeline.not_after(stamp, now + 4_000)
                timeline.settle()
                self._anchored_at[mark.device] = now
            host_ns, half, fault = timeline.span(self._stamp(mark), elapsed_ns, called_ns, seen_ns)
            return Position(host_ns, half + 1, fault=fault, latency_ns=self.launch_latency_ns)

    def floor_ns(self, place: Place) -> int | Missing:  # noqa: ARG002 - all devices are alike
        """Return what an empty pair reads at the least."""
        return self._floor

    def limits(self) -> Iterator[Limit]:
        """Say how much is kept of the fullest of its streams."""
        yield from limits_of(list(self._places.values()))

    def floors(self) -> dict[int, int]:
        """Return the floors of the devices that were used so far, by index."""
        return dict.fromkeys((device for device, _ in self._places), self._floor)

    def release(self, *marks: AnyMark) -> None:
        """Count the marks back in."""
        with self._lock:
            self.marks_in_use -= len(marks)

    def describe(self, place: Place) -> DeviceInfo:
        """Return a make-believe identity."""
        return DeviceInfo(place.device, f"GPU-fake-{place.device}", "Fake GPU")

    def unhindered(self) -> contextlib.AbstractContextManager[None]:
        """Nothing here hinders a capture."""
        return contextlib.nullcontext()

    # -- inside ---------------------------------------------------------------------------------------

    def true_host_ns(self, mark: AnyMark) -> int:
        """Return when *mark* was reached, on the host's monotonic axis: what a placement is judged by."""
        at = _fake(mark).at_ns
        if at is None:
            raise DeviceFault("CUDA_ERROR_NOT_READY")
        return at

    def _where(self) -> tuple[int, int]:
        where: tuple[int, int] = getattr(self._current, "where", (0, 0))
        return where

    def _stream(self, where: tuple[int, int] | None = None) -> _Stream:
        return self._streams.setdefault(where or self._where(), _Stream())

    def _put(self, stream: _Stream, item: int | FakeMark) -> None:
        if stream.held is not None:
            stream.held.append(item)
            return
        begin = max(self.host_clock.now_ns() + self.launch_latency_ns, stream.ready_at)
        if isinstance(item, FakeMark):
            item.at_ns = begin
            stream.ready_at = begin + self._floor
        else:
            stream.ready_at = begin + item

    def _device_time(self, host_ns: int) -> int:
        return self._skew + round((host_ns - self._origin) * self._rate)

    def _stamp(self, mark: FakeMark) -> int:
        return self._device_time(self.true_host_ns(mark))

    def _wait_until(self, moment_ns: int) -> None:
        self.host_clock.advance_to(moment_ns)

    def _check(self) -> None:
        if self._broken is not None:
            raise DeviceFault(self._broken)


def _fake(mark: AnyMark) -> FakeMark:
    assert isinstance(mark, FakeMark)  # noqa: S101 - our own marks come back to us
    return mark
