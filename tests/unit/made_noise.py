"""Times of calls as machines give them: they drift, neighbours resemble each other, and some are far out."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence

from gpu_timed.analysis.deciding import Decider

Noise = Callable[[random.Random], Iterator[float]]


def made(
    *, spread: float = 0.01, likeness: float = 0.7, drift: float = 0.002, outliers: float = 0.01, steps: float = 0.001
) -> Noise:
    """Return a source of endless factors around 1, one for each call.

    *spread* of single calls, *likeness* of each to the one before, *drift* of a random walk in a call (and of a slow
    wave), how many are *outliers* of up to ten times, and how often clocks make *steps* of some percent.
    """

    def run(chance: random.Random) -> Iterator[float]:
        near = walk = shift = 0.0
        phase, index = chance.random() * 2 * math.pi, 0
        while True:
            near = likeness * near + math.sqrt(1 - likeness**2) * chance.gauss(0, spread)
            walk = 0.999 * walk + chance.gauss(0, drift / 3)
            if chance.random() < steps:
                shift = chance.uniform(-0.03, 0.03)
            wave = 0.01 * math.sin(phase + index / 300)
            far = chance.paretovariate(1.5) - 1 if chance.random() < outliers else 0.0
            yield math.exp(near + walk + shift + wave) * (1 + min(9.0, far))
            index += 1

    return run


def two_speeds(*, slow: float = 100.0, into: float = 0.02, out_of: float = 0.05, spread: float = 0.02) -> Noise:
    """Return a source that now and then is *slow* times as long for a while, as where threads wait for each other."""

    def run(chance: random.Random) -> Iterator[float]:
        slowed = False
        while True:
            if chance.random() < (out_of if slowed else into):
                slowed = not slowed
            yield (slow if slowed else 1.0) * math.exp(chance.gauss(0, spread))

    return run


def recorded(times: Sequence[float]) -> Noise:
    """Return a source that begins anywhere in *times*, and goes round."""

    def run(chance: random.Random) -> Iterator[float]:
        index = chance.randrange(len(times))
        while True:
            yield times[index]
            index = (index + 1) % len(times)

    return run


def compare(
    noise: Noise, factor: float, seed: int, *, blocks: int, calls: int, first: int = 2, precision: float | None = None
) -> Decider:
    """Compare a function with itself, made *factor* times as slow, in blocks as the engine makes them."""
    chance = random.Random(seed)
    times = noise(chance)
    more = {} if precision is None else {"precision": precision}
    decider = Decider(["one", "other"], "one", most_blocks=blocks, **more)
    enough = False
    while not enough:
        order = ["one", "other"]
        chance.shuffle(order)
        medians = {}
        for name in order:
            for _ in range(first):  # which find the caches as the other arm left them
                next(times)
            took = [next(times) * (factor if name == "other" else 1.0) for _ in range(calls)]
            medians[name] = statistics.median(took)
        enough = decider.add(medians)
    return decider
