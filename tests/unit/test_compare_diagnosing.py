"""What limits an arm, in words from its numbers; unlike circumstances; and when there is no verdict at all."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from gpu_timed import DevicePeaks, Missing, Work
from gpu_timed.analysis.concluding import Time, conclude
from gpu_timed.analysis.deciding import Decider
from gpu_timed.analysis.diagnosing import break_even, diagnose, same_kernels_as_graph
from gpu_timed.analysis.likeness import unlike
from gpu_timed.arms import Agreement, Arm, ColdPhase, Samples, Turn, Verdict
from gpu_timed.option_names import on_the_command_line
from gpu_timed.step_timeline import OperatorGaps, ProfiledSteps, spoken

US, MS = 1_000, 1_000_000
UNKNOWN = Missing("unknown")


def arm(
    name: str = "eager",
    *,
    wall_ns: int = 21_700 * US,
    launch_ns: int = 21_500 * US,
    device_ns: Any = None,
    busy_ns: int | None = None,
    late_ns: Any = UNKNOWN,
    more_gaps: tuple[OperatorGaps, ...] = (OperatorGaps("aten::add", "", 900, 1 * MS, 10 * US),),
    **more: Any,
) -> Arm:
    timeline: Any = Missing("not_profiled", "not asked for")
    if busy_ns is not None:
        timeline = ProfiledSteps(
            steps=(),
            source="kineto",
            kernels=1105,
            copies=0,
            launches=1105,
            busy_ns=busy_ns,
            span_ns=wall_ns,
            gap_count=1104,
            gap_ns=17 * US,
            late_ns=late_ns,
            operators=(OperatorGaps("aten::mm", "aten::linear", 155, 3 * MS, 15 * US), *more_gaps),
        )
    held = Samples(
        block=(0, 0, 0),
        wall_ns=(wall_ns, wall_ns - 1, 10 * wall_ns),
        launch_ns=(launch_ns,) * 3,
        device_ns=(wall_ns,) * 3 if device_ns is None else device_ns,
    )
    return Arm(**{"name": name, "mode": name, "ran": name, "samples": held, "timeline": timeline} | more)


def said(found: Any) -> str:
    return " ".join(found.sentences)


def test_launch_bound() -> None:
    """The decode step of a small model, as it was measured."""
    found = diagnose(arm(busy_ns=2_540 * US))
    assert found.bound == "launch"
    assert found.busy_ratio == pytest.approx(2.54 / 21.7, rel=1e-3)
    assert found.idle_share == pytest.approx(1 - 2.54 / 21.7, rel=1e-3)
    assert found.ceiling == pytest.approx(21.7 / 2.54, rel=1e-3)
    assert found.typical_gap_ns == 17 * US
    assert found.typical_operator == "aten::mm"
    words = said(found)
    assert "busy for 2.54 ms of 21.7 ms (12%)" in words
    assert "at most 8.54 times as fast" in words
    assert "1,105 kernels" in words
    assert "typical gap between kernels is 17 µs in the profiled pass, which slows the host (1,104 gaps" in words
    assert found.idle_per_gap_ns == (21_700 - 2_540) * US // 1_104
    assert "Unprofiled, a call's idle time is 17.4 µs for each of its gaps." in words
    assert "It waited longest for what aten::mm launches: 75% of that time, in 155 gaps." in words
    assert "from a profiled pass" in words


def test_device_bound() -> None:
    found = diagnose(arm(wall_ns=10 * MS, launch_ns=1 * MS, busy_ns=9_700 * US))
    assert found.bound == "device"
    assert "A CUDA Graph cannot help here" in said(found)
    assert "at most 1.03 times" in said(found)


def test_what_is_a_graph_already_is_not_told_to_become_one() -> None:
    words = said(diagnose(arm("cuda_graph", wall_ns=10 * MS, launch_ns=1 * MS, busy_ns=9_700 * US)))
    assert "already" in words
    assert "cannot help" not in words


@pytest.mark.parametrize(("busy_ns", "launch_ns"), [(7 * MS, 9 * MS), (3 * MS, 2 * MS)])
def test_mixed(busy_ns: int, launch_ns: int) -> None:
    """Either it is in between, or the device waits for something else than launches."""
    found = diagnose(arm(wall_ns=10 * MS, launch_ns=launch_ns, busy_ns=busy_ns))
    assert found.bound == "mixed"
    assert f"the host launches for {launch_ns / MS / 10:.0%}" in said(found)


def test_gaps_of_the_devices_own_are_not_the_hosts() -> None:
    """As in a graph, or where the function waits inside its launch."""
    assert diagnose(arm(busy_ns=2 * MS, late_ns=15 * MS)).bound == "launch"
    found = diagnose(arm(busy_ns=2 * MS, late_ns=1 * MS))
    assert found.bound == "mixed"
    assert "no faster host would close them" in said(found)


def test_few_gaps_that_waited_for_the_host_are_not_the_typical_one() -> None:
    """As between the two graphs of a compiled model: one long gap, and hundreds that are the device's own."""
    found = diagnose(arm("reduce-overhead", busy_ns=20 * MS, more_gaps=()))
    words = said(found)
    assert "The typical gap between kernels is 17 µs (1,104 gaps a call)." in words
    assert "For the host the device waited in 155 of them, longest for what aten::mm launches (3 ms" in words
    assert "Unprofiled" not in words


