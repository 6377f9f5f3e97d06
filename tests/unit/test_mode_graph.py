"""The CUDA Graph mode on a device that captures on the CPU: what is captured, what is not, and what a call leaves."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import pytest

from gpu_timed import CudaGraph, ModeError, current, flush, gpu_timed, use_mode
from gpu_timed.record import NOT_SET
from gpu_timed.testing import capture

torch = pytest.importorskip("torch")
from make_believe_graphs import Device  # noqa: E402 - needs torch

from gpu_timed.modes import capturing, host_state, torch_values  # noqa: E402
from gpu_timed.modes.launcher import Passing  # noqa: E402

GRAPH = CudaGraph(warmup=1)


def modes(records: list[Any]) -> list[str]:
    return [record.mode for record in records]


def x(*values: float) -> Any:
    return torch.tensor(values or (1.0, 2.0))


# -- the life of a graph ----------------------------------------------------------------------------------


def test_warm_up_capture_replay_and_what_the_spans_say(graphs: Device) -> None:
    ran = itertools.count()  # which nobody can look into

    @gpu_timed(name="step", mode=CudaGraph(warmup=2))
    def step(a: Any, *, factor: float = 1.0) -> dict[str, Any]:
        next(ran)
        return {"y": a * factor, "parts": (a + 1, 7)}

    with capture() as records:
        for value in range(6):
            found = step(x(value, 1.0), factor=3.0)
            assert found["y"].tolist() == [3.0 * value, 3.0]
            assert found["parts"][0].tolist() == [value + 1.0, 2.0]
            assert found["parts"][1] == 7
    assert modes(records) == ["eager"] * 3 + ["cuda_graph"] * 3
    assert {record.mode_requested for record in records} == {"cuda_graph"}
    assert [record.mode_reason for record in records][:2] == [
        "warm-up 1 of 2 before capture",
        "warm-up 2 of 2 before capture",
    ]
    assert records[2].mode_reason == "captured (1.0 MiB) and compared with this run"
    assert [record.graph_memory_bytes for record in records] == [NOT_SET] * 3 + [1 << 20] * 3
    assert [record.warmth for record in records] == ["cold"] * 3 + ["warm"] * 3
    assert records[2].tier == "initialised"
    assert next(ran) == 4  # three calls, and the host's part of the capture
    assert (graphs.captures, graphs.replays) == (1, 4)  # three calls, and the one that was compared
    assert "mode_not_honoured" not in flush().counts


def test_b3_outputs_are_not_overwritten_unless_asked_for(graphs: Device) -> None:
    cloned = gpu_timed(name="f", mode=GRAPH)(lambda a: a * 2)
    aliased = gpu_timed(name="g", mode=CudaGraph(warmup=1, outputs="alias"))(lambda a: a * 2)
    for function, expected in ((cloned, [2.0, 4.0]), (aliased, [10.0, 12.0])):
        for _ in range(2):
            function(x())
        first = function(x())
        assert function(x(5.0, 6.0)).tolist() == [10.0, 12.0]
        assert first.tolist() == expected


def test_a_signature_is_shapes_dtypes_strides_static_arguments_and_grad_mode(graphs: Device) -> None:
    f = gpu_timed(name="f", mode=GRAPH)(lambda a, n=1: a * n)
    square = torch.arange(4.0).reshape(2, 2)
    calls: list[Any] = [
        lambda: f(x()),
        lambda: f(x(1.0)),
        lambda: f(x().half()),
        lambda: f(square),
        lambda: f(square.T),
        lambda: f(x(), 2),
        lambda: f(x(), n=2),
        lambda: f(x(), 2.0),
        lambda: torch.no_grad()(f)(x()),
        lambda: torch.inference_mode()(f)(x()),
    ]
    for call in calls:
        for _ in range(3):
            call()
    assert graphs.captures == len(calls)
    assert f(square.T).tolist() == square.T.tolist()
    assert f(x(), 2).tolist() == [2.0, 4.0]


def test_minus_zero_is_not_zero(graphs: Device) -> None:
    held = {"zero": 0.0}
    f = gpu_timed(name="f", mode=GRAPH)(lambda a, n: (a / n).sign() + (a / held["zero"]).sign())
    for zero, expected in ((0.0, 2.0), (-0.0, 0.0), (float("0.0"), 2.0)):
        for _ in range(3):
            assert f(x(1.0), zero).item() == expected
    held["zero"] = -0.0
    assert f(x(1.0), 0.0).item() == 0.0


def test_b4_graphs_are_bounded_and_so_are_captures(graphs: Device) -> None:
    f = gpu_timed(name="f", mode=CudaGraph(warmup=1, max_graphs=3))(lambda a: a + 1)
    with capture() as records:
        for size in range(1, 101):
            for _ in range(3):
                assert f(torch.zeros(size)).sum().item() == size
    assert graphs.captures == 12
    assert graphs.captures - graphs.released == 3
    assert modes(records[-3:]) == ["eager"] * 3
    assert "too many input signatures" in records[-1].mode_reason
    with capture() as records:  # what is captured stays
        f(torch.zeros(12))
    assert modes(records) == ["cuda_graph"]


def test_the_graph_that_was_replayed_longest_ago_goes(graphs: Device) -> None:
    f = gpu_timed(name="f", mode=CudaGraph(warmup=1, max_graphs=2))(lambda a: a + 1)
    for size in (1, 2):
        for _ in range(2):
            f(torch.zeros(size))
    f(torch.zeros(1))
    for _ in range(2):
        f(torch.zeros(3))
    assert [graph.released for graph in graphs.graphs] == [False, True, False]


def test_static_inputs_are_replayed_where_they_are(graphs: Device) -> None:
    f = gpu_timed(name="f", mode=CudaGraph(warmup=1, inputs="static"))(lambda a: a * 2)
    held = x()
    for _ in range(3):
        f(held)
    held.fill_(5.0)
    assert f(held).tolist() == [10.0, 10.0]
    assert graphs.captures == 1
    other = x()
    for _ in range(2):
        assert f(other).tolist() == [2.0, 4.0]
    assert graphs.captures == 2


# -- state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", range(1, 6))
def test_device_state_is_that_of_as_many_eager_calls(graphs: Device, calls: int) -> None:
    """In-place caches at fixed addresses: whatever was warm-up, capture, comparison or replay."""
    cache = torch.zeros(4)

    @gpu_timed(name="append", mode=GRAPH)
    def append(a: Any, at: Any) -> Any:
        cache.index_add_(0, at, a)
        a.add_(1.0)
        return cache.sum()

    given = x(1.0, 1.0)
    with capture() as records:
        for call in range(calls):
            total = append(given, torch.tensor([0, 3]))
            assert total.item() == sum(2.0 * (each + 1) for each in range(call + 1))
    assert modes(records) == (["eager"] * 2 + ["cuda_graph"] * 3)[:calls]
    assert given.tolist() == [1.0 + calls] * 2
    assert cache.tolist() == [sum(range(1, calls + 1)), 0.0, 0.0, sum(range(1, calls + 1))]


def test_an_argument_that_is_returned_is_returned(graphs: Device) -> None:
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: a.mul_(2))
    with capture() as records:
        for _ in range(4):
            given = x()
            assert f(given) is given
            assert given.tolist() == [2.0, 4.0]
    assert modes(records) == ["eager"] * 2 + ["cuda_graph"] * 2


@pytest.mark.parametrize("most", [0, 100])
def test_state_beyond_the_bound_is_not_captured(graphs: Device, most: int) -> None:
    cache = torch.zeros(100)

    @gpu_timed(name="f", mode=CudaGraph(warmup=1, max_state_bytes=most))
    def f(a: Any) -> Any:
        cache.add_(1.0)
        return a + cache[0]

    with capture() as records:
        for call in range(4):
            assert f(x(0.0)).tolist() == [call + 1.0]
    assert graphs.captures == 0
    assert f"max_state_bytes={most}" in records[-1].mode_reason


def test_what_is_made_inside_and_changed_there_is_no_state(graphs: Device) -> None:
    f = gpu_timed(lambda a: (a + 1).add_(1).mul_(2), name="f", mode=CudaGraph(warmup=1, max_state_bytes=0))
    with capture() as records:
        for _ in range(3):
            assert f(x()).tolist() == [6.0, 8.0]
    assert modes(records)[2:] == ["cuda_graph"]


def test_what_raw_kernels_change_is_declared(graphs: Device) -> None:
    """A kernel the dispatcher does not see: its memory is put back after the comparison, where it is declared."""
    cache = torch.zeros(2)

    class Raw(Device):
        def capture(self, tensor: Any, function: Any) -> Any:
            graph = super().capture(tensor, function)
            replay = graph.replay
            cache.numpy()[:] -= 1  # a capture runs nothing

            def both() -> None:
                cache.numpy()[:] += 1
                replay()

            graph.replay = both  # type: ignore[method-assign]
            return graph

    graphs.__class__ = Raw

    @gpu_timed(name="f", mode=CudaGraph(warmup=1, mutates=lambda a: cache))
    def f(a: Any) -> Any:
        cache.numpy()[:] += 1
        return a * 2

    for call in range(5):
        f(x())
        assert cache.tolist() == [call + 1.0] * 2


@pytest.mark.parametrize("compiles", [False, True])
def test_b2_an_argument_that_raw_kernels_change_unseen_is_noticed(graphs: Device, compiles: bool) -> None:
    """A Triton kernel that works in place, say: a replay would change the graph's copy of it."""
    graphs.compiles = compiles

    class Raw(Device):
        def capture(self, inputs: Any, function: Any, **more: Any) -> Any:
            before = [each.clone() for each in inputs]
            graph = super().capture(inputs, function, **more)
            for each, was in zip(inputs, before, strict=True):
                each.copy_(was)  # a capture runs nothing
            return graph

    graphs.__class__ = Raw

    def f(a: Any, b: Any) -> Any:
        a.numpy()[:] += b.numpy()
        return a

    timed = gpu_timed(f, name="f", mode=GRAPH)
    with capture() as records:
        for _ in range(4):
            given = x(1.0, float("nan"))
            assert timed(given, x()) is given
            assert given[0].item() == 2.0
    assert modes(records) == ["eager"] * 4
    assert "changes an argument by what is no operation of torch" in records[-1].mode_reason


