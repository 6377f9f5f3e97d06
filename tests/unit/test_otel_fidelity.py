"""The SDK's own parts (processors, samplers, limits, resources) see of a timed call what they see of any span."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import itertools
import random
import threading
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import IdGenerator, ReadableSpan, Span, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import SpanContext, StatusCode, TraceFlags
from opentelemetry.trace.span import TraceState

from gpu_timed import Missing, configure, flush, gpu_span, gpu_timed
from gpu_timed.testing import FakeDevice, capture
from gpu_timed.values import LONGEST

UNSAMPLED_PARENT = SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(0))
USERS: contextvars.ContextVar[str] = contextvars.ContextVar("USERS", default="nobody")


class CountedIds(IdGenerator):
    """Gives the trace ids it was given, and span ids 1, 2, 3 …"""

    def __init__(self, trace_ids: list[int] | None = None) -> None:
        self._traces = iter(trace_ids) if trace_ids is not None else itertools.count(1)
        self._spans = itertools.count(1)

    def generate_trace_id(self) -> int:
        return next(self._traces)

    def generate_span_id(self) -> int:
        return next(self._spans)


def provide(*processors: SpanProcessor, **options: object) -> InMemorySpanExporter:
    """Make a provider with *processors* and *options* the global one; return what it exports to, last of all."""
    held = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False, **options)
    for processor in (*processors, SimpleSpanProcessor(held)):
        provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)
    return held


def delivered(held: InMemorySpanExporter, device: FakeDevice) -> dict[str, ReadableSpan]:
    """Let the device finish, deliver everything, and return the host spans by name."""
    device.run_dry()
    flush(5)
    return {span.name: span for span in held.get_finished_spans() if not span.name.endswith("[gpu]")}


# -- processors -------------------------------------------------------------------------------------------


class Starts(SpanProcessor):
    """Remembers what it saw in ``on_start``, and writes to the span there."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, object]] = {}

    def on_start(self, span: Span, parent_context: otel_context.Context | None = None) -> None:
        parent = trace.get_current_span(parent_context)
        self.seen[span.name] = {
            "attributes": dict(span.attributes or {}),
            "baggage": dict(baggage.get_all(parent_context)),
            "baggage_now": dict(baggage.get_all()),
            "variable": USERS.get(),
            "parent": parent.get_span_context(),
            "current": trace.get_current_span().get_span_context(),
            "recording": span.is_recording(),
            "start": span.start_time,
            "end": span.end_time,
        }
        span.set_attribute("user.from_baggage", baggage.get_baggage("tenant", parent_context) or "none")
        span.set_attribute("user.replaced", "at start")


def test_on_start_sees_the_callers_world(device):
    """``on_start`` sees baggage, the user's context variables, the parent, and the start attributes of the site."""
    starts = Starts()
    held = provide(starts)

    @gpu_timed(name="work", sync="deferred", attributes=lambda n: {"user.n": n})
    def work(n: int) -> None:
        device.launch(1_000)
        USERS.set("changed inside")

    def request() -> SpanContext:
        USERS.set("alice")
        otel_context.attach(baggage.set_baggage("tenant", "acme"))
        with trace.get_tracer("app").start_as_current_span("request") as span:
            work(3)
            return span.get_span_context()

    parent = contextvars.copy_context().run(request)
    span = delivered(held, device)["work"]
    seen = starts.seen["work"]
    assert seen["baggage"] == seen["baggage_now"] == {"tenant": "acme"}
    assert seen["variable"] == "alice"
    assert seen["parent"] == seen["current"] == parent
    assert seen["recording"] is True
    assert seen["attributes"]["user.n"] == 3
    assert seen["attributes"]["code.function.name"].endswith("work")
    assert (seen["start"], seen["end"]) == (span.start_time, None)
    assert span.attributes["user.from_baggage"] == "acme"


def test_user_code_goes_over_what_on_start_wrote(device):
    """What the call itself writes comes after ``on_start``, so it wins, as on a span of the SDK's."""
    held = provide(Starts())

    @gpu_timed(name="work")
    def work() -> None:
        trace.get_current_span().set_attribute("user.replaced", "inside")

    work()
    assert delivered(held, device)["work"].attributes["user.replaced"] == "inside"


