"""Kernel records and what the host did meanwhile, made into the timeline of each step, and what steps have in common.

Pure: records come in as :class:`~gpu_timed.step_timeline.Kernel` and :class:`HostSpan`, whoever recorded them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from gpu_timed.record import Answer, Measured, Missing
from gpu_timed.step_timeline import Gap, Kernel, OperatorGaps, ProfiledSteps, Source, StepTimeline

_NO_GAPS = Missing("needs_kernel_records", "nothing ran after a gap")
_NO_CALLS = Missing("needs_kernel_records", "calls of the host were not recorded")


class HostSpan(NamedTuple):
    """An operator, an annotation, or a call of CUDA's interface, as the host ran it. Nanoseconds, on one axis."""

    start_ns: int
    end_ns: int
    name: str
    thread: int = 0
    correlation: int = 0
    """Of a call: the number that its work has as :attr:`~gpu_timed.step_timeline.Kernel.launch`."""


class _Launch(NamedTuple):
    """A call that gave the device work, and what the host was at when it made it."""

    start_ns: int
    end_ns: int
    operator: str
    within: str


def timelines(
    executions: Iterable[Kernel],
    steps: Sequence[tuple[int, int]],
    *,
    calls: Iterable[HostSpan] = (),
    operators: Iterable[HostSpan] = (),
) -> tuple[StepTimeline, ...]:
    """Return the timeline of each step.

    Work belongs to the step in which the host launched it; where the launch is not known, to the step that had begun
    last when it began to run, so the device must have been idle between steps. What was launched outside of all
    steps is left out.

    Args:
        executions: What ran, in any order; ``operator`` and ``within`` are filled in here.
        steps: Begin and end of each on the host, in order, not overlapping; the end after the device was done.
        calls: Calls that launched work, in any order.
        operators: Operators and annotations, in any order; nested ones on one thread lie inside each other. The
            annotations of the steps themselves are not among them.
    """
    launches = _launches(calls, operators)
    begins = [begin for begin, _ in steps]
    held: list[list[Kernel]] = [[] for _ in steps]
    for work in executions:
        launch = launches.get(work.launch)
        at = launch.start_ns if launch is not None else work.start_ns
        index = bisect_right(begins, at) - 1
        if index < 0 or (launch is not None and at > steps[index][1]):
            continue
        begin = begins[index]
        named = launch if launch is not None else work
        held[index].append(
            work._replace(
                start_ns=work.start_ns - begin,
                end_ns=work.end_ns - begin,
                operator=named.operator,
                within=named.within,
            )
        )
    return tuple(_timeline(kernels, begin, end, launches) for kernels, (begin, end) in zip(held, steps, strict=True))


def merged(kernels: Sequence[Kernel]) -> tuple[int, list[tuple[int, int]]]:
    """Return how long at least one of *kernels* ran, and between which two of them nothing did, as their indices.

    Args:
        kernels: In the order of their starts. The first index of a pair is of the one that ended last before the gap.
    """
    busy = 0
    gaps: list[tuple[int, int]] = []
    if not kernels:
        return busy, gaps
    begin, last = kernels[0].start_ns, 0
    for index, kernel in enumerate(kernels):
        end = kernels[last].end_ns
        if kernel.start_ns > end:
            busy += end - begin
            begin = kernel.start_ns
            gaps.append((last, index))
        if kernel.end_ns > end:
            last = index
    return busy + kernels[last].end_ns - begin, gaps


def summarised(steps: Sequence[StepTimeline], source: Source, notes: Sequence[str] = ()) -> ProfiledSteps:
    """Return what *steps* have in common: medians, and the operators that the device waited for.

    Args:
        steps: At least one.
        source: As in :class:`~gpu_timed.step_timeline.ProfiledSteps`.
        notes: What is to be known already; more is added where the steps differ.
    """
    gaps = [gap for step in steps for gap in step.gaps]
    launches = [step.launches for step in steps if step.launches is not None]
    late = [gap.duration_ns for gap in gaps if gap.host_late == "yes"]
    known = not gaps or any(gap.host_late != "unknown" for gap in gaps)
    return ProfiledSteps(
        steps=tuple(steps),
        source=source,
        kernels=_median(step.kernel_count for step in steps),
        copies=_median(step.copy_count for step in steps),
        launches=_median(launches) if launches else _NO_CALLS,
        busy_ns=_median(step.busy_ns for step in steps),
        span_ns=_median(step.span_ns for step in steps),
        gap_count=_median(len(step.gaps) for step in steps),
        gap_ns=_median(gap.duration_ns for gap in gaps) if gaps else _NO_GAPS,
        late_ns=round(sum(late) / len(steps)) if known else _NO_CALLS,
        operators=_by_operator(gaps, len(steps)),
        notes=(*notes, *_differences(steps)),
    )


