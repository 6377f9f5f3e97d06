"""What a mode may do to a process that serves traffic, apart from a wrong answer: end it, hang it, fill it."""

from __future__ import annotations

import gc
import tracemalloc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from gpu_timed import CudaGraph, gpu_timed
from gpu_timed.testing import capture

torch = pytest.importorskip("torch")
from make_believe_graphs import Device  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn.attention.flex_attention import flex_attention  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from gpu_timed.modes import capturing, torch_graphs, torch_values, torch_watching  # noqa: E402
from gpu_timed.modes.launcher import Ground  # noqa: E402
from gpu_timed.modes.torch_watching import Watch, key_of  # noqa: E402

GRAPH = CudaGraph(warmup=1)


def two(*values: float) -> Any:
    return torch.tensor(values or (1.0, 2.0))


# -- tensors that are made of others ----------------------------------------------------------------------


def test_what_is_changed_of_a_tensor_made_of_others_are_its_parts(graphs: Device) -> None:
    """Such a tensor (DTensor, a quantised weight) has no memory: to set that aside would be to read at address 0."""
    state = TwoTensor(torch.zeros(2), torch.zeros(2))
    with Watch(lambda _: True, 1 << 20) as watch:
        state.add_(1)
    assert set(watch.changed) == {key_of(state.a), key_of(state.b)}
    assert not watch.blocked

    def f(a: Any) -> Any:
        state.add_(a)
        return a + state.a

    f = gpu_timed(name="f", mode=GRAPH)(f)
    with capture() as records:
        for call in range(5):
            assert f(torch.ones(2)).tolist() == [call + 3.0] * 2
    assert [record.mode for record in records] == ["eager"] * 2 + ["cuda_graph"] * 3
    assert state.b.tolist() == [6.0, 6.0]


@pytest.mark.parametrize("changes", [False, True])
def test_a_weight_that_is_made_of_others_is_read_by_a_graph(graphs: Device, *, changes: bool) -> None:
    """Quantised weights are: to ask where the memory of one is raises, and no such model was captured."""
    weight = TwoTensor(torch.full((2,), 3.0), torch.zeros(2))

    def f(a: Any, total: Any) -> Any:
        if changes:
            total.add_(a)
        return a * weight.a + (weight * 2).a

    f = gpu_timed(name="f", mode=GRAPH)(f)
    total = torch.zeros(2)
    with capture() as records:
        for _ in range(4):
            assert f(torch.ones(2), total).tolist() == [9.0, 9.0]
    assert [record.mode for record in records] == ["eager"] * 2 + ["cuda_graph"] * 2
    assert total.tolist() == [4.0 * changes] * 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["batch", "batch, that only reads", "instance"])
def test_running_statistics_are_those_of_as_many_eager_calls(graphs: Device, kind: str, mode: Any) -> None:
    """A batch norm does not say in its schema that it changes them: a replay beside the call moved them once more."""
    layers = [
        torch.nn.InstanceNorm1d(2, track_running_stats=True) if kind == "instance" else torch.nn.BatchNorm1d(2)
        for _ in range(2)
    ]
    for layer in layers:
        layer.train("reads" not in kind)
    f = gpu_timed(layers[0].forward, name="f", mode=GRAPH)
    a = torch.arange(24.0).reshape(3, 2, 4)
    with mode():
        for _ in range(5):
            assert torch.allclose(f(a), layers[1](a))
        with Watch(lambda _: True) as watch:
            layers[0](a)
    assert graphs.captures == 1
    for one in (layers[0].running_mean, layers[0].running_var):
        assert (key_of(one) in watch.changed) == ("reads" not in kind)
    with mode():
        layers[1](a)
    assert torch.allclose(layers[0].running_mean, layers[1].running_mean)
    assert torch.allclose(layers[0].running_var, layers[1].running_var)


def test_statistics_that_an_exported_batch_norm_only_reads_are_no_state_that_changes() -> None:
    """It has no argument that says so: its name does."""
    ones = [torch.ones(2) for _ in range(4)]
    with Watch(lambda _: True) as watch:
        torch.ops.aten._native_batch_norm_legit_no_training(torch.ones(3, 2), *ones, 0.1, 1e-5)
    assert not watch.changed


# -- operations that run functions ------------------------------------------------------------------------


