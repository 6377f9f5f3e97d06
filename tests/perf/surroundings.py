"""Where a measurement was taken: what every script here writes beside its figures."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

from gpu_timed.clocks import cuda_devices
from gpu_timed.diagnosis.versions import installed_version

PACKAGES = ("gpu-timed", "opentelemetry-sdk")


def environment(torch: Any = None, *packages: str) -> dict[str, Any]:
    """Return card, driver, host, versions and date.

    Args:
        torch: The module, where a card is used by it; without it no device is touched.
        packages: Distributions whose versions are told besides, where they are installed.
    """
    found: dict[str, Any] = {
        "card": torch.cuda.get_device_name() if torch is not None else "none",
        "driver": cuda_devices.driver_version() or "none",
        "torch": torch.__version__ if torch is not None else installed_version("torch") or "none",
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "date": time.strftime("%Y-%m-%d"),
    }
    if torch is not None:
        found["cuda"] = torch.version.cuda
    versions = {name: installed_version(name) for name in (*PACKAGES, *packages)}
    return found | {name: version for name, version in versions.items() if version}


def _cpu() -> str:
    """Return the processor's name as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
