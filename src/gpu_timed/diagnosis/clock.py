"""How well a device's clock can be read: measured with the very marks that spans are made of.

Everything is asked of a :class:`~gpu_timed.ports.Bench`, so that a fake device passes through the same code.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from gpu_timed.errors import DeviceFault
from gpu_timed.findings import Finding
from gpu_timed.ports import Bench, Mark
from gpu_timed.record import Missing

IDLE_PAIRS: Final = 200
QUEUED_PAIRS: Final = 12
_QUEUED_ROUNDS: Final = 6
_MARKS_AT_ONCE: Final = 16
_MARK_ROUNDS: Final = 20
_READS: Final = 2_000
_WARM_UP: Final = 5
_WIDE_UNCERTAINTY_NS: Final = 50_000


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of one clock. Nanoseconds; None where it could not be."""

    floor_idle_ns: float | None
    """Median of an empty pair of marks on an idle stream."""
    floor_idle_min_ns: int | None
    """The least of them."""
    floor_queued_ns: float | None
    """Median of an empty pair queued behind work: what a pair adds to a span that holds no launch gap."""
    floor_queued_min_ns: int | None
    """The least of them."""
    resolution_ns: int | None
    """Smallest step seen between two durations."""
    uncertainty_ns: float | None
    """Median half-width of the interval in which a placed mark truly lies."""
    uncertainty_max_ns: int | None
    """The widest."""
    latency_ns: float | None
    """How long an idle device takes to reach what was just put on a stream."""
    mark_ns: float | None
    """What placing one mark costs the calling thread."""


def measure(bench: Bench) -> Figures:
    """Measure the clock of *bench*, whose stream must be idle and nobody else's.

    Raises:
        DeviceFault: The device answered with an error, or took no marks.
    """
    with bench.place.clock.unhindered():
        for _ in range(_WARM_UP):
            _idle_pair(bench)
        idle = [_idle_pair(bench) for _ in range(IDLE_PAIRS)]
        floors = [elapsed for elapsed, _, _ in idle]
        queued = [elapsed for _ in range(_QUEUED_ROUNDS) for elapsed in _queued_pairs(bench)]
        mark_ns = statistics.median(_cost_of_a_mark(bench) for _ in range(_MARK_ROUNDS))
    widths = [width for _, width, _ in idle]
    return Figures(
        floor_idle_ns=statistics.median(floors),
        floor_idle_min_ns=min(floors),
        floor_queued_ns=statistics.median(queued) if queued else None,
        floor_queued_min_ns=min(queued, default=None),
        resolution_ns=smallest_step([*floors, *queued]),
        uncertainty_ns=statistics.median(widths),
        uncertainty_max_ns=max(widths),
        latency_ns=statistics.median(latency for _, _, latency in idle),
        mark_ns=mark_ns,
    )


def smallest_step(values: Sequence[int]) -> int | None:
    """Return the smallest distance between two different *values*, or None where all are the same."""
    ordered = sorted(set(values))
    return min((after - before for before, after in itertools.pairwise(ordered)), default=None)


def findings(bench: Bench) -> Iterator[Finding]:
    """Measure the clock of *bench*, and say what its figures mean for spans.

    Raises:
        DeviceFault: The device answered with an error, or took no marks.
    """
    figures = measure(bench)
    device = bench.place.device
    values: dict[str, Any] = {"device": device, "clock": bench.place.clock.name, **asdict(figures)}
    yield Finding(f"floor.{device}", "ok", _floor(device, figures), values=values)
    wide = figures.uncertainty_ns is not None and figures.uncertainty_ns > _WIDE_UNCERTAINTY_NS
    yield Finding(
        f"placement.{device}",
        "warning" if wide else "ok",
        f"device {device}: a span's place on the host's time axis is true to ± {_us(figures.uncertainty_ns)} "
        f"(at most {_us(figures.uncertainty_max_ns)}); an idle device is reached after {_us(figures.latency_ns)}",
        "the host is busy: measure again when it is not" if wide else "",
        {"device": device, "uncertainty_ns": figures.uncertainty_ns, "latency_ns": figures.latency_ns},
    )
    yield Finding(
        f"cost.{device}",
        "ok",
        f"device {device}: placing a mark costs {_us(figures.mark_ns)}; a span places two",
        values={"device": device, "mark_ns": figures.mark_ns},
    )


