"""Functions of every kind: what comes back is what went in, and its device time is that of its own resumptions."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import itertools
import threading
import time
import types
import typing
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gpu_timed import ConfigurationError, NotCallableError, configure, flush, gpu_span, gpu_timed
from gpu_timed.record import Missing, Record
from gpu_timed.testing import FakeDevice, capture, use_device

US = 1_000
MS = 1_000_000


@pytest.fixture(autouse=True)
def _no_mark_is_lost(device: FakeDevice) -> Iterator[None]:
    """Whatever a test does with ``device``, every mark is given back in the end."""
    otel_context.attach(Context())  # what a failing test left behind is no parent of this one's calls
    yield
    device.run_dry()
    assert flush(5).pending == 0
    assert device.marks_in_use == 0


@types.coroutine
def pause(value: Any = None) -> Iterator[Any]:
    """Suspend a coroutine without an event loop; returns what is sent in."""
    return (yield value)


def finish(coroutine: Any) -> Any:
    """Run a coroutine that suspends only in :func:`pause` to its end."""
    try:
        while True:
            coroutine.send(None)
    except StopIteration as stop:
        return stop.value


def only(records: list[Record]) -> Record:
    (record,) = records
    return record


# -- D1: one span from the first step to the last ---------------------------------------------------------


def test_a_generator_is_one_span_over_all_its_steps(device: FakeDevice) -> None:
    """D1: the device time is the sum over the steps; the consumer's work and thinking are not in it."""

    @gpu_timed
    def tokens() -> Iterator[int]:
        for token in range(3):
            device.launch(20 * MS)
            device.host_clock.advance(MS)
            yield token

    began = device.host.now_ns()
    with capture() as records:
        got = []
        for token in tokens():
            got.append(token)
            device.launch(5 * MS)  # the consumer's own work, on the same stream
            device.host_clock.advance(7 * MS)
    record = only(records)
    assert got == [0, 1, 2]
    assert record.device_ns == 60 * MS
    assert record.launch_ns == 3 * MS
    assert record.resumptions == 4
    assert record.start_ns == device.host.to_unix(began)
    assert record.end_ns - record.start_ns >= 75 * MS
    assert record.quality == ()


def test_an_async_generator_is_one_span_over_all_its_steps(device: FakeDevice) -> None:
    """D1 for async generators: awaits inside and yields to the consumer both suspend the span."""

    @gpu_timed
    async def tokens() -> AsyncIterator[int]:
        for token in range(3):
            device.launch(10 * MS)
            await asyncio.sleep(0)
            device.launch(10 * MS)
            yield token

    async def main() -> list[int]:
        got = []
        async for token in tokens():
            got.append(token)
            device.launch(5 * MS)
            await asyncio.sleep(0)
            device.launch(5 * MS)
        return got

    with capture() as records:
        assert asyncio.run(main()) == [0, 1, 2]
    record = only(records)
    assert record.device_ns == 60 * MS
    assert record.resumptions == 7
    assert (record.sync, record.status) == ("deferred", "ok")


def test_a_coroutine_is_one_span_over_all_its_steps(device: FakeDevice) -> None:
    """D1 for coroutines: what other tasks put on the stream between two steps is theirs."""

    @gpu_timed
    async def infer() -> str:
        for _ in range(3):
            device.launch(20 * MS)
            device.host_clock.advance(MS)
            await asyncio.sleep(0)
        return "done"

    async def stranger() -> None:
        for _ in range(5):
            device.launch(5 * MS)
            await asyncio.sleep(0)

    async def main() -> str:
        return (await asyncio.gather(infer(), stranger()))[0]

    with capture() as records:
        assert asyncio.run(main()) == "done"
    record = only(records)
    assert (record.device_ns, record.launch_ns, record.resumptions) == (60 * MS, 3 * MS, 4)
    assert (record.sync, record.sync_ns) == ("deferred", 0)


def test_a_span_begins_with_the_first_step_and_not_with_the_call(device: FakeDevice) -> None:
    """A generator or coroutine that nobody runs is no span."""

    @gpu_timed
    def generator() -> Iterator[int]:
        yield 1

    @gpu_timed
    async def coroutine() -> None: ...

    @gpu_timed
    async def async_generator() -> AsyncIterator[int]:
        yield 1

    with capture() as records:
        made = generator(), coroutine(), async_generator()
        made[0].close()
        made[1].close()
        finish(made[2].aclose())
        del made
    assert records == []


@pytest.mark.parametrize("kind", ["coroutine", "generator"])
def test_queue_and_least_time_are_sums_too(device: FakeDevice, kind: str) -> None:
    """queue_ns and device_min_ns add up over the resumptions, each measured against its own launch."""

    def step(turn: int) -> None:
        device.host_clock.advance(100 * MS if turn else 0)
        device.launch(10 * MS)
        device.host_clock.advance(4 * MS)

    def steps() -> Iterator[None]:
        step(0)
        yield
        step(1)

    async def awaits() -> None:
        step(0)
        await pause()
        step(1)

    with capture() as records:
        if kind == "coroutine":
            finish(gpu_timed(awaits)())
        else:
            list(gpu_timed(sync="deferred")(steps)())
    record = only(records)
    assert record.resumptions == 2
    # First: 10 ms of work, launched within 4. Then: the device is free after 6 more, and gets its work after 100.
    assert record.device_ns == 10 * MS + (100 - 6 + 10) * MS
    assert record.launch_ns == 4 * MS + 104 * MS
    assert abs(record.queue_ns - 6 * MS) <= 2 * record.uncertainty_ns
    assert abs(record.device_min_ns - (10 - 4 + 104 - 98) * MS) <= 2 * record.uncertainty_ns
    assert record.launch_gaps_included == "yes"


