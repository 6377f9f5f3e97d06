"""gpu_timed: true GPU time in distributed traces.

Importing this touches no device and loads neither torch nor wrapt: names are loaded on first use.

The rooms, from the top down; each looks down only:

    cli  instrumentation                         the commands, and OpenTelemetry's way to switch it on
    targets                                      timing by name, with no change to the code
    timed  configuration  propagation  testing  doctor  selftest  comparison  …   the doors
    measure                                      many calls, well: self-test and comparison
    current ← tracer ← resolver ← reading ← span the engine
    clocks  warmth  context  export  callables   where time, causes, parents, sinks and wrappers come from
    modes                                        how the work is launched
    diagnosis  sites  target_names  analysis     what the doctor says; the sites; how targets are written; judging
    kernel_caches                                where compiled code is kept between processes
    site  ports  peaks  settings  record  work  …        the ground: nouns and interfaces
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_timed.arms import Comparison
    from gpu_timed.cache_facts import CacheReport, PinReport
    from gpu_timed.comparison import compare
    from gpu_timed.compile_caches import caches, pin_caches, watch_cache
    from gpu_timed.configuration import configure
    from gpu_timed.current import flush, shutdown
    from gpu_timed.delivery import FlushResult
    from gpu_timed.doctor import diagnose
    from gpu_timed.errors import (
        ConfigurationError,
        DeviceFault,
        GpuTimedError,
        MissingExtraError,
        ModeError,
        NotCallableError,
        UnknownArmError,
        WaitTimeout,
    )
    from gpu_timed.findings import Diagnosis
    from gpu_timed.mode_values import Compile, CudaGraph
    from gpu_timed.peaks import DevicePeaks
    from gpu_timed.propagation import carry, extracted, inject
    from gpu_timed.record import Cause, Missing, Record, WorkDone
    from gpu_timed.selftest import measure_peaks, run_selftest
    from gpu_timed.timed import gpu_span, gpu_timed, use_mode
    from gpu_timed.trials import SelfTest
    from gpu_timed.work import Work

__all__ = [
    "CacheReport",
    "Cause",
    "Comparison",
    "Compile",
    "ConfigurationError",
    "CudaGraph",
    "DeviceFault",
    "DevicePeaks",
    "Diagnosis",
    "FlushResult",
    "GpuTimedError",
    "Missing",
    "MissingExtraError",
    "ModeError",
    "NotCallableError",
    "PinReport",
    "Record",
    "SelfTest",
    "UnknownArmError",
    "WaitTimeout",
    "Work",
    "WorkDone",
    "caches",
    "carry",
    "compare",
    "configure",
    "diagnose",
    "extracted",
    "flush",
    "gpu_span",
    "gpu_timed",
    "inject",
    "measure_peaks",
    "pin_caches",
    "run_selftest",
    "shutdown",
    "use_mode",
    "watch_cache",
]

_HOMES = {
    "compare": "comparison",
    "Comparison": "arms",
    "carry": "propagation",
    "extracted": "propagation",
    "inject": "propagation",
    "configure": "configuration",
    **dict.fromkeys(["caches", "pin_caches", "watch_cache"], "compile_caches"),
    **dict.fromkeys(["CacheReport", "PinReport"], "cache_facts"),
    "diagnose": "doctor",
    "Diagnosis": "findings",
    "flush": "current",
    "shutdown": "current",
    "FlushResult": "delivery",
    "measure_peaks": "selftest",
    "run_selftest": "selftest",
    "DevicePeaks": "peaks",
    "Work": "work",
    "WorkDone": "record",
    "SelfTest": "trials",
    "gpu_timed": "timed",
    "gpu_span": "timed",
    "use_mode": "timed",
    "Compile": "mode_values",
    "CudaGraph": "mode_values",
    "Cause": "record",
    "Missing": "record",
    "Record": "record",
    **dict.fromkeys(
        [
            *("ConfigurationError", "DeviceFault", "GpuTimedError", "MissingExtraError"),
            *("ModeError", "NotCallableError", "UnknownArmError", "WaitTimeout"),
        ],
        "errors",
    ),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("gpu_timed._version").VERSION
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gpu_timed' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gpu_timed.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
