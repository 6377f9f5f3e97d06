"""Taking a device's peaks, and keeping them for every process of this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

from gpu_timed import current, peaks
from gpu_timed.clocks import cuda_devices
from gpu_timed.diagnosis.versions import installed_version
from gpu_timed.errors import GpuTimedError
from gpu_timed.measure import ceilings
from gpu_timed.measure.ceilings import PeakBench
from gpu_timed.peaks import DevicePeaks
from gpu_timed.trials import Row

PEAKS_S: Final = 2.0
"""What measuring the products of matrices may take, about."""


def find(bench: PeakBench, card: dict[str, Any], seconds: float = PEAKS_S) -> DevicePeaks:
    """Measure on *bench*, the device that *card* describes by its ``uuid`` and ``card``.

    Raises:
        GpuTimedError: The device could not be measured.
    """
    if not card.get("uuid"):
        raise GpuTimedError("the device has no UUID by which its peaks could be found again")
    bytes_per_s = ceilings.bandwidths(bench)
    return DevicePeaks(
        uuid=card["uuid"],
        name=card.get("card") or "",
        driver=cuda_devices.driver_version(),
        torch=installed_version("torch"),
        measured=time.strftime("%Y-%m-%d"),
        flops_per_s=ceilings.flops(bench, seconds),
        bytes_per_s=bytes_per_s,
    )


def keep(found: DevicePeaks) -> str:
    """Write *found* to its file, and have this process know it; returns the file.

    Raises:
        GpuTimedError: It cannot be written; the message says what to do.
    """
    folder = peaks.directory()
    if folder is None:
        raise GpuTimedError("there is no home directory to keep the peaks in: set GPU_TIMED_CACHE_DIR.")
    try:
        path = str(peaks.save(found, folder))
    except OSError as error:
        raise GpuTimedError(
            f"the peaks cannot be kept in {folder} ({error.strerror or error}): "
            "set GPU_TIMED_CACHE_DIR to a directory that can be written."
        ) from error
    current.forget_peaks()
    return path


def rows(bench: PeakBench, card: dict[str, Any], seconds: float = PEAKS_S) -> Iterator[Row]:
    """Measure the peaks on *bench* and keep them, as a row. What cannot be measured or kept is told, no failure."""
    try:
        found = find(bench, card, seconds)
    except Exception as error:  # noqa: BLE001 - told in place of the figures
        text = f"what the device can do at most could not be measured: {error}"
        yield Row(section="device", name="peak", verdict="skipped", text=text)
        return
    rates, widths = dict(found.flops_per_s), dict(found.bytes_per_s)
    words = f"at most {ceilings.shown(rates, widths)}"
    values: dict[str, Any] = {"flops_per_s": rates, "bytes_per_s": widths, "path": None}
    try:
        values["path"] = keep(found)
        words += f"; kept in {values['path']}"
    except GpuTimedError as error:
        words += f"; not kept: {error}"
    yield Row(section="device", name="peak", verdict="info", text=words, values=values)
