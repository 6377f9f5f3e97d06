"""Every span arrives, once, whole: over HTTP and gRPC, by ``configure()`` and by the application's own provider."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections import Counter
from pathlib import Path

import pytest
from opentelemetry import trace
from receiver import Receiver, grpc_receiver, http_receiver

from gpu_timed import ConfigurationError, MissingExtraError, configure, flush, gpu_span, shutdown

CALLS = """
    set_up()
    device = fake_device()
    tracer = trace.get_tracer("app")
    decode = gpu_timed(name="decode", attributes={"model": "m", "heads": [1, 2], "rate": 0.5})(
        lambda: device.launch(2_000_001)
    )
    later = gpu_timed(name="later", sync="deferred")(lambda: device.launch(1_000_003))
    for number in range(20):
        with tracer.start_as_current_span(f"request {number}"):
            decode()
            later()
    @gpu_timed(name="fails")
    def fails():
        device.launch(1_000)
        raise ValueError("told to")
    try:
        fails()
    except ValueError:
        pass
    result = flush(20)
    answer(complete=result.complete, counts=dict(result.counts))
"""


def check(receiver: Receiver) -> None:
    """Hold what came of CALLS against what was done there."""
    assert receiver.once()
    assert Counter(span.name.partition(" ")[0] for span in receiver.spans) == {
        "request": 20,
        "decode": 40,
        "later": 40,
        "fails": 2,
    }
    by_id = {span.span_id: span for span in receiver.spans}
    for number in range(20):
        request = receiver.one(f"request {number}")
        assert (request.parent_id, request.scope) == ("", "app")
        inside = [span for span in receiver.spans if span.trace_id == request.trace_id and span is not request]
        assert Counter(span.name for span in inside) == {"decode": 1, "decode [gpu]": 1, "later": 1, "later [gpu]": 1}
        assert {span.scope for span in inside} == {"gpu_timed"}
    for gpu in [span for span in receiver.spans if span.name.endswith("[gpu]")]:
        host = by_id[gpu.parent_id]
        assert host.name == gpu.name.removesuffix(" [gpu]")
        assert gpu.within(host)
        told = host.attributes["gpu_timed.device.duration_ns"]
        assert gpu.end_ns - gpu.start_ns == told == gpu.attributes["gpu_timed.device.duration_ns"]
        if host.name != "fails":
            assert by_id[host.parent_id].name.startswith("request ")
    for name, least in (("decode [gpu]", 2_000_001), ("later [gpu]", 1_000_003)):
        durations = [span.end_ns - span.start_ns for span in receiver.named(name)]
        assert len(durations) == 20
        assert min(durations) >= least
        assert any(duration % 1_000 for duration in durations), "nanoseconds were lost on the way"
    decodes = receiver.named("decode")
    assert all(span.attributes["model"] == "m" for span in decodes)
    assert all(span.attributes["heads"] == (1, 2) for span in decodes)
    assert all(span.attributes["rate"] == 0.5 for span in decodes)
    assert sorted(span.attributes["gpu_timed.call.index"] for span in decodes) == list(range(20))
    assert all(span.within(by_id[span.parent_id]) for span in decodes)
    failed = receiver.one("fails")
    assert (failed.status, failed.attributes["error.type"], failed.events) == (2, "ValueError", ("exception",))


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_every_span_arrives_once_and_whole(protocol, door, program):
    """Parents, times to the nanosecond, attributes, scope, resource and status arrive as they were made."""
    with grpc_receiver() if protocol == "grpc" else http_receiver() as receiver:
        address = f"http://{receiver.endpoint}" if protocol == "grpc" else receiver.endpoint
        ended = program(
            CALLS,
            DOOR=door,
            OTEL_EXPORTER_OTLP_ENDPOINT=address,
            OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
            OTEL_SERVICE_NAME="llm",
            OTEL_RESOURCE_ATTRIBUTES="deployment.environment=test",
        )
    check(receiver)
    for span in receiver.spans:
        assert span.resource["service.name"] == "llm"
        assert span.resource["deployment.environment"] == "test"
        assert span.resource["telemetry.sdk.language"] == "python"
        assert span.resource.get("host.name") == (socket.gethostname() if door == "configure" else None)
    counts = ended.answer["counts"]
    assert ended.answer["complete"] is True
    assert counts["handed_over"] == 41
    if door == "configure":
        assert counts["batched"] == counts["exported"] == len(receiver.spans)
    assert ended.err == ""


def test_spans_arrive_compressed(door, program):
    """With ``OTEL_EXPORTER_OTLP_COMPRESSION=gzip`` every request is compressed, and holds the same."""
    with http_receiver() as receiver:
        program(CALLS, DOOR=door, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint, OTEL_EXPORTER_OTLP_COMPRESSION="gzip")
    check(receiver)
    assert set(receiver.encodings) == {"gzip"}


def test_a_collector_that_is_busy_gets_the_spans_later(door, program):
    """Requests answered 503 with ``Retry-After`` are sent again, and what they held arrives once."""
    busy = ("status", (503, {"Retry-After": "1"}))
    with http_receiver(answers=[busy, busy]) as receiver:
        ended = program(CALLS, DOOR=door, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint)
    check(receiver)
    assert receiver.requests >= 3
    assert len(receiver.turned_away) > 0
    assert ended.answer["complete"] is True
    assert "export_failed" not in ended.answer["counts"]
    assert ended.took_s > 2, "Retry-After was not waited for"


def test_a_grpc_collector_that_is_busy_gets_the_spans_later(door, program):
    """Requests answered UNAVAILABLE are sent again, and what they held arrives once."""
    with grpc_receiver(answers=[("status", ("UNAVAILABLE", None))]) as receiver:
        ended = program(
            CALLS,
            DOOR=door,
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://{receiver.endpoint}",
            OTEL_EXPORTER_OTLP_PROTOCOL="grpc",
        )
    check(receiver)
    assert len(receiver.turned_away) > 0
    assert ended.answer["complete"] is True


def test_a_refusal_is_counted_and_the_next_spans_arrive(program):
    """Spans refused with 400 are counted as failed, once; those made afterwards arrive."""
    with http_receiver(answers=[("status", (400, {}))]) as receiver:
        ended = program(
            """
            set_up()
            work = gpu_timed(name="work")(lambda: None)
            for _ in range(3):
                for _ in range(4):
                    work()
                result = flush(20)
                answer(complete=result.complete, counts=dict(result.counts))
            """,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
        )
    assert [told["complete"] for told in ended.answers] == [False, True, True]
    counts = ended.answers[-1]["counts"]
    assert (counts["batched"], counts["export_failed"], counts["exported"]) == (12, 4, 8)
    assert len(receiver.turned_away) == 4
    assert len(receiver.spans) == 8


def test_what_the_collector_says_it_rejected_is_not_counted_as_exported(program):
    """An answer of 200 that rejects some of the spans makes the flush false, once, and the counts say how many."""
    with http_receiver(answers=[("partial", 3), "ok"]) as receiver:
        ended = program(
            """
            set_up()
            work = gpu_timed(name="work")(lambda: 7)
            for _ in range(2):
                for _ in range(5):
                    work()
                result = flush(20)
                answer(complete=result.complete, counts=dict(result.counts))
            """,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            OTEL_BSP_SCHEDULE_DELAY="60000",
        )
    first, second = ended.answers
    assert (first["complete"], second["complete"]) == (False, True)
    assert (first["counts"]["exported"], first["counts"]["rejected"]) == (2, 3)
    assert (second["counts"]["exported"], second["counts"]["rejected"]) == (7, 3)
    assert ended.err.count("too many attributes") == 1


def test_a_redirection_is_no_delivery(program):
    """A proxy that answers with its log-in page's address has taken nothing, and nothing is claimed."""
    with http_receiver(always=("status", (302, {"Location": "http://login.invalid/"}))) as receiver:
        ended = program(
            """
            set_up()
            gpu_timed(name="work")(lambda: 7)()
            result = flush(20)
            answer(complete=result.complete, counts=dict(result.counts))
            """,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
        )
    assert ended.answer["complete"] is False
    assert ended.answer["counts"]["export_failed"] == 1
    assert "http://login.invalid/" in ended.err


