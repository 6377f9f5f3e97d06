"""Each example runs as its first lines say, prints what it promises, and exports the spans that it is about."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"  # the W3C recommendation's own example
pytestmark = pytest.mark.timeout(120)


@dataclass
class Exported:
    """One span as it was exported."""

    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    service: str
    attributes: dict[str, Any] = field(default_factory=dict)


def run(name: str, folder: Path, *, driver: str | None = None, code: int = 0, **environment: str) -> str:
    """Run an example as a user does, in *folder*, and return what it printed."""
    held = {key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "GPU_TIMED_", "NUMBA_"))}
    held.pop("TRITON_INTERPRET", None)
    # Warnings that are the example's own fail it; those of the libraries it uses are theirs.
    path = os.pathsep.join(part for part in (str(ROOT / "src"), held.get("PYTHONPATH", "")) if part)
    held |= {"HOME": str(folder), "PYTHONWARNINGS": "error:::__main__", "PYTHONPATH": path, **environment}
    command = [sys.executable, str(EXAMPLES / name)] if driver is None else [sys.executable, "-c", driver]
    done = subprocess.run(command, cwd=folder, env=held, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "gpu_timed:" not in done.stderr, done.stderr  # our own faults are logged so
    return done.stdout


def plain(value: dict[str, Any]) -> Any:
    """Return the value of an attribute in OTLP's JSON."""
    ((kind, held),) = value.items()
    if kind == "arrayValue":
        return [plain(one) for one in held["values"]]
    return int(held) if kind == "intValue" else held


def exported(folder: Path) -> list[Exported]:
    """Return the host spans that the example wrote. Spans of a device, where there is one, lie inside them."""
    found = []
    for file in folder.glob("gpu_timed-spans*.jsonl"):
        for group in (group for line in file.read_text().splitlines() for group in json.loads(line)["resourceSpans"]):
            resource = {one["key"]: plain(one["value"]) for one in group["resource"]["attributes"]}
            assert resource["host.name"]  # or Jaeger takes the device's clock for another machine's
            found += [
                Exported(
                    name=span["name"],
                    trace=span["traceId"],
                    id=span["spanId"],
                    parent=span.get("parentSpanId", ""),
                    start=int(span["startTimeUnixNano"]),
                    end=int(span["endTimeUnixNano"]),
                    service=resource["service.name"],
                    attributes={one["key"]: plain(one["value"]) for one in span.get("attributes", ())},
                )
                for scope in group["scopeSpans"]
                for span in scope["spans"]
            ]
    return [span for span in found if not span.name.endswith("[gpu]")]


def named(spans: list[Exported], name: str) -> list[Exported]:
    return [span for span in spans if span.name == name]


def has_device_time_or_says_why(span: Exported, *reasons: str) -> None:
    """A time that was not measured is never a number."""
    duration = span.attributes.get("gpu_timed.device.duration_ns")
    missing = span.attributes.get("gpu_timed.device.missing")
    assert (duration is not None and duration > 0) != (missing in reasons), span


@pytest.fixture
def jsonl() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("opentelemetry.exporter.otlp.json.file")


def test_every_example_is_run_here_and_stays_short() -> None:
    """One idea a file, 30 to 80 lines, and none without a test."""
    tests = Path(__file__).read_text()
    found = sorted(EXAMPLES.glob("*.py"))
    assert len(found) == 8
    for example in found:
        assert f'run("{example.name}", tmp_path' in tests, example
        assert 30 <= len(example.read_text().splitlines()) <= 80, example


