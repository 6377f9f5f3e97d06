"""No answer of a graph that is not that of the function any more reaches the user: each change is one of them."""

from __future__ import annotations

import array
import collections
import functools
import gc
import itertools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from gpu_timed import CudaGraph, gpu_timed
from gpu_timed.testing import capture

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")
import torch.utils._pytree as pytree  # noqa: E402
from make_believe_graphs import Device  # noqa: E402 - needs torch

from gpu_timed.modes import graphed, host_guards, host_places, host_state, torch_values  # noqa: E402

GRAPH = CudaGraph(warmup=1)


@pytest.fixture(autouse=True, params=["dicts asked", "dicts watched"])
def how_dicts_are_known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether each entry of a dict is looked at, or torch is asked which dicts were written to."""
    monkeypatch.setattr(host_guards, "_FEWEST_WATCHED", 0 if request.param == "dicts watched" else 1 << 30)


def x(*values: float) -> Any:
    return torch.tensor(values or (1.0, 2.0))


def modes(records: list[Any]) -> list[str]:
    return [record.mode for record in records]


# -- what stands where another stood ----------------------------------------------------------------------

SOURCE = """
import cfg_of_the_user as cfg
import torch
SCALE = 2.0
W = torch.ones(2)
MODEL = None
N = 0
def times(a): return a * SCALE
def helper(a): return times(a) * W
def plain(a): return helper(a)
def nested(a): return sum([helper(a) for _ in range(2)])
def through_module(a): return a * cfg.W * cfg.inner.scale
def imports(a):
    import cfg_of_the_user
    return a * cfg_of_the_user.W
def model(a): return MODEL(a)
def default(a, held=[1.0]): return a * held[0]
def counts(a):
    global N
    N += 1
    return a * 1
def counting(a): return counts(a)
class Module(torch.nn.Module):
    def forward(self, a): return a * SCALE * W
class Methods:
    K = 1.0
    @property
    def w(self): return W
    def inner(self, a): return a * SCALE * self.w * self.K
    def step(self, a): return self.inner(a)
class Derived(Methods): pass
class Calls:
    def __call__(self, a): return a * SCALE
class Operator:
    def __matmul__(self, a): return a * SCALE
OPERATOR = Operator()
def adds(a): return a * sum([1.0])
def may_ask(a): return a * getattr(cfg, "LATER", 1.0)
def operates(a): return OPERATOR @ a
@torch.no_grad()
def without_grad(a): return a * SCALE
"""


class Thing:
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


class Slots:
    __slots__ = ("w",)

    def __init__(self) -> None:
        self.w = torch.ones(2)

    def step(self, a: Any) -> Any:
        return a * self.w


class Outer(torch.nn.Module):  # type: ignore[misc] # torch is not read by mypy
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.parts = torch.nn.ModuleList([Inner(), Inner()])

    def forward(self, a: Any) -> Any:
        for part in self.parts:
            a = part(a)
        return self.inner(a)


class Inner(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, a: Any) -> Any:
        return a * self.scale


class Twice(Inner):
    def forward(self, a: Any) -> Any:
        return a * self.scale * 2


class Nines(torch.nn.ReLU):  # type: ignore[misc]
    def forward(self, a: Any) -> Any:
        return a * 9


class Buffered(torch.nn.Module):  # type: ignore[misc]
    def forward(self, a: Any) -> Any:
        return a * sum(self.buffers(), 1.0)


class Calling:
    def __call__(self, a: Any) -> Any:
        return a * 1


class CallingNines:
    def __call__(self, a: Any) -> Any:
        return a * 9


class Lying(dict):  # type: ignore[type-arg]
    """Says that there is nothing in it, and keeps in mind that it was asked."""

    __slots__ = ("asked", "slot")

    def __len__(self) -> int:
        self.asked = True
        return 0

    def __iter__(self) -> Any:
        self.asked = True
        return iter(())

    __getitem__ = __iter__


class LyingList(list):  # type: ignore[type-arg]
    __len__, __iter__, __getitem__ = Lying.__len__, Lying.__iter__, Lying.__iter__
    asked = False


class Attributed(dict):  # type: ignore[type-arg]
    pass


class Named:
    """A key that is equal to another one and is not the same, and keeps in mind that it was asked."""

    asked = False

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __eq__(self, _: object) -> bool:
        Named.asked = True
        return True

    def __hash__(self) -> int:
        Named.asked = True
        return 7


class Going(torch.nn.Module):  # type: ignore[misc]
    """Goes through all that is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.relu = torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.ReLU()

    def forward(self, a: Any) -> Any:
        for module in self.modules():
            a = module(a) if isinstance(module, Inner) else a
        return a * (len(list(self.relu.parameters())) + 1)


def gain(module: Any, _given: Any, result: Any) -> Any:
    return result * getattr(module, "gain", 1.0)


class Number(float):
    """A number with attributes."""


class Pair(tuple):  # type: ignore[type-arg] # noqa: SLOT001 - it is to have attributes
    """A tuple with attributes."""


def with_scale(of: Any, scale: float) -> Any:
    of.scale = scale
    return of


def another_at_the_same_address(held: set[Any]) -> None:
    address = id(next(iter(held)))
    held.clear()
    made = []
    for value in range(10_000):
        made.append(float(value + 2))
        if id(made[-1]) == address:
            held.add(made[-1])
            return
    held.add(2.0)  # that of before is still there


def _with_cell() -> Callable[[Any], Any]:
    value = 1.0

    def asks(a: Any) -> Any:
        try:
            return a * value
        except NameError:
            return a * 1

    return asks


