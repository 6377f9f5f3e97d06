"""The span: one execution while it is open, with the marks it has placed so far."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from threading import get_ident
from typing import Any, Final, NamedTuple, Protocol

from gpu_timed.clocks.host import HostClock
from gpu_timed.context.recording import Admission, RecordingSpan, message_of
from gpu_timed.errors import WaitTimeout
from gpu_timed.mode_values import Ran
from gpu_timed.ports import MOST_WATCHERS, NOT_GIVEN, Interval, Launch, Locator, Mark, Place, WarmthSource
from gpu_timed.record import NO_RESULTS, Missing, Record
from gpu_timed.settings import LatePolicy, SyncPolicy
from gpu_timed.site import Site
from gpu_timed.strangers import tell_strangers
from gpu_timed.values import AttributeValue
from gpu_timed.work import Work, one_work

MOST_SEGMENTS: Final = 4096
"""Resumptions of one coroutine that are marked; beyond it the device time is Missing("overflow")."""
MOST_INTERVALS: Final = 256
"""Pieces of one span in which something was compiled somewhere: of more, the latest are kept."""
_FORGOTTEN: Final = Interval(-1, -1, 0)
"""Stands for those that are not: it begins before whatever the ring still holds, so that nobody calls the span warm."""
_READING_S: Final = 1.0
_NO_FAILURES: Final = frozenset({("torch.utils.checkpoint", "_StopRecomputationError")})
"""Exceptions that are an ordinary ending: a checkpointed function is computed again only as far as it is needed."""
OVERFLOW: Final = Missing("overflow")
DEVICE_CHANGED: Final = Missing("device_changed")
FAULT: Final = Missing("internal_fault")
NEW_SHAPE: Final = "new_shape_cudnn_benchmark"
CAPTURE_AWAITED: Final = "capture_awaited"
INPUTS_UNSEEN: Final = "inputs_unseen_cudnn_benchmark"


class Segment(NamedTuple):
    """One uninterrupted run: its two marks, and the host's monotonic time around them in nanoseconds."""

    place: Place | None
    start: Mark | Missing
    called_ns: int
    """Just before the start mark was placed."""
    entered_ns: int
    """Just after: the user's code began."""
    end: Mark | Missing
    returned_ns: int
    """The user's code returned or was suspended."""
    marked_ns: int
    """Just after the end mark was placed: up to here the device may have waited for the host."""


_segment: Final = partial(tuple.__new__, Segment)  # a third of what calling the class costs


class Engine(Protocol):
    """Who opens and closes spans, and can be asked for a record."""

    host: HostClock
    locator: Locator
    warmth: WarmthSource | None

    def wait(self, span: Span, timeout_s: float | None) -> Record:
        """Block until the record is there."""
        ...

    def leave(self, opened: Any, error: BaseException | None = None, result: Any = None) -> None:
        """Close the span."""
        ...

    def mend(self, opened: Any) -> None:
        """Do what an interrupt has left to do of closing it."""
        ...


