"""The machine's state near a span: what NVML tells of the right card, or why nothing; and that nobody waits for it."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_believe_nvml import GPU_IS_LOST, NOT_SUPPORTED, UNINITIALIZED, FakeNvml

from gpu_timed import configure, current, flush, gpu_timed, shutdown
from gpu_timed.errors import ConfigurationError
from gpu_timed.export import attributes
from gpu_timed.ledger import Ledger
from gpu_timed.ports import Sighting
from gpu_timed.record import Missing, Record, Vitals
from gpu_timed.settings import Settings, from_environment
from gpu_timed.testing import FakeDevice, capture, use_device
from gpu_timed.vitals import load, nvml
from gpu_timed.vitals.ring import Ring, together
from gpu_timed.vitals.sampler import THREAD, Sampler

CARD = "GPU-fake-0"
PATIENCE_S = 20.0
MS = 1_000_000


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """NVML with the fake device's first two cards."""
    held = FakeNvml({CARD: 1500, "GPU-fake-1": 900})
    monkeypatch.setitem(sys.modules, "pynvml", held)
    return held


@pytest.fixture
def real() -> Iterator[FakeDevice]:
    """A fake device on the machine's own clock, whose spans and readings are on one axis; read every 10 ms."""
    configure(vitals_interval_s=0.01)
    with use_device(FakeDevice(realtime=True)) as device:
        yield device


def until(true: Callable[[], Any]) -> Any:
    """Return what *true* returns once that is something."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = true()
        if found:
            return found
        time.sleep(0.002)
    raise AssertionError("it did not come to pass")


def one(device: FakeDevice, **options: Any) -> Record:
    """Return the record of a span."""
    with capture() as records:
        gpu_timed(name="work", **options)(lambda: device.launch(MS))()
    return records[0]


def with_vitals(device: FakeDevice, ready: Callable[[Vitals], Any] = lambda _: True) -> Record:
    """Make spans until one has a reading that is *ready*, and return its record."""

    def attempt() -> Record | None:
        record = one(device)
        return record if isinstance(record.vitals, Vitals) and ready(record.vitals) else None

    found: Record = until(attempt)
    return found


def a_vitals(**changes: Any) -> Vitals:
    """Return a reading with these *changes*."""
    held: dict[str, Any] = {
        "taken_ns": 1,
        "sm_clock_mhz": 1500,
        "sm_clock_max_mhz": 1980,
        "throttle": (),
        "power_w": 100.0,
        "temperature_c": 40,
        "host_load": 0.5,
        "process_cpus": 1.0,
        "cpus_allowed": 2.0,
    }
    return Vitals(**{**held, **changes})


def sampler_threads() -> list[threading.Thread]:
    """Return the sampler's threads."""
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


class Source:
    """A source of one reading, which says who asked."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer or Sighting(a_vitals(), 7)
        self.threads: list[str] = []
        self.asked: list[tuple[str | None, int, int]] = []

    def at(self, device_uuid: str | None, start_ns: int, end_ns: int) -> Sighting:
        self.threads.append(threading.current_thread().name)
        self.asked.append((device_uuid, start_ns, end_ns))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def stop(self) -> None:
        pass


@pytest.fixture
def source(device: FakeDevice) -> Source:
    """A source in place of the sampler."""
    held = Source()
    current.tracer().resolver.reader.vitals = held
    return held


# -- a record has them ------------------------------------------------------------------------------------


def test_a_record_carries_the_state_of_its_card(cards, real):
    """Clock, highest clock, reasons, power, temperature and load, in the units the record states."""
    cards.reasons[CARD] = 0x1 | 0x2
    record = with_vitals(real, lambda held: not isinstance(held.process_cpus, Missing))
    held = record.vitals
    assert (held.sm_clock_mhz, held.sm_clock_max_mhz) == (1500, 1980)
    assert held.throttle == ("gpu_idle", "applications_clocks_setting")
    assert (held.power_w, held.temperature_c) == (123.456, 41)
    assert held.host_load == pytest.approx(load.load_per_cpu(), abs=5)
    assert 0 <= held.process_cpus < 1_000
    assert held.cpus_allowed > 0
    assert 0 <= record.vitals_age_ns <= 20 * MS
    assert abs(held.taken_ns - record.device_start_ns) < 60_000 * MS


def test_each_device_has_its_own(cards, real):
    """Two devices of one process are told apart by UUID; an unknown one is told as such, and the host's load stays."""
    assert with_vitals(real).vitals.sm_clock_mhz == 1500
    with real.use(device=1):
        assert with_vitals(real).vitals.sm_clock_mhz == 900
    with real.use(device=2):
        held = with_vitals(real).vitals
    assert held.sm_clock_mhz.reason == "not_found"
    assert isinstance(held.host_load, float)
    assert not any(question.endswith("TotalEnergyConsumption") for question, _ in cards.asked)


