"""Finds a kernel of known duration that works here, and learns how good its timer is.

Triton goes first, since it comes with torch; then CuPy, Numba, and torch's own sleep, which stamps nothing and is
known from a calibration only. Each is tried before it is used: what does not run for as long as it says is left out.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gpu_timed.measure.rig import Kernel, NotTestable, Rig
from gpu_timed.trials import FLOOR_NS, Instrument, Stamp

TICKS: Final = 20
"""A kernel that lasts fewer steps of the timer than this cannot be timed by it."""
CALIBRATED: Final = 0.05
"""How far the clock of the multiprocessors may have moved since a calibration, as a part of itself."""
_TRIED_NS: Final = 1_000_000
_ROW: Final = 16
_ROW_NS: Final = 5_000
_BEFORE_ROW_NS: Final = 4_000_000
"""Work in front of the row: more than queueing it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A rig that works, and why others before it did not."""

    rig: Rig
    kernel: str
    refused: dict[str, str]
    stamped: bool = True
    """Whether the kernel stamps its begin and end."""


def find(candidates: Sequence[tuple[str, Callable[[], Kernel]]], make_rig: Callable[[Kernel], Rig]) -> Found:
    """Return a rig with the first of *candidates* (name, and what makes it) that proves itself.

    Raises:
        NotTestable: None did; the message says of each why.
    """
    refused: dict[str, str] = {}
    for name, make in candidates:
        try:
            kernel = make()
            rig = make_rig(kernel)
            prove(rig)
        except Exception as error:  # noqa: BLE001 - not installed, does not compile, does not run: the next, then
            refused[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        else:
            return Found(rig=rig, kernel=name, refused=refused, stamped=getattr(kernel, "stamped", True))
    raise NotTestable("; ".join(f"{name}: {why}" for name, why in refused.items()) or "no kernel was there to try")


def prove(rig: Rig) -> None:
    """Run two kernels of a millisecond.

    Raises:
        NotTestable: One of them did not last as long, by itself.
    """
    rig.settle()
    rig.stamps()
    for _ in range(2):
        rig.launch(_TRIED_NS)
    for stamp in rig.stamps():  # of a kernel that does not time itself this is what was asked, and tells nothing
        if not _TRIED_NS <= stamp.true_ns < 1.5 * _TRIED_NS:
            raise NotTestable(f"a kernel of {_TRIED_NS:,} ns says that it ran for {stamp.true_ns:,} ns")


def turnaround(rig: Rig) -> int:
    """Return the median time from the end of a kernel to the begin of one queued right behind it, in nanoseconds.

    0 of kernels that write no stamps.
    """
    rig.settle()
    rig.stamps()
    rig.occupy(_BEFORE_ROW_NS)
    for _ in range(_ROW):
        rig.launch(_ROW_NS)
    stamps: list[Stamp] = list(rig.stamps())
    gaps = [
        after.begin_ns - before.end_ns
        for before, after in itertools.pairwise(stamps)
        if after.begin_ns is not None and before.end_ns is not None
    ]
    return max(0, round(statistics.median(gaps))) if gaps else 0


def smallest_step(reads: Sequence[int]) -> int | None:
    """Return the smallest step between two *reads* of a timer, one after the other; None where it never moved."""
    steps = [after - before for before, after in itertools.pairwise(reads) if after > before]
    return min(steps, default=None)


def instrument(*, tick_ns: int | None, turnaround_ns: int, cycles: bool, floor_ns: int | None = None) -> Instrument:
    """Return what the truth is good for.

    Args:
        tick_ns: The smallest step of the timer; None where kernels have none, and are as long as was calibrated.
        turnaround_ns: As :func:`turnaround` gives it.
        cycles: Whether kernels that are too short for the timer are known by the multiprocessor's cycles.
        floor_ns: What an empty pair of marks was measured to read at the least on this device, if it was. More than
            :data:`~gpu_timed.trials.FLOOR_NS` is not allowed for.
    """
    floor = FLOOR_NS if floor_ns is None else min(floor_ns, FLOOR_NS)
    if tick_ns is None:
        return Instrument(floor_ns=floor, turnaround_ns=turnaround_ns, doubt=CALIBRATED)
    least = 0 if cycles else TICKS * tick_ns
    return Instrument(floor_ns=floor, tick_ns=tick_ns, turnaround_ns=turnaround_ns, least_ns=least)
