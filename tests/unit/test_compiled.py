"""Decorated functions and torch.compile, on the CPU: nothing compiles differently, nothing is left out in silence."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpu_timed import CudaGraph, ModeError, flush, gpu_span, gpu_timed
from gpu_timed.testing import capture

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Graphs:
    """A backend that counts the graphs it is given and runs them as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: Any, example: Any) -> Any:
        self.count += 1
        return module


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


def test_a_decorated_function_in_a_compiled_region_costs_no_break_and_no_recompile(
    graphs: Graphs, caplog: pytest.LogCaptureFixture
) -> None:
    """Under fullgraph=True: one graph for twenty calls, right values, no span, and one word about it."""

    @gpu_timed
    def inner(x: Any, *, factor: float = 2.0) -> Any:
        return x * factor

    def outer(x: Any) -> Any:
        return inner(x) + inner(x, factor=3.0)

    compiled = torch.compile(outer, backend=graphs, fullgraph=True)
    with caplog.at_level(logging.WARNING, "gpu_timed"), capture() as records:
        for _ in range(20):
            assert compiled(torch.ones(4)).tolist() == [5.0] * 4
    assert graphs.count == 1
    assert records == []
    said = [record.getMessage() for record in caplog.records if "compiled region" in record.getMessage()]
    assert len(said) == 1
    assert "inner" in said[0]
    assert "gpu_timed(torch.compile(f))" in said[0]
    assert flush().counts["not_timed_in_compiled_region"] == 1


def test_outside_of_a_compiled_region_it_is_timed_again(graphs: Graphs) -> None:
    """What was traced once is timed when called eagerly."""

    @gpu_timed
    def inner(x: Any) -> Any:
        return x + 1

    torch.compile(lambda x: inner(x) * 1, backend=graphs, fullgraph=True)(torch.ones(2))
    with capture() as records:
        inner(torch.ones(2))
    assert [record.name.rpartition(".")[2] for record in records] == ["inner"]


def test_c4_twelve_functions_compile_twelve_graphs(graphs: Graphs) -> None:
    """C4: the recompile limit is kept by code object, and each wrapper has its own."""
    functions: list[Callable[..., Any]] = [eval(f"lambda x: x + {index}") for index in range(12)]
    with capture():
        for index, function in enumerate(functions):
            compiled = torch.compile(gpu_timed(function), backend=graphs, fullgraph=True)
            assert compiled(torch.zeros(1)).item() == index
    assert graphs.count == 12


def test_c2_the_timer_outside_of_a_compiled_function(graphs: Graphs) -> None:
    """C2: gpu_timed(torch.compile(f)) times every call and compiles once; compiling it again goes through it."""
    timed = gpu_timed(torch.compile(lambda x: x + 1, backend=graphs), name="outside")
    with capture() as records:
        for _ in range(3):
            assert timed(torch.ones(2)).tolist() == [2.0, 2.0]
    assert graphs.count == 1
    assert [record.name for record in records] == ["outside"] * 3
    assert not [key for key in vars(timed) if "dynamo" in key]
    again = torch.compile(timed, backend=graphs)
    assert again(torch.ones(2)).tolist() == [2.0, 2.0]


def test_c3_a_block_in_a_compiled_region_costs_no_break_and_no_recompile(graphs: Graphs) -> None:
    """C3: a gpu_span block inside compiles away under fullgraph=True, and is counted."""

    def f(x: Any) -> Any:
        with gpu_span("mid"):
            y = x * 2
        return y + 1

    compiled = torch.compile(f, backend=graphs, fullgraph=True)
    with capture() as records:
        for _ in range(20):
            assert compiled(torch.ones(4)).tolist() == [3.0] * 4
    assert graphs.count == 1
    assert records == []
    assert flush().counts["not_timed_in_compiled_region"] == 1


def test_a_decorated_forward_leaves_the_module_compiled(graphs: Graphs) -> None:
    """A decorated method of a compiled module leaves it compiled, in one graph."""

    class Layer(torch.nn.Module):
        @gpu_timed
        def forward(self, x: Any) -> Any:
            return torch.relu(x) + 1

    compiled = torch.compile(Layer(), backend=graphs, fullgraph=True)
    for _ in range(5):
        assert compiled(torch.ones(3)).tolist() == [2.0] * 3
    assert graphs.count == 1


def test_a_raise_in_a_compiled_region_is_the_users(graphs: Graphs) -> None:
    """An exception of a decorated function in a compiled region is the function's own."""

    @gpu_timed
    def inner(x: Any) -> Any:
        if x.shape[0] == 3:
            raise ValueError("three")
        return x

    compiled = torch.compile(lambda x: inner(x) * 2, backend=graphs)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="three"):
        compiled(torch.ones(3))


@contextlib.contextmanager
def while_another_thread_compiles() -> Iterator[None]:
    """In the midst of a compile, for as long as the block lasts."""
    begun, end = threading.Event(), threading.Event()

    def backend(module: Any, example: Any) -> Any:
        begun.set()
        assert end.wait(60)
        return module

    thread = threading.Thread(target=lambda: torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)))
    thread.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        end.set()
        thread.join()


def test_what_another_thread_compiles_is_nothing_to_this_one(graphs: Graphs) -> None:
    """Torch's own answer to whether it is compiling is one for the whole process: each recompile would lose spans."""

    class Model(torch.nn.Module):
        @gpu_timed(name="forward")
        def forward(self, x: Any) -> Any:
            return x + 1

    model, plain = Model(), gpu_timed(lambda x: x + 1, name="plain")
    strict = gpu_timed(lambda x: x + 1, name="strict", mode=CudaGraph(strict=True))
    moded = gpu_timed(lambda x: x + 1, name="moded", mode="cuda_graph")
    with while_another_thread_compiles(), capture() as records:
        plain(torch.ones(2))
        model(torch.ones(2))
        moded(torch.ones(2))
        with gpu_span("block"):
            pass
        with pytest.raises(ModeError):
            strict(torch.ones(2))
    assert [record.name for record in records] == ["plain", "forward", "moded", "block", "strict"]
    assert records[2].mode_requested == "cuda_graph"
    assert "not_timed_in_compiled_region" not in flush().counts


def test_a_call_that_is_not_compiled_says_so_while_another_thread_compiles(graphs: Graphs) -> None:
    f = gpu_timed(lambda x: x + 1, name="f", mode="compile")
    with while_another_thread_compiles(), torch.compiler.set_stance("force_eager"), capture() as records:
        f(torch.ones(2))
    assert records[0].mode == "eager"