def test_spans_beside_one_reading_share_it(cards, real):
    """One object for all of them: a million spans do not hold a million readings."""
    with_vitals(real)
    current.tracer().resolver.reader.vitals._stopping = True
    until(lambda: not sampler_threads())
    with capture() as records:
        for _ in range(5):
            gpu_timed(name="work")(lambda: None)()
    kept = [record.vitals for record in records if isinstance(record.vitals, Vitals)]
    assert len({id(held) for held in kept}) <= 1


def test_the_calling_thread_never_touches_them(device, source):
    """Under every policy the source is asked on the resolver's thread alone."""
    for sync in ("deferred", "boundary", "device"):
        for _ in range(3):
            one(device, sync=sync)
    assert len(source.threads) == 9
    assert set(source.threads) == {"gpu_timed-resolver"}
    one(device, sync="deferred", late="device_only")
    assert set(source.threads) == {"gpu_timed-resolver"}


def test_nvml_is_asked_on_a_thread_of_its_own(cards, real):
    """Neither the calling thread nor the resolver's ever waits for NVML, and the thread is a daemon."""
    with_vitals(real)
    assert cards.threads == {THREAD}
    (thread,) = sampler_threads()
    assert thread.daemon
    assert cards.open == 1
    shutdown()
    assert not sampler_threads()
    assert cards.open == 0


def test_no_span_no_thread(cards):
    """Decorating, and calls without a device, start nothing."""
    with use_device(FakeDevice(realtime=True)) as device:
        device.disappear("no_device")
        record = one(device)
        assert record.vitals == record.idle_before_ns == Missing("no_device")
    assert not sampler_threads()
    assert cards.asked == []


def test_the_source_is_asked_for_the_device_s_time(device, source):
    """The interval is that of the marks on the host's monotonic axis, and the UUID the clock's."""
    record = one(device)
    ((uuid, start, end),) = source.asked
    assert uuid == record.device_uuid == CARD
    assert end - start == record.device_ns
    assert device.host.to_unix(start) == record.device_start_ns
    assert (record.vitals, record.vitals_age_ns) == (a_vitals(), 7)


def test_a_source_that_raises_costs_the_span_nothing(device, source):
    """The times are there; the fault is counted."""
    source.answer = ValueError("of ours")
    record = one(device)
    assert (record.device_ns, record.status) == (MS, "ok")
    assert record.vitals == Missing("internal_fault")
    assert flush(5).counts["vitals"] == 1


@pytest.mark.parametrize("switched", [{"vitals": False}, {"vitals_interval_s": 0}])
def test_switched_off_there_is_nothing(cards, switched):
    """No thread, no question, and the record says that nobody asked for it."""
    configure(**switched)
    with use_device(FakeDevice(realtime=True)) as device:
        record = one(device)
    assert record.vitals == record.vitals_age_ns == Missing("not_set")
    assert not sampler_threads()
    assert cards.asked == []
    assert "vitals" not in repr(record)


def test_the_settings_are_read_and_checked():
    """By variable and in code; too short an interval is refused, 0 is none."""
    held = from_environment({"GPU_TIMED_VITALS": "0", "GPU_TIMED_VITALS_INTERVAL_S": "2.5"})
    assert (held.vitals, held.vitals_interval_s) == (False, 2.5)
    assert from_environment({"GPU_TIMED_VITALS_INTERVAL_S": "0"}).vitals_interval_s == 0
    assert Settings().vitals
    for wrong in (0.001, -1, float("nan"), True, "1", 1e9):
        with pytest.raises(ConfigurationError, match="vitals_interval_s"):
            Settings(vitals_interval_s=wrong)


