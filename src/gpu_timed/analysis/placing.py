"""Where a device's own timer stands on the host's axis, from kernels launched between two looks at the host's clock.

A kernel cannot begin before the host began to launch it, nor end after the host saw it done. Each such fact bounds
the distance between the two clocks; all of them together bound it best. This is knowledge of its own, apart from
the marks that spans are made of, so that a placement can be held against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

DRIFT: Final = 20e-6
"""How fast the two clocks may drift apart meanwhile: 3.5e-6 was seen between an H200 and its host."""


class Bracket(NamedTuple):
    """One kernel: its own stamps on the device's timer, and the host's time around it. Nanoseconds."""

    before_ns: int
    begin_ns: int
    end_ns: int
    after_ns: int


class Anchor(NamedTuple):
    """The host's time less the device's, in nanoseconds, and how far off it may be."""

    offset_ns: int
    half_ns: int


def anchor(brackets: Iterable[Bracket]) -> Anchor | None:
    """Return what *brackets* say together, or None where they say nothing, or contradict each other."""
    held = list(brackets)
    if not held:
        return None
    drift = math.ceil(DRIFT * (held[-1].after_ns - held[0].before_ns))
    low = max(bracket.before_ns - bracket.begin_ns for bracket in held) - drift
    high = min(bracket.after_ns - bracket.end_ns for bracket in held) + drift
    if low > high:
        return None
    return Anchor((low + high) // 2, (high - low + 1) // 2)
