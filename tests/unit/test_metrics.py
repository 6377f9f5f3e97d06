"""Metrics: histograms with exemplars that point at spans, counts of calls, causes and losses; Prometheus."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.util._once import Once

from gpu_timed import configure, current, flush, gpu_timed
from gpu_timed.testing import FakeDevice, capture

US = 1_000


@pytest.fixture
def reader() -> Any:
    """The reader of a global meter provider of the application's."""
    metrics._internal._METER_PROVIDER_SET_ONCE = Once()
    metrics._internal._METER_PROVIDER = None
    held = InMemoryMetricReader()
    provider = MeterProvider([held], shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    yield held
    provider.shutdown()
    metrics._internal._METER_PROVIDER_SET_ONCE = Once()
    metrics._internal._METER_PROVIDER = None


def read(reader: Any) -> dict[str, list[Any]]:
    """Return the data points by metric name."""
    flush(10)
    data = reader.get_metrics_data()
    if data is None:
        return {}
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if scope.scope.name == "gpu_timed"
    }


def test_times_in_seconds_by_name_warmth_and_device(reader: Any, device: FakeDevice) -> None:
    """Device, launch and queue time, cold calls apart from warm ones, in buckets of microseconds."""

    @gpu_timed(name="step", mode="eager")
    def step(cold: bool) -> None:
        device.launch(30 * US)
        device.host_clock.advance(5 * US)
        if cold:
            current._state.ring.emit("torch.compile", "f compiled", "built", 2_000 * US)

    for cold in (True, False, False):
        step(cold)
    found = read(reader)
    points = {point.attributes["gpu_timed.warmth"]: point for point in found["gpu_timed.device.duration"]}
    assert {warmth: (point.count, round(point.sum, 9)) for warmth, point in points.items()} == {
        "cold": (1, 30e-6),
        "warm": (2, 60e-6),
    }
    assert dict(points["warm"].attributes) == {
        "gpu_timed.span.name": "step",
        "gpu_timed.warmth": "warm",
        "gpu_timed.mode": "eager",
        "gpu_timed.device.index": 0,
    }
    point = points["warm"]
    assert [bound for bound, count in zip(point.explicit_bounds, point.bucket_counts, strict=False) if count] == [50e-6]
    assert sum(each.sum for each in found["gpu_timed.launch.duration"]) == pytest.approx(15e-6)
    assert {each.count for each in found["gpu_timed.queue.duration"]} == {1, 2}
    (compiling,) = found["gpu_timed.compile.duration"]
    assert compiling.sum == pytest.approx(2e-3)
    (cause,) = found["gpu_timed.cold"]
    assert (cause.value, cause.attributes["gpu_timed.probe"], cause.attributes["gpu_timed.warmth.tier"]) == (
        1,
        "torch.compile",
        "built",
    )


def test_an_exemplar_points_at_its_span(reader: Any, exporter: Any, device: FakeDevice) -> None:
    """The exemplar has the trace and span id of the host span that was exported."""
    with capture() as records:
        gpu_timed(lambda: device.launch(7 * US), name="f")()
    (point,) = read(reader)["gpu_timed.device.duration"]
    (exemplar,) = point.exemplars
    assert (exemplar.trace_id, exemplar.span_id) == (records[0].trace_id, records[0].span_id)
    assert exemplar.value == pytest.approx(7e-6)


def test_calls_are_counted_whether_recorded_or_not(reader: Any, device: FakeDevice) -> None:
    """Two sites of one name are one count; a call that was left out is in it; a site without calls is not."""
    first, second = (gpu_timed(lambda: None, name="f", every=10) for _ in range(2))
    gpu_timed(lambda: None, name="never called")
    for _ in range(25):
        first()
    second()
    gpu_timed(lambda: None, name="gone")()
    found = read(reader)
    assert sorted((p.value, p.attributes["gpu_timed.span.name"]) for p in found["gpu_timed.calls"]) == [
        (1, "gone"),
        (26, "f"),
    ]
    assert sum(point.count for point in found["gpu_timed.launch.duration"]) == 5
    assert len(read(reader)["gpu_timed.calls"]) == 2, "a count never goes back"


