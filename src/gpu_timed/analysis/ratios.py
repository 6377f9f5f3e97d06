"""How many times longer one arm takes than another: the ratio of their times, with its interval.

In each block every arm has its turn, so that what drifts (clocks, heat, the host's load) is the same for both and
falls out of the ratio of their medians. Of the logarithms of these ratios, one for each block:

* The location is the mean with a fifth trimmed off either end: some blocks that were disturbed move nothing.
* Its standard error comes from a bootstrap over blocks (:func:`scipy.stats.bootstrap`), so that arms stay paired: half
  of the middle 68 % of its distribution, which a few resamples made of outliers do not stretch. It is widened
  where neighbouring blocks resemble each other: by ``sqrt((1 + r) / (1 - r))`` for a correlation *r* at lag 1, as the
  mean of a long autoregressive series of first order is that much less certain.
* The interval is that error times Student's t with ``h - 1`` degrees of freedom, *h* being what is left of the
  trimming (Tukey and McLaughlin, Sankhya A 25, 1963). Percentiles of a bootstrap would be too narrow: at the level that
  looking repeatedly takes, their tails lie beyond what a dozen blocks can show.

Exchanging the arms gives the inverse of everything, to the last bit but one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from gpu_timed.errors import missing_extra

TRIMMED: Final = 0.2
"""Part that is trimmed off either end."""
RESAMPLES: Final = 1_000
_SEED: Final = 20_240_607
"""Of the resampling: any will do, always the same one, so that a comparison can be repeated from its samples."""
_ONE_SIGMA: Final = (15.866, 84.134)
_MOST_CORRELATED: Final = 0.9
FEWEST: Final = 5
"""Blocks, without which there is no interval: with a fifth trimmed off either end, three are left."""


class Interval(NamedTuple):
    """A ratio of times, and within what it lies. All three are greater than 0; 1 means equally long."""

    ratio: float
    low: float
    high: float
    blocks: int

    @property
    def half_width(self) -> float:
        """Half its width as a logarithm, which for small ones is as a part of the ratio."""
        return math.log(self.high / self.low) / 2

    @property
    def inverse(self) -> Interval:
        """The same with the arms exchanged."""
        return Interval(1 / self.ratio, 1 / self.high, 1 / self.low, self.blocks)


@functools.cache
def _stats() -> Any:
    try:
        return importlib.import_module("scipy.stats")
    except ImportError as error:
        raise missing_extra("compare()", "scipy", "compare") from error


def need_scipy() -> None:
    """Find out at once whether SciPy is there, not after the measuring.

    Raises:
        MissingExtraError: It is not installed.
    """
    _stats()


def interval(times: Sequence[float], against: Sequence[float], level: float) -> Interval | None:
    """Return the ratio of *times* to those *against* which they are held, one of each for each block.

    Args:
        times: Medians of an arm's times, by block; greater than 0.
        against: Those of the other arm, in the same blocks.
        level: Of the interval, such as 0.95.

    Returns:
        None where there are fewer than :data:`FEWEST` blocks, or a time is 0.

    Raises:
        MissingExtraError: SciPy is not installed.
    """
    count = len(times)
    if count < FEWEST or min(times) <= 0 or min(against) <= 0:
        return None
    logs = [math.log(mine) - math.log(other) for mine, other in zip(times, against, strict=True)]
    if math.fsum(logs) < 0:  # one of the two orders is worked out, the other is its inverse
        found = _of([-log for log in logs], level)
        return found.inverse
    return _of(logs, level)


def _of(logs: list[float], level: float) -> Interval:
    stats = _stats()
    centre = float(stats.trim_mean(logs, TRIMMED))
    error = 0.0
    if max(logs) > min(logs):
        found = stats.bootstrap(
            (logs,),
            functools.partial(stats.trim_mean, proportiontocut=TRIMMED),
            n_resamples=RESAMPLES,
            vectorized=True,
            method="percentile",
            **{_generator_argument(stats): _SEED},
        )
        low, high = stats.scoreatpercentile(found.bootstrap_distribution, _ONE_SIGMA)
        error = float(high - low) / 2 * _widening(logs)
    left = len(logs) - 2 * math.floor(TRIMMED * len(logs))
    half = float(stats.t.ppf((1 + level) / 2, left - 1)) * error
    return Interval(math.exp(centre), math.exp(centre - half), math.exp(centre + half), len(logs))


@functools.cache
def _generator_argument(stats: Any) -> str:
    """Return what SciPy calls the source of random numbers: ``rng`` from 1.15 on, ``random_state`` before."""
    return "rng" if "rng" in inspect.signature(stats.bootstrap).parameters else "random_state"


def _widening(logs: list[float]) -> float:
    """Return by what the standard error grows as neighbouring blocks resemble each other; 1 where they do not."""
    ordered = sorted(logs)
    cut = math.floor(TRIMMED / 2 * len(ordered))
    low, high = ordered[cut], ordered[-1 - cut]
    held = [min(high, max(low, log)) for log in logs]  # one outlier is no drift
    mean = math.fsum(held) / len(held)
    off = [log - mean for log in held]
    square = math.fsum(one * one for one in off)
    if square <= 0:
        return 1.0
    like = math.fsum(one * other for one, other in itertools.pairwise(off)) / square
    like = min(_MOST_CORRELATED, max(0.0, like))
    return math.sqrt((1 + like) / (1 - like))
