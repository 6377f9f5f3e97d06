"""Comparisons with figures like those of a decode step on an H200, for what shows them. Nothing is measured."""

from __future__ import annotations

import random
from typing import Any

from gpu_timed.analysis.timeline import HostSpan, summarised, timelines
from gpu_timed.arms import (
    Agreement,
    Arm,
    BreakEven,
    ColdPhase,
    Comparison,
    Diagnosis,
    Environment,
    Point,
    Samples,
    Verdict,
)
from gpu_timed.record import Missing
from gpu_timed.step_timeline import Kernel, ProfiledSteps

EVIL = "<script>alert('1')</script>&\"'"
BUSY_MS = {1: 2.54, 8: 3.28, 32: 5.06}
_OPERATORS = ("aten::addmm", "aten::mul", "aten::copy_", "aten::mm", "aten::pow", "aten::cat", "aten::add")


def profile(kernels: int, busy_ms: float, *, launch_us: float | None, seed: int = 1) -> ProfiledSteps:
    """Return steps of *kernels* kernels; the host launches one every *launch_us*, or all of them as a graph."""
    chance = random.Random(seed)
    work, calls, operators, steps = [], [], [], []
    at, correlation = 1_000_000, 1
    for _ in range(3):
        begin, free, host = at, at, at + 3_000
        for index in range(kernels):
            lasts = round(busy_ms * 1e6 / kernels * chance.uniform(0.3, 1.7))
            name = _OPERATORS[index % len(_OPERATORS)]
            if launch_us is None:
                start = max(free + chance.randrange(500, 1_200), at + 9_000)
                if not index:
                    calls.append(HostSpan(at + 2_000, at + 8_000, "cudaGraphLaunch", 1, correlation))
            else:
                host += round(launch_us * 1e3 * chance.lognormvariate(-0.1, 0.5))
                calls.append(HostSpan(host, host + 3_000, "cudaLaunchKernel", 1, correlation + index))
                operators.append(HostSpan(host - 2_000, host + 4_000, name, 1))
                operators.append(HostSpan(host - 4_000, host + 5_000, "aten::linear", 1))
                start = max(free + 900, host + 4_000)
            free = start + lasts
            work.append(
                Kernel(
                    start,
                    free,
                    f"void at::native::kernel<{name}, 4>(int)",
                    stream=7 + (index % 40 == 39),
                    launch=correlation if launch_us is None else correlation + index,
                )
            )
        steps.append((begin, max(free, host) + 20_000))
        at, correlation = free + 3_000_000, correlation + kernels
    return summarised(timelines(work, steps, calls=calls, operators=operators), "kineto")


