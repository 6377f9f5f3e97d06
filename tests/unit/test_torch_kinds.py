"""Every kind of torch callable: decorated it stays what it was, computes what it did, and each call is a record."""

import asyncio
import copy
import inspect
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpu_timed import NotCallableError, flush, gpu_timed
from gpu_timed.testing import capture

torch = pytest.importorskip("torch")
nn = torch.nn
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning"),
]
X = torch.ones(1, 2)


def linear(cls: Any = nn.Linear) -> Any:
    """Of ones it makes threes, of threes sevens."""
    made = cls(2, 2)
    nn.init.ones_(made.weight)
    nn.init.ones_(made.bias)
    return made


timed = lambda name="t": gpu_timed(linear(), name=name)
names = lambda records: [record.name for record in records]
zero = lambda module: [module, [nn.init.zeros_(parameter) for parameter in module.parameters()]][0]


class Plain(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.linear = linear()
        self.factor = factor

    def forward(self, x, plus: float = 0.0):  # what TorchScript reads has no annotations but of its own types
        return torch.add(self.linear(x) * self.factor, plus)


class Forward(Plain):
    forward = gpu_timed(Plain.forward, name="t")


@gpu_timed
class Block(Plain):
    """Has a forward of its own."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__(factor)

    def forward(self, x, plus: float = 0.0):
        return torch.add(self.linear(x) * self.factor, plus)


class Sub(Block):
    def forward(self, x):
        return super().forward(x) + 1


class Heir(Block): ...


Named = gpu_timed(name="t")(type("Named", (nn.Linear,), {"__module__": __name__}))


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = timed("child")
        self.body = nn.Sequential(timed("inner"), nn.ReLU())

    def forward(self, x):
        return self.body(self.child(x))


KINDS: dict[str, tuple[Callable[[], Any], list[str], float]] = {  # the maker, its records, its value of X
    "timed module": (timed, ["t"], 3),
    "timed stack": (lambda: gpu_timed(nn.Sequential(linear(), nn.ReLU()), name="t"), ["t"], 3),
    "timed submodules": (Parent, ["child", "inner"], 7),
    "decorated forward": (Forward, ["t"], 3),
    "decorated class": (Block, ["Block"], 3),
    "heir": (Heir, ["Block"], 3),
    "super().forward": (Sub, ["Block"], 4),
    "inherited forward": (lambda: linear(Named), ["t"], 3),
    "stack of decorated": (lambda: nn.Sequential(Block(), Forward()), ["Block", "t"], 7),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the names that were said not to be timed, which must be as many as were counted."""
    said = [text.split()[1] for text in caplog.messages if "compiled region" in text]
    assert flush().counts.get("not_timed_in_compiled_region", 0) == len(said)
    return said


def through_file(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def gradients(module: Any, call: Callable[..., Any] | None = None) -> list[Any]:
    """Run forward and backward; return the gradients, whole ones where they are sharded."""
    (call or module)(X.clone().requires_grad_()).sum().backward()
    found = [parameter.grad for parameter in module.parameters()]
    return [(each.full_tensor() if hasattr(each, "full_tensor") else each).tolist() for each in found]


@every_kind
@pytest.mark.parametrize("way", [copy.deepcopy, through_file])
def test_a_copy_has_its_own_weights_and_both_are_timed(kind: str, way: Callable[[Any], Any]) -> None:
    """Each call is a record, of a copy and of what comes back from a file too; making one, or a base class, is none."""
    make, expected, value = KINDS[kind]
    with capture() as records:
        first = make()
        other = zero(way(first))
        assert other(X).tolist() == [[float(kind == "super().forward")] * 2]
        assert first(X).tolist() == [[value, value]]
        assert Plain()(X, plus=1.0).tolist() == [[4.0, 4.0]]
    assert names(records) == expected * 2
    assert type(other).__name__ == type(first).__name__


SELF = ["half()", "bfloat16()", "float()", "double()", "type(torch.float64)", "to(torch.float64)", "cpu()", "eval()"]
SELF += ["train()", "requires_grad_()", "apply(lambda _: None)", "to_empty(device='cpu')", "share_memory()"]


@pytest.mark.parametrize("call", [*SELF, "eval().double().cpu().train(False).requires_grad_(False)"])
def test_a_method_that_returns_the_module_returns_the_timed_one(call: str) -> None:
    """What .to(), .eval() and the like return, in a chain too, is the timed module and gives a record."""
    module = timed()
    again = eval(f"module.{call}")
    with capture() as records:
        again(X.to(again.weight.dtype))
    assert names(records) == ["t"]
    assert again is module


def test_a_timed_module_is_a_module_like_the_bare_one() -> None:
    """Type, parameters, keys, gradients, keyword arguments and hooks are the module's."""
    module, seen = timed(), []
    module.register_forward_pre_hook(lambda *_: seen.append("pre"))
    module.register_forward_hook(lambda *_: seen.append("forward"))
    module.register_full_backward_hook(lambda *_: seen.append("backward"))
    with capture() as records:
        assert gradients(module) == gradients(linear())
        assert module(input=X).tolist() == [[3.0, 3.0]]
    assert names(records) == ["t", "t"]
    assert seen[:3] == ["pre", "forward", "backward"]
    assert isinstance(module, nn.Linear)
    assert list(module.state_dict()) == [key for key, _ in module.named_parameters()] == ["weight", "bias"]


def test_a_timed_stack_is_a_sequence_and_is_found_as_itself() -> None:
    """It has a length, items and an iterator, and named_modules() of its parent gives what the parent calls."""
    stack = gpu_timed(nn.Sequential(nn.ReLU(), nn.Tanh()))
    assert (len(stack), type(stack[1])) == (2, nn.Tanh)
    assert dict(nn.Sequential(stack).named_modules())["0"] is stack
    assert [type(each) for each in stack] == [nn.ReLU, nn.Tanh]


REACH = {"double()": "weight.dtype == torch.float64", "apply(zero)": "bias.sum() == 0", "eval()": "training is False"}
REACH |= {"load_state_dict(zero(Parent()).state_dict())": "bias.sum() == 0"}


@pytest.mark.parametrize("act", REACH)
def test_what_is_done_to_a_parent_reaches_the_timed_child(act: str) -> None:
    """A parent's to, apply, eval and load_state_dict change the timed children, which stay timed, under their names."""
    parent = Parent()
    eval(f"parent.{act}")
    assert eval(f"parent.child.{REACH[act]} and parent.body[0].{REACH[act]}")
    with capture() as records:
        parent(X.to(parent.child.weight.dtype))
    assert names(records) == ["child", "inner"]
    assert list(parent.state_dict()) == ["child.weight", "child.bias", "body.0.weight", "body.0.bias"]
    assert [name for name, _ in parent.named_modules()] == ["", "child", "body", "body.0", "body.1"]


def test_a_decorated_class_stays_a_class() -> None:
    """Its type, name, documentation, signature, subclasses and instances are what they were."""
    assert (type(Block), type(Block()), Block.__qualname__, Block.__module__) == (type, Block, "Block", __name__)
    assert (Block.__doc__, Sub.__mro__[1:3]) == ("Has a forward of its own.", (Block, Plain))
    assert inspect.signature(Block) == inspect.signature(Plain)
    assert inspect.signature(Block.forward) == inspect.signature(Plain.forward)
    assert issubclass(Sub, Block) is isinstance(Sub(), Block) is True
    assert Block(factor=2.0)(X, plus=1.0).tolist() == [[7.0, 7.0]]


async def async_call(self: Any, x: int) -> list[int]:
    return [x]


CALLS: list[tuple[Callable[..., Any], Callable[..., Any]]]
CALLS = [(lambda _, x: [x], list), (lambda _, x: (yield x), list), (async_call, asyncio.run)]


@pytest.mark.parametrize(("function", "run"), CALLS)
@pytest.mark.parametrize("own", [True, False])
def test_calls_of_instances_of_a_decorated_class_are_timed(function: Any, run: Any, own: bool) -> None:
    """A class with its own or inherited __call__ keeps its kind: its calls are records, its base's are not."""
    base: Any = type("Base", (), {"__call__": function})
    cls = gpu_timed(type("Caller", (base,), {"__call__": function} if own else {}))
    with capture() as records:
        assert run(cls()(1)) == run(base()(1)) == [1]
    assert names(records) == ["Caller"]
    for kind in (inspect.iscoroutinefunction, inspect.isgeneratorfunction):
        assert kind(cls.__call__) == kind(function)


@pytest.mark.parametrize("hint", ["method", r"\.module\(\)"])
def test_what_cannot_be_called_is_refused_with_a_hint(hint: str) -> None:
    """A class without __call__ (decorate its methods) and an exported program (decorate its .module())."""
    target = type("Still", (), {"run": async_call}) if hint == "method" else torch.export.export(linear(), (X,))
    with pytest.raises(NotCallableError, match=hint):
        gpu_timed(target, name="t")


class Graphs:
    """A backend that counts the graphs it is given and runs them as they are."""

    count = 0

    def __call__(self, module: Any, example: Any) -> Any:
        self.count += 1
        return module


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


TRACERS: dict[str, Callable[[Any], Any]] = {
    "export": lambda m: torch.export.export(m, (X,), strict=False).module(),
    "strict export": lambda m: torch.export.export(m, (X,), strict=True).module(),
    "jit.trace": lambda m: torch.jit.trace(m, torch.ones(2, 2)),
    "jit.script": torch.jit.script,
    "fx": torch.fx.symbolic_trace,
}


@every_kind
@pytest.mark.parametrize("how", [*TRACERS, "compile"])
def test_tracing_gives_the_right_values(kind: str, how: str, graphs: Graphs, caplog: pytest.LogCaptureFixture) -> None:
    """It computes the same, is compiled without break or recompile, and compile and export lose no name in silence."""
    if (how, kind) == ("jit.script", "super().forward"):
        pytest.skip("TorchScript knows no super().forward")
    make, expected, value = KINDS[kind]
    with capture() as records:
        traced = TRACERS[how](make()) if how in TRACERS else torch.compile(make(), backend=graphs, fullgraph=True)
        assert [traced(X).tolist() for _ in range(3)] == [[[value, value]]] * 3
    if "jit" in how or how == "fx":
        return
    assert graphs.count == (how == "compile")
    assert (names(records), reported(caplog)) in (([], expected), (expected * 3, []))


class Triple(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 3)
    backward = staticmethod(lambda ctx, grad: grad * 2)


OUTSIDE: dict[str, Callable[[Graphs], Any]] = {
    "compiled": lambda g: gpu_timed(torch.compile(Plain(), backend=g), name="t"),
    "compiled, in a chain": lambda g: gpu_timed(torch.compile(Plain(), backend=g), name="t").eval(),
    "compiled around a timed part": lambda g: gpu_timed(torch.compile(Block(), backend=g), name="t"),
    "compiled in place": lambda g: [module := gpu_timed(Plain(), name="t"), module.compile(backend=g)][0],
    **{how: lambda _, how=how: gpu_timed(TRACERS[how](Plain()), name="t") for how in TRACERS},
    "autograd.Function": lambda _: gpu_timed(Triple.apply, name="t"),
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_timing_what_is_compiled_or_traced_times_each_call(kind: str, graphs: Graphs) -> None:
    """gpu_timed(torch.compile(…)), timed.compile() and the like compile once, give a record per call, and gradients."""
    target, x = OUTSIDE[kind](graphs), X.clone().requires_grad_()
    with capture() as records:
        found = [target(x) for _ in range(3)]
    sum(found).sum().backward()
    assert [each.tolist() for each in found] + [x.grad.tolist()] == [[[3.0, 3.0]]] * 3 + [[[6.0, 6.0]]]
    assert graphs.count == kind.startswith("compiled")
    assert names(records) == ["t"] * 3


def function(x):  # gpu_timed's wrapper has a variable of this name
    return x * 10


def helped(x):
    return torch.relu(function(x @ x)) + 1


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "vmap": torch.func.vmap,
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "no_grad": torch.no_grad(),
    "inference_mode": torch.inference_mode(),
    "autocast": torch.autocast("cpu", dtype=torch.bfloat16),
    "compile": lambda f: torch.compile(f, backend="eager"),
    **{name: TRACERS[name] for name in ("jit.trace", "jit.script", "fx")},
}


@pytest.mark.parametrize("how", TRANSFORMS)
@pytest.mark.parametrize("above", [True, False])
def test_a_transform_above_or_below_gives_the_same(how: str, above: bool) -> None:
    """Values, type and gradients are the undecorated's; timed once a call but where it was traced away."""
    transform, x = TRANSFORMS[how], torch.ones(2, 2, requires_grad=True)
    done = transform(gpu_timed(helped, name="t")) if above else gpu_timed(transform(helped), name="t")
    with capture() as records:
        found = done(x)
    wanted = transform(helped)(x)
    assert (found.tolist(), found.dtype) == (wanted.tolist(), wanted.dtype)
    assert (found.requires_grad, found.is_inference()) == (wanted.requires_grad, wanted.is_inference())
    assert names(records) == ["t"] or (above and how in ("compile", "jit.trace", "jit.script", "fx"))
    assert above or "jit" not in how or ("aten::" in str(done.graph) and "return" in done.code)


def normed(module: Any) -> Any:
    found = [each for each in module.modules() if isinstance(each, nn.Linear)]
    return [module, [nn.utils.parametrizations.weight_norm(each) for each in found]][0]


same = lambda module: module
fsdp2 = lambda m: torch.distributed.fsdp.fully_shard(m, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], int]] = {  # what to make, what to call, records
    "checkpoint": (same, lambda m: lambda x: checkpoint(m, x, use_reentrant=False), 2),
    "old checkpoint": (same, lambda m: lambda x: checkpoint(m, x, use_reentrant=True), 2),
    "functional": (same, lambda m: lambda x: torch.func.functional_call(m, dict(m.named_parameters()), x), 1),
    "weight_norm": (normed, same, 1),
    "DDP": (nn.parallel.DistributedDataParallel, same, 1),
    "FSDP1": (lambda m: torch.distributed.fsdp.FullyShardedDataParallel(m, device_id=torch.device("cpu")), same, 1),
    "FSDP2": (fsdp2, same, 1),
}


