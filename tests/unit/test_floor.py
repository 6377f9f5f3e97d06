"""The floor: how it is learned from marks alone, and what a span says that reads no more than marks do."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_diagnosis_parts import FakeDriver

from gpu_timed import diagnose, gpu_span, gpu_timed
from gpu_timed.clocks import cuda_floor
from gpu_timed.clocks.cuda_event import CudaEventClock
from gpu_timed.clocks.cuda_floor import Floor
from gpu_timed.measure.known import instrument
from gpu_timed.ports import Launch, Place
from gpu_timed.record import Missing, Record
from gpu_timed.testing import FakeDevice, capture, use_device
from gpu_timed.trials import FLOOR_NS

FLOOR = 1_250
BUSY_NS = 10_000_000
NOTES = {"below_floor", "no_work_on_stream"}


def span(
    *,
    work_ns: int = 0,
    launch_ns: int = 0,
    busy_ns: int = BUSY_NS,
    floor_ns: int = FLOOR,
    side_ns: int = 0,
    **changes: Any,
) -> Record:
    """Return the record of a call that takes the host *launch_ns*, behind *busy_ns* of other work."""
    with use_device(FakeDevice(floor_ns=floor_ns, launch_latency_ns=3_000)) as device:
        if busy_ns:
            device.launch(busy_ns)
        with gpu_span("call", sync="deferred") as open_span:
            for name, value in changes.items():
                setattr(open_span, name, value)
            if work_ns:
                device.launch(work_ns)
            if side_ns:
                with device.use(stream=7):
                    device.launch(side_ns)
            device.host_clock.advance(launch_ns)
        device.run_dry()
        return open_span.wait(5)


# -- below_floor ------------------------------------------------------------------------------------------


def test_an_empty_span_behind_other_work_is_below_the_floor():
    """It reads the floor, says how much that is, and that nothing limits it."""
    record = span()
    assert (record.device_ns, record.floor_ns, record.launch_gaps_included) == (FLOOR, FLOOR, "no")
    assert record.quality == ("below_floor",)
    assert record.bound == "unknown"


@pytest.mark.parametrize(("work", "below"), [(FLOOR - 1, True), (FLOOR, False)])
def test_below_the_floor_is_what_is_shorter_than_an_empty_pair(work, below):
    """Twice the floor is no longer below it; from there on the device limits the call."""
    record = span(work_ns=work)
    assert record.device_ns == work + FLOOR
    assert ("below_floor" in record.quality) is below
    assert record.bound == ("unknown" if below else "device")


def test_a_short_kernel_of_an_h200_is_not_below_the_floor():
    """0.93 µs of kernel read 3.2 µs behind other work: most of that is not the marks'."""
    assert span(work_ns=3_200 - FLOOR).quality == ()


@pytest.mark.parametrize("launch", [7_200, 200_000])
def test_an_empty_span_on_an_idle_stream_is_not_called_below_the_floor(launch):
    """It reads what the host took: the lower bound of 0 says what that is worth, and nothing is noted."""
    record = span(busy_ns=0, launch_ns=launch)
    assert record.device_ns >= launch
    assert (record.device_min_ns, record.launch_gaps_included, record.quality) == (0, "yes", ())
    assert record.bound == "unknown"


# -- no_work_on_stream ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("launch", "noted"), [(19_999, False), (20_000, True)])
def test_a_long_call_that_leaves_nothing_on_a_busy_stream_is_told(launch, noted):
    """Its work went to another stream; below 20 µs a call need not have had any."""
    record = span(launch_ns=launch, side_ns=500_000)
    assert record.device_ns == FLOOR
    assert ("no_work_on_stream" in record.quality) is noted


@pytest.mark.parametrize(("work", "noted"), [(624, True), (625, False)])
def test_half_a_floor_of_work_is_work(work, noted):
    """What reads one and a half floors is still below the floor, and may be a very short kernel."""
    record = span(work_ns=work, launch_ns=100_000)
    assert record.quality == (("below_floor", "no_work_on_stream") if noted else ("below_floor",))


