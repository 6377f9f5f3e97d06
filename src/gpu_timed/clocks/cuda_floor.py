"""The floor of a device: what an empty pair of marks reads at the least, learned without any work on the device.

A burst of marks is put on a stream of our own, one right behind the other. Where the device was behind the host for
a moment, two of them were queued together, and lie as far apart as marks do: 1.25 µs with one H200, 2.9 with another.
Elsewhere they lie as far apart as the host placed them (recording costs it 2.1 to 2.4 µs), which is why only the least
counts. No kernel is launched, no stream but ours is touched, and nothing is waited for but the burst itself.

What spans read is learned from as well: whatever pair reads less than the floor so far proves that the floor is lower.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from gpu_timed.clocks import cuda_driver as driver
from gpu_timed.record import Missing

NOT_YET: Final = Missing("not_measured", "no empty pair of marks was read yet")
_EVENTS: Final = 9
_FIRST_BURSTS: Final = 6
_MOST_NS: Final = 5_000
"""More is no floor but a host that came late with the second mark: a floor that is too high would make
nothing of what was measured, so none is better. Above what recording costs an H200's host, and above its floors."""
_LIMIT_NS: Final = 500_000
"""How long a burst may take, and be waited for: its stream may share a hardware queue with work, or another thread may
hold the interpreter."""

Submit: TypeAlias = Callable[[ctypes.CDLL, int, Sequence[int]], int]
"""Puts these events on a stream in their order: library, stream, handles; returns the driver's code."""


def one_by_one(library: ctypes.CDLL, stream: int, events: Sequence[int]) -> int:
    """Record each of *events* on *stream* by a call of its own."""
    record = library.cuEventRecord
    for event in events:
        code = record(event, stream)
        if code != driver.SUCCESS:
            return int(code)
    return driver.SUCCESS


class Floor:
    """What is known of the floor of one device. Made in the device's context; its owner sees to threads."""

    def __init__(self, library: ctypes.CDLL, submit: Submit = one_by_one) -> None:
        self._library = library
        self._submit = submit
        self._events = [handle for handle in (driver.create_event(library) for _ in range(_EVENTS)) if handle]
        self._least_ns = 0
        self._tried = False

    @property
    def ns(self) -> int | Missing:
        """The floor in nanoseconds, as far as it is known."""
        return self._least_ns or NOT_YET

    def learn(self, elapsed_ns: int) -> None:
        """Learn from any pair of marks: it cannot have read less than an empty one does at the least."""
        if 0 < elapsed_ns < self._least_ns:
            self._least_ns = elapsed_ns

    def measure(self, stream: int, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        """Put bursts of marks on *stream*, which must be ours: several the first time, then one. Never raises."""
        if len(self._events) < 2:  # noqa: PLR2004 - a pair
            return
        bursts = 1 if self._tried else _FIRST_BURSTS
        self._tried = True
        for _ in range(bursts):
            began = now_ns()
            if self._submit(self._library, stream, self._events) != driver.SUCCESS:
                return
            while (code := self._library.cuEventQuery(self._events[-1])) == driver.NOT_READY:
                if now_ns() - began > _LIMIT_NS:
                    return
            if code != driver.SUCCESS:  # an error of the device is told to whoever asks about a span
                return
            least = min(map(self._elapsed_ns, self._events, self._events[1:]))
            if 0 < least <= min(_MOST_NS, self._least_ns or _MOST_NS):
                self._least_ns = least
            if now_ns() - began > _LIMIT_NS:
                return

    def close(self) -> None:
        """Destroy the events."""
        for event in self._events:
            self._library.cuEventDestroy_v2(event)
        self._events = []

    def _elapsed_ns(self, start: int, end: int) -> int:
        result = ctypes.c_float()
        if self._library.cuEventElapsedTime(ctypes.byref(result), start, end) != driver.SUCCESS:
            return _MOST_NS + 1
        return round(result.value * 1e6)
