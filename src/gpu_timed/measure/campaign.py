"""Takes a device through every regime, policy and duration, within a given time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from gpu_timed.analysis.judging import judge, pool
from gpu_timed.analysis.placing import Anchor, Bracket, anchor
from gpu_timed.measure.regimes import DURATIONS_NS, POLICIES, QUICK_DURATIONS_NS, REGIMES, Regime
from gpu_timed.measure.rig import NotTestable, Rig
from gpu_timed.measure.session import Made, Session
from gpu_timed.record import Missing, Record
from gpu_timed.settings import SyncPolicy
from gpu_timed.trials import Instrument, Observation, Row, Stamp

_CHUNK: Final = 16
"""Spans that are made before their stamps are read: few enough for the launch queue, with work in front of each."""
_CHUNK_S: Final = 0.1
_ANCHORS: Final = 8
_ANCHOR_NS: Final = 1_000

Progress = Callable[[int, int, str], None]
"""Told how many rows are done, of how many, and what comes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to test, and how much of it."""

    regimes: Sequence[Regime] = REGIMES
    policies: Sequence[SyncPolicy] = POLICIES
    durations_ns: Sequence[int] = DURATIONS_NS
    most_spans: int = 200
    """Spans of a row, if there is time."""
    fewest_spans: int = 6
    """Spans of a row, whether there is time or not."""


FULL: Final = Plan()
QUICK: Final = Plan(durations_ns=QUICK_DURATIONS_NS, most_spans=50)


def run(
    rig: Rig,
    session: Session,
    instrument: Instrument,
    *,
    plan: Plan = FULL,
    until_s: float = float("inf"),
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Yield the row of every regime, policy and duration, and one of all durations. What fails is a row, not raised.

    Args:
        rig: The device.
        session: What makes the spans.
        instrument: How good the truth is.
        plan: What to test.
        until_s: When to be done, by ``time.monotonic()``; what is left is shared among the rows to come.
        progress: Told before each row.
    """
    arms: list[tuple[Regime, SyncPolicy]] = [(regime, sync) for regime in plan.regimes for sync in plan.policies]
    total, done = len(arms) * len(plan.durations_ns), 0
    for regime, sync in arms:
        together: list[Observation] = []
        for duration_ns in plan.durations_ns:
            if progress is not None:
                progress(done, total, f"{regime.name}, {sync}")
            now_s = time.monotonic()
            share_s = max(0.0, until_s - now_s) / (total - done)
            done += 1
            try:
                spans = observe(rig, session, regime, sync, duration_ns, plan=plan, until_s=now_s + share_s)
                row = judge(regime.name, sync, duration_ns, spans, instrument)
            except Exception as error:  # noqa: BLE001 - one row less, and the others are told
                yield _failed(regime, sync, duration_ns, error)
            else:
                together += spans if row.checks else []
                yield row
        yield pool(regime.name, sync, together, instrument)
    if progress is not None:
        progress(done, total, "")


def observe(
    rig: Rig,
    session: Session,
    regime: Regime,
    sync: SyncPolicy,
    duration_ns: int,
    *,
    plan: Plan = FULL,
    until_s: float = float("inf"),
) -> list[Observation]:
    """Make spans of one kernel each in *regime*, and return each beside the truth.

    Raises:
        NotTestable: Kernels were launched and left no stamps.
    """
    site = session.site(f"gpu_timed.selftest.{regime.name}", sync)
    work = regime.work(rig, duration_ns)
    _warm_up(rig, regime, work)
    found: list[Observation] = []
    while len(found) < plan.most_spans:
        chunk = _Chunk(rig, session, regime, duration_ns)
        chunk.anchor()
        wanted = min(_CHUNK, plan.most_spans - len(found))
        chunk.make(lambda: session.measure(site, work), wanted, plan.fewest_spans, until_s)
        new = chunk.observations()
        found += new
        late = time.monotonic() >= until_s and len(found) >= plan.fewest_spans
        if late or all(span.reason == "pending" for span in new):
            break
    return found