def test_names_of_compiled_graphs_can_be_said() -> None:
    name = "## Call CompiledFxGraph faoqnf6dg7fx372jjc22ysuxruem2y3dndoc4tytjuf7yjeggijb ##"
    assert spoken(name) == "a compiled graph of torch (faoqnf)"
    assert spoken("aten::mm") == "aten::mm"


def test_busy_for_longer_than_it_took_is_all_of_it() -> None:
    found = diagnose(arm(wall_ns=10 * MS, busy_ns=11 * MS))
    assert (found.bound, found.idle_share, found.ceiling) == ("device", 0.0, 1.0)


def test_no_kernels() -> None:
    assert diagnose(arm(busy_ns=0)).bound == "unknown"


def test_by_marks_alone() -> None:
    assert diagnose(arm()).bound == "unknown"
    assert "cannot be told from marks alone" in said(diagnose(arm()))
    found = diagnose(arm(launch_ns=2 * MS))
    assert found.bound == "device"
    assert "launched everything after 2 ms" in said(found)
    assert found.busy_ratio == Missing("not_set")
    nowhere = arm(device_ns=Missing("no_device", "no GPU here"))
    assert diagnose(nowhere).bound == "unknown"
    assert "no GPU here" in said(diagnose(nowhere))


def test_by_what_a_graph_of_the_same_kernels_takes() -> None:
    agreed = Agreement(equal=True)
    graph = arm("cuda_graph", wall_ns=2_980 * US, launch_ns=100 * US, agreement=agreed)
    eager = arm()
    assert same_kernels_as_graph(eager, (eager, graph)) is graph
    found = diagnose(eager, graph=graph)
    assert found.bound == "launch"
    assert "at least 86% of the time goes into launching" in said(found)
    assert diagnose(eager, graph=arm("cuda_graph", wall_ns=20 * MS)).bound == "unknown"
    for other in (
        replace(graph, agreement=Agreement(equal=False)),
        replace(graph, ran="eager"),
        replace(graph, samples=Samples()),
    ):
        assert same_kernels_as_graph(eager, (eager, other)) is None
    assert same_kernels_as_graph(replace(eager, ran="compile"), (eager, graph)) is None


PEAKS = DevicePeaks(uuid="GPU-1", flops_per_s={"bf16": 700e12}, bytes_per_s={"memory": 4e12})


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (Work(bytes=4e12 * 0.008), "Memory-bound: while they run, its kernels reach 80% of the measured bandwidth"),
        (Work(flops=700e12 * 0.009, dtype="bf16"), "Compute-bound: while they run, its kernels reach 90% of the"),
        (Work(flops=700e12 * 0.001, bytes=4e12 * 0.002, dtype="bf16"), "Below both peaks"),
        (Work(flops=700e12, dtype="bf16"), "check work="),
        (Work(flops=1e9, dtype="fp64"), "is not known (not of fp64)"),
    ],
)
def test_memory_or_compute(work: Work, words: str) -> None:
    found = diagnose(arm(wall_ns=10_100 * US, launch_ns=1 * MS, busy_ns=10 * MS), work=work, peaks=PEAKS)
    assert words in said(found)
    assert "peak" not in said(diagnose(arm(wall_ns=10_100 * US, busy_ns=10 * MS)))


