"""Timing: what the marks of one span say, worked out on the host's monotonic axis.

A span's *launch* and *queue* have one origin, the moment user code was entered, so that they can be compared.

How much of the device time can have been waiting: from the moment the device reached the start mark
until the last thing the host put on the stream could reach it. That last thing is the end mark itself,
placed a few microseconds after the function returned, and an idle device takes a few more to reach it.
(With the return alone, 15 % of 5 µs kernels on an idle H200 lay below the lower bound.)

And how much of it can be the device's own, for beginning and ending work between two marks: see ``_EDGES_NS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpu_timed.errors import DeviceFault
from gpu_timed.record import Answer, Measured, Missing
from gpu_timed.span import FAULT, Segment, Span

_KERNEL_NS: Final = 1_250
"""A pair that reads less than so much over the floor is below the floor: handing over to a kernel alone takes as long.
By CUPTI, 1.25 to 1.28 µs lie between two kernels in a row on an H200, whatever an empty pair reads on its host (1.25 µs
on one, 2.9 on another); the shortest kernel reads 1.9 over it."""
_EMPTY_NS: Final = 800
"""A pair that reads less than so much over the floor holds no kernel. An empty one varies by half a microsecond where
the floor is high, by 32 ns where it is not."""
_EDGES_NS: Final = 6_250
"""A pair around queued work reads up to the floor and so much more than the work takes by CUPTI, from the first
kernel's begin to the last one's end: for handing over from mark to work and from work to mark. On two H200 (driver 580,
floors of 1.25 and 2.9 µs): 0.8 to 2.3 µs over the floor for kernels and graphs of one, 4.5 to 6.2 for graphs of many.
"""
_USUAL_FLOOR_NS: Final = 1_250
"""Stands for the floor until it is measured: that of an H200."""
_NO_EARLIER_SPAN: Final = Missing("no_earlier_span")


@dataclass(slots=True)
class Device:
    """What the marks of one span say, on the host's monotonic axis."""

    device_ns: Measured
    proven_ns: Measured
    """What no launch gap can have been."""
    min_ns: Measured
    """What is left of it without the device's own part."""
    queue_ns: Measured
    start_ns: Measured
    end_ns: Measured
    uncertainty_ns: Measured
    floor_ns: Measured
    gaps: Answer = "unknown"
    empty: bool = False
    """Every pair read too little for a kernel."""
    pairs: int = 1
    """How many pairs of marks it adds up."""

    @property
    def below_floor(self) -> bool:
        """Whether what is left without the marks is less than handing over to a kernel takes."""
        device_ns, floor_ns = self.device_ns, self.floor_ns
        if not isinstance(device_ns, int) or not isinstance(floor_ns, int) or not floor_ns:
            return False  # a clock whose marks take no time has no floor
        return device_ns < floor_ns + self.pairs * _KERNEL_NS


def read_marks(span: Span, seen_ns: int) -> Device:
    """Add up the segments. A fault of the device becomes the span's, and everything Missing."""
    try:
        pieces = [_read_segment(span, segment, seen_ns) for segment in span.told()]
    except DeviceFault as fault:
        if not span.seen_ns:  # else its own work was done before the device fell into error
            span.device_error = str(fault)
        return nothing(Missing("device_error", str(fault)))
    if len(pieces) == 1:
        return pieces[0]
    total = Device(0, 0, 0, 0, pieces[0].start_ns, pieces[-1].end_ns, 0, 0, "no")
    total.pairs = len(pieces)
    total.empty = all(piece.empty for piece in pieces)
    for piece in pieces:
        total.device_ns = _add(total.device_ns, piece.device_ns)
        total.proven_ns = _add(total.proven_ns, piece.proven_ns)
        total.min_ns = _add(total.min_ns, piece.min_ns)
        total.queue_ns = _add(total.queue_ns, piece.queue_ns)
        total.floor_ns = _add(total.floor_ns, piece.floor_ns)
        total.end_ns = max(number(total.end_ns), number(piece.end_ns))
        total.uncertainty_ns = max(number(total.uncertainty_ns), number(piece.uncertainty_ns))
        total.gaps = (
            "yes" if "yes" in (total.gaps, piece.gaps) else "unknown" if piece.gaps == "unknown" else total.gaps
        )
    return total


def _read_segment(span: Span, segment: Segment, seen_ns: int) -> Device:
    place, start, end = segment.place, segment.start, segment.end
    assert place is not None  # noqa: S101 - span.missing() said that every mark is there
    assert not isinstance(start, Missing)  # noqa: S101
    assert not isinstance(end, Missing)  # noqa: S101
    clock = place.clock
    device_ns = clock.elapsed_ns(start, end)
    if isinstance(device_ns, Missing):
        return nothing(device_ns)
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
    edges = 0  # of a clock whose marks are no pair on a stream, or take no time
    if clock.in_order and floor_ns != 0:
        edges = _EDGES_NS + (floor_ns if isinstance(floor_ns, int) else _USUAL_FLOOR_NS)
    longest_gap = 0 if gaps == "no" else max(0, exposed - waited) if isinstance(queue, int) else exposed
    return Device(
        device_ns=device_ns,
        proven_ns=max(0, device_ns - longest_gap),
        min_ns=max(0, device_ns - longest_gap - edges),
        queue_ns=queue,
        start_ns=position.host_ns,
        end_ns=position.host_ns + device_ns,
        uncertainty_ns=uncertainty,
        floor_ns=floor_ns,
        gaps=gaps,
        empty=isinstance(floor_ns, int) and floor_ns > 0 and device_ns < floor_ns + _EMPTY_NS,
    )


def idle_before(span: Span, found: Device) -> Measured:
    """Return device time since the last end mark that was placed on this stream before the start mark.

    The order of a stream is the order in which its marks were placed, so that it is exact also where the
    positions of two marks lie closer together than they are known.
    """
    if isinstance(found.queue_ns, Missing):
        return found.queue_ns  # the start's position is not to be relied on
    first = span.segments[0]
    assert first.place is not None  # noqa: S101 - it has marks
    ends = first.place.ends
    try:
        for back in range(1, len(ends) + 1):  # those behind the start mark are of spans inside this one
            end_ns, marked_ns = ends[-back]
            if marked_ns <= first.called_ns:
                return max(0, number(found.start_ns) - end_ns)
    except IndexError:  # a reset of the place by another thread
        pass
    return _NO_EARLIER_SPAN


def launch_of(span: Span) -> Measured:
    """Return the host nanoseconds that the call took, marks left out."""
    if span.spoiled:
        return FAULT
    return span.unmarked_ns + sum(segment.returned_ns - segment.entered_ns for segment in span.segments)


def nothing(reason: Missing) -> Device:
    """Return a device time of which nothing is known, for one *reason*."""
    return Device(reason, reason, reason, reason, reason, reason, reason, reason)


def _add(total: Measured, piece: Measured) -> Measured:
    if isinstance(total, Missing):
        return total
    return piece if isinstance(piece, Missing) else total + piece


def number(value: Measured) -> int:
    """Return *value*, or 0 where it is missing."""
    return value if isinstance(value, int) else 0
