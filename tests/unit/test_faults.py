"""Faults inside gpu_timed: whatever breaks, at whatever moment, the user's call never feels it.

Each part of the engine is made to raise, once or for good, around functions, coroutines and generators. Then:
the call returned its own value or raised its own exception; the context is what it was; the fault can be
seen in the counts; no wrong time was told; every mark came back; and the next healthy call is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler

from gpu_timed import current, flush, gpu_span, gpu_timed, ports
from gpu_timed.clocks.host import HostClock
from gpu_timed.context.gate import Gate
from gpu_timed.errors import DeviceFault
from gpu_timed.peaks import PeakBook
from gpu_timed.ports import Clock, Locator, SecondLook, Sighting, Verdict, VitalsSource, WarmthSource, WorkCounter
from gpu_timed.reader import Reader
from gpu_timed.record import NOT_SET, Missing, Record
from gpu_timed.resolver import Resolver
from gpu_timed.testing import FakeDevice, use_device
from gpu_timed.values import clean
from gpu_timed.work import Work

MS = 1_000_000
ALWAYS = 0
PATIENCE_S = 0.4
LONG_S = 20.0
"""How long to wait for what must come, on a machine that is busy: spent only by a test that fails."""
ORDINARY = {"handed_over", "no_provider", "boundary_without_asyncio"}
"""Counts that are no fault."""


class Sink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def announce(self, span: Any, record: Record) -> None:
        pass

    def emit(self, span: Any, record: Record) -> None:
        self.records.append(record)


class Warmth:
    """A source that sees nothing, unless something is to happen in every call, or a library to tune itself."""

    def __init__(self) -> None:
        self.happens = self.tunes = False
        self.seen = 0

    @property
    def generation(self) -> int:
        self.seen += self.happens
        return self.seen

    def verdict(self, intervals: Any, *, first_call: bool, around: Any = None) -> Verdict:
        return Verdict("unknown", NOT_SET, ())

    def tunes_by_shape(self) -> bool:
        return self.tunes

    def lasting(self, intervals: Any) -> Any:
        return ()

    def signature(self, arguments: Any, named: Any) -> Any:
        return ()


class Second:
    """Looks again and sees nothing."""

    watching = True

    def second_look(self, site: Any, began_ns: int, ended_ns: int, verdict: Verdict) -> Verdict:
        return verdict


class Vitals:
    """Knows nothing of the machine."""

    def at(self, device_uuid: str | None, start_ns: int, end_ns: int) -> Sighting:
        return Sighting(NOT_SET, NOT_SET)

    def stop(self) -> None:
        pass


class Memory:
    """Knows nothing of an allocator."""

    def notes(self, device: int, taken_ns: int, usual_ns: list[int], *, first: bool) -> tuple[str, ...]:
        return ()


class Counting:
    """Counts nothing."""

    def stop(self, spoilt: Missing | None) -> Missing:
        return Missing("not_counted")


class Counter:
    """Begins to count each call."""

    def __init__(self, counting: Counting) -> None:
        self.counting = counting

    def begin(self, counted: Any, arguments: Any, named: Any) -> Any:
        return self.counting


class World:
    """A tracer on a fake device, everything of it within reach."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = self.clock = self.locator = device
        self.tracer = current.tracer()
        self.warmth = Warmth()
        self.tracer.warmth = self.tracer.resolver.reader.warmth = cast("WarmthSource", self.warmth)
        self.gate = self.tracer.gate
        self.host = device.host
        self.resolver = self.tracer.resolver
        self.reader = self.resolver.reader
        self.reader.second_look = self.second = Second()
        self.reader.vitals = self.vitals = Vitals()
        self.reader.memory = self.memory = Memory()
        self.reader.peaks = self.peaks = PeakBook(lambda: None, lambda: None, lambda: None)
        self.counting = Counting()
        self.tracer.counter = self.counter = Counter(self.counting)
        self.work: Any = self.own_work
        self.own = self
        self.sink = Sink()
        self.ledger = current.ledger()

    def own_work(self) -> Work:
        """What a call has to do, as its user says."""
        return Work(flops=1)

    def own_attributes(self) -> dict[str, Any]:
        """Attributes of a call, as its user says."""
        return {"a": 1}


@pytest.fixture
def world() -> Iterator[World]:
    otel_context.attach(Context())  # what a failing test left behind is no parent of this one's calls
    with use_device(FakeDevice()) as device:
        made = World(device)
        with current.sink(made.sink):
            yield made


