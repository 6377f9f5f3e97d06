"""Timelines of profiled steps: busy and gaps are the span, and a gap has the operator that the device waited for."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_timed.analysis.timeline import HostSpan, busy_ratio, idle_before, merged, summarised, timelines
from gpu_timed.record import Missing
from gpu_timed.step_timeline import Kernel

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
LAYER, LINEAR, MM = HostSpan(0, 100, "layer"), HostSpan(10, 60, "aten::linear"), HostSpan(20, 50, "aten::addmm")


@st.composite
def works(draw: st.DrawFn) -> list[Kernel]:
    """Work of a step of a million nanoseconds, on a few streams, in the order in which it began."""
    pairs = draw(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 100), st.integers(0, 3)), max_size=40))
    return sorted(Kernel(start, start + lasts, "k", stream=stream) for start, lasts, stream in pairs)


@PATIENT
@given(works())
def test_busy_and_gaps_are_the_span(kernels: list[Kernel]) -> None:
    (step,) = timelines(kernels, [(0, 2_000)])
    assert step.busy_ns + sum(gap.duration_ns for gap in step.gaps) == step.span_ns
    assert step.idle_ns == sum(gap.duration_ns for gap in step.gaps)
    assert all(gap.duration_ns > 0 for gap in step.gaps)


@PATIENT
@given(works())
def test_busy_is_what_counting_every_nanosecond_says(kernels: list[Kernel]) -> None:
    busy = {at for kernel in kernels for at in range(kernel.start_ns, kernel.end_ns)}
    assert merged(kernels)[0] == len(busy)


@PATIENT
@given(works(), st.randoms(use_true_random=False), st.integers(0, 1_000_000))
def test_neither_order_nor_streams_nor_where_the_step_lies_change_it(
    kernels: list[Kernel], chance: random.Random, moved: int
) -> None:
    (step,) = timelines(kernels, [(0, 2_000)])
    shuffled = [one._replace(start_ns=one.start_ns + moved, end_ns=one.end_ns + moved, stream=7) for one in kernels]
    chance.shuffle(shuffled)
    (other,) = timelines(shuffled, [(moved, moved + 2_000)])
    assert (other.busy_ns, other.gaps, other.start_ns, other.end_ns) == (
        *(step.busy_ns, step.gaps),
        *(step.start_ns, step.end_ns),
    )


@PATIENT
@given(works())
def test_cutting_a_kernel_in_two_changes_neither_busy_nor_gaps(kernels: list[Kernel]) -> None:
    cut = [
        piece
        for one in kernels
        for middle in [(one.start_ns + one.end_ns) // 2]
        for piece in (one._replace(end_ns=middle), one._replace(start_ns=middle))
    ]
    (step,), (other,) = timelines(kernels, [(0, 2_000)]), timelines(cut, [(0, 2_000)])
    assert (other.busy_ns, other.gaps) == (step.busy_ns, step.gaps)


def test_a_gap_has_the_operator_whose_launch_ended_it() -> None:
    calls = [HostSpan(1, 3, "cudaLaunchKernel", correlation=1), HostSpan(30, 40, "cudaLaunchKernel", correlation=2)]
    work = [Kernel(44, 60, "gemm", launch=2), Kernel(5, 10, "copy", launch=1)]
    (step,) = timelines(work, [(0, 100)], calls=calls, operators=[MM, LAYER, LINEAR])
    (gap,) = step.gaps
    assert (gap.start_ns, gap.end_ns) == (10, 44)
    assert (gap.operator, gap.within, gap.host_late) == ("aten::addmm", "layer", "yes")
    assert [(one.operator, one.within) for one in step.kernels] == [("layer", ""), ("aten::addmm", "layer")]
    assert (step.launches, step.kernel_count, step.wall_ns) == (2, 2, 100)


def test_operators_of_another_thread_or_that_have_ended_are_not_named() -> None:
    calls = [HostSpan(70, 72, "cudaLaunchKernel", correlation=1), HostSpan(30, 31, "cuLaunchKernel", 9, 2)]
    (step,) = timelines(
        [Kernel(33, 40, "a", launch=2), Kernel(75, 80, "b", launch=1)], [(0, 100)], calls=calls, operators=[LINEAR, MM]
    )
    assert [one.operator for one in step.kernels] == ["cuLaunchKernel", "cudaLaunchKernel"]


def test_work_that_was_queued_in_time_is_not_the_hosts_fault() -> None:
    calls = [HostSpan(at, at + 2, "cudaLaunchKernel", correlation=at) for at in (1, 4)]
    (step,) = timelines([Kernel(10, 20, "a", launch=1), Kernel(22, 30, "b", launch=4)], [(0, 50)], calls=calls)
    assert [gap.host_late for gap in step.gaps] == ["no"]


def test_a_gap_inside_a_graphs_replay_is_not_the_hosts_fault_though_its_launch_lasts() -> None:
    calls = [HostSpan(1, 40, "cudaGraphLaunch", correlation=5)]
    (step,) = timelines([Kernel(10, 20, "a", launch=5), Kernel(22, 30, "b", launch=5)], [(0, 50)], calls=calls)
    assert [(gap.host_late, gap.operator) for gap in step.gaps] == [("no", "cudaGraphLaunch")]
    assert (step.launches, step.kernel_count) == (1, 2)


def test_without_calls_nothing_is_said_of_launches() -> None:
    (step,) = timelines([Kernel(1, 2, "a"), Kernel(5, 6, "b")], [(0, 10)])
    assert step.launches is None
    assert [gap.host_late for gap in step.gaps] == ["unknown"]
    found = summarised([step], "cupti")
    assert isinstance(found.launches, Missing)
    assert isinstance(found.late_ns, Missing)
    assert found.gap_ns == 3


def test_work_belongs_to_the_step_that_launched_it() -> None:
    calls = [HostSpan(at, at + 1, "cudaLaunchKernel", correlation=at) for at in (1, 5, 15, 25, 120)]
    work = [Kernel(at + 10, at + 12, "k", launch=at) for at in (1, 5, 15, 25, 120)]
    # Launched at 1 and 15, outside of the steps; and one at 5 that began to run after its step had ended.
    first, second = timelines(work, [(2, 10), (20, 130)], calls=calls)
    assert [one.launch for one in first.kernels] == [5]
    assert [(one.launch, one.start_ns) for one in second.kernels] == [(25, 15), (120, 110)]


def test_copies_are_busy_and_no_kernels() -> None:
    work = [Kernel(0, 10, "k", launch=1), Kernel(20, 50, "Memcpy DtoH", "memcpy", launch=2)]
    (step,) = timelines(work, [(0, 60)])
    assert (step.kernel_count, step.copy_count, step.busy_ns) == (1, 1, 40)


def test_what_steps_have_in_common_is_their_median() -> None:
    def step(gap: int, kernels: int = 3) -> list[Kernel]:
        return [Kernel(at * (10 + gap), at * (10 + gap) + 10, "k", launch=at + 1) for at in range(kernels)]

    calls = [
        HostSpan(base + 11 + at, base + 12 + at, "launch", 0, 1 + at + base) for base in (0, 1000) for at in (0, 1)
    ]
    work = [
        Kernel(20 + 30 * at + base, 30 + 30 * at + base, "k", launch=1 + at + base)
        for base in (0, 1000)
        for at in (0, 1)
    ]
    steps = timelines(
        work, [(0, 100), (1000, 1100)], calls=calls, operators=[HostSpan(11, 12, "a"), HostSpan(12, 14, "b")]
    )
    found = summarised(steps, "kineto", ["said"])
    assert (found.kernels, found.launches, found.busy_ns, found.span_ns) == (2, 2, 20, 40)
    assert (found.gap_ns, found.gap_count, found.late_ns, found.idle_ns) == (20, 1, 0, 20)
    assert found.notes == ("said",)
    assert found.operators == ()  # all was queued in time: the device waited for nobody
    assert idle_before(steps) == 20
    more = summarised(
        [*timelines(step(5), [(0, 99)]), *timelines(step(7, 4), [(0, 99)]), *timelines(step(9), [(0, 99)])], "cupti"
    )
    assert (more.kernels, more.span_ns, more.typical.span_ns) == (3, 48, 48)
    assert more.notes == ("The profiled steps differ: 3 to 4 kernels.",)


def test_operators_come_by_their_gap_time() -> None:
    calls = [HostSpan(at, at + 8, "launch", 0, at) for at in (10, 110, 210)]
    work = [Kernel(1, 5, "k")] + [Kernel(at + 10, at + 20, "k", launch=at) for at in (10, 110, 210)]
    operators = [HostSpan(9, 20, "short"), HostSpan(109, 120, "long"), HostSpan(209, 220, "long")]
    steps = timelines(work, [(0, 300)], calls=calls, operators=operators)
    found = summarised(steps, "kineto").operators
    assert [(one.operator, one.gaps, one.total_ns, one.typical_ns) for one in found] == [
        ("long", 2, 180, 90),
        ("short", 1, 15, 15),
    ]


def test_of_no_work_nothing_is_made_up() -> None:
    (step,) = timelines([], [(0, 10)])
    found = summarised([step], "kineto")
    assert (step.busy_ns, step.span_ns, step.gaps, found.kernels) == (0, 0, (), 0)
    assert isinstance(found.gap_ns, Missing)
    assert isinstance(idle_before([step]), Missing)


def test_two_devices_are_told() -> None:
    (step,) = timelines([Kernel(0, 10, "a", device=0), Kernel(5, 15, "b", device=1)], [(0, 60)])
    assert step.busy_ns == 15
    assert summarised([step], "cupti").notes == ("2 devices worked: busy is where any of them did.",)


def test_the_busy_ratio_is_of_the_wall_time_it_is_given() -> None:
    assert busy_ratio(25, 100) == pytest.approx(0.25)
    assert busy_ratio(101, 100) == pytest.approx(1.01)  # two passes: not clamped
    assert isinstance(busy_ratio(25, 0), Missing)