def test_what_was_not_measured_is_not_recorded(reader: Any, device: FakeDevice) -> None:
    """A Missing time is no zero: it is in no histogram."""
    device.disappear()
    gpu_timed(lambda: None, name="f")()
    found = read(reader)
    assert "gpu_timed.device.duration" not in found
    assert [point.count for point in found["gpu_timed.launch.duration"]] == [1]


def test_losses_and_faults_are_counters(reader: Any, device: FakeDevice) -> None:
    """Spans that went nowhere stand under their reason, faults under their kind; progress is in neither."""
    gpu_timed(lambda: None, name="f", attributes=lambda: 1 / 0)()
    found = read(reader)
    assert [(p.value, p.attributes["gpu_timed.reason"]) for p in found["gpu_timed.spans.lost"]] == [(1, "no_provider")]
    faults = {point.attributes["gpu_timed.reason"]: point.value for point in found["gpu_timed.faults"]}
    assert faults["attributes_raised"] == 1
    assert "handed_over" not in faults


def test_limits_are_gauges_and_what_they_dropped_a_counter(reader: Any, device: FakeDevice) -> None:
    """How full what is kept is, by the names of the doctor; a series of drops only where something was dropped."""
    configure(max_pending=2)
    f = gpu_timed(lambda: device.launch(10), name="f", sync="deferred")
    with device.held():
        for _ in range(3):
            f()
    device.run_dry()
    found = read(reader)
    use = {point.attributes["gpu_timed.limit.name"]: point.value for point in found["gpu_timed.limit.in_use"]}
    most = {point.attributes["gpu_timed.limit.name"]: point.value for point in found["gpu_timed.limit.most"]}
    assert (use["pending"], use["ends"], most["pending"], most["queue"]) == (0, 2, 2, 100_000)
    assert use.keys() == most.keys()
    dropped = {point.attributes["gpu_timed.limit.name"]: point.value for point in found["gpu_timed.limit.dropped"]}
    assert dropped == {"pending": 1}


def test_nothing_is_recorded_on_the_calling_thread(reader: Any, device: FakeDevice) -> None:
    """Aggregation is the resolver's: no instrument is touched by a decorated call."""
    threads: set[str] = set()
    gpu_timed(lambda: None, name="first")()
    read(reader)
    sink = next(s for s in current.tracer().resolver._sinks if type(s).__name__ == "MetricsSink")
    for field, histogram in sink._histograms:
        del field
        record = histogram.record

        def watched(*args: Any, record: Any = record, **kwargs: Any) -> None:
            threads.add(threading.current_thread().name)
            record(*args, **kwargs)

        histogram.record = watched
    gpu_timed(lambda: device.launch(1), name="second", sync="boundary")()
    read(reader)
    assert threads == {"gpu_timed-resolver"}


def test_a_provider_set_later_is_found(device: FakeDevice) -> None:
    """Calls before the application sets its provider are lost to metrics, and later ones are not."""
    f = gpu_timed(lambda: None, name="f")
    f()
    flush(10)
    metrics._internal._METER_PROVIDER_SET_ONCE = Once()
    metrics._internal._METER_PROVIDER = None
    held = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([held], shutdown_on_exit=False))
    f()
    (point,) = read(held)["gpu_timed.launch.duration"]
    assert point.count == 1
    metrics._internal._METER_PROVIDER_SET_ONCE = Once()
    metrics._internal._METER_PROVIDER = None


def test_prometheus_reads_them_by_opentelemetrys_own_exporter(device: FakeDevice) -> None:
    """Scraped as text: names, units and labels as Prometheus has them."""
    exporter = pytest.importorskip("opentelemetry.exporter.prometheus")
    prometheus = pytest.importorskip("prometheus_client")
    metrics._internal._METER_PROVIDER_SET_ONCE = Once()
    metrics._internal._METER_PROVIDER = None
    held = exporter.PrometheusMetricReader()
    provider = MeterProvider([held], shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    try:
        gpu_timed(lambda: device.launch(30 * US), name="f")()
        flush(10)
        text = prometheus.generate_latest().decode()
    finally:
        provider.shutdown()
        metrics._internal._METER_PROVIDER_SET_ONCE = Once()
        metrics._internal._METER_PROVIDER = None
    assert 'gpu_timed_span_name="f"' in text
    assert "gpu_timed_device_duration_seconds_bucket{" in text
    assert "gpu_timed_calls_total{" in text