@pytest.mark.usefixtures("jsonl")
def test_decorate(tmp_path: Path) -> None:
    """Three calls, three records told, three spans in the file, and the first is marked as the first."""
    told = run("decorate.py", tmp_path)
    spans = named(exported(tmp_path), "infer")
    assert [span.attributes["gpu_timed.call.index"] for span in spans] == [0, 1, 2]
    assert [span.attributes.get("gpu_timed.first_call") for span in spans] == [True, None, None]
    assert re.findall(r"^infer, call (\d)( \(the first\))?", told, re.MULTILINE) == [
        ("0", " (the first)"),
        ("1", ""),
        ("2", ""),
    ]
    for span, milliseconds in zip(spans, re.findall(r"the host took +([\d.]+) ms", told), strict=True):
        assert span.attributes["gpu_timed.launch.duration_ns"] / 1e6 == pytest.approx(float(milliseconds), abs=0.001)
        assert span.attributes["model"] == "two-layers"
        assert Path(span.attributes["code.file.path"]).name == "decorate.py"
        has_device_time_or_says_why(span, "no_device")


@pytest.mark.usefixtures("jsonl")
def test_sentence_embeddings(tmp_path: Path) -> None:
    """A sentence's nearest neighbour is of its own topic, without a network, and each batch is a span."""
    pytest.importorskip("wordllama")
    nowhere = "http://127.0.0.1:1"  # for a library that would download what it should bring
    told = run("sentence_embeddings.py", tmp_path, HTTPS_PROXY=nowhere, HTTP_PROXY=nowhere, HF_HUB_OFFLINE="1")
    source = (EXAMPLES / "sentence_embeddings.py").read_text()
    topics = {
        text: topic
        for topic, texts in re.findall(r'^    "(\w+)": \[(.*)\],$', source, re.MULTILINE)
        for text in re.findall(r'"([^"]+)"', texts)
    }
    pairs = re.findall(r"^(-?[\d.]+)  (.+?)  ~  (.+)$", told, re.MULTILINE)
    assert sorted(text for _, text, _ in pairs) == sorted(topics)
    assert len(topics) == 12
    for score, text, nearest in pairs:
        assert text != nearest
        assert topics[text] == topics[nearest], (text, nearest)
        assert 0 < float(score) < 1
    spans = named(exported(tmp_path), "encode")
    assert [span.attributes["batch"] for span in spans] == [4, 4, 4]
    assert told.count("encode: 4 texts") == 3
    assert told.endswith("delivered\n")
    for span in spans:
        assert span.attributes["code.function.name"].endswith("Encoder.encode")
        has_device_time_or_says_why(span, "no_device")


@pytest.mark.usefixtures("jsonl")
def test_fastapi_service(tmp_path: Path) -> None:
    """One trace from the client down to each token."""
    pytest.importorskip("fastapi")
    pytest.importorskip("opentelemetry.instrumentation.fastapi")
    told = run("fastapi_service.py", tmp_path)
    spans = exported(tmp_path)
    (client,) = named(spans, "client")
    assert f"4 tokens in trace {client.trace}" in told
    assert told.endswith("\ndelivered\n")
    check_request(spans, trace=client.trace, caller=client.id)


@pytest.mark.usefixtures("jsonl")
def test_fastapi_service_takes_the_trace_of_a_caller_elsewhere(tmp_path: Path) -> None:
    """The trace and the parent are those in the caller's W3C header; a request without one begins its own."""
    pytest.importorskip("fastapi")
    pytest.importorskip("opentelemetry.instrumentation.fastapi")
    driver = f"""
import asyncio, httpx, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import fastapi_service as service

async def drive():
    transport = httpx.ASGITransport(service.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        for headers in ({{"traceparent": "00-{TRACE}-{CALLER}-01"}}, {{}}):
            answer = await client.post("/generate?tokens=4", headers=headers)
            assert answer.status_code == 200 and len(answer.text.split()) == 4, answer.text
            assert all(0 <= int(token) < service.WIDTH for token in answer.text.split())
    print("delivered" if service.flush(10) else "not delivered")

asyncio.run(drive())
"""
    assert run("fastapi_service.py", tmp_path, driver=driver) == "delivered\n"
    spans = exported(tmp_path)
    check_request([span for span in spans if span.trace == TRACE], trace=TRACE, caller=CALLER)
    others = [span for span in spans if span.trace != TRACE]
    check_request(others, trace=others[0].trace, caller="")