def test_a_coroutine_inside_a_coroutine_has_its_own_time(device: FakeDevice) -> None:
    """Nested timed coroutines are suspended together, resumed together, and each tells its own sum."""

    @gpu_timed
    async def inner() -> None:
        device.launch(2 * MS)
        await pause()
        device.launch(2 * MS)

    @gpu_timed
    async def outer() -> None:
        device.launch(MS)
        await inner()
        device.launch(MS)

    with capture() as records:
        running = outer()
        running.send(None)
        device.launch(50 * MS)
        with contextlib.suppress(StopIteration):
            running.send(None)
    assert {record.name.rpartition(".")[2]: record.device_ns for record in records} == {
        "inner": 4 * MS,
        "outer": 6 * MS,
    }
    outer_record, inner_record = sorted(records, key=lambda record: record.parent_id is not None)
    assert inner_record.parent_id == outer_record.span_id
    assert [record.quality for record in records] == [(), ()]


def test_eight_coroutines_on_one_stream_each_read_their_own_time(device: FakeDevice) -> None:
    """Interleaved eight ways on one stream, every coroutine's device time is exact."""

    @gpu_timed
    async def worker(number: int) -> None:
        for step in range(number + 2):
            device.launch((number + 1) * 100 * US + step)
            device.host_clock.advance(10 * US)
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*(worker(number) for number in range(8)))

    with capture() as records:
        asyncio.run(main())
    by_call = {record.call_index: record for record in records}
    assert sorted(by_call) == list(range(8))
    for number, record in by_call.items():
        steps = number + 2
        assert record.device_ns == steps * (number + 1) * 100 * US + sum(range(steps))
        assert record.resumptions == steps + 1
        assert record.quality == ()


# -- D1: the protocols pass through -----------------------------------------------------------------------


class Boom(Exception):  # noqa: N818 - a name, not a kind
    pass


def talkative(log: list[Any]) -> Iterator[Any]:
    """A generator that answers everything that can be done to one."""
    total = 0
    try:
        while True:
            try:
                got = yield total
            except KeyError as error:
                log.append(("caught", error.args))
                total += 100
                continue
            except GeneratorExit:
                log.append("exit")
                raise
            log.append(("got", got))
            if got == "stop":
                return total
            if got == "boom":
                raise LookupError(total)
            if got == "stopiteration":
                raise StopIteration(total)  # noqa: PLR1708 - what Python makes of it is asked
            total += 1
    finally:
        log.append("closed")


def stubborn(log: list[Any]) -> Iterator[Any]:
    """A generator that yields once more when it is closed."""
    try:
        yield 1
    finally:
        log.append("closing")
        yield 2


async def async_talkative(log: list[Any]) -> AsyncIterator[Any]:
    total = 0
    try:
        while True:
            await pause("from inside")
            try:
                got = yield total
            except KeyError as error:
                log.append(("caught", error.args))
                total += 100
                continue
            except GeneratorExit:
                log.append("exit")
                raise
            log.append(("got", got))
            if got == "stop":
                return
            if got == "boom":
                raise LookupError(total)
            if got == "stopiteration":
                raise StopAsyncIteration(total)
            total += 1
    finally:
        await pause("from finally")
        log.append("closed")


async def async_stubborn(log: list[Any]) -> AsyncIterator[Any]:
    try:
        yield 1
    finally:
        log.append("closing")
        yield 2


async def coroutine_talkative(log: list[Any]) -> Any:
    total = 0
    try:
        while True:
            try:
                got = await pause(total)
            except KeyError as error:
                log.append(("caught", error.args))
                total += 100
                continue
            except GeneratorExit:
                log.append("exit")
                raise
            log.append(("got", got))
            if got == "stop":
                return total
            if got == "boom":
                raise LookupError(total)
            if got == "stopiteration":
                raise StopIteration(total)
            total += 1
    finally:
        log.append("closed")


async def coroutine_stubborn(log: list[Any]) -> Any:
    try:
        await pause(1)
    finally:
        log.append("closing")
        await pause(2)


ERRORS = {"key": KeyError("k"), "boom": Boom("b"), "cancel": asyncio.CancelledError("c"), "exit": GeneratorExit()}
script = st.lists(
    st.sampled_from(
        ["next", "send 1", "send stop", "send boom", "send stopiteration", "close"]
        + [f"throw {name}" for name in ERRORS]
    ),
    min_size=1,
    max_size=7,
)


def describe(error: BaseException) -> tuple[Any, ...]:
    cause = error.__cause__
    same = next((name for name, held in ERRORS.items() if held is error), None)
    said = tuple(str(argument).replace("coroutine ignored", "generator ignored") for argument in error.args)
    return type(error).__name__, said, same, None if cause is None else (type(cause).__name__, cause.args)


def play(running: Any, step: str) -> tuple[Any, ...]:
    """Do one step of a script to a generator or coroutine; returns all that can be seen of it."""
    word, _, argument = step.partition(" ")
    try:
        if word == "next":
            return ("value", running.send(None))
        if word == "send":
            return ("value", running.send(argument))
        if word == "throw":
            return ("value", running.throw(ERRORS[argument]))
        return ("closed", running.close())
    except StopIteration as stop:
        return ("returned", stop.value)
    except BaseException as error:
        return ("raised", *describe(error))


