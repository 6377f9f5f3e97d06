"""What a timed call looks like in a trace: what user code wrote, who is whose child, and what the device did."""

from __future__ import annotations

import ast
import asyncio
import contextvars
import inspect
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

import gpu_timed as library
from gpu_timed import configure, flush, gpu_span, gpu_timed
from gpu_timed.export import attributes as names
from gpu_timed.testing import FakeDevice, capture

ELSEWHERE = SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(1))


def exported(exporter: InMemorySpanExporter, device: FakeDevice | None = None) -> list[ReadableSpan]:
    """Let the device finish, deliver everything, and return the spans in the order of their export."""
    if device is not None:
        device.run_dry()
    assert flush(5)
    return list(exporter.get_finished_spans())


def by_name(spans: list[ReadableSpan]) -> dict[str, ReadableSpan]:
    """Return the spans by name; two of one name are an error of the test."""
    found = {span.name: span for span in spans}
    assert len(found) == len(spans)
    return found


def is_child(child: ReadableSpan, parent: ReadableSpan) -> bool:
    """Return whether *child* names *parent* as its parent, in the same trace."""
    return (
        child.parent is not None
        and child.parent.span_id == parent.context.span_id
        and child.context.trace_id == parent.context.trace_id
    )


def users(span: ReadableSpan) -> dict[str, object]:
    """Return the attributes that user code put on *span*."""
    return {key: value for key, value in span.attributes.items() if key.startswith("user.")}


# -- what user code writes --------------------------------------------------------------------------------


def _sets_attributes(span: trace.Span) -> None:
    span.set_attribute("user.one", 1)
    span.set_attributes({"user.two": [1.5, 2.5], "user.three": True})
    span.set_attribute("user.one", "again")


def _adds_events(span: trace.Span) -> None:
    span.add_event("late", {"n": 1}, timestamp=2_000)
    span.add_event("early", timestamp=1_000)
    span.add_event("middle", {"texts": ["a", "b"]}, 1_500)


def _adds_links(span: trace.Span) -> None:
    span.add_link(ELSEWHERE, {"why": "batch"})
    span.add_link(ELSEWHERE)


def _renames(span: trace.Span) -> None:
    span.update_name("first")
    span.update_name("second")


def _sets_status(span: trace.Span) -> None:
    span.set_status(StatusCode.ERROR, "no memory")


def _sets_status_object(span: trace.Span) -> None:
    span.set_status(Status(StatusCode.ERROR, "first"))
    span.set_status(Status(StatusCode.OK))
    span.set_status(StatusCode.ERROR, "OK is final")


def _records_exception(span: trace.Span) -> None:
    try:
        int("no number")
    except ValueError as error:
        span.record_exception(error, {"user.try": 3}, timestamp=77)
        span.record_exception(error, {"exception.message": "better"}, escaped=True)


def _look(span: ReadableSpan) -> dict[str, object]:
    """Return everything that user code can write to a span."""
    return {
        "name": span.name,
        "attributes": users(span),
        "events": [(e.name, dict(e.attributes or {}), e.timestamp if e.timestamp < 10_000 else 0) for e in span.events],
        "links": [(link.context, dict(link.attributes or {})) for link in span.links],
        "status": (span.status.status_code, span.status.description),
    }


@pytest.mark.parametrize(
    "write",
    [
        _sets_attributes,
        _adds_events,
        _adds_links,
        _renames,
        _sets_status,
        _sets_status_object,
        _records_exception,
    ],
)
def test_writes_arrive_as_on_an_sdk_span(write, exporter, device):
    """Whatever is written to the current span inside a call is exported as the SDK would have exported it."""

    @gpu_timed(name="work")
    def ours() -> None:
        write(trace.get_current_span())

    ours()
    with trace.get_tracer("plain").start_as_current_span("work") as theirs:
        write(theirs)
    spans = {s.instrumentation_scope.name: s for s in exported(exporter, device) if not s.name.endswith("[gpu]")}
    assert _look(spans["gpu_timed"]) == _look(spans["plain"])


def test_an_event_without_a_time_gets_the_time_of_the_write(exporter, device):
    """An event says when it was added, not when the span was put together afterwards."""

    @gpu_timed(name="work", sync="deferred")
    def work() -> None:
        device.launch(1_000)
        trace.get_current_span().add_event("now")

    before = time.time_ns()
    work()
    after = time.time_ns()
    time.sleep(0.01)
    (event,) = by_name(exported(exporter, device))["work"].events
    assert before <= event.timestamp <= after