asks_for_cell = _with_cell()


class Alike(type):
    """Of classes each of which says that it is every other."""

    def __eq__(cls, _: object) -> bool:
        return True

    def __hash__(cls) -> int:
        return 7


class OneAlike(metaclass=Alike):
    value = 1.0


class OtherAlike(metaclass=Alike):
    value = 5.0


class Pretending:
    """Says that it is a dict, as some proxies do."""

    def __init__(self) -> None:
        self.value = 1.0

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return dict


def one_after_another(values: Any, a: Any) -> Any:
    for value in values:
        a = a * 2 + value
    return a


def scaled(value: float, a: Any) -> Any:
    return a * value


def other(_module: Any, _given: Any, result: Any) -> Any:
    return result * 9


User = types.ModuleType


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> User:
    cfg = types.ModuleType("cfg_of_the_user")
    cfg.W, cfg.inner = torch.ones(2), Thing(scale=1.0)  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "cfg_of_the_user", cfg)
    made = types.ModuleType("of_the_user")
    exec(SOURCE, made.__dict__)
    of_torch = types.ModuleType("torch.somewhere")
    exec("def around(f): return lambda a: f(a)", of_torch.__dict__)
    made.around = of_torch.around  # type: ignore[attr-defined]
    return made


def nines() -> Any:
    return torch.full((2,), 9.0)


