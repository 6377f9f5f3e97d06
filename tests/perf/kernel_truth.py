"""What the scripts that hold spans against CUPTI's kernel records have in common: matching, shares, surroundings.

Nothing here imports torch by itself, so that the arithmetic can be tried without a device.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import surroundings

FLOOR_NS = 1_300
"""What a pair of marks may add to queued work: 1.25 µs on an H200, by steps of 32 ns."""
RESOLUTION_NS = 500
"""What NVIDIA documents for the time stamp of an event."""


class Kernels(NamedTuple):
    """What ran in one span, by CUPTI. Unix nanoseconds."""

    start_ns: int
    end_ns: int
    count: int
    busy_ns: int
    """Time with any of them running."""

    @property
    def span_ns(self) -> int:
        """From the first start to the last end."""
        return self.end_ns - self.start_ns


def in_order(executions: Sequence[Any], counts: Sequence[int]) -> list[Kernels] | None:
    """Give each of *counts* calls, one after the other on one stream, as many *executions* as it has.

    None where there are more or fewer than that: then nobody knows which belongs to which.
    """
    if len(executions) != sum(counts):
        return None
    found, at = [], 0
    for count in counts:
        mine = executions[at : at + count]
        at += count
        end = busy = 0
        for one in sorted(mine, key=lambda one: one.start_ns):
            busy += max(0, one.end_ns - max(end, one.start_ns))
            end = max(end, one.end_ns)
        found.append(Kernels(min(one.start_ns for one in mine), end, count, busy))
    return found


def outside(value: int, low: int, high: int) -> int:
    """Return by how much *value* lies below *low* (negative) or above *high*; 0 in between."""
    return min(0, value - low) or max(0, value - high)


def share(good: Iterable[bool]) -> float | None:
    """Return what part of *good* is true."""
    held = list(good)
    return sum(held) / len(held) if held else None


def quantile(values: Iterable[float], part: float) -> float | None:
    """Return the least of *values* that *part* of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(part * len(ordered)) - 1))] if ordered else None


def median(values: Iterable[float]) -> float | None:
    """Return the median, or None of nothing."""
    held = list(values)
    return statistics.median(held) if held else None


def realtime_less_monotonic_ns() -> int:
    """Return the host's realtime clock less its monotonic one: it changes only when the realtime clock is stepped."""
    best: tuple[int, int] | None = None
    for _ in range(20):
        before, unix, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        if best is None or after - before < best[0]:
            best = after - before, unix - (before + after) // 2
    assert best is not None
    return best[1]


def environment(torch: Any) -> dict[str, Any]:
    """Return card, driver, versions and date."""
    return {
        **surroundings.environment(torch, "cupti-python", "nvidia-cuda-cupti", "numpy", "cupy-cuda13x", "cupy-cuda12x"),
        "note": "kernel records were on throughout: launches are some 12 % slower with them, graph replays some 17 %",
    }


def us(value: float | None) -> str:
    """Show nanoseconds as microseconds."""
    return "-" if value is None else f"{value / 1e3:.2f}"


def percent(value: float | None) -> str:
    """Show a share."""
    return "-" if value is None else f"{100 * value:.2f} %"
