"""The self-test on a fake device whose truth is known: it passes, and catches every clock that is made wrong."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from fake_rig import FakeRig
from opentelemetry.sdk.trace import TracerProvider, sampling
from opentelemetry.trace import set_tracer_provider
from rich.console import Console
from typer.testing import CliRunner

from gpu_timed import ConfigurationError, flush, run_selftest, selftest
from gpu_timed.cli import selftest as room
from gpu_timed.cli.main import app
from gpu_timed.errors import DeviceFault
from gpu_timed.measure import campaign, known
from gpu_timed.measure.campaign import Plan
from gpu_timed.measure.regimes import REGIMES
from gpu_timed.measure.rig import NotTestable
from gpu_timed.measure.session import Session
from gpu_timed.ports import NOT_GIVEN, Place
from gpu_timed.record import Missing
from gpu_timed.testing import FakeDevice, capture
from gpu_timed.trials import Check, Instrument, Row, SelfTest

DURATIONS = (5_000, 20_000, 1_000_000, 10_000_000)
PLAN = Plan(durations_ns=DURATIONS, most_spans=12, fewest_spans=6)
LIKE_A_GPU = {"launch_latency_ns": 6_000, "lateness_ns": 3_000, "drift_ppm": 3.5}
"""Microseconds to be reached and to be seen, and a clock that drifts: as an H200 was seen to be."""


def rows_of(fake: FakeDevice, plan: Plan = PLAN, **options: Any) -> list[Row]:
    """Take *fake* through *plan*."""
    session = Session(fake, fake.host, patience_s=0.05)
    try:
        return list(campaign.run(FakeRig(fake), session, Instrument(), plan=plan, **options))
    finally:
        session.close()


# -- as it should be --------------------------------------------------------------------------------------


def test_a_device_that_tells_the_truth_passes_every_row():
    """Every regime, policy and duration: all checks hold, and where no gap is included the error is nothing."""
    fake = FakeDevice(**LIKE_A_GPU)
    rows = rows_of(fake)
    assert {(row.name, row.sync, row.duration_ns) for row in rows} == {
        (regime.name, sync, duration) for regime in REGIMES for sync in ("boundary", "deferred") for duration in DURATIONS
    }
    assert [row.text for row in rows if row.verdict != "ok"] == []
    assert all(row.spans == PLAN.most_spans for row in rows)
    assert all(row.check("placement").value == 1.0 for row in rows)
    queued = [row for row in rows if row.name == "queued"]
    assert all(row.values["exact_spans"] == row.spans for row in queued)
    assert max(abs(row.values["bias_ns"]) for row in queued) <= 40  # 3.5 ppm of 10 ms
    assert fake.marks_in_use == 0


def test_the_figures_say_what_a_pair_reads_on_an_idle_stream():
    """Eager, the pair holds the 4 µs of launching; the graph's, 1 µs; both within the bounds, whose width is told."""
    rows = {(row.name, row.sync): row for row in rows_of(FakeDevice(**LIKE_A_GPU), Plan(durations_ns=(20_000,)))}
    assert rows["eager", "boundary"].values["excess_ns"] == 4_000
    assert rows["graph", "boundary"].values["excess_ns"] == 1_000
    assert rows["eager", "boundary"].values["bias_ns"] is None
    assert rows["eager", "boundary"].check("exact").verdict == "skipped"
    assert rows["busy_host", "deferred"].values["excess_ns"] == 400_000
    assert all(row.values["width_ns"] >= row.values["excess_ns"] for row in rows.values())


# -- made wrong -------------------------------------------------------------------------------------------


class LateEnd(FakeDevice):
    """Reaches every end mark 3 µs after the work."""

    def mark(self, place: Place, values: Any = NOT_GIVEN, since: Any = None) -> Any:
        if since is not None:
            with self._lock:
                self._put(self._stream((place.device, place.stream)), 3_000)
        return super().mark(place, values, since)


