"""The self-test on a fake device whose truth is known: it passes, and catches every clock that is made wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import subprocess
import sys
import threading
import types
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
from gpu_timed.ports import NOT_GIVEN, Bench, Place
from gpu_timed.record import Missing
from gpu_timed.testing import FakeDevice, capture
from gpu_timed.trials import Instrument, Row, SelfTest

DURATIONS = (5_000, 20_000, 1_000_000, 10_000_000)
PLAN = Plan(durations_ns=DURATIONS, most_spans=12, fewest_spans=6)
LIKE_A_GPU = {"launch_latency_ns": 6_000, "lateness_ns": 3_000, "drift_ppm": 3.5}
"""Microseconds to be reached and to be seen, and a clock that drifts: as an H200 was seen to be."""


def rows_of(fake: FakeDevice, plan: Plan = PLAN, **options: Any) -> list[Row]:
    """Take *fake* through *plan*; without the rows of all durations together."""
    return [row for row in all_rows_of(fake, plan, **options) if row.duration_ns is not None]


def all_rows_of(fake: FakeDevice, plan: Plan = PLAN, **options: Any) -> list[Row]:
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
        (regime.name, sync, duration)
        for regime in REGIMES
        for sync in ("boundary", "deferred")
        for duration in DURATIONS
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
    assert rows["busy_host", "deferred"].values["excess_ns"] == pytest.approx(400_000, abs=2)  # 3.5 ppm
    assert all(row.values["width_ns"] >= row.values["excess_ns"] for row in rows.values())


def test_all_durations_of_a_regime_are_judged_together_as_well():
    """After the durations of a regime and policy comes their sum; what was too short for the timer is not in it."""
    fake = FakeDevice(**LIKE_A_GPU)
    rows = all_rows_of(fake)
    together = [row for row in rows if row.duration_ns is None]
    assert [(row.name, row.sync) for row in together] == [
        (r.name, s) for r in REGIMES for s in ("boundary", "deferred")
    ]
    assert rows[len(DURATIONS)] is together[0]
    assert {(row.verdict, row.spans) for row in together} == {("ok", len(DURATIONS) * PLAN.most_spans)}
    session = Session(fake, fake.host)
    instrument = known.instrument(tick_ns=1_000, turnaround_ns=0, cycles=False)
    rows = list(campaign.run(FakeRig(fake), session, instrument, plan=PLAN))
    session.close()
    assert {row.spans for row in rows if row.duration_ns is None} == {3 * PLAN.most_spans}


# -- made wrong -------------------------------------------------------------------------------------------


class LateEnd(FakeDevice):
    """Reaches every end mark 4 µs after the work."""

    def mark(self, place: Place, values: Any = NOT_GIVEN, since: Any = None) -> Any:
        if since is not None:
            with self._lock:
                self._put(self._stream((place.device, place.stream)), 4_000)
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
"""From here on one per cent is more than floor and uncertainty can hide."""
LONGEST = DURATIONS[-1]
"""And here more than the launch gap of a busy host as well."""


IDLE = ("eager", "graph", "side_stream", "after_idle")


def everywhere(_: Row) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A clock that is made wrong, the checks of which one must fail, and the rows in which it must, and may."""

    clock: type[FakeDevice]
    checks: set[str]
    must: Callable[[Row], bool]
    may: Callable[[Row], bool]


def _queued(row: Row) -> bool:
    return row.name == "queued"


def _deferred(row: Row) -> bool:
    return row.sync == "deferred"


MUTATIONS = [
    Mutation(LateEnd, {"exact"}, _queued, _queued),
    Mutation(Swapped, {"measured"}, everywhere, everywhere),
    # Too fast a device contradicts the host, whose clock then states wide uncertainties for a while: elsewhere too.
    Mutation(Fast, {"interval"}, lambda row: row.duration_ns == LONGEST and row.name in IDLE, everywhere),
    Mutation(
        Fast, {"order"}, lambda row: row.duration_ns == LONGEST and row.name in IDLE and not _deferred(row), everywhere
    ),
    Mutation(
        Slow,
        {"interval"},
        lambda row: row.duration_ns == LONGEST and row.name != "busy_host",
        lambda row: row.duration_ns >= LONG,
    ),
    Mutation(
        Slow, {"exact"}, lambda row: _queued(row) and row.duration_ns >= LONG, lambda row: row.duration_ns >= LONG
    ),
    Mutation(Stale, {"placement"}, lambda row: row.name != "busy_host", everywhere),
    Mutation(StaleEarly, {"placement"}, everywhere, everywhere),
    Mutation(WrongDevice, {"place"}, everywhere, everywhere),
    Mutation(WrongStream, {"place"}, everywhere, everywhere),
    Mutation(WrongStream, {"interval"}, lambda row: row.duration_ns >= LONG, everywhere),
    Mutation(DroppedFlush, {"measured"}, _deferred, _deferred),
]