def test_nan_among_the_arguments_is_no_change_of_them(graphs: Device) -> None:
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: a.isnan())
    with capture() as records:
        for _ in range(3):
            assert f(x(1.0, float("nan"))).tolist() == [False, True]
    assert modes(records)[2:] == ["cuda_graph"]


def test_what_a_call_does_but_once_is_no_obstacle(graphs: Device) -> None:
    """A buffer made at the first call, a kernel tuned by reading times back; in later calls nothing of the kind."""
    held: dict[str, Any] = {"weight": None, "calls": 0}

    @gpu_timed(name="f", mode=CudaGraph(warmup=2))
    def f(a: Any) -> Any:
        if held["weight"] is None:
            held["weight"] = torch.full((2,), a.max().item())
        return a * held["weight"]

    with capture() as records:
        for _ in range(5):
            assert f(x()).tolist() == [2.0, 4.0]
    assert modes(records) == ["eager"] * 3 + ["cuda_graph"] * 2
    assert records[0].mode_reason.startswith("warm-up 1 of 2, looked at again: aten::_local_scalar_dense makes")
    assert records[0].warmth == "cold"


@pytest.mark.parametrize("where", ["attribute", "closure", "argument", "list"])
def test_host_state_that_changes_is_never_replayed(graphs: Device, where: str) -> None:
    class Counts:
        def __init__(self) -> None:
            self.n = 0
            self.all: list[int] = []

        def step(self, a: Any) -> Any:
            self.n += 1
            return a + self.n

        def append(self, a: Any) -> Any:
            self.all.append(1)
            return a + len(self.all)

    counts, n = Counts(), 0

    def closure(a: Any) -> Any:
        nonlocal n
        n += 1
        return a + n

    def argument(a: Any, held: Any) -> Any:
        return Counts.step(held, a)

    made = {"attribute": counts.step, "closure": closure, "argument": argument, "list": counts.append}[where]
    f = gpu_timed(made, name="f", mode=CudaGraph(warmup=2))
    more = (counts,) if where == "argument" else ()
    with capture() as records:
        for call in range(6):
            assert f(x(0.0), *more).tolist() == [call + 1.0]
    assert modes(records) == ["eager"] * 6
    assert "changes host state" in records[-1].mode_reason
    assert graphs.captures == 0


