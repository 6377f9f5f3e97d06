"""The gate: asks OpenTelemetry, once for each call, whether it is recorded and under which ids.

The provider is whatever the application made global, looked up anew each time (40 ns), so that a
provider set after decorating is found. With the SDK's provider the sampler is asked exactly as the SDK
would ask it. With any other provider the plain API starts the span. With none, calls are measured and
nothing is exported.
"""

from __future__ import annotations

import contextvars
import random
from collections.abc import Callable, Mapping
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context

from gpu_timed.context.recording import Admission, RecordingSpan
from gpu_timed.ledger import Ledger
from gpu_timed.values import AttributeValue

SCOPE: Final = "gpu_timed"
_INTERNAL: Final = trace.SpanKind.INTERNAL
_SAMPLED: Final = int(trace.TraceFlags.SAMPLED)
# Newer SDKs flag a trace id as random (W3C trace context level 2); the flag must survive as they set it.
_RANDOM: Final = int(getattr(trace.TraceFlags, "RANDOM_TRACE_ID", 0))
# The key under which OpenTelemetry keeps the current span, learned through its public call.
_KEY: Final = next(iter(trace.set_span_in_context(trace.INVALID_SPAN, Context())))
_OURS: Final = otel_context.create_key("gpu_timed.span")


class Gate:
    """Decides at entry, and attaches what was decided to the caller's context."""

    def __init__(self, ledger: Ledger, version: str) -> None:
        self._ledger = ledger
        self._version = version
        self._provider: Any = None
        self._tracer: Any = None
        self._sdk = False
        self.on_provider: list[Any] = []
        #: Told once there is a call to record and no provider to record it with: may set one.
        self.on_none: Callable[[], None] | None = None

    def admit(self, name: str, attributes: Mapping[str, AttributeValue]) -> Admission | Context | None:
        """Decide about a call.

        Returns:
            An :class:`Admission` if the call is recorded; a context to attach if it is not, and its
            children must learn so; None if it is not, and the context says so already.
        """
        provider = trace.get_tracer_provider()
        if provider is not self._provider:
            self._adopt(provider)
        context = otel_context.get_current()
        parent: Any = context.get(_KEY)
        parent_id: int | None = None
        trace_id = parent_flags = 0
        if isinstance(parent, RecordingSpan):
            kept = parent.admission
            trace_id, parent_id, parent_flags = kept.trace_id, kept.span_id, kept.flags
        elif isinstance(parent, trace.Span):
            known = parent.get_span_context()
            trace_id, parent_id, parent_flags = known.trace_id, known.span_id, int(known.trace_flags)
            if not known.is_valid:
                parent, parent_id, trace_id = None, None, 0
        else:
            parent = None
        tracer = self._tracer
        if tracer is None:
            return self._admit_alone(context, parent, trace_id, parent_id)
        if not self._sdk:
            return self._admit_foreign(name, attributes, context=context, parent=parent, parent_id=parent_id)

        enabled = getattr(tracer, "_is_enabled", None)  # sdk 1.45; where it is missing, none can be disabled
        if enabled is not None and not enabled():
            return None
        generator = tracer.id_generator
        if parent_id is None:
            trace_id = generator.generate_trace_id()
            random_id = _RANDOM and generator.is_trace_id_random()
        else:
            random_id = parent_flags & _RANDOM
        try:
            sampling = tracer.sampler.should_sample(context, trace_id, name, _INTERNAL, attributes, ())
        except Exception as error:  # noqa: BLE001 - a sampler of the user's; the call must not feel it
            self._ledger.fault("sampler_raised", error)
            return None
        decision = sampling.decision
        flags = (_SAMPLED if decision.is_sampled() else 0) | (_RANDOM if random_id else 0)
        if not decision.is_recording():
            if parent is not None and not parent_flags & _SAMPLED and not parent.is_recording():
                return None  # the context says so already
            return self._unsampled(context, trace_id, generator.generate_span_id(), flags, sampling.trace_state)
        admission = Admission(tracer, context, context.get(_OURS), parent, trace_id=trace_id, parent_id=parent_id)
        admission.span_id = generator.generate_span_id()
        admission.flags = flags
        admission.trace_state = sampling.trace_state
        admission.sampling = sampling
        admission.caller = contextvars.copy_context()
        return admission

    def attach(self, span: RecordingSpan) -> Any:
        """Make *span*, or the provider's own in its place, the current one; returns what :meth:`detach` needs."""
        kept = span.admission
        return otel_context.attach(Context({**kept.context, _KEY: kept.foreign or span, _OURS: span}))

    def attach_context(self, context: Context) -> Any:
        """Make *context* the current one; returns what :meth:`detach` needs."""
        return otel_context.attach(context)

    def current(self) -> Context:
        """Return the current context."""
        return otel_context.get_current()

    def detach(self, token: Any) -> None:
        """Undo an attach. Silent when the caller's own code already left another context behind."""
        try:
            _detach(token)
        except ValueError:
            self._ledger.count("context_moved")

    # -- inside ---------------------------------------------------------------------------------------

    def _adopt(self, provider: Any) -> None:
        """Take hold of a provider seen for the first time."""
        if isinstance(provider, trace.ProxyTracerProvider) and self.on_none is not None:
            self.on_none()
            provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):
            self._tracer, self._sdk, self._provider = None, False, provider
            return
        tracer = provider.get_tracer(SCOPE, self._version)
        from opentelemetry.sdk import trace as sdk  # noqa: PLC0415 - 40 ms, and only with a provider

        self._tracer, self._sdk = tracer, isinstance(tracer, sdk.Tracer)
        self._provider = provider  # last: another thread that sees it must find the rest
        for listener in self.on_provider:
            listener()

    def _admit_alone(self, context: Context, parent: Any, trace_id: int, parent_id: int | None) -> Admission:
        """Admit with no provider at all: ids of our own, nothing exported."""
        trace_id = trace_id or _random_id(128)
        admission = Admission(None, context, context.get(_OURS), parent, trace_id=trace_id, parent_id=parent_id)
        admission.span_id = _random_id(64)
        admission.flags = _SAMPLED
        return admission

    def _admit_foreign(
        self,
        name: str,
        attributes: Mapping[str, AttributeValue],
        *,
        context: Context,
        parent: Any,
        parent_id: int | None,
    ) -> Admission | Context | None:
        """Let a provider that is not the SDK's start its own span, by the plain API."""
        tracer = self._tracer
        span = tracer.start_span(name, context=context, attributes=attributes)
        known = span.get_span_context()
        if not span.is_recording():
            return None if parent is span or not known.is_valid else trace.set_span_in_context(span, context)
        trace_id = known.trace_id
        admission = Admission(tracer, context, context.get(_OURS), parent, trace_id=trace_id, parent_id=parent_id)
        admission.span_id = known.span_id
        admission.flags = int(known.trace_flags)
        admission.trace_state = known.trace_state
        admission.foreign = span
        admission.caller = contextvars.copy_context()
        return admission

    def _unsampled(self, context: Context, trace_id: int, span_id: int, flags: int, trace_state: Any) -> Context:
        """Return the context in which children learn that their trace is not sampled."""
        known = trace.SpanContext(trace_id, span_id, False, trace.TraceFlags(flags), trace_state)
        return trace.set_span_in_context(trace.NonRecordingSpan(known), context)


class AloneGate(Gate):
    """Records every call with ids of its own, whatever provider and sampler say: for measuring ourselves."""

    def _adopt(self, provider: Any) -> None:
        self._provider = provider  # seen, and not used


def _random_id(bits: int) -> int:
    return random.getrandbits(bits) or 1


def _detach(token: Any) -> None:
    # ``opentelemetry.context.detach`` logs a stack trace when the token belongs to another context,
    # which happens when user code finalises a coroutine elsewhere. The runtime context says it plainly.
    otel_context._RUNTIME_CONTEXT.detach(token)  # noqa: SLF001 - api 1.30 to 1.45
