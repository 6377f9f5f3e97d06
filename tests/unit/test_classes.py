"""``@gpu_timed`` on a class: calling its instances is timed, and the class stays the class it was."""

from __future__ import annotations

import abc
import array
import asyncio
import copy
import enum
import inspect
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import make_dataclass
from typing import Any, NamedTuple

import pytest

from gpu_timed import ConfigurationError, NotCallableError, gpu_timed
from gpu_timed.testing import FakeDevice, capture

WORK_NS = 5_000
names = lambda records: [record.name for record in records]


class Bare:
    """Works on *device*; its factor is its state."""

    factor = 3

    def __call__(self, device: FakeDevice, x: int = 1) -> int:
        """Multiply."""
        device.launch(WORK_NS)
        return x * self.factor


def dataclass(name: str, decorator: Any = lambda kind: kind, **options: Any) -> Any:
    """Make a dataclass with a call; *decorator* stands below it."""
    base, here = decorator(type("Base", (Bare,), {})), {"__module__": __name__}
    return make_dataclass(name, [("factor", int, 3)], bases=(base,), namespace=here, **options)


Frozen = gpu_timed(dataclass("Frozen", frozen=True), name="frozen")
SlotsBelow = gpu_timed(dataclass("SlotsBelow", slots=True))
SlotsAbove = dataclass("SlotsAbove", gpu_timed(name="above"), slots=True, order=True)
Timed = gpu_timed(type("Timed", (Bare,), {"LIMIT": 7, "build": classmethod(lambda cls: cls())}))
HERE: dict[str, Any] = {"factor": 3, "__module__": __name__}
calls = lambda base: lambda self, device, x=1: base.__call__(self, device, x)
Over = type("Over", (Timed,), {"__call__": calls(Timed)})
Abstract = gpu_timed(abc.ABCMeta("Abstract", (), {**HERE, "__call__": abc.abstractmethod(calls(Bare))}))
Concrete = abc.ABCMeta("Concrete", (Abstract,), {**HERE, "__call__": calls(Abstract)})
Trouble = gpu_timed(type("Trouble", (Bare, ValueError), {}))
MADE: list[Any] = []
Counting = type("Counting", (type,), {"__call__": lambda cls, *args: [MADE.append(cls), type.__call__(cls, *args)][1]})
Counted = gpu_timed(Counting("Counted", (Bare,), {}))
Pair = gpu_timed(type("Pair", (NamedTuple("Base", [("factor", int)]),), {"__call__": Bare.__call__}))
Choice = gpu_timed(enum.Enum("Choice", "ONE", type=Bare))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((kind, kind.__name__) for kind in (Timed, SlotsBelow, Trouble, Counted)),
        *((Frozen, "frozen"), (SlotsAbove, "above"), (Over, "Timed"), (Concrete, "Abstract")),
        *((lambda: Choice.ONE, "Choice"), (lambda: Pair(3), "Pair")),
    ],
)
def test_a_call_of_an_instance_is_a_record(device: FakeDevice, make: Callable[[], Any], name: str) -> None:
    """Making one is none, calling it is one, also of what comes out of pickle or a copy."""
    with capture() as records:
        made = make()
    assert records == []
    for again in (made, copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        with capture() as records:
            assert (again(device, 2), type(again)) == (6, type(made))
        assert [(record.name, record.device_ns) for record in records] == [(name, WORK_NS)]


def test_the_class_is_the_class_it_was(device: FakeDevice) -> None:
    """The very class comes back; its attributes, signature and documentation are as they were, and so is its base."""
    plain = type("Plain", (Bare,), {"__doc__": "Documented.", "__init__": lambda self, factor, *, other="": None})
    signature = inspect.signature(plain)
    assert gpu_timed(plain, name="plain") is plain
    assert (inspect.signature(plain), plain.__doc__) == (signature, "Documented.")
    assert str(inspect.signature(plain.__call__)) == "(self, device: 'FakeDevice', x: 'int' = 1) -> 'int'"
    assert (plain.__call__.__doc__, vars(plain)["__call__"].__wrapped__) == ("Multiply.", Bare.__call__)
    assert (Timed.LIMIT, type(Timed.build()), Timed.__base__) == (7, Timed, Bare)
    assert pickle.loads(pickle.dumps(Timed)) is Timed
    with capture() as records:
        assert Bare()(device) == 3
    assert records == []


def test_subclasses_abstract_methods_and_metaclasses(device: FakeDevice) -> None:
    """An override that calls no base is not timed, a decorated subclass is a span around; a metaclass is left alone."""
    apart, again = type("Apart", (Timed,), {"__call__": lambda *_: 5}), gpu_timed(type("Again", (Over,), {}))
    with capture() as records:
        assert (apart()(device), again()(device, 1)) == (5, 3)
    assert names(records) == ["Timed", "Again"]
    assert records[0].parent_id == records[1].span_id
    with pytest.raises(TypeError, match="abstract"):
        Abstract()
    MADE.clear()
    assert [type(Counted())] == MADE == [Counted]
    assert not hasattr(Counting.__call__, "__wrapped__")


def generator(_: Any, device: FakeDevice) -> Iterator[int]:
    """Work in two steps, as do the next two."""
    for step in range(2):
        device.launch(WORK_NS)
        yield step


async def coroutine(_: Any, device: FakeDevice) -> list[int]:
    return [(device.launch(WORK_NS), await asyncio.sleep(0), step)[2] for step in range(2)]


async def async_generator(_: Any, device: FakeDevice) -> AsyncIterator[int]:
    for step in generator(_, device):
        yield step


class_of = lambda call: type("C", (), {"__call__": call})


async def drain(made: Any) -> list[int]:
    """Return what a coroutine or an async generator gives."""
    return [item async for item in made] if hasattr(made, "__aiter__") else await made


@pytest.mark.parametrize("call", [generator, coroutine, async_generator])
def test_each_kind_of_call_stays_of_its_kind(device: FakeDevice, call: Any) -> None:
    """What others launch between two steps is not in the time, and the method is asked for its kind as before."""
    timed = gpu_timed(class_of(call))
    for question in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction):
        assert question(timed.__call__) == question(call)
    with capture() as records:
        made = timed()(device)
        if call is generator:
            assert [[step, device.launch(700)][0] for step in made] == [0, 1]
        else:
            assert asyncio.run(drain(made)) == [0, 1]
    assert [(record.name, record.device_ns, record.resumptions) for record in records] == [("C", 2 * WORK_NS, 3)]


