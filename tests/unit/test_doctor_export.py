"""The doctor's test span, against receivers that take it, refuse it, say nothing, or are something else."""

from __future__ import annotations

import http.server
import importlib.util
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace

from gpu_timed import diagnose
from gpu_timed.cli.main import app
from gpu_timed.export import otel_environment, probe
from gpu_timed.findings import Finding

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry.exporter") is None, reason="the exporters are an extra"
)


class Receiver(http.server.BaseHTTPRequestHandler):
    """Takes requests, and answers as told."""

    requests: list[tuple[str, str, bytes, dict[str, str]]]
    answer: int
    headers_sent: dict[str, str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.requests.append((self.command, self.path, body, {k.lower(): v for k, v in self.headers.items()}))
        self.send_response(self.answer)
        for name, value in self.headers_sent.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST  # noqa: N815 - the server looks for this name

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def receiver() -> Iterator[Any]:
    """A receiver on this machine: ``.url``, ``.requests``, and how it answers."""
    handler = type("Handler", (Receiver,), {"requests": [], "answer": 200, "headers_sent": {}})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def silent() -> Iterator[str]:
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def free_port() -> int:
    """Return a port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def sent(endpoint: str | None = None, timeout_s: float = 5.0) -> Finding:
    """Return the finding about the test span."""
    found = diagnose(send=True, endpoint=endpoint, timeout_s=timeout_s).section("export").get("send")
    assert found is not None
    return found


def test_a_receiver_that_takes_the_span_is_ok(receiver, caplog):
    """One request with one span, at the path of traces, with the host in its resource."""
    found = sent(receiver.url)
    assert found.level == "ok"
    assert (found.values["answer"], found.values["status"]) == ("accepted", 200)
    assert found.values["url"] == f"{receiver.url}/v1/traces"
    ((method, path, body, headers),) = receiver.requests
    assert (method, path, headers["content-type"]) == ("POST", "/v1/traces", "application/x-protobuf")
    assert probe.SPAN_NAME.encode() in body
    assert b"host.name" in body
    assert socket.gethostname().encode() in body
    assert caplog.text == ""


def test_the_variables_say_where_to_as_for_configure(receiver, monkeypatch):
    """Without ``endpoint=`` OpenTelemetry's own variables are followed, headers and all."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret-token")
    found = diagnose(send=True)
    assert found.section("export").get("send").level == "ok"
    assert receiver.requests[0][3]["authorization"] == "secret-token"
    assert f"a test span arrived at {receiver.url}/v1/traces" in found.verdict
    assert "secret" not in found.to_json()
    assert "authorization=***" in found.to_json()


@pytest.mark.parametrize(
    ("status", "fix"), [(400, "own log"), (401, "OTEL_EXPORTER_OTLP_HEADERS"), (404, "/v1/traces"), (503, "own log")]
)
def test_a_receiver_that_refuses_shows_its_status(receiver, status, fix, caplog):
    """The HTTP status is shown with what to look at, it is asked once, and nothing is logged."""
    receiver.answer = status
    began = time.monotonic()
    found = sent(receiver.url)
    assert time.monotonic() - began < 4
    assert (found.level, found.values["answer"], found.values["status"]) == ("problem", "http_error", status)
    assert f"HTTP {status}" in found.text
    assert fix in found.fix
    assert len(receiver.requests) == 1
    assert caplog.text == ""


def test_nobody_listening_is_told_as_refused():
    """A refused connection is told at once; where an address was given it is a problem."""
    began = time.monotonic()
    found = sent(f"http://127.0.0.1:{free_port()}")
    assert time.monotonic() - began < 4
    assert (found.level, found.values["answer"]) == ("problem", "refused")
    assert "connection refused" in found.text


def test_nobody_at_the_default_address_is_a_warning_with_two_ways_out(monkeypatch):
    """Where no address was given, nothing at the default one is no fault; it says how to start a receiver."""
    monkeypatch.setattr(probe.otlp, "over_http", _to_a_free_port(probe.otlp.over_http))
    found = sent()
    assert (found.level, found.values["answer"]) == ("warning", "refused")
    assert "docker run" in found.fix
    assert "--endpoint" in found.fix


def _to_a_free_port(make: Any) -> Any:
    return lambda endpoint, **options: make(f"http://127.0.0.1:{free_port()}", **options)


def test_a_silent_receiver_is_bounded_in_time(silent):
    """A receiver that takes the connection and says nothing costs the time it was given, and little more."""
    began = time.monotonic()
    found = sent(silent, timeout_s=0.5)
    took = time.monotonic() - began
    assert 0.4 < took < 3
    assert (found.level, found.values["answer"]) == ("problem", "timeout")
    assert "0.5 s" in found.text


def test_a_receiver_that_trickles_is_bounded_too():
    """Bytes that come one by one do not stretch the time."""
    stop = threading.Event()

    def trickle(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            while not stop.wait(0.1):
                try:
                    connection.sendall(b"X-More: 1\r\n")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=trickle, args=(server,))
        thread.start()
        began = time.monotonic()
        try:
            found = sent(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.4)
            took = time.monotonic() - began
        finally:
            stop.set()
            thread.join()
    assert took < 3
    assert found.values["answer"] == "timeout"


def test_a_receiver_that_hangs_up_is_asked_once():
    """A connection closed without an answer is told as a failure, and not tried again, as an exporter would."""
    taken: list[int] = []

    def hang_up(server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            taken.append(1)
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(1)
        thread = threading.Thread(target=hang_up, args=(server,))
        thread.start()
        found = sent(f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert (found.level, found.values["answer"]) == ("problem", "failed")
    assert len(taken) == 1


def test_a_web_page_is_no_receiver(receiver):
    """A server that answers everything with a page takes no spans, whatever its status says."""
    receiver.headers_sent = {"Content-Type": "text/html; charset=utf-8"}
    found = sent(receiver.url)
    assert (found.level, found.values["answer"]) == ("problem", "not_otlp")


def test_a_redirect_that_loses_the_span_is_no_success(receiver):
    """A redirect to a login page, followed (which turns the POST into a GET) or not, is told as what it is."""
    receiver.answer, receiver.headers_sent = 302, {"Location": "/login"}
    original = receiver.do_POST

    def answer(self: Any) -> None:
        self.answer = 302 if self.command == "POST" else 200
        original(self)

    receiver.do_POST = receiver.do_GET = answer
    found = sent(receiver.url)
    assert receiver.requests[0][0] == "POST"
    assert (found.level, found.values["answer"], found.values["status"]) == ("problem", "http_error", 302)


def test_a_host_that_is_not_known(monkeypatch):
    """A name that cannot be resolved is told as that."""

    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = sent("http://collector.invalid:4318")
    assert (found.level, found.values["answer"]) == ("problem", "unknown_host")


def test_a_receiver_that_speaks_no_tls(receiver):
    """https to a plain port is told as a matter of TLS."""
    found = sent(receiver.url.replace("http:", "https:"))
    assert found.values["answer"] == "tls"
    assert "OTEL_EXPORTER_OTLP_CERTIFICATE" in found.fix


def test_a_password_in_the_address_is_not_shown(receiver):
    """Neither in the text nor in the values."""
    found = diagnose(send=True, endpoint=receiver.url.replace("//", "//user:hunter2@"))
    assert found.section("export").get("send").level == "ok"
    assert "hunter2" not in found.to_json()


def test_a_wrong_endpoint_in_the_variables_is_a_finding(monkeypatch):
    """What the exporter itself cannot use does not come out as an exception."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "not an address")
    found = sent(timeout_s=1)
    assert found.level == "problem"
    assert found.values["answer"] == "failed"


@pytest.mark.parametrize("endpoint", ["http://localhost:99999", "http://", "http://[::1:4318"])
def test_an_address_that_is_none_in_the_variables_is_a_finding(endpoint, monkeypatch):
    """A port out of range, no host, half an IPv6 address: each is told, and none is raised."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    found = diagnose(send=True, timeout_s=1).section("export")
    assert found.get("failed") is None
    assert found.get("send").level == "problem"
    assert found.get("send").values["answer"] in {"failed", "unknown_host"}


def test_a_compression_that_cannot_be_used_is_a_finding(monkeypatch, receiver):
    """A variable at which the exporter raises costs this finding alone."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "zip")
    found = diagnose(send=True, endpoint=receiver.url).section("export")
    assert found.get("send").level in ("problem", "ok")
    assert found.get("failed") is None


def test_without_the_exporter_the_pip_command_is_named(monkeypatch):
    """A missing extra is a finding with the command that installs it: a problem where it was asked for."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert sent().level == "warning"
    found = sent("http://localhost:4318")
    assert (found.level, found.fix) == ("problem", "pip install 'gpu-timed[otlp]'")


def test_the_applications_provider_is_not_touched(receiver, exporter):
    """The test span goes by a provider of its own: the application's sees nothing of it, and stays."""
    provider = trace.get_tracer_provider()
    assert sent(receiver.url).level == "ok"
    assert trace.get_tracer_provider() is provider
    assert exporter.get_finished_spans() == ()


def test_other_threads_may_log_meanwhile(silent, caplog):
    """Only the doctor's own messages are held back, and afterwards no filter is left."""
    logger = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    before = list(logger.filters)
    answer: list[Finding] = []
    thread = threading.Thread(target=lambda: answer.append(sent(silent, timeout_s=0.4)))
    thread.start()
    time.sleep(0.2)
    logger.warning("the application's own")
    thread.join()
    assert "the application's own" in caplog.text
    assert caplog.text.count("WARNING") == 1
    time.sleep(0.3)
    assert set(logger.filters) <= set(before)  # one of another test's may still have been there, and gone since


def test_nothing_is_left_running(silent):
    """The thread that sent ends soon after the answer is given."""
    sent(silent, timeout_s=0.3)
    until = time.monotonic() + 5
    while any(thread.name == "gpu_timed-doctor-send" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_credential_provider_is_left_alone(receiver, monkeypatch):
    """Where the session is somebody else's, the exporter makes it, and its answer is told all the same."""
    monkeypatch.setattr(probe, "_CREDENTIALS", ("OTEL_SERVICE_NAME",))
    monkeypatch.setenv("OTEL_SERVICE_NAME", "x")
    monkeypatch.setattr(probe, "_session", None)  # calling it would raise
    assert sent(receiver.url).values["answer"] == "accepted"
    receiver.answer = 400
    found = sent(receiver.url)
    assert found.values["answer"] == "failed"
    assert "400" in found.values["detail"]


# -- variables --------------------------------------------------------------------------------------------


def variables(**environment: str) -> dict[str, Finding]:
    """Return what is found about the provider and these variables, by key."""
    return {finding.key: finding for finding in otel_environment.provider_findings(environment)}


def test_a_disabled_sdk_is_a_problem(monkeypatch):
    """``OTEL_SDK_DISABLED=true`` means no spans, and the test span says the same."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    found = diagnose(send=True, endpoint="http://127.0.0.1:1").section("export")
    assert found.get("sdk_disabled").level == "problem"
    assert found.get("send").level == "problem"
    assert "OTEL_SDK_DISABLED" in found.get("send").text


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4317/v1/traces"},
    ],
)
def test_grpc_is_told_apart(environment):
    """The port and the protocol of gRPC are the commonest mistake, and the exporter speaks HTTP."""
    assert variables(**environment)["protocol"].level == "warning"


def test_a_sampler_that_records_nothing_is_a_warning():
    """``always_off`` is legal, and seldom meant."""
    assert variables(OTEL_TRACES_SAMPLER="always_off")["sampler"].level == "warning"
    assert "sampler" not in variables(OTEL_TRACES_SAMPLER="always_on")


def test_the_command_line_reports_the_receiver(receiver):
    """``gpu-timed doctor --endpoint`` sends, and its exit code and verdict say what came of it."""
    from typer.testing import CliRunner

    done = CliRunner().invoke(app, ["doctor", "--json", "--endpoint", receiver.url])
    told = json.loads(done.stdout)
    export = next(section for section in told["sections"] if section["name"] == "export")
    (send,) = (finding for finding in export["findings"] if finding["key"] == "send")
    assert send["level"] == "ok"
    assert len(receiver.requests) == 1
