"""What a span costs on the calling thread, in interleaved rounds, beside the usual ways to do the same.

    python tests/perf/overhead.py [--rounds 25] [--json FILE]

Without a GPU the device's part is left out. Rounds are short and spaced, so that resolving and exporting,
which happen on another thread, do not run in between; what they cost a busy process is ``steps.py``'s question.
Each figure is the median over the rounds; each ratio is the median of the rounds' own ratios, so that what slows a
round down slows both of its sides. The stages are parts of one deferred span, each timed alone in the same process.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from surroundings import environment

from gpu_timed import configure, current, flush, gpu_timed
from gpu_timed.span import Span

CALLS = 200
FAR = trace.SpanContext(1 << 100, 1 << 50, is_remote=True, trace_flags=trace.TraceFlags(0))
UNSAMPLED = trace.NonRecordingSpan(FAR)
USUAL = "OpenTelemetry span, two torch events"
PLAIN = "OpenTelemetry span alone"
OURS = "gpu_timed, deferred"


class Nowhere(SpanExporter):
    """Takes every span and keeps none."""

    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.SUCCESS


class Arm:
    """One way to call: what is done around a block of calls, and the call."""

    def __init__(self, call: Callable[[], Any], around: Callable[[], Any] = contextlib.nullcontext) -> None:
        self.call = call
        self.around = around


def provider(sampler: Any = None) -> TracerProvider:
    """Return a provider that keeps nothing."""
    made = TracerProvider(sampler=sampler) if sampler is not None else TracerProvider()
    made.add_span_processor(BatchSpanProcessor(Nowhere()))
    return made


@contextlib.contextmanager
def global_provider(other: TracerProvider) -> Iterator[None]:
    """Make *other* the global provider for a block: OpenTelemetry's public call takes one only."""
    before = trace._TRACER_PROVIDER
    trace._TRACER_PROVIDER = other
    gpu_timed(name="adopt", sync="deferred")(bare)()
    try:
        yield
    finally:
        trace._TRACER_PROVIDER = before
        gpu_timed(name="adopt", sync="deferred")(bare)()


def bare() -> None:
    """Do nothing: the call alone."""


def arms(torch: Any) -> dict[str, Arm]:
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

    deferred = gpu_timed(sync="deferred")
    never = provider(ParentBased(TraceIdRatioBased(0.0)))
    inner = deferred(lambda: None)
    sampler, generator = never.sampler, never.id_generator

    def ask_sampler() -> None:
        sampler.should_sample(None, generator.generate_trace_id(), "usual", None, {}, ())

    found = {
        "bare call": Arm(bare),
        "gpu_timed, every=1000000 (left out)": Arm(gpu_timed(every=1_000_000)(lambda: None)),
        "gpu_timed, unsampled parent": Arm(deferred(lambda: None), lambda: trace.use_span(UNSAMPLED)),
        "gpu_timed, unsampled root": Arm(deferred(lambda: None), lambda: global_provider(never)),
        "the sampler of the line above alone": Arm(ask_sampler),
        OURS: Arm(deferred(lambda: None)),
        "gpu_timed, deferred, inside a span": Arm(
            deferred(lambda: None), lambda: tracer.start_as_current_span("around")
        ),
        "gpu_timed, deferred, two nested": Arm(deferred(inner)),
        "gpu_timed, boundary": Arm(gpu_timed(sync="boundary")(lambda: None)),
        PLAIN: Arm(otel_span),
    }
    if torch is not None:
        found[USUAL] = Arm(obvious)
        found["OpenTelemetry span, two torch events, sync"] = Arm(obvious_with_sync)
        result = torch.ones(1, device="cuda")
        found["gpu_timed, deferred, returns a tensor"] = Arm(deferred(lambda: result))

        def nvtx() -> None:
            with torch.cuda.nvtx.range("usual"):
                pass

        def record_function() -> None:
            with torch.profiler.record_function("usual"):
                pass

        found["NVTX range, no profiler"] = Arm(nvtx)
        found["torch record_function, no profiler"] = Arm(record_function)
    return found


def measure(torch: Any, rounds: int) -> dict[str, list[float]]:
    """Return the nanoseconds a call of every round."""
    calls = arms(torch)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for round_ in range(rounds + 2):
        for name in order:
            arm = calls[name]
            call = arm.call
            with arm.around():
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
    return taken


def stages(rounds: int) -> dict[str, float]:
    """Return what the parts of a deferred span take alone, median nanoseconds."""
    tracer = current.tracer()
    gate, locator, host = tracer.gate, tracer.locator, tracer.host
    site = current.new_site("stages", sync="deferred")
    admission = gate.admit(site.name, {})
    place = locator.locate()
    span = Span(tracer, site, 0, admission, {}, "deferred", "host")
    parts: dict[str, Callable[[], Any]] = {
        "an empty call": lambda: None,
        "decision, ids, parent (admit)": lambda: gate.admit(site.name, {}),
        "decision under an unsampled parent": lambda: gate.admit(site.name, {}),
        "span object": lambda: Span(tracer, site, 0, admission, {}, "deferred", "host"),
        "context attached and detached": lambda: gate.detach(gate.attach(span)),
        "where the work goes (locate), once": locator.locate,
        "host clock, once": host.now_ns,
    }
    if hasattr(place, "clock"):
        parts["mark placed and given back, once"] = lambda: place.clock.release(place.clock.mark(place))
    found: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, part in parts.items():
            around = trace.use_span(UNSAMPLED) if "unsampled" in name else contextlib.nullcontext()
            with around:
                begin = time.perf_counter_ns()
                for _ in range(CALLS):
                    part()
                found[name].append((time.perf_counter_ns() - begin) / CALLS)
    return {name: statistics.median(values) for name, values in found.items()}


def report(taken: dict[str, list[float]], parts: dict[str, float]) -> dict[str, Any]:
    """Print the tables, and return them."""
    usual = taken.get(USUAL) or taken[PLAIN]
    against = USUAL if USUAL in taken else PLAIN
    print(f"{'':45s} {'µs':>9s} {'added':>9s}   of '{against}'")
    figures: dict[str, Any] = {}
    for name, values in taken.items():
        added = statistics.median(one - bare for one, bare in zip(values, taken["bare call"], strict=True))
        ratio = statistics.median(one / other for one, other in zip(values, usual, strict=True))
        figures[name] = {"ns": statistics.median(values), "added_ns": added, "ratio": ratio}
        print(f"{name:45s} {statistics.median(values) / 1e3:9.2f} {added / 1e3:9.2f}   {ratio:.3f}")
    print("\nstages of one deferred span, each alone")
    for name, value in parts.items():
        print(f"{name:45s} {value / 1e3:9.2f}")
    return {"against": against, "arms": figures, "stages": parts}


def main() -> None:
    """Print the table, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trace.set_tracer_provider(provider())
    configure(poll_ms=1000)
    try:
        import torch

        cuda = torch if torch.cuda.is_available() else None
    except ImportError:
        cuda = None
    if cuda is not None:
        cuda.ones(1, device="cuda")
        cuda.cuda.synchronize()
    where = environment(cuda)
    print(where)
    found = report(measure(cuda, options.rounds), stages(options.rounds))
    if options.json:
        options.json.write_text(json.dumps({"environment": where, **found}, indent=1))


if __name__ == "__main__":
    main()
