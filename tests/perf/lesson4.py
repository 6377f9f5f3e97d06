"""Is a decode step launch-bound, and what pays? Measured by hand, and by ``compare``, side by side.

    python tests/perf/lesson4.py [--batches 1,8,32] [--budget 12] [--steps 40] [--json FILE] [--keep FOLDER]

Needs a CUDA device, torch and transformers. One decode step of TinyLlama-1.1B's shape (random fp16 weights, static
cache), eager, as a CUDA Graph, and by ``torch.compile(mode="reduce-overhead")``.

By hand, with nothing of gpu_timed: the wall time of a step is the median of ``perf_counter`` around the call and
``synchronize``; kernels, busy time (their union), and the typical gap come from torch's profiler in a pass of its own,
its exported trace read with other code than ours: the operator of a gap is what Kineto's "External id" links the
kernel behind it to. The busy ratio is the profiled busy time over the unprofiled wall time. A host's pace changes by
tens of percent within a minute, so steps are timed by hand between the blocks of ``compare``, and the same number of
times; the profiled pass comes last. What is compared is the same work: replays without copies of inputs or outputs
(``CudaGraph(inputs="static", outputs="alias")``), since that is what one makes by hand. Each batch size has a process
of its own: after torch's profiler launches stay slower. Times in the table are milliseconds, gaps microseconds; under
each figure of ours stands how far it is from the one by hand.
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ARMS = ("eager", "cuda_graph", "reduce-overhead")
LENGTH = 1024
PROFILED = 5
RESULT = "result: "


class Decode:
    """One decode step for a batch, and what puts its cache back."""

    def __init__(self, batch: int) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=22,
            num_attention_heads=32,
            num_key_value_heads=4,
            max_position_embeddings=2048,
            attn_implementation="sdpa",
        )
        with torch.device("cuda"):
            model = LlamaForCausalLM(config).half().eval()
        cache = StaticCache(config=config, max_cache_len=LENGTH)
        self.token = torch.ones(batch, 1, dtype=torch.long, device="cuda")
        self.position = torch.full((batch, 1), 16, dtype=torch.long, device="cuda")

        def step(token: Any, position: Any) -> Any:
            with torch.no_grad():
                return model(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True).logits

        self.step = step
        self.reset = cache.reset
        step(self.token, self.position)  # the cache takes its memory in the first
        self.reset()
        torch.cuda.synchronize()

    def call(self) -> Any:
        """Run one step eagerly."""
        return self.step(self.token, self.position)

    def graph(self) -> Callable[[], Any]:
        """Return the replay of the step, captured by hand."""
        import torch

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.call()
        return graph.replay

    def compiled(self) -> Callable[[], Any]:
        """Return the step by torch.compile, warmed up."""
        import torch

        compiled = torch.compile(self.step, mode="reduce-overhead")

        def call() -> Any:
            return compiled(self.token, self.position)

        for _ in range(5):
            self.reset()
            call()
            torch.cuda.synchronize()
        return call


def wall_ms(call: Callable[[], Any], reset: Callable[[], None], steps: int, first: int = 1) -> list[float]:
    """Return the milliseconds of *steps* steps, each waited for, after *first* that are not counted."""
    import torch

    found = []
    for index in range(steps + first):
        reset()
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if index >= first:
            found.append((time.perf_counter() - began) * 1e3)
    return found


def profiled(call: Callable[[], Any], reset: Callable[[], None]) -> dict[str, Any]:
    """Return kernels, launches, busy time and gaps of a step, by torch's profiler and arithmetic of our own here."""
    import numpy as np
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED + 1):
            reset()
            torch.cuda.synchronize()
            with record_function("by hand"):
                call()
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    complete = [event for event in events if event.get("ph") == "X"]
    steps = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in complete
        if event["name"] == "by hand" and event["cat"] == "user_annotation"
    )
    operators = {
        event["args"]["External id"]: event["name"]
        for event in complete
        if event["cat"] == "cpu_op" and "External id" in event.get("args", {})
    }
    work = [event for event in complete if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    rows: list[dict[str, Any]] = []
    gaps: list[float] = []
    waited: Counter[str] = Counter()
    for begin, end in steps[1:]:
        mine = sorted((one for one in work if begin <= one["ts"] < end), key=lambda one: one["ts"])
        starts = np.array([one["ts"] for one in mine])
        reached = np.maximum.accumulate(np.array([one["ts"] + one["dur"] for one in mine]))
        between = starts[1:] - reached[:-1]
        for index in np.flatnonzero(between > 0):
            linked = mine[index + 1]["args"].get("External id")
            waited[operators.get(linked, "no operator")] += float(between[index])
        gaps += between[between > 0].tolist()
        rows.append(
            {
                "kernels": sum(one["cat"] == "kernel" for one in mine),
                "launches": len({one["args"]["correlation"] for one in mine}),
                "busy_ms": float(reached[-1] - starts[0] - between[between > 0].sum()) / 1e3,
            }
        )
    found: dict[str, Any] = {name: median(row[name] for row in rows) for name in rows[0]}
    found["gap_us"] = median(gaps) if gaps else 0.0
    found["operator"] = waited.most_common(1)[0][0] if waited else ""
    return found


def ours(
    decode: Decode, budget_s: float, keep: Path | None, between: Callable[[], None]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the same figures by ``compare``, and what else it said. *between* is called after each of its blocks."""
    from gpu_timed import Compile, CudaGraph, compare

    def progress(_done: float, _of: float, what: str) -> None:
        if what.startswith("block"):
            between()

    compared = compare(
        decode.step,
        args=(decode.token, decode.position),
        modes=(
            "eager",
            CudaGraph(inputs="static", outputs="alias"),
            Compile(mode="reduce-overhead", outputs="alias"),
        ),
        reset=decode.reset,
        budget_s=budget_s,
        progress=progress,
    )
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"batch-{decode.token.shape[0]}.pickle").write_bytes(pickle.dumps(compared))
    found: dict[str, dict[str, Any]] = {}
    for arm in compared.arms:
        if not len(arm.samples):
            found[arm.name] = {"refused": arm.refused or compared.refused}
            continue
        row: dict[str, Any] = {"wall_ms": median(arm.samples.wall_ns) / 1e6, "ran": str(arm.ran)}
        row["one_off_ms"] = arm.cold.one_off_ns / 1e6 if isinstance(arm.cold.one_off_ns, int) else None
        seen = arm.timeline
        if seen:
            row |= {"kernels": seen.kernels, "launches": seen.launches, "busy_ms": seen.busy_ns / 1e6}
            row["gap_us"] = seen.gap_ns / 1e3 if isinstance(seen.gap_ns, int) else 0.0
            row["operator"] = seen.operators[0].operator if seen.operators else ""
            row["busy_ratio"] = row["busy_ms"] / row["wall_ms"]
        else:
            row["no_timeline"] = repr(seen)
        found[arm.name] = row
    said = {
        "verdicts": [f"{one.arm}: {one.word or one.reason} {one.ratio}" for one in compared.verdicts],
        "diagnosis": list(compared.diagnosis.sentences) if compared.diagnosis else [],
        "break_even": {name: str(one.calls) for name, one in compared.break_evens.items()},
        "seconds": compared.seconds,
        "refused": compared.refused,
        "stopped": compared.stopped,
    }
    return found, said


def one_batch(batch: int, steps: int, budget_s: float, keep: Path | None, *, comparing: bool) -> dict[str, Any]:
    """Measure one batch size in this process."""
    import torch

    began = time.perf_counter()
    decode = Decode(batch)
    calls = {"eager": decode.call, "cuda_graph": decode.graph(), "reduce-overhead": decode.compiled()}
    took = {"prepare_s": time.perf_counter() - began}
    gc.collect()
    walls: dict[str, list[float]] = {arm: [] for arm in ARMS}

    def by_hand(many: int) -> None:
        held = gc.isenabled()
        gc.disable()
        for arm in ARMS:
            walls[arm] += wall_ms(calls[arm], decode.reset, many if arm == "eager" else 4 * many)
        if held:
            gc.enable()

    mine: dict[str, dict[str, Any]] = {}
    said: dict[str, Any] = {}
    by_hand(2)
    for values in walls.values():
        values.clear()
    if comparing:
        began = time.perf_counter()
        mine, said = ours(decode, budget_s, keep, lambda: by_hand(1))
        took["compare_s"] = time.perf_counter() - began
    else:
        by_hand(steps)
    kept = {arm: median(walls[arm]) for arm in ARMS}
    counted = {arm: len(walls[arm]) for arm in ARMS}
    began = time.perf_counter()
    hand: dict[str, dict[str, Any]] = {}
    for arm in ARMS:
        hand[arm] = {"wall_ms": kept[arm], "steps": counted[arm], **profiled(calls[arm], decode.reset)}
        hand[arm]["busy_ratio"] = hand[arm]["busy_ms"] / hand[arm]["wall_ms"]
    by_hand(8)  # with the profiler attached by now: to be seen, and not in the figures above
    for arm in ARMS:
        hand[arm]["wall_after_profiler_ms"] = median(walls[arm][counted[arm] :])
    took["by_hand_s"] = time.perf_counter() - began
    card = torch.cuda.get_device_name()
    return {"batch": batch, "card": card, "torch": torch.__version__, "hand": hand, "ours": mine, "said": said} | took


FIGURES = (("wall_ms", 3), ("busy_ms", 3), ("busy_ratio", 3), ("kernels", 0), ("launches", 0), ("gap_us", 2))


def table(found: dict[str, Any]) -> None:
    """Print one batch size."""
    print(f"\nbatch {found['batch']}, {found['card']}, torch {found['torch']}")
    print(f"{'':24s}" + "".join(f"{name:>14s}" for name, _ in FIGURES) + "   operator of most gap time")
    for arm in ARMS:
        hand, mine = found["hand"][arm], found["ours"].get(arm, {})
        print(f"{arm:16s}{'by hand':8s}" + "".join(f"{hand[name]:14.{digits}f}" for name, digits in FIGURES), end="")
        print(f"   {hand['operator']}")
        if "refused" in mine or not mine:
            print(f"{'':16s}{'ours':8s}   {mine.get('refused', 'not asked')}")
            continue
        cells = [f"{mine[name]:14.{digits}f}" if name in mine else f"{'-':>14s}" for name, digits in FIGURES]
        print(f"{'':16s}{'ours':8s}" + "".join(cells) + f"   {mine.get('operator', mine.get('no_timeline'))}")
        apart = [
            f"{100 * (mine[name] / hand[name] - 1):+13.2f}%" if name in mine and hand[name] else f"{'':>14s}"
            for name, _ in FIGURES
        ]
        print(f"{'':24s}" + "".join(apart) + f"   ran as {mine['ran']}")
    for what, value in found["said"].items():
        print(f"  {what}: {value}")


def main() -> None:
    """Measure each batch size in a process of its own, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--steps", type=int, default=40, help="steps by hand where nothing is compared")
    parser.add_argument("--budget", type=float, default=12.0, help="seconds that compare may measure, a batch size")
    parser.add_argument("--no-compare", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for what compare found, pickled: to_html() elsewhere")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        found = one_batch(options.one, options.steps, options.budget, options.keep, comparing=not options.no_compare)
        print(RESULT + json.dumps(found, default=str))
        return
    everything = []
    for batch in options.batches.split(","):
        began = time.perf_counter()
        command = [sys.executable, __file__, "--one", batch, "--steps", str(options.steps)]
        command += ["--budget", str(options.budget), *(["--no-compare"] if options.no_compare else [])]
        command += ["--keep", str(options.keep)] if options.keep else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
        if not lines:
            print(f"\nbatch {batch}: failed with {done.returncode}\n{done.stdout[-2000:]}")
            continue
        found = json.loads(lines[-1].removeprefix(RESULT)) | {"seconds": time.perf_counter() - began}
        everything.append(found)
        table(found)
        print(f"  took {found['seconds']:.0f} s", flush=True)
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