def test_a_declared_reset_makes_the_capture_and_the_call_one(graphs: Device) -> None:
    held = {"n": 0}

    @gpu_timed(name="f", mode=CudaGraph(warmup=1, reset=lambda: held.update(n=0)))
    def f(a: Any) -> Any:
        held["n"] += 1
        return a + 1

    for _ in range(4):
        assert f(x(0.0)).tolist() == [1.0]
    assert graphs.captures == 1


def test_host_state_that_only_the_outputs_show_is_noticed_by_the_comparison(graphs: Device) -> None:
    """Hidden where nobody looks: the replay differs from the eager run, whose result stands."""
    hidden = iter(range(1000))

    @gpu_timed(name="f", mode=GRAPH)
    def f(a: Any) -> Any:
        return a + next(hidden)

    with capture() as records:
        found = [f(x(0.0)).item() for _ in range(5)]
    assert modes(records) == ["eager"] * 5
    assert "a replay does not do what the eager run did" in records[-1].mode_reason
    assert found == sorted(found)
    assert graphs.released == 1


def test_state_that_a_replay_would_leave_otherwise_is_noticed_and_put_right(graphs: Device) -> None:
    """The outputs are equal; what the call leaves in its cache is not."""
    cache, hidden = torch.zeros(1), iter(range(1, 1000))

    @gpu_timed(name="f", mode=GRAPH)
    def f(a: Any) -> Any:
        cache.fill_(next(hidden))
        return a + 1

    with capture() as records:
        for _ in range(2):
            f(x())
    assert cache.item() == 2.0
    assert "a replay does not do what the eager run did" in records[1].mode_reason


def test_settings_that_change_at_every_call_end_in_eager_calls(graphs: Device) -> None:
    held = {"n": 0}
    f = gpu_timed(lambda a: a + held["n"], name="f", mode=GRAPH)
    with capture() as records:
        for call in range(30):
            held["n"] = call
            assert f(x(0.0)).item() == call
    assert graphs.captures == 9
    assert "changes again and again" in records[-1].mode_reason


def test_objects_among_the_arguments_are_not_kept_alive(graphs: Device) -> None:
    """A cache of each request: its graph goes with it."""

    class Cache:
        def __init__(self) -> None:
            self.kept = torch.zeros(1)

    f = gpu_timed(lambda a, cache: cache.kept.add_(a).clone(), name="f", mode=GRAPH)
    for request in range(5):
        cache = Cache()
        for call in range(4):
            assert f(x(1.0), cache).item() == call + 1.0, request
        gone, kept = weakref.ref(cache), weakref.ref(cache.kept)
        del cache
        assert gone() is None  # at once, and not when garbage is collected next
        del graphs.graphs[:]
        assert kept() is None  # nor what it holds
    assert graphs.captures == 5


