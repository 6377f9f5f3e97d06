"""What the self-test holds against a span: pure functions over numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_timed.analysis.judging import (
    allowed_outside,
    is_inside,
    is_placed,
    judge,
    placement_error,
    pool,
    quantile,
    spread,
    unlikely,
)
from gpu_timed.analysis.placing import DRIFT, Bracket, anchor
from gpu_timed.record import Missing
from gpu_timed.trials import Instrument, Observation, Row, worst

FLOOR = 1_300
EXACT = Instrument(floor_ns=FLOOR, tick_ns=0)


def span(**changes: Any) -> Observation:
    """A span of 20 µs that is right, and holds no gap."""
    values: dict[str, Any] = {
        "true_ns": 20_000,
        "device_ns": 20_500,
        "device_min_ns": 20_500,
        "uncertainty_ns": 4_000,
        "gaps": "no",
        "lead_ns": 300,
        "tail_ns": 200,
        "anchor_ns": 1_000,
    }
    return Observation(**{**values, **changes})


def judged(*spans: Observation, instrument: Instrument = EXACT) -> Row:
    """Judge them as one row."""
    return judge("queued", "boundary", 20_000, spans, instrument)


# -- the interval -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("true", "inside"),
    [
        (10_000 - 4_000 - FLOOR, True),
        (10_000 - 4_000 - FLOOR - 1, False),
        (30_000 + FLOOR, True),
        (30_000 + FLOOR + 1, False),
        (20_000, True),
    ],
)
def test_the_truth_may_lie_outside_by_floor_and_uncertainty(true, inside):
    """Below by uncertainty and floor, above by the floor alone: ``device_ns`` does not depend on the place."""
    held = span(true_ns=true, device_ns=30_000, device_min_ns=10_000)
    assert is_inside(held, EXACT) is inside


def test_a_step_of_the_timer_belongs_to_the_truth():
    """A truth that is known to 100 ns may lie outside by as much."""
    held = span(true_ns=30_000 + FLOOR + 100, device_ns=30_000)
    assert not is_inside(held, Instrument(floor_ns=FLOOR, tick_ns=99))
    assert is_inside(held, Instrument(floor_ns=FLOOR, tick_ns=100))


@pytest.mark.parametrize("name", ["device_ns", "device_min_ns", "uncertainty_ns"])
def test_a_span_without_a_number_is_never_inside(name):
    """What is missing holds no truth."""
    assert not is_inside(span(**{name: Missing("pending")}), EXACT)


# -- how many may break a promise -------------------------------------------------------------------------


@pytest.mark.parametrize(("spans", "allowed"), [(1, 1), (6, 1), (100, 1), (199, 1), (200, 2), (1_000, 10)])
def test_one_in_a_hundred_may_be_outside_and_one_always(spans, allowed):
    """99 % of a regime must keep a promise; one span is always forgiven."""
    assert allowed_outside(spans) == allowed


@pytest.mark.parametrize("spans", [1, 6, 12, 50, 200, 1_000])
def test_a_row_fails_where_chance_would_do_so_once_in_a_thousand_times(spans):
    """One breach more than is allowed is unlikely among spans of which 99 % keep the promise; as many are not."""

    def tail(least: int) -> float:
        return sum(math.comb(spans, k) * 0.01**k * 0.99 ** (spans - k) for k in range(least, spans + 1))

    most = unlikely(spans)
    assert tail(most + 1) < 0.001
    assert most == 1 or tail(most) >= 0.001


@pytest.mark.parametrize(("spans", "most"), [(1, 1), (6, 2), (12, 2), (50, 4), (200, 8)])
def test_how_many_that_is(spans, most):
    """In figures."""
    assert unlikely(spans) == most


def test_a_regime_fails_with_one_span_more_than_may_be_outside():
    """Of 200 spans two may be outside, and three not; the row says how many it was."""
    wrong = span(true_ns=50_000)
    row = pool("queued", "boundary", [*[span()] * 198, *[wrong] * 2], EXACT)
    assert (row.verdict, row.values["share_inside"], row.duration_ns) == ("ok", 0.99, None)
    row = pool("queued", "boundary", [*[span()] * 197, *[wrong] * 3], EXACT)
    assert row.verdict == "fail"
    assert row.text.startswith("197 of 200 spans hold the truth")
    assert pool("queued", "boundary", [], EXACT).verdict == "skipped"


def test_a_row_of_one_duration_forgives_what_chance_may_do():
    """Of 200 spans eight may be outside, nine not: the regime as a whole is held to 99 %."""
    wrong = span(true_ns=50_000)
    assert judged(*[span()] * 192, *[wrong] * 8).verdict == "ok"
    assert judged(*[span()] * 191, *[wrong] * 9).verdict == "fail"


def test_a_truth_that_is_known_to_a_part_of_itself_only_is_held_against_so_much_less():
    """Kernels that do not time themselves: five per cent of 20 µs is one microsecond."""
    calibrated = Instrument(floor_ns=FLOOR, tick_ns=0, doubt=0.05)
    held = [span(true_ns=20_000, device_ns=24_900, device_min_ns=20_900)] * 5
    assert judged(*held).check("exact").verdict == "fail"
    assert judged(*held, instrument=calibrated).check("exact").verdict == "ok"
    assert is_inside(span(true_ns=30_000, device_ns=27_200), calibrated)
    assert not is_inside(span(true_ns=30_000, device_ns=27_199), calibrated)


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        ("measured", {"device_ns": Missing("lost"), "reason": "lost"}),
        ("place", {"right_place": False}),
        ("interval", {"true_ns": 90_000}),
        ("exact", {"device_ns": 23_901, "device_min_ns": 20_000}),
        ("exact", {"true_ns": 21_801}),
        ("placement", {"lead_ns": -6_301}),
        ("placement", {"tail_ns": -6_301}),
        ("placement", {"lead_ns": 6_301}),
        ("placement", {"tail_ns": 6_301}),
        ("order", {"fault": True}),
    ],
)
def test_each_check_is_about_its_own_fault(check, changes):
    """A row of right spans passes all checks; each fault fails its own, just beyond what is allowed."""
    assert {held.verdict for held in judged(*[span()] * 10).checks} == {"ok"}
    row = judged(*[span(**changes)] * 10)
    assert row.check(check).verdict == "fail"
    assert row.verdict == "fail"


def test_a_device_time_that_is_missing_says_why():
    """The reasons are counted in the row's words."""
    lost = span(device_ns=Missing("lost"), reason="lost")
    assert "6 of 10 spans have a device time (lost: 4)" in judged(*[span()] * 6, *[lost] * 4).text


