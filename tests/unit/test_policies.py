"""The sync policies: what each waits for, and the numbers it gives, exact on a device made of arithmetic."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

import gpu_timed as package
from gpu_timed import WaitTimeout, configure, current, flush, gpu_span, gpu_timed, shutdown
from gpu_timed.record import Missing, Record
from gpu_timed.testing import FakeDevice, capture, use_device

US = 1_000
MS = 1_000_000
PLAIN = ("boundary", "deferred", "device")
PACKAGE = str(Path(package.__file__).parent)


@pytest.fixture(autouse=True)
def _no_mark_is_lost(device: FakeDevice) -> Iterator[None]:
    """Whatever a test does with ``device``, every mark is given back in the end."""
    otel_context.attach(Context())  # what a failing test left behind is no parent of this one's calls
    yield
    device.run_dry()
    assert flush(5).pending == 0
    assert device.marks_in_use == 0


def measure(device: FakeDevice, work: Callable[[], Any], **options: Any) -> Record:
    """Run *work* as one timed call and return its record."""
    with capture() as records:
        gpu_timed(name="work", **options)(work)()
    (record,) = records
    return record


# -- the numbers ------------------------------------------------------------------------------------------


def test_boundary_on_an_idle_device(device: FakeDevice) -> None:
    """Launch, device and sync times of one kernel launched at once: exact, and the call returns at its end."""

    def work() -> None:
        device.launch(10 * MS)
        device.host_clock.advance(300 * US)

    began = device.host.now_ns()
    record = measure(device, work)
    assert device.host.now_ns() - began == 10 * MS
    assert (record.device_ns, record.launch_ns, record.sync_ns) == (10 * MS, 300 * US, 10 * MS - 300 * US)
    assert record.queue_ns <= record.uncertainty_ns
    assert record.start_ns == device.host.to_unix(began)
    assert abs(record.end_ns - device.host.to_unix(began + 10 * MS)) <= record.uncertainty_ns
    assert abs(record.device_start_ns - record.start_ns) <= record.uncertainty_ns
    assert record.device_end_ns - record.device_start_ns == record.device_ns
    assert (record.sync, record.clock, record.status, record.error, record.resumptions) == (
        "boundary",
        "fake",
        "ok",
        "",
        1,
    )
    assert (record.device, record.stream, record.device_uuid, record.device_name) == (0, 0, "GPU-fake-0", "Fake GPU")
    assert record.quality == ()


def test_boundary_is_the_default_of_a_plain_call(device: FakeDevice) -> None:
    """Without a word about sync the record is there when the call returns."""
    with gpu_span("block") as span:
        device.launch(MS)
    assert span.record is not None
    assert (span.record.sync, span.record.device_ns) == ("boundary", MS)


def test_deferred_never_waits(device: FakeDevice) -> None:
    """A deferred call returns after its launch, states sync 0, and has the same device time later."""

    def work() -> None:
        device.launch(10 * MS)
        device.host_clock.advance(300 * US)

    began = device.host.now_ns()
    with capture() as records:
        gpu_timed(sync="deferred")(work)()
        assert device.host.now_ns() - began == 300 * US
    (record,) = records
    assert (record.device_ns, record.launch_ns, record.sync_ns) == (10 * MS, 300 * US, 0)
    assert record.end_ns == device.host.to_unix(began + 10 * MS) + (record.device_start_ns - record.start_ns)


def test_deferred_behind_a_late_device(device: FakeDevice) -> None:
    """While the device is late the call has returned and nothing is resolved; afterwards the time is exact."""
    with capture() as records, device.held():
        gpu_timed(sync="deferred")(lambda: device.launch(100 * MS))()
        assert flush(0.05).pending == 1
        assert records == []
        device.host_clock.advance(7 * MS)
    (record,) = records
    assert record.device_ns == 100 * MS
    assert abs(record.queue_ns - 7 * MS) <= record.uncertainty_ns


def test_a_deferred_record_is_none_until_it_is_there(device: FakeDevice) -> None:
    """span.record is None while pending, wait raises WaitTimeout in time, and returns the record once it is there."""
    with device.held():
        with gpu_span("late", sync="deferred") as span:
            device.launch(MS)
            with pytest.raises(WaitTimeout, match=r"'late'.*still open"):
                span.wait(0.01)
        assert span.record is None
        with pytest.raises(WaitTimeout, match=r"'late'.*has not been reached"):
            span.wait(0.01)
        with pytest.raises(TimeoutError):  # its other name
            span.wait(0)
    device.run_dry()
    record = span.wait(5)
    assert record.device_ns == MS
    assert span.record is record
    assert span.wait(0) is record


def test_wait_wakes_up_when_the_device_gets_there(device: FakeDevice) -> None:
    """A thread blocked in wait without a limit gets the record as soon as time has passed on the device."""
    with gpu_span("late", sync="deferred") as span:
        device.launch(MS)
    got: list[Record] = []
    waiting = threading.Thread(target=lambda: got.append(span.wait()))
    waiting.start()
    device.run_dry()
    waiting.join(10)
    assert [record.device_ns for record in got] == [MS]


@pytest.mark.parametrize("sync", PLAIN)
def test_foreign_work_queued_before_is_not_ours(device: FakeDevice, sync: Any) -> None:
    """A3: behind 50 ms of someone else's work a span tells its own millisecond; the wait is its queue time."""
    device.launch(50 * MS)

    def work() -> None:
        device.launch(MS)
        device.host_clock.advance(20 * US)

    record = measure(device, work, sync=sync)
    assert record.device_ns == MS if sync != "device" else record.device_ns >= MS
    assert abs(record.queue_ns - 50 * MS) <= record.uncertainty_ns
    assert record.sync_ns == {"boundary": 51 * MS - 20 * US, "device": 51 * MS - 20 * US, "deferred": 0}[sync]
    if sync != "device":  # which waits before its end mark: what the device did meanwhile is not known so well
        assert record.launch_gaps_included == "no"
        assert record.device_min_ns == record.device_ns
        assert record.bound == "device"


