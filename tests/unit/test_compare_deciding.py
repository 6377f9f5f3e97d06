"""Verdicts: how often they are right under noise as machines have it, and that they do not depend on the order."""

from __future__ import annotations

import math
import random
import statistics
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_noise import Noise, compare, made, two_speeds

from gpu_timed import MissingExtraError
from gpu_timed.analysis import ratios
from gpu_timed.analysis.deciding import FIRST_LOOK, LEVEL, Decider, looks, say
from gpu_timed.analysis.ratios import FEWEST, Interval, interval

CALM = made()
ROUGH = made(spread=0.03, likeness=0.9, drift=0.004, steps=0.005)
JUMPY = two_speeds()
TRIALS = 100


def words(noise: Noise, factor: float, *, calls: int = 9, blocks: int = 200) -> list[str]:
    return [compare(noise, factor, seed, blocks=blocks, calls=calls).say("other").word for seed in range(TRIALS)]


@pytest.mark.parametrize("noise", [CALM, ROUGH, JUMPY], ids=["calm", "rough", "jumpy"])
def test_an_arm_and_itself_are_not_told_apart(noise: Noise) -> None:
    found = words(noise, 1.0)
    assert found.count("faster") + found.count("slower") <= 5
    assert noise is not CALM or found.count("same") >= 90


@pytest.mark.parametrize(("noise", "factor", "word"), [(CALM, 1 / 1.02, "faster"), (ROUGH, 1.02, "slower")])
def test_two_percent_are_found(noise: Noise, factor: float, word: str) -> None:
    assert words(noise, factor).count(word) >= 90


def test_looking_several_times_errs_no_more_often_than_said() -> None:
    """Without the sharing out of errors, one look in twenty would err, and one run in six or so."""
    wrong = 0
    for seed in range(200):
        chance = random.Random(1000 + seed)
        decider = Decider(["one", "other"], "one", most_blocks=128)
        erred = False
        for _ in range(128):
            decider.add({name: math.exp(chance.gauss(0, 0.02)) for name in ("one", "other")})
            if decider.blocks in looks(128):
                found = decider.interval("other")
                assert found is not None
                erred = erred or not found.low <= 1 <= found.high
        wrong += erred
    # 200 runs at 5 %: 10 expected, and 18 or more one time in a hundred.
    assert wrong <= 17


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    chance = random.Random(1)
    held = 0
    for _ in range(300):
        other = [math.exp(chance.gauss(0, 0.01)) for _ in range(20)]
        mine = [1.05 * math.exp(chance.gauss(0, 0.01)) for _ in range(20)]
        found = interval(mine, other, 0.95)
        assert found is not None
        held += found.low <= 1.05 <= found.high
    assert 0.92 <= held / 300 <= 0.99


def test_neighbours_alike_widen_the_interval() -> None:
    """300 means of 20 values of a series in which each resembles the one before: 95 % hold the truth all the same."""
    chance = random.Random(2)
    held = 0
    for _ in range(300):
        near, logs = chance.gauss(0, 0.01), []
        for _ in range(60):
            near = 0.6 * near + 0.8 * chance.gauss(0, 0.01)
            logs.append(near)
        found = interval([math.exp(log) for log in logs], [1.0] * 60, 0.95)
        assert found is not None
        held += found.low <= 1 <= found.high
    assert held / 300 >= 0.9


times = st.lists(st.tuples(st.floats(1e3, 1e9), st.floats(1e3, 1e9)), min_size=FEWEST, max_size=40)


@settings(max_examples=60, deadline=None)
@given(times, st.floats(0.9, 1.1))
def test_exchanging_the_arms_exchanges_the_verdict(pairs: list[tuple[float, float]], near: float) -> None:
    swapped = {"faster": "slower", "slower": "faster", "same": "same", "ambiguous": "ambiguous"}
    for held in (pairs, [(mine, mine * near * (1 + 1e-3 * index)) for index, (mine, _) in enumerate(pairs)]):
        mine, other = [pair[0] for pair in held], [pair[1] for pair in held]
        one, back = interval(mine, other, LEVEL), interval(other, mine, LEVEL)
        assert one is not None
        assert back is not None
        assert back.ratio == pytest.approx(1 / one.ratio)
        assert (back.low, back.high) == pytest.approx((1 / one.high, 1 / one.low))
        assert say(back, len(held)).word == swapped[say(one, len(held)).word]


def test_an_outlier_moves_nothing() -> None:
    chance = random.Random(3)
    other = [math.exp(chance.gauss(0, 0.002)) for _ in range(30)]
    mine = [math.exp(chance.gauss(0, 0.002)) for _ in range(30)]
    calm = interval(mine, other, LEVEL)
    mine[7] *= 50
    mine[20] *= 9
    found = interval(mine, other, LEVEL)
    assert calm is not None
    assert found is not None
    assert found.ratio == pytest.approx(calm.ratio, abs=0.001)
    assert found.half_width < 0.01


