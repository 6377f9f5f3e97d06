"""The interfaces of the rooms above, and the few values that pass through them.

The engine knows these and no implementation: clocks, locators, probes and sinks are handed to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from gpu_timed.bounds import Limit, fullest
from gpu_timed.record import NOT_SET, Cause, Measured, Missing, Record, Tier, Vitals, Warmth
from gpu_timed.work import Work

ENDS_KEPT: Final = 1024
"""Latest end marks of a stream that are remembered."""
MOST_WATCHERS: Final = 1024
"""Spans open on one stream, each inside the next, that are told of strangers' marks."""

NOT_GIVEN: Final = object()
"""Stands for the values of a piece of work that is not a call: nobody knows what it takes or makes."""


class Mark(Protocol):
    """A point on a clock, placed but perhaps not yet reached. Opaque outside its clock."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a device is called: index as the runtime counts, UUID, product name, and ``gpu`` or another kind."""

    index: int
    uuid: str | Missing
    name: str | Missing
    kind: str = "gpu"


class Place:
    """One stream of one device, with the clock that can mark it. Made once for each stream, then kept."""

    __slots__ = ("clock", "device", "ends", "stream", "unwatched", "watchers")

    def __init__(self, clock: Clock, device: int, stream: int) -> None:
        self.clock = clock
        self.device = device
        self.stream = stream
        #: Spans that have a start mark here and no end mark yet: a mark by a stranger is a mark in between.
        self.watchers: list[Any] = []
        #: Spans that could not be among them, because there were too many.
        self.unwatched = 0
        #: The latest end marks on the host's monotonic axis: where the device reached each, and when it was placed.
        self.ends: deque[tuple[int, int]] = deque(maxlen=ENDS_KEPT)


def limits_of(places: Sequence[Place], before: int = 0) -> Iterator[Limit]:
    """Say how much is kept of the fullest of *places*; *before* were dropped of others that are gone."""
    yield Limit(
        "watched",
        MOST_WATCHERS,
        fullest(len(place.watchers) for place in places),
        before + sum(place.unwatched for place in places),
        "spans open on one stream that are told of strangers' work",
        loses=True,
    )
    yield Limit("ends", ENDS_KEPT, fullest(len(place.ends) for place in places), None, "latest end marks of a stream")


class Launch(NamedTuple):
    """What a kernel's own launch says of where it goes."""

    runtime: str
    """``numba``, ``triton``, ``jax`` …: whose locator to ask."""
    stream: int | None = None
    """Raw handle of the stream it names; None for the runtime's current one."""
    absent: Missing | None = None
    """Why it goes to no device at all."""


class Position(NamedTuple):
    """Where a mark stands on the host's monotonic axis: true within ``uncertainty_ns``."""

    host_ns: int
    uncertainty_ns: int
    fault: bool
    """The order of events contradicted what was known of the device's clock."""
    latency_ns: int = 0
    """How long an idle device takes to reach what the host has just put on a stream."""


