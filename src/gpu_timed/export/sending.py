"""What stands around OpenTelemetry's OTLP exporters: forks, and what a collector's answer really says."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from gpu_timed.ledger import Ledger

_CREDENTIAL_VARIABLES: Final = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
)


class Answers:
    """Reads what a collector answers over HTTP: the SDK's exporter takes everything below 400 for success.

    That is so for a redirection, behind which nothing was delivered, and for an answer that says that some of
    the spans were rejected.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.redirected = False
        self.rejected = 0

    def session(self) -> Any:
        """Return a session whose answers are seen here; None where a plug-in of the application's makes it."""
        if any(os.environ.get(variable) for variable in _CREDENTIAL_VARIABLES):
            return None
        import requests  # noqa: PLC0415 - the exporter's own dependency

        made = requests.Session()
        made.hooks["response"].append(self._see)
        return made

    def forget(self) -> None:
        """Begin anew, before a request."""
        self.redirected, self.rejected = False, 0

    def _see(self, response: Any, *_: Any, **__: Any) -> None:
        self.forget()  # of the request before, which is sent again
        try:
            self.redirected = 300 <= response.status_code < 400  # noqa: PLR2004 - HTTP's classes
            if response.status_code == 200 and response.content:  # noqa: PLR2004
                from opentelemetry.proto.collector.trace.v1 import trace_service_pb2  # noqa: PLC0415

                told = trace_service_pb2.ExportTraceServiceResponse.FromString(response.content).partial_success
                self.rejected = max(0, told.rejected_spans)
                if self.rejected:
                    self._ledger.fault("collector_rejected", told.error_message or "it did not say why")
            elif self.redirected:
                self._ledger.fault("collector_redirected", f"to {response.headers.get('location')}")
        except Exception:  # noqa: BLE001 - an answer that is not OTLP's says nothing about spans
            self.rejected = 0


class PerProcess(SpanExporter):
    """An exporter that a forked child does not share with its parent.

    Args:
        make: Makes the exporter; called on the first export of a process.
        ledger: Where it is counted that a child could not export.
        survives: Whether a child may make one of its own although its parent has used one. Over HTTP it must: two
            processes that send on one connection read each other's answers, and send again what had arrived. With
            gRPC it must not: its library does not survive a fork of a process that has used it, and ends the child.
        answers: What reads the collector's answers, if anything does.
    """

    def __init__(
        self, make: Callable[[], SpanExporter], ledger: Ledger, *, survives: bool, answers: Answers | None = None
    ) -> None:
        self._answers = answers
        self.rejected = 0
        """How many of the spans last exported the collector said it had not taken."""
        self._make = make
        self._ledger = ledger
        self._survives = survives
        self._inner: SpanExporter | None = None
        self._pid = 0

    def ready(self) -> PerProcess:
        """Make the exporter now: what it refuses, it refuses here."""
        self._inner, self._pid = self._make(), os.getpid()
        return self

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export *spans*. Over gRPC it fails in the child of a process that has exported before it forked."""
        inner = self._inner
        if inner is None or (self._survives and self._pid != os.getpid()):
            inner, self._pid = self._make(), os.getpid()
            self._inner = inner
        if self._pid != os.getpid():
            self._ledger.fault(
                "grpc_after_fork",
                "gRPC does not survive a fork of a process that has exported: use protocol='http/protobuf', "
                "or call configure() in the child",
            )
            return SpanExportResult.FAILURE
        answers = self._answers
        if answers is None:
            return inner.export(spans)
        answers.forget()
        result = inner.export(spans)
        self.rejected = answers.rejected
        return SpanExportResult.FAILURE if answers.redirected else result

    def shutdown(self) -> None:
        """Shut the exporter down, if this process made it."""
        if self._inner is not None and self._pid == os.getpid():
            self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002 - the SDK's signature
        """Nothing is held back here."""
        return True
