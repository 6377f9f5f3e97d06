"""What model libraries do beside computing: caches that grow, weights made of others, objects handed out."""

from __future__ import annotations

import gc
import itertools
import queue
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from gpu_timed import CudaGraph, gpu_timed
from gpu_timed.testing import capture

torch = pytest.importorskip("torch")
from make_believe_graphs import Device  # noqa: E402
from torch import library as operations  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402

GRAPH = CudaGraph(warmup=1)


def x(*values: float) -> Any:
    return torch.tensor(values or (1.0, 2.0))


class Growing:
    """A cache that puts a longer tensor in the place of the one that it has."""

    def __init__(self) -> None:
        self.keys = torch.zeros(1, 2)

    def update(self, keys: Any) -> Any:
        self.keys = torch.cat([self.keys, keys[None]])
        return self.keys


@pytest.mark.parametrize("reset", [None, lambda cache: setattr(cache, "keys", cache.keys[:-1])], ids=["none", "reset"])
def test_a_cache_that_grows_is_refused_whatever_is_put_back(
    graphs: Device, reset: Callable[[Any], None] | None
) -> None:
    """With ``reset=`` it would be captured, and each replay read the cache as it was at the capture."""
    cache, other = Growing(), Growing()
    mode = CudaGraph(warmup=1, reset=None if reset is None else lambda: reset(cache))
    f = gpu_timed(lambda keys: cache.update(keys).sum(0), name="f", mode=mode)
    with capture() as records:
        for value in range(6):
            keys = x(value, 1.0)
            assert torch.equal(f(keys), other.update(keys).sum(0))
    assert [record.mode for record in records] == ["eager"] * 6
    assert "puts another tensor in the place of cache.keys, which it reads" in records[-1].mode_reason
    assert "change it in place" in records[-1].mode_reason
    assert graphs.captures == 0


