"""Outputs held against each other, and whether a function does the same every time."""

from __future__ import annotations

import importlib.util
import math
import random
import subprocess
import sys
import textwrap
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest

from gpu_timed import CudaGraph, Missing, compare, current
from gpu_timed.measure import outputs, seeds, steadiness
from gpu_timed.measure.outputs import agreement, kept

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")
from make_believe_graphs import Device  # noqa: E402 - needs torch


@dataclass
class Answer:
    logits: Any
    count: int = 3


def held(expected: Any, found: Any, tolerance: float | None = None) -> Any:
    return agreement(kept(expected), found, tolerance)


def test_equal_ones_agree_to_the_bit() -> None:
    nested = {"a": (torch.ones(3), [numpy.arange(4), 1.5]), "b": Answer(torch.tensor(math.nan)), "c": "text", "d": None}
    found = held(nested, nested)
    assert (found.equal, found.exact, found.max_abs, found.where) == (True, True, 0.0, "")
    assert found.text == "equal to the bit"


@pytest.mark.parametrize("make", [torch.tensor, numpy.array], ids=["torch", "numpy"])
def test_numbers_that_are_near(make: Any) -> None:
    one, other = make([1.0, -200.0, 3.0]), make([1.0 + 1e-9, -200.0, 3.0])
    found = held(one, other)
    assert found.equal
    far = held(one, make([1.0, -200.0, 4.0]))
    assert not far.equal
    assert far.max_abs == pytest.approx(1.0)
    assert far.max_rel == pytest.approx(1 / math.sqrt(40010 / 3))  # of the root mean square, larger than 3
    assert "1 of 3 numbers" in far.text
    assert held(one, make([1.0, -200.0, 4.0]), tolerance=0.01).equal
    assert not held(one, make([1.0, math.nan, 3.0])).equal
    assert held(one, make([1.0, math.nan, 3.0])).max_abs == math.inf
    assert held(make([math.inf, math.nan]), make([math.inf, math.nan])).exact
    assert not held(make([math.inf, 1.0]), make([-math.inf, 1.0])).equal


@pytest.mark.parametrize(
    ("dtype", "step"),
    [(torch.float16, 2**-9), (torch.bfloat16, 2**-6), (torch.float32, 2**-16), (torch.float64, 2**-26)],
)
def test_each_type_has_its_tolerance(dtype: Any, step: float) -> None:
    one = torch.ones(64, dtype=dtype)
    assert held(one, one * (1 + step)).equal
    assert not held(one, one * (1 + step)).exact
    assert not held(one, one * (1 + 64 * step)).equal


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (torch.ones(2), torch.ones(3), "(3,) of torch.float32 in place of (2,)"),
        (torch.ones(2), torch.ones(2).double(), "torch.float64 in place of"),
        (torch.tensor([1, 2]), torch.tensor([1, 5]), "whole numbers differ by up to 3"),
        (torch.tensor([True]), torch.tensor([False]), "whole numbers differ by up to 1"),
        (numpy.array([1, 2]), numpy.array([1, 5]), "whole numbers differ by up to 3"),
        (numpy.array(["a"]), numpy.array(["b"]), "differ"),
        (numpy.ones(2), numpy.ones(3), "(3,) of float64 in place of (2,)"),
        (torch.ones(2), numpy.ones(2), "a ndarray in place of a Tensor"),
        (1.0, 2.0, "2.0 in place of 1.0"),
        (1, 2, "2 in place of 1"),
        (True, 1, "1 in place of True"),
        ("a", "b", "'b' in place of 'a'"),
        (1.0, "b", "'b' in place of 1.0"),
        (object(), Answer(1), "2 outputs nested otherwise than the 1"),
        ((1, 2), (1,), "nested otherwise"),
        ({"a": 1}, {"b": 1}, "nested otherwise"),
        (object(), random.Random(1), "a Random in place of a object"),
    ],
)
def test_what_does_not_agree(one: Any, other: Any, said: str) -> None:
    found = held(one, other)
    assert not found.equal
    assert not found.exact
    assert said in found.text


def test_it_says_where() -> None:
    one = OrderedDict(x=1, y=[Answer(torch.zeros(2)), 3])
    found = held(one, OrderedDict(x=1, y=[Answer(torch.ones(2)), 4]))
    assert found.where == "['y'][0].logits"
    assert found.text.startswith("['y'][0].logits: 2 of 2 numbers of torch.float32 differ")