def check_request(spans: list[Exported], *, trace: str, caller: str) -> None:
    """The request is the caller's child, prefill and stream are the request's, and each decode step is stream's."""
    assert {span.trace for span in spans} == {trace}
    (request,), (prefill,), (stream,) = (named(spans, name) for name in ("POST /generate", "prefill", "stream"))
    steps = named(spans, "decode")
    assert request.parent == caller
    assert prefill.parent == stream.parent == request.id
    assert [step.parent for step in steps] == [stream.id] * 4
    assert request.start <= prefill.start <= prefill.end <= stream.start
    assert all(stream.start <= step.start and step.end <= stream.end for step in steps)
    assert stream.attributes["gpu_timed.resumptions"] > 4  # the body was streamed: a token, and it was suspended
    for span in (prefill, stream, *steps):
        assert span.attributes["gpu_timed.sync.policy"] == "deferred"
        has_device_time_or_says_why(span, "no_device")


@pytest.mark.usefixtures("jsonl")
def test_production(tmp_path: Path) -> None:
    """Whole traces are sampled, one step in ten is recorded, and what is said to be delivered is in the file."""
    told = run("production.py", tmp_path)
    spans = exported(tmp_path)
    requests = named(spans, "request")
    assert 5 <= len(requests) <= 60  # of 100, at 0.25: fewer or more in less than one run in a million
    for request in requests:
        (infer,) = (span for span in named(spans, "infer") if span.trace == request.trace)
        steps = [span for span in named(spans, "step") if span.trace == request.trace]
        assert infer.parent == request.id
        assert [step.parent for step in steps] == [infer.id] * 2
        assert {step.attributes["gpu_timed.call.index"] % 10 for step in steps} == {0}
        assert infer.attributes["gpu_timed.sync.policy"] == "deferred"
    assert len(spans) == 4 * len(requests)
    assert "delivered: True, pending: 0" in told
    counts = {kind: int(count) for kind, count in re.findall(r"^  (\w+) +(\d+)$", told, re.MULTILINE)}
    assert counts["exported"] == counts["batched"] >= len(spans)  # more where there are device spans
    assert counts["handed_over"] == 3 * len(requests)
    assert set(counts) == {"exported", "batched", "handed_over"}, "something was dropped, lost or refused"


@pytest.mark.usefixtures("jsonl")
def test_production_takes_its_sampling_from_the_deployment(tmp_path: Path) -> None:
    """A sampler set outside is the one that is used."""
    told = run("production.py", tmp_path, OTEL_TRACES_SAMPLER="always_off", OTEL_TRACES_SAMPLER_ARG="")
    assert exported(tmp_path) == []
    assert "delivered: True" in told


@pytest.mark.usefixtures("jsonl")
def test_worker_pool(tmp_path: Path) -> None:
    """Work in threads and in processes lies under the span that handed it out."""
    told = run("worker_pool.py", tmp_path)
    spans = exported(tmp_path)
    (threads,), (processes,) = named(spans, "threads"), named(spans, "processes")
    parents = {span.attributes["batch"]: (span.trace, span.parent, span.service) for span in named(spans, "embed")}
    assert parents == {
        1: (threads.trace, threads.id, "parent"),
        2: (threads.trace, threads.id, "parent"),
        3: (processes.trace, processes.id, "worker"),
        4: (processes.trace, processes.id, "worker"),
    }
    assert "threads: [4096.0, 8192.0]" in told
    assert "processes: delivered [True, True]" in told
    assert f"00-{processes.trace}-{processes.id}-" in told
    assert len(list(tmp_path.glob("gpu_timed-spans-*.jsonl"))) in (2, 3)  # a quick worker may take both tasks


