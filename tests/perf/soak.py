"""A long run: does anything grow, and is every span exported or counted?

    python tests/perf/soak.py [--spans 10000000] [--seconds S] [--piece 250000] [--warm-up 50000] [--json FILE] [--gpu]

Spans of every kind, in turn: nested, failing, left out by ``every=``, generators, coroutines, blocks, a boundary, a
function that writes to its span, and a chain of contexts in which each call begins the next. In a process of a
service's shape: OpenTelemetry's SDK, a batch exporter that counts and keeps nothing. After each piece it says what
there is: resident memory, threads, live objects, marks in use, and the limits that are not empty; with ``--json`` a
line for each piece is appended, so that runs can be added up. It fails if spans are missing, if memory grew by more
than 50 MB for a million spans, or if a mark was not given back.

Without ``--gpu`` the device is make-believe and its clock moves as it is told; with it, real kernels on real streams.
``--seconds`` ends a run by time, the warm-up included, with six looks on the way: runs of some minutes on a card add
up to a long one. All spans of a run are made on one thread, and it waits for the resolver where that falls behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from gpu_timed import configure, current, flush, gpu_span, gpu_timed
from gpu_timed.delivery import LOSSES
from gpu_timed.export.provider import CountingProcessor
from gpu_timed.testing import FakeDevice, use_device

US = 1_000
GROWTH_MB = 50.0
"""For each million spans: DESIGN's budget."""
LOOKS = 6
"""Of a run that is ended by time; the first ends the warm-up, if that was not over before."""
STUCK_S = 120.0
"""Without a span resolved for so long, the run is given up."""
CATCH_UP = 5_000
"""Spans waiting, from which on the caller waits for the resolver: what is dropped would only be counted."""


class Counted(SpanExporter):
    """Counts host and device spans, and keeps none."""

    def __init__(self) -> None:
        self.host = self.device = 0

    def export(self, spans: Any) -> SpanExportResult:
        for span in spans:
            if span.name.endswith("]"):
                self.device += 1
            else:
                self.host += 1
        return SpanExportResult.SUCCESS


class Load:
    """Calls of every kind. ``made`` counts the spans that must come out."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.made = 0
        self._context = contextvars.copy_context()
        self._loop = asyncio.new_event_loop()
        deferred = gpu_timed(sync="deferred")

        @deferred
        def inner() -> None:
            work()

        @deferred
        def outer() -> None:
            inner()
            inner()

        @gpu_timed(sync="deferred", attributes=lambda: {"batch": 8})
        def failing() -> None:
            work()
            raise KeyError("expected")

        @gpu_timed(sync="deferred", every=4)
        def thinned() -> None:
            work()

        @gpu_timed(sync="boundary")
        def boundary() -> None:
            work()

        @deferred
        def generator() -> Iterator[int]:
            for number in range(3):
                work()
                yield number

        @deferred
        async def coroutine() -> None:
            work()
            await asyncio.sleep(0)
            work()

        @deferred
        def chained() -> None:
            work()
            self._context = contextvars.copy_context()

        @deferred
        def writing() -> None:
            span = trace.get_current_span()
            span.set_attribute("tokens", 512)
            span.add_event("prefilled", {"step": 1})
            work()

        def block() -> None:
            with gpu_span("block", sync="deferred", attributes={"layer": 3}) as span:
                work()
            del span

        self._calls = (outer, failing, thinned, boundary, generator, coroutine, chained, writing, block)
        self._thinned = 0

    def round(self) -> None:
        """Call each kind once."""
        outer, failing, thinned, boundary, generator, coroutine, chained, writing, block = self._calls
        outer()
        try:
            failing()
        except KeyError:
            pass
        thinned()
        boundary()
        for _ in generator():
            pass
        self._loop.run_until_complete(coroutine())
        self._context.run(chained)
        writing()
        block()
        self.made += 10 + (self._thinned % 4 == 0)
        self._thinned += 1

    def close(self) -> None:
        """Close the event loop."""
        self._loop.close()


def resident_mb() -> float:
    """Return the resident memory of this process in 10^6 bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 1e6


def look(load: Load, exporter: Counted, marks: Callable[[], int], began: float) -> dict[str, Any]:
    """Return what there is, after everything has come out."""
    done = flush(120)
    gc.collect()
    counts = dict(done.counts)
    batch = (
        "exported",
        "rejected",
        "export_failed",
        "dropped_in_batch",
    )  # host and device spans, after the handing over
    lost = sum(counts.get(kind, 0) for kind in LOSSES if kind not in batch)
    gone = abs(load.made - counts.get("handed_over", 0) - lost)
    gone += abs(counts.get("batched", 0) - sum(counts.get(kind, 0) for kind in batch))
    gone += abs(counts.get("exported", 0) - exporter.host - exporter.device)
    return {
        "seconds": round(time.monotonic() - began, 1),
        "made": load.made,
        "host_spans": exporter.host,
        "device_spans": exporter.device,
        "lost": lost + sum(counts.get(kind, 0) for kind in batch[1:]),
        "missing": gone,
        "rss_mb": round(resident_mb(), 1),
        "threads": threading.active_count(),
        "objects": len(gc.get_objects()),
        "marks": marks(),
        "limits": {each.name: each.in_use for each in current.limits() if each.in_use},
        "dropped": {each.name: each.dropped for each in current.limits() if each.dropped},
        "counts": counts,
    }