@pytest.mark.parametrize(
    "mutation", MUTATIONS, ids=lambda held: f"{held.clock.__name__}-{'/'.join(sorted(held.checks))}"
)
def test_a_clock_that_is_made_wrong_fails_in_the_rows_that_it_must(mutation):
    """Each fault is caught by the check that is about it, in every row in which it shows, and in no other."""
    rows = rows_of(mutation.clock(**LIKE_A_GPU))
    caught = {where(row) for row in rows if any(row.check(name).verdict == "fail" for name in mutation.checks)}
    assert {where(row) for row in rows if mutation.must(row)} - caught == set()
    assert {where(row) for row in rows if row.failed and not mutation.may(row)} == set()
    found = SelfTest("0", {}, tuple(rows))
    assert found.exit_code == 1
    assert found.verdict.startswith("Failed")


def where(row: Row) -> tuple[str, str | None, int | None]:
    """Name a row."""
    return row.name, row.sync, row.duration_ns


# -- what goes wrong besides ------------------------------------------------------------------------------


class BrokenGraphs(FakeRig):
    """Cannot capture."""

    def replay(self, duration_ns: int) -> Callable[[], None]:
        raise ValueError("no graphs here")


def test_a_regime_that_cannot_be_run_is_a_row_and_the_others_are_told():
    """An error stands in its own rows, with its type and words, and fails them alone."""
    fake = FakeDevice(**LIKE_A_GPU)
    session = Session(fake, fake.host)
    rows = list(campaign.run(BrokenGraphs(fake), session, Instrument(), plan=PLAN))
    session.close()
    assert {row.verdict for row in rows if row.name == "graph" and row.duration_ns is None} == {"skipped"}
    assert {row.name for row in rows if row.failed} == {"graph"}
    (text,) = {row.text for row in rows if row.failed}
    assert text == "could not be run (ValueError: no graphs here)"
    assert {row.verdict for row in rows if row.failed} == {"error"}
    assert SelfTest("0", {}, tuple(rows)).exit_code == 1


class Forgetful(FakeRig):
    """Loses a stamp now and then."""

    def stamps(self) -> Any:
        return super().stamps()[1:]


def test_kernels_that_leave_no_stamps_are_an_error_and_no_truth():
    """A span is never put beside the stamp of another kernel."""
    fake = FakeDevice(**LIKE_A_GPU)
    session = Session(fake, fake.host)
    with pytest.raises(NotTestable, match="20 kernels left 19 stamps"):
        campaign.observe(Forgetful(fake), session, REGIMES[0], "boundary", 5_000, plan=PLAN)
    session.close()


def test_a_device_in_error_is_told_and_ends():
    """Every row of a broken device is an error row; nothing is raised."""
    fake = FakeDevice(**LIKE_A_GPU)
    fake.break_down()
    rows = rows_of(fake, Plan(durations_ns=(5_000,)))
    assert {row.verdict for row in rows} == {"error"}


def test_kernels_too_short_for_the_timer_are_not_judged():
    """Below twenty steps of the timer a row says so, shows its figures, and neither passes nor fails."""
    fake = LateEnd(**LIKE_A_GPU)
    session = Session(fake, fake.host)
    instrument = known.instrument(tick_ns=90, turnaround_ns=0, cycles=False)
    plan = Plan(regimes=[r for r in REGIMES if r.name == "queued"], durations_ns=(1_000, 20_000), most_spans=12)
    short, long = list(campaign.run(FakeRig(fake), session, instrument, plan=plan))[:2]
    session.close()
    assert (short.verdict, long.verdict) == ("skipped", "fail")
    assert "20 steps" in short.text
    assert short.values["bias_ns"] == 4_000
    assert known.instrument(tick_ns=1_000, turnaround_ns=0, cycles=True).least_ns == 0
    assert known.instrument(tick_ns=None, turnaround_ns=0, cycles=False).doubt == known.CALIBRATED