class Receiver(HTTPServer):
    """Takes OTLP over HTTP, and keeps it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.requests: list[Any] = []
        self.paths: list[str] = []


class Answer(BaseHTTPRequestHandler):
    """Answers one export."""

    server: Receiver

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.paths.append(self.path)
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing on standard error."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    with Receiver() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.05,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.mark.usefixtures("jsonl")
def test_to_jaeger(tmp_path: Path, receiver: Receiver) -> None:
    """The receiver has what the example says it took, under one trace, with the host named."""
    endpoint = f"http://127.0.0.1:{receiver.server_port}"
    told = run("to_jaeger.py", tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, NO_PROXY="127.0.0.1")
    groups = [group for request in receiver.requests for group in request.resource_spans]
    spans = [span for group in groups for scope in group.scope_spans for span in scope.spans]
    assert set(receiver.paths) == {"/v1/traces"}
    assert f"{len(spans)} spans taken by {endpoint}" in told
    assert "http://localhost:16686" in told
    for group in groups:
        resource = {one.key: one.value.string_value for one in group.resource.attributes}
        assert resource["service.name"] == "to-jaeger"
        assert resource["host.name"]
    hosts = [span for span in spans if not span.name.endswith("[gpu]")]
    assert sorted(span.name for span in hosts) == ["decode", "decode", "decode", "generate", "prefill"]
    assert len({span.trace_id for span in spans}) == 1
    (generate,) = (span for span in hosts if span.name == "generate")
    assert {span.parent_span_id for span in hosts if span is not generate} == {generate.span_id}
    # What the text tells to search for is there.
    firsts = {span.name for span in hosts for one in span.attributes if one.key == "gpu_timed.first_call"}
    assert firsts == {"generate", "prefill", "decode"}


@pytest.mark.usefixtures("jsonl")
def test_to_jaeger_says_so_when_nothing_listens(tmp_path: Path) -> None:
    """It ends by itself, with a failure and a sentence that names the address."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    told = run("to_jaeger.py", tmp_path, code=1, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1", NO_PROXY="127.0.0.1")
    said = re.fullmatch(
        r"0 of (\d+) spans were taken by http://127\.0\.0\.1:1 within 3 s: is Jaeger, .* there\?\n", told
    )
    assert said, told
    assert int(said[1]) >= 5  # more where there are device spans


@pytest.mark.usefixtures("jsonl")
def test_kernels(tmp_path: Path) -> None:
    """A span for each launch; Triton's only where Triton is; simulated time is not device time."""
    pytest.importorskip("numba.cuda")
    told = run("kernels.py", tmp_path)
    spans = exported(tmp_path)
    expected = {"numba add"}
    gpu = Path("/dev/nvidiactl").exists()
    if importlib.util.find_spec("triton") and (not gpu or importlib.import_module("torch").cuda.is_available()):
        expected.add("triton add")
    assert {span.name for span in spans} == expected
    for name in expected:
        mine = named(spans, name)
        assert [span.attributes["gpu_timed.call.index"] for span in mine] == [0, 1]
        assert f"{name.split()[0]}: 2046" in told  # 1023 + 1023: the kernel did run
        for span in mine:
            has_device_time_or_says_why(span, "simulated")
            duration = span.attributes.get("gpu_timed.device.duration_ns")
            device = "simulated" if duration is None else f"{duration} ns"
            launch = span.attributes["gpu_timed.launch.duration_ns"]
            index = span.attributes["gpu_timed.call.index"]
            assert f"{name}, launch {index}: host {launch} ns, device {device}" in told


def test_compare_modes(tmp_path: Path) -> None:
    """Both comparisons end in a verdict or say why there is none, and the page stands by itself."""
    for package in ("torch", "scipy", "matplotlib"):
        pytest.importorskip(package)
    told = run("compare_modes.py", tmp_path)
    for said in ("batch = 1\n", "batch = 256\n", "the same as a page: gpu_timed-compare.html"):
        assert said in told
    assert re.search(r"cuda_graph is \w+ than eager|No verdict on cuda_graph: .+", told)
    assert re.search(
        r"^row by row is (slower|faster|same|ambiguous)\b.*|^It cannot be told whether row by row .+",
        told,
        re.MULTILINE,
    )
    page = (tmp_path / "gpu_timed-compare.html").read_text(encoding="utf-8")
    assert page.count("</svg>") >= 4
    assert not re.search(r"""(?:src|href)=["']http""", page)