def test_what_is_written_is_kept_as_it_was_at_that_moment(exporter, device):
    """A list or dict that user code changes after writing does not change what was written."""
    values, details = [1, 2], {"n": 1}

    @gpu_timed(name="work", sync="deferred")
    def work() -> None:
        device.launch(1_000)
        trace.get_current_span().set_attribute("user.values", values)
        trace.get_current_span().add_event("event", details)

    work()
    values.append(3)
    details["n"] = 2
    span = by_name(exported(exporter, device))["work"]
    assert span.attributes["user.values"] == (1, 2)
    assert span.events[0].attributes == {"n": 1}


def test_writes_to_the_target_of_a_block_arrive(exporter, device):
    """The target of ``with gpu_span() as span`` is the current span and takes the same writes."""
    with gpu_span("block") as span:
        assert trace.get_current_span() is span
        span.set_attribute("user.one", 1)
    assert users(by_name(exported(exporter, device))["block"]) == {"user.one": 1}


def test_the_current_span_records_inside_and_not_afterwards(exporter, device, caplog):
    """``is_recording()`` is True during the call and False after it; a late write is logged and left out."""
    seen = []

    @gpu_timed(name="work")
    def work() -> None:
        seen.append(trace.get_current_span())
        assert seen[0].is_recording() is True

    work()
    assert seen[0].is_recording() is False
    assert trace.get_current_span() is trace.INVALID_SPAN
    seen[0].set_attribute("user.late", 1)
    assert users(by_name(exported(exporter, device))["work"]) == {}
    assert "ended span" in caplog.text


def test_ending_the_span_early_ends_its_writes_but_not_its_time(exporter, device):
    """A stray ``end()`` by user code closes the span to writes; it ends when the call ends all the same."""

    @gpu_timed(name="work")
    def work() -> None:
        span = trace.get_current_span()
        span.set_attribute("user.before", 1)
        span.end(end_time=5)
        assert not span.is_recording()
        device.host_clock.advance(3_000)

    work()
    span = by_name(exported(exporter, device))["work"]
    assert users(span) == {"user.before": 1}
    assert span.end_time - span.start_time == 3_000


def test_the_ids_seen_inside_are_the_ones_exported(exporter, device):
    """``get_span_context()`` inside gives trace id, span id, flags and state of the span that is exported."""
    seen = {}

    @gpu_timed(name="inner")
    def inner() -> None:
        seen["inner"] = trace.get_current_span().get_span_context()

    @gpu_timed(name="outer")
    def outer() -> None:
        seen["outer"] = trace.get_current_span().get_span_context()
        inner()

    outer()
    spans = by_name(exported(exporter, device))
    for name, context in seen.items():
        found = spans[name].context
        assert context == found
        assert (context.trace_flags, context.trace_state) == (found.trace_flags, found.trace_state)
        assert context.trace_flags.sampled
        assert not context.is_remote


@pytest.mark.parametrize("flags", [None, 0b01, 0b11])  # none, sampled, sampled and random
def test_trace_flags_are_those_of_an_sdk_span(flags, exporter, device):
    """The flags, the one for random trace ids included, are those of a span that the SDK starts in the same place."""
    seen = []

    @gpu_timed
    def ours() -> None:
        seen.append(trace.get_current_span().get_span_context().trace_flags)

    remote = SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(flags or 0))
    with trace.use_span(trace.INVALID_SPAN if flags is None else trace.NonRecordingSpan(remote)):
        ours()
        with trace.get_tracer("plain").start_as_current_span("theirs") as theirs:
            ours()
    assert seen == [theirs.get_span_context().trace_flags] * 2
    exported_flags = {s.context.trace_flags for s in exported(exporter, device)}
    assert exported_flags == {theirs.get_span_context().trace_flags}


def test_a_parent_that_is_not_valid_is_no_parent(exporter, device):
    """Under an invalid span, as libraries without tracing leave behind, a call is the root of a trace of its own."""

    @gpu_timed(name="work")
    def work() -> None: ...

    with capture() as records, trace.use_span(trace.INVALID_SPAN):
        work()
    span = by_name([s for s in exported(exporter, device) if not s.name.endswith("[gpu]")])["work"]
    assert span.parent is None
    assert span.context.is_valid
    assert [record.parent_id for record in records] == [None]