def attention(a: Any) -> Any:
    return flex_attention(a, a, a)


def branches(a: Any) -> Any:
    return torch.cond(a.sum() > 0, torch.sin, torch.cos, (a,))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("function", "name"), [(attention, "flex_attention"), (branches, "cond")])
@pytest.mark.parametrize("known", [True, False])
def test_operations_that_run_functions_are_run_and_named(
    graphs: Device, monkeypatch: pytest.MonkeyPatch, function: Any, name: str, known: bool
) -> None:
    """They raise, in the user's call, where a mode is around them that they do not know: no call came through."""
    if not known:  # as in older versions of torch

        class Older(Watch):
            supports_higher_order_operators = False

        monkeypatch.setattr(torch_watching, "Watch", Older)
        monkeypatch.setattr(torch_watching, "_all_come_here", False)
    f = gpu_timed(function, name="f", mode=GRAPH)
    a = torch.ones(1, 2, 4, 8)
    with capture() as records:
        for _ in range(3):
            assert torch.equal(f(a), function(a))
    assert {record.mode for record in records} == {"eager"}
    assert f"{name} runs functions that cannot be seen into, at {__file__}:" in records[-1].mode_reason


# -- what stands around a call and sees each operation ----------------------------------------------------


class Seen(TorchFunctionMode):
    """Keeps the names of the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def by_flops(f: Any, a: Any) -> bool:
    with FlopCounterMode(display=False) as counted:
        f(a)
    return bool(counted.get_total_flops() == 16)


def by_functions(f: Any, a: Any) -> bool:
    with Seen() as seen:
        f(a)
    return seen.names == ["matmul"]


def by_trace(f: Any, a: Any) -> bool:
    def g(a: Any) -> Any:
        return f(a)

    traced = torch.jit.trace(g, a, check_trace=False)
    return "aten::matmul" in str(traced.graph) and "aten::copy_" not in str(traced.graph)


def by_recording(f: Any, a: Any) -> bool:
    return [node.name for node in make_fx(f)(a).graph.nodes] == ["a_1", "mm", "output"]


def by_forward_derivative(f: Any, a: Any) -> bool:
    with forward_ad.dual_level():
        found = f(forward_ad.make_dual(a, torch.ones(2, 2)))
        return forward_ad.unpack_dual(found).tangent is not None


def by_transform(f: Any, a: Any) -> bool:
    return bool(torch.equal(torch.func.vmap(f)(a[None])[0], a @ a))


AROUND: dict[Callable[[Any, Any], bool], str] = {
    by_flops: "a replay shows no operations to _FlopCounterMode, which is around the call",
    by_functions: "a replay shows no operations to Seen, which is around the call",
    by_trace: "inside a trace of torch.jit",
    by_recording: "a replay shows no operations to ProxyTorchDispatchMode, which is around the call",
    by_forward_derivative: "a replay has no forward derivatives",
    by_transform: "inside a transform of torch.func",
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", AROUND)
@pytest.mark.parametrize("strict", [False, True])
def test_who_looks_at_operations_gets_to_see_them(graphs: Device, how: Any, strict: bool) -> None:
    """In the first calls those of the function and no others; and never a replay, which is none."""
    f = gpu_timed(name="f", mode=CudaGraph(warmup=1, strict=strict))(lambda a: torch.matmul(a, a))
    a = torch.ones(2, 2)
    for calls in (0, 1, 4):
        for _ in range(calls):
            f(a)
        before = graphs.captures, graphs.replays
        with capture() as records:
            assert how(f, a)
        assert before == (graphs.captures, graphs.replays)
        assert {record.mode_reason.replace(" FlopC", " _FlopC") for record in records} == {AROUND[how]}
    with capture() as records:
        f(a)
    assert records[0].mode == "cuda_graph"


def test_the_device_that_tensors_are_made_on_is_part_of_a_signature(graphs: Device) -> None:
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: (a * 2, torch.ones(2)))
    a = two()
    for _ in range(4):
        f(a)
    with torch.device("meta"):
        assert f(a)[1].is_meta
    here = torch.device("cpu")
    with capture() as records, here:
        for _ in range(4):
            f(a)
    assert [record.mode for record in records] == ["eager"] * 2 + ["cuda_graph"] * 2


def test_a_block_with_a_device_around_each_call_is_the_same_one_to_a_graph(
    graphs: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another object in each call; to take the arguments apart for that takes five times as long."""
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: (a * 2, torch.ones(2)))
    for _ in range(4):
        with torch.device("cpu"):
            f(two())
    taken: list[Any] = []
    take = torch_values.take
    monkeypatch.setattr(torch_values, "take", lambda *given, **named: taken.append(given) or take(*given, **named))
    with torch.device("cpu"):
        assert f(two())[0].tolist() == [2.0, 4.0]
    assert not taken
    with torch.device("meta"):
        a = torch.ones(2, device="cpu")
        assert f(a)[1].is_meta
    assert taken
    with torch.device("cpu"), Seen():
        before = graphs.replays
        f(two())
    assert graphs.replays == before


