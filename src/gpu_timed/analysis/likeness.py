"""Whether two arms were measured under the same circumstances: clocks and throttling, as read after each turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from gpu_timed.arms import Turn

FEWEST: Final = 3
"""Readings of each arm, without which nothing is said."""
SHARE: Final = 0.25
"""By what part of the turns throttling may differ. Turns are short, and heat outlasts them: it hits neighbours, too."""
CLOCK: Final = 0.03
"""By what part clocks may differ: an H200 steps by 15 MHz of 1,980, and hovers around the highest under load."""
_NOISE: Final = 3


class Unlike(NamedTuple):
    """How the circumstances of two arms differ."""

    text: str
    """In words; empty where they do not."""
    handicapped: Literal["mine", "other", ""] = ""
    """Which of the two had the worse: if it was the faster all the same, it is."""


def unlike(mine: Sequence[Turn], other: Sequence[Turn]) -> Unlike:
    """Return how the circumstances of two arms differ. What could not be read is no difference."""
    shares = [_slowed(turns) for turns in (mine, other)]
    if shares[0] is not None and shares[1] is not None and abs(shares[0] - shares[1]) >= SHARE:
        return Unlike(
            f"heat, power or a brake held the clocks down in {shares[0]:.0%} of its turns, and in {shares[1]:.0%} of "
            "the other's",
            "mine" if shares[0] > shares[1] else "other",
        )
    clocks = [_clocks(turns) for turns in (mine, other)]
    if min(map(len, clocks)) < FEWEST:
        return Unlike("")
    medians = [statistics.median(held) for held in clocks]
    noise = max(
        statistics.median(abs(clock - median) for clock in held) for held, median in zip(clocks, medians, strict=True)
    )
    apart = abs(medians[0] - medians[1])
    if apart > CLOCK * max(medians) and apart > _NOISE * noise:
        return Unlike(
            f"the clock of the multiprocessors was {medians[0]:,.0f} MHz in its turns, and {medians[1]:,.0f} MHz in "
            "the other's",
            "mine" if medians[0] < medians[1] else "other",
        )
    return Unlike("")


def _slowed(turns: Sequence[Turn]) -> float | None:
    known = [turn.slowed for turn in turns if isinstance(turn.slowed, bool)]
    return sum(known) / len(known) if len(known) >= FEWEST else None


def _clocks(turns: Sequence[Turn]) -> list[int]:
    return [turn.sm_clock_mhz for turn in turns if isinstance(turn.sm_clock_mhz, int)]
