"""The first calls of an arm: measured apart, until nothing is compiled, tuned, loaded or captured any more."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Sequence
from typing import Final

from gpu_timed.arms import ColdPhase, FirstCall
from gpu_timed.measure.contestant import AS_GIVEN, Arguments, Contestant
from gpu_timed.measure.stopwatch import Stopwatch
from gpu_timed.mode_values import EAGER
from gpu_timed.ports import Interval, WarmthSource
from gpu_timed.record import NOT_SET, Cause, Measured, Missing, Warmth

QUIET: Final = 3
"""Calls in a row without a cause, launched in the same mode, after which an arm is warm."""
MOST_CALLS: Final = 40
MOST_NS: Final = 300_000_000_000
"""After so long no further call is made to become warm: 5 minutes. One that compiles for longer is waited for."""


def warm_up(
    contestant: Contestant,
    stopwatch: Stopwatch,
    arguments: Arguments,
    warmth: WarmthSource | None,
    prepare: Callable[[], object],
) -> ColdPhase:
    """Call *contestant* until it is warm.

    Args:
        contestant: What is called.
        stopwatch: Times each call.
        arguments: What it takes.
        warmth: Sees what is compiled and loaded; None where nobody watches: a few calls are made then.
        prepare: Called before each call.

    Raises:
        Exception: What the function raises.
    """
    calls: list[FirstCall] = []
    quiet = 0
    began = stopwatch.host.now_ns()
    while quiet < QUIET and len(calls) < MOST_CALLS and stopwatch.host.now_ns() - began < MOST_NS:
        prepare()
        before = 0 if warmth is None else warmth.generation
        took = stopwatch.time(contestant.call, *arguments)
        word, causes = _seen(warmth, before, first=not calls)
        ran = contestant.ran
        same = not calls or calls[-1].ran == ran.mode
        calls.append(FirstCall(took.wall_ns, word, causes, ran.mode, ran.reason))
        quiet = quiet + 1 if not causes and same else 0
    settled = quiet >= QUIET
    reason = ""
    if not settled:
        last = next((call.causes[0] for call in reversed(calls) if call.causes), None)
        what = f": {last.probe}: {last.what}" if last is not None else ""
        reason = f"after {len(calls)} calls something was still prepared anew in one of the last {QUIET}{what}"
    once = _one_off(calls)
    if contestant.mode not in (AS_GIVEN, EAGER.name) and contestant.ran.mode == EAGER.name:
        once = Missing("not_run", f"it ran as {EAGER.name}: {contestant.ran.reason or 'nobody knows why'}")
    elif once == 0 and not settled:  # held against calls that were not warm: it cannot be said that there was none
        once = Missing("not_settled", reason)
    return ColdPhase(calls=tuple(calls), one_off_ns=once, settled=settled, reason=reason)


def _seen(warmth: WarmthSource | None, before: int, *, first: bool) -> tuple[Warmth, tuple[Cause, ...]]:
    if warmth is None:
        return "unknown", ()
    verdict = warmth.verdict([Interval(before, warmth.generation, threading.get_ident())], first_call=first)
    return verdict.warmth, verdict.causes


def _one_off(calls: Sequence[FirstCall]) -> Measured:
    """Return what the calls before the last quiet ones took beyond what those take, in nanoseconds."""
    if len(calls) <= QUIET:
        return NOT_SET if not calls else max(0, calls[0].wall_ns - min(call.wall_ns for call in calls))
    usual = statistics.median(call.wall_ns for call in calls[-QUIET:])
    return round(sum(max(0.0, call.wall_ns - usual) for call in calls[:-QUIET]))
