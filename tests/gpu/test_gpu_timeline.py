"""Timelines of profiled steps on a device: kernels, gaps and their operators are what the step was made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpu_timed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
COUNT = 50


@pytest.fixture(scope="module")
def found() -> Any:
    """What the process found; it is its own since torch's profiler keeps CUPTI."""
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("no CUDA device")
    script = Path(__file__).with_name("timeline_process.py")
    parts = [str(Path(gpu_timed.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    held = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in parts if part)}
    done = subprocess.run(
        [sys.executable, str(script)], env=held, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_host_that_pauses_leaves_gaps_as_long_as_it_paused(found: Any) -> None:
    paused = found["paused"]
    assert (paused["source"], paused["steps"]) == ("kineto", 5)
    assert (paused["kernels"], paused["launches"], paused["copies"]) == (COUNT, COUNT, 0)
    assert len(paused["gaps"]) == COUNT - 1
    # From one launch to the next the device runs one kernel and waits once. The host's pace varies a little.
    assert paused["gap_ns"] + paused["kernel_ns"] == pytest.approx(found["period_ns"], rel=0.05, abs=5_000)
    assert set(paused["host_late"]) == {"yes"}
    assert paused["late_ns"] == pytest.approx(paused["span_ns"] - paused["busy_ns"], rel=0.1)


def test_gaps_carry_the_operator_that_was_being_launched(found: Any) -> None:
    operator, within, gaps, _, typical = found["paused"]["operators"][0]
    assert operator == "aten::mm"
    assert within == "aten::matmul"
    assert gaps == COUNT - 1
    assert typical == pytest.approx(found["paused"]["gap_ns"], rel=0.01)


def test_in_a_graph_the_gaps_are_the_devices_own(found: Any) -> None:
    graph = found["graph"]
    assert (graph["kernels"], graph["launches"]) == (COUNT, 1)
    assert set(graph["host_late"]) <= {"no"}
    assert graph["late_ns"] == 0
    assert graph["span_ns"] - graph["busy_ns"] < 0.2 * graph["span_ns"]  # starting a kernel takes about 1 µs of 20
    assert graph["span_ns"] < 0.3 * found["paused"]["span_ns"]


def test_busy_time_is_what_cupti_says_by_itself(found: Any) -> None:
    if "missing" in found["cupti"]:
        pytest.skip(found["cupti"]["missing"])
    # One stream: nothing overlaps, so that the merged time is the sum.
    assert found["graph"]["busy_ns"] == pytest.approx(found["cupti"]["sum_ns"], rel=0.03)


def test_two_streams_count_once_where_they_overlap(found: Any) -> None:
    both = found["two_streams"]
    assert (both["kernels"], both["streams"]) == (2, 2)
    assert both["busy_ns"] <= both["span_ns"]


def test_a_step_without_work_has_a_reason(found: Any) -> None:
    assert "needs_kernel_records" in found["none"]["missing"]