def test_tensors_among_the_arguments_are_not_kept_alive(graphs: Device) -> None:
    f = gpu_timed(lambda a, b: a + b, name="f", mode=GRAPH)
    for call in range(5):
        given = x(), x()
        gone = [weakref.ref(each) for each in given]
        f(*given)
        del given
        assert [each() for each in gone] == [None, None], call
    assert graphs.captures == 1


def test_nesting_is_part_of_the_signature(graphs: Device) -> None:
    f = gpu_timed(lambda a: a[0] + 1, name="f", mode=GRAPH)
    with capture() as records:
        for _ in range(4):
            assert f(x()).item() == 2.0
            assert f([x()]).tolist() == [2.0, 3.0]
    assert modes(records)[4:] == ["cuda_graph"] * 4


def test_what_is_made_inside_can_be_freed_inside(graphs: Device) -> None:
    """A call that is watched holds on to none of what it makes."""
    from torch.multiprocessing.reductions import StorageWeakRef

    freed: list[bool] = []

    def f(a: Any) -> Any:
        made = a + 1
        held = StorageWeakRef(made.untyped_storage())
        result = made * 2
        del made
        freed.append(held.expired())
        return result

    gpu_timed(f, name="f", mode=GRAPH)(x())
    assert freed == [True]


def test_an_object_that_came_to_have_the_identity_of_another_is_another(
    graphs: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held:
        pass

    monkeypatch.setattr(torch_values, "id", lambda _: 1, raising=False)
    f = gpu_timed(lambda a, held: a + 1, name="f", mode=GRAPH)
    with capture() as records:
        for _ in range(2):
            held = Held()
            for _ in range(3):
                f(x(), held)
            del held
    assert modes(records) == ["eager", "eager", "cuda_graph"] * 2


@pytest.mark.parametrize("how", ["attribute", "data", "closure", "plain", "training", "load_state_dict"])
def test_what_is_bound_anew_is_captured_anew(graphs: Device, how: str) -> None:
    """Weights re-bound after a capture, or another value of a setting: the next call does what it would eagerly."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0))
    model.scale = 1.0
    bias = torch.zeros(2)

    def step(a: Any) -> Any:
        return model(a) * model.scale + bias + (0.0 if model[1].training else 1.0)

    f = gpu_timed(step, name="f", mode=GRAPH)
    with torch.no_grad():
        for _ in range(3):
            f(x())
        replays = graphs.replays
        if how == "attribute":
            model[0].weight = torch.nn.Parameter(torch.ones(2, 2))
        elif how == "data":
            model[0].weight.data = torch.ones(2, 2)
        elif how == "closure":
            bias = torch.ones(2)
        elif how == "plain":
            model.scale = 2.0
        elif how == "training":
            model[1].eval()
        else:
            model.load_state_dict({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)})
        for _ in range(2):
            assert torch.allclose(f(x()), step(x()))
    assert graphs.captures == (1 if how == "load_state_dict" else 2)
    assert graphs.replays > replays


class Model:
    """Adds what it holds, and does more to the state of the world if told."""

    def __init__(self, does: str) -> None:
        self.weight, self.scale, self.does = torch.ones(2), 1.0, does
        self.cache = torch.zeros(2)

    def step(self, a: Any) -> Any:
        if self.does == "state":
            self.cache.add_(a)
        if self.does == "input":
            a.add_(1)
        y = a * self.scale + self.weight
        return torch.nn.functional.dropout(y, 0.5) if self.does == "random" else y


@pytest.mark.parametrize("does", ["nothing", "state", "input", "random", "unseen", "declared"])
@pytest.mark.parametrize("how", ["bound", "plain", "moved"])
def test_nobody_sees_what_a_stale_replay_gives_or_does(graphs: Device, does: str, how: str) -> None:
    """What only gives outputs is asked after the launch, while the device works; all else before it."""
    model, twin = Model(does), Model(does)
    graphs.compiles = does == "unseen"
    mode = CudaGraph(warmup=1, mutates=lambda *_: []) if does == "declared" else GRAPH
    f = gpu_timed(model.step, name="f", mode=mode)
    launches: list[int] = []
    torch.manual_seed(0)
    drawn = torch.get_rng_state()
    for call in range(8):
        if call == 4:
            for one in (model, twin):
                if how == "bound":
                    one.weight = torch.full((2,), 5.0)
                elif how == "plain":
                    one.scale = 3.0
                else:
                    one.weight.data = torch.full((2,), 5.0)
        given, also = x(float(call), 1.0), x(float(call), 1.0)
        torch.set_rng_state(drawn)
        expected = twin.step(also)
        after = torch.get_rng_state()
        torch.set_rng_state(drawn)
        before = graphs.replays
        assert torch.equal(f(given), expected), call
        launches.append(graphs.replays - before)
        drawn = torch.get_rng_state()
        assert torch.equal(drawn, after), call
        assert torch.equal(given, also), call
        assert torch.equal(model.cache, twin.cache), call
    compared = 0 if does == "unseen" else 1
    thrown_away = 1 if does == "nothing" else 0
    assert launches == [0, compared, 1, 1, compared + thrown_away, 1, 1, 1]
    assert graphs.captures == 2


@pytest.mark.parametrize("most", [8, 7])
def test_what_a_stale_replay_reads_is_there(graphs: Device, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Held until the next call, where it is not much; else nothing is launched that may read what was freed."""
    from torch.multiprocessing.reductions import StorageWeakRef

    monkeypatch.setattr(capturing, "MOST_HELD", most)
    weight = torch.ones(2)  # of eight bytes
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: a * weight)
    for _ in range(3):
        f(x())
    old = StorageWeakRef(weight.untyped_storage())
    weight.data = torch.full((2,), 3.0)
    assert old.expired() == (most == 7)
    before = graphs.replays
    for _ in range(2):
        assert f(x()).tolist() == [3.0, 6.0]
    assert old.expired()
    assert graphs.replays - before == (2 if most == 7 else 3)  # one of them compared, one thrown away


