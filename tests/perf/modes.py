"""What each mode costs and gives, and what ``cuda_graph`` costs beside a replay written by hand.

    python tests/perf/modes.py [--workloads mlp,conv] [--modes eager,cuda_graph] [--layers 22] [--json FILE]

Needs a CUDA device and torch. Three tables:

* Each function of ``mode_workloads.py`` under each mode: medians of the launch (host), the device time and the wall
  time (from the call until the device is done), microseconds, and by how much the outputs differ from eager ones,
  relative to the largest value (``equal``: bit for bit; what compiled code draws at random is other numbers). Modes
  that compile run a decode step of ``--compile-layers`` layers, since 22 take a minute to compile.
* ``cuda_graph`` against the same by hand: a copy of each input, ``CUDAGraph.replay()``, a copy of each output;
  ``alias`` against the same without copies of the outputs; ``by hand, anew`` is a second capture by hand, which
  shows how much one graph differs from another of the same function. Blocks of calls in turn; the ratio of wall
  medians of neighbouring blocks, with the half-width of its 95 % bootstrap interval. ``then wait``: each call waited
  for; ``in a row``: twenty calls, then the wait. ``span``: with a deferred span around each call as well.
* The parts of one call in the mode, each alone, nanoseconds on the host.

Without a device ``--make-believe`` prints the last table for a device that captures on the CPU: Python's part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mode_workloads
import numpy as np
import torch
from mode_workloads import WORKLOADS, Workload, furthest, tensors

from gpu_timed import CudaGraph, current, flush, gpu_timed
from gpu_timed.testing import capture

MODES = ("eager", "cuda_graph", "compile", "reduce-overhead")
COMPILES = frozenset({"compile", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"})
UNMEASURED = 1_000_000_000
"""``every=`` of a site whose calls run in the mode and are no spans."""
CALLS = 40
IN_A_ROW = 20


def called(workload: Workload, function: Callable[..., Any], count: int) -> list[list[Any]]:
    """Return the outputs of *count* calls from the workload's first state, copied."""
    workload.reset()
    torch.manual_seed(0)
    found = []
    for index in range(count):
        positional, named = workload.arguments[index % len(workload.arguments)]
        found.append([each.clone() for each in tensors(function(*positional, **named))])
    return found


def median_us(measured: list[Any]) -> float:
    """Return the median of nanoseconds, in microseconds; NaN where any of them is missing."""
    return statistics.median(measured) / 1e3 if all(isinstance(each, int) for each in measured) else float("nan")


