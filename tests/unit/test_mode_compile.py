"""The torch.compile modes, for real and on the CPU: compiled once for each site, and honest about what ran."""

from __future__ import annotations

import os
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gpu_timed import Compile, Missing, ModeError, flush, gpu_timed, use_mode
from gpu_timed.modes import compiled
from gpu_timed.testing import capture
from gpu_timed.warmth import torch_compile

torch = pytest.importorskip("torch")
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Graphs:
    """A backend that counts the graphs it is given and runs them as they are."""

    def __init__(self, failing: bool = False) -> None:
        self.count = 0
        self.failing = failing

    def __call__(self, module: Any, example: Any) -> Any:
        self.count += 1
        if self.failing:
            raise OSError("no compiler here")
        return module


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs() -> Graphs:
    return Graphs()


def told(records: list[Any]) -> list[tuple[str, str]]:
    return [(record.mode, record.mode_requested) for record in records]


def ones(dimensions: int) -> Any:
    return torch.ones([1] * dimensions)


def test_it_compiles_once_with_keywords_and_the_spans_say_so(graphs: Graphs) -> None:
    @gpu_timed(name="scaled", mode=Compile(backend=graphs, fullgraph=True))
    def scaled(x: Any, *, factor: float = 2.0) -> dict[str, Any]:
        return {"y": x * factor}

    with capture() as records:
        for _ in range(4):
            assert scaled(torch.ones(3), factor=3.0)["y"].tolist() == [3.0] * 3
    assert graphs.count == 1
    assert told(records) == [("compile", "compile")] * 4
    assert [record.warmth for record in records] == ["cold", "warm", "warm", "warm"]
    assert all(record.mode_reason == "" for record in records)


def test_inductor_for_real() -> None:
    """The default backend on the CPU, and torch's word for a mode whose CUDA Graphs have no device."""

    @gpu_timed(name="f", mode="compile")
    def f(x: Any) -> Any:
        return (x * 2).sin() + 1

    x = torch.linspace(0, 1, 64)
    with capture() as records:
        assert torch.allclose(f(x), (x * 2).sin() + 1)
        with use_mode("reduce-overhead"):
            for _ in range(2):
                assert torch.allclose(f(x), (x * 2).sin() + 1)
    assert told(records) == [("compile", "compile"), *[("compile", "reduce-overhead")] * 2]
    assert "no CUDA device" in records[1].mode_reason
    assert flush().counts["mode_not_honoured"] == 2


def broken(x: Any) -> Any:
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


def printing(x: Any) -> Any:
    y = x * 2
    print("in between")
    return y + 1


def asking(x: Any) -> Any:
    y = x * 2
    return y + 1 if y.sum().item() > 0 else y - 1


def inside(x: Any) -> Any:
    return broken(broken(x))


def whole(x: Any) -> Any:
    return x * 2 + 1


@pytest.mark.parametrize(
    ("function", "parts"),
    [(broken, 2), (printing, 2), (asking, 2), (inside, 2), (whole, 1)],
    ids=["broken", "printing", "asking", "inside", "whole"],
)
@pytest.mark.filterwarnings("ignore:Graph break from")
def test_graph_breaks_are_told_for_good(graphs: Graphs, function: Any, parts: int) -> None:
    """Of the very site that has them: another one, compiled meanwhile or inside, tells its own."""
    other = gpu_timed(whole, name="other", mode=Compile(backend=graphs))
    f = gpu_timed(function, name="f", mode=Compile(backend=graphs, strict=True))
    with capture() as records:
        for size in (2, 2, 3, 2):
            x = torch.ones(size)
            assert torch.equal(f(x), function(x))
            other(x)
    assert {record.mode for record in records} == {"compile"}
    said = {name: {record.mode_reason for record in records if record.name == name} for name in ("f", "other")}
    assert said["other"] == {""}
    (found,) = said["f"]
    if parts == 1:
        assert found == ""
    else:
        assert found.startswith("graph breaks: torch compiled it as ")
        assert int(found.split()[6]) >= parts