class Sabotage:
    """Makes one method raise at its *nth* call, or at every one (ALWAYS)."""

    def __init__(self, nth: int, *, afterwards: bool = False, error: type[Exception] = RuntimeError) -> None:
        self.nth = nth
        self.error = error
        self.calls = itertools.count(1)
        self.fired = 0
        self.afterwards = afterwards

    def of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            number = next(self.calls)
            if self.nth not in (ALWAYS, number):
                return original(*arguments, **named)
            self.fired += 1
            if self.afterwards:
                original(*arguments, **named)
            raise self.error("injected")

        return call

    def strike(self, world: World, target: str, patch: pytest.MonkeyPatch) -> None:
        part, _, method = target.partition(".")
        kind = {"warmth": Warmth, "resolver": Resolver, "second": Second}.get(part)
        if kind is not None and not callable(getattr(kind, method)):  # a property
            before = vars(kind)[method]
            patch.setattr(kind, method, property(self.of(getattr(before, "fget", lambda _: before))))
        else:
            owner = getattr(world, part)
            patch.setattr(owner, method, self.of(getattr(owner, method)))


ANY_TIME = {"enter", "leave", "suspend", "resume", "wait", "settle", "submit", "reading", "asking"}
TARGETS: dict[str, tuple[tuple[int, ...], set[str]]] = {
    "locator.locate": ((1, 2, 3, ALWAYS), {"enter", "leave", "suspend", "resume"}),
    "locator.device_of": ((1, ALWAYS), {"leave"}),
    "clock.mark": ((1, 2, 3, 4, ALWAYS), {"enter", "leave", "suspend", "resume"}),
    "clock.is_capturing": ((1, ALWAYS), {"leave"}),
    "clock.wait": ((1, ALWAYS), {"wait"}),
    "clock.wait_device": ((1, ALWAYS), {"leave"}),
    "clock.is_done": ((1, 2, 3, ALWAYS), {"asking", "wait", "reading", "device_error"}),
    "clock.elapsed_ns": ((1, 2, ALWAYS), {"reading"}),
    "clock.position": ((1, 2, ALWAYS), {"reading"}),
    "clock.floor_ns": ((1, 2, ALWAYS), {"reading"}),
    "clock.release": ((1, 2, ALWAYS), {"release"}),
    "clock.describe": ((1, ALWAYS), {"describing"}),
    "clock.unhindered": ((1, 2, ALWAYS), {"unhindered", "wait", "leave"}),
    "gate.admit": ((1, ALWAYS), {"enter"}),
    "gate.attach": ((1, ALWAYS), {"enter"}),
    "gate.attach_context": ((1, ALWAYS), {"resume"}),
    "gate.current": ((1, ALWAYS), {"suspend", "resume"}),
    "gate.detach": ((1, 2, ALWAYS), {"detach"}),
    "gate.restore": ((1, ALWAYS), {"mend"}),
    "host.now_ns": ((1, 2, 3, 4, 5, 6, 7, 8, ALWAYS), ANY_TIME | {"unreadable"}),
    "host.refresh": ((1, ALWAYS), {"reading", "unreadable"}),
    "host.to_unix": ((1, 2, 3, ALWAYS), {"reading", "unreadable", "submit"}),
    "resolver.submit": ((1, ALWAYS), {"submit"}),
    "resolver.full": ((1, 2, ALWAYS), {"enter", "resume"}),
    "resolver.pending": ((1, ALWAYS), {"resolver"}),
    "resolver.abandon": ((), set()),
    "resolver.take_in": ((), set()),
    "resolver.hand_over_now": ((1, ALWAYS), {"submit"}),
    "reader.ready": ((1, ALWAYS), {"resolver", "settle", "submit"}),
    "reader.resolve": ((1, ALWAYS), {"resolver", "settle", "submit"}),
    "reader.provisional": ((1, ALWAYS), {"submit"}),
    "reader.resolve_if_done": ((1, ALWAYS), {"settle", "submit"}),
    "reader.calm_for": ((1, ALWAYS), {"resolver", "settle", "submit"}),
    "sink.announce": ((1, ALWAYS), {"sink_Sink"}),
    "sink.emit": ((1, ALWAYS), {"sink_Sink", "lost_in_sink"}),
    "warmth.generation": ((1, 2, ALWAYS), {"enter", "leave", "suspend", "resume"}),
    "warmth.verdict": ((1, ALWAYS), {"reading", "unreadable", "submit"}),
    "warmth.tunes_by_shape": ((1, ALWAYS), {"enter"}),
    "warmth.signature": ((1, ALWAYS), {"inputs_unreadable"}),
    "warmth.lasting": ((1, ALWAYS), {"reading", "unreadable", "submit"}),
    "second.watching": ((1, ALWAYS), {"reading", "unreadable"}),
    "second.second_look": ((1, ALWAYS), {"reading", "unreadable"}),
    "vitals.at": ((1, ALWAYS), {"vitals"}),
    "memory.notes": ((1, ALWAYS), {"memory"}),
    "peaks.of": ((1, ALWAYS), {"reading", "unreadable", "submit"}),
    "counter.begin": ((1, ALWAYS), {"counting"}),
    "counting.stop": ((1, ALWAYS), {"counting"}),
    "own.own_work": ((1, ALWAYS), {"work_raised"}),
    "own.own_attributes": ((1, ALWAYS), {"attributes_raised"}),
}
"""At which of its calls each part is made to raise, and under which names that is counted."""

