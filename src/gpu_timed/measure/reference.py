"""A second truth for the self-test: CUPTI's kernel records, for the very executions that time themselves.

Kernels that stamp their own begin and end cannot see what starting and ending a kernel takes the device. CUPTI's
records are made outside of the kernel, on the realtime axis, so that three things can be held against each other for
each execution: the kernel's own stamps, CUPTI's time, and what the span says.

While records are on, launches are slower (12 % eager, 17 % as a graph, on an H200): these rows are rows of their own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from gpu_timed.analysis.judging import judge, spread
from gpu_timed.clocks.cupti_records import Execution, Records
from gpu_timed.measure.regimes import QUEUED_NS, REGIMES, Regime
from gpu_timed.measure.rig import NotTestable, Rig
from gpu_timed.measure.session import Made, Session
from gpu_timed.record import Missing, Record
from gpu_timed.settings import SyncPolicy
from gpu_timed.trials import Instrument, Observation, Row, Stamp, Verdict, worst

DURATIONS_NS: Final = (4_000, 25_000, 120_000)
"""None of those of the other rows, so that graphs of these are captured while CUPTI looks on: whether it sees the
kernels of graphs from before it was there depends on its version."""
SPANS: Final = 16
"""Of each regime and duration."""
RESOLUTION_NS: Final = 500
"""What NVIDIA documents for an event's time stamp ("around 0.5 microseconds")."""
_SYNC: Final[SyncPolicy] = "deferred"
_ROW_NS: Final = 5_000
_ROW: Final = 16
_BEFORE_ROW_NS: Final = 4_000_000
_SECTION: Final = "cupti"


class Source(Protocol):
    """What :class:`gpu_timed.clocks.cupti_activity.KernelRecords` does."""

    def start(self) -> None:
        """Begin to record."""
        ...

    def take(self) -> Records:
        """Return what there is since the last time."""
        ...

    def stop(self) -> Records:
        """Detach."""
        ...


@dataclass(frozen=True, slots=True)
class Beside:
    """One span, its kernel's own stamps, and CUPTI's record of it."""

    stamp: Stamp
    execution: Execution
    record: Record | None


def rows(
    rig: Rig,
    session: Session,
    source: Source,
    *,
    stamped: bool,
    regimes: Sequence[Regime] = REGIMES,
    until_s: float = float("inf"),
) -> Iterator[Row]:
    """Yield a row about the edges of kernels, and one of each regime. What fails is a row, not raised.

    Args:
        rig: The device.
        session: What makes the spans.
        source: Where records come from; it is started and stopped.
        stamped: Whether the kernels time themselves.
        regimes: What to test.
        until_s: When to be done, by ``time.monotonic()``: regimes that would come later are left out, and say so.

    Raises:
        GpuTimedError: Records cannot be had; nothing has been yielded then.
    """
    rig.settle()
    source.start()
    try:
        if stamped:
            yield _isolated("edges", functools.partial(edges, rig, source))
        for regime in regimes:
            if time.monotonic() >= until_s:
                yield Row(section=_SECTION, name=regime.name, verdict="skipped", text="no time was left for it")
                continue
            row = functools.partial(regime_row, rig, session, source, regime, stamped=stamped)
            yield _isolated(regime.name, row)
    finally:
        rig.settle()
        source.stop()


def edges(rig: Rig, source: Source) -> Row:
    """Return how far apart kernels are that run one right behind the other: by their own stamps, and by CUPTI."""
    rig.settle()
    rig.stamps()
    source.take()
    rig.occupy(_BEFORE_ROW_NS)
    for _ in range(_ROW):
        rig.launch(_ROW_NS)
    rig.settle()
    kernels = _short(_complete(source.take()))
    stamps = list(rig.stamps())
    _as_many(kernels, stamps)
    own = [
        after.begin_ns - before.end_ns
        for before, after in itertools.pairwise(stamps)
        if after.begin_ns is not None and before.end_ns is not None
    ]
    seen = [after.start_ns - before.end_ns for before, after in itertools.pairwise(kernels)]
    longer = [one.end_ns - one.start_ns - stamp.true_ns for one, stamp in zip(kernels, stamps, strict=True)]
    values = {
        "turnaround_ns": _median(own),
        "cupti_turnaround_ns": _median(seen),
        "cupti_less_stamps_ns": _median(longer),
        "cupti_less_stamps_spread_ns": spread(longer),
    }
    text = (
        f"from a kernel's end to the next one's begin: {values['turnaround_ns']:,} ns by their own stamps, "
        f"{values['cupti_turnaround_ns']:,} ns by CUPTI, to which kernels last {values['cupti_less_stamps_ns']:+,} ns "
        "longer than to themselves"
    )
    return Row(section=_SECTION, name="edges", verdict="info", text=text, spans=len(kernels), values=values)


def regime_row(rig: Rig, session: Session, source: Source, regime: Regime, *, stamped: bool) -> Row:
    """Return the row of one regime, all durations: the promises of a span, with CUPTI's time as the truth."""
    site = session.site(f"gpu_timed.selftest.cupti.{regime.name}", _SYNC)
    found: dict[int, list[Beside]] = {}
    judged: list[Row] = []
    instrument = Instrument(tick_ns=RESOLUTION_NS)
    for duration_ns in DURATIONS_NS:
        work = regime.work(rig, duration_ns)
        span = functools.partial(session.measure, site, work)
        _make(rig, regime, duration_ns, span, 2)
        rig.stamps()
        source.take()
        made, stream = _make(rig, regime, duration_ns, span, SPANS)
        kernels = _short(_complete(source.take()))
        records = session.records(made)
        stamps = list(rig.stamps())
        _as_many(kernels, stamps)
        beside = [Beside(*each) for each in zip(stamps, kernels, records, strict=True)]
        found[duration_ns] = beside
        spans = [_observation(one, rig.device, stream) for one in beside]
        judged.append(judge(regime.name, _SYNC, duration_ns, spans, instrument))
    return _together(regime, found, judged, stamped=stamped)