def test_what_cannot_be_compared_is_said() -> None:
    found = held((object(), 1), (object(), 1))
    assert found.equal
    assert found.text == "equal to the bit; 1 of an opaque type were not compared"
    assert held(object(), object()).text.startswith("there was nothing to compare")
    assert held("a", "a").max_abs == Missing("not_set")


def test_what_is_kept_is_a_copy() -> None:
    value = torch.ones(2)
    before = kept(value)
    value.add_(1)
    assert not agreement(before, value).equal
    array = numpy.ones(2)
    before = kept(array)
    array += 1
    assert not agreement(before, array).equal


def test_arrays_of_jax() -> None:
    """In a process of its own: with JAX in this one, other tests would find a device."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("no JAX here")
    code = """
        import jax.numpy as jnp
        from gpu_timed.measure.outputs import agreement, kept
        one = jnp.ones(3, dtype=jnp.bfloat16)
        print([agreement(kept(one), one * by).equal for by in (1 + 2**-7, 2)])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[True, False]"


# -- sources of random numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "draw", [random.random, numpy.random.rand, lambda: torch.rand(1).item()], ids=["python", "numpy", "torch"]
)
def test_sources_are_seeded_and_put_back(draw: Any) -> None:
    seeds.seed(3)
    expected = [draw(), draw()]
    seeds.seed(3)
    first = draw()
    with seeds.kept():
        seeds.seed(9)
        assert not seeds.drawn_since(9)
        draw()
        assert seeds.drawn_since(9)
    assert [first, draw()] == expected


# -- steadiness -----------------------------------------------------------------------------------------------


def check(function: Any, *arguments: Any, reset: Any = None) -> steadiness.Steady:
    function(*arguments)  # as the calls that warm it up
    return steadiness.check(function, function, arguments, {}, reset=reset, seed=1)


def test_a_plain_function_is_steady() -> None:
    found = check(lambda x: x * 2, torch.ones(3))
    assert (found.why_not, found.draws, found.note) == ("", False, "")
    assert found.agreement.exact


def test_a_module_in_training_is_not() -> None:
    norm = torch.nn.BatchNorm1d(3)
    x = torch.randn(4, 3)
    assert "in place" in check(lambda x: norm(x) * 1, x).why_not
    assert "in place" in check(norm, x).why_not
    norm.eval()
    assert check(norm, x).why_not == ""


_cache = torch.zeros(3)
_count = 0


def test_what_is_global_is_named_as_it_is_written() -> None:
    def moves(x: Any) -> Any:
        _cache.add_(1)
        return x

    def counts(x: Any) -> Any:
        global _count  # noqa: PLW0603
        _count += 1
        return x

    assert check(moves, torch.ones(3)).why_not.startswith("a call changes _cache in place")
    assert check(counts, torch.ones(3)).why_not.startswith("a call changes host state (_count)")


def test_writing_the_same_again_is_no_change() -> None:
    cache = torch.zeros(4, 3)

    def step(x: Any) -> Any:
        cache[2] = x
        return cache.sum()

    assert check(step, torch.ones(3)).why_not == ""

    def moves(x: Any) -> Any:
        cache.add_(x)
        return x

    assert "cache" in check(moves, torch.ones(3)).why_not


def test_an_argument_that_is_changed() -> None:
    def step(x: Any) -> int:
        x += 1
        return 0

    assert "a call changes argument [0] in place" in check(step, torch.ones(3)).why_not
    assert "a call changes argument [0] in place" in check(step, numpy.ones(3)).why_not

    def unseen(x: Any) -> int:  # as a kernel that is no operation of torch
        x.numpy()[0] += 1
        return 0

    assert "a call changes argument [0] in place" in check(unseen, torch.ones(3)).why_not


def test_reset_makes_it_steady_if_it_puts_everything_back() -> None:
    x, held = torch.ones(3), [0]

    def step(x: Any) -> Any:
        x.add_(1)
        held[0] += 1
        return x.sum() + held[0]

    def reset() -> None:
        x.fill_(1)
        held[0] = 0

    assert "differ" in check(step, x).why_not
    found = check(step, x, reset=reset)
    assert found.why_not == ""
    assert "a call changes argument [0] in place" in found.note
    half = check(step, x, reset=lambda: x.fill_(1))
    assert "though reset= was called before each" in half.why_not


def test_random_numbers_are_no_state() -> None:
    found = check(torch.nn.functional.dropout, torch.ones(100))
    assert (found.why_not, found.draws) == ("", True)