PARTS: dict[str, type[Any]] = {
    "locator": Locator,
    "clock": Clock,
    "gate": Gate,
    "host": HostClock,
    "resolver": Resolver,
    "reader": Reader,
    "sink": ports.Sink,
    "warmth": WarmthSource,
    "second": SecondLook,
    "vitals": VitalsSource,
    "memory": ports.MemoryWatch,
    "peaks": PeakBook,
    "counter": WorkCounter,
    "counting": ports.Counting,
}
NOT_IN_A_CALL = {
    *("resolver.add_sink", "resolver.remove_sink", "resolver.flush", "resolver.stop", "resolver.running"),
    *("resolver.wait", "vitals.stop", "peaks.forget"),
    *("resolver.limits", "reader.limits", "peaks.limits", "reader.calm_no_more"),
}
"""What only users of the library call, or its own end."""


def test_every_part_is_struck() -> None:
    """Each public method of each part has its entry above: a new one is added there, or said not to be in any call."""
    known = {
        f"{part}.{name}"
        for part, kind in PARTS.items()
        for name in {*vars(kind), *getattr(kind, "__annotations__", {}), *(["now_ns"] if kind is HostClock else [])}
        if not name.startswith("_") and name not in ("name", "in_order")
    }
    assert known - NOT_IN_A_CALL == {target for target in TARGETS if not target.startswith("own.")}


class Own(Exception):  # noqa: N818 - a name, not a kind
    """The user's own exception."""


VALUE, OWN = object(), Own("mine")
ONCE = ("function", "method", "block")
TWICE = ("coroutine", "generator", "async_generator")
TRUE_NS = {**dict.fromkeys(ONCE, 2 * MS), **dict.fromkeys(TWICE, 4 * MS)}


def step(world: World) -> None:
    world.device.launch(MS)
    world.device.host_clock.advance(2 * MS)


def make(world: World, kind: str, sync: Any, *, raises: bool, late: Any = None) -> Callable[[], Any]:
    """A timed call of one kind; calling it returns VALUE or raises OWN."""

    def end() -> object:
        if raises:
            raise OWN
        return VALUE

    options: dict[str, Any] = {"sync": sync, "late": late, "name": "call"}
    timed = functools.partial(gpu_timed, **options, work=world.work, attributes=lambda *_: world.own_attributes())

    @timed()
    def function() -> object:
        step(world)
        return end()

    class Model:
        @gpu_timed(**options)
        def method(self) -> object:
            step(world)
            return end()

    def block() -> object:
        with gpu_span(**options):
            step(world)
            return end()

    @timed(sync="boundary" if sync == "device" else sync)
    async def coroutine() -> object:
        step(world)
        await asyncio.sleep(0)
        step(world)
        return end()

    @timed(sync="boundary" if sync == "device" else sync)
    async def async_generator() -> Any:
        step(world)
        yield 1
        step(world)
        end()

    @timed()
    def generator() -> Iterator[int]:
        step(world)
        yield 1
        step(world)
        return end()

    def run_generator() -> object:
        running = generator()
        assert next(running) == 1
        try:
            next(running)
        except StopIteration as stop:
            return stop.value
        return None

    def run_coroutine() -> object:
        return asyncio.run(asyncio.wait_for(coroutine(), PATIENCE_S))

    def run_async_generator() -> object:
        async def run() -> object:
            assert [item async for item in async_generator()] == [1]
            return VALUE

        return asyncio.run(asyncio.wait_for(run(), PATIENCE_S))

    return {
        "function": function,
        "method": Model().method,
        "block": block,
        "coroutine": run_coroutine,
        "async_generator": run_async_generator,
        "generator": run_generator,
    }[kind]


