"""The contract of the ports Clock and Locator, proved on every clock there is.

One suite, several benches. A bench knows how to give its device work, keep it busy, capture it and break
it, or says in ``lacks`` what its kind of clock has none of; the facts are stated once. The real one
(``-m gpu``) needs torch with CUDA and changes no test:

    pytest -m gpu tests/contract
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gpu_timed.clocks.fence import FenceClock, FenceMark
from gpu_timed.clocks.timeline import RATE_BOUND
from gpu_timed.errors import DeviceFault
from gpu_timed.ports import NOT_GIVEN, DeviceInfo, Launch, Mark, Place, Position
from gpu_timed.record import Missing
from gpu_timed.testing import FakeDevice

MS = 1_000_000
LONG_MS = 300
"""How long a device without a hold is kept busy: every host-side step behind it takes far less."""


class FakeBench:
    """A fake device, virtual or in real time."""

    lacks: Mapping[str, str] = {}
    """What this kind of clock has none of, and why: the facts about it do not apply."""
    step_ns = 100
    """How far off a sum of durations may be."""
    tries = 1
    """How often a clock that a busy host holds up may try to be narrow."""

    def __init__(self, *, slack_ns: int = 0, drift_ppm: float = 0.0, pause_ns: int = 0, **options: Any) -> None:
        self.floor_ns = (options.get("floor_ns", 0),) * 2
        self.device = FakeDevice(drift_ppm=drift_ppm, **options)
        self.clock = self.locator = self.device
        self.pause_ns = pause_ns
        self.now_ns: Callable[[], int] = self.device.host.now_ns
        self._slack_ns = slack_ns
        self._drift = abs(drift_ppm) * 1e-6
        self._streams = iter(range(1, 1_000))

    def close_to(self, measured_ns: int, true_ns: int) -> bool:
        """Whether a duration is right, as exactly as this clock can be."""
        around = 1 + round(true_ns * self._drift)
        return true_ns - around <= measured_ns <= true_ns + around + self._slack_ns

    def work(self, duration_ns: int) -> Callable[[], int]:
        """Queue work; what comes back says how long it took in truth."""
        self.device.launch(duration_ns)
        return lambda: duration_ns

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Let nothing that is queued inside begin before the block ends."""
        return self.device.held()

    def stream(self) -> contextlib.AbstractContextManager[None]:
        """Make another stream of the same device the current one."""
        return self.device.use(stream=next(self._streams))

    @contextlib.contextmanager
    def capture(self) -> Iterator[Place]:
        """Capture a stream; leaving proves that the capture still works."""
        with self.device.use(stream=next(self._streams)):
            place = self.device.locate()
            assert isinstance(place, Place)
            with self.device.capture():
                yield place

    def pass_time(self, duration_ns: int) -> None:
        """Let time pass on the host."""
        self.device.host_clock.advance(duration_ns)

    def settle(self) -> None:
        """Wait, as user code does, until everything queued has run and can be seen."""
        self.device.run_dry()

    def true_ns(self, mark: Any) -> int | None:
        """When a mark was reached in truth, on the host's axis; None where nobody can know."""
        return self.device.true_host_ns(mark)

    def result(self) -> object:
        """Something that lives on device 0."""
        return type("Result", (), {"fake_device": 0})()

    def identity(self) -> tuple[int, str]:
        """Index and product name of the device."""
        return 0, "Fake GPU"

    def question_mode(self) -> int | None:
        """How this thread's questions are held against captures; None where they never are."""
        return None

    def break_down(self) -> None:
        """Put the device into an error state for good."""
        self.device.break_down()

    def sacrifice(self, check: Callable[[Any], None]) -> None:
        """Run *check* where it may destroy the device."""
        check(self)

    def marks_kept(self) -> int:
        """How many marks are in use now."""
        return self.device.marks_in_use


