"""Device time by gpu_timed beside an independent CUDA event pair around the same calls.

    python tests/perf/truth.py [--json FILE]

Medians of 200 calls each, the device idle at each start. Graph replays are measured in turn, call by call, so that
clocks and temperature are the same for both; eager steps, whose length is the host's, by a pair inside the same calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from surroundings import environment

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
from workloads import LlamaStep, mlp_graph

from gpu_timed import gpu_timed
from gpu_timed.testing import capture

POLICIES = ("boundary", "deferred")


class Pair:
    """An event pair of our own around a call, on the current stream."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._stream = torch.cuda.current_stream()
        self.microseconds: list[float] = []

    def around(self, call: Callable[[], Any]) -> None:
        """Run *call* between the two events."""
        self._start.record(self._stream)
        call()
        self._end.record(self._stream)

    def read(self) -> None:
        """Wait for the second event and keep the time between them."""
        self._end.synchronize()
        self.microseconds.append(self._start.elapsed_time(self._end) * 1e3)


def in_turn(
    call: Callable[[], Any], before: Callable[[], Any] | None, rounds: int
) -> tuple[list[Any], dict[str, Pair]]:
    """Time bare calls by a pair and decorated ones by gpu_timed, each in turn, the order rotating."""
    timed = {sync: gpu_timed(call, name=sync, sync=sync) for sync in POLICIES}
    pair = Pair()
    order = ["pair", *POLICIES]
    with capture() as records:
        for _ in range(rounds):
            for which in order:
                _rest(before)
                if which == "pair":
                    pair.around(call)
                    pair.read()
                else:
                    timed[which]()
            order.append(order.pop(0))
    return records, dict.fromkeys(POLICIES, pair)


def same_calls(
    call: Callable[[], Any], before: Callable[[], Any] | None, rounds: int
) -> tuple[list[Any], dict[str, Pair]]:
    """Time the same calls by gpu_timed and by a pair inside it."""
    pairs = {sync: Pair() for sync in POLICIES}
    timed = {sync: gpu_timed(lambda p=pairs[sync]: p.around(call), name=sync, sync=sync) for sync in POLICIES}
    with capture() as records:
        for _ in range(rounds):
            for which in POLICIES:
                _rest(before)
                timed[which]()
                pairs[which].read()
    return records, pairs


def _rest(before: Callable[[], Any] | None) -> None:
    if before is not None:
        before()
    torch.cuda.synchronize()
    time.sleep(0.0002)


def compare(
    how: Any, call: Callable[[], Any], before: Callable[[], Any] | None = None, rounds: int = 200
) -> dict[str, Any]:
    """Return medians in microseconds, of *rounds* calls each, with the device idle at each start."""
    for _ in range(10):
        call()
    records, pairs = how(call, before, rounds)
    found: dict[str, Any] = {}
    for sync in POLICIES:
        mine = [record for record in records if record.name == sync]
        assert len(mine) == rounds, (sync, len(mine))
        found[f"{sync}_pair_us"] = statistics.median(pairs[sync].microseconds)
        found[f"{sync}_us"] = statistics.median(record.device_ns for record in mine) / 1e3
        found[f"{sync}_min_us"] = statistics.median(record.device_min_ns for record in mine) / 1e3
        found[f"{sync}_launch_us"] = statistics.median(record.launch_ns for record in mine) / 1e3
    return found


def measure(rounds: int = 200) -> dict[str, dict[str, Any]]:
    """Measure the three workloads."""
    found = {"MLP, 24 layers, graph replay": compare(in_turn, mlp_graph(), rounds=rounds)}
    step = LlamaStep()
    found["Llama 1.1B decode, graph replay"] = compare(in_turn, step.replay, step.before, rounds)
    step.reset()
    found["Llama 1.1B decode, eager"] = compare(same_calls, step.eager, step.before, rounds)
    return found


def main() -> None:
    """Print the table, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure()
    where = environment(torch)
    print(where)
    for name, row in found.items():
        print(f"{name:34s}", "  ".join(f"{key} {value:10.2f}" for key, value in row.items()))
    if options.json:
        options.json.write_text(json.dumps({"environment": where, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