def problems_of(
    world: World,
    kind: str,
    sync: Any,
    target: str,
    *,
    raises: bool,
    nth: int,
    late: Any = None,
    error: type[Exception] = RuntimeError,
) -> Iterator[str]:
    """Strike one call, and say everything that is not as it must be."""
    world.work = "count" if target.startswith("count") else lambda *_: world.own_work()
    world.warmth.happens, world.warmth.tunes = target == "warmth.lasting", target == "warmth.signature"
    call = make(world, kind, sync, raises=raises, late=late)
    sabotage = Sabotage(nth, afterwards=target in ("gate.detach", "gate.restore"), error=error)
    before = otel_context.get_current()
    counted = flush(PATIENCE_S).counts
    with pytest.MonkeyPatch.context() as patch:
        sabotage.strike(world, target, patch)
        try:
            outcome = call()
        except BaseException as came:
            outcome = came
        if outcome is not (OWN if raises else VALUE):
            yield f"the call gave {outcome!r}"
        if otel_context.get_current() is not before:
            yield "the context changed"
            otel_context.attach(before)
        world.device.run_dry()
        flush(0.05 if nth == ALWAYS else PATIENCE_S)
    found = flush(LONG_S)
    if found.pending:
        yield f"{found.pending} spans never resolved"
        return
    new = {kind for kind, count in found.counts.items() if count > counted.get(kind, 0)} - ORDINARY
    if sabotage.fired and not new:
        yield "the fault was not counted"
    if not sabotage.fired and new:
        yield f"counted without a fault: {new}"
    if new - TARGETS[target][1]:
        yield f"counted by other names: {new - TARGETS[target][1]}"
    struck = list(world.sink.records)
    if len(struck) > 1:
        yield f"{len(struck)} records of one call"
    if not struck and not sabotage.fired:
        yield "no record, and no fault"
    for record in struck:
        if not isinstance(record.device_ns, Missing) and record.device_ns != TRUE_NS[kind]:
            yield f"told {record.device_ns} ns instead of {TRUE_NS[kind]}"
        if isinstance(record.launch_ns, int) and record.launch_ns != TRUE_NS[kind]:
            yield f"told a launch of {record.launch_ns} ns instead of {TRUE_NS[kind]}"
        if not isinstance(record.device_ns, Missing) and record.status != ("error" if raises else "ok"):
            yield f"status {record.status}"
    if world.device.marks_in_use and target != "clock.release":
        yield f"{world.device.marks_in_use} marks were not given back"
    world.device.marks_in_use = 0
    for place in world.device._places.values():
        if place.watchers:
            yield "the span is watched for strangers for ever"
    world.sink.records.clear()
    world.warmth.happens = world.warmth.tunes = False
    make(world, kind, sync, raises=False, late=late)()
    world.device.run_dry()
    if flush(LONG_S).pending:
        yield "the next call never resolved"
    healthy = [
        (record.device_ns, record.status, tuple(note for note in record.quality if note != "flops_counted"))
        for record in world.sink.records
    ]
    if healthy != [(TRUE_NS[kind], "ok", ())]:
        yield f"the next call told {healthy}"
    world.sink.records.clear()


POLICIES = (("boundary", "host"), ("deferred", "host"), ("deferred", "device_only"), ("device", "host"))


def strikes() -> Iterator[Any]:
    for target, (nths, _) in TARGETS.items():
        for nth, kind in itertools.product(nths, (*ONCE, *TWICE)):
            if kind in ("method", "block") and (nth != 1 or target.startswith(("own.", "count"))):
                continue
            if kind == "async_generator" and nth not in (1, ALWAYS):
                continue
            yield pytest.param(target, nth, kind, id=f"{target}-{nth or 'always'}-{kind}")


@pytest.mark.parametrize(("target", "nth", "kind"), list(strikes()))
def test_a_fault_is_never_felt(world: World, kind: str, target: str, nth: int) -> None:
    """One part raises at its nth call, under each policy and ending: what holds without a fault holds with it."""
    for (sync, late), raises in itertools.product(POLICIES, [False, True]):
        if sync == "device" and (kind not in ("function", "generator") or not target.startswith(("clock.", "host."))):
            continue
        if late == "device_only" and nth not in (1, ALWAYS):
            continue
        found = list(problems_of(world, kind, sync, target, raises=raises, nth=nth, late=late))
        assert (sync, late, raises, found) == (sync, late, raises, [])


