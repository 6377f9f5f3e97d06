"""Throughput: the work of a call set beside its device time, and beside what the device was measured to do.

``device_ns`` is an upper bound of the time that the work took, so a rate is a lower bound: a rate that is too
high for the device is so for certain, whatever launch gaps the time holds. Then the time does not cover the work
(it ran on another stream, or had not been launched yet), or less was done than was stated.

Without a device time there is no rate, and no verdict. The launch time is no substitute: on a device that works
while the host goes on, or that begins only when it is asked for results, it says nothing of the work (twenty
products of 2048² "take" 0.12 ms there, 2,800 TFLOP/s).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gpu_timed.peaks import DevicePeaks
from gpu_timed.record import NOT_SET, Measured, Missing, WorkDone
from gpu_timed.work import Work

MARGIN: Final = 1.25
"""How far above the measured peak a rate may lie before the device cannot have done it. A peak is measured with
random numbers, at whatever clock the power allows: data that switch fewer bits (zeros) are multiplied some 15 %
faster, and a short burst on a cool device runs at its highest clock. Work that nobody waited for is off by far more."""
BYTES_MARGIN: Final = 2.0
"""The same above the fastest copy: what a kernel only reads, and finds in the cache, comes faster than a copy of it."""
UNNAMED_MARGIN: Final = 2.0
"""Further, where the type of number is not stated: it may be half as wide as the narrowest that was measured."""
_NO_MEMORY: Final = Missing("peak_not_measured", "not of the memory")
_NOT_ASKED: Final = (NOT_SET, NOT_SET, NOT_SET)
_NO_TIME: Final = Missing("no_time", "the device time is 0: nothing can be divided by it")


class _Limits(NamedTuple):
    """What a type of number is held against on one device."""

    name: str | Missing
    """Of the peak of the operations."""
    peak: float | Missing
    margin: float
    """How many times the peak no rate can exceed."""
    memory: float | Missing
    memory_margin: float


def done(work: Work, device_ns: Measured, peaks: DevicePeaks | Missing) -> WorkDone:
    """Return what *work* in *device_ns* (nanoseconds) means on a device with *peaks*."""
    dtype = work.dtype
    if isinstance(peaks, Missing):
        limits = _Limits(peaks, peaks, 1.0, peaks, 1.0)
    else:
        held = peaks.limits.get(dtype)
        if held is None:
            held = peaks.limits[dtype] = _limits(dtype, peaks)
        limits = held
    flops, nbytes = work.flops, work.bytes
    in_flops = _NOT_ASKED if flops is None else _set_beside(flops, device_ns, limits.peak, limits.margin)
    in_bytes = _NOT_ASKED if nbytes is None else _set_beside(nbytes, device_ns, limits.memory, limits.memory_margin)
    return WorkDone(
        NOT_SET if flops is None else flops,
        NOT_SET if nbytes is None else nbytes,
        NOT_SET if dtype is None else dtype,
        in_flops[0],
        in_bytes[0],
        in_flops[1],
        in_bytes[1],
        NOT_SET if flops is None else limits.name,
        _either(in_flops[2], in_bytes[2]),
    )


def _set_beside(
    amount: float, device_ns: Measured, peak: float | Missing, margin: float
) -> tuple[float | Missing, float | Missing, bool | Missing]:
    """Return the rate, its share of *peak*, and whether it exceeds that *margin* times."""
    if isinstance(device_ns, Missing):
        return device_ns, device_ns, device_ns
    rate = amount / device_ns * 1e9 if device_ns > 0 else _NO_TIME
    if isinstance(peak, Missing):
        return rate, rate if isinstance(rate, Missing) else peak, peak
    return rate, rate if isinstance(rate, Missing) else rate / peak, amount * 1e9 > peak * margin * device_ns


def _either(*verdicts: bool | Missing) -> bool | Missing:
    """Return whether one of both is so, as far as it is known of either; else why it is known of neither."""
    one, other = verdicts
    if isinstance(one, Missing):
        return one if isinstance(other, Missing) and one is not NOT_SET else other
    return one if isinstance(other, Missing) else one or other


def _limits(dtype: str | None, peaks: DevicePeaks) -> _Limits:
    memory: float | Missing = peaks.bytes_per_s.get("memory", _NO_MEMORY)
    memory_margin = BYTES_MARGIN
    if not isinstance(memory, Missing):
        memory_margin *= max(1.0, peaks.bytes_per_s.get("cache", 0.0) / memory)
    rates = peaks.flops_per_s
    name = max(rates, key=lambda each: rates[each], default=None) if dtype is None else dtype
    if name is None or name not in rates:
        gone = Missing("peak_not_measured", f"not of {name}" if name else "of no type of number")
        return _Limits(gone, gone, 1.0, memory, memory_margin)
    margin = MARGIN
    if dtype is None:
        margin *= UNNAMED_MARGIN
    elif dtype == "fp32":  # what is fp32 in the program runs as tf32 where the runtime may choose
        margin *= max(1.0, rates.get("tf32", 0.0) / rates[name])
    return _Limits(name, rates[name], margin, memory, memory_margin)
