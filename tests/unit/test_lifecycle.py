"""The life of the process: flushing, shutting down, forking, ending, and what happens when there is too much."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gpu_timed import (
    GpuTimedError,
    Missing,
    WaitTimeout,
    configure,
    current,
    flush,
    gpu_span,
    gpu_timed,
    shutdown,
    testing,
)
from gpu_timed.export.memory import MemorySink
from gpu_timed.testing import capture

FileSpanExporter = pytest.importorskip("opentelemetry.exporter.otlp.json.file").FileSpanExporter

PROMPT_S = 4.0
"""What a call with a limit of well under a second may take at most on a busy machine."""


def timed(action: Callable[[], object]) -> tuple[object, float]:
    """Return what *action* returned, and how many seconds it took."""
    before = time.monotonic()
    return action(), time.monotonic() - before


def resolver_threads() -> list[str]:
    """Return the names of gpu_timed's own threads that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gpu_timed-resolver")]


class Gate(SpanProcessor):
    """Lets no span through ``on_end`` until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.passed: list[str] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.reached.set()
        self.opened.wait(30)
        self.passed.append(span.name)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A provider whose only processor is shut; opened at the end of the test whatever happened."""
    made = Gate()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(made)
    trace.set_tracer_provider(provider)
    yield made
    made.opened.set()
    for thread in threading.enumerate():
        if thread.name == "gpu_timed-resolver":  # one that a shutdown has left behind
            thread.join(5 if current._state.tracer is None else 0)


# -- flush ------------------------------------------------------------------------------------------------


def test_a_flush_with_nothing_to_do_is_true():
    """Before any call a flush is true at once, and starts nothing."""
    result = flush(5)
    assert result
    assert (result.complete, result.pending, result.provider, result.counts) == (True, 0, "none", {})
    assert resolver_threads() == []


def test_a_flush_is_bounded_when_the_device_hangs(exporter, device):
    """With the device held a flush ends in time, is false, and counts the spans that wait; they are not lost."""

    @gpu_timed(sync="deferred")
    def work() -> None:
        device.launch(1_000)

    with device.held():
        for _ in range(3):
            work()
        result, took = timed(lambda: flush(0.1))
        assert not result
        assert (result.pending, result.provider, result.complete) == (3, "flushed", False)
        assert took < PROMPT_S
        assert exporter.get_finished_spans() == ()
    device.run_dry()
    result = flush(5)
    assert result
    assert result.pending == 0
    assert len(exporter.get_finished_spans()) == 6


def test_a_flush_is_true_to_the_facts_when_a_processor_blocks(gate, device):
    """With a processor that never returns a flush ends in time and does not claim that all was delivered."""
    with gpu_span("work"):
        device.launch(1_000)
    assert gate.reached.wait(5)
    result, took = timed(lambda: flush(0.1))
    assert took < PROMPT_S
    assert gate.passed == []
    assert not result
    assert result.pending >= 1


def test_a_flush_is_bounded_when_a_processor_blocks(gate, device):
    """Spans that wait behind a processor that does not return are pending; once it returns they are delivered."""
    for _ in range(3):
        with gpu_span("work"):
            device.launch(1_000)
    assert gate.reached.wait(5)
    with gpu_span("work"):
        device.launch(1_000)
    result, took = timed(lambda: flush(0.1))
    assert took < PROMPT_S
    assert not result
    assert result.pending >= 1
    gate.opened.set()
    assert flush(5)
    assert Counter(gate.passed) == {"work": 4, "work [gpu]": 4}


def test_a_flush_is_true_to_the_facts_while_a_record_is_being_read(exporter, device, monkeypatch):
    """A span whose marks are being read as the flush runs out of time is neither in a list nor delivered: not true."""
    reading, read_on = threading.Event(), threading.Event()
    position = device.position

    def slow(*args: object) -> object:
        reading.set()
        read_on.wait(2)
        return position(*args)

    monkeypatch.setattr(device, "position", slow)
    with gpu_span("work", sync="deferred"):
        device.launch(1_000)
    device.run_dry()
    try:
        assert reading.wait(5)
        result, took = timed(lambda: flush(0.1))
        assert took < 1.5
        assert exporter.get_finished_spans() == ()
        assert not result
    finally:
        read_on.set()
    assert flush(5)


class StubbornProvider(TracerProvider):
    """A provider whose ``force_flush`` does as it is told."""

    def __init__(self, flushing: Callable[[int], object]) -> None:
        super().__init__(shutdown_on_exit=False)
        self.flushing = flushing
        trace.set_tracer_provider(self)

    def force_flush(self, timeout_millis: int = 30_000) -> object:
        return self.flushing(timeout_millis)


def test_a_flush_is_bounded_when_the_provider_hangs(device):
    """A ``force_flush`` that ignores its limit is left behind: the flush ends in time and says ``failed``."""
    released = threading.Event()
    given = []
    StubbornProvider(lambda limit: given.append(limit) or released.wait(30))
    with gpu_span("work"):
        pass
    try:
        result, took = timed(lambda: flush(0.2))
        assert took < PROMPT_S
        assert not result
        assert result.provider == "failed"
        assert 1 <= given[0] <= 200
        _, took = timed(lambda: shutdown(0.2))
        assert took < PROMPT_S
    finally:
        released.set()


