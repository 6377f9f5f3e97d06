"""torch's caching allocator: whether it went to the device for memory around a call that took long.

No hook tells of that at a bearable cost: what torch offers is called at each allocation. Its counters are read
instead (11 µs), after a call that is suspect, and held against the last reading. What they grew by was grown since
then, in this call or in one that was not suspect: so it is a note that says "may", and makes no call cold.

Private name used, 2.6 to 2.14: ``torch._C._cuda_memoryStats`` with ``num_device_alloc`` and ``num_alloc_retries``;
where one is missing nothing is said. With ``cudaMallocAsync`` as the allocator they stay 0.
"""

from __future__ import annotations

import sys
from typing import Any, Final

GREW: Final = "allocator_may_have_grown"
RETRIED: Final = "allocator_may_have_retried"
_LONG_NS: Final = 100_000
"""The least that a trip to the device for memory takes the host, with what it waits for: a shorter call made none."""
_MANY: Final = 4
_ENOUGH: Final = 3
"""Calls after which it is known how long a site's calls usually take."""


class AllocatorWatch:
    """Reads the counters of torch's allocator after suspect calls."""

    def __init__(self) -> None:
        #: The last reading, by device: blocks asked of the device so far, and caches given up for want of memory.
        self._last: dict[int, tuple[int, int]] = {}

    def notes(self, device: int, taken_ns: int, usual_ns: list[int], *, first: bool) -> tuple[str, ...]:
        """Return quality notes on a call on *device* (its ordinal in torch).

        Args:
            device: The ordinal.
            taken_ns: How long the call took the host, in nanoseconds.
            usual_ns: How long earlier calls of its site took.
            first: Whether it was the first call of its site.
        """
        if taken_ns < _LONG_NS or not (first or _is_unusual(taken_ns, usual_ns)):
            return ()
        now = _counters(device)
        if now is None:
            return ()
        before = self._last.get(device, (0, 0))
        self._last[device] = now
        return (*((GREW,) if now[0] > before[0] else ()), *((RETRIED,) if now[1] > before[1] else ()))


def _is_unusual(taken_ns: int, usual_ns: list[int]) -> bool:
    if len(usual_ns) < _ENOUGH or taken_ns <= _MANY * min(usual_ns):
        return False
    return taken_ns > _MANY * sorted(usual_ns)[len(usual_ns) // 2]


def _counters(device: int) -> tuple[int, int] | None:
    torch: Any = sys.modules.get("torch")
    cuda: Any = getattr(torch, "cuda", None)
    read: Any = getattr(getattr(torch, "_C", None), "_cuda_memoryStats", None)
    if read is None or cuda is None or not cuda.is_initialized():
        return None
    found = read(device)
    try:
        return int(found["num_device_alloc"]), int(found["num_alloc_retries"])
    except KeyError:
        return None
