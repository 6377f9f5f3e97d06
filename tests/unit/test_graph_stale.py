"""What a replay that should not have been does: stop the device for good, or another rank wait for ever."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpu_timed import CudaGraph, ModeError, gpu_timed
from gpu_timed.testing import capture

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functions_of_dist  # noqa: E402
from make_believe_graphs import Device, Graph  # noqa: E402
from torch import library as operations  # noqa: E402
from torch.distributed import destroy_process_group  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from gpu_timed.modes import host_reach  # noqa: E402
from gpu_timed.modes.torch_watching import Watch, key_of  # noqa: E402

GRAPH = CudaGraph(warmup=1)
functional = torch.nn.functional


class Table:
    """Rows that are looked up by their numbers."""

    def __init__(self, rows: int) -> None:
        self.rows = torch.arange(3.0 * rows).reshape(rows, 3)


LOOKUPS: dict[str, Callable[[Any, Any], Any]] = {
    "embedding": lambda rows, ids: functional.embedding(ids, rows),
    "embedding_bag": lambda rows, ids: functional.embedding_bag(ids[None], rows),
    "index": lambda rows, ids: rows[ids],
    "index of int32": lambda rows, ids: rows[ids.int()],
    "index_select": lambda rows, ids: rows.index_select(0, ids),
    "gather": lambda rows, ids: rows.gather(0, ids[:, None]),
    "take": torch.take,
    "computed": lambda rows, ids: rows[(ids.float() * 1.0).long()],
    "of what is cast": lambda rows, ids: rows.half()[ids],
}


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("how", ["bound", "moved"])
def test_no_index_is_looked_up_in_a_table_that_was(graphs: Device, lookup: str, how: str) -> None:
    """On a device that is an assertion, after which the process can use it no more: a larger vocabulary, say."""
    table = Table(4)
    f = gpu_timed(name="f", mode=GRAPH)(lambda ids: LOOKUPS[lookup](table.rows, ids))
    for _ in range(4):
        f(torch.tensor([0, 3]))
    before = graphs.replays
    if how == "bound":
        table.rows = Table(9).rows
    else:
        table.rows.data = Table(9).rows
    with capture() as records:
        found = f(torch.tensor([8, 3]))
    assert torch.equal(found, LOOKUPS[lookup](table.rows, torch.tensor([8, 3])))
    assert records[0].mode_reason == "captured (1.0 MiB) and compared with this run"
    assert graphs.replays - before == 1  # the one that was compared


@operations.custom_op("gpu_timed_tests::doubled", mutates_args=())
def doubled(a: torch.Tensor) -> torch.Tensor:
    return a * 2


IDS = torch.tensor([0, 1])
HALVES = torch.tensor([0.5, 0.5])


@pytest.mark.parametrize(
    ("call", "stops"),
    [
        (lambda: doubled(HALVES), True),
        (lambda: torch._assert_async(HALVES[0]), True),
        (lambda: functional.binary_cross_entropy(HALVES, HALVES), True),
        (lambda: HALVES.masked_scatter(HALVES > 0, HALVES), True),
        (lambda: functional.nll_loss(HALVES[None], IDS[:1]), True),
        (lambda: functional.one_hot(IDS, 2), True),
        (lambda: HALVES.scatter(0, IDS, HALVES), True),
        (lambda: torch.where(HALVES > 0, HALVES, HALVES.exp()), False),
        (lambda: (IDS * 2 + 1)[None].view(-1).float() * HALVES, False),
        (lambda: HALVES @ HALVES, False),
        (lambda: functional.layer_norm(HALVES, (2,)).argmax().float(), False),
        (lambda: functional.scaled_dot_product_attention(*[torch.ones(1, 2, 4)] * 3, torch.ones(2, 2).bool()), False),
    ],
)
def test_what_may_stop_a_device(call: Callable[[], Any], stops: bool) -> None:
    with Watch(lambda _: True) as watch:
        call()
    assert watch.may_stop == stops


def from_library(name: str) -> Any:
    """Return what stands for a kernel of that library: callable, and does something."""
    kind = type("Kernel", (), {"__module__": name, "__call__": lambda _, a: a * 2})
    return kind()


def module(name: str) -> Any:
    made = types.ModuleType(name)
    made.work = lambda a: a * 2  # type: ignore[attr-defined]
    return made


class Holder:
    """An object with a kernel in it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def step(self, a: Any) -> Any:
        return self.kernel(a) * weight


weight = torch.ones(2)
kernel: Any = None
library: Any = None


def by_global(a: Any) -> Any:
    return kernel(a) * weight


def by_module(a: Any) -> Any:
    return library.work(a) * weight


def by_root(a: Any) -> Any:
    return a * (math.sqrt(4.0) * weight)


