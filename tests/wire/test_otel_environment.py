"""OpenTelemetry's own variables mean what OpenTelemetry says, by ``configure()`` and by the application's provider."""

from __future__ import annotations

from collections import Counter

import pytest
from receiver import http_receiver

CALLS = """
    from opentelemetry import context
    set_up()
    device = fake_device()
    work = gpu_timed(name="work")(lambda: device.launch(1_000))
    def under(trace_id, flags):
        far = trace.SpanContext(trace_id, 1, is_remote=True, trace_flags=trace.TraceFlags(flags))
        token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(far)))
        work()
        context.detach(token)
    for number in range(60):
        work()
    for number in range(1, 11):
        under(number, 1)
        under(number + (1 << 100), 0)
    result = flush(20)
    answer(complete=result.complete, counts=dict(result.counts))
"""
PLAIN = """
    set_up()
    work = gpu_timed(name="work", attributes={f"a{number}": number for number in range(40)})(lambda: 7)
    for _ in range(40):
        assert work() == 7
    began = time.monotonic()
    result = flush(20)
    answer(complete=result.complete, counts=dict(result.counts), took=time.monotonic() - began)
"""


@pytest.mark.parametrize(
    ("sampler", "arg", "roots", "sampled", "unsampled"),
    [
        ("always_on", "", 60, 10, 10),
        ("always_off", "", 0, 0, 0),
        ("traceidratio", "1", 60, 10, 10),
        ("traceidratio", "0", 0, 0, 0),
        ("traceidratio", "0.5", None, 10, 10),  # the parents' trace ids are low ones, which a ratio keeps
        ("parentbased_always_on", "", 60, 10, 0),
        ("parentbased_always_off", "", 0, 10, 0),
        ("parentbased_traceidratio", "0", 0, 10, 0),
        ("parentbased_traceidratio", "0.5", None, 10, 0),
        ("", "", 60, 10, 0),
    ],
)
def test_the_sampler_is_opentelemetrys(sampler, arg, roots, sampled, unsampled, door, program):  # noqa: PLR0917
    """``OTEL_TRACES_SAMPLER`` and its argument decide which calls are recorded, roots and children."""
    with http_receiver() as receiver:
        ended = program(
            CALLS,
            DOOR=door,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            OTEL_TRACES_SAMPLER=sampler,
            OTEL_TRACES_SAMPLER_ARG=arg,
        )
    hosts = receiver.named("work")
    children = [span for span in hosts if span.parent_id]
    found = Counter("unsampled" if int(span.trace_id, 16) >> 100 else "sampled" for span in children)
    assert (found["sampled"], found["unsampled"]) == (sampled, unsampled)
    if roots is None:
        assert 0 < len(hosts) - len(children) < 60
    else:
        assert len(hosts) - len(children) == roots
    assert {span.parent_id for span in receiver.named("work [gpu]")} == {span.span_id for span in hosts}
    assert ended.answer["complete"] is True
    assert ended.answer["counts"].get("handed_over", 0) == len(hosts)


def test_a_disabled_sdk_exports_nothing_and_calls_go_on(door, program):
    """Under ``OTEL_SDK_DISABLED=true`` decorated calls return as ever, and nothing is measured, sent or lost."""
    with http_receiver() as receiver:
        ended = program(CALLS, DOOR=door, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint, OTEL_SDK_DISABLED="true")
    assert receiver.requests == 0
    assert ended.answer == {"complete": True, "counts": {}}
    assert ended.err == ""


def test_the_resource_is_as_the_variables_say(door, program):
    """``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` are in the resource of every span; the name goes first."""
    with http_receiver() as receiver:
        program(
            PLAIN,
            DOOR=door,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            OTEL_SERVICE_NAME="llm",
            OTEL_RESOURCE_ATTRIBUTES="service.name=lesser,host.name=pod-7,team=a%20b",
        )
    assert len(receiver.named("work")) == 40
    for span in receiver.spans:
        assert (span.resource["service.name"], span.resource["host.name"]) == ("llm", "pod-7")
        assert span.resource["team"] == "a b"


@pytest.mark.parametrize(
    ("variable", "path", "arrives_at"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "", "/v1/traces"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "/", "/v1/traces"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "/tenant", "/tenant/v1/traces"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "/take/these", "/take/these"),
    ],
)
def test_the_endpoint_is_a_base_or_a_whole_one(variable, path, arrives_at, door, program):
    """``OTEL_EXPORTER_OTLP_ENDPOINT`` gets ``/v1/traces`` put on; ``…_TRACES_ENDPOINT`` is used as it is."""
    with http_receiver() as receiver:
        program(PLAIN, DOOR=door, **{variable: receiver.endpoint + path})
    assert set(receiver.paths) == {arrives_at}
    assert len(receiver.named("work")) == 40


def test_the_endpoint_of_traces_goes_first(door, program):
    """``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` wins over ``OTEL_EXPORTER_OTLP_ENDPOINT``."""
    with http_receiver() as all_signals, http_receiver() as traces:
        program(
            PLAIN,
            DOOR=door,
            OTEL_EXPORTER_OTLP_ENDPOINT=all_signals.endpoint,
            OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=traces.endpoint + "/v1/traces",
        )
    assert (all_signals.requests, len(traces.named("work"))) == (0, 40)


