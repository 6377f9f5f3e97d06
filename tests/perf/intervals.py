"""Whether the truth lies in [``device_min_ns``, ``device_ns``] of 10,000 live spans, against CUPTI's kernel records.

    python tests/perf/intervals.py [--spans 10000] [--json FILE]

Spans of torch operations from one kernel of a microsecond to a 24-layer MLP, eager and as CUDA graphs, ``boundary``
and ``deferred`` in turn, in four regimes: on an idle stream, behind queued work, beside a busy stream (whose kernels
leave nearly all multiprocessors free), beside a busy Python thread. A fifth one, ``contended``, is shown by itself:
there another stream's products fill the whole device, and a kernel that the device has reached still waits for room,
which is no launch gap, and which marks cannot tell from work.

The truth of each is CUPTI's own: from the start of its first kernel (copy, memset) to the end of its last one, for the
very same execution. The slack is the floor of the marks (1.3 µs) and an event's documented resolution (0.5 µs); shares
without it are shown as well. ``busy in`` is the share whose busy time (any of its kernels running) lies in the bounds:
that is what remains of a call whose gaps are all of the host's making.

Kernel records slow launches down (some 12 %; graph replays some 17 %): the gaps, and so the widths of the intervals,
are a little larger here than without them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from kernel_truth import FLOOR_NS, RESOLUTION_NS, Kernels, environment, in_order, median, percent, quantile, share, us

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
from workloads import Spin, captured

from gpu_timed import gpu_span
from gpu_timed.clocks.cupti_activity import KernelRecords
from gpu_timed.measure.rig import spinning_thread
from gpu_timed.testing import capture

REGIMES = ("idle", "queued", "busy_stream", "busy_thread")
CONTENDED = "contended"
POLICIES = ("boundary", "deferred")
KINDS = ("kernel", "memcpy", "memset")
CHUNK = 48
TOLERANCE_NS = FLOOR_NS + RESOLUTION_NS
LEAD_NS = 600_000
BESIDE_NS = 2_000_000
LONG_LEAD_NS = 6_000_000
"""Work in front of a queued span: longer than opening it and launching its work takes the host."""
MANY = 10
"""From so many kernels on, launching takes as long as the long lead is for."""


def workloads() -> dict[str, Callable[[], Any]]:
    """Return what is measured, by name."""
    torch.manual_seed(0)

    def matrix(size: int) -> Any:
        return torch.randn(size, size, device="cuda", dtype=torch.bfloat16)

    def product(size: int) -> Callable[[], Any]:
        a, out = matrix(size), matrix(size)
        return lambda: torch.mm(a, a, out=out)

    def addition(size: int) -> Callable[[], Any]:
        a = torch.zeros(size, device="cuda")
        return lambda: a.add_(1.0)

    small = addition(1 << 10)
    layers = [torch.nn.Linear(2048, 2048, device="cuda", dtype=torch.float16).requires_grad_(False) for _ in range(24)]
    x = torch.randn(1, 2048, device="cuda", dtype=torch.float16)

    def many() -> None:
        for _ in range(20):
            small()

    def mlp() -> None:
        y = x
        for layer in layers:
            y = torch.relu(layer(y))

    eager: dict[str, Callable[[], Any]] = {
        "add 1 Ki": small,
        "add 4 Mi": addition(1 << 22),
        "mm 512": product(512),
        "mm 2048": product(2048),
        "add 64 Mi": addition(1 << 26),
        "mm 4096": product(4096),
        "20 small adds": many,
        "MLP": mlp,
    }
    graphs = {f"{name}, graph": captured(eager[name]) for name in ("add 4 Mi", "mm 512", "20 small adds", "MLP")}
    return {**eager, **{name: graph.replay for name, graph in graphs.items()}}


class Bench:
    """The work, how many executions each has, and ways to be busy."""

    def __init__(self) -> None:
        self.works = workloads()
        self.spin = Spin()
        self.other = torch.cuda.Stream()
        a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        self._other_work = lambda: torch.mm(a, a, out=self._out)
        self._out = torch.empty_like(a)
        self.counts: dict[str, int] = {}
        self.other_streams: set[tuple[int, int]] = set()

    def warm_up(self) -> None:
        """Compile, load and tune whatever first calls would."""
        for _ in range(3):
            for work in self.works.values():
                work()
            self.busy()
            with torch.cuda.stream(self.other):
                self.spin(BESIDE_NS)
        torch.cuda.synchronize()

    def calibrate(self, session: KernelRecords) -> None:
        """Learn how many executions each work has, and by what number CUPTI knows the other stream."""
        session.take()
        for name, work in self.works.items():
            seen = []
            for _ in range(3):
                work()
                torch.cuda.synchronize()
                seen.append(len(session.take().executions))
            if len(set(seen)) != 1 or not seen[0]:
                raise SystemExit(f"{name}: {seen} executions in three calls: they cannot be matched to spans")
            self.counts[name] = seen[0]
        self.busy()
        torch.cuda.synchronize()
        self.other_streams = {(one.context, one.stream) for one in session.take().executions}

    def busy(self) -> None:
        """Queue about half a millisecond of work on the other stream, which fills the device."""
        with torch.cuda.stream(self.other):
            for _ in range(3):
                self._other_work()

    def span(self, regime: str, sync: str, name: str) -> None:
        """Make one span."""
        if regime == "queued":
            self.spin(LONG_LEAD_NS if self.counts[name] >= MANY else LEAD_NS)
        else:
            torch.cuda.synchronize()
            if regime == CONTENDED:
                self.busy()
            elif regime == "busy_stream":
                with torch.cuda.stream(self.other):
                    self.spin(BESIDE_NS)
        with gpu_span(name, sync=sync):
            self.works[name]()


def measure(bench: Bench, session: KernelRecords, spans: int) -> tuple[list[dict[str, Any]], Counter[str], list[str]]:
    """Return each span beside the truth, how many could not be matched, and what the records lacked.

    *spans* are those of the four regimes together; the fifth has as many as each of them.
    """
    found: list[dict[str, Any]] = []
    unmatched: Counter[str] = Counter()
    notes: list[str] = []
    each = max(len(POLICIES), spans // len(REGIMES))
    order = [(sync, name) for name in bench.works for sync in POLICIES]
    for regime in (*REGIMES, CONTENDED):
        made = 0
        with busy_thread(regime):
            while made < each:
                plan = [order[(made + index) % len(order)] for index in range(min(CHUNK, each - made))]
                made += len(plan)
                with capture() as records:
                    for sync, name in plan:
                        bench.span(regime, sync, name)
                    torch.cuda.synchronize()
                took = session.take()
                notes += [took.note] if took.note else []
                mine = [
                    one
                    for one in took.executions
                    if one.name != "spin" and (one.context, one.stream) not in bench.other_streams
                ]
                kernels = in_order(mine, [bench.counts[name] for _, name in plan])
                ordered = sorted(records, key=lambda record: record.start_ns)
                if kernels is None or [record.name for record in ordered] != [name for _, name in plan]:
                    unmatched[regime] += len(plan)
                    continue
                found += [beside(regime, record, truth) for record, truth in zip(ordered, kernels, strict=True)]
    return found, unmatched, notes


@contextlib.contextmanager
def busy_thread(regime: str) -> Iterator[None]:
    """Keep a Python thread busy in the regime of that name."""
    with spinning_thread() if regime == "busy_thread" else contextlib.nullcontext():
        yield


def beside(regime: str, record: Any, truth: Kernels) -> dict[str, Any]:
    """Return what one span says, beside the truth, in nanoseconds."""
    true_ns, busy_ns = truth.span_ns, truth.busy_ns
    one = {"regime": regime, "sync": record.sync, "work": record.name, "true_ns": true_ns, "busy_ns": busy_ns}
    values = (record.device_ns, record.device_min_ns, record.uncertainty_ns)
    if not all(isinstance(value, int) for value in values):
        return one | {"measured": False, "reason": str(record.device_ns)}
    device, least, stated = values
    return one | {
        "measured": True,
        "device_ns": device,
        "device_min_ns": least,
        "uncertainty_ns": stated,
        "gaps": record.launch_gaps_included,
        "inside": least - TOLERANCE_NS <= true_ns <= device + TOLERANCE_NS,
        "inside_without": least <= true_ns <= device,
        "inside_stated": least - TOLERANCE_NS - stated <= true_ns <= device + TOLERANCE_NS,
        "busy_inside": least - TOLERANCE_NS <= busy_ns <= device + TOLERANCE_NS,
        "fault": "anchor_fault" in record.quality,
    }


def figures(spans: list[dict[str, Any]]) -> dict[str, Any]:
    """Return shares, widths and exactness of *spans*."""
    told = [one for one in spans if one["measured"]]
    widths = [one["device_ns"] - one["device_min_ns"] for one in told]
    relative = [(one["device_ns"] - one["device_min_ns"]) / max(1, one["true_ns"]) for one in told]
    exact = [one["device_ns"] - one["true_ns"] for one in told if one["gaps"] == "no"]
    return {
        "spans": len(spans),
        "not_measured": len(spans) - len(told),
        "true_median_ns": median(one["true_ns"] for one in told),
        "inside": share(one["inside"] for one in told),
        "inside_without_tolerance": share(one["inside_without"] for one in told),
        "inside_with_stated_uncertainty": share(one["inside_stated"] for one in told),
        "busy_inside": share(one["busy_inside"] for one in told),
        "busy_median_ns": median(one["busy_ns"] for one in told),
        "below": sum(one["true_ns"] < one["device_min_ns"] - TOLERANCE_NS for one in told),
        "above": sum(one["true_ns"] > one["device_ns"] + TOLERANCE_NS for one in told),
        "width_median_ns": median(widths),
        "width_p90_ns": quantile(widths, 0.9),
        "relative_width_median": median(relative),
        "relative_width_p90": quantile(relative, 0.9),
        "excess_median_ns": median(one["device_ns"] - one["true_ns"] for one in told),
        "gaps": dict(Counter(one["gaps"] for one in told)),
        "exact_median_ns": median(exact),
        "exact_p1_ns": quantile(exact, 0.01),
        "exact_p99_ns": quantile(exact, 0.99),
        "faults": sum(one["fault"] for one in told),
    }


def grouped(spans: list[dict[str, Any]], *keys: str) -> dict[str, Any]:
    """Return the figures of each group."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in spans:
        groups.setdefault(", ".join(one[key] for key in keys), []).append(one)
    return {name: figures(held) for name, held in groups.items()}


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    columns = (
        "spans",
        "inside",
        "no slack",
        "busy in",
        "true µs",
        "width µs",
        "p90",
        "relative",
        "gaps n/y/?",
        "exact µs",
        "p99",
    )
    print(f"{'':34s}" + "".join(f"{column:>13s}" for column in columns))
    tables = (("all", {"": found["all"]}), *((key, found[key]) for key in ("by_regime", "by_work", "by_regime_work")))
    for title, rows in tables:
        print(title)
        for name, row in rows.items():
            gaps = "/".join(str(row["gaps"].get(answer, 0)) for answer in ("no", "yes", "unknown"))
            cells = (
                str(row["spans"]),
                percent(row["inside"]),
                percent(row["inside_without_tolerance"]),
                percent(row["busy_inside"]),
                us(row["true_median_ns"]),
                us(row["width_median_ns"]),
                us(row["width_p90_ns"]),
                percent(row["relative_width_median"]),
                gaps,
                us(row["exact_median_ns"]),
                us(row["exact_p99_ns"]),
            )
            print(f"  {name:32s}" + "".join(f"{cell:>13s}" for cell in cells))
    print(f"unmatched {found['unmatched'] or 'none'}; incomplete records {found['incomplete_records'] or 'never'}")
    print(found["environment"]["note"])


def main() -> None:
    """Print the tables, and write them as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with KernelRecords(kinds=KINDS) as session:
        bench = Bench()  # graphs that were captured before CUPTI was there may be unknown to it
        bench.warm_up()
        bench.calibrate(session)
        spans, unmatched, notes = measure(bench, session, options.spans)
    held = [one for one in spans if one["regime"] != CONTENDED]
    found = {
        "environment": environment(torch),
        "settings": {"spans": options.spans, "tolerance_ns": TOLERANCE_NS, "executions": bench.counts},
        "all": figures(held),
        "by_regime": grouped(spans, "regime", "sync"),
        "by_work": grouped(held, "work"),
        "by_regime_work": grouped(spans, "regime", "work"),
        "unmatched": dict(unmatched),
        "incomplete_records": notes,
        "outside": [one for one in held if one["measured"] and not one["inside"]][:200],
    }
    print(found["environment"])
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