def test_a_call_that_raises_is_an_error_with_the_exception(exporter, device):
    """An exception is raised on, and the span has the status, the event and ``error.type`` as from the SDK."""

    @gpu_timed(name="work")
    def work() -> None:
        raise LookupError("not there")

    with pytest.raises(LookupError, match="not there"):
        work()
    span = by_name(exported(exporter, device))["work"]
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "LookupError: not there"
    assert span.attributes[names.ERROR_TYPE] == "LookupError"
    (event,) = span.events
    assert event.attributes["exception.type"] == "LookupError"
    assert event.attributes["exception.escaped"] == "True"
    assert "in work" in event.attributes["exception.stacktrace"]


def test_a_deep_stack_trace_keeps_the_line_that_raised(exporter, device):
    """The stack trace of an exception from deep below still ends with the line that raised, as from the SDK."""

    def deeper(levels: int, path: list[int]) -> None:
        if levels % 2:
            deeper(levels - 1, [*path, levels])
        elif levels:
            deeper(levels - 1, path + [levels] * 2)
        else:
            raise ValueError("the bottom")

    @gpu_timed(name="work")
    def work() -> None:
        deeper(60, [])

    with pytest.raises(ValueError, match="the bottom"):
        work()
    (event,) = by_name(exported(exporter, device))["work"].events
    assert event.attributes["exception.stacktrace"].rstrip().endswith("ValueError: the bottom")


def test_a_status_of_ok_is_final(exporter, device):
    """A call that says OK and then raises keeps OK, as the SDK has it."""

    @gpu_timed(name="work")
    def work() -> None:
        trace.get_current_span().set_status(StatusCode.OK)
        raise KeyError("k")

    with pytest.raises(KeyError):
        work()
    assert by_name(exported(exporter, device))["work"].status.status_code is StatusCode.OK


# -- parents and children ---------------------------------------------------------------------------------


def test_spans_nest_with_the_users_own_in_both_directions(exporter, device):
    """user > gpu_timed > user > gpu_timed > gpu_timed: each is the child of the one around it."""
    tracer = trace.get_tracer("app")

    @gpu_timed(name="innermost")
    def innermost() -> None: ...

    @gpu_timed(name="inner")
    def inner() -> None:
        innermost()

    @gpu_timed(name="outer")
    def outer() -> None:
        with tracer.start_as_current_span("between"):
            inner()

    with tracer.start_as_current_span("request"):
        outer()
    spans = by_name([s for s in exported(exporter, device) if not s.name.endswith("[gpu]")])
    chain = ["request", "outer", "between", "inner", "innermost"]
    assert spans["request"].parent is None
    for above, below in itertools.pairwise(chain):
        assert is_child(spans[below], spans[above]), (above, below)
    assert not any(span.parent and span.parent.is_remote for span in spans.values())


def test_a_users_span_in_between_does_not_look_like_a_stranger(exporter, device):
    """A gpu_timed call inside a user's span inside a gpu_timed call is nested, not ``interleaved``."""
    tracer = trace.get_tracer("app")
    with capture() as records, gpu_span("outer"), tracer.start_as_current_span("between"), gpu_span("inner"):
        device.launch(1_000)
    assert {record.name: record.quality for record in records} == {"outer": (), "inner": ()}


def test_a_remote_parent_is_the_parent(exporter, device):
    """A span context that came in a header is the parent, and its trace is gone on with."""

    @gpu_timed(name="work")
    def work() -> None: ...

    with trace.use_span(trace.NonRecordingSpan(ELSEWHERE)):
        work()
    span = by_name(exported(exporter, device))["work"]
    assert span.parent == ELSEWHERE
    assert span.context.trace_id == ELSEWHERE.trace_id


def test_the_callers_context_is_back_after_the_call(exporter, device):
    """After the call, returned or raised, the current span is the one from before."""

    @gpu_timed
    def work(*, fail: bool) -> None:
        if fail:
            raise ValueError

    with trace.get_tracer("app").start_as_current_span("request") as request:
        work(fail=False)
        assert trace.get_current_span() is request
        with pytest.raises(ValueError):  # noqa: PT011 - the one raised here
            work(fail=True)
        assert trace.get_current_span() is request