def test_calls_of_the_signature_that_was_replayed_last_are_known_at_a_glance(
    graphs: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Holder:
        factor = 2.0

    held = Holder()
    f = gpu_timed(name="f", mode=GRAPH)(lambda h, a, n, *, b=None: (a * h.factor, a + b, n))
    for _ in range(3):
        f(held, x(), 7, b=x())
    with capture() as records, monkeypatch.context() as patch:
        patch.setattr(torch_values, "take", lambda *_, **__: 1 / 0)
        for value in range(3):
            first, second, n = f(held, x(value, 1.0), 7, b=x(1.0, 1.0))
            assert (first.tolist(), second.tolist(), n) == ([2.0 * value, 2.0], [value + 1.0, 2.0], 7)
    assert modes(records) == ["cuda_graph"] * 3


def test_so_are_those_that_no_graph_can_hold(graphs: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: a * (a.max().item() if a.shape[0] == 2 else 1))
    for _ in range(4):
        f(x(1.0))
        f(x())
    with capture() as records, monkeypatch.context() as patch:
        patch.setattr(torch_values, "take", lambda *_, **__: 1 / 0)
        for _ in range(3):
            assert f(x()).tolist() == [2.0, 4.0]
    assert {(record.mode, "makes the host wait" in record.mode_reason) for record in records} == {("eager", True)}
    with capture() as records:
        assert f(x(3.0)).tolist() == [3.0]
    assert modes(records) == ["cuda_graph"]


# -- what a graph cannot hold -----------------------------------------------------------------------------


def test_b1_what_the_host_reads_names_the_line_and_is_tried_once(graphs: Device) -> None:
    @gpu_timed(name="f", mode=GRAPH)
    def f(a: Any) -> Any:
        return a * a.max().item()

    with capture() as records:
        for _ in range(4):
            assert f(x()).tolist() == [2.0, 4.0]
    assert modes(records) == ["eager"] * 4
    assert "aten::_local_scalar_dense makes the host wait" in records[0].mode_reason
    assert "test_mode_graph.py:" in records[-1].mode_reason
    assert graphs.captures == 0
    assert [record.warmth for record in records][1:] == ["warm"] * 3


def test_a_fallback_is_for_its_signature_alone(graphs: Device) -> None:
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: a * 2 if a.shape[0] < 3 else a * a.sum().item())
    with capture() as records:
        for _ in range(3):
            f(x())
            f(x(1.0, 2.0, 3.0))
    assert modes(records[::2]) == ["eager", "eager", "cuda_graph"]
    assert modes(records[1::2]) == ["eager"] * 3


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda a: a.double() * 2, "makes a tensor on"),
        (lambda a: a.requires_grad_() * 2, "requires grad"),
        (lambda a: a.view(-1), "a view of an argument"),
        (lambda a: {1, 2}, "an output is a set"),
        (lambda a: (a.nonzero(), a)[1] + 1, "aten::nonzero makes the host wait"),
        (lambda a: torch.linalg.eigvals(a[:, None] * a).real, "aten::linalg_eig makes the host wait"),
    ],
)
def test_what_cannot_be_held_runs_eagerly_with_the_reason(graphs: Device, function: Any, says: str) -> None:
    f = gpu_timed(name="f", mode=GRAPH)(function)
    with capture() as records:
        for _ in range(3):
            f(x())
    assert modes(records) == ["eager"] * 3
    assert says in records[-1].mode_reason


def test_arguments_that_cannot_be_held(graphs: Device) -> None:
    f = gpu_timed(name="f", mode=GRAPH)(lambda a, b=None: a + 1 if b is None else b.add_(a))
    with capture() as records:
        for _ in range(3):
            f(x().double())
            f(x(1.0).expand(2))
            both = x()
            f(both, both)
            f(3)
    for index, says in enumerate(("an argument is a tensor on", "overlaps itself", "share memory", "no argument")):
        assert says in records[8 + index].mode_reason
    assert graphs.captures == 0


