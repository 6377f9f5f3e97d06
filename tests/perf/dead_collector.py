"""What a collector that is down, silent, slow, resetting or refusing does to the latency of decorated calls.

    python tests/perf/dead_collector.py [--rounds 12] [--calls 1500] [--json FILE]

For each state of the collector a process of its own calls the same function, decorated (``sync="deferred"``,
``configure(exporter="otlp")``) and not, in blocks that alternate; the processes take turns, round by round. The
function stands for launching and waiting: some 20 µs of Python, then 200 µs with the GIL released. Calls come back to
back, so the exporter's queue is always full. Microseconds; the ratio is decorated over undecorated in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "wire"))

STATES = ("no exporter", "well", "down", "silent", "slow", "resetting", "refusing", "overloaded")


def work() -> int:
    """Do what a step does on the host: some Python, then a wait without the GIL."""
    total = 0
    for number in range(400):
        total += number
    time.sleep(0.0002)
    return total


def child(calls: int) -> None:
    """Answer each line on stdin with the latencies of one block of each kind, in nanoseconds."""
    from gpu_timed import configure, flush, gpu_timed

    address = os.environ["ADDRESS"]
    if address:
        configure(exporter="otlp", endpoint=address)
    else:
        configure(exporter="none")
    decorated = gpu_timed(name="work", sync="deferred")(work)

    def block(call: Callable[[], int]) -> list[int]:
        found = []
        for _ in range(calls):
            began = time.perf_counter_ns()
            call()
            found.append(time.perf_counter_ns() - began)
        return found

    for number, _ in enumerate(sys.stdin):
        order = (work, decorated) if number % 2 else (decorated, work)
        found = {call is decorated: block(call) for call in order}
        print(
            json.dumps({"bare": found[False], "decorated": found[True], "counts": dict(flush(0.01).counts)}), flush=True
        )
    os._exit(0)


def percentile(values: list[int], share: float) -> float:
    """Return the value in microseconds below which *share* of *values* lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] / 1e3


def main() -> None:
    """Run all states and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--calls", type=int, default=1_500)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.calls)
        return
    from receiver import http_receiver, nobody

    answers = {
        "well": "ok",
        "silent": "silent",
        "slow": ("slow", 3.0),
        "resetting": "reset",
        "refusing": ("status", (400, {})),
        "overloaded": ("status", (503, {"Retry-After": "1"})),
    }
    found: dict[str, dict[str, list[int]]] = {state: {"bare": [], "decorated": []} for state in STATES}
    counts: dict[str, dict[str, int]] = {}
    with contextlib.ExitStack() as stack:
        running = {}
        for state in STATES:
            address = ""
            if state == "down":
                address = stack.enter_context(nobody())
            elif state in answers:
                address = stack.enter_context(http_receiver(answers[state])).endpoint
            running[state] = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, __file__, "--child", "--calls", str(options.calls)],
                    env={**os.environ, "ADDRESS": address},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
        for number in range(options.rounds + 1):
            for state, process in running.items():
                process.stdin.write("go\n")
                process.stdin.flush()
                told = json.loads(process.stdout.readline())
                counts[state] = told["counts"]
                if number:  # the first warms up, and fills the queue
                    for kind in ("bare", "decorated"):
                        found[state][kind] += told[kind]
        for process in running.values():
            process.stdin.close()
    print(f"{options.rounds} rounds of {options.calls} calls of each kind, Python {sys.version.split()[0]}\n")
    print("| collector | bare p50 | decorated p50 | ratio | bare p99 | decorated p99 | ratio |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for state, kinds in found.items():
        cells = []
        for share in (0.5, 0.99):
            bare, decorated = (percentile(kinds[kind], share) for kind in ("bare", "decorated"))
            cells += [f"{bare:,.0f}", f"{decorated:,.0f}", f"{decorated / bare:.2f}"]
        print(f"| {state} | {' | '.join(cells)} |")
    print()
    for state, told in counts.items():
        print(f"{state}: {told}")
    if options.json:
        means = {s: {k: statistics.fmean(v) for k, v in kinds.items()} for s, kinds in found.items()}
        options.json.write_text(json.dumps({"means_ns": means, "counts": counts}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