class CudaBench:
    """The real clock on torch's device 0."""

    floor_ns = (500, 3_000)
    """1.25 µs on an H200; the documented resolution of an event is half a microsecond."""

    lacks: Mapping[str, str] = {}
    step_ns = 100  # float32 milliseconds
    tries = 1

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch says at import is not what is tested here
            import torch
        from gpu_timed.clocks import cuda_driver
        from gpu_timed.clocks.cuda_event import CudaEventClock
        from gpu_timed.clocks.cuda_places import CudaPlaces
        from gpu_timed.clocks.torch_locator import TorchLocator

        self.torch: Any = torch
        self.pause_ns = 30 * MS
        self.now_ns: Callable[[], int] = time.perf_counter_ns
        torch.cuda.init()
        torch.ones(1, device="cuda")
        torch.cuda.synchronize()
        library = cuda_driver.load()
        assert library is not None
        self._library = library
        self.clock: Any = CudaEventClock(library)
        self.locator = TorchLocator(CudaPlaces(lambda: self.clock))
        self._cycles_per_ns = self._calibrate()

    def close_to(self, measured_ns: int, true_ns: int) -> bool:
        """Our marks lie just outside torch's own pair: a little longer, never shorter."""
        return true_ns - 2_000 <= measured_ns <= true_ns + 50_000 + true_ns // 100

    def work(self, duration_ns: int) -> Callable[[], int]:
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.torch.cuda._sleep(int(duration_ns * self._cycles_per_ns))
        end.record()

        def true() -> int:
            end.synchronize()
            return round(begin.elapsed_time(end) * 1e6)

        return true

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        self.torch.cuda._sleep(int(LONG_MS * MS * self._cycles_per_ns))
        yield

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        with self.torch.cuda.stream(self.torch.cuda.Stream()):
            yield

    @contextlib.contextmanager
    def capture(self) -> Iterator[Place]:
        torch = self.torch
        held = torch.zeros(8, device="cuda")
        held.add_(1)  # loads the kernel: a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held.add_(1)
            yield Place(self.clock, torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream)
        graph.replay()
        torch.cuda.synchronize()
        assert held.tolist() == [2.0] * 8

    def pass_time(self, duration_ns: int) -> None:
        time.sleep(duration_ns / 1e9)

    def settle(self) -> None:
        self.torch.cuda.synchronize()

    def true_ns(self, mark: Any) -> int | None:
        return None

    def result(self) -> object:
        return self.torch.ones(2, device="cuda:0")

    def identity(self) -> tuple[int, str]:
        return 0, self.torch.cuda.get_device_name(0)

    def question_mode(self) -> int | None:
        exchange = self._library.cuThreadExchangeStreamCaptureMode
        mode = ctypes.c_int(0)
        exchange(ctypes.byref(mode))
        was = mode.value
        exchange(ctypes.byref(mode))
        return was

    def break_down(self) -> None:
        torch = self.torch
        with contextlib.suppress(RuntimeError):
            torch.zeros(4, device="cuda")[torch.tensor([10**9], device="cuda")]
            torch.cuda.synchronize()

    def sacrifice(self, check: Callable[[Any], None]) -> None:
        suite = f"import runpy; suite = runpy.run_path({__file__!r}); "
        done = subprocess.run(
            [sys.executable, "-c", f"{suite}suite[{check.__name__!r}](suite['CudaBench']()); print('as promised')"],
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert "as promised" in done.stdout, done.stderr[-4_000:]

    def marks_kept(self) -> int:
        return 0  # a pool of events counts nothing

    def _calibrate(self) -> float:
        torch, cycles = self.torch, 50_000_000
        torch.cuda._sleep(cycles)  # clocks go up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return cycles / (begin.elapsed_time(end) * 1e6)


class Piece:
    """A result in the making: there at ``ready_ns``, which is 0 while the work has only been described."""

    __slots__ = ("__weakref__", "duration_ns", "ready_ns")

    def __init__(self, duration_ns: int) -> None:
        self.duration_ns = duration_ns
        self.ready_ns = 0


class LazyRuntime:
    """A make-believe runtime in real time: one piece of work after the other, none begun before a flush."""

    def __init__(self) -> None:
        self.made: weakref.WeakSet[Piece] = weakref.WeakSet()
        self.held = False
        self._lock = threading.RLock()
        self._described: list[Piece] = []
        self._running: list[Piece] = []
        self._busy_until = 0

    def describe_work(self, duration_ns: int) -> None:
        with self._lock:
            piece = Piece(duration_ns)
            self._described.append(piece)
            self.made.add(piece)

    def flush(self, values: Any) -> None:
        with self._lock:
            while self._described and not self.held:
                piece = self._described.pop(0)
                self._busy_until = max(self._busy_until, time.perf_counter_ns()) + piece.duration_ns
                piece.ready_ns = self._busy_until
                self._running.append(piece)

    def results(self, values: Any) -> list[Piece]:
        assert values is NOT_GIVEN
        with self._lock:
            self._running = [piece for piece in self._running if not self.is_ready(piece)]
            return self._running + self._described

    def is_ready(self, result: Piece) -> bool:
        return 0 < result.ready_ns <= time.perf_counter_ns()

    def wait(self, results: list[Piece]) -> None:
        for piece in results:
            while not self.is_ready(piece):
                time.sleep(max(0, piece.ready_ns - time.perf_counter_ns()) / 1e9)

    def describe(self, place: Place) -> DeviceInfo:
        return DeviceInfo(place.device, "GPU-make-believe", "Lazy")


class WatchedFence(FenceClock):
    """Remembers of its last marks what can be known from outside: which pieces they wait for, how sure they were."""

    def __init__(self, runtime: LazyRuntime) -> None:
        super().__init__(runtime)
        self.awaits: dict[FenceMark, list[Piece]] = {}
        self.window_ns = self.widest_ns = 0

    def mark(self, place: Place, values: Any = NOT_GIVEN, since: Mark | None = None) -> FenceMark | Missing:
        made = super().mark(place, values, since)
        assert isinstance(made, FenceMark)
        self.awaits[made] = list(made.pending)
        return made

    def elapsed_ns(self, start: Mark, end: Mark) -> int:
        elapsed = super().elapsed_ns(start, end)
        self.window_ns = self.position(start, elapsed, 0, 0).uncertainty_ns
        self.widest_ns = max(self.widest_ns, self.window_ns)
        return elapsed

    def release(self, *marks: Mark) -> None:
        super().release(*marks)
        for mark in marks:
            assert isinstance(mark, FenceMark)
            self.awaits.pop(mark, None)


class FenceBench:
    """The real fence clock, over a make-believe runtime that is lazy and has one queue."""

    lacks: Mapping[str, str] = {
        "streams": "one place stands for everything that the runtime does",
        "captures": "nothing is captured where there are no streams, and what is traced has no place",
        "lasting errors": "each result fails by itself, and what was there before stays known",
        "devices": "a result is waited for wherever it lives",
        "floor": "no marks are put on a device",
    }
    tries = 10

    def __init__(self) -> None:
        self._runtime = LazyRuntime()
        self.clock = WatchedFence(self._runtime)
        self.locator = self
        self.pause_ns = 2 * MS
        self.now_ns: Callable[[], int] = time.perf_counter_ns
        self._place = Place(self.clock, 0, 0)

    def locate(self, launch: Launch | None = None) -> Place | Missing:
        return self._place

    def close_to(self, measured_ns: int, true_ns: int) -> bool:
        """Results are there at a known time: the clock is right within what it says itself."""
        return abs(measured_ns - true_ns) <= self.clock.window_ns

    @property
    def step_ns(self) -> int:
        """A mark that was looked at later than the one behind it is off by its own window at the most."""
        return self.clock.widest_ns

    def work(self, duration_ns: int) -> Callable[[], int]:
        self._runtime.describe_work(duration_ns)
        return lambda: duration_ns

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the queue busy with a piece that is there once the block ends; nothing behind it begins before."""
        self._runtime.describe_work(0)
        self._runtime.held = True
        yield
        self._runtime.held = False
        self._runtime.flush(NOT_GIVEN)

    def pass_time(self, duration_ns: int) -> None:
        time.sleep(duration_ns / 1e9)

    def settle(self) -> None:
        """Wait for all results, and for the clock to have looked."""
        self._runtime.flush(NOT_GIVEN)
        self._runtime.wait(self._runtime.results(NOT_GIVEN))
        deadline = time.monotonic() + 10
        while not all(self.clock.is_done(mark) for mark in tuple(self.clock.awaits)):
            assert time.monotonic() < deadline, "the clock never looked"
            time.sleep(0.001)

    def true_ns(self, mark: Any) -> int | None:
        """When the last of its results was there; None for a mark that was reached as it was placed."""
        return max((piece.ready_ns for piece in self.clock.awaits[mark]), default=None)

    def identity(self) -> tuple[int, str]:
        return 0, "Lazy"

    def question_mode(self) -> int | None:
        return None

    def marks_kept(self) -> int:
        """How many results are kept alive, by marks that were released or by the clock itself."""
        self.settle()
        assert self._runtime.results(NOT_GIVEN) == []
        deadline = time.monotonic() + 10
        while self._runtime.made and time.monotonic() < deadline:
            time.sleep(0.001)
        return len(self._runtime.made)


def _cuda() -> CudaBench:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return CudaBench()


BENCHES: dict[str, Callable[[], Any]] = {
    "virtual": lambda: FakeBench(pause_ns=1_100 * MS),
    "realtime": lambda: FakeBench(realtime=True, slack_ns=200 * MS, pause_ns=2 * MS),
    "skewed": lambda: FakeBench(skew_ns=-7_000_000_000, drift_ppm=23.0, pause_ns=1_100 * MS, launch_latency_ns=4_000),
    "slow": lambda: FakeBench(skew_ns=1 << 50, drift_ppm=-31.5, pause_ns=700 * MS),
    "late": lambda: FakeBench(lateness_ns=2 * MS, launch_latency_ns=9_000, drift_ppm=3.5, pause_ns=1_100 * MS),
    "floored": lambda: FakeBench(floor_ns=1_250, slack_ns=2_000, launch_latency_ns=4_000, pause_ns=1_100 * MS),
    "fence": FenceBench,
    "cuda": _cuda,
}


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.gpu] if name == "cuda" else []) for name in BENCHES])
def bench(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A device to ask, idle before and after."""
    made = BENCHES[request.param]()
    yield made
    made.settle()


def needs(bench: Any, what: str) -> None:
    """Leave the test where this kind of clock has no such thing, and say why."""
    if what in bench.lacks:
        pytest.skip(f"no {what}: {bench.lacks[what]}")


def here(bench: Any) -> Place:
    found = bench.locator.locate()
    assert isinstance(found, Place), found
    return found


def marked(bench: Any) -> Any:
    mark = bench.clock.mark(here(bench))
    assert not isinstance(mark, Missing), mark
    return mark


def elsewhere(work: Callable[[], Any]) -> Any:
    """Run *work* on a thread that has never touched the device."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(timeout=60)


# -- marks and the order of things ------------------------------------------------------------------------


def test_marks_are_reached_in_the_order_of_their_stream(bench: Any) -> None:
    """Whenever a mark is seen done, every mark placed before it on the stream is done too."""
    with bench.hold():
        marks = [marked(bench)]
        for _ in range(4):
            bench.work(3 * MS)
            marks.append(marked(bench))
        assert not bench.clock.is_done(marks[0])
    for _ in range(100_000):
        later_first = [bench.clock.is_done(mark) for mark in reversed(marks)]
        assert later_first == sorted(later_first)
        if all(later_first):
            break
        bench.pass_time(MS // 2)
    assert all(bench.clock.is_done(mark) for mark in marks)
    bench.clock.release(*marks)


def test_a_mark_behind_queued_work_is_not_done(bench: Any) -> None:
    """is_done answers False, and at once, while the device is kept from reaching the mark."""
    with bench.hold():
        bench.work(MS)
        mark = marked(bench)
        assert [bench.clock.is_done(mark) for _ in range(10)] == [False] * 10
    bench.settle()
    assert bench.clock.is_done(mark)
    bench.clock.release(mark)


def test_wait_returns_once_the_mark_is_reached_and_not_before(bench: Any) -> None:
    """After wait the mark is done; before, behind 50 ms of work, it is not."""
    with bench.hold():
        bench.work(50 * MS)
        mark = marked(bench)
    assert not bench.clock.is_done(mark)
    bench.clock.wait(mark)
    assert bench.clock.is_done(mark)
    bench.clock.wait(mark)  # once more costs nothing
    bench.clock.release(mark)


def test_a_busy_stream_holds_no_other_stream_up(bench: Any) -> None:
    """A mark on an idle stream is reached while another stream of the device is kept busy."""
    needs(bench, "streams")
    with bench.hold():
        behind = marked(bench)
        with bench.stream():
            free = marked(bench)
            bench.clock.wait(free)
        assert bench.clock.is_done(free)
        assert not bench.clock.is_done(behind)
    bench.settle()
    bench.clock.release(behind, free)


@pytest.mark.parametrize("asked_from", [lambda work: work(), elsewhere], ids=["here", "elsewhere"])
def test_waiting_for_the_device_waits_for_every_stream(bench: Any, asked_from: Any) -> None:
    """After wait_device the marks of two streams are done, whichever thread asked."""
    needs(bench, "streams")
    place = here(bench)
    bench.work(20 * MS)
    first = marked(bench)
    with bench.stream():
        bench.work(30 * MS)
        second = marked(bench)
    asked_from(lambda: bench.clock.wait_device(place))
    assert bench.clock.is_done(first)
    assert bench.clock.is_done(second)
    bench.clock.release(first, second)


# -- durations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duration_ns", [200_000, 5 * MS, 40 * MS])
def test_elapsed_is_the_time_of_the_work_between_two_marks(bench: Any, duration_ns: int) -> None:
    """The time between two marks is that of the work between them, not of what was queued before."""
    with bench.hold():
        bench.work(10 * MS)
        start = marked(bench)
        true = bench.work(duration_ns)
        end = marked(bench)
    bench.clock.wait(end)
    assert bench.close_to(bench.clock.elapsed_ns(start, end), true())
    bench.clock.release(start, end)


def test_elapsed_of_adjacent_marks_is_never_negative(bench: Any) -> None:
    """Marks placed one after the other, idle or busy, lie zero or more nanoseconds apart."""
    marks = [marked(bench) for _ in range(20)]
    with bench.hold():
        marks += [marked(bench) for _ in range(20)]
    bench.settle()
    gaps = [bench.clock.elapsed_ns(one, next_one) for one, next_one in itertools.pairwise(marks)]
    assert min(gaps) >= 0
    bench.clock.release(*marks)


def test_elapsed_adds_up(bench: Any) -> None:
    """From the first mark to the third is as long as from the first to the second to the third."""
    marks = [marked(bench)]
    for duration in (3 * MS, 7 * MS):
        bench.work(duration)
        marks.append(marked(bench))
    bench.clock.wait(marks[-1])
    first, second, third = marks
    parts = bench.clock.elapsed_ns(first, second) + bench.clock.elapsed_ns(second, third)
    assert abs(bench.clock.elapsed_ns(first, third) - parts) <= bench.step_ns
    bench.clock.release(*marks)


def test_the_floor_is_no_more_than_any_pair_has_read(bench: Any) -> None:
    """Unknown, or no more than the least pair that was placed; from any thread, and without asking the device."""
    place, least = here(bench), 2**63
    for held in (False, True):
        pairs = []
        with bench.hold() if held else contextlib.nullcontext():
            for _ in range(20):
                called = bench.now_ns()
                pairs.append((called, marked(bench), marked(bench)))
        bench.settle()
        for called, start, end in pairs:
            elapsed = bench.clock.elapsed_ns(start, end)
            bench.clock.position(start, elapsed, called, bench.now_ns())
            bench.clock.release(start, end)
            least = min(least, elapsed)
    floor = bench.clock.floor_ns(place)
    assert elsewhere(lambda: bench.clock.floor_ns(place)) == floor
    if "floor" in bench.lacks:
        assert floor == Missing("not_measured", floor.detail)
        assert floor.detail
    else:
        assert bench.floor_ns[0] <= floor <= min(least, bench.floor_ns[1])


# -- positions --------------------------------------------------------------------------------------------


def check_position(bench: Any, *, busy_ns: int, work_ns: int, seen_late_ns: int = 0) -> Position:
    """Place one span, and hold the answer against everything that is certain."""
    if busy_ns:
        bench.work(busy_ns)
    called = bench.now_ns()
    start = marked(bench)
    bench.work(work_ns)
    end = marked(bench)
    bench.clock.wait(end)
    if seen_late_ns:
        bench.pass_time(seen_late_ns)
    seen = bench.now_ns()
    elapsed = bench.clock.elapsed_ns(start, end)
    found: Position = bench.clock.position(start, elapsed, called, seen)
    around = found.uncertainty_ns
    assert not found.fault
    assert around >= 0
    assert found.host_ns >= called - around
    assert found.host_ns + elapsed <= seen + around + 1 + RATE_BOUND * elapsed
    true = bench.true_ns(start)
    if true is not None:
        assert abs(found.host_ns - true) <= around
    bench.clock.release(start, end)
    return found


def test_a_position_is_true_within_what_it_says(bench: Any) -> None:
    """Over many spans and pauses the true start never lies further off than the stated uncertainty."""
    dice = random.Random(7)
    for _ in range(25):
        check_position(
            bench,
            busy_ns=dice.choice([0, 100_000, 4 * MS]),
            work_ns=dice.randrange(10_000, 3 * MS),
            seen_late_ns=dice.choice([0, 1_000, bench.pause_ns]),
        )
        bench.pass_time(dice.choice([0, bench.pause_ns]))


def test_a_position_seen_late_is_still_narrow(bench: Any) -> None:
    """The timeline, not only the moment of looking, says where a span was: 20 ms late, and known to 1 ms."""
    check_position(bench, busy_ns=0, work_ns=MS)
    tries = (check_position(bench, busy_ns=0, work_ns=MS, seen_late_ns=20 * MS) for _ in range(bench.tries))
    assert any(found.uncertainty_ns < MS for found in tries)


def test_positions_can_be_asked_from_any_thread(bench: Any) -> None:
    """A thread that never touched the device gets the same answers."""
    called = bench.now_ns()
    start = marked(bench)
    bench.work(2 * MS)
    end = marked(bench)

    def ask() -> Position:
        with bench.clock.unhindered():
            bench.clock.wait(end)
            assert bench.clock.is_done(start)
            found: Position = bench.clock.position(start, bench.clock.elapsed_ns(start, end), called, bench.now_ns())
            return found

    found = elsewhere(ask)
    assert not found.fault
    assert called - found.uncertainty_ns <= found.host_ns <= bench.now_ns() + found.uncertainty_ns
    bench.clock.release(start, end)


# -- threads, pools ---------------------------------------------------------------------------------------


def test_released_marks_can_be_placed_again(bench: Any) -> None:
    """Three hundred pairs, each released after use, go on telling the right time."""
    kept = bench.marks_kept()
    for turn in range(300):
        start = marked(bench)
        true = bench.work(20_000 + turn * 100)
        end = marked(bench)
        bench.clock.wait(end)
        assert bench.clock.elapsed_ns(start, end) >= true() * (1 - 4e-5) - 2_000
        bench.clock.release(start, end)
    assert bench.marks_kept() == kept


def test_a_mark_can_be_placed_from_a_thread_new_to_the_device(bench: Any) -> None:
    """A place found on one thread can be marked from another that never called the runtime."""
    place = here(bench)
    mark = elsewhere(lambda: bench.clock.mark(place))
    assert not isinstance(mark, Missing)
    bench.clock.wait(mark)
    bench.clock.release(mark)


def test_several_threads_mark_their_own_streams_at_once(bench: Any) -> None:
    """Eight threads, a stream each, and no mark is handed to two of them or tells another's time."""
    needs(bench, "streams")
    at_once = threading.Barrier(8)

    def work(number: int) -> list[tuple[Any, Any, Callable[[], int]]]:
        pairs = []
        with bench.stream():
            at_once.wait(30)
            for _ in range(20):
                start = marked(bench)
                true = bench.work(100_000 + 10_000 * number)
                pairs.append((start, marked(bench), true))
            bench.clock.wait(pairs[-1][1])
        return pairs

    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(work, range(8)))
    everything = [pair for pairs in done for pair in pairs]
    assert len({id(mark) for start, end, _ in everything for mark in (start, end)}) == 8 * 20 * 2
    for start, end, true in everything:
        assert bench.clock.elapsed_ns(start, end) >= true() * (1 - 4e-5) - 2_000
    for pairs in done:  # each stream's marks are in the order they were placed in
        line = [mark for start, end, _ in pairs for mark in (start, end)]
        assert min(bench.clock.elapsed_ns(a, b) for a, b in itertools.pairwise(line)) >= 0
    bench.clock.release(*(mark for start, end, _ in everything for mark in (start, end)))