def test_device_policy_waits_for_side_streams(device: FakeDevice) -> None:
    """Work on another stream is part of the time under sync="device", and of no other policy."""

    def work() -> None:
        device.launch(MS)
        with device.use(stream=7):
            device.launch(5 * MS)

    assert measure(device, work, sync="device").device_ns == 5 * MS
    assert measure(device, work, sync="boundary").device_ns == MS
    device.run_dry()
    assert measure(device, work, sync="deferred").device_ns == MS
    device.run_dry()


def test_device_policy_states_the_whole_wait(device: FakeDevice) -> None:
    """Under sync="device" sync_ns is the wait for the device, and the launch ends before it."""

    def work() -> None:
        with device.use(stream=7):
            device.launch(5 * MS)
        device.host_clock.advance(MS)

    record = measure(device, work, sync="device")
    assert (record.launch_ns, record.sync_ns) == (MS, 4 * MS)
    assert abs(record.end_ns - record.start_ns - 5 * MS) <= record.uncertainty_ns


def test_device_policy_leaves_other_devices_alone(device: FakeDevice) -> None:
    """sync="device" waits for the span's own device, not for its neighbour."""

    def work() -> None:
        with device.use(device=1):
            device.launch(500 * MS)
        device.launch(MS)

    began = device.host.now_ns()
    gpu_timed(sync="device")(work)()
    assert device.host.now_ns() - began == MS


@pytest.mark.parametrize(
    ("foreign", "steps", "expected"),
    [
        # foreign work before, then (launch, host time) steps; device, least, gaps, bound
        (0, [(10, 0)], (10, 10, "yes", "device")),
        (0, [(10, 4)], (10, 6, "yes", "unknown")),
        (0, [(0, 6), (10, 0)], (16, 10, "yes", "unknown")),
        (0, [(3, 9), (3, 0)], (12, 3, "yes", "unknown")),
        (5, [(10, 2)], (10, 10, "no", "device")),
        (5, [(10, 9)], (10, 6, "unknown", "unknown")),
        (100, [(1, 50), (1, 40)], (2, 2, "no", "device")),
        (40, [(10, 50), (10, 0)], (20, 10, "unknown", "unknown")),
        (0, [(0, 5)], (5, 0, "yes", "unknown")),
        (0, [], (0, 0, "yes", "unknown")),
    ],
)
def test_the_least_device_time(device: FakeDevice, foreign: int, steps: Any, expected: Any) -> None:
    """device_min_ns = device - max(0, launch - queue), gaps and bound follow from it, to the uncertainty."""
    if foreign:
        device.launch(foreign * MS)

    def work() -> None:
        for launched, passed in steps:
            if launched:
                device.launch(launched * MS)
            device.host_clock.advance(passed * MS)

    record = measure(device, work)
    around = record.uncertainty_ns
    assert around < 10 * US
    launch = sum(passed for _, passed in steps) * MS
    assert record.launch_ns == launch
    assert abs(record.queue_ns - foreign * MS) <= around
    assert record.device_ns == expected[0] * MS
    assert abs(record.device_min_ns - expected[1] * MS) <= around
    assert record.device_min_ns == max(0, record.device_ns - max(0, launch - record.queue_ns))
    assert (record.launch_gaps_included, record.bound) == expected[2:]


def test_numbers_do_not_depend_on_the_devices_own_clock() -> None:
    """Seconds of skew and a drifting device clock change nothing but a few parts per million."""
    with use_device(FakeDevice(skew_ns=-(10**15), drift_ppm=30)) as device:
        device.launch(50 * MS)
        record = measure(device, lambda: device.launch(10 * MS))
        assert record.device_ns == 10 * MS + 300
        assert abs(record.queue_ns - 50 * MS) <= record.uncertainty_ns
        assert device.marks_in_use == 0


@given(
    foreign=st.lists(st.integers(0, 3 * MS), max_size=3),
    steps=st.lists(st.tuples(st.integers(0, 2 * MS), st.integers(0, 2 * MS)), max_size=6),
    latency=st.sampled_from([0, 4_000, 80_000]),
    sync=st.sampled_from(["boundary", "deferred"]),
)
@settings(max_examples=120, deadline=None)
def test_the_truth_lies_between_the_least_and_the_device_time(
    foreign: list[int], steps: list[tuple[int, int]], latency: int, sync: Any
) -> None:
    """For any mix of foreign work, launches and host time the work really done lies within what the record says."""
    with use_device(FakeDevice(launch_latency_ns=latency, drift_ppm=0)) as device:
        for duration in foreign:
            device.launch(duration)
        begin = device.host.now_ns()

        def work() -> None:
            for duration, passed in steps:
                device.launch(duration)
                device.host_clock.advance(passed)

        record = measure(device, work, sync=sync)
        busy = sum(duration for duration, _ in steps)
        # A launch of zero is none; what lies between two launches' latencies is not work either.
        assert record.device_min_ns - record.uncertainty_ns - latency <= busy <= record.device_ns
        assert abs(record.queue_ns - max(latency, sum(foreign))) <= record.uncertainty_ns + latency
        assert record.launch_ns == sum(passed for _, passed in steps)
        assert record.start_ns == device.host.to_unix(begin)
        assert device.marks_in_use == 0