# -- a request from outside (E1) --------------------------------------------------------------------------

SERVER = """
    import asyncio
    from opentelemetry import propagate
    from opentelemetry.trace import SpanKind
    set_up()
    device = fake_device()
    tracer = trace.get_tracer("server")
    @gpu_timed(name="decode", sync="deferred", attributes={"phase": "decode"})
    def decode():
        device.launch(1_000_000)
    async def handle(headers):
        caller = propagate.extract(headers)
        with tracer.start_as_current_span("POST /gen", context=caller, kind=SpanKind.SERVER):
            async with gpu_span("prefill", attributes={"phase": "prefill"}):
                device.launch(5_000_000)
                await asyncio.sleep(0.005)
            for _ in range(8):
                decode()
                await asyncio.sleep(0)
    async def serve():
        flags = "01", "01", "00"
        await asyncio.gather(*(
            handle({"traceparent": f"00-{number:032x}-{number:016x}-{flag}"}) for number, flag in enumerate(flags, 1)
        ))
    asyncio.run(serve())
    answer(complete=flush(20).complete)
"""


def test_device_time_stands_in_the_callers_trace(door, program):
    """With a W3C ``traceparent`` one trace holds client, request, prefill and decode; an unsampled one has none."""
    with http_receiver() as receiver:
        ended = program(SERVER, DOOR=door, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint)
    assert ended.answer == {"complete": True}
    assert receiver.once()
    assert {span.trace_id for span in receiver.spans} == {f"{1:032x}", f"{2:032x}"}, "the third was not sampled"
    for number in (1, 2):
        held = [span for span in receiver.spans if span.trace_id == f"{number:032x}"]
        assert Counter(span.name for span in held) == {
            "POST /gen": 1,
            "prefill": 1,
            "prefill [gpu]": 1,
            "decode": 8,
            "decode [gpu]": 8,
        }
        (request,) = [span for span in held if span.name == "POST /gen"]
        assert (request.parent_id, request.kind) == (f"{number:016x}", 2)
        phases = [span for span in held if span.parent_id == request.span_id]
        assert Counter(span.attributes["phase"] for span in phases) == {"prefill": 1, "decode": 8}
        for gpu in [span for span in held if span.name.endswith("[gpu]")]:
            (host,) = [span for span in phases if span.span_id == gpu.parent_id]
            assert gpu.within(host)


