"""The modes on a real device: outputs, state and memory are those of eager calls, whatever ran.

Tolerances: the kernels of a replay are those of the eager run, so that most outputs are equal; 1e-2 in fp16 allows for
libraries that choose another algorithm on another stream. Memory: 64 MiB for what libraries keep of their own.
"""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_timed import Compile, CudaGraph, flush, gpu_timed, use_mode
from gpu_timed.testing import capture

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _cleaned() -> Iterator[None]:
    """What a test leaves on the device is its own to answer for."""
    yield
    flush()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def modes(records: list[Any]) -> list[str]:
    return [record.mode for record in records]


def reasons(records: list[Any]) -> dict[str, int]:
    """What a failure is to tell: how often each mode ran, and why."""
    return dict(Counter(f"{record.mode}: {record.mode_reason}" for record in records))


def mlp(width: int = 1024) -> Any:
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(24)]
    return torch.nn.Sequential(*layers).cuda().half().eval()


@torch.no_grad()
def test_a_24_layer_mlp_is_equal_to_eager_and_faster() -> None:
    model = mlp()
    step = gpu_timed(model, name="mlp", mode="cuda_graph", sync="deferred")
    inputs = [torch.randn(1, 1024, device="cuda", dtype=torch.float16) for _ in range(20)]
    with capture() as records:
        found = [step(x) for x in inputs]
        with use_mode("eager"):
            expected = [step(x) for x in inputs]
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-2, atol=1e-2)
    assert modes(records[:20]) == ["eager"] * 4 + ["cuda_graph"] * 16, reasons(records)
    assert [record.warmth for record in records[:4]] == ["cold"] * 4
    assert [record.warmth for record in records[5:20]] == ["warm"] * 15
    graph_ns = statistics.median(record.launch_ns for record in records[6:20])
    eager_ns = statistics.median(record.launch_ns for record in records[26:])
    print(f"launch: graph {graph_ns / 1000:.1f} µs, eager {eager_ns / 1000:.1f} µs")
    assert graph_ns < eager_ns / 2


@torch.no_grad()
def test_a_conv_net_with_keywords_and_nested_outputs() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 3)
    ).cuda()
    net.eval()

    @gpu_timed(name="conv", mode="cuda_graph")
    def conv(x: Any, *, scale: float) -> dict[str, Any]:
        y = net(x)
        return {"y": y * scale, "parts": (y.mean((2, 3)), [x.shape[0]])}

    with capture() as records:
        for _ in range(8):
            x = torch.randn(2, 3, 32, 32, device="cuda")
            found, y = conv(x, scale=2.0), net(x)
            assert torch.allclose(found["y"], y * 2, rtol=1e-3, atol=1e-3)
            assert torch.allclose(found["parts"][0], y.mean((2, 3)), rtol=1e-3, atol=1e-3)
            assert found["parts"][1] == [2]
    assert modes(records)[4:] == ["cuda_graph"] * 4, reasons(records)


@torch.no_grad()
def test_a_cache_in_place_holds_what_as_many_eager_calls_leave() -> None:
    """A decode step with a static cache of its own: tokens written at a position that comes as a tensor."""
    torch.manual_seed(0)
    wide, length = 64, 32
    project = torch.nn.Linear(wide, wide).cuda()

    def make() -> tuple[Any, Any]:
        cache = torch.zeros(length, wide, device="cuda")

        def step(x: Any, at: Any) -> Any:
            cache.index_copy_(0, at, project(x))
            return torch.softmax(x @ cache.T, -1) @ cache

        return step, cache

    graphed, cache = make()
    eager, expected = make()
    step = gpu_timed(graphed, name="decode", mode="cuda_graph")
    with capture() as records:
        for position in range(length):
            x, at = torch.randn(1, wide, device="cuda"), torch.tensor([position], device="cuda")
            assert torch.allclose(step(x, at), eager(x, at), rtol=1e-4, atol=1e-4), position
            assert torch.allclose(cache, expected, rtol=1e-4, atol=1e-4), position
    assert modes(records)[4:] == ["cuda_graph"] * (length - 4), reasons(records)


@torch.no_grad()
def test_a_llama_step_never_differs_from_eager() -> None:
    """Transformers' static cache counts its own position on some versions: captured or refused, never wrong."""
    pytest.importorskip("transformers")
    from workloads import LlamaStep

    llama = LlamaStep()
    step = gpu_timed(
        lambda token, position: (
            llama.model(input_ids=token, position_ids=position, past_key_values=llama.cache, use_cache=True).logits
        ),
        name="llama",
        mode="cuda_graph",
    )
    expected = []
    for run in ("eager", "cuda_graph"):
        llama.reset()
        with use_mode(run), capture() as records:
            for index in range(10):
                token = torch.full((1, 1), index + 1, dtype=torch.long, device="cuda")
                logits = step(token, torch.full((1, 1), index, dtype=torch.long, device="cuda"))
                if run == "eager":
                    expected.append(logits.clone())
                else:
                    assert torch.allclose(logits, expected[index], rtol=1e-2, atol=1e-2), (index, modes(records))
    print(f"llama: {modes(records)}; {records[-1].mode_reason}")


@torch.no_grad()
def test_random_numbers_advance_and_none_is_drawn_unnoticed() -> None:
    f = gpu_timed(name="dropout", mode="cuda_graph")(lambda x: torch.nn.functional.dropout(x, 0.5))
    x = torch.ones(4096, device="cuda")
    torch.manual_seed(0)
    expected = [torch.nn.functional.dropout(x, 0.5) for _ in range(10)]
    torch.manual_seed(0)
    with capture() as records:
        found = [f(x) for _ in range(10)]
    assert modes(records)[4:] == ["cuda_graph"] * 6, reasons(records)
    assert len({tuple(one.tolist()) for one in found}) == 10
    for index in range(4):  # those that ran eagerly, on the way to the graph
        assert torch.equal(found[index], expected[index]), index
    print("masks of replays are those of eager runs:", all(map(torch.equal, found, expected)))


