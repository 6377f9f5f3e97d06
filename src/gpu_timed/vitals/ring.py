"""The latest readings of one device, and which of them belong to a span. No thread and no clock of its own."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Final, TypeVar

from gpu_timed.ports import Sighting
from gpu_timed.record import Missing, Vitals

MOST: Final = 512
"""Readings kept of each device: at one a second, those of the last four minutes at least."""
_STARTING: Final = Sighting(Missing("starting"), Missing("starting"))
_STALE: Final = Sighting(Missing("stale"), Missing("stale"))
_when: Final = itemgetter(0)

_Value = TypeVar("_Value", int, float)


class Ring:
    """Readings in the order of their time. One thread adds, any thread looks; no lock is taken.

    Args:
        reach_ns: How far a reading may lie from a span that it is told of.
        most: How many are kept; half of them go when it is full.
    """

    def __init__(self, reach_ns: int, most: int = MOST) -> None:
        self._reach_ns = reach_ns
        self._most = most
        self._held: list[tuple[int, Vitals]] = []

    def __len__(self) -> int:
        """Return how many readings are held."""
        return len(self._held)

    def add(self, at_ns: int, vitals: Vitals) -> None:
        """Add a reading of *at_ns*, on the host's monotonic axis, not before that of the last one."""
        if len(self._held) >= self._most:
            self._held = self._held[-(self._most // 2) :]  # a new list: who is looking has the old one
        self._held.append((at_ns, vitals))

    def near(self, start_ns: int, end_ns: int) -> Sighting:
        """Return what is known of the time from *start_ns* to *end_ns*.

        The readings of that time, together; where there are none, the nearest one, if it is near enough.
        """
        held = self._held
        size = len(held)
        if not size:
            return _STARTING
        first = bisect_left(held, start_ns, 0, size, key=_when)
        if first < size and held[first][0] <= end_ns:
            behind = bisect_right(held, end_ns, first, size, key=_when)
            if behind == first + 1:
                return Sighting(held[first][1], 0)
            return Sighting(together([vitals for _, vitals in held[first:behind]]), 0)
        near = [(start_ns - held[first - 1][0], first - 1)] if first else []
        if first < size:
            near.append((held[first][0] - end_ns, first))
        age, index = min(near)
        return Sighting(held[index][1], age) if age <= self._reach_ns else _STALE


def together(several: Sequence[Vitals]) -> Vitals:
    """Sum up *several* readings of one device in one: lowest clock, every reason, highest of all else."""
    reasons = [held.throttle for held in several if not isinstance(held.throttle, Missing)]
    return Vitals(
        taken_ns=several[0].taken_ns,
        readings=sum(held.readings for held in several),
        sm_clock_mhz=_pick(min, (held.sm_clock_mhz for held in several)),
        sm_clock_max_mhz=_pick(max, (held.sm_clock_max_mhz for held in several)),
        throttle=tuple(dict.fromkeys(one for held in reasons for one in held)) if reasons else several[0].throttle,
        power_w=_pick(max, (held.power_w for held in several)),
        temperature_c=_pick(max, (held.temperature_c for held in several)),
        host_load=_pick(max, (held.host_load for held in several)),
        process_cpus=_pick(max, (held.process_cpus for held in several)),
        cpus_allowed=_pick(min, (held.cpus_allowed for held in several)),
    )


def _pick(choose: Callable[[Any], Any], values: Iterable[_Value | Missing]) -> _Value | Missing:
    """Return the chosen one of the *values* that are there; without any, why the first is not."""
    listed = list(values)
    known = [value for value in listed if not isinstance(value, Missing)]
    chosen: _Value | Missing = choose(known) if known else listed[0]
    return chosen
