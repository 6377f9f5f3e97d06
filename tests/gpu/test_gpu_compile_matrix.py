"""The compile modes on functions of the shapes that inference is made of, and what is known of torch's own graphs.

Some seconds of compilation for each: about two minutes in all. Outputs within what fused kernels may differ by.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_timed import Compile, flush, gpu_timed
from gpu_timed.testing import capture

torch = pytest.importorskip("torch")
from mode_workloads import WORKLOADS, furthest, tensors  # noqa: E402 - needs torch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    with torch.no_grad():
        yield
    flush()
    torch.compiler.reset()
    torch.cuda.synchronize()


@pytest.mark.parametrize("mode", ["compile", "reduce-overhead"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_compiled_code_gives_what_eager_does(name: str, mode: str) -> None:
    workload = WORKLOADS[name](small=True, **({"layers": 2} if name == "decode" else {}))
    timed = gpu_timed(workload.function, name=name, mode=mode)

    def called(function: Any) -> list[list[Any]]:
        workload.reset()
        found = []
        for positional, named in workload.arguments:
            found.append(tensors(function(*positional, **named)))  # not copied: outputs are to stay
        return [[each.clone() for each in call] for call in found]

    expected = called(workload.function)
    with capture() as records:
        called(timed)
        found = called(timed)
    last = records[-1]
    print(f"{name}, {mode}: ran {last.mode} {last.mode_reason}")
    if workload.random:  # other numbers, of the same kind
        for one, other in zip(expected, found, strict=True):
            assert abs(one[0].mean() - other[0].mean()) < 0.1
        assert len({call[0].sum().item() for call in found}) == len(found)
    else:
        assert furthest(expected, found) < max(workload.tolerance, 1e-2), last
    assert last.mode_requested == mode
    assert last.mode == mode or (mode == "reduce-overhead" and "skipped" in last.mode_reason), last
    assert last.warmth == "warm", last.causes


def test_parts_and_skips_are_on_the_span() -> None:
    """What torch cannot capture in one piece: split where it can be, else left out; the span says which."""
    held = torch.ones(64)

    @gpu_timed(name="parts", mode="reduce-overhead")
    def parts(x: Any) -> Any:
        y = (x * 2).relu()
        z = (held + 1).sin()  # on the host, in the midst of it
        return (y + z.to("cuda")).cos()

    x = torch.ones(64, device="cuda")
    expected = ((x * 2).relu() + (held + 1).sin().to("cuda")).cos()
    with capture() as records:
        for _ in range(5):
            assert torch.allclose(parts(x), expected, rtol=1e-4, atol=1e-5)
    last = records[-1]
    print(f"parts: ran {last.mode}: {last.mode_reason}")
    assert "skipped" in last.mode_reason or "parts for CUDA Graphs" in last.mode_reason, last


def test_mark_step_begin_is_the_users_to_call() -> None:
    """With aliases, outputs are torch's own until the next step begins; two sites share one step."""
    first = gpu_timed(name="first", mode=Compile("reduce-overhead", outputs="alias"))(lambda x: (x * 2).relu())
    second = gpu_timed(name="second", mode=Compile("reduce-overhead", outputs="alias"))(lambda x: (x + 1).cos())
    with capture() as records:
        for value in range(8):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.full((64,), float(value), device="cuda")
            y = first(x)
            z = second(y)
            assert torch.allclose(y, (x * 2).relu())
            assert torch.allclose(z, ((x * 2).relu() + 1).cos(), atol=1e-5)
    assert {record.mode for record in records} == {"reduce-overhead"}, records[-1]


def test_c1_a_site_inside_a_compiled_region() -> None:
    before = flush().counts.get("not_timed_in_compiled_region", 0)

    @gpu_timed(name="inside a compiled region")
    def inner(x: Any) -> Any:
        return x @ x

    outer = torch.compile(lambda x: inner(x) + 1, fullgraph=True)
    x = torch.eye(8, device="cuda")
    with capture() as records:
        for _ in range(3):
            assert torch.equal(outer(x), x + 1)
    assert records == []
    assert flush().counts["not_timed_in_compiled_region"] == before + 1  # and said, with its name


def test_c2_decorated_inside_outside_and_on_both_sides() -> None:
    def f(x: Any) -> Any:
        return x + 1

    x = torch.ones(4, device="cuda")
    outside = gpu_timed(torch.compile(f), name="outside")
    inside = torch.compile(gpu_timed(f, name="inside"))
    both = torch.compile(gpu_timed(torch.compile(f), name="both"))
    with capture() as records:
        for function in (outside, inside, both):
            for _ in range(3):
                assert function(x).tolist() == [2.0] * 4
    assert [record.name for record in records] == ["outside"] * 3


def test_c6_threads_that_share_a_site_are_right_whatever_ran() -> None:
    """Up to torch 2.11 its CUDA Graphs work on the thread that first used them alone: the others say so."""
    f = gpu_timed(name="shared", mode="reduce-overhead")(lambda x: (x * 2 + 1).relu())
    f(torch.ones(64, device="cuda"))
    wrong: list[Any] = []

    def work(value: float) -> None:
        try:
            with torch.no_grad():
                for _ in range(20):
                    x = torch.full((64,), value, device="cuda")
                    found = f(x)
                    if not torch.equal(found, (x * 2 + 1).relu()):
                        wrong.append((value, found[0].item()))
        except Exception as error:
            wrong.append(repr(error))

    with capture() as records:
        threads = [threading.Thread(target=work, args=(float(value),)) for value in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print("threads:", {(record.mode, record.mode_reason) for record in records})
    assert wrong == []
    assert all(record.mode == "reduce-overhead" or record.mode_reason for record in records)
