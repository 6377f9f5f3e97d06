"""How many calls an arm makes in its turn, and which of them count.

The first calls of a turn find the host's caches as another arm left them. Of a decode step on an H200's host, a call
by ``reduce-overhead`` took 8 % longer as the second of its turn than as the fifth (2.3 ms), and eagerly 3 % longer as
the first than by hand behind another one (21 ms); on another CPU a model of 44 layers took 15 % longer as the first,
and 1 % as the second. So the first ones do not count, and a long call has several that do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

TURN_NS: Final = 20_000_000
"""How long a turn is to last: long beside what changing arms disturbs, short beside what drifts."""
MOST_CALLS: Final = 500
BLOCKS: Final = 20
"""Blocks that there is to be time for, before long calls get a longer turn."""
_SETTLING: Final = 2
"""Calls of a turn that do not count, where it has many."""
_NEAR: Final = 1.25
"""A turn that lasts by up to this factor longer or shorter than it is to has the right number of calls."""


class Share(NamedTuple):
    """What a turn of long calls consists of. One of short calls is as long as a turn is to be."""

    settling: int
    """Calls that do not count, because they come first."""
    counted: int
    """Calls that do, at the least."""


SHARES: Final = (Share(1, 4), Share(1, 3), Share(1, 2), Share(1, 1), Share(0, 1))
"""From the best to the shortest. Calls that leave no time for more than the last are so long that they settle alone."""


def fitting(call_ns: float, share: Share) -> int:
    """Return how many calls of *call_ns* nanoseconds are to count in a turn."""
    return max(share.counted, min(MOST_CALLS, round(TURN_NS / max(1.0, call_ns))))


def settling(counted: int, share: Share) -> int:
    """Return how many calls come before those *counted*."""
    return _SETTLING if counted > SHARES[0].counted else share.settling


def length_ns(call_ns: int, share: Share) -> int:
    """Return how long a turn of calls of *call_ns* nanoseconds is."""
    counted = fitting(call_ns, share)
    return (settling(counted, share) + counted) * call_ns


def share_out(calls_ns: Iterable[int], left_ns: int) -> Share:
    """Return the best share with which there is time for :data:`BLOCKS` blocks; else the shortest.

    Args:
        calls_ns: How long a call of each arm takes, in nanoseconds.
        left_ns: The time for all blocks.
    """
    held = list(calls_ns)
    fit = (share for share in SHARES if BLOCKS * sum(length_ns(call_ns, share) for call_ns in held) <= left_ns)
    return next(fit, SHARES[-1])


def adjusted(counted: int, turn_ns: int, share: Share) -> int:
    """Return how many calls are to count in the next turn, where in the last one *counted* did, in *turn_ns*."""
    off = TURN_NS / max(1, turn_ns)
    if 1 / _NEAR < off < _NEAR:
        return counted
    return max(share.counted, min(MOST_CALLS, round(counted * max(0.5, min(2.0, off)))))
