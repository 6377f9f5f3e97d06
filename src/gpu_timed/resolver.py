"""The resolver: learns afterwards what the device did, on a thread of its own, and passes records on.

One daemon thread, started by the first recorded span. It looks at the oldest mark of each stream only
(a stream reaches its marks in order), builds the record of every span whose marks were reached, and
hands it to the sinks. Nothing here is ever waited for by a decorated call.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from gpu_timed.bounds import Limit
from gpu_timed.courtesy import Bell, Courtesy
from gpu_timed.errors import WaitTimeout
from gpu_timed.ledger import Ledger
from gpu_timed.peaks import PeakBook
from gpu_timed.ports import Sink, VitalsSource, WarmthSource
from gpu_timed.reader import Reader
from gpu_timed.record import Missing, Record
from gpu_timed.settings import Settings
from gpu_timed.span import Span

_HURRIED_S: Final = 0.0002
_EARLY: Final = 1024
"""Spans that have arrived since the last look, a power of two: with so many the next one comes before its time."""
_GRACE_S: Final = 0.1
_SHARE_FOR_DEVICE: Final = 0.6
"""Of the time for ending: what may go into waiting for the device. The rest is for handing on."""
_KNOWN: Final = 0
"""The lane of spans whose records are there as they come: the identity of no stream."""
_OVERFLOW: Final = Missing("overflow")
_LOST: Final = Missing("lost")
_PENDING: Final = Missing("pending")


class _Barrier:
    """A point in the queue: set once every span that was submitted before it has been passed on."""

    def __init__(self) -> None:
        self.before: list[Span] | None = None
        self.passed = Bell()


class Resolver:
    """Takes spans that have returned, and passes each on exactly once, or counts it."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        warmth: WarmthSource | None = None,
        vitals: VitalsSource | None = None,
        peaks: PeakBook | None = None,
    ) -> None:
        self.settings = settings
        self._ledger = ledger
        self.reader = Reader(ledger, warmth, vitals, peaks)
        self._sinks: tuple[Sink, ...] = ()
        self._arrivals: deque[Span | _Barrier] = deque()
        self._lanes: dict[int, deque[tuple[int, Span]]] = {}
        self._numbers = itertools.count()
        self._waiting = 0
        self._barriers: list[_Barrier] = []
        self._hurried = 0
        self._idle = True
        self._courtesy = Courtesy()
        self._wake = Bell()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._last: Callable[[], None] | None = None
        self.dead = False

    # -- from the calling thread ----------------------------------------------------------------------

    def add_sink(self, sink: Sink) -> None:
        """Pass every span from now on to *sink* as well."""
        with self._lock:
            self._sinks = (*self._sinks, sink)

    def remove_sink(self, sink: Sink) -> None:
        """Pass no more spans to *sink*."""
        with self._lock:
            self._sinks = tuple(held for held in self._sinks if held is not sink)

    @property
    def full(self) -> bool:
        """Whether as many spans wait for the device as may."""
        return self._waiting + len(self._arrivals) >= self.settings.max_pending

    @property
    def pending(self) -> int:
        """How many spans wait for the device, or to be looked at."""
        return self._waiting + len(self._arrivals)

    def submit(self, span: Span) -> None:
        """Take a span whose call has returned."""
        if self.dead:
            return  # a forked child: the span is the parent's
        arrivals = self._arrivals
        held = len(arrivals)
        if self._stopping or held >= self.settings.max_queue:
            self._ledger.count("after_shutdown" if self._stopping else "dropped_queue_full")
            self.abandon(span, _LOST if self._stopping else _OVERFLOW)
            span.admission.let_go()
            return
        arrivals.append(span)
        if self._idle or held & (_EARLY - 1) == _EARLY - 1:
            self._rouse()

    def take_in(self, span: Span) -> None:
        """Take a span that :meth:`submit` could not be called for, or failed with: looked at with the next one.

        It calls nothing but C: there may be no room left on the stack.
        """
        if not self.dead:
            self._arrivals.append(span)

    def hand_over_now(self, span: Span) -> bool:
        """Pass on, on the calling thread, what is known of *span* as it returns; True if that is everything."""
        if (span.seen_ns or span.missing() is not None) and self.reader.resolve_if_done(span):
            self._pass_on(span)
            return True
        provisional = self.reader.provisional(span)
        for sink in self._sinks:
            try:
                sink.announce(span, provisional)
            except Exception as error:  # noqa: BLE001 - a user's processor
                self._ledger.fault(f"sink_{type(sink).__name__}", error)
        return False

    def abandon(self, span: Span, reason: Missing) -> None:
        """Give *span* a record without a device time, so that its marks come back and nobody waits for it."""
        self.reader.resolve(span, reason)

    def wait(self, span: Span, timeout_s: float | None) -> Record:
        """Block until *span* has its record. See :meth:`gpu_timed.span.Span.wait`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while span.found is None:
            if self.dead:
                raise WaitTimeout(
                    f"span {span.name!r} was begun before this process was forked: its record is the parent's."
                )
            if not span.is_recording() and self.reader.resolve_if_done(span):
                break
            if deadline is not None and time.monotonic() >= deadline:
                state = "is still open" if span.is_recording() else "has not been reached by the device"
                raise WaitTimeout(f"no record of span {span.name!r} within {timeout_s} s: it {state}.")
            time.sleep(_HURRIED_S)
        assert span.found is not None  # noqa: S101 - the loop ended
        return span.found

    def flush(self, timeout_s: float) -> int:
        """Pass on every span submitted so far.

        Returns:
            How many were still waiting for the device or for a sink when *timeout_s* had passed.
        """
        if self._thread is None and not self._arrivals:
            return 0
        if self._stopping and not self.running:  # stopped by another thread: nobody will come by a barrier any more
            return sum(isinstance(item, Span) for item in tuple(self._arrivals)) + self._waiting
        barrier = _Barrier()
        with self._lock:
            self._hurried += 1
            self._arrivals.append(barrier)
            self._rouse_locked()
        try:
            if barrier.passed.wait(timeout_s):
                return 0
            before = barrier.before
            if before is None:  # the thread is in a sink that does not return
                return sum(isinstance(item, Span) for item in tuple(self._arrivals)) + self._waiting
            return sum(not span.emitted for span in before)
        finally:
            with self._lock:
                self._hurried -= 1

    def stop(self, timeout_s: float, last: Callable[[], None] | None = None) -> int:
        """Pass on what can be within *timeout_s*, the rest without a device time, and end the thread.

        Args:
            timeout_s: Seconds for everything together.
            last: What the thread is to do as its last act: at the end of a process no other can be started.

        Returns:
            How many spans were left.
        """
        deadline = time.monotonic() + timeout_s
        left = self.flush(_SHARE_FOR_DEVICE * timeout_s)
        self._last = last
        self._stopping = True
        self._wake.ring()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(_GRACE_S, deadline - time.monotonic()))
            if thread.is_alive():
                self._ledger.fault("resolver_stuck", "a sink or the device did not return in time")
        if self.reader.vitals is not None:
            self.reader.vitals.stop()
        return left

    @property
    def running(self) -> bool:
        """Whether the thread is there."""
        return self._thread is not None and self._thread.is_alive()

    def limits(self) -> Iterator[Limit]:
        """Say how many spans wait, and how many were turned away."""
        counts, held = self._ledger.snapshot(), self.settings
        late, lost = counts.get("overflow", 0), counts.get("dropped_queue_full", 0)
        yield Limit("pending", held.max_pending, self.pending, late, "spans that wait for the device", loses=True)
        yield Limit("queue", held.max_queue, len(self._arrivals), lost, "spans that wait to be looked at", loses=True)
        yield from self.reader.limits()

    # -- the thread -----------------------------------------------------------------------------------

    def _rouse(self) -> None:
        with self._lock:
            self._rouse_locked()

    def _rouse_locked(self) -> None:
        if self._thread is None and not self._stopping:
            # Before it is started: a signal's handler that comes here meanwhile must not start another.
            thread = self._thread = threading.Thread(target=self._run, name="gpu_timed-resolver", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads for now: the next span tries again
                self._thread = None
                self._ledger.fault("thread_not_started", error)
                return
            except BaseException:  # an interrupt while it waits for the thread, which may be there or not
                self._thread = None  # one that is there sees that it is not this one, and ends
                raise
        self._idle = False
        self._wake.ring()

    def _run(self) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():
                return
        with contextlib.ExitStack() as stack:
            stack.callback(self.reader.calm_no_more)
            while True:
                self._pause()
                try:
                    self._take_arrivals(stack)
                    self._look()
                except BaseException as error:  # noqa: BLE001 - this thread must outlive anything
                    self._ledger.fault("resolver", error)
                if self._stopping:
                    self._give_up()
                    if self._last is not None:
                        self._last()
                    return

    def _pause(self) -> None:
        """Sleep until there is something to do; when idle without end, else for one poll interval."""
        self._wake.clear()
        if not (self._arrivals or self._waiting or self._stopping):
            self._idle = True
            if not self._arrivals:  # one that came before _idle was set did not rouse us
                self._wake.wait()
            self._idle = False
            self._wake.clear()
        if self._hurried:
            if self._waiting:
                time.sleep(_HURRIED_S)
        elif not self._stopping:
            self._wake.wait(self.settings.poll_ms / 1e3)

    def _take_arrivals(self, stack: contextlib.ExitStack) -> None:
        arrivals = self._arrivals
        for _ in range(len(arrivals)):
            item = arrivals.popleft()
            if isinstance(item, _Barrier):
                item.before = [span for lane in self._lanes.values() for _, span in lane]
                self._barriers.append(item)
            else:
                place = item.segments[-1].place if item.segments else None
                known = item.found is not None  # such a one waits for no other on its stream
                lane = self._lanes.setdefault(_KNOWN if known else id(place), deque())
                lane.append((next(self._numbers), item))
                self._waiting += 1
                if not known:
                    self.reader.calm_for(item, stack, keep=True)  # last: a fault of it must not lose the span

    def _look(self) -> None:
        """Pass on what is done, as it came: a child is there before its parent, whatever streams they are on."""
        lanes = dict(self._lanes)  # without those whose first is not done
        while lanes:
            key = min(lanes, key=lambda one: lanes[one][0][0]) if len(lanes) > 1 else next(iter(lanes))
            lane = lanes[key]
            span = lane[0][1]
            if span.found is None and not self.reader.ready(span):
                del lanes[key]
                continue
            self.reader.resolve(span)
            if span.found is None:  # another thread is reading it
                del lanes[key]
                continue
            self._let_go()
            self._pass_on(span)
            lane.popleft()  # not before: a flush counts what is still in a lane
            self._waiting -= 1
            self._let_go()
            if not lane:
                del self._lanes[key], lanes[key]
        for barrier in list(self._barriers):
            if all(span.emitted for span in barrier.before or ()):
                self._barriers.remove(barrier)
                barrier.passed.ring()

    def _let_go(self) -> None:
        if not self._hurried and not self._stopping:  # else somebody waits for us
            self._courtesy.after_a_step(self.pending)

    def _give_up(self) -> None:
        """At the end: what the device has not finished is passed on without its time."""
        self._take_arrivals(contextlib.ExitStack())
        for _, span in sorted(itertools.chain.from_iterable(self._lanes.values())):
            if span.found is None:
                self._ledger.count("pending_at_exit")
                self.abandon(span, _PENDING)
            until = time.monotonic() + _GRACE_S
            while span.found is None and time.monotonic() < until:
                time.sleep(_HURRIED_S)  # another thread is reading it
            if span.found is not None:
                self._pass_on(span)
        self._lanes.clear()
        for barrier in self._barriers:
            barrier.passed.ring()

    def _pass_on(self, span: Span) -> None:
        record = span.found
        assert record is not None  # noqa: S101 - resolved before
        if span.emitted:
            return
        for sink in self._sinks:
            try:
                sink.emit(span, record)
            except BaseException as error:  # a user's processor or a full disk
                # Not every library's errors are Exceptions: a panic of Rust is none, nor what ends a task or a test.
                if not isinstance(error, Exception) and threading.current_thread() is not self._thread:
                    span.emitted = True
                    raise  # an interrupt of the user's
                self._ledger.fault(f"sink_{type(sink).__name__}", error)
                self._ledger.count("lost_in_sink")
        span.emitted = True
        if span.writes_dropped:
            self._ledger.count("writes_dropped", span.writes_dropped)
        span.admission.let_go()
