"""What devices were measured to do at most: when, and with what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpu_timed.findings import Finding, Inventory
from gpu_timed.peaks import DevicePeaks, PeakBook
from gpu_timed.record import Missing

_FIX: Final = "gpu-timed selftest"


def findings(inventory: Inventory, book: PeakBook) -> Iterator[Finding]:
    """Report the measured peaks of each device of *inventory*, as spans would find them."""
    for device in inventory.devices:
        if device.uuid is not None:
            yield _one(device.index, book.of(device.uuid))


def _one(index: int, found: DevicePeaks | Missing) -> Finding:
    key = f"peak.{index}"
    if isinstance(found, Missing):
        detail = f" ({found.detail})" if ":" in found.detail else ""
        text = f"peak of device {index}: not measured{detail}: spans with work= show no share of it"
        return Finding(key, "note", text, _FIX, {"measured": None})
    values = {
        "measured": found.measured,
        "driver": found.driver,
        "torch": found.torch,
        "path": found.path,
        "flops_per_s": dict(found.flops_per_s),
        "bytes_per_s": dict(found.bytes_per_s),
    }
    best = max(found.flops_per_s.items(), key=lambda item: item[1], default=None)
    rates = [] if best is None else [f"{best[1] / 1e12:,.3g} TFLOP/s in {best[0]}"]
    if "memory" in found.bytes_per_s:
        rates.append(f"{found.bytes_per_s['memory'] / 1e9:,.4g} GB/s of memory")
    text = f"peak of device {index}: {', '.join(rates)}; measured {found.measured} with torch {found.torch}"
    return Finding(key, "ok", text, values=values)
