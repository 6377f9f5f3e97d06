"""How well device spans stand on the host's axis, over minutes and after a long pause, against CUPTI's kernel records.

    python tests/perf/placement.py [--minutes 8] [--pause-s 180] [--rate 100] [--json FILE]

Spans of single kernels of 5 µs to 1 ms, ``deferred``, in three ways, in turn:

``idle``   eager, on an idle stream: the kernel must lie within the device span, ± the stated uncertainty. Where the
           start mark itself was reached nobody knows: it may have been long before the kernel
``graph``  the same as a CUDA graph
``tight``  behind a kernel that still runs and in front of another one: both marks are reached between two kernels,
           about a microsecond apart, so that the error of both ends is known, with its sign

The promise: in 99 % of the spans the true position lies within ``uncertainty_ns`` of the stated one (and the floor of
the marks, 1.3 µs). In the middle nothing at all runs for as long as ``--pause-s``. CUPTI's times are taken as the
truth; records slow launches down by some 12 %, which moves no position.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from kernel_truth import (
    FLOOR_NS,
    environment,
    in_order,
    median,
    outside,
    percent,
    quantile,
    realtime_less_monotonic_ns,
    share,
    us,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
from workloads import Spin, captured

from gpu_timed import gpu_span
from gpu_timed.clocks.cupti_activity import KernelRecords
from gpu_timed.testing import capture

DURATIONS_NS = (5_000, 20_000, 100_000, 1_000_000)
WAYS = ("idle", "tight", "graph", "tight")
LEAD_NS = 400_000
"""Work in front of a tight span: longer than it takes to launch the span, with room for a host that is held up."""
TAIL_NS = 5_000
TIGHT_NS = 5_000
"""How far apart the kernels around a mark may be for the span to count as tight."""
KERNELS = {"idle": 1, "graph": 1, "tight": 3}
CHUNK_S = 5.0


class Work:
    """Kernels and graphs of each duration."""

    def __init__(self) -> None:
        self.spin = Spin()
        self.graphs = {duration: captured(lambda d=duration: self.spin(d)) for duration in DURATIONS_NS}
        torch.cuda.synchronize()

    def span(self, way: str, duration_ns: int) -> None:
        """Make one span."""
        if way == "tight":
            self.spin(LEAD_NS)
            with gpu_span(way, sync="deferred"):
                self.spin(duration_ns)
            self.spin(TAIL_NS)
            return
        with gpu_span(way, sync="deferred"):
            if way == "graph":
                self.graphs[duration_ns].replay()
            else:
                self.spin(duration_ns)


def chunk(work: Work, session: KernelRecords, seconds: float, rate: float, begun: int) -> tuple[list[Any], dict]:
    """Make spans for *seconds*; return them beside the truth, and what was lost."""
    ways: list[str] = []
    with capture() as records:
        begin = time.perf_counter()
        while (now := time.perf_counter() - begin) < seconds:
            due = (len(ways) + 1) / rate
            if now < due:
                time.sleep(max(0.0, min(due - now, seconds - now)))
            way = WAYS[(begun + len(ways)) % len(WAYS)]
            work.span(way, DURATIONS_NS[(begun + len(ways)) // len(WAYS) % len(DURATIONS_NS)])
            ways.append(way)
        torch.cuda.synchronize()
    found = session.take()
    lost = {"spans": len(ways), "incomplete": found.note, "unmatched": 0}
    executions = [one for one in found.executions if one.name == "spin"]
    kernels = in_order(executions, [1] * sum(KERNELS[way] for way in ways))
    ordered = sorted(records, key=lambda record: record.start_ns)
    if kernels is None or len(ordered) != len(ways) or [record.name for record in ordered] != ways:
        return [], lost | {"unmatched": len(ways)}
    rows, at = [], 0
    for record, way in zip(ordered, ways, strict=True):
        rows.append((record, way, kernels[at : at + KERNELS[way]]))
        at += KERNELS[way]
    return rows, lost


def judge(rows: list[Any]) -> list[dict[str, Any]]:
    """Return the errors of each span, in nanoseconds."""
    found = []
    for record, way, kernels in rows:
        mine = kernels[1] if way == "tight" else kernels[0]
        one: dict[str, Any] = {"way": way, "unix_ns": record.start_ns, "fault": "anchor_fault" in record.quality}
        if not all(
            isinstance(value, int) for value in (record.device_start_ns, record.device_end_ns, record.uncertainty_ns)
        ):
            found.append(one | {"placed": False})
            continue
        start, end, stated = record.device_start_ns, record.device_end_ns, record.uncertainty_ns
        out = max(start - mine.start_ns, mine.end_ns - end)
        one |= {
            "placed": True,
            "uncertainty_ns": stated,
            "contained": out <= stated,
            "contained_with_floor": out <= stated + FLOOR_NS,
            "out_ns": out,
        }
        if way == "tight":
            before, after = kernels[0], kernels[2]
            gaps = mine.start_ns - before.end_ns, after.start_ns - mine.end_ns
            one["tight"] = max(gaps) <= TIGHT_NS
            if one["tight"]:
                # Within the gap the marks may be anywhere: the error is counted from its middle, and what is
                # certain is how far they lie outside of it.
                one |= {
                    "start_error_ns": start - (before.end_ns + mine.start_ns) // 2,
                    "end_error_ns": end - (mine.end_ns + after.start_ns) // 2,
                    "start_out_ns": outside(start, before.end_ns, mine.start_ns),
                    "end_out_ns": outside(end, mine.end_ns, after.start_ns),
                    "gap_ns": max(gaps),
                }
        found.append(one)
    return found


def figures(spans: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the shares and errors of *spans*."""
    placed = [one for one in spans if one["placed"]]
    tight = [one for one in placed if one.get("tight")]
    stated = [one["uncertainty_ns"] for one in placed]
    held: dict[str, Any] = {
        "spans": len(spans),
        "not_placed": len(spans) - len(placed),
        "faults": sum(one["fault"] for one in spans),
        "contained": share(one["contained"] for one in placed),
        "contained_with_floor": share(one["contained_with_floor"] for one in placed),
        "worst_out_ns": max((one["out_ns"] for one in placed), default=None),
        "uncertainty_median_ns": median(stated),
        "uncertainty_p99_ns": quantile(stated, 0.99),
        "uncertainty_max_ns": max(stated, default=None),
        "tight": len(tight),
        "not_tight": sum(one.get("tight") is False for one in placed),
        "gap_median_ns": median(one["gap_ns"] for one in tight),
    }
    for end in ("start", "end"):
        errors = [one[f"{end}_error_ns"] for one in tight]
        held |= {
            f"{end}_within": share(abs(one[f"{end}_out_ns"]) <= one["uncertainty_ns"] for one in tight),
            f"{end}_within_with_floor": share(
                abs(one[f"{end}_out_ns"]) <= one["uncertainty_ns"] + FLOOR_NS for one in tight
            ),
            f"{end}_error_median_ns": median(errors),
            f"{end}_error_p1_ns": quantile(errors, 0.01),
            f"{end}_error_p99_ns": quantile(errors, 0.99),
            f"{end}_worst_out_ns": max((abs(one[f"{end}_out_ns"]) for one in tight), default=None),
        }
    return held