class Listing:
    """A cache that keeps what it is given one beside another, in a list or by number."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def update(self, keys: Any) -> Any:
        if isinstance(self.held, list):
            self.held.append(keys * 1)
            return torch.stack(self.held)
        self.held[len(self.held)] = keys * 1
        return torch.stack(list(self.held.values()))


@pytest.mark.parametrize("kind", [list, dict])
def test_a_list_that_grows_is_refused_whatever_is_put_back(graphs: Device, kind: Any) -> None:
    cache, other = Listing(kind()), Listing(kind())
    mode = CudaGraph(warmup=1, reset=lambda: cache.held.pop(*([] if kind is list else [len(cache.held) - 1])))
    f = gpu_timed(lambda keys: cache.update(keys).sum(0), name="f", mode=mode)
    for value in range(6):
        assert torch.equal(f(x(value, 1.0)), other.update(x(value, 1.0)).sum(0))
    assert graphs.captures == 0


def test_a_cache_of_tensors_made_of_others_that_grows_is_refused(graphs: Device) -> None:
    held = types.SimpleNamespace(keys=TwoTensor(torch.zeros(1, 2), torch.zeros(1, 2)))

    def function(a: Any) -> Any:
        held.keys = torch.cat([held.keys, TwoTensor(a[None], a[None])])
        return held.keys.a.sum(0)

    mode = CudaGraph(warmup=1, reset=lambda: setattr(held, "keys", held.keys[:-1]))
    f = gpu_timed(function, name="f", mode=mode)
    assert [f(x(1.0, 1.0)).tolist() for _ in range(6)] == [[float(count)] * 2 for count in range(1, 7)]
    assert graphs.captures == 0


def test_another_view_of_the_same_memory_is_no_other_tensor(graphs: Device) -> None:
    held = types.SimpleNamespace(all=torch.zeros(4))
    view = held.view = held.all[:2]

    def function(a: Any) -> Any:
        held.view = held.all[:2]
        held.view.copy_(a)
        return held.all * 2

    f = gpu_timed(function, name="f", mode=CudaGraph(warmup=1, reset=lambda: setattr(held, "view", view)))
    with capture() as records:
        for value in range(6):
            assert f(x(value, 1.0)).tolist() == [value * 2.0, 2.0, 0.0, 0.0]
    assert "puts another tensor" not in "".join(record.mode_reason for record in records)
    assert records[2].mode == "cuda_graph"


def test_a_tensor_that_is_left_behind_and_not_read_needs_a_reset(graphs: Device) -> None:
    held = types.SimpleNamespace(last=x(0.0))

    def function(a: Any) -> Any:
        held.last = a * 2
        return held.last + 1

    f = gpu_timed(function, name="f", mode=CudaGraph(warmup=1, reset=lambda: setattr(held, "last", None)))
    with capture() as records:
        for _ in range(4):
            assert f(x()).tolist() == [3.0, 5.0]
    assert "cuda_graph" in {record.mode for record in records}


def applied(weight: Any) -> None:
    """Put other parts into it, as ``Module._apply`` does by ``swap_tensors``."""
    torch.utils.swap_tensors(weight, TwoTensor(x(7.0, 7.0), x(8.0, 8.0)))


WAYS: dict[str, Callable[[Any], None]] = {
    "an attribute": lambda weight: setattr(weight, "a", x(7.0, 7.0)),
    "swapped": applied,
    "its memory": lambda weight: setattr(weight.a, "data", x(7.0, 7.0)),
    "in place": lambda weight: weight.a.fill_(7.0),
}


@pytest.mark.parametrize("way", WAYS)
def test_another_part_of_a_weight_made_of_others_is_noticed(graphs: Device, way: str) -> None:
    """Quantised weights, say: the tensor stays, and what it is made of is exchanged."""
    held = types.SimpleNamespace(weight=TwoTensor(x(3.0, 3.0), x(4.0, 4.0)))
    f = gpu_timed(lambda a: (held.weight * a).a, name="f", mode=GRAPH)
    for _ in range(4):
        assert f(x()).tolist() == [3.0, 6.0]
    assert graphs.replays == 3
    WAYS[way](held.weight)
    for _ in range(4):
        assert f(x()).tolist() == [7.0, 14.0]
    assert graphs.captures == (1 if way == "in place" else 2)


def test_a_model_of_many_objects_is_not_one_of_many_functions(graphs: Device) -> None:
    """What is bounded is functions to look into: a deep model has thousands of objects, and some hundred of those."""
    blocks = [torch.nn.Sequential(*[torch.nn.Identity() for _ in range(50)]) for _ in range(30)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(2, 2))
    f = gpu_timed(model.forward, name="f", mode=GRAPH)
    with capture() as records, torch.no_grad():
        for _ in range(3):
            assert torch.equal(f(x()), model(x()))
    assert records[-1].mode == "cuda_graph"


@pytest.fixture
def asked(graphs: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The device, and a torch that tells of its captures."""
    made, capturing = graphs.capture, [False]

    def capture_(inputs: list[Any], function: Callable[[], Any], **options: Any) -> Any:
        capturing[0] = True
        try:
            return made(inputs, function, **options)
        finally:
            capturing[0] = False

    monkeypatch.setattr(graphs, "capture", capture_)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    return graphs


def test_what_is_left_out_in_a_capture_keeps_no_graph_away(asked: Device) -> None:
    """A mask that lets all through is left away, where the host may look into it: transformers does so."""

    def attend(a: Any, mask: Any) -> Any:
        if not torch.cuda.is_current_stream_capturing() and bool(mask.all()):
            return a * 2
        return a * 2 * mask

    f = gpu_timed(attend, name="f", mode=CudaGraph())
    with capture() as records:
        for index in range(8):
            mask = x(1.0, float(index % 3 > 0))
            assert torch.equal(f(x(3.0, 4.0), mask), attend(x(3.0, 4.0), mask))
    assert [record.mode for record in records] == ["eager"] * 4 + ["cuda_graph"] * 4
    assert asked.captures == 1


