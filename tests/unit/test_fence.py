"""The fence clock: spans on a make-believe runtime that is controlled to the step."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from make_believe import LONG_NS, MS, MakeBelieve, Thing, soon

from gpu_timed import current, flush, gpu_timed
from gpu_timed.clocks import fence
from gpu_timed.clocks.fence import FenceClock
from gpu_timed.clocks.host import HostClock
from gpu_timed.record import Missing, Record
from gpu_timed.testing import capture


@pytest.fixture
def runtime() -> Iterator[MakeBelieve]:
    """A runtime that is measured for the length of the test."""
    made = MakeBelieve()
    with current.device(made, HostClock()):
        yield made
    made.release()


def timed(sync: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    return gpu_timed(function, name="f", sync=sync)


def looking_threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "gpu_timed-fence"}


def measure(call: Callable[..., Any], *args: Any) -> Record:
    """Run one span and return its record."""
    with capture() as records:
        call(*args)
    (record,) = records
    return record


def number(value: Any) -> int:
    assert isinstance(value, int), value
    return value


both = pytest.mark.parametrize("sync", ["deferred", "boundary"])


def test_a_span_has_the_results_time_and_the_runtimes_device(runtime: MakeBelieve) -> None:
    """Device, kind and name are the runtime's; the time is that of the result, and the call returns long before."""
    made: list[Thing] = []

    def make(_: int) -> Thing:
        made.append(runtime.thing(200 * MS))
        return made[-1]

    with capture() as records:
        before = time.perf_counter_ns()
        timed("deferred", make)(0)
        after = time.perf_counter_ns()
    (record,) = records
    assert (record.clock, record.device, record.device_type) == ("fence", 3, "tpu")
    assert (record.device_name, record.device_uuid) == ("Believe", Missing("no_device"))
    around = number(record.uncertainty_ns)
    assert made[0].ready_ns - after - around <= number(record.device_ns) <= made[0].ready_ns - before + around
    assert number(record.launch_ns) < 100 * MS
    assert (record.queue_ns, record.sync_ns, record.launch_gaps_included) == (0, 0, "yes")


def test_results_are_kept_alive_until_they_are_there_and_no_longer(runtime: MakeBelieve) -> None:
    """An argument and a result that nobody else holds live as long as a mark waits for them."""

    def call() -> list[weakref.ref[Thing]]:
        argument = runtime.thing()
        return [weakref.ref(argument), weakref.ref(timed("deferred", lambda _: runtime.thing())(argument))]

    held = call()
    gc.collect()
    assert None not in [one() for one in held]
    runtime.release()
    assert soon(lambda: [one() for one in held] == [None, None])
    assert flush().pending == 0


def test_described_work_is_begun_before_a_mark_looks(runtime: MakeBelieve) -> None:
    """Start and end both flush first, then find the results, then look: work that nobody began would never end."""
    argument, result = runtime.thing(MS, lazy=True), runtime.thing(5 * MS, lazy=True)
    record = measure(timed("deferred", lambda _: result), argument)
    assert runtime.asked == ["flush", "results", "is_ready"] * 2
    assert argument.ready_ns < result.ready_ns < LONG_NS
    assert number(record.device_ns) > 0


@both
def test_device_time_begins_when_the_arguments_are_there(runtime: MakeBelieve, sync: Any) -> None:
    """The wait for the arguments is the queue's, what remains is the device's, and nothing of it is a launch gap."""
    argument, result = runtime.thing(150 * MS), runtime.thing(220 * MS)
    before = time.perf_counter_ns()
    record = measure(timed(sync, lambda _: result), argument)
    around = number(record.uncertainty_ns)
    assert 50 * MS < number(record.queue_ns) <= argument.ready_ns - before + around
    assert abs(number(record.device_ns) - (result.ready_ns - argument.ready_ns)) <= around
    assert record.device_min_ns == record.device_ns
    assert (record.launch_gaps_included, record.bound) == ("no", "device")


def test_results_that_are_there_already(runtime: MakeBelieve) -> None:
    """A call whose results are there as it returns is over then; no thread is started and nothing is kept."""
    there = runtime.thing(0)
    for sync in ("deferred", "boundary"):
        record = measure(timed(sync, lambda thing: thing), there)
        assert number(record.device_ns) < 100 * MS
        assert (record.queue_ns, record.bound) == (0, "unknown")
        assert number(record.uncertainty_ns) < 100 * MS  # how long the look at the result took
    assert not runtime.clock._looking
    assert not runtime.clock._pending


def test_a_call_without_results_has_no_time(runtime: MakeBelieve) -> None:
    """Nothing in the result and nothing on its way: no_results, and not the host's time."""
    record = measure(timed("boundary", lambda x: x), 7)
    assert isinstance(record.device_ns, Missing)
    assert record.device_ns.reason == "no_results"
    assert (record.status, record.sync_ns) == ("ok", 0)
    assert number(record.launch_ns) > 0


def test_work_that_nobody_returned_counts_while_it_is_on_its_way(runtime: MakeBelieve) -> None:
    """A call that returns None is over when all that is under way is there."""
    left: list[Thing] = []
    record = measure(timed("boundary", lambda _: left.append(runtime.thing(100 * MS))), 0)
    assert number(record.device_ns) >= 99 * MS
    assert left[0].ready_ns < time.perf_counter_ns()


