"""The profiled pass of a comparison: kernel records of some steps, by whoever can record them here.

torch's profiler where torch is in use, since it knows the operators; else CUPTI by itself, through ``cupti-python``.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from gpu_timed.analysis.timeline import HostSpan, summarised, timelines
from gpu_timed.clocks.cupti_activity import KernelRecords, RecordsUnavailable
from gpu_timed.clocks.cupti_records import EXECUTIONS, Records
from gpu_timed.errors import MissingExtraError
from gpu_timed.record import Missing
from gpu_timed.step_timeline import Execution, Kernel, ProfiledSteps

STEPS: Final = 5
"""Steps that are profiled unless told otherwise."""
_KINDS: Final[dict[str, Execution]] = {"kernel": "kernel", "memcpy": "memcpy", "memset": "memset"}
_NO_OPERATORS: Final = "Recorded by CUPTI alone, which knows no operators."


def profile(
    call: Callable[[], object],
    *,
    wait: Callable[[], object],
    steps: int = STEPS,
    before: Callable[[], object] | None = None,
    rehearse: bool = False,
) -> ProfiledSteps | Missing:
    """Record *steps* calls of *call*, the device idle before each.

    To be called once all timing is done: launches may stay slower afterwards (``measure/torch_profile.py``).
    Whatever *call*, *before* or *wait* raise is raised; why there are no records is returned.

    Args:
        call: One step.
        wait: Waits for the device's work.
        steps: How many, at least 1.
        before: Called before each step, outside of it, like ``reset=``.
        rehearse: Whether this is the first pass of the process, which torch's profiler is slower in.
    """
    found: ProfiledSteps | Missing
    if "torch" in sys.modules:
        leaf: Any = importlib.import_module("gpu_timed.measure.torch_profile")
        if leaf.usable() is None:
            found = leaf.profile(call, steps=steps, before=before, rehearse=rehearse)
            return found
    return by_cupti(call, wait=wait, steps=steps, before=before)


def by_cupti(
    call: Callable[[], object],
    *,
    wait: Callable[[], object],
    steps: int = STEPS,
    before: Callable[[], object] | None = None,
) -> ProfiledSteps | Missing:
    """Record as :func:`profile` does, by CUPTI alone: kernels, copies and launches, and no operators."""
    records = KernelRecords(kinds=(*EXECUTIONS, "runtime", "driver"))
    try:
        records.start()
    except (MissingExtraError, RecordsUnavailable) as error:
        return Missing("needs_kernel_records", " ".join(str(error).split()))
    held: list[tuple[int, int]] = []
    try:
        for _ in range(steps + 1):
            if before is not None:
                before()
            wait()
            began = time.time_ns()
            call()
            wait()
            held.append((began, time.time_ns()))
    finally:
        found = records.stop()
    return understood(found, held[1:])


def understood(records: Records, steps: list[tuple[int, int]]) -> ProfiledSteps | Missing:
    """Return the timeline of *steps*, begins and ends in Unix time, by what CUPTI recorded."""
    executions = [
        Kernel(one.start_ns, one.end_ns, one.name, kind, device=one.device, stream=one.stream, launch=one.correlation)
        for one in records.executions
        if (kind := _KINDS.get(one.kind)) is not None
    ]
    made = timelines(executions, steps, calls=_calls(records))
    if not any(step.kernels for step in made):
        return Missing("needs_kernel_records", f"CUPTI recorded no device work ({records.note or 'none was launched'})")
    notes = [_NO_OPERATORS]
    if not records.complete:
        notes.append(f"Of the kernel records some are missing: {records.note}.")
    return summarised(made, "cupti", notes)


def _calls(records: Records) -> Iterator[HostSpan]:
    wanted = {one.correlation for one in records.executions}
    for kind in ("runtime", "driver"):
        table = records.others.get(kind)
        if table is None:
            continue
        columns = (table[name].tolist() for name in ("start", "end", "thread_id", "correlation_id"))
        for start, end, thread, correlation in zip(*columns, strict=True):
            if correlation in wanted:
                yield HostSpan(start, end, "", thread, correlation)
