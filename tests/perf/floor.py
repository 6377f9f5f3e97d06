"""Which way of putting marks on an idle stream shows the floor: call by call, or several at once by a graph.

    python tests/perf/floor.py [--json FILE]

The truth is what empty pairs read that were queued behind work. Each way is tried on a quiet host and beside a Python
thread that never gives the interpreter up. Needs one GPU; the driver is used directly.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu_timed.clocks import cuda_devices, cuda_driver
from gpu_timed.clocks.cuda_floor import Floor, one_by_one
from gpu_timed.diagnosis import clock as diagnosis

EVENTS, BURSTS, FLOORS = 9, 300, 30
_pointer = ctypes.c_void_p


class AtOnce:
    """A CUDA graph of event records, one behind the other: a whole burst is one call of the host."""

    def __init__(self, library: Any) -> None:
        for name, arguments in {
            "cuGraphCreate": (_pointer, ctypes.c_uint),
            "cuGraphAddEventRecordNode": (_pointer, _pointer, _pointer, ctypes.c_size_t, _pointer),
            "cuGraphInstantiateWithFlags": (_pointer, _pointer, ctypes.c_ulonglong),
            "cuGraphLaunch": (_pointer, _pointer),
        }.items():
            getattr(library, name).argtypes = arguments
        self._made: dict[tuple[int, ...], Any] = {}

    def __call__(self, library: Any, stream: int, events: Sequence[int]) -> int:
        """Put *events* on *stream*, as any :data:`gpu_timed.clocks.cuda_floor.Submit`."""
        key = tuple(events)
        if key not in self._made:
            code, made = self._make(library, key)
            if code:
                return code
            self._made[key] = made
        return int(library.cuGraphLaunch(self._made[key], stream))

    def _make(self, library: Any, events: Sequence[int]) -> tuple[int, Any]:
        graph, made, before = _pointer(), _pointer(), _pointer()
        code = library.cuGraphCreate(ctypes.byref(graph), 0)
        for count, event in enumerate(events):
            node = _pointer()
            after = ctypes.byref(before) if count else None
            code = code or library.cuGraphAddEventRecordNode(ctypes.byref(node), graph, after, bool(count), event)
            before = node
        return int(code or library.cuGraphInstantiateWithFlags(ctypes.byref(made), graph, 0)), made


def gaps_of(library: Any, stream: int, submit: Callable[..., int]) -> list[int]:
    """Return the gaps between neighbours in many bursts, in nanoseconds."""
    events = [cuda_driver.create_event(library) for _ in range(EVENTS)]
    found = []
    for _ in range(BURSTS):
        assert submit(library, stream, events) == cuda_driver.SUCCESS
        assert library.cuEventSynchronize(events[-1]) == cuda_driver.SUCCESS
        for start, end in pairwise(events):
            read = ctypes.c_float()
            assert library.cuEventElapsedTime(ctypes.byref(read), start, end) == cuda_driver.SUCCESS
            found.append(round(read.value * 1e6))
    for event in events:
        library.cuEventDestroy_v2(event)
    return found


def floors_of(library: Any, stream: int, submit: Callable[..., int]) -> tuple[list[Any], float]:
    """Return what a fresh floor says after its first measurement, many times, and what one costs in microseconds."""
    found, began, spent = [], 0.0, 0.0
    for _ in range(FLOORS):
        floor = Floor(library, submit)
        began = time.perf_counter()
        floor.measure(stream)
        spent += time.perf_counter() - began
        found.append(floor.ns if isinstance(floor.ns, int) else None)
        floor.close()
    return found, spent / FLOORS * 1e6


@contextmanager
def company(*, busy: bool) -> Iterator[None]:
    """Have a thread beside us that counts for all it is worth, or none."""
    stop: list[bool] = []

    def count() -> None:
        number = 0
        while not stop:
            number += 1

    thread = threading.Thread(target=count, daemon=True)
    if busy:
        thread.start()
    yield
    stop.append(True)
    if busy:
        thread.join()


def main() -> None:
    """Print a line for each way and host."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    library = cuda_devices.load()
    if library is None:
        sys.exit("there is no NVIDIA driver here")
    rows: list[dict[str, Any]] = []
    with cuda_devices.bench(library, 0) as bench:
        figures = diagnosis.measure(bench)
        print(f"queued pairs: median {figures.floor_queued_ns} ns, least {figures.floor_queued_min_ns} ns")
        print(f"idle pairs:   median {figures.floor_idle_ns} ns, least {figures.floor_idle_min_ns} ns")
        print(f"the clock itself says {bench.place.clock.floor_ns(bench.place)} ns\n")
        print("way       host    least    1 %    10 %  median | floor: least  median  most  unknown | µs for the first")
        stream = bench.place.stream
        for way, submit in (("calls", one_by_one), ("graph", AtOnce(library))):
            for busy in (False, True):
                with company(busy=busy):
                    gaps = sorted(gaps_of(library, stream, submit)) if not busy else []
                    floors, cost = floors_of(library, stream, submit)
                known = [floor for floor in floors if floor is not None]
                row = {
                    "way": way,
                    "busy": busy,
                    "least": gaps[0] if gaps else None,
                    "p1": gaps[len(gaps) // 100] if gaps else None,
                    "p10": gaps[len(gaps) // 10] if gaps else None,
                    "median": gaps[len(gaps) // 2] if gaps else None,
                    "floor_least": min(known, default=None),
                    "floor_median": statistics.median(known) if known else None,
                    "floor_most": max(known, default=None),
                    "unknown": len(floors) - len(known),
                    "cost_us": round(cost, 1),
                }
                rows.append(row)
                cells = ["-" if value is None else str(value) for value in list(row.values())[2:]]
                print(f"{way:9} {'busy' if busy else 'quiet':6}", *(f"{cell:>7}" for cell in cells))
    if options.json:
        options.json.write_text(json.dumps({"queued_ns": figures.floor_queued_ns, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