@torch.no_grad()
def test_weights_bound_anew_are_seen() -> None:
    model = mlp(256)
    step = gpu_timed(model, name="rebound", mode=CudaGraph(warmup=1))
    x = torch.randn(1, 256, device="cuda", dtype=torch.float16)
    for _ in range(3):
        step(x)
    model[3][0].weight = torch.nn.Parameter(torch.randn(256, 256, device="cuda", dtype=torch.float16))
    assert torch.allclose(step(x), model(x), rtol=1e-2, atol=1e-2)
    model[4][0].weight.data = torch.randn(256, 256, device="cuda", dtype=torch.float16)
    assert torch.allclose(step(x), model(x), rtol=1e-2, atol=1e-2)
    with capture() as records:
        assert torch.allclose(step(x), model(x), rtol=1e-2, atol=1e-2)
    assert modes(records) == ["cuda_graph"]


def test_a_host_counter_is_never_replayed() -> None:
    count = 0

    @gpu_timed(name="counter", mode="cuda_graph")
    def step(x: Any) -> Any:
        nonlocal count
        count += 1
        return x + count

    zero = torch.zeros(1, device="cuda")
    with capture() as records:
        assert [step(zero).item() for _ in range(8)] == [float(each) for each in range(1, 9)]
    assert "changes host state" in records[-1].mode_reason


@torch.no_grad()
def test_a_hundred_shapes_stay_within_their_bound_of_memory() -> None:
    f = gpu_timed(name="shapes", mode=CudaGraph(warmup=1, max_graphs=8))(lambda x: torch.softmax(x @ x.T, -1))
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    with capture() as records:
        for size in range(16, 116):
            for _ in range(3):
                x = torch.randn(size, 64, device="cuda")
                assert torch.allclose(f(x), torch.softmax(x @ x.T, -1), rtol=1e-3, atol=1e-4)
    grown = torch.cuda.memory_reserved() - before
    print(f"100 shapes: {grown / MIB:.0f} MiB more, {reasons(records)}")
    # One workspace of cuBLAS for the captures (32 MiB on a Hopper) and one for the eager calls, segments of 2 MiB for
    # small tensors and of 20 MiB for larger ones, of which there are none.
    assert grown < 2 * 32 * MIB + 64 * MIB, reasons(records)
    assert "too many input signatures" in records[-1].mode_reason


def test_what_is_captured_by_the_user_is_left_alone() -> None:
    f = gpu_timed(lambda x: x * 2, name="mine", mode=CudaGraph(warmup=1))
    x = torch.ones(4, device="cuda")
    for _ in range(4):
        f(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = f(x)
    x.fill_(5.0)
    graph.replay()
    assert y.tolist() == [10.0] * 4


def test_streams_and_threads_share_a_graph() -> None:
    f = gpu_timed(lambda x: (x * 2 + 1).sqrt(), name="shared", mode=CudaGraph(warmup=1))
    wrong: list[Any] = []

    def work(value: float) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.full((1024,), value, device="cuda")
            for _ in range(100):
                found = f(x)
                if not torch.equal(found, (x * 2 + 1).sqrt()):
                    wrong.append(value)

    for _ in range(3):
        f(torch.zeros(1024, device="cuda"))
    threads = [threading.Thread(target=work, args=(float(value),)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@torch.no_grad()
def test_reduce_overhead_hands_out_outputs_that_stay_and_says_what_ran() -> None:
    model = mlp(256)
    step = gpu_timed(model, name="compiled", mode="reduce-overhead")
    inputs = [torch.randn(1, 256, device="cuda", dtype=torch.float16) for _ in range(6)]
    with capture() as records:
        found = [step(x) for x in inputs]
    for one, x in zip(found, inputs, strict=True):
        assert torch.allclose(one, model(x), rtol=2e-2, atol=2e-2)
    assert modes(records) == ["reduce-overhead"] * 6, reasons(records)
    assert records[-1].warmth == "warm"

    state = torch.zeros(4, device="cuda")

    @gpu_timed(name="skipped", mode=Compile("reduce-overhead"))
    def mutates(x: Any) -> Any:
        x.add_(1)
        return x.cpu().to("cuda") + state

    with capture() as records:
        for _ in range(4):
            mutates(torch.zeros(4, device="cuda"))
    print(f"skipped: {modes(records)}; {records[-1].mode_reason}")
    assert records[-1].mode == "compile"
    assert "skip" in records[-1].mode_reason


@torch.no_grad()
def test_what_a_replay_costs_beside_a_bare_one() -> None:
    """Printed, not asserted: the host's time of a call in the mode, beside ``graph.replay()`` with copies by hand."""
    model = mlp()
    x = torch.randn(1, 1024, device="cuda", dtype=torch.float16)
    step = gpu_timed(model, name="cost", mode="cuda_graph", every=1_000_000)
    for _ in range(6):
        step(x)
    from workloads import captured

    static = x.clone()
    graph = captured(lambda: model(static))

    def by_hand() -> None:
        static.copy_(x)
        graph.replay()

    def median_us(action: Any) -> float:
        taken = []
        for _ in range(200):
            torch.cuda.synchronize()
            began = time.perf_counter_ns()
            action()
            taken.append(time.perf_counter_ns() - began)
        return statistics.median(taken) / 1000

    print(f"host: in the mode {median_us(lambda: step(x)):.1f} µs, by hand {median_us(by_hand):.1f} µs")
