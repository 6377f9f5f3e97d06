"""The fence clock step by step: what its thread does, in which order, and what happens when steps cross."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from make_believe import MS, MakeBelieve, Thing, soon

from gpu_timed import current, flush, gpu_timed
from gpu_timed.clocks import fence
from gpu_timed.clocks.fence import FenceClock, FenceMark
from gpu_timed.clocks.host import HostClock
from gpu_timed.errors import DeviceFault
from gpu_timed.ports import Place
from gpu_timed.record import Missing, Record
from gpu_timed.testing import capture


@pytest.fixture
def runtime() -> Iterator[MakeBelieve]:
    """A runtime that is measured for the length of the test."""
    made = MakeBelieve()
    with current.device(made, HostClock()):
        yield made
    made.release()


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread looks: the test does."""
    monkeypatch.setattr(FenceClock, "_look", lambda self: None)


def mark(runtime: MakeBelieve, *values: Thing) -> FenceMark:
    made = runtime.clock.mark(runtime.place, values)
    assert isinstance(made, FenceMark), made
    return made


def looking_threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "gpu_timed-fence"}


def measure(call: Callable[..., Any], *args: Any) -> Record:
    with capture() as records:
        call(*args)
    (record,) = records
    return record


@pytest.mark.usefixtures("by_hand")
def test_a_look_stamps_what_is_there_and_nothing_else(runtime: MakeBelieve) -> None:
    """One look: the ready mark is stamped with the width of the gap before it, the other stays."""
    there, away = runtime.thing(), runtime.thing()
    first, second = mark(runtime, there), mark(runtime, there, away)
    there.ready_ns = ready = time.perf_counter_ns()
    runtime.clock._sweep()
    assert first.at_ns - first.window_ns <= ready <= first.at_ns
    assert second.at_ns == 0
    assert list(runtime.clock._pending) == [second]
    with pytest.raises(DeviceFault):
        runtime.clock.elapsed_ns(first, second)
    runtime.release()
    runtime.clock.wait(second)
    assert runtime.clock.elapsed_ns(first, second) == second.at_ns - first.at_ns
    assert runtime.clock.position(first, 0, 0, 0).uncertainty_ns == first.window_ns + second.window_ns + 1


@pytest.mark.usefixtures("by_hand")
def test_a_released_mark_keeps_nothing_and_harms_no_look(runtime: MakeBelieve) -> None:
    """A mark given back while its results are away is dropped at the next look."""
    given_back, other = mark(runtime, runtime.thing()), mark(runtime, away := runtime.thing())
    runtime.clock.release(given_back)
    assert given_back.pending == []
    runtime.clock._sweep()
    assert list(runtime.clock._pending) == [other]
    assert not runtime.is_ready(away)


