"""One comparison from its first call to its verdicts: who may take part, first calls, blocks, kernel records."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from gpu_timed.analysis.concluding import Time, conclude
from gpu_timed.analysis.deciding import LEVEL, PRECISION, Decider
from gpu_timed.analysis.diagnosing import break_even, diagnose, same_kernels_as_graph
from gpu_timed.analysis.spread import unsteady
from gpu_timed.arms import NOT_PROFILED, NOT_RUN, Agreement, Arm, BreakEven, ColdPhase, Comparison, not_measured
from gpu_timed.ledger import Ledger
from gpu_timed.measure import outputs, seeds, step_profile
from gpu_timed.measure.contestant import Arguments, Contestant
from gpu_timed.measure.interleaving import Course, Lane, describe, divide, run
from gpu_timed.measure.states import States
from gpu_timed.measure.steadiness import Steady, check
from gpu_timed.measure.stopwatch import Stopwatch
from gpu_timed.measure.surroundings import environment, held_memory
from gpu_timed.measure.warming import warm_up
from gpu_timed.mode_values import EAGER
from gpu_timed.option_names import given
from gpu_timed.peaks import DevicePeaks
from gpu_timed.ports import WarmthSource
from gpu_timed.record import NOT_SET, Measured, Missing
from gpu_timed.step_timeline import ProfiledSteps
from gpu_timed.work import Work

Progress = Callable[[int, int, str], None]
"""Told how much is done, of how much, and what is being done."""
PARTS: Final = 100
"""Of the whole, as progress is told: of these the blocks take most."""
TIMED: Final = 90
"""From here on kernels are recorded."""
_FIRST: Final = 20
PROFILED: Final = "profiled_pass"
"""In the ledger: passes with kernel records, after which launches are slower in this process."""
_SLOWED: Final = (
    "Kernels were recorded in this process before, by an earlier comparison: launches are slower since then, those of "
    "eager arms most. A new process gives the times that users see."
)
_ALONE: Final = (
    "Wall: one call at a time, each waited for. Calls that are queued behind each other hide launching that these show."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to compare. See :func:`gpu_timed.compare`."""

    name: str
    baseline: str
    arguments: Arguments
    budget_ns: int
    seed: int
    reset: Callable[[], object] | None = None
    outputs: bool = True
    tolerance: float | None = None
    by_device: bool = False
    work: Work | None = None
    profile: bool = True
    level: float = LEVEL
    precision: float = PRECISION


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What of the process it uses."""

    stopwatch: Stopwatch
    warmth: WarmthSource | None
    peaks: Callable[[str | Missing], DevicePeaks | Missing]
    ledger: Ledger
    alone: Callable[[], AbstractContextManager[None]]
    """Leaves CUPTI, which has one user in a process, to the profiled pass."""


class Contest:
    """Holds *contestants* against each other: :meth:`run`, then :meth:`record_kernels`, then :meth:`result`.

    Of several in one process all must have run before the first one records kernels.

    Args:
        contestants: The arms; the baseline is among them.
        plan: How.
        tools: What is measured with.
        progress: Told what is being done.
    """

    def __init__(self, contestants: Sequence[Contestant], plan: Plan, tools: Tools, progress: Progress) -> None:
        self._plan = plan
        self._tools = tools
        self._watch = tools.stopwatch
        self._progress = progress
        self._lanes = [Lane(each) for each in contestants]
        self._base = next(lane for lane in self._lanes if lane.name == plan.baseline)
        self._chance = random.Random(plan.seed)  # noqa: S311 - the order of blocks
        self._steady: dict[int, Steady] = {}
        self._cold: dict[str, ColdPhase] = {}
        self._as_written: dict[int, ColdPhase] = {}
        self._memory: dict[str, Measured] = {}
        self._agreed: dict[str, Agreement] = {}
        self._steps: dict[str, ProfiledSteps | Missing] = {}
        self._notes: list[str] = []
        self._decider: Decider | None = None
        self._stopped = ""
        self._load: float | Missing = NOT_SET
        self._spent_ns = self._first_ns = self._blocks_ns = 0

    def run(self) -> None:
        """Time all of them. Of what the arms raise nothing comes out but what is no Exception."""
        began = self._watch.host.now_ns()
        if self._tools.ledger.snapshot().get(PROFILED):
            self._notes.append(_SLOWED)
        self._admit()
        self._first_ns = self._watch.host.now_ns() - began
        states = States(self._watch.device_uuid)
        try:
            if not self._base.failed:
                self._decider, self._stopped = self._measure(states)
            self._load = states.host_load()
        finally:
            states.close()
        self._spent_ns += self._watch.host.now_ns() - began

    def record_kernels(self) -> None:
        """Make the profiled pass of each arm. Launches are slower ever after: nothing may be timed any more."""
        began = self._watch.host.now_ns()
        if self._plan.profile and not self._base.failed:
            self._record_kernels()
        self._spent_ns += self._watch.host.now_ns() - began

    def result(self) -> Comparison:
        """Return what was found."""
        plan, watch, decider = self._plan, self._watch, self._decider
        arms = tuple(self._arm(lane) for lane in self._lanes)
        base = arms[self._lanes.index(self._base)]
        steady = self._steady.get(id(self._base.contestant.function))
        others = [arm for arm in arms if arm is not base]
        verdicts = tuple(
            conclude(
                arm,
                base,
                decider,
                quantity="device" if plan.by_device else "wall",
                draws=steady is not None and steady.draws,
                compared=plan.outputs,
                time=Time(plan.budget_ns / 1e9, self._blocks_ns / 1e9),
            )
            for arm in others
        )
        measured = [arm for arm in arms if len(arm.samples)]
        peaks: DevicePeaks | Missing = NOT_SET if plan.work is None else self._tools.peaks(watch.device_uuid)
        return Comparison(
            name=plan.name,
            arms=arms,
            baseline=base.name,
            verdicts=verdicts,
            diagnoses={
                arm.name: diagnose(arm, work=plan.work, peaks=peaks, graph=same_kernels_as_graph(arm, arms))
                for arm in measured
            },
            break_evens={
                arm.name: break_even(arm, base, verdict)
                if arm in measured and base in measured
                else BreakEven(arm=arm.name, calls=NOT_RUN)
                for arm, verdict in zip(others, verdicts, strict=True)
            },
            refused=base.refused,
            environment=environment(watch, arms, self._load),
            notes=(
                *self._notes,
                *unsteady(arms, self._load, on_cpu=watch.clock == "host" and "torch" in sys.modules),
                *([_ALONE] if measured else []),
            ),
            seed=plan.seed,
            blocks=0 if decider is None else decider.blocks,
            calls_per_turn={lane.name: lane.calls for lane in self._lanes if lane.took},
            stopped=self._stopped,
            seconds=self._spent_ns / 1e9,
            first_calls_s=self._first_ns / 1e9,
            blocks_s=self._blocks_ns / 1e9,
        )

    # -- who takes part -------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Bring every arm to where it is warm, and leave out those that do not do what the baseline does."""
        eager_first = sorted(self._lanes, key=lambda lane: (lane is not self._base, lane.contestant.mode != EAGER.name))
        for index, lane in enumerate(eager_first):
            if self._base.failed:
                lane.failed = lane.failed or not_measured(self._base.name)
                continue
            self._progress(_FIRST * index // len(eager_first), PARTS, f"{lane.name}: first calls")
            try:
                lane.failed = self._ready(lane)
            except Exception as error:  # noqa: BLE001 - the arm says why, and the others go on
                lane.failed = describe(error)
                if isinstance(error, TypeError) and not any(self._plan.arguments):
                    lane.failed += f" (no arguments were given: {given('args')} gives them)"
        try:
            if not self._base.failed and any(self._elsewhere(lane) for lane in self._running):
                self._watch.whole_device = True
                self._notes.append("Some of the work goes to other streams: every call waits for the whole device.")
        except Exception as error:  # noqa: BLE001 - as above; the next call of it says why
            self._notes.append(f"Whether work goes to other streams is not known ({describe(error)}).")

    def _ready(self, lane: Lane) -> str:
        """Warm *lane* up, and compare what it gives; returns why it cannot take part."""
        contestant, plan = lane.contestant, self._plan
        if not self._is_as_written(lane) and (why_not := self._known(contestant).why_not):
            return why_not
        before = held_memory()
        cold = self._cold[lane.name] = self._first_calls(lane)
        after = held_memory()
        self._memory[lane.name] = (
            max(0, after - before) if isinstance(before, int) and isinstance(after, int) else after
        )
        self._watch.look()
        if why_not := self._known(contestant).why_not:
            return why_not
        if not cold.settled:
            self._notes.append(f"{lane.name}: {cold.reason}.")
        ran = contestant.ran
        if ran.mode == EAGER.name and contestant.mode not in (EAGER.name, "as_given"):
            return f"it ran as {ran.mode}: {ran.reason or 'nobody knows why'}"
        if plan.by_device and isinstance(device := self._time(contestant).device_ns, Missing):
            return (
                f"there is no device time to compare by ({device.detail or device.reason}): use {given('by', 'wall')}"
            )
        self._agree(lane)
        return ""

    def _first_calls(self, lane: Lane) -> ColdPhase:
        """Warm *lane* up. Of a function as it is written the first calls are made once, whichever arm was first."""
        found = self._warm(lane.contestant)
        if not self._is_as_written(lane):
            return found
        return self._as_written.setdefault(id(lane.contestant.function), found)

    def _known(self, contestant: Contestant) -> Steady:
        """Return whether the function of *contestant* does the same every time."""
        function, plan = contestant.function, self._plan
        found = self._steady.get(id(function))
        if found is None:
            if contestant.mode not in (EAGER.name, "as_given"):  # no arm has called it as it is written
                self._as_written[id(function)] = self._warm(Contestant("eager", function, EAGER))
            positional, named = plan.arguments
            found = check(
                function,
                lambda *args, **kwargs: self._finished(function, args, kwargs),
                positional,
                named,
                reset=plan.reset,
                seed=plan.seed,
                tolerance=plan.tolerance,
                compared=plan.outputs,
            )
            self._steady[id(function)] = found
            if found.note and found.note not in self._notes:
                self._notes.append(found.note)
        return found

    def _agree(self, lane: Lane) -> None:
        """Hold what *lane* gives now against what the baseline's function gives."""
        plan = self._plan
        base = self._steady[id(self._base.contestant.function)]
        if not plan.outputs:
            return
        if lane is self._base and lane.name not in self._agreed:
            self._agreed[lane.name] = base.agreement
        with seeds.kept():
            self._prepare()
            seeds.seed(plan.seed)
            result = self._finished(lane.contestant.call, *plan.arguments)
            found = outputs.agreement(base.expected, result, plan.tolerance)
        before = self._agreed.get(lane.name)
        if before is None or before.equal:
            self._agreed[lane.name] = found

    def _finished(self, call: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Return what a call gives once it is there, on whatever stream it is made."""
        result = self._watch.time(call, arguments, named).result
        self._watch.settle()
        return result

    def _elsewhere(self, lane: Lane) -> bool:
        self._prepare()
        return self._watch.goes_elsewhere(lane.contestant.call, *self._plan.arguments)

    def _warm(self, contestant: Contestant) -> ColdPhase:
        return warm_up(contestant, self._watch, self._plan.arguments, self._tools.warmth, self._prepare)

    def _time(self, contestant: Contestant) -> Any:
        self._prepare()
        return self._watch.time(contestant.call, *self._plan.arguments)

    def _prepare(self) -> None:
        """Put back what the function changes, and wait until that is done."""
        if self._plan.reset is not None:
            self._plan.reset()
            self._watch.settle()

    def _is_as_written(self, lane: Lane) -> bool:
        return lane.contestant.mode in (EAGER.name, "as_given")

    @property
    def _running(self) -> list[Lane]:
        return [lane for lane in self._lanes if not lane.failed]

    # -- measuring ------------------------------------------------------------------------------------

    def _measure(self, states: States) -> tuple[Decider, str]:
        """Run the blocks."""
        plan, watch = self._plan, self._watch
        course = Course(
            stopwatch=watch,
            arguments=plan.arguments,
            prepare=None if plan.reset is None else self._prepare,
            state=states.after,
            by_device=plan.by_device,
        )
        began = watch.host.now_ns()
        for lane in self._running:
            try:
                course.pace(lane)
            except Exception as error:  # noqa: BLE001 - the arm says why, and the others go on
                lane.failed = describe(error)
        names = [lane.name for lane in self._running]
        until = began + plan.budget_ns
        left = max(0, until - watch.host.now_ns())
        most = max(1, left // max(1, divide(self._running, left)))
        decider = Decider(
            names or [plan.baseline],
            plan.baseline,
            most_blocks=most,
            level=plan.level,
            precision=plan.precision,
        )

        def tell(blocks: int) -> None:
            part = min(1.0, (watch.host.now_ns() - began) / plan.budget_ns)
            self._progress(_FIRST + int((TIMED - 1 - _FIRST) * part), PARTS, f"block {blocks}")

        stopped = run(self._running, course, decider, self._chance, until_ns=until, progress=tell)
        self._blocks_ns = watch.host.now_ns() - began
        for lane in self._running:
            try:
                self._agree(lane)  # a graph that was left behind by what it depends on gives something else by now
            except Exception as error:  # noqa: BLE001 - as above
                lane.failed = describe(error)
        return decider, stopped

    def _record_kernels(self) -> None:
        """Make the profiled pass of each arm, last of all: recording kernels slows launches down."""
        for index, lane in enumerate(self._lanes):
            if lane.failed or not lane.took:
                continue
            self._progress(TIMED + index * (PARTS - TIMED) // len(self._lanes), PARTS, f"{lane.name}: kernels")
            positional, named = self._plan.arguments
            try:
                if self._watch.clock == "host":
                    self._steps[lane.name] = Missing("no_device")
                    continue
                rehearse = not self._tools.ledger.snapshot().get(PROFILED)
                with self._tools.alone():
                    self._steps[lane.name] = found = step_profile.profile(
                        functools.partial(lane.contestant.call, *positional, **named),
                        wait=self._watch.settle,
                        before=self._plan.reset,
                        rehearse=rehearse,
                    )
                if not isinstance(found, Missing):
                    self._tools.ledger.count(PROFILED)
            except Exception as error:  # noqa: BLE001 - without it, all else stays
                self._steps[lane.name] = Missing("needs_kernel_records", describe(error))

    def _arm(self, lane: Lane) -> Arm:
        contestant = lane.contestant
        called = lane.name in self._cold
        return Arm(
            name=lane.name,
            mode=contestant.mode,
            ran=contestant.ran.mode if called else NOT_RUN,
            reason=contestant.ran.reason if called else "",
            refused=lane.failed,
            strayed=lane.strayed,
            cold=self._cold.get(lane.name, ColdPhase()),
            samples=lane.samples,
            turns=tuple(lane.turns),
            memory_held_bytes=self._memory.get(lane.name, NOT_SET),
            timeline=self._steps.get(lane.name, NOT_PROFILED),
            agreement=self._agreed.get(lane.name, NOT_SET),
        )