def busy_ratio(busy_ns: int, wall_ns: float) -> float | Missing:
    """Return which part of a call's time the device worked.

    Args:
        busy_ns: Of a profiled step: the durations of kernels are not the profiler's.
        wall_ns: Of an *unprofiled* call, from its begin until the device was done: the profiler's own cost is not
            in it. Near 1 the two passes' clocks may differ by more than the rest, so it can exceed 1 a little.
    """
    return busy_ns / wall_ns if wall_ns > 0 else Missing("no_time")


def idle_before(steps: Sequence[StepTimeline]) -> Measured:
    """Return how long the device waited from the host's begin of a step for its first work, as a median."""
    found = [step.start_ns for step in steps if step.kernels]
    return _median(found) if found else Missing("needs_kernel_records", "nothing ran")


def _launches(calls: Iterable[HostSpan], operators: Iterable[HostSpan]) -> Mapping[int, _Launch]:
    """Return each call by its correlation, with the innermost and the outermost operator around it on its thread."""
    by_thread: dict[int, list[tuple[int, int, int, HostSpan]]] = defaultdict(list)
    for rank, spans in enumerate((operators, calls)):
        for span in spans:
            # Of spans that begin together the longer one is outside, and an operator outside of a call.
            by_thread[span.thread].append((span.start_ns, -span.end_ns, rank, span))
    found: dict[int, _Launch] = {}
    for entries in by_thread.values():
        entries.sort(key=lambda entry: entry[:3])
        around: list[HostSpan] = []
        for start, _, rank, span in entries:
            while around and around[-1].end_ns <= start:
                around.pop()
            if rank == 0:
                around.append(span)
            elif span.correlation:
                inner = around[-1].name if around else span.name
                outer = around[0].name if len(around) > 1 else ""
                found.setdefault(span.correlation, _Launch(start, span.end_ns, inner, outer))
    return found


def _timeline(kernels: list[Kernel], begin: int, end: int, launches: Mapping[int, _Launch]) -> StepTimeline:
    kernels.sort()
    busy, pairs = merged(kernels)
    gaps = []
    for before, after in pairs:
        first, then = kernels[before], kernels[after]
        late = _late(first, then, launches.get(then.launch), begin)
        gaps.append(Gap(first.end_ns, then.start_ns, then.operator, then.within, late))
    known = {kernel.launch for kernel in kernels}
    return StepTimeline(
        kernels=tuple(kernels),
        gaps=tuple(gaps),
        busy_ns=busy,
        launches=None if 0 in known else len(known),
        wall_ns=end - begin,
    )


def _late(first: Kernel, then: Kernel, launch: _Launch | None, begin: int) -> Answer:
    if first.launch == then.launch and then.launch:
        return "no"  # between two kernels of one graph
    if launch is None:
        return "unknown"
    return "yes" if launch.end_ns - begin > first.end_ns else "no"


def _by_operator(gaps: Iterable[Gap], steps: int) -> tuple[OperatorGaps, ...]:
    held: dict[tuple[str, str], list[int]] = defaultdict(list)
    for gap in gaps:
        if gap.operator and gap.host_late != "no":
            held[gap.operator, gap.within].append(gap.duration_ns)
    found = [
        OperatorGaps(operator, within, round(len(each) / steps), round(sum(each) / steps), _median(each))
        for (operator, within), each in held.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.total_ns, one.operator, one.within)))


def _differences(steps: Sequence[StepTimeline]) -> list[str]:
    notes = []
    counts = [step.kernel_count for step in steps]
    if min(counts) != max(counts):
        notes.append(f"The profiled steps differ: {min(counts)} to {max(counts)} kernels.")
    devices = {kernel.device for step in steps for kernel in step.kernels}
    if len(devices) > 1:
        notes.append(f"{len(devices)} devices worked: busy is where any of them did.")
    return notes


def _median(values: Iterable[int]) -> int:
    return round(median(values))