def test_a_cause_that_passes_is_tried_again_at_later_calls(graphs: Device) -> None:
    graphs.failing = Passing("another thread broke the capture")
    step = gpu_timed(name="step", mode=GRAPH)(lambda a: a * 2)
    with capture() as records:
        for index in range(6):
            if index == 3:
                graphs.failing = None
            assert step(x()).tolist() == [2.0, 4.0]
    assert modes(records) == ["eager"] * 4 + ["cuda_graph"] * 2
    assert records[1].mode_reason == "not captured now, tried at a later call: another thread broke the capture"
    assert records[1].warmth == "cold"
    assert "mode_not_honoured" not in flush().counts


def test_but_not_without_end(graphs: Device) -> None:
    graphs.failing = Passing("no memory for a graph")
    step = gpu_timed(name="step", mode=GRAPH)(lambda a: a * 2)
    with capture() as records:
        for _ in range(20):
            assert step(x()).tolist() == [2.0, 4.0]
    assert graphs.captures == 8
    assert records[-1].mode_reason == "could not be captured (Passing: no memory for a graph)"


def test_one_capture_at_a_time_in_a_process(graphs: Device) -> None:
    step = gpu_timed(name="step", mode=GRAPH)(lambda a: a * 2)
    with capture() as records:
        step(x())
        turn = current.modes.ground.take_turn()
        assert turn is not None
        assert step(x()).tolist() == [2.0, 4.0]
        current.modes.ground.end_turn()
        for _ in range(2):
            step(x())
    assert modes(records) == ["eager"] * 3 + ["cuda_graph"]
    assert records[1].mode_reason == "another thread is capturing a graph: tried at a later call"
    assert "mode_not_honoured" not in flush().counts


@pytest.mark.parametrize(("error", "gives_up"), [(Passing("busy"), False), (RuntimeError("broken"), True)])
def test_a_replay_that_cannot_be_queued_costs_no_call(
    graphs: Device, monkeypatch: pytest.MonkeyPatch, error: Exception, gives_up: bool
) -> None:
    step = gpu_timed(name="step", mode=GRAPH)(lambda a: a.mul_(2))
    for _ in range(3):
        step(x())

    def fails() -> None:
        raise error

    with capture() as records:
        with monkeypatch.context() as patch:
            patch.setattr(graphs.graphs[0], "replay", fails)
            for _ in range(12):
                assert step(x()).tolist() == [2.0, 4.0]
        assert step(x()).tolist() == [2.0, 4.0]
    assert modes(records) == ["eager"] * 12 + ["eager" if gives_up else "cuda_graph"]
    assert records[0].mode_reason == ("a replay failed (RuntimeError: broken)" if gives_up else "busy")


