"""What may leave a device in a bad state, or meets another thread's captures: each run in a process of its own.

``python graph_hazards.py NAME [ARGUMENT]`` prints one line of JSON about what happened.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from gpu_timed import CudaGraph, flush, gpu_timed
from gpu_timed.testing import capture

MIB = 1 << 20
GRAPH = CudaGraph(warmup=1)


def _reasons(records: list[Any]) -> dict[str, int]:
    return dict(Counter(f"{record.mode}: {record.mode_reason}" for record in records))


class Beside:
    """Does something again and again in threads of its own, each on a stream of its own, until it is left."""

    def __init__(self, action: Callable[[], Callable[[], None]], threads: int = 1) -> None:
        self._action = action
        self._stop = threading.Event()
        self._ready = threading.Barrier(threads + 1)
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]
        self.errors: list[str] = []
        self.rounds = 0

    def _run(self) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            try:
                once = self._action()
                torch.cuda.current_stream().synchronize()
            finally:
                self._ready.wait()
            while not self._stop.is_set():
                try:
                    once()
                    self.rounds += 1
                except Exception:
                    self.errors.append(traceback.format_exc(limit=-3)[-600:])
                    if len(self.errors) > 5:
                        return
                time.sleep(0.0002)

    def __enter__(self) -> Beside:
        for thread in self._threads:
            thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def captures_beside_timing(policy: str) -> dict[str, Any]:
    """A hundred captures of ours while two threads time their calls with the sync policy *policy*."""
    timed = gpu_timed(lambda x: x + 1, name="other", sync=policy)

    def time_something() -> Callable[[], None]:
        x = torch.zeros(256, device="cuda")
        timed(x)
        return lambda: timed(x)

    captured, wrong, seen = 0, 0, []
    with Beside(time_something, threads=2) as beside:
        for index in range(100):
            f = gpu_timed(lambda x: x * 2, name=f"f{index % 5}", mode=GRAPH)
            x = torch.ones(64, device="cuda")
            with capture() as records:
                for _ in range(16):
                    wrong += not torch.equal(f(x), x * 2)
            mine = [record for record in records if record.name.startswith("f")]
            captured += mine[-1].mode == "cuda_graph"
            seen += [mine[2], mine[-1]]
    return {
        "captured": captured,
        "wrong": wrong,
        "errors": beside.errors,
        "rounds": beside.rounds,
        "third and last call": _reasons(seen),
        "counts": dict(flush().counts),
    }


def the_users_captures(mode: str) -> dict[str, Any]:
    """A hundred captures of the user's own, in *mode*, while another thread captures, compares and evicts ours."""

    def ours() -> Callable[[], None]:
        for size in (8, 16):  # what the user's own calls allocate on this stream is there before
            x = torch.ones(size, device="cuda")
            _ = [x * 2 for _ in range(8)]

        def once() -> None:
            f = gpu_timed(lambda x: x * 2, name="ours", mode=CudaGraph(warmup=1, max_graphs=1), sync="deferred")
            for size in (8, 16):
                x = torch.ones(size, device="cuda")
                for _ in range(3):
                    f(x)

        return once

    x = torch.ones(64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    survived, right, broken = 0, 0, []
    with capture() as records, Beside(ours) as beside:
        for _ in range(100):
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.stream(stream):
                    graph.capture_begin(capture_error_mode=mode)
                    for _ in range(50):
                        y = x * 2
                    graph.capture_end()
                    survived += 1
                    graph.replay()
                stream.synchronize()
                right += y.tolist() == [2.0] * 64
            except RuntimeError as error:
                broken.append(str(error).partition("\n")[0])
                graph = None
            time.sleep(0.001)
    return {
        "survived": survived,
        "right": right,
        "broken": dict(Counter(broken)),
        "errors": beside.errors,
        "rounds": beside.rounds,
        "ours": _reasons(records),
    }


def random_numbers_and_replays_beside() -> dict[str, Any]:
    """Two threads draw random numbers, and replay a graph of torch's, while a third captures ours a hundred times."""
    graph, static = torch.cuda.CUDAGraph(), torch.ones(8, device="cuda")
    with torch.cuda.graph(graph):
        static * 2

    def others() -> Callable[[], None]:
        torch.rand(8, device="cuda")

        def once() -> None:
            torch.rand(8, device="cuda")
            graph.replay()

        return once

    captured, seen = 0, []
    with Beside(others, threads=2) as beside:
        for index in range(100):
            f = gpu_timed(lambda x: x * 2, name=f"f{index}", mode=GRAPH)
            x = torch.ones(64, device="cuda")
            with capture() as records:
                for _ in range(8):
                    f(x)
            captured += records[-1].mode == "cuda_graph"
            seen.append(records[-1])
    return {"captured": captured, "errors": beside.errors, "rounds": beside.rounds, "last calls": _reasons(seen)}


def fallbacks() -> dict[str, Any]:
    """What the host reads, what the capture itself refuses, what moves to the host: right results and no leak."""
    blocker = torch.zeros(1)

    def syncing(x: Any) -> Any:
        y = x * 2
        torch.cuda.current_stream().synchronize()  # no operation: only the capture refuses it
        return y

    def synchronising_random(x: Any) -> Any:
        y = torch.nn.functional.dropout(x, 0.0) + 0 * torch.rand(1, device="cuda")
        torch.cuda.current_stream().synchronize()
        return y

    cases: dict[str, Any] = {
        "item": lambda x: x * x.max().item(),
        "nonzero": lambda x: x[x > 0].sum() + x,
        "host": lambda x: x + blocker.to(x.device),
        "sync": syncing,
        "sync after random numbers": synchronising_random,
        "grad": lambda x: x * torch.ones(1, device="cuda", requires_grad=True),
    }
    x = torch.full((8,), 2.0, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    found: dict[str, Any] = {"wrong": 0, "reasons": {}, "modes": {}}
    for name, case in cases.items():
        timed = gpu_timed(case, name=name, mode=GRAPH)
        with capture() as records:
            for _ in range(10):
                found["wrong"] += not torch.equal(timed(x), case(x))
        found["reasons"][name] = records[-1].mode_reason
        found["modes"][name] = sorted({record.mode for record in records})
        del timed
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    found["grown_mib"] = (torch.cuda.memory_reserved() - before) / MIB
    good = gpu_timed(lambda x: x * 3, name="good", mode=GRAPH)
    random = gpu_timed(lambda x: torch.nn.functional.dropout(x, 0.5), name="random", mode=GRAPH)
    with capture() as records:
        for _ in range(4):
            found["wrong"] += not torch.equal(good(x), x * 3)
            random(x)
    found["afterwards"] = _reasons(records)
    with torch.cuda.stream(torch.cuda.Stream()):
        found["sum"] = (torch.ones(4, device="cuda") * 2).sum().item()
    return found


def graphs_on_two_streams() -> dict[str, Any]:
    """Two functions that multiply matrices, replayed at once on two streams, their workspaces let go in between."""
    torch.manual_seed(0)
    weights = [torch.randn(512, 512, device="cuda") for _ in range(2)]
    sites = [
        gpu_timed(lambda x, w=w: (x @ w @ w).relu(), name=f"mm{index}", mode=GRAPH) for index, w in enumerate(weights)
    ]
    inputs = [torch.randn(8, 512, device="cuda") for _ in range(2)]
    expected = [(x @ w @ w).relu() for x, w in zip(inputs, weights, strict=True)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    wrong, worst = 0, 0.0
    with capture() as records, torch.no_grad():
        for turn in range(200):
            found = []
            for index in range(2):
                with torch.cuda.stream(streams[index]):
                    found.append(sites[index](inputs[index]))
            torch.cuda.synchronize()
            for one, other in zip(found, expected, strict=True):
                worst = max(worst, (one - other).abs().max().item() / other.abs().max().item())
                wrong += not torch.allclose(one, other, rtol=1e-3, atol=1e-2 * other.abs().max().item())
            if turn == 100:
                torch._C._cuda_clearCublasWorkspaces()  # as torch.compile's CUDA Graphs do
                _ = [torch.full((1 << 20,), 1e9, device="cuda") for _ in range(64)]
    return {"wrong": wrong, "worst": worst, "modes": _reasons(records)}


def main() -> None:
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))


if __name__ == "__main__":
    main()