def measure(minutes: float, pause_s: float, rate: float) -> dict[str, Any]:
    """Make spans for *minutes* in all, the pause in their middle included."""
    active_s = max(2 * CHUNK_S, 60 * minutes - pause_s)
    spans: list[dict[str, Any]] = []
    clocks: list[tuple[float, int]] = []
    lost: Counter[str] = Counter()
    notes: list[str] = []
    resumed_ns, made, paused = 0, 0, pause_s <= 0
    with KernelRecords() as session:
        work = Work()  # graphs that were captured before CUPTI was there may be unknown to it
        for way in KERNELS:  # what the first spans load and allocate
            for duration in DURATIONS_NS:
                work.span(way, duration)
        torch.cuda.synchronize()
        session.take()
        begin = time.perf_counter()
        used = 0.0
        while used < active_s:
            if not paused and used >= active_s / 2:
                paused = True
                time.sleep(pause_s)
                resumed_ns = time.time_ns()
            clocks.append((time.perf_counter() - begin, realtime_less_monotonic_ns()))
            began = time.perf_counter()
            rows, said = chunk(work, session, min(CHUNK_S, active_s - used), rate, made)
            used += time.perf_counter() - began
            made += said["spans"]
            lost["unmatched"] += said["unmatched"]
            notes += [said["incomplete"]] if said["incomplete"] else []
            spans += judge(rows)
    clocks.append((time.perf_counter() - begin, realtime_less_monotonic_ns()))
    first = min((one["unix_ns"] for one in spans), default=0)
    by_minute: dict[int, list[dict[str, Any]]] = {}
    for one in spans:
        by_minute.setdefault((one["unix_ns"] - first) // 60_000_000_000, []).append(one)
    after = [one for one in spans if resumed_ns and 0 <= one["unix_ns"] - resumed_ns < 2_000_000_000]
    offsets = [offset for _, offset in clocks]
    return {
        "settings": {"minutes": minutes, "pause_s": pause_s, "rate": rate, "floor_ns": FLOOR_NS},
        "made": made,
        "unmatched": lost["unmatched"],
        "incomplete_records": notes,
        "realtime_steps_ns": {
            "largest": max((abs(b - a) for a, b in itertools.pairwise(offsets)), default=0),
            "range": max(offsets) - min(offsets),
            "series": clocks,
        },
        "all": figures(spans),
        "by_way": {way: figures([one for one in spans if one["way"] == way]) for way in KERNELS},
        "by_minute": {str(minute): figures(held) for minute, held in sorted(by_minute.items())},
        "two_seconds_after_the_pause": figures(after),
    }


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    columns = ("spans", "contained", "start in", "end in", "start µs", "end µs", "stated µs", "p99", "faults")
    print(f"{'':26s}" + "".join(f"{column:>12s}" for column in columns))
    rows = {"all": found["all"], **found["by_way"]}
    rows |= {f"minute {minute}": held for minute, held in found["by_minute"].items()}
    rows["2 s after the pause"] = found["two_seconds_after_the_pause"]
    for name, row in rows.items():
        cells = (
            str(row["spans"]),
            percent(row["contained_with_floor"]),
            percent(row["start_within_with_floor"]),
            percent(row["end_within_with_floor"]),
            us(row["start_error_median_ns"]),
            us(row["end_error_median_ns"]),
            us(row["uncertainty_median_ns"]),
            us(row["uncertainty_p99_ns"]),
            str(row["faults"]),
        )
        print(f"{name:26s}" + "".join(f"{cell:>12s}" for cell in cells))
    total = found["all"]
    print(
        f"without the floor: contained {percent(total['contained'])}, start {percent(total['start_within'])}, "
        f"end {percent(total['end_within'])}; {total['tight']} tight spans, {total['not_tight']} not tight"
    )
    print(
        f"realtime clock: largest step {found['realtime_steps_ns']['largest']} ns; unmatched {found['unmatched']}; "
        f"incomplete {found['incomplete_records'] or 'never'}"
    )


def main() -> None:
    """Print the table, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--pause-s", type=float, default=180.0)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {"environment": environment(torch), **measure(options.minutes, options.pause_s, options.rate)}
    print(found["environment"])
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