def test_eight_concurrent_tasks_keep_their_parents(exporter, device):
    """Coroutines that interleave on one loop: every span has the parent of its own task."""
    tracer = trace.get_tracer("app")

    @gpu_timed(name="step")
    async def step(task: int, turn: int) -> None:
        trace.get_current_span().set_attribute("user.task", task)
        for _ in range(1 + (task + turn) % 3):
            device.launch(100)
            await asyncio.sleep(0)
        with tracer.start_as_current_span("leaf") as leaf:
            leaf.set_attribute("user.task", task)
            await asyncio.sleep(0)
        assert trace.get_current_span().is_recording()

    async def task(number: int) -> None:
        with tracer.start_as_current_span("request") as request:
            request.set_attribute("user.task", number)
            for turn in range(3):
                await step(number, turn)
                assert trace.get_current_span() is request

    async def main() -> None:
        await asyncio.gather(*(task(number) for number in range(8)))

    asyncio.run(main())
    spans = exported(exporter, device)
    by_id = {span.context.span_id: span for span in spans}
    steps = [span for span in spans if span.name == "step"]
    leaves = [span for span in spans if span.name == "leaf"]
    assert (len(steps), len(leaves)) == (24, 24)
    for child in steps + leaves:
        parent = by_id[child.parent.span_id]
        assert parent.name == {"step": "request", "leaf": "step"}[child.name]
        assert is_child(child, parent)
        assert parent.attributes["user.task"] == child.attributes["user.task"]


def test_a_worker_thread_without_propagation_gives_a_root(exporter, device):
    """In a pool's thread a call is a root span, also when the thread was used with a parent before."""

    @gpu_timed(name="work")
    def work(label: str) -> None:
        trace.get_current_span().set_attribute("user.label", label)

    with ThreadPoolExecutor(1) as pool, trace.get_tracer("app").start_as_current_span("request") as request:
        pool.submit(contextvars.copy_context().run, work, "carried").result()
        pool.submit(work, "bare").result()
    spans = {s.attributes["user.label"]: s for s in exported(exporter, device) if s.name == "work"}
    assert spans["bare"].parent is None
    assert spans["bare"].context.trace_id != request.get_span_context().trace_id
    assert spans["carried"].parent == request.get_span_context()


def test_to_thread_keeps_the_parent(exporter, device):
    """``asyncio.to_thread`` carries the context, so the parent is the coroutine's span."""

    @gpu_timed(name="inner")
    def inner() -> None: ...

    @gpu_timed(name="outer")
    async def outer() -> None:
        await asyncio.to_thread(inner)

    asyncio.run(outer())
    spans = by_name([s for s in exported(exporter, device) if not s.name.endswith("[gpu]")])
    assert is_child(spans["inner"], spans["outer"])


# -- the device span --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["boundary", "deferred", "device"])
@pytest.mark.parametrize("launched_ns", [0, 1_000, 3_000_000])
def test_the_device_span_lies_in_its_host_span(sync, launched_ns, exporter, device):
    """``<name> [gpu]`` is a child of the host span, lies inside it, and lasts exactly ``device_ns``."""

    @gpu_timed(name="work", sync=sync)
    def work() -> None:
        device.launch(launched_ns)
        device.host_clock.advance(20_000)

    with capture() as records:
        work()
    spans = by_name(exported(exporter, device))
    host, gpu = spans["work"], spans["work [gpu]"]
    (record,) = records
    assert is_child(gpu, host)
    assert host.start_time <= gpu.start_time <= gpu.end_time <= host.end_time
    assert gpu.end_time - gpu.start_time == record.device_ns == max(launched_ns, 20_000)
    assert (gpu.start_time, gpu.end_time) == (record.device_start_ns, record.device_end_ns)
    assert (host.start_time, host.end_time) == (record.start_ns, record.end_ns)
    assert {host.kind, gpu.kind} == {trace.SpanKind.INTERNAL}
    assert gpu.context.span_id != host.context.span_id
    assert gpu.context.trace_flags == host.context.trace_flags


