"""The self-test on a real device. Needs one GPU and torch; Triton, CuPy or Numba for kernels that time themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpu_timed
from gpu_timed.trials import Check, Row, SelfTest

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

FROM_NS = 20_000
"""Where a share is asserted: shorter kernels are printed."""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What ``gpu-timed selftest --quick --json`` prints, in a process of its own."""
    pytest.importorskip("typer")
    source = str(Path(gpu_timed.__file__).parents[1])
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([source, before] if before else [source])
    done = subprocess.run(
        [sys.executable, "-m", "gpu_timed", "selftest", "--json", "--quick"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    print(done.stderr[-4_000:])
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["verdict"]["exit_code"] == done.returncode
    return found


def rows(told: dict[str, Any], section: str) -> list[dict[str, Any]]:
    """Return the rows of a section."""
    return [row for row in told["rows"] if row["section"] == section]


def test_it_ran_and_this_is_what_it_found(told: dict[str, Any]) -> None:
    """Every regime and policy has its rows, none crashed, and the card is named. Prints everything."""
    from rich.console import Console

    from gpu_timed.cli import selftest as room

    made = tuple(Row(**{**row, "checks": tuple(Check(**check) for check in row["checks"])}) for row in told["rows"])
    room.show(Console(width=200, file=sys.stdout), SelfTest(told["gpu_timed"], told["environment"], made))
    print(json.dumps(told["environment"], indent=1))
    for row in told["rows"]:
        print(row["name"], row["sync"], row["duration_ns"], row["verdict"], row["text"], json.dumps(row["values"]))
    assert told["environment"]["card"]
    assert told["environment"]["kernel"]
    regimes = rows(told, "regime")
    assert len({(row["name"], row["sync"]) for row in regimes}) == 14
    assert [(row["name"], row["text"]) for row in told["rows"] if row["verdict"] == "error"] == []
    assert all(row["spans"] >= 6 for row in regimes if row["verdict"] != "skipped")
    assert len(regimes) == 14 * (4 + 1)


def test_the_resolution_of_the_timer_was_measured(told: dict[str, Any]) -> None:
    """``%globaltimer`` moves in steps of a nanosecond to a few microseconds."""
    (timer,) = (row for row in rows(told, "device") if row["name"] == "timer")
    assert 1 <= timer["values"]["resolution_ns"] <= 5_000


def test_the_truth_lies_in_the_interval(told: dict[str, Any]) -> None:
    """As a graph, behind queued work and on a side stream, from 20 µs up, in 99 % of the spans of each regime."""
    shares = {}
    for name in ("graph", "queued", "side_stream"):
        held = [row for row in rows(told, "regime") if row["name"] == name and (row["duration_ns"] or 0) >= FROM_NS]
        assert len(held) == 2 * 3
        inside = sum(round(row["values"]["share_inside"] * row["spans"]) for row in held)
        shares[name] = inside / sum(row["spans"] for row in held)
    print(shares)
    assert {name: share for name, share in shares.items() if share < 0.99} == {}
