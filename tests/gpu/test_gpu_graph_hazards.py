"""CUDA Graph mode beside what may break it, and whom it may break; each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu


def happened(*arguments: str) -> Any:
    script = Path(__file__).with_name("graph_hazards.py")
    ended = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, f"{arguments}: {ended.returncode}\n{ended.stdout[-1000:]}\n{ended.stderr[-4000:]}"
    found = json.loads(ended.stdout.strip().rpartition("\n")[2])
    print(*arguments, json.dumps(found, indent=1))
    return found


@pytest.mark.parametrize("policy", ["boundary", "deferred"])
def test_a_hundred_captures_while_other_threads_time(policy: str) -> None:
    found = happened("captures_beside_timing", policy)
    assert found["wrong"] == 0, found
    assert found["errors"] == [], found
    assert found["captured"] == 100, found
    assert found["rounds"] > 100, found


def test_a_hundred_captures_while_other_threads_wait_for_the_device() -> None:
    """Which would end a capture in whatever mode: those of ours and captures make way for one another."""
    found = happened("captures_beside_timing", "device")
    assert found["wrong"] == 0, found
    assert found["errors"] == [], found
    assert found["captured"] == 100, found


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_the_users_captures_survive_ours(mode: str) -> None:
    found = happened("the_users_captures", mode)
    assert found["survived"] == 100, found
    assert found["right"] == 100, found
    assert found["errors"] == [], found
    assert any(key.startswith("cuda_graph") for key in found["ours"]), found


def test_others_may_draw_random_numbers_and_replay_while_we_capture() -> None:
    found = happened("random_numbers_and_replays_beside")
    assert found["errors"] == [], found
    assert found["captured"] == 100, found


def test_what_no_graph_can_hold_leaves_the_process_whole() -> None:
    found = happened("fallbacks")
    assert found["wrong"] == 0, found
    assert set(map(tuple, found["modes"].values())) == {("eager",)}, found
    assert "graph_hazards.py:" in found["reasons"]["item"], found
    assert found["grown_mib"] < 64, found  # what libraries keep of their own
    assert sum(count for key, count in found["afterwards"].items() if key.startswith("cuda_graph")) == 4, found
    assert found["sum"] == 8.0


def test_graphs_of_two_functions_replay_at_once() -> None:
    found = happened("graphs_on_two_streams")
    assert found["wrong"] == 0, found
    assert found["modes"].get("cuda_graph: ", 0) > 300, found