# -- configure() ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["{}", "http://{}", "http://{}/"])
def test_grpc_sends_to_host_and_port(written, device):
    """``endpoint=`` for gRPC is a host and a port, with or without a scheme; on this machine nothing is encrypted."""
    with grpc_receiver() as receiver:
        configure(
            exporter="otlp", protocol="grpc", endpoint=written.format(receiver.endpoint), headers={"X-Api-Key": "k 1"}
        )
        with gpu_span("work"):
            device.launch(1_000)
        result = shutdown(10)
    assert result, result
    assert result.counts["exported"] == 2
    assert receiver.one("work [gpu]").parent_id == receiver.one("work").span_id
    assert receiver.one("work").headers["x-api-key"] == "k 1"


def test_headers_in_code_go_over_those_of_the_environment(device, monkeypatch):
    """``headers=`` is put over ``OTEL_EXPORTER_OTLP_HEADERS``, name by name, whatever the case of the letters."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=environment,tenant=7")
    with http_receiver() as receiver:
        configure(exporter="otlp", endpoint=receiver.endpoint, headers={"Api-Key": "code"})
        with gpu_span("work"):
            pass
        assert shutdown(10)
    headers = receiver.one("work").headers
    assert (headers["api-key"], headers["tenant"]) == ("code", "7")


def test_an_encrypted_grpc_endpoint_is_not_sent_to_in_the_clear(device, monkeypatch):
    """``https://`` means TLS: a receiver that speaks plain gRPC gets nothing, and the flush is false."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with grpc_receiver() as receiver:
        configure(exporter="otlp", protocol="grpc", endpoint=f"https://{receiver.endpoint}")
        with gpu_span("work"):
            pass
        assert not flush(3)
        assert "exported" not in shutdown(1).counts
    assert receiver.requests == 0


