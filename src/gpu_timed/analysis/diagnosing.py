"""What limits an arm, and what would help: words from its numbers.

The device was busy for the kernel time of a profiled pass, set beside the wall time of calls that nobody profiled: the
profiler widens gaps and no kernels. However well the same kernels are launched, a call takes no less than that.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from gpu_timed.analysis import throughput
from gpu_timed.arms import Arm, BreakEven, Diagnosis, Limit, Verdict
from gpu_timed.peaks import DevicePeaks
from gpu_timed.record import NOT_SET, Measured, Missing
from gpu_timed.step_timeline import ProfiledSteps, spoken
from gpu_timed.work import Work

DEVICE: Final = 0.85
"""Busy for at least this part of the time, the device is what limits."""
LAUNCH: Final = 0.6
"""Busy for less than this part, and the host launching for most of it, launching is what limits."""
LAUNCHING: Final = 0.7
"""Part of the wall time that the host launches, from which on it is held to be what the device waits for."""
_SAME_WORK: Final = frozenset({"eager", "cuda_graph"})
"""Modes that run the same kernels: what one saves on the other is launching."""
_GRAPHS: Final = frozenset({"cuda_graph", "reduce-overhead", "max-autotune"})
_GRAPHED: Final = "It is launched as a graph already"
_NEAR_PEAK: Final = 0.6
_HARDLY: Final = 0.3


class Typical(NamedTuple):
    """Medians over blocks of an arm's warm calls, in nanoseconds."""

    wall_ns: int
    launch_ns: int
    device_ns: Measured


def typical(arm: Arm) -> Typical:
    """Return the medians over blocks of the samples of *arm*, of which there must be some."""
    samples = arm.samples
    device = samples.device_ns
    return Typical(
        round(samples.typical(samples.wall_ns)),
        round(samples.typical(samples.launch_ns)),
        device if isinstance(device, Missing) else round(samples.typical(device)),
    )


def diagnose(
    arm: Arm, *, work: Work | None = None, peaks: DevicePeaks | Missing = NOT_SET, graph: Arm | None = None
) -> Diagnosis:
    """Say what limits *arm*.

    Args:
        arm: With samples.
        work: What one call has to do.
        peaks: What the device was measured to do at most.
        graph: An arm that launched the same kernels as a CUDA Graph, with equal outputs, where there is one.
    """
    held, steps = typical(arm), arm.timeline
    if isinstance(steps, Missing):
        return _from_marks(arm, held, graph, work, peaks)
    wall, busy = held.wall_ns, steps.busy_ns
    if busy <= 0 or wall <= 0:
        return Diagnosis(bound="unknown", sentences=("No kernel ran in the profiled steps.",), busy_ns=busy)
    ratio = busy / wall
    idle, ceiling = max(0.0, 1 - ratio), max(1.0, wall / busy)
    operator = steps.operators[0].operator if steps.operators else ""
    source = "kernel time from a profiled pass, wall time from calls that were not profiled"
    said = [f"The device was busy for {_time(busy)} of {_time(wall)} ({ratio:.0%}): {source}."]
    bound: Limit
    if ratio >= DEVICE:
        bound = "device"
        said.append("Device-bound: the device hardly waits for the host.")
        said.append(
            f"{_GRAPHED if arm.ran in _GRAPHS else 'A CUDA Graph cannot help here'}: better launching makes it at most "
            f"{ceiling:.2f} times as fast. Less work or faster kernels would."
        )
    elif ratio < LAUNCH and held.launch_ns >= LAUNCHING * wall and not _own_gaps(steps):
        bound = "launch"
        said.append(
            f"Launch-bound: the host launches for {held.launch_ns / wall:.0%} of the time, {steps.kernels:,} kernels a "
            f"call, and the device is idle for {idle:.0%} of it."
        )
        said.append(
            f"Fewer launches (a CUDA Graph, reduce-overhead, fusion) make it at most {ceiling:.3g} times as fast, for "
            f"the kernels take {_time(busy)}; more work in each launch (a larger batch) costs little until then."
        )
    else:
        bound = "mixed"
        said.append(
            f"Mixed: the device is idle for {idle:.0%} of the time, and the host launches for "
            f"{held.launch_ns / wall:.0%} of it. Better launching makes it at most {ceiling:.3g} times as fast."
        )
        if _own_gaps(steps):
            said.append(
                "Most of the gaps are the device's own (starting kernels, waiting for each other): what follows had "
                "been launched by then, and no faster host would close them."
            )
    each = max(0, wall - busy) // steps.gap_count if steps.gap_count else NOT_SET
    said += _gaps(steps, each)
    said += _throughput(work, busy, peaks)
    return Diagnosis(
        bound=bound,
        sentences=tuple(said),
        busy_ratio=ratio,
        busy_ns=busy,
        idle_share=idle,
        typical_gap_ns=steps.gap_ns,
        idle_per_gap_ns=each,
        typical_operator=operator or Missing("unknown"),
        ceiling=ceiling,
    )


def _gaps(steps: ProfiledSteps, each: Measured) -> list[str]:
    """Say how long a gap is, and what the device waited for.

    What it waited for the host is longer in the profiled pass: how long in other calls is told by their idle time.
    """
    if isinstance(steps.gap_ns, Missing) or not steps.gap_count:
        return []
    late = sum(one.gaps for one in steps.operators)
    most = steps.operators[0] if late else None
    text = f"The typical gap between kernels is {_time(steps.gap_ns)}"
    if late < steps.gap_count / 2:
        said = [f"{text} ({_gap_count(steps.gap_count)} a call)."]
        if most is not None:
            said.append(
                f"For the host the device waited in {late:,} of them, longest for what {spoken(most.operator)} "
                f"launches ({_time(most.total_ns)} a call in the profiled pass)."
            )
        return said
    shared = f" Unprofiled, a call's idle time is {_time(each)} for each of its gaps." if isinstance(each, int) else ""
    said = [f"{text} in the profiled pass, which slows the host ({_gap_count(steps.gap_count)} a call).{shared}"]
    if most is not None:
        part = most.total_ns / max(1, sum(one.total_ns for one in steps.operators))
        said.append(
            f"It waited longest for what {spoken(most.operator)} launches: {part:.0%} of that time, in "
            f"{_gap_count(most.gaps)}."
        )
    return said


