"""What a comparison found: arms, their samples, verdicts, and what follows from them. Nouns only.

All times are whole nanoseconds. What was not measured is :class:`~gpu_timed.record.Missing`, never 0.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from gpu_timed.errors import UnknownArmError
from gpu_timed.record import NOT_SET, Cause, Measured, Missing, Warmth
from gpu_timed.step_timeline import ProfiledSteps

Word: TypeAlias = Literal["faster", "slower", "same", "ambiguous"]
Quantity: TypeAlias = Literal["wall", "device"]
Limit: TypeAlias = Literal["launch", "device", "mixed", "unknown"]

NOT_PROFILED: Final = Missing("not_profiled", "no pass with kernel records was made")
NOT_RUN: Final = Missing("not_run")
NO_DEVICE: Final = Missing("no_device")


WIDE: Final = 2.0
"""An interval whose ends are further apart than by this factor tells of nothing that is nearer than that."""


def counted(count: int, what: str) -> str:
    """Return a number of things: 1 block, 2 blocks."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def not_measured(name: str) -> str:
    """Return why an arm is refused of which nothing else is known than that the baseline called *name* was."""
    return f"{name} was not measured"


class FirstCall(NamedTuple):
    """One call of an arm before it was warm."""

    wall_ns: int
    """From the call until the device had done it."""
    warmth: Warmth
    causes: tuple[Cause, ...]
    """What was compiled, tuned, loaded or captured in it."""
    ran: str
    """The mode that ran: the first calls of a graph are eager."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdPhase:
    """The calls of an arm until it was warm. They are in none of its samples."""

    calls: tuple[FirstCall, ...] = ()
    one_off_ns: Measured = NOT_RUN
    """What they took together beyond what warm calls take: compiling, capturing, loading, warming up. 0 where they
    took no more. Missing where that is not known: the mode never ran, or no call was warm to hold them against."""
    settled: bool = False
    """Whether the last ones had no causes left; else the bound on calls or on time ended it, and *reason* says so."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The warm calls of an arm, in the order in which they were made; equally long tuples."""

    block: tuple[int, ...] = ()
    """Number of the block in which each was made, from 0. In a block every arm has its turn."""
    wall_ns: tuple[int, ...] = ()
    """From just before the call until the host saw that the device had done it."""
    launch_ns: tuple[int, ...] = ()
    """From just before the call to its return."""
    device_ns: tuple[int, ...] | Missing = NO_DEVICE
    """From a mark just before the call to one just behind it, on the device. Gaps included."""

    def __len__(self) -> int:
        return len(self.wall_ns)

    def block_medians(self, times: Sequence[int]) -> list[float]:
        """Return the median of each block of *times*, which are one of the tuples above; in nanoseconds."""
        both = zip(self.block, times, strict=True)
        return [statistics.median(time for _, time in each) for _, each in itertools.groupby(both, lambda one: one[0])]

    def typical(self, times: Sequence[int]) -> float:
        """Return the median of the medians of the blocks, as verdicts take them: each block counts alike.

        In nanoseconds. Of all calls alike the median would be that of the blocks that had the more of them.

        Raises:
            statistics.StatisticsError: There are none.
        """
        return statistics.median(self.block_medians(times))