# -- captures ---------------------------------------------------------------------------------------------


def test_a_captured_stream_has_no_place(bench: Any) -> None:
    """While a stream is captured locate says so; afterwards there is a place again."""
    needs(bench, "captures")
    with bench.capture() as place:
        found = bench.locator.locate()
        assert isinstance(found, Missing)
        assert found.reason == "captured"
        assert bench.clock.is_capturing(place)
    assert not bench.clock.is_capturing(place)
    assert isinstance(bench.locator.locate(), Place)


def test_an_idle_stream_is_not_capturing(bench: Any) -> None:
    """A stream that nobody captures is not capturing, also while another one is."""
    place = here(bench)
    assert not bench.clock.is_capturing(place)
    assert elsewhere(lambda: bench.clock.is_capturing(place)) is False


@pytest.mark.parametrize("asked_from", [lambda work: work(), elsewhere], ids=["same_thread", "other_thread"])
def test_questions_leave_a_capture_alone(bench: Any, asked_from: Any) -> None:
    """Asked unhindered, every question is answered during a capture, and the graph still replays."""
    needs(bench, "captures")
    called = bench.now_ns()
    start = marked(bench)
    true = bench.work(MS)
    end = marked(bench)
    bench.settle()
    seen = bench.now_ns()

    def ask() -> int:
        with bench.clock.unhindered():
            bench.clock.wait(end)
            assert bench.clock.is_done(start)
            elapsed: int = bench.clock.elapsed_ns(start, end)
            bench.clock.position(start, elapsed, called, seen)
            return elapsed

    with bench.capture():
        elapsed = asked_from(ask)
    assert elapsed >= true() * (1 - 4e-5) - 2_000
    bench.clock.release(start, end)