def samples(wall_ms: float, device_ms: float, launch_ms: float, *, count: int = 240, seed: int = 3) -> Samples:
    """Return noisy samples with a few outliers."""
    chance = random.Random(seed)
    wall = [
        round(1e6 * wall_ms * chance.lognormvariate(0, 0.02) * (1.4 if chance.random() < 0.02 else 1))
        for _ in range(count)
    ]
    return Samples(
        block=tuple(index // 12 for index in range(count)),
        wall_ns=tuple(wall),
        launch_ns=tuple(round(one * launch_ms / wall_ms) for one in wall),
        device_ns=tuple(round(one * device_ms / wall_ms) for one in wall),
    )


def comparison(batch: int = 1, *, kernels: int = 1_105, **more: Any) -> Comparison:
    """Return three arms: eager, a faster graph, and one that fell back."""
    busy = BUSY_MS[batch]
    eager = 21.7
    arms = (
        Arm(
            name="eager",
            mode="eager",
            ran="eager",
            samples=samples(eager, eager - 0.1, eager - 0.3),
            timeline=profile(kernels, busy, launch_us=24e3 / kernels),
            cold=ColdPhase(one_off_ns=812_000_000, settled=True),
            agreement=Agreement(equal=True, exact=True),
            memory_held_bytes=0,
        ),
        Arm(
            name="cuda_graph",
            mode="cuda_graph",
            ran="cuda_graph",
            samples=samples(busy * 1.17, busy * 1.16, 0.12, seed=4),
            timeline=profile(kernels, busy, launch_us=None, seed=2),
            cold=ColdPhase(one_off_ns=1_403_000_000, settled=True),
            agreement=Agreement(equal=True, max_abs=2e-3, max_rel=1e-2, text="equal within 1e-2"),
            memory_held_bytes=310 << 20,
        ),
        Arm(
            name="reduce-overhead",
            mode="reduce-overhead",
            ran="eager",
            reason="torch skipped CUDA Graphs: a mutated input",
            samples=samples(eager * 0.99, eager, eager - 0.2, seed=5),
            cold=ColdPhase(one_off_ns=61_000_000_000),
            agreement=Agreement(equal=True, exact=True),
        ),
    )
    ratio = busy * 1.17 / eager
    return Comparison(
        **{
            "name": "decode",
            "arms": arms,
            "baseline": "eager",
            "verdicts": (
                Verdict(
                    arm="cuda_graph",
                    against="eager",
                    word="faster",
                    reason="the interval lies below 0.99",
                    ratio=ratio,
                    low=ratio * 0.995,
                    high=ratio * 1.006,
                    level=0.99,
                    blocks=20,
                ),
                Verdict(
                    arm="reduce-overhead",
                    against="eager",
                    word=None,
                    reason="It ran as eager, so nothing can be said of reduce-overhead.",
                ),
            ),
            "diagnoses": {
                "eager": Diagnosis(
                    bound="launch",
                    sentences=(
                        f"Launch-bound: the device works for {100 * busy / eager:.1f} % of a call.",
                        f"Launching better can make it at most {eager / busy:.1f} times as fast.",
                    ),
                    busy_ratio=busy / eager,
                    idle_share=1 - busy / eager,
                ),
                "cuda_graph": Diagnosis(bound="device", sentences=("Device-bound.",), busy_ratio=1 / 1.17),
            },
            "break_evens": {
                "cuda_graph": BreakEven(arm="cuda_graph", calls=32),
                "reduce-overhead": BreakEven(arm="reduce-overhead", calls=Missing("not_told")),
            },
            "environment": Environment(
                card="NVIDIA H200",
                clock="cuda_event",
                driver="580.95.05",
                versions={"python": "3.12.3", "torch": "2.11.0+cu130", "gpu_timed": "0.1.0"},
                platform="Linux",
                date="2026-11-30",
                sm_clock_mhz=(1965, 1980),
                throttle=(),
                host_load=0.21,
            ),
            "notes": ("The baseline's second run gave the same outputs to the bit.",),
            "seed": 17,
            "blocks": 20,
            "stopped": "the interval was narrow enough",
            "seconds": 18.2,
            **more,
        }
    )


def host_only() -> Comparison:
    """Return two arms of a machine without a device."""
    held = comparison()
    arms = tuple(
        Arm(
            name=name,
            mode="as_given",
            ran="eager",
            samples=Samples(block=one.block, wall_ns=one.wall_ns, launch_ns=one.launch_ns),
            timeline=Missing("no_device", "torch finds no CUDA device"),
        )
        for name, one in (("mine", held.arms[0].samples), (EVIL, held.arms[2].samples))
    )
    verdict = Verdict(
        arm=EVIL, against="mine", word="ambiguous", reason="The budget ran out.", ratio=0.99, low=0.97, high=1.01
    )
    return Comparison(name=EVIL, arms=arms, baseline="mine", verdicts=(verdict,), blocks=20, stopped="budget")


def refused() -> Comparison:
    """Return a comparison that was refused."""
    return Comparison(
        name="decode",
        arms=(Arm(name="eager", mode="eager"), Arm(name="cuda_graph", mode="cuda_graph")),
        baseline="eager",
        refused="two eager runs from the same inputs gave different outputs: give reset=.",
    )


def swept(batches: tuple[int, ...] = (1, 8, 32), *, kernels: int = 1_105) -> Comparison:
    """Return a sweep over batch sizes."""
    points = tuple(Point(batch, comparison(batch, kernels=kernels)) for batch in batches)
    return Comparison(
        name="decode",
        arms=(),
        baseline="eager",
        sweep="batch",
        points=points,
        environment=points[0].comparison.environment,
    )