def test_every_span_is_started_and_ended_once(device):
    """Processors get one ``on_start`` and one ``on_end`` for each host span and each device span."""
    calls: list[tuple[str, str]] = []

    class Counting(SpanProcessor):
        def on_start(self, span: Span, parent_context: otel_context.Context | None = None) -> None:
            calls.append(("start", span.name))

        def on_end(self, span: ReadableSpan) -> None:
            calls.append(("end", span.name))

    held = provide(Counting())
    for late in ("host", "device_only"):
        calls.clear()
        with gpu_span(f"work {late}", sync="deferred", late=late):
            device.launch(1_000)
        delivered(held, device)
        expected = [(what, name) for what in ("end", "start") for name in (f"work {late}", f"work {late} [gpu]")]
        assert sorted(calls) == expected


class Raising(SpanProcessor):
    """Raises in ``on_start`` or ``on_end`` for spans whose name begins with ``bad``."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_start(self, span: Span, parent_context: otel_context.Context | None = None) -> None:
        if self.where == "start" and span.name.startswith("bad"):
            raise RuntimeError("a broken processor")

    def on_end(self, span: ReadableSpan) -> None:
        if self.where == "end" and span.name.startswith("bad"):
            raise RuntimeError("a broken processor")


@pytest.mark.parametrize("where", ["start", "end"])
@pytest.mark.parametrize("late", ["host", "device_only"])
@pytest.mark.parametrize("sync", ["boundary", "deferred"])
def test_a_processor_that_raises_stays_inside(where, late, sync, device):
    """A processor that raises reaches neither the call nor later spans, and is counted by kind."""
    held = provide(Raising(where))

    @gpu_timed(name="bad", sync=sync, late=late)
    def bad() -> int:
        device.launch(1_000)
        return 7

    @gpu_timed(name="good", sync=sync, late=late)
    def good() -> None:
        device.launch(1_000)

    assert bad() == 7
    good()
    assert "good" in delivered(held, device)
    assert flush(5).counts["sink_OtelSink"] >= 1
    assert device.marks_in_use == 0


def test_a_flush_after_a_processor_lost_a_span_is_not_true(device):
    """``flush()`` is true only if nothing was lost, and a span that died in a processor is lost."""
    provide(Raising("start"))
    with gpu_span("bad"):
        device.launch(1_000)
    assert not flush(5)


def test_a_processor_that_fails_on_the_device_span_does_not_cost_the_host_span(device):
    """A processor that cannot take the device span still gets the host span."""

    class NoDeviceSpans(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            if span.name.endswith("[gpu]"):
                raise RuntimeError("what is this?")

    held = provide(NoDeviceSpans())
    with gpu_span("work"):
        device.launch(1_000)
    assert "work" in delivered(held, device)


# -- samplers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.0, 0.03, 0.5, 1.0])
def test_a_ratio_sampler_decides_as_under_the_sdk(ratio, device):
    """For 400 given trace ids exactly those are exported that the SDK's own tracer exports."""
    dice = random.Random(4)
    ids = [dice.getrandbits(128) or 1 for _ in range(400)]
    held = provide(sampler=TraceIdRatioBased(ratio), id_generator=CountedIds(ids))
    theirs = InMemorySpanExporter()
    plain = TracerProvider(sampler=TraceIdRatioBased(ratio), id_generator=CountedIds(ids), shutdown_on_exit=False)
    plain.add_span_processor(SimpleSpanProcessor(theirs))
    tracer = plain.get_tracer("plain")

    @gpu_timed(name="work")
    def work() -> None: ...

    for _ in ids:
        work()
        tracer.start_span("work").end()
    device.run_dry()
    assert flush(10)
    ours = [s.context.trace_id for s in held.get_finished_spans() if s.name == "work"]
    assert ours == [s.context.trace_id for s in theirs.get_finished_spans()]
    assert (len(ours) in (0, 400)) == (ratio in (0.0, 1.0))


def test_an_unsampled_parent_switches_measuring_off(device):
    """Under an unsampled parent nothing is exported, no mark is placed, and no record is made."""
    held = provide(sampler=ParentBased(TraceIdRatioBased(1.0)))
    marks = []

    @gpu_timed(name="work")
    def work() -> None:
        marks.append(device.marks_in_use)
        assert not trace.get_current_span().is_recording()
        assert trace.get_current_span().get_span_context().trace_id == UNSAMPLED_PARENT.trace_id

    with capture() as records, trace.use_span(trace.NonRecordingSpan(UNSAMPLED_PARENT)):
        work()
        with gpu_span("block") as block:
            assert block.wait(0).device_ns == Missing("not_sampled")
    assert marks == [0]
    assert records == []
    assert delivered(held, device) == {}


