"""The timeline: whatever it says of the distance between two clocks is true, as long as it is told the truth."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_timed.clocks.timeline import RATE_BOUND, WANDER, Timeline

S = 1_000_000_000
MS = 1_000_000
MINUTE = 60 * S
PPM_BOUND = RATE_BOUND * 1e6
ROUNDING_NS = 2


class Truth:
    """Two clocks with a constant rate between them: the host's time of a device stamp, as an exact fraction."""

    def __init__(self, offset_ns: int, rate_ppb: int) -> None:
        self._offset = offset_ns
        self._rate = Fraction(rate_ppb, 10**9)

    def host(self, device_ns: int) -> Fraction:
        return device_ns + self._offset + self._rate * device_ns


class Fact(NamedTuple):
    """One true statement: *early* nanoseconds before the device's *stamp*, or *late* behind its end."""

    kind: str
    stamp: int
    elapsed: int
    early: int
    late: int

    def tell(self, timeline: Timeline, truth: Truth) -> bool:
        """Tell it; returns whether it was believed, having checked what a span says of itself."""
        called = math.floor(truth.host(self.stamp)) - self.early
        seen = math.ceil(truth.host(self.stamp + self.elapsed)) + self.late
        if self.kind == "before":
            return timeline.not_before(self.stamp, called)
        if self.kind == "after":
            return timeline.not_after(self.stamp + self.elapsed, seen)
        host, half, fault = timeline.span(self.stamp, self.elapsed, called, seen)
        assert half >= 0
        assert abs(host - truth.host(self.stamp)) <= half + ROUNDING_NS
        return not fault


offsets = st.integers(-(1 << 55), 1 << 55)
rates = st.integers(-49_900, 49_900)  # parts per thousand million: within RATE_BOUND
slacks = st.one_of(st.integers(0, 50), st.integers(0, 10 * MS))
kinds = st.sampled_from(["before", "after", "span"])


def facts(stamps: st.SearchStrategy[int], *, most: int) -> st.SearchStrategy[list[Fact]]:
    made = st.builds(Fact, kinds, stamps, st.one_of(st.just(0), st.integers(0, 3 * S)), slacks, slacks)
    return st.lists(made, min_size=1, max_size=most)


def anchor(timeline: Timeline, truth: Truth, stamp: int, *, half_ns: int = 4_000) -> bool:
    """Give a fresh pair of tight bounds, as the clocks do once a second."""
    believed = timeline.not_before(stamp, math.floor(truth.host(stamp)) - half_ns)
    believed = timeline.not_after(stamp, math.ceil(truth.host(stamp)) + half_ns) and believed
    timeline.settle()
    return believed


def seen_late(timeline: Timeline, truth: Truth, stamp: int) -> tuple[Fraction, int, bool]:
    """Place an idle span that was looked at seconds later; returns its error, what it states, and its fault."""
    called = math.floor(truth.host(stamp)) - 5 * S
    seen = math.ceil(truth.host(stamp)) + 5 * S
    host, half, fault = timeline.span(stamp, 0, called, seen)
    return abs(host - truth.host(stamp)), half, fault


def wide() -> st.SearchStrategy[int]:
    return st.integers(0, 10 * MINUTE)


# -- truth in, truth out ----------------------------------------------------------------------------------


@given(offset=offsets, rate=rates, told=facts(wide(), most=12))
@settings(max_examples=400, deadline=None)
def test_true_facts_in_any_order_are_believed_and_never_mislead(offset: int, rate: int, told: list[Fact]) -> None:
    """For any offset, any drift within the bound and any order of facts: no fault, and every span placed truly."""
    timeline, truth = Timeline(), Truth(offset, rate)
    for fact in told:
        assert fact.tell(timeline, truth)
    assert timeline.faults == 0


