"""Comparing on a device made of arithmetic: who takes part, what is measured, what is said, and what is left behind."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from make_believe_nvml import FakeNvml

from gpu_timed import (
    ConfigurationError,
    CudaGraph,
    GpuTimedError,
    Missing,
    Work,
    compare,
    configure,
    current,
    flush,
    gpu_timed,
)
from gpu_timed.analysis.deciding import FIRST_LOOK
from gpu_timed.testing import FakeDevice, capture, use_device
from gpu_timed.views import words as table_words

LAUNCH, WORK = 40_000, 200_000


def kernel(device: FakeDevice, launch_ns: int = LAUNCH, work_ns: int = WORK) -> Callable[..., Any]:
    """Return a function that launches one kernel."""

    def step(x: float = 1.0) -> float:
        device.host_clock.advance(launch_ns)
        device.launch(work_ns)
        return x

    return step


def words(found: Any) -> list[str | None]:
    return [verdict.word for verdict in found.verdicts]


def test_two_functions_are_told_apart(device: FakeDevice) -> None:
    found = compare({"old": kernel(device), "new": kernel(device, work_ns=WORK // 2)}, args=(3.0,), seed=7)
    assert [arm.name for arm in found.arms] == ["old", "new"]
    assert found.baseline == "old"
    old, new = found.arms
    assert set(old.samples.wall_ns) == {LAUNCH + WORK}
    assert set(old.samples.launch_ns) == {LAUNCH}
    # From the mark just before the call to the one behind it: the launch gap is in it.
    assert set(old.samples.device_ns) == {LAUNCH + WORK}  # type: ignore[arg-type]
    assert set(new.samples.wall_ns) == {LAUNCH + WORK // 2}
    (verdict,) = found.verdicts
    assert (verdict.arm, verdict.against, verdict.word) == ("new", "old", "faster")
    assert verdict.ratio == pytest.approx((LAUNCH + WORK / 2) / (LAUNCH + WORK))
    assert FIRST_LOOK <= verdict.blocks == found.blocks < 2 * FIRST_LOOK
    assert found.stopped == "every interval was narrower than ±0.5%"
    assert found.seed == 7
    assert found.environment.card == "Fake GPU"
    assert found.environment.clock == "fake"
    assert found.name == "old / new"


def test_a_sweep_that_outgrows_the_memory_keeps_what_it_has(device: FakeDevice) -> None:
    def args(x: float) -> tuple[float]:
        if x == 2.0:
            raise MemoryError("too much")
        return (x,)

    found = compare(kernel(device), args, modes=("eager",), sweep={"x": [1.0, 2.0, 3.0]}, budget_s=1)
    first, second, third = (point.comparison for point in found.points)
    assert first.arms[0].samples.wall_ns
    assert third.arms[0].samples.wall_ns
    assert second.refused == "its arguments could not be made (MemoryError: too much)"
    assert "too much" in found.to_text()
    with pytest.raises(MemoryError):
        compare(kernel(device), args, modes=("eager",), sweep={"x": [2.0, 1.0]}, budget_s=1)


def test_two_comparisons_at_once_take_turns_and_leave_measuring_on() -> None:
    began, other = threading.Event(), threading.Event()

    def first(x: int) -> int:
        began.set()
        other.wait(0.05)  # the second cannot begin meanwhile
        return x

    def second(x: int) -> int:
        other.set()
        time.sleep(0.02)
        return x

    def run(function: Callable[[int], int], budget_s: float) -> None:
        compare({"a": function, "b": function}, args=(1,), budget_s=budget_s, profile=False)

    # Side by side the second would outlast the first, and put back the first one's silence.
    threads = [threading.Thread(target=run, args=each) for each in ((first, 0.1), (second, 2.0))]
    threads[0].start()
    assert began.wait(30)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert not current.tracer().settings.disabled
    with capture() as records:
        gpu_timed(name="afterwards")(lambda: None)()
    assert [record.name for record in records] == ["afterwards"]


def test_exchanged_they_are_told_apart_the_other_way(device: FakeDevice) -> None:
    slow, fast = kernel(device), kernel(device, work_ns=WORK // 2)
    assert words(compare({"a": slow, "b": fast})) == ["faster"]
    assert words(compare({"b": fast, "a": slow})) == ["slower"]
    assert words(compare({"a": slow, "b": fast}, baseline="b")) == ["slower"]


def test_equal_ones_are_the_same(device: FakeDevice) -> None:
    assert words(compare({"a": kernel(device), "b": kernel(device), "c": kernel(device)})) == ["same", "same"]


def test_by_device_it_is_the_device_that_is_compared(device: FakeDevice) -> None:
    """The same work, and a host that returns later: alone, that is in the pair of marks as well."""

    def waits(x: float = 1.0) -> float:
        device.launch(WORK)
        device.synchronize()
        device.host_clock.advance(WORK)
        return x

    def plain(x: float = 1.0) -> float:
        device.launch(WORK)
        return x

    assert words(compare({"plain": plain, "waits": waits})) == ["slower"]
    found = compare({"plain": plain, "waits": waits}, by="device")
    assert found.verdicts[0].quantity == "device"
    assert found.verdicts[0].word == "slower"  # its end mark is placed only after it has returned


def test_blocks_hold_every_arm_once_in_an_order_that_changes(device: FakeDevice) -> None:
    ran: list[str] = []

    def arm(name: str) -> Callable[[], int]:
        def call() -> int:
            if not ran or ran[-1] != name:
                ran.append(name)
            device.launch(WORK)
            return 0

        return call

    found = compare({name: arm(name) for name in "abc"}, seed=1)
    for one in found.arms:
        assert sorted(set(one.samples.block)) == list(range(found.blocks))
        per_block = [one.samples.block.count(block) for block in range(found.blocks)]
        assert set(per_block) == {found.calls_per_turn[one.name]} == {100}  # 20 ms of 200 µs
        assert [turn.block for turn in one.turns] == list(range(found.blocks))
    in_blocks = ran[-30:]
    assert len({tuple(in_blocks[index : index + 3]) for index in range(0, 30, 3)}) > 1


def test_the_seed_gives_the_same_order(device: FakeDevice) -> None:
    def order(seed: int) -> list[str]:
        ran: list[str] = []
        compare(
            {name: lambda name=name: ran.append(name) or device.launch(WORK) for name in "ab"}, seed=seed, reset=int
        )
        return ran

    assert order(3) == order(3)
    assert order(3) != order(4)


def test_garbage_waits_and_is_collected_again_afterwards(device: FakeDevice) -> None:
    seen: list[bool] = []

    def step() -> None:
        seen.append(gc.isenabled())
        device.launch(WORK)

    assert gc.isenabled()
    compare({"a": step, "b": step}, reset=int)
    assert gc.isenabled()
    assert len(seen) > 1000
    assert seen[-len(seen) // 2 :].count(True) < len(seen) // 10
    gc.disable()
    try:
        compare({"a": step, "b": step}, reset=int)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_nothing_is_exported_meanwhile_and_everything_again_afterwards(device: FakeDevice, exporter: Any) -> None:
    @gpu_timed
    def inner() -> None:
        device.launch(WORK)

    @gpu_timed(mode="eager")
    def moded() -> None:
        inner()

    inner()
    found = compare({"a": inner, "b": moded, "c": lambda: moded() or None}, modes=None)
    assert words(found) == ["same", "same"]
    inner()
    assert flush(5)
    names = [span.name.rpartition(".")[2] for span in exporter.get_finished_spans() if "[gpu]" not in span.name]
    assert len(names) == 2
    assert not current.tracer().settings.disabled


def test_settings_that_change_meanwhile_stay(device: FakeDevice) -> None:
    changed = itertools.count()

    def step() -> int:
        if next(changed) == 20:
            configure(sync="deferred")
        device.launch(WORK)
        return 0

    compare({"a": step, "b": kernel(device)}, reset=int, outputs="ignore")
    assert current.tracer().settings.sync == "deferred"
    assert not current.tracer().settings.disabled


def test_turns_find_their_length_though_calls_were_slow_at_first(device: FakeDevice) -> None:
    calls = itertools.count()

    def settles() -> float:
        device.launch(20_000_000 if next(calls) < 20 else WORK)
        return 1.0

    found = compare({"a": kernel(device), "b": settles}, budget_s=8)
    samples = found.arm("b").samples
    assert samples.block.count(0) < 10
    assert samples.block.count(found.blocks - 1) == found.calls_per_turn["b"] == pytest.approx(100, rel=0.25)
    assert found.verdict("b").word == "faster"  # without what kernel() takes to launch


def test_a_turn_ends_in_time_though_calls_become_slow(device: FakeDevice) -> None:
    calls = itertools.count()

    def slows() -> float:
        device.launch(WORK if next(calls) < 500 else 50 * WORK)
        return 1.0

    found = compare({"a": kernel(device), "b": slows}, budget_s=8)
    samples = found.arm("b").samples
    for block in range(found.blocks):
        assert sum(wall for at, wall in zip(samples.block, samples.wall_ns, strict=True) if at == block) < 60_000_000
    assert found.verdict("b").word == "slower"


def test_a_long_call_is_a_turn_by_itself(device: FakeDevice) -> None:
    arms = {"a": kernel(device, work_ns=50_000_000), "b": kernel(device, work_ns=55_000_000)}
    found = compare(arms, budget_s=5)
    assert set(found.calls_per_turn.values()) == {1}
    assert words(found) == ["slower"]


def test_what_stopped_it_is_true_of_the_intervals_that_are_shown(device: FakeDevice) -> None:
    """Arms that are far apart need not be told apart as finely: then it does not say that they were."""
    chance = random.Random(1)

    def rough() -> None:
        device.launch(round(WORK * chance.gauss(3, 0.15)))

    found = compare({"a": lambda: device.launch(WORK), "b": rough}, reset=int, seed=1, budget_s=60)
    (verdict,) = found.verdicts
    assert isinstance(verdict.half_width, float)
    assert isinstance(verdict.ratio, float)
    assert 0.005 < verdict.half_width / verdict.ratio <= 0.01
    assert found.stopped == "every interval was narrower than ±0.5%, or ±1.0% of arms that differ by more than 10%"


def test_blocks_and_first_calls_are_timed_apart(device: FakeDevice) -> None:
    calls = itertools.count()

    def compiles() -> None:
        device.launch(3_000_000_000 if not next(calls) else WORK)

    found = compare({"a": compiles, "b": lambda: device.launch(WORK)}, reset=int, budget_s=0.5)
    assert 3 < found.first_calls_s < 3.5
    assert 0 < found.blocks_s < 0.8
    assert found.seconds >= found.first_calls_s + found.blocks_s


def test_blocks_that_are_unlike_are_told(device: FakeDevice) -> None:
    blocks: list[int] = []

    def jumps() -> int:
        slow = len(blocks) // 60 % 3 == 0
        blocks.append(0)
        device.launch(100 * WORK if slow else WORK)
        return 0

    found = compare({"a": kernel(device), "b": jumps}, budget_s=20, reset=int, outputs="ignore", seed=2)
    (note,) = [one for one in found.notes if one.startswith("Calls vary")]
    assert note.startswith("Calls vary from block to block, those of b ")


# -- trust ------------------------------------------------------------------------------------------------


def test_hidden_state_is_refused_and_reset_makes_it_work(device: FakeDevice) -> None:
    count = [0]

    def step() -> int:
        count[0] += 1
        device.launch(WORK)
        return 0

    found = compare({"a": step, "b": kernel(device)})
    assert "count" in found.refused
    assert "reset=" in found.refused
    assert words(found) == [None]
    assert found.verdicts[0].reason.startswith("a was not measured")
    assert not len(found.arm("a").samples)
    assert "(give reset=, which puts it back" in found.refused
    assert not any("reset= is called" in note for note in found.notes)

    def reset() -> None:
        count[0] = 0

    found = compare({"a": step, "b": step}, reset=reset)
    assert not found.refused
    assert words(found) == ["same"]
    assert any("reset=" in note for note in found.notes)


def test_outputs_that_change_from_call_to_call_are_refused(device: FakeDevice) -> None:
    numbers = itertools.count()  # which nobody can look into

    def step() -> int:
        device.launch(WORK)
        return next(numbers)

    found = compare({"a": step, "b": kernel(device)})
    assert "two calls from the same inputs differ" in found.refused
    assert "in place of" in found.refused
    found = compare({"a": step, "b": step}, reset=lambda: None)
    assert "though reset= was called" in found.refused


def test_an_argument_that_is_changed_in_place_is_refused(device: FakeDevice) -> None:
    held = [1, 2]

    def step(values: list[int]) -> int:
        values.append(3)
        device.launch(WORK)
        return 0

    assert "host state" in compare({"a": step, "b": lambda _: device.launch(WORK)}, args=(held,)).refused


def test_the_second_function_may_be_the_one_that_is_refused(device: FakeDevice) -> None:
    numbers = itertools.count()
    found = compare({"a": kernel(device), "b": lambda: next(numbers), "c": kernel(device)})
    assert words(found) == [None, "same"]
    assert "differ" in found.verdict("b").reason


def test_unequal_outputs_get_no_verdict(device: FakeDevice) -> None:
    def other(x: float) -> float:
        device.launch(WORK // 2)
        return x + 0.5

    arms = {"a": kernel(device), "b": other}
    found = compare(arms, args=(1.0,))
    assert words(found) == [None]
    assert "its outputs differ: the output: 1.5 in place of 1.0" in found.verdicts[0].reason
    agreement = found.arm("b").agreement
    assert not isinstance(agreement, Missing)
    assert (agreement.equal, agreement.max_abs, agreement.max_rel) == (False, 0.5, 0.5)
    assert not isinstance(found.verdicts[0].ratio, Missing)  # it is shown, and nothing is said of it
    assert words(compare(arms, args=(1.0,), outputs="ignore")) == ["faster"]
    assert words(compare(arms, args=(1.0,), tolerance=0.6)) == ["faster"]


def test_an_arm_whose_outputs_drift_away_while_it_is_measured_gets_no_verdict(device: FakeDevice) -> None:
    def drifts() -> Callable[[], int]:
        held = map(int, itertools.count())  # nothing to look into

        def call() -> int:
            device.launch(WORK)
            return int(next(held) > 100)

        return call

    found = compare({"a": lambda: device.launch(WORK) or 0, "b": drifts()})
    assert words(found) == [None]
    assert "its outputs differ" in found.verdicts[0].reason
    found = compare({"a": drifts(), "b": lambda: device.launch(WORK) or 0})
    assert words(found) == [None]
    assert "a did not stay the same" in found.verdicts[0].reason


def test_random_numbers_are_set_alike_and_put_back(device: FakeDevice) -> None:
    def step() -> float:
        device.launch(WORK)
        return random.random()

    def draws_more() -> float:
        random.random()
        return step()

    found = compare({"a": step, "b": step, "c": draws_more})
    assert words(found) == ["same", None]
    assert "draws random numbers" in found.verdict("c").reason
    random.seed(5)
    expected = random.random()
    random.seed(5)
    compare({"a": kernel(device), "b": kernel(device)})  # which draw none: nobody else's sequence moves
    assert random.random() == expected


def test_an_arm_that_raises_says_why_and_the_others_go_on(device: FakeDevice) -> None:
    def broken() -> None:
        raise ValueError("no such kernel")

    found = compare({"a": kernel(device), "b": broken, "c": kernel(device)})
    assert words(found) == [None, "same"]
    assert found.verdict("b").reason == "ValueError: no such kernel"
    calls = itertools.count()

    def breaks_later() -> float:
        if next(calls) > 300:
            raise RuntimeError("out of memory")
        device.launch(WORK)
        return 1.0

    found = compare({"a": kernel(device), "b": breaks_later, "c": kernel(device)})
    assert words(found) == [None, "same"]
    assert found.arm("b").refused == "RuntimeError: out of memory"
    found = compare({"a": broken, "b": kernel(device)})
    assert found.refused == "ValueError: no such kernel"
    assert not found.arm("b").samples.wall_ns


class Counter:
    """Holds a counter that no output shows."""

    n = 0


def test_a_counter_of_a_class_is_host_state(device: FakeDevice) -> None:
    def step() -> int:
        Counter.n += 1
        device.launch(WORK)
        return 0

    assert "host state (Counter.n)" in compare({"a": step, "b": kernel(device)}).refused


def test_an_arm_that_is_not_there_is_named_with_those_that_are(device: FakeDevice) -> None:
    found = compare({"a": kernel(device), "b": kernel(device)})
    for ask in (found.arm, found.verdict):
        with pytest.raises(KeyError) as raised:
            ask("bogus")
        assert isinstance(raised.value, GpuTimedError)
        assert str(raised.value) == "there is no arm 'bogus'. Arms: 'a', 'b'."
    with pytest.raises(GpuTimedError, match="'a' is the baseline: the others are held against it"):
        found.verdict("a")


def test_a_function_that_was_given_no_arguments_says_where_they_come_from(device: FakeDevice) -> None:
    found = compare({"a": lambda x: x, "b": lambda x: x})
    assert found.refused.startswith("TypeError: ")
    assert found.refused.endswith("(no arguments were given: args= gives them)")
    assert found.notes == ()
    assert "no arguments" not in compare({"a": lambda x: x, "b": lambda x: x}, args=(1, 2)).refused


def test_an_interrupt_comes_out_and_everything_is_put_back(device: FakeDevice) -> None:
    calls = itertools.count()

    def step() -> float:
        if next(calls) > 300:
            raise KeyboardInterrupt
        device.launch(WORK)
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        compare({"a": step, "b": kernel(device)})
    assert gc.isenabled()
    assert not current.tracer().settings.disabled


def test_a_device_that_breaks_down_refuses_and_does_not_raise(device: FakeDevice) -> None:
    calls = itertools.count()

    def step() -> float:
        if next(calls) == 400:
            device.break_down()
        device.launch(WORK)
        return 1.0

    found = compare({"a": step, "b": kernel(device)})
    assert words(found) == [None]
    assert "CUDA_ERROR" in found.arm("a").refused + found.arm("b").refused


def test_what_reset_launches_is_none_of_the_call(device: FakeDevice) -> None:
    found = compare({"a": kernel(device), "b": kernel(device)}, reset=lambda: device.launch(1_000_000))
    for arm in found.arms:
        assert set(arm.samples.wall_ns) == {LAUNCH + WORK}
        assert set(arm.samples.device_ns) == {LAUNCH + WORK}  # type: ignore[arg-type]
        assert {call.wall_ns for call in arm.cold.calls} == {LAUNCH + WORK}


# -- circumstances ----------------------------------------------------------------------------------------


def test_clocks_are_read_after_each_turn(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml({"GPU-fake-0": 1980})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = compare({"a": kernel(device), "b": kernel(device)})
    assert found.environment.sm_clock_mhz == (1980, 1980)
    assert [turn.sm_clock_mhz for turn in found.arm("a").turns] == [1980] * found.blocks
    assert words(found) == ["same"]
    assert nvml.open == 0


def test_an_arm_that_was_held_down_gets_no_verdict(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml({"GPU-fake-0": 1980})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)

    def hot(x: float = 1.0) -> float:
        nvml.reasons["GPU-fake-0"] = 0x040
        device.launch(2 * WORK)
        return x

    def cool(x: float = 1.0) -> float:
        nvml.reasons["GPU-fake-0"] = 0
        device.launch(WORK)
        return x

    found = compare({"a": cool, "b": hot})
    assert words(found) == [None]
    assert "held the clocks down in 100% of its turns, and in 0% of the other's" in found.verdicts[0].reason
    assert found.environment.throttle == ("hw_thermal_slowdown",)


# -- modes ------------------------------------------------------------------------------------------------


def test_a_mode_that_falls_back_says_so_and_gets_no_verdict(device: FakeDevice, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        found = compare(kernel(device), modes=("eager", CudaGraph()))
    assert [arm.name for arm in found.arms] == ["eager", "cuda_graph"]
    graph = found.arm("cuda_graph")
    assert (graph.mode, graph.ran, graph.honoured) == ("cuda_graph", "eager", False)
    assert graph.refused.startswith("it ran as eager: ")
    assert not len(graph.samples)
    assert words(found) == [None]
    assert found.arm("eager").samples.wall_ns  # alone, it is still measured
    assert "only one left" in found.stopped
    assert not caplog.records  # it is in the result
    assert graph.cold.calls  # which ran as they are written, and tell nothing of what a graph takes once
    assert graph.cold.one_off_ns == Missing("not_run", graph.refused)
    assert {row.name: row.cells for row in table_words.rows(found)}["one-off"] == ("0 ns", table_words.NONE)


def test_what_is_a_mode_and_what_is_not(device: FakeDevice) -> None:
    modes = [CudaGraph(warmup=1), CudaGraph(reset=int, outputs="alias"), "cuda_graph", CudaGraph(), "compile"]
    found = compare(kernel(device), modes=modes)
    alike = ["cuda_graph(warmup=1)", "cuda_graph(outputs='alias', reset=…)", "cuda_graph", "cuda_graph 2"]
    assert [arm.name for arm in found.arms] == ["eager", *alike, "compile"]
    assert found.name == "step"
    found = compare(kernel(device), modes=[CudaGraph(warmup=1), CudaGraph(warmup=2), "eager"], baseline="cuda_graph")
    assert found.baseline == "cuda_graph(warmup=1)"
    assert compare(kernel(device), modes=("eager",)).verdicts == ()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"modes": "eager"}, "must be several.*: modes=\\('eager', 'cuda_graph', 'reduce-overhead'\\)"),
        ({"modes": "compile"}, "modes=\\('eager', 'compile'\\)"),
        ({"modes": "eager, compile"}, "modes=\\('eager', 'compile'\\)"),
        ({"modes": ("fast",)}, "unknown mode 'fast'"),
        ({"modes": ()}, "modes= is empty"),
        ({"modes": ("eager",), "baseline": "compile"}, "unknown baseline 'compile'"),
        ({"budget_s": 0}, "budget_s"),
        ({"outputs": "skip"}, "unknown way to treat outputs"),
        ({"by": "launch"}, "unknown time 'launch'"),
        ({"tolerance": -1}, "tolerance"),
        ({"seed": -1}, "seed"),
        ({"reset": 3}, "reset"),
        ({"reset": lambda x: x}, "reset is called without arguments, and cannot be: missing a required argument: 'x'"),
        ({"args": lambda: 3}, r"must return a tuple, not int: return \(x,\) for one"),
        ({"args": lambda size: (size,)}, "given as args= is called with no argument, and cannot be: missing .*'size'"),
        (
            {"args": lambda size: (size,), "sweep": {"batch": [1]}},
            "given as args= is called with batch=, and cannot be: missing a required argument: 'size'",
        ),
        ({"args": lambda: (), "sweep": {"batch": [1]}}, "unexpected keyword argument 'batch'"),
        ({"args": 3}, r"args=\(x,\)"),
        ({"kwargs": 3}, "kwargs"),
        ({"work": "count"}, "counts no operations"),
        ({"sweep": {}}, "sweep"),
        ({"sweep": {"batch": [1]}}, "args=lambda batch"),
        ({"sweep": {"batch": []}, "args": lambda batch: ()}, "list of values"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        compare(lambda: None, **options)


def test_callables_that_cannot_be_used() -> None:
    async def coroutine() -> None: ...

    with pytest.raises(ConfigurationError, match="coroutines"):
        compare(coroutine)
    with pytest.raises(ConfigurationError, match="not int"):
        compare(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError) as raised:
        compare([print, print])  # type: ignore[arg-type]
    said = 'compare() takes a function, or several by name, not list: compare({"old": f, "new": g}).'
    assert str(raised.value) == said
    with pytest.raises(ConfigurationError, match=r'given by name: compare\({"old": f, "new": g}\)'):
        compare({})
    with pytest.raises(ConfigurationError, match="for one function"):
        compare({"a": print, "b": print}, modes=("eager",))


# -- the rest ---------------------------------------------------------------------------------------------


def test_first_calls_are_apart(device: FakeDevice) -> None:
    calls = itertools.count()

    def compiles() -> float:
        if next(calls) < 2:
            current.modes.cold("built something", 5_000_000)
            device.host_clock.advance(5_000_000)
        device.launch(WORK)
        return 1.0

    found = compare({"a": kernel(device, launch_ns=WORK), "b": compiles})
    cold = found.arm("b").cold
    assert cold.settled
    assert [bool(call.causes) for call in cold.calls] == [True, True, False, False, False]
    assert cold.one_off_ns == 10_000_000
    assert set(found.arm("b").samples.wall_ns) == {WORK}
    even = found.break_evens["b"]
    assert even.calls == 10_000_000 // WORK == even.extra_one_off_ns // even.gain_ns  # type: ignore[operator]
    assert found.break_evens["b"].gain_ns == WORK


def test_none_is_said_of_what_is_taken_once_only_where_it_was_measured(device: FakeDevice) -> None:
    """By calls that are all alike: nothing was taken once, unless each of them prepares something anew."""

    def compiles() -> float:
        current.modes.cold("compiled again", 5)
        device.launch(WORK)
        return 1.0

    found = compare({"a": kernel(device), "b": compiles})
    assert found.arm("a").cold.one_off_ns == 0
    never = found.arm("b").cold.one_off_ns
    assert isinstance(never, Missing)
    assert never.reason == "not_settled"
    assert "compiled again" in never.detail
    calls = itertools.count()

    def settles_never() -> float:
        if not next(calls):
            device.host_clock.advance(5_000_000)
        return compiles()

    # What the first call took beyond the others is known though these were not warm.
    assert compare({"a": kernel(device), "b": settles_never}).arm("b").cold.one_off_ns == 5_000_000


def test_what_is_taken_once_by_a_function_as_it_is_written_is_known_though_another_arm_came_first(
    device: FakeDevice,
) -> None:
    def made() -> Callable[[], float]:
        calls = itertools.count()

        def step() -> float:
            if not next(calls):
                device.host_clock.advance(5_000_000)
            device.launch(WORK)
            return 1.0

        return step

    step = made()
    found = compare({"a": step, "b": step}, reset=int)
    assert [arm.cold.one_off_ns for arm in found.arms] == [5_000_000, 5_000_000]


def test_an_arm_that_never_becomes_warm_says_so(device: FakeDevice) -> None:
    def compiles() -> float:
        current.modes.cold("compiled again", 5)
        device.launch(WORK)
        return 1.0

    found = compare({"a": kernel(device), "b": compiles})
    assert not found.arm("b").cold.settled
    assert len(found.arm("b").cold.calls) == 40
    assert any(note.startswith("b: after 40 calls") and "compiled again" in note for note in found.notes)


def test_work_on_other_streams_is_waited_for(device: FakeDevice) -> None:
    def elsewhere() -> float:
        with device.use(stream=7):
            device.launch(WORK)
        return 1.0

    found = compare({"a": elsewhere, "b": kernel(device)})
    assert set(found.arm("a").samples.wall_ns) == {WORK}
    assert set(found.arm("b").samples.wall_ns) == {LAUNCH + WORK}
    assert any("other streams" in note for note in found.notes)


@pytest.mark.parametrize(("launch_ns", "waits_ns", "said"), [(21_000_000, 70_000, False), (1_000_000, 70_000, True)])
def test_a_wait_that_finds_cold_caches_is_no_other_stream(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, launch_ns: int, waits_ns: int, said: bool
) -> None:
    """Behind a long call the host takes longer for the first wait, with nothing to wait for."""
    wait, cold = type(device).wait_device, [False]

    def step() -> int:
        device.host_clock.advance(launch_ns)
        device.launch(WORK)
        cold[0] = True
        return 0

    def waits(self: Any, place: Any) -> None:
        wait(self, place)
        if cold[0]:
            device.host_clock.advance(waits_ns)
        cold[0] = False

    monkeypatch.setattr(type(device), "wait_device", waits)
    found = compare({"a": step, "b": step}, budget_s=2)
    assert any("other streams" in note for note in found.notes) is said


def test_outputs_are_looked_at_once_they_are_there(device: FakeDevice) -> None:
    class Result:
        dtype = shape = None

        def __init__(self, value: float) -> None:
            self.value, self.ready_ns = value, device.host_clock.now_ns() + WORK

        def __array__(self, *_: Any, **__: Any) -> Any:
            return numpy.array(self.value if device.host_clock.now_ns() >= self.ready_ns else -1.0)

    def on_another_stream() -> Result:
        with device.use(stream=7):
            device.launch(WORK)
        return Result(3.0)

    def here() -> Result:
        device.launch(WORK)
        return Result(3.0)

    numpy = pytest.importorskip("numpy")
    found = compare({"a": here, "b": on_another_stream})
    assert found.arm("b").agreement.equal, found.arm("b").agreement  # type: ignore[union-attr]


def test_time_is_kept(device: FakeDevice) -> None:
    chance = random.Random(3)

    def noisy() -> float:
        device.launch(round(WORK * chance.uniform(0.5, 2)))
        return 1.0

    began = device.host_clock.now_ns()
    found = compare({"a": noisy, "b": noisy}, budget_s=0.5, reset=int, seed=1)
    assert 0.4e9 < device.host_clock.now_ns() - began < 0.8e9
    assert words(found) == ["ambiguous"]
    assert "it is not known whether there is a difference of more than 1%" in found.verdicts[0].reason
    assert "raise budget_s (now 0.5) to" in found.verdicts[0].reason


def test_time_is_kept_though_calls_become_slow(device: FakeDevice) -> None:
    chance, calls = random.Random(3), itertools.count()

    def slows() -> float:
        device.launch(round((1 if next(calls) < 100 else 20) * WORK * chance.uniform(0.5, 2)))
        return 1.0

    began = device.host_clock.now_ns()
    found = compare({"a": slows, "b": slows}, budget_s=1, reset=int)
    assert device.host_clock.now_ns() - began < 1.5e9
    assert found.stopped == "the time given by budget_s was up"


def test_our_own_wrapper_is_taken_off(device: FakeDevice) -> None:
    asked: list[int] = []

    @gpu_timed(mode=lambda: asked.append(1))
    def step() -> None:
        device.launch(WORK)

    found = compare(step, modes=("eager",))
    assert found.name == "step"
    assert found.arm("eager").samples.wall_ns
    assert not asked


def test_without_a_device_wall_and_launch_are_there(device: FakeDevice) -> None:
    device.disappear("no_device")

    def step(n: int) -> int:
        device.host_clock.advance(n)
        return 0

    found = compare({"a": lambda: step(100_000), "b": lambda: step(200_000)})
    assert words(found) == ["slower"]
    assert found.arm("a").samples.device_ns == Missing("no_device")
    assert found.arm("a").timeline == Missing("no_device")
    assert found.environment.clock == "host"
    assert found.diagnosis is not None
    assert found.diagnosis.bound == "unknown"
    refused = compare({"a": lambda: step(1), "b": lambda: step(1)}, by="device").refused
    assert refused == "there is no device time to compare by (no_device): use by='wall'"


def test_on_the_real_clock_it_finds_a_device_at_work() -> None:
    with use_device(FakeDevice(realtime=True)) as device:
        arms = {"a": lambda: device.launch(2_000_000), "b": lambda: device.launch(6_000_000)}
        assert words(compare(arms, budget_s=1.5)) == ["slower"]


def test_a_sweep_makes_its_arguments(device: FakeDevice) -> None:
    def step(n: int) -> int:
        device.host_clock.advance(LAUNCH)
        device.launch(1000 * n)
        return n

    told: list[tuple[int, int, str]] = []
    found = compare(
        {"a": step, "b": step},
        args=lambda batch: (batch,),
        sweep={"batch": [1, 8, 1000]},
        progress=lambda *what: told.append(what),
    )
    assert found.sweep == "batch"
    assert [point.value for point in found.points] == [1, 8, 1000]
    walls = [point.comparison.arm("a").samples.wall_ns[0] for point in found.points]
    assert walls == [LAUNCH + 1000, LAUNCH + 8000, LAUNCH + 1_000_000]
    assert [words(point.comparison) for point in found.points] == [["same"]] * 3
    done = [what[0] for what in told]
    assert done == sorted(done)
    assert all(what[1] == 300 for what in told)
    assert told[0][2] == "batch=1: a: first calls"


def test_work_may_be_a_function_of_the_arguments(device: FakeDevice) -> None:
    seen: list[Any] = []

    def work(x: float) -> Work:
        seen.append(x)
        return Work(flops=1e6)

    compare({"a": kernel(device), "b": kernel(device)}, args=(2.0,), work=work)
    assert seen == [2.0]


def test_no_marks_are_left(device: FakeDevice) -> None:
    compare({"a": kernel(device), "b": kernel(device)})
    assert device.marks_in_use == 0
    with capture() as records:  # and the engine goes on
        gpu_timed(kernel(device))()
    assert len(records) == 1