@pytest.mark.parametrize("error", [MemoryError, RecursionError])
@pytest.mark.parametrize("target", [target for target, (nths, _) in TARGETS.items() if 1 in nths])
def test_a_fault_of_the_machine_is_never_felt(world: World, target: str, error: type[Exception]) -> None:
    """No memory, or no room on the stack, for a part of ours: as any other fault."""
    for (sync, late), kind in itertools.product(POLICIES[:3], ["function", "coroutine"]):
        found = list(problems_of(world, kind, sync, target, raises=False, nth=1, late=late, error=error))
        assert (sync, late, kind, found) == (sync, late, kind, [])


@pytest.mark.parametrize("sync", ["boundary", "deferred", "device"])
@pytest.mark.parametrize("target", [target for target in TARGETS if target.startswith("clock.")])
def test_a_device_in_error_is_never_felt(world: World, target: str, sync: Any) -> None:
    """Each question to the clock answered by an error of the device: the span says so, and the call does not."""
    for kind in ("function", "generator"):
        call = make(world, kind, sync, raises=False)
        with pytest.MonkeyPatch.context() as patch:
            Sabotage(ALWAYS, error=DeviceFault).strike(world, target, patch)
            assert call() is VALUE
            world.device.run_dry()
            assert flush(PATIENCE_S).pending == 0
        for record in world.sink.records:
            assert isinstance(record.device_ns, Missing) or record.device_ns == TRUE_NS[kind]
        world.sink.records.clear()
        world.device.marks_in_use = 0


# -- faults of the process --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["function", "coroutine", "generator"])
@pytest.mark.parametrize("sync", ["boundary", "deferred"])
def test_no_thread_can_be_started(world: World, kind: str, sync: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the system refuses a thread the call returns its value; once it grants one, everything is resolved."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "gpu_timed-resolver":
            raise RuntimeError("can't start new thread")
        start(thread)

    call = make(world, kind, "deferred" if kind == "coroutine" else sync, raises=False)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert call() is VALUE
        assert call() is VALUE
    assert call() is VALUE
    world.device.run_dry()
    assert flush(1).pending == 0
    assert [record.device_ns for record in world.sink.records][-1:] == [TRUE_NS[kind]]
    assert world.device.marks_in_use == 0


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("kind", ["function", "coroutine", "generator"])
@pytest.mark.parametrize("target", ["locator.locate", "host.now_ns", "gate.admit", "resolver.submit"])
def test_logging_a_fault_can_fail_too(world: World, kind: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logging filter of the application's that raises turns no fault of ours into the user's."""

    def refuse(record: logging.LogRecord) -> bool:
        raise LookupError("the filter is broken")

    logger = logging.getLogger("gpu_timed")
    logger.addFilter(refuse)
    try:
        with monkeypatch.context() as patch:
            Sabotage(1).strike(world, target, patch)
            for _ in range(2):
                try:
                    outcome = make(world, kind, "deferred", raises=False)()
                except LookupError as felt:
                    outcome = repr(felt)
                assert outcome is VALUE
            world.device.run_dry()
            flush(0.2)
    finally:
        logger.removeFilter(refuse)


def test_a_fault_is_logged_once_for_each_kind(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred faults of one kind are a hundred in the counts and one line in the log."""
    with monkeypatch.context() as patch:
        Sabotage(ALWAYS).strike(world, "locator.locate", patch)
        for _ in range(100):
            make(world, "function", "deferred", raises=False)()
    assert len([entry for entry in caplog.records if entry.name == "gpu_timed"]) == 1
    assert "injected" in caplog.text
    assert sum(count for kind, count in flush(1).counts.items() if kind not in ORDINARY) >= 100


# -- what the user and the application bring along ---------------------------------------------------------


class Evil(Exception):  # noqa: N818 - a name, not a kind
    """An exception whose text raises another of its kind."""

    def __str__(self) -> str:
        raise Evil


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ValueError("no attributes"), id="plain"),
        pytest.param(Evil(), id="unprintable"),
    ],
)
@pytest.mark.parametrize("kind", ["function", "coroutine", "generator"])
def test_attributes_that_raise(world: World, kind: str, error: Exception) -> None:
    """A function of attributes that raises costs its attributes, and is counted; the call is measured all the same."""

    def attributes() -> Any:
        raise error

    made = gpu_timed(sync="deferred", attributes=attributes)

    @made
    def function() -> object:
        step(world)
        return VALUE

    @made
    async def coroutine() -> object:
        step(world)
        return VALUE

    @made
    def generator() -> Iterator[int]:
        step(world)
        yield 1

    if kind == "function":
        assert function() is VALUE
    elif kind == "coroutine":
        assert asyncio.run(coroutine()) is VALUE
    else:
        assert list(generator()) == [1]
    found = flush(1)
    assert found.counts["attributes_raised"] == 1
    assert [record.device_ns for record in world.sink.records] == [2 * MS]