def test_unhindered_restores_what_it_changed(bench: Any) -> None:
    """The thread's capture mode is the same after the block, also when the block raised."""
    before = bench.question_mode()
    with bench.clock.unhindered():
        if before is not None:
            assert bench.question_mode() != before
        with bench.clock.unhindered():
            pass
    assert bench.question_mode() == before
    with pytest.raises(ZeroDivisionError), bench.clock.unhindered():
        raise ZeroDivisionError
    assert bench.question_mode() == before


# -- a device in error ------------------------------------------------------------------------------------


def check_broken(bench: Any) -> None:
    place = here(bench)
    start, end = marked(bench), marked(bench)
    bench.settle()
    bench.break_down()
    for _ in range(3):
        refused = bench.clock.mark(place)
        assert isinstance(refused, Missing), refused
        assert refused.reason == "device_error"
        assert refused.detail
    questions: list[Callable[[], Any]] = [
        lambda: bench.clock.is_done(start),
        lambda: bench.clock.wait(end),
        lambda: bench.clock.wait_device(place),
        lambda: bench.clock.elapsed_ns(start, end),
    ]
    for ask in questions:
        try:
            answer = ask()
        except DeviceFault as fault:
            assert str(fault)  # noqa: PT017 - this runs in a process without pytest too
        else:
            raise AssertionError(f"a broken device answered {answer!r}")
    bench.clock.describe(place)