def test_time_that_is_up_leaves_every_row_a_few_spans():
    """With no time at all every row has the fewest spans, and progress is told row by row."""
    told: list[tuple[int, int, str]] = []
    rows = rows_of(FakeDevice(**LIKE_A_GPU), until_s=0.0, progress=lambda *step: told.append(step))
    assert {row.spans for row in rows} == {PLAN.fewest_spans}
    assert [done for done, _, _ in told] == list(range(len(rows) + 1))
    assert {total for _, total, _ in told} == {len(rows)}
    assert told[0][2] == "eager, boundary"


def test_nothing_goes_to_opentelemetry_and_no_sampler_has_a_say(exporter, device):
    """The spans of a self-test are in no trace and in no capture, and a sampler that takes none does not matter."""
    with capture() as records:
        rows = rows_of(FakeDevice(**LIKE_A_GPU), Plan(durations_ns=(5_000,), most_spans=6))
    assert {row.verdict for row in rows} == {"ok"}
    flush(5)
    assert records == []
    assert exporter.get_finished_spans() == ()


def test_a_sampler_that_takes_nothing_does_not_matter():
    """All spans are measured all the same."""
    set_tracer_provider(TracerProvider(sampler=sampling.ALWAYS_OFF, shutdown_on_exit=False))
    rows = rows_of(FakeDevice(**LIKE_A_GPU), Plan(durations_ns=(5_000,), most_spans=6))
    assert {row.verdict for row in rows} == {"ok"}


# -- how good the truth is --------------------------------------------------------------------------------


