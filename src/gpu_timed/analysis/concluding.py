"""The verdict of each arm: none where it would be about something else than what was asked."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from gpu_timed.analysis.deciding import Decider
from gpu_timed.analysis.likeness import unlike
from gpu_timed.analysis.ratios import FEWEST
from gpu_timed.arms import Arm, Quantity, Verdict
from gpu_timed.option_names import called, given
from gpu_timed.record import NOT_SET, Missing

LONGEST_S: Final = 3_600
"""The most that blocks may be given, in seconds: an hour."""
_DRAWS: Final = "; it draws random numbers, which modes may draw in another order: {} says not to compare them"
_ALL_THE_SAME: Final = {("faster", "mine"), ("slower", "other")}
"""Words that stand though circumstances differed: the one that had the worse was the faster."""


class Time(NamedTuple):
    """The time for the blocks, in seconds."""

    given_s: float
    """What there was."""
    spent_s: float
    """What they took: a little more, where the last one had begun."""


def conclude(
    arm: Arm,
    baseline: Arm,
    decider: Decider | None,
    *,
    quantity: Quantity,
    draws: bool = False,
    compared: bool = True,
    time: Time | None = None,
) -> Verdict:
    """Return the verdict of *arm* against *baseline*.

    Args:
        arm: With samples, or with the reason why there are none.
        baseline: The same of what it is held against.
        decider: Holds the blocks; None where nothing was measured.
        quantity: Which time is compared.
        draws: Whether the function draws random numbers.
        compared: Whether outputs that are not known to agree stand in the way.
        time: What the blocks were given, to say how much more would tell; None says nothing of it.
    """
    why_not = _why_not(arm, baseline, draws=draws, compared=compared)
    if decider is None:
        why_not = why_not or "nothing was measured"
        return Verdict(arm=arm.name, against=baseline.name, word=None, reason=why_not, quantity=quantity)
    found = decider.interval(arm.name) if _measured(arm) and _measured(baseline) else None
    said = decider.say(arm.name) if not why_not else None
    if said is not None and decider is not None and time is not None and said.more is not None:
        said = said._replace(reason=f"{said.reason}; {_advice(said.more, decider.blocks, time)}")
    if said is not None:
        apart = unlike(arm.turns, baseline.turns)
        if apart.text and (said.word, apart.handicapped) in _ALL_THE_SAME:
            said = said._replace(reason=f"{said.reason}, although {apart.text}")
        elif apart.text:
            said, why_not = None, apart.text
    return Verdict(
        arm=arm.name,
        against=baseline.name,
        word=None if said is None else said.word,
        reason=why_not if said is None else said.reason,
        quantity=quantity,
        ratio=NOT_SET if found is None else found.ratio,
        low=NOT_SET if found is None else found.low,
        high=NOT_SET if found is None else found.high,
        level=decider.level,
        blocks=decider.blocks,
        more=NOT_SET if said is None or said.more is None else said.more,
    )


def _advice(more: int, blocks: int, time: Time) -> str:
    """Return what time would do for *more* blocks than the *blocks* that there are: ambiguous is what ran out of it."""
    wanted_s = max(time.given_s, time.spent_s) * (blocks + more) / max(1, blocks)
    option = called("budget_s")
    if wanted_s > LONGEST_S:
        return f"it would take longer than {option} can be ({LONGEST_S:g} s)"
    how = "at least" if blocks < FEWEST else "about"
    return f"raise {option} (now {time.given_s:g}) to {how} {_rounded_up(wanted_s)} s"


def _rounded_up(value: float) -> str:
    """Return two digits, and no exponent."""
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{float(f'{math.ceil(value / step) * step:.3g}'):g}"


def _measured(arm: Arm) -> bool:
    return not arm.refused and len(arm.samples) > 0


def _why_not(arm: Arm, baseline: Arm, *, draws: bool, compared: bool) -> str:
    if baseline.refused:
        return f"{baseline.name} was not measured: {baseline.refused}"
    if arm.refused:
        return arm.refused
    for one in (arm, baseline):
        if one.strayed:
            return f"{'' if one is arm else one.name + ': '}{one.strayed}"
        if not one.honoured:
            whose = "it" if one is arm else one.name
            return f"{whose} was asked to run as {one.mode} and ran as {one.ran}: {one.reason or 'nobody knows why'}"
    if compared and not isinstance(baseline.agreement, Missing) and not baseline.agreement.equal:
        return f"the outputs of {baseline.name} did not stay the same: {baseline.agreement.text}"
    if compared and not isinstance(arm.agreement, Missing) and not arm.agreement.equal:
        return f"its outputs differ: {arm.agreement.text}{_DRAWS.format(given('outputs', 'ignore')) if draws else ''}"
    return ""