def of(ratio: float, low: float, high: float) -> str:
    return say(Interval(ratio, low, high, 50), 50).word


def test_what_is_said_of_an_interval() -> None:
    assert of(1.0, 0.995, 1.005) == "same"
    assert of(1.005, 1.001, 1.009) == "same"  # there is a difference, and nobody would choose by it
    assert of(1.009, 1.001, 1.017) == "ambiguous"
    assert of(1.02, 1.005, 1.035) == "slower"
    assert of(0.98, 0.97, 0.99) == "faster"
    assert of(1.03, 0.999, 1.06) == "ambiguous"
    assert of(0.14, 0.13, 0.15) == "faster"
    assert "7.14 times" in say(Interval(0.14, 0.13, 0.15, 50), 50).reason


def test_a_wide_interval_tells_only_what_is_beyond_it() -> None:
    assert of(85, 9.6, 754) == "slower"
    assert of(1 / 85, 1 / 754, 1 / 9.6) == "faster"
    assert of(2.4, 1.5, 3.6) == "ambiguous"  # wholly above 1, and three times as far at one end as at the other
    assert of(2.4, 1.9, 3.6) == "slower"
    assert of(1 / 2.4, 1 / 3.6, 1 / 1.5) == "ambiguous"
    assert say(Interval(85, 9.6, 754, 20), 20).reason == "it takes 9.6 to 750 times as long"
    said = say(Interval(1.5, 0.7, 3, 20), 20)
    assert (said.reason, said.more) == ("the times of blocks vary too much to tell", None)


def test_how_many_blocks_would_tell_is_said_only_where_it_can_be_guessed() -> None:
    assert say(Interval(1.02, 0.99, 1.05, 20), 20).more is not None
    wide = say(Interval(1.2, 0.97, 1.5, 20), 20)
    assert wide.word == "ambiguous"
    assert wide.more is None
    assert wide.reason.endswith("of more than 1%")
    many = say(Interval(1.009, 0.994, 1.024, 5), 5)
    assert many.more is None
    assert say(Interval(1.009, 1.001, 1.017, 20), 20).more is not None


def test_what_would_be_needed_to_tell() -> None:
    said = say(Interval(1.02, 0.99, 1.05, 50), 50)
    assert said.word == "ambiguous"
    assert said.more is not None
    assert 50 < said.more < 80
    few = say(None, 3)
    assert few.word == "ambiguous"
    assert few.more == 2
    assert few.reason == "there was time for 3 blocks, and an interval takes 5"
    assert say(None, 1).reason == "there was time for 1 block, and an interval takes 5"
    assert say(None, 5).reason == "a time of 0 was read"
    assert say(None, 5).more is None
    # A comparison ends after 2,000 blocks: 1,200 and as many more are not to be had.
    assert say(Interval(1.02, 0.99, 1.05, 1_200), 1_200).reason.endswith("more time would hardly tell, in this noise")


def test_looks_are_few_and_fixed() -> None:
    assert looks(200) == (12, 25, 50, 100, 200)
    assert looks(10) == (10,)
    assert looks(10_000)[-1] == 10_000
    assert len(looks(10_000)) == 6


def test_it_stops_once_it_is_precise_and_not_before() -> None:
    def run(spread: float) -> Decider:
        chance = random.Random(4)
        decider = Decider(["a", "b"], "a", most_blocks=400)
        while not decider.add({name: math.exp(chance.gauss(0, spread)) for name in "ab"}):
            pass
        return decider

    assert run(0.0005).blocks == FIRST_LOOK
    assert run(0.2).blocks == 400
    assert not run(0.2).precise


def test_equal_times_have_an_interval_of_no_width() -> None:
    assert interval([7.0] * 6, [7.0] * 6, LEVEL) == Interval(1.0, 1.0, 1.0, 6)
    assert interval([0.0] * 6, [7.0] * 6, LEVEL) is None


def test_the_noise_is_noise() -> None:
    """What the tests above rest on."""
    factors = made(outliers=0.02)(random.Random(5))
    held = [next(factors) for _ in range(4000)]
    assert max(held) > 2
    assert statistics.correlation(held[:-1], held[1:]) < 0.5  # outliers hide it
    calm = made(outliers=0)(random.Random(5))
    held = [next(calm) for _ in range(4000)]
    assert statistics.correlation(held[:-1], held[1:]) > 0.7


def test_without_scipy_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    ratios._stats.cache_clear()
    try:
        with pytest.raises(MissingExtraError, match=r"pip install 'gpu-timed\[compare\]'"):
            ratios.need_scipy()
    finally:
        ratios._stats.cache_clear()