def play_async(running: Any, step: str) -> tuple[Any, ...]:
    """The same for an async generator, whose steps are awaited by hand: what they await can be seen too."""
    word, _, argument = step.partition(" ")
    awaited: list[Any] = []
    try:
        if word in ("next", "send"):
            waiting = running.asend(argument or None)
        elif word == "throw":
            waiting = running.athrow(ERRORS[argument])
        else:
            waiting = running.aclose()
        iterator = waiting.__await__()
        while True:
            awaited.append(iterator.send(None))
    except StopIteration as stop:
        return ("value", stop.value, awaited)
    except BaseException as error:
        return ("raised", *describe(error), awaited)


@pytest.mark.parametrize(
    ("subject", "player"),
    [
        (talkative, play),
        (stubborn, play),
        (coroutine_talkative, play),
        (coroutine_stubborn, play),
        (async_talkative, play_async),
        (async_stubborn, play_async),
    ],
    ids=lambda value: value.__name__,
)
@pytest.mark.parametrize("sync", ["deferred", "boundary"])
@given(steps=script)
@settings(max_examples=60, deadline=None)
def test_any_conversation_is_the_same_with_and_without_us(
    subject: Any, player: Any, sync: Any, steps: list[str]
) -> None:
    """Any sequence of next, send, throw and close has the same values, errors and side effects as undecorated."""
    if subject in (stubborn, coroutine_stubborn, async_stubborn):
        # Who ignores a close() is told so, and need not be the same afterwards; ``yield from`` makes one of a throw().
        steps = [step for step in steps if step not in ("throw exit", "close")] + ["close"]
    said: list[Any] = []
    logs: list[list[Any]] = [[], []]
    before = otel_context.get_current()
    with use_device(FakeDevice()) as device:
        for function, log in zip((subject, gpu_timed(sync=sync)(subject)), logs, strict=True):
            running = function(log)
            said.append([player(running, step) for step in steps])
            assert otel_context.get_current() is before
            if "stubborn" not in subject.__name__:
                player(running, "close")
            del running
            for error in ERRORS.values():
                error.__traceback__ = error.__context__ = error.__cause__ = None
        assert said[0] == said[1]
        assert logs[0] == logs[1]
        device.run_dry()
        assert flush(5).pending == 0
        assert device.marks_in_use == 0
        assert set(flush(5).counts) <= {"handed_over", "no_provider", "boundary_without_asyncio"}


@pytest.mark.parametrize("ending", ["exhausted", "closed", "dropped", "raised", "thrown"])
def test_a_generator_ends_its_span_once(device: FakeDevice, ending: str) -> None:
    """However a generator ends its span ends then, once, with the right status."""

    @gpu_timed
    def steps() -> Iterator[int]:
        device.launch(MS)
        yield 1
        device.launch(MS)
        if ending == "raised":
            raise Boom
        yield 2

    with capture() as records:
        running: Any = steps()
        next(running)
        if ending == "exhausted":
            list(running)
        elif ending == "closed":
            running.close()
        elif ending == "raised":
            with pytest.raises(Boom):
                next(running)
        elif ending == "thrown":
            with pytest.raises(Boom):
                running.throw(Boom())
        del running
        gc.collect()
    record = only(records)
    assert record.status == {"closed": "cancelled", "dropped": "cancelled", "exhausted": "ok"}.get(ending, "error")
    assert record.device_ns == (2 * MS if ending in ("exhausted", "raised") else MS)


def test_async_for_with_a_break_ends_the_span_when_the_loop_ends(device: FakeDevice) -> None:
    """An async generator left by break is closed by its loop, and its span then: once, cancelled."""
    closed = []

    @gpu_timed
    async def steps() -> AsyncIterator[int]:
        try:
            for number in range(10):
                device.launch(MS)
                yield number
        finally:
            closed.append(True)

    async def main() -> None:
        async for number in steps():
            if number == 2:
                break
        await asyncio.sleep(0)

    with capture() as records:
        asyncio.run(main())
    record = only(records)
    assert closed == [True]
    assert (record.device_ns, record.status) == (3 * MS, "cancelled")


def test_a_cancelled_task_ends_its_span(device: FakeDevice) -> None:
    """Cancellation reaches the function, its cleanup runs, and the span says cancelled and not error."""
    cleaned = []

    @gpu_timed(sync="boundary")
    async def infer() -> None:
        device.launch(MS)
        try:
            await asyncio.sleep(60)
        finally:
            device.launch(MS)
            cleaned.append(True)

    async def main() -> None:
        task = asyncio.create_task(infer())
        await asyncio.sleep(0)
        task.cancel("enough")
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await task
        assert task.cancelled()

    with capture() as records:
        asyncio.run(main())
    record = only(records)
    assert cleaned == [True]
    assert (record.status, record.device_ns) == ("cancelled", 2 * MS)
    assert record.error.startswith("asyncio.exceptions.CancelledError")


def test_a_swallowed_cancellation_is_no_ending(device: FakeDevice) -> None:
    """A function that catches its cancellation and goes on is ok."""

    @gpu_timed
    async def infer() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            device.launch(MS)
        return "went on"

    async def main() -> str:
        task = asyncio.create_task(infer())
        await asyncio.sleep(0)
        task.cancel()
        return await task

    with capture() as records:
        assert asyncio.run(main()) == "went on"
    assert (only(records).status, only(records).device_ns) == ("ok", MS)


@pytest.mark.parametrize("how", ["generator", "coroutine", "async_generator"])
def test_a_thrown_exception_keeps_no_frame_alive(device: FakeDevice, how: str) -> None:
    """What the frames held is free once a thrown exception was handled, without the garbage collector's help."""
    assert freed(how, gpu_timed)


