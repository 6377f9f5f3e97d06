"""What the CUDA Graph mode may do to a process, apart from a wrong answer, on a real device.

Tolerance: 1e-5 in float32, for statistics of a few thousand values that are added up in any order.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest

from gpu_timed import CudaGraph, flush, gpu_timed
from gpu_timed.testing import capture

torch = pytest.importorskip("torch")
from torch.autograd import forward_ad  # noqa: E402
from torch.nn.attention.flex_attention import flex_attention  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
GRAPH = CudaGraph(warmup=1)
MIB = 1 << 20


def modes(records: list[Any]) -> list[str]:
    return [record.mode for record in records]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_running_statistics_are_those_of_as_many_eager_calls(mode: Any) -> None:
    ours = torch.nn.BatchNorm2d(8).cuda()
    plain = copy.deepcopy(ours)
    f = gpu_timed(ours.forward, name="norm", mode=GRAPH)
    with mode(), capture() as records:
        for call in range(6):
            x = torch.randn(4, 8, 16, 16, device="cuda") + call
            assert torch.allclose(f(x), plain(x), atol=1e-5)
    assert modes(records)[2:] == ["cuda_graph"] * 4, [record.mode_reason for record in records]
    assert torch.allclose(ours.running_mean, plain.running_mean, atol=1e-5)
    assert torch.allclose(ours.running_var, plain.running_var, atol=1e-5)
    assert ours.num_batches_tracked == plain.num_batches_tracked == 6


def test_state_that_is_made_of_other_tensors() -> None:
    state = TwoTensor(torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda"))

    @gpu_timed(name="two", mode=GRAPH)
    def f(x: Any) -> Any:
        state.add_(x)
        return state.a + x

    with capture() as records:
        for call in range(6):
            assert f(torch.ones(8, device="cuda")).tolist() == [call + 2.0] * 8
    assert modes(records)[2:] == ["cuda_graph"] * 4, [record.mode_reason for record in records]
    assert state.b.tolist() == [6.0] * 8


def test_a_weight_that_is_made_of_other_tensors_in_a_block_with_a_device() -> None:
    weight = TwoTensor(torch.full((8,), 3.0, device="cuda"), torch.zeros(8, device="cuda"))
    f = gpu_timed(name="reads", mode=GRAPH)(lambda x: x * weight.a + (weight * 2).a + torch.ones(8))
    with capture() as records:
        for _ in range(6):
            with torch.device("cuda"):
                assert f(torch.ones(8)).tolist() == [10.0] * 8
    assert modes(records)[2:] == ["cuda_graph"] * 4, [record.mode_reason for record in records]


def test_operations_that_run_functions_come_through() -> None:
    f = gpu_timed(name="flex", mode=GRAPH)(lambda q: flex_attention(q, q, q))
    q = torch.randn(1, 2, 128, 64, device="cuda")
    with capture() as records:
        for _ in range(3):
            assert f(q).shape == q.shape
    assert "flex_attention runs functions that cannot be seen into" in records[-1].mode_reason


def test_a_generator_of_its_own_breaks_nothing() -> None:
    own = torch.Generator(device="cuda").manual_seed(1)
    again = torch.Generator(device="cuda").manual_seed(1)
    f = gpu_timed(name="draws", mode=GRAPH)(lambda x: x + torch.rand(8, device="cuda", generator=own))
    with capture() as records:
        for _ in range(4):
            x = torch.zeros(8, device="cuda")
            assert torch.equal(f(x), torch.rand(8, device="cuda", generator=again))
    assert "generator= of its own" in records[-1].mode_reason
    torch.rand(8, device="cuda")


def test_who_looks_at_operations_gets_to_see_them() -> None:
    f = gpu_timed(name="seen", mode=GRAPH)(lambda x: x @ x)
    x = torch.eye(64, device="cuda")
    for _ in range(4):
        f(x)
    with FlopCounterMode(display=False) as counted:
        f(x)
    assert counted.get_total_flops() == 2 * 64**3
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        assert torch.equal(tangent, torch.full_like(x, 2.0))
    with capture() as records:
        f(x)
    assert modes(records) == ["cuda_graph"]


class Layer(torch.nn.Module):
    """32 MiB of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Buffer(torch.ones(8 * MIB, device="cuda"))

    @gpu_timed(name="layer", mode=GRAPH)
    def step(self, x: Any) -> Any:
        return x * self.weight[:8]


def test_a_model_that_is_gone_leaves_the_device() -> None:
    x = torch.ones(8, device="cuda")
    layer = Layer()
    for _ in range(4):
        layer.step(x)
    flush()
    held = torch.cuda.memory_allocated()
    del layer
    gc.collect()
    assert held - torch.cuda.memory_allocated() >= 32 * MIB