@pytest.mark.parametrize("changes", [False, True])
def test_a_call_whose_replay_has_changed_state_is_not_run_again(
    graphs: Device, monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    state = torch.zeros(2)

    @gpu_timed(name="step", mode=GRAPH)
    def step(a: Any) -> Any:
        if changes:
            state.add_(a)
        return a * 2

    for _ in range(3):
        step(x())

    def fails(*_: Any) -> Any:
        raise MemoryError("for a copy of the output")

    monkeypatch.setattr(capturing.Captured, "made", fails)
    if changes:
        with pytest.raises(MemoryError, match="for a copy"):
            step(x())
        assert state.tolist() == [4.0, 8.0]
    else:
        assert step(x()).tolist() == [2.0, 4.0]


def test_only_what_draws_random_numbers_or_changes_streams_is_captured_by_torch(
    graphs: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since that puts the random generator, which all threads share, into capture mode."""

    def beside(a: Any) -> Any:
        thread = threading.Thread(target=torch.rand, args=(4,))
        thread.start()
        thread.join()
        return a * 2

    def attention(a: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(beside(a), a, a)

    functions: list[Any] = [lambda a: torch.nn.functional.dropout(a, 0.5), lambda a: a * 2, beside, attention]
    with torch.no_grad():
        for index, function in enumerate(functions):
            step = gpu_timed(name=f"step{index}", mode=GRAPH)(function)
            for _ in range(2):
                step(torch.ones(1, 2, 4, 4))
        stands = torch.get_rng_state()
        set_back = []
        monkeypatch.setattr(graphs, "set_random_state", lambda *_: set_back.append(1))
        step = gpu_timed(name="again", mode=GRAPH)(beside)
        for _ in range(2):
            step(x())
        assert not torch.equal(torch.get_rng_state(), stands)  # what the other thread drew stays drawn
        assert set_back == []
    assert graphs.by_torch == [True, False, False, False, False]
    monkeypatch.setattr(graphs, "where", lambda _: itertools.count().__next__)
    step = gpu_timed(name="streams", mode=GRAPH)(lambda a: a * 2)
    for _ in range(2):
        step(x())
    assert graphs.by_torch[5:] == [True]


def test_a_capture_that_fails_costs_no_call_and_is_not_tried_again(graphs: Device) -> None:
    graphs.failing = RuntimeError("cudaErrorStreamCaptureInvalidated")
    state = torch.zeros(1)
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: state.add_(1) + a)
    with capture() as records:
        for call in range(4):
            assert f(x(0.0)).item() == call + 1.0
    assert graphs.captures == 1
    assert "could not be captured (RuntimeError: cudaErrorStreamCaptureInvalidated)" in records[-1].mode_reason
    assert flush().counts["mode_not_honoured"] == 3


def test_strict_raises_and_says_why(graphs: Device) -> None:
    f = gpu_timed(name="f", mode=CudaGraph(warmup=1, strict=True))(lambda a: a * a.max().item())
    with pytest.raises(ModeError, match=r"f cannot run as cuda_graph: aten::_local_scalar_dense"):
        f(x())
    graphs.why = "no CUDA device"
    g = gpu_timed(name="g", mode=CudaGraph(strict=True))(lambda a: a)
    with capture() as records:
        for refused in (g, f):
            with pytest.raises(ModeError, match="no CUDA device"):
                refused(x())
    assert [(record.mode.reason, record.mode_requested) for record in records] == [("not_run", "cuda_graph")] * 2
    assert all(record.mode_reason == "no CUDA device" and record.status == "error" for record in records)


def test_an_exception_of_the_users_is_the_users_in_every_phase(graphs: Device) -> None:
    raising = {"now": False}

    def step(a: Any, held: Any) -> Any:
        if held["now"]:
            raise KeyError("mine")
        return a + 1

    f = gpu_timed(step, name="f", mode=CudaGraph(warmup=1))
    for call in range(3):
        raising["now"] = True
        with pytest.raises(KeyError, match="mine"):
            f(x(), raising)
        raising["now"] = False
        assert f(x(), raising).tolist() == [2.0, 3.0], call


def test_without_a_device_and_inside_a_capture_of_the_users(graphs: Device) -> None:
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: a + 1)
    for why in ("no CUDA device", "the caller is capturing a graph itself"):
        graphs.why = why
        with capture() as records:
            assert f(x()).tolist() == [2.0, 3.0]
        assert records[0].mode_reason == why
    graphs.why = ""
    for _ in range(4):
        f(x())
    graphs.why = "the caller is capturing a graph itself"  # now that its calls are known at a glance
    with capture() as records:
        assert f(x()).tolist() == [2.0, 3.0]
    assert records[0].mode_reason == graphs.why


def test_on_this_machine_the_real_device_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with capture() as records, use_mode("cuda_graph"):
        assert gpu_timed(name="f")(lambda a: a + 1)(x()).tolist() == [2.0, 3.0]
    assert (records[0].mode, records[0].mode_requested) == ("eager", "cuda_graph")
    assert records[0].mode_reason == "no CUDA device"


# -- together ---------------------------------------------------------------------------------------------


def test_a_site_inside_another_ones_graph_has_none_of_its_own(graphs: Device) -> None:
    inner = gpu_timed(name="inner", mode=GRAPH)(lambda a: a * 2)
    outer = gpu_timed(name="outer", mode=GRAPH)(lambda a: inner(a) + 1)
    with capture() as records:
        for _ in range(4):
            assert outer(x()).tolist() == [3.0, 5.0]
    assert graphs.captures == 1
    assert [record.mode for record in records if record.name == "outer"][-1] == "cuda_graph"
    assert {record.mode_reason for record in records if record.name == "inner"} == {
        "inside the CUDA Graph of another site"
    }
    for _ in range(4):
        inner(x())
    another = gpu_timed(name="another", mode=GRAPH)(lambda a: inner(a) + 1)
    with capture() as records:  # though its calls are known at a glance
        another(x())
    assert {record.mode_reason for record in records if record.name == "inner"} == {
        "inside the CUDA Graph of another site"
    }
    inner_too = gpu_timed(name="alone", mode=GRAPH)(lambda a: a * 2)
    for _ in range(2):
        inner_too(x())
    assert graphs.captures == 3


def test_modules_and_methods(graphs: Device) -> None:
    torch.manual_seed(0)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

        @gpu_timed(name="forward", mode=GRAPH)
        def forward(self, a: Any) -> Any:
            return self.linear(a)

    first, second = Layer(), Layer()
    live = gpu_timed(torch.nn.Linear(2, 2), name="live", mode=GRAPH)
    with torch.no_grad(), capture() as records:
        for _ in range(4):
            assert torch.allclose(first(x()), first.linear(x()))
            assert torch.allclose(second(x()), second.linear(x()))
            assert torch.allclose(live(x()), torch.nn.functional.linear(x(), live.weight, live.bias))
    assert graphs.captures == 3
    assert modes(records[-3:]) == ["cuda_graph"] * 3


def test_random_numbers_go_on_as_if_there_were_no_graph(graphs: Device) -> None:
    """B6: no number is drawn twice or left out on the way to a graph; what draws is captured all the same."""
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: torch.nn.functional.dropout(a, 0.5))
    given = torch.ones(64)
    torch.manual_seed(0)
    expected = [torch.nn.functional.dropout(given, 0.5) for _ in range(5)]
    torch.manual_seed(0)
    with capture() as records:
        for one in expected:
            assert torch.equal(f(given), one)
    assert modes(records)[2:] == ["cuda_graph"] * 3


def test_a_comparison_leaves_the_random_numbers_where_the_call_left_them(graphs: Device) -> None:
    """Whatever the replay that was compared has drawn."""
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: torch.nn.functional.dropout(a, 0.5))
    given = torch.ones(64)
    torch.manual_seed(0)
    for _ in range(2):
        torch.nn.functional.dropout(given, 0.5)
    expected = torch.get_rng_state()
    torch.manual_seed(0)
    graphs.draws_more = 3
    for _ in range(2):
        f(given)
    assert graphs.captures == graphs.replays == 1
    assert torch.equal(torch.get_rng_state(), expected)


def test_what_draws_random_numbers_is_compared_as_all_else(graphs: Device) -> None:
    """Replayed from where the call began to draw, it draws the same: what differs comes of something else."""
    hidden = itertools.count(1)
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: torch.nn.functional.dropout(a, 0.5) * next(hidden))
    with capture() as records:
        for call in range(12):
            assert f(torch.ones(64)).max().item() >= 2.0 * (call + 1)
    assert modes(records) == ["eager"] * 12
    assert "a replay does not do what the eager run did" in records[1].mode_reason
    assert records[-1].mode_reason.startswith("could not be captured")
    assert graphs.captures == graphs.replays == graphs.released == 8


def test_another_thread_that_draws_in_between_is_no_reason_to_give_up(
    graphs: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: torch.nn.functional.dropout(a, 0.5))
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "set_random_state", lambda *_: None)
        for _ in range(3):
            f(torch.ones(64))
    with capture() as records:
        for _ in range(3):
            f(torch.ones(64))
    assert modes(records) == ["eager"] + ["cuda_graph"] * 2


def test_an_audit_compares_again_now_and_then(graphs: Device) -> None:
    f = gpu_timed(name="f", mode=CudaGraph(warmup=1, audit_every=3))(lambda a: a + 1)
    with capture() as records:
        for value in range(9):
            assert f(x(value)).tolist() == [value + 1.0]
    assert modes(records) == [
        "eager",
        "eager",
        "cuda_graph",
        "cuda_graph",
        "eager",
        *["cuda_graph"] * 2,
        "eager",
        "cuda_graph",
    ]
    assert records[4].mode_reason == "compared with this run"
    assert graphs.captures == 1


def test_where_compiled_code_may_run_nothing_is_changed_twice(graphs: Device) -> None:
    graphs.compiles = True
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: a + 1)
    with capture() as records:
        for _ in range(2):
            f(x())
    assert "not compared: torch.compile is in use" in records[1].mode_reason
    assert (graphs.captures, graphs.replays) == (1, 0)


def test_threads_replay_one_graph_and_get_their_own_outputs(graphs: Device) -> None:
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: a * 2 + 1)
    wrong: list[Any] = []

    def work(value: float) -> None:
        for _ in range(50):
            found = f(x(value)).tolist()
            if found != [2 * value + 1]:
                wrong.append((value, found))

    threads = [threading.Thread(target=work, args=(float(value),)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert graphs.captures == 1


def test_a_fault_of_ours_is_counted_and_not_felt(graphs: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: a + 1)
    for where, name in ((torch_values, "take"), (host_state, "Snapshot"), (torch_values, "apart")):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, lambda *_, **__: 1 / 0)
            with capture() as records:
                assert f(torch.zeros(len(name))).sum().item() == len(name)
            assert records[0].mode == "eager"
            assert "ZeroDivisionError" in records[0].mode_reason


def test_guards_look_at_every_kind_of_place() -> None:
    class Holder:
        count, weight = 1, None

    held = Holder()
    held.count, held.weight, held.parts = 1000, torch.ones(2), [1, torch.ones(1)]
    number = 3

    def function(a: Any) -> Any:
        return a * number + held.weight + held.parts[1] * held.count

    guards = host_state.Snapshot(function, [], torch.is_tensor).guards()
    assert not guards.stale()
    held.count = int("1000")
    assert not guards.stale()

    def changed(change: Any, back: Any) -> bool:
        change()
        found = guards.stale()
        back()
        assert not guards.stale()
        return found

    weight, memory = held.weight, held.weight.data
    assert changed(lambda: setattr(held, "count", 2), lambda: setattr(held, "count", 1000))
    assert changed(lambda: setattr(held, "count", 1000.0), lambda: setattr(held, "count", 1000))
    assert changed(lambda: setattr(held, "weight", weight.clone()), lambda: setattr(held, "weight", weight))
    assert changed(lambda: setattr(weight, "data", torch.ones(2)), lambda: setattr(weight, "data", memory))
    assert changed(lambda: delattr(held, "count"), lambda: setattr(held, "count", 1000))
    assert changed(lambda: held.parts.insert(0, 5), lambda: held.parts.pop(0))
    number = 4
    assert guards.stale()
