"""Noting: says what is doubtful about the numbers of a span, from the numbers themselves."""

from __future__ import annotations

import statistics
from typing import Final

from gpu_timed.span import Span
from gpu_timed.timing import Device, launch_of, number

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
_LONG_NS: Final = 20_000
_MUCH: Final = 8
"""A call that took the host so long, and so many times what the device needed for it, was to do something: in 20 µs
even torch, which takes 5 to 10 for each, launches two kernels. On an idle stream no call is eight times as long as
its pair of marks, which lasts from its begin to its end."""


def note_full_queue(span: Span, found: Device) -> None:
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
    if number(found.queue_ns) < _FAR_BEHIND_NS:
        quiet.append(taken)
    else:
        usual = statistics.median(quiet.copy()) if len(quiet) >= _ENOUGH_QUIET else taken
        held_up = taken > _HELD_UP * usual and taken > usual + _HELD_UP_NS
        if held_up and found.gaps == "no":
            waiting = 1 + sum(end > last.marked_ns for end, _ in tuple(place.ends))
            kernels = 1 if span.launch is not None else usual / _LAUNCH_NS
            if waiting * (kernels + 2) >= _QUEUE_ENTRIES:
                span.note("launch_queue_full")
        if not held_up and len(quiet) < (quiet.maxlen or 0):
            quiet.append(taken)  # and no more while the device is far behind: a full queue would become the usual
    if isinstance(found.end_ns, int):
        place.ends.append((found.end_ns, last.marked_ns))


def note_floor(span: Span, found: Device) -> None:
    """Say so where the device time is no more than marks may read by themselves; and where it should have been more.

    A call whose work, all of it, went to the stream of its marks cannot take the host long and read as nothing: what it
    launched lies between the marks. Nor can a call on an idle stream, where the marks lie as far apart as its begin
    and its end. A kernel's own launch is on that stream for certain, and no call that waits for a result.
    """
    if not found.below_floor:
        return
    span.note("below_floor")
    launch_ns, device_ns = launch_of(span), found.device_ns
    if not isinstance(launch_ns, int) or not isinstance(device_ns, int):
        return
    if found.empty and span.launch is None and launch_ns >= max(_LONG_NS, _MUCH * device_ns):
        span.note("no_work_on_stream")
