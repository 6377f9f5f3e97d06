"""CUDA Graph mode on functions of the shapes that inference is made of: outputs and state are those of eager calls.

Bit for bit, where eager calls on another stream give the same bits, as they do unless a library adds up in any order;
else within 1e-2 of the largest value. What compiled code gives is in ``test_gpu_compile_matrix.py``.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_timed import CudaGraph, flush, gpu_timed
from gpu_timed.testing import capture

torch = pytest.importorskip("torch")
from mode_workloads import WORKLOADS, Workload, furthest, tensors  # noqa: E402 - needs torch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
MIB = 1 << 20
CALLS = 12


@pytest.fixture(autouse=True)
def _cleaned() -> Iterator[None]:
    with torch.no_grad():
        yield
    flush()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def made(name: str) -> Workload:
    return WORKLOADS[name](**({"layers": 4} if name == "decode" else {}))


def state(workload: Workload) -> list[Any]:
    """What it keeps between calls."""
    return [each.clone() for each in getattr(workload.function, "buffers", list)()]


def called(workload: Workload, function: Any) -> list[list[Any]]:
    """What calls of *function* give, from the first state and seed on, and in the end what they leave."""
    workload.reset()
    torch.manual_seed(0)
    found = []
    for index in range(CALLS):
        positional, named = workload.arguments[index % len(workload.arguments)]
        found.append([each.clone() for each in tensors(function(*positional, **named))])
    return [*found, state(workload)]


@pytest.mark.parametrize("outputs", ["clone", "alias"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_replay_gives_and_leaves_what_an_eager_call_does(name: str, outputs: Any) -> None:
    workload = made(name)
    expected = called(workload, workload.function)
    with torch.cuda.stream(torch.cuda.Stream()):
        elsewhere = furthest(expected, called(workload, workload.function))
    torch.cuda.synchronize()
    timed = gpu_timed(workload.function, name=name, mode=CudaGraph(warmup=2, outputs=outputs))
    with capture() as records:
        differs = furthest(expected, called(workload, timed))
    ran = Counter(f"{record.mode}: {record.mode_reason}" for record in records)
    print(f"{name}, {outputs}: eager on another stream differs by {elsewhere}, the mode by {differs}")
    assert [record.mode for record in records] == ["eager"] * 3 + ["cuda_graph"] * (CALLS - 3), ran
    assert differs == 0.0 if elsewhere == 0.0 else differs < 1e-2, ran
    assert all(record.graph_memory_bytes >= MIB for record in records[3:]), records[-1]


@pytest.mark.parametrize("name", ["mlp", "nested"])
def test_static_inputs_give_the_same(name: str) -> None:
    """Replayed on the tensors of the capture: one graph for each set of arguments."""
    workload = made(name)
    workload.arguments = workload.arguments[:2]
    expected = called(workload, workload.function)
    timed = gpu_timed(workload.function, name=name, mode=CudaGraph(warmup=1, inputs="static"))
    with capture() as records:
        assert furthest(expected, called(workload, timed)) < 1e-2
    assert [record.mode for record in records][4:] == ["cuda_graph"] * (CALLS - 4), records[-1].mode_reason


@pytest.mark.parametrize("context", ["no_grad", "inference_mode", "autocast", "grad"])
def test_under_every_mode_of_torch(context: str) -> None:
    """Each is part of the signature; what would need a gradient is refused."""
    workload = made("mlp")
    within = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cuda", torch.bfloat16),
        "grad": torch.enable_grad,
    }[context]
    timed = gpu_timed(workload.function, name=context, mode=CudaGraph(warmup=1))
    with within():
        expected = called(workload, workload.function)
        with capture() as records:
            found = called(workload, timed)
    assert furthest(expected, found) < 1e-2
    assert {each.dtype for call in found[:-1] for each in call} == {each.dtype for each in expected[0]}
    if context == "grad":
        assert "requires grad" in records[-1].mode_reason
        assert found[-2][0].requires_grad
    else:
        assert records[-1].mode == "cuda_graph", records[-1].mode_reason


def test_b1_a_storm_of_calls_that_no_graph_can_hold_costs_next_to_nothing() -> None:
    """A thousand calls: right, each with its reason, memory flat; and within a tenth of the time of eager ones.

    Both arms are spans of the same kind. A function of a dozen kernels and one ``.item()``: some 100 µs.
    """
    x = torch.rand(4096, device="cuda")

    def function(a: Any) -> Any:
        y = a
        for _ in range(10):
            y = y * 1.01 + 0.5
        return y * y.max().item()

    graph = gpu_timed(function, name="storm", mode="cuda_graph", sync="deferred")
    eager = gpu_timed(function, name="calm", mode="eager", sync="deferred")
    expected = function(x)
    for _ in range(20):
        graph(x)
        eager(x)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_reserved()
    ratios, wrong = [], 0
    with capture() as records:
        for turn in range(20):
            taken = {}
            for timed in (graph, eager) if turn % 2 else (eager, graph):
                each = []
                for _ in range(50):
                    began = time.perf_counter_ns()
                    found = timed(x)
                    each.append(time.perf_counter_ns() - began)
                    wrong += not torch.equal(found, expected)
                taken[timed] = statistics.median(each)
            flush()
            ratios.append(taken[graph] / taken[eager])
    grown = torch.cuda.memory_reserved() - before
    storm = [record for record in records if record.name == "storm"]
    print(f"storm: ratio of medians {statistics.median(ratios):.3f}, {grown / MIB:.1f} MiB more")
    assert wrong == 0
    assert len(storm) == 1000
    assert {record.mode for record in storm} == {"eager"}
    assert all("makes the host wait" in record.mode_reason and ".py:" in record.mode_reason for record in storm)
    assert grown == 0
    assert statistics.median(ratios) <= 1.10, ratios


def test_100_shapes_in_random_order() -> None:
    """B4: more shapes than graphs may be; evicted and refused ones are right, and memory is bounded."""
    import random

    f = gpu_timed(name="shapes", mode=CudaGraph(warmup=1, max_graphs=32))(lambda x: torch.softmax(x @ x.T, -1))
    order = [size for size in range(16, 116) for _ in range(4)]
    random.Random(0).shuffle(order)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    with capture() as records:
        for size in order:
            x = torch.randn(size, 64, device="cuda")
            assert torch.allclose(f(x), torch.softmax(x @ x.T, -1), rtol=1e-3, atol=1e-4), size
    grown = torch.cuda.memory_reserved() - before
    ran = Counter(record.mode for record in records)
    memory = max(record.graph_memory_bytes for record in records if record.mode == "cuda_graph")
    print(f"100 shapes in random order: {grown / MIB:.0f} MiB more, {memory / MIB:.0f} MiB of graphs, {dict(ran)}")
    assert ran["cuda_graph"] > 50, ran
    assert grown < 2 * 32 * MIB + 64 * MIB  # as in test_gpu_modes.py
    assert memory < 32 * MIB + 64 * MIB


def test_a_stale_graph_gives_nothing_to_anybody() -> None:
    """The guards of a graph without state are looked at while the device works: a hundred changes of all kinds."""
    weight = torch.ones(256, device="cuda")
    held = {"scale": 1.0, "weight": weight}
    f = gpu_timed(name="stale", mode=CudaGraph(warmup=1))(lambda x: (x * held["weight"]).sum() * held["scale"])
    for _ in range(4):
        f(weight)
    x = torch.ones(256, device="cuda")
    for change in range(8):
        if change % 3 == 0:
            held["scale"] = 2.0 + change
        elif change % 3 == 1:
            held["weight"] = torch.full((256,), 3.0 + change, device="cuda")
        else:
            held["weight"].data = torch.full((256,), 5.0 + change, device="cuda")
        for _ in range(3):
            assert f(x).item() == held["weight"][0].item() * 256 * held["scale"], change
    with capture() as records:
        f(x)
    assert records[0].mode == "cuda_graph", records[0].mode_reason