@pytest.mark.parametrize("answer", [False, None])
def test_a_provider_that_says_no_makes_the_flush_false(answer, device):
    """A provider that answers anything but yes has not flushed."""
    StubbornProvider(lambda _: answer)
    result = flush(5)
    assert not result
    assert result.provider == "failed"


def test_a_provider_that_raises_makes_the_flush_false(device, monkeypatch):
    """A ``force_flush`` that raises makes the flush false, and prints no stack trace."""
    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)

    def fail(_: int) -> bool:
        raise ConnectionError("no route")

    StubbornProvider(fail)
    result = flush(5)
    assert not result
    assert result.provider == "failed"
    assert printed == []


def test_flushes_may_meet(exporter, device):
    """Flushes of several threads at once, with calls in between, all end and all are true."""

    @gpu_timed(sync="deferred")
    def work() -> None: ...

    results = []

    def busy() -> None:
        for _ in range(5):
            work()
            results.append(bool(flush(10)))

    threads = [threading.Thread(target=busy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == [True] * 20
    assert len([s for s in exporter.get_finished_spans() if not s.name.endswith("[gpu]")]) == 20


def test_a_flush_from_a_processor_does_not_hang(device):
    """A processor that calls ``flush()`` on gpu_timed's own thread gets its answer in time."""
    answers = []

    class Flushing(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            answers.append(flush(0.05))

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Flushing())
    trace.set_tracer_provider(provider)
    with gpu_span("work"):
        pass
    result, took = timed(lambda: flush(5))
    assert result
    assert took < PROMPT_S
    assert len(answers) == 2


def test_a_flush_without_a_provider_says_that_spans_go_nowhere(device, caplog):
    """With nobody to hand spans to, ``flush()`` is false, counts them, and says so once in the log."""
    gpu_timed(name="work")(lambda: None)()
    for _ in range(2):
        found = flush(5)
    assert found.counts["no_provider"] == 1
    gpu_timed(name="work")(lambda: None)()
    assert not flush(5)
    assert [record.getMessage() for record in caplog.records if "no OpenTelemetry provider" in record.getMessage()] == [
        (
            "gpu_timed: no OpenTelemetry provider is set: spans are measured and go nowhere. "
            "Set one, or call gpu_timed.configure(exporter=...)."
        )
    ]


def test_a_record_can_be_waited_for_without_a_provider(device):
    """``span.wait()`` and ``flush()`` do their work where nobody exports anything."""
    with gpu_span("work", sync="deferred") as span:
        device.launch(1_000)
    assert span.record is None
    device.run_dry()
    assert flush(5).pending == 0
    assert span.record is span.wait(0)
    assert span.record.device_ns == 1_000


# -- shutdown ---------------------------------------------------------------------------------------------


def test_many_spans_are_looked_at_before_their_time(device):
    """The thread looks rarely, so as to leave the interpreter alone, but not so rarely that spans pile up."""
    configure(poll_ms=60_000)
    step = gpu_timed(name="step", sync="deferred")(lambda: device.launch(1_000))
    with capture() as records:
        step()
        deadline = time.monotonic() + 30
        while current.tracer().resolver._idle and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)  # roused by the first, it sleeps for a minute by now
        for _ in range(1_100):
            step()
            device.run_dry()
        while len(records) < 1_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(records) >= 1_000


def test_calls_go_on_being_measured_after_a_shutdown(exporter, device):
    """``shutdown()`` delivers what is left and ends the thread; the next call starts anew and is delivered too."""

    @gpu_timed(name="work", sync="deferred")
    def work() -> int:
        return 7

    work()
    device.run_dry()
    assert shutdown(5)
    assert resolver_threads() == []
    assert [s.name for s in exporter.get_finished_spans()].count("work") == 1
    with capture() as records:
        assert work() == 7
    assert [record.call_index for record in records] == [1]
    assert flush(5)
    assert [s.name for s in exporter.get_finished_spans()].count("work") == 2
    assert shutdown(5)
    assert shutdown(5)
    assert resolver_threads() == []


def test_who_waits_for_a_resolver_that_was_shut_down_does_not_wait_for_ever(device):
    """A capture, or another thread's flush, that began before a shutdown: nobody would come by its barrier."""

    def around() -> object:
        with capture() as records:
            gpu_timed(lambda: device.launch(1))()
            shutdown(5.0)
        return len(records)

    found, took = timed(around)
    assert found == 1
    assert took < PROMPT_S


def test_a_shutdown_leaves_the_applications_provider_running(exporter, device):
    """The application's own provider is flushed and not shut down."""
    with gpu_span("work"):
        pass
    assert shutdown(5)
    trace.get_tracer("app").start_span("still there").end()
    assert "still there" in [s.name for s in exporter.get_finished_spans()]


def test_a_shutdown_with_the_device_hung_delivers_without_its_time(exporter, device):
    """What the device has not finished is delivered as ``pending`` in time, is counted, and makes the result false."""

    @gpu_timed(name="work", sync="deferred")
    def work() -> None:
        device.launch(1_000)

    with device.held():
        work()
        work()
        result, took = timed(lambda: shutdown(0.1))
    assert took < PROMPT_S
    assert not result
    assert result.counts["pending_at_exit"] == 2
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["work", "work"]
    assert {span.attributes["gpu_timed.device.missing"] for span in spans} == {"pending"}


def test_a_shutdown_gives_all_marks_back(device):
    """No mark is left in use after a shutdown, whatever the device had not finished."""
    with device.held():
        with gpu_span("work", sync="deferred"):
            device.launch(1_000)
        shutdown(0.1)
    assert device.marks_in_use == 0


@pytest.mark.parametrize("sync", ["deferred", "boundary"])
def test_a_call_that_is_open_at_a_shutdown_returns_and_is_counted(sync, exporter, device):
    """A call that outlives a shutdown returns, its span is counted as lost, and its marks are given back once."""

    @gpu_timed(name="work", sync=sync)
    def work() -> int:
        device.launch(1_000)
        shutdown(1)
        return 7

    assert work() == 7
    device.run_dry()
    result = flush(5)
    assert not result
    assert result.counts["after_shutdown"] == 1
    assert device.marks_in_use == 0


def test_a_span_that_is_open_at_a_shutdown_is_lost(device):
    """The record of a span that a shutdown came in between of says ``lost``, as the list of reasons has it."""
    with gpu_span("work", sync="deferred") as span:
        device.launch(1_000)
        shutdown(1)
    device.run_dry()
    assert span.wait(1).device_ns == Missing("lost")


def test_a_shutdown_is_bounded_by_its_limit_when_a_processor_blocks(gate, device):
    """With a processor that never returns ``shutdown(1.0)`` takes about a second."""
    with gpu_span("work"):
        pass
    assert gate.reached.wait(5)
    result, took = timed(lambda: shutdown(1.0))
    assert not result
    assert took < 1.8


def test_after_the_installed_provider_is_shut_down_a_flush_does_not_claim_delivery(tmp_path, device):
    """Calls after ``shutdown()`` under ``configure(exporter=…)`` run, and no flush says that they were exported."""
    configure(exporter="jsonl", path=tmp_path / "spans.jsonl")
    with gpu_span("first"):
        pass
    assert shutdown(5)
    with gpu_span("second"):
        pass
    assert not flush(5)
    written = (tmp_path / "spans.jsonl").read_text(encoding="utf-8")
    assert '"name":"first"' in written
    assert '"name":"second"' not in written


# -- a machine without threads to spare -------------------------------------------------------------------


def no_thread(_: threading.Thread) -> None:
    """Stand for ``Thread.start`` where the system has no thread left."""
    raise RuntimeError("can't start new thread")


def test_a_thread_that_could_not_be_started_is_tried_again(exporter, device, monkeypatch):
    """Where the resolver's thread cannot be started the call returns, and a later call tries again."""
    work = gpu_timed(name="work", sync="deferred")(lambda: 7)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        assert work() == 7
    assert work() == 7
    device.run_dry()
    thread = current.tracer().resolver._thread
    try:
        assert flush(1)
        assert len([s for s in exporter.get_finished_spans() if s.name == "work"]) == 2
    finally:
        if thread is not None and thread.ident is None:
            current.tracer().resolver._thread = None  # it could not be joined by the fixture either


def test_a_thread_that_could_not_be_started_does_not_break_a_coroutine(exporter, device, monkeypatch):
    """Where the resolver's thread cannot be started a coroutine returns what it returns, and is not queued twice."""

    @gpu_timed
    async def work() -> int:
        return 7

    resolver = current.tracer().resolver
    try:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            assert asyncio.run(work()) == 7
        assert len(resolver._arrivals) == 1
        assert "boundary_without_asyncio" not in current.ledger().snapshot()
    finally:
        resolver._thread = None  # it could not be joined by the fixture


def test_a_coroutine_that_waits_for_its_record_ends_without_a_thread(exporter, device, monkeypatch):
    """Where the resolver's thread cannot be started, a coroutine with ``boundary`` still returns."""

    @gpu_timed(sync="boundary")
    async def work() -> int:
        device.launch(1_000)
        device.host_clock.advance(5_000)
        return 7

    async def main() -> int:
        return await asyncio.wait_for(work(), 0.5)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        assert asyncio.run(main()) == 7


def test_a_coroutine_that_waits_for_its_record_does_not_wait_for_a_processor(gate, device):
    """A processor that never returns does not keep a coroutine with ``boundary`` from returning (rule 6)."""
    with gpu_span("work"):
        pass
    assert gate.reached.wait(5)

    @gpu_timed(sync="boundary")
    async def work() -> int:
        device.launch(1_000)
        device.host_clock.advance(5_000)
        return 7

    async def main() -> int:
        return await asyncio.wait_for(work(), 0.5)

    assert asyncio.run(main()) == 7


# -- too much (D4) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "calls", "recorded"), [(1, 7, 7), (3, 10, 4), (10, 100, 10), (1_000, 5, 1)])
def test_every_counts_all_and_records_one_in_n(every, calls, recorded, exporter, device):
    """``every=N`` records calls 0, N, 2N …; each says how many calls came before, and the others do nothing."""

    @gpu_timed(name="work", every=every)
    def work() -> bool:
        return trace.get_current_span().is_recording()

    with capture() as records:
        seen = [work() for _ in range(calls)]
    indices = list(range(0, calls, every))
    assert [record.call_index for record in records] == indices
    assert len(records) == recorded
    assert [record.first_call for record in records] == [index == 0 for index in indices]
    assert [index for index, recording in enumerate(seen) if recording] == indices
    assert flush(5)
    assert len([s for s in exporter.get_finished_spans() if s.name == "work"]) == recorded


def test_every_thins_blocks_and_coroutines_too(device):
    """``every=N`` holds for ``with gpu_span()`` in one place, and for coroutines."""

    @gpu_timed(name="coroutine", every=2)
    async def work() -> None: ...

    async def main() -> None:
        for _ in range(5):
            await work()

    with capture() as records:
        for _ in range(5):
            with gpu_span("block", every=2):
                pass
        asyncio.run(main())
    assert Counter(record.name for record in records) == {"block": 3, "coroutine": 3}


@pytest.mark.parametrize("sync", ["deferred", "boundary"])
def test_too_many_pending_spans_are_exported_without_a_device_time(sync, exporter, device):
    """Beyond ``max_pending`` a call places no mark and never waits; it is exported as ``overflow`` and counted."""
    configure(max_pending=3)

    @gpu_timed(sync="deferred")
    def late() -> None:
        device.launch(1_000)

    @gpu_timed(name="more", sync=sync)
    def more() -> int:
        device.launch(1_000)
        return 7

    with capture() as records:
        with device.held():
            for _ in range(3):
                late()
            marks = device.marks_in_use
            assert [more() for _ in range(5)] == [7] * 5  # "boundary" would wait for ever on a mark
            assert device.marks_in_use == marks == 6
            result = flush(0.2)
            assert result.pending == 3
            assert result.counts["overflow"] == 5
        device.run_dry()
        assert flush(5)
        late()
    found = Counter((r.name, r.device_ns if r.name == "more" else r.device_ns == 1_000) for r in records)
    site = "test_too_many_pending_spans_are_exported_without_a_device_time.late"
    assert found == {("more", Missing("overflow")): 5, (site, True): 4}
    assert flush(5)
    held = [s.attributes for s in exporter.get_finished_spans() if s.name == "more"]
    assert [a["gpu_timed.device.missing"] for a in held] == ["overflow"] * 5
    assert device.marks_in_use == 0


@pytest.mark.parametrize("sync", ["deferred", "boundary"])
def test_a_full_queue_drops_and_counts(sync, gate, device):
    """Beyond ``max_queue`` finished spans are dropped and counted, marks given back once, and no call waits."""
    configure(max_queue=5, device_spans=False)

    @gpu_timed(name="work", sync=sync)
    def work() -> int:
        return 7

    work()
    device.run_dry()
    assert gate.reached.wait(5)
    assert [work() for _ in range(20)] == [7] * 20
    assert not flush(0.05)
    gate.opened.set()
    device.run_dry()
    counts = flush(5).counts
    assert counts["dropped_queue_full"] >= 14
    assert len(gate.passed) + counts["dropped_queue_full"] == 21
    assert counts["handed_over"] == len(gate.passed)
    assert device.marks_in_use == 0


def test_a_dropped_span_has_no_device_time_made_of_reused_marks(gate, device):
    """The record of a span that was dropped does not come from marks that were given back."""
    configure(max_queue=1, device_spans=False)
    with gpu_span("first"):
        pass
    assert gate.reached.wait(5)
    spans = []
    for _ in range(3):
        with gpu_span("work", sync="deferred") as span:
            device.launch(1_000)
        spans.append(span)
    device.run_dry()
    assert current.ledger().snapshot()["dropped_queue_full"] == 2
    try:
        found = spans[-1].wait(0.1)
    except WaitTimeout:
        return
    assert not isinstance(found.device_ns, int)


def test_a_burst_under_a_slow_sink_loses_nothing_uncounted(device):
    """10,000 calls under a slow processor: what was exported and what was dropped add up to what was created."""

    class Slow(SpanProcessor):
        def __init__(self) -> None:
            self.ended = 0

        def on_end(self, span: ReadableSpan) -> None:
            time.sleep(0.0001)
            self.ended += 1

    slow = Slow()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(slow)
    trace.set_tracer_provider(provider)
    configure(max_queue=1_000, max_pending=500, device_spans=False)
    work = gpu_timed(sync="deferred")(lambda: None)
    for _ in range(10_000):
        work()
    device.run_dry()
    result = flush(30)
    assert result.pending == 0
    assert not result, "something was dropped, and the flush says it was not"
    dropped = result.counts["dropped_queue_full"]
    assert dropped > 0
    assert slow.ended + dropped == 10_000
    assert result.counts["handed_over"] == slow.ended
    assert flush(5), "a loss that was reported is reported again"


def test_a_burst_under_a_slow_receiver_loses_nothing_uncounted(tmp_path, device, monkeypatch):
    """10,000 calls under ``configure(exporter=…)`` and a slow receiver: exported and dropped add up to created."""
    real = FileSpanExporter.export

    def slow(self: FileSpanExporter, spans: list[ReadableSpan]) -> object:
        time.sleep(0.02)
        return real(self, spans)

    monkeypatch.setattr(FileSpanExporter, "export", slow)
    path = tmp_path / "spans.jsonl"
    configure(exporter="jsonl", path=path, device_spans=False)
    work = gpu_timed(name="work", sync="deferred")(lambda: None)
    for _ in range(10_000):
        work()
    device.run_dry()
    result = flush(30)
    assert shutdown(5) or True
    written = path.read_text(encoding="utf-8").count('"name":"work"')
    assert result.counts["exported"] == written
    losses = sum(n for kind, n in result.counts.items() if "drop" in kind or "failed" in kind)
    assert written + losses == 10_000
    assert bool(result) == (written == 10_000)


def test_a_capture_that_could_not_keep_all_says_so(device, monkeypatch):
    """``capture()`` keeps a bounded number of records; a list that lacks some is not passed off as complete."""
    monkeypatch.setattr(testing, "MemorySink", functools.partial(MemorySink, limit=3))
    work = gpu_timed(lambda: None)
    with capture() as records:
        for _ in range(3):
            work()
    assert len(records) == 3

    def too_many() -> None:
        with capture():
            for _ in range(5):
                work()

    with pytest.raises(GpuTimedError, match=r"keeps 3 records, and 2 more were dropped\. Capture a shorter"):
        too_many()


# -- the end of the process -------------------------------------------------------------------------------

PRELUDE = """
import json, multiprocessing, os, signal, sys, threading, time
from gpu_timed import WaitTimeout, configure, current, flush, gpu_span, gpu_timed, shutdown
from gpu_timed.testing import FakeDevice, capture, use_device
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult

class Lines(SpanExporter):
    "Writes the name of a span and the process that exported it, in one write each."
    def __init__(self):
        self.file = os.open(os.environ["SPANS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    def export(self, spans):
        for span in spans:
            os.write(self.file, f"{span.name} {os.getpid()}\\n".encode())
        return SpanExportResult.SUCCESS

def provide(*processors):
    provider = TracerProvider()
    for processor in processors:
        provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)

def answer(**values):
    print(json.dumps(values), flush=True)

def wait_for(pid):
    "Return the exit code of a child, which has ten seconds."
    for _ in range(1_000):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"

def fork(child):
    "Run child() in a forked process, and return its exit code: 0 unless it raised."
    pid = os.fork()
    if pid:
        return wait_for(pid)
    code = 1
    try:
        child()
        code = 0
    finally:
        os._exit(code)

device = FakeDevice(realtime=True)
using = use_device(device)
"""


class Ended:
    """A process that has ended: what it printed, what it left in its file of spans, and how long it took."""

    def __init__(self, done: subprocess.CompletedProcess[str], path: Path, took_s: float) -> None:
        self.code, self.err, self.took_s = done.returncode, done.stderr, took_s
        self.answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        self.text = path.read_text(encoding="utf-8") if path.exists() else ""

    @property
    def names(self) -> Counter[str]:
        """How often each name stands in the file of spans written by ``exporter="jsonl"``."""
        return Counter(span["name"] for span in self.spans)

    @property
    def spans(self) -> list[dict[str, object]]:
        """The spans in the file written by ``exporter="jsonl"``, with attributes as a dict."""
        found = []
        for line in self.text.splitlines():
            for resource in json.loads(line)["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    for span in scope["spans"]:
                        held = {a["key"]: next(iter(a["value"].values())) for a in span["attributes"]}
                        found.append({**span, "attributes": held})
        return found


@pytest.fixture
def process(tmp_path: Path) -> Callable[..., Ended]:
    """Run a script after the prelude in a process of its own, and return how it ended."""

    def run(script: str, *, code: int | None = 0, **variables: str) -> Ended:
        path = tmp_path / "spans"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPU_TIMED_", "OTEL_"))}
        before = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + textwrap.dedent(script)],
            env={**kept, "SPANS": str(path), **variables},
            capture_output=True,
            text=True,
            timeout=40,
            check=False,
        )
        assert code is None or done.returncode == code, done.stderr
        return Ended(done, path, time.monotonic() - before)

    return run


