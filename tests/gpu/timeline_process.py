"""What test_gpu_timeline.py looks at, in a process of its own: torch's profiler keeps CUPTI once it has run.

    python tests/gpu/timeline_process.py

Prints JSON: a loop of 50 products of matrices with the host busy between them, and the same captured as a graph.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from workloads import captured

from gpu_timed.clocks.cupti_activity import KernelRecords
from gpu_timed.errors import GpuTimedError
from gpu_timed.measure import step_profile
from gpu_timed.record import Missing

COUNT, PAUSE_NS, STEPS = 50, 200_000, 5


def shown(call: Callable[[], object]) -> dict[str, Any]:
    """Profile *call*, and return what was found as JSON has it."""
    began = time.perf_counter()
    found = step_profile.profile(call, wait=torch.cuda.synchronize, steps=STEPS)
    if isinstance(found, Missing):
        return {"missing": repr(found)}
    step = found.typical
    return {
        "source": found.source,
        "steps": len(found.steps),
        "kernels": found.kernels,
        "copies": found.copies,
        "launches": found.launches,
        "busy_ns": found.busy_ns,
        "span_ns": found.span_ns,
        "gap_ns": found.gap_ns,
        "late_ns": found.late_ns,
        "gaps": [gap.duration_ns for gap in step.gaps],
        "host_late": [gap.host_late for gap in step.gaps],
        "kernel_ns": median(kernel.duration_ns for kernel in step.kernels),
        "operators": [tuple(one) for one in found.operators],
        "streams": len({kernel.stream for kernel in step.kernels}),
        "notes": found.notes,
        "took_s": time.perf_counter() - began,
    }


def by_cupti(call: Callable[[], object]) -> dict[str, Any]:
    """Return the sum of the kernels of one call by CUPTI's own records, nothing of ours in between; as a median."""
    try:
        sums = []
        for _ in range(3):
            with KernelRecords() as records:
                call()
                torch.cuda.synchronize()
            assert records.found is not None
            sums.append(sum(one.end_ns - one.start_ns for one in records.found.executions))
    except GpuTimedError as error:
        return {"missing": str(error)}
    return {"sum_ns": median(sums)}


def main() -> None:
    """Print everything."""
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.float16) / 64
    periods: list[int] = []

    def paused() -> None:
        last = 0
        for _ in range(COUNT):
            until = time.perf_counter_ns() + PAUSE_NS
            while time.perf_counter_ns() < until:
                pass
            now = time.perf_counter_ns()
            if last:
                periods.append(now - last)
            last = now
            torch.matmul(x, x)

    def dense() -> None:
        for _ in range(COUNT):
            torch.matmul(x, x)

    def two_streams() -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        torch.matmul(x, x)
        with torch.cuda.stream(side):
            torch.matmul(x, x)
        torch.cuda.current_stream().wait_stream(side)

    for _ in range(20):
        dense()
    graph = captured(dense)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    found: dict[str, Any] = {"cupti": by_cupti(graph.replay)}  # before torch's profiler, which keeps CUPTI
    found["graph"] = shown(graph.replay)
    periods.clear()
    found["paused"] = shown(paused)
    found["period_ns"] = median(periods)
    found["two_streams"] = shown(two_streams)
    found["none"] = shown(lambda: None)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