@pytest.mark.parametrize("call", [coroutine, async_generator])
def test_sync_device_is_refused_where_calls_suspend(call: Any) -> None:
    """As on a coroutine function: it would block the event loop."""
    with pytest.raises(ConfigurationError, match="event loop"):
        gpu_timed(class_of(call), sync="device")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *(
            (kind("C", (), {}), r"no __call__ of its own\. Decorate its methods")
            for kind in (type, Counting, abc.ABCMeta)
        ),
        *((kind, "no __call__ of its own") for kind in (class_of(None), enum.Enum("C", "RED"))),
        *((class_of(call), "Decorate an instance instead") for call in (staticmethod(len), abs, classmethod(repr))),
    ],
)
def test_a_class_that_cannot_be_timed_is_refused_with_the_fix(kind: Any, text: str) -> None:
    """The metaclass's call is not the instances', and one that is no function binds in a way of its own."""
    with pytest.raises(NotCallableError, match=f"cannot time the class C: .*{text}"):
        gpu_timed(kind)


of_c = pytest.param(array.array, ("i", [1]))


@pytest.mark.parametrize(("kind", "args"), [(int, ("12",)), (dict, ([(1, 2)],)), of_c])
def test_a_builtin_type_is_timed_as_a_function(device: FakeDevice, kind: Any, args: tuple[Any, ...]) -> None:
    """It cannot be changed, and calling it is what one does with it."""
    timed = gpu_timed(kind)
    with capture() as records:
        assert timed(*args) == kind(*args)
    assert names(records) == [kind.__name__]


def test_modules_are_timed_in_their_forward(device: FakeDevice) -> None:
    """Hooks stand outside, state and pickle are the module's; what has no forward of Python's is refused."""
    torch = pytest.importorskip("torch")

    forward = lambda self, x: [device.launch(WORK_NS), torch.nn.Linear.forward(self, x)][1]
    Layer = type("Layer", (torch.nn.Linear,), {"forward": forward})  # noqa: N806 - a class
    assert gpu_timed(Layer, sync="deferred", attributes={"model": "m"}) is Layer
    module, hooked = torch.nn.Sequential(Layer(2, 2), type("Inherits", (Layer,), {})(2, 2)), []
    module[0].register_forward_hook(lambda *_: hooked.append(device.launch(700)))
    with capture() as records:
        assert module(torch.ones(2)).tolist() == copy.deepcopy(module)(torch.ones(2)).tolist()
    found = [(record.name, record.device_ns, record.sync, record.attributes["model"]) for record in records]
    assert found == [("Layer", WORK_NS, "deferred", "m")] * 4
    assert (len(hooked), len(module.state_dict()), "__call__" in vars(Layer)) == (2, 4, False)
    for kind in (type("Empty", (torch.nn.Module,), {}), type("S", (Layer,), {"forward": staticmethod(abs)})):
        with pytest.raises(NotCallableError, match=r"its forward is not a Python|it has no forward of"):
            gpu_timed(kind)