def test_a_site_inside_another_ones_graph_has_none_on_a_thread_of_autograds(graphs: Device) -> None:
    """Such a thread has the modes of the one that asked for the derivatives, and nothing else of it."""
    inner = gpu_timed(name="inner", mode=CudaGraph(warmup=1, strict=True))(lambda grad: grad * 3)
    for _ in range(4):
        inner(torch.ones(2))
    before = graphs.replays
    with capture() as records, Watch(lambda _: True):
        inner(torch.ones(2))
    assert graphs.replays == before
    assert [record.mode_reason for record in records] == ["inside the CUDA Graph of another site"]


# -- what is kept alive -----------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A layer of which many are made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Buffer(torch.ones(1))

    @gpu_timed(name="step", mode=CudaGraph(warmup=1))
    def step(self, a: Any) -> Any:
        return a * self.weight


def test_a_model_that_is_gone_is_kept_by_no_graph(graphs: Device) -> None:
    """Else its weights stay on the device until the site is called with arguments that it does not know."""
    gone, stays = Model(), Model()
    for _ in range(4):
        gone.step(two())
        stays.step(two())
    graphs.graphs.clear()  # which keeps what it has seen
    weight = weakref.ref(gone.weight)
    del gone
    assert weight() is None
    before = graphs.captures
    assert stays.step(two(3.0, 4.0)).tolist() == [3.0, 4.0]
    assert graphs.captures == before


def test_a_model_in_whose_place_another_stands_is_kept_by_no_graph_of_other_arguments(graphs: Device) -> None:
    """A shape that comes once a day would hold the weights of yesterday's model until tomorrow."""
    held = {"weight": torch.ones(1)}
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: a * held["weight"])
    shapes = [two(), two(1.0), two(1.0, 2.0, 3.0)]
    for a in shapes:
        for _ in range(4):
            f(a)
    graphs.graphs.clear()
    weight = weakref.ref(held["weight"])
    held["weight"] = torch.full((1,), 2.0)
    for _ in range(2):
        assert f(shapes[0]).tolist() == [2.0, 4.0]
    assert weight() is None
    before = graphs.captures
    for a in shapes[1:]:
        assert f(a).tolist() == [2.0 * value for value in a.tolist()]
        assert f(a).tolist() == [2.0 * value for value in a.tolist()]
    assert graphs.captures - before == 2  # at once: they are warm


def test_captures_anew_are_counted_for_all_that_went_stale(graphs: Device) -> None:
    held = {"factor": 0.0}
    f = gpu_timed(name="f", mode=CudaGraph(warmup=1, max_graphs=100))(lambda a: a * held["factor"])
    for call in range(60):
        held["factor"] += call % 2
        f(two(*[1.0] * (1 + call % 4)))
    assert graphs.captures < 60
    with capture() as records:
        f(two(1.0))
    assert records[0].mode_reason == "what it sees on the host changes again and again between its calls"


@pytest.mark.parametrize("kind", [str, bytes])
def test_a_long_text_among_the_arguments_is_not_kept(graphs: Device, kind: Any) -> None:
    """A prompt of each request, or an image: it is a part of the signature, of which a thousand are known."""
    f = gpu_timed(name="f", mode=GRAPH)(lambda a, text: a * len(text))

    def text(call: int) -> Any:
        made = str(call) * 100_000
        return made if kind is str else made.encode()

    f(two(), text(0))
    tracemalloc.start()
    try:
        for call in range(1, 6):
            assert f(two(), text(call)).tolist() == [100_000.0, 200_000.0]
        assert tracemalloc.get_traced_memory()[0] < 300_000
    finally:
        tracemalloc.stop()
    before = graphs.captures
    for _ in range(3):
        f(two(), text(7))
    assert graphs.captures - before == 1  # it is the same one to it
    assert f(two(), text(7) + text(7)).tolist() == [200_000.0, 400_000.0]