# -- inside -----------------------------------------------------------------------------------------------


def _make(rig: Rig, regime: Regime, duration_ns: int, span: Callable[[], Made], count: int) -> tuple[list[Made], int]:
    """Make *count* spans, and wait for the device; returns them, and the stream they are on."""
    made = []
    with contextlib.ExitStack() as stack:
        if regime.side:
            stack.enter_context(rig.on_side_stream())
        if regime.busy_host:
            stack.enter_context(rig.busy_host())
        stream = rig.stream()
        for _ in range(count):
            regime.prepare(rig, duration_ns)
            made.append(span())
    rig.settle()
    return made, stream


def _complete(found: Records) -> Records:
    """Return *found*.

    Raises:
        NotTestable: Records are missing: then nobody knows which belongs to which span.
    """
    if not found.complete:
        raise NotTestable(f"CUPTI's records are not complete: {found.note}")
    return found


def _short(found: Records) -> list[Execution]:
    """Return the kernels that are measured, in their order: the work around them is much longer."""
    return [one for one in found.executions if one.kind == "kernel" and one.end_ns - one.start_ns < QUEUED_NS // 2]


def _as_many(kernels: Sequence[Execution], stamps: Sequence[Stamp]) -> None:
    if len(kernels) != len(stamps):
        raise NotTestable(f"{len(stamps)} kernels left stamps, and CUPTI has {len(kernels)}")


def _observation(one: Beside, device: int, stream: int) -> Observation:
    """Return the span beside CUPTI's record, which is on the realtime axis like the span's own place."""
    true_ns = one.execution.end_ns - one.execution.start_ns
    record = one.record
    if record is None:
        missing = Missing("pending")
        return Observation(
            true_ns=true_ns, device_ns=missing, device_min_ns=missing, uncertainty_ns=missing, reason=missing.reason
        )
    start, end = record.device_start_ns, record.device_end_ns
    return Observation(
        true_ns=true_ns,
        device_ns=record.device_ns,
        device_min_ns=record.device_min_ns,
        uncertainty_ns=record.uncertainty_ns,
        gaps=record.launch_gaps_included,
        reason=record.device_ns.reason if isinstance(record.device_ns, Missing) else "",
        fault="anchor_fault" in record.quality,
        right_place=record.device == device and record.stream == stream,
        lead_ns=one.execution.start_ns - start if isinstance(start, int) else None,
        tail_ns=end - one.execution.end_ns if isinstance(end, int) else None,
    )


def _together(regime: Regime, found: dict[int, list[Beside]], judged: Sequence[Row], *, stamped: bool) -> Row:
    """Return one row of all durations, with the figures of each."""
    by_duration: dict[str, dict[str, Any]] = {}
    longer: list[int] = []
    for (duration_ns, beside), row in zip(found.items(), judged, strict=True):
        over = [one.execution.end_ns - one.execution.start_ns - one.stamp.true_ns for one in beside]
        longer += over
        by_duration[str(duration_ns)] = {
            "cupti_less_stamps_ns": _median(over) if stamped else None,
            "cupti_ns": row.values["true_ns"],
            "device_less_cupti_ns": row.values["bias_ns"],
            "excess_ns": row.values["excess_ns"],
            "share_inside": row.values["share_inside"],
        }
    spans = sum(row.spans for row in judged)
    inside = sum(round((row.values["share_inside"] or 0) * row.spans) for row in judged)
    exact = [row.values["bias_ns"] for row in judged if row.values["bias_ns"] is not None]
    values = {
        "cupti_less_stamps_ns": _median(longer) if stamped else None,
        "device_less_cupti_ns": _median(exact),
        "excess_ns": _median([row.values["excess_ns"] for row in judged if row.values["excess_ns"] is not None]),
        "placement_ns": max((row.values["placement_ns"] or 0 for row in judged), default=None),
        "by_duration": by_duration,
    }
    own = f"; to CUPTI kernels last {values['cupti_less_stamps_ns']:+,} ns longer than to themselves" if stamped else ""
    bias = f"; without a launch gap device_ns is {values['device_less_cupti_ns']:+,} ns over it" if exact else ""
    failed = [f"{row.duration_ns:,} ns: {row.text}" for row in judged if row.failed]
    verdict: Verdict = worst(row.verdict for row in judged)
    return Row(
        section=_SECTION,
        name=regime.name,
        verdict=verdict,
        text="; ".join(
            [f"{regime.words}, {inside} of {spans} spans hold CUPTI's time of their kernel{bias}{own}", *failed]
        ),
        sync=_SYNC,
        spans=spans,
        checks=tuple(check._replace(name=f"{check.name}_{row.duration_ns}") for row in judged for check in row.checks),
        values=values,
    )


def _median(values: Sequence[int]) -> int | None:
    return round(statistics.median(values)) if values else None


def _isolated(name: str, row: Callable[[], Row]) -> Row:
    try:
        return row()
    except Exception as error:  # noqa: BLE001 - one row less, and the others are told
        text = f"could not be run ({type(error).__name__}: {error})"
        return Row(section=_SECTION, name=name, verdict="error", text=text)