@pytest.mark.parametrize("kind", ["function", "coroutine", "generator"])
def test_an_interrupt_in_the_users_attributes_is_the_users(world: World, kind: str) -> None:
    """A KeyboardInterrupt that lands in the function of attributes comes out; the context is as before."""
    before = otel_context.get_current()

    def attributes() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gpu_timed(attributes=attributes)(lambda: None)()
    assert otel_context.get_current() is before
    assert make(world, kind, "deferred", raises=False)() is VALUE


class Touchy:
    """A result that raises whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise LookupError(name)


@pytest.mark.parametrize("sync", ["boundary", "deferred"])
def test_a_result_that_cannot_be_looked_at(world: World, sync: Any) -> None:
    """Looking for the device of a result may fail: the result is returned, and the call is measured."""
    result = Touchy()

    @gpu_timed(sync=sync)
    def function() -> object:
        step(world)
        return result

    assert function() is result
    assert flush(1).pending == 0
    assert [record.device_ns for record in world.sink.records] == [2 * MS]
    assert world.device.marks_in_use == 0


class BrokenSampler(Sampler):
    def should_sample(self, *arguments: Any, **named: Any) -> Any:
        raise LookupError("no decision")

    def get_description(self) -> str:
        return "broken"


class BrokenIds(RandomIdGenerator):
    def generate_span_id(self) -> int:
        raise LookupError("no ids")


class BrokenProcessor(SpanProcessor):
    def __init__(self, at: str) -> None:
        setattr(self, at, self.fail)

    def fail(self, *arguments: Any, **named: Any) -> None:
        raise LookupError("the processor is broken")


class BrokenProvider(trace.TracerProvider):
    def get_tracer(self, *arguments: Any, **named: Any) -> Any:
        raise LookupError("no tracer")


def broken_provider(how: str) -> trace.TracerProvider:
    if how == "provider":
        return BrokenProvider()
    if how == "sampler":
        return TracerProvider(sampler=ParentBased(BrokenSampler()), shutdown_on_exit=False)
    if how == "ids":
        return TracerProvider(id_generator=BrokenIds(), shutdown_on_exit=False)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BrokenProcessor(how))
    return provider


@pytest.mark.parametrize("kind", ["function", "coroutine", "generator"])
@pytest.mark.parametrize("sync", ["boundary", "deferred"])
@pytest.mark.parametrize("how", ["provider", "sampler", "ids", "on_start", "on_end"])
def test_a_broken_provider_is_not_felt(world: World, how: str, kind: str, sync: Any) -> None:
    """A sampler, id generator, processor or provider of the application's that raises is counted, and that is all."""
    trace.set_tracer_provider(broken_provider(how))
    before = otel_context.get_current()
    for raises in (False, True):
        for _ in range(2):
            try:
                outcome = make(world, kind, sync, raises=raises)()
            except Own as error:
                outcome = error
            assert outcome is (OWN if raises else VALUE)
            assert otel_context.get_current() is before
    world.device.run_dry()
    found = flush(1)
    assert found.pending == 0
    assert found.counts.keys() - ORDINARY
    assert world.device.marks_in_use == 0
    assert all(record.device_ns == TRUE_NS[kind] for record in world.sink.records)


def test_one_sink_that_raises_takes_nothing_from_another(world: World) -> None:
    """Every sink gets every record, whatever the others do, and OpenTelemetry's too."""

    class Broken(Sink):
        def emit(self, span: Any, record: Record) -> None:
            raise OSError("the disk is full")

    exported = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    trace.set_tracer_provider(provider)
    after = Sink()
    with current.sink(Broken()), current.sink(after):
        for _ in range(5):
            make(world, "function", "deferred", raises=False)()
        found = flush(1)
    assert found.counts["sink_Broken"] == 5
    assert len(world.sink.records) == len(after.records) == 5
    assert len([span for span in exported.get_finished_spans() if span.name == "call"]) == 5


