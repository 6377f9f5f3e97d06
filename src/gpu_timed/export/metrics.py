"""Metrics of finished spans: histograms of device, launch and queue time, and counts of what was not exported.

Recorded on the resolver's thread, in the context of the span, so that exemplars point at it. They go to the
application's meter provider: Prometheus, OTLP or any other reader is OpenTelemetry's own. Without one they
cost nothing. ``warmth`` and ``mode`` are attributes, so that cold calls never pollute warm statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, Observation

from gpu_timed.bounds import Limit
from gpu_timed.delivery import LOSSES
from gpu_timed.export.attributes import DEVICE_INDEX, MODE, WARMTH, WARMTH_TIER
from gpu_timed.record import Missing, Record

DEVICE_DURATION: Final = "gpu_timed.device.duration"
"""Histogram, seconds: from start mark to end mark on the device."""
LAUNCH_DURATION: Final = "gpu_timed.launch.duration"
"""Histogram, seconds: host time from entering the function to its return."""
QUEUE_DURATION: Final = "gpu_timed.queue.duration"
"""Histogram, seconds: how long the call's work waited behind earlier work."""
COMPILE_DURATION: Final = "gpu_timed.compile.duration"
"""Histogram, seconds: host time of cold calls in compiling, tuning and loading."""
COLD: Final = "gpu_timed.cold"
"""Counter: causes of cold calls, by probe and tier."""
CALLS: Final = "gpu_timed.calls"
"""Counter: calls of each site, those that were not recorded included."""
LOST: Final = "gpu_timed.spans.lost"
"""Counter: spans that did not get to the exporter or came without their device time, by reason."""
FAULTS: Final = "gpu_timed.faults"
"""Counter: things that went wrong inside gpu_timed, by kind."""
IN_USE: Final = "gpu_timed.limit.in_use"
"""Gauge: how much of each limit of the process is used. Some thirty series, whose names come from gpu_timed."""
MOST: Final = "gpu_timed.limit.most"
"""Gauge: each limit."""
DROPPED: Final = "gpu_timed.limit.dropped"
"""Counter: what did not find room under each limit, or made room for something newer."""
LIMIT_NAME: Final = "gpu_timed.limit.name"
"""Attribute: which limit, as ``gpu-timed doctor`` names them."""
SPAN_NAME: Final = "gpu_timed.span.name"
"""Attribute: the site's name, from code."""
PROBE: Final = "gpu_timed.probe"
"""Attribute: which probe saw the cause."""
REASON: Final = "gpu_timed.reason"
"""Attribute: why a span was lost, or what kind of fault it was."""

BUCKETS: Final = (*(round(step * 10.0**power, 9) for power in range(-6, 1) for step in (1, 2, 5)), 10.0)
"""Seconds, from a microsecond to ten seconds: OpenTelemetry's own begin at five *seconds*."""
_LOSSES: Final = frozenset({*LOSSES, "overflow"})
_NOT_SET_YET: Final = "_ProxyMeterProvider"
"""What the API gives before the application has set a provider (1.30 to 1.45). Instruments made there would be made
again on the real one, beside ours."""
_PROGRESS: Final = frozenset({"handed_over", "exported", "batched", "not_timed_in_compiled_region"})