def saying_first(x: Any) -> Any:
    print("before")
    return x + 1


def saying_last(x: Any) -> float:
    return float((x + 1).sum().item())


@pytest.mark.parametrize("function", [saying_first, saying_last])
@pytest.mark.filterwarnings("ignore:Graph break from")
def test_graph_breaks_that_leave_one_graph_are_told(graphs: Graphs, function: Any) -> None:
    """Beside a break there need be nothing to compile; and a second site finds all but its own frame compiled."""
    sites = [gpu_timed(function, name=name, mode=Compile(backend=graphs)) for name in ("one", "two")]
    with capture() as records:
        for f in sites:
            for _ in range(2):
                f(torch.ones(2))
        torch.compiler.reset()
        sites[0](torch.ones(2))
    assert {record.mode for record in records} == {"compile"}
    assert {record.mode_reason for record in records} == {
        "graph breaks: torch compiled it in parts (TORCH_LOGS=graph_breaks says where)"
    }


def at_once(call: Callable[[], object]) -> None:
    """Make *call* on twelve threads that begin together."""
    ready = threading.Barrier(12)
    with ThreadPoolExecutor(12) as pool:
        for each in [pool.submit(lambda: (ready.wait(30), call())) for _ in range(12)]:
            each.result(60)


def test_threads_that_make_the_first_call_at_once_compile_it_once(graphs: Graphs) -> None:
    """Each by itself they would come to the recompile limit, and be uncompiled for good."""
    f = gpu_timed(lambda x: x + 1, name="f", mode=Compile(backend=graphs))
    with capture() as records:
        at_once(lambda: [f(torch.ones(2)) for _ in range(2)])
    assert graphs.count == 1
    assert told(records) == [("compile", "compile")] * 24