def known(floors: Mapping[int, int]) -> Iterator[Finding]:
    """Report the *floors* (nanoseconds, by device) that the spans of this process have been held against."""
    for device, floor_ns in sorted(floors.items()):
        yield Finding(
            f"known_floor.{device}",
            "ok",
            f"device {device}: an empty pair of marks reads {_us(floor_ns)} at the least, as seen so far: "
            f"spans of less than {_us(2 * floor_ns)} are noted as below_floor",
            values={"device": device, "floor_ns": floor_ns},
        )


def host(now_ns: Callable[[], int]) -> Finding:
    """Report the smallest step of the host's monotonic clock."""
    step = smallest_step([now_ns() for _ in range(_READS)])
    text = f"the host's clock moves in steps of {_ns(step)}"
    return Finding("host", "ok", text, values={"resolution_ns": step})


def _floor(device: int, figures: Figures) -> str:
    queued = figures.floor_queued_ns
    behind = f", {_us(queued)} behind other work" if queued is not None else ""
    step = f"; steps of {_ns(figures.resolution_ns)}" if figures.resolution_ns is not None else ""
    return (
        f"device {device}: a span with nothing in it reads {_us(figures.floor_idle_ns)} on an idle stream "
        f"(least {_us(figures.floor_idle_min_ns)}){behind}: shorter work cannot be told from nothing{step}"
    )


def _idle_pair(bench: Bench) -> tuple[int, int, int]:
    """Return duration, half-width of its place, and latency of one empty pair on the idle stream."""
    clock = bench.place.clock
    called = bench.now_ns()
    start, end = _mark(bench), _mark(bench)
    clock.wait(end)
    seen = bench.now_ns()
    elapsed = _elapsed(bench, start, end)
    position = clock.position(start, elapsed, called, seen)
    clock.release(start, end)
    return elapsed, position.uncertainty_ns, position.latency_ns


def _elapsed(bench: Bench, start: Mark, end: Mark) -> int:
    elapsed = bench.place.clock.elapsed_ns(start, end)
    if isinstance(elapsed, Missing):
        raise DeviceFault(f"an empty pair of marks tells no time: {elapsed!r}")
    return elapsed


def _queued_pairs(bench: Bench) -> list[int]:
    """Return the durations of empty pairs that were all queued while the device was still at work."""
    if bench.busy is None:
        return []
    clock = bench.place.clock
    bench.busy()
    before = _mark(bench)
    pairs = [(_mark(bench), _mark(bench)) for _ in range(QUEUED_PAIRS)]
    behind = not clock.is_done(before)  # else the device had caught up: these are no queued pairs
    clock.wait(pairs[-1][1])
    found = [_elapsed(bench, start, end) for start, end in pairs] if behind else []
    clock.release(before, *(mark for pair in pairs for mark in pair))
    return found


def _cost_of_a_mark(bench: Bench) -> float:
    marks: list[Mark] = []
    began = bench.now_ns()
    for _ in range(_MARKS_AT_ONCE):
        marks.append(_mark(bench))  # noqa: PERF401 - the loop is what is measured
    took = bench.now_ns() - began
    bench.place.clock.wait(marks[-1])
    bench.place.clock.release(*marks)
    return took / _MARKS_AT_ONCE


def _mark(bench: Bench) -> Mark:
    mark = bench.place.clock.mark(bench.place)
    if isinstance(mark, Missing):
        raise DeviceFault(f"no mark could be placed: {mark.reason} {mark.detail}".strip())
    return mark


def _us(nanoseconds: float | None) -> str:
    return "?" if nanoseconds is None else f"{nanoseconds / 1e3:.3g} µs"


def _ns(nanoseconds: int | None) -> str:
    return "?" if nanoseconds is None else f"{nanoseconds} ns"
