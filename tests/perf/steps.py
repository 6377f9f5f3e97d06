"""What leaving it on does to a service: latencies of two real steps, undecorated, measured, and measured and exported.

    python tests/perf/steps.py [--decode 2000] [--replays 100000] [--json FILE]

Needs a CUDA device, torch and, for the decode step, transformers. Two calls: one decode step of TinyLlama-1.1B's
shape, launched kernel by kernel (some 1,100 of them), and the replay of a CUDA graph of some 200 µs. Each is followed
by a wait for its result, as a service waits for a token. Three arms take turns in short blocks: the call itself;
the call with ``gpu_timed(sync="deferred")`` and nothing exported; the same with spans sent by OTLP over HTTP, from
this process, to a receiver in another one. Microseconds; the ratio is an arm's percentile over the undecorated one's.
For throughput, each block's time is held against that of the undecorated block beside it, and the median ratio is
given with the half-width of its 95 % bootstrap interval (Efron's percentile method, by SciPy).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import bootstrap

sys.path[:0] = [str(Path(__file__).parents[1] / "gpu"), str(Path(__file__).parents[1] / "wire")]

ARMS = ("bare", "measured", "exported")
PERCENTILES = (50, 99, 99.9)

RECEIVER = """
import sys, time
from receiver import http_receiver
with http_receiver() as receiver:
    print(receiver.endpoint, flush=True)
    sys.stdin.read()
"""


def block(call: Callable[[], None], wait: Callable[[], None], before: Callable[[], None], count: int) -> list[int]:
    """Return the nanoseconds that each of *count* calls took until its work was done."""
    found = []
    now_ns = time.perf_counter_ns
    for _ in range(count):
        before()
        began = now_ns()
        call()
        wait()
        found.append(now_ns() - began)
    return found


def measure(
    call: Callable[[], None], wait: Callable[[], None], before: Callable[[], None], *, total: int, each: int
) -> dict[str, list[list[int]]]:
    """Return the latencies of *total* calls of each arm, by blocks of *each*."""
    from gpu_timed import current, flush, gpu_timed
    from gpu_timed.context.gate import AloneGate

    tracer = current.tracer()
    exporting = tracer.gate
    alone = AloneGate(current.ledger(), "perf")
    timed = gpu_timed(name="step", sync="deferred")(call)
    found: dict[str, list[list[int]]] = {arm: [] for arm in ARMS}
    order = list(ARMS)
    for round_ in range(-1, max(1, total // each)):
        for arm in order:
            tracer.gate = alone if arm == "measured" else exporting
            taken = block(call if arm == "bare" else timed, wait, before, each if round_ >= 0 else min(each, 50))
            if arm == "bare" or round_ < 0:
                flush(30)  # what an arm left behind is not the next one's
            if round_ >= 0:
                found[arm].append(taken)
        order.append(order.pop(0))
        gc.collect()
    tracer.gate = exporting
    return found


def report(name: str, found: dict[str, list[list[int]]]) -> dict[str, Any]:
    """Print a table of one step, and return it."""
    print(f"\n{name}: {sum(map(len, found['bare']))} calls of each arm")
    print(f"{'':10s}" + "".join(f"{'p' + str(p):>12s}{'ratio':>8s}" for p in PERCENTILES) + f"{'throughput':>22s}")
    result: dict[str, Any] = {}
    bare = np.concatenate([np.asarray(one) for one in found["bare"]])
    per_block = np.array([sum(one) for one in found["bare"]], dtype=float)
    for arm in ARMS:
        values = np.concatenate([np.asarray(one) for one in found[arm]])
        row: dict[str, Any] = {}
        line = f"{arm:10s}"
        for p in PERCENTILES:
            value, ratio = (
                float(np.percentile(values, p)) / 1e3,
                float(np.percentile(values, p) / np.percentile(bare, p)),
            )
            row[f"p{p}_us"], row[f"p{p}_ratio"] = value, ratio
            line += f"{value:12.1f}{ratio:8.3f}"
        ratios = per_block / np.array([sum(one) for one in found[arm]], dtype=float)
        half = 0.0
        if arm != "bare" and len(ratios) > 2:
            interval = bootstrap((ratios,), np.median, method="percentile").confidence_interval
            half = (interval.high - interval.low) / 2
        row["throughput"], row["throughput_half_width"] = float(np.median(ratios)), float(half)
        print(line + f"{np.median(ratios):14.4f} ± {half:.4f}")
        result[arm] = row
    return result


def main() -> None:
    """Run both steps and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", type=int, default=2_000)
    parser.add_argument("--replays", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    import torch
    from surroundings import environment
    from workloads import LlamaStep, mlp_graph

    from gpu_timed import configure, flush, shutdown

    wire = Path(__file__).parents[1] / "wire"
    receiver = subprocess.Popen(
        [sys.executable, "-c", RECEIVER],
        env={**os.environ, "PYTHONPATH": f"{wire}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert receiver.stdout is not None
    configure(exporter="otlp", endpoint=receiver.stdout.readline().strip())
    where = environment(torch)
    print(where)
    results: dict[str, Any] = {}
    wait = torch.cuda.synchronize
    if options.replays:
        replay = mlp_graph()
        results["graph replay"] = report(
            "graph replay", measure(replay, wait, lambda: None, total=options.replays, each=2_000)
        )
    if options.decode:
        step = LlamaStep()
        results["decode step"] = report(
            "decode step", measure(step.eager, wait, step.before, total=options.decode, each=20)
        )
    counts = dict(flush(30).counts)
    print("\n", shutdown(10), "\n", counts)
    receiver.terminate()
    if options.json:
        options.json.write_text(json.dumps({"environment": where, "steps": results, "counts": counts}, indent=1))


if __name__ == "__main__":
    main()