def test_children_of_an_unsampled_root_are_unsampled(device):
    """A root that the sampler drops is current, so that the user's and our own spans inside are dropped with it."""
    held = provide(sampler=ParentBased(ALWAYS_OFF))
    seen = []

    @gpu_timed(name="inner")
    def inner() -> None: ...

    @gpu_timed(name="outer")
    def outer() -> None:
        root = trace.get_current_span().get_span_context()
        assert root.is_valid
        assert not root.trace_flags.sampled
        with trace.get_tracer("app").start_as_current_span("user") as span:
            assert span.get_span_context().trace_id == root.trace_id
            assert not span.is_recording()
            inner()
        seen.append((root.trace_id, device.marks_in_use))

    with capture() as records:
        outer()
        outer()
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert len({trace_id for trace_id, _ in seen}) == 2
    assert [marks for _, marks in seen] == [0, 0]
    assert records == []
    assert delivered(held, device) == {}


def test_an_unsampled_blocks_target_has_the_ids_of_the_current_span(device):
    """The target of an unsampled ``with gpu_span()`` gives the ids that are propagated, as the SDK's does."""
    provide(sampler=ParentBased(ALWAYS_OFF))
    with gpu_span("work") as span:
        assert span.get_span_context() == trace.get_current_span().get_span_context()


class Asked(Sampler):
    """Remembers what it was asked, and answers with attributes and a trace state of its own."""

    def __init__(self, decision: Decision = Decision.RECORD_AND_SAMPLE) -> None:
        self.questions: list[tuple[object, ...]] = []
        self.decision = decision

    def should_sample(  # noqa: PLR0917 - OpenTelemetry's signature
        self, parent_context, trace_id, name, kind=None, attributes=None, links=None, trace_state=None
    ) -> SamplingResult:
        parent = trace.get_current_span(parent_context).get_span_context()
        extras = {"tenant": baggage.get_baggage("tenant", parent_context)}
        self.questions.append((parent, extras, trace_id, name, kind, dict(attributes or {}), tuple(links or ())))
        return SamplingResult(
            self.decision, {**(attributes or {}), "sampler.said": "yes"}, TraceState([("vendor", "a1")])
        )

    def get_description(self) -> str:
        return "Asked"


@pytest.mark.parametrize("parented", [False, True])
def test_the_sampler_is_asked_what_the_sdk_would_ask(parented, device):
    """A sampler gets the parent context, trace id, name, kind, attributes and links that the SDK would give it."""
    sampler = Asked()
    held = provide(sampler=sampler, id_generator=CountedIds([7, 7]))
    parent = trace.NonRecordingSpan(SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(1)))
    attributes = {"user.model": "m", "user.n": 3}

    def body() -> None: ...

    body.__qualname__, body.__module__ = "work", "__main__"
    code = {
        "code.function.name": "__main__.work",
        "code.file.path": __file__,
        "code.line.number": body.__code__.co_firstlineno,
    }
    work = gpu_timed(name="work", attributes=attributes)(body)
    with trace.use_span(parent) if parented else contextlib.nullcontext():
        token = otel_context.attach(baggage.set_baggage("tenant", "acme"))
        work()
        trace.get_tracer("app").start_span("work", attributes={**code, **attributes}).end()
        otel_context.detach(token)
    assert delivered(held, device)
    assert len(sampler.questions) == 2, "asked again when the span was made"
    ours, theirs = sampler.questions
    assert ours == theirs
    assert ours[2:5] == (0xABC if parented else 7, "work", trace.SpanKind.INTERNAL)


def test_what_the_sampler_adds_is_kept(device):
    """Attributes and trace state of the sampler's answer are on the span, seen inside and exported."""
    held = provide(sampler=Asked())
    seen = []

    @gpu_timed(name="work")
    def work() -> None:
        seen.append(trace.get_current_span().get_span_context().trace_state)

    work()
    span = delivered(held, device)["work"]
    assert span.attributes["sampler.said"] == "yes"
    assert span.context.trace_state == seen[0] == TraceState([("vendor", "a1")])


def test_the_samplers_attributes_are_not_put_on_the_device_span(device):
    """The device span has its own few attributes and not those of the host span's start."""
    held = provide(sampler=Asked())
    with gpu_span("work", attributes={"user.n": 1}):
        device.launch(1_000)
    delivered(held, device)
    (gpu,) = (span for span in held.get_finished_spans() if span.name.endswith("[gpu]"))
    assert not {"sampler.said", "user.n", "code.file.path"} & set(gpu.attributes)


