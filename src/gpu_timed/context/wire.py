"""The current context as text, and back: what goes along with a request to another process.

OpenTelemetry's global propagator writes and reads it: W3C ``traceparent``, ``tracestate`` and ``baggage``,
unless ``OTEL_PROPAGATORS`` says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.context import Context

from gpu_timed.context.recording import RecordingSpan


def inject() -> dict[str, str]:
    """Return the headers that make what another process does a part of the current trace.

    A span that goes nowhere, because no provider is set, is left out: whoever took it for a parent would
    hang under a span that nobody has, and take its own decision about sampling for made.
    """
    context = otel_context.get_current()
    found: Any = trace.get_current_span(context)
    real = found
    while isinstance(real, RecordingSpan) and real.admission.tracer is None:
        real = real.admission.parent
    if real is not found:
        context = trace.set_span_in_context(real or trace.INVALID_SPAN, context)
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context)
    return carrier


def extract(headers: Mapping[str, str]) -> Context:
    """Return what *headers*, as :func:`carrier` returns them, say.

    It begins from nothing: what an earlier request left behind on this thread is not this one's parent.
    """
    return propagate.extract(headers, Context())


def attach(context: Context | None) -> Any:
    """Make *context*, or nothing at all, the current one; returns what :func:`detach` needs."""
    return otel_context.attach(Context() if context is None else context)


def detach(token: Any) -> None:
    """Undo :func:`attach`. Silent if the context was left on the way, as by a generator that is finalised elsewhere."""
    try:
        otel_context._RUNTIME_CONTEXT.detach(token)  # noqa: SLF001 - api 1.30 to 1.45; the public one logs a stack trace
    except ValueError:
        pass


def carrier(headers: Iterable[tuple[Any, Any]]) -> Mapping[str, str]:
    """Return *headers* under lower-case names: HTTP's have no case, and ASGI's are bytes. Repeated ones are joined."""
    found: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name, value = (
            part.decode("latin-1") if isinstance(part, bytes) else str(part) for part in (raw_name, raw_value)
        )
        name = name.lower()
        found[name] = f"{found[name]},{value}" if name in found else value
    return found