def _gap_count(count: int) -> str:
    return f"{count:,} gap" if count == 1 else f"{count:,} gaps"


def _own_gaps(steps: ProfiledSteps) -> bool:
    """Return whether the device hardly waited for the host between its kernels, as far as that is known."""
    late = steps.late_ns
    return isinstance(late, int) and steps.idle_ns > 0 and late < _HARDLY * steps.idle_ns


def _from_marks(
    arm: Arm, held: Typical, graph: Arm | None, work: Work | None, peaks: DevicePeaks | Missing
) -> Diagnosis:
    """Say what can be said without kernel records."""
    why = arm.timeline
    assert isinstance(why, Missing)  # noqa: S101 - the caller looked
    if isinstance(held.device_ns, Missing):
        text = (
            f"No device time was measured ({held.device_ns.detail or held.device_ns.reason}): what limits is unknown."
        )
        return Diagnosis(bound="unknown", sentences=(text,))
    said = [f"How busy the device was is not known ({why.detail or why.reason})."]
    if held.launch_ns < (1 - LAUNCHING) * held.wall_ns:
        said.insert(
            0,
            f"Device-bound: the host had launched everything after {_time(held.launch_ns)}, and the device was done "
            f"after {_time(held.wall_ns)}.",
        )
        said += _throughput(work, held.device_ns, peaks)
        return Diagnosis(bound="device", sentences=tuple(said))
    if graph is not None and arm.ran == "eager":
        least = typical(graph).wall_ns
        if least < (1 - (1 - LAUNCH) / 2) * held.wall_ns:
            said.insert(
                0,
                f"Launch-bound: the same kernels take {_time(least)} as a CUDA Graph, in place of "
                f"{_time(held.wall_ns)}: at least {1 - least / held.wall_ns:.0%} of the time goes into launching.",
            )
            return Diagnosis(bound="launch", sentences=tuple(said))
    said.append("What limits cannot be told from marks alone.")
    return Diagnosis(bound="unknown", sentences=tuple(said))


def _throughput(work: Work | None, device_ns: Measured, peaks: DevicePeaks | Missing) -> list[str]:
    """Say which part of what the device can do at most is reached, and so what limits the kernels."""
    if work is None:
        return []
    done = throughput.done(work, device_ns, peaks)
    if done.exceeds_peak is True:
        return ["More work was stated than the device can have done in that time: check work=."]
    shares = {"compute": done.flops_share, "memory": done.bytes_share}
    known = {name: share for name, share in shares.items() if isinstance(share, float)}
    if not known:
        absent = next(
            (share for share in shares.values() if isinstance(share, Missing) and share is not NOT_SET), NOT_SET
        )
        return [f"Whether memory or arithmetic limits its kernels is not known ({absent.detail or absent.reason})."]
    name = max(known, key=lambda each: known[each])
    of = "the measured bandwidth of the memory" if name == "memory" else f"the measured {done.flops_peak} peak"
    limit = (
        {"compute": "Compute-bound", "memory": "Memory-bound"}[name]
        if known[name] >= _NEAR_PEAK
        else "Below both peaks"
    )
    return [f"{limit}: while they run, its kernels reach {known[name]:.0%} of {of}."]


def break_even(arm: Arm, baseline: Arm, verdict: Verdict) -> BreakEven:
    """Return after how many calls *arm* has paid for what it took once, beyond what the baseline took once."""
    mine, other = arm.cold.one_off_ns, baseline.cold.one_off_ns
    if isinstance(mine, Missing):
        return BreakEven(arm=arm.name, calls=mine, extra_one_off_ns=mine)
    if isinstance(other, Missing):
        return BreakEven(arm=arm.name, calls=other, extra_one_off_ns=other)
    once = max(0, mine - other)
    gain = typical(baseline).wall_ns - typical(arm).wall_ns
    if verdict.word == "slower":
        calls: Measured = Missing("slower", "it never pays: its warm calls are slower")
    elif verdict.word != "faster":
        calls = Missing("not_told", "it was not found to be faster")
    elif gain <= 0:
        calls = Missing("not_told", "it is faster on the device, and saves no wall time")
    else:
        calls = math.ceil(once / gain)
    return BreakEven(arm=arm.name, calls=calls, extra_one_off_ns=once, gain_ns=gain)


def same_kernels_as_graph(arm: Arm, arms: tuple[Arm, ...]) -> Arm | None:
    """Return the arm that ran the same kernels as a CUDA Graph, with outputs that agree; None without one."""
    for other in arms:
        agreed = not isinstance(other.agreement, Missing) and other.agreement.equal
        if other is not arm and other.ran == "cuda_graph" and agreed and len(other.samples) and arm.ran in _SAME_WORK:
            return other
    return None


def _time(duration_ns: int) -> str:
    for unit, size in (("s", 1_000_000_000), ("ms", 1_000_000), ("µs", 1_000)):
        if duration_ns >= size:
            return f"{duration_ns / size:.3g} {unit}"
    return f"{duration_ns} ns"