@pytest.mark.parametrize("how", ["generator", "coroutine", "async_generator"])
def test_undecorated_a_thrown_exception_keeps_no_frame_alive(how: str) -> None:
    """The control of the test above: Python itself keeps nothing."""
    assert freed(how, lambda function: function)


class Big:
    """Stands for a tensor that a frame holds."""


def freed(how: str, deco: Any) -> bool:
    held: list[weakref.ref[Big]] = []

    @deco
    def generator() -> Iterator[int]:
        big = Big()
        held.append(weakref.ref(big))
        yield 1

    @deco
    async def coroutine() -> None:
        big = Big()
        held.append(weakref.ref(big))
        await pause()

    @deco
    async def async_generator() -> AsyncIterator[int]:
        big = Big()
        held.append(weakref.ref(big))
        yield 1

    gc.collect()
    gc.disable()
    try:
        if how == "async_generator":

            async def main() -> None:
                agen = async_generator()
                await agen.asend(None)
                with contextlib.suppress(Boom):
                    await agen.athrow(Boom())

            finish(main())
        else:
            running: Any = generator() if how == "generator" else coroutine()
            running.send(None)
            with contextlib.suppress(Boom):
                running.throw(Boom())
            del running
        return held[0]() is None
    finally:
        gc.enable()
        gc.collect()


def test_thousands_of_resumptions_are_bounded(device: FakeDevice) -> None:
    """Beyond 4096 resumptions the device time is Missing("overflow"), the values all pass, and it is noted."""
    with use_device(FakeDevice()) as own, capture() as records:

        @gpu_timed
        def steps() -> Iterator[int]:
            for number in range(4_200):
                own.launch(10)
                yield number

        assert sum(steps()) == sum(range(4_200))
    record = only(records)
    assert record.device_ns == Missing("overflow")
    assert record.quality == ("segments_overflow",)


def test_thousands_of_resumptions_leak_no_mark() -> None:
    """Every mark of an overflowing generator is given back."""
    with use_device(FakeDevice()) as own, capture():

        @gpu_timed
        def steps() -> Iterator[int]:
            yield from range(4_200)

        list(steps())
    assert own.marks_in_use == 0


def test_thousands_of_resumptions_are_all_in_the_launch_time() -> None:
    """launch_ns stays the time the generator was running."""
    with use_device(FakeDevice()) as own, capture() as records:

        @gpu_timed
        def steps() -> Iterator[int]:
            for number in range(4_200):
                own.host_clock.advance(10)
                yield number

        for _ in steps():
            own.host_clock.advance(MS)
    assert only(records).launch_ns == 42_000


def test_thousands_of_resumptions_are_all_counted() -> None:
    """resumptions says how often the generator ran."""
    with use_device(FakeDevice()), capture() as records:

        @gpu_timed
        def steps() -> Iterator[int]:
            yield from range(4_200)

        list(steps())
    assert only(records).resumptions == 4_201


# -- identity ---------------------------------------------------------------------------------------------


def plain(a: int, /, b: str = "b", *rest: int, key: float = 1.0, **more: Any) -> list[int]:
    """Plain documentation."""
    return [a]


def generator(a: int, b: str = "b") -> Iterator[int]:
    """Generator documentation."""
    yield a


async def coroutine(a: int, b: str = "b") -> int:
    """Coroutine documentation."""
    return a


async def async_generator(a: int, b: str = "b") -> AsyncIterator[int]:
    """Async generator documentation."""
    yield a


FUNCTIONS = [plain, generator, coroutine, async_generator]
QUESTIONS = [
    inspect.isfunction,
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
    asyncio.iscoroutinefunction,
    inspect.isroutine,
    callable,
]
each_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)


@each_function
def test_a_decorated_function_is_what_it_was(function: Any) -> None:
    """Kind, signature, name, module, documentation and annotations survive; __wrapped__ is the original."""
    function.marker = object()
    timed = gpu_timed(function)
    assert timed is not function
    assert timed.__wrapped__ is function
    assert [ask(timed) for ask in QUESTIONS] == [ask(function) for ask in QUESTIONS]
    assert inspect.signature(timed) == inspect.signature(function)
    assert typing.get_type_hints(timed) == typing.get_type_hints(function)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "marker"):
        assert getattr(timed, name) == getattr(function, name), name
    assert inspect.unwrap(timed) is function
    assert timed.__code__.co_name == function.__name__


@each_function
def test_what_a_call_makes_is_of_the_same_kind(function: Any) -> None:
    """A call returns a generator, coroutine or async generator exactly when the original does."""
    made = [kind(1) for kind in (function, gpu_timed(function))]
    kinds = (inspect.isgenerator, inspect.iscoroutine, inspect.isasyncgen, inspect.isawaitable)
    answers = [[ask(value) for ask in kinds] for value in made]
    assert answers[0] == answers[1]
    for value in made:
        if hasattr(value, "close"):
            value.close()


@each_function
def test_every_decorated_function_has_its_own_code(function: Any) -> None:
    """No two decorated functions share a code object, not even the same function decorated twice (C4)."""
    codes = [gpu_timed(function).__code__ for _ in range(12)]
    assert len({id(code) for code in codes}) == 12
    assert function.__code__ not in codes


def test_a_wrong_call_is_a_type_error_as_before(device: FakeDevice) -> None:
    """Wrong arguments to a plain function raise the function's own TypeError."""
    with pytest.raises(TypeError, match=r"plain\(\) missing 1 required positional argument: 'a'"):
        gpu_timed(plain)()