# -- faults of one device ---------------------------------------------------------------------------------


def test_a_stream_that_cannot_be_asked_holds_no_other_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While questions about one device raise something unforeseen, spans on another are resolved and flushed."""
    original = world.device.is_done

    def is_done(mark: Any) -> bool:
        if mark.device == 1:
            raise RuntimeError("unforeseen")
        return original(mark)

    with monkeypatch.context() as patch:
        patch.setattr(world.device, "is_done", is_done)
        with world.device.use(device=1):
            make(world, "function", "deferred", raises=False)()
        for _ in range(3):
            make(world, "function", "deferred", raises=False)()
        flush(0.2)
        told = [record.device_ns for record in world.sink.records if record.device == 0]
        assert told == [2 * MS] * 3
    assert flush(1).pending == 0
    assert world.device.marks_in_use == 0


def test_waiting_for_a_span_whose_questions_raise(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """span.wait raises WaitTimeout or returns a record that says what is missing, never the fault itself."""
    with monkeypatch.context() as patch:
        Sabotage(ALWAYS).strike(world, "clock.is_done", patch)
        with gpu_span("late", sync="deferred") as span:
            step(world)
        with contextlib.suppress(TimeoutError):
            record = span.wait(0.2)
            assert isinstance(record.device_ns, Missing)


# -- interrupts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sync", "waiting"), [("boundary", "wait"), ("device", "wait_device")])
def test_an_interrupt_while_waiting_loses_nothing(
    world: World, sync: Any, waiting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the span waits for the device comes out; the span is resolved later, and every mark comes back."""

    def interrupt(what: Any) -> None:
        raise KeyboardInterrupt

    before = otel_context.get_current()
    with monkeypatch.context() as patch:
        patch.setattr(world.device, waiting, interrupt)
        with pytest.raises(KeyboardInterrupt):
            gpu_timed(sync=sync)(lambda: step(world))()
    assert otel_context.get_current() is before
    world.device.run_dry()
    found = flush(1)
    assert found.pending == 0
    assert world.sink.records or found.counts.keys() - ORDINARY
    assert world.device.marks_in_use == 0
    assert [place.watchers for place in world.device._places.values()] == [[]]


@contextlib.contextmanager
def left_to_us(world: World) -> Iterator[Any]:
    """A deferred span that the device reaches when the block begins, while the resolver's thread sleeps for long."""
    current.set_settings(poll_ms=10_000)
    with world.device.held():
        with gpu_span("ours", sync="deferred") as span:
            step(world)
        assert flush(0.05).pending == 1
        time.sleep(0.05)
    world.device.run_dry()
    yield span