def test_calls_of_which_each_has_another_signature_are_not_watched_for_ever(graphs: Device) -> None:
    """That costs a multiple of the call: a name of the request among the arguments is enough."""
    f = gpu_timed(name="f", mode=CudaGraph(warmup=2, max_graphs=1))(lambda a, name: a * 2)
    for _ in range(4):
        f(two(), "the usual one")
    with capture() as records:
        for call in range(40):
            assert f(two(), f"request {call}").tolist() == [2.0, 4.0]
        f(two(), "the usual one")
    whys = [record.mode_reason for record in records]
    assert whys[:30] == ["warm-up 1 of 2 before capture"] * 30
    assert set(whys[30:40]) == {"32 calls were watched for 1 graphs: too many input signatures"}
    assert records[-1].mode == "cuda_graph"


def test_an_exception_keeps_no_copies_of_ours(graphs: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reports errors keeps them, and so the frames that they went through; and of state there may be a gigabyte."""
    state, copies = torch.zeros(2), []

    def f(a: Any, switch: Any) -> Any:
        state.add_(a)
        if switch.fails:
            raise ValueError("the user's")
        return a * 2

    content_of = torch_watching.content_of

    def noting(tensor: Any) -> Any:
        made = content_of(tensor)
        copies.append(weakref.ref(made))
        return made

    switch = types.SimpleNamespace(fails=False)
    decorated = gpu_timed(name="f", mode=CudaGraph(warmup=1, reset=lambda: None))(f)
    decorated(two(), switch)
    monkeypatch.setattr(torch_watching, "content_of", noting)
    switch.fails = True
    with pytest.raises(ValueError, match="the user's") as raised:
        decorated(two(), switch)
    assert copies
    assert [copy() for copy in copies] == [None] * len(copies)
    assert raised.value.__context__ is None


def test_a_generator_of_its_own_is_named_and_tried_once(graphs: Device) -> None:
    """A capture fails of it, which looks like another thread's doing: eight captures of each signature, and why not."""
    own = torch.Generator().manual_seed(1)
    f = gpu_timed(name="f", mode=GRAPH)(lambda a, draw: a + torch.rand(2, generator=draw))
    with capture() as records:
        for _ in range(3):
            f(two(), own)
        for _ in range(3):
            f(two(), torch.default_generator)
    assert graphs.captures == 1
    assert "aten::rand draws from a generator= of its own" in records[1].mode_reason
    assert [record.mode for record in records] == ["eager"] * 5 + ["cuda_graph"]


def test_state_is_not_set_aside_in_memory_that_the_call_may_need(graphs: Device) -> None:
    """Where little is left it would be the user's own allocation that fails, in the user's call."""
    state = torch.zeros(1 << 10)  # of 4 KiB
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: state.add_(1)[:2] + a)
    graphs.free = 15 << 10
    with capture() as records:
        for call in range(3):
            assert f(two()).tolist() == [call + 2.0, call + 3.0]
        assert graphs.captures == 0
        graphs.free = 16 << 10
        for call in range(3, 6):
            assert f(two()).tolist() == [call + 2.0, call + 3.0]
    little = "the device has too little memory left to set aside what the call changes"
    assert [record.mode_reason for record in records][1:] == [
        *[f"not captured now, tried at a later call: {little}"] * 2,
        "captured (1.0 MiB) and compared with this run",
        "",
        "",
    ]


# -- what comes in between --------------------------------------------------------------------------------


