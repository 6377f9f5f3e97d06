"""The leaf that captures, on a driver and an allocator that only count: what is begun is ended, once."""

from __future__ import annotations

import contextlib
import gc
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gpu_timed.modes import cuda_graphs, torch_graphs  # noqa: E402
from gpu_timed.modes.launcher import Ground, Passing  # noqa: E402


class Machine:
    """Counts users of the pool, as torch's allocator does; and what the driver holds."""

    def __init__(self) -> None:
        self.users = 0
        self.allocating = False
        self.capturing = False
        self.executables: set[int] = set()
        self.launches: list[tuple[int, int]] = []
        self.streams = 100
        self.current = 7
        self.relaxed_depth = 0
        self.not_relaxed: list[str] = []
        self.ending: Exception | None = None
        self.made: list[Any] = []
        self.generator_captures = False

    @contextlib.contextmanager
    def relaxed(self) -> Any:
        self.relaxed_depth += 1
        try:
            yield
        finally:
            self.relaxed_depth -= 1

    def use(self, _index: int, _pool: Any) -> None:
        self.users += 1
        self.allocating = True

    def leave(self, _index: int, _pool: Any) -> None:
        if not self.allocating:
            raise RuntimeError("not currently recording to mempool_id")
        self.allocating = False

    def release(self, _index: int, _pool: Any) -> None:
        self.users -= 1
        assert self.users >= 0

    def new_stream(self) -> int:
        self.streams += 1
        return self.streams

    def begin(self, _stream: int) -> None:
        assert not self.capturing
        self.capturing = True

    def abandon(self, _stream: int) -> None:
        self.capturing = False

    def end(self, _stream: int) -> int:
        self.capturing = False
        if self.ending is not None:
            raise self.ending
        self.executables.add(len(self.executables) + 1)
        return len(self.executables)

    def destroy(self, executable: int) -> None:
        if not self.relaxed_depth:
            self.not_relaxed.append("destroy")
        self.executables.remove(executable)


class Stream:
    def __init__(self, name: int) -> None:
        self.name = name
        self.waited: list[int] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other.name)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    for name, stands_in in (("_use_pool", made.use), ("_leave_pool", made.leave), ("_release_pool", made.release)):
        monkeypatch.setattr(torch_graphs, name, stands_in)
    monkeypatch.setattr(torch_graphs, "_current_stream", lambda _: made.current)
    monkeypatch.setattr(torch_graphs, "_current_device", lambda: 0)
    for name in ("new_stream", "begin", "abandon", "end", "destroy"):
        monkeypatch.setattr(cuda_graphs, name, getattr(made, name))
    monkeypatch.setattr(cuda_graphs, "load", object)
    monkeypatch.setattr(cuda_graphs, "launch", lambda what, where: made.launches.append((what, where)))
    monkeypatch.setattr(cuda_graphs, "is_capturing", lambda _: False)
    monkeypatch.setattr(cuda_graphs, "strict_for_this_thread_alone", contextlib.nullcontext)
    streams: dict[int, Stream] = {}
    for name, value in (
        ("device", lambda _: contextlib.nullcontext()),
        ("stream", lambda _: contextlib.nullcontext()),
        ("ExternalStream", lambda raw, device: Stream(raw)),
        ("current_stream", lambda _: streams.setdefault(made.current, Stream(made.current))),
        ("graph_pool_handle", lambda: (0, 1)),
        ("memory_snapshot", lambda: [{"device": 0, "segment_pool_id": (0, 1), "total_size": 1 << 21}]),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    return made


class Input:
    def __init__(self) -> None:
        self.device = torch.device("cuda:0")
        self.told: list[int] = []

    def record_stream(self, stream: Any) -> None:
        self.told.append(stream.name)


def test_every_capture_leaves_the_pool_one_user_and_the_last_word_is_the_pools(machine: Machine) -> None:
    ground = Ground()
    device = torch_graphs.Device(machine.relaxed, ground)

    def function() -> str:
        assert ground._capturing  # nobody of ours begins to wait for the device
        return "outputs"

    graphs = [device.capture([Input()], function, by_torch=False) for _ in range(3)]
    assert not ground._capturing
    assert (machine.users, machine.allocating, machine.capturing) == (1, False, False)
    assert machine.executables == {1, 2, 3}
    assert [graph.outputs for graph in graphs] == ["outputs"] * 3
    assert device.held() == 1 << 21  # all three share it
    graphs[0].release()
    graphs[0].release()
    assert machine.executables == {2, 3}
    del device, graphs
    gc.collect()
    assert (machine.users, machine.executables, machine.not_relaxed) == (0, set(), [])
    assert ground.free_stream(0) == 101  # for the next function
    assert ground.free_stream(0) is None


@pytest.mark.parametrize("by_torch", [False, True])
def test_what_the_user_raises_in_a_capture_leaves_nothing_begun(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, by_torch: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: TorchGraph(machine))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.empty(1))
    device = torch_graphs.Device(machine.relaxed, Ground())
    enabled = gc.isenabled()

    def fails() -> None:
        assert not gc.isenabled()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        device.capture([Input()], fails, by_torch=by_torch)
    assert (machine.users, machine.allocating, machine.capturing) == (1, False, False)
    assert machine.generator_captures is False
    assert gc.isenabled() == enabled