class MetricsSink:
    """Records every finished span with the meter provider in force.

    Args:
        version: Of this library, as the meter's.
        calls: Gives the calls so far by site name.
        counts: Gives the ledger's counts.
        limits: Gives every limit of the process.
    """

    def __init__(
        self,
        version: str,
        calls: Callable[[], Mapping[str, int]],
        counts: Callable[[], Mapping[str, int]],
        limits: Callable[[], Iterable[Limit]] = tuple,
    ) -> None:
        self._limits = limits
        self._version = version
        self._calls = calls
        self._counts = counts
        self._provider: Any = None
        self._histograms: list[tuple[str, Any]] = []
        self._compile: Any = None
        self._cold: Any = None

    def announce(self, span: Any, record: Record) -> None:
        """Record nothing: the numbers are still to come."""

    def emit(self, span: Any, record: Record) -> None:  # noqa: ARG002 - the shape of a sink
        """Record what was measured; what is missing is left out."""
        provider = metrics.get_meter_provider()
        if provider is not self._provider:
            if type(provider).__name__ == _NOT_SET_YET:
                return
            self._begin(provider)
        attributes: dict[str, Any] = {SPAN_NAME: record.name, WARMTH: record.warmth}
        if isinstance(record.mode, str):
            attributes[MODE] = record.mode
        if isinstance(record.device, int):
            attributes[DEVICE_INDEX] = record.device
        context = _context_of(record)
        for field, histogram in self._histograms:
            value = getattr(record, field)
            if not isinstance(value, Missing):
                histogram.record(value / 1e9, attributes, context)
        if record.causes:
            for cause in record.causes:
                self._cold.add(1, {SPAN_NAME: record.name, PROBE: cause.probe, WARMTH_TIER: cause.tier})
            if isinstance(record.compile_ns, int):
                self._compile.record(record.compile_ns / 1e9, {SPAN_NAME: record.name}, context)

    # -- inside ---------------------------------------------------------------------------------------

    def _begin(self, provider: Any) -> None:
        meter = provider.get_meter("gpu_timed", self._version)

        def histogram(name: str, what: str) -> Any:
            return meter.create_histogram(name, "s", what, explicit_bucket_boundaries_advisory=BUCKETS)

        self._histograms = [
            ("device_ns", histogram(DEVICE_DURATION, "Time from start mark to end mark on the device.")),
            ("launch_ns", histogram(LAUNCH_DURATION, "Host time from entering the function to its return.")),
            ("queue_ns", histogram(QUEUE_DURATION, "How long the work waited behind earlier work.")),
        ]
        self._compile = histogram(COMPILE_DURATION, "Host time of cold calls in compiling, tuning and loading.")
        self._cold = meter.create_counter(COLD, "{cause}", "Causes of cold calls.")
        meter.create_observable_counter(CALLS, [self._observe_calls], "{call}", "Calls, recorded or not.")
        meter.create_observable_counter(LOST, [self._observe_lost], "{span}", "Spans lost, by reason.")
        meter.create_observable_counter(FAULTS, [self._observe_faults], "{fault}", "Faults inside gpu_timed.")
        meter.create_observable_gauge(IN_USE, [self._observe_use], "{item}", "How much of each limit is used.")
        meter.create_observable_gauge(MOST, [self._observe_most], "{item}", "Each limit.")
        meter.create_observable_counter(DROPPED, [self._observe_dropped], "{item}", "What did not find room.")
        self._provider = provider

    def _observe_use(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(one.in_use, {LIMIT_NAME: one.name}) for one in self._limits() if one.in_use is not None]

    def _observe_most(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(one.most, {LIMIT_NAME: one.name}) for one in self._limits() if one.in_use is not None]

    def _observe_dropped(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(one.dropped, {LIMIT_NAME: one.name}) for one in self._limits() if one.dropped]

    def _observe_calls(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(count, {SPAN_NAME: name}) for name, count in self._calls().items() if count]

    def _observe_lost(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(count, {REASON: kind}) for kind, count in self._counts().items() if kind in _LOSSES]

    def _observe_faults(self, _: CallbackOptions) -> Iterable[Observation]:
        other = _LOSSES | _PROGRESS
        return [Observation(count, {REASON: kind}) for kind, count in self._counts().items() if kind not in other]


def _context_of(record: Record) -> Any:
    """Return a context in which the record's host span is the current one."""
    held = trace.SpanContext(record.trace_id, record.span_id, is_remote=False, trace_flags=_SAMPLED)
    return trace.set_span_in_context(trace.NonRecordingSpan(held))


_SAMPLED: Final = trace.TraceFlags(trace.TraceFlags.SAMPLED)