@pytest.mark.parametrize(
    ("variables", "protocol"),
    [
        ({}, "http"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": ""}, "http"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "grpc"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, "http"),
    ],
)
def test_the_protocol_is_opentelemetrys_variable(variables, protocol, device, monkeypatch):
    """Without ``protocol=`` the variables say it, that of traces first; without any it is HTTP."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with http_receiver() as http, grpc_receiver() as grpc:
        configure(exporter="otlp", endpoint=grpc.endpoint if protocol == "grpc" else http.endpoint)
        with gpu_span("work"):
            pass
        assert shutdown(10)
    assert (len(http.named("work")), len(grpc.named("work"))) == ((0, 1) if protocol == "grpc" else (1, 0))


def test_the_protocol_in_code_goes_before_the_environment(device, monkeypatch):
    """``protocol=`` wins over the variables, even over one that cannot be used."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon")
    with http_receiver() as receiver:
        configure(exporter="otlp", protocol="http/protobuf", endpoint=receiver.endpoint)
        with gpu_span("work"):
            pass
        assert shutdown(10)
    assert len(receiver.named("work")) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"protocol": "http/proto"}, "did you mean 'http/protobuf'?"),
        ({"protocol": ["grpc"]}, "unknown protocol"),
        ({"protocol": "grpc", "endpoint": "localhost"}, "needs a host and a port: localhost:4317"),
        ({"protocol": "grpc", "endpoint": "http://localhost"}, "needs a host and a port: localhost:4317"),
        ({"protocol": "grpc", "endpoint": "ftp://localhost:4317"}, "needs a host and a port"),
        ({"protocol": "grpc", "endpoint": "localhost:port"}, "is not the address of a collector"),
        ({"protocol": "grpc", "endpoint": 4317}, "is not the address of a collector"),
        (
            {"protocol": "grpc", "endpoint": "http://h:4317/v1/traces"},
            "has a path, which gRPC does not. Write 'h:4317",
        ),
        ({"endpoint": "http://localhost:99999"}, "is not the address of a collector"),
        ({"endpoint": 4318}, "is not the address of a collector"),
        ({"endpoint": "http://"}, "needs a scheme and a host"),
        ({"headers": "api-key=1"}, "headers must be a mapping of names to texts, not str"),
        ({"headers": {"api-key": 1}}, "headers must be a mapping of names to texts; of 'api-key' one is not a text"),
        ({"headers": {"a": "x\r\nb: y"}}, "the header 'a' is empty or holds a line break"),
        ({"headers": {"": "x"}}, "the header '' is empty or holds a line break"),
    ],
)
def test_what_cannot_be_sent_with_is_refused(options, says):
    """A protocol, endpoint or header that cannot work is refused with the fix, and leaves no provider behind."""
    with pytest.raises(ConfigurationError) as caught:
        configure(exporter="otlp", **options)
    assert says in str(caught.value)
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


