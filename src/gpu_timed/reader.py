"""The reader: asks the clocks of one finished span, and builds its record, once.

The resolver's thread and a caller that waits for a record may both come to a span; whoever claims it first
reads it. Nothing here raises but an interrupt of the user's.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Iterator
from typing import Final

from gpu_timed import reading
from gpu_timed.bounds import Limit
from gpu_timed.errors import DeviceFault
from gpu_timed.ledger import Ledger
from gpu_timed.peaks import PeakBook
from gpu_timed.ports import Clock, Mark, MemoryWatch, Place, SecondLook, Sighting, Verdict, VitalsSource, WarmthSource
from gpu_timed.record import NOT_SET, Cause, Missing, Record
from gpu_timed.site import MOST_LASTING
from gpu_timed.span import FAULT, NEW_SHAPE, Span

MOST_CLOCKS: Final = 64
"""Clocks for which the resolver's thread stays in relaxed capture mode. A process has one or two."""
_PENDING: Final = Missing("pending")
_MARK_FAILED: Final = "mark_failed"
_TORCHS_OWN: Final = "cuda init"
"""The probe that sees torch set the device up, and says how long that took."""
_MOST_REASONS: Final = 3
"""Of what holds for a site that are told in one reason, on each of its spans; a function split in parts has many."""


