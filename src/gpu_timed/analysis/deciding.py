"""When there are enough blocks, and what may be said of two arms then.

A difference of less than :data:`REGION` is none: nobody chooses a mode for it, and the placing of memory alone makes
as much. With the interval of the ratio:

``same``       it lies wholly within that region
``slower``     it lies wholly above 1, and the ratio itself beyond the region; ``faster`` likewise below. One that is
               wider than :data:`WIDE` must lie beyond that factor as a whole
``ambiguous``  anything else: there is a reason, and a guess how many blocks would tell

Looking at the figures again and again until they please errs more often than any single look. So the looks are few and
fixed beforehand (after a half, a quarter … of the blocks that there is time for), and their errors are shared out
between them (Bonferroni): all of them together err as often as :data:`LEVEL` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from gpu_timed.analysis.ratios import FEWEST, Interval, interval
from gpu_timed.arms import WIDE, Word, counted

LEVEL: Final = 0.95
"""How often all looks together are right about one arm."""
REGION: Final = 0.01
"""Differences up to this part of the time are none."""
PRECISION: Final = 0.005
"""Half-width of the interval, as a part of the ratio, at which measuring stops."""
FIRST_LOOK: Final = 12
"""Blocks before the first look."""
MOST_LOOKS: Final = 6
MOST_BLOCKS: Final = 2_000
BEYOND_DOUBT: Final = 10 * REGION
"""Where arms differ by more than this, an interval that is :data:`CLEAR` times as wide will do."""
CLEAR: Final = 2
_NEAREST: Final = REGION / 10
_GUESSABLE: Final = 0.2
"""Half-width of the interval up to which it can be guessed how many blocks would tell."""
_MOST_MORE: Final = 100
"""More than so many times the blocks there are is no advice."""


class Said(NamedTuple):
    """What may be said of a ratio."""

    word: Word
    reason: str
    more: int | None = None
    """Blocks that it would take beyond those there are, about; None where none are wanted or nobody can tell."""


def say(found: Interval | None, blocks: int, *, region: float = REGION) -> Said:
    """Return the word for an interval; *blocks* is how many there were, where there is none."""
    if found is None:
        if blocks >= FEWEST:
            return Said("ambiguous", "a time of 0 was read")
        words = f"there was time for {counted(blocks, 'block')}, and an interval takes {FEWEST}"
        return Said("ambiguous", words, FEWEST - blocks)
    edge = 1 + region
    shown = f"{_percent(found.low)} to {_percent(found.high)}"
    if found.low >= 1 / edge and found.high <= edge:
        return Said("same", f"the difference is {shown}, and up to {region:.0%} is none")
    far = WIDE if found.high > WIDE * found.low else 1.0
    if found.low > far and found.ratio >= edge:
        return Said("slower", f"it takes {_times(found)} as long")
    if found.high < 1 / far and found.ratio <= 1 / edge:
        return Said("faster", f"the other takes {_times(found.inverse)} as long")
    if far > 1:
        return Said("ambiguous", "the times of blocks vary too much to tell")
    distance = abs(math.log(found.ratio))
    wanted = distance if distance >= math.log(edge) else math.log(edge) - distance
    grow = (found.half_width / max(_NEAREST, wanted)) ** 2
    more = math.ceil(found.blocks * max(0.0, grow - 1)) or 1
    if found.low > 1 or found.high < 1:
        words = f"it differs by {shown}: it is not known whether that is more than {region:.0%}"
    else:
        words = f"it differs by {shown}: it is not known whether there is a difference of more than {region:.0%}"
    if found.blocks + more > MOST_BLOCKS:
        return Said("ambiguous", f"{words}; more time would hardly tell, in this noise")
    if found.half_width > _GUESSABLE or more >= _MOST_MORE * found.blocks:
        return Said("ambiguous", words)
    return Said("ambiguous", words, more)


def looks(most_blocks: int) -> tuple[int, ...]:
    """Return after how many blocks to look, the last time after *most_blocks*."""
    found = {most_blocks}
    while len(found) < MOST_LOOKS and (half := min(found) // 2) >= FIRST_LOOK:
        found.add(half)
    return tuple(sorted(found))


class Decider:
    """Takes the blocks one after the other, and says when there are enough. The same for live and for recorded ones.

    Args:
        arms: Names of all arms.
        baseline: The one that the others are held against.
        most_blocks: Blocks that there is time for.
        level: How often all looks together are right about one arm.
        precision: Half-width of the interval at which there are enough.
    """

    def __init__(
        self,
        arms: Sequence[str],
        baseline: str,
        *,
        most_blocks: int,
        level: float = LEVEL,
        precision: float = PRECISION,
    ) -> None:
        self.baseline = baseline
        self.level = level
        self.precision = precision
        self.most_blocks = max(1, min(MOST_BLOCKS, most_blocks))
        self._looks = looks(self.most_blocks)
        self._each_level = 1 - (1 - level) / len(self._looks)
        self._times: dict[str, list[float]] = {name: [] for name in arms}

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return len(self._times[self.baseline])

    def add(self, medians: Mapping[str, float]) -> bool:
        """Take one block, the median time of each arm in it; returns whether there are enough now."""
        for name, times in self._times.items():
            times.append(medians[name])
        if self.blocks >= self.most_blocks:
            return True
        return self.blocks in self._looks and all(map(self._enough, self._others))

    def drop(self, name: str) -> None:
        """Leave arm *name* out from now on. Without the baseline there are no further blocks."""
        if name != self.baseline:
            self._times.pop(name, None)

    def interval(self, name: str) -> Interval | None:
        """Return the interval of the ratio of arm *name* to the baseline; None where there are too few blocks."""
        return interval(self._times[name], self._times[self.baseline], self._each_level)

    def say(self, name: str) -> Said:
        """Return what may be said of arm *name*."""
        return say(self.interval(name), self.blocks)

    @property
    def precise(self) -> bool:
        """Whether all intervals are as narrow as they were asked to be."""
        return all(map(self._enough, self._others))

    @property
    def widest(self) -> float:
        """The largest half-width of all intervals, as a part of the ratio; 0 where there is none."""
        found = [self.interval(name) for name in self._others]
        return max((one.half_width for one in found if one is not None), default=0.0)

    @property
    def alone(self) -> bool:
        """Whether there is no arm beside the baseline."""
        return not self._others

    @property
    def _others(self) -> list[str]:
        return [name for name in self._times if name != self.baseline]

    def _enough(self, name: str) -> bool:
        found = self.interval(name)
        if found is None or say(found, self.blocks).word == "ambiguous":
            return False
        clear = abs(math.log(found.ratio)) > BEYOND_DOUBT
        return found.half_width <= self.precision * (CLEAR if clear else 1)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2g} %" if abs(ratio - 1) < 0.1 else f"{100 * (ratio - 1):+.0f} %"  # noqa: PLR2004


def _times(found: Interval) -> str:
    """Return the ratio and its interval; of one that is wide the interval alone."""
    if found.high > WIDE * found.low:
        low, high = (f"{float(f'{one:.2g}'):g}" for one in (found.low, found.high))  # without an exponent
        return f"{low} to {high} times"
    digits = 4 if found.high < 2 else 3  # noqa: PLR2004
    return f"{found.ratio:.{digits}g} times ({found.low:.{digits}g} to {found.high:.{digits}g})"
