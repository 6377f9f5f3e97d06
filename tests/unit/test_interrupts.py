"""Interrupts, handlers and a full stack: what can come between any two steps of gpu_timed's own code.

CPython lets a signal in as a Python function is entered and as a C function returns. At each of these points in turn,
counted by the profiler's hook, a call is interrupted (Ctrl-C), or something of gpu_timed's is run that a signal's
handler, or a generator that the garbage collector finalises, could run there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

import gpu_timed as library
from gpu_timed import current, flush, gpu_span, gpu_timed
from gpu_timed.clocks import fake
from gpu_timed.export.memory import MemorySink
from gpu_timed.testing import FakeDevice, reset, use_device

SOURCE = str(Path(library.__file__).parent)
PATIENCE_S = 2.0
FINALISER = {"_count_the_gone", "calls_in"}
"""Out of a finaliser of a weak reference nothing ever comes."""
UNPROTECTED = {"__exit__", "__aexit__", "__enter__", "__aenter__", *FINALISER}
"""As these are entered nobody can catch anything but the user's code: so it is for every context manager in Python."""
VALUE = object()


class Points:
    """Runs *action* at the *nth* point of gpu_timed's own code on this thread at which CPython lets a signal in."""

    def __init__(self, nth: int, action: Callable[[], None]) -> None:
        self.nth = nth
        self.action = action
        self.seen = 0
        self.where = ""
        self.fired = False

    def __enter__(self) -> Points:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        # The make-believe device stands for the driver, which no signal of Python's interrupts.
        if code.co_name in UNPROTECTED and (event == "call" or code.co_name in FINALISER):
            return
        if self.fired or not code.co_filename.startswith(SOURCE) or code.co_filename == fake.__file__:
            return
        if event == "call":
            if frame.f_lasti > 10:  # a generator that goes on
                return
        elif event != "c_return":
            return
        self.seen += 1
        if self.seen == self.nth:
            self.fired = True
            self.where = f"{event} of {code.co_qualname}:{frame.f_lineno} ({argument})"
            self.action()


def interrupt() -> None:
    raise KeyboardInterrupt


def work(device: FakeDevice) -> object:
    device.launch(1_000_000)
    device.host_clock.advance(2_000_000)
    return VALUE


def plain(device: FakeDevice, **options: Any) -> Callable[[], object]:
    return gpu_timed(name="call", **options)(functools.partial(work, device))


def function(device: FakeDevice, **options: Any) -> Callable[[], object]:
    @gpu_timed(name="call", **options)
    def call() -> object:
        return work(device)

    return call


def raising(device: FakeDevice, **options: Any) -> Callable[[], object]:
    own = LookupError("mine")

    @gpu_timed(name="call", **options)
    def call() -> object:
        work(device)
        raise own

    def outer() -> object:
        try:
            call()
        except LookupError as error:
            return VALUE if error is own else error
        return None

    return outer


def method(device: FakeDevice, **options: Any) -> Callable[[], object]:
    class Model:
        @gpu_timed(name="call", **options)
        def call(self) -> object:
            return work(device)

    return Model().call


def block(device: FakeDevice, **options: Any) -> Callable[[], object]:
    def call() -> object:
        with gpu_span("call", attributes={"a": 1}, **options):
            return work(device)

    return call


def generator(device: FakeDevice, **options: Any) -> Callable[[], object]:
    @gpu_timed(name="call", **options)
    def call() -> Iterator[int]:
        work(device)
        yield 1
        return VALUE

    def outer() -> object:
        running = call()
        next(running)
        try:
            next(running)
        except StopIteration as stop:
            return stop.value
        return None

    return outer


def steps_of(coroutine: Any) -> object:
    """Drive a coroutine by hand: an event loop has interrupts of its own to care for."""
    try:
        while True:
            coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    finally:
        coroutine.close()


class _Pause:
    def __await__(self) -> Any:
        yield


def coroutine(device: FakeDevice, **options: Any) -> Callable[[], object]:
    @gpu_timed(name="call", **options)
    async def call() -> object:
        work(device)
        await _Pause()
        return VALUE

    return lambda: steps_of(call())


def async_generator(device: FakeDevice, **options: Any) -> Callable[[], object]:
    @gpu_timed(name="call", **options)
    async def call() -> AsyncGenerator[object, None]:
        work(device)
        await _Pause()
        yield VALUE

    async def outer() -> object:
        running = call()
        try:
            return await anext(running)
        finally:
            await running.aclose()

    return lambda: steps_of(outer())


def async_block(device: FakeDevice, **options: Any) -> Callable[[], object]:
    async def call() -> object:
        async with gpu_span("call", **options):
            await _Pause()
            return work(device)

    return lambda: steps_of(call())


PLAIN = (function, raising, method, plain, block)
SUSPENDED = (generator, coroutine, async_generator, async_block)