# -- quality and attributes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reasons", "noted"),
    [
        *((reason, True) for reason in ("sw_power_cap", "hw_slowdown", "sw_thermal_slowdown")),
        *((reason, True) for reason in ("hw_thermal_slowdown", "hw_power_brake_slowdown")),
        *((reason, False) for reason in ("gpu_idle", "applications_clocks_setting", "sync_boost")),
        ("display_clock_setting", False),
    ],
)
def test_a_slowed_clock_is_noted(device, source, reasons, noted):
    """Heat, power and brakes are; rest and settings are not."""
    source.answer = Sighting(a_vitals(throttle=("gpu_idle", reasons)), 0)
    assert one(device).quality == (("throttled",) if noted else ())


def test_unknown_reasons_are_not_no_reasons(device, source):
    """A span whose reasons could not be read has neither the note nor an empty list."""
    source.answer = Sighting(a_vitals(throttle=Missing("unsupported")), 0)
    record = one(device)
    assert record.quality == ()
    assert attributes.THROTTLE_REASONS not in attributes.of_host_span(record)


def test_attributes(device, source):
    """Each by its name; a missing one is left out, and an empty list says that nothing held the clock."""
    one(device)
    found = attributes.of_host_span(one(device))
    assert found[attributes.SM_CLOCK] == 1500
    assert found[attributes.THROTTLE_REASONS] == ()
    assert (found[attributes.POWER], found[attributes.TEMPERATURE]) == (100.0, 40)
    assert found[attributes.HOST_LOAD] == 0.5
    assert isinstance(found[attributes.IDLE_BEFORE], int)
    names = {
        getattr(attributes, name) for name in ("SM_CLOCK", "THROTTLE_REASONS", "POWER", "TEMPERATURE", "HOST_LOAD")
    }
    for answer in (
        Sighting(Missing("stale"), Missing("stale")),
        Sighting(Vitals(**dict.fromkeys((f.name for f in dataclasses.fields(Vitals)), Missing("x"))), 0),
    ):
        source.answer = answer
        assert not names & attributes.of_host_span(one(device)).keys()


# -- NVML -------------------------------------------------------------------------------------------------


def test_without_nvml_the_load_is_still_there(monkeypatch, real):
    """Each value of the GPU says that NVML is missing, with the command that brings it."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    held = with_vitals(real).vitals
    absent = {held.sm_clock_mhz, held.sm_clock_max_mhz, held.throttle, held.power_w, held.temperature_c}
    assert len(absent) == 1
    (reason,) = absent
    assert reason.reason == "no_nvml"
    assert "pip install 'gpu-timed[nvml]'" in reason.detail
    assert isinstance(held.host_load, float)


def test_nvml_that_does_not_start(cards):
    """Without a driver it is missing, with NVML's words."""
    cards.refuses["nvmlInit"] = UNINITIALIZED
    held = nvml.Nvml()
    assert held.absent == held.card(CARD) == Missing("no_nvml", "error 1")
    held.close()
    assert cards.open == 0


def test_a_package_that_only_has_the_name(monkeypatch):
    """Another package called pynvml raises nothing."""
    monkeypatch.setitem(sys.modules, "pynvml", object())
    assert nvml.Nvml().absent.reason == "no_nvml"


def test_a_mig_instance_is_found_by_its_digits_and_tells_what_its_card_tells(monkeypatch):
    """Whatever stands before the digits; what the instance does not answer, its card does."""
    cards = FakeNvml({"MIG-5a": 0, "GPU-card": 1410}, {"MIG-5a": "GPU-card"})
    monkeypatch.setitem(sys.modules, "pynvml", cards)
    for question in ("ClockInfo", "MaxClockInfo", "CurrentClocksEventReasons", "CurrentClocksThrottleReasons"):
        cards.refuses[f"nvmlDeviceGet{question}", "MIG-5a"] = NOT_SUPPORTED
    cards.reasons["GPU-card"] = 0x4
    for name in ("MIG-5a", "GPU-5a"):
        card = nvml.Nvml().card(name)
        assert card.uuid == "MIG-5a"
        reading = card.read()
        assert (reading.sm_clock_mhz, reading.sm_clock_max_mhz) == (1410, 1980)
        assert reading.throttle == ("sw_power_cap",)
        assert reading.power_w == 123.456
    before = len(cards.asked)
    card.read()
    assert len(cards.asked) == before + 4  # the way that answered is kept


def test_a_card_is_never_taken_for_another(cards):
    """A UUID that NVML does not know gives no card, not the first one."""
    found = nvml.Nvml().card("GPU-other")
    assert found.reason == "not_found"


