"""What a span costs on the calling thread, in interleaved rounds, beside the usual ways to do the same.

    python tests/perf/overhead.py [--json FILE]

Without a GPU the device's part is left out. Rounds are short and spaced, so that resolving and exporting,
which happen on another thread, do not run in between; what they cost a busy process is another question.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from gpu_timed import configure, flush, gpu_timed

CALLS, ROUNDS = 200, 25


class Nowhere(SpanExporter):
    """Takes every span and keeps none."""

    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def bare() -> None:
    """Do nothing: the call alone."""


def arms(torch: Any) -> dict[str, Callable[[], None]]:
    """Return the calls to compare, by name."""
    tracer = trace.get_tracer("usual")

    def otel_span() -> None:
        with tracer.start_as_current_span("usual"):
            pass

    def obvious() -> None:
        with tracer.start_as_current_span("usual"):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            end.record()

    def obvious_with_sync() -> None:
        with tracer.start_as_current_span("usual") as span:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            end.record()
            end.synchronize()
            span.set_attribute("ms", start.elapsed_time(end))

    found = {
        "bare call": bare,
        "gpu_timed, every=1000000 (left out)": gpu_timed(every=1_000_000)(lambda: None),
        "gpu_timed, deferred": gpu_timed(sync="deferred")(lambda: None),
        "gpu_timed, boundary": gpu_timed(sync="boundary")(lambda: None),
        "OpenTelemetry span alone": otel_span,
    }
    if torch is not None:
        found["OpenTelemetry span, two torch events"] = obvious
        found["OpenTelemetry span, two torch events, sync"] = obvious_with_sync
    return found


def measure(torch: Any) -> dict[str, float]:
    """Return the median nanoseconds a call, over interleaved rounds."""
    calls = arms(torch)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for round_ in range(ROUNDS + 2):
        for name in order:
            call = calls[name]
            gc.collect()
            gc.disable()
            begin = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            each = (time.perf_counter_ns() - begin) / CALLS
            gc.enable()
            if torch is not None:
                torch.cuda.synchronize()
            flush(30)
            if round_ >= 2:  # the first two fill pools and caches
                taken[name].append(each)
        order.append(order.pop(0))
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> None:
    """Print the table, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    trace.set_tracer_provider(provider)
    configure(poll_ms=1000)
    try:
        import torch

        cuda = torch if torch.cuda.is_available() else None
    except ImportError:
        cuda = None
    if cuda is not None:
        cuda.ones(1, device="cuda")
        cuda.cuda.synchronize()
    environment = {
        "card": cuda.cuda.get_device_name() if cuda is not None else "none",
        "torch": cuda.__version__ if cuda is not None else "",
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"),
    }
    found = measure(cuda)
    print(environment)
    for name, value in found.items():
        print(f"{name:45s} {value / 1e3:9.2f} µs")
    if options.json:
        options.json.write_text(json.dumps({"environment": environment, "ns": found}, indent=1))


if __name__ == "__main__":
    main()