def test_record_only_is_measured_and_seen_but_not_exported(device):
    """RECORD_ONLY: processors get the span with flag 0, exporters do not, and the record is there."""
    starts = Starts()
    held = provide(starts, sampler=Asked(Decision.RECORD_ONLY))

    @gpu_timed(name="work")
    def work() -> None:
        device.launch(1_000)
        span = trace.get_current_span()
        assert span.is_recording()
        assert not span.get_span_context().trace_flags.sampled

    with capture() as records:
        work()
    assert [record.device_ns for record in records] == [1_000]
    assert delivered(held, device) == {}
    assert "work" in starts.seen


class DropInner(Sampler):
    """Records roots without sampling them, and drops what is inside."""

    def should_sample(  # noqa: PLR0917 - OpenTelemetry's signature
        self, parent_context, trace_id, name, kind=None, attributes=None, links=None, trace_state=None
    ) -> SamplingResult:
        return SamplingResult(Decision.DROP if name == "inner" else Decision.RECORD_ONLY, attributes)

    def get_description(self) -> str:
        return "DropInner"


def test_writes_in_a_dropped_call_do_not_land_on_a_parent_that_only_records(device):
    """Under a RECORD_ONLY parent a dropped call has a span of its own that keeps nothing, as under the SDK."""
    provide(sampler=DropInner())

    @gpu_timed(name="inner")
    def inner() -> None:
        trace.get_current_span().set_attribute("user.inner", 1)

    with trace.get_tracer("app").start_as_current_span("outer") as outer:
        inner()
        assert "user.inner" not in outer.attributes


def test_a_sampler_that_raises_does_not_break_the_call(device):
    """A sampler that raises costs the measurement, not the call, and is counted."""

    class Broken(Asked):
        def should_sample(self, *_: object, **__: object) -> SamplingResult:
            raise RuntimeError("no budget file")

    held = provide(sampler=Broken())

    @gpu_timed
    def work() -> int:
        return 7

    assert work() == 7
    assert device.marks_in_use == 0
    assert delivered(held, device) == {}
    assert flush(1).counts["sampler_raised"] == 1


def test_a_generator_of_ids_that_raises_does_not_break_the_call(device):
    """An id generator that raises costs the measurement, not the call, and leaves no context behind."""

    class Broken(CountedIds):
        def generate_span_id(self) -> int:
            raise RuntimeError("no entropy")

    provide(id_generator=Broken())

    @gpu_timed
    def work() -> int:
        return 7

    assert work() == 7
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert flush(1).counts["enter"] == 1


# -- limits, resource, scope ------------------------------------------------------------------------------


def test_span_limits_hold(device):
    """Limits on attributes, their length, events and links cut a timed span as they cut one of the SDK's."""
    limits = SpanLimits(
        max_span_attributes=40,
        max_span_attribute_length=12,
        max_attribute_length=12,
        max_events=3,
        max_event_attributes=1,
        max_links=2,
    )
    held = provide(span_limits=limits)
    elsewhere = [SpanContext(1, n, is_remote=True, trace_flags=TraceFlags(1)) for n in range(1, 6)]

    def write() -> None:
        span = trace.get_current_span()
        span.set_attributes({f"user.{n}": n for n in range(60)})
        span.set_attribute("user.text", "x" * 100)
        for n in range(6):
            span.add_event(f"event {n}", {"a": "y" * 100, "b": 2})
        for context in elsewhere:
            span.add_link(context)

    gpu_timed(name="ours")(write)()
    with trace.get_tracer("app").start_as_current_span("theirs"):
        write()
    spans = delivered(held, device)
    ours, theirs = spans["ours"], spans["theirs"]
    assert len(ours.attributes) == len(theirs.attributes) == 40
    assert ours.dropped_attributes > 0
    assert ours.attributes["user.text"] == theirs.attributes["user.text"] == "x" * 12
    assert all(len(v) <= 12 for v in ours.attributes.values() if isinstance(v, str))
    assert [(e.name, dict(e.attributes)) for e in ours.events] == [(e.name, dict(e.attributes)) for e in theirs.events]
    assert [link.context for link in ours.links] == [link.context for link in theirs.links] == elsewhere[-2:]
    assert (ours.dropped_events, ours.dropped_links) == (theirs.dropped_events, theirs.dropped_links) == (3, 3)


def test_the_resource_is_the_providers(device):
    """Host span and device span carry the resource of the application's provider."""
    held = provide(resource=Resource({"service.name": "llm"}))
    with gpu_span("work"):
        device.launch(1_000)
    delivered(held, device)
    assert [span.resource.attributes["service.name"] for span in held.get_finished_spans()] == ["llm", "llm"]