def test_a_high_floor_asks_for_a_longer_call():
    """Where marks take 10 µs each, a call of 79 µs is not long beside them, and one of 80 is."""
    assert "no_work_on_stream" not in span(floor_ns=10_000, launch_ns=79_999).quality
    assert "no_work_on_stream" in span(floor_ns=10_000, launch_ns=80_000).quality


def test_a_kernels_own_launch_is_on_its_stream():
    """Its marks are placed where it goes: however little they read, it was there."""
    assert span(launch_ns=50_000, launch=Launch("torch")).quality == ("below_floor",)


def test_a_launch_bound_call_is_no_call_without_work():
    """On an idle stream many small launches read as long as the call: nothing is noted."""
    with use_device(FakeDevice(floor_ns=FLOOR, launch_latency_ns=5_000)) as device:
        with gpu_span("eager", sync="deferred") as open_span:
            for _ in range(100):
                device.host_clock.advance(8_000)
                device.launch(1_000)
        device.run_dry()
        assert open_span.wait(5).quality == ()


# -- resumptions ------------------------------------------------------------------------------------------


def coroutine(*works: int) -> Record:
    """Return the record of a coroutine that queues each of *works* in a resumption of its own, on a busy device."""
    with use_device(FakeDevice(floor_ns=FLOOR)) as device, capture() as records:

        @gpu_timed
        async def call() -> None:
            for work in works[:-1]:
                device.launch(work)
                device.host_clock.advance(30_000)
                await asyncio.sleep(0)
            device.launch(works[-1])

        device.launch(BUSY_NS)
        asyncio.run(call())
    (record,) = records
    return record


def test_the_floor_counts_once_for_each_resumption():
    """Three pairs of marks add three floors, and the span is held against all of them."""
    record = coroutine(0, 0, 0)
    assert (record.resumptions, record.device_ns, record.floor_ns) == (3, 3 * FLOOR, 3 * FLOOR)
    assert record.quality == ("below_floor", "no_work_on_stream")
    below, above = coroutine(0, 0, 3 * FLOOR - 1), coroutine(0, 0, 3 * FLOOR)
    assert (below.quality, below.bound) == (("below_floor",), "unknown")
    assert (above.quality, above.bound) == ((), "device")


# -- where there is no floor ------------------------------------------------------------------------------


def test_without_a_floor_nothing_is_noted(monkeypatch):
    """A floor that was not measured is missing in the record, with its reason."""
    monkeypatch.setattr(FakeDevice, "floor_ns", lambda self, place: cuda_floor.NOT_YET)
    record = span(launch_ns=100_000)
    assert record.device_ns == FLOOR
    assert (record.floor_ns, record.quality) == (cuda_floor.NOT_YET, ())


def test_without_a_device_the_floor_is_missing_for_the_same_reason(device: FakeDevice):
    """A span that was not measured on a device has no floor."""
    device.disappear("not_initialised")
    with capture() as records:
        gpu_timed(name="work")(lambda: None)()
    assert records[0].floor_ns == Missing("not_initialised")
    assert records[0].quality == ()


@given(
    floor=st.integers(0, 5_000),
    work=st.integers(0, 1_000_000),
    launch=st.integers(0, 1_000_000),
    busy=st.one_of(st.just(0), st.integers(1, 2_000_000)),
)
def test_long_spans_have_no_notes_and_no_span_is_wrong(floor, work, launch, busy):
    """Work of a floor or more is never noted; no time is negative; the truth lies between the bounds."""
    record = span(floor_ns=floor, work_ns=work, launch_ns=launch, busy_ns=busy)
    assert 0 <= record.device_min_ns <= record.device_ns
    assert record.floor_ns == floor
    assert record.floor_ns <= record.device_ns
    assert record.device_min_ns - record.uncertainty_ns - floor <= work <= record.device_ns
    if work >= floor:
        assert not NOTES & set(record.quality)
    if "no_work_on_stream" in record.quality:
        assert "below_floor" in record.quality
        assert launch >= 20_000
    if "below_floor" in record.quality:
        assert record.bound == "unknown"


# -- learning it ------------------------------------------------------------------------------------------


