"""The rig of the self-test on torch without a GPU, and its kernel compiled for GPUs that are not here."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest

from gpu_timed.measure.rig import STAMPS_KEPT, NotTestable, spinning_thread

torch = pytest.importorskip("torch")


class HostKernel:
    """Stamps at once, on the host: a timer in steps of 32 ns, and two cycles a nanosecond."""

    name = "host"
    stamped = True

    def __init__(self) -> None:
        self.now = 1_000_000
        self.lost = 0

    def launch(self, duration_ns: int, stamps: Any) -> None:
        if self.lost:
            self.lost -= 1
            return
        turn = int(stamps[0])
        slot = 1 + 3 * (turn & (STAMPS_KEPT - 1))
        begin, self.now = self.now, self.now + duration_ns
        stamps[slot : slot + 3] = torch.tensor([begin // 32 * 32, self.now // 32 * 32, 2 * duration_ns])
        stamps[0] = turn + 1

    def read_timer(self, reads: Any) -> None:
        reads.copy_(torch.arange(reads.numel()) // 3 * 32)


class Graph:
    """Runs what was captured anew."""

    captured: Any = None

    def replay(self) -> None:
        self.captured()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rig whose device is the host."""
    from gpu_timed.measure import torch_rig

    @contextlib.contextmanager
    def graph(into: Graph) -> Any:
        kernel, kept = made.kernel, []
        real = kernel.launch
        kernel.launch = lambda *args: kept.append(args)
        yield
        kernel.launch = real
        into.captured = lambda: [real(*args) for args in kept]

    @contextlib.contextmanager
    def stream(which: Any) -> Any:
        before, cuda.current = cuda.current, which
        yield
        cuda.current = before

    cuda = types.SimpleNamespace(
        current=types.SimpleNamespace(cuda_stream=0),
        init=lambda: None,
        synchronize=lambda: None,
        current_device=lambda: 0,
        Stream=lambda: types.SimpleNamespace(cuda_stream=77),
        stream=stream,
        current_stream=lambda: cuda.current,
        CUDAGraph=Graph,
        graph=graph,
    )
    host = types.SimpleNamespace(
        cuda=cuda,
        int64=torch.int64,
        zeros=lambda size, dtype, device: torch.zeros(size, dtype=dtype),
        ones=lambda size, device: torch.ones(size),
    )
    monkeypatch.setattr(torch_rig, "torch", host)
    made = torch_rig.TorchRig(HostKernel())
    return made


def test_stamps_come_back_in_order_and_once(rig):
    """Each launch, replayed or not, leaves one stamp; other work leaves none; reading forgets them."""
    rig.launch(3_200)
    rig.occupy(640_000)
    rig.replay(6_400)()
    rig.occupy_other(640_000)
    rig.launch(9_600)
    assert [stamp.true_ns for stamp in rig.stamps()] == [3_200, 6_400, 9_600]
    assert rig.stamps() == []
    rig.replay(6_400)()
    (stamp,) = rig.stamps()
    assert stamp.end_ns - stamp.begin_ns == 6_400


def test_a_graph_is_captured_once(rig):
    """The second replay of one duration is of the same graph."""
    rig.replay(6_400)()
    rig.replay(6_400)()
    rig.replay(3_200)()
    assert len(rig._graphs) == 2
    assert len(rig.stamps()) == 3


def test_a_kernel_that_left_no_stamp_is_noticed(rig):
    """Fewer stamps than launches are an error, and the next reading is clean again."""
    rig.kernel.lost = 1
    rig.launch(3_200)
    rig.launch(3_200)
    with pytest.raises(NotTestable, match="2 kernels were launched, and 1 left stamps"):
        rig.stamps()
    rig.launch(3_200)
    assert len(rig.stamps()) == 1


def test_more_stamps_than_are_kept_are_an_error(rig):
    """The ring never passes old stamps for new ones."""
    rig._asked = [1] * (STAMPS_KEPT + 1)
    with pytest.raises(NotTestable, match="4097 kernels"):
        rig.stamps()


def test_short_kernels_are_known_by_their_cycles(rig):
    """Below twenty steps of the timer the truth is the cycles, at the rate of a long kernel; above it the stamps."""
    assert rig.measure_timer() == 32
    assert rig.cycles_per_ns == pytest.approx(2.0, rel=1e-4)
    rig.launch(100)
    rig.launch(1_000)
    short, long = rig.stamps()
    assert short.true_ns == 100
    assert short.end_ns - short.begin_ns in (96, 128)
    assert long.true_ns % 32 == 0


def test_a_timer_that_stands_still_is_an_error(rig):
    """No step is no resolution."""
    rig.kernel.read_timer = lambda reads: reads.zero_()
    with pytest.raises(NotTestable, match="did not move"):
        rig.measure_timer()


def test_kernels_without_stamps_are_known_by_what_was_asked(rig):
    """Their duration is the calibrated one, and they have no place on any axis."""
    rig.kernel.stamped = False
    rig.launch(5_000)
    assert rig.stamps() == [(None, None, 5_000)]
    assert rig.measure_timer() is None


def test_streams_are_those_of_torch(rig):
    """The rig's own stream is the current one inside, and the one before it outside."""
    assert rig.stream() == 0
    with rig.on_side_stream() as raw:
        assert raw == rig.stream() == 77
    assert rig.stream() == 0


def test_a_busy_thread_ends_with_its_block():
    """Nothing goes on spinning."""
    import threading

    with spinning_thread():
        assert any(thread.name == "gpu_timed-busy-host" for thread in threading.enumerate())
    assert not any(thread.name == "gpu_timed-busy-host" for thread in threading.enumerate())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("capability", [80, 90])
def test_the_triton_kernel_compiles_and_reads_its_timer_twice_in_a_loop(capability, tmp_path, monkeypatch):
    """To machine code for GPUs that are not here, with the loop between the stamps as it is written."""
    pytest.importorskip("triton")
    compiler = pytest.importorskip("triton.compiler")
    backends = pytest.importorskip("triton.backends.compiler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from gpu_timed.measure import triton_spin

    if not hasattr(triton_spin._spin, "arg_names") or not hasattr(triton_spin._spin, "cache_key"):
        pytest.skip("Triton's interpreter is on")
    target = backends.GPUTarget("cuda", capability, 32)
    for kernel, signature, constants in (
        (triton_spin._spin, {"stamps": "*i64", "duration_ns": "i32", "KEPT": "constexpr"}, {"KEPT": STAMPS_KEPT}),
        (triton_spin._read_timer, {"reads": "*i64", "count": "i32"}, {}),
    ):
        source = compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
        made = compiler.compile(source, target=target, options={"num_warps": 1})
        assert len(made.asm["cubin"]) > 1_000
        reads = made.asm["ptx"].count("%globaltimer")
        assert reads == 2 if constants else reads >= 1