class Clock(Protocol):
    """Marks on streams, and what can be asked of them once the device has reached them.

    A mark is reached in the order of its stream. Only :meth:`wait` and :meth:`wait_device` block; they
    and the questions may be asked from any thread, also while another thread captures a graph. An answer
    that is an error of the device raises :class:`~gpu_timed.errors.DeviceFault`.
    """

    name: str
    in_order: bool
    """Whether marks on one place are reached in the order in which they were placed."""

    def mark(self, place: Place, values: Any = NOT_GIVEN, since: Mark | None = None) -> Mark | Missing:
        """Place a mark behind the work queued so far on *place*. Never blocks, never raises.

        For a clock that can see work by its results only: *values* are what a call takes or, with its start
        mark as *since*, what it has made.
        """
        ...

    def is_capturing(self, place: Place) -> bool:
        """Return whether work put on *place* now would go into a graph instead of running."""
        ...

    def is_done(self, mark: Mark) -> bool:
        """Return whether the device has reached *mark*."""
        ...

    def wait(self, mark: Mark) -> None:
        """Block until the device has reached *mark*."""
        ...

    def wait_device(self, place: Place) -> None:
        """Block until every stream of the device of *place* is idle."""
        ...

    def elapsed_ns(self, start: Mark, end: Mark) -> int | Missing:
        """Return device nanoseconds from *start* to *end*, the latter reached; or why nobody can tell any more."""
        ...

    def position(self, start: Mark, elapsed_ns: int, called_ns: int, seen_ns: int) -> Position:
        """Place *start*, reached, on the host's monotonic axis.

        *called_ns* is the host's time just before *start* was placed, *seen_ns* a time at which the mark
        that lies *elapsed_ns* behind it was known to be reached: the truth cannot lie outside these two.
        """
        ...

    def floor_ns(self, place: Place) -> int | Missing:
        """Return what an empty pair of marks reads at the least on the device of *place*, in nanoseconds.

        Never more than any pair has read that was given to :meth:`position`. Missing as long as it was not measured,
        and where marks add nothing that could be told from the work. Never blocks, never raises, asks no device.
        """
        ...

    def release(self, *marks: Mark) -> None:
        """Give *marks* back for re-use. They must not be asked anything afterwards."""
        ...

    def describe(self, place: Place) -> DeviceInfo:
        """Return what the device of *place* is called."""
        ...

    def unhindered(self) -> AbstractContextManager[None]:
        """Return a context in which this thread's questions cannot break another thread's graph capture."""
        ...


class Locator(Protocol):
    """Says for a runtime where its current work goes, without initialising anything."""

    def locate(self, launch: Launch | None = None) -> Place | Missing:
        """Return the place of the current stream, or of *launch*, or why there is none.

        Work put there now would run: a stream that is being captured is ``Missing("captured")``.
        """
        ...

    def device_of(self, value: Any) -> int | None:
        """Return the index of the device on which *value* (a result) lives, if it lives on one."""
        ...


class Bench(NamedTuple):
    """A stream for measuring on: idle, and nobody else's."""

    place: Place
    now_ns: Callable[[], int]
    """The host's monotonic clock, in nanoseconds."""
    busy: Callable[[], None] | None
    """Queues work of some 100 µs on the stream and returns at once; None where there is no way to."""


class Verdict(NamedTuple):
    """What the probes saw while a span was running."""

    warmth: Warmth
    tier: Tier | Missing
    causes: tuple[Cause, ...]
    compile_ns: Measured = NOT_SET
    concurrent: tuple[Cause, ...] = ()
    """What happened meanwhile on other threads of Python, and counts for nothing here."""


class Interval(NamedTuple):
    """A piece of a span in which something happened: the generations at its ends, and its thread."""

    began: int
    ended: int
    thread_id: int


@dataclass(slots=True, eq=False)
class Lasting:
    """Something that happened in a call and holds for later calls of the same site as well, though they are warm."""

    note: str
    """The quality note that says so."""
    text: str
    """What happened, for people."""
    until: int | None = None
    """Generation of the event that undid it; None while it holds."""

    def holds(self, generation: int) -> bool:
        """Return whether it held for what had ended when there had been *generation* events."""
        return self.until is None or generation < self.until