def test_an_interrupt_while_reading_stops_no_other_span(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in span.wait, in the midst of reading the marks, leaves the later spans of the stream as they were."""

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with left_to_us(world) as span:
        with monkeypatch.context() as patch:
            patch.setattr(world.device, "position", interrupt)
            with pytest.raises(KeyboardInterrupt):
                span.wait(1)
        for _ in range(3):
            make(world, "function", "deferred", raises=False)()
        found = flush(1)
    assert found.pending == 0
    assert [record.device_ns for record in world.sink.records if record.name == "call"] == [2 * MS] * 3


def test_an_interrupted_reading_is_done_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in span.wait costs the span nothing: it is read later, its times are its own, and its marks come back."""
    original = world.device.position
    interrupts = iter([KeyboardInterrupt()])

    def interrupt(*arguments: Any) -> Any:
        for error in interrupts:
            raise error
        return original(*arguments)

    began = world.host.to_unix(world.host.now_ns())
    with left_to_us(world) as span:
        monkeypatch.setattr(world.device, "position", interrupt)
        with pytest.raises(KeyboardInterrupt):
            span.wait(1)
        assert flush(1).pending == 0
    assert [(record.device_ns, record.start_ns) for record in world.sink.records] == [(MS, began)]
    assert world.device.marks_in_use == 0


def test_shutting_down_while_a_thread_reads_loses_no_other_span(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A span that a slow span.wait is reading at shutdown takes no other span with it."""
    reading, go = threading.Event(), threading.Event()
    original = world.device.elapsed_ns

    def slow(start: Any, end: Any) -> int:
        if threading.current_thread().name == "waiting":
            reading.set()
            assert go.wait(10)
        return original(start, end)

    monkeypatch.setattr(world.device, "elapsed_ns", slow)
    with left_to_us(world) as span:
        waiting = threading.Thread(target=span.wait, name="waiting")
        waiting.start()
        try:
            assert reading.wait(10)
            for _ in range(2):
                make(world, "function", "deferred", raises=False)()
            # However busy the machine is, it must give up the one that is being read and pass on the others: stopped
            # for real, it has as long as it needs, and the reader lets go only after that.
            stopping = threading.Thread(target=world.resolver.stop, args=(0.3,))
            stopping.start()
            thread = world.resolver._thread
            assert thread is not None
            thread.join(30)
            stopping.join(30)
            assert len([record for record in world.sink.records if record.name == "call"]) == 2
        finally:
            go.set()
            waiting.join(10)


# -- what is no Exception, and what is hostile ----------------------------------------------------------------------


class Panic(BaseException):
    """As a panic of Rust arrives in Python, or what ends a test or a task."""


@pytest.mark.parametrize("late", ["host", "device_only"])
def test_a_sink_may_raise_what_is_no_exception(world: World, late: Any) -> None:
    """On gpu_timed's thread whatever a sink raises is counted, once a span, and the thread goes on."""

    class Broken(Sink):
        def emit(self, span: Any, record: Record) -> None:
            raise Panic

    with current.sink(Broken()):
        for _ in range(3):
            make(world, "function", "deferred", raises=False, late=late)()
        world.device.run_dry()
        found = flush(LONG_S)
    assert (found.pending, found.counts["sink_Broken"]) == (0, 3)
    assert world.resolver.running
    make(world, "function", "deferred", raises=False)()
    assert flush(LONG_S).pending == 0
    assert len(world.sink.records) == 4


def test_what_user_code_wrote_wrongly_costs_itself_alone(world: World, exporter: InMemorySpanExporter) -> None:
    """A write that the SDK's span does not take is counted; the span is exported with everything else."""
    with gpu_span("call", sync="deferred") as span:
        span.set_attribute("before", 1)
        span._write("add_event", ("name",), timestamp="no number", no_such="argument")
        span.set_attribute("after", 2)
        step(world)
    assert flush(LONG_S).counts["write_raised"] == 1
    made = next(span for span in exporter.get_finished_spans() if span.name == "call")
    assert made.attributes is not None
    assert (made.attributes["before"], made.attributes["after"]) == (1, 2)


class Meta(type):
    @property
    def __module__(cls) -> str:  # type: ignore[override]
        raise LookupError


class Hostile(metaclass=Meta):
    def __getattr__(self, name: str) -> Any:
        raise LookupError(name)

    def __str__(self) -> str:
        raise LookupError

    def __len__(self) -> int:
        raise LookupError

    def __iter__(self) -> Any:
        raise LookupError


class Endless:
    dtype = "x" * 100_000

    @property
    def shape(self) -> Any:
        return itertools.count()


def inside_itself() -> list[Any]:
    made: list[Any] = []
    made += [made] * 4096
    return made


HOSTILE: dict[str, Callable[[], Any]] = {
    "raising": Hostile,
    "raising inside": lambda: [Hostile()],
    "endless shape": Endless,
    "inside itself": inside_itself,
    "wide": lambda: [[0] * 4096] * 4096,
    "large number": lambda: 1 << 100_000,
    "bytes": lambda: b"x" * 10**7,
}


@pytest.mark.parametrize("what", list(HOSTILE))
def test_hostile_attributes_are_named_or_left_out(world: World, what: str) -> None:
    """Values that raise, have no end or hold themselves: the call goes on, and what is kept is bounded."""
    value = HOSTILE[what]()
    kept = clean(value)
    assert kept is None or isinstance(kept, str | tuple)
    assert not isinstance(kept, str) or len(kept) <= 4096
    assert not isinstance(kept, tuple) or sum(len(str(item)) for item in kept) <= 4096 * 4096
    with gpu_span("call", sync="deferred", attributes={"value": value, Hostile(): 1}) as span:  # type: ignore[dict-item]
        span.set_attribute("value", value)
        step(world)
    world.device.run_dry()
    assert flush(LONG_S).pending == 0
    assert [record.device_ns for record in world.sink.records] == [2 * MS]