def test_a_process_that_ends_delivers_what_is_pending(process):
    """Spans whose work the device has still before it as the program ends are in the file, with their times, once."""
    ended = process("""
        using.__enter__()
        configure(exporter="jsonl", path=os.environ["SPANS"])
        work = gpu_timed(name="work", sync="deferred")(lambda: device.launch(2_000_000))
        for _ in range(50):
            work()
    """)
    assert ended.names == {"work": 50, "work [gpu]": 50}
    hosts = [span["attributes"] for span in ended.spans if span["name"] == "work"]
    assert all(int(held["gpu_timed.device.duration_ns"]) >= 2_000_000 for held in hosts)
    assert sorted(int(held["gpu_timed.call.index"]) for held in hosts) == list(range(50))
    assert ended.err == ""


@pytest.mark.parametrize("first", ["provider", "call"])
def test_the_applications_provider_gets_the_last_spans_before_it_shuts_down(first, process):
    """With a provider of the application's own, made before or after the first call, the last spans come in time."""
    ended = process(
        """
        using.__enter__()
        work = gpu_timed(name="work", sync="deferred")(lambda: device.launch(2_000_000))
        if os.environ["FIRST"] == "call":
            work()
        provide(BatchSpanProcessor(Lines()))
        for _ in range(20):
            work()
        """,
        FIRST=first,
    )
    lines = [line.rpartition(" ")[0] for line in ended.text.splitlines()]
    assert Counter(lines) == {"work": 20, "work [gpu]": 20}
    assert ended.err == ""


