"""What a device can do at most, found by a few large pieces of work: how sizes are chosen, and what counts.

Of each kind of work the sizes are tried from small to large, as long as memory and time last. A size stands for
the median of its trials, and the kind for its best size: a larger one is not always faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from gpu_timed.errors import GpuTimedError

SIZES: Final = (1024, 2048, 4096, 8192)
"""Rows and columns of the square matrices."""
COPIES: Final = (8 << 20, 16 << 20, 32 << 20)
"""Bytes of the copies that a cache may hold."""
LARGEST_COPY: Final = 1 << 30
SMALLEST_COPY: Final = 256 << 20
"""Bytes of the copy that no cache holds: several times the 50 MB of an H200, the 126 MB of a B200."""
SHARE_OF_MEMORY: Final = 0.25
"""Of the memory that is free: how much may be taken, for all of it together."""
TRIALS: Final = 7
_GROWTH: Final = 8
"""A product of matrices twice as large takes eight times as long."""
_SETTLING: Final = 3
"""Trials before the first that counts: kernels are loaded, and clocks go up."""


class PeakBench(Protocol):
    """A device to measure on, by marks on it and never by the host's clock."""

    def free_bytes(self) -> int:
        """Return how much memory is free."""
        ...

    def dtypes(self) -> Sequence[tuple[str, float]]:
        """Return the types of number to try, and the bytes of one."""
        ...

    def product_ns(self, dtype: str, size: int) -> Callable[[], float]:
        """Prepare a product of two square matrices; returns what runs it, for nanoseconds of device time.

        Raises:
            Exception: The device has no such numbers, or no room.
        """
        ...

    def copy_ns(self, nbytes: int) -> Callable[[], float]:
        """Prepare a copy of *nbytes* within the device's memory; returns what runs it, for nanoseconds."""
        ...


def flops(bench: PeakBench, seconds: float) -> dict[str, float]:
    """Return the most operations a second that each type of number reached, of those that the device has.

    *seconds* is time of the device, all types together: loading a library does not count, and would otherwise leave
    no time for the sizes that matter. The smallest size is tried in any case.

    Raises:
        GpuTimedError: None could be measured.
    """
    found: dict[str, float] = {}
    dtypes = bench.dtypes()
    last: Exception | None = None
    for dtype, width in dtypes:
        left_s, taken_s = seconds / len(dtypes), 0.0
        for size in SIZES:
            fits = 2 * size * size * (width + 4) <= SHARE_OF_MEMORY * bench.free_bytes()
            if not fits or (taken_s and _GROWTH * taken_s > left_s):
                break
            try:
                taken_s, rate = _best(bench.product_ns(dtype, size), 2.0 * size**3)
            except Exception as error:  # noqa: BLE001 - a device that lacks the type
                last = error
                break
            left_s -= taken_s
            found[dtype] = max(found.get(dtype, 0.0), rate)
    if not found:
        raise GpuTimedError(f"no product of matrices could be measured ({type(last).__name__}: {last})")
    return found


def bandwidths(bench: PeakBench) -> dict[str, float]:
    """Return bytes a second of a large copy as ``memory``, and of the best small one as ``cache``.

    Every byte is read and written, and counted twice. What has no room is left out.
    """
    found: dict[str, float] = {}
    large = LARGEST_COPY
    while large > SMALLEST_COPY and 2 * large > SHARE_OF_MEMORY * bench.free_bytes():
        large //= 2
    for name, sizes in (("memory", (large,)), ("cache", COPIES)):
        for size in sizes:
            if 2 * size <= SHARE_OF_MEMORY * bench.free_bytes():
                _, rate = _best(bench.copy_ns(size), 2.0 * size)
                found[name] = max(found.get(name, 0.0), rate)
    return found


def _best(run: Callable[[], float], amount: float) -> tuple[float, float]:
    """Return the seconds that trying *run* took the device, about, and *amount* a second by the median."""
    times = [run() for _ in range(_SETTLING + TRIALS)]
    middle = statistics.median(times[_SETTLING:])
    if middle <= 0:
        raise GpuTimedError("the device's clock did not move")
    # Before each reading the same runs once more, so that nothing is launched within it.
    return 2 * sum(times) / 1e9, amount / middle * 1e9


def shown(flops_per_s: dict[str, float], bytes_per_s: dict[str, float]) -> str:
    """Return both in words."""
    rates = [
        f"{name} {rate / 1e12:,.3g} {'TOP' if name.startswith('int') else 'TFLOP'}/s"
        for name, rate in sorted(flops_per_s.items(), key=lambda it: -it[1])
    ]
    rates += [f"{name} {rate / 1e9:,.4g} GB/s" for name, rate in bytes_per_s.items()]
    return ", ".join(rates)