# -- break-even -----------------------------------------------------------------------------------------------


def verdict(word: Any) -> Verdict:
    return Verdict(arm="cuda_graph", against="eager", word=word, reason="")


def test_break_even() -> None:
    base = arm(cold=ColdPhase(one_off_ns=1 * MS))
    graph = arm("cuda_graph", wall_ns=1_700 * US, cold=ColdPhase(one_off_ns=101 * MS))
    found = break_even(graph, base, verdict("faster"))
    assert (found.calls, found.extra_one_off_ns, found.gain_ns) == (5, 100 * MS, 20 * MS)
    cheaper = replace(graph, cold=ColdPhase(one_off_ns=0))
    assert break_even(cheaper, base, verdict("faster")).calls == 0
    assert break_even(graph, base, verdict("slower")).calls == Missing(
        "slower", "it never pays: its warm calls are slower"
    )
    for word in ("same", "ambiguous", None):
        calls = break_even(graph, base, verdict(word)).calls
        assert isinstance(calls, Missing)
        assert calls.reason == "not_told"
    unknown = Missing("not_settled", "still compiling")
    for its, others in ((unknown, 1 * MS), (101 * MS, unknown), (unknown, unknown)):  # of which none is 0
        mine, other = (replace(one, cold=ColdPhase(one_off_ns=once)) for one, once in ((graph, its), (base, others)))
        found = break_even(mine, other, verdict("faster"))
        assert (found.calls, found.extra_one_off_ns) == (unknown, unknown)
    on_the_device = break_even(replace(graph, samples=base.samples), base, verdict("faster")).calls
    assert on_the_device == Missing("not_told", "it is faster on the device, and saves no wall time")


# -- circumstances --------------------------------------------------------------------------------------------


def turns(*clocks: Any, slowed: Any = False) -> list[Turn]:
    return [Turn(index, clock, (), slowed) for index, clock in enumerate(clocks)]


def test_clocks_apart_are_unlike() -> None:
    mine, other = turns(1980, 1965, 1980, 1980), turns(1980, 1980, 1965, 1980)
    assert unlike(mine, other).text == ""
    found = unlike(turns(1200, 1215, 1200, 1200), other)
    assert "1,200 MHz in its turns, and 1,980 MHz" in found.text
    assert found.handicapped == "mine"
    assert unlike(other, turns(1200, 1215, 1200, 1200)).handicapped == "other"
    # As far apart as each is by itself: noise.
    assert unlike(turns(1200, 1500, 1900, 1300, 1800), turns(1900, 1400, 1980, 1700, 1250)).text == ""
    gone = Missing("no_nvml")
    assert unlike(turns(gone, gone, gone, gone), other).text == ""
    assert unlike(turns(1200, 1200), turns(1980, 1980)).text == ""  # too few to tell


def test_a_throttle_that_hit_one_arm_is_unlike() -> None:
    slow, free = turns(1980, 1980, 1980, 1980, slowed=True), turns(1980, 1980, 1980, 1980)
    found = unlike(slow, free)
    assert "held the clocks down in 100% of its turns, and in 0% of the other's" in found.text
    assert found.handicapped == "mine"
    assert unlike(slow, slow).text == ""
    assert unlike(slow, turns(*[1980] * 4, slowed=Missing("no_nvml"))).text == ""
    most = [*free, *free, *free, *slow[:1]]
    assert unlike(most, free).text == ""


def test_who_is_faster_with_the_worse_of_it_is_faster() -> None:
    slow, free = tuple(turns(*[1980] * 4, slowed=True)), tuple(turns(*[1980] * 4))
    base, mine = arm(), arm("compile")

    def found(factor: float, its: Any, others: Any) -> Verdict:
        decider = decided("compile", factor=factor)
        return conclude(replace(mine, turns=its), replace(base, turns=others), decider, quantity="wall")

    assert found(0.5, slow, free).word == "faster"
    assert "although heat, power or a brake" in found(0.5, slow, free).reason
    assert found(2.0, free, slow).word == "slower"
    for factor, its, others in ((0.5, free, slow), (2.0, slow, free), (1.0, slow, free), (1.0, free, slow)):
        assert found(factor, its, others).word is None
        assert found(factor, its, others).reason.startswith("heat, power or a brake")


