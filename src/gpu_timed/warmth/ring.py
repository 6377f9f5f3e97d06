"""The ring: what was compiled, tuned, loaded or initialised in this process, and how much of it a span caused."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from gpu_timed.bounds import Limit
from gpu_timed.ports import Interval, Lasting, Verdict
from gpu_timed.record import NOT_SET, Cause, Measured, Missing, Tier

EVENTS_KEPT: Final = 1024
"""Latest events; a span in which there were more, or that is read so late, is ``unknown``."""
LASTING_KEPT: Final = 128
"""Latest events that hold for later calls, until their site has taken them over."""
_MOST_CAUSES: Final = 16
_MOST_CONCURRENT: Final = 8
_MOST_TEXT: Final = 300
_PATIENCE_S: Final = 1.0
"""How long an event waits for the lock. Who tells may hold a lock of the driver's (see
:mod:`gpu_timed.warmth.cuda_modules`) that the lock's holder waits for, where the collector of garbage frees a tensor
just then: rather an event less than two threads that wait for each other for ever."""
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
        self._lasting: deque[tuple[int, int, Lasting]] = deque(maxlen=LASTING_KEPT)
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._lock = threading.RLock()  # freeing something may load a module, and tell

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
        """Take note of something that ended just now on the calling thread.

        Raises:
            TimeoutError: The ring was held for too long.
        """
        cause = Cause(probe, what[:_MOST_TEXT], tier, duration_ns, detail[:_MOST_TEXT])
        worker = isinstance(threading.current_thread(), threading._DummyThread)  # noqa: SLF001 - says "not Python's"
        thread_id = threading.get_ident()
        if worker and self.works_for is not None:
            owner = self.works_for()
            if owner is not None:
                thread_id, worker = owner, False
        ended_ns = time.perf_counter_ns()
        if not self._lock.acquire(timeout=_PATIENCE_S):
            raise TimeoutError("the ring of warmth was held for too long")
        try:
            event = Event(self.generation + 1, ended_ns, thread_id, worker, cause)
            self._events.append(event)
            for each in undone:
                each.until = event.generation
            if lasting is not None:
                self._lasting.append((event.generation, thread_id, lasting))
            self.generation = event.generation  # last: who reads it finds the event
        finally:
            self._lock.release()

    def restart(self) -> None:
        """Begin anew in a forked child, whose copy of the lock may be held by a thread it does not have."""
        self._lock = threading.RLock()  # freeing something may load a module, and tell

    def limits(self) -> Iterator[Limit]:
        """Say how many events are kept."""
        held = len(self._events)
        yield Limit("events_of_warmth", EVENTS_KEPT, held, self.generation - held, "events of compiling and loading")
        yield Limit("lasting", LASTING_KEPT, len(self._lasting), None, "events that hold for later calls")

    def verdict(
        self, intervals: Sequence[Interval], *, first_call: bool, around: tuple[int, int] | None = None
    ) -> Verdict:
        """Return what happened in *intervals*, each on the thread that it names.

        Events of a worker thread count for the thread that waits for it, or, where that is not known, for every span
        that was open; those of another Python thread for none: they are listed as concurrent. So is what happened on
        any thread, its own included, while it was suspended.
        """
        found: list[Event] = []
        others: list[Event] = []
        truncated = False
        suspended = around is not None and around[0] < around[1]
        if intervals or suspended:
            with self._lock:
                kept = tuple(self._events)
            oldest = kept[0].generation if kept else 0
            for began, ended, thread_id in intervals:
                truncated = truncated or began + 1 < oldest
                for event in kept:
                    if began < event.generation <= ended:
                        mine = event.thread_id == thread_id or event.of_worker
                        (found if mine else others).append(event)
            if around is not None and suspended:
                mine_are = {event.generation for event in found}
                between = (event for event in kept if around[0] < event.generation <= around[1])
                others = [event for event in between if event.generation not in mine_are]
        concurrent = _shown(others, _MOST_CONCURRENT)
        if not found:
            if truncated:
                overflow = Missing("overflow", "too many events to keep")
                return Verdict("unknown", NOT_SET, (), overflow, concurrent)
            # Asked of the view, which goes through the fewer; a set goes through all modules of the process: 50 µs.
            if first_call:
                return Verdict("unknown", NOT_SET, (), NOT_SET, concurrent)
            if not sys.modules.keys().isdisjoint(self.blind_to):
                unwatched = ", ".join(sorted(self.blind_to & sys.modules.keys()))
                return Verdict("unknown", NOT_SET, (), Missing("unwatched", unwatched), concurrent)
            return Verdict("warm", "hot", (), 0, concurrent)
        coldest = max((event.cause for event in found), key=lambda cause: _ORDER[cause.tier])
        return Verdict("cold", coldest.tier, _shown(found, _MOST_CAUSES), _united(found), concurrent)

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


def _shown(events: Sequence[Event], most: int) -> tuple[Cause, ...]:
    """Return the causes of *events*, equal ones as one, in the order in which they happened; of many, the costliest."""
    alike: dict[tuple[str, str, Tier, str], list[Event]] = {}
    for event in events:
        cause = event.cause
        alike.setdefault((cause.probe, cause.what, cause.tier, cause.detail), []).append(event)
    causes = [_together(held) for held in alike.values()]
    kept = sorted(range(len(causes)), key=lambda index: _cost(causes[index]), reverse=True)[:most]
    return tuple(causes[index] for index in sorted(kept))


def _together(alike: Sequence[Event]) -> Cause:
    cause = alike[0].cause
    if len(alike) == 1:
        return cause
    return replace(cause, what=f"{cause.what}, {len(alike)} times", duration_ns=_united(alike))


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