def test_what_is_not_left_out_is_refused_before_it_breaks_the_capture(asked: Device) -> None:
    tried, read = itertools.count(), itertools.count()  # state that is not seen

    def function(a: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            next(tried)
        found = a.sum().item()
        next(read)
        return a * found

    f = gpu_timed(function, name="f", mode=GRAPH)
    with capture() as records:
        for _ in range(4):
            assert f(x()).tolist() == [3.0, 6.0]
    assert {record.mode for record in records} == {"eager"}
    assert "could not be captured (Waits: aten::_local_scalar_dense makes the host wait" in records[-1].mode_reason
    assert (next(tried), next(read)) == (1, 4)
    assert asked.captures == 1


def test_a_read_whose_refusal_the_function_catches_makes_no_graph(asked: Device) -> None:
    """Its other path is not the one that it takes outside of a capture."""

    def count(mask: Any) -> int:
        try:
            return int(mask.sum().item())
        except Exception:
            return 2

    def function(a: Any, mask: Any) -> Any:
        return a * (count(mask) + bool(torch.cuda.is_current_stream_capturing() and len(a) > 2))

    f = gpu_timed(function, name="f", mode=GRAPH)
    with capture() as records:
        for index in range(6):
            mask = x(1.0, float(index < 3))
            assert torch.equal(f(x(), mask), function(x(), mask))
    assert {record.mode for record in records} == {"eager"}
    assert "could not be captured (Waits:" in records[-1].mode_reason


def test_a_read_inside_of_a_tensor_made_of_others_is_refused_too(asked: Device) -> None:
    """Its class takes the operation apart, and looks into a part."""

    class Looks(TwoTensor):  # type: ignore[misc]
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mul.Tensor:
                return args[1] * args[0].a.sum().item()
            return super().__torch_dispatch__(func, types, args, kwargs)

    weight = Looks(x(3.0, 3.0), x(4.0, 4.0))

    def function(a: Any) -> Any:
        return None if torch.cuda.is_current_stream_capturing() and a is None else weight * a

    f = gpu_timed(function, name="f", mode=GRAPH)
    with capture() as records:
        for _ in range(4):
            assert f(x()).tolist() == [6.0, 12.0]
    assert "could not be captured (Waits:" in records[-1].mode_reason


def test_what_may_not_be_captured_takes_no_graph_s_place(asked: Device) -> None:
    def function(a: Any) -> Any:
        if torch.cuda.is_current_stream_capturing() and a is None:
            return None
        return a * a.sum().item() if len(a) > 2 else a * 2

    f = gpu_timed(function, name="f", mode=CudaGraph(warmup=1, max_graphs=1))
    with capture() as records:
        for sizes in (2, 2, 2, 3, 3, 3, 2):
            f(torch.ones(sizes))
    assert records[-1].mode == "cuda_graph"


class Cache:
    """State on the device, which a model hands out beside what it computes."""

    def __init__(self) -> None:
        self.total = torch.zeros(2)


def test_an_argument_that_is_handed_out_is_that_one_and_is_not_kept_alive(graphs: Device) -> None:
    """As a model's output holds the cache that it was given."""

    def step(a: Any, cache: Cache) -> dict[str, Any]:
        cache.total += a
        return {"sum": cache.total * 2, "cache": cache}

    f = gpu_timed(step, name="f", mode=GRAPH)
    for turn in range(2):
        cache = Cache()
        with capture() as records:
            for index in range(1, 5):
                found = f(x(), cache=cache)
                assert found["cache"] is cache
                assert found["sum"].tolist() == [2.0 * index, 4.0 * index]
        assert [record.mode for record in records] == ["eager", "eager", "cuda_graph", "cuda_graph"], turn
        gone = weakref.ref(cache)
        del cache, found
        gc.collect()
        assert gone() is None


def test_what_stands_somewhere_is_handed_out_until_another_does(graphs: Device) -> None:
    held = types.SimpleNamespace(cache=Cache())
    f = gpu_timed(lambda a: (a * 2, held.cache), name="f", mode=GRAPH)
    for _ in range(2):
        for _ in range(4):
            found = f(x())
            assert found[0].tolist() == [2.0, 4.0]
            assert found[1] is held.cache
        held.cache = Cache()
    assert graphs.captures == 2


@pytest.mark.parametrize("kind", ["a large array", "a queue"])
def test_what_is_not_looked_into_is_no_output_of_a_graph(graphs: Device, kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    held = numpy.zeros(20_000) if kind == "a large array" else queue.Queue()

    def function(a: Any) -> Any:
        if kind == "a queue":
            held.put(1)
        else:
            held[0] += 1
        return a * 2, held

    f = gpu_timed(function, name="f", mode=GRAPH)
    for count in range(1, 6):
        found = f(x())[1]
        assert (found.qsize() if kind == "a queue" else found[0]) == count


def test_an_object_that_is_made_in_the_call_is_no_output_of_a_graph(graphs: Device) -> None:
    f = gpu_timed(lambda a: (a * 2, Cache()), name="f", mode=GRAPH)
    with capture() as records:
        f(x())
    assert "an output is a Cache: return its tensors, say" in records[0].mode_reason


def test_what_is_made_once_after_a_change_is_looked_at_again(graphs: Device) -> None:
    """A bias that is computed when it is first asked for, and let go when the model is told of other weights."""
    held = types.SimpleNamespace(weight=x(2.0, 2.0), bias=None)

    def function(a: Any) -> Any:
        if held.bias is None:
            held.bias = held.weight + 1
        return a * held.weight + held.bias

    f = gpu_timed(function, name="f", mode=CudaGraph())
    for weight in (2.0, 3.0, 4.0):
        held.weight, held.bias = x(weight, weight), None
        with capture() as records:
            for _ in range(80):  # more than pay for a capture, too
                assert f(x()).tolist() == [weight * 2 + 1, weight * 3 + 1]
        assert records[-1].mode == "cuda_graph"
    assert "looked at again: changes host state, which a replay would not: held.bias" in records[0].mode_reason


def test_what_changes_in_each_call_after_a_change_is_refused_at_the_second(graphs: Device) -> None:
    held = types.SimpleNamespace(weight=x(2.0, 2.0), counts=False, count=0)

    def function(a: Any) -> Any:
        held.count += held.counts
        return a * held.weight

    f = gpu_timed(function, name="f", mode=GRAPH)
    for _ in range(3):
        f(x())
    held.weight, held.counts = x(3.0, 3.0), True
    with capture() as records:
        for _ in range(4):
            assert f(x()).tolist() == [3.0, 6.0]
    assert held.count == 4
    assert "looked at again" in records[0].mode_reason
    assert [record.mode_reason.startswith("changes host state") for record in records] == [False, True, True, True]


# -- attention ---------------------------------------------------------------------------------------------


@operations.custom_op("gpu_timed_tests::attention", mutates_args=(), schema="(Tensor q) -> (Tensor o, Tensor l)")
def attention_with_two(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q * 2, torch.ones((), dtype=torch.float64)


@operations.custom_op(
    "gpu_timed_tests::attention_forward", mutates_args=(), schema="(Tensor q) -> (Tensor output, Tensor philox_seed)"
)
def attention(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q * 2, torch.ones((), dtype=torch.float64)


@operations.custom_op(
    "gpu_timed_tests::attention_backward", mutates_args=(), schema="(Tensor grad, Tensor philox_seed) -> Tensor"
)
def attention_backward(grad: torch.Tensor, philox_seed: torch.Tensor) -> torch.Tensor:
    return grad * 3


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda q: attention(q)[0], ""),
        (lambda q: attention_backward(*attention(q)), ""),
        (lambda q: attention_with_two(q)[0], "gpu_timed_tests::attention makes a tensor on cpu"),
        (lambda q: attention(q)[0] + attention(q)[1], "aten::add works on a tensor on cpu"),
        (lambda q: attention(q)[1], "an output is a tensor on cpu"),
    ],
    ids=["dropped", "to the backward pass", "another's", "computed with", "handed out"],
)
def test_what_attention_keeps_on_the_host_for_its_backward_pass(graphs: Device, call: Any, says: str) -> None:
    """As torch's own does, of CUDA tensors: seed and offset of random numbers. All float64 is on the host here."""
    f = gpu_timed(call, name="f", mode=GRAPH)
    with capture() as records, torch.no_grad():
        for _ in range(4):
            assert torch.equal(f(x()), call(x()))
    assert records[-1].mode == ("eager" if says else "cuda_graph")
    assert says in records[-1].mode_reason


@pytest.mark.parametrize("which", ["all of that name", "one of them"])
def test_an_operation_of_torch_in_a_closure_keeps_what_it_finds(graphs: Device, which: str) -> None:
    """Its attributes and caches fill when it is first called."""
    operation = torch.ops.gpu_timed_tests.attention_forward
    if which == "one of them":
        operation = operation.default
    found = iter(range(9))

    def step(a: Any) -> Any:
        vars(operation)[f"found_{which}_{next(found)}"] = a.shape
        return operation(a)[0]

    f = gpu_timed(step, name="f", mode=GRAPH)
    with capture() as records:
        for _ in range(4):
            assert f(x(-1.0, 2.0)).tolist() == [-2.0, 4.0]
    assert [record.mode for record in records] == ["eager", "eager", "cuda_graph", "cuda_graph"]


# -- what changes how a tensor lies ----------------------------------------------------------------------


def other_data(h: Any) -> None:
    h.data = h.data.transpose(-1, -2)


REARRANGED: dict[str, Callable[[Any], Any]] = {
    "transpose_": lambda h: h.transpose_(-1, -2),
    "squeeze_": lambda h: h.squeeze_(0),
    "unsqueeze_": lambda h: h.unsqueeze_(0),
    "as_strided_": lambda h: h.as_strided_((2,), (1,), 1),
    "resize_": lambda h: h.resize_(1, 1, 1),
    "set_": lambda h: h.set_(h.clone()),
    "data": other_data,
}


def cube() -> Any:
    return torch.arange(6.0).reshape(1, 2, 3)


@pytest.mark.parametrize("how", REARRANGED)
def test_state_that_is_rearranged_in_place_is_as_after_eager_calls(graphs: Device, how: str) -> None:
    """A capture runs the host's part of the call once more, a replay none of it: shapes are of the host."""
    states = [types.SimpleNamespace(h=cube()) for _ in range(2)]

    def of(state: Any) -> Callable[[Any], Any]:
        return lambda a: (REARRANGED[how](state.h), a * state.h.sum())[1]

    f, expected = gpu_timed(of(states[0]), name="f", mode=GRAPH), of(states[1])
    with capture() as records:
        for _ in range(5):
            assert torch.equal(f(x()), expected(x()))
            assert (states[0].h.shape, states[0].h.stride()) == (states[1].h.shape, states[1].h.stride())
            assert torch.equal(states[0].h, states[1].h)
    assert {record.mode for record in records} == {"eager"}
    assert ".h" in records[-1].mode_reason
    assert graphs.captures == 0


@pytest.mark.parametrize("inputs", ["copy", "static"])
@pytest.mark.parametrize("how", REARRANGED)
def test_an_argument_that_is_rearranged_in_place(graphs: Device, how: str, inputs: Any) -> None:
    f = gpu_timed(lambda a: (REARRANGED[how](a), a * 2)[1], name="f", mode=CudaGraph(warmup=1, inputs=inputs))
    with capture() as records:
        for _ in range(4):
            given, other = cube(), cube()
            REARRANGED[how](other)
            assert torch.equal(f(given), other * 2)
            assert torch.equal(given, other)
    assert {record.mode for record in records} == {"eager"}
    assert "of an argument in place, which a replay would not" in records[-1].mode_reason
    assert graphs.captures == 0


def test_what_is_rearranged_and_made_in_the_call_is_its_own(graphs: Device) -> None:
    f = gpu_timed(lambda a: a.view(-1).unsqueeze_(0).t_() * 2, name="f", mode=GRAPH)
    with capture() as records:
        for _ in range(4):
            assert f(x()).tolist() == [[2.0], [4.0]]
    assert records[-1].mode == "cuda_graph"


def test_after_a_capture_that_failed_the_solver_of_matrices_is_mended(graphs: Device) -> None:
    """Its handle would fail in the next call of anybody on this thread."""
    graphs.failing = RuntimeError("cusolver error")
    with capture() as records:
        for function in (lambda a: a / a.norm(), lambda a: torch.linalg.eigvalsh(a[:, None] * a)):
            f = gpu_timed(function, name="f", mode=GRAPH)
            for _ in range(3):
                assert torch.equal(f(x()), function(x()))
            graphs.asked.append("next")
    assert ["cusolver error" in record.mode_reason for record in records] == [False, True, True] * 2
    assert graphs.asked == ["next", "mend", "next"]


@pytest.mark.parametrize(("outputs", "stride"), [("clone", (2, 1)), ("alias", (3, 1))])
def test_an_output_that_is_a_part_of_a_larger_tensor_comes_packed(
    graphs: Device, outputs: Any, stride: tuple[int, int]
) -> None:
    f = gpu_timed(lambda a: (a * 2)[:, 1:], name="f", mode=CudaGraph(warmup=1, outputs=outputs))
    for _ in range(4):
        found = f(torch.ones(2, 3))
        assert torch.equal(found, torch.full((2, 2), 2.0))
    assert found.stride() == stride
