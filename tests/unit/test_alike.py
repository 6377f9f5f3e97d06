"""What tells the calls of one signature at a glance: it says so of no call that has another."""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from gpu_timed.modes import torch_values  # noqa: E402 - needs torch


def taken(*arguments: Any, **named: Any) -> Any:
    return torch_values.take(arguments, named, lambda _: True, static=False)


def alike(*arguments: Any, **named: Any) -> Any:
    return torch_values.alike(taken(*arguments, **named), arguments, named)


def made(*arguments: Any, **named: Any) -> Callable[..., Any]:
    found = alike(*arguments, **named)
    assert found is not None
    return lambda *others, **other_named: found.tensors(others, other_named)


def zeros(*shape: int) -> Any:
    return torch.zeros(*shape)


class Thing:
    pass


THING = Thing()


def test_it_gives_the_tensors_of_the_like_in_order() -> None:
    tensors = [zeros(2, 3) + index for index in range(3)]
    found = made(zeros(2, 3), 5, zeros(2, 3), thing=THING, b=zeros(2, 3))(
        tensors[0], 5, tensors[1], thing=THING, b=tensors[2]
    )
    assert list(map(id, found)) == list(map(id, tensors))
    assert made(zeros(2))(tensors[0][0, :2]) is not None


OTHERS: dict[str, Callable[[], Any]] = {
    "shape": lambda: zeros(3, 2),
    "strides": lambda: zeros(3, 2).T,
    "offset is no difference": lambda: zeros(4, 3)[2:],
    "dtype": lambda: zeros(2, 3).half(),
    "device": lambda: torch.zeros(2, 3, device="meta"),
    "kind": lambda: torch.nn.Parameter(zeros(2, 3), requires_grad=False),
    "requires grad": lambda: zeros(2, 3).requires_grad_(),
    "layout": lambda: zeros(2, 3).to_sparse(),
    "no tensor": lambda: 3,
    "a list of them": lambda: [zeros(2, 3)],
}


@pytest.mark.parametrize("graded", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_another_tensor_is_another(name: str, graded: bool) -> None:
    with torch.set_grad_enabled(graded):
        assert (made(zeros(2, 3))(OTHERS[name]()) is not None) == (name == "offset is no difference")


def test_other_arguments_are_others() -> None:
    known = made(zeros(2), 1000.5, True, THING, k=zeros(2))
    number = 1000.5
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((zeros(2), number, 1, THING), {"k": zeros(2)}),
        ((zeros(2), number, True, Thing()), {"k": zeros(2)}),
        ((zeros(2), number, True, THING), {}),
        ((zeros(2), number, True, THING), {"other": zeros(2)}),
        ((zeros(2), number, True), {"k": zeros(2)}),
        ((zeros(2), number, True, THING, zeros(2)), {}),
        ((zeros(2), -number, True, THING), {"k": zeros(2)}),
    ]
    assert [known(*arguments, **named) for arguments, named in calls] == [None] * len(calls)


def test_a_thing_that_is_gone_is_nobody() -> None:
    thing = Thing()
    known = made(zeros(2), thing)
    del thing
    assert known(zeros(2), None) is None
    assert known(zeros(2), Thing()) is None


def test_modes_of_torch_that_are_others_are_others() -> None:
    known = made(zeros(2))
    with torch.no_grad():
        assert known(zeros(2)) is None
    with torch.inference_mode():
        ordinary = made(zeros(2))
        assert known(zeros(2)) is None
        assert ordinary(zeros(2)) is not None
    assert ordinary(zeros(2)) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert known(zeros(2)) is None


@pytest.mark.parametrize("autocast_is", [True])
def test_autocast_is_asked_for(monkeypatch: pytest.MonkeyPatch, autocast_is: bool) -> None:
    known = made(zeros(2))
    monkeypatch.setattr(torch_values, "_is_autocast", lambda *_: autocast_is)
    assert known(zeros(2)) is None
    assert alike(zeros(2)) is None


def test_what_cannot_be_told_so_is_taken_apart_each_time() -> None:
    shared = zeros(2)
    assert alike(shared, shared) is None
    assert alike([zeros(2)]) is None
    assert alike(3) is None
    assert alike(zeros(2), torch.Size([1])) is None


@pytest.mark.parametrize("error", [AttributeError, TypeError])
def test_a_torch_that_is_not_known_is_no_fault(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", fails)
    assert alike(zeros(2)) is None


def test_it_keeps_no_tensor_alive() -> None:
    import weakref

    given = zeros(2)
    gone = weakref.ref(given)
    known = made(given)
    del given
    assert gone() is None
    assert known(zeros(2)) is not None


def test_addresses() -> None:
    tensors = [zeros(2), torch.nn.Parameter(zeros(3))]
    are_at, addresses = torch_values.are_at(tensors), [each.data_ptr() for each in tensors]
    assert are_at(addresses)
    held = tensors[1].data
    tensors[1].data = zeros(3)
    assert not are_at(addresses)
    tensors[1].data = held
    assert are_at(addresses)


@pytest.mark.parametrize(
    "result", [zeros(1), (zeros(1), zeros(2)), [zeros(1)], {"a": zeros(1), "b": (3, None)}, (), ((zeros(1),),), 5]
)
def test_outputs_are_put_together_as_they_were(result: Any) -> None:
    leaves, spec = torch_values.apart(result)
    again = torch_values.together(spec, result)(list(leaves))
    assert type(again) is type(result)
    assert list(map(id, torch_values.apart(again)[0])) == list(map(id, leaves))
    assert torch_values.apart(again)[1] == spec


class Pair(NamedTuple):
    one: Any
    other: Any


NESTED: dict[str, Any] = {
    "one": zeros(1),
    "a list": [zeros(1), zeros(1)],
    "a dict": {"b": zeros(1), "a": zeros(1)},
    "nested": {"b": [zeros(1), (zeros(1), {"z": zeros(1), "a": 3})], "a": (zeros(1), None), "c": "text"},
    "empty parts": [(), {}, zeros(1), []],
    "a dict of dicts": {1: {2: zeros(1)}, (3,): {4: zeros(1)}},
    "a named tuple": Pair(zeros(1), [zeros(1)]),
    "an ordered dict": OrderedDict(b=zeros(1), a=(zeros(1),)),
    "a named tuple inside": [zeros(1), {"p": Pair(zeros(1), zeros(1))}],
    "a deque": (deque([zeros(1)], maxlen=3), zeros(1)),
    "a parameter": {"w": torch.nn.Parameter(zeros(1))},
}


@pytest.mark.parametrize("name", NESTED)
def test_outputs_are_put_together_as_they_were_apart(name: str) -> None:
    like = NESTED[name]
    leaves, spec = torch_values.apart(like)
    put = torch_values.together(spec, like)
    fresh = [leaf.clone() if torch_values.is_tensor(leaf) else leaf for leaf in leaves]
    for _ in range(2):
        made = put(list(fresh))
        again, nested = torch_values.apart(made)
        assert nested == spec
        assert all(map(operator.is_, again, fresh))
        assert type(made) is type(like)
        if isinstance(like, dict):
            assert list(made) == list(like)
