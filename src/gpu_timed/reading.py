"""Reading: turns the marks of a finished span into its record.

The arithmetic, in one place. A span's *launch* and *queue* have one origin, the moment user
code was entered, so that they can be compared.

How much of the device time can have been waiting: from the moment the device reached the start mark
until the last thing the host put on the stream could reach it. That last thing is the end mark itself,
placed a few microseconds after the function returned, and an idle device takes a few more to reach it.
(With the return alone, 15 % of 5 µs kernels on an idle H200 lay below the lower bound.)
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from gpu_timed.errors import DeviceFault
from gpu_timed.ports import DeviceInfo, Verdict
from gpu_timed.record import NOT_SAMPLED, NOT_SET, Answer, Bound, Measured, Missing, Record, Status
from gpu_timed.site import Site
from gpu_timed.span import FAULT, Segment, Span

DEVICE_ERROR_HINT: Final = "may come from earlier work"
_PROVEN: Final = 0.9
"""Share of the device time that must be proven work before the device is called the bound."""
_FAR_BEHIND_NS: Final = 1_000_000
"""How far behind the device is, at the least, when its launch queue is full of work of a microsecond or more."""
_QUEUE_ENTRIES: Final = 1000
"""What the launch queue of a stream holds, kernels and marks: 1,024 on an H200 with driver 580, where 341 spans of one
kernel and two marks were waiting whenever a launch was held up."""
_LAUNCH_NS: Final = 2_000
"""The least that a launch costs the host: it bounds how many there can have been in a call."""
_HELD_UP: Final = 4
_HELD_UP_NS: Final = 20_000
"""A call that took the host so many times its usual time, and so much longer, was held up."""
_ENOUGH_QUIET: Final = 3
_BELOW: Final = 2
"""A pair that reads less than so many floors is below the floor: what is left of it without the marks is shorter than
an empty pair. On an H200 that is 2.5 µs: an empty pair that was queued reads 1.25, the shortest kernel in one 3.2."""
_EMPTY: Final = 1.5
"""A pair that reads less than so many floors holds no kernel: half a floor is more than an empty pair varies by (the
clock steps by 32 ns, documented is half a microsecond), and less than the shortest kernel takes (2 µs on an H200)."""
_LONG_NS: Final = 20_000
_MUCH: Final = 8
"""A call that took the host so long, and so many times what the device needed for it, was to do something: in 20 µs
even torch, which takes 5 to 10 for each, launches two kernels. On an idle stream no call is eight times as long as
its pair of marks, which lasts from its begin to its end."""
_UNKNOWN: Final = Verdict("unknown", NOT_SET, ())


@dataclass(slots=True)
class _Device:
    """What the marks of one span say, on the host's monotonic axis."""

    device_ns: Measured
    min_ns: Measured
    queue_ns: Measured
    start_ns: Measured
    end_ns: Measured
    uncertainty_ns: Measured
    floor_ns: Measured
    gaps: Answer = "unknown"
    empty: bool = False
    """Every pair read too little for a kernel."""

    @property
    def below_floor(self) -> bool:
        """Whether at least half of the device time may be the marks' own."""
        device_ns, floor_ns = self.device_ns, self.floor_ns
        return isinstance(device_ns, int) and isinstance(floor_ns, int) and device_ns < _BELOW * floor_ns