@pytest.mark.parametrize(
    ("where", "first"),
    [
        ("triton.runtime.jit", True),
        ("numba.cuda.dispatcher", True),
        ("cupy._core.raw", True),
        ("my_own.kernels", False),
        ("an object's", True),
        ("a module", True),
        ("a module of one's own", False),
        ("in C", True),
        ("in C, of the standard library", False),
    ],
)
def test_before_kernels_that_torch_does_not_see_all_is_asked(
    graphs: Device, monkeypatch: pytest.MonkeyPatch, where: str, first: bool
) -> None:
    """What they read, and what they check, nobody knows: none of them is launched on what was."""
    here = globals()
    monkeypatch.setitem(here, "weight", torch.ones(2))
    if where == "an object's":
        function = Holder(from_library("triton.runtime.jit")).step
    elif where.startswith("a module"):
        monkeypatch.setitem(here, "library", module("my_own" if "own" in where else "cupy"))
        function = by_module
    elif where.startswith("in C"):
        if where == "in C":
            monkeypatch.setattr(host_reach, "_CLOSED", host_reach._CLOSED - {"math"})
        function = by_root
    else:
        monkeypatch.setitem(here, "kernel", from_library(where))
        function = by_global
    f = gpu_timed(function, name="f", mode=GRAPH)
    for _ in range(4):
        f(torch.ones(2))
    before = graphs.replays
    monkeypatch.setitem(here, "weight", torch.full((2,), 3.0))
    assert f(torch.ones(2)).tolist() == [6.0, 6.0]
    assert graphs.replays - before == (1 if first else 2)  # the one that was compared; and one thrown away


@pytest.fixture
def ranks() -> Iterator[None]:
    """A group of two ranks, of which the other is make-believe and adds nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@operations.custom_op("gpu_timed_tests::reduced", mutates_args=())
def reduced(a: torch.Tensor) -> torch.Tensor:
    found = a.clone()
    dist.all_reduce(found)
    return found


@pytest.mark.parametrize("how", ["in place", "an operation of one's own"])
def test_what_ranks_exchange_is_exchanged_as_often_as_it_is_called(graphs: Device, ranks: None, how: str) -> None:
    """One rank that tries a replay out beside its call is one exchange ahead of the others."""
    factor = [2.0]
    with Watch(lambda _: True):
        reduced(torch.ones(2))  # torch keeps in it how it is called

    @gpu_timed(name="f", mode=CudaGraph(warmup=1, audit_every=2, collectives=True))
    def f(a: Any) -> Any:
        a = a * factor[0]
        if how == "in place":
            dist.all_reduce(a)
            return a
        return reduced(a)

    with capture() as records:
        for call in range(8):
            if call == 5:
                factor[0] = 3.0
            before = graphs.replays
            assert f(torch.ones(2)).tolist() == [factor[0]] * 2
            assert graphs.replays - before == int(call not in {0, 1, 3, 5, 7}), call
    whys = [record.mode_reason for record in records if record.mode_reason]
    told = "not compared: it exchanges data with other ranks"
    if how.startswith("an operation"):
        told = "not compared: gpu_timed_tests::reduced may exchange data with other ranks"
    assert whys[1:] == [f"captured (1.0 MiB) and {told}", told] * 2


def test_what_ranks_exchange_is_captured_if_that_is_declared(graphs: Device, ranks: None) -> None:
    """Each rank decides for itself, and one that replays while another does not is undefined, or waits for ever."""

    def f(a: Any) -> Any:
        dist.all_reduce(a)
        return a * 0.5

    with capture() as records:
        timed = gpu_timed(f, name="f", mode=GRAPH)
        for _ in range(3):
            timed(torch.ones(2))
    assert [record.mode for record in records] == ["eager"] * 3
    assert records[2].mode_reason == (
        "it exchanges data with other ranks (declare CudaGraph(collectives=True) if all of them make the same calls)"
    )
    strict = gpu_timed(f, name="f", mode=CudaGraph(warmup=1, strict=True))
    with pytest.raises(ModeError, match="exchanges data"):
        strict(torch.ones(2))
    assert graphs.captures == 0


def test_what_is_exchanged_in_place_is_changed(ranks: None) -> None:
    """Of which the schemas of these operations say nothing."""
    x, y = torch.ones(2), torch.ones(2)
    with Watch(lambda _: True) as watch:
        dist.all_reduce(x)
        y + 1
    assert set(watch.changed) == {key_of(x)}


def test_exchanges_of_functions_without_side_effects_are_seen_too(ranks: None) -> None:
    with Watch(lambda _: True) as watch:
        given = functions_of_dist.all_reduce(torch.ones(2), "sum", dist.group.WORLD) * 1
    assert given.tolist() == [1.0, 1.0]
    assert watch.talks


@pytest.mark.parametrize("how", ["destroyed", "aborted"])
def test_graphs_go_before_the_communicators_that_they_hold(
    graphs: Device, ranks: None, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Of NCCL's to destroy one is to wait until no graph has it: the end of the program hangs."""
    began: list[bool] = []

    def noting(graph: Graph) -> None:
        began.append(dist.is_initialized())
        release(graph)

    if how == "aborted" and not hasattr(dist.ProcessGroup, "abort"):
        pytest.skip("not in this version of torch")
    release = Graph.release
    monkeypatch.setattr(Graph, "release", noting)

    @gpu_timed(name="f", mode=CudaGraph(warmup=1, collectives=True))
    def f(a: Any) -> Any:
        a = a * 2.0
        dist.all_reduce(a)
        return a

    for _ in range(3):
        f(torch.ones(2))
    if how == "destroyed":
        destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    else:
        dist.group.WORLD.abort()
    assert began == [True]
    for _ in range(3):
        assert f(torch.ones(2)).tolist() == [2.0, 2.0]
    assert graphs.captures == 2


def test_where_there_are_no_other_ranks_all_is_compared(graphs: Device) -> None:
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: doubled(a) + 1)
    with Watch(lambda _: True):
        doubled(torch.ones(2))
    with capture() as records:
        for _ in range(3):
            f(torch.ones(2))
    assert records[1].mode_reason == "captured (1.0 MiB) and compared with this run"