def test_who_calls_in_the_midst_of_a_replay_does_not_change_its_inputs(
    graphs: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler of a signal, or a finalizer, comes on the thread that is about to queue the graph."""
    f = gpu_timed(name="f", mode=CudaGraph(warmup=1, max_graphs=1, strict=True))(lambda a: a * 2)
    for _ in range(4):
        f(two())
    replay, found = graphs.graphs[0].replay, []

    def interrupted() -> None:
        monkeypatch.setattr(graphs.graphs[0], "replay", replay)
        with capture() as records:
            found.extend([f(two(7.0, 8.0)), *(f(two(1.0, 2.0, 3.0)) for _ in range(3))])
        assert {record.mode_reason for record in records} == {
            "inside a replay of its own, say by a handler of a signal"
        }
        replay()

    monkeypatch.setattr(graphs.graphs[0], "replay", interrupted)
    assert f(two()).tolist() == [2.0, 4.0]
    assert found[0].tolist() == [14.0, 16.0]
    assert not graphs.graphs[0].released  # by the captures that were not made


class OfTheUsersError(Exception):
    """Has a cause."""


def test_an_exception_after_a_replay_that_changed_state_is_as_it_was_raised(
    graphs: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, cause = torch.zeros(2), KeyError("why")
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: state.add_(a) * 2)
    for _ in range(3):
        f(two())

    def fails(*_: Any) -> Any:
        raise OfTheUsersError from cause

    monkeypatch.setattr(capturing.Captured, "made", fails)
    with pytest.raises(OfTheUsersError) as raised:
        f(two())
    assert raised.value.__cause__ is cause
    assert raised.value.__context__ is cause.__context__


class Interrupted:
    """Calls *function*, after which an exception comes that a handler of a signal raised: Ctrl-C, a soft time limit."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        self.function(*args)
        raise KeyboardInterrupt


def test_an_interrupt_as_autograd_is_switched_off_leaves_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch_values._set_grad
    monkeypatch.setattr(torch_values, "_set_grad", lambda on: real(on) if on else Interrupted(real)(on))
    with pytest.raises(KeyboardInterrupt):
        torch_values.copy_into([two()], [two()])
    left_on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert left_on


def test_an_interrupt_as_the_collector_is_switched_off_leaves_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "disable", Interrupted(gc.disable))
    with pytest.raises(KeyboardInterrupt), torch_graphs._no_collection():
        pass
    left_on = gc.isenabled()
    gc.enable()
    assert left_on


def test_an_interrupt_as_a_call_begins_or_ceases_to_be_watched_leaves_nothing_that_watches(
    graphs: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would see, and keep alive, every tensor that the thread works with from then on."""
    f, enter = gpu_timed(name="f", mode=GRAPH)(lambda a: a * 2), Watch.__enter__

    def enters(watch: Watch) -> None:
        enter(watch)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Watch, "__enter__", enters)
        with pytest.raises(KeyboardInterrupt):
            f(two())
    left = torch._C._len_torch_dispatch_stack()
    with monkeypatch.context() as patch:
        patch.setattr(Watch, "__exit__", lambda *_: Interrupted(int)())
        with pytest.raises(KeyboardInterrupt):
            f(two())
    assert (left, torch._C._len_torch_dispatch_stack()) == (0, 0)
    for _ in range(4):
        f(two())
    assert graphs.captures == 1


class Lock:
    """A lock, after whose release an interrupt comes, once."""

    def __init__(self, lock: Any) -> None:
        self.lock, self.comes = lock, True

    def __enter__(self) -> None:
        self.lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self.lock.__exit__(None, None, None)
        if self.comes:
            self.comes = False
            raise KeyboardInterrupt


@pytest.mark.parametrize("which", ["capturing", "waiting"])
def test_an_interrupt_as_a_capture_or_a_wait_begins_leaves_none_begun(which: str) -> None:
    """Else every later wait for the device takes 0.1 s more, or no capture is made any more."""
    ground = Ground()
    ground._lock = Lock(ground._lock)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt), getattr(ground, which)():
        pytest.fail("not reached")
    with ground.capturing(), ground.waiting():
        pass
    assert not ground._capturing
    assert ground._waiting == 0


def test_a_turn_that_an_interrupt_loses_is_given_back(graphs: Device) -> None:
    """After it was taken, and before anybody knows: else no site of the process is captured any more."""
    ground = Ground()
    with pytest.raises(KeyboardInterrupt):
        Interrupted(ground.take_turn)()
    turn = ground.take_turn()
    assert turn is not None
    assert ground.take_turn() is None
    ground.end_turn()
    assert ground.take_turn() is not None