@pytest.mark.parametrize("function", FUNCTIONS[1:], ids=lambda function: function.__name__)
def test_a_wrong_call_is_a_type_error_at_the_first_step(function: Any) -> None:
    """Wrong arguments raise the function's own TypeError, of what suspends at its first step (a limit README names)."""
    made = gpu_timed(function)()
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        (made.asend(None) if inspect.isasyncgen(made) else made).send(None)


def test_a_generator_based_coroutine_can_still_be_awaited() -> None:
    """What types.coroutine made awaitable is awaitable afterwards."""

    @gpu_timed
    @types.coroutine
    def old_style() -> Iterator[Any]:
        return (yield)

    async def main() -> Any:
        return await old_style()

    finish(main())


def test_a_generator_based_coroutine_never_blocks_its_loop(device: FakeDevice) -> None:
    """What types.coroutine made awaitable is deferred unless asked otherwise, as a coroutine is."""
    blocked = []
    device.wait = blocked.append  # type: ignore[method-assign]

    @gpu_timed
    @types.coroutine
    def old_style() -> Iterator[Any]:
        device.launch(MS)
        return (yield)

    async def main() -> Any:
        return await old_style()

    with capture() as records:
        finish(main())
    assert blocked == []
    assert only(records).sync == "deferred"


class Owner:
    """Methods of every kind, decorated in either order."""

    factor = 3

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    @gpu_timed
    def method(self, x: int) -> int:
        return self.factor * x

    @gpu_timed(name="optioned")
    async def async_method(self, x: int) -> int:
        return self.factor * x

    @gpu_timed
    def generator_method(self, x: int) -> Iterator[int]:
        yield self.factor * x

    @gpu_timed
    @staticmethod
    def static_inside(x: int) -> int:
        return 3 * x

    @staticmethod
    @gpu_timed
    def static_outside(x: int) -> int:
        return 3 * x

    @gpu_timed
    @classmethod
    def class_inside(cls, x: int) -> int:
        return cls.factor * x

    @classmethod
    @gpu_timed
    def class_outside(cls, x: int) -> int:
        return cls.factor * x

    @property
    @gpu_timed
    def looked_up(self) -> int:
        return self.factor


class Child(Owner):
    factor = 5


def test_methods_bind_as_they_did(device: FakeDevice) -> None:
    """Methods, static and class methods in either order, through instance, class and subclass."""
    owner, child = Owner(device), Child(device)
    with capture() as records:
        assert owner.method(2) == Owner.method(owner, 2) == 6
        assert child.method(2) == 10
        assert asyncio.run(child.async_method(2)) == 10
        assert list(owner.generator_method(2)) == [6]
        assert (
            owner.static_inside(2) == Owner.static_inside(2) == owner.static_outside(2) == Owner.static_outside(2) == 6
        )
        assert owner.class_inside(2) == Owner.class_inside(2) == owner.class_outside(2) == Owner.class_outside(2) == 6
        assert child.class_inside(2) == Child.class_outside(2) == 10
        assert child.looked_up == 5
    assert len(records) == 16
    assert {record.name for record in records} == {
        "optioned",
        *(
            f"Owner.{name}"
            for name in (
                "method",
                "generator_method",
                "static_inside",
                "static_outside",
                "class_inside",
                "class_outside",
                "looked_up",
            )
        ),
    }
    assert isinstance(inspect.getattr_static(Owner, "static_inside"), staticmethod)
    assert isinstance(inspect.getattr_static(Owner, "class_inside"), classmethod)
    assert str(inspect.signature(owner.method)) == "(x: 'int') -> 'int'"
    assert owner.method.__self__ is owner


def test_super_and_name_mangling_survive(device: FakeDevice) -> None:
    """Zero-argument super() and private names go on working inside a decorated method."""

    class Base:
        def name(self) -> str:
            return "base"

    class Derived(Base):
        __hidden = "hidden"

        @gpu_timed
        def name(self) -> str:
            return super().name() + self.__hidden

    assert Derived().name() == "basehidden"


# -- objects ----------------------------------------------------------------------------------------------


class Model:
    """A callable object with state."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.calls = 0

    def __call__(self, duration_ns: int, *, again: bool = False) -> int:
        """Run."""
        self.calls += 1
        self.device.launch(duration_ns)
        return duration_ns


def test_a_callable_object_stays_itself(device: FakeDevice) -> None:
    """A callable object keeps its type, attributes and state; its calls are spans under its class's name."""
    model = Model(device)
    timed = gpu_timed(model)
    with capture() as records:
        assert timed(MS, again=True) == MS
    assert isinstance(timed, Model)
    assert timed.calls == model.calls == 1
    timed.calls = 7
    assert model.calls == 7
    assert timed.__wrapped__ is model
    assert inspect.signature(timed) == inspect.signature(model)
    record = only(records)
    assert (record.name, record.device_ns) == ("Model", MS)


def test_partials_builtins_bound_methods_and_lambdas(device: FakeDevice) -> None:
    """Whatever can be called can be timed, and answers as before."""
    model = Model(device)
    with capture() as records:
        assert gpu_timed(functools.partial(plain, 1))() == [1]
        assert gpu_timed(len)([1, 2]) == 2
        assert gpu_timed(model.__call__)(5) == 5
        assert gpu_timed(lambda x: x)(6) == 6
        assert gpu_timed(functools.lru_cache(plain))(7) == [7]
        assert gpu_timed(int)("12") == 12
    assert [record.status for record in records] == ["ok"] * 6
    assert gpu_timed(functools.partial(plain, 1)).func is plain


def test_an_object_that_raises_raises_the_same(device: FakeDevice) -> None:
    """A builtin's own exception comes out, and the span is an error."""
    with capture() as records, pytest.raises(ZeroDivisionError):
        gpu_timed(divmod)(1, 0)
    assert only(records).status == "error"


