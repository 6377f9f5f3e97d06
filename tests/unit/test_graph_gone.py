"""Graphs that go at a moment that nobody chose: by another thread, at the end of a process group, after a change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from gpu_timed import CudaGraph, current, gpu_timed
from gpu_timed.testing import capture

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from make_believe_graphs import Device  # noqa: E402

from gpu_timed.modes import capturing, graphed, torch_ranks  # noqa: E402
from gpu_timed.modes.launcher import Ground  # noqa: E402

GRAPH = CudaGraph(warmup=1)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ranks, "has_ranks", lambda: True)
    monkeypatch.setattr(torch_ranks, "_before_they_end", lambda _: None)


def two(*values: float) -> Any:
    return torch.tensor(values or (1.0, 2.0))


# -- a graph that goes on another thread -------------------------------------------------------------------


def going(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, ground: Ground) -> Callable[[], None]:
    """Have the graphs of *ground* go the next time *name* of *owner* is called, as if by another thread."""
    armed: list[bool] = []
    called = getattr(owner, name)

    def goes(*arguments: Any) -> Any:
        if armed and armed.pop():
            other = threading.Thread(target=ground.let_go)
            other.start()
            other.join()
        return called(*arguments)

    monkeypatch.setattr(owner, name, goes)
    return lambda: armed.append(True)


def test_a_graph_that_goes_while_it_is_audited_is_not_replayed(
    graphs: Device, ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver does not say that it is gone: to launch it is to read memory that was freed."""
    arm = going(monkeypatch, capturing.Captured, "says", current.modes.ground)
    f = gpu_timed(name="f", mode=CudaGraph(warmup=1, audit_every=2))(lambda a: a * 2)
    for _ in range(3):
        f(two())
    arm()
    with capture() as records:
        for _ in range(4):
            assert f(two()).tolist() == [2.0, 4.0]
    assert graphs.captures == 2
    assert all("failed" not in record.mode_reason and "could not" not in record.mode_reason for record in records)
    assert "cuda_graph" in {record.mode for record in records[-2:]}  # of two calls one is compared


def test_the_end_of_a_process_group_does_not_wait_for_a_replay_that_has_no_end(
    graphs: Device, ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To abort a group is how an exchange that hangs is ended: the replay waits for that, and may not be waited for."""
    monkeypatch.setattr(graphed, "_LONGEST_S", 0.01)
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: a * 2)
    for _ in range(3):
        f(two())
    hangs, aborted = threading.Event(), threading.Event()
    replayed = graphs.graphs[0].replay

    def hang() -> None:
        hangs.set()
        assert aborted.wait(10)
        replayed()

    monkeypatch.setattr(graphs.graphs[0], "replay", hang)
    caller = threading.Thread(target=f, args=(two(),))
    caller.start()
    assert hangs.wait(10)
    current.modes.ground.let_go()
    assert not graphs.released
    aborted.set()
    caller.join()
    current.modes.ground.let_go()
    assert graphs.released


def test_a_process_group_that_cannot_be_waited_on_is_no_exception_of_the_call(
    graphs: Device, ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: Any) -> None:
        raise TypeError("cannot set an attribute of ProcessGroup")

    monkeypatch.setattr(torch_ranks, "_before_they_end", raises)
    f = gpu_timed(name="f", mode=GRAPH)(lambda a: a * 2)
    with capture() as records:
        for _ in range(3):
            assert f(two()).tolist() == [2.0, 4.0]
    assert records[-1].mode == "cuda_graph"


class Group(dist.ProcessGroup):  # type: ignore[misc,name-defined]
    """A process group in Python: C++ asks for its methods by their names."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.aborts = 0


class OwnEnd(Group):
    def abort(self) -> None:
        self.aborts += 1
        super().abort()


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "abort"), reason="not in this version of torch")
@pytest.mark.parametrize(("kind", "aborts"), [(Group, 0), (OwnEnd, 1)])
def test_what_ends_a_process_group_in_python_is_called_once(
    monkeypatch: pytest.MonkeyPatch, kind: type[Group], aborts: int
) -> None:
    """Who is in front of a method of C++ is taken for its new definition, and would be called by it for ever."""
    for name in ("shutdown", "abort"):
        monkeypatch.setattr(dist.ProcessGroup, name, getattr(dist.ProcessGroup, name))
    monkeypatch.setattr(torch_ranks.atexit, "register", lambda _: None)
    gone: list[bool] = []
    torch_ranks._before_they_end(lambda: gone.append(True))
    group = kind()
    group.abort()
    assert group.aborts == aborts
    assert gone == [True]


