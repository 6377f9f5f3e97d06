"""How often verdicts are right on this machine's noise: records it once, and replays it through the same decision.

A function is called again and again, each call waited for, as ``compare`` does; its times are kept as JSON. Then a
hundred comparisons of it with itself, and of it with itself made 2 % slower, are drawn from that recording: turns
follow each other in time as they do in ``compare``, and blocks and looks are those of the default budget. With
``--live`` a few real comparisons follow, one arm of which runs one product in fifty more (on the CPU: a loop).

    python tests/perf/compare_noise.py [--seconds 30] [--live 3] [--out noise.json] [--from noise.json]

Asserts nothing. Look at ``identical`` (same or ambiguous in at least 95 of 100) and ``slower`` (at least 90 of 100).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from made_noise import compare as replay
from made_noise import recorded

from gpu_timed import compare, current
from gpu_timed.measure.stopwatch import Stopwatch
from gpu_timed.measure.turns import fitting, settling, share_out

TRIALS = 100
BUDGET_NS = 20_000_000_000


def workload() -> tuple[Any, Any, tuple[Any, ...]]:
    """Return a function, the same made 2 % slower, and what they take."""
    try:
        import torch
    except ImportError:
        torch = None

    if torch is not None and torch.cuda.is_available():
        x = torch.randn(1024, 1024, device="cuda", dtype=torch.float16)

        def products(count: int) -> Any:
            def run(x: Any) -> Any:
                for _ in range(count):
                    y = x @ x
                return y

            return run

        return products(50), products(51), (x,)

    def adds(count: int) -> Any:
        return lambda: sum(range(count))

    return adds(50_000), adds(51_000), ()


def record(seconds: float) -> dict[str, list[int]]:
    """Return wall and device times of calls for so long, in the order in which they were made."""
    call, _, arguments = workload()
    tracer = current.tracer()
    watch = Stopwatch(tracer.locator, tracer.host)
    for _ in range(10):
        watch.time(call, arguments, {})
    wall, device = [], []
    until = time.monotonic() + seconds
    gc.collect()
    gc.disable()
    while time.monotonic() < until:
        took = watch.time(call, arguments, {})
        wall.append(took.wall_ns)
        if isinstance(took.device_ns, int):
            device.append(took.device_ns)
    gc.enable()
    return {"wall_ns": wall, "device_ns": device}


def judged(times: list[int]) -> dict[str, Any]:
    """Return how a hundred comparisons each come out."""
    usual = statistics.median(times)
    share = share_out([round(usual)] * 2, BUDGET_NS)
    calls = fitting(usual, share)
    first = settling(calls, share)
    blocks = round(BUDGET_NS / (2 * (calls + first) * usual))
    noise = recorded(times)
    found: dict[str, Any] = {"calls": len(times), "median_ns": usual, "calls_per_turn": calls, "most_blocks": blocks}
    found["not_counted"] = first
    deciles = statistics.quantiles(times, n=10)
    found["p10_p90"] = [deciles[0] / usual, deciles[-1] / usual]
    for name, factor in (("identical", 1.0), ("slower", 1.02), ("faster", 1 / 1.02)):
        held = [replay(noise, factor, seed, blocks=blocks, calls=calls, first=first) for seed in range(TRIALS)]
        found[name] = dict(Counter(each.say("other").word for each in held))
        found[f"{name}_blocks"] = statistics.median(each.blocks for each in held)
    return found


def live(times: int) -> list[dict[str, Any]]:
    """Compare for real."""
    call, slower, arguments = workload()
    rows = []
    for _ in range(times):
        for name, other in (("identical", call), ("slower", slower)):
            found = compare({"one": call, "other": other}, arguments, budget_s=10, profile=False, outputs="ignore")
            verdict = found.verdicts[0]
            interval = [verdict.low, verdict.high] if verdict.ratio else None
            rows.append(
                {"arms": name, "word": verdict.word, "ratio": verdict.ratio, "interval": interval}
                | {"blocks": found.blocks, "seconds": found.seconds, "reason": verdict.reason}
            )
            print(json.dumps(rows[-1], default=repr), flush=True)
    return rows


def main() -> None:
    """Record, replay, and compare for real."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--live", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--from", dest="source", type=Path)
    asked = parser.parse_args()
    if asked.source is not None:
        times = json.loads(asked.source.read_text())
    else:
        times = record(asked.seconds)
        if asked.out is not None:
            asked.out.write_text(json.dumps(times))
    random.seed(0)
    for name, held in times.items():
        if held:
            print(name, json.dumps(judged(held), indent=1), flush=True)
    live(asked.live)


if __name__ == "__main__":
    main()