def read(span: Span, seen_ns: int, verdict: Verdict = _UNKNOWN, mode_reason: str = "") -> Record:
    """Build the record of *span*.

    Args:
        span: A span whose last mark was reached, or that can have no device time.
        seen_ns: The host's monotonic time at which its last mark was known to be reached.
        verdict: What the warmth probes saw.
        mode_reason: Why the call did not run as it was to be launched.
    """
    missing = span.missing()
    if missing is not None and missing.reason == "device_error" and not span.device_error:
        span.device_error = missing.detail or "device error"
    if span.device_error:
        missing = Missing("device_error", span.device_error)
    if missing is not None and missing.reason == "simulated":
        verdict = _UNKNOWN  # nothing is compiled there, and nothing is warm
    found = _nothing(missing) if missing is not None else _read_marks(span, seen_ns)
    if missing is None:
        _note_full_queue(span, found)
        _note_floor(span, found)
    to_unix = span.host.to_unix
    ended_ns = max(span.returned_ns, span.started_ns) + span.sync_ns
    if isinstance(found.end_ns, int) and span.late == "host":
        ended_ns = max(ended_ns, found.end_ns)
    place = span.segments[0].place if span.segments else None
    info = None if place is None else _describe(place)
    unknown = missing if missing is not None else Missing("no_device")
    error = span.error
    if span.device_error and not error:
        error = f"{span.device_error} ({DEVICE_ERROR_HINT})"
    kept = span.admission
    return Record(
        name=span.site.name,
        trace_id=kept.trace_id,
        span_id=kept.span_id,
        parent_id=kept.parent_id,
        process_id=os.getpid(),
        thread_id=span.thread_id,
        attributes=MappingProxyType(dict(span.start_attributes)),
        clock="host" if place is None else place.clock.name,
        device=unknown if place is None else place.device,
        device_uuid=unknown if info is None else info.uuid,
        device_name=unknown if info is None else info.name,
        device_type="gpu" if info is None else info.kind,
        stream=unknown if place is None else place.stream,
        start_ns=to_unix(span.started_ns),
        end_ns=to_unix(ended_ns),
        launch_ns=_launch(span),
        queue_ns=found.queue_ns,
        device_ns=found.device_ns,
        device_min_ns=found.min_ns,
        floor_ns=found.floor_ns,
        sync_ns=span.sync_ns,
        device_start_ns=to_unix(found.start_ns) if isinstance(found.start_ns, int) else found.start_ns,
        device_end_ns=to_unix(found.end_ns) if isinstance(found.end_ns, int) else found.end_ns,
        uncertainty_ns=found.uncertainty_ns,
        launch_gaps_included=found.gaps,
        warmth=verdict.warmth,
        tier=verdict.tier,
        causes=verdict.causes,
        compile_ns=verdict.compile_ns,
        first_call=span.index == 0,
        call_index=span.index,
        mode=span.site.mode or NOT_SET,
        mode_requested=span.site.mode or NOT_SET,
        mode_reason=mode_reason,
        bound=_bound(found),
        sync=span.sync,
        resumptions=len(span.segments) + span.unmarked,
        status=_status(span, error),
        error=error,
        quality=span.quality,
    )


def blank(site: Site, unix_ns: int, reason: Missing = NOT_SAMPLED) -> Record:
    """Build the record of a call of *site* of which nothing is known, for one *reason*."""
    no = reason
    return Record(
        name=site.name,
        trace_id=0,
        span_id=0,
        parent_id=None,
        process_id=os.getpid(),
        thread_id=0,
        attributes=MappingProxyType(dict(site.attributes)),
        clock="host",
        device=no,
        device_uuid=no,
        device_name=no,
        stream=no,
        start_ns=unix_ns,
        end_ns=unix_ns,
        launch_ns=no,
        queue_ns=no,
        device_ns=no,
        device_min_ns=no,
        floor_ns=no,
        sync_ns=no,
        device_start_ns=no,
        device_end_ns=no,
        uncertainty_ns=no,
        first_call=False,
        call_index=0,
        sync="deferred",
    )


def _read_marks(span: Span, seen_ns: int) -> _Device:
    """Add up the segments. A fault of the device becomes the span's, and everything Missing."""
    try:
        pieces = [_read_segment(span, segment, seen_ns) for segment in span.told()]
    except DeviceFault as fault:
        span.device_error = str(fault)
        return _nothing(Missing("device_error", str(fault)))
    if len(pieces) == 1:
        return pieces[0]
    total = _Device(0, 0, 0, pieces[0].start_ns, pieces[-1].end_ns, 0, 0, "no")
    total.empty = all(piece.empty for piece in pieces)
    for piece in pieces:
        total.device_ns = _add(total.device_ns, piece.device_ns)
        total.min_ns = _add(total.min_ns, piece.min_ns)
        total.queue_ns = _add(total.queue_ns, piece.queue_ns)
        total.floor_ns = _add(total.floor_ns, piece.floor_ns)
        total.end_ns = max(_number(total.end_ns), _number(piece.end_ns))
        total.uncertainty_ns = max(_number(total.uncertainty_ns), _number(piece.uncertainty_ns))
        total.gaps = (
            "yes" if "yes" in (total.gaps, piece.gaps) else "unknown" if piece.gaps == "unknown" else total.gaps
        )
    return total


