"""Receivers of OTLP on this machine, over HTTP and gRPC, that parse what comes and answer as they are told."""

from __future__ import annotations

import contextlib
import gzip
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="no exporters here")

Answer = str | tuple[str, Any]
"""``ok`` · ``silent`` (take the request, never answer) · ``reset`` (tear the connection down) · (``slow``, seconds) ·
(``partial``, n) (200, with n spans rejected) · (``status``, (code, headers)); over gRPC a code is a name."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A span as it came, with all that stood around it."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: int
    status: int
    attributes: Mapping[str, Any]
    events: tuple[str, ...]
    scope: str
    resource: Mapping[str, Any]
    headers: Mapping[str, str]
    body_bytes: int

    def within(self, other: Arrived) -> bool:
        """Whether this span lies inside *other*."""
        return other.start_ns <= self.start_ns <= self.end_ns <= other.end_ns


@dataclass
class Receiver:
    """What came, and what is answered."""

    endpoint: str = ""
    answers: list[Answer] = field(default_factory=list)
    """What the next requests are answered, each once; afterwards :attr:`always`."""
    always: Answer = "ok"
    requests: int = 0
    connections: int = 0
    sizes: list[int] = field(default_factory=list)
    """How many spans each request held."""
    paths: list[str] = field(default_factory=list)
    encodings: list[str] = field(default_factory=list)
    spans: list[Arrived] = field(default_factory=list)
    """The spans of the requests that were answered with success."""
    turned_away: list[Arrived] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, body: bytes, headers: Mapping[str, str]) -> tuple[Answer, Callable[[], None]]:
        """Parse *body*; return what to answer, and what to call when the sender has its success."""
        found = list(parse(service.ExportTraceServiceRequest.FromString(body), headers, len(body)))
        with self._lock:
            self.requests += 1
            self.sizes.append(len(found))
            answer = self.answers.pop(0) if self.answers else self.always
        kind = answer if isinstance(answer, str) else answer[0]
        kept = self.spans if kind in ("ok", "slow", "partial") else self.turned_away

        def keep() -> None:
            with self._lock:
                kept.extend(found)

        if kept is self.turned_away:
            keep()
        return answer, keep

    def named(self, name: str) -> list[Arrived]:
        """Return the spans called *name*, in the order of their start."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_ns)

    def one(self, name: str) -> Arrived:
        """Return the only span called *name*."""
        (found,) = self.named(name)
        return found

    def once(self) -> bool:
        """Whether no span came twice."""
        return len({(span.trace_id, span.span_id) for span in self.spans}) == len(self.spans)


def parse(request: Any, headers: Mapping[str, str], size: int) -> Iterator[Arrived]:
    """Return the spans of an OTLP *request*, in its order."""
    for resources in request.resource_spans:
        resource = plain(resources.resource.attributes)
        for scoped in resources.scope_spans:
            for span in scoped.spans:
                yield Arrived(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    kind=span.kind,
                    status=span.status.code,
                    attributes=plain(span.attributes),
                    events=tuple(event.name for event in span.events),
                    scope=scoped.scope.name,
                    resource=resource,
                    headers=headers,
                    body_bytes=size,
                )


def plain(pairs: Any) -> dict[str, Any]:
    """Return OTLP's keys and values as a dict of Python's own values."""
    return {pair.key: value_of(pair.value) for pair in pairs}


def value_of(value: Any) -> Any:
    """Return one of OTLP's AnyValues as a Python value."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(value_of(item) for item in value.array_value.values)
    if kind == "kvlist_value":
        return plain(value.kvlist_value.values)
    return getattr(value, kind) if kind else None


# -- HTTP -------------------------------------------------------------------------------------------------


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    receiver: Receiver

    def setup(self) -> None:
        super().setup()
        self.receiver.connections += 1

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        coded = self.headers.get("Content-Encoding", "")
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.receiver.paths.append(self.path)
        self.receiver.encodings.append(coded)
        answer, keep = self.receiver.take(gzip.decompress(body) if coded == "gzip" else body, headers)
        kind, detail = (answer, None) if isinstance(answer, str) else answer
        if kind == "silent":
            self.receiver.ended.wait()
            self.close_connection = True
        elif kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
        elif kind == "status":
            code, extra = detail
            self._answer(code, b"", extra)
        else:
            if kind == "slow":
                self.receiver.ended.wait(detail)
            told = service.ExportTraceServiceResponse()
            if kind == "partial":
                told.partial_success.rejected_spans = detail
                told.partial_success.error_message = "too many attributes"
            keep()
            self._answer(200, told.SerializeToString(), {})

    def _answer(self, code: int, body: bytes, headers: Mapping[str, str]) -> None:
        with contextlib.suppress(OSError):  # a sender that has given up
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """A sender that went away is what some tests are about."""

    def shutdown_request(self, request: Any) -> None:
        with contextlib.suppress(OSError):
            super().shutdown_request(request)


@contextlib.contextmanager
def http_receiver(always: Answer = "ok", answers: list[Answer] | None = None) -> Iterator[Receiver]:
    """Run a receiver over HTTP on a port of its own."""
    receiver = Receiver(always=always, answers=answers or [])
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"receiver": receiver}))
    receiver.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


# -- gRPC -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def grpc_receiver(always: Answer = "ok", answers: list[Answer] | None = None) -> Iterator[Receiver]:
    """Run a receiver over gRPC on a port of its own."""
    grpc = pytest.importorskip("grpc")
    stubs = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")
    receiver = Receiver(always=always, answers=answers or [])

    class Servicer(stubs.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the service's own name
            headers = {pair.key: pair.value for pair in context.invocation_metadata()}
            receiver.encodings.append(headers.get("grpc-encoding", ""))
            answer, keep = receiver.take(request.SerializeToString(), headers)
            kind, detail = (answer, None) if isinstance(answer, str) else answer
            told = service.ExportTraceServiceResponse()
            if kind == "silent":
                while context.is_active() and not receiver.ended.is_set():
                    time.sleep(0.02)
            elif kind == "slow":
                receiver.ended.wait(detail)
            elif kind == "partial":
                told.partial_success.rejected_spans = detail
            elif kind == "status":
                context.abort(getattr(grpc.StatusCode, detail[0]), "as told")
            elif kind == "reset":
                context.abort(grpc.StatusCode.UNAVAILABLE, "as told")
            keep()
            return told

    server = grpc.server(ThreadPoolExecutor(8))
    stubs.add_TraceServiceServicer_to_server(Servicer(), server)
    receiver.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        receiver.ended.set()
        server.stop(0.2).wait()


# -- nobody there -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    """Give an address at which every connection is refused, and which nobody else gets meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, and never listening
        yield f"http://127.0.0.1:{held.getsockname()[1]}"