@given(offset=offsets, rate=rates, told=facts(wide(), most=8), asked=wide())
@settings(max_examples=300, deadline=None)
def test_what_was_learned_holds_at_any_other_time(offset: int, rate: int, told: list[Fact], asked: int) -> None:
    """A span that brings no knowledge of its own is placed truly by what other facts said, before or after it."""
    timeline, truth = Timeline(), Truth(offset, rate)
    for fact in told:
        fact.tell(timeline, truth)
    error, half, fault = seen_late(timeline, truth, asked)
    assert error <= half + ROUNDING_NS
    assert not fault


@given(truth=st.builds(Truth, offsets, rates), stamp=wide(), early=slacks, late=slacks, elapsed=st.integers(0, 10 * S))
@settings(deadline=None)
def test_one_span_alone_is_as_narrow_as_its_own_bounds(
    truth: Truth, stamp: int, early: int, late: int, elapsed: int
) -> None:
    """With nothing else known, a span is placed between its call and its end being seen, and no wider."""
    timeline = Timeline()
    called, seen = math.floor(truth.host(stamp)) - early, math.ceil(truth.host(stamp + elapsed)) + late
    host, half, fault = timeline.span(stamp, elapsed, called, seen)
    assert not fault
    assert abs(host - truth.host(stamp)) <= half + ROUNDING_NS
    # Twice the drift: the place may be drawn to one side, so as not to end after it was seen to have ended.
    assert 2 * half <= seen - elapsed - called + 2 * RATE_BOUND * elapsed + 3 * ROUNDING_NS


@pytest.mark.parametrize("rate_ppb", [-49_900, -20_000, 0, 49_900])
@pytest.mark.parametrize("late_ns", [0, 40_000])
def test_a_long_span_alone_is_true_however_early_it_was_called(rate_ppb: int, late_ns: int) -> None:
    """Three seconds of device time on a clock that is off: wherever the middle is chosen, the truth is within half."""
    truth, elapsed = Truth(0, rate_ppb), 3 * S
    for early in range(0, 500_000, 5_000):
        called, seen = math.floor(truth.host(S)) - early, math.ceil(truth.host(S + elapsed)) + late_ns
        host, half, fault = Timeline().span(S, elapsed, called, seen)
        assert not fault
        assert abs(host - truth.host(S)) <= half + ROUNDING_NS


def test_nothing_known_is_not_bounded() -> None:
    """Bounded needs both sides: one fact alone leaves the other side open."""
    timeline = Timeline()
    assert not timeline.bounded
    timeline.not_before(0, 5)
    assert not timeline.bounded
    timeline.not_after(10, 30)
    assert timeline.bounded


# -- contradiction ----------------------------------------------------------------------------------------