def what_is_wrong(device: FakeDevice, before: Any) -> Iterator[str]:
    """Say what an interrupted call has left behind."""
    if otel_context.get_current() is not before:
        yield "the context changed"
        otel_context.attach(before)
    device.run_dry()
    if flush(PATIENCE_S).pending:
        yield "a span is pending"
    if device.marks_in_use:
        yield f"{device.marks_in_use} marks were not given back"
        device.marks_in_use = 0
    for place in device._places.values():
        if place.watchers:
            yield "a span is watched for strangers for ever"
            place.watchers.clear()
    if len([thread for thread in threading.enumerate() if thread.name == "gpu_timed-resolver"]) > 1:
        yield "two threads"


def at_every_point(
    device: FakeDevice, make: Callable[..., Callable[[], object]], action: Callable[[], None], **options: Any
) -> Iterator[tuple[int, str, object]]:
    """Call, with *action* at each point in turn; gives each point, where it was, and what came out."""
    call = make(device, **options)
    assert call() is VALUE  # warm: sites, tracer and thread are there
    assert flush(PATIENCE_S).pending == 0
    nth = 0
    while True:
        nth += 1
        points = Points(nth, action)
        outcome: object
        try:
            with points:
                outcome = call()
        except BaseException as error:
            outcome = error
        if not points.fired:
            break
        yield nth, points.where, outcome
    assert nth > 20


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")  # interrupted before it could be
@pytest.mark.parametrize("provider", ["none", "sdk", "unsampled"])
@pytest.mark.parametrize("sync", ["boundary", "deferred"])
@pytest.mark.parametrize("make", [*PLAIN, *SUSPENDED])
def test_an_interrupt_at_any_point_leaves_nothing_behind(
    device: FakeDevice, make: Any, sync: Any, provider: str
) -> None:
    """Ctrl-C at each point of gpu_timed's code comes out; context, marks and the next call are as they should be."""
    if provider != "none":
        made = TracerProvider(sampler=ALWAYS_ON if provider == "sdk" else ALWAYS_OFF, shutdown_on_exit=False)
        made.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
        trace.set_tracer_provider(made)
    if make in SUSPENDED and sync == "boundary":
        sync = None
    sink = MemorySink(0)
    other = make(device, sync=sync)  # made once: sites that are gone are counted by a finaliser, at points of its own
    before = otel_context.get_current()
    wrong: list[tuple[str, str]] = []
    with current.sink(sink):
        for _, where, outcome in at_every_point(device, make, interrupt, sync=sync):
            if not isinstance(outcome, KeyboardInterrupt):
                wrong.append((where, f"came out: {outcome!r}"))
            wrong += [(where, problem) for problem in what_is_wrong(device, before)]
            sink.records.clear()
            assert other() is VALUE
            device.run_dry()
            assert flush(PATIENCE_S).pending == 0
            told = [(record.device_ns, record.quality, record.parent_id) for record in sink.records]
            if told != ([] if provider == "unsampled" else [(2_000_000, (), None)]):
                wrong.append((where, f"the next call told {told}"))
    assert not wrong, "\n".join(map(str, wrong))


# -- a handler of a signal, or a finaliser ---------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["none", "sdk"])
@pytest.mark.parametrize("sync", ["boundary", "deferred"])
@pytest.mark.parametrize("make", [function, block, generator, coroutine])
def test_a_handler_may_call_us_at_any_point(device: FakeDevice, make: Any, sync: Any, provider: str) -> None:
    """At each point a handler times, counts, reads a record and flushes: nothing is waited for, and nothing is lost."""
    if provider != "none":
        made = TracerProvider(shutdown_on_exit=False)
        made.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
        trace.set_tracer_provider(made)
    if make in SUSPENDED and sync == "boundary":
        sync = None
    sink = MemorySink(0)
    wrong: list[tuple[str, str]] = []

    def handler() -> None:
        with gpu_span("handler", sync="boundary") as span:
            pass
        assert span.record is not None
        current.ledger().fault("handled", "by a handler")

    def run() -> None:
        before = otel_context.get_current()  # of this thread: another test may have left one behind on the main one
        for nth, where, outcome in at_every_point(device, make, handler, sync=sync):
            if outcome is not VALUE:
                wrong.append((where, f"came out: {outcome!r}"))
            wrong.extend((where, problem) for problem in what_is_wrong(device, before))
            names = sorted(record.name for record in sink.records)
            if names != [*["call"] * (1 + (nth == 1)), "handler"]:  # with the first, the one that was to warm up
                wrong.append((where, f"records of {names}"))
            if flush(PATIENCE_S).counts["handled"] != nth:
                wrong.append((where, "not counted"))
            sink.records.clear()

    with current.sink(sink):
        thread = threading.Thread(target=run, daemon=True)  # a deadlock must not hang the tests
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "it hangs"
    assert not wrong, "\n".join(map(str, wrong))


