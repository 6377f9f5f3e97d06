"""Peaks: the most that a device was measured to do on this machine. Kept in files, read once per device.

One file for each device, driver and torch, in ``GPU_TIMED_CACHE_DIR``, else ``gpu_timed`` below
``XDG_CACHE_HOME``, else ``~/.cache/gpu_timed``::

    {"schema": 1, "uuid": "GPU-…", "name": "NVIDIA H200", "driver": "580.95.05", "torch": "2.11.0",
     "measured": "2026-01-31", "flops_per_s": {"bf16": 7.1e14, …}, "bytes_per_s": {"memory": 4.1e12, "cache": 6e12}}

Nothing here comes from a datasheet, and nothing is measured here.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from gpu_timed.bounds import Limit
from gpu_timed.record import Missing
from gpu_timed.settings import CACHE_VARIABLE

SCHEMA: Final = 1
MOST_DEVICES: Final = 64
"""Devices whose peaks are kept in memory; those of further ones are read from their files again."""
REMEDY: Final = "run `gpu-timed selftest`, or gpu_timed.measure_peaks()"
NOT_MEASURED: Final = Missing("peak_not_measured", REMEDY)


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeaks:
    """What one device was measured to do at most, on this machine."""

    uuid: str
    """UUID of the device, or of the MIG instance."""
    name: str = ""
    """Product name."""
    driver: str | None = None
    """Version of its driver then."""
    torch: str | None = None
    """Version of torch that launched the work: its libraries hold the kernels."""
    measured: str = ""
    """Date."""
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Floating-point operations a second by type of number, of the fastest of some large matrix products."""
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Bytes read and written a second: ``memory`` by a copy larger than any cache, ``cache`` by smaller ones."""
    path: str = ""
    """File it was read from; empty if it was not."""
    limits: dict[str | None, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What follows from these by type of number, worked out once: see :mod:`gpu_timed.analysis.throughput`."""


def directory(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return where peaks are kept; None where there is no such place, as for a user without a home."""
    said = environment.get(CACHE_VARIABLE, "").strip()
    try:
        if said:
            return Path(said).expanduser()
        base = environment.get("XDG_CACHE_HOME", "")
        # The XDG base directory specification has a relative path ignored.
        return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "gpu_timed"
    except RuntimeError:
        return None


def save(found: DevicePeaks, folder: Path) -> Path:
    """Write *found* to its file in *folder*, whole or not at all; returns the file.

    Raises:
        OSError: It cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_stem(found.uuid)}-{_safe(found.driver)}-{_safe(found.torch)}.json"
    values = {
        "schema": SCHEMA,
        **{name: value for name, value in asdict(found).items() if name not in ("path", "limits")},
    }
    number, unfinished = tempfile.mkstemp(dir=folder, prefix=".peaks-")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1)
        Path(unfinished).replace(path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
    return path


def load(folder: Path | None, uuid: str, driver: str | None, torch: str | None) -> DevicePeaks | Missing:
    """Return the peaks of device *uuid* under *driver*: those by *torch*, else the newest. Never raises.

    What another driver reached is not taken for what this one can; *driver* None means that nobody knows it.
    """
    if folder is None:
        return NOT_MEASURED
    said = ""
    found: list[tuple[bool, float, DevicePeaks]] = []
    try:
        for path in folder.glob(f"{_stem(uuid)}-*.json"):
            try:
                one = _read(path)
                if one.uuid != uuid:
                    continue
                if driver is not None and one.driver is not None and one.driver != driver:
                    said = said or f"measured with driver {one.driver}, and this is {driver}"
                    continue
                found.append((one.torch == torch, path.stat().st_mtime, one))
            except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                said = f"{path} cannot be read ({type(error).__name__})"
    except OSError as error:
        said = f"{folder} cannot be read ({type(error).__name__})"
    if found:
        return max(found, key=lambda item: item[:2])[2]
    return Missing("peak_not_measured", f"{said}: {REMEDY}") if said else NOT_MEASURED


class PeakBook:
    """The peaks of this machine's devices as the engine looks them up: each is read from its file once.

    Args:
        folder: Returns where the files are.
        driver: Returns the version of the driver.
        torch: Returns the version of the installed torch.
    """

    def __init__(
        self, folder: Callable[[], Path | None], driver: Callable[[], str | None], torch: Callable[[], str | None]
    ) -> None:
        self._ask = (folder, driver, torch)
        self._found: dict[str, DevicePeaks | Missing] = {}

    def of(self, uuid: str | Missing) -> DevicePeaks | Missing:
        """Return the peaks of device *uuid*, or why they are not known. Never raises; may read files once."""
        if isinstance(uuid, Missing):
            return Missing("peak_not_measured", "the device is not known by its UUID")
        found = self._found.get(uuid)
        if found is None:
            try:
                folder, driver, torch = self._ask
                found = load(folder(), uuid, driver(), torch())
            except Exception as error:  # noqa: BLE001 - a record is made all the same
                found = Missing("peak_not_measured", f"{type(error).__name__}: {error}")
            if len(self._found) >= MOST_DEVICES:
                self._found.pop(next(iter(self._found)), None)
            self._found[uuid] = found
        return found

    def limits(self) -> Iterator[Limit]:
        """Say of how many devices the peaks are known."""
        yield Limit("peaks", MOST_DEVICES, len(self._found), None, "devices whose peaks were looked up")

    def forget(self) -> None:
        """Read the files again, which have changed."""
        self._found = {}


def _read(path: Path) -> DevicePeaks:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if values["schema"] != SCHEMA:
        raise ValueError("schema")
    return DevicePeaks(
        uuid=str(values["uuid"]),
        name=str(values.get("name", "")),
        driver=values.get("driver"),
        torch=values.get("torch"),
        measured=str(values.get("measured", "")),
        flops_per_s=_rates(values["flops_per_s"]),
        bytes_per_s=_rates(values["bytes_per_s"]),
        path=str(path),
    )


def _rates(values: Mapping[str, Any]) -> dict[str, float]:
    rates = {str(name): float(value) for name, value in values.items()}
    if not all(value > 0 and math.isfinite(value) for value in rates.values()):
        raise ValueError("rates")
    return rates


def _stem(uuid: str) -> str:
    return f"peaks-{_safe(uuid)}"


def _safe(text: str | None) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]", "_", text or "unknown")