def test_the_boundary_span_covers_the_wait(exporter, device):
    """With ``boundary`` the host span lasts launch plus wait, within what the device's place is uncertain by."""

    @gpu_timed(name="work")
    def work() -> None:
        device.host_clock.advance(10_000)
        device.launch(500_000)

    work()
    host = by_name(exported(exporter, device))["work"]
    assert host.attributes[names.LAUNCH_DURATION] == 10_000
    assert host.attributes[names.SYNC_DURATION] == 500_000
    assert 0 <= host.end_time - host.start_time - 510_000 <= host.attributes[names.UNCERTAINTY]


def test_the_host_span_has_every_number_under_its_documented_name(exporter, device):
    """The host span's attributes are the record's fields under the names of ``export/attributes.py``, no others."""

    @gpu_timed(name="work", attributes={"user.model": "m"}, mode="eager")
    def work() -> None:
        device.launch(500_000)
        device.host_clock.advance(10_000)

    with capture() as records:
        work()
        work()
    spans = exported(exporter, device)
    first, second = (span for span in spans if span.name == "work")
    _, record = records
    expected = {
        "code.function.name": f"{work.__module__}.{work.__qualname__}",
        "code.file.path": __file__,
        "code.line.number": inspect.unwrap(work).__code__.co_firstlineno,
        "user.model": "m",
        "thread.id": record.thread_id,
        "hw.id": "GPU-fake-0",
        "hw.name": "Fake GPU",
        "hw.type": "gpu",
        "gpu_timed.device.duration_ns": 500_000,
        "gpu_timed.device.min_ns": record.device_min_ns,
        "gpu_timed.floor_ns": 0,
        "gpu_timed.device.index": 0,
        "gpu_timed.device.stream": "0x0",
        "gpu_timed.launch.duration_ns": 10_000,
        "gpu_timed.queue.duration_ns": record.queue_ns,
        "gpu_timed.sync.duration_ns": 490_000,
        "gpu_timed.sync.policy": "boundary",
        "gpu_timed.idle_before_ns": 0,
        "gpu_timed.uncertainty_ns": record.uncertainty_ns,
        "gpu_timed.launch_gaps_included": record.launch_gaps_included,
        "gpu_timed.clock": "fake",
        "gpu_timed.warmth": "warm",
        "gpu_timed.warmth.tier": "hot",
        "gpu_timed.bound": "device",
        "gpu_timed.mode": "eager",
        "gpu_timed.call.index": 1,
    }
    assert dict(second.attributes) == expected
    assert first.attributes["gpu_timed.first_call"] is True
    assert first.attributes["gpu_timed.call.index"] == 0


def test_the_device_span_says_which_device_and_how_sure(exporter, device):
    """The device span names device and stream, its duration, clock, mode, warmth and uncertainty, and no more."""

    @gpu_timed(name="work", mode="eager")
    def work() -> None:
        device.launch(500_000)

    with capture() as records, device.use(device=1, stream=0xBEEF):
        work()
    (record,) = records
    assert dict(by_name(exported(exporter, device))["work [gpu]"].attributes) == {
        "hw.id": "GPU-fake-1",
        "hw.name": "Fake GPU",
        "hw.type": "gpu",
        "gpu_timed.device.index": 1,
        "gpu_timed.device.stream": "0xbeef",
        "gpu_timed.device.duration_ns": 500_000,
        "gpu_timed.floor_ns": 0,
        "gpu_timed.uncertainty_ns": record.uncertainty_ns,
        "gpu_timed.clock": "fake",
        "gpu_timed.warmth": record.warmth,
        "gpu_timed.mode": "eager",
    }


def test_every_attribute_name_is_a_documented_constant():
    """Each constant of ``export/attributes.py`` has a text below it that says what it is, and a name of its own."""
    body = ast.parse(Path(names.__file__).read_text(encoding="utf-8")).body
    values = []
    for statement, following in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign):
            values.append(statement.value.value)
            assert isinstance(following, ast.Expr), f"{statement.target.id} is not documented"
            assert isinstance(following.value.value, str)
    assert len(values) > 20
    assert len(set(values)) == len(values)
    assert all(v.startswith(("gpu_timed.", "hw.")) or v in ("error.type", "thread.id") for v in values)