@pytest.mark.parametrize("how", ["partial", "bound method", "object", "partial of a generator"])
def test_coroutines_in_other_clothes_are_timed_to_their_end(how: str) -> None:
    """A partial, bound method or callable object that makes a coroutine or generator is timed as one."""
    with use_device(FakeDevice()) as device, capture() as records:

        class Served:
            async def __call__(self) -> None:
                await self.method()

            async def method(self) -> None:
                device.launch(MS)
                device.host_clock.advance(2 * MS)

        def steps() -> Iterator[None]:
            device.launch(MS)
            device.host_clock.advance(2 * MS)
            yield

        served = Served()
        made: Any = {
            "partial": functools.partial(Served.method, served),
            "bound method": served.method,
            "object": served,
            "partial of a generator": functools.partial(steps),
        }[how]
        result = gpu_timed(made)()
        if how == "partial of a generator":
            list(result)
        else:
            finish(result)
    assert (only(records).device_ns, only(records).launch_ns) == (2 * MS, 2 * MS)


@pytest.mark.parametrize("nothing", [5, "text", [1], object(), property(len)])
def test_what_cannot_be_called_is_refused(nothing: Any) -> None:
    """Decorating something that cannot be called is a NotCallableError, which is a TypeError."""
    with pytest.raises(NotCallableError) as caught:
        gpu_timed(nothing)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("function", [coroutine, async_generator, functools.partial(coroutine)])
def test_device_policy_is_refused_where_it_would_block_a_loop(function: Any) -> None:
    """sync="device" on what runs on an event loop is a ConfigurationError that names the other two."""
    with pytest.raises(ConfigurationError, match=r"boundary.*deferred"):
        gpu_timed(sync="device")(function)


def test_device_policy_is_refused_for_an_async_block(device: FakeDevice) -> None:
    """The same for ``async with``."""

    async def main() -> None:
        async with gpu_span("block", sync="device"):
            pass

    with pytest.raises(ConfigurationError, match=r"boundary.*deferred"):
        asyncio.run(main())


def test_a_process_wide_device_policy_does_not_block_a_loop(device: FakeDevice) -> None:
    """configure(sync="device") is not applied to what runs on an event loop."""
    configure(sync="device")
    waited = []
    device.wait_device = waited.append  # type: ignore[method-assign]

    @gpu_timed
    async def infer() -> None:
        device.launch(MS)
        device.host_clock.advance(2 * MS)

    with capture() as records:
        asyncio.run(infer())
    assert waited == []
    assert only(records).sync in ("boundary", "deferred")


# -- the context ------------------------------------------------------------------------------------------


def test_the_current_span_is_the_same_after_every_await(device: FakeDevice) -> None:
    """Inside, get_current_span() is one and the same span over awaits, and is the parent of what is started."""
    seen = []

    @gpu_timed
    async def infer() -> None:
        for _ in range(3):
            seen.append(trace.get_current_span())
            await asyncio.sleep(0)
        seen.append(trace.get_current_span())

    with capture() as records:
        asyncio.run(infer())
    assert len({id(span) for span in seen}) == 1
    assert seen[0].get_span_context().span_id == only(records).span_id


def test_between_steps_the_caller_sees_nothing_of_it(device: FakeDevice) -> None:
    """Between two steps of a generator, coroutine or async generator the caller's context is the very same one."""

    @gpu_timed
    def steps() -> Iterator[Any]:
        yield trace.get_current_span()
        yield trace.get_current_span()

    @gpu_timed
    async def awaits() -> None:
        await pause(trace.get_current_span())
        await pause(trace.get_current_span())

    @gpu_timed
    async def async_steps() -> AsyncIterator[Any]:
        yield trace.get_current_span()
        await pause(trace.get_current_span())
        yield trace.get_current_span()

    before = otel_context.attach(otel_context.set_value("mine", 1))
    mine = otel_context.get_current()
    try:
        for running in (steps(), awaits()):
            first, second = running.send(None), running.send(None)
            assert otel_context.get_current() is mine
            assert first is second
            assert first.get_span_context().is_valid
            with contextlib.suppress(StopIteration):
                running.send(None)
            assert otel_context.get_current() is mine
        agen = async_steps()
        for _ in range(2):
            step = agen.asend(None)
            with contextlib.suppress(StopIteration):
                while True:
                    step.send(None)
                    assert otel_context.get_current() is mine
            assert otel_context.get_current() is mine
        finish(agen.aclose())
        assert otel_context.get_current() is mine
    finally:
        otel_context.detach(before)