# -- which provider ---------------------------------------------------------------------------------------


def test_a_provider_set_after_decorating_is_found(device):
    """A provider that comes after the decorator, and after the first calls, gets every call from then on."""
    ran = []

    @gpu_timed(name="work", attributes=lambda n: {"user.n": n})
    def work(n: int) -> None:
        ran.append(n)

    work(0)
    held = provide()
    work(1)
    device.run_dry()
    assert flush(5).pending == 0
    assert ran == [0, 1]
    assert [s.attributes["user.n"] for s in held.get_finished_spans() if s.name == "work"] == [1]


def test_without_a_provider_calls_are_measured(device):
    """With no provider at all calls work, nest, and give records with ids of their own."""

    @gpu_timed(name="inner")
    def inner() -> None:
        device.launch(1_000)

    @gpu_timed(name="outer")
    def outer() -> str:
        inner()
        assert trace.get_current_span().get_span_context().is_valid
        return "result"

    with capture() as records:
        assert outer() == "result"
    found = {record.name: record for record in records}
    assert found["outer"].parent_id is None
    assert found["inner"].parent_id == found["outer"].span_id != 0
    assert found["inner"].trace_id == found["outer"].trace_id != 0
    assert found["inner"].device_ns == 1_000
    assert flush(1).provider == "none"


@pytest.mark.parametrize(
    "parent", [None, UNSAMPLED_PARENT, SpanContext(5, 6, is_remote=True, trace_flags=TraceFlags(1))]
)
def test_a_disabled_sdk_leaves_the_call_untouched(parent, device, monkeypatch):
    """Under ``OTEL_SDK_DISABLED=true`` the call runs as if undecorated: no mark, no record, the same current span."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    held = provide()
    around = trace.INVALID_SPAN if parent is None else trace.NonRecordingSpan(parent)

    @gpu_timed
    def work() -> int:
        assert trace.get_current_span() is around
        assert device.marks_in_use == 0
        return 7

    with capture() as records, trace.use_span(around):
        assert work() == 7
    assert records == []
    assert delivered(held, device) == {}


def test_a_call_while_another_thread_meets_the_provider_is_exported(device):
    """Two threads that meet a new provider at the same moment both export their spans."""
    held = InMemorySpanExporter()
    asked, go_on = threading.Event(), threading.Event()

    class Slow(TracerProvider):
        def get_tracer(self, *args: object, **kwargs: object) -> trace.Tracer:
            if not asked.is_set():
                asked.set()
                go_on.wait(5)
            return super().get_tracer(*args, **kwargs)

    provider = Slow(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(held))
    trace.set_tracer_provider(provider)
    first, second = gpu_timed(name="first")(lambda: None), gpu_timed(name="second")(lambda: None)
    thread = threading.Thread(target=first)
    thread.start()
    assert asked.wait(5)
    hasty = threading.Thread(target=second)
    hasty.start()
    hasty.join(0.2)  # it may wait for the first, or ask for a tracer of its own
    go_on.set()
    thread.join(5)
    hasty.join(5)
    assert set(delivered(held, device)) == {"first", "second"}


class ForeignSpan(trace.Span):
    """A span of a provider that is not the SDK's."""

    def __init__(self, name: str, context: SpanContext, parent: SpanContext, attributes: object, start: object) -> None:
        self.name, self.parent, self.start_time = name, parent, start
        self.attributes = dict(attributes or {})
        self.events: list[tuple[object, ...]] = []
        self.statuses: list[object] = []
        self.ends: list[int | None] = []
        self._context = context

    def get_span_context(self) -> SpanContext:
        return self._context

    def set_attributes(self, attributes) -> None:
        self.attributes.update(attributes)

    def set_attribute(self, key, value) -> None:
        self.attributes[key] = value

    def add_event(self, name, attributes=None, timestamp=None) -> None:
        self.events.append((name, attributes, timestamp))

    def update_name(self, name) -> None:
        self.name = name

    def is_recording(self) -> bool:
        return self._context.trace_flags.sampled and not self.ends

    def set_status(self, status, description=None) -> None:
        self.statuses.append(status)

    def record_exception(self, exception, attributes=None, timestamp=None, escaped=False) -> None:
        self.events.append(("exception", exception, timestamp))

    def end(self, end_time=None) -> None:
        self.ends.append(end_time)