@pytest.mark.parametrize("reason", ["not_initialised", "no_device"])
def test_a_missing_time_is_left_out_and_explained(reason, exporter, device):
    """Without a device there is no number and no device span, and ``gpu_timed.device.missing`` says why."""
    device.disappear(reason)

    @gpu_timed(name="work")
    def work() -> None:
        device.host_clock.advance(700)

    work()
    (span,) = exported(exporter, device)
    held = {key: value for key, value in span.attributes.items() if key.startswith(("gpu_timed.", "hw."))}
    assert held == {
        "gpu_timed.device.missing": reason,
        "gpu_timed.launch.duration_ns": 700,
        "gpu_timed.sync.duration_ns": 0,
        "gpu_timed.sync.policy": "boundary",
        "gpu_timed.clock": "host",
        "gpu_timed.warmth": "unknown",
        "gpu_timed.bound": "unknown",
        "gpu_timed.call.index": 0,
        "gpu_timed.first_call": True,
    }


def test_a_block_says_where_it_stands(exporter, device):
    """Its file, its function and its line: not ours."""
    with gpu_span("block"):
        pass
    found = {span.name: span for span in exported(exporter, device)}
    lines, first = inspect.getsourcelines(test_a_block_says_where_it_stands)
    said = dict(found["block"].attributes)
    assert said["code.function.name"] == f"{__name__}.test_a_block_says_where_it_stands"
    assert said["code.file.path"] == __file__
    assert lines[said["code.line.number"] - first].strip() == 'with gpu_span("block"):'


def test_a_captured_call_has_no_device_span(exporter, device):
    """Work that went into a graph did not run: no device span, and the host span says ``captured``."""

    @gpu_timed(name="work")
    def work() -> None:
        device.launch(1_000)

    with device.capture():
        work()
    (span,) = exported(exporter, device)
    assert span.attributes[names.DEVICE_MISSING] == "captured"
    assert names.DEVICE_DURATION not in span.attributes


def test_a_device_error_is_the_spans_and_not_the_callers(exporter, device):
    """A device that broke marks the span ERROR with a hint, and the call returns what it returns."""

    @gpu_timed(name="work")
    def work() -> int:
        device.launch(1_000)
        device.break_down()
        return 5

    assert work() == 5
    device.host_clock.advance(10_000)
    assert flush(5)
    (span,) = exporter.get_finished_spans()
    assert span.attributes[names.DEVICE_MISSING] == "device_error"
    assert flush(1).counts.get("handed_over") == 1


def test_device_spans_can_be_turned_off(exporter, device):
    """With ``device_spans=False`` there is one span a call, and the device's numbers stand on it."""
    configure(device_spans=False)

    @gpu_timed(name="work")
    def work() -> None:
        device.launch(1_000)

    work()
    (span,) = exported(exporter, device)
    assert span.attributes[names.DEVICE_DURATION] == 1_000


# -- late spans -------------------------------------------------------------------------------------------


def test_device_only_hands_the_host_span_over_before_the_call_returns(exporter, device):
    """``late="device_only"``: the exporter has the host span at return, and the device span brings the numbers."""

    @gpu_timed(name="work", sync="deferred", late="device_only")
    def work() -> None:
        device.launch(40_000)
        device.host_clock.advance(500)

    with device.held():
        work()
        (host,) = exporter.get_finished_spans()
        assert host.name == "work"
        assert host.end_time - host.start_time == 500
        assert host.attributes[names.DEVICE_MISSING] == "pending"
        assert host.attributes[names.LAUNCH_DURATION] == 500
        assert names.DEVICE_DURATION not in host.attributes
    spans = by_name(exported(exporter, device))
    gpu = spans["work [gpu]"]
    assert set(spans) == {"work", "work [gpu]"}
    assert is_child(gpu, host)
    assert gpu.end_time - gpu.start_time == gpu.attributes[names.DEVICE_DURATION] == 40_000
    assert names.DEVICE_MISSING not in gpu.attributes
    assert 0 <= gpu.attributes[names.QUEUE_DURATION] <= 500
    assert gpu.attributes[names.CALL_INDEX] == 0


def test_device_only_with_nothing_to_wait_for_exports_one_whole_span(exporter, device):
    """``late="device_only"`` without a device: one span, at return, exactly once."""
    device.disappear()

    @gpu_timed(name="work", sync="deferred", late="device_only")
    def work() -> None: ...

    work()
    assert [span.name for span in exporter.get_finished_spans()] == ["work"]
    assert len(exported(exporter, device)) == 1