@pytest.fixture
def world() -> Iterator[None]:
    distributed = pytest.importorskip("torch.distributed.fsdp") and torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("kind", [*KINDS, "timed outside"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_and_records_are_right(kind: str, way: str, world: None) -> None:
    """The gradients equal the undecorated's; one record a call, and one more where a checkpoint computes again."""
    make, expected, _ = KINDS.get(kind, (Plain, ["t"], 3))
    wrap, call, times = WAYS[way]
    try:
        bare = wrap(nn.Sequential(*(linear() for _ in expected)))
        wanted = gradients(bare, call(bare))
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"does not run here undecorated: {error}")
    module = wrap(make()) if kind in KINDS else gpu_timed(wrap(make()), name="t")
    with capture() as records:
        assert gradients(module, call(module)) == wanted
    assert sorted(names(records)) == sorted(expected * times)
    assert {record.status for record in records} == {"ok"}  # also where a checkpoint ends the second time early


class Inside(Plain):
    forward = gpu_timed(lambda self, x: checkpoint(self.linear, x, use_reentrant=False), name="outer")


def test_a_checkpoint_inside_a_decorated_forward() -> None:
    """The inner module is timed again as it is computed again, the outer forward is not."""
    module = Inside()
    module.linear = timed("inner")
    with capture() as records:
        assert gradients(module) == gradients(linear())
    assert names(records) == ["inner", "outer", "inner"]


def test_a_module_timed_twice_is_two_spans() -> None:
    """As a function decorated twice is."""
    twice = gpu_timed(gpu_timed(torch.nn.Linear(2, 2), name="inner"), name="outer")
    with capture() as records:
        assert twice(torch.ones(1, 2)).shape == (1, 2)
    assert sorted(record.name for record in records) == ["inner", "outer"]