class ForeignTracer(trace.Tracer):
    """Starts :class:`ForeignSpan` objects and keeps them."""

    def __init__(self, *, sampled: bool, fail: bool) -> None:
        self.spans: list[ForeignSpan] = []
        self._sampled, self._fail = sampled, fail

    def start_span(  # noqa: PLR0917 - OpenTelemetry's signature
        self, name, context=None, kind=None, attributes=None, links=None, start_time=None, **_
    ) -> trace.Span:
        if self._fail:
            raise RuntimeError("agent not reachable")
        parent = trace.get_current_span(context).get_span_context()
        made = SpanContext(parent.trace_id or 9, len(self.spans) + 1, False, TraceFlags(self._sampled))
        self.spans.append(ForeignSpan(name, made, parent, attributes, start_time))
        return self.spans[-1]

    @contextlib.contextmanager
    def start_as_current_span(self, name, *args, **kwargs) -> Iterator[trace.Span]:
        with trace.use_span(self.start_span(name), end_on_exit=True) as span:
            yield span


class ForeignProvider(trace.TracerProvider):
    """A provider that implements OpenTelemetry's API and nothing of its SDK."""

    def __init__(self, *, sampled: bool = True, fail: bool = False) -> None:
        self.tracer = ForeignTracer(sampled=sampled, fail=fail)
        trace.set_tracer_provider(self)

    def get_tracer(self, *_: object, **__: object) -> trace.Tracer:
        return self.tracer


@pytest.mark.parametrize("sync", ["boundary", "deferred"])
def test_a_provider_that_is_not_the_sdks_gets_plain_api_calls(sync, device):
    """A foreign provider starts both spans itself; the host span gets the numbers and ends at the record's end."""
    provider = ForeignProvider()

    @gpu_timed(name="work", sync=sync, attributes={"user.model": "m"})
    def work() -> None:
        device.launch(5_000)
        assert trace.get_current_span() is provider.tracer.spans[0]
        trace.get_current_span().set_attribute("user.one", 1)

    with capture() as records:
        work()
    (record,) = records
    host, gpu = provider.tracer.spans
    assert (host.name, gpu.name) == ("work", "work [gpu]")
    assert host.ends == [record.end_ns]
    assert host.attributes["gpu_timed.device.duration_ns"] == 5_000
    assert (host.attributes["user.model"], host.attributes["user.one"]) == ("m", 1)
    assert (record.trace_id, record.span_id) == (9, 1)
    assert gpu.parent == host.get_span_context()
    assert (gpu.start_time, gpu.ends) == (record.device_start_ns, [record.device_end_ns])
    assert host.statuses == []


def test_a_foreign_span_keeps_what_is_written_to_the_target_of_a_block(device):
    """Writes to the target of ``with gpu_span()`` reach the foreign span too, and ids agree."""
    provider = ForeignProvider()
    with gpu_span("outer") as outer:
        outer.set_attribute("user.one", 1)
        outer.add_event("event", timestamp=5)
        with gpu_span("inner"):
            pass
        assert outer.get_span_context() == provider.tracer.spans[0].get_span_context()
    assert flush(5)
    found = {span.name: span for span in provider.tracer.spans}
    assert found["outer"].attributes["user.one"] == 1
    assert found["outer"].events == [("event", None, 5)]
    assert found["inner"].parent == found["outer"].get_span_context()
    assert all(len(span.ends) == 1 for span in provider.tracer.spans)


def test_a_foreign_span_learns_of_the_callers_exception(device):
    """A call that raises gives a foreign span the exception as an event, and an ERROR status."""
    provider = ForeignProvider()

    @gpu_timed
    def work() -> None:
        raise LookupError("not there")

    with pytest.raises(LookupError):
        work()
    assert flush(5)
    span = provider.tracer.spans[0]
    assert [status.status_code for status in span.statuses] == [StatusCode.ERROR]
    assert [event[0] for event in span.events] == ["exception"]


def test_a_foreign_span_that_does_not_record_is_not_measured(device):
    """A foreign provider that answers with a span that does not record switches measuring off for that call."""
    provider = ForeignProvider(sampled=False)

    @gpu_timed
    def work() -> int:
        assert device.marks_in_use == 0
        assert trace.get_current_span().get_span_context() == provider.tracer.spans[0].get_span_context()
        return 7

    with capture() as records:
        assert work() == 7
    assert records == []


def test_a_foreign_provider_that_raises_does_not_break_the_call(device):
    """A foreign tracer that raises costs the measurement, not the call, and is counted."""
    ForeignProvider(fail=True)

    @gpu_timed
    def work() -> int:
        return 7

    assert work() == 7
    assert flush(1).counts["enter"] == 1


