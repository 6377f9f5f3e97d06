"""Callable objects behind wrapt's proxy: they stay what they were, and can be copied and pickled."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import operator
import pickle
from typing import Any

import pytest

from gpu_timed import gpu_timed
from gpu_timed.testing import FakeDevice, capture


class Scale:
    """A callable object with state."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, x: int) -> int:
        return x * self.factor


@gpu_timed
def module_level(x: int) -> int:
    return x + 1


scale = gpu_timed(Scale(3), name="scale", sync="deferred", every=2, attributes={"model": "m"})


def test_an_object_stays_what_it_was(device: FakeDevice) -> None:
    """isinstance, attributes (read and written) and the value are the object's."""
    timed = gpu_timed(Scale(2))
    timed.factor = 5
    with capture() as records:
        assert timed(4) == 20
    assert isinstance(timed, Scale)
    assert timed.__wrapped__.factor == 5
    assert [record.name for record in records] == ["Scale"]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda timed: pickle.loads(pickle.dumps(timed))])
def test_a_copy_is_timed_and_has_its_own_state(device: FakeDevice, how: Any) -> None:
    """A copy, a deep copy and what comes back from pickle are timed with the same options, on their own object."""
    again = how(scale)
    again.factor = 7
    with capture() as records:
        assert [again(1) for _ in range(4)] == [7] * 4
    assert scale.factor == 3
    assert {record.name for record in records} == {"scale"}
    assert len(records) == 2
    assert {(record.sync, record.attributes["model"]) for record in records} == {("deferred", "m")}


@pytest.mark.parametrize("target", [functools.partial(operator.add, 1), operator.neg, max])
def test_partials_and_builtins_survive_pickle(device: FakeDevice, target: Any) -> None:
    """Partials and builtins come back from pickle timed."""
    again = pickle.loads(pickle.dumps(gpu_timed(target, name="t")))
    with capture() as records:
        assert again(3) == target(3) if target is not max else again(3, 4) == 4
    assert [record.name for record in records] == ["t"]


def test_d9_functions_pickle_by_name_and_run_in_a_spawned_worker() -> None:
    """D9: a decorated function and a decorated object run in a pool of spawned processes."""
    assert pickle.loads(pickle.dumps(module_level)) is module_level
    assert copy.deepcopy(module_level)(1) == 2
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(module_level, [1, 2]) == [2, 3]
        assert pool.map(scale, [1, 2]) == [3, 6]


def test_a_copied_module_uses_its_own_weights() -> None:
    """A deep copy of a live nn.Module that was decorated has weights of its own, and both are timed."""
    torch = pytest.importorskip("torch")
    module = gpu_timed(torch.nn.Linear(2, 2), name="linear")
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    x = torch.ones(1, 2)
    with capture() as records:
        assert other(x).abs().sum() == 0
        assert module(x).abs().sum() > 0
    assert isinstance(module, torch.nn.Module)
    assert [record.name for record in records] == ["linear"] * 2
    assert torch.nn.Sequential(module).state_dict().keys() == {"0.weight", "0.bias"}