class Swapped(FakeDevice):
    """Takes the end for the start."""

    def elapsed_ns(self, start: Any, end: Any) -> int:
        return super().elapsed_ns(end, start)


class Fast(FakeDevice):
    """Counts 1 % too much."""

    gain = 1.01

    def elapsed_ns(self, start: Any, end: Any) -> int:
        return round(super().elapsed_ns(start, end) * self.gain)


class Slow(Fast):
    """Counts 1 % too little."""

    gain = 0.99


class Stale(FakeDevice):
    """Places by an anchor that is 200 µs out of date, and states what it always did."""

    moved_ns = 200_000

    def position(self, *args: Any) -> Any:
        found = super().position(*args)
        return found._replace(host_ns=found.host_ns + self.moved_ns)


class StaleEarly(Stale):
    """The same to the other side."""

    moved_ns = -200_000


class WrongDevice(FakeDevice):
    """Marks device 1, whatever device the work is on."""

    def locate(self, launch: Any = None) -> Any:
        found = super().locate(launch)
        return self._places.setdefault((1, found.stream), Place(self, 1, found.stream))


class WrongStream(FakeDevice):
    """Marks stream 7, whatever stream the work is on."""

    def locate(self, launch: Any = None) -> Any:
        found = super().locate(launch)
        return self._places.setdefault((found.device, 7), Place(self, found.device, 7))


class DroppedFlush(FakeDevice):
    """Never shows a mark as reached that nobody waited for: what was queued is not handed to the device."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._waited: set[int] = set()

    def is_done(self, mark: Any) -> bool:
        return id(mark) in self._waited and super().is_done(mark)

    def wait(self, mark: Any) -> None:
        self._waited.add(id(mark))
        super().wait(mark)

    def elapsed_ns(self, start: Any, end: Any) -> int:
        return self._stamp(end) - self._stamp(start)


LONG = 1_000_000
"""From here on one per cent is more than floor, uncertainty and launch gap together can hide."""
MUTANTS: list[tuple[type[FakeDevice], str, Callable[[Row], bool]]] = [
    (LateEnd, "exact", lambda row: row.name == "queued"),
    (Swapped, "measured", lambda row: True),
    (Fast, "interval", lambda row: row.duration_ns >= LONG and (row.name != "busy_host" or row.duration_ns > LONG)),
    (Fast, "exact", lambda row: row.name == "queued" and row.duration_ns >= LONG),
    (Slow, "interval", lambda row: row.duration_ns >= LONG and (row.name != "busy_host" or row.duration_ns > LONG)),
    (Slow, "exact", lambda row: row.name == "queued" and row.duration_ns >= LONG),
    (Stale, "placement", lambda row: True),
    (StaleEarly, "placement", lambda row: True),
    (WrongDevice, "place", lambda row: True),
    (WrongStream, "place", lambda row: True),
    (WrongStream, "interval", lambda row: row.name in ("eager", "graph", "side_stream", "after_idle")),
    (DroppedFlush, "measured", lambda row: row.sync == "deferred"),
]


@pytest.mark.parametrize(("mutant", "check", "must_fail"), MUTANTS, ids=[f"{m.__name__}-{c}" for m, c, _ in MUTANTS])
def test_a_clock_that_is_made_wrong_fails_in_the_rows_that_it_must(mutant, check, must_fail):
    """Each check fails in exactly the rows in which the fault shows, and by the check that is about it."""
    rows = rows_of(mutant(**LIKE_A_GPU))
    failed = {(row.name, row.sync, row.duration_ns) for row in rows if row.check(check).verdict == "fail"}
    expected = {(row.name, row.sync, row.duration_ns) for row in rows if must_fail(row)}
    assert failed == expected
    assert all(row.failed for row in rows if must_fail(row))
    found = SelfTest("0", {}, tuple(rows))
    assert found.exit_code == 1
    assert found.verdict.startswith("Failed")