class WarmthSource(Protocol):
    """Sees what is compiled, tuned, loaded or initialised in this process."""

    tunes_by_shape: Callable[[], bool] | None
    """Whether a library tunes itself at this moment for each new shape of its inputs, unseen; None while there is none.
    Asked by every call: some 20 ns."""

    @property
    def generation(self) -> int:
        """How many such events there have been. Costs a few nanoseconds."""
        ...

    def verdict(
        self, intervals: Sequence[Interval], *, first_call: bool, around: tuple[int, int] | None = None
    ) -> Verdict:
        """Return what happened in *intervals*; without any, what that means.

        *around* is the generations between which a span was also suspended: what happened there is concurrent.
        """
        ...

    def lasting(self, intervals: Sequence[Interval]) -> Sequence[Lasting]:
        """Return what happened in *intervals* that holds for later calls, too."""
        ...

    def signature(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Hashable | None:
        """Return what of a call's inputs such a library tunes itself for; None if nothing of them can be seen.

        Asked only while :attr:`tunes_by_shape` says yes.
        """
        ...


class SecondLook(Protocol):
    """Looks again, afterwards, whether something was built in a call: for what tells nobody when it builds."""

    @property
    def watching(self) -> bool:
        """Whether there is anything to look at."""
        ...

    def second_look(self, site: Any, began_ns: int, ended_ns: int, verdict: Verdict) -> Verdict:
        """Return *verdict*, or a colder one, for a call of *site* between two times (Unix time in nanoseconds)."""
        ...


class MemoryWatch(Protocol):
    """Knows whether an allocator went to the device for memory."""

    def notes(self, device: int, taken_ns: int, usual_ns: list[int], *, first: bool) -> tuple[str, ...]:
        """Return quality notes on a call on *device* that took the host *taken_ns*, where its site's take *usual_ns*.

        Asked by whoever reads a span's marks, never inside a call.
        """
        ...


class Sighting(NamedTuple):
    """What is known of the state of the machine near a span."""

    vitals: Vitals | Missing
    age_ns: Measured
    """How far the reading lies from the span, in nanoseconds."""


class VitalsSource(Protocol):
    """Knows what state the machine was in. Asked by whoever reads a span's marks, never inside a call."""

    def at(self, device_uuid: str | None, start_ns: int, end_ns: int) -> Sighting:
        """Return what was read nearest to an interval of the host's monotonic axis. Never blocks.

        *device_uuid* as the clock describes the device; None where it has none. What was not asked for before
        is read from then on. On the monotonic axis, so that a stepped realtime clock moves nothing.
        """
        ...

    def stop(self) -> None:
        """Read no more. Does not wait for a reading that hangs."""
        ...


class Counting(Protocol):
    """A count of operations that is going on, on the thread that began it."""

    def stop(self, spoilt: Missing | None) -> Work | Missing:
        """End it on the same thread; returns what was counted, or why that is not to be used.

        *spoilt* says why the call cannot be counted after all; then nothing is kept.
        """
        ...


class WorkCounter(Protocol):
    """Counts the operations of a call, once for each input signature."""

    def begin(
        self, counted: dict[Any, Any], arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Work | Missing | Counting:
        """Return what a call with such arguments has to do, or begin to count; *counted* is the site's memory."""
        ...


class ModeSwitch(Protocol):
    """Knows which mode a call is to run in, and runs it so."""

    in_force: bool
    """Whether a site may be asked to run in another mode than its own. Read by every call."""

    def run(
        self,
        site: Any,
        function: Callable[..., Any],
        opened: Any,
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> Any:
        """Call *function* in the mode of this call of *site*, and tell *opened*, its span or None, what ran."""
        ...

    def decline(self, site: Any, opened: Any, why: str) -> None:
        """Tell *opened* that the call runs as it is, whatever was asked for, and *why*."""
        ...


class Door(NamedTuple):
    """What a wrapper calls: the way into the engine."""

    enter: Callable[..., Any]
    """:meth:`gpu_timed.tracer.Tracer.enter`: opens a span for one call, or returns None: nothing to close."""
    traced: Callable[[str], None]
    """Told the name of a site that Dynamo met inside a compiled region. Runs once, while tracing."""
    modes: ModeSwitch
    """Asked for calls of a site that is ``moded``, and for all once it is ``in_force``."""


class Sink(Protocol):
    """Where finished spans go. Called on the resolver's thread, but for ``late="device_only"``."""

    def announce(self, span: Any, record: Record) -> None:
        """Take a host span that ends now, on the calling thread; *record* holds no device time yet."""
        ...

    def emit(self, span: Any, record: Record) -> None:
        """Take one finished span. May be slow and may raise; neither reaches a decorated call."""
        ...