# -- streams and devices ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", PLAIN)
def test_the_end_mark_goes_on_the_starts_stream(device: FakeDevice, sync: Any) -> None:
    """A function that leaves another stream current is measured on the stream it began on."""
    left = contextlib.ExitStack()

    def work() -> None:
        device.launch(3 * MS)
        left.enter_context(device.use(stream=9))

    with left:
        record = measure(device, work, sync=sync)
    assert (record.stream, record.device_ns, record.quality) == (0, 3 * MS, ())


@pytest.mark.parametrize("sync", ["boundary", "deferred"])
def test_a_changed_device_has_no_device_time(device: FakeDevice, sync: Any) -> None:
    """A span that ends on another device than it began on says Missing("device_changed"), and nothing raises."""

    def work() -> str:
        device.launch(MS)
        device.set_device(1)
        return "done"

    with capture() as records:
        assert gpu_timed(sync=sync)(work)() == "done"
    device.set_device(0)
    (record,) = records
    for value in (record.device_ns, record.device_min_ns, record.queue_ns, record.device_start_ns):
        assert isinstance(value, Missing)
        assert value.reason == "device_changed"
    assert (record.status, record.device) == ("ok", 0)


def test_calls_on_alternating_devices(device: FakeDevice) -> None:
    """A4: a hundred calls on two devices in turn each tell their own device and time."""

    @gpu_timed(sync="deferred")
    def work(number: int) -> None:
        device.launch(number * US)

    with capture() as records:
        for number in range(1, 101):
            with device.use(device=number % 2):
                work(number)
            device.host_clock.advance(MS)
    by_index = sorted(records, key=lambda record: record.call_index)
    assert [record.device for record in by_index] == [number % 2 for number in range(1, 101)]
    assert [record.device_ns for record in by_index] == [number * US for number in range(1, 101)]
    assert {record.device_uuid for record in records} == {"GPU-fake-0", "GPU-fake-1"}


def test_a_result_on_another_device_is_noted(device: FakeDevice) -> None:
    """device_map="auto": a result that lives elsewhere is noted; one that lives here is not."""

    class Result:
        def __init__(self, where: int) -> None:
            self.fake_device = where

    assert measure(device, lambda: Result(1)).quality == ("result_on_other_device",)
    assert measure(device, lambda: Result(0)).quality == ()
    assert measure(device, lambda: "text").quality == ()


@pytest.mark.parametrize("sync", PLAIN)
def test_nothing_runs_in_a_capture(device: FakeDevice, sync: Any) -> None:
    """A call while its stream is captured has no device time, places no mark and is not waited for."""
    placed = counted(device, "mark")
    waited = counted(device, "wait_device")
    with device.capture():
        record = measure(device, lambda: device.launch(MS), sync=sync)
    assert isinstance(record.device_ns, Missing)
    assert record.device_ns.reason == "captured"
    assert (record.status, record.sync_ns, placed, waited) == ("ok", 0, [], [])


@pytest.mark.parametrize("sync", ["boundary", "deferred"])
def test_a_capture_that_begins_inside(device: FakeDevice, sync: Any) -> None:
    """When the stream is being captured at the end of the call, no mark goes into the graph."""
    left = contextlib.ExitStack()
    placed = counted(device, "mark")

    def work() -> None:
        left.enter_context(device.capture())
        device.launch(MS)

    with left:
        record = measure(device, work, sync=sync)
    assert isinstance(record.device_ns, Missing)
    assert record.device_ns.reason == "captured"
    assert len(placed) == 1


def test_device_policy_does_not_break_a_capture_that_began_inside(device: FakeDevice) -> None:
    """A device-wide wait would end the capture that the call has begun: it is left out."""
    left = contextlib.ExitStack()
    waited = counted(device, "wait_device")
    with left:
        measure(device, lambda: left.enter_context(device.capture()) and None, sync="device")
    assert waited == []


@pytest.mark.parametrize("sync", ["boundary", "deferred"])
def test_a_capture_that_begins_inside_while_another_stream_becomes_current(device: FakeDevice, sync: Any) -> None:
    """The span's own stream is what counts: it is captured at the end, though the current one is not."""
    left = contextlib.ExitStack()
    placed = counted(device, "mark")

    def work() -> None:
        left.enter_context(device.capture())
        left.enter_context(device.use(stream=5))

    with left:
        record = measure(device, work, sync=sync)
    assert isinstance(record.device_ns, Missing)
    assert record.device_ns.reason == "captured"
    assert len(placed) == 1


