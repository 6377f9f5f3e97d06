"""The arithmetic of the scripts that hold spans against kernel records."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1] / "perf"))

import kernel_truth


def ran(*times: tuple[int, int]) -> list[SimpleNamespace]:
    return [SimpleNamespace(start_ns=start, end_ns=end) for start, end in times]


def test_executions_are_given_to_calls_in_their_order():
    """First start to last end, also where one that began earlier ends last; busy is the union."""
    found = kernel_truth.in_order(ran((10, 20), (30, 90), (40, 50), (95, 100), (200, 201)), [1, 3, 1])
    assert found == [(10, 20, 1, 10), (30, 100, 3, 65), (200, 201, 1, 1)]
    assert [one.span_ns for one in found] == [10, 70, 1]


def test_what_cannot_be_matched_is_nothing():
    assert kernel_truth.in_order(ran((10, 20)), [1, 1]) is None
    assert kernel_truth.in_order(ran((10, 20), (30, 40)), [1]) is None


def test_distances_and_shares():
    assert [kernel_truth.outside(value, 10, 20) for value in (7, 10, 15, 20, 24)] == [-3, 0, 0, 0, 4]
    assert kernel_truth.share([True, False, True, True]) == 0.75
    assert kernel_truth.share([]) is None
    assert kernel_truth.quantile(range(1, 101), 0.99) == 99
    assert kernel_truth.quantile([], 0.5) is None
    assert kernel_truth.median([]) is None
