"""Effort: what a call has to do, asked as it is entered, or counted while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpu_timed.ledger import Ledger
from gpu_timed.ports import WorkCounter
from gpu_timed.record import Missing
from gpu_timed.span import Span
from gpu_timed.work import COUNT, Work

CAPTURED: Final = Missing("not_counted", "the call was captured into a graph")
RAISED: Final = Missing("not_counted", "the call raised")
_WORK_RAISED: Final = Missing("work_raised")
_NOT_COUNTED: Final = Missing("not_counted")
SUSPENDED: Final = Missing("not_counted", "the call is suspended now and then: give it work=Work(...)")


def find(
    span: Span,
    counter: WorkCounter | None,
    ledger: Ledger,
    arguments: tuple[Any, ...],
    named: Mapping[str, Any],
    *,
    suspends: bool,
) -> None:
    """Ask what the call has to do: the user's function, or what torch counts or has counted. Never raises."""
    site = span.site
    try:
        if site.work_source != COUNT:
            found = site.work_source(*arguments, **named)
            if found is not None and not isinstance(found, Work):
                raise TypeError(f"work= returned {type(found).__name__}, no Work")  # noqa: TRY301
            span.work = found
        elif suspends or site.counted is None:
            span.work = SUSPENDED
        elif counter is not None:
            started = counter.begin(site.counted, arguments, named)
            if isinstance(started, Work | Missing):
                span.work = started
            else:
                span.counting = started
    except Exception as error:  # noqa: BLE001 - the user's function, or a torch that is not known
        counts = site.work_source == COUNT
        ledger.fault("counting" if counts else "work_raised", error)
        span.work = _NOT_COUNTED if counts else _WORK_RAISED


def stop_counting(span: Span, ledger: Ledger, spoilt: Missing | None) -> None:
    """Take the counter off the thread, and keep what it counted, unless *spoilt* says why not. Never raises."""
    counting, span.counting = span.counting, None
    span.note("flops_counted")
    try:
        found = counting.stop(spoilt)
        span.work = span.work or found  # what the call said of itself stands
    except Exception as error:  # noqa: BLE001 - rule 1
        ledger.fault("counting", error)
        span.work = span.work or _NOT_COUNTED
