"""The warm calls of all arms, in blocks: every arm has its turn in each, in an order that is drawn anew.

What drifts hits all arms alike, and what one leaves behind (caches, clocks, the allocator) hits each other as often.
Nothing is collected as garbage in a turn, and nothing of gpu_timed's own goes on meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpu_timed.analysis.deciding import BEYOND_DOUBT, CLEAR, Decider
from gpu_timed.arms import Samples, Turn, counted
from gpu_timed.measure.contestant import Arguments, Contestant
from gpu_timed.measure.stopwatch import Stopwatch, Took
from gpu_timed.measure.turns import (
    MOST_CALLS,
    SHARES,
    TURN_NS,
    Share,
    adjusted,
    fitting,
    length_ns,
    settling,
    share_out,
)
from gpu_timed.option_names import called
from gpu_timed.record import Missing

_LONGEST: Final = 2
"""After this many times what a turn is to last it ends, whatever calls are left of it."""
_FEWEST_PACED: Final = 3


@dataclass(slots=True, eq=False)
class Lane:
    """One arm as it is measured."""

    contestant: Contestant
    calls: int = 1
    """Of a turn, those that count."""
    share: Share = SHARES[-1]
    call_ns: int = 0
    """How long a call took, before the first block."""
    shortest_ns: int = 0
    """The shortest of those."""
    block: list[int] = field(default_factory=list)
    took: list[tuple[int, int, int | Missing]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    failed: str = ""
    """Why it runs no more."""
    strayed: str = ""
    """How it came to be launched otherwise than when it was warm."""

    @property
    def name(self) -> str:
        """Of the arm."""
        return self.contestant.name

    @property
    def samples(self) -> Samples:
        """What was measured."""
        device = [took[2] for took in self.took]
        absent = next((one for one in device if isinstance(one, Missing)), None)
        if absent is None and not device:
            absent = Missing("not_run")
        return Samples(
            block=tuple(self.block),
            wall_ns=tuple(took[0] for took in self.took),
            launch_ns=tuple(took[1] for took in self.took),
            device_ns=absent if absent is not None else tuple(one for one in device if isinstance(one, int)),
        )


@dataclass(slots=True, kw_only=True)
class Course:
    """What all turns have in common.

    Args:
        stopwatch: Times the calls.
        arguments: What the function takes.
        prepare: Called before each call, outside of what is timed.
        state: Returns the state of the machine after a turn of the block with that number.
        by_device: Whether arms are compared by their device time, not by the wall's.
    """

    stopwatch: Stopwatch
    arguments: Arguments
    prepare: Callable[[], object] | None
    state: Callable[[int], Turn]
    by_device: bool = False

    def time(self, lane: Lane) -> Took:
        """Prepare and time one call."""
        if self.prepare is not None:
            self.prepare()
        return self.stopwatch.time(lane.contestant.call, *self.arguments)

    def pace(self, lane: Lane) -> None:
        """Find out how long a call of *lane* takes, to begin with."""
        now = self.stopwatch.host.now_ns
        each: list[int] = []
        began = now()
        while len(each) < _FEWEST_PACED or (now() - began < TURN_NS and len(each) < MOST_CALLS):
            before = now()
            self.time(lane)
            each.append(max(1, now() - before))
        lane.call_ns, lane.shortest_ns = round(statistics.median(each)), min(each)


def divide(lanes: Sequence[Lane], left_ns: int) -> int:
    """Share the time out between *lanes*, which have been paced; returns how long one block is at the least, in ns."""
    share = share_out((lane.shortest_ns for lane in lanes), left_ns)
    for lane in lanes:
        lane.share, lane.calls = share, fitting(lane.call_ns, share)
    return sum(length_ns(lane.shortest_ns, share) for lane in lanes)


def run(
    lanes: Sequence[Lane],
    course: Course,
    decider: Decider,
    chance: random.Random,
    *,
    until_ns: int,
    progress: Callable[[int], None],
) -> str:
    """Run blocks until there are enough, or time is up at *until_ns*; returns why it ended.

    An arm that raises drops out, and says why; the baseline must not. Of what was measured in a block that did not
    come to its end nothing is kept.
    """
    now = course.stopwatch.host.now_ns
    block = 0
    while True:
        running = [lane for lane in lanes if not lane.failed]
        if decider.baseline not in {lane.name for lane in running}:
            return f"{decider.baseline} could not be run to the end"
        medians = _block(running, course, chance, block)
        if medians is None:
            for lane in running:
                if lane.failed:
                    decider.drop(lane.name)
            continue
        enough = decider.add(medians)
        block += 1
        progress(decider.blocks)
        if enough:
            return _words(decider)
        if now() >= until_ns:
            return f"the time given by {called('budget_s')} was up"


def _words(decider: Decider) -> str:
    if decider.alone:
        return f"{decider.baseline} was the only one left, and needs no more than {counted(decider.blocks, 'block')}"
    if decider.precise:
        enough = f"±{decider.precision:.1%}"
        if decider.widest > decider.precision:  # of arms that are far apart
            enough += f", or ±{CLEAR * decider.precision:.1%} of arms that differ by more than {BEYOND_DOUBT:.0%}"
        return f"every interval was narrower than {enough}"
    return f"there was time for {counted(decider.blocks, 'block')}"


def _block(running: Sequence[Lane], course: Course, chance: random.Random, block: int) -> dict[str, float] | None:
    """Give each arm its turn; returns the median of each, or None where one dropped out."""
    order = list(running)
    chance.shuffle(order)
    found: dict[str, list[Took]] = {}
    turns: dict[str, Turn] = {}
    with _no_garbage():
        for lane in order:
            try:
                found[lane.name] = _turn(lane, course)
            except Exception as error:  # noqa: BLE001 - the arm says why, and the others go on
                lane.failed = describe(error)
                return None
            turns[lane.name] = course.state(block)
    medians = {}
    for lane in running:
        took = found[lane.name]
        lane.block += [block] * len(took)
        lane.took += [(one.wall_ns, one.launch_ns, one.device_ns) for one in took]
        lane.turns.append(turns[lane.name])
        held = [one.device_ns if course.by_device else one.wall_ns for one in took]
        medians[lane.name] = statistics.median(one if isinstance(one, int) else 0 for one in held)
    return medians


def _turn(lane: Lane, course: Course) -> list[Took]:
    before, now = lane.contestant.ran, course.stopwatch.host.now_ns
    most = _LONGEST * max(TURN_NS, length_ns(lane.call_ns, lane.share))
    began = now()
    for _ in range(settling(lane.calls, lane.share)):
        course.time(lane)
    took: list[Took] = []
    while len(took) < lane.calls and (not took or now() - began < most):
        took.append(course.time(lane)._replace(result=None))
    after = lane.contestant.ran
    if after.mode != before.mode and not lane.strayed:
        lane.strayed = f"it ran as {after.mode} after a while: {after.reason or 'nobody knows why'}"
    lane.calls = adjusted(len(took), now() - began, lane.share)
    return took


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Collect no garbage for the length of the block, and the young of it afterwards."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
            gc.collect(0)


def describe(error: BaseException) -> str:
    """Return what was raised, in one line."""
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}"[:300] if said else type(error).__name__