# -- the first call of a process -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["interrupt", "handler"])
def test_the_first_call_may_be_interrupted_at_any_point(what: str) -> None:
    """Ctrl-C, or a handler's own span, while tracer and thread are made: later calls are measured, by one thread."""
    wrong: list[tuple[str, str]] = []

    def handler() -> None:
        with gpu_span("handler"):
            pass

    nth = 0
    while True:
        nth += 1
        reset()
        before = otel_context.get_current()
        with use_device(FakeDevice()) as device:
            tracer = current.tracer()
            call = function(device, sync="deferred")
            points = Points(nth, interrupt if what == "interrupt" else handler)
            try:
                with points:
                    outcome: object = call()
            except BaseException as error:
                outcome = error
            if not points.fired:
                break
            if what == "interrupt" and not isinstance(outcome, KeyboardInterrupt):
                wrong.append((points.where, f"came out: {outcome!r}"))
            if what == "handler" and outcome is not VALUE:
                wrong.append((points.where, f"came out: {outcome!r}"))
            sink = MemorySink(0)
            with current.sink(sink):
                assert call() is VALUE
                wrong.extend((points.where, problem) for problem in what_is_wrong(device, before))
            if [record.device_ns for record in sink.records if record.quality == ()][-1:] != [2_000_000]:
                wrong.append((points.where, f"the next call told {sink.records}"))
            assert current.tracer() is tracer
    assert nth > 40
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("started", [False, True])
def test_an_interrupt_while_the_thread_starts_makes_no_second(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    """Ctrl-C in the midst of starting gpu_timed's thread, which may be there or not: in the end there is one."""
    start = threading.Thread.start
    made: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        made.append(thread)
        if started:
            start(thread)
        raise KeyboardInterrupt

    call = function(device, sync="deferred")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call()
    sink = MemorySink(0)
    with current.sink(sink):
        assert call() is VALUE
        device.run_dry()
        assert flush(PATIENCE_S).pending == 0
    assert len(made) == 1
    if started:
        made[0].join(5)
    assert not made[0].is_alive()
    assert [record.device_ns for record in sink.records] == [2_000_000, 2_000_000]


# -- a full stack ----------------------------------------------------------------------------------------------------


def deep(left: int, call: Callable[[], object]) -> object:
    """Call with only *left* more frames to be had."""
    depth = len(inspect.stack(0))

    def down(more: int) -> object:
        return call() if more <= 0 else down(more - 1)

    return down(sys.getrecursionlimit() - depth - left)


@pytest.mark.parametrize("sync", ["boundary", "deferred"])
@pytest.mark.parametrize("make", [function, raising, method, block, generator])
def test_with_little_room_on_the_stack_the_call_returns_all_the_same(device: FakeDevice, make: Any, sync: Any) -> None:
    """However few frames are left: the call gives what it would have given, or there was no room for the user's own."""
    call = make(device, sync=sync)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "gpu_timed", lambda **_: lambda bare: bare)
        patch.setitem(globals(), "gpu_span", lambda *_, **__: contextlib.nullcontext())
        bare = make(device, sync=sync)
    needed = 0
    for left in range(40):
        try:
            deep(left, bare)
        except RecursionError:
            needed = left + 1
    sink = MemorySink(0)
    before = otel_context.get_current()
    wrong: list[tuple[int, str]] = []
    failed = measured = 0
    with current.sink(sink):
        for left in range(70):
            sink.records.clear()
            try:
                outcome = deep(left, call)
            except BaseException as error:
                outcome = error
            if isinstance(outcome, RecursionError):
                failed = max(failed, left)
            elif outcome is not VALUE:
                wrong.append((left, f"came out: {outcome!r}"))
            wrong += [(left, problem) for problem in what_is_wrong(device, before)]
            for record in sink.records:
                if isinstance(record.device_ns, int) and outcome is VALUE:
                    measured += 1
                    if record.device_ns != 2_000_000:
                        wrong.append((left, f"told {record.device_ns}"))
        assert call() is VALUE
    assert not wrong, "\n".join(map(str, wrong))
    assert failed < needed + 6, f"{failed} frames were not enough, of which the call itself needs {needed}"
    assert measured > 20
    assert flush(1).counts.keys() & {"no_room_on_the_stack", "enter", "leave", "submit", "wait"}


@pytest.fixture
def limit() -> Iterator[None]:
    """A stack of a few hundred frames: the traces of each level of an endless recursion take their time."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 400)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("make", ["function", "block", "generator"])
def test_endless_recursion_ends_as_without_us(device: FakeDevice, make: str, limit: None) -> None:
    """A timed function that calls itself without end raises its RecursionError; each level closes what it opened."""

    @gpu_timed(name="call", sync="deferred")
    def again(depth: int) -> object:
        return again(depth + 1)

    def blocks(depth: int) -> object:
        with gpu_span("call", sync="deferred"):
            return blocks(depth + 1)

    @gpu_timed(name="call", sync="deferred")
    def generators(depth: int) -> Iterator[int]:
        yield from generators(depth + 1)

    before = otel_context.get_current()
    for _ in range(2):
        with pytest.raises(RecursionError):
            {"function": again, "block": blocks, "generator": lambda depth: list(generators(depth))}[make](0)
        assert list(what_is_wrong(device, before)) == []
    assert function(device)() is VALUE