def _read_segment(span: Span, segment: Segment, seen_ns: int) -> _Device:
    place, start, end = segment.place, segment.start, segment.end
    assert place is not None  # noqa: S101 - span.missing() said that every mark is there
    assert not isinstance(start, Missing)  # noqa: S101
    assert not isinstance(end, Missing)  # noqa: S101
    clock = place.clock
    device_ns = clock.elapsed_ns(start, end)
    if isinstance(device_ns, Missing):
        return _nothing(device_ns)
    if device_ns < 0:
        raise DeviceFault("the device stamped the end before the start")
    position = clock.position(start, device_ns, segment.called_ns, seen_ns)
    uncertainty = position.uncertainty_ns
    waited = position.host_ns - segment.entered_ns
    queue: Measured = max(0, waited)
    if position.fault:
        span.note("anchor_fault")
        queue = Missing("anchor_fault")
    exposed = segment.marked_ns - segment.entered_ns + position.latency_ns
    gaps: Answer = "unknown"
    if isinstance(queue, int):
        if waited - uncertainty >= exposed:
            gaps = "no"
        elif waited <= uncertainty:
            gaps = "yes"
    # From the start mark on, which may have been reached before the user's code was entered.
    floor_ns = clock.floor_ns(place)  # after the place was asked for: with the first, the floor is measured
    longest_gap = 0 if gaps == "no" else max(0, exposed - waited) if isinstance(queue, int) else exposed
    return _Device(
        device_ns=device_ns,
        min_ns=max(0, device_ns - longest_gap),
        queue_ns=queue,
        start_ns=position.host_ns,
        end_ns=position.host_ns + device_ns,
        uncertainty_ns=uncertainty,
        floor_ns=floor_ns,
        gaps=gaps,
        empty=isinstance(floor_ns, int) and device_ns < _EMPTY * floor_ns,
    )


def _note_full_queue(span: Span, found: _Device) -> None:
    """Say so where the host was held up while the device was far behind it: a launch waited for a free entry.

    An inference, from what the same site's calls usually cost the host. The device must have been behind
    all the time, which tells this from a call that waits for a result; and as many spans must have been
    waiting as could fill the queue, which tells it from a hiccup of the host's behind a short queue.
    """
    last = span.segments[-1]
    place, quiet = last.place, span.site.quiet_ns
    if place is None or place.clock.name == "fence":
        return
    taken = sum(segment.marked_ns - segment.called_ns for segment in span.segments) // len(span.segments)
    if _number(found.queue_ns) < _FAR_BEHIND_NS:
        quiet.append(taken)
    else:
        usual = statistics.median(quiet.copy()) if len(quiet) >= _ENOUGH_QUIET else taken
        held_up = taken > _HELD_UP * usual and taken > usual + _HELD_UP_NS
        if held_up and found.gaps == "no":
            waiting = 1 + sum(end > last.marked_ns for end in tuple(place.ends))
            kernels = 1 if span.launch is not None else usual / _LAUNCH_NS
            if waiting * (kernels + 2) >= _QUEUE_ENTRIES:
                span.note("launch_queue_full")
        if not held_up and len(quiet) < (quiet.maxlen or 0):
            quiet.append(taken)  # and no more while the device is far behind: a full queue would become the usual
    place.ends.append(_number(found.end_ns))


def _note_floor(span: Span, found: _Device) -> None:
    """Say so where the device time is no more than marks may read by themselves; and where it should have been more.

    A call whose work, all of it, went to the stream of its marks cannot take the host long and read as nothing: what it
    launched lies between the marks. Nor can a call on an idle stream, where the marks lie as far apart as its begin
    and its end. A kernel's own launch is on that stream for certain, and no call that waits for a result.
    """
    if not found.below_floor:
        return
    span.note("below_floor")
    launch_ns, device_ns = _launch(span), found.device_ns
    if not isinstance(launch_ns, int) or not isinstance(device_ns, int):
        return
    if found.empty and span.launch is None and launch_ns >= max(_LONG_NS, _MUCH * device_ns):
        span.note("no_work_on_stream")


def _launch(span: Span) -> Measured:
    if span.spoiled:
        return FAULT
    return span.unmarked_ns + sum(segment.returned_ns - segment.entered_ns for segment in span.segments)


def _status(span: Span, error: str) -> Status:
    if span.cancelled and not span.device_error:
        return "cancelled"
    return "error" if error else "ok"


def _bound(found: _Device) -> Bound:
    """Say ``device`` when at least nine tenths of the device time cannot have been launch gaps."""
    if isinstance(found.device_ns, Missing) or isinstance(found.min_ns, Missing) or found.device_ns == 0:
        return "unknown"
    if found.below_floor:  # the marks may be all that was
        return "unknown"
    return "device" if found.min_ns >= _PROVEN * found.device_ns else "unknown"


def _nothing(reason: Missing) -> _Device:
    return _Device(reason, reason, reason, reason, reason, reason, reason)


def _describe(place: Any) -> DeviceInfo:
    info: DeviceInfo = place.clock.describe(place)
    return info


def _add(total: Measured, piece: Measured) -> Measured:
    if isinstance(total, Missing):
        return total
    return piece if isinstance(piece, Missing) else total + piece


def _number(value: Measured) -> int:
    return value if isinstance(value, int) else 0
