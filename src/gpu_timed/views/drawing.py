"""What of a comparison is drawn: few enough points that a page stays small, chosen so that the shape stays true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from gpu_timed.step_timeline import Gap, Kernel, ProfiledSteps, StepTimeline

MOST_DOTS: Final = 400
"""Samples of an arm that are drawn; of more, every n-th by size, so that their distribution stays."""
AROUND: Final = (4, 6)
"""Kernels before and after the gap that a stretch is chosen for, on a wide page."""
AROUND_NARROW: Final = (2, 2)
_MOST_LANES: Final = 4
_BEYOND: Final = 0.01
_MARGIN: Final = 0.08


class Stretch(NamedTuple):
    """A part of a step that is drawn kernel by kernel. Nanoseconds since the host began the step."""

    start_ns: int
    end_ns: int
    kernels: tuple[Kernel, ...]
    gaps: tuple[Gap, ...]
    streams: tuple[int, ...]
    """Which of the streams have a lane, in the order of the lanes."""


def thinned(values: Sequence[int], most: int = MOST_DOTS) -> list[int]:
    """Return at most *most* of *values*, evenly by rank, the smallest and the largest always."""
    held = sorted(values)
    if len(held) <= most:
        return held
    step = (len(held) - 1) / (most - 1)
    return [held[round(index * step)] for index in range(most)]


def quantile(values: Sequence[int], part: float) -> float:
    """Return the value below which *part* of *values* lie, between neighbours in proportion (Hyndman and Fan's type 7).

    Raises:
        IndexError: There are none.
    """
    held = sorted(values)
    at = part * (len(held) - 1)
    low = int(at)
    high = min(low + 1, len(held) - 1)
    return held[low] + (held[high] - held[low]) * (at - low)


def reach(arms: Sequence[Sequence[int]], medians: Sequence[float], *, logarithmic: bool) -> tuple[float, float]:
    """Return where an axis begins and ends that outliers do not crush: the 1st to the 99th percentile of every arm.

    With :data:`_MARGIN` of its length at either end, so that what is hardly beyond is drawn. Begin and end are the same
    where all of it is one point.

    Raises:
        ValueError: There are no arms.
    """
    low = min(*medians, *(quantile(values, _BEYOND) for values in arms))
    high = max(*medians, *(quantile(values, 1 - _BEYOND) for values in arms))
    if logarithmic and low > 0:
        margin = (high / low) ** _MARGIN
        return low / margin, high * margin
    return low - _MARGIN * (high - low), high + _MARGIN * (high - low)


def busy_shares(step: StepTimeline, until_ns: int, bins: int) -> list[float]:
    """Return for each of *bins* equal parts of the time from 0 to *until_ns* which share of it the device worked."""
    width = until_ns / bins
    held = [0.0] * bins
    for start, end in _busy(step):
        first, last = int(start / width), min(int(end / width), bins - 1)
        for index in range(max(0, first), last + 1):
            held[index] += max(0.0, min(end, (index + 1) * width) - max(start, index * width))
    return [min(1.0, busy / width) for busy in held]


def typical_stretch(found: ProfiledSteps, around: tuple[int, int] = AROUND) -> Stretch | None:
    """Return a part of the typical step around a gap as long as the typical one.

    Where most gaps waited for the host it is one of the operator most waited for. None where there are no gaps.
    """
    step = found.typical
    waited = sum(one.gaps for one in found.operators) >= found.gap_count / 2
    most = found.operators[0].operator if found.operators and waited else None
    gaps = [gap for gap in step.gaps if gap.operator == most] or list(step.gaps)
    if not gaps or not isinstance(found.gap_ns, int):
        return None
    typical = found.gap_ns
    # Not at the rim of the step where there is a choice: what is around it is to be seen too.
    middle = step.start_ns + step.span_ns / 2
    gap = min(gaps, key=lambda one: (abs(one.duration_ns - typical) > typical / 10, abs(one.start_ns - middle)))
    index = next(index for index, one in enumerate(step.kernels) if one.start_ns >= gap.end_ns)
    before, after = around
    kernels = step.kernels[max(0, index - before) : index + after]
    start, end = kernels[0].start_ns, max(one.end_ns for one in kernels)
    return Stretch(
        start,
        end,
        kernels,
        tuple(one for one in step.gaps if start <= one.start_ns and one.end_ns <= end),
        tuple(dict.fromkeys(one.stream for one in kernels))[:_MOST_LANES],
    )


def _busy(step: StepTimeline) -> list[tuple[int, int]]:
    """Return the times between the gaps."""
    if not step.kernels:
        return []
    starts = [step.start_ns, *(gap.end_ns for gap in step.gaps)]
    ends = [*(gap.start_ns for gap in step.gaps), step.end_ns]
    return list(zip(starts, ends, strict=True))