def places(user: User) -> dict[str, tuple[Callable[..., Any], Callable[[], Any]]]:
    """Return functions, and changes that each of them would see."""
    outer, held, listed, slots = Outer(), Thing(cfg=Thing(w=torch.ones(2))), [(torch.ones(2),)], Slots()
    sequence = torch.nn.Sequential(Inner(), Inner())
    chosen = Thing(way=torch.relu, parts=collections.deque([1.0]), some={1.0}, array=numpy.ones(1))
    given = functools.partial(scaled, 1.0)
    picked = Thing(function=given)
    methods, derived = user.Methods(), user.Derived()
    user.MODEL = Inner()
    inner, buffered, calling, empty = Inner(), Buffered(), Calling(), Thing(some={})
    lying, full, lying_list = Lying(), Lying(one=1.0), LyingList([1.0])
    attributed, counter = Attributed(one=1), collections.Counter()
    full.slot = attributed.w = 1.0
    ordered, plain, key = collections.OrderedDict(a=1.0, b=2.0), {"a": 1.0, "b": 2.0}, Named(1.0)
    keyed, keyed_too = {key: 1.0}, {Named(1.0): 1.0}
    weight, bag, relu = torch.nn.Module(), torch.nn.Module(), torch.nn.ReLU()
    weight.register_parameter("w", torch.nn.Parameter(torch.ones(2), requires_grad=False))
    relu.register_forward_hook(gain)
    going, going_too, hooked, part = Going(), Going(), Inner(), Inner()
    hooked.register_forward_hook(other)
    number, pair, some = with_scale(Number(1.0), 1.0), Thing(of=with_scale(Pair((1,)), 1.0)), {float("1")}
    frozen = Thing(of=frozenset({Named(1.0)}))
    unset, cell = SlotCache(), types.CellType()
    behind, bare, shaped = {"w": 1.0}, array.array("d", [1.0]), numpy.ones((2, 1))
    proxy, view = types.MappingProxyType(behind), behind.values()
    one_alike, pretending = OneAlike(), Pretending()
    with_relu = torch.nn.Sequential(torch.nn.ReLU(), Inner())

    def put(holder: Any, name: str, value: Any) -> Callable[[], Any]:
        return lambda: setattr(holder, name, value)

    return {
        "a submodule": (outer, put(outer, "inner", Inner(5.0))),
        "one of a list of modules": (outer, lambda: outer.parts.__setitem__(0, Inner(5.0))),
        "one more in a list of modules": (outer, lambda: outer.parts.append(Inner(5.0))),
        "a setting of a submodule": (outer, put(outer.parts[0], "scale", 5.0)),
        "a hook": (outer, lambda: outer.inner.register_forward_hook(other)),
        "one of a sequence": (sequence, lambda: sequence.__setitem__(0, Inner(5.0))),
        "an object in between": (lambda a: a * held.cfg.w, put(held, "cfg", Thing(w=nines()))),
        "a tuple in a list": (lambda a: a * listed[0][0], lambda: listed.__setitem__(0, (nines(),))),
        "a function": (lambda a: chosen.way(a) * 1, put(chosen, "way", torch.sin)),
        "what a partial is of": (
            lambda a: picked.function(a) * 1,
            put(picked, "function", functools.partial(scaled, 5.0)),
        ),
        "in a deque": (lambda a: a * chosen.parts[0], lambda: chosen.parts.__setitem__(0, 5.0)),
        "in a set": (lambda a: a * sum(chosen.some), lambda: (chosen.some.clear(), chosen.some.add(5.0))),
        "in an array": (lambda a: a * float(chosen.array[0]), lambda: chosen.array.fill(5.0)),
        "a slot": (slots.step, lambda: setattr(slots, "w", nines())),
        "a helper's number": (user.plain, put(user, "SCALE", 5.0)),
        "a helper's tensor": (user.plain, put(user, "W", nines())),
        "a helper": (user.plain, put(user, "helper", lambda a: a * 9)),
        "in code inside": (user.nested, put(user, "SCALE", 5.0)),
        "an attribute of a module": (user.through_module, put(user.cfg, "W", nines())),
        "in an attribute of a module": (user.through_module, put(user.cfg, "inner", Thing(scale=5.0))),
        "what is imported inside": (user.imports, put(user.cfg, "W", nines())),
        "a global model": (user.model, put(user, "MODEL", Inner(5.0))),
        "a default": (user.default, lambda: user.default.__defaults__[0].__setitem__(0, 5.0)),
        "what forward reads": (user.Module(), put(user, "SCALE", 5.0)),
        "what a method's method reads": (methods.step, put(user, "SCALE", 5.0)),
        "what a property reads": (methods.step, put(user, "W", nines())),
        "an attribute of a class": (methods.step, put(user.Methods, "K", 5.0)),
        "what hides one of a class": (methods.step, put(methods, "K", 5.0)),
        "what hides one of a class that it inherits": (derived.step, put(user.Derived, "K", 5.0)),
        "what a function reads that torch stands around": (user.around(user.plain), put(user, "SCALE", 5.0)),
        "what an operator reads": (user.operates, put(user, "SCALE", 5.0)),
        "what a decorated function reads": (user.without_grad, put(user, "SCALE", 5.0)),
        "the class of a module": (lambda a: inner(a) * 1, put(inner, "__class__", Twice)),
        "the class of a module of torch": (with_relu, put(with_relu[0], "__class__", Nines)),
        "the class of an object": (lambda a: calling(a) * 1, put(calling, "__class__", CallingNines)),
        "all attributes at once": (lambda a: a * held.cfg.w, put(held.cfg, "__dict__", {"w": nines()})),
        "a buffer of a module that had none": (buffered, lambda: buffered.register_buffer("b", torch.tensor(4.0))),
        "what an empty dict took over whole": (
            lambda a: a * sum(empty.some.values(), 1.0),
            lambda: empty.some.update({"one": 4.0}),
        ),
        "in a dict of the user's that was empty": (
            lambda a: a * sum(dict.values(lying), 1.0),
            lambda: lying.update(one=4.0),
        ),
        "in a dict of the user's": (lambda a: a * sum(dict.values(full)), lambda: full.update(one=4.0)),
        "in a list of the user's": (
            lambda a: a * list.__getitem__(lying_list, 0),
            lambda: list.__setitem__(lying_list, 0, 4.0),
        ),
        "a slot of a dict": (lambda a: a * full.slot, put(full, "slot", 5.0)),
        "all attributes of a dict": (lambda a: a * attributed.w, put(attributed, "__dict__", {"w": 5.0})),
        "the order of a dict": (
            lambda a: one_after_another(plain.values(), a),
            lambda: plain.update(a=plain.pop("a")),
        ),
        "the order of an ordered dict": (
            lambda a: one_after_another(ordered.values(), a),
            lambda: ordered.move_to_end("a"),
        ),
        "in a key": (lambda a: a * next(iter(keyed)).scale, put(key, "scale", 5.0)),
        "a key": (
            lambda a: a * next(iter(keyed_too)).scale,
            lambda: (keyed_too.clear(), keyed_too.update({Named(5.0): 1.0})),
        ),
        "all parameters": (lambda a: a * weight.w, put(weight, "_parameters", {"w": nines()})),
        "all hooks": (lambda a: hooked(a) * 1, put(hooked, "_forward_hooks", collections.OrderedDict())),
        "the state of a module": (
            lambda a: part(a) * 1,
            lambda: part.__setstate__({**vars(part), "_modules": {}, "_forward_hooks": {0: other}}),
        ),
        "in an empty module of torch": (
            lambda a: a * getattr(bag, "k", 1.0),
            lambda: bag.register_buffer("k", torch.tensor(4.0)),
        ),
        "a module in one of torch": (going, lambda: going.linear.add_module("more", Inner(5.0))),
        "a parameter of a module of torch": (going_too, lambda: going_too.relu.register_parameter("p", weight.w)),
        "what a hook asks a module of torch for": (
            lambda a: relu(a) * 1,
            lambda: relu.register_buffer("gain", torch.tensor(4.0)),
        ),
        "a number in a set": (lambda a: a * sum(some), lambda: another_at_the_same_address(some)),
        "what is equal to one of a set": (
            lambda a: a * next(iter(frozen.of)).scale,
            put(frozen, "of", frozenset({Named(5.0)})),
        ),
        "an attribute of a number": (lambda a: a * number * number.scale, put(number, "scale", 5.0)),
        "a tuple with another attribute": (
            lambda a: a * pair.of.scale,
            put(pair, "of", with_scale(Pair((1,)), 5.0)),
        ),
        "a slot that was not set": (lambda a: a * getattr(unset, "w", 1.0), put(unset, "w", 5.0)),
        "a variable that was not set": (
            types.FunctionType(asks_for_cell.__code__, globals(), "asks", None, (cell,)),
            put(cell, "cell_contents", 5.0),
        ),
        "the code of a helper": (user.plain, put(user.helper, "__code__", (lambda a: a * 9).__code__)),
        "a class that is equal to the other": (lambda a: a * one_alike.value, put(one_alike, "__class__", OtherAlike)),
        "in what says that it is a dict": (lambda a: a * pretending.value, put(pretending, "value", 5.0)),
        "what hides a function of Python's": (user.adds, put(user, "sum", lambda _: 5.0)),
        "a name in a module that had none": (user.may_ask, put(user.cfg, "LATER", 5.0)),
        "behind a proxy": (lambda a: a * proxy["w"], lambda: behind.update(w=5.0)),
        "behind a view": (lambda a: a * sum(view), lambda: behind.update(w=5.0)),
        "in an array of Python's": (lambda a: a * bare[0], lambda: bare.__setitem__(0, 5.0)),
        "the shape of an array": (lambda a: a * shaped.shape[0], lambda: shaped.resize((1, 2), refcheck=False)),
        "in an empty counter": (lambda a: a * (1 + sum(counter.values())), lambda: counter.update({"one": 4})),
    }


