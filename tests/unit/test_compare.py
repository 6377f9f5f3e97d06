"""Comparing on a device made of arithmetic: who takes part, what is measured, what is said, and what is left behind."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
from make_believe_nvml import FakeNvml

from gpu_timed import ConfigurationError, CudaGraph, Missing, Work, compare, configure, current, flush, gpu_timed
from gpu_timed.analysis.deciding import FIRST_LOOK
from gpu_timed.testing import FakeDevice, capture, use_device

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
    assert "±0.5%" in found.stopped
    assert found.seed == 7
    assert found.environment.card == "Fake GPU"
    assert found.environment.clock == "fake"
    assert found.name == "old / new"


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
        calls = itertools.count(1)  # nothing to look into

        def call() -> int:
            device.launch(WORK)
            return int(next(calls) > 100)

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


def test_a_function_that_was_given_no_arguments_says_where_they_come_from(device: FakeDevice) -> None:
    found = compare({"a": lambda x: x, "b": lambda x: x})
    assert found.refused.startswith("TypeError: ")
    assert found.refused.endswith("(no arguments were given: args=, or --args-from on the command line, gives them)")
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


def test_what_is_a_mode_and_what_is_not(device: FakeDevice) -> None:
    found = compare(kernel(device), modes=[CudaGraph(warmup=1), CudaGraph(warmup=2)])
    assert [arm.name for arm in found.arms] == ["eager", "cuda_graph", "cuda_graph 2"]
    assert found.name == "step"
    assert compare(kernel(device), modes=("eager",)).verdicts == ()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"modes": "eager"}, "must be several"),
        ({"modes": ("fast",)}, "unknown mode 'fast'"),
        ({"modes": ()}, "modes= is empty"),
        ({"modes": ("eager",), "baseline": "compile"}, "unknown baseline 'compile'"),
        ({"budget_s": 0}, "budget_s"),
        ({"outputs": "skip"}, "unknown way to treat outputs"),
        ({"by": "launch"}, "unknown time 'launch'"),
        ({"tolerance": -1}, "tolerance"),
        ({"seed": -1}, "seed"),
        ({"reset": 3}, "reset"),
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
    assert even.calls == 10_000_000 // WORK == even.one_off_ns // even.gain_ns  # type: ignore[operator]
    assert found.break_evens["b"].gain_ns == WORK


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
    assert "which may be none and may be more than 1%" in found.verdicts[0].reason


def test_time_is_kept_though_calls_become_slow(device: FakeDevice) -> None:
    chance, calls = random.Random(3), itertools.count()

    def slows() -> float:
        device.launch(round((1 if next(calls) < 100 else 20) * WORK * chance.uniform(0.5, 2)))
        return 1.0

    began = device.host_clock.now_ns()
    found = compare({"a": slows, "b": slows}, budget_s=1, reset=int)
    assert device.host_clock.now_ns() - began < 1.5e9
    assert "budget_s" in found.stopped


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
    assert refused == "there is no device time to compare by (no_device)"


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
