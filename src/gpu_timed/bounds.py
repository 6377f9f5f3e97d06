"""Bounds: whatever can grow in a process has a limit, and says how much of it is used and what was dropped.

Each part of the engine tells its own, and :func:`gpu_timed.current.limits` collects them for the doctor and for
metrics. Asking costs the calls nothing: lengths of what is there, and counters that are kept anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Limit(NamedTuple):
    """One thing that cannot grow any further."""

    name: str
    """Names it, stable between versions: ``queue``, ``events`` …"""
    most: int
    """How many there may be."""
    in_use: int | None
    """How many there are just now; of several (a ring for each stream), in the fullest. None for what is bounded in
    each span by itself."""
    dropped: int | None
    """How many did not find room, or made room, in this process so far. None where nothing can be."""
    what: str
    """What they are, in words."""
    loses: bool = False
    """Whether what is dropped is missing in the user's numbers; else older things made room, as they are meant to."""


def fullest(sizes: Iterable[int]) -> int:
    """Return the largest of *sizes*, 0 of none."""
    return max(sizes, default=0)