def test_device_only_holds_for_coroutines(exporter, device):
    """``late="device_only"`` hands a coroutine's host span over as it returns, like that of a plain call."""

    @gpu_timed(name="work", late="device_only")
    async def work() -> None:
        device.launch(40_000)

    with device.held():
        asyncio.run(work())
        at_return = [span.name for span in exporter.get_finished_spans()]
    exported(exporter, device)
    assert at_return == ["work"]


def test_device_only_without_device_spans_keeps_the_number(exporter, device):
    """``late="device_only"`` with device spans off does not lose the device's time: some span carries it."""
    configure(device_spans=False)
    with gpu_span("work", sync="deferred", late="device_only"):
        device.launch(40_000)
    held = [span.attributes.get(names.DEVICE_DURATION) for span in exported(exporter, device)]
    assert 40_000 in held


def test_by_default_the_host_span_waits_for_the_device(exporter, device):
    """``late="host"``: nothing is exported at return, and the host span then ends with the device."""

    @gpu_timed(name="work", sync="deferred")
    def work() -> None:
        device.launch(40_000)
        device.host_clock.advance(500)

    with device.held():
        work()
        assert flush(0.05).pending == 1
        assert exporter.get_finished_spans() == ()
    spans = by_name(exported(exporter, device))
    host, gpu = spans["work"], spans["work [gpu]"]
    assert host.end_time == gpu.end_time > host.start_time + 500
    assert host.attributes[names.LAUNCH_DURATION] == 500
    assert host.attributes[names.DEVICE_DURATION] == 40_000


def test_a_device_that_is_done_early_does_not_shorten_the_host_span(exporter, device):
    """``late="host"``: where the device was done by the return, the host span ends there (± uncertainty)."""

    @gpu_timed(name="work", sync="deferred")
    def work() -> None:
        device.launch(1_000)
        device.host_clock.advance(900_000)

    work()
    host = by_name(exported(exporter, device))["work"]
    assert 0 <= host.end_time - host.start_time - 900_000 <= host.attributes[names.UNCERTAINTY]


def test_the_device_time_reaches_the_span_without_a_word_about_ended_spans(exporter, device, caplog):
    """A time that is known only later is on the exported span, and nothing is written to an ended one."""

    @gpu_timed(name="work", sync="deferred")
    def work() -> None:
        device.launch(7_000_000)

    work()
    host = by_name(exported(exporter, device))["work"]
    assert host.attributes[names.DEVICE_DURATION] == 7_000_000
    assert "ended span" not in caplog.text


def test_two_providers_do_not_mix(device):
    """A span goes to the provider that was in force as it was entered, also when another came since."""
    held = [InMemorySpanExporter(), InMemorySpanExporter()]
    providers = [TracerProvider(shutdown_on_exit=False) for _ in held]
    for provider, sink in zip(providers, held, strict=True):
        provider.add_span_processor(SimpleSpanProcessor(sink))

    @gpu_timed(sync="deferred")
    def work() -> None:
        device.launch(1_000)

    for provider in providers:
        trace._TRACER_PROVIDER = provider
        work()
    device.run_dry()
    assert flush(5)
    traces = [{span.context.trace_id for span in sink.get_finished_spans()} for sink in held]
    assert [len(found) for found in traces] == [1, 1]
    assert traces[0] != traces[1]


def test_links_given_to_the_api_are_taken(exporter, device):
    """``Link`` objects of the API and ``add_link`` of their contexts come out alike."""

    @gpu_timed(name="work")
    def work() -> None:
        link = Link(ELSEWHERE, {"n": 1})
        trace.get_current_span().add_link(link.context, link.attributes)

    work()
    (link,) = by_name(exported(exporter, device))["work"].links
    assert link.context == ELSEWHERE
    assert dict(link.attributes) == {"n": 1}


def test_the_scope_is_gpu_timed_with_its_version(exporter, device):
    """Every span's instrumentation scope is ``gpu_timed`` in the version of this package."""
    with gpu_span("work"):
        device.launch(1_000)
    scopes = {(s.instrumentation_scope.name, s.instrumentation_scope.version) for s in exported(exporter, device)}
    assert scopes == {("gpu_timed", library.__version__)}