def test_the_end_is_bounded_when_the_device_hangs(process):
    """With the device hung the process ends by ``GPU_TIMED_EXIT_TIMEOUT_S``, and the spans say ``pending``."""
    ended = process(
        """
        using.__enter__()
        configure(exporter="jsonl", path=os.environ["SPANS"])
        held = device.held()
        held.__enter__()
        work = gpu_timed(name="work", sync="deferred")(lambda: device.launch(1_000))
        for _ in range(3):
            work()
        """,
        GPU_TIMED_EXIT_TIMEOUT_S="0.3",
    )
    assert ended.took_s < 2 * PROMPT_S
    assert ended.names == {"work": 3}
    assert {span["attributes"]["gpu_timed.device.missing"] for span in ended.spans} == {"pending"}
    assert ended.err == ""


def test_the_end_leaves_time_to_export_when_the_device_hangs(process):
    """With the device hung and a receiver that takes a moment, the last spans are delivered within the limit."""
    ended = process(
        """
        from opentelemetry.exporter.otlp.json.file import FileSpanExporter
        real = FileSpanExporter.export
        def slow(self, spans):
            time.sleep(0.4)
            return real(self, spans)
        FileSpanExporter.export = slow
        using.__enter__()
        configure(exporter="jsonl", path=os.environ["SPANS"])
        held = device.held()
        held.__enter__()
        gpu_timed(name="work", sync="deferred")(lambda: device.launch(1_000))()
        """,
        GPU_TIMED_EXIT_TIMEOUT_S="1.5",
    )
    assert ended.names == {"work": 1}