# -- attribute values (D7) --------------------------------------------------------------------------------


class Untouchable:
    """Has shape and dtype, as an array on a device; reading its values is an error."""

    shape = (2, 3)
    dtype = "float16"

    def _refuse(self, *_: object, **__: object) -> None:
        raise AssertionError("read back from the device")

    __str__ = __repr__ = __format__ = __bool__ = __len__ = __iter__ = __getitem__ = _refuse
    __int__ = __float__ = __index__ = __array__ = item = tolist = cpu = numpy = _refuse


UNTOUCHED = "Untouchable(shape=(2, 3), dtype=float16)"
SHAPELY = [
    (Untouchable(), UNTOUCHED),
    ([Untouchable(), Untouchable()], (UNTOUCHED, UNTOUCHED)),
    ((1, Untouchable()), ("1", UNTOUCHED)),
]


def _by_callable(value: object) -> None:
    gpu_timed(name="work", attributes=lambda v: {"user.v": v})(lambda v: None)(value)


def _by_mapping(value: object) -> None:
    gpu_timed(name="work", attributes={"user.v": value})(lambda: None)()


def _by_block(value: object) -> None:
    with gpu_span("work", attributes={"user.v": value}):
        pass


def _by_attribute(value: object) -> None:
    with gpu_span("work"):
        trace.get_current_span().set_attribute("user.v", value)


def _by_attributes(value: object) -> None:
    with gpu_span("work"):
        trace.get_current_span().set_attributes({"user.v": value})


DOORS: list[Callable[[object], None]] = [_by_callable, _by_mapping, _by_block, _by_attribute, _by_attributes]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("value", "expected"), SHAPELY)
def test_an_array_is_named_and_never_read(door, value, expected, exporter, device):
    """Through every door a value with shape and dtype becomes type, shape and dtype, and is asked nothing else."""
    door(value)
    assert delivered(exporter, device)["work"].attributes["user.v"] == expected


@pytest.mark.parametrize("door", DOORS)
def test_a_torch_tensor_is_named_and_never_read(door, exporter, device, monkeypatch):
    """A torch tensor of any rank, a zero-dimensional one too, is not turned into a number or a text."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("read back from the device")

    value = torch.ones(4).sum()
    for method in ("__repr__", "__str__", "__format__", "item", "tolist", "__float__", "__bool__", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, method, refuse, raising=False)
    door(value)
    held = delivered(exporter, device)["work"].attributes["user.v"]
    assert held == "Tensor(shape=(), dtype=torch.float32)"


def test_a_tensor_in_an_event_or_a_link_is_not_read(exporter, device):
    """Attributes of events, links and recorded exceptions are cleaned in the same way."""
    with gpu_span("work") as span:
        span.add_event("event", {"v": Untouchable()})
        span.add_link(SpanContext(1, 2, is_remote=True), {"v": Untouchable()})
        span.record_exception(ValueError("x"), {"v": Untouchable()})
    found = delivered(exporter, device)["work"]
    held = [*(event.attributes["v"] for event in found.events), *(link.attributes["v"] for link in found.links)]
    assert held == [UNTOUCHED] * 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(2.5), 2.5),
        (np.float64(2.5), 2.5),
        (np.int64(7), 7),
        (np.uint8(7), 7),
        (np.bool_(1), True),
        (np.str_("text"), "text"),
        (torch.ones(2, 3).shape, (2, 3)),
        ([np.int64(1), 2], (1, 2)),
        ([np.float32(1), 2], (1.0, 2.0)),
        ([], ()),
        (("a", "b"), ("a", "b")),
        (True, True),
        (b"text", "text"),
        (np.ones((2, 3)), "ndarray(shape=(2, 3), dtype=float64)"),
        (np.ones(()), "ndarray(shape=(), dtype=float64)"),
    ],
)
def test_numbers_stay_numbers(value, expected, exporter, device):
    """NumPy scalars stay numbers, a ``torch.Size`` is a tuple of integers, arrays are named."""
    _by_callable(value)
    held = delivered(exporter, device)["work"].attributes["user.v"]
    assert held == expected
    assert type(held) is type(expected)
    if isinstance(expected, tuple):
        assert [type(item) for item in held] == [type(item) for item in expected]


def test_an_object_is_named_by_its_type(exporter, device):
    """An object of the user's is named by its type: its text may hold anything, and cost anything."""

    class Prompt:
        def __str__(self) -> str:
            raise AssertionError("secret")

    _by_callable(Prompt())
    held = delivered(exporter, device)["work"].attributes["user.v"]
    assert held == f"{__name__}.{Prompt.__qualname__}"