# -- exact ------------------------------------------------------------------------------------------------


def test_exactness_is_about_spans_that_say_no_gap_is_included():
    """Others are not held to it; with too few of the first there is no bias to be told."""
    gappy = span(gaps="yes", device_ns=60_000, device_min_ns=10_000)
    row = judged(*[gappy] * 8, span(), span())
    assert (row.check("exact").verdict, row.values["bias_ns"]) == ("skipped", None)
    row = judged(*[gappy] * 7, *[span()] * 3)
    assert (row.check("exact").verdict, row.values["bias_ns"], row.values["exact_spans"]) == ("ok", 500, 3)
    assert row.values["excess_ns"] == 40_000


def test_what_a_kernel_cannot_see_of_itself_is_allowed():
    """Starting and ending a kernel is the device's work and outside its stamps: an exact span may hold it."""
    held = [span(device_ns=24_600, device_min_ns=20_000)] * 5
    assert judged(*held).check("exact").verdict == "fail"
    assert judged(*held, instrument=Instrument(tick_ns=0, turnaround_ns=2_000)).check("exact").verdict == "ok"
    assert judged(*held, instrument=Instrument(tick_ns=0, turnaround_ns=1_999)).check("exact").verdict == "fail"


# -- placement --------------------------------------------------------------------------------------------


def test_a_span_with_a_gap_may_begin_early_and_end_late():
    """The pair holds the gap, so the kernel may lie anywhere in it; it may not stick out."""
    assert placement_error(span(gaps="unknown", lead_ns=50_000, tail_ns=9_000)) == 0
    assert placement_error(span(gaps="no", lead_ns=50_000, tail_ns=9_000)) == 50_000
    assert placement_error(span(gaps="unknown", lead_ns=-3, tail_ns=-7)) == 7
    assert placement_error(span(lead_ns=None)) is None
    assert not is_placed(span(lead_ns=None), EXACT)


def test_a_placement_nobody_can_know_is_skipped_with_a_reason():
    """Without stamps there is no kernel to place."""
    check = judged(*[span(lead_ns=None, tail_ns=None)] * 5).check("placement")
    assert check.verdict == "skipped"
    assert "not known" in check.text


def test_brackets_bound_the_distance_of_two_clocks():
    """A kernel begins after its launch and ends before it is seen: the tightest of both sides count."""
    wide, early, late = (
        Bracket(1_000, 500, 600, 9_000),
        Bracket(2_000, 1_100, 1_200, 8_000),
        Bracket(3_000, 2_500, 2_600, 3_700),
    )
    found = anchor([wide, early, late])
    drift = 1  # of 2.7 µs
    assert found == ((900 - drift + 1_100 + drift) // 2, 101)
    assert anchor([]) is None


def test_brackets_that_contradict_each_other_say_nothing():
    """A timer that was moved meanwhile gives no anchor."""
    assert anchor([Bracket(1_000, 0, 100, 1_200), Bracket(2_000, 0, 100, 2_200)]) is None


@given(
    st.integers(-(10**15), 10**15),
    st.lists(st.tuples(st.integers(0, 10**5), st.integers(0, 10**5), st.integers(0, 10**5)), min_size=1, max_size=8),
    st.floats(-DRIFT / 2, DRIFT / 2),
)
def test_an_anchor_is_true_within_what_it_says(offset, delays, rate):
    """Whatever launches and looks took, and though the clocks drift: every kernel is placed within the half-width."""
    brackets, host = [], 0
    for before, lasted, after in delays:
        begin = host + before
        stamps = [round((moment - offset) * 1 + rate * moment) for moment in (begin, begin + lasted)]
        brackets.append(Bracket(host, *stamps, begin + lasted + after))
        host = begin + lasted + after + 1_000
    found = anchor(brackets)
    assert found is not None
    moment = 0
    for (before, lasted, after), bracket in zip(delays, brackets, strict=True):
        true = moment + before
        assert abs(bracket.begin_ns + found.offset_ns - true) <= found.half_ns + 2
        moment = true + lasted + after + 1_000


# -- small things -----------------------------------------------------------------------------------------


def test_quantiles_are_values_that_were_there():
    """The least value that so many do not exceed; the spread is the middle nine tenths."""
    values = list(range(1, 101))
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile([7], 0.05)) == (50, 99, 7)
    assert spread(values) == 90
    assert spread([3]) == 0


def test_a_row_without_spans_is_an_error():
    """Nothing measured is nothing proved."""
    assert judge("eager", "boundary", 5_000, [], EXACT).verdict == "error"


def test_the_worst_verdict_counts():
    """An error is worse than a failure; what was only shown or skipped is no pass."""
    order = ["info", "skipped", "ok", "fail", "error"]
    for one, other in itertools.combinations(order, 2):
        assert worst([one, other]) == other
    assert worst([]) == "info"