def table(name: str, workload: Workload, modes: list[str]) -> dict[str, Any]:
    """Measure *workload* in each mode, print a row for each, and return them."""
    expected = called(workload, workload.function, mode_workloads.INPUTS)
    rows: dict[str, Any] = {}
    for mode in modes:
        torch.compiler.reset()
        timed = gpu_timed(workload.function, name=f"{name} {mode}", mode=mode, sync="boundary")
        began = time.perf_counter()
        try:
            called(workload, timed, 10)  # warm-up, capture, compilation
            prepared_s = time.perf_counter() - began
            differs = furthest(expected, called(workload, timed, mode_workloads.INPUTS))
            walls = []
            with capture() as records:
                for index in range(CALLS):
                    positional, named = workload.arguments[index % len(workload.arguments)]
                    torch.cuda.synchronize()
                    at = time.perf_counter_ns()
                    timed(*positional, **named)
                    torch.cuda.synchronize()
                    walls.append(time.perf_counter_ns() - at)
        except Exception as error:
            rows[mode] = {"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]}
            print(f"{name:14s} {mode:16s} {rows[mode]['failed']}", flush=True)
            continue
        last = records[-1]
        rows[mode] = {
            "ran": last.mode,
            "reason": last.mode_reason,
            "launch_us": median_us([record.launch_ns for record in records]),
            "device_us": median_us([record.device_ns for record in records]),
            "wall_us": statistics.median(walls) / 1e3,
            "differs": differs,
            "prepared_s": prepared_s,
        }
        row = rows[mode]
        same = "equal" if not differs else "other numbers" if workload.random and mode in COMPILES else f"{differs:.1e}"
        print(
            f"{name:14s} {mode:16s} {row['launch_us']:10.1f} {row['device_us']:10.1f} {row['wall_us']:10.1f} "
            f"{same:>14s}   {row['ran']}{': ' * bool(row['reason'])}{row['reason'][:60]}",
            flush=True,
        )
    return rows


class ByHand:
    """What its author would write instead of the mode: copies of the inputs, a replay, copies of the outputs."""

    def __init__(self, workload: Workload, *, clones: bool) -> None:
        positional, named = workload.arguments[0]
        self._static = [each.clone() for each in tensors((positional, named))]
        following = iter(self._static)
        flat = [next(following) if isinstance(each, torch.Tensor) else each for each in positional]
        by_name = {key: next(following) if isinstance(each, torch.Tensor) else each for key, each in named.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                workload.function(*flat, **by_name)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            outputs = workload.function(*flat, **by_name)
        self._outputs, self._clones = tensors(outputs), clones
        self._names = tuple(named)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        given = [each for each in (*positional, *named.values()) if isinstance(each, torch.Tensor)]
        for static, each in zip(self._static, given, strict=True):
            static.copy_(each)
        self._graph.replay()
        return [each.clone() for each in self._outputs] if self._clones else self._outputs


def block(workload: Workload, function: Callable[..., Any], count: int, in_a_row: int) -> float:
    """Return the median wall time of a call, nanoseconds, over *count* turns of *in_a_row* calls."""
    taken, now_ns, wait = [], time.perf_counter_ns, torch.cuda.synchronize
    arguments = workload.arguments
    for turn in range(count):
        positional, named = arguments[turn % len(arguments)]
        wait()
        began = now_ns()
        for _ in range(in_a_row):
            function(*positional, **named)
        wait()
        taken.append((now_ns() - began) / in_a_row)
    return statistics.median(taken)


def half_width(ratios: list[float]) -> float:
    """Return the half-width of the 95 % interval of the median of *ratios*: percentile bootstrap, 2,000 draws."""
    draws = np.random.default_rng(0).choice(ratios, (2_000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(high - low) / 2


def beside_by_hand(name: str, workload: Workload, rounds: int) -> dict[str, Any]:
    """Measure ``cuda_graph`` against the same by hand, print a row for each arm, and return them."""
    arms: dict[str, tuple[Callable[..., Any], str]] = {
        "by hand": (ByHand(workload, clones=True), "by hand"),
        "by hand, anew": (ByHand(workload, clones=True), "by hand"),
        "cuda_graph": (gpu_timed(workload.function, name=f"{name} g", mode="cuda_graph", every=UNMEASURED), "by hand"),
        "and span": (gpu_timed(workload.function, name=f"{name} s", mode="cuda_graph", sync="deferred"), "by hand"),
        "by hand, alias": (ByHand(workload, clones=False), "by hand, alias"),
        "alias": (
            gpu_timed(workload.function, name=f"{name} a", mode=CudaGraph(outputs="alias"), every=UNMEASURED),
            "by hand, alias",
        ),
    }
    torch.compiler.reset()
    for function, _ in arms.values():
        called(workload, function, 8)
    rows: dict[str, Any] = {arm: {} for arm in arms}
    for way, in_a_row, count in (("then wait", 1, CALLS), ("in a row", IN_A_ROW, 4)):
        found: dict[str, list[float]] = {arm: [] for arm in arms}
        order = list(arms)
        for _ in range(rounds):
            for arm in order:
                found[arm].append(block(workload, arms[arm][0], count, in_a_row))
            order.append(order.pop(0))
        for arm, (_, against) in arms.items():
            ratios = [one / other for one, other in zip(found[arm], found[against], strict=True)]
            rows[arm][way] = {
                "us": statistics.median(found[arm]) / 1e3,
                "ratio": statistics.median(ratios),
                "half_width": half_width(ratios),
            }
    for arm, row in rows.items():
        line = "".join(
            f"{row[way]['us']:12.1f} {row[way]['ratio']:7.4f} ± {row[way]['half_width']:.4f}"
            for way in ("then wait", "in a row")
        )
        print(f"{name:14s} {arm:16s} {line}", flush=True)
    flush(10)
    return rows


def stages(of: str, workload: Workload, wait: Callable[[], object]) -> dict[str, float]:
    """Return what the parts of one call in the mode take on the host, median nanoseconds, each alone."""
    from gpu_timed.modes import torch_values

    timed = gpu_timed(workload.function, name=f"stages {of}", mode="cuda_graph", every=UNMEASURED)
    called(workload, timed, 8)
    site = next(held for held in current._state.sites._every if held.name == f"stages {of}")
    launcher = next(iter(site.launchers.values()))
    known, alike = launcher._recent
    captured, graph, device = known.captured, known.captured.graph, launcher._device
    if not torch.cuda.is_available():
        graph.replay = lambda: None
    seen: list[Any] = []
    tell = type(alike).tensors
    type(alike).tensors = lambda *given: (seen.append(given[1:]), tell(*given))[1]
    positional, named = workload.arguments[0]
    timed(*positional, **named)
    type(alike).tensors = tell
    arguments, names = seen[0]
    given = alike.tensors(arguments, names)
    parts: dict[str, Callable[[], Any]] = {
        "an empty call": lambda: None,
        "all of a call": lambda: timed(*positional, **named),
        "of it the mode's": lambda: launcher.run(None, arguments, names),
        "is the caller capturing": device.is_capturing,
        "same signature": lambda: alike.tensors(arguments, names),
        "(taken apart, if another)": lambda: launcher._take(arguments, names),
        f"memory where it was ({len(captured.guards.tensors)})": captured.guards.moved,
        f"host state as it was ({captured.guards.count})": captured.guards.rebound,
        "order of streams": graph.order,
        f"copies in ({len(given)})": lambda: torch_values.copy_into(captured.static, given),
        "of that torch's own": lambda: [one.copy_(other) for one, other in zip(captured.static, given, strict=True)],
        "launch": graph.replay,
        f"copies out ({len(captured.plan)})": lambda: captured.together(captured.made(given)),
    }
    found: dict[str, list[float]] = {name: [] for name in parts}
    with torch.no_grad():
        for _ in range(40):
            for name, part in parts.items():
                wait()
                began = time.perf_counter_ns()
                for _ in range(10):
                    part()
                found[name].append((time.perf_counter_ns() - began) / 10)
    workload.reset()
    result = {name: statistics.median(values) for name, values in found.items()}
    for name, value in result.items():
        print(f"    {name:36s} {value:10.0f}")
    return result


def make_believe() -> None:
    """Have graphs captured on the CPU."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
    from make_believe_graphs import Device

    from gpu_timed.modes import torch_graphs

    torch_graphs.Device = lambda *_: Device()  # type: ignore[assignment,misc]


def main() -> None:
    """Print the tables, and write them as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--compile-layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--make-believe", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names, modes = options.workloads.split(","), options.modes.split(",")
    if options.make_believe:
        make_believe()
    device = "cpu" if options.make_believe else "cuda"
    environment = {
        "card": "none" if options.make_believe else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"),
    }
    print(environment)
    found: dict[str, Any] = {"environment": environment, "modes": {}, "by hand": {}, "stages": {}}
    with torch.no_grad():
        if not options.make_believe:
            compiles = [mode for mode in modes if mode in COMPILES]
            print(f"\n{'':14s} {'':16s} {'launch µs':>10s} {'device µs':>10s} {'wall µs':>10s} {'outputs':>14s}   ran")
            for name in names:
                if name != "decode":
                    found["modes"][name] = table(name, WORKLOADS[name](), modes)
                    continue
                plain = [mode for mode in modes if mode not in COMPILES]
                found["modes"][name] = table(name, WORKLOADS[name](layers=options.layers), plain)
                if compiles:
                    short = f"decode of {options.compile_layers}"
                    found["modes"][short] = table(short, WORKLOADS[name](layers=options.compile_layers), modes)
            print(f"\n{'':31s} {'then wait µs':>12s} {'ratio':>16s} {'in a row µs':>14s} {'ratio':>16s}")
            for name in names:
                more = {"layers": options.layers} if name == "decode" else {}
                found["by hand"][name] = beside_by_hand(name, WORKLOADS[name](**more), options.rounds)
        for name in names:
            print(f"\nparts of a call, ns on the host: {name}")
            more = {"layers": options.layers} if name == "decode" and not options.make_believe else {}
            wait = (lambda: None) if options.make_believe else torch.cuda.synchronize
            workload = WORKLOADS[name](device, small=options.make_believe, **more)
            found["stages"][name] = stages(name, workload, wait)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