@pytest.mark.usefixtures("by_hand")
def test_looks_grow_rarer(runtime: MakeBelieve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause between two looks grows with the wait, as the module's docstring says, up to a millisecond."""
    at, pauses = [1], [0.0]

    def sleep(seconds: float) -> None:
        at[0] += round(seconds * 1e9)
        pauses.append(seconds)

    monkeypatch.setattr(fence, "time", types.SimpleNamespace(sleep=sleep))
    clock = FenceClock(runtime, lambda: at[0])
    away = runtime.thing()
    clock.mark(runtime.place, away)
    while at[0] < 200 * MS:
        clock._sweep()
    assert pauses[1] == fence._SHORTEST_LOOK_S
    assert pauses[-1] == fence._LONGEST_LOOK_S
    assert len(pauses) < 1_000
    assert not runtime.is_ready(away)


@pytest.mark.usefixtures("by_hand")
def test_what_comes_just_after_the_first_look_is_in_the_window(runtime: MakeBelieve) -> None:
    """A result that is there a moment after the mark looked lies between stamp and stamp less window."""
    at = [1_000]
    clock = FenceClock(runtime, lambda: at[0])
    thing = runtime.thing()
    answers = iter([False, True, True])

    def look(_: Thing) -> bool:
        answer = next(answers)
        at[0] += 1_000  # it becomes ready within this microsecond
        return answer

    runtime.is_ready = look  # type: ignore[method-assign]
    made = clock.mark(runtime.place, thing)
    assert isinstance(made, FenceMark)
    clock._sweep()
    assert made.at_ns - made.window_ns <= 1_500 <= made.at_ns


@pytest.mark.usefixtures("by_hand")
def test_marks_stay_in_their_order(runtime: MakeBelieve) -> None:
    """A mark that comes during a look is not stamped before those that were there."""
    things = [runtime.thing() for _ in range(3)]
    marks = [mark(runtime, thing) for thing in things[:2]]
    look = runtime.is_ready

    def one_comes(thing: Thing) -> bool:
        if len(marks) == 2:
            runtime.is_ready = look  # type: ignore[method-assign]
            marks.append(mark(runtime, things[2]))
        return look(thing)

    runtime.is_ready = one_comes  # type: ignore[method-assign]
    runtime.clock._sweep()
    assert len(marks) == 3
    assert list(runtime.clock._pending) == marks


class Crowded(FenceMark):
    """Whenever the clock looks into it, another thread places a mark: here the same thread, to the step."""

    def __getattribute__(self, name: str) -> Any:
        if COMING:
            COMING.pop()()
        return super().__getattribute__(name)


COMING: list[Callable[[], Any]] = []


@pytest.mark.usefixtures("by_hand")
def test_marks_may_come_at_any_step_of_a_look(runtime: MakeBelieve) -> None:
    """However often other threads place marks while the clock looks, it goes on and keeps every one."""
    clock, thing = runtime.clock, runtime.thing()
    clock._pending.extend(Crowded([thing], time.perf_counter_ns()) for _ in range(3))
    COMING[:] = [lambda: mark(runtime, thing)] * 30
    try:
        for _ in range(10):
            clock._sweep()
    finally:
        came = 30 - len(COMING)
        COMING.clear()
    assert len(clock._pending) == 3 + came > 20
    runtime.release()
    clock._sweep()
    assert not clock._pending


def test_the_thread_lingers(runtime: MakeBelieve) -> None:
    """Spans that follow each other share one thread, also where their marks overlapped."""
    before, seen = looking_threads(), set()
    for _ in range(5):
        made = [mark(runtime, runtime.thing(2 * MS)) for _ in range(3)]
        seen |= looking_threads() - before
        assert soon(lambda made=made: all(map(runtime.clock.is_done, made)))
        time.sleep(0.02)
    assert len(seen) == 1


def test_a_mark_survives_that_no_thread_can_be_started(runtime: MakeBelieve, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a process, or at the limit of threads, a boundary span is measured all the same."""

    def refuse(self: threading.Thread) -> None:
        if self.name == "gpu_timed-fence":
            raise RuntimeError("can't start new thread")
        start(self)

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with capture() as records:
        gpu_timed(lambda _: runtime.thing(20 * MS))(0)
    assert [isinstance(record.device_ns, int) for record in records] == [True]


@pytest.mark.usefixtures("by_hand")
def test_the_end_can_be_seen_before_anybody_looked_at_the_start(runtime: MakeBelieve) -> None:
    """A wait at the boundary that is over before the thread's next look: the arguments are there too, just unseen."""
    argument, result = runtime.thing(20 * MS), runtime.thing(21 * MS)
    record = measure(gpu_timed(lambda _: result), argument)
    assert (record.status, record.error) == ("ok", "")
    assert isinstance(record.device_ns, int)


@pytest.mark.parametrize("sync", ["deferred", "boundary"])
def test_a_result_that_needs_no_argument_may_come_first(runtime: MakeBelieve, sync: Any) -> None:
    """A call may return what its arguments have no part in: no error, and no time that is surer than it can be."""
    argument, result = runtime.thing(), runtime.thing(5 * MS)
    with capture() as records:
        assert gpu_timed(lambda _: result, sync=sync)(argument) is result
        assert soon(lambda: runtime.is_ready(result))
        flush(0.2)
        assert not runtime.is_ready(argument)
        runtime.release()
    (record,) = records
    assert (record.status, record.error) == ("ok", "")
    if isinstance(record.device_ns, int):
        assert isinstance(record.device_min_ns, int)
        assert isinstance(record.uncertainty_ns, int)
        assert record.device_min_ns - record.uncertainty_ns <= 6 * MS
        assert record.device_ns + record.uncertainty_ns >= 4 * MS
    else:
        assert record.device_ns.reason != "device_error"


@pytest.mark.parametrize("sync", ["deferred", "boundary"])
def test_an_error_without_words_is_an_error(runtime: MakeBelieve, sync: Any) -> None:
    """What is raised without a message, or with an empty first line, still marks the span."""
    record = measure(gpu_timed(lambda _: runtime.thing(5 * MS, error=MemoryError()), sync=sync), 0)
    assert record.status == "error"
    assert "MemoryError" in record.error
    assert isinstance(record.device_ns, Missing)


def test_waiting_for_the_device_tells_its_error(runtime: MakeBelieve, monkeypatch: pytest.MonkeyPatch) -> None:
    """wait_device raises what the runtime reports, and waits however many marks are pending."""
    monkeypatch.setattr(fence, "MOST_PENDING", 0)
    slow = runtime.thing(30 * MS)
    runtime.clock.wait_device(runtime.place)
    assert slow.ready_ns <= time.perf_counter_ns()

    def broken(values: Any) -> list[Thing]:
        raise RuntimeError("the device is gone")

    runtime.results = broken  # type: ignore[method-assign]
    with pytest.raises(DeviceFault, match="the device is gone"):
        runtime.clock.wait_device(runtime.place)


class LateClock(FenceClock):
    """The host is held up for 30 ms just after a start mark was stamped."""

    def mark(self, place: Place, values: Any = None, since: Any = None) -> FenceMark | Missing:
        made = super().mark(place, values, since)
        if since is None:
            time.sleep(0.03)
        return made


def test_a_pause_before_the_call_is_no_proven_work(runtime: MakeBelieve) -> None:
    """Time between the stamp of the start and the user's code is not in device_min_ns."""
    runtime.place = Place(LateClock(runtime), 3, 0)
    record = measure(gpu_timed(lambda thing: thing), runtime.thing(0))
    assert isinstance(record.device_min_ns, int)
    assert record.device_min_ns < 15 * MS


def test_a_generator_whose_consumer_waits_has_a_time(runtime: MakeBelieve) -> None:
    """Items that the consumer waited for leave nothing for the last step: the time of the others remains."""

    def steps() -> Iterator[Thing]:
        for _ in range(3):
            yield runtime.thing(10 * MS)

    def consume() -> None:
        for thing in gpu_timed(steps, sync="deferred")():
            runtime.wait([thing])

    record = measure(consume)
    assert isinstance(record.device_ns, int)
    assert record.device_ns >= 25 * MS