class Marks:
    """A driver whose marks lie as far apart as it is told, one burst after the other."""

    def __init__(self, *bursts: list[int], ready: bool = True, refuses: str = "") -> None:
        self.bursts = list(bursts)
        self.ready, self.refuses = ready, refuses
        self.made = self.placed = 0
        self.times: dict[int, int] = {}
        self.alive: set[int] = set()

    def cuEventCreate(self, where: Any, flags: int) -> int:  # noqa: N802
        if self.refuses == "create":
            return 2
        self.made += 1
        where._obj.value = self.made
        self.alive.add(self.made)
        return 0

    def cuEventDestroy_v2(self, event: int) -> None:  # noqa: N802
        self.alive.remove(event)

    def cuEventRecord(self, event: int, stream: int) -> int:  # noqa: N802
        assert stream == 11
        if self.refuses == "record":
            return 700
        if event == 1:
            self.gaps = iter(self.bursts.pop(0) if self.bursts else [])
            self.at = 1_000_000
        else:
            self.at += next(self.gaps, 2_200)
        self.times[event] = self.at
        self.placed += 1
        return 0

    def cuEventQuery(self, event: int) -> int:  # noqa: N802
        return 700 if self.refuses == "query" else 0 if self.ready else 600

    def cuEventElapsedTime(self, result: Any, start: int, end: int) -> int:  # noqa: N802
        result._obj.value = (self.times[end] - self.times[start]) / 1e6
        return 700 if self.refuses == "elapsed" else 0


def test_the_floor_is_the_least_of_all_gaps():
    """Several bursts at first, one later; what is read higher changes nothing."""
    library = Marks([2_300, 1_312], [2_200, 2_200, 1_248], *[[]] * 4, [1_600], [1_216])
    floor = Floor(library)  # type: ignore[arg-type]
    assert floor.ns == cuda_floor.NOT_YET
    floor.measure(11)
    assert floor.ns == 1_248
    placed = library.placed
    floor.measure(11)
    assert (floor.ns, library.placed) == (1_248, placed + 9)
    floor.measure(11)
    assert floor.ns == 1_216


def test_a_host_that_comes_late_measures_no_floor():
    """Gaps that are the host's own are none of the device's: nothing is known, and the next time it may be."""
    library = Marks(*[[3_001] * 8] * 6, [3_001] * 7 + [3_000])
    floor = Floor(library)  # type: ignore[arg-type]
    floor.measure(11)
    assert floor.ns == cuda_floor.NOT_YET
    floor.measure(11)
    assert floor.ns == 3_000


def test_any_pair_that_reads_less_proves_that_the_floor_is_lower():
    """But nothing is learned from spans alone, whose least need not be empty; and a pair cannot read nothing."""
    floor = Floor(Marks())  # type: ignore[arg-type]
    floor.learn(1_200)
    assert floor.ns == cuda_floor.NOT_YET
    floor.measure(11)
    assert floor.ns == 2_200
    for read, known in ((2_300, 2_200), (1_250, 1_250), (0, 1_250)):
        floor.learn(read)
        assert floor.ns == known


@pytest.mark.parametrize("refused", ["create", "record", "query", "elapsed"])
def test_a_driver_that_refuses_leaves_the_floor_unknown(refused):
    """Nothing is raised, nothing is waited for, and the events are given back."""
    library = Marks(refuses=refused)
    floor = Floor(library)  # type: ignore[arg-type]
    floor.measure(11)
    assert floor.ns == cuda_floor.NOT_YET
    floor.close()
    assert library.alive == set()


def test_a_stream_that_is_held_up_is_not_waited_for():
    """After half a millisecond, by the clock that it is given, the burst is left alone, and no second one made."""
    library = Marks(ready=False)
    ticks = iter(range(0, 10**9, 100_000))
    floor = Floor(library)  # type: ignore[arg-type]
    floor.measure(11, lambda: next(ticks))
    assert (floor.ns, library.placed) == (cuda_floor.NOT_YET, 9)
    assert next(ticks) <= 1_000_000


def test_a_busy_host_is_not_made_to_measure_again_and_again():
    """A burst that took more than half a millisecond is the last for this time."""
    library = Marks([1_250])
    ticks = iter(range(0, 10**9, 600_000))
    floor = Floor(library)  # type: ignore[arg-type]
    floor.measure(11, lambda: next(ticks))
    assert (floor.ns, library.placed) == (1_250, 9)