@pytest.mark.parametrize("in_ns", [0, 20 * MS], ids=["at_once", "later"])
@pytest.mark.parametrize("sync", ["deferred", "boundary", "device"])
def test_a_result_that_failed_marks_the_span_and_not_the_call(runtime: MakeBelieve, sync: Any, in_ns: int) -> None:
    """The call returns what it made; the span is in error and says that it may come from earlier work."""
    broken = runtime.thing(in_ns, error=RuntimeError("NaN in step 7\nand a page of more"))
    with capture() as records:
        assert timed(sync, lambda: broken)() is broken
    (record,) = records
    assert (record.status, record.error) == ("error", "NaN in step 7 (may come from earlier work)")
    assert record.device_ns == Missing("device_error", "NaN in step 7")
    assert measure(timed("boundary", lambda _: runtime.thing(MS)), 0).status == "ok"


@both
def test_the_truth_lies_within_what_is_stated(runtime: MakeBelieve, sync: Any) -> None:
    """Fifty spans in real time: the work within the stated bounds, which are not the whole span."""
    truths, widths = [], []
    made: list[Thing] = []
    call = timed(sync, lambda _: made[-1])
    for turn in range(50):
        argument = runtime.thing(2 * MS + 37_000 * turn)
        made.append(runtime.thing(5 * MS + 61_000 * turn))
        record = measure(call, argument)
        true = made[-1].ready_ns - argument.ready_ns
        device, least, around = record.device_ns, record.device_min_ns, record.uncertainty_ns
        if isinstance(device, int) and isinstance(least, int) and isinstance(around, int):
            truths.append(least - around <= true <= device + around)
            widths.append(around / true)
    assert sum(truths) >= 40, truths
    assert sorted(widths)[5] < 0.5


def test_beyond_the_limit_a_span_says_overflow(runtime: MakeBelieve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark too many is Missing("overflow"), keeps nothing alive, and leaves the others right and the counts clean."""
    monkeypatch.setattr(fence, "MOST_PENDING", 3)
    make = timed("deferred", lambda _: runtime.thing(20 * MS))
    with capture() as records:
        with monkeypatch.context() as without_thread:
            without_thread.setattr(FenceClock, "_look", lambda self: None)
            for _ in range(3):
                make(0)
            lost = weakref.ref(make(0))
            assert lost() is None
        runtime.clock._look()
    times = {record.call_index: record.device_ns for record in records}
    assert times.pop(3) == Missing("overflow")
    assert min(map(number, times.values())) >= 15 * MS
    assert {record.status for record in records} == {"ok"}
    assert flush().counts.keys() <= {"no_provider", "overflow"}
    assert number(measure(make, 0).device_ns) >= 15 * MS


def test_the_thread_ends_when_idle_and_is_started_again(runtime: MakeBelieve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that nobody uses has no thread; the next mark gets one."""
    monkeypatch.setattr(fence, "_LINGER_S", 0.02)
    before = looking_threads()
    for _ in range(2):
        timed("deferred", lambda _: runtime.thing())(0)
        (own,) = looking_threads() - before
        runtime.release()
        own.join(10)
        assert not own.is_alive()
        assert not runtime.clock._looking
        assert flush().pending == 0


@both
def test_the_thread_outlives_a_runtime_that_raises(runtime: MakeBelieve, sync: Any) -> None:
    """After a question that raised, what was pending beside it is still stamped, and by the same thread."""
    others = looking_threads()
    with capture(5) as records:
        timed("deferred", lambda _: runtime.thing())(0)
        (own,) = looking_threads() - others
        lost = weakref.ref(timed(sync, lambda _: runtime.thing(5 * MS, error=OSError("gone")))(0))
        assert soon(lambda: lost() is None)
        assert own.is_alive()
        assert looking_threads() - others == {own}
        runtime.release()
    assert [record.error for record in records] == ["", "gone (may come from earlier work)"]
    assert isinstance(records[0].device_ns, int)


def test_a_wait_at_the_boundary_needs_no_thread(runtime: MakeBelieve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calling thread waits in the runtime and stamps by itself."""
    monkeypatch.setattr(FenceClock, "_look", lambda self: None)
    record = measure(timed("boundary", lambda _: runtime.thing(200 * MS)), 0)
    assert number(record.device_ns) >= 199 * MS
    assert number(record.sync_ns) > 50 * MS


def test_an_interrupted_wait_is_the_users_and_the_span_goes_on(runtime: MakeBelieve) -> None:
    """Ctrl-C in the wait at the boundary comes out of the call, and the time is told all the same."""

    def interrupt() -> None:
        if threading.get_ident() == runtime.owner:
            time.sleep(0.02)
            raise KeyboardInterrupt

    with capture() as records:
        runtime.asleep = interrupt
        with pytest.raises(KeyboardInterrupt):
            timed("boundary", lambda _: runtime.thing())(0)
        runtime.release()
    assert number(records[0].device_ns) >= 19 * MS


def test_sync_device_waits_for_everything(runtime: MakeBelieve) -> None:
    """It waits for what the call left on its way, though it returned something else."""
    left: list[Thing] = []
    there = runtime.thing(0)
    timed("device", lambda _: left.append(runtime.thing(30 * MS)) or there)(0)
    assert left[0].ready_ns <= time.perf_counter_ns()


def test_many_threads(runtime: MakeBelieve) -> None:
    """Eight threads, spans of both policies: every one has the time of its own result, and nothing is left."""

    made = {sync: timed(sync, runtime.thing) for sync in ("boundary", "deferred")}

    def work(thread: int) -> None:
        for turn in range(20):
            made["boundary" if (turn + thread) % 2 else "deferred"]((1 + turn % 4) * MS)

    with capture() as records, ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(records) == 160
    assert {record.status for record in records} == {"ok"}
    assert min(number(record.device_ns) + number(record.uncertainty_ns) for record in records) >= MS
    assert soon(lambda: not runtime.clock._pending)
