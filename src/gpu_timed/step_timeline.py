"""What a device did in a profiled step: its kernels, the gaps between them, and which host operator they waited for.

All of it comes from kernel records, in a pass of its own: recording costs the host time, which widens gaps and not
kernels. So the durations of kernels hold for unprofiled calls too, and the lengths of gaps are those of the profiled
pass. A busy ratio that is free of the profiler divides :attr:`ProfiledSteps.busy_ns` by the wall time of an
*unprofiled* call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from gpu_timed.record import Answer, Measured

Execution: TypeAlias = Literal["kernel", "memcpy", "memset"]
Source: TypeAlias = Literal["kineto", "cupti"]
_COMPILED: Final = re.compile(r"## Call CompiledFxGraph (\w{6})\w* ##")
"""What Inductor calls the annotation around one of its graphs (torch 2.6 to 2.13): a hash of 50 letters."""


def spoken(operator: str) -> str:
    """Return the name of an operator or annotation as one can say it: hashes are cut."""
    return _COMPILED.sub(r"a compiled graph of torch (\1)", operator)


class Kernel(NamedTuple):
    """One kernel, copy or memset as the device ran it. Nanoseconds since the host began the step."""

    start_ns: int
    end_ns: int
    name: str
    kind: Execution = "kernel"
    device: int = 0
    """Index among the devices that this process sees."""
    stream: int = 0
    """The recorder's number of the stream: not the raw handle."""
    operator: str = ""
    """Innermost host operator or annotation whose call launched it; else that call itself; empty where not known."""
    within: str = ""
    """The outermost operator or annotation inside the step around that; empty where there is none other."""
    launch: int = 0
    """One number for one launch: all kernels of a graph's replay have the same. 0 where not known."""

    @property
    def duration_ns(self) -> int:
        """How long it ran."""
        return self.end_ns - self.start_ns


class Gap(NamedTuple):
    """A time between the first and the last work of a step in which nothing ran. Nanoseconds, as in :class:`Kernel`."""

    start_ns: int
    end_ns: int
    operator: str = ""
    """The operator of the work that ended it: what the host was launching while the device waited."""
    within: str = ""
    """As in :class:`Kernel`."""
    host_late: Answer = "unknown"
    """Whether the call that launched that work returned only after the device had run dry. ``no``: it was queued in
    time, and the gap is the device's own (what starting a kernel takes, a dependency, a gap inside a graph)."""

    @property
    def duration_ns(self) -> int:
        """How long nothing ran."""
        return self.end_ns - self.start_ns


class OperatorGaps(NamedTuple):
    """The gaps that the host was late for and that ended with work of one operator, in all profiled steps together."""

    operator: str
    within: str
    gaps: int
    """How many, a step (mean, rounded)."""
    total_ns: int
    """How long together, a step (mean)."""
    typical_ns: int
    """Median of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """One profiled step. Nanoseconds; positions count from where the host began the step."""

    kernels: tuple[Kernel, ...]
    """All work of the device, copies and memsets too, in the order in which it began."""
    gaps: tuple[Gap, ...]
    """In order. Together with :attr:`busy_ns` they are :attr:`span_ns`."""
    busy_ns: int
    """How long at least one kernel, copy or memset ran: where several did, on any streams, it counts once."""
    launches: int | None
    """Calls of the host that gave the device work (a graph's replay is one); None where they were not recorded."""
    wall_ns: int | None = None
    """Host time from the begin of the step until the device was done, *with* the profiler's own cost in it."""

    @property
    def start_ns(self) -> int:
        """Where the first work began; 0 without any."""
        return self.kernels[0].start_ns if self.kernels else 0

    @property
    def end_ns(self) -> int:
        """Where the last work ended; 0 without any."""
        return max((kernel.end_ns for kernel in self.kernels), default=0)

    @property
    def span_ns(self) -> int:
        """From the first start to the last end."""
        return self.end_ns - self.start_ns

    @property
    def idle_ns(self) -> int:
        """How much of that nothing ran."""
        return self.span_ns - self.busy_ns

    @property
    def kernel_count(self) -> int:
        """Kernels alone, without copies and memsets."""
        return sum(kernel.kind == "kernel" for kernel in self.kernels)

    @property
    def copy_count(self) -> int:
        """Copies and memsets."""
        return len(self.kernels) - self.kernel_count


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledSteps:
    """Some profiled steps of one arm, and what they have in common: medians over the steps. Nanoseconds."""

    steps: tuple[StepTimeline, ...]
    """At least one."""
    source: Source
    """Who recorded: torch's profiler (Kineto), or CUPTI by itself, which knows no operators."""
    kernels: int
    """Kernels of a step."""
    copies: int
    """Copies and memsets of a step."""
    launches: Measured
    """Calls of the host that gave the device work, of a step."""
    busy_ns: int
    span_ns: int
    """From the first start to the last end, with the profiler's own cost in it where the host is late."""
    gap_count: int
    gap_ns: Measured
    """The typical gap: median over all gaps of all steps."""
    late_ns: Measured
    """How long of a step (mean) the device waited for the host's next launch, between the first and the last work:
    the gaps whose ``host_late`` is ``yes``. The other gaps no faster host would take away."""
    operators: tuple[OperatorGaps, ...] = ()
    """Whom the device waited for, those with most gap time first; none where all gaps are the device's own."""
    notes: tuple[str, ...] = ()
    """What is to be known of these figures: sentences."""

    @property
    def idle_ns(self) -> int:
        """How much of the span nothing ran, in the profiled pass."""
        return max(0, self.span_ns - self.busy_ns)

    @property
    def typical(self) -> StepTimeline:
        """The step whose span is the median one: the one to draw."""
        return sorted(self.steps, key=lambda step: step.span_ns)[(len(self.steps) - 1) // 2]