@pytest.mark.parametrize("how", ["coroutine", "generator", "async_generator"])
def test_what_user_code_attached_survives_suspension(
    device: FakeDevice, exporter: InMemorySpanExporter, how: str
) -> None:
    """A span the user opened inside is current again after an await or yield, and is our child in the trace."""
    tracer = trace.get_tracer("user")
    outside = []

    async def body_async() -> AsyncIterator[None]:
        ours = trace.get_current_span()
        with tracer.start_as_current_span("inner") as inner:
            yield
            assert trace.get_current_span() is inner
            with gpu_span("grandchild"):
                device.launch(MS)
            yield
            assert trace.get_current_span() is inner
        assert trace.get_current_span() is ours

    def body() -> Iterator[None]:
        stepping = body_async()
        with contextlib.suppress(StopAsyncIteration):
            while True:
                finish(stepping.asend(None))
                yield

    @gpu_timed(name="outer", sync="deferred")
    async def as_coroutine() -> None:
        async for _ in body_async():
            await pause()

    @gpu_timed(name="outer", sync="deferred")
    def as_generator() -> Iterator[None]:
        yield from body()

    @gpu_timed(name="outer", sync="deferred")
    async def as_async_generator() -> AsyncIterator[None]:
        async for _ in body_async():
            yield

    before = otel_context.get_current()
    if how == "async_generator":
        agen = as_async_generator()
        with contextlib.suppress(StopAsyncIteration):
            while True:
                finish(agen.asend(None))
                outside.append(otel_context.get_current())
    else:
        running: Any = as_coroutine() if how == "coroutine" else as_generator()
        with contextlib.suppress(StopIteration):
            while True:
                running.send(None)
                outside.append(otel_context.get_current())
    assert len(outside) == 2
    assert all(context is before for context in outside)
    device.run_dry()
    assert flush(5)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans["inner"].parent.span_id == spans["outer"].context.span_id
    assert spans["grandchild"].parent.span_id == spans["inner"].context.span_id
    assert flush(5).counts.keys() == {"handed_over"}


def test_a_generator_moved_to_another_thread_leaves_both_contexts_alone(device: FakeDevice) -> None:
    """A generator begun on one thread and ended on another is one span, and neither thread's context changes."""

    @gpu_timed
    def steps() -> Iterator[int]:
        device.launch(MS)
        yield 1
        device.launch(MS)
        yield 2

    changed = []

    def drain() -> None:
        before = otel_context.get_current()
        changed.append(list(running))
        changed.append(otel_context.get_current() is before)

    with capture() as records:
        running = steps()
        before = otel_context.get_current()
        next(running)
        thread = threading.Thread(target=drain)
        thread.start()
        thread.join(10)
        assert otel_context.get_current() is before
    assert changed == [[2], True]
    assert only(records).device_ns == 2 * MS
    assert flush(5).counts.keys() == {"no_provider"}


# -- the event loop ---------------------------------------------------------------------------------------


async def tick(ticks: list[float]) -> None:
    while True:
        await asyncio.sleep(0.002)
        ticks.append(time.perf_counter())


def test_boundary_in_a_coroutine_never_blocks_the_loop() -> None:
    """A10: while the device is busy 100 ms another task keeps ticking; the record is there when the call returns."""
    with use_device(FakeDevice(realtime=True)) as busy, capture() as records:

        def blocked(mark: Any) -> None:
            raise AssertionError("the event loop was blocked")

        busy.wait = busy.wait_device = blocked  # type: ignore[method-assign]
        spans: list[Any] = []

        @gpu_timed(sync="boundary")
        async def infer() -> str:
            spans.append(trace.get_current_span())
            busy.launch(100 * MS)
            await asyncio.sleep(0)
            return "value"

        async def main() -> None:
            ticks: list[float] = []
            ticker = asyncio.create_task(tick(ticks))
            began = time.perf_counter()
            assert await infer() == "value"
            ended = time.perf_counter()
            ticker.cancel()
            assert spans[0].record is not None
            assert ended - began >= 0.1
            assert len([moment for moment in ticks if began < moment < ended]) >= 5

        asyncio.run(main())
    record = only(records)
    assert (record.sync, record.status) == ("boundary", "ok")
    assert record.device_ns >= 100 * MS
    assert record.sync_ns >= 50 * MS
    assert record.end_ns - record.start_ns >= 100 * MS


def test_boundary_in_an_async_generator_and_block_never_blocks_the_loop() -> None:
    """The same for an async generator and an async block."""
    with use_device(FakeDevice(realtime=True)) as busy, capture() as records:

        @gpu_timed(sync="boundary", name="generator")
        async def steps() -> AsyncIterator[int]:
            busy.launch(30 * MS)
            yield 1

        async def main() -> None:
            ticks: list[float] = []
            ticker = asyncio.create_task(tick(ticks))
            assert [number async for number in steps()] == [1]
            after_generator = len(ticks)
            async with gpu_span("block", sync="boundary") as span:
                busy.launch(30 * MS)
            assert span.record is not None
            assert span.record.device_ns >= 30 * MS
            ticker.cancel()
            assert after_generator >= 2
            assert len(ticks) - after_generator >= 2

        asyncio.run(main())
    assert {record.name: record.sync for record in records} == {"generator": "boundary", "block": "boundary"}


def test_an_error_in_a_boundary_coroutine_waits_too_and_is_raised() -> None:
    """A coroutine that raises has its device time waited for off the loop, and raises its own exception."""
    with use_device(FakeDevice(realtime=True)) as busy, capture() as records:
        spans: list[Any] = []

        @gpu_timed(sync="boundary")
        async def infer() -> None:
            spans.append(trace.get_current_span())
            busy.launch(20 * MS)
            raise Boom

        async def main() -> None:
            with pytest.raises(Boom):
                await infer()
            assert spans[0].record is not None

        asyncio.run(main())
    assert (only(records).status, only(records).device_ns >= 20 * MS) == ("error", True)


def test_wait_for_times_out_while_the_device_is_late(device: FakeDevice) -> None:
    """wait_for around a boundary coroutine on a device that does not come raises TimeoutError; it is recorded later."""

    @gpu_timed(sync="boundary")
    async def infer() -> None:
        device.launch(MS)

    with capture() as records:
        with device.held(), pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(infer(), 0.05))
        assert records == []
    assert only(records).device_ns == MS


