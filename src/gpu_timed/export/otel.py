"""Turns a finished span into OpenTelemetry spans, exactly as the SDK would have made them at entry.

The real span is made by the SDK's own ``start_span``, on a shallow copy of the application's tracer
whose id generator and sampler answer what was decided when the call was entered. Limits, links, the
resource and every span processor are therefore the application's own, and ``on_start`` runs in the
caller's context.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from gpu_timed.export import attributes
from gpu_timed.ledger import Ledger
from gpu_timed.record import Missing, Record

_INTERNAL: Final = trace.SpanKind.INTERNAL


class _Decided:
    """Sampler and id generator in one, that repeat a decision made earlier."""

    __slots__ = ("_generator", "sampling", "span_id", "trace_id")

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self.sampling: Any = None
        self.trace_id = 0
        self.span_id = 0

    def should_sample(self, *_: Any, **__: Any) -> Any:
        return self.sampling

    def get_description(self) -> str:
        return "decided at entry by gpu_timed"

    def generate_span_id(self) -> int:
        return self.span_id or int(self._generator.generate_span_id())

    def generate_trace_id(self) -> int:
        return self.trace_id

    def is_trace_id_random(self) -> bool:
        return bool(self._generator.is_trace_id_random())


class OtelSink:
    """Hands spans to the provider that was in force when they were entered.

    Args:
        ledger: Where spans that could not be handed over are counted.
        device_spans: Whether a second span shows the device's work.
    """

    def __init__(self, ledger: Ledger, *, device_spans: bool) -> None:
        self._ledger = ledger
        self.device_spans = device_spans

    def announce(self, span: Any, record: Record) -> None:
        """Make and end the host span now, without the device's numbers: its device span will carry them."""
        kept = span.admission
        if kept.tracer is not None:
            held = attributes.of_host_span(record)
            span.host_span = kept.caller.run(self._make_host, span, record, self._copy(span), held)
            kept.caller.run(self._end_host, span.host_span, record)

    def emit(self, span: Any, record: Record) -> None:
        """Make the host span of *record*, its device span inside it, and end both at their own times."""
        kept = span.admission
        if kept.tracer is None:
            self._ledger.count("no_provider")
            return
        kept.caller.run(self._make, span, record)
        self._ledger.count("handed_over")

    # -- inside ---------------------------------------------------------------------------------------

    def _make(self, span: Any, record: Record) -> None:
        tracer = self._copy(span)
        if span.host_span is not None:
            self._make_device(span, record, tracer, span.host_span, attributes.of_host_span(record))
            return
        held, of_device = attributes.of_both_spans(record)
        host = self._make_host(span, record, tracer, held)
        try:
            self._make_device(span, record, tracer, host, of_device)
        finally:  # a processor that fails on the one must not cost the other
            self._end_host(host, record)

    def _copy(self, span: Any) -> Any:
        """Return the tracer to make this span with: a copy that repeats the decision, or a foreign one as it is."""
        kept = span.admission
        if kept.foreign is not None:
            return kept.tracer
        tracer = _clone(kept.tracer)  # anew each time: the original's resource changes after a fork
        decided = _Decided(kept.tracer.id_generator)
        decided.trace_id, decided.span_id = kept.trace_id, kept.span_id
        # A sampler whose answer was known at entry is asked for the whole of it now.
        decided.sampling = kept.sampling or kept.sampler.should_sample(
            kept.context, kept.trace_id, span.name, _INTERNAL, span.start_attributes, ()
        )
        tracer.sampler = tracer.id_generator = decided
        return tracer

    def _make_host(self, span: Any, record: Record, tracer: Any, held: dict[str, Any]) -> Any:
        kept = span.admission
        host = kept.foreign
        if host is None:
            host = tracer.start_span(
                span.name,
                context=kept.context,
                kind=_INTERNAL,
                attributes=span.start_attributes,
                start_time=record.start_ns,
            )
        for method, arguments, named in span.writes or ():
            try:
                getattr(host, method)(*arguments, **named)
            except Exception as error:  # noqa: BLE001 - what user code wrote costs itself, and not the span
                self._ledger.fault("write_raised", error)
        try:
            host.set_attributes(held)
        except Exception as error:  # noqa: BLE001 - a span that was begun is ended
            self._ledger.fault("write_raised", error)
        return host

    def _make_device(self, span: Any, record: Record, tracer: Any, host: Any, held: dict[str, Any]) -> None:
        if not self.device_spans or isinstance(record.device_start_ns, Missing):
            return
        if span.admission.foreign is None:
            decided = tracer.id_generator
            decided.span_id = 0  # a new one
            decided.sampling = _clone(decided.sampling)
            decided.sampling.attributes = held
        device = tracer.start_span(
            f"{record.name} [{record.device_type}]",
            context=trace.set_span_in_context(host, span.admission.context),
            kind=_INTERNAL,
            attributes=held,
            start_time=record.device_start_ns,
        )
        device.end(end_time=record.device_end_ns)

    def _end_host(self, host: Any, record: Record) -> None:
        try:
            if record.status == "error":
                host.set_status(Status(StatusCode.ERROR, record.error))
        finally:
            host.end(end_time=record.end_ns)


def _clone(original: Any) -> Any:
    """Copy an object of the SDK's as ``copy.copy`` does, at a sixth of its cost where it is a plain object."""
    kind: Any = type(original)
    if not _is_plain(kind):
        return copy.copy(original)
    made = object.__new__(kind)
    made.__dict__.update(original.__dict__)
    return made


@functools.lru_cache(maxsize=16)
def _is_plain(kind: Any) -> bool:
    """Return whether objects of *kind* keep everything in their ``__dict__``, and are copied as objects are."""
    return bool(kind.__dictoffset__) and not hasattr(kind, "__copy__") and not hasattr(kind, "__slots__")