class Turn(NamedTuple):
    """What state the machine was in after one turn of an arm in one block."""

    block: int
    sm_clock_mhz: Measured
    throttle: tuple[str, ...] | Missing
    """What held the clocks, in NVML's words, as in :class:`~gpu_timed.record.Vitals`."""
    slowed: bool | Missing
    """Whether heat, power or a brake held them down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The outputs of an arm beside the baseline's, from equal inputs and equal seeds."""

    equal: bool
    """Whether all of them agree within the tolerance of their type."""
    exact: bool = False
    """Whether they are the same to the bit."""
    max_abs: float | Missing = NOT_SET
    """The largest difference of two numbers."""
    max_rel: float | Missing = NOT_SET
    """The largest difference of two numbers as a part of the baseline's, or of the root mean square of its array where
    that is larger: next to 0 any difference is large."""
    where: str = ""
    """Which output differs first, like ``[0]['logits']``; empty where none does."""
    text: str = ""
    """The same in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run the function, and what was measured of it."""

    name: str
    mode: str
    """The mode that was asked for; ``as_given`` for an arm that is a function of its own."""
    ran: str | Missing = NOT_RUN
    """The mode that its samples ran in."""
    reason: str = ""
    """Why that is another one, or what else is to be known of how it ran."""
    refused: str = ""
    """Why it was not measured to the end; empty where it was."""
    strayed: str = ""
    """How it came to be launched otherwise while it was measured than when it was warm; empty where it was not."""
    cold: ColdPhase = ColdPhase()
    samples: Samples = Samples()
    turns: tuple[Turn, ...] = ()
    memory_held_bytes: Measured = NOT_SET
    """Device memory that was held once it was warm, beyond what was held before its first call."""
    timeline: ProfiledSteps | Missing = NOT_PROFILED
    """What the device did in a step, from kernel records of a separate pass; or why that is not known."""
    agreement: Agreement | Missing = NOT_SET
    """How its outputs compare with the baseline's; of the baseline, with those of its own second run."""

    @property
    def honoured(self) -> bool:
        """Whether what ran is what was asked for."""
        return self.mode in ("as_given", self.ran)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How an arm compares with another."""

    arm: str
    against: str
    word: Word | None
    """``faster``, ``slower``, ``same``, ``ambiguous``; None where there can be none, and *reason* says why."""
    reason: str
    quantity: Quantity = "wall"
    """Which time was compared."""
    ratio: float | Missing = NOT_SET
    """Time of *arm* as a part of the time of *against*: 0.5 takes half as long."""
    low: float | Missing = NOT_SET
    """Interval in which that ratio lies, with *level*."""
    high: float | Missing = NOT_SET
    level: float = 0.95
    """How often such an interval holds the truth, however often was looked while it was measured."""
    blocks: int = 0
    """Blocks that it rests on."""
    more: int | Missing = NOT_SET
    """Blocks that it would take, as a rough guess, to tell what is ambiguous now."""

    @property
    def half_width(self) -> float | Missing:
        """Half the width of the interval."""
        if isinstance(self.low, Missing) or isinstance(self.high, Missing):
            return NOT_SET
        return (self.high - self.low) / 2

    @property
    def wide(self) -> bool:
        """Whether the interval is so wide that a ratio alone would say too much: its ends a factor of 2 apart."""
        low, high = self.low, self.high
        return not isinstance(low, Missing) and not isinstance(high, Missing) and high > WIDE * low


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What limits an arm, told by its numbers."""

    bound: Limit
    sentences: tuple[str, ...]
    busy_ratio: float | Missing = NOT_SET
    """Kernel time of a step, from the profiled pass, as a part of the wall time of the unprofiled one."""
    busy_ns: Measured = NOT_SET
    """Kernel time of a step, from the profiled pass; overlaps counted once."""
    idle_share: float | Missing = NOT_SET
    """The rest of it."""
    typical_gap_ns: Measured = NOT_SET
    """Median gap of the profiled pass, in which the host is slower."""
    idle_per_gap_ns: Measured = NOT_SET
    """What the device idles in an unprofiled call, wall time less busy time, divided by the gaps of a call."""
    typical_operator: str | Missing = NOT_SET
    """What the host was launching when the device waited most."""
    ceiling: float | Missing = NOT_SET
    """How many times faster launching better can make it at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """After how many calls an arm has paid for what it took once."""

    arm: str
    calls: Measured
    """``Missing("slower")`` where it never does, ``Missing("not_told")`` where there is no verdict ``faster``,
    ``Missing("not_run")`` of an arm that was not measured."""
    extra_one_off_ns: Measured = NOT_SET
    """What the arm takes once beyond what the baseline takes once: the difference of their
    :attr:`ColdPhase.one_off_ns`, 0 where it takes no more. Missing where one of them is."""
    gain_ns: Measured = NOT_SET
    """What a warm call gains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where and under what it was measured."""

    card: str | Missing = NO_DEVICE
    device_uuid: str | Missing = NO_DEVICE
    clock: str = "host"
    """Where device times come from; ``host`` where there are none."""
    driver: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of Python, gpu_timed, and the runtimes that are installed."""
    platform: str = ""
    date: str = ""
    sm_clock_mhz: tuple[int, int] | Missing = NOT_SET
    """The lowest and the highest that was read between turns."""
    throttle: tuple[str, ...] | Missing = NOT_SET
    """Every reason that was read."""
    host_load: float | Missing = NOT_SET
    """Load average of the last minute for each CPU, as it ended."""


