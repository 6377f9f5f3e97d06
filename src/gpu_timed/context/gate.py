"""The gate: asks OpenTelemetry, once for each call, whether it is recorded and under which ids.

The provider is whatever the application made global, looked up anew each time (40 ns), so that a
provider set after decorating is found. With the SDK's provider the sampler is asked exactly as the SDK
would ask it. With any other provider the plain API starts the span. With none, calls are measured and
nothing is exported.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context

from gpu_timed.context import runtime
from gpu_timed.context.recording import LEFT, OURS, Admission, RecordingSpan, SilentSpan
from gpu_timed.context.sampling import SAMPLED, StaticRules
from gpu_timed.ledger import Ledger
from gpu_timed.values import AttributeValue

SCOPE: Final = "gpu_timed"
_INTERNAL: Final = trace.SpanKind.INTERNAL
_SAMPLED: Final = int(trace.TraceFlags.SAMPLED)
# Newer SDKs flag a trace id as random (W3C trace context level 2); the flag must survive as they set it.
_RANDOM: Final = int(getattr(trace.TraceFlags, "RANDOM_TRACE_ID", 0))
# The key under which OpenTelemetry keeps the current span, learned through its public call.
_KEY: Final = next(iter(trace.set_span_in_context(trace.INVALID_SPAN, Context())))

_bits: Final = random.getrandbits
_holder: Final = runtime.holder
_Span: Final = trace.Span
_in_order: Final = runtime.in_order
_current, _attach, _detach = runtime.current, runtime.attach, runtime.detach  # each lookup in the module costs 20 ns


class Gate:
    """Decides at entry, and attaches what was decided to the caller's context."""

    def __init__(self, ledger: Ledger, version: str) -> None:
        self._ledger = ledger
        self._version = version
        self._provider: Any = None
        self._tracer: Any = None
        self._sdk = False
        #: Asks the tracer whether it is enabled, where its SDK can disable one (1.45).
        self._enabled: Callable[[], bool] | None = None
        self._rules: StaticRules | None = None
        self.on_provider: list[Any] = []
        #: Told once there is a call to record and no provider to record it with: may set one.
        self.on_none: Callable[[], None] | None = None

    def admit(self, name: str, attributes: Mapping[str, AttributeValue]) -> Admission | Context | None:
        """Decide about a call.

        Returns:
            An :class:`Admission` that says whether the call is recorded, to attach; or a context to attach
            instead; None if it is not recorded, and the context says so already.
        """
        provider = _holder._TRACER_PROVIDER  # noqa: SLF001 - see runtime.holder
        if provider is not self._provider or provider is None:
            provider = trace.get_tracer_provider()
            if provider is not self._provider:
                self._adopt(provider)
        context = _current()
        parent: Any = context.get(_KEY)
        parent_id: int | None = None
        trace_id, parent_flags, remote = 0, 0, False
        if parent is not None:  # the costly questions only then
            kept = getattr(parent, "admission", None)
            if type(kept) is Admission:
                trace_id, parent_id, parent_flags = kept.trace_id, kept.span_id, kept.flags
            elif _Span in type(parent).__mro__ or isinstance(parent, _Span):  # the second takes 0.2 µs
                known = parent.get_span_context()
                trace_id, parent_id, remote, parent_flags, _, valid = known if _in_order else runtime.fields(known)
                if not valid:
                    parent, parent_id, trace_id, parent_flags, remote = None, None, 0, 0, False
            else:
                parent = None
        tracer = self._tracer
        if tracer is None:
            trace_id = trace_id or _random_id(128)
            return Admission(None, context, parent, parent_id, trace_id, _random_id(64), _SAMPLED)
        if not self._sdk:
            return self._admit_foreign(name, attributes, context, parent, parent_id)

        enabled = self._enabled
        if enabled is not None and not enabled():
            return None
        sampler, generator, rules = tracer.sampler, tracer.id_generator, self._rules
        if rules is None or rules.sampler is not sampler:
            rules = self._rules = StaticRules(sampler)
        usual = type(generator) is rules.usual_generator  # which draws random bits: two calls fewer to do it here
        if parent_id is None:
            trace_id = (_bits(128) or 1) if usual else generator.generate_trace_id()
            flags = _RANDOM if _RANDOM and (usual or generator.is_trace_id_random()) else 0
            answer = rules.root
        else:
            flags = parent_flags & _RANDOM
            answer = (rules.remote_child if remote else rules.child)[parent_flags & _SAMPLED]
        sampling: Any = None
        if answer < 0:
            asked = rules.asked_at_root if parent_id is None else sampler
            try:
                sampling = asked.should_sample(context, trace_id, name, _INTERNAL, attributes, ())
            except Exception as error:  # noqa: BLE001 - a sampler of the user's; the call must not feel it
                self._ledger.fault("sampler_raised", error)
                return None
            answer = rules.bits(sampling.decision)
        if answer & SAMPLED:
            flags |= _SAMPLED
        elif not answer and parent is not None and not parent_flags & _SAMPLED and not parent.is_recording():
            return None  # the context says so already
        span_id = (_bits(64) or 1) if usual else generator.generate_span_id()
        return Admission(tracer, context, parent, parent_id, trace_id, span_id, flags, sampling, sampler, answer != 0)

    def attach(self, span: RecordingSpan | SilentSpan) -> Any:
        """Make *span*, or the provider's own in its place, the current one; returns what :meth:`detach` needs."""
        kept = span.admission
        assert kept is not None  # noqa: S101 - it was admitted
        # A context refuses changes; ``set_value`` would copy it twice for each value.
        return _attach(Context({**kept.context, _KEY: kept.foreign or span, OURS: span}))

    def attach_context(self, context: Context) -> Any:
        """Make *context* the current one; returns what :meth:`detach` needs."""
        return runtime.attach(context)

    def current(self) -> Context:
        """Return the current context."""
        return runtime.current()

    def detach(self, token: Any) -> None:
        """Undo an attach. Silent when the caller's own code already left another context behind."""
        try:
            _detach(token)
        except ValueError:
            self._ledger.count("context_moved")

    def restore(self, opened: Any) -> None:
        """Give the caller of *opened* its context back, also where an interrupt has lost the token. Never raises."""
        if opened is None:
            return
        token, before, kept = opened.token, opened.caller_context, opened.admission
        if token is LEFT:
            return
        try:
            opened.token = LEFT
            if token is not None:
                runtime.detach(token)
            elif before is not None and (kept is None or runtime.current().get(OURS) is opened):
                runtime.attach(before)
            elif kept is not None and runtime.current().get(OURS) is opened:
                runtime.attach(kept.context)
        except ValueError:
            self._ledger.count("context_moved")
        except RuntimeError:  # the interrupt came just after it was detached
            pass

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
        self._enabled = getattr(tracer, "_is_enabled", None)
        self._provider = provider  # last: another thread that sees it must find the rest
        for listener in self.on_provider:
            listener()

    def _admit_foreign(
        self, name: str, attributes: Mapping[str, AttributeValue], context: Context, parent: Any, parent_id: int | None
    ) -> Admission | Context | None:
        """Let a provider that is not the SDK's start its own span, by the plain API."""
        tracer = self._tracer
        span = tracer.start_span(name, context=context, attributes=attributes)
        known = span.get_span_context()
        if not span.is_recording():
            return None if parent is span or not known.is_valid else trace.set_span_in_context(span, context)
        flags = int(known.trace_flags)
        return Admission(tracer, context, parent, parent_id, known.trace_id, known.span_id, flags, foreign=span)


class AloneGate(Gate):
    """Records every call with ids of its own, whatever provider and sampler say: for measuring ourselves."""

    def _adopt(self, provider: Any) -> None:
        self._provider = provider  # seen, and not used


def _random_id(width: int) -> int:
    return random.getrandbits(width) or 1
