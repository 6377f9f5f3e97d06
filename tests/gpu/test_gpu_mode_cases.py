"""Cases from the field, by their numbers: what graphs have done to others, and what ours must not do.

B1 is in ``test_gpu_mode_matrix.py`` (a storm) and ``test_gpu_graph_hazards.py``, B4 in ``test_gpu_mode_matrix.py``, C1,
C2 and C6 in ``test_gpu_compile_matrix.py``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_timed import CudaGraph, flush, gpu_timed
from gpu_timed.testing import capture

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def _cleaned() -> Iterator[None]:
    yield
    flush()
    torch.cuda.synchronize()


def told(records: list[Any]) -> list[tuple[str, str]]:
    return [(record.mode, record.mode_reason) for record in records]


@pytest.mark.parametrize("declared", [True, False])
def test_b2_a_kernel_that_tunes_itself_does_so_before_the_capture(declared: bool) -> None:
    """In place, by Triton: declared, it is captured; not declared, that is noticed."""
    pytest.importorskip("triton")
    from card_kernels import triton_add_one

    mode = CudaGraph(mutates=lambda x: [x]) if declared else CudaGraph()

    @gpu_timed(name="tuned", mode=mode)
    def f(x: Any) -> Any:
        triton_add_one[lambda meta: ((x.numel() + meta["BLOCK"] - 1) // meta["BLOCK"],)](x, x.numel())
        return x

    with capture() as records:
        for value in range(8):
            x = torch.full((4096,), float(value), device="cuda")
            assert f(x) is x
            assert torch.equal(x, torch.full((4096,), value + 1.0, device="cuda")), (value, told(records))
    print("tuned:", *told(records), sep="\n")
    if declared:
        assert [mode for mode, _ in told(records)][-4:] == ["cuda_graph"] * 4
    else:
        assert records[-1].mode == "eager"
        assert "mutates=" in records[-1].mode_reason


def test_b3_outputs_survive_the_next_replay() -> None:
    f = gpu_timed(name="f", mode=CudaGraph(warmup=1))(lambda x: x * 2)
    with capture() as records:
        found = [f(torch.full((4,), float(value), device="cuda")) for value in range(10)]
    assert [each.tolist() for each in found] == [[2.0 * value] * 4 for value in range(10)]
    assert records[-1].mode == "cuda_graph", told(records)


def test_b5_the_python_inside_does_not_run_and_the_span_outside_says_how_it_ran() -> None:
    inner = gpu_timed(name="inner")(lambda x: x.relu())
    outer = gpu_timed(name="outer", mode=CudaGraph(warmup=1))(lambda x: inner(x @ x))
    x = torch.eye(16, device="cuda")
    with capture() as records:
        for _ in range(10):
            assert torch.equal(outer(x), x)
    outside = [record for record in records if record.name == "outer"]
    inside = [record for record in records if record.name == "inner"]
    assert [record.mode for record in outside] == ["eager"] * 2 + ["cuda_graph"] * 8, told(outside)
    print("inner spans:", [(record.device_ns, record.launch_ns) for record in inside])
    assert len(inside) == 3  # of two eager calls, and of the capture, which has no time
    assert sum(isinstance(record.device_ns, int) for record in inside) == 2


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_b6_the_same_seed_gives_the_same_numbers_and_those_of_eager_calls(seeds: tuple[int, int]) -> None:
    f = gpu_timed(name="dropout", mode=CudaGraph(warmup=1))(lambda x: torch.nn.functional.dropout(x, 0.5))
    x = torch.ones(4096, device="cuda")
    for _ in range(4):
        f(x)
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        found.append([f(x) for _ in range(4)])
        after = torch.cuda.get_rng_state()
        torch.manual_seed(seed)
        eager = [torch.nn.functional.dropout(x, 0.5) for _ in range(4)]
        assert all(map(torch.equal, found[-1], eager)), seed
        assert torch.equal(after, torch.cuda.get_rng_state()), seed
    assert len({tuple(each.tolist()) for each in found[0]}) == 4
    assert all(map(torch.equal, *found)) == (seeds[0] == seeds[1])


def test_b7_collectives_of_two_ranks() -> None:
    """NCCL inside: both ranks capture, and neither hangs; its watchdog queries events in another thread meanwhile."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(Path(__file__).with_name("graph_ranks.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, script],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = []
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=60)
            assert rank.returncode == 0, f"{rank.returncode}\n{out[-1000:]}\n{err[-3000:]}"
            said.append(json.loads(out.strip().rpartition("\n")[2]))
    finally:
        for rank in ranks:
            rank.kill()
    print("ranks:", json.dumps(said, indent=1))
    assert [each["wrong"] for each in said] == [0, 0], said
    assert said[0]["modes"] == said[1]["modes"], said


def test_a_capture_of_anothers_is_not_waited_for_by_ours() -> None:
    """The caller's own capture of a function in the mode holds its kernels, not a replay of ours."""
    f = gpu_timed(name="f", mode=CudaGraph(warmup=1))(lambda x: x * 3)
    x = torch.ones(8, device="cuda")
    for _ in range(4):
        f(x)
    graph = torch.cuda.CUDAGraph()
    with capture() as records, torch.cuda.graph(graph):
        y = f(x)
    x.fill_(2.0)
    graph.replay()
    assert y.tolist() == [6.0] * 8
    assert records[-1].mode_reason == "the caller is capturing a graph itself"