# -- calls that are watched for nothing --------------------------------------------------------------------


def used_up(factor: dict[str, float], *usual: str) -> Callable[..., Any]:
    """Return a site with graphs for *usual*, of which as many other calls were watched for nothing as may be."""
    f: Callable[..., Any] = gpu_timed(name="f", mode=CudaGraph(warmup=2, max_graphs=len(usual)))(
        lambda a, name: a * factor["is"]
    )
    for name in usual:
        for _ in range(4):
            f(two(), name)
    for call in range(40 * len(usual)):
        f(two(), f"request {call}")
    return f


def test_a_graph_is_captured_anew_however_many_calls_were_watched_for_nothing(graphs: Device) -> None:
    """That takes no more watching. Else new weights, once, would have ended the mode of the site for ever."""
    factor = {"is": 2.0}
    f = used_up(factor, "one", "the other")
    factor["is"] = 3.0
    for name in ("one", "the other"):  # whose graph goes with that of the first
        with capture() as records:
            for _ in range(3):
                assert f(two(), name).tolist() == [3.0, 6.0]
        assert [record.mode for record in records] == ["eager", "cuda_graph", "cuda_graph"]


def test_replays_pay_for_more_calls_that_are_watched(graphs: Device) -> None:
    """What was too many signatures in an hour is little beside the calls of a week."""
    f = used_up({"is": 2.0}, "the usual one")
    with capture() as records:
        f(two(), "another one")
        for _ in range(64 * 3):
            f(two(), "the usual one")
        for _ in range(4):
            assert f(two(), "another one").tolist() == [2.0, 4.0]
    assert records[0].mode_reason.endswith("too many input signatures")
    assert [record.mode for record in records[-4:]] == ["eager"] * 3 + ["cuda_graph"]
    with capture() as records:  # of the graph that went, too
        f(two(), "a third one")
        f(two(), "a fourth one")
    assert [record.mode_reason.startswith("warm-up") for record in records] == [True, False]


@pytest.mark.parametrize("replays", [63, 62])
def test_captures_that_have_paid_are_not_held_against_a_site(graphs: Device, replays: int) -> None:
    """New weights once in a while, or one adapter for another, are no reason to give the mode up after some days."""
    factor = {"is": 0.0}
    f = gpu_timed(lambda a: a * factor["is"], name="f", mode=CudaGraph(warmup=1, max_graphs=8))
    with capture() as records:
        for turn in range(40):
            factor["is"] += 1.0
            for _ in range((turn == 0) + 1 + replays):  # warm-up, capture with one replay, and replays
                assert f(two()).tolist() == [factor["is"], 2 * factor["is"]]
    paid = replays == 63
    assert graphs.captures == (40 if paid else 9)
    assert records[-1].mode == ("cuda_graph" if paid else "eager")


@pytest.mark.parametrize("replays", [63, 62])
def test_nor_are_those_of_signatures_that_were_used_enough(graphs: Device, replays: int) -> None:
    f = gpu_timed(name="f", mode=CudaGraph(warmup=1, max_graphs=1))(lambda a: a + 1)
    for size in range(1, 11):
        for _ in range(2 + replays):
            assert f(torch.zeros(size)).tolist() == [1.0] * size
    assert graphs.captures == (10 if replays == 63 else 4)


@pytest.mark.parametrize("replays", [63, 62])
def test_nor_are_those_of_models_that_are_gone(graphs: Device, replays: int) -> None:
    """Whose graphs go with them, and not by us."""

    class Model:
        factor = 2.0

    f = gpu_timed(name="f", mode=CudaGraph(warmup=1, max_graphs=1))(lambda a, model: a * model.factor)
    for _ in range(10):
        model = Model()
        for _ in range(2 + replays):
            assert f(two(), model).tolist() == [2.0, 4.0]
    assert graphs.captures == (10 if replays == 63 else 4)