def test_a_loop_that_was_closed_meanwhile_harms_nothing(device: FakeDevice) -> None:
    """When the loop is gone by the time the record is there, later spans are resolved all the same."""

    @gpu_timed(sync="boundary")
    async def infer() -> None:
        device.launch(MS)

    with capture() as records:
        with device.held(), pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(infer(), 0.01))
        gpu_timed(name="later")(lambda: device.launch(MS))()
    assert [record.device_ns for record in records] == [MS, MS]


def test_boundary_without_an_asyncio_loop_is_resolved_later(device: FakeDevice) -> None:
    """Under another event loop a boundary coroutine returns at once, is counted, and is resolved as deferred."""

    @gpu_timed(sync="boundary")
    async def infer() -> str:
        device.launch(MS)
        await pause()
        return "value"

    with capture() as records:
        assert finish(infer()) == "value"
    assert (only(records).device_ns, only(records).sync_ns) == (MS, 0)
    assert flush(5).counts["boundary_without_asyncio"] == 1


def test_many_boundary_coroutines_wait_together() -> None:
    """Twenty at once on a busy device all return, each with its record."""
    with use_device(FakeDevice(realtime=True)) as busy, capture() as records:

        @gpu_timed(sync="boundary")
        async def infer(number: int) -> int:
            busy.launch(MS)
            await asyncio.sleep(0)
            return number

        async def main() -> list[int]:
            return await asyncio.wait_for(asyncio.gather(*(infer(number) for number in range(20))), 20)

        assert asyncio.run(main()) == list(range(20))
    assert len(records) == 20


def test_device_only_ends_a_coroutines_host_span_on_time(device: FakeDevice, exporter: InMemorySpanExporter) -> None:
    """With late="device_only" the host span of a coroutine is out before the device is done, as a function's is."""

    @gpu_timed(late="device_only", sync="deferred", name="function")
    def function() -> None:
        device.launch(MS)

    @gpu_timed(late="device_only", name="coroutine")
    async def coroutine() -> None:
        device.launch(MS)

    with device.held():
        function()
        assert [span.name for span in exporter.get_finished_spans()] == ["function"]
        asyncio.run(coroutine())
        assert [span.name for span in exporter.get_finished_spans()] == ["function", "coroutine"]


# -- recursion and threads --------------------------------------------------------------------------------


def test_recursion(device: FakeDevice) -> None:
    """Each level is a span, child of the one above, with the time of all below."""

    @gpu_timed(sync="deferred")
    def down(levels: int) -> int:
        device.launch(MS)
        return 1 + (down(levels - 1) if levels else 0)

    with capture() as records:
        assert down(5) == 6
    by_index = sorted(records, key=lambda record: record.call_index)
    assert [record.device_ns for record in by_index] == [6 * MS, 5 * MS, 4 * MS, 3 * MS, 2 * MS, MS]
    assert [record.parent_id for record in by_index[1:]] == [record.span_id for record in by_index[:-1]]
    assert all(record.quality == () for record in records)


def test_a_recursive_generator(device: FakeDevice) -> None:
    """A generator that delegates to itself: each level is a span with the time of all below."""

    @gpu_timed(sync="deferred")
    def down(levels: int) -> Iterator[int]:
        device.launch(MS)
        yield levels
        if levels:
            yield from down(levels - 1)

    with capture() as records:
        assert list(down(3)) == [3, 2, 1, 0]
    assert sorted(record.device_ns for record in records) == [MS, 2 * MS, 3 * MS, 4 * MS]
    assert all(record.quality == () for record in records)


@pytest.mark.parametrize("sync", ["boundary", "deferred"])
def test_eight_threads_lose_nothing(device: FakeDevice, sync: Any) -> None:
    """Eight threads call one function 500 times each: 4000 records, every index once, every time right."""
    at_once = threading.Barrier(8)

    @gpu_timed(sync=sync)
    def work(thread: int) -> int:
        device.launch(1_000 + thread)
        return thread

    def call(thread: int) -> None:
        with device.use(stream=thread):
            at_once.wait(30)
            for _ in range(500):
                assert work(thread) == thread

    with capture() as records:
        threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(record.call_index for record in records) == list(range(4_000))
    assert sum(record.first_call for record in records) == 1
    assert len({record.span_id for record in records}) == 4_000
    for stream, group in itertools.groupby(sorted(records, key=lambda r: r.stream), key=lambda r: r.stream):
        mine = list(group)
        assert len(mine) == 500
        assert len({record.thread_id for record in mine}) == 1
        assert all(record.device_ns >= 1_000 + stream for record in mine)


def test_threads_on_one_stream_lose_nothing(device: FakeDevice) -> None:
    """The same on one shared stream, where spans cross: no record, mark or context is lost."""

    @gpu_timed(sync="deferred")
    def work() -> None:
        device.launch(1_000)

    def call() -> None:
        for _ in range(250):
            before = otel_context.get_current()
            work()
            assert otel_context.get_current() is before

    with capture() as records:
        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(record.call_index for record in records) == list(range(2_000))
    assert all(isinstance(record.device_ns, int) and record.device_ns >= 1_000 for record in records)


def test_attributes_may_depend_on_the_call(device: FakeDevice) -> None:
    """A function of the arguments gives the span its attributes, for each kind of function."""
    made: list[Callable[..., Any]] = [
        gpu_timed(attributes=lambda a, b="b": {"a": a, "b": b})(function) for function in FUNCTIONS
    ]
    with capture() as records:
        made[0](1, b="x")
        list(made[1](1, b="x"))
        finish(made[2](1, b="x"))
        agen = made[3](1, b="x")
        finish(agen.asend(None))
        finish(agen.aclose())
    assert len(records) == 4
    for record in records:
        assert {"a": 1, "b": "x"}.items() <= record.attributes.items()