@given(offset=offsets, rate=rates, jump=st.integers(20 * MS, S), early=st.booleans())
@settings(deadline=None)
def test_a_contradiction_is_counted_and_recovered_from(offset: int, rate: int, jump: int, early: bool) -> None:
    """A clock that jumped is one fault; from the next facts on everything is true again."""
    timeline, truth = Timeline(), Truth(offset, rate)
    for second in range(1, 30):
        assert anchor(timeline, truth, second * S)
    jumped = Truth(offset + (jump if early else -jump), rate)
    assert not anchor(timeline, jumped, 30 * S)
    assert timeline.faults == 1
    for second in range(31, 60):
        assert anchor(timeline, jumped, second * S)
        error, half, fault = seen_late(timeline, jumped, second * S + S // 2)
        assert (error <= half + ROUNDING_NS, fault) == (True, False)
    assert half < 20_000
    assert timeline.faults == 1


def test_a_span_that_contradicts_the_anchors_says_so() -> None:
    """A span that cannot have been where the anchors put it is flagged, and placed by its own bounds."""
    timeline, truth = Timeline(), Truth(0, 0)
    for second in range(1, 10):
        anchor(timeline, truth, second * S)
    host, half, fault = timeline.span(10 * S, MS, 10 * S + 500_000, 10 * S + 5 * MS)
    assert fault
    assert timeline.faults == 1
    assert host - half >= 10 * S + 500_000 - ROUNDING_NS
    assert host + half <= 10 * S + 5 * MS + ROUNDING_NS


def test_a_span_that_contradicts_itself_says_so() -> None:
    """Ten milliseconds of device time between two host readings five milliseconds apart is a fault, and flagged."""
    timeline = Timeline()
    _, _, fault = timeline.span(0, 10 * MS, 0, 5 * MS)
    assert timeline.faults == 1
    assert fault


# -- the rate of drift ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ppm", [0.0, 3.5, -3.5, 20.0, -45.0])
def test_minutes_of_anchors_teach_the_rate(ppm: float) -> None:
    """After five minutes of +-4 us a second, a pause of 60 s costs tens of microseconds instead of 3 ms, truly."""
    timeline, truth = Timeline(), Truth(123_456_789, round(ppm * 1000))
    for second in range(1, 301):
        assert anchor(timeline, truth, second * S)
    error, half, fault = seen_late(timeline, truth, 360 * S)
    assert not fault
    assert error <= half + ROUNDING_NS
    assert half < 50_000
    assert half < RATE_BOUND * 60 * S / 50
    assert half >= WANDER * 60 * S / 2  # and it does not pretend to know the rate better than it can


def test_without_anchors_a_pause_costs_the_whole_bound() -> None:
    """One anchor says nothing of the rate: 60 s later the position is known to 50 ppm, and no better is claimed."""
    timeline, truth = Timeline(), Truth(0, 49_900)
    anchor(timeline, truth, S)
    error, half, _ = seen_late(timeline, truth, 61 * S)
    assert error <= half + ROUNDING_NS
    assert half == pytest.approx(RATE_BOUND * MINUTE + 4_000, rel=0.01)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_changed_rate_is_noticed_and_learned_anew(sign: int) -> None:
    """When the drift itself changes (NTP, heat) the old rate is dropped, and soon everything is true again."""
    timeline = Timeline()
    host_of = {second: Fraction(second * S) + Fraction(5 * second * S, 10**6) for second in range(201)}
    for second in range(201, 500):
        host_of[second] = host_of[200] + (second - 200) * S * (1 + Fraction(-20 * sign, 10**6))
    errors = []
    for second in range(1, 500):
        true = host_of[second]
        timeline.not_before(second * S, math.floor(true) - 4_000)
        timeline.not_after(second * S, math.ceil(true) + 4_000)
        timeline.settle()
        host, half, _ = timeline.span(second * S, 0, math.floor(true) - S, math.ceil(true) + S)
        errors.append((second, abs(host - true) - half))
    assert [second for second, beyond in errors if second > 205 and beyond > ROUNDING_NS] == []
    assert 1 <= timeline.faults <= 5


class Wandering:
    """A drift of a few ppm that wanders by 0.1 ppm over the minutes, as crystals do."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        self._ppm = dice.uniform(-8, 8)
        self._waves = [(dice.uniform(0, 0.05), dice.uniform(40, 400), dice.uniform(0, math.tau)) for _ in range(2)]
        self._offset = dice.randrange(-(1 << 50), 1 << 50)

    def host(self, device_ns: int) -> int:
        """The integral of the rate, in integers but for the small wander."""
        seconds = device_ns / 1e9
        wander = sum(a * p / math.tau * (1 - math.cos(math.tau * seconds / p + f)) for a, p, f in self._waves)
        return device_ns + self._offset + round(self._ppm * seconds * 1e3 + wander * 1e3)


def live(seed: int, *, spans_a_second: int, end: int = 481 * S, pause: int = 180 * S) -> tuple[int, int, int]:
    """Live through minutes of spans with a pause in them; returns samples, untrue ones, and the widest stated."""
    dice, clocks, timeline = random.Random(seed), Wandering(seed), Timeline()
    samples = untrue = widest = 0
    stamp, pause_at, anchored = S, 120 * S, 0
    while stamp < end:
        stamp += round(dice.uniform(0.5, 1.5) * S / spans_a_second)
        if pause_at <= stamp < pause_at + pause:
            stamp = pause_at + pause
        if stamp - anchored >= S:  # just before it is needed, as the clocks do
            bracket = dice.randrange(5_000, 8_000)
            early = dice.randrange(0, bracket)
            timeline.not_before(stamp, clocks.host(stamp) - early)
            timeline.not_after(stamp, clocks.host(stamp) + bracket - early)
            timeline.settle()
            anchored = stamp
        elapsed = dice.choice([0, 5_000, 300_000, 20 * MS])
        called = clocks.host(stamp) - dice.choice([3_000, 50_000, 5 * MS])
        seen = clocks.host(stamp + elapsed) + dice.choice([5_000, 20 * MS])
        host, half, fault = timeline.span(stamp, elapsed, called, seen)
        samples += 1
        untrue += fault or abs(host - clocks.host(stamp)) > half + ROUNDING_NS
        widest = max(widest, half)
    return samples, untrue, widest


@pytest.mark.parametrize("seed", range(12))
def test_eight_minutes_with_a_pause_are_true_in_every_sample(seed: int) -> None:
    """Eight minutes, a three-minute pause, a wandering drift: the true error is within the stated one every time."""
    samples, untrue, widest = live(seed, spans_a_second=2)
    assert samples > 400
    assert untrue == 0
    assert widest < 100_000


@pytest.mark.parametrize("seed", range(2))
def test_dense_traffic_is_true_in_every_sample(seed: int) -> None:
    """Twenty seconds at 4,000 spans a second, the drift wandering: the true error is within the stated one."""
    _, untrue, _ = live(seed, spans_a_second=4_000, end=21 * S, pause=0)
    assert untrue == 0


@pytest.mark.parametrize("rate_ppb", [3_500, -3_500])
def test_a_learned_rate_holds_under_dense_traffic(rate_ppb: int) -> None:
    """Ten thousand spans a second, with an anchor each second: every one is placed truly, and nothing is a fault."""
    timeline, truth = Timeline(), Truth(10**15, rate_ppb)
    for second in range(1, 121):
        anchor(timeline, truth, second * S)
    wrong = 0
    for number in range(50_000):
        stamp = 120 * S + number * 100_000
        if number % 10_000 == 9_999:
            wrong += not anchor(timeline, truth, stamp)
        host, half, fault = timeline.span(
            stamp, 40_000, math.floor(truth.host(stamp)) - 3_000, math.ceil(truth.host(stamp + 40_000)) + 20 * MS
        )
        wrong += fault or abs(host - truth.host(stamp)) > half + ROUNDING_NS
    assert wrong == 0
    assert timeline.faults == 0


def test_an_unlearned_rate_holds_between_facts_a_few_microseconds_apart() -> None:
    """Spans 5 us apart at 40 ppm, known to 3 us each: a thousand in a row, and every one placed truly."""
    timeline, truth = Timeline(), Truth(0, -40_000)
    wrong = 0
    for number in range(100_000):
        stamp = S + number * 5_000
        host, half, fault = timeline.span(
            stamp, 2_000, math.floor(truth.host(stamp)) - 3_000, math.ceil(truth.host(stamp + 2_000)) + 20 * MS
        )
        wrong += fault or abs(host - truth.host(stamp)) > half + ROUNDING_NS
        if number == 0:
            anchor(timeline, truth, stamp)
    assert wrong == 0


@given(
    offset=offsets,
    rate=rates,
    told=st.lists(st.builds(Fact, kinds, st.integers(0, 20_000), st.just(0), st.just(0), st.just(0)), max_size=60),
)
@settings(max_examples=300, deadline=None, database=None, derandomize=True)
def test_true_facts_close_together_are_believed(offset: int, rate: int, told: list[Fact]) -> None:
    """Exact facts within 20 us of each other never contradict one another by more than they are rounded."""
    timeline, truth = Timeline(), Truth(offset, rate)
    for fact in told:
        assert fact.tell(timeline, truth)
