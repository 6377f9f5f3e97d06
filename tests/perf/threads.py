"""Many threads at once: no record lost, no parent of another thread's, and what a span costs beside one thread.

    python tests/perf/threads.py [--threads 64] [--spans 10000] [--rounds 3] [--json FILE]

Spans nested two deep, on the machine's own clock, all on one stream of a make-believe device; the many and the one
make as many spans in all, in rounds that alternate. The cost is CPU time of the whole process, resolving and handing
over included, divided by spans: with one interpreter lock, wall time would say how the threads were scheduled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from gpu_timed import configure, current, flush, gpu_timed
from gpu_timed.testing import FakeDevice, use_device

PAUSE_AFTER = 200
"""Pairs after which a thread lets the resolver catch up: what is dropped would not be a cost."""


class Records:
    """Keeps of each record what tells whose it is."""

    def __init__(self) -> None:
        self.held: list[tuple[str, int, int | None, int]] = []

    def announce(self, span: Any, record: Any) -> None:
        pass

    def emit(self, span: Any, record: Any) -> None:
        self.held.append((record.name, record.span_id, record.parent_id, record.thread_id))


def calls(device: FakeDevice) -> Any:
    """Return a decorated function that calls another."""

    @gpu_timed(name="inner", sync="deferred")
    def inner() -> None:
        device.launch(100)

    @gpu_timed(name="outer", sync="deferred")
    def outer() -> None:
        inner()

    return outer


def run(device: FakeDevice, threads: int, pairs: int) -> float:
    """Make *pairs* of spans on each of *threads*; returns the process's CPU nanoseconds a span."""
    outer = calls(device)
    ready = threading.Barrier(threads)
    resolver = current.tracer().resolver

    def work() -> None:
        ready.wait()
        for number in range(pairs):
            outer()
            if number % PAUSE_AFTER == 0:
                while resolver.pending > 2_000:
                    time.sleep(0.002)

    began = time.process_time_ns()
    started = [threading.Thread(target=work) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    device.run_dry()
    if not flush(120):
        print("flush was not complete", file=sys.stderr)
    return (time.process_time_ns() - began) / (2 * threads * pairs)


def wrong(held: list[tuple[str, int, int | None, int]], threads: int, pairs: int) -> list[str]:
    """Return what is wrong with the records of such a run, in words."""
    found = []
    names = Counter(name for name, _, _, _ in held)
    if names != Counter({"outer": threads * pairs, "inner": threads * pairs}):
        found.append(f"{dict(names)}, not {threads * pairs} of each")
    if len({span_id for _, span_id, _, _ in held}) != len(held):
        found.append("a span id came twice")
    outer = {span_id: thread for name, span_id, _, thread in held if name == "outer"}
    strange = sum(outer.get(parent or 0) != thread for name, _, parent, thread in held if name == "inner")
    if strange:
        found.append(f"{strange} spans whose parent is not their own thread's")
    if len({parent for name, _, parent, _ in held if name == "inner"}) != names["inner"]:
        found.append("a parent with two children")
    return found


def main() -> None:
    """Run both, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--spans", type=int, default=10_000, help="spans a thread")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trace.set_tracer_provider(TracerProvider())
    configure(max_pending=1_000_000, max_queue=1_000_000)
    pairs = options.spans // 2
    cost: dict[str, list[float]] = {"one": [], "many": []}
    faults: list[str] = []
    with use_device(FakeDevice(realtime=True)) as device:
        run(device, 1, 500)
        for _ in range(options.rounds):
            for kind, threads, each in (("one", 1, pairs * options.threads), ("many", options.threads, pairs)):
                records = Records()
                with current.sink(records):
                    cost[kind].append(run(device, threads, each))
                faults += wrong(records.held, threads, each)
    one, many = (statistics.median(cost[kind]) / 1e3 for kind in ("one", "many"))
    ratio = statistics.median(b / a for a, b in zip(cost["one"], cost["many"], strict=True))
    counts = dict(flush(1).counts)
    print(f"{options.rounds} rounds of {2 * pairs * options.threads:,} spans, Python {sys.version.split()[0]}")
    print(f"one thread: {one:.1f} µs of CPU a span; {options.threads} threads: {many:.1f}; ratio {ratio:.2f} (limit 2)")
    print("records:", "; ".join(faults) or "all there, every parent its own thread's")
    print("counts:", counts)
    if options.json:
        found = {"cost_ns": cost, "ratio": ratio, "faults": faults, "counts": counts}
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