def test_a_broken_device_is_told_from_a_slow_one(bench: Any) -> None:
    """In an error state mark gives Missing("device_error") with the driver's word, and questions raise DeviceFault."""
    needs(bench, "lasting errors")
    bench.sacrifice(check_broken)


# -- names and places -------------------------------------------------------------------------------------


def test_a_device_has_index_uuid_and_name(bench: Any) -> None:
    """describe gives the runtime's index, a UUID as NVML writes it, and the product name, each time the same."""
    index, name = bench.identity()
    place = here(bench)
    info = bench.clock.describe(place)
    assert (info.index, info.name) == (index, name)
    assert isinstance(info.uuid, str)
    assert info.uuid.startswith(("GPU-", "MIG-"))
    assert elsewhere(lambda: bench.clock.describe(place)) == info


def test_a_stream_has_one_place(bench: Any) -> None:
    """The same stream is the same place each time, another stream is another, and both have this clock."""
    needs(bench, "streams")
    place = here(bench)
    with bench.stream():
        other = here(bench)
        assert here(bench) is other
    assert other is not place
    assert (other.device, other.clock) == (place.device, bench.clock)
    assert other.stream != place.stream
    assert here(bench) is place


def test_a_result_is_found_on_its_device(bench: Any) -> None:
    """device_of knows the device of a result, and None of what lives on none."""
    needs(bench, "devices")
    assert bench.locator.device_of(bench.result()) == 0
    for nothing in (None, 1, "text", [], {}, (), object()):
        assert bench.locator.device_of(nothing) is None
