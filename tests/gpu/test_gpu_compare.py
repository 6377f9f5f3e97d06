"""Comparing on a real device: what is alike, what is slower, what is refused, and what fell back."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from typing import Any

import pytest

from gpu_timed import CudaGraph, Missing, compare

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu
GRAPH = CudaGraph()


def word(found: Any, name: str) -> Any:
    verdict = found.verdict(name)
    return verdict.word, verdict.reason, found.refused, found.stopped


@pytest.fixture(scope="module")
def square() -> Any:
    return torch.randn(2048, 2048, device="cuda", dtype=torch.float16)


def products(count: int) -> Any:
    def run(x: Any) -> Any:
        for _ in range(count):
            y = x @ x
        return y

    return run


def test_identical_arms_are_not_told_apart(square: Any) -> None:
    found = compare({"one": products(20), "other": products(20)}, (square,), budget_s=4, profile=False)
    assert found.verdicts[0].word in ("same", "ambiguous"), word(found, "other")
    one = found.arm("one")
    assert found.environment.clock == "cuda_event"
    assert isinstance(one.samples.device_ns, tuple)
    # Each from a mark outside what the host's clock sees: a wall is no shorter than its launch, nor hardly than its
    # device time, which begins a little before.
    assert all(wall >= launch for wall, launch in zip(one.samples.wall_ns, one.samples.launch_ns, strict=True))
    assert statistics.median(one.samples.device_ns) < 1.2 * statistics.median(one.samples.wall_ns)


def test_twenty_one_products_take_longer_than_twenty(square: Any) -> None:
    """5 % more of the same kernel; the interval holds what one product is of twenty, within what marks add."""
    found = compare({"20": products(20), "21": products(21)}, (square,), budget_s=6, profile=False)
    verdict = found.verdicts[0]
    assert verdict.word == "slower", word(found, "21")
    assert 1.03 < verdict.ratio < 1.07
    back = compare({"21": products(21), "20": products(20)}, (square,), budget_s=6, profile=False)
    assert back.verdicts[0].word == "faster", word(back, "20")


def test_an_mlp_is_launch_bound_and_its_graph_is_faster() -> None:
    layers = [torch.nn.Linear(1024, 1024, device="cuda", dtype=torch.float16) for _ in range(24)]
    model = torch.nn.Sequential(*layers).eval()

    def step(x: Any) -> Any:
        with torch.no_grad():
            return model(x)

    x = torch.randn(1, 1024, device="cuda", dtype=torch.float16)
    found = compare(step, (x,), modes=("eager", GRAPH), budget_s=5)
    graph, eager = found.arm("cuda_graph"), found.arm("eager")
    assert graph.ran == "cuda_graph", graph.reason
    assert found.verdict("cuda_graph").word == "faster", word(found, "cuda_graph")
    assert graph.agreement.equal  # type: ignore[union-attr]
    assert isinstance(graph.memory_held_bytes, int)
    assert isinstance(graph.cold.one_off_ns, int)
    even = found.break_evens["cuda_graph"].calls
    assert isinstance(even, int)
    assert found.diagnosis is not None
    if not isinstance(eager.timeline, Missing):
        assert eager.timeline.kernels >= 24
        assert found.diagnosis.bound == "launch", (
            found.diagnosis,
            eager.samples.launch_ns[:9],
            eager.samples.wall_ns[:9],
        )
        gain = statistics.median(eager.samples.wall_ns) / statistics.median(graph.samples.wall_ns)
        assert gain < 1.05 * found.diagnosis.ceiling  # the bound holds


def test_a_large_product_is_device_bound(square: Any) -> None:
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    found = compare({"mm": products(4)}, (x,), budget_s=2)
    assert found.diagnosis is not None
    assert found.diagnosis.bound == "device", found.diagnosis
    assert found.verdicts == ()


def test_hidden_state_is_refused_and_reset_makes_it_work(square: Any) -> None:
    position = torch.zeros((), device="cuda", dtype=torch.long)
    cache = torch.zeros(4096, 256, device="cuda")

    def step(x: Any) -> Any:
        cache.index_copy_(0, position.view(1), x)
        position.add_(1)
        return cache.sum(0) / position

    x = torch.randn(1, 256, device="cuda")
    found = compare(step, (x,), modes=("eager", GRAPH), budget_s=2, profile=False)
    assert any(word in found.refused for word in ("position", "cache", "differ")), found.refused

    def reset() -> None:
        position.zero_()
        cache.zero_()

    found = compare(step, (x,), modes=("eager", GRAPH), budget_s=3, profile=False, reset=reset)
    assert not found.refused
    assert found.arm("cuda_graph").ran == "cuda_graph", found.arm("cuda_graph").reason
    assert found.verdict("cuda_graph").word is not None, word(found, "cuda_graph")


def test_unequal_outputs_are_refused(square: Any) -> None:
    found = compare({"a": lambda x: x @ x, "b": lambda x: x @ x + 1}, (square,), budget_s=1, profile=False)
    assert found.verdicts[0].word is None
    assert "its outputs differ" in found.verdicts[0].reason


def test_a_mode_that_falls_back_is_named() -> None:
    """What reads a value on the host cannot be captured."""
    x = torch.ones(1024, device="cuda")
    found = compare(lambda x: x * float(x.sum().item()), (x,), modes=("eager", GRAPH), budget_s=1, profile=False)
    graph = found.arm("cuda_graph")
    assert (graph.ran, graph.honoured) == ("eager", False)
    assert graph.refused.startswith("it ran as eager: ")
    assert found.verdict("cuda_graph").word is None
    assert found.arm("eager").samples.wall_ns


def test_work_on_another_stream_is_waited_for(square: Any) -> None:
    side = torch.cuda.Stream()
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)

    def elsewhere(x: Any) -> Any:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return products(10)(x)

    found = compare({"here": products(10), "elsewhere": elsewhere}, (x,), budget_s=2, profile=False)
    assert any("other streams" in note for note in found.notes)
    assert 0.9 < found.verdicts[0].ratio < 1.2, word(found, "elsewhere")


def test_an_arm_without_memory_says_so(square: Any) -> None:
    def hungry(x: Any) -> Any:
        return torch.empty(1 << 45, device="cuda")

    found = compare({"a": lambda x: x @ x, "b": hungry, "c": lambda x: x @ x}, (square,), budget_s=1, profile=False)
    assert "OutOfMemoryError" in found.arm("b").refused
    assert found.verdict("c").word in ("same", "ambiguous")


def test_a_sweep_of_batches() -> None:
    layers = [torch.nn.Linear(512, 512, device="cuda", dtype=torch.float16) for _ in range(24)]
    model = torch.nn.Sequential(*layers).eval()

    def step(x: Any) -> Any:
        with torch.no_grad():
            return model(x)

    found = compare(
        step,
        args=lambda batch: (torch.randn(batch, 512, device="cuda", dtype=torch.float16),),
        modes=("eager", GRAPH),
        sweep={"batch": [1, 64]},
        budget_s=1.5,
    )
    assert [point.value for point in found.points] == [1, 64]
    for point in found.points:
        assert point.comparison.verdict("cuda_graph").word == "faster", word(point.comparison, "cuda_graph")


def test_a_long_eager_call_takes_what_it_takes_by_hand() -> None:
    """Hundreds of launches from Python, in turn with a graph of them, beside a loop by hand between the blocks.

    The host's pace changes within seconds, so both are timed about as often and in turn. 5 % is more than the
    difference of two such loops; of a turn that counted the call behind another arm it was 2 to 3 % by itself.
    """
    layers = [torch.nn.Linear(256, 256, device="cuda", dtype=torch.float16) for _ in range(200)]
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.GELU())]).eval()
    x = torch.randn(8, 256, device="cuda", dtype=torch.float16)

    def step(x: Any) -> Any:
        with torch.no_grad():
            return model(x)

    held: list[float] = []

    def by_hand(_done: int, _total: int, what: str) -> None:
        if not what.startswith("block"):
            return
        gc.disable()
        for index in range(6):
            torch.cuda.synchronize()
            began = time.perf_counter()
            step(x)
            torch.cuda.synchronize()
            if index >= 2:
                held.append((time.perf_counter() - began) * 1e9)
        gc.enable()

    found = compare(step, (x,), modes=("eager", GRAPH), budget_s=5, profile=False, progress=by_hand)
    mine = statistics.median(found.arm("eager").samples.wall_ns)
    assert 0.95 < mine / statistics.median(held) < 1.05, (mine, statistics.median(held), len(held), found.blocks)
    assert not any("other streams" in note for note in found.notes)
    assert set(Counter(found.arm("eager").samples.block).values()) <= set(range(4, 500))


def test_a_second_comparison_says_that_kernels_were_recorded(square: Any) -> None:
    compare({"a": products(2), "b": products(2)}, (square,), budget_s=0.5)
    found = compare({"a": products(2), "b": products(2)}, (square,), budget_s=0.5, profile=False)
    assert any("earlier comparison" in note for note in found.notes)