class Point(NamedTuple):
    """One value of a sweep, and what was found there."""

    value: Any
    comparison: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What :func:`gpu_timed.compare` found."""

    name: str
    """Of what was compared."""
    arms: tuple[Arm, ...]
    baseline: str
    """Name of the arm that the others are held against."""
    verdicts: tuple[Verdict, ...] = ()
    """One for each arm but the baseline, in the order of the arms."""
    diagnoses: Mapping[str, Diagnosis] = field(default_factory=dict)
    """By arm, of those that have samples."""
    break_evens: Mapping[str, BreakEven] = field(default_factory=dict)
    """By arm, of those that have samples but the baseline."""
    refused: str = ""
    """Why nothing was compared at all (hidden state, say); empty where it was."""
    environment: Environment = Environment()
    notes: tuple[str, ...] = ()
    """What else is to be known about these numbers."""
    seed: int = 0
    """By which the blocks were shuffled."""
    blocks: int = 0
    calls_per_turn: Mapping[str, int] = field(default_factory=dict)
    stopped: str = ""
    """Why it was measured no longer."""
    seconds: float = 0.0
    """How long all of it took."""
    first_calls_s: float = 0.0
    """How long it took of that until all arms were warm: compiling, capturing, holding outputs against each other."""
    blocks_s: float = 0.0
    """How long the blocks took, which is what ``budget_s`` bounds."""
    sweep: str = ""
    """Name of what was swept; *arms* and verdicts are then those of the points."""
    points: tuple[Point, ...] = ()

    def arm(self, name: str) -> Arm:
        """Return the arm called *name*.

        Raises:
            UnknownArmError: There is none. It is a KeyError.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise self._unknown(name)

    def verdict(self, name: str) -> Verdict:
        """Return the verdict of the arm called *name*.

        Raises:
            UnknownArmError: There is none, or it is the baseline. It is a KeyError.
        """
        for verdict in self.verdicts:
            if verdict.arm == name:
                return verdict
        if name == self.baseline and any(arm.name == name for arm in self.arms):
            raise UnknownArmError(f"{name!r} is the baseline: the others are held against it. {self._names()}")
        raise self._unknown(name)

    def _unknown(self, name: str) -> UnknownArmError:
        if self.points:
            return UnknownArmError(f"of a sweep each point has arms of its own: points[0].comparison.arm({name!r}).")
        return UnknownArmError(f"there is no arm {name!r}. {self._names()}")

    def _names(self) -> str:
        return f"Arms: {', '.join(repr(arm.name) for arm in self.arms)}."

    @property
    def diagnosis(self) -> Diagnosis | None:
        """What limits the baseline."""
        return self.diagnoses.get(self.baseline)

    @property
    def exit_code(self) -> int:
        """What the command line answers: 1 where nothing could be compared, of a sweep at any of its values, else 0."""
        each = [point.comparison for point in self.points] or [self]
        return int(
            any(one.refused or (one.verdicts and all(verdict.word is None for verdict in one.verdicts)) for one in each)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dictionaries and lists, in the shape that ``views/plain.py`` documents."""
        from gpu_timed.views import plain  # noqa: PLC0415 - a view is above what it shows

        return plain.to_dict(self)

    def to_json(self, indent: int | None = None) -> str:
        """Return :meth:`to_dict` as JSON text, in ASCII; *indent* as in :func:`json.dumps`."""
        from gpu_timed.views import plain  # noqa: PLC0415

        return plain.to_json(self, indent)

    def to_pandas(self) -> Any:
        """Return a data frame with a row for each warm call: its arm, block and times in nanoseconds.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        from gpu_timed.views import frame  # noqa: PLC0415

        return frame.to_pandas(self)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a page with words, plots and figures to *path*, and return that. It stands by itself, offline too.

        Raises:
            MissingExtraError: matplotlib is not installed.
            OSError: The file cannot be written.
        """
        from gpu_timed.views import page  # noqa: PLC0415

        return page.to_html(self, path)

    def to_text(self, width: int = 100) -> str:
        """Return what ``gpu-timed compare`` prints, without colours, for *width* columns."""
        from gpu_timed.views import table  # noqa: PLC0415

        return table.text(self, width)