def test_the_first_kernel_that_proves_itself_is_taken():
    """What cannot be made, and what lies about its duration, is left out with its reason."""
    fake = FakeDevice(**LIKE_A_GPU)

    class Liar(FakeRig):
        def stamps(self) -> Any:
            return [stamp._replace(true_ns=stamp.true_ns // 2) for stamp in super().stamps()]

    def missing() -> Any:
        raise ImportError("No module named 'triton'")

    candidates = [("Triton", missing), ("Liar", lambda: Liar), ("Fake", lambda: FakeRig), ("Never", missing)]
    found = known.find(candidates, lambda kind: kind(fake))
    assert found.kernel == "Fake"
    assert isinstance(found.rig, FakeRig)
    assert found.refused == {
        "Triton": "ImportError: No module named 'triton'",
        "Liar": "NotTestable: a kernel of 1,000,000 ns says that it ran for 500,002 ns",
    }
    with pytest.raises(NotTestable, match="Triton: ImportError"):
        known.find(candidates[:2], lambda kind: kind(fake))


def test_the_turnaround_is_what_lies_between_kernels_in_a_row():
    """Kernels queued one behind the other lie as far apart as the device needs to go on."""
    fake = FakeDevice(**LIKE_A_GPU)

    class Slow(FakeRig):
        def _queue(self, duration_ns: int, launch_ns: int) -> None:
            super()._queue(duration_ns, launch_ns)
            self.fake.launch(700)

    assert known.turnaround(FakeRig(fake)) == 0
    assert known.turnaround(Slow(fake)) == 700


def test_the_smallest_step_of_a_timer():
    """Readings of the same moment are no step."""
    assert known.smallest_step([5, 5, 37, 37, 101]) == 32
    assert known.smallest_step([5, 5]) is None


def test_figures_are_told_and_what_cannot_be_measured_is_an_error_of_its_own():
    """A timer that cannot be read leaves the rest to be measured."""
    fake = FakeDevice(**LIKE_A_GPU)
    rows, instrument = selftest.figure_rows(FakeRig(fake))
    assert [(row.name, row.verdict) for row in rows] == [("timer", "info"), ("turnaround", "info")]
    assert rows[0].values == {"resolution_ns": 1, "least_ns": 20, "cycles_per_ns": 1.98}
    assert instrument == Instrument(tick_ns=1, turnaround_ns=0, least_ns=0)

    class NoTimer(FakeRig):
        def measure_timer(self) -> int:
            raise NotTestable("it stands still")

    rows, _ = selftest.figure_rows(NoTimer(fake))
    assert [(row.name, row.verdict) for row in rows] == [("timer", "error"), ("turnaround", "info")]
    assert rows[0].text == "could not be run: it stands still"


# -- what is shown ----------------------------------------------------------------------------------------


def shown(found: SelfTest, width: int = 140) -> str:
    """Return what the command prints."""
    console = Console(file=io.StringIO(), width=width)
    room.show(console, found)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_the_table_has_a_line_for_every_regime_and_shows_what_failed():
    """Passing, no row is called failing; with a late end mark the rows behind queued work are, and say by how much."""
    good = shown(
        SelfTest("0", {"card": "Fake GPU", "date": "2026-01-01"}, tuple(all_rows_of(FakeDevice(**LIKE_A_GPU))))
    )
    for regime in REGIMES:
        assert regime.name in good
    assert "Fake GPU" in good
    assert "Passed: 70 rows" in good
    assert "fail" not in good
    bad = shown(SelfTest("0", {}, tuple(all_rows_of(LateEnd(**LIKE_A_GPU)))))
    assert "Failed: 8 of 70" in bad
    assert "queued, deferred, 10 ms: spans without a launch gap are off by +4,000 ns" in bad
    assert len(re.findall(r" exact\b", bad)) == 8
    assert re.findall(r"\+4\b(?!,)", bad) != []


def test_progress_is_drawn_and_leaves_no_thread():
    """Row by row, on a terminal; no thread of its own draws while something is measured."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    before = threading.active_count()
    with room.watched(console) as progress:
        progress(3, 12, "queued, deferred")
        assert threading.active_count() == before
    text = console.file.getvalue()
    assert "queued, deferred" in text
    assert "25%" in text


def test_a_terminal_without_the_characters_shows_the_table_all_the_same():
    """In ASCII the units are written out, and nothing is raised."""
    rows = tuple(all_rows_of(FakeDevice(**LIKE_A_GPU), Plan(durations_ns=(5_000,), most_spans=6)))
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True), width=80)
    room.show(console, SelfTest("0", {}, rows))
    text = raw.getvalue().decode()
    assert "5 us" in text
    assert "Passed: 28 rows" in text


def test_json_has_the_documented_shape():
    """Every row has the documented members, in ASCII, and the numbers of the rows themselves."""
    rows = tuple(all_rows_of(FakeDevice(**LIKE_A_GPU), Plan(durations_ns=(5_000,), most_spans=6)))
    found = SelfTest("1.2", {"card": "µ"}, rows)
    text = found.to_json()
    told = json.loads(text)
    assert text.isascii()
    assert list(told) == ["schema", "gpu_timed", "verdict", "environment", "rows"]
    assert told["verdict"] == {"level": "ok", "text": found.verdict, "exit_code": 0}
    assert set(told["rows"][0]) == {
        "section",
        "name",
        "sync",
        "duration_ns",
        "verdict",
        "text",
        "spans",
        "checks",
        "values",
    }
    assert [check["name"] for check in told["rows"][0]["checks"]] == [
        "measured",
        "place",
        "interval",
        "exact",
        "placement",
        "order",
    ]
    assert told["rows"][0]["values"] == dict(rows[0].values)


def test_an_error_counts_as_failing_and_skipped_does_not():
    """The exit code and the sentence follow the rows."""
    skipped = Row(section="device", name="none", verdict="skipped", text="there is none")
    error = Row(section="device", name="failed", verdict="error", text="could not be run: x")
    assert SelfTest("0", {}, (skipped,)).exit_code == 0
    assert SelfTest("0", {}, (skipped,)).verdict == "Nothing of a device was tested: there is none"
    assert SelfTest("0", {}, (skipped, error)).exit_code == 1
    assert SelfTest("0", {}, (skipped, error)).verdict.startswith("Failed: 1 of 1")
    assert "could not be run: x" in shown(SelfTest("0", {}, (error,)))


# -- the command, without a GPU ---------------------------------------------------------------------------


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest.cuda_driver, "device_present", lambda: False)


@pytest.mark.usefixtures("_no_gpu")
def test_without_a_gpu_it_says_so_and_measures_the_host():
    """The host's rows, one that says why there are no others, and exit code 0."""
    found = run_selftest(quick=True)
    assert {row.section for row in found.rows} == {"host", "device"}
    assert [row.name for row in found.rows] == ["clock", "span_cost", "span_cost", "none"]
    assert found.exit_code == 0
    assert "no NVIDIA GPU" in found.verdict
    costs = [row.values["host_ns"] for row in found.rows if row.name == "span_cost"]
    assert all(0 < cost < 1_000_000 for cost in costs)
    assert found.environment["card"] is None
    assert found.environment["opentelemetry-sdk"]


@pytest.mark.usefixtures("_no_gpu")
def test_the_command_without_a_gpu():
    """JSON on stdout and nothing else; a table without it; exit code 0."""
    done = CliRunner().invoke(app, ["selftest", "--json", "--quick"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["verdict"]["exit_code"] == 0
    done = CliRunner().invoke(app, ["selftest"])
    assert done.exit_code == 0
    assert "no NVIDIA GPU" in done.stdout


def test_the_command_exits_with_one_where_a_row_failed(monkeypatch):
    """The exit code is that of the rows."""
    bad = SelfTest("0", {}, (Row(section="device", name="x", verdict="fail", text="outside"),))
    monkeypatch.setattr(selftest, "run_selftest", lambda **_: bad)
    done = CliRunner().invoke(app, ["selftest"])
    assert done.exit_code == 1
    assert "outside" in done.stdout


@pytest.mark.parametrize("seconds", ["0", "-1", "601", "nan", "soon"])
def test_seconds_that_cannot_be_used_are_a_usage_error(seconds):
    """Exit code 2, and nothing is measured."""
    done = CliRunner().invoke(app, ["selftest", "--seconds", seconds])
    assert done.exit_code == 2
    assert "Verdict" not in done.stdout  # click before 8.2 puts stderr there as well
    if seconds != "soon":
        with pytest.raises(ConfigurationError, match="greater than 0 and at most 600"):
            run_selftest(seconds=float(seconds))


def test_a_machine_whose_gpu_cannot_be_tested_fails(monkeypatch):
    """Where there is a GPU and no way to test it, the test has not passed: the reason is an error row."""
    monkeypatch.setattr(selftest.cuda_driver, "device_present", lambda: True)
    monkeypatch.setattr(selftest.importlib, "import_module", _no_torch(selftest.importlib.import_module))
    found = run_selftest(quick=True)
    (row,) = [row for row in found.rows if row.section == "device"]
    assert row.verdict == "error"
    assert "need torch" in row.text
    assert found.exit_code == 1


class FakeLeaves:
    """Stands for the modules that know a runtime: a rig on a fake device, and one kernel that works."""

    def __init__(self, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake = fake
        self.why_not = ""
        self.kernels = {"Triton": None, "CuPy": FakeRig}
        monkeypatch.setattr(selftest.cuda_driver, "device_present", lambda: True)
        monkeypatch.setattr(selftest.cuda_driver, "load", lambda: None)
        monkeypatch.setattr(selftest.cuda_devices, "bench", self.bench)
        monkeypatch.setattr(selftest, "_LEAVES", {name: (name, "Kernel") for name in self.kernels})
        monkeypatch.setattr(selftest.importlib, "import_module", self.load)
        monkeypatch.setattr(selftest, "TorchLocator", lambda places: fake)
        monkeypatch.setattr(selftest, "HostClock", lambda: fake.host)
        monkeypatch.setattr(campaign, "QUICK", Plan(durations_ns=(5_000, 20_000), most_spans=6))

    @contextlib.contextmanager
    def bench(self, library: Any, index: int) -> Any:
        yield Bench(self.fake.locate(), self.fake.host.now_ns, lambda: self.fake.launch(100_000))

    def load(self, name: str) -> Any:
        if name.endswith("torch_rig"):
            return types.SimpleNamespace(
                usable=lambda: self.why_not, synchronized=lambda: 0, TorchRig=lambda kernel: kernel(self.fake)
            )
        if name == "pynvml":
            raise ImportError(f"No module named {name!r}")
        kernel = self.kernels[name.rpartition(".")[2]]
        if kernel is None:
            raise ImportError(f"No module named {name!r}")
        return types.SimpleNamespace(Kernel=lambda: kernel)


def test_on_a_device_every_part_is_measured_and_told(monkeypatch):
    """Host, floor, timer, turnaround, cost and every regime, in this order; the kernel that was taken is named."""
    FakeLeaves(FakeDevice(**LIKE_A_GPU), monkeypatch)
    found = run_selftest(quick=True)
    assert [row.text for row in found.rows if row.failed] == []
    names = [row.name for row in found.rows if row.section == "device"]
    assert names == ["floor", "timer", "turnaround", "span_cost", "span_cost"]
    floor = next(row for row in found.rows if row.name == "floor")
    assert (floor.values["floor_queued_ns"], floor.values["latency_ns"]) == (0, 6_000)
    assert len([row for row in found.rows if row.section == "regime"]) == 14 * 3
    assert found.environment["kernel"] == "CuPy"
    assert list(found.environment["kernels_refused"]) == ["Triton"]
    assert list(found.environment["vitals"]) == ["start", "end"]
    for state in found.environment["vitals"].values():
        assert state["sm_clock_mhz"] is state["throttle"] is None
        assert "not installed" in state["absent"]
        assert state["host_load"] >= 0
        assert state["cpus_allowed"] > 0
    assert list(found.environment["regimes"]) == [regime.name for regime in REGIMES]
    assert found.exit_code == 0
    json.loads(found.to_json())
    assert "Passed: 42 rows" in shown(found)


@pytest.mark.parametrize(
    ("floor", "allowed", "says"),
    [
        (400, 400, "its floor of 400 ns is allowed for"),
        (1_301, 1_300, "its floor of 1,301 ns is higher than that of an H200: 1,300 ns are allowed for"),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_spans_are_held_against_the_floor_of_this_device(monkeypatch, floor, allowed, says, known):
    """What an empty pair reads here is what a pair may add, if it is no more than on an H200; the row says so.

    Where the clock could not measure it by itself, the pairs of the row itself tell it.
    """
    if not known:
        monkeypatch.setattr(FakeDevice, "floor_ns", lambda self, place: Missing("not_measured"))
    FakeLeaves(FakeDevice(floor_ns=floor, **LIKE_A_GPU), monkeypatch)
    monkeypatch.setattr(campaign, "QUICK", Plan(regimes=(), durations_ns=()))
    made = []
    run = campaign.run
    monkeypatch.setattr(
        campaign, "run", lambda rig, session, held, **options: made.append(held) or run(rig, session, held, **options)
    )
    found = run_selftest(quick=True)
    row = next(row for row in found.rows if row.name == "floor")
    assert row.values["floor_ns"] == row.values["floor_queued_ns"] == floor
    assert row.text.endswith(says)
    assert [instrument.floor_ns for instrument in made] == [allowed]


def test_a_floor_that_is_not_known_is_taken_to_be_that_of_an_h200():
    """And the words say so."""
    assert selftest._floor_words(None) == "its floor could not be measured: 1,300 ns are allowed for"


def test_a_floor_that_cannot_be_measured_leaves_the_rest(monkeypatch):
    """One error row, with the driver's word; regimes are tested all the same."""
    leaves = FakeLeaves(FakeDevice(**LIKE_A_GPU), monkeypatch)

    def refused(library: Any, index: int) -> Any:
        raise DeviceFault("CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(selftest.cuda_devices, "bench", refused)
    found = run_selftest(quick=True)
    assert [row.text for row in found.rows if row.failed] == ["could not be run: DeviceFault: CUDA_ERROR_OUT_OF_MEMORY"]
    assert len([row for row in found.rows if row.section == "regime"]) == 14 * 3
    assert found.exit_code == 1
    assert leaves.fake.marks_in_use == 0


def test_no_kernel_that_works_is_told_with_every_reason(monkeypatch):
    """Without a truth nothing is judged, and the test has not passed."""
    leaves = FakeLeaves(FakeDevice(**LIKE_A_GPU), monkeypatch)
    leaves.kernels["CuPy"] = None
    found = run_selftest(quick=True)
    (row,) = [row for row in found.rows if row.failed]
    assert "Triton: ImportError" in row.text
    assert "CuPy: ImportError" in row.text
    leaves.why_not = "torch is built without CUDA"
    (row,) = [row for row in run_selftest(quick=True).rows if row.failed]
    assert row.text == "could not be run: torch is built without CUDA"


def _no_torch(real: Any) -> Any:
    def load(name: str) -> Any:
        if "torch" in name:
            raise ImportError("No module named 'torch'")
        return real(name)

    return load


def test_looking_at_the_command_loads_no_runtime():
    """The self-test's door and its judges load neither torch nor triton, numba or cupy."""
    script = (
        "import sys, gpu_timed.selftest, gpu_timed.cli.selftest\n"
        "print([name for name in ('torch', 'triton', 'numba', 'cupy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