@pytest.mark.parametrize("sync", ["boundary", "deferred"])
def test_a_capture_of_another_stream_does_not_cost_the_time(device: FakeDevice, sync: Any) -> None:
    """When a captured stream is current at the end, and the span's own is not captured, it is measured."""
    left = contextlib.ExitStack()

    def work() -> None:
        device.launch(MS)
        left.enter_context(device.use(stream=5))
        left.enter_context(device.capture())

    with left:
        record = measure(device, work, sync=sync)
    assert (record.device_ns, record.stream) == (MS, 0)


def test_a_capture_inside_that_ends_inside(device: FakeDevice) -> None:
    """A call that captures and is done with it before it returns is timed as usual."""

    def work() -> None:
        with device.use(stream=4), device.capture():
            device.launch(100 * MS)
        device.launch(MS)

    assert measure(device, work).device_ns == MS


@pytest.mark.parametrize("sync", PLAIN)
def test_a_runtime_that_is_not_initialised_is_left_alone(device: FakeDevice, sync: Any) -> None:
    """Before the runtime has a device the call is recorded without device time, even if it appears meanwhile."""
    device.disappear()

    def work() -> None:
        device.appear()
        device.launch(MS)

    record = measure(device, work, sync=sync)
    assert isinstance(record.device_ns, Missing)
    assert record.device_ns.reason == "not_initialised"
    assert (record.clock, record.status, record.sync_ns) == ("host", "ok", 0)
    assert record.device_uuid == Missing("not_initialised")
    device.run_dry()
    assert measure(device, lambda: device.launch(MS), sync=sync).device_ns == MS


def test_boundary_waits_for_every_stream_the_span_marked() -> None:
    """A generator whose resumptions ran on two streams is waited for on both."""
    with use_device(FakeDevice()) as device, capture() as records:

        @gpu_timed(sync="boundary")
        def steps() -> Iterator[int]:
            device.launch(100 * MS)
            yield 1
            device.launch(MS)

        running = steps()
        with device.use(stream=1):
            next(running)
        assert list(running) == []
    (record,) = records
    assert (record.status, record.device_ns) == ("ok", 101 * MS)


def test_the_device_span_ends_with_the_last_work() -> None:
    """When an earlier resumption's stream is busy longest, that is where the device span ends."""
    with use_device(FakeDevice()) as device, capture() as records:

        @gpu_timed(sync="deferred")
        def steps() -> Iterator[int]:
            device.launch(100 * MS)
            yield 1
            device.launch(MS)

        running = steps()
        with device.use(stream=1):
            next(running)
        assert list(running) == []
    (record,) = records
    assert record.device_ns == 101 * MS
    assert record.device_end_ns - record.device_start_ns >= 100 * MS


# -- a device in error ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", PLAIN)
def test_an_error_met_while_waiting_is_not_raised(sync: Any) -> None:
    """A11: the call returns its value; the span is an error that "may come from earlier work"; the next ones too."""
    with use_device(FakeDevice()) as device, capture() as records:

        @gpu_timed(sync=sync)
        def innocent() -> str:
            device.launch(MS)
            return "value"

        breaks_in = {"boundary": "wait", "device": "wait_device", "deferred": "is_done"}[sync]
        original = getattr(device, breaks_in)

        def question(what: Any) -> Any:
            device.break_down("CUDA_ERROR_ASSERT")
            return original(what)

        setattr(device, breaks_in, question)
        assert innocent() == "value"
        assert flush(5).pending == 0
        with pytest.raises(RuntimeError, match="CUDA_ERROR_ASSERT"):
            innocent()  # the user's own next device call raises, as it would have
        with gpu_span("later", sync=sync):
            pass
    first, second, third = records
    assert isinstance(first.device_ns, Missing)
    assert first.device_ns.reason == "device_error"
    assert first.status == "error"
    assert first.error == "CUDA_ERROR_ASSERT (may come from earlier work)"
    assert second.error == "RuntimeError: CUDA_ERROR_ASSERT"
    for later in (second, third):
        assert isinstance(later.device_ns, Missing)
        assert later.device_ns.reason == "device_error"


def test_what_was_waited_for_before_the_device_broke_is_no_error() -> None:
    """Its time can no longer be read, but its own work was done: it says what is missing, and is no error."""
    configure(poll_ms=60_000)
    with use_device(FakeDevice()) as device, capture() as records:
        with gpu_span("first", sync="boundary"):
            device.launch(1_000_000)
        time.sleep(0.05)  # roused by it, the resolver's thread sleeps for long
        with gpu_span("done", sync="boundary"):
            device.launch(1_000_000)
        device.break_down()
        with gpu_span("later", sync="boundary"):
            pass
    done, later = records[-2:]
    assert (done.name, done.status, done.error) == ("done", "ok", "")
    assert isinstance(done.device_ns, Missing)
    assert done.device_ns.reason == "device_error"
    assert later.status == "error"
    assert current.ledger().snapshot()["device_error"] >= 2


@pytest.mark.parametrize(("sync", "broken_before"), [("boundary", True), ("boundary", False), ("deferred", False)])
def test_an_error_met_while_marking_is_an_error(sync: Any, broken_before: bool) -> None:
    """When the device refuses a mark with an error the span is an error too, with the same hint."""
    with use_device(FakeDevice()) as device, capture() as records:
        if broken_before:
            device.break_down()
        with gpu_span("innocent", sync=sync):
            device.break_down()
    (record,) = records
    assert isinstance(record.device_ns, Missing)
    assert record.device_ns.reason == "device_error"
    assert record.status == "error"
    assert "may come from earlier work" in record.error