class _Chunk:
    """Some spans between two looks at their stamps."""

    def __init__(self, rig: Rig, session: Session, regime: Regime, duration_ns: int) -> None:
        self._rig = rig
        self._session = session
        self._regime = regime
        self._duration_ns = duration_ns
        self._around: list[tuple[int, int]] = []
        self._made: list[Made] = []
        self._stream = 0

    def anchor(self) -> None:
        """Launch kernels between two looks at the host's clock, on an idle device."""
        rig, now_ns = self._rig, self._session.host.now_ns
        launch = _quickest(rig)
        for _ in range(_ANCHORS):
            rig.settle()
            before = now_ns()
            launch()
            rig.settle()
            self._around.append((before, now_ns()))

    def make(self, span: Callable[[], Made], wanted: int, fewest: int, until_s: float) -> None:
        """Make spans, until there are as many as *wanted* or time is up; a few in any case."""
        rig, regime = self._rig, self._regime
        stop_s = min(until_s, time.monotonic() + _CHUNK_S)
        with contextlib.ExitStack() as stack:
            if regime.side:
                stack.enter_context(rig.on_side_stream())
            if regime.busy_host:
                stack.enter_context(rig.busy_host())
            self._stream = rig.stream()
            for count in range(wanted):
                if count >= fewest and time.monotonic() >= stop_s:
                    break
                regime.prepare(rig, self._duration_ns)
                self._made.append(span())
        rig.settle()

    def observations(self) -> list[Observation]:
        """Return each span beside the truth."""
        rig, session = self._rig, self._session
        records = session.records(self._made)
        stamps = list(rig.stamps())
        if len(stamps) != len(self._around) + len(self._made):
            raise NotTestable(f"{len(self._around) + len(self._made)} kernels left {len(stamps)} stamps")
        anchors, kernels = stamps[: len(self._around)], stamps[len(self._around) :]
        placed = anchor(
            Bracket(before, stamp.begin_ns, stamp.end_ns, after)
            for (before, after), stamp in zip(self._around, anchors, strict=True)
            if stamp.begin_ns is not None and stamp.end_ns is not None
        )
        return [
            self._beside(made, record, stamp, placed)
            for made, record, stamp in zip(self._made, records, kernels, strict=True)
        ]

    def _beside(self, made: Made, record: Record | None, stamp: Stamp, placed: Anchor | None) -> Observation:
        if record is None:
            missing = Missing("pending" if made.span is not None else "internal_fault")
            return Observation(
                true_ns=stamp.true_ns,
                device_ns=missing,
                device_min_ns=missing,
                uncertainty_ns=missing,
                reason=missing.reason,
            )
        lead = tail = None
        to_unix = self._session.host.to_unix
        if placed is not None and stamp.begin_ns is not None and stamp.end_ns is not None:
            if isinstance(record.device_start_ns, int):
                lead = to_unix(stamp.begin_ns + placed.offset_ns) - record.device_start_ns
            if isinstance(record.device_end_ns, int):
                tail = record.device_end_ns - to_unix(stamp.end_ns + placed.offset_ns)
        inside = [value for value in (record.launch_ns, record.sync_ns) if isinstance(value, int)]
        return Observation(
            true_ns=stamp.true_ns,
            device_ns=record.device_ns,
            device_min_ns=record.device_min_ns,
            uncertainty_ns=record.uncertainty_ns,
            gaps=record.launch_gaps_included,
            reason=record.device_ns.reason if isinstance(record.device_ns, Missing) else "",
            fault="anchor_fault" in record.quality,
            right_place=record.device == self._rig.device and record.stream == self._stream,
            lead_ns=lead,
            tail_ns=tail,
            anchor_ns=placed.half_ns if placed is not None else 0,
            host_ns=made.ended_ns - made.began_ns - sum(inside),
        )


def _failed(regime: Regime, sync: SyncPolicy, duration_ns: int, error: Exception) -> Row:
    return Row(
        section="regime",
        name=regime.name,
        verdict="error",
        text=f"could not be run ({type(error).__name__}: {error})",
        sync=sync,
        duration_ns=duration_ns,
    )


def _quickest(rig: Rig) -> Callable[[], None]:
    """Return the launch of a short kernel that takes the host least: a graph's, where there can be one."""
    try:
        return rig.replay(_ANCHOR_NS)
    except Exception:  # noqa: BLE001 - the row about graphs says why
        return lambda: rig.launch(_ANCHOR_NS)


def _warm_up(rig: Rig, regime: Regime, work: Callable[[], None]) -> None:
    """Load and compile whatever the first calls would, and forget their stamps."""
    with rig.on_side_stream() if regime.side else contextlib.nullcontext():
        for _ in range(2):
            work()
        rig.occupy(_ANCHOR_NS)
        rig.occupy_other(_ANCHOR_NS)
        _quickest(rig)()
        rig.settle()
    rig.stamps()
