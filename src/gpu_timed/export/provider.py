"""Builds the OpenTelemetry provider that ``configure(exporter=…)`` asks for, with OpenTelemetry's own parts."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from gpu_timed.errors import ConfigurationError, missing_extra, unknown_value
from gpu_timed.export import otlp, resource
from gpu_timed.ledger import Ledger

EXPORTERS: Final = frozenset({"otlp", "jsonl", "console", "none"})


class CountingProcessor(SpanProcessor):
    """A batch processor that counts what it was given: the SDK's own drops the oldest of a full queue silently."""

    def __init__(self, exporter: SpanExporter, ledger: Ledger) -> None:
        self._inner = BatchSpanProcessor(CountingExporter(exporter, ledger))
        self._ledger = ledger

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing: batching begins at the end."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue *span*."""
        context = span.context
        if context is not None and context.trace_flags.sampled:
            self._ledger.count("batched")
        self._inner.on_end(span)

    def shutdown(self) -> None:
        """Export what is queued, and end. What did not come out by then never will."""
        try:
            self._inner.shutdown()  # type: ignore[no-untyped-call] # opentelemetry-sdk 1.45
        finally:
            self._count_lost(self._ledger.snapshot().get("batched", 0))

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Export what is queued, then count what was queued before and came out neither exported nor refused."""
        before = self._ledger.snapshot().get("batched", 0)
        flushed = bool(self._inner.force_flush(timeout_millis))
        if flushed:
            self._count_lost(before)
        return flushed

    def _count_lost(self, queued: int) -> None:
        counts = self._ledger.snapshot()
        lost = queued - sum(counts.get(k, 0) for k in ("exported", "rejected", "export_failed", "dropped_in_batch"))
        if lost > 0:
            self._ledger.count("dropped_in_batch", lost)


class CountingExporter(SpanExporter):
    """Counts what the receiver took and what was lost on the way; the work is another exporter's."""

    def __init__(self, inner: SpanExporter, ledger: Ledger) -> None:
        self._inner = inner
        self._ledger = ledger

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export *spans*, and count the answer."""
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                rejected = min(len(spans), getattr(self._inner, "rejected", 0))
                self._ledger.count("exported", len(spans) - rejected)
                if rejected:
                    self._ledger.count("rejected", rejected)
            else:
                self._ledger.count("export_failed", len(spans))
        return result

    def shutdown(self) -> None:
        """Shut the exporter down."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the exporter."""
        return self._inner.force_flush(timeout_millis)


def install(exporter: str, **options: Any) -> None:
    """Make a provider with *exporter* the application's global one. The options as in :func:`build`.

    Raises:
        ConfigurationError: The exporter is unknown, lacks its argument, or a provider is set already.
        MissingExtraError: The exporter's package is not installed.
    """
    trace.set_tracer_provider(build(exporter, **options, refuse_second=True))


class StandBy:
    """A provider with *exporter* that is ready, for the case that the application sets none of its own.

    Args:
        exporter: As in :func:`build`, like the options.
        action: Run when somebody who uses the API alone starts a span with no provider set, before it is started:
            that span would else be lost, and the timed call in it without a parent. Private name used:
            ``ProxyTracer._tracer`` (api 1.30 to 1.45), which every span of a proxy asks for; without it nothing is run.

    Raises:
        ConfigurationError: The exporter is unknown or lacks its argument.
        MissingExtraError: The exporter's package is not installed.
    """

    def __init__(self, exporter: str, *, action: Callable[[], None], **options: Any) -> None:
        self._made = build(exporter, **options)
        self._asked = vars(trace.ProxyTracer).get("_tracer")
        ask = getattr(self._asked, "fget", None)
        if ask is None:
            return

        def tracer(proxy: trace.ProxyTracer) -> Any:
            action()
            return ask(proxy)

        setattr(trace.ProxyTracer, "_tracer", property(tracer))  # noqa: B010 - a type checker knows it as read-only

    def step_in(self) -> bool:
        """Make it the global provider if there is none yet; returns whether it is the global one."""
        self.withdraw()
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            trace.set_tracer_provider(self._made)
        return trace.get_tracer_provider() is self._made

    def withdraw(self) -> None:
        """Wait for nobody's span any more."""
        if self._asked is not None:
            setattr(trace.ProxyTracer, "_tracer", self._asked)  # noqa: B010 - as above


def build(
    exporter: str,
    *,
    ledger: Ledger,
    service_name: str | None,
    path: str | os.PathLike[str] | None,
    endpoint: str | None,
    protocol: str | None = None,
    headers: Mapping[str, str] | None = None,
    refuse_second: bool = False,
) -> TracerProvider:
    """Build a provider with *exporter*.

    Raises:
        ConfigurationError: The exporter is unknown, lacks its argument, or *refuse_second* and there is one already.
        MissingExtraError: The exporter's package is not installed.
    """
    if not isinstance(exporter, str) or exporter not in EXPORTERS:
        raise unknown_value("exporter", exporter, EXPORTERS)
    for option, value, owner in (
        ("path", path, "jsonl"),
        ("endpoint", endpoint, "otlp"),
        ("protocol", protocol, "otlp"),
        ("headers", headers, "otlp"),
    ):
        if value is not None and exporter != owner:
            raise ConfigurationError(f"{option}= belongs to exporter={owner!r}, not to {exporter!r}.")
    if refuse_second and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        raise ConfigurationError(
            "this process has an OpenTelemetry tracer provider already, and it can be set only once. Leave exporter= "
            "out to send spans through it, or call configure() before the provider is set."
        )
    inner: SpanExporter | None = None
    if exporter == "otlp":
        inner = otlp.exporter(protocol=protocol, endpoint=endpoint, headers=headers, ledger=ledger)
    elif exporter == "jsonl":
        inner = _json_lines(path)
    elif exporter == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter  # noqa: PLC0415 - only if asked for

        inner = ConsoleSpanExporter()
    # Not the SDK's own exit handler: with a dead collector it would wait for every retry.
    provider = TracerProvider(resource=resource.make(service_name), shutdown_on_exit=False)
    if inner is not None:
        provider.add_span_processor(CountingProcessor(inner, ledger))
    if hasattr(os, "register_at_fork"):
        _renew_in_children(weakref.ref(provider))
    return provider


def _renew_in_children(reference: weakref.ref[TracerProvider]) -> None:
    def renew() -> None:
        provider = reference()
        if provider is not None:
            resource.renew(provider)

    os.register_at_fork(after_in_child=renew)


def _json_lines(path: str | os.PathLike[str] | None) -> SpanExporter:
    if path is None:
        raise ConfigurationError("exporter='jsonl' needs path=: the file to append OTLP JSON lines to.")
    try:
        from opentelemetry.exporter.otlp.json.file import FileSpanExporter  # noqa: PLC0415 - an extra
    except ImportError:
        raise missing_extra("exporter='jsonl'", "opentelemetry-exporter-otlp-json-file", "otlp") from None
    try:
        return FileSpanExporter(path)
    except OSError as error:
        raise ConfigurationError(f"path={os.fspath(path)!r} cannot be written: {error.strerror}.") from error