def test_what_has_no_answer_is_unsupported_and_not_asked_again(cards):
    """The rest is read."""
    cards.refuses["nvmlDeviceGetPowerUsage"] = NOT_SUPPORTED
    card = nvml.Nvml().card(CARD)
    reading = card.read()
    assert reading.power_w == Missing("unsupported", "error 3")
    assert (reading.sm_clock_mhz, reading.throttle, reading.temperature_c) == (1500, (), 41)
    card.read()
    assert [question for question, _ in cards.asked].count("nvmlDeviceGetPowerUsage") == 1


def test_older_names_are_tried(cards, monkeypatch):
    """A binding, or a driver, that does not know the event reasons is asked for the throttle reasons."""
    cards.reasons[CARD] = 0x40
    cards.refuses["nvmlDeviceGetCurrentClocksEventReasons"] = 13
    assert nvml.Nvml().card(CARD).read().throttle == ("hw_thermal_slowdown",)
    cards.refuses.clear()
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetCurrentClocksEventReasons")
    assert nvml.Nvml().card(CARD).read().throttle == ("hw_thermal_slowdown",)
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetCurrentClocksThrottleReasons")
    assert nvml.Nvml().card(CARD).read().throttle.reason == "unsupported"


def test_a_failure_is_missing_for_that_reading_only(cards):
    """What answered before, and fails, is asked again: also where the error would have meant that it has no answer."""
    card = nvml.Nvml().card(CARD)
    card.read()
    cards.refuses["nvmlDeviceGetClockInfo"] = NOT_SUPPORTED
    assert card.read().sm_clock_mhz == Missing("nvml_error", "error 3")
    cards.refuses.clear()
    assert card.read().sm_clock_mhz == 1500


def test_a_lost_card_is_given_up_and_counted(cards, real):
    """After five failures in a row it is not asked again; spans go on."""
    with_vitals(real)
    for question in ("ClockInfo", "CurrentClocksEventReasons", "PowerUsage", "Temperature"):
        cards.refuses[f"nvmlDeviceGet{question}"] = GPU_IS_LOST
    until(lambda: current.ledger().snapshot().get("vitals_given_up"))
    asked = len(cards.asked)
    held = with_vitals(real, lambda held: held.sm_clock_mhz == Missing("nvml_error", "NVML failed again and again"))
    assert held.device_ns > 0
    assert len(cards.asked) == asked
    assert current.ledger().snapshot()["vitals_given_up"] == 1


def test_failures_must_come_in_a_row(cards):
    """A card that answers now and then is asked on."""
    card = nvml.Nvml().card(CARD)
    card.read()
    questions = [f"nvmlDeviceGet{name}" for name in ("ClockInfo", "CurrentClocksEventReasons", "PowerUsage")]
    for _ in range(3):
        cards.refuses = dict.fromkeys([*questions, "nvmlDeviceGetTemperature"], GPU_IS_LOST)
        for _ in range(4):
            assert card.read().temperature_c.reason == "nvml_error"
        cards.refuses = dict.fromkeys(questions, GPU_IS_LOST)
        assert card.read().temperature_c == 41
        assert not card.lost


def test_the_reasons_in_words():
    """Every bit by its name; one that nobody knows is not left out."""
    assert nvml.in_words(0) == ()
    assert nvml.in_words(0x1FF) == tuple(nvml.REASONS.values())
    assert nvml.in_words(0x44 | 0x600) == ("sw_power_cap", "hw_thermal_slowdown", "unknown_0x600")


def test_energy_is_read_where_it_is_asked_for(cards):
    """In millijoules, and NVML is closed again."""
    assert nvml.read_energy_mj(CARD) == 5_000
    assert nvml.read_energy_mj("GPU-other").reason == "not_found"
    cards.refuses["nvmlDeviceGetTotalEnergyConsumption"] = NOT_SUPPORTED
    assert nvml.read_energy_mj(CARD).reason == "unsupported"
    assert cards.open == 0


# -- nobody waits -----------------------------------------------------------------------------------------


def test_a_call_that_hangs_keeps_nobody(cards, real):
    """Spans, flush and shutdown end while NVML does not answer; the reading that comes too late is not used."""
    cards.hang = threading.Event()
    until(lambda: one(real) and cards.looks())
    (hung,) = sampler_threads()
    for sync in ("boundary", "deferred"):
        record = one(real, sync=sync)
        assert record.device_ns > 0
        assert record.vitals == Missing("starting")
    assert flush(5).pending == 0
    assert shutdown(5).pending == 0
    assert hung.is_alive()
    cards.hang.set()
    hung.join(PATIENCE_S)
    assert not hung.is_alive()