def test_a_first_call_that_waits_for_another_thread_has_it_wait_for_no_more_than_compiling(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ranks in threads of one process do, and who holds a lock that the function takes."""
    monkeypatch.setattr(compiled, "_LONGEST_S", 600.0)
    both = threading.Barrier(2)

    def meet(x: Any) -> Any:
        both.wait(60)
        return x + 1

    f = gpu_timed(meet, name="f", mode=Compile(backend=graphs))
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(f, torch.ones(2)) for _ in range(2)]
        assert [each.result(60).sum().item() for each in found] == [4.0, 4.0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore")
def test_a_forked_process_waits_for_no_thread_that_it_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_LONGEST_S", 600.0)
    first = compiled._First()
    assert first.is_mine()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(first.is_mine()))
    thread.start()
    thread.join()
    assert found == [False]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert not first.is_mine()
    first.wait()


def test_a_first_call_that_compiles_nothing_is_not_the_first(graphs: Graphs) -> None:
    f = gpu_timed(lambda x: x + 1, name="f", mode=Compile(backend=graphs))
    with FlopCounterMode(display=False):
        f(torch.ones(2))
    torch.compiler.set_stance("force_eager")
    f(torch.ones(2))
    torch.compiler.set_stance("default")
    at_once(lambda: f(torch.ones(2)))
    assert graphs.count == 1


def test_why_it_was_given_up_is_not_said_of_what_was_compiled_since(graphs: Graphs) -> None:
    def function(x: Any, fails: bool = False) -> Any:
        if fails:
            raise KeyError("the user's")
        return x + 1

    f = gpu_timed(function, name="f", mode=Compile(backend=graphs))
    with pytest.raises(KeyError):
        f(torch.ones(2), fails=True)
    torch.compiler.reset()
    with capture() as records:
        for dimensions in range(1, 11):
            f(ones(dimensions))
    assert [record.mode for record in records] == ["compile"] * 8 + ["eager"] * 2
    assert "KeyError" not in records[-1].mode_reason


def test_max_autotune_without_a_device_is_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuned all the same: not the ``compile`` of torch's default mode."""
    from gpu_timed.modes import torch_compiling

    monkeypatch.setattr(torch_compiling, "compile_for_site", lambda function, *_: function)
    f = gpu_timed(lambda x: x * 2, name="f", mode="max-autotune")
    with capture() as records:
        f(torch.ones(2))
    assert told(records) == [("max-autotune-no-cudagraphs", "max-autotune")]
    assert "no CUDA device" in records[0].mode_reason


def test_strict_without_a_device_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known before the call is said before it."""
    from gpu_timed.modes import torch_compiling

    monkeypatch.setattr(torch_compiling, "compile_for_site", lambda function, *_: function)
    ran: list[int] = []
    f = gpu_timed(lambda x: ran.append(1), name="f", mode=Compile(mode="reduce-overhead", strict=True))
    with capture() as records, pytest.raises(ModeError, match="no CUDA device: strict=True is for hosts that have one"):
        f(torch.ones(2))
    assert not ran
    assert isinstance(records[0].mode, Missing)


def test_torchs_reason_for_leaving_out_cuda_graphs_lasts() -> None:
    """It is in the metrics of the compile; later calls of the site say it too."""
    module, heard = types.ModuleType("torch._dynamo.utils"), list[Any]()
    module.log_compilation_event = lambda metrics: None  # type: ignore[attr-defined]
    torch_compile.PROBES[0].attach(module, lambda *_, lasting=None, **__: heard.append(lasting))  # type: ignore[arg-type]
    reason = "skipping cudagraphs due to mutated inputs (1 instances). Found from\n  a stack"
    module.log_compilation_event(types.SimpleNamespace(compile_id="3/0", co_name="f", cudagraph_skip_reason=reason))
    assert heard[0].note == "cudagraphs_skipped"
    assert heard[0].text == "f [3/0]: skipping cudagraphs due to mutated inputs (1 instances). Found from"


@pytest.mark.parametrize(
    ("counter", "ran", "says"),
    [
        ("cudagraph_partitions", "reduce-overhead", "torch split it into 3 parts for CUDA Graphs"),
        ("cudagraph_skips", "compile", "torch skipped CUDA Graphs in this or an earlier call"),
        ("another", "reduce-overhead", ""),
    ],
)
def test_what_torch_counts_of_cuda_graphs_lasts(
    monkeypatch: pytest.MonkeyPatch, counter: str, ran: str, says: str
) -> None:
    from gpu_timed.modes import torch_compiling

    def made(function: Any, *_: Any) -> Any:
        def run(x: Any) -> Any:
            if x == 1:
                torch_compiling.counters["inductor"][counter] += 3
            return function(x)

        return run

    monkeypatch.setattr(torch_compiling, "compile_for_site", made)
    monkeypatch.setattr(torch_compiling, "has_cuda", lambda: True)
    f = gpu_timed(lambda x: x + 1, name="f", mode="reduce-overhead")
    with capture() as records:
        assert [f(0), f(1), f(2)] == [1, 2, 3]
    assert told(records) == [("reduce-overhead", "reduce-overhead"), *[(ran, "reduce-overhead")] * 2]
    assert [record.mode_reason for record in records] == ["", says, says]


def test_beyond_the_recompile_limit_the_span_says_eager(graphs: Graphs) -> None:
    """C4: no call that torch ran uncompiled is called compiled; inputs it has code for still are."""
    f = gpu_timed(name="f", mode=Compile(backend=graphs))(lambda x: x + 1)
    with capture() as records:
        for dimensions in (*range(1, 11), 3):
            assert f(ones(dimensions)).sum().item() == 2.0
    assert graphs.count == 8
    assert [record.mode for record in records] == ["compile"] * 8 + ["eager"] * 2 + ["compile"]
    assert "torch ran it uncompiled" in records[8].mode_reason
    assert "recompile_limit" in records[9].mode_reason
    with use_mode(Compile(backend=graphs, strict=True)):
        for dimensions in range(1, 9):
            f(ones(dimensions))
        with pytest.raises(ModeError, match="uncompiled"):
            f(ones(9))


def test_c4_each_site_has_code_of_its_own(graphs: Graphs) -> None:
    functions = [gpu_timed(mode=Compile(backend=graphs))(eval(f"lambda x: x + {index}")) for index in range(12)]
    with capture() as records:
        for index, function in enumerate(functions):
            assert function(torch.zeros(1)).item() == index
    assert graphs.count == 12
    assert told(records) == [("compile", "compile")] * 12


def test_what_fullgraph_refuses_runs_as_it_is_with_the_reason_and_is_not_tried_again(graphs: Graphs) -> None:
    calls = []

    @gpu_timed(name="read", mode=Compile(backend=graphs, fullgraph=True))
    def read(x: Any) -> Any:
        calls.append(1)
        return x * 2 if x.sum() > 0 else x

    with capture() as records:
        for _ in range(3):
            assert read(torch.full((2,), 2.0)).tolist() == [4.0, 4.0]
    assert len(calls) == 3
    assert told(records) == [("eager", "compile")] * 3
    assert "could not be compiled (Unsupported" in records[2].mode_reason
    assert "; without fullgraph=True what can be is compiled" in records[2].mode_reason
    assert [record.warmth for record in records][1:] == ["warm", "warm"]
    strict = Compile(backend=graphs, fullgraph=True, strict=True)
    with capture() as records, use_mode(strict):
        for _ in range(2):  # as it fails, and given up
            with pytest.raises(ModeError, match="read cannot"):
                read(torch.ones(2))
    assert len(calls) == 3
    assert [record.mode.reason for record in records] == ["not_run"] * 2


def test_a_limit_under_fullgraph_leaves_the_inputs_before_it_compiled(graphs: Graphs) -> None:
    f = gpu_timed(name="f", mode=Compile(backend=graphs, fullgraph=True))(lambda x: x + 1)
    with capture() as records:
        for dimensions in (*range(1, 21), 2):
            f(ones(dimensions))
    assert [record.mode for record in records] == ["compile"] * 8 + ["eager"] * 12 + ["compile"]


def test_a_backend_that_fails_costs_no_call_and_runs_nothing_twice() -> None:
    """What ran before the graph that failed is not run again."""
    graphs, calls = Graphs(failing=True), []

    @gpu_timed(name="broken", mode=Compile(backend=graphs))
    def broken(x: Any) -> Any:
        y = x + 1
        torch._dynamo.graph_break()
        calls.append(1)
        return y * 2

    with capture() as records:
        for _ in range(3):
            assert broken(torch.ones(2)).tolist() == [4.0, 4.0]
    assert len(calls) == 3
    assert told(records) == [("eager", "compile")] * 3
    assert "OSError: no compiler here" in records[2].mode_reason


def test_a_graph_that_failed_says_nothing_of_another_that_did_not() -> None:
    graphs = Graphs(failing=True)
    f = gpu_timed(name="f", mode=Compile(backend=graphs))(lambda x: x + 1)
    with capture() as records:
        f(ones(1))
        graphs.failing = False
        f(ones(2))
        f(ones(1))
    assert [record.mode for record in records] == ["eager", "compile", "eager"]


def test_an_error_of_the_users_is_the_users(graphs: Graphs) -> None:
    @gpu_timed(name="f", mode=Compile(backend=graphs))
    def f(x: Any) -> Any:
        if x.shape[0] == 3:
            raise ValueError("three")
        return x + 1

    f(torch.ones(2))
    with capture() as records, pytest.raises(ValueError, match="three"):
        f(torch.ones(3))
    assert records[0].status == "error"


def test_modules_methods_and_hooks(graphs: Graphs) -> None:
    mode = Compile(backend=graphs, fullgraph=True)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

        @gpu_timed(name="forward", mode=mode)
        def forward(self, x: Any, *, scale: float = 1.0) -> Any:
            return self.linear(x) * scale

    torch.manual_seed(0)
    layer, plain = Layer(), torch.nn.Linear(2, 2)
    hooked: list[int] = []
    plain.register_forward_hook(lambda *_: hooked.append(1))
    live = gpu_timed(plain, name="live", mode=Compile(backend=graphs))
    x = torch.ones(1, 2)
    with capture() as records:
        for _ in range(2):
            assert torch.allclose(layer(x, scale=2.0), layer.linear(x) * 2)
            assert torch.allclose(live(x), torch.nn.functional.linear(x, plain.weight, plain.bias))
    assert told(records) == [("compile", "compile")] * 4
    assert len(hooked) == 2
    loss = layer(x).sum()
    loss.backward()
    assert layer.linear.weight.grad is not None
    layer.linear.weight.data.zero_()
    assert torch.allclose(layer(x), layer.linear.bias)


def test_c2_what_is_compiled_already(graphs: Graphs) -> None:
    """It is compiled again in the mode that was asked for, once; and timed once."""
    inner = torch.compile(lambda x: x + 1, backend=graphs)
    f = gpu_timed(inner, name="f", mode=Compile(backend=graphs))
    module = gpu_timed(torch.compile(torch.nn.Identity(), backend=graphs), name="m", mode=Compile(backend=graphs))
    with capture() as records:
        for _ in range(3):
            assert f(torch.ones(2)).tolist() == [2.0, 2.0]
        assert module(torch.ones(2)).tolist() == [1.0, 1.0]
    assert [record.name for record in records] == ["f"] * 3 + ["m"]
    assert graphs.count <= 2


def test_c1_a_site_inside_a_compiled_region_is_compiled_with_it(graphs: Graphs) -> None:
    inner = gpu_timed(name="inner", mode=Compile(backend=graphs))(lambda x: x * 2)
    outer = gpu_timed(name="outer", mode=Compile(backend=graphs, fullgraph=True))(lambda x: inner(x) + 1)
    with capture() as records:
        for _ in range(3):
            assert outer(torch.ones(2)).tolist() == [3.0, 3.0]
    assert [record.name for record in records] == ["outer"] * 3
    assert graphs.count == 1


def test_an_inner_site_that_runs_uncompiled_says_nothing_of_the_outer(graphs: Graphs) -> None:
    inner = gpu_timed(name="inner", mode=Compile(backend=graphs))(torch.compiler.disable(lambda x: x * 2))
    outer = gpu_timed(name="outer", mode=Compile(backend=graphs))(lambda x: x + 1)

    def both(x: Any) -> Any:
        return outer(inner(x))

    with capture() as records:
        both(torch.ones(2))
        gpu_timed(name="all", mode=Compile(backend=graphs))(lambda x: torch.compiler.disable(both)(x) - 1)(
            torch.ones(2)
        )
    found = [(record.name, record.mode) for record in records]
    assert ("outer", "compile") in found
    assert ("all", "compile") in found


def test_c6_threads_share_the_code_and_the_one_that_compiles_is_cold(graphs: Graphs) -> None:
    f = gpu_timed(name="f", mode=Compile(backend=graphs))(lambda x: x + 1)
    with capture() as records:
        f(torch.ones(4))
        threads = [threading.Thread(target=lambda: [f(torch.ones(4)) for _ in range(5)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with torch.no_grad():
            f(torch.ones(4))
    assert len(records) == 22
    assert {record.mode for record in records} == {"compile"}
    assert [record.warmth for record in records if record.call_index in (0, 21)] == ["cold", "cold"]


def test_under_a_stance_that_forces_eager_the_span_says_so(graphs: Graphs) -> None:
    f = gpu_timed(name="f", mode=Compile(backend=graphs))(lambda x: x + 1)
    with capture() as records:
        with torch.compiler.set_stance("force_eager"):
            f(torch.ones(2))
        f(torch.ones(2))
    assert told(records) == [("eager", "compile"), ("compile", "compile")]


def test_disabled_and_unsampled_calls_are_compiled_too(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    f = gpu_timed(name="f", mode=Compile(backend=graphs), every=1000)(lambda x: x + 1)
    for dimensions in (1, 2, 3):
        f(ones(dimensions))
    assert graphs.count == 3
    monkeypatch.setenv("GPU_TIMED_DISABLED", "1")
    from gpu_timed.testing import reset

    reset()
    g = gpu_timed(name="g", mode=Compile(backend=graphs))(lambda x: x - 1)
    g(ones(1))
    assert graphs.count == 4


def test_torchs_own_warnings_are_none_of_ours(graphs: Graphs) -> None:
    f = gpu_timed(name="f", mode=Compile(backend=graphs))(lambda x: x + 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f(torch.ones(2))
        f(torch.ones(2))
    assert [str(each.message) for each in caught if "gpu_timed" in str(each.filename)] == []


def test_a_call_that_torch_compiles_nothing_in_costs_later_ones_nothing(graphs: Graphs) -> None:
    """Torch itself gives a function up for good that was called so: every later call ran uncompiled."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    f = gpu_timed(lambda x: x @ x, name="f", mode=Compile(backend=graphs, strict=True))
    x = torch.ones(4, 4)
    with capture() as records:
        with FlopCounterMode(display=False) as counted:
            f(x)
        f(x)
        torch.vmap(f)(torch.ones(2, 4, 4))
        made = make_fx(f)(x)
        torch.jit.trace(f, (x,), check_trace=False)
        f(x)
    assert counted.get_total_flops() == 2 * 4**3
    assert torch.equal(made(x), x @ x)
    assert [record.mode for record in records] == ["eager", "compile", "eager", "eager", "eager", "compile"]
    whys = [record.mode_reason for record in records]
    assert "FlopCounterMode around the call" in whys[0]
    assert (whys[2], whys[4]) == ("inside a transform of torch.func", "inside a trace of torch.jit")
    assert "ProxyTorchDispatchMode around the call" in whys[3]


def test_counting_its_work_keeps_no_call_from_being_compiled(graphs: Graphs) -> None:
    f = gpu_timed(lambda x: x @ x, name="f", mode=Compile(backend=graphs), work="count")
    with capture() as records:
        for _ in range(2):
            f(torch.ones(4, 4))
    assert told(records) == [("compile", "compile")] * 2


@pytest.mark.parametrize("uncompiled", [True, False])
def test_a_call_that_raises_says_what_ran(graphs: Graphs, uncompiled: bool) -> None:
    def f(x: Any, fails: bool) -> Any:
        if fails:
            raise KeyError("the user's")
        return x + 1

    timed = gpu_timed(f, name="f", mode=Compile(backend=graphs))
    torch.compiler.set_stance("force_eager" if uncompiled else "default")
    with capture() as records, pytest.raises(KeyError, match="the user's"):
        timed(torch.ones(2), fails=True)
    torch.compiler.set_stance("default")
    assert records[0].mode == "eager"  # Dynamo compiles nothing that only raises
    assert records[0].mode_requested == "compile"
    says = "or by a stance" if uncompiled else "in a call that raised KeyError"
    assert says in records[0].mode_reason
    with capture() as records:
        timed(torch.ones(2), fails=False)
    assert [(record.mode, says in record.mode_reason) for record in records] == [
        ("compile", False) if uncompiled else ("eager", True)
    ]
    with capture() as records, pytest.raises(RuntimeError):
        gpu_timed(lambda x: x @ x, name="g", mode=Compile(backend=graphs))(torch.ones(3, 4))
    assert isinstance(records[0].mode, Missing)  # it was to compile it that failed
    assert "could not be compiled (TorchRuntimeError" in records[0].mode_reason