NAMES = (
    *("a submodule", "one of a list of modules", "one more in a list of modules", "a setting of a submodule"),
    *("a hook", "one of a sequence", "an object in between", "a tuple in a list", "a function"),
    *("what a partial is of", "in a deque", "in a set", "in an array", "a slot", "a helper's number"),
    *("a helper's tensor", "a helper", "in code inside", "an attribute of a module"),
    *("in an attribute of a module", "what is imported inside", "a global model", "a default"),
    *("what forward reads", "what a method's method reads", "what a property reads", "an attribute of a class"),
    *("what hides one of a class that it inherits", "what a function reads that torch stands around"),
    *("what hides one of a class", "what an operator reads", "what a decorated function reads"),
    *("the class of a module", "the class of a module of torch", "the class of an object", "all attributes at once"),
    *("a buffer of a module that had none", "what an empty dict took over whole"),
    *("in a dict of the user's that was empty", "in a dict of the user's", "in a list of the user's"),
    *("all parameters", "all hooks", "the state of a module", "in an empty module of torch"),
    *("a module in one of torch", "a parameter of a module of torch", "what a hook asks a module of torch for"),
    *("a number in a set", "what is equal to one of a set", "an attribute of a number"),
    *("a class that is equal to the other", "in what says that it is a dict"),
    *("behind a proxy", "behind a view", "in an array of Python's", "the shape of an array"),
    *("what hides a function of Python's", "a name in a module that had none"),
    *(
        "the code of a helper",
        "a tuple with another attribute",
        "a slot that was not set",
        "a variable that was not set",
    ),
    *("the order of a dict", "the order of an ordered dict", "in a key", "a key"),
    *("a slot of a dict", "all attributes of a dict", "in an empty counter"),
)


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_where_another_stood_is_not_the_graphs(graphs: Device, user: User, name: str) -> None:
    function, change = places(user)[name]
    f = gpu_timed(function, name="f", mode=GRAPH)
    for _ in range(4):
        before = f(x()).tolist()
    assert (graphs.captures, graphs.replays) == (1, 3)  # two calls, and what was compared
    change()
    expected = function(x()).tolist()
    assert expected != before
    assert [f(x()).tolist() for _ in range(3)] == [expected] * 3
    assert graphs.captures == 2


@pytest.mark.parametrize("how", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_a_hook_of_all_modules_is_one_of_each(graphs: Device, how: str) -> None:
    inner = Inner()
    f = gpu_timed(lambda a: inner(a) * 1, name="f", mode=GRAPH)
    for _ in range(4):
        f(x())
    handle = getattr(torch.nn.modules.module, how)(lambda _, given, result=None: given[0] * 9)
    try:
        assert [f(x()).tolist() for _ in range(3)] == [[9.0, 18.0]] * 3
    finally:
        handle.remove()
    assert f(x()).tolist() == [1.0, 2.0]


def test_the_class_of_an_argument_is_looked_at(graphs: Device) -> None:
    """Which is not kept alive for it."""
    calling = Calling()
    f = gpu_timed(lambda a, by: by(a) * 1, name="f", mode=GRAPH)
    for _ in range(4):
        assert f(x(), calling).tolist() == [1.0, 2.0]
    assert graphs.replays == 3
    calling.__class__ = CallingNines  # type: ignore[assignment]
    assert [f(x(), calling).tolist() for _ in range(3)] == [[9.0, 18.0]] * 3
    alive = weakref.ref(calling)
    del calling
    gc.collect()
    assert alive() is None


def test_a_number_with_attributes_is_known_by_what_it_is_and_not_by_its_value(graphs: Device) -> None:
    f = gpu_timed(lambda a, by: a * by * by.scale, name="f", mode=GRAPH)
    one, other_one = with_scale(Number(2.0), 1.0), with_scale(Number(2.0), 5.0)
    for _ in range(4):
        assert f(x(), one).tolist() == [2.0, 4.0]
    assert graphs.replays == 3
    assert f(x(), other_one).tolist() == [10.0, 20.0]
    one.scale = 3.0
    assert f(x(), one).tolist() == [6.0, 12.0]
    addresses = set()
    for scale in range(1, 20):
        made = with_scale(Number(2.0), float(scale))
        addresses.add(id(made))
        assert f(x(), made).tolist() == [2.0 * scale, 4.0 * scale]
        del made
    assert len(addresses) < 19


class Cache(dict):  # type: ignore[type-arg]
    pass


class ListCache(list):  # type: ignore[type-arg]
    pass


class SlotCache:
    __slots__ = ("__weakref__", "w")


class ArrayCache(numpy.ndarray):  # type: ignore[misc,type-arg]
    pass


def slot_cache() -> Any:
    made = SlotCache()
    made.w = 1.0  # type: ignore[attr-defined]
    return made


CACHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (lambda: Cache(w=1.0), lambda made: made["w"], lambda made: made.update(w=5.0)),
    "list": (lambda: ListCache([1.0]), lambda made: made[0], lambda made: made.__setitem__(0, 5.0)),
    "slots": (slot_cache, lambda made: made.w, lambda made: setattr(made, "w", 5.0)),
    "array": (lambda: numpy.ones(1).view(ArrayCache), lambda made: float(made[0]), lambda made: made.fill(5.0)),
}


