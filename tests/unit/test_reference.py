"""The self-test's second truth: kernel records, on a fake device whose records are made up."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from fake_rig import FakeRig

from gpu_timed import selftest
from gpu_timed.clocks import cupti_activity
from gpu_timed.clocks.cupti_activity import RecordsUnavailable
from gpu_timed.clocks.cupti_records import Execution, Records
from gpu_timed.measure import reference
from gpu_timed.measure.regimes import REGIMES
from gpu_timed.measure.session import Session
from gpu_timed.testing import FakeDevice
from gpu_timed.trials import Row

LIKE_A_GPU = {"launch_latency_ns": 6_000, "lateness_ns": 3_000}


class Recorded(FakeDevice):
    """Writes down what it ran; *edge_ns* longer at both ends together than the kernels say."""

    def __init__(self, edge_ns: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.edge_ns = edge_ns
        self.ran: list[Execution] = []

    def launch(self, duration_ns: int) -> None:
        stream = self._stream()
        begin = max(self.host_clock.now_ns() + self.launch_latency_ns, stream.ready_at)
        super().launch(duration_ns)
        start = self.host.to_unix(begin)
        end = start + duration_ns + self.edge_ns
        self.ran.append(Execution(start, end, "kernel", "spin", 0, 1, self._where()[1], len(self.ran), 0, 0))


class Source:
    """Hands over what the device wrote down."""

    def __init__(self, device: Recorded) -> None:
        self.device = device
        self.calls: list[str] = []
        self.refused: Exception | None = None
        self.lack: dict[str, int] = {}
        self.lose = 0

    def start(self) -> None:
        self.calls.append("start")
        if self.refused is not None:
            raise self.refused

    def take(self) -> Records:
        ran, self.device.ran = self.device.ran, []
        return Records(executions=tuple(sorted(ran))[: len(ran) - self.lose], **self.lack)

    def stop(self) -> Records:
        self.calls.append("stop")
        return Records(executions=())


def rows_of(device: Recorded, source: Source | None = None, **options: Any) -> list[Row]:
    session = Session(device, device.host, patience_s=0.05)
    try:
        return list(reference.rows(FakeRig(device), session, source or Source(device), **{"stamped": True, **options}))
    finally:
        session.close()


def test_every_regime_has_a_row_and_one_is_about_edges():
    """On a device that tells the truth all hold, also where other work is beside or in front."""
    device = Recorded(**LIKE_A_GPU)
    source = Source(device)
    rows = rows_of(device, source)
    assert [row.name for row in rows] == ["edges", *(regime.name for regime in REGIMES)]
    assert [row.text for row in rows if row.failed] == []
    assert {row.section for row in rows} == {"cupti"}
    assert all(row.spans == reference.SPANS * 3 for row in rows[1:])
    assert all(row.check("interval_25000").value == 1.0 for row in rows[1:])
    assert all(row.check("placement_25000").value == 1.0 for row in rows[1:])
    queued = next(row for row in rows if row.name == "queued")
    assert queued.values["device_less_cupti_ns"] == 0
    assert queued.values["cupti_less_stamps_ns"] == 0
    assert source.calls == ["start", "stop"]
    assert device.marks_in_use == 0


def test_the_edges_of_kernels_are_told():
    """A kernel that lasts a microsecond longer to CUPTI than to itself, and so is as much nearer to the next one."""
    rows = rows_of(Recorded(edge_ns=1_000, **LIKE_A_GPU))
    edge = rows[0].values
    assert (edge["turnaround_ns"], edge["cupti_turnaround_ns"], edge["cupti_less_stamps_ns"]) == (0, -1_000, 1_000)
    queued = next(row for row in rows if row.name == "queued")
    assert queued.values["cupti_less_stamps_ns"] == 1_000
    assert queued.values["device_less_cupti_ns"] == -1_000
    assert queued.values["by_duration"]["4000"]["cupti_ns"] == 5_000
    assert "+1,000 ns longer than to themselves" in queued.text
    assert not any(row.failed for row in rows)


def test_spans_that_do_not_hold_cuptis_time_fail():
    """5 µs more than the span says, beyond any floor: every regime without a gap, in words and by duration."""
    rows = rows_of(Recorded(edge_ns=5_000, **LIKE_A_GPU))
    queued = next(row for row in rows if row.name == "queued")
    assert queued.verdict == "fail"
    assert queued.check("interval_4000").verdict == "fail"
    assert queued.check("exact_120000").verdict == "fail"
    assert "4,000 ns: " in queued.text


def test_records_that_cannot_be_matched_are_an_error_and_no_figure():
    device = Recorded(**LIKE_A_GPU)
    source = Source(device)
    source.lose = 1
    rows = rows_of(device, source)
    assert {row.verdict for row in rows} == {"error"}
    assert "CUPTI has" in rows[1].text
    source = Source(device)
    source.lack = {"dropped": 4}
    rows = rows_of(device, source)
    assert {row.verdict for row in rows} == {"error"}
    assert "4 dropped by CUPTI" in rows[0].text
    assert source.calls == ["start", "stop"]


def test_kernels_without_stamps_are_held_against_cupti_all_the_same():
    rows = rows_of(Recorded(**LIKE_A_GPU), stamped=False)
    assert [row.name for row in rows] == [regime.name for regime in REGIMES]
    assert all(row.values["cupti_less_stamps_ns"] is None for row in rows)
    assert not any("themselves" in row.text for row in rows)


def test_regimes_without_time_are_left_out_and_cupti_is_detached():
    device = Recorded(**LIKE_A_GPU)
    source = Source(device)
    rows = rows_of(device, source, until_s=0.0)
    assert {row.verdict for row in rows[1:]} == {"skipped"}
    assert source.calls == ["start", "stop"]


def test_the_self_test_says_why_there_is_no_cupti(monkeypatch: pytest.MonkeyPatch):
    """Not installed, not asked for, held by somebody else: one row, which fails nothing."""
    device = Recorded(**LIKE_A_GPU)
    rig, session = FakeRig(device), Session(device, device.host)
    held = Source(device)
    held.refused = RecordsUnavailable("another profiler has CUPTI in this process")
    monkeypatch.setattr(cupti_activity, "KernelRecords", lambda: held)
    found = [
        *selftest._cupti_rows(rig, session, "not asked for", stamped=True, until_s=float("inf")),
        *selftest._cupti_rows(rig, session, "", stamped=True, until_s=float("inf")),
    ]
    session.close()
    assert [(row.verdict, row.section, row.name) for row in found] == [("skipped", "cupti", "none")] * 2
    assert found[0].text.endswith(": not asked for")
    assert found[1].text.endswith("another profiler has CUPTI in this process")
    assert held.calls == ["start"]
    assert dataclasses.asdict(found[0])["values"] == {}
