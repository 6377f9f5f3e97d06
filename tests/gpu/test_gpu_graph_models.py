"""What model libraries do beside computing, captured on a real device. Needs one GPU, torch, and transformers for some.

The same on a make-believe device is in ``tests/unit/test_graph_models.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from gpu_timed import CudaGraph, gpu_timed
from gpu_timed.testing import capture

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(120)]


def x(*values: float) -> Any:
    import torch

    return torch.tensor(values or (1.0, 2.0), device="cuda")


def modes(
    f: Callable[..., Any], calls: list[tuple[Any, ...]], expected: Callable[..., Any], tolerance: float
) -> list[Any]:
    """Call *f* and hold it against *expected*; return the records."""
    import torch

    with capture() as records, torch.no_grad():
        for arguments in calls:
            torch.testing.assert_close(f(*arguments), expected(*arguments), rtol=tolerance, atol=tolerance)
    return records


def test_what_is_left_out_in_a_capture_keeps_no_graph_away() -> None:
    import torch

    def attend(a: Any, mask: Any) -> Any:
        if not torch.cuda.is_current_stream_capturing() and bool(mask.all()):
            return a * 2
        return a * 2 * mask

    calls = [(x(3.0, 4.0), x(1.0, float(index % 3 > 0))) for index in range(8)]
    records = modes(gpu_timed(attend, name="f", mode="cuda_graph"), calls, attend, 0.0)
    assert [record.mode for record in records] == ["eager"] * 4 + ["cuda_graph"] * 4


def test_what_is_not_left_out_is_refused_and_breaks_no_stream() -> None:
    """The next capture on the same thread, by torch, and the next of ours are as if there had been none."""
    import torch

    def function(a: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            a = a * 2
        return a * a.sum().item()

    before = torch.cuda.memory_reserved()
    records = modes(gpu_timed(function, name="f", mode=CudaGraph(warmup=1)), [(x(),)] * 4, function, 0.0)
    assert {record.mode for record in records} == {"eager"}
    assert "could not be captured (Waits:" in records[-1].mode_reason
    torch.cuda.synchronize()
    graph, a = torch.cuda.CUDAGraph(), x()
    with torch.cuda.graph(graph):
        doubled = a * 2
    graph.replay()
    assert doubled.tolist() == [2.0, 4.0]
    records = modes(gpu_timed(lambda a: a * 3, name="g", mode=CudaGraph(warmup=1)), [(x(),)] * 4, lambda a: a * 3, 0.0)
    assert records[-1].mode == "cuda_graph"
    assert torch.cuda.memory_reserved() - before < 128 << 20


class Cache:
    """State on the device, which a model hands out beside what it computes."""

    def __init__(self) -> None:
        self.total = x(0.0, 0.0)


def test_an_argument_that_is_handed_out_is_that_one() -> None:
    def step(a: Any, cache: Cache) -> dict[str, Any]:
        cache.total += a
        return {"sum": cache.total * 2, "cache": cache}

    f = gpu_timed(step, name="f", mode=CudaGraph(warmup=1))
    cache = Cache()
    with capture() as records:
        for index in range(1, 7):
            found = f(x(), cache=cache)
            assert found["cache"] is cache
            assert found["sum"].tolist() == [2.0 * index, 4.0 * index]
    assert records[-1].mode == "cuda_graph"


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "and backward"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        *(("MATH", "float32"), ("EFFICIENT_ATTENTION", "float32"), ("EFFICIENT_ATTENTION", "bfloat16")),
        *(("FLASH_ATTENTION", "bfloat16"), ("CUDNN_ATTENTION", "bfloat16")),
    ],
)
def test_attention_by_every_backend(backend: str, dtype: str, dropout: float, backward: bool) -> None:
    """Some keep the seed of random numbers on the host where they are not captured."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def step(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)), torch.set_grad_enabled(backward):
            if backward:
                q = q.detach().requires_grad_()
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
            return torch.autograd.grad(out.float().square().sum(), q)[0] if backward else out

    f = gpu_timed(step, name="f", mode=CudaGraph(warmup=1))
    torch.manual_seed(1)
    calls = [[torch.randn(2, 4, 64, 64, device="cuda", dtype=getattr(torch, dtype)) for _ in "qkv"] for _ in range(5)]
    torch.manual_seed(2)
    with capture() as records, torch.no_grad():
        found = [f(*call) for call in calls]
    torch.manual_seed(2)
    with torch.no_grad():
        expected = [step(*call) for call in calls]
    assert [record.mode for record in records][2:] == ["cuda_graph"] * 3, records[-2].mode_reason
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("eigvals", {}), ("eig", {}), ("eigh", {}), ("inv", {}), ("ldl_factor", {}), ("cholesky", {}), ("lstsq", {})),
        *(("lu_factor", {}), ("svdvals", {"driver": "gesvd"}), ("svdvals", {"driver": "gesvdj"}), ("svdvals", {})),
    ],
)
def test_linear_algebra_goes_on_as_ever(name: str, options: Any, count: int, dtype: str) -> None:
    """Here, and in what is called next on this thread without a mode: a capture of most of it fails."""
    import torch
    from torch.utils import _pytree as pytree

    function = getattr(torch.linalg, name)
    root = torch.randn(count, 5, 5, device="cuda", dtype=getattr(torch, dtype)).squeeze(0)
    given = (root @ root.mT + 5 * torch.eye(5, device="cuda"),) * (2 if name == "lstsq" else 1)
    expected = pytree.tree_leaves(function(*given, **options))
    f = gpu_timed(function, name="f", mode=CudaGraph(warmup=1))
    with capture() as records:
        found = [f(*given, **options) for _ in range(3)]
    found += [function(*given, **options) for _ in range(3)]
    for each in found:
        for one, other in zip(pytree.tree_leaves(each), expected, strict=True):
            torch.testing.assert_close(one, other)
    assert records[-1].mode == "cuda_graph" or records[-1].mode_reason


def small(kind: str, layers: int) -> Any:
    """Return a small model of transformers with random weights."""
    transformers = pytest.importorskip("transformers")
    import torch

    sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=layers, **sizes)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}Model")(config).eval().cuda()


@pytest.mark.parametrize(("kind", "layers"), [("Bert", 2), ("Bert", 24), ("Llama", 2)])
@pytest.mark.parametrize("masked", [True, False])
def test_models_of_transformers(kind: str, layers: int, masked: bool) -> None:
    """Before its version 5 it may look into masks in a capture, too: then it is refused, and right."""
    transformers = pytest.importorskip("transformers")
    import torch

    model = small(kind, layers)
    other = copy.deepcopy(model)
    calls: list[tuple[Any, ...]] = []
    for index in range(8):
        ids = torch.randint(5, 120, (2, 9), device="cuda")
        mask = torch.ones_like(ids)
        mask[1, : index % 3] = 0
        calls.append((ids, mask) if masked else (ids,))

    def of(which: Any) -> Callable[..., Any]:
        return lambda ids, mask=None: which(ids, attention_mask=mask).last_hidden_state[:, -3:]

    f = gpu_timed(of(model), name="f", mode="cuda_graph")
    records = modes(f, calls, of(other), 1e-4)
    print(transformers.__version__, kind, layers, masked, records[-1].mode, records[-1].mode_reason)
    if int(transformers.__version__.partition(".")[0]) >= 5:
        assert records[-1].mode == "cuda_graph"
    weights = {name: value * 1.5 for name, value in other.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    other.load_state_dict(weights)
    modes(f, calls, of(other), 1e-4)