def test_what_is_too_large_to_copy_is_told_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steadiness, "MOST_BYTES", 8)
    cache = torch.zeros(100)

    def same(x: Any) -> Any:
        cache[2] = 1
        return x

    assert "cache" in check(same, 1).why_not


# -- torch's arms, by compare() -------------------------------------------------------------------------------


def test_a_graph_is_an_arm(graphs: Device) -> None:
    layer = torch.nn.Linear(8, 8)

    def step(x: Any) -> Any:
        with torch.no_grad():
            return layer(x)

    found = compare(step, (torch.ones(2, 8),), modes=("eager", CudaGraph(warmup=1)), budget_s=0.4)
    graph = found.arm("cuda_graph")
    assert graph.ran == "cuda_graph"
    assert graph.honoured
    assert graph.refused == ""
    assert isinstance(graph.cold.one_off_ns, int)
    assert [call.ran for call in graph.cold.calls][:3] == ["eager", "eager", "cuda_graph"]
    assert graph.agreement.equal  # type: ignore[union-attr]
    assert found.verdicts[0].word is not None
    assert graphs.replays > 20


def test_first_calls_of_eager_are_known_where_a_graph_is_the_baseline(graphs: Device) -> None:
    """They were made before the graph's, to see whether the function does the same every time."""
    chance = [True]

    def step(x: Any) -> Any:
        if chance and chance.pop():
            current.modes.cold("built something", 5)
        return x * 2

    modes = (CudaGraph(warmup=1), "eager")
    found = compare(step, (torch.ones(2),), modes=modes, baseline="cuda_graph", budget_s=0.2, reset=lambda: None)
    assert not found.refused
    graph, eager = found.arms
    assert [cause.what for cause in eager.cold.calls[0].causes] == ["built something"]
    assert {call.ran for call in eager.cold.calls} == {"eager"}
    assert "built something" not in str(graph.cold)


def test_a_mode_that_must_run_and_cannot_names_the_function(graphs: Device) -> None:
    held = [0]

    def step(x: Any) -> Any:
        held[0] += 1
        return x

    modes = ("eager", CudaGraph(warmup=1, strict=True))
    arm = compare(step, (torch.ones(2),), modes=modes, budget_s=0.4, reset=lambda: None, outputs="ignore").arms[1]
    assert arm.refused.startswith("ModeError: step cannot run as cuda_graph: changes host state"), arm.refused


def test_state_that_a_graph_would_not_move_and_reset(graphs: Device) -> None:
    held = [0]

    def step(x: Any) -> Any:
        held[0] += 1
        return x * held[0]

    def reset() -> None:
        held[0] = 0

    modes = ("eager", CudaGraph(warmup=1))
    found = compare(step, (torch.ones(2),), modes=modes, budget_s=0.4)
    assert "two calls from the same inputs differ" in found.refused
    found = compare(step, (torch.ones(2),), modes=modes, budget_s=0.4, reset=reset)
    assert not found.refused
    assert found.arm("eager").samples.wall_ns
    assert "changes host state, which a replay would not" in found.verdicts[0].reason
    tensor = torch.zeros(2)

    def moves(x: Any) -> Any:
        tensor.add_(1)
        return x * tensor

    found = compare(moves, (torch.ones(2),), modes=modes, budget_s=0.4, reset=tensor.zero_)
    assert found.arm("cuda_graph").ran == "cuda_graph", found.arm("cuda_graph").reason
    assert found.arm("cuda_graph").agreement.equal  # type: ignore[union-attr]
    assert found.verdicts[0].word is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_with_other_outputs_gets_no_verdict() -> None:
    from gpu_timed import Compile

    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *args: [each + 1 for each in graph.forward(*args)]

    found = compare(lambda x: x * 2, (torch.ones(4),), modes=("eager", Compile(backend=wrong)), budget_s=0.4)
    assert found.arm("compile").ran == "compile"
    (verdict,) = found.verdicts
    assert verdict.word is None
    assert "4 of 4 numbers of torch.float32 differ, by up to 1" in verdict.reason


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_was_asked_for_and_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare(lambda x: x * 2, (torch.ones(4),), modes=("eager", "reduce-overhead"), budget_s=0.4)
    if torch.cuda.is_available():
        pytest.skip("for a machine without a device")
    arm = found.arm("reduce-overhead")
    assert (arm.ran, arm.honoured) == ("compile", False), arm
    assert found.verdicts[0].word is None
    assert "asked to run as reduce-overhead and ran as compile" in found.verdicts[0].reason
    assert outputs.arrays_of(3) is None
