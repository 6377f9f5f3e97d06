"""The ring: what was compiled, tuned, loaded or initialised in this process, and how much of it a span caused."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from gpu_timed.ports import Interval, Lasting, Verdict
from gpu_timed.record import NOT_SET, Cause, Measured, Missing, Tier

_KEPT: Final = 1024
_LASTING_KEPT: Final = 128
_MOST_CAUSES: Final = 16
_MOST_TEXT: Final = 300
_ORDER: Final[dict[Tier, int]] = {"hot": 0, "initialised": 1, "loaded": 2, "built": 3}


_UNSEEN: Final = frozenset({"mlx", "taichi", "tensorflow", "tilelang", "tinygrad", "warp"})
"""Runtimes that compile and have no probe here: where one is in use, nothing seen does not mean nothing happened."""


class Event(NamedTuple):
    """One thing that was not hot: a cause, when it ended (monotonic nanoseconds) and on which thread."""

    generation: int
    ended_ns: int
    thread_id: int
    of_worker: bool
    """Whether the thread is none of Python's own: autograd's, or a pool of a native library."""
    cause: Cause


class Ring:
    """The latest events of the process. Reading :attr:`generation` costs one attribute."""

    def __init__(self) -> None:
        #: How many events there have been.
        self.generation = 0
        #: Modules of runtimes whose probe is not attached: once one is loaded, what it would have seen is not known.
        self.blind_to: set[str] = set(_UNSEEN)
        #: Whether a library tunes itself for each new shape just now; None as long as none is loaded.
        self.tunes_by_shape: Callable[[], bool] | None = None
        #: What of a call's inputs it would tune itself for.
        self.sign: Callable[[tuple[Any, ...], Mapping[str, Any]], Hashable | None] | None = None
        #: Says for a thread that is none of Python's own which of Python's waits for it, or None.
        self.works_for: Callable[[], int | None] | None = None
        self._lasting: deque[tuple[int, int, Lasting]] = deque(maxlen=_LASTING_KEPT)
        self._events: deque[Event] = deque(maxlen=_KEPT)
        self._lock = threading.RLock()

    def emit(
        self,
        probe: str,
        what: str,
        tier: Tier,
        duration_ns: Measured = NOT_SET,
        detail: str = "",
        *,
        lasting: Lasting | None = None,
        undone: Sequence[Lasting] = (),
    ) -> None:
        """Take note of something that ended just now on the calling thread."""
        cause = Cause(probe, what[:_MOST_TEXT], tier, duration_ns, detail[:_MOST_TEXT])
        worker = isinstance(threading.current_thread(), threading._DummyThread)  # noqa: SLF001 - says "not Python's"
        thread_id = threading.get_ident()
        if worker and self.works_for is not None:
            owner = self.works_for()
            if owner is not None:
                thread_id, worker = owner, False
        with self._lock:
            event = Event(self.generation + 1, time.perf_counter_ns(), thread_id, worker, cause)
            self._events.append(event)
            for each in undone:
                each.until = event.generation
            if lasting is not None:
                self._lasting.append((event.generation, thread_id, lasting))
            self.generation = event.generation  # last: who reads it finds the event

    def restart(self) -> None:
        """Begin anew in a forked child, whose copy of the lock may be held by a thread it does not have."""
        self._lock = threading.RLock()

    def verdict(self, intervals: Sequence[Interval], *, first_call: bool) -> Verdict:
        """Return what happened in *intervals*, each on the thread that it names.

        Events of a worker thread count for the thread that waits for it, or, where that is not known, for every span
        that was open; those of another Python thread for none.
        """
        found: list[Event] = []
        truncated = False
        if intervals:
            with self._lock:
                kept = tuple(self._events)
            oldest = kept[0].generation if kept else 0
            for began, ended, thread_id in intervals:
                truncated = truncated or began + 1 < oldest
                found += [
                    event
                    for event in kept
                    if began < event.generation <= ended and (event.thread_id == thread_id or event.of_worker)
                ]
        if not found:
            if truncated:
                return Verdict("unknown", NOT_SET, (), Missing("overflow", "too many events to keep"))
            # Not isdisjoint, which goes through all modules of the process: 50 µs.
            if first_call or any(module in sys.modules for module in self.blind_to):
                return Verdict("unknown", NOT_SET, ())
            return Verdict("warm", "hot", (), 0)
        causes = [event.cause for event in found]
        coldest = max(causes, key=lambda cause: _ORDER[cause.tier])
        # The costliest are shown where there are many, in the order in which they happened.
        shown = sorted(causes, key=_cost, reverse=True)[:_MOST_CAUSES]
        return Verdict(
            "cold", coldest.tier, tuple(cause for cause in causes if cause in shown)[:_MOST_CAUSES], _united(found)
        )

    def lasting(self, intervals: Sequence[Interval]) -> Sequence[Lasting]:
        """Return what was said in *intervals* to hold for later calls, too."""
        with self._lock:
            kept = tuple(self._lasting)
        return [
            lasting
            for generation, thread, lasting in kept
            if any(began < generation <= ended and thread == thread_id for began, ended, thread_id in intervals)
        ]

    def signature(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Hashable | None:
        """Return what of a call's inputs a library would tune itself for; None if nothing of them can be seen."""
        return None if self.sign is None else self.sign(arguments, named)


def _cost(cause: Cause) -> int:
    return cause.duration_ns if isinstance(cause.duration_ns, int) else 0


def _united(events: Sequence[Event]) -> Measured:
    """Return the host nanoseconds that *events* took together, nested and overlapping ones counted once."""
    timed = [event for event in events if isinstance(event.cause.duration_ns, int)]
    if not timed:
        return NOT_SET
    spans = sorted((event.ended_ns - _cost(event.cause), event.ended_ns) for event in timed)
    total, reached = 0, spans[0][0]
    for begin, end in spans:
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total