class Span(RecordingSpan):
    """An open span. It is what ``get_current_span()`` returns inside the call, unless the provider made its own.

    User code may write to it as to any OpenTelemetry span, and ask :meth:`wait` for the record.
    """

    # What most spans never change stands on the class: an instance that sets thirty attributes costs a
    # microsecond on the calling thread.
    #: The finished measurement, once some thread has read the marks.
    found: Record | None = None
    #: The host's time at which a wait at the boundary saw the last mark reached; 0 if nobody waited.
    seen_ns: int = 0
    quality: tuple[str, ...] = ()
    started_ns: int = 0
    returned_ns: int = 0
    sync_ns: int = 0
    error: str = ""
    cancelled: bool = False
    device_error: str = ""
    #: Pieces in which something was compiled, tuned, loaded or initialised somewhere in the process.
    cold: tuple[Interval, ...] = ()
    _generation: int = 0
    #: How many events of warmth there had been when it began, if it was suspended since; else -1.
    _before: int = -1
    #: Name of the clock of a device that nobody had set up when a segment began, and somebody had when it ended.
    set_up: str = ""
    #: Why nobody can say whether its inputs made a library tune itself: a quality note, or nothing.
    input_doubt: str = ""
    awaited: bool = False
    #: Resumptions beyond MOST_SEGMENTS, and the host time they ran: counted, not marked.
    unmarked: int = 0
    unmarked_ns: int = 0
    #: Something inside gpu_timed failed while the span was open: none of its times can be trusted.
    spoiled: bool = False
    token: Any = None
    saved_context: Any = None
    caller_context: Any = None
    #: It was passed on after its end.
    submitted: bool = False
    #: Some thread has begun to read the marks.
    claimed: bool = False
    emitted: bool = False
    #: Work that is neither its own nor of a span inside it was marked on its stream while it was open.
    interleaved: bool = False
    #: Which of the tracer's captures was the newest when the call returned.
    epoch: int = 0
    #: The real host span, where it was made before the device was done (``late="device_only"``).
    host_span: Any = None
    #: What the call itself says of where its work goes.
    launch: Launch | None = None
    #: What this call has to do, where that is not the same for every call of the site.
    work: Work | Missing | None = None
    #: How it was launched, where it was to be in some mode.
    ran: Ran | None = None
    #: What counts its operations just now.
    counting: Any = None
    _place: Place | None = None
    _start: Mark | Missing = OVERFLOW
    _end: Mark | Missing = FAULT
    _called_ns: int = 0
    _entered_ns: int = 0

    def __init__(  # noqa: PLR0917 - by position, and all of it: this is the hot path
        self,
        owner: Engine,
        site: Site,
        index: int,
        admission: Admission,
        attributes: Mapping[str, AttributeValue],
        sync: SyncPolicy,
        late: LatePolicy,
    ) -> None:
        self.admission = admission
        self.name = site.name
        self.start_attributes = attributes
        self.owner = owner
        self.site = site
        self.index = index
        self.sync: SyncPolicy = sync
        self.late: LatePolicy = late
        self.host = owner.host
        self.thread_id = get_ident()
        self.segments: list[Segment] = []
        self._locator = owner.locator
        self._warmth = owner.warmth

    # -- for the user ---------------------------------------------------------------------------------

    @property
    def record(self) -> Record | None:
        """The finished measurement, None until the device is done and it is resolved.

        A span that waited at its boundary has reached its marks: its record is made when it is asked for
        here, or by gpu_timed's own thread soon after, and not at the cost of the call.
        """
        if self.found is None and self.seen_ns:
            try:  # not resolve_if_done: the resolver's thread may be reading it at this moment
                self.owner.wait(self, _READING_S)
            except WaitTimeout:
                pass
        return self.found

    def wait(self, timeout_s: float | None = None) -> Record:
        """Block until the device has finished this span's work, and return the record.

        Call it after the span has ended. *timeout_s* is in seconds, None for no limit.

        Raises:
            WaitTimeout: The record was not there in time, or the span is still open.
        """
        return self.owner.wait(self, timeout_s)

    def set_work(self, work: Work) -> None:
        """Say what this span has to do, where that is known only inside it. In place of what was said before.

        Call it before the span ends.

        Raises:
            ConfigurationError: *work* is no :class:`~gpu_timed.work.Work`.
        """
        self.work = one_work(work)

    # -- for the engine -------------------------------------------------------------------------------

    @property
    def captured(self) -> bool:
        """Whether the open segment's work goes into a graph instead of running."""
        return isinstance(self._start, Missing) and self._start.reason == "captured"

    @property
    def generation(self) -> int:
        """How many events of warmth there had been when its last segment ended."""
        return self.cold[-1].ended if self.cold else self._generation

    @property
    def around(self) -> tuple[int, int] | None:
        """From where to where events of warmth count as beside it; None if it was never suspended."""
        return None if self._before < 0 else (self._before, max(self._generation, self.generation))

    @property
    def place(self) -> Place | None:
        """Where the open segment's marks go, None if it has none."""
        return self._place

    def begin(self, values: Any = NOT_GIVEN, *, marked: bool) -> None:
        """Place the start mark of a segment that works on *values*; *marked* False leaves it out."""
        warmth, now_ns = self._warmth, self.host.now_ns
        if warmth is not None:
            if self.segments and self._before < 0:
                self._before = self._generation
            self._generation = warmth.generation
        place = self._locator.locate(self.launch) if marked and len(self.segments) < MOST_SEGMENTS else OVERFLOW
        if isinstance(place, Missing):
            self._place = None
            self._start = place
            self._called_ns = self._entered_ns = now_ns()
        else:
            self._place, self._start, self._end = place, FAULT, FAULT  # until they are placed
            watchers = place.watchers
            if watchers:
                tell_strangers(self, watchers)
            if not self.interleaved:
                if len(watchers) < MOST_WATCHERS:
                    watchers.append(self)
                else:
                    place.unwatched += 1
            self._called_ns = now_ns()
            self._start = place.clock.mark(place, values)  # last of all: what follows it is inside the measured time
            self._entered_ns = now_ns()
        if not self.segments:
            self.started_ns = self._called_ns

    def finish(self, returned_ns: int, values: Any = NOT_GIVEN) -> None:
        """Place the end mark of the segment, which made *values*, on the stream of its start mark; close it."""
        self.returned_ns = returned_ns
        warmth = self._warmth
        if warmth is not None and warmth.generation != self._generation:
            held = self.cold if len(self.cold) < MOST_INTERVALS else (_FORGOTTEN, *self.cold[2:])
            self.cold = (*held, Interval(self._generation, warmth.generation, get_ident()))
        if self.spoiled:
            return
        place, start = self._place, self._start
        end: Mark | Missing = start
        marked_ns = returned_ns
        if place is not None:
            if not isinstance(start, Missing):
                here = self._locator.locate(self.launch)
                end = self._end = (
                    place.clock.mark(place, values, start)
                    if here is place
                    else self._end_at(here, place, values, start)
                )
                marked_ns = self.host.now_ns()
            watchers = place.watchers
            if len(watchers) > 1 or self.interleaved:
                tell_strangers(self, watchers)
            try:
                watchers.remove(self)
            except ValueError:
                pass  # it is interleaved, which nobody has to tell it again
        elif isinstance(start, Missing) and start.reason == "not_initialised":
            here = self._locator.locate(self.launch)
            if not isinstance(here, Missing):
                self.set_up = here.clock.name
        made = _segment((place, start, self._called_ns, self._entered_ns, end, returned_ns, marked_ns))
        room = len(self.segments) < MOST_SEGMENTS
        # With nothing in between that lets an interrupt in: the marks are the span's or the segment's, never both's.
        self._place, self._start = None, FAULT
        if room:
            self.segments.append(made)
        else:
            self.note("segments_overflow")
            self.unmarked += 1
            self.unmarked_ns += returned_ns - self._entered_ns

    def spoil(self) -> None:
        """After a fault inside gpu_timed: keep the marks for re-use, and tell no time."""
        self.spoiled = True
        place, start = self._place, self._start
        self._place, self._start = None, FAULT
        if place is not None:
            try:
                place.watchers.remove(self)
            except ValueError:
                pass
            now = self._called_ns
            self.segments.append(Segment(place, start, now, now, self._end, now, now))

    def look_at(self, result: Any) -> None:
        """Note a result that lives on another device than the one that was marked."""
        place = self.segments[-1].place if self.segments else None
        if place is not None and result is not None:
            lives_on = self._locator.device_of(result)
            if lives_on is not None and lives_on != place.device:
                self.note("result_on_other_device")

    def note(self, note: str) -> None:
        """Add a quality note, once."""
        if note not in self.quality:
            self.quality = (*self.quality, note)

    def fail(self, error: BaseException) -> None:
        """Remember what the call raised, as text: keeping it would keep its frames and their tensors."""
        kind = type(error)
        if (kind.__module__, kind.__name__) in _NO_FAILURES:
            return
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        self.error = f"{module}{kind.__qualname__}: {message_of(error)}"
        if isinstance(error, Exception):
            self.record_exception(error, escaped=True)
        else:  # as the SDK has it, a cancellation is an ending and no error
            self.cancelled = True

    def marks(self) -> list[tuple[Place, Mark]]:
        """Return every mark placed, with its place."""
        found: list[tuple[Place, Mark]] = []
        for segment in self.segments:
            if segment.place is not None:
                found += [(segment.place, m) for m in (segment.start, segment.end) if not isinstance(m, Missing)]
        return found

    def last_marks(self) -> list[tuple[Place, Mark]]:
        """Return the last end mark on each stream: with these the device has reached all of them.

        Of a clock that has no streams, every one: there a later mark may be reached before an earlier.
        """
        last: dict[int, tuple[Place, Mark]] = {}
        for segment in self.segments:
            place, end = segment.place, segment.end
            if place is not None and not isinstance(end, Missing):
                last[id(place if place.clock.in_order else segment)] = place, end
        return list(last.values())

    def told(self) -> list[Segment]:
        """Return the segments that have something to tell: without those that left no result, unless all did."""
        some = [segment for segment in self.segments if segment.end != NO_RESULTS]
        return some or self.segments

    def missing(self) -> Missing | None:
        """Return why the device time cannot be known whatever the device does, or None if it can."""
        if self.spoiled or not self.segments:
            return FAULT
        if self.unmarked:
            return OVERFLOW
        device: int | None = None
        for segment in self.told():
            for mark in (segment.start, segment.end):
                if isinstance(mark, Missing):
                    return mark
            assert segment.place is not None  # noqa: S101 - it has marks
            if device is None:
                device = segment.place.device
            elif device != segment.place.device:
                return DEVICE_CHANGED
        return None

    # -- inside ---------------------------------------------------------------------------------------

    def _end_at(self, here: Place | Missing, place: Place, values: Any, start: Mark) -> Mark | Missing:
        """Mark the end on *place*, where the segment began, though the current work goes *here* by now."""
        if isinstance(here, Missing):
            if here.reason != "captured" or place.clock.is_capturing(place):
                return here
        elif here.device != place.device:
            return DEVICE_CHANGED
        elif place.clock.is_capturing(place):
            return Missing("captured")
        return place.clock.mark(place, values, start)
