"""Throughput: the work of a call set beside its device time, and beside what the device was measured to do.

``device_ns`` is an upper bound of the time that the work took, so a rate is a lower bound: a rate that is too
high for the device is so for certain, whatever launch gaps the time holds. Then the time does not cover the work
(it ran on another stream, or had not been launched yet), or less was done than was stated.

Without a device time there is no rate, and no verdict. The launch time is no substitute: on a device that works
while the host goes on, or that begins only when it is asked for results, it says nothing of the work (twenty
products of 2048² "take" 0.12 ms there, 2,800 TFLOP/s).
"""

from __future__ import annotations

from typing import Final

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
_NO_TIME: Final = Missing("no_time", "the device time is 0: nothing can be divided by it")


def done(work: Work, device_ns: Measured, peaks: DevicePeaks | Missing) -> WorkDone:
    """Return what *work* in *device_ns* (nanoseconds) means on a device with *peaks*."""
    named, flops_peak, ceiling = _flops_peak(work, peaks)
    bytes_peak, bytes_ceiling = _bytes_peak(peaks)
    flops_per_s, bytes_per_s = _rate(work.flops, device_ns), _rate(work.bytes, device_ns)
    verdicts = [
        _exceeds(work.flops, device_ns, ceiling),
        _exceeds(work.bytes, device_ns, bytes_ceiling),
    ]
    known = [verdict for verdict in verdicts if isinstance(verdict, bool)]
    asked = [verdict for verdict, amount in zip(verdicts, (work.flops, work.bytes), strict=True) if amount is not None]
    return WorkDone(
        flops=NOT_SET if work.flops is None else work.flops,
        bytes=NOT_SET if work.bytes is None else work.bytes,
        dtype=NOT_SET if work.dtype is None else work.dtype,
        flops_per_s=flops_per_s,
        bytes_per_s=bytes_per_s,
        flops_share=_share(flops_per_s, flops_peak),
        bytes_share=_share(bytes_per_s, bytes_peak),
        flops_peak=named if work.flops is not None else NOT_SET,
        exceeds_peak=any(known) if known else asked[0],
    )


def _flops_peak(work: Work, peaks: DevicePeaks | Missing) -> tuple[str | Missing, float | Missing, float | Missing]:
    """Return the name of the peak that the operations are held against, the peak, and what cannot be exceeded."""
    if isinstance(peaks, Missing):
        return peaks, peaks, peaks
    rates = peaks.flops_per_s
    if work.dtype is None:
        if not rates:
            gone = Missing("peak_not_measured", "of no type of number")
            return gone, gone, gone
        name = max(rates, key=lambda each: rates[each])
        return name, rates[name], rates[name] * MARGIN * UNNAMED_MARGIN
    if work.dtype not in rates:
        gone = Missing("peak_not_measured", f"not of {work.dtype}")
        return gone, gone, gone
    peak = rates[work.dtype]
    # What is fp32 in the program runs as tf32 where the runtime may choose.
    highest = max(peak, rates.get("tf32", 0.0)) if work.dtype == "fp32" else peak
    return work.dtype, peak, highest * MARGIN


def _bytes_peak(peaks: DevicePeaks | Missing) -> tuple[float | Missing, float | Missing]:
    if isinstance(peaks, Missing):
        return peaks, peaks
    peak = peaks.bytes_per_s.get("memory")
    if peak is None:
        gone = Missing("peak_not_measured", "not of the memory")
        return gone, gone
    return peak, max(peak, peaks.bytes_per_s.get("cache", 0.0)) * BYTES_MARGIN


def _rate(amount: float | None, device_ns: Measured) -> float | Missing:
    if amount is None:
        return NOT_SET
    if isinstance(device_ns, Missing):
        return device_ns
    return amount / device_ns * 1e9 if device_ns > 0 else _NO_TIME


def _share(rate: float | Missing, peak: float | Missing) -> float | Missing:
    if isinstance(rate, Missing):
        return rate
    return peak if isinstance(peak, Missing) else rate / peak


def _exceeds(amount: float | None, device_ns: Measured, ceiling: float | Missing) -> bool | Missing:
    if amount is None:
        return NOT_SET
    if isinstance(device_ns, Missing):
        return device_ns
    if isinstance(ceiling, Missing):
        return ceiling
    return amount * 1e9 > ceiling * device_ns