class Reader:
    """Turns spans that have returned into records."""

    def __init__(
        self,
        ledger: Ledger,
        warmth: WarmthSource | None = None,
        vitals: VitalsSource | None = None,
        peaks: PeakBook | None = None,
    ) -> None:
        self.warmth = warmth
        self.second_look: SecondLook | None = None
        self.memory: MemoryWatch | None = None
        self.vitals = vitals
        self.peaks = peaks
        self._ledger = ledger
        self._claiming = threading.RLock()
        self._calmed: dict[int, tuple[Clock, contextlib.ExitStack]] = {}
        self._clocks_dropped = 0

    def ready(self, span: Span) -> bool:
        """Return whether everything that can be known of *span* is known by now."""
        if span.seen_ns or span.missing() is not None:
            return True
        try:
            return all(place.clock.is_done(mark) for place, mark in span.last_marks())
        except DeviceFault as fault:
            span.device_error = str(fault)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not lose the span
            self._ledger.fault("asking", error)
            span.spoil()
        return True

    def resolve_if_done(self, span: Span) -> bool:
        """Build the record of *span* if the device has reached its marks; returns whether it is there. Never raises."""
        if span.found is None:
            with contextlib.ExitStack() as stack:
                self.calm_for(span, stack)
                if not self.ready(span):
                    return False
                self.resolve(span)
        return span.found is not None

    def resolve(self, span: Span, reason: Missing | None = None) -> None:
        """Build the record of *span*; with a *reason* the device is not asked, and its time is missing for it.

        Never raises; the marks come back and the record is there. What another thread is reading is left to it.
        """
        with self._claiming:
            if span.claimed:
                return
            span.claimed = True
        marks, held = span.marks(), span.segments
        if reason is not None:
            span.segments = [segment._replace(end=reason) for segment in held]
        try:
            record = self._record(span)
        except BaseException:  # an interrupt of the user's, on the calling thread: the resolver reads it again
            span.segments, span.claimed = held, False
            raise
        why = record.device_ns.reason if isinstance(record.device_ns, Missing) else ""
        if why == "device_error" or span.device_error:
            self._ledger.count("device_error")  # its events are of no more use
        else:
            self._release(marks)
        if why == _MARK_FAILED:
            self._ledger.count(_MARK_FAILED)
        if "anchor_fault" in span.quality:
            self._ledger.count("anchor_fault")
        if span.unmarked:
            self._ledger.count("segments_overflow", span.unmarked)
        span.found = record

    def provisional(self, span: Span) -> Record:
        """Return what is known of *span* as its call returns: no device time yet."""
        without = copy.copy(span)
        without.segments = [segment._replace(end=_PENDING) for segment in span.segments]
        return self._read(without, span.host.now_ns(), final=False)

    def calm_for(self, span: Span, stack: contextlib.ExitStack, *, keep: bool = False) -> None:
        """Make this thread's questions harmless to captures, for the clocks that *span* has marks of."""
        for place, _ in span.marks():
            clock = place.clock
            if keep and id(clock) in self._calmed:
                continue
            try:
                (self._kept_for(clock) if keep else stack).enter_context(clock.unhindered())
            except Exception as error:  # noqa: BLE001 - asked all the same
                self._ledger.fault("unhindered", error)

    def calm_no_more(self) -> None:
        """Undo what :meth:`calm_for` kept, on the same thread."""
        while self._calmed:
            self._calmed.popitem()[1][1].close()

    def limits(self) -> Iterator[Limit]:
        """Say how much is kept."""
        yield Limit(
            "clocks", MOST_CLOCKS, len(self._calmed), self._clocks_dropped, "clocks asked by gpu_timed's thread"
        )

    # -- inside ---------------------------------------------------------------------------------------

    def _kept_for(self, clock: Clock) -> contextlib.ExitStack:
        """Return what keeps this thread's questions to *clock* harmless until the thread ends."""
        if len(self._calmed) >= MOST_CLOCKS:  # a test suite that makes a fake device for each test
            oldest = next(iter(self._calmed))
            self._calmed.pop(oldest)[1].close()
            self._clocks_dropped += 1
        own = contextlib.ExitStack()
        self._calmed[id(clock)] = clock, own
        return own

    def _record(self, span: Span) -> Record:
        for _ in ("as it is", "without the device"):
            try:
                span.host.refresh()
                seen_ns = span.seen_ns or span.host.now_ns()
                if span.awaited:
                    span.sync_ns = seen_ns - span.returned_ns
                return self._read(span, seen_ns)
            except Exception as error:  # noqa: BLE001 - a fault of ours must not lose the span
                self._ledger.fault("reading", error)
                span.spoil()
        span.emitted = True  # nothing in it could be shown
        self._ledger.count("unreadable")
        return reading.blank(span.site, time.time_ns(), FAULT)

    def _read(self, span: Span, seen_ns: int, *, final: bool = True) -> Record:
        near = None if self.vitals is None else self._near
        if final:
            self._note_memory(span)
        if self.warmth is None:
            return reading.read(span, seen_ns, near=near, peaks=self.peaks, fault=self._ledger.fault)
        verdict = self.warmth.verdict(span.cold, first_call=span.index == 0, around=span.around)
        if span.set_up:
            verdict = _with_device(verdict, span.set_up)
        if span.input_doubt and any(segment.place is not None for segment in span.segments):
            span.note(span.input_doubt)
            if verdict.warmth == "warm" and span.input_doubt == NEW_SHAPE:
                verdict = Verdict("unknown", NOT_SET, (), concurrent=verdict.concurrent)
        if final and self.second_look is not None and self.second_look.watching:  # else on the calling thread
            ended_ns = max(span.returned_ns, span.started_ns) + span.sync_ns
            to_unix = span.host.to_unix
            verdict = self.second_look.second_look(span.site, to_unix(span.started_ns), to_unix(ended_ns), verdict)
        return reading.read(
            span,
            seen_ns,
            verdict,
            near=near,
            peaks=self.peaks,
            mode_reason=self._lasting(span),
            fault=self._ledger.fault,
        )

    def _note_memory(self, span: Span) -> None:
        """Say so where an allocator may have gone to the device for memory. A fault of it costs the span nothing."""
        place = span.segments[0].place if span.segments else None
        if self.memory is None or place is None or span.spoiled or place.clock.name == "fence":
            return
        taken_ns = sum(segment.marked_ns - segment.called_ns for segment in span.segments) // len(span.segments)
        try:
            for note in self.memory.notes(place.device, taken_ns, list(span.site.quiet_ns), first=span.index == 0):
                span.note(note)
        except Exception as error:  # noqa: BLE001
            self._ledger.fault("memory", error)

    def _near(self, device_uuid: str | None, start_ns: int, end_ns: int) -> Sighting:
        """Ask the vitals. A fault of theirs must not cost the span its times."""
        assert self.vitals is not None  # noqa: S101 - else this is not passed on
        try:
            return self.vitals.at(device_uuid, start_ns, end_ns)
        except Exception as error:  # noqa: BLE001
            self._ledger.fault("vitals", error)
            return Sighting(FAULT, FAULT)

    def _lasting(self, span: Span) -> str:
        """Note what happened in this call or an earlier one of its site and still holds; return it in words."""
        assert self.warmth is not None  # noqa: S101 - the caller looked
        lasting = span.site.lasting
        if span.cold:
            held = {id(each) for _, each in tuple(lasting)}
            found = self.warmth.lasting(span.cold)
            fresh = [(span.index, each) for each in found if id(each) not in held]
            span.site.lasting_dropped += max(0, len(lasting) + len(fresh) - MOST_LASTING)
            lasting.extend(fresh)
        if not lasting:
            return ""
        holding = [each for index, each in tuple(lasting) if index <= span.index and each.holds(span.generation)]
        for each in holding:
            span.note(each.note)
        texts = list(dict.fromkeys(each.text for each in holding))
        more = [f"and {len(texts) - _MOST_REASONS} more"] if len(texts) > _MOST_REASONS else []
        return "; ".join([*texts[:_MOST_REASONS], *more])

    def _release(self, marks: list[tuple[Place, Mark]]) -> None:
        for place, mark in marks:
            try:
                place.clock.release(mark)
            except Exception as error:  # noqa: BLE001 - one mark less in the pool
                self._ledger.fault("release", error)


def _with_device(verdict: Verdict, clock: str) -> Verdict:
    """Return *verdict* of a call in which the device of *clock* was set up, by whatever runtime."""
    if any(cause.probe == _TORCHS_OWN for cause in verdict.causes):
        return verdict
    what = "CUDA context created" if clock == "cuda_event" else "device set up"
    causes = (Cause("device", what, "initialised"), *verdict.causes)
    if verdict.warmth == "cold":
        return verdict._replace(causes=causes)
    return Verdict("cold", "initialised", causes, concurrent=verdict.concurrent)