@pytest.mark.parametrize("option", ["protocol", "headers"])
def test_options_of_otlp_belong_to_otlp(option):
    """``protocol=`` and ``headers=`` need ``exporter="otlp"``."""
    value = {"protocol": "grpc", "headers": {"a": "b"}}[option]
    with pytest.raises(ConfigurationError, match=f"{option}= needs exporter="):
        configure(**{option: value})
    with pytest.raises(ConfigurationError, match=f"{option}= belongs to exporter='otlp', not to 'console'"):
        configure(exporter="console", **{option: value})


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_a_protocol_in_the_environment_that_cannot_be_used_is_named(variable, monkeypatch):
    """A variable that asks for a protocol there is not is named in the error, with the choices."""
    monkeypatch.setenv(variable, "http/json")
    with pytest.raises(ConfigurationError) as caught:
        configure(exporter="otlp")
    assert str(caught.value).startswith(f"{variable}: unknown protocol 'http/json'")
    assert "'grpc', 'http/protobuf'" in str(caught.value)


def test_grpc_without_its_package_names_the_pip_command(monkeypatch):
    """Without gRPC's exporter ``protocol="grpc"`` raises MissingExtraError with an extra that there is."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(MissingExtraError) as caught:
        configure(exporter="otlp", protocol="grpc")
    assert "pip install 'gpu-timed[otlp-grpc]'" in str(caught.value)
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    (extra,) = re.findall(r"^otlp-grpc = \[(.*)\]$", text, re.MULTILINE)
    assert "opentelemetry-exporter-otlp-proto-grpc" in extra
    assert "opentelemetry-exporter-otlp-proto-grpc" in str(caught.value)


# -- the resource (E2) ------------------------------------------------------------------------------------


def resource(**options: str) -> dict[str, object]:
    """Return the resource under ``configure(exporter="none", …)``."""
    configure(exporter="none", **options)
    return dict(trace.get_tracer_provider().resource.attributes)


def test_the_resource_names_the_process():
    """Process, program and Python stand in the resource; the command line and the user's name do not."""
    held = resource()
    assert held["process.pid"] == os.getpid()
    assert held["process.executable.path"] == sys.executable
    assert held["process.runtime.name"] == sys.implementation.name
    assert held["process.runtime.version"].startswith("3.")
    assert held["service.instance.id"]
    assert not {"process.command_line", "process.command_args", "process.owner"} & set(held)
    assert not any(name.startswith("gpu_timed.") for name in held)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, (3, 1, 8)),
        ({"SLURM_PROCID": "5", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16"}, (5, 0, 16)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, (2, 2, 4)),
        # torchrun, started once on each machine by Slurm
        ({"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (9, 1, 16)),
        ({"RANK": "0"}, (0, None, None)),
        ({"RANK": "", "LOCAL_RANK": "first", "WORLD_SIZE": "-1"}, (None, None, None)),
    ],
)
def test_the_resource_names_the_rank(variables, expected, monkeypatch):
    """What torchrun, Slurm or Open MPI say of the rank stands in the resource, and no process group is made."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    held = resource()
    names = ("gpu_timed.rank", "gpu_timed.local_rank", "gpu_timed.world_size")
    assert tuple(held.get(name) for name in names) == expected


def test_the_environment_goes_before_what_was_found_out(monkeypatch):
    """``OTEL_RESOURCE_ATTRIBUTES`` wins over every attribute that gpu_timed finds by itself."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv(
        "OTEL_RESOURCE_ATTRIBUTES", "gpu_timed.rank=seven,process.pid=1,service.instance.id=i-1,host.id=h"
    )
    held = resource()
    assert held["gpu_timed.rank"] == "seven"
    assert held["process.pid"] == "1"
    assert held["service.instance.id"] == "i-1"
    assert held["host.id"] == "h"


def test_neither_rank_nor_resource_loads_a_runtime(program):
    """``configure()`` under torchrun's variables imports no torch and touches no device."""
    ended = program(
        """
        configure(exporter="none")
        held = trace.get_tracer_provider().resource.attributes
        loaded = [name for name in ("torch", "numba", "cupy", "jax") if name in sys.modules]
        answer(rank=held["gpu_timed.rank"], loaded=loaded)
        """,
        RANK="1",
        LOCAL_RANK="1",
        WORLD_SIZE="2",
    )
    assert ended.answer == {"rank": 1, "loaded": []}