def test_the_end_is_bounded_when_a_processor_hangs(process):
    """With a processor that never returns the process ends all the same."""
    ended = process(
        """
        class Stuck(SpanProcessor):
            def on_end(self, span):
                threading.Event().wait()
        provide(Stuck())
        gpu_timed(name="work")(lambda: None)()
        """,
        GPU_TIMED_EXIT_TIMEOUT_S="0.3",
    )
    assert ended.took_s < 2 * PROMPT_S


def test_the_end_is_bounded_when_the_collector_does_not_answer(process):
    """With ``configure(exporter="otlp")`` and a silent collector the process ends by ``GPU_TIMED_EXIT_TIMEOUT_S``."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        ended = process(
            """
            configure(exporter="otlp", endpoint="http://127.0.0.1:" + os.environ["PORT"])
            gpu_timed(name="work")(lambda: None)()
            """,
            PORT=str(silent.getsockname()[1]),
            GPU_TIMED_EXIT_TIMEOUT_S="0.3",
            OTEL_EXPORTER_OTLP_TIMEOUT="4",
        )
    assert ended.took_s < 3.0


@pytest.mark.parametrize(
    ("ending", "code", "status"), [("sys.exit(3)", 3, 0), ("raise ValueError('x')", 1, 2), ("pass", 0, 0)]
)
def test_a_program_that_ends_inside_a_call_delivers_it(ending, code, status, process):
    """A call that ends the program by ``sys.exit()`` or by an exception is delivered, and the exit code is its own."""
    ended = process(
        f"""
        configure(exporter="jsonl", path=os.environ["SPANS"])
        @gpu_timed(name="work")
        def work():
            {ending}
        work()
        """,
        code=code,
    )
    (span,) = ended.spans
    assert span["name"] == "work"
    assert span.get("status", {}).get("code", 0) == status


def test_a_program_that_only_decorates_ends_at_once(process):
    """A program that decorates and never calls starts no thread and leaves nothing behind."""
    ended = process("""
        gpu_timed(lambda: 7)
        gpu_span("block")
        assert threading.active_count() == 1
    """)
    assert (ended.text, ended.err) == ("", "")


# -- fork (D3) --------------------------------------------------------------------------------------------


def test_a_forked_child_starts_with_nothing(process):
    """After a fork each side exports its own spans, once: the parent's pending ones, and the child's new ones."""
    ended = process("""
        using.__enter__()
        provide(SimpleSpanProcessor(Lines()))
        work = gpu_timed(name="parents", sync="deferred")(lambda: device.launch(3_000_000))
        held = device.held()
        held.__enter__()
        for _ in range(5):
            work()
        def child():
            assert threading.active_count() == 1
            assert flush(1).counts == {}
            mine = gpu_timed(name="childs", sync="deferred")(lambda: 7)
            assert [mine() for _ in range(3)] == [7] * 3
            result = flush(5)
            assert result, result
            assert result.counts["handed_over"] == 3, result
        code = fork(child)
        held.__exit__(None, None, None)
        time.sleep(0.02)
        result = flush(5)
        answer(code=code, parent=os.getpid(), complete=result.complete, handed=result.counts["handed_over"])
    """)
    (found,) = ended.answers
    assert (found["code"], found["complete"], found["handed"]) == (0, True, 5)
    lines = [line.rpartition(" ")[::2] for line in ended.text.splitlines()]
    assert Counter(name for name, _ in lines) == {"parents": 5, "parents [gpu]": 5, "childs": 3}
    assert {name for name, pid in lines if pid == str(found["parent"])} == {"parents", "parents [gpu]"}


def test_a_span_that_is_open_across_a_fork_is_the_parents(process):
    """A call that forks returns in both; the parent exports it once, the child asks its device nothing and goes on."""
    ended = process("""
        using.__enter__()
        provide(SimpleSpanProcessor(Lines()))
        inner = gpu_timed(name="inner")(lambda: 7)
        @gpu_timed(name="outer")
        def outer():
            with gpu_span("block", sync="deferred"):
                device.launch(1_000)
                pid = os.fork()
                if pid == 0:
                    device.wait = device.is_done = lambda mark: os._exit(9)
                return pid
        pid = outer()
        if pid == 0:
            code = 1
            try:
                assert trace.get_current_span() is trace.INVALID_SPAN
                assert inner() == 7
                assert flush(5)
                code = 0
            finally:
                os._exit(code)
        code = wait_for(pid)
        answer(code=code, complete=bool(flush(5)), parent=os.getpid())
    """)
    (found,) = ended.answers
    assert (found["code"], found["complete"]) == (0, True)
    lines = [line.rpartition(" ")[::2] for line in ended.text.splitlines()]
    assert Counter(name for name, pid in lines if pid == str(found["parent"])) == {
        "outer": 1,
        "outer [gpu]": 1,
        "block": 1,
        "block [gpu]": 1,
    }
    assert [name for name, pid in lines if pid != str(found["parent"])] == ["inner"]


def test_generators_and_coroutines_that_are_open_across_a_fork_go_on(process):
    """A generator begun before a fork can be finished on both sides of it."""
    ended = process("""
        provide(SimpleSpanProcessor(Lines()))
        @gpu_timed(name="numbers")
        def numbers():
            yield 1
            yield 2
        @gpu_timed(name="task")
        async def task():
            await pause()
            return 7
        import types
        @types.coroutine
        def pause():
            yield
        begun, running = numbers(), task()
        assert next(begun) == 1
        running.send(None)
        def finish():
            assert list(begun) == [2]
            try:
                running.send(None)
            except StopIteration as stop:
                assert stop.value == 7
            assert flush(5)
        code = fork(finish)
        finish()
        answer(code=code)
    """)
    assert ended.answers == [{"code": 0}], ended.err
    assert Counter(line.rpartition(" ")[0] for line in ended.text.splitlines()) == {"numbers": 1, "task": 1}


def test_forking_under_load_does_not_hang(process):
    """Children forked while other threads make spans, flush and log never hang, and each delivers its own."""
    ended = process("""
        provide(SimpleSpanProcessor(Lines()))
        flush(1)  # the first one loads what it needs
        busy = gpu_timed(name="busy", sync="deferred")(lambda: None)
        mine = gpu_timed(name="mine", sync="deferred")(lambda: None)
        going = True
        def load():
            while going:
                for _ in range(20):
                    busy()
                flush(1)
        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        def child():
            mine()
            assert flush(5)
        codes = [fork(child) for _ in range(20)]
        going = False
        for thread in threads:
            thread.join()
        answer(codes=codes)
    """)
    assert ended.answers == [{"codes": [0] * 20}], ended.err
    assert Counter(line.rpartition(" ")[0] for line in ended.text.splitlines())["mine"] == 20


def test_a_child_forked_during_the_first_flush_does_not_hang(process):
    """A fork while another thread is in the first flush of the process leaves the child able to flush."""
    ended = process("""
        import faulthandler
        gpu_timed(name="work")(lambda: None)()
        from importlib.machinery import SourceFileLoader
        loading, load_on = threading.Event(), threading.Event()
        real = SourceFileLoader.exec_module
        def slow(self, module):
            "Makes whatever a first flush has to import take its time."
            if threading.current_thread() is thread:
                loading.set()
                load_on.wait(20)
            return real(self, module)
        SourceFileLoader.exec_module = slow
        thread = threading.Thread(target=flush)
        thread.start()
        loading.wait(1)
        def child():
            faulthandler.dump_traceback_later(2, exit=True)
            flush(1)
        code = fork(child)
        load_on.set()
        thread.join()
        answer(code=code)
    """)
    assert ended.answers == [{"code": 0}], ended.err


def test_a_child_that_ends_by_itself_delivers(process):
    """A forked child that leaves by ``sys.exit()`` delivers what it has, as any process does."""
    ended = process("""
        configure(exporter="jsonl", path=os.environ["SPANS"])
        gpu_timed(name="parents")(lambda: None)()
        pid = os.fork()
        if pid == 0:
            gpu_timed(name="childs")(lambda: None)()
            sys.exit(0)
        answer(code=wait_for(pid))
    """)
    assert ended.answers == [{"code": 0}], ended.err
    assert ended.names == {"parents": 1, "childs": 1}
    assert ended.err == ""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_multiprocessing_child_delivers_what_it_flushes(method, process, tmp_path):
    """A worker of ``multiprocessing`` that flushes before it returns has delivered, however it was started."""
    script = tmp_path / "program.py"
    script.write_text(
        PRELUDE
        + textwrap.dedent("""
        @gpu_timed(name="work")
        def work():
            return 7

        def child():
            if trace.get_tracer_provider().__class__.__name__ == "ProxyTracerProvider":
                configure(exporter="jsonl", path=os.environ["SPANS"])
            assert work() == 7
            assert flush(5)

        if __name__ == "__main__":
            configure(exporter="jsonl", path=os.environ["SPANS"])
            work()
            context = multiprocessing.get_context(os.environ["METHOD"])
            workers = [context.Process(target=child) for _ in range(3)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(20)
            answer(codes=[worker.exitcode for worker in workers])
        """),
        encoding="utf-8",
    )
    ended = process(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", METHOD=method)
    assert ended.answers == [{"codes": [0, 0, 0]}], ended.err
    assert ended.names == {"work": 4}


def test_a_child_counts_its_own_exports(process):
    """Under ``configure(exporter=…)`` a forked child's flush counts what the receiver took from it."""
    ended = process("""
        configure(exporter="jsonl", path=os.environ["SPANS"])
        work = gpu_timed(name="work")(lambda: None)
        work()
        assert flush(5).counts["exported"] == 1
        def child():
            work()
            result = flush(5)
            assert result.counts.get("exported") == 1, result
        answer(code=fork(child))
    """)
    assert ended.names == {"work": 2}
    assert ended.answers == [{"code": 0}], ended.err


@pytest.mark.parametrize("lock", ["current.ledger()._lock", "current._state.lock", "current.tracer().resolver._lock"])
def test_a_child_forked_while_a_lock_is_held_does_not_hang(lock, process):
    """A fork while another thread holds one of our locks stops neither the child's calls nor its export."""
    ended = process(
        """
        configure(exporter="jsonl", path=os.environ["SPANS"])
        work = gpu_timed(name="work")(lambda: None)
        work()
        assert flush(5)
        taken, done = threading.Event(), threading.Event()
        def counting():
            with eval(os.environ["LOCK"]):
                taken.set()
                done.wait(20)
        threading.Thread(target=counting).start()
        taken.wait()
        pid = os.fork()
        if pid == 0:
            work()
            os._exit(0 if flush(1) else 1)
        done.set()
        answer(code=wait_for(pid))
        """,
        LOCK=lock,
    )
    assert ended.answers == [{"code": 0}], ended.err


def test_a_child_tells_of_its_own_losses(process):
    """A child's flush is false after a loss of its own and only then, whatever the parent has lost before."""
    ended = process("""
        provide()
        gpu_timed(name="work")(lambda: None)()
        assert flush(1)
        current.ledger().count("dropped_queue_full", 5)
        assert not flush(1)
        def child():
            assert flush(1)
            current.ledger().count("dropped_queue_full", 5)
            assert not flush(1)
        answer(code=fork(child))
    """)
    assert ended.answers == [{"code": 0}], ended.err


def test_a_child_that_waits_for_a_span_of_the_parents_is_told(process):
    """In a forked child ``span.wait()`` of a span that is the parent's says so at once, with no limit given too."""
    ended = process("""
        using.__enter__()
        held = device.held()
        held.__enter__()
        with gpu_span("work", sync="deferred") as span:
            device.launch(1_000)
        def child():
            try:
                span.wait()
            except WaitTimeout as error:
                assert "forked" in str(error)
            else:
                raise AssertionError("a record of nothing")
        answer(code=fork(child))
        held.__exit__(None, None, None)
    """)
    assert ended.answers == [{"code": 0}], ended.err


def test_the_first_call_in_a_child_is_a_first_call(process):
    """The first call of a site in a forked child is its first call in that process."""
    ended = process("""
        work = gpu_timed(name="work")(lambda: None)
        work()
        def child():
            with capture() as records:
                work()
            assert records[0].first_call, records
            assert records[0].call_index == 0
        answer(code=fork(child))
    """)
    assert ended.answers == [{"code": 0}], ended.err


def test_settings_survive_a_fork(process):
    """What was configured before a fork holds in the child."""
    ended = process("""
        configure(sync="deferred", max_pending=5)
        gpu_timed(name="work")(lambda: None)()
        def child():
            assert current.settings().max_pending == 5
            with capture() as records:
                gpu_timed(name="work")(lambda: None)()
            assert [r.sync for r in records] == ["deferred"]
        answer(code=fork(child))
    """)
    assert ended.answers == [{"code": 0}], ended.err


def test_grandchildren_start_with_nothing_too(process):
    """A fork in a fork behaves as the first one."""
    ended = process("""
        provide(SimpleSpanProcessor(Lines()))
        work = gpu_timed(name="work")(lambda: None)
        def generation(left):
            work()
            if left:
                assert fork(lambda: generation(left - 1)) == 0
            assert flush(5).counts["handed_over"] == 1
        generation(3)
    """)
    assert len(ended.text.splitlines()) == 4
    assert len(set(ended.text.splitlines())) == 4


def test_two_providers_in_one_life(device):
    """After a shutdown, and a provider of its own for the next part of a program's life, spans go to the new one."""
    held = []
    for _ in range(2):
        trace._TRACER_PROVIDER = provider = TracerProvider(shutdown_on_exit=False)
        held.append(InMemorySpanExporter())
        provider.add_span_processor(SimpleSpanProcessor(held[-1]))
        with gpu_span("work"):
            pass
        assert shutdown(5)
    assert [len([s for s in h.get_finished_spans() if s.name == "work"]) for h in held] == [1, 1]


@pytest.mark.parametrize(("looked", "said"), [(False, True), (True, False)])
def test_who_forgot_to_configure_is_told_at_the_end(looked, said, process):
    """Spans that all went nowhere are said once as the process ends, but not to a test that looked at the records."""
    ended = process(
        """
        using.__enter__()
        if os.environ["LOOKED"] == "1":
            from gpu_timed.testing import capture
            with capture():
                pass
        gpu_timed(name="work", sync="deferred")(lambda: device.launch(1))()
        """,
        LOOKED="1" if looked else "0",
    )
    assert ("spans are measured and go nowhere" in ended.err) == said