def test_a_late_answer_is_not_used(cards, real):
    """Nobody knows which moment it shows."""
    cards.hang = threading.Event()
    until(lambda: one(real) and cards.looks())
    time.sleep(0.03)
    cards.hang.set()
    until(lambda: current.ledger().snapshot().get("vitals_late"))
    cards.hang = None
    assert with_vitals(real).vitals.sm_clock_mhz == 1500


def test_without_another_thread_spans_go_on(cards, real, monkeypatch):
    """Where none can be started it is counted and tried again an interval later."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == THREAD:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert one(real).device_ns > 0
    assert current.ledger().snapshot()["vitals_not_started"] >= 1
    monkeypatch.setattr(threading.Thread, "start", start)
    assert with_vitals(real).vitals.sm_clock_mhz == 1500


def test_readings_that_always_fail_end_and_say_so(monkeypatch):
    """Five faults of ours in a row end the thread; they are counted, and records say that it has failed."""

    class Broken:
        def card(self, uuid: str) -> Any:
            raise ValueError("of ours")

        def close(self) -> None:
            pass

    ledger = Ledger()
    sampler = Sampler(ledger, interval_s=0.01, nvml=Broken)
    sampler.at(CARD, 0, 1)
    until(lambda: sampler._ended)
    assert ledger.snapshot() == {"vitals": 5}
    assert sampler.at(CARD, 0, 1).vitals.reason == "internal_fault"
    until(lambda: not sampler_threads())


def test_a_sampler_that_cannot_open_ends():
    """What opening raises is counted once, and nothing is tried again."""

    def fail() -> Any:
        raise ValueError("of ours")

    ledger = Ledger()
    sampler = Sampler(ledger, interval_s=0.01, nvml=fail)
    sampler.at(CARD, 0, 1)
    until(lambda: sampler._ended)
    sampler.at(CARD, 0, 1)
    assert ledger.snapshot() == {"vitals": 1}


def test_it_rests_while_no_spans_come_and_goes_on_with_the_next(cards):
    """An idle service is not polled for ever."""
    sampler = Sampler(Ledger(), interval_s=0.01, rest_after=3)
    try:
        sampler.at(CARD, 0, 1)
        until(lambda: sampler._resting)
        looks = cards.looks()
        time.sleep(0.05)
        assert cards.looks() == looks
        now = time.perf_counter_ns()
        sampler.at(CARD, now, now)
        until(lambda: cards.looks() > looks)
        assert until(lambda: isinstance(sampler.at(CARD, now, time.perf_counter_ns()).vitals, Vitals))
    finally:
        sampler.stop()
    assert not sampler_threads()


def test_resting_it_can_be_stopped(cards):
    """The thread ends, and NVML is closed."""
    sampler = Sampler(Ledger(), interval_s=0.01, rest_after=1)
    sampler.at(CARD, 0, 1)
    until(lambda: sampler._resting)
    sampler.stop()
    until(lambda: not sampler_threads())
    assert cards.open == 0
    sampler.at(CARD, 0, 1)
    assert not sampler_threads()


def test_devices_are_limited():
    """Beyond 64 of them nothing is read, and it is counted."""
    ledger = Ledger()
    sampler = Sampler(ledger, interval_s=60)
    sampler._stopping = True  # no thread
    found = [sampler.at(f"GPU-{number}", 0, 1).vitals.reason for number in range(70)]
    assert found == ["starting"] * 64 + ["overflow"] * 6
    assert ledger.snapshot()["vitals_too_many"] == 6


# -- which reading ----------------------------------------------------------------------------------------


@given(
    times=st.lists(st.integers(0, 300), min_size=1, max_size=10).map(sorted),
    start=st.integers(-50, 350),
    length=st.one_of(st.integers(0, 10), st.integers(0, 200)),
    reach=st.integers(0, 100),
)
def test_the_nearest_reading_or_all_of_the_time(times, start, length, reach):
    """Against the plain way: those inside, else the nearest, else stale."""
    ring = Ring(reach)
    for at in times:
        ring.add(at, a_vitals(taken_ns=at, sm_clock_mhz=2_000 - at))
    found = ring.near(start, start + length)
    inside = [at for at in times if start <= at <= start + length]
    if inside:
        assert found.age_ns == 0
        assert found.vitals.readings == len(inside)
        assert found.vitals.taken_ns == inside[0]
        assert found.vitals.sm_clock_mhz == 2_000 - inside[-1]
        return
    distance = min(start - at if at < start else at - start - length for at in times)
    if distance > reach:
        assert found == Sighting(Missing("stale"), Missing("stale"))
    else:
        assert found.age_ns == distance
        at = found.vitals.taken_ns
        assert (start - at if at < start else at - start - length) == distance


def test_before_the_first_reading():
    """There is none yet, and that is what is said."""
    assert Ring(10).near(0, 5).vitals == Missing("starting")


@given(most=st.integers(2, 40), count=st.integers(1, 300))
def test_the_ring_is_bounded_and_keeps_the_latest(most, count):
    """Never more than its limit, and the last reading is always there."""
    ring = Ring(10, most)
    for at in range(count):
        ring.add(at, a_vitals(taken_ns=at))
        assert len(ring) <= most
        assert ring.near(at, at).vitals.taken_ns == at
    assert len(ring) >= min(count, most // 2)


def test_a_reader_is_not_disturbed_while_readings_are_added():
    """On two threads, with the ring running over again and again."""
    ring = Ring(1_000_000, 8)
    ring.add(0, a_vitals(taken_ns=0))
    done = threading.Event()

    def add() -> None:
        for at in range(1, 20_000):
            ring.add(at, a_vitals(taken_ns=at))
        done.set()

    thread = threading.Thread(target=add)
    thread.start()
    asked = 0
    while not done.is_set():
        assert isinstance(ring.near(asked, asked).vitals, Vitals)
        asked += 7
    thread.join()
    assert asked


def test_several_readings_together():
    """Lowest clock, every reason, highest of the rest; what one could not read, another did."""
    gone = Missing("nvml_error")
    found = together(
        [
            a_vitals(taken_ns=5, sm_clock_mhz=gone, throttle=("gpu_idle",), power_w=50.0, temperature_c=gone),
            a_vitals(taken_ns=6, sm_clock_mhz=1200, throttle=gone, host_load=3.0, temperature_c=gone),
            a_vitals(taken_ns=7, sm_clock_mhz=1700, throttle=("sw_power_cap", "gpu_idle"), process_cpus=9.0),
        ]
    )
    assert (found.taken_ns, found.readings, found.sm_clock_mhz) == (5, 3, 1200)
    assert found.throttle == ("gpu_idle", "sw_power_cap")
    assert (found.power_w, found.temperature_c, found.host_load, found.process_cpus) == (100.0, 40, 3.0, 9.0)
    nothing = together([a_vitals(throttle=gone), a_vitals(throttle=Missing("other"))])
    assert nothing.throttle == gone


# -- the host ---------------------------------------------------------------------------------------------


def test_cpus_by_quota(tmp_path, monkeypatch):
    """The least of affinity and every quota above the process; what cannot be read limits nothing."""
    monkeypatch.setattr(load.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    mine = tmp_path / "cgroup"
    assert load.cpus_allowed(tmp_path, mine) == 8
    mine.write_text("12:cpu:/old\n0::/a/b\n")
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/cpu.max").write_text("max 100000\n")
    assert load.cpus_allowed(tmp_path, mine) == 8
    (tmp_path / "a/cpu.max").write_text("250000 100000\n")
    assert load.cpus_allowed(tmp_path, mine) == 2.5
    (tmp_path / "a/b/cpu.max").write_text("50000 100000\n")
    assert load.cpus_allowed(tmp_path, mine) == 0.5
    (tmp_path / "a/b/cpu.max").write_text("nonsense")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert load.cpus_allowed(tmp_path, mine) == 2.5
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("100000\n")
    assert load.cpus_allowed(tmp_path, mine) == 1


def test_this_process_s_share():
    """CPU time over time, since the look before; the first has none."""
    times = iter([1_000, 2_000, 2_000])
    used = iter([0, 1_500, 1_600])
    held = load.HostLoad(lambda: next(times), lambda: next(used))
    assert held.read().process_cpus == Missing("starting")
    assert held.read().process_cpus == 1.5
    assert held.read().process_cpus == Missing("starting")


def test_no_load_average_is_unsupported(monkeypatch):
    """On a system without one, and where it cannot be had."""

    def fail() -> Any:
        raise OSError

    monkeypatch.setattr(load.os, "getloadavg", fail)
    assert load.load_per_cpu() == Missing("unsupported")