class TorchGraph:
    """As torch's own, up to 2.11: what fails leaves the allocator and the generator in the middle of it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.private = False
        self.ended = False
        self.broken = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "") -> None:
        assert capture_error_mode == "thread_local"
        self.private = pool is None
        self.machine.generator_captures = True
        if not self.private:
            self.machine.use(0, pool)

    def capture_end(self) -> None:
        if self.machine.made:
            raise self.machine.made.pop()
        if not self.private:
            self.machine.leave(0, None)
        self.machine.generator_captures = False
        self.ended = True

    def reset(self) -> None:
        if self.ended and not self.private:
            self.machine.release(0, None)
        self.ended = False


@pytest.mark.parametrize("said", ["operation failed due to a previous error during capture", "operation not permitted"])
def test_a_capture_of_torchs_that_fails_is_cleaned_up(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: TorchGraph(machine))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.empty(1))
    device = torch_graphs.Device(machine.relaxed, Ground())
    machine.made.append(RuntimeError(said))
    with pytest.raises(Passing if "previous" in said else RuntimeError, match=said):
        device.capture([Input()], lambda: "outputs", by_torch=True)
    assert (machine.users, machine.allocating, machine.generator_captures) == (1, False, False)
    graph = device.capture([Input()], lambda: "outputs", by_torch=True)
    assert machine.users == 2
    graph.release()
    assert machine.users == 1


@pytest.mark.parametrize(("code", "passes"), [(901, True), (2, True), (904, False)])
def test_what_the_driver_refuses_may_pass_or_not(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, code: int, passes: bool
) -> None:
    monkeypatch.setattr(cuda_graphs, "_name_of", str)
    machine.ending = cuda_graphs.Refused("cuStreamEndCapture", code)
    device = torch_graphs.Device(machine.relaxed, Ground())
    with pytest.raises(Passing if passes else cuda_graphs.Refused, match=str(code)):
        device.capture([Input()], lambda: None, by_torch=False)
    assert (machine.users, machine.allocating) == (1, False)


def test_replays_of_one_pool_never_overlap_and_inputs_outlive_them(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch_graphs.Device(machine.relaxed, Ground())
    given = Input()
    first, second = (device.capture([given], lambda: None, by_torch=False) for _ in range(2))

    def replay(graph: Any, stream: int) -> None:
        machine.current = stream
        graph.order()
        graph.replay()

    for graph, stream in ((first, 7), (first, 7), (second, 8), (second, 8), (first, 7)):
        replay(graph, stream)
    assert machine.launches == [(1, 7), (1, 7), (2, 8), (2, 8), (1, 7)]
    assert torch.cuda.current_stream(0).waited == [8]  # stream 7, for what was on 8
    machine.current = 8
    assert torch.cuda.current_stream(0).waited == [7]
    assert given.told == [7, 8]
    monkeypatch.setattr(cuda_graphs, "is_capturing", lambda stream: stream == 7)
    with pytest.raises(Passing, match="is being captured"):
        replay(second, 9)


def test_a_thread_that_has_no_context_yet_gets_one(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_name_of", str)
    device = torch_graphs.Device(machine.relaxed, Ground())
    graph = device.capture([Input()], lambda: None, by_torch=False)
    asked: list[Any] = []

    def launch(what: int, where: int) -> None:
        asked.append((what, where))
        if len(asked) == 1:
            raise cuda_graphs.Refused("cuGraphLaunch", 201)

    touched: list[Any] = []
    monkeypatch.setattr(cuda_graphs, "launch", launch)
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *_, device: (touched.append(device), real(1))[1])
    graph.order()
    graph.replay()
    assert (asked, touched) == ([(1, 7), (1, 7)], ["cuda:0"])


def test_room_is_what_the_driver_has_and_what_torch_keeps_for_all(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for in relaxed mode: another thread may be in the midst of a capture.

    What is idle in the pool of a graph is for captures into that alone: a call that were to rely on it has no memory.
    """
    depths: list[int] = []
    segments = [
        {"device": 0, "total_size": 50, "allocated_size": 20, "segment_pool_id": (0, 0)},
        {"device": 0, "total_size": 7000, "allocated_size": 10, "segment_pool_id": (0, 1)},
        {"device": 0, "total_size": 6000, "allocated_size": 10, "segment_pool_id": (2, 0)},
        {"device": 1, "total_size": 5000, "allocated_size": 10, "segment_pool_id": (0, 0)},
        {"device": 0, "total_size": 5, "allocated_size": 4},
    ]
    snapshots: list[bool] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: depths.append(machine.relaxed_depth) or (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: snapshots.append(True) or segments)
    device, tensor = (
        torch_graphs.Device(machine.relaxed, Ground()),
        types.SimpleNamespace(device=torch.device("cuda:0")),
    )
    assert device.room(tensor, 101) == 131
    assert depths == [1]
    assert snapshots == [True]
    assert device.room(tensor, 100) == 100  # it takes milliseconds where there are many tensors
    assert snapshots == [True]


@pytest.mark.parametrize("fails", [False, True])
def test_the_solver_of_matrices_is_mended_by_a_call_of_no_consequence(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Which may be the one that fails."""
    asked: list[Any] = []

    def solves(matrix: Any) -> Any:
        asked.append(matrix.shape)
        if fails:
            raise RuntimeError("cusolver error")

    monkeypatch.setattr(torch.linalg, "cholesky_ex", solves)
    torch_graphs.Device(machine.relaxed, Ground()).mend_solver(torch.ones(3))
    assert asked == [(2, 2)]