def run(load: Load, exporter: Counted, options: argparse.Namespace, around: Any) -> list[dict[str, Any]]:
    """Run in pieces; returns a look after the warm-up and after each piece."""
    catch_up, marks = around
    resolver = current.tracer().resolver
    began = time.monotonic()
    seen: list[dict[str, Any]] = []

    def until(done: Callable[[], bool]) -> None:
        while not done():
            for _ in range(50):
                load.round()
            catch_up()
            waited = time.monotonic()
            while resolver.pending > CATCH_UP:
                time.sleep(0.005)
                if time.monotonic() - waited > STUCK_S:
                    print(f"{resolver.pending} spans were not resolved within {STUCK_S:.0f} s", file=sys.stderr)
                    raise SystemExit(2)
        catch_up()
        seen.append(look(load, exporter, marks, began))
        show(seen[-1])
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(seen[-1]) + "\n")

    warm_up = options.warm_up
    if options.seconds:
        piece_s = options.seconds / LOOKS
        until(lambda: load.made >= warm_up or time.monotonic() >= began + piece_s)
        for piece in range(2, LOOKS + 1):
            until(lambda end=began + piece * piece_s: time.monotonic() >= end)
    else:
        until(lambda: load.made >= warm_up)
        for piece in range(1, -(-options.spans // options.piece) + 1):
            end = min(piece * options.piece, options.spans) + warm_up
            until(lambda end=end: load.made >= end)
    return seen


def show(found: dict[str, Any]) -> None:
    """Print a line."""
    limits = ", ".join(f"{name} {value:,}" for name, value in found["limits"].items())
    print(
        f"{found['seconds']:>8.0f} s {found['made']:>11,} spans {found['rss_mb']:>7.1f} MB",
        f"{found['threads']:>3} threads {found['objects']:>9,} objects {found['marks']:>5} marks in use,",
        f"{found['missing']} missing, {found['lost']} counted as lost | {limits} | dropped {found['dropped']}",
        flush=True,
    )


def verdict(seen: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong, in words."""
    first, last = seen[0], seen[-1]
    millions = (last["made"] - first["made"]) / 1e6
    grown = last["rss_mb"] - first["rss_mb"]
    found = []
    if grown > GROWTH_MB * max(millions, 0.2):
        found.append(f"memory grew by {grown:.1f} MB in {millions:.2f} million spans")
    if last["missing"]:
        found.append(f"{last['missing']} spans were neither exported nor counted")
    if last["marks"] > first["marks"]:
        found.append(f"{last['marks']} marks in use, {first['marks']} at first")
    if last["threads"] > first["threads"]:
        found.append(f"{last['threads']} threads, {first['threads']} at first")
    print(f"memory: {grown:+.1f} MB in {millions:.2f} million spans; objects: {last['objects'] - first['objects']:+,}")
    print(f"{(last['made'] - first['made']) / max(0.1, last['seconds'] - first['seconds']):,.0f} spans a second")
    return found


def on_gpu() -> tuple[Callable[[], Any], Callable[[], None], Callable[[], int]]:
    """Return some work, what lets the device catch up, and how many events are in use."""
    import torch

    torch.zeros(1, device="cuda")
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    values = torch.zeros(1 << 16, device="cuda")
    turn = 0

    def work() -> None:
        nonlocal turn
        turn += 1
        with torch.cuda.stream(streams[turn % 3] if turn % 10 == 0 else streams[0]):
            values.add_(1.0)

    def in_use() -> int:
        clock = current.tracer().locator._cuda._clock
        if clock is None:
            return 0
        return sum(device.made - device.destroyed - len(device.free) for device in clock._devices.values())

    return work, torch.cuda.synchronize, in_use


def main() -> None:
    """Run, and say whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=float, default=0.0, help="run for so long instead")
    parser.add_argument("--warm-up", type=int, default=50_000, help="spans before the first look: pools and rings fill")
    parser.add_argument("--piece", type=int, default=250_000)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    provider, exporter = TracerProvider(), Counted()
    provider.add_span_processor(CountingProcessor(exporter, current.ledger()))
    trace.set_tracer_provider(provider)
    configure(sync="deferred")
    if options.gpu:
        work, catch_up, marks = on_gpu()
        load = Load(work)
        seen = run(load, exporter, options, (catch_up, marks))
    else:
        with use_device(FakeDevice()) as device:

            def work() -> None:
                device.launch(20 * US)
                device.host_clock.advance(5 * US)

            load = Load(work)
            seen = run(load, exporter, options, (device.run_dry, lambda: device.marks_in_use))
    load.close()
    wrong = verdict(seen)
    print("wrong: " + "; ".join(wrong) if wrong else "nothing grew, and every span was exported or counted")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