def test_a_user_error_goes_before_the_devices(device: FakeDevice) -> None:
    """When the call raised, its own exception is the span's error, whatever the device says."""
    with use_device(FakeDevice()) as broken, capture() as records:

        @gpu_timed(sync="deferred")
        def both() -> None:
            broken.launch(1)
            broken.break_down()
            raise KeyError("mine")

        with pytest.raises(KeyError):
            both()
    assert records[0].error == "KeyError: 'mine'"


# -- exceptions -------------------------------------------------------------------------------------------

Body = Callable[[], Any]
Attempt = Callable[[], tuple[str, Any]]


def outcome(call: Body) -> tuple[str, Any]:
    try:
        return "returned", call()
    except BaseException as error:
        return "raised", error


async def outcome_of(make: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "returned", await make()
    except BaseException as error:
        return "raised", error


def on_loop(make: Callable[[], Any]) -> tuple[str, Any]:
    return asyncio.run(outcome_of(make))


def as_function(deco: Any, block: Any, body: Body) -> Attempt:
    @deco
    def function() -> Any:
        return body()

    return lambda: outcome(function)


def as_method(deco: Any, block: Any, body: Body) -> Attempt:
    class Owner:
        @deco
        def method(self) -> Any:
            return body()

    return lambda: outcome(Owner().method)


def as_staticmethod(deco: Any, block: Any, body: Body) -> Attempt:
    class Owner:
        @deco
        @staticmethod
        def method() -> Any:
            return body()

    return lambda: outcome(Owner.method)


def as_classmethod(deco: Any, block: Any, body: Body) -> Attempt:
    class Owner:
        @deco
        @classmethod
        def method(cls) -> Any:
            return body()

    return lambda: outcome(Owner.method)


def as_coroutine(deco: Any, block: Any, body: Body) -> Attempt:
    @deco
    async def coroutine() -> Any:
        await asyncio.sleep(0)
        return body()

    return lambda: on_loop(coroutine)


def as_generator(deco: Any, block: Any, body: Body) -> Attempt:
    @deco
    def generator() -> Any:
        yield 1
        return body()

    def run() -> Any:
        running = generator()
        assert next(running) == 1
        try:
            next(running)
        except StopIteration as stop:
            return stop.value

    return lambda: outcome(run)


def as_async_generator(deco: Any, block: Any, body: Body) -> Attempt:
    @deco
    async def generator() -> Any:
        yield 1
        yield body()

    async def run() -> Any:
        running = generator()
        assert await anext(running) == 1
        value = await anext(running)
        with pytest.raises(StopAsyncIteration):
            await anext(running)
        return value

    return lambda: on_loop(run)


def as_block(deco: Any, block: Any, body: Body) -> Attempt:
    def run() -> Any:
        with block("block"):
            return body()

    return lambda: outcome(run)


def as_async_block(deco: Any, block: Any, body: Body) -> Attempt:
    async def run() -> Any:
        async with block("block"):
            await asyncio.sleep(0)
            return body()

    return lambda: on_loop(run)


class _Callable:
    def __init__(self, body: Body) -> None:
        self.body = body

    def __call__(self) -> Any:
        return self.body()


def as_object(deco: Any, block: Any, body: Body) -> Attempt:
    called = deco(_Callable(body))
    return lambda: outcome(called)


KINDS = [
    as_function,
    as_method,
    as_staticmethod,
    as_classmethod,
    as_coroutine,
    as_generator,
    as_async_generator,
    as_block,
    as_async_block,
    as_object,
]
ON_LOOP = {as_coroutine, as_async_generator, as_async_block}
EVERY_WAY = [
    pytest.param(kind, sync, id=f"{kind.__name__[3:]}-{sync}")
    for kind in KINDS
    for sync in PLAIN
    if sync != "device" or kind not in ON_LOOP
]
every_way = pytest.mark.parametrize(("kind", "sync"), EVERY_WAY)


def timed(kind: Any, sync: Any, body: Body) -> Attempt:
    made: Attempt = kind(gpu_timed(sync=sync), lambda name: gpu_span(name, sync=sync), body)
    return made


def plain(kind: Any, body: Body) -> Attempt:
    made: Attempt = kind(lambda function: function, lambda _: contextlib.nullcontext(), body)
    return made


class Unprintable(Exception):  # noqa: N818 - a name, not a kind
    """An exception whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def foreign_frames(error: BaseException) -> list[tuple[str, int | None, str]]:
    """The frames of a traceback that are not gpu_timed's."""
    frames = traceback.extract_tb(error.__traceback__)
    return [(f.filename, f.lineno, f.name) for f in frames if not f.filename.startswith(PACKAGE)]


@every_way
def test_a_value_passes_through(device: FakeDevice, kind: Any, sync: Any) -> None:
    """What the call returns is the very object the function returned, and one span says so."""
    value = object()

    def body() -> Any:
        device.launch(MS)
        device.host_clock.advance(2 * MS)
        return value

    with capture() as records:
        assert timed(kind, sync, body)() == ("returned", value)
    (record,) = records
    assert (record.status, record.error, record.sync) == ("ok", "", sync)
    assert record.device_ns == 2 * MS


@every_way
@pytest.mark.parametrize(
    "error",
    [
        ValueError("wrong"),
        Unprintable(),
        ExceptionGroup("many", [ValueError("one"), KeyError("two")]),
        KeyboardInterrupt(),
        SystemExit(3),
        asyncio.CancelledError("stop"),
        GeneratorExit(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_passes_through_untouched(device: FakeDevice, kind: Any, sync: Any, error: BaseException) -> None:
    """The very exception comes out, with the user's frames, cause and context as they would have been without us."""

    def body() -> Any:
        device.launch(MS)
        device.host_clock.advance(2 * MS)
        raise error

    error.__traceback__ = None
    assert plain(kind, body)() == ("raised", error)
    expected = foreign_frames(error)
    kept = (error.__cause__, error.__context__, error.__suppress_context__, getattr(error, "__notes__", None))
    error.__traceback__ = None
    device.run_dry()
    with capture() as records:
        how, raised = timed(kind, sync, body)()
    assert how == "raised"
    assert raised is error
    assert foreign_frames(error) == expected
    assert (error.__cause__, error.__context__, error.__suppress_context__, getattr(error, "__notes__", None)) == kept
    (record,) = records
    assert record.status == ("error" if isinstance(error, Exception) else "cancelled")
    assert record.error.partition(":")[0].endswith(type(error).__qualname__)
    assert record.device_ns == 2 * MS
    error.__traceback__ = None


@every_way
def test_an_exception_keeps_its_cause(device: FakeDevice, kind: Any, sync: Any) -> None:
    """``raise … from`` survives: cause and context are the user's own."""
    cause = KeyError("inner")

    def body() -> Any:
        try:
            raise cause
        except KeyError as caught:
            raise ValueError("outer") from caught

    _, raised = timed(kind, sync, body)()
    assert raised.__cause__ is cause
    assert raised.__context__ is cause
    raised.__traceback__ = cause.__traceback__ = None


class Big:
    """Stands for a tensor that a frame holds."""


@every_way
@pytest.mark.parametrize("raises", [True, False])
def test_no_frame_is_kept_alive(device: FakeDevice, kind: Any, sync: Any, raises: bool) -> None:
    """What the user's frames held is free as soon as undecorated, at once where Python itself keeps nothing.

    (From 3.12 on, asyncio's own frames keep what a coroutine raised until the next garbage collection.)
    """
    held: list[weakref.ref[Big]] = []

    def body() -> Any:
        big = Big()
        held.append(weakref.ref(big))
        if raises:
            raise ValueError
        return None

    def freed(attempt: Attempt) -> bool:
        held.clear()
        gc.disable()
        try:
            how, _ = attempt()
            del _
            assert how == ("raised" if raises else "returned")
            return held[0]() is None
        finally:
            gc.enable()

    assert freed(timed(kind, sync, body)) >= freed(plain(kind, body))


# -- interleaved ------------------------------------------------------------------------------------------


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_two_threads_on_one_stream_are_noted(device: FakeDevice) -> None:
    """A span with another thread's marks between its own says interleaved; the one inside it does not."""
    with capture() as records, gpu_span("outer"):
        in_thread(gpu_timed(name="inner")(lambda: device.launch(MS)))
    notes = {record.name: record.quality for record in records}
    assert notes == {"outer": ("interleaved",), "inner": ()}


def test_crossing_spans_are_both_noted(device: FakeDevice) -> None:
    """When each of two threads' spans ends inside or begins inside the other, both are noted."""
    inside, over = threading.Event(), threading.Event()

    def cross() -> None:
        with gpu_span("second"):
            inside.set()
            assert over.wait(30)

    with capture() as records:
        with gpu_span("first"):
            crossing = threading.Thread(target=cross)
            crossing.start()
            assert inside.wait(30)
        over.set()
        crossing.join(30)
    assert {record.name: record.quality for record in records} == {
        "first": ("interleaved",),
        "second": ("interleaved",),
    }


def test_threads_on_streams_of_their_own_are_not_noted(device: FakeDevice) -> None:
    """Another stream's marks are not in between."""

    def other() -> None:
        with device.use(stream=3), gpu_span("inner"):
            device.launch(MS)

    with capture() as records, gpu_span("outer"):
        in_thread(other)
    assert [record.quality for record in records] == [(), ()]


def test_nested_spans_are_not_noted(device: FakeDevice) -> None:
    """A span's own children, at any depth, mark its stream by right."""
    with capture() as records, gpu_span("a"), gpu_span("b"), gpu_span("c"):
        device.launch(MS)
    assert [record.quality for record in records] == [()] * 3


def test_a_users_span_in_between_is_still_family(device: FakeDevice) -> None:
    """timed → the user's own OpenTelemetry span → timed: the inner one is a descendant, no stranger."""
    trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
    mine = trace.get_tracer("mine")
    with capture() as records, gpu_span("outer"), mine.start_as_current_span("mine"), gpu_span("inner"):
        device.launch(MS)
    assert [record.quality for record in records] == [(), ()]


def test_an_async_block_around_foreign_work_is_noted(device: FakeDevice) -> None:
    """A task that marks the stream while an async block is suspended makes it interleaved."""

    async def stranger(go: asyncio.Event) -> None:
        await go.wait()
        with gpu_span("stranger", sync="deferred"):
            device.launch(MS)

    async def main() -> None:
        go = asyncio.Event()
        other = asyncio.create_task(stranger(go))
        async with gpu_span("block"):
            go.set()
            await other

    with capture() as records:
        asyncio.run(main())
    assert {record.name: record.quality for record in records} == {"block": ("interleaved",), "stranger": ()}


def test_an_async_block_around_its_own_tasks_is_not_noted(device: FakeDevice) -> None:
    """Tasks and calls started inside an async block are its children."""

    @gpu_timed
    async def child() -> None:
        device.launch(MS)
        await asyncio.sleep(0)
        device.launch(MS)

    async def main() -> None:
        async with gpu_span("block"):
            await asyncio.gather(*(asyncio.create_task(child()) for _ in range(3)))

    with capture() as records:
        asyncio.run(main())
    assert [record.quality for record in records if record.name == "block"] == [()]


# -- thinning, limits, ends -------------------------------------------------------------------------------


def counted(device: FakeDevice, name: str) -> list[Any]:
    """Record the arguments of every call of one of the clock's methods."""
    calls: list[Any] = []
    original = getattr(device, name)

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        return original(*arguments)

    setattr(device, name, call)
    return calls


def everything(device: FakeDevice) -> list[list[Any]]:
    return [counted(device, name) for name in ("mark", "locate", "wait", "wait_device", "elapsed_ns", "device_of")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__[3:])
@pytest.mark.parametrize("sync", ["boundary", "deferred"])
def test_an_unsampled_call_touches_no_device(device: FakeDevice, kind: Any, sync: Any) -> None:
    """A9: when the sampler says no, nothing is asked of the device and nothing is waited for."""
    trace.set_tracer_provider(TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False))
    touched = everything(device)
    with capture() as records:
        assert timed(kind, sync, lambda: 5)() == ("returned", 5)
    assert records == []
    assert touched == [[]] * len(touched)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__[3:])
def test_every_leaves_calls_out_but_counts_them(device: FakeDevice, kind: Any) -> None:
    """every=3 records calls 0 and 3 of six; the others touch nothing."""
    marks = counted(device, "mark")
    attempt = kind(gpu_timed(every=3), lambda name: gpu_span(name, every=3), lambda: 5)
    placed = []
    with capture() as records:
        for _ in range(6):
            assert attempt() == ("returned", 5)
            placed.append(len(marks))
    assert sorted(record.call_index for record in records) == [0, 3]
    assert placed[0] == placed[1] == placed[2] < placed[3] == placed[4] == placed[5]


def test_an_unrecorded_block_says_so(device: FakeDevice) -> None:
    """The span of a block that is left out has a record in which everything is Missing("not_sampled")."""
    configure(sync="deferred")
    for index in range(2):
        with gpu_span("thin", every=2) as span:
            device.launch(MS)
        if index:
            assert span.record.device_ns == Missing("not_sampled")
            assert span.wait(0).launch_ns == Missing("not_sampled")


def test_switched_off_in_the_environment(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """With GPU_TIMED_DISABLED=1 a decorated function is the function, and a block touches nothing."""
    monkeypatch.setenv("GPU_TIMED_DISABLED", "1")
    current.reset()
    touched = everything(device)

    def function() -> int:
        return 1

    assert gpu_timed(function) is function
    with use_device(device), gpu_span("block"):
        pass
    assert touched == [[]] * len(touched)


def test_too_many_pending_calls_go_on_without_device_time(device: FakeDevice) -> None:
    """Beyond max_pending a call is recorded with Missing("overflow"), counted, and marks nothing."""
    configure(max_pending=2)
    marks = counted(device, "mark")
    with capture() as records, device.held():
        for _ in range(5):
            gpu_timed(name="work", sync="deferred")(lambda: device.launch(MS))()
    assert len(marks) == 4
    times = sorted((record.device_ns for record in records), key=str)
    assert times == [MS, MS, Missing("overflow"), Missing("overflow"), Missing("overflow")]
    assert flush(5).counts["overflow"] == 3


class Stuck:
    """A sink that does not return until it is told to."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()

    def announce(self, span: Any, record: Record) -> None:
        pass

    def emit(self, span: Any, record: Record) -> None:
        self.entered.set()
        assert self.go.wait(30)


@contextlib.contextmanager
def full_queue(device: FakeDevice) -> Iterator[None]:
    """A queue of one, with one in it, behind a sink that is stuck."""
    configure(max_queue=1)
    stuck = Stuck()
    with current.sink(stuck):
        try:
            with gpu_span("first"):
                pass
            assert stuck.entered.wait(10)
            with gpu_span("second"):
                pass
            yield
        finally:
            stuck.go.set()
            flush(5)


def test_a_full_queue_drops_and_counts(device: FakeDevice) -> None:
    """Beyond max_queue finished spans are dropped and counted, their marks given back, and flush says incomplete."""
    with full_queue(device):
        kept = device.marks_in_use
        for _ in range(3):
            gpu_timed(sync="deferred")(lambda: None)()
        assert device.marks_in_use == kept
    found = flush(5)
    assert found.counts["dropped_queue_full"] == 3


def test_a_full_queue_gives_marks_back_once() -> None:
    """A boundary call whose span is dropped has given its marks back already, and does not do so twice."""
    with use_device(FakeDevice()) as device, full_queue(device):
        queued = device.marks_in_use  # of the span that fills the queue
        for _ in range(3):
            gpu_timed(sync="boundary")(lambda: None)()
        assert device.marks_in_use == queued


def test_waiting_for_a_dropped_span_asks_nothing_of_its_marks() -> None:
    """The marks of a dropped span are another's by now: wait ends without asking them, with what is known."""
    with use_device(FakeDevice()) as device, full_queue(device):
        queued = device.marks_in_use  # of the span that fills the queue
        with gpu_span("dropped", sync="deferred") as span:
            device.launch(MS)
        device.run_dry()
        with contextlib.suppress(WaitTimeout):
            assert isinstance(span.wait(0.1).device_ns, Missing)
        assert device.marks_in_use == queued


def test_a_full_queue_does_not_hang_a_boundary_coroutine() -> None:
    """A coroutine whose span is dropped returns its value all the same."""
    with use_device(FakeDevice(realtime=True)) as device, full_queue(device):

        @gpu_timed(sync="boundary")
        async def coroutine() -> int:
            return 5

        assert asyncio.run(asyncio.wait_for(coroutine(), 1)) == 5


def test_shutdown_passes_on_what_the_device_has_not_finished(device: FakeDevice) -> None:
    """A span still pending at shutdown is passed on as Missing("pending") and counted; a later call is measured."""
    with use_device(FakeDevice()) as late:
        seen: list[Record] = []

        class Sink:
            def announce(self, span: Any, record: Record) -> None:
                pass

            def emit(self, span: Any, record: Record) -> None:
                seen.append(record)

        with current.sink(Sink()), late.held():
            gpu_timed(sync="deferred")(lambda: late.launch(MS))()
            found = shutdown(0.2)
    assert [record.device_ns for record in seen] == [Missing("pending")]
    assert found.counts["pending_at_exit"] == 1
    assert not found


def test_shutdown_gives_the_marks_back() -> None:
    """What was pending at shutdown has both its marks given back."""
    with use_device(FakeDevice()) as late, late.held():
        gpu_timed(sync="deferred")(lambda: late.launch(MS))()
        shutdown(0.2)
        assert late.marks_in_use == 0


# -- the context ------------------------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("raises", [True, False])
def test_the_callers_context_is_untouched(device: FakeDevice, kind: Any, sync: Any, raises: bool) -> None:
    """Inside, the span is current; before and after, the context is the very same one."""
    inside: list[Any] = []

    def body() -> None:
        inside.append(trace.get_current_span())
        if raises:
            raise ValueError

    before = otel_context.get_current()
    timed(kind, sync, body)()
    assert otel_context.get_current() is before
    assert inside[0].get_span_context().is_valid


def test_one_block_object_can_be_entered_while_it_is_open() -> None:
    """``block = gpu_span(…)`` used again inside itself leaves the context as it was, and records both."""
    with use_device(FakeDevice()) as device, capture() as records:
        block = gpu_span("again")
        before = otel_context.get_current()
        token = otel_context.attach(before)
        try:
            with block, block:
                device.launch(MS)
            assert otel_context.get_current() is before
        finally:
            otel_context.detach(token)
    assert len(records) == 2


def test_one_block_object_can_be_used_again(device: FakeDevice) -> None:
    """The same block object, one use after the other, is one span each."""
    block = gpu_span("again")
    with capture() as records:
        for _ in range(3):
            with block:
                device.launch(MS)
    assert [record.call_index for record in records] == [0, 1, 2]


def test_random_scenarios_lose_no_mark_and_no_record(device: FakeDevice) -> None:
    """Four hundred calls of every kind, policy, stream and ending: one record each, every mark given back."""
    dice = random.Random(11)
    with capture() as records:
        for _ in range(400):
            kind = dice.choice(KINDS)
            sync = dice.choice([s for s in PLAIN if s != "device" or kind not in ON_LOOP])
            error = dice.choice([None, ValueError(), KeyboardInterrupt()])

            def body(error: BaseException | None = error) -> None:
                device.launch(dice.randrange(MS))
                device.host_clock.advance(3 * MS)
                if error is not None:
                    raise error

            with contextlib.ExitStack() as stack:
                stack.enter_context(device.use(device=dice.randrange(2), stream=dice.randrange(3)))
                if dice.random() < 0.1:
                    stack.enter_context(device.capture())
                timed(kind, sync, body)()
    assert len(records) == 400


def test_a_boundary_record_is_there_on_return_while_another_thread_reads_it(device: FakeDevice) -> None:
    """span.record of a boundary span is never None, also while gpu_timed's own thread is just reading its marks."""
    reading, go_on = threading.Event(), threading.Event()
    original = device.position

    def slow(*arguments: Any) -> Any:
        reading.set()
        go_on.wait(5)
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "position", slow)
        with gpu_span("work") as span:
            device.launch(MS)
        flusher = threading.Thread(target=flush, args=(5,))
        flusher.start()  # hurries the resolver's thread into reading
        assert reading.wait(5)
        threading.Timer(0.05, go_on.set).start()
        record = span.record
        flusher.join()
    assert record is not None
    assert record.device_ns == MS