@pytest.mark.parametrize("door", DOORS)
def test_long_texts_and_sequences_are_cut(door, exporter, device):
    """A text or sequence of any length is cut to a fixed one, so that no prompt fills a trace."""
    door("x" * (LONGEST + 100))
    door(["y"] * (LONGEST + 100))
    device.run_dry()
    assert flush(5)
    held = [s.attributes["user.v"] for s in exporter.get_finished_spans() if s.name == "work"]
    assert sorted(len(value) for value in held) == [LONGEST, LONGEST]


class Color(str, enum.Enum):  # noqa: UP042 - the mix-in from before StrEnum is what is tested
    """A text that is an enum, whose ``str()`` is not its text."""

    RED = "red"


def test_a_text_enum_is_its_text(exporter, device):
    """A member of a ``str`` enum is exported as the text it is, as with the SDK."""
    _by_callable(Color.RED)
    assert delivered(exporter, device)["work"].attributes["user.v"] == "red"


def test_none_does_not_become_a_text(exporter, device):
    """``set_attribute(key, None)`` leaves None or nothing behind, as with the SDK, and no made-up text."""
    _by_attribute(None)
    assert delivered(exporter, device)["work"].attributes.get("user.v") is None


@pytest.mark.parametrize("door", DOORS)
def test_a_value_whose_shape_raises_does_not_break_the_call(door, exporter, device):
    """A value that cannot say its shape (``torch.nested``) is named by its type or left out; the call goes on."""
    with warnings.catch_warnings(action="ignore"):  # torch says once in a process that it is a prototype
        value = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(RuntimeError):
        value.shape  # noqa: B018 - the property raises, which is the point
    door(value)
    assert "work" in delivered(exporter, device)


def test_the_attributes_function_gets_the_arguments_and_nothing_is_recorded_without_it(exporter, device):
    """Arguments become attributes only through ``attributes=``, which is called with them as the function is."""

    @gpu_timed(name="with", attributes=lambda x, *, uid: {"uid": uid, "shape": x.shape, "v": x.sum()})
    def with_attributes(x: torch.Tensor, *, uid: str) -> torch.Tensor:
        return x

    @gpu_timed(name="without")
    def without(x: torch.Tensor, *, uid: str) -> torch.Tensor:
        return x

    x = torch.ones(2, 3)
    assert with_attributes(x, uid="user-1") is x
    assert without(x, uid="user-1") is x
    spans = delivered(exporter, device)
    held = {k: v for k, v in spans["with"].attributes.items() if not k.startswith(("gpu_timed.", "code.", "hw."))}
    held.pop("thread.id")
    assert held == {"uid": "user-1", "shape": (2, 3), "v": "Tensor(shape=(), dtype=torch.float32)"}
    assert "user-1" not in [*spans["without"].attributes.values()]


@pytest.mark.parametrize(
    "broken",
    [
        lambda x: 1 / 0,
        dict,  # the wrong signature
        lambda x: None,  # no mapping
        lambda x: [1],  # no mapping
    ],
)
def test_an_attributes_function_that_fails_costs_its_attributes_only(broken, exporter, device):
    """A function for ``attributes=`` that fails is counted; the call runs and its span is exported."""

    @gpu_timed(name="work", attributes=broken)
    def work(x: int) -> int:
        return x

    assert work(7) == 7
    assert "work" in delivered(exporter, device)
    assert flush(1).counts["attributes_raised"] == 1


def test_span_names_come_from_code(exporter, device):
    """A thousand different arguments make one span name."""

    @gpu_timed(attributes=lambda uid: {"uid": uid})
    def work(uid: str) -> None: ...

    configure(device_spans=False)
    for n in range(1_000):
        work(f"user-{n}")
    device.run_dry()
    assert flush(5)
    spans = exporter.get_finished_spans()
    assert len(spans) == 1_000
    assert {span.name for span in spans} == {"test_span_names_come_from_code.work"}


def test_renaming_leaves_the_record_and_the_device_span_alone(exporter, device):
    """``update_name`` renames the host span; record and device span keep the name of the site."""
    with capture() as records, gpu_span("work") as span:
        device.launch(1_000)
        span.update_name("GET /users/17")
    assert flush(5)
    assert {s.name for s in exporter.get_finished_spans()} == {"GET /users/17", "work [gpu]"}
    assert [record.name for record in records] == ["work"]
