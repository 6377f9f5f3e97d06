"""Kernel records of some steps, with the operators that launched them, by torch's profiler (Kineto).

Names used: ``torch.profiler.profile``, ``ProfilerActivity``, ``record_function``, ``kineto_available``,
``export_chrome_trace``, ``torch.cuda.synchronize`` (public; torch 2.6 to 2.13 read). The trace is read as the file that
torch exports, a public format: ``events()`` makes an object with a tree of children of every event.

After torch's profiler has run, launches stay slower in that process, since CUPTI stays attached: so this comes after
everything that is timed. torch detaches it where ``TEARDOWN_CUPTI=1`` is set before, unless CUDA Graphs were used: on a
thread that waits for the process's next calls of CUDA (Kineto's ``teardownContext``, private). A pass that begins
before it has done so crashes (pytorch/kineto#1169), and a process that ends before hangs.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch

from gpu_timed.analysis import kineto_trace
from gpu_timed.analysis.timeline import summarised, timelines
from gpu_timed.record import Missing
from gpu_timed.step_timeline import ProfiledSteps

STEP: Final = "gpu_timed.step"
"""Name of the annotation around each step."""
_THROWN_AWAY: Final = 2
_CALLS: Final = 20
_BETWEEN_S: Final = 0.005
"""Between calls of CUDA that let torch detach CUPTI: nothing tells when it has."""
NO_KERNELS: Final = (
    "torch's profiler recorded no device work: none was launched, or another profiler has CUPTI in this process"
)


def usable() -> Missing | None:
    """Return why torch's profiler cannot record a device's kernels here; None where it can."""
    if not torch.cuda.is_available():
        return Missing("no_device", "torch finds no CUDA device")
    if not torch.profiler.kineto_available():
        return Missing("needs_kernel_records", "this torch is built without Kineto")
    return None


def profile(
    call: Callable[[], object],
    *,
    steps: int,
    before: Callable[[], object] | None = None,
    rehearse: bool = False,
) -> ProfiledSteps | Missing:
    """Record *steps* calls of *call*, the device idle before each, and some more before them that are thrown away.

    The first steps of a pass are slower on the host, and those of a process's first pass much more (on a CPU of 2
    cores: 26, 19, 16, 15 and 14 ms in place of 11, after a first one of 30), which is in the gaps of what launches.

    Whatever *call* or *before* raise is raised. What goes wrong with the profiler is told by what is returned.

    Args:
        call: One step. What it launches on the current device is waited for.
        steps: How many, at least 1.
        before: Called before each step, outside of it.
        rehearse: Whether to throw away a short pass before.
    """
    missing = usable()
    if missing is not None:
        return missing
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    if rehearse:
        text = recorded(call, activities, torch.cuda.synchronize, steps=_THROWN_AWAY, before=before)
        if isinstance(text, Missing):
            return text
    text = recorded(call, activities, torch.cuda.synchronize, steps=steps + _THROWN_AWAY, before=before)
    return text if isinstance(text, Missing) else understood(text, steps)


def recorded(
    call: Callable[[], object],
    activities: list[Any],
    wait: Callable[[], object],
    *,
    steps: int,
    before: Callable[[], object] | None = None,
) -> bytes | Missing:
    """Return the trace of *steps* steps as torch exports it; *wait* waits for the device."""
    profiler = torch.profiler.profile(activities=activities)
    try:
        profiler.start()
    except Exception as error:  # noqa: BLE001 - another one is at work, or Kineto fails
        return Missing("needs_kernel_records", f"torch's profiler did not start: {error}")
    try:
        with _no_collection():
            for _ in range(steps):
                if before is not None:
                    before()
                wait()
                with torch.profiler.record_function(STEP):
                    call()
                    wait()
    except BaseException:
        _stopped(profiler, wait)
        raise
    fault = _stopped(profiler, wait)
    if fault is not None:
        return fault
    try:
        with tempfile.TemporaryDirectory(prefix="gpu_timed-") as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            return path.read_bytes()
    except Exception as error:  # noqa: BLE001 - no room for the file, say
        return Missing("needs_kernel_records", f"the trace of torch's profiler could not be had: {error}")


def understood(text: bytes, steps: int) -> ProfiledSteps | Missing:
    """Return the last *steps* steps of a trace."""
    try:
        found = kineto_trace.read(text, STEP)
    except ValueError as error:
        return Missing("needs_kernel_records", f"the trace of torch's profiler is not understood: {error}")
    if len(found.steps) < steps:
        return Missing("needs_kernel_records", f"of {steps} steps torch's profiler recorded {len(found.steps)}")
    made = timelines(
        found.executions, found.steps[-steps:], calls=found.calls, operators=_inside(found, found.steps[-steps][0])
    )
    if not any(step.kernels for step in made):
        return Missing("needs_kernel_records", NO_KERNELS)
    notes = [f"{found.unread} events of the trace were not understood."] if found.unread else []
    return summarised(made, "kineto", notes)


def _inside(found: kineto_trace.Recorded, begin: int) -> Iterator[Any]:
    """Return the operators that are not around all steps, like an annotation in the caller's own code."""
    return (span for span in found.operators if span.start_ns >= begin)


def _stopped(profiler: Any, wait: Callable[[], object]) -> Missing | None:
    try:
        profiler.stop()
    except Exception as error:  # noqa: BLE001
        return Missing("needs_kernel_records", f"torch's profiler did not stop: {error}")
    if os.environ.get("TEARDOWN_CUPTI") == "1":
        with suppress(Exception):  # what the device has to say was said in the last step
            for _ in range(_CALLS):
                time.sleep(_BETWEEN_S)
                wait()
    return None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector away, which would look like a slow operator."""
    held = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if held:
            gc.enable()
