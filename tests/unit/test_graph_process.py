"""What a mode may do to a process that serves traffic, apart from a wrong answer: end it, hang it, fill it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpu_timed import CudaGraph, gpu_timed
from gpu_timed.testing import capture

torch = pytest.importorskip("torch")
from make_believe_graphs import Device  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from gpu_timed.modes import torch_graphs  # noqa: E402
from gpu_timed.modes.torch_watching import Watch, key_of  # noqa: E402

GRAPH = CudaGraph(warmup=1)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch_graphs, "Device", lambda *_: device)
    return device


def two(*values: float) -> Any:
    return torch.tensor(values or (1.0, 2.0))


# -- tensors that are made of others ----------------------------------------------------------------------


def test_what_is_changed_of_a_tensor_made_of_others_are_its_parts(graphs: Device) -> None:
    """Such a tensor (DTensor, a quantised weight) has no memory: to set that aside would be to read at address 0."""
    state = TwoTensor(torch.zeros(2), torch.zeros(2))
    with Watch(lambda _: True, 1 << 20) as watch:
        state.add_(1)
    assert set(watch.changed) == {key_of(state.a), key_of(state.b)}
    assert not watch.blocked

    def f(a: Any) -> Any:
        state.add_(a)
        return a + state.a

    f = gpu_timed(name="f", mode=GRAPH)(f)
    with capture() as records:
        for call in range(5):
            assert f(torch.ones(2)).tolist() == [call + 3.0] * 2
    assert [record.mode for record in records] == ["eager"] * 2 + ["cuda_graph"] * 3
    assert state.b.tolist() == [6.0, 6.0]


# -- what stands around a call and sees each operation ----------------------------------------------------


class Seen(TorchFunctionMode):
    """Keeps the names of the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def by_flops(f: Any, a: Any) -> bool:
    with FlopCounterMode(display=False) as counted:
        f(a)
    return bool(counted.get_total_flops() == 16)


def by_functions(f: Any, a: Any) -> bool:
    with Seen() as seen:
        f(a)
    return seen.names == ["matmul"]


def by_trace(f: Any, a: Any) -> bool:
    def g(a: Any) -> Any:
        return f(a)

    traced = torch.jit.trace(g, a, check_trace=False)
    return "aten::matmul" in str(traced.graph) and "aten::copy_" not in str(traced.graph)


def by_recording(f: Any, a: Any) -> bool:
    return [node.name for node in make_fx(f)(a).graph.nodes] == ["a_1", "mm", "output"]


def by_forward_derivative(f: Any, a: Any) -> bool:
    with forward_ad.dual_level():
        found = f(forward_ad.make_dual(a, torch.ones(2, 2)))
        return forward_ad.unpack_dual(found).tangent is not None


def by_transform(f: Any, a: Any) -> bool:
    return bool(torch.equal(torch.func.vmap(f)(a[None])[0], a @ a))


AROUND: dict[Callable[[Any, Any], bool], str] = {
    by_flops: "a replay shows no operations to _FlopCounterMode, which is around the call",
    by_functions: "a replay shows no operations to Seen, which is around the call",
    by_trace: "inside a trace of torch.jit",
    by_recording: "a replay shows no operations to ProxyTorchDispatchMode, which is around the call",
    by_forward_derivative: "a replay has no forward derivatives",
    by_transform: "inside a transform of torch.func",
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", AROUND)
@pytest.mark.parametrize("strict", [False, True])
def test_who_looks_at_operations_gets_to_see_them(graphs: Device, how: Any, strict: bool) -> None:
    """In the first calls those of the function and no others; and never a replay, which is none."""
    f = gpu_timed(name="f", mode=CudaGraph(warmup=1, strict=strict))(lambda a: torch.matmul(a, a))
    a = torch.ones(2, 2)
    for calls in (0, 1, 4):
        for _ in range(calls):
            f(a)
        before = graphs.captures, graphs.replays
        with capture() as records:
            assert how(f, a)
        assert before == (graphs.captures, graphs.replays)
        assert {record.mode_reason.replace(" FlopC", " _FlopC") for record in records} == {AROUND[how]}
    with capture() as records:
        f(a)
    assert records[0].mode == "cuda_graph"


def test_the_device_that_tensors_are_made_on_is_part_of_a_signature(graphs: Device) -> None:
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: (a * 2, torch.ones(2)))
    a = two()
    for _ in range(4):
        f(a)
    with torch.device("meta"):
        assert f(a)[1].is_meta
    here = torch.device("cpu")
    with capture() as records, here:
        for _ in range(4):
            f(a)
    assert [record.mode for record in records] == ["eager"] * 2 + ["cuda_graph"] * 2


def test_a_site_inside_another_ones_graph_has_none_on_a_thread_of_autograds(graphs: Device) -> None:
    """Such a thread has the modes of the one that asked for the derivatives, and nothing else of it."""
    inner = gpu_timed(name="inner", mode=CudaGraph(warmup=1, strict=True))(lambda grad: grad * 3)
    for _ in range(4):
        inner(torch.ones(2))
    before = graphs.replays
    with capture() as records, Watch(lambda _: True):
        inner(torch.ones(2))
    assert graphs.replays == before
    assert [record.mode_reason for record in records] == ["inside the CUDA Graph of another site"]