@pytest.mark.parametrize("kind", CACHES)
def test_what_an_argument_holds_is_looked_at_and_does_not_keep_it_alive(graphs: Device, kind: str) -> None:
    make, ask, change = CACHES[kind]
    f = gpu_timed(lambda a, by: a * ask(by), name="f", mode=GRAPH)
    made = make()
    for _ in range(4):
        assert f(x(), made).tolist() == [1.0, 2.0]
    assert graphs.replays == 3
    change(made)
    assert [f(x(), made).tolist() for _ in range(4)] == [[5.0, 10.0]] * 4
    assert graphs.captures == 2
    alive = weakref.ref(made)
    del made
    gc.collect()
    assert alive() is None


def test_every_place_is_looked_at(user: User) -> None:
    assert set(NAMES) == set(places(user))


def test_functions_of_torch_are_looked_at_where_they_stand(graphs: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by another library, say, put in the place of torch's."""
    layer = torch.nn.Linear(2, 2)
    changes = (
        (lambda a: torch.nn.functional.relu(a) * 1, torch.nn.functional, "relu", torch.sin),
        (lambda a: torch.cos(a) * 1, torch, "cos", torch.sin),
        (layer, torch.nn.Linear, "forward", lambda _, a: torch.sin(a)),
        (lambda a: layer(a) * 1, torch.nn.Linear, "forward", lambda _, a: torch.sin(a)),
    )
    for function, holder, name, other_one in changes:
        f = gpu_timed(function, name="f", mode=GRAPH)
        with monkeypatch.context() as patch, torch.no_grad():
            for _ in range(4):
                f(x())
            patch.setattr(holder, name, other_one)
            assert f(x()).tolist() == x().sin().tolist()
    assert graphs.captures == 2 * len(changes)


@pytest.mark.parametrize("how", ["function", "module", "method", "partial", "instance"])
def test_what_a_site_inside_reads_is_looked_at_too(graphs: Device, user: User, how: str) -> None:
    """Whatever stands around it."""
    module, methods = Inner(2.0), user.Methods()
    decorated: Any = {
        "function": lambda: gpu_timed(user.plain, name="inner"),
        "module": lambda: gpu_timed(module, name="inner"),
        "method": lambda: gpu_timed(methods.step, name="inner"),
        "partial": lambda: gpu_timed(functools.partial(user.plain), name="inner"),
        "instance": lambda: gpu_timed(user.Calls(), name="inner"),
    }[how]()
    f = gpu_timed(lambda a: decorated(a) + 1, name="outer", mode=GRAPH)
    for _ in range(4):
        before = f(x()).tolist()
    if how == "module":
        module.scale = 5.0
    else:
        user.SCALE = 5.0
    expected = (decorated(x()) + 1).tolist()
    assert expected != before
    assert f(x()).tolist() == expected
    assert graphs.captures == 2


@pytest.mark.parametrize("where", ["global of a helper", "deque", "array", "set", "tuple put anew"])
def test_what_a_call_changes_there_is_never_replayed(graphs: Device, user: User, where: str) -> None:
    held = Thing(parts=collections.deque(maxlen=3), array=numpy.zeros(1), some=set(), pair=(0, object()))

    def deque(a: Any) -> Any:
        held.parts.append(1)
        return a * 1

    def array(a: Any) -> Any:
        held.array[0] += 1
        return a * 1

    def some(a: Any) -> Any:
        held.some.add(len(held.some))
        return a * 1

    def pair(a: Any) -> Any:
        held.pair = 0, object()
        return a * 1

    made = {"global of a helper": user.counting, "deque": deque, "array": array, "set": some, "tuple put anew": pair}
    f = gpu_timed(made[where], name="f", mode=GRAPH)
    with capture() as records:
        f(x())
    assert "changes host state" in records[0].mode_reason
    assert graphs.captures == 0


def test_what_is_equal_by_value_is_no_change(graphs: Device) -> None:
    """A shape, dtype or number that a call puts down again: made anew, and what it was."""
    held = Thing(shape=None, dtype=None, size=None)

    @gpu_timed(name="f", mode=CudaGraph(warmup=2))
    def f(a: Any) -> Any:
        held.shape, held.dtype, held.size, held.device = a.shape, a.dtype, float(a.numel()) + 1000.5, a.device
        return a * 1

    with capture() as records:
        for _ in range(5):
            f(x())
    assert modes(records)[3:] == ["cuda_graph"] * 2


def test_what_is_equal_and_another_object_is_known_at_a_glance_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Thing(size=1000.5, shape=(1, 2000))
    guards = host_state.Snapshot(lambda: held, [], torch.is_tensor).guards()
    asked: list[bool] = []
    real = guards._any_other
    monkeypatch.setattr(guards, "_any_other", lambda: (asked.append(True), real())[1])
    held.size, held.shape = float("1000.5"), (1, int("2000"))
    assert [guards.stale() for _ in range(3)] == [False] * 3
    assert asked == [True]
    held.size = 1000.0
    assert guards.stale()


class Unequal:
    def __eq__(self, _: object) -> bool:
        raise AssertionError("asked")

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def test_objects_of_the_user_are_not_asked(graphs: Device) -> None:
    held = Thing(one=Unequal(), more=[Unequal(), (Unequal(),)])
    f = gpu_timed(lambda a: (held, a * 1)[1], name="f", mode=GRAPH)
    for _ in range(4):
        f(x())
    held.one, held.more[0] = Unequal(), Unequal()
    for _ in range(3):
        f(x())
    assert graphs.captures == 2


def test_names_that_nobody_asks_for_are_no_change(graphs: Device, user: User) -> None:
    f = gpu_timed(user.adds, name="f", mode=GRAPH)
    for count in range(5):
        f(x())
        setattr(user, f"more{count}", count)
    assert (graphs.captures, graphs.replays) == (1, 4)
    del user.more0
    f(x())
    user.sum = lambda _: 5.0  # type: ignore[attr-defined]
    assert f(x()).tolist() == [5.0, 10.0]


def test_containers_of_the_user_are_not_asked(graphs: Device) -> None:
    held = Thing(dict=Lying(one=1.0), list=LyingList([1.0]))
    f = gpu_timed(lambda a: (held, a * 1)[1], name="f", mode=GRAPH)
    held.dict.asked = held.list.asked = False
    for _ in range(4):
        f(x())
    assert graphs.replays == 3
    dict.__setitem__(held.dict, "one", 2.0)
    f(x())
    assert graphs.captures == 2
    assert not held.dict.asked
    assert not held.list.asked


def test_keys_of_the_user_are_not_asked(graphs: Device) -> None:
    key = Named(1.0)
    held = {key: torch.ones(2)}
    f = gpu_timed(lambda a: a * next(iter(held.values())), name="f", mode=GRAPH)
    Named.asked = False
    for _ in range(4):
        f(x())
    assert not Named.asked
    held[key] = nines()
    Named.asked = False
    assert [f(x()).tolist() for _ in range(3)] == [[9.0, 18.0]] * 3
    held[key].data = torch.full((2,), 4.0)
    assert [f(x()).tolist() for _ in range(3)] == [[4.0, 8.0]] * 3
    assert graphs.captures == 3


def test_an_empty_dict_of_another_kind_is_asked_itself() -> None:
    """One that takes over the parts of another is not told by the count, from Python 3.12 on."""
    made: list[Any] = [collections.Counter(), collections.defaultdict(list), Lying(), collections.OrderedDict(), {}]
    watched: list[Any] = []
    host_guards.Guards([(held, host_places.LENGTH, 0) for held in made], writes=watched.extend)
    assert watched == []


@pytest.mark.parametrize("how", ["too many parts", "too much in all"])
def test_what_cannot_all_be_watched_is_not_captured(graphs: Device, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(host_state, "_MOST_PARTS" if how == "too many parts" else "_MOST", 30)
    held = Thing(parts=[[0] * 10, [0] * 31])
    with capture() as records:
        assert gpu_timed(lambda a: a * held.parts[1][0], name="f", mode=GRAPH)(x()).tolist() == [0.0, 0.0]
    assert "cannot be watched" in records[0].mode_reason
    assert graphs.captures == 0


# -- a tensor's shape, at the same address ----------------------------------------------------------------


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("how", ["transposed", "narrowed", "of another dtype"])
def test_a_tensor_of_another_shape_at_the_same_address_is_another(
    graphs: Device, monkeypatch: pytest.MonkeyPatch, how: str, at_once: bool
) -> None:
    if not at_once:
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", lambda *_, **__: 1 / "")
    w = torch.arange(4.0).reshape(2, 2)
    f = gpu_timed(lambda a: a * w.sum(), name="f", mode=GRAPH)
    for _ in range(4):
        f(x())
    assert graphs.captures == 1
    address = w.data_ptr()
    if how == "transposed":
        w.t_()
    elif how == "narrowed":
        w.data = w.data[:1]
    else:
        w.data = w.data.view(torch.int32)
    assert w.data_ptr() == address
    expected = (x() * w.sum()).tolist()
    assert f(x()).tolist() == expected
    assert graphs.captures == 2


@pytest.mark.parametrize("at_once", [True, False])
def test_a_parameter_that_is_to_be_trained_from_now_on_is_another(
    graphs: Device, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    if not at_once:
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", lambda *_, **__: 1 / "")
    w = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    f = gpu_timed(lambda a: a * w, name="f", mode=GRAPH)
    for _ in range(4):
        assert not f(x()).requires_grad
    with torch.no_grad():
        for _ in range(4):
            f(x())
    assert graphs.replays == 6
    w.requires_grad_(True)
    with torch.no_grad():  # where that is nothing to it
        f(x())
    assert graphs.replays == 7
    assert [f(x()).requires_grad for _ in range(3)] == [True] * 3


def test_another_mode_of_torch_is_no_other_shape() -> None:
    tensors = [torch.zeros(2, 3), torch.nn.Parameter(torch.zeros(3))]
    as_now = torch_values.are_as_now(tensors)
    with torch.inference_mode(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert as_now()
    assert as_now()
    tensors[0].t_()
    assert not as_now()
    assert torch_values.are_as_now([])()


# -- outputs that are no tensors --------------------------------------------------------------------------


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("equal", [0, 2])
@pytest.mark.parametrize(
    "gives",
    [
        lambda a, n: (a * 1, n),
        lambda a, n: (a * 1, [1, True, 1.0][n % 3]),
        lambda a, n: (a * 1, [a * 2]) if n % 2 else (a * 1, (a * 2,)),
        lambda a, n: {str(n % 2): a * 1},
        lambda a, n: (a * 1, None if n % 2 else a * 2),
        lambda a, n: [a * 1] * (1 + n % 2),
    ],
    ids=["number", "kind", "nesting", "names", "none", "count"],
)
def test_outputs_that_are_no_tensors_are_those_of_the_call(
    graphs: Device, gives: Callable[..., Any], equal: int, compiles: bool
) -> None:
    """Also where the first *equal* runs give the same, and the one that is captured does not."""
    graphs.compiles = compiles
    hidden = itertools.count()
    f = gpu_timed(lambda a: gives(a, max(0, next(hidden) - equal + 1)), name="f", mode=GRAPH)
    with capture() as records:
        for _ in range(5):
            f(x())
    assert modes(records) == ["eager"] * 5
    assert graphs.captures == (1 if equal else 0)
    assert graphs.replays == 0
    assert any(says in records[1].mode_reason for says in ("no tensor changes", "another number of outputs"))


def test_outputs_that_are_no_tensors_and_stay_the_same_are_no_obstacle(graphs: Device) -> None:
    f = gpu_timed(lambda a: {"y": a * 1, "n": (float("nan"), None, "name", True)}, name="f", mode=GRAPH)
    with capture() as records:
        for _ in range(4):
            found = f(x())
    assert modes(records)[2:] == ["cuda_graph"] * 2
    assert repr(found["n"]) == "(nan, None, 'name', True)"


STANDING = torch.ones(2)


def twice(a: Any) -> Any:
    made = a * 2
    return {"one": made, "other": [made, a + 1, made]}


@pytest.mark.parametrize("outputs", ["clone", "alias"])
def test_outputs_that_are_one_stay_one(graphs: Device, outputs: Any) -> None:
    f = gpu_timed(twice, name="f", mode=CudaGraph(warmup=1, outputs=outputs))
    for _ in range(4):
        found = f(x())
    assert graphs.replays == 3
    assert found["one"] is found["other"][0] is found["other"][2]
    assert [each.tolist() for each in found["other"]] == [[2.0, 4.0], [2.0, 3.0], [2.0, 4.0]]
    if outputs == "clone":
        assert f(x(5.0, 6.0))["one"] is not found["one"]
        assert found["one"].tolist() == [2.0, 4.0]


def test_a_tensor_of_the_host_that_is_handed_out_untouched_is_that_one(graphs: Device) -> None:
    f = gpu_timed(lambda a: (a * 2, STANDING), name="f", mode=GRAPH)
    for _ in range(4):
        assert f(x())[1] is STANDING
    assert graphs.replays == 3


def test_an_output_that_the_call_leaves_behind_is_no_such_tensor(graphs: Device) -> None:
    held = Thing(last=None)

    def function(a: Any) -> Any:
        held.last = a * 2
        return held.last

    f = gpu_timed(function, name="f", mode=CudaGraph(warmup=1, reset=lambda: setattr(held, "last", None)))
    for _ in range(4):
        found = f(x())
        assert found.tolist() == [2.0, 4.0]
    f(x(5.0, 6.0))
    assert found.tolist() == [2.0, 4.0]


def test_a_shape_that_is_handed_out_is_one(graphs: Device) -> None:
    f = gpu_timed(lambda a: (a * 2, {"shape": a.shape}), name="f", mode=GRAPH)
    for _ in range(4):
        found = f(x())[1]["shape"]
        assert (type(found), found) == (torch.Size, torch.Size([2]))
    assert graphs.replays == 3


# -- arguments that share memory --------------------------------------------------------------------------

STATE = torch.zeros(4)


def changes_one(a: Any, b: Any) -> Any:
    a.add_(1)
    return a * b


def changes_both(a: Any, b: Any) -> Any:
    a.add_(1)
    b.mul_(2)
    return a + b


def changes_state(a: Any, b: Any) -> Any:
    STATE.add_(1)
    return a * b


def reads_state(a: Any, b: Any) -> Any:
    a.add_(1)
    return a * b * STATE[:2]


def of_one(one: Any) -> tuple[Any, Any]:
    return one[:2], one[1:3]


def the_same(one: Any) -> tuple[Any, Any]:
    return one[:2], one[:2]


def of_the_state(_: Any) -> tuple[Any, Any]:
    return STATE[1:3], x()


@pytest.mark.parametrize("when", ["at a replay", "at the capture"])
@pytest.mark.parametrize(
    ("function", "makes"),
    [
        *((changes_one, of_one), (changes_one, the_same), (changes_both, of_one), (changes_both, the_same)),
        *((changes_state, of_the_state), (reads_state, of_the_state)),
    ],
)
def test_arguments_that_share_memory_that_is_changed_run_eagerly(
    graphs: Device, function: Callable[..., Any], makes: Callable[[Any], tuple[Any, Any]], when: str
) -> None:
    f = gpu_timed(function, name="f", mode=GRAPH)
    for _ in range(1 if when == "at the capture" else 4):
        f(x(), x(3.0, 4.0))

    def gives(called: Callable[..., Any]) -> list[Any]:
        one = x(1.0, 2.0, 3.0, 4.0)
        STATE.fill_(5.0)
        return [called(*makes(one)).tolist(), one.tolist(), STATE.tolist()]

    with capture() as records:
        found = [gives(f) for _ in range(2)]
        f(x(), x(3.0, 4.0))
        f(x(), x(3.0, 4.0))
    assert found == [gives(function)] * 2
    assert modes(records) == ["eager"] * 2 + (["cuda_graph"] * 2 if when == "at a replay" else ["eager", "cuda_graph"])
    assert "arguments share memory" in records[0].mode_reason
    assert graphs.captures == 1


def test_arguments_that_share_memory_that_is_only_read_are_replayed(graphs: Device) -> None:
    """Query, key and value of one projection; and, where there is state that changes, not that."""
    for function in (lambda a, b: a * b, changes_state):
        f = gpu_timed(function, name="f", mode=GRAPH)
        for _ in range(4):
            f(x(), x(3.0, 4.0))
        one = x(1.0, 2.0, 3.0, 4.0)
        with capture() as records:
            assert f(*of_one(one)).tolist() == [2.0, 6.0]
            assert f(one[:2], one[:2]).tolist() == [1.0, 4.0]
        assert modes(records) == ["cuda_graph"] * 2


@pytest.mark.parametrize(
    ("starts", "changed", "shares"),
    [
        ((0, 2), (True, False), False),
        ((0, 1), (True, False), True),
        ((1, 0), (True, False), True),
        ((0, 1), (False, False), False),
        ((6, 8), (False, False), True),  # into what is written
        ((4, 0), (False, False), False),  # as far as that
        ((10, 0), (False, False), False),  # what is only read
        ((10, 0), (True, False), True),
        ((0, 11), (True, False), False),
    ],
)
def test_ranges(starts: tuple[int, int], changed: tuple[bool, bool], shares: bool) -> None:
    memory = torch.zeros(16)
    written, read = (numpy.array(memory.numpy(), copy=False)[part] for part in (slice(6, 9), slice(10, 13)))
    like = [torch.zeros(2), torch.zeros(2)]
    asks = torch_values.Shares(like, list(changed), [torch.from_numpy(written)], [torch.from_numpy(read)])
    given = [memory[start : start + 2] for start in starts]
    assert [asks(given) for _ in range(2)] == [shares] * 2
    assert asks(like) is False
    assert asks(given) is shares


# -- what must not be felt --------------------------------------------------------------------------------


class Box:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


def test_no_code_of_the_user_runs_with_the_lock(graphs: Device) -> None:
    """Nor at the comparison: what it waits for may be waiting for this."""

    class Kept(Box):
        pass

    free: list[bool] = []
    f = gpu_timed(lambda a: Kept(a * 2), name="f", mode=GRAPH)
    made = []
    real = graphed.Graphed.__init__

    def look() -> None:
        def asks() -> None:
            taken = [one._lock.acquire(timeout=1) for one in made]
            free.extend(taken)
            for one, was in zip(made, taken, strict=True):
                if was:
                    one._lock.release()

        thread = threading.Thread(target=asks)
        thread.start()
        thread.join()

    def flatten(box: Box) -> tuple[list[Any], None]:
        look()
        return [box.inside], None

    def unflatten(leaves: Any, _: Any) -> Box:
        look()
        return Kept(*leaves)

    def init(self: Any, *more: Any, **named: Any) -> None:
        made.append(self)
        real(self, *more, **named)

    pytree.register_pytree_node(Kept, flatten, unflatten)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphed.Graphed, "__init__", init)
        for _ in range(4):
            assert f(x()).inside.tolist() == [2.0, 4.0]
    assert graphs.replays == 3
    assert len(made) == 1
    assert len(free) >= 6
    assert all(free)


@pytest.mark.parametrize("changes", [False, True])
def test_what_the_user_raises_putting_outputs_together_is_no_second_call(graphs: Device, changes: bool) -> None:
    class Raises(Box):
        pass

    def unflatten(*_: Any) -> Any:
        raise KeyError("mine")

    state = torch.zeros(2)

    def function(a: Any) -> Any:
        if changes:
            state.add_(1)
        return Raises(a * 2)

    pytree.register_pytree_node(Raises, lambda box: ([box.inside], None), unflatten)
    f = gpu_timed(function, name="f", mode=GRAPH)
    for _ in range(2):
        f(x())
    if changes:
        with pytest.raises(KeyError, match="mine"):
            f(x())
        assert state.tolist() == [3.0, 3.0]
    for _ in range(10):
        assert f(x()).inside.tolist() == [2.0, 4.0]
    assert graphs.replays == (2 if changes else 9)


def test_a_strict_site_inside_another_ones_graph_runs_as_it_is(graphs: Device) -> None:
    strict = CudaGraph(warmup=1, strict=True)
    inner = gpu_timed(lambda a: a * 2, name="inner", mode=strict)
    outer = gpu_timed(lambda a: inner(a) + 1, name="outer", mode=strict)
    with capture() as records:
        for _ in range(4):
            assert outer(x()).tolist() == [3.0, 5.0]
            inner(x())
    assert [record.mode for record in records if record.name == "outer"][-1] == "cuda_graph"
    assert records[-1].mode == "cuda_graph"


def test_what_knows_calls_at_a_glance_may_fail(graphs: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_values, "alike", lambda *_: 1 / 0)
    f = gpu_timed(lambda a: a * 2, name="f", mode=GRAPH)
    with capture() as records:
        for _ in range(5):
            assert f(x()).tolist() == [2.0, 4.0]
    assert modes(records)[2:] == ["cuda_graph"] * 3


def test_replays_that_fail_now_and_then_are_no_reason_to_give_up(
    graphs: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    f = gpu_timed(lambda a: a * 2, name="f", mode=GRAPH)
    for _ in range(3):
        f(x())
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(graphs.graphs[0], "replay", lambda: 1 / 0)
            for _ in range(7):
                f(x())
        with capture() as records:
            f(x())
        assert modes(records) == ["cuda_graph"]