def test_headers_are_sent(door, program):
    """``OTEL_EXPORTER_OTLP_HEADERS`` stand in every request, decoded."""
    with http_receiver() as receiver:
        program(
            PLAIN,
            DOOR=door,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            OTEL_EXPORTER_OTLP_HEADERS="api-key=k%201,tenant=7",
        )
    assert len(receiver.named("work")) == 40
    assert {(span.headers["api-key"], span.headers["tenant"]) for span in receiver.spans} == {("k 1", "7")}


def test_the_timeout_of_an_export_is_kept(door, program):
    """With ``OTEL_EXPORTER_OTLP_TIMEOUT=1`` a silent collector is given up after a second, not after ten."""
    with http_receiver(always="silent") as receiver:
        ended = program(PLAIN, DOOR=door, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint, OTEL_EXPORTER_OTLP_TIMEOUT="1")
    assert ended.answer["took"] < 7
    if door == "configure":
        assert ended.answer["complete"] is False
        assert ended.answer["counts"]["export_failed"] == 40


def test_limits_of_a_span_are_kept(door, program):
    """``OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT`` bounds what stands on a span, ours and the user's together."""
    with http_receiver() as receiver:
        program(PLAIN, DOOR=door, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint, OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT="12")
    assert {len(span.attributes) for span in receiver.named("work")} == {12}


def test_the_size_of_a_batch_is_kept(door, program):
    """``OTEL_BSP_MAX_EXPORT_BATCH_SIZE`` bounds the spans of one request."""
    with http_receiver() as receiver:
        program(PLAIN, DOOR=door, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint, OTEL_BSP_MAX_EXPORT_BATCH_SIZE="10")
    assert len(receiver.named("work")) == 40
    assert receiver.requests >= 4
    assert max(receiver.sizes) <= 10


@pytest.mark.parametrize(("delay_ms", "arrives"), [("50", True), ("60000", False)])
def test_the_delay_of_a_batch_is_kept(delay_ms, arrives, door, program):
    """``OTEL_BSP_SCHEDULE_DELAY`` says when spans are sent that nobody flushes."""
    with http_receiver() as receiver:
        ended = program(
            """
            set_up()
            gpu_timed(name="work")(lambda: 7)()
            time.sleep(1.5)
            print("gone", flush=True)
            os._exit(0)
            """,
            DOOR=door,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            OTEL_BSP_SCHEDULE_DELAY=delay_ms,
        )
    assert "gone" in ended.out
    assert bool(receiver.spans) is arrives


def test_the_size_of_the_queue_is_kept_and_what_it_drops_is_counted(door, program):
    """``OTEL_BSP_MAX_QUEUE_SIZE`` bounds what waits: the oldest are dropped, and ``configure()`` counts them."""
    with http_receiver(always=("slow", 1.0)) as receiver:
        ended = program(
            """
            set_up()
            work = gpu_timed(name="work")(lambda: 7)
            for _ in range(40):
                work()
            current.tracer().resolver.flush(10)
            result = flush(20)
            answer(complete=result.complete, counts=dict(result.counts))
            """,
            DOOR=door,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            OTEL_BSP_MAX_QUEUE_SIZE="15",
            OTEL_BSP_MAX_EXPORT_BATCH_SIZE="15",
            OTEL_BSP_SCHEDULE_DELAY="60000",
        )
    counts = ended.answer["counts"]
    assert counts["handed_over"] == 40
    assert 15 <= len(receiver.spans) <= 30, "15 on the way and 15 that wait; the rest was dropped"
    if door == "configure":
        assert counts["exported"] + counts["dropped_in_batch"] == 40
        assert counts["exported"] == len(receiver.spans)
        assert ended.answer["complete"] is False


def test_the_variable_of_exporters_is_for_auto_instrumentation_alone(program):
    """``OTEL_TRACES_EXPORTER`` does not overrule the exporter that the code asks for."""
    with http_receiver() as receiver:
        ended = program(PLAIN, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint, OTEL_TRACES_EXPORTER="console")
    assert len(receiver.named("work")) == 40
    assert '"name": "work"' not in ended.out


def test_the_application_may_come_by_opentelemetry_instrument(program):
    """Set up by ``opentelemetry-instrument``'s own configurator, gpu_timed's spans go where it sends them."""
    with http_receiver() as receiver:
        program(
            """
            from opentelemetry.sdk._configuration import _OTelSDKConfigurator
            work = gpu_timed(name="work")(lambda: 7)
            work()  # before: measured, and sent nowhere
            _OTelSDKConfigurator().configure()
            for _ in range(5):
                work()
            """,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            OTEL_TRACES_EXPORTER="otlp_proto_http",
            OTEL_METRICS_EXPORTER="none",
            OTEL_LOGS_EXPORTER="none",
        )
    assert len(receiver.named("work")) == 5