# -- no verdict -----------------------------------------------------------------------------------------------


def decided(*names: str, factor: float = 2.0) -> Decider:
    decider = Decider(["eager", *names], "eager", most_blocks=20)
    for block in range(20):
        decider.add({"eager": 100.0 + block % 3, **dict.fromkeys(names, factor * (100.0 + block % 3))})
    return decider


def test_how_much_time_would_tell_is_said_in_the_option_that_gives_it() -> None:
    def reason(blocks: int, time: Time | None = None, spread: int = 2) -> str:
        decider = Decider(["eager", "b"], "eager", most_blocks=20)
        for block in range(blocks):
            decider.add({"eager": 100.0, "b": 101.0 + spread * (block % 3 - 1)})
        found = conclude(arm(), arm("b"), None, quantity="wall", time=time)
        found = conclude(arm("b"), arm(), decider, quantity="wall", time=time)
        assert found.word == "ambiguous"
        assert isinstance(found.more, int)
        return found.reason

    assert reason(4, Time(0.5, 0.5)).endswith(
        "there was time for 4 blocks, and an interval takes 5; raise budget_s (now 0.5) to at least 0.63 s"
    )
    assert reason(4, Time(0.5, 2.0)).endswith("(now 0.5) to at least 2.5 s")  # what they took, where that was more
    assert reason(4).endswith("takes 5")
    more = conclude(arm("b"), arm(), _wavering(), quantity="wall").more
    assert isinstance(more, int)
    said = conclude(arm("b"), arm(), _wavering(), quantity="wall", time=Time(20, 18)).reason
    told = re.search(r"more than 1%; raise budget_s \(now 20\) to about (\d+) s$", said)
    assert told, said
    wanted = 20 * (20 + more) / 20
    assert wanted <= int(told[1]) < 1.1 * wanted + 1
    said = conclude(arm("b"), arm(), _wavering(), quantity="wall", time=Time(3_000, 3_000)).reason
    assert said.endswith("; it would take longer than budget_s can be (3600 s)")
    with on_the_command_line():
        assert "raise --budget (now 0.5)" in reason(4, Time(0.5, 0.5))


def _wavering() -> Decider:
    """Return what cannot tell, and could with some more blocks."""
    decider = Decider(["eager", "b"], "eager", most_blocks=20)
    for block in range(20):
        decider.add({"eager": 100.0, "b": 102.0 + 6 * (block % 3 - 1)})
    return decider


def test_a_verdict_and_none() -> None:
    base, mine = arm(agreement=Agreement(equal=True)), arm("compile", agreement=Agreement(equal=True))
    decider = decided("compile")
    found = conclude(mine, base, decider, quantity="wall")
    assert (found.word, found.ratio, found.blocks, found.level) == ("slower", pytest.approx(2.0), 20, 0.95)

    def why(mine: Arm = mine, base: Arm = base, **more: Any) -> str:
        found = conclude(mine, base, decider, quantity="wall", **more)
        assert found.word is None
        return found.reason

    assert why(replace(mine, refused="no memory")) == "no memory"
    assert why(base=replace(base, refused="moves")) == "eager was not measured: moves"
    assert why(replace(mine, mode="reduce-overhead", reason="skipped")) == (
        "it was asked to run as reduce-overhead and ran as compile: skipped"
    )
    assert why(base=replace(base, mode="cuda_graph", reason="not proven")).startswith("eager was asked to run as")
    assert why(replace(mine, strayed="it ran as eager after a while")) == "it ran as eager after a while"
    differs = Agreement(equal=False, text="[0]: far")
    assert why(replace(mine, agreement=differs)) == "its outputs differ: [0]: far"
    draws = why(replace(mine, agreement=differs), draws=True)
    assert draws.endswith(
        "draws random numbers, which modes may draw in another order: outputs='ignore' says not to compare them"
    )
    assert "outputs of eager did not stay the same" in why(base=replace(base, agreement=differs))
    assert conclude(replace(mine, agreement=differs), base, decider, quantity="wall", compared=False).word == "slower"
    assert conclude(mine, base, None, quantity="wall").reason == "nothing was measured"
