"""Where it was measured: card, versions, clocks, load."""

from __future__ import annotations

import importlib
import platform
import sys
import time
from collections.abc import Sequence
from typing import Final

from gpu_timed._version import VERSION
from gpu_timed.arms import Arm, Environment
from gpu_timed.clocks import cuda_devices
from gpu_timed.diagnosis.versions import installed_version
from gpu_timed.measure.stopwatch import Stopwatch
from gpu_timed.record import NOT_SET, Measured, Missing

PACKAGES: Final = (
    "torch",
    "triton",
    "numba",
    "numba-cuda",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "jax",
    "numpy",
    "scipy",
    "transformers",
)


def environment(stopwatch: Stopwatch, arms: Sequence[Arm], host_load: float | Missing) -> Environment:
    """Return where *arms* were measured by *stopwatch*, with a *host_load* as it ended."""
    turns = [turn for arm in arms for turn in arm.turns]
    clocks = [turn.sm_clock_mhz for turn in turns if isinstance(turn.sm_clock_mhz, int)]
    reasons = [turn.throttle for turn in turns if not isinstance(turn.throttle, Missing)]
    unread = next((turn.sm_clock_mhz for turn in turns if isinstance(turn.sm_clock_mhz, Missing)), NOT_SET)
    versions = {name: version for name in PACKAGES if (version := installed_version(name))}
    return Environment(
        card=stopwatch.device_name,
        device_uuid=stopwatch.device_uuid,
        clock=stopwatch.clock,
        driver=cuda_devices.driver_version(),
        versions={"python": platform.python_version(), "gpu_timed": VERSION, **versions},
        platform=platform.platform(),
        date=time.strftime("%Y-%m-%d"),
        sm_clock_mhz=(min(clocks), max(clocks)) if clocks else unread,
        throttle=tuple(sorted({reason for held in reasons for reason in held})) if reasons else unread,
        host_load=host_load,
    )


def held_memory() -> Measured:
    """Return how many bytes of the device torch holds; Missing where it is not imported, or has no device."""
    if "torch" not in sys.modules:
        return Missing("unsupported_runtime")
    found: Measured = importlib.import_module("gpu_timed.measure.torch_memory").held()
    return found
