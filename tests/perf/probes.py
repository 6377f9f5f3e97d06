"""What knowing cold from warm costs a hot call: the probes of all runtimes together, on the calling thread.

    python tests/perf/probes.py [--rounds 40] [--json FILE]

Nanoseconds a span, medians over interleaved rounds, torch imported. First the very steps that a span takes for its
warmth, without the rest: reading the ring's generation at the begin and comparing it at the end, and asking whether
cuDNN tunes itself for each shape (``torch.backends.cudnn.benchmark`` is off); each less an empty function. Then whole
deferred spans, on the device if torch finds one, with the probes and without. Last what a call pays while cuDNN does
tune itself, by the number of tensors it takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu_timed import current, flush, gpu_timed

CALLS = 20_000
SPANS = 2_000


class Steps:
    """A span and a tracer, as far as they have to do with warmth."""

    def __init__(self, warmth: Any) -> None:
        self.warmth = warmth
        self.generation = 0

    def nothing(self) -> None:
        """Do nothing."""

    def generations(self) -> None:
        """As ``Span.begin`` and ``Span.finish`` do."""
        warmth = self.warmth
        if warmth is not None:
            self.generation = warmth.generation
        warmth = self.warmth
        if warmth is not None and warmth.generation != self.generation:
            raise AssertionError

    def inputs(self) -> None:
        """As ``Tracer.enter`` does."""
        warmth = self.warmth
        if warmth is not None:
            tunes = warmth.tunes_by_shape
            if tunes is not None and tunes():
                raise AssertionError


def per_call(call: Callable[[], Any], calls: int) -> float:
    """Return nanoseconds a call; what is left to do afterwards is done before the next are timed."""
    began = time.perf_counter_ns()
    for _ in range(calls):
        call()
    took = (time.perf_counter_ns() - began) / calls
    flush(30)
    return took


def interleaved(calls: dict[str, Callable[[], Any]], count: int, rounds: int) -> dict[str, list[float]]:
    """Return nanoseconds a call in each round."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls)[:: 1 if number % 2 else -1]:
            found[name].append(per_call(calls[name], count))
    return found


def over(found: dict[str, list[float]], name: str, base: str) -> float:
    """Return by how much *name* takes longer than *base*, the median over rounds."""
    return statistics.median(a - b for a, b in zip(found[name], found[base], strict=True))


def steps(rounds: int) -> dict[str, float]:
    """Return what the steps of warmth cost."""
    held = Steps(current.tracer().warmth)
    calls = {"nothing": held.nothing, "generations": held.generations, "inputs": held.inputs}
    found = interleaved(calls, CALLS, rounds)
    parts = {name: over(found, name, "nothing") for name in ("generations", "inputs")}
    return {**parts, "together": sum(parts.values())}


def spans(rounds: int) -> dict[str, float]:
    """Return what whole spans cost with and without the probes, and while cuDNN tunes itself."""
    tracer = current.tracer()
    warmth, reader = tracer.warmth, tracer.resolver.reader
    timed = gpu_timed(lambda *_: None, name="timed", sync="deferred")
    tensors = [torch.empty(1, 3, n, n) for n in range(1, 9)]

    def arm(watched: Any, tuning: bool, *args: Any) -> Callable[[], None]:
        def run() -> None:
            tracer.warmth = reader.warmth = watched
            torch.backends.cudnn.benchmark = tuning
            for _ in range(SPANS):
                timed(*args)

        return run

    calls = {
        "without": arm(None, False, tensors[0]),
        "with": arm(warmth, False, tensors[0]),
        "tuning, 1 tensor": arm(warmth, True, tensors[0]),
        "tuning, 8 tensors": arm(warmth, True, *tensors),
    }
    found = {name: [value / SPANS for value in held] for name, held in interleaved(calls, 1, rounds).items()}
    tracer.warmth = reader.warmth = warmth
    torch.backends.cudnn.benchmark = False
    whole = statistics.median(found["without"])
    return {"whole span without": whole, **{name: over(found, name, "without") for name in calls if name != "without"}}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    gc.disable()
    if torch.cuda.is_available():
        torch.cuda.init()
    found = {"steps": steps(options.rounds), "spans": spans(options.rounds)}
    for title, values in found.items():
        for name, value in values.items():
            print(f"{title:6} {name:20} {value:8.0f} ns")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