def read_pair(clock: CudaEventClock, place: Place) -> int:
    """Place an empty pair, and have it placed on the host's axis."""
    called = clock._now_ns()
    start, end = clock.mark(place), clock.mark(place)
    assert not isinstance(start, Missing)
    assert not isinstance(end, Missing)
    clock.wait(end)
    elapsed = clock.elapsed_ns(start, end)
    clock.position(start, elapsed, called, clock._now_ns())
    clock.release(start, end)
    return elapsed


def test_the_clock_measures_with_its_first_anchor_and_gives_everything_back():
    """Unknown before; afterwards no more than any pair has read; and no event or stream is left."""
    library = FakeDriver(started=True)
    library.references = 1
    clock = CudaEventClock(library)  # type: ignore[arg-type]
    place = Place(clock, 0, 5)
    assert clock.floor_ns(place) == cuda_floor.NOT_YET
    read = [read_pair(clock, place) for _ in range(20)]
    floor = clock._devices[0].floor
    assert floor is not None
    assert floor._tried
    floor._least_ns = 2_000  # a busy host need not have measured any
    library.ready_at[5] = time.perf_counter_ns() + 50_000_000  # queued behind other work
    read.append(read_pair(clock, place))
    assert read[-1] == pytest.approx(1_250, abs=5)
    assert clock.floor_ns(place) == read[-1]
    assert clock.floors() == {0: read[-1]}
    clock.close()
    assert library.alive == set()
    assert clock.floors() == {}


def test_without_a_stream_of_its_own_the_clock_measures_no_floor():
    """Bursts go to no stream of the application's."""
    library = FakeDriver(started=True, refuses={"cuStreamCreate": 2})
    library.references = 1
    clock = CudaEventClock(library)  # type: ignore[arg-type]
    place = Place(clock, 0, 5)
    read_pair(clock, place)
    assert clock.floor_ns(place) == cuda_floor.NOT_YET
    assert clock.floors() == {}
    assert clock._devices[0].floor is None


# -- shown ------------------------------------------------------------------------------------------------


def test_the_doctor_shows_what_is_known_without_measuring(monkeypatch):
    """In a process that has measured: the floor, and from where on spans are noted. Else nothing of it."""
    assert not [found for found in diagnose().section("clock").findings if found.key.startswith("known_floor")]
    with use_device(FakeDevice(floor_ns=FLOOR)), capture():
        gpu_timed(name="work")(lambda: None)()
        (found,) = [found for found in diagnose().section("clock").findings if found.key.startswith("known_floor")]
    assert found.values == {"device": 0, "floor_ns": FLOOR}
    assert "1.25 µs" in found.text
    assert "2.5 µs" in found.text


@pytest.mark.parametrize(("measured", "allowed"), [(None, FLOOR_NS), (FLOOR, FLOOR), (FLOOR_NS + 1, FLOOR_NS), (0, 0)])
@pytest.mark.parametrize("tick", [None, 32])
def test_the_self_test_allows_for_the_floor_of_this_device(measured, allowed, tick):
    """Never for more than an H200's, and for that where none was measured."""
    made = instrument(tick_ns=tick, turnaround_ns=700, cycles=True, floor_ns=measured)
    assert made.floor_ns == allowed


def test_what_handing_over_may_have_taken_is_in_no_lower_bound():
    """Behind queued work a pair reads more than the work, up to six floors: the truth stays above the lower bound."""
    for extra_floors in (1, 2, 6):
        fake = FakeDevice(floor_ns=1_000)
        with use_device(fake), capture() as records:
            fake.launch(1_000_000)
            with gpu_span("queued", sync="deferred"):
                fake.launch(30_000 + (extra_floors - 1) * 1_000)
            fake.run_dry()
        record = records[0]
        assert record.launch_gaps_included == "no"
        assert record.device_ns == 30_000 + extra_floors * 1_000
        assert record.device_min_ns == record.device_ns - 6_000 <= 30_000
        assert record.bound == "device"
