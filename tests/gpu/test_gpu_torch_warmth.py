"""Cold or warm under torch on a GPU, in fresh processes: caches empty, then filled.

A first call with everything from disk is ``loaded``; what no probe can see of a first call (modules loaded lazily by
the driver, handles of libraries) leaves it ``unknown``, never warm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from warmth_table import show

pytestmark = pytest.mark.gpu

HEAD = """
    import json, threading
    from gpu_timed import current, gpu_timed
    from gpu_timed.testing import capture
    gpu_timed(lambda: None, sync="deferred")()
    def show(records):
        print(json.dumps([{"tier": r.tier if isinstance(r.tier, str) else r.warmth, "quality": r.quality,
            "name": r.name, "causes": [f"{c.probe}: {c.what}" for c in r.causes],
            "details": [c.detail for c in r.causes],
            "reason": r.mode_reason, "device_ns": r.device_ns if isinstance(r.device_ns, int) else None,
            "compile_ns": r.compile_ns if isinstance(r.compile_ns, int) else None} for r in records]))
    def hot(f, *args):
        with capture(300) as records:
            for _ in range(301): f(*args)
        show([r for r in records[1:] if (r.warmth, r.tier) != ("warm", "hot")])
"""


class Row(NamedTuple):
    """What one process does, and what its calls are to be."""

    body: str
    empty: tuple[str, ...]
    """Tiers with empty caches; ``unknown`` where nothing explains a first call."""
    filled: tuple[str, ...]
    says: tuple[str, ...] = ()
    """Texts among the causes and details, with empty caches."""


ROWS: dict[str, Row] = {
    "max-autotune": Row(
        """
        import torch
        a, b = (torch.randn(512, 512, device="cuda", dtype=torch.float16) for _ in range(2))
        step = torch.compile(lambda a, b: torch.relu(a @ b), mode="max-autotune")
        f = gpu_timed(step, name="f", sync="deferred")
        with capture() as records:
            for _ in range(4): f(a, b)
        show(records)
        hot(f, a, b)
        """,
        ("built", "initialised", "hot", "hot"),
        ("loaded|built", "initialised", "hot", "hot"),  # tuned anew where the best was one to begin with (2.11)
        ("choices of a kernel benchmarked", "cudagraph: recorded"),
    ),
    "reduce-overhead": Row(
        """
        import torch
        x = torch.ones(256, 256, device="cuda")
        f = gpu_timed(torch.compile(lambda x: (torch.sin(x) @ x).cos(), mode="reduce-overhead"), name="f")
        with capture() as records:
            for _ in range(4): f(x)
        show(records)
        hot(f, x)
        """,
        ("built", "initialised", "hot", "hot"),
        ("loaded", "initialised", "hot", "hot"),
        ("warm-up run before recording", "cudagraph: recorded", "captured a CUDA graph"),
    ),
    "another shape": Row(
        """
        import torch
        f = gpu_timed(torch.compile(lambda x: torch.sin(x) + x), name="f", sync="deferred")
        with capture() as records:
            for n in (64, 64, 32, 16, 32): f(torch.ones(n, 64, device="cuda"))
        show(records)
        hot(f, torch.ones(64, 64, device="cuda"))
        """,
        ("built", "hot", "built", "hot", "hot"),
        ("loaded", "hot", "loaded", "hot", "hot"),
        ("recompiled", "size mismatch at index 0"),
    ),
    "coordinate descent": Row(
        """
        import torch
        import torch._inductor.config as config
        config.coordinate_descent_tuning = True
        f = gpu_timed(torch.compile(lambda x: torch.softmax(x, -1) + x), name="f", sync="deferred")
        x = torch.randn(512, 1024, device="cuda")
        with capture() as records:
            for _ in range(4): f(x)
        show(records)
        hot(f, x)
        """,
        ("built", "hot", "hot", "hot"),
        ("loaded|built", "hot", "hot", "hot"),  # whether what was found is kept differs by version
        ("tuned by coordinate descent",),
    ),
    "lazy backward": Row(
        """
        import torch
        compiled = torch.compile(lambda x: (torch.sin(x) * x).sum())
        losses = [compiled(torch.ones(64, 64, device="cuda", requires_grad=True)) for _ in range(3)]
        f = gpu_timed(lambda loss: loss.backward(), name="f", sync="deferred")
        go, done = threading.Event(), threading.Event()
        class Wait(torch.autograd.Function):  # another thread waits in a backward of its own meanwhile
            @staticmethod
            def forward(ctx, x): return x * 1
            @staticmethod
            def backward(ctx, grad): go.set(); assert done.wait(60); return grad
        wait = gpu_timed(lambda: Wait.apply(torch.ones(2, requires_grad=True)).sum().backward(), name="wait")
        go.set(), done.set(), wait(), go.clear(), done.clear()
        with capture() as records:
            thread = threading.Thread(target=wait)
            thread.start()
            assert go.wait(60)
            for loss in losses: f(loss)
            done.set(), thread.join()
        show(sorted(records, key=lambda r: r.name))
        show([])
        """,
        ("built", "hot", "hot", "hot"),
        (
            "unknown|loaded|initialised",
            "hot",
            "hot",
            "hot",
        ),  # the backward came with the forward's entry, outside any call
        ("backward [0/0] compiled",),
    ),
    "plain capture": Row(
        """
        import torch
        x = torch.ones(256, 256, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3): x @ x
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        @gpu_timed(name="f")
        def f():
            if f.captured:
                graph.replay()
                return
            with torch.cuda.graph(graph): x @ x
            f.captured = True
        f.captured = False
        with capture() as records:
            for _ in range(4): f()
        show(records)
        hot(f)
        """,
        ("initialised", "hot", "hot", "hot"),
        ("initialised", "hot", "hot", "hot"),
        ("cuda graph: captured a CUDA graph",),
    ),
    "cudnn benchmark": Row(
        """
        import torch
        torch.backends.cudnn.benchmark = True
        conv = torch.nn.Conv2d(3, 64, 7).cuda()
        f = gpu_timed(conv.forward, name="f")
        images = {h: torch.randn(1, 3, h, h, device="cuda") for h in (224, 256)}
        with capture() as records, torch.no_grad():
            for h in (224, 224, 256, 256, 224): f(images[h])
        show(records)
        with torch.no_grad(): hot(f, images[224])
        """,
        ("unknown", "hot", "unknown", "hot", "hot"),
        ("unknown", "hot", "unknown", "hot", "hot"),
    ),
    "limit": Row(
        """
        import torch
        torch._dynamo.config.recompile_limit = 2
        f = gpu_timed(torch.compile(lambda x: torch.sin(x) + 1, dynamic=False), name="f", sync="deferred")
        with capture() as records:
            for n in (32, 64, 96, 128, 32): f(torch.ones(n, device="cuda"))
        show(records)
        hot(f, torch.ones(32, device="cuda"))
        """,
        ("built", "built", "built", "hot", "hot"),
        ("loaded", "loaded", "built", "hot", "hot"),
        ("reached recompile_limit (2)",),
    ),
    "first use": Row(
        """
        @gpu_timed(name="f", sync="deferred")
        def f():
            import torch
            return torch.ones(8, device="cuda")
        with capture() as records:
            for _ in range(3): f()
        show(records)
        hot(f)
        """,
        ("initialised", "hot", "hot"),
        ("initialised", "hot", "hot"),
        ("import: torch imported", "cuda init: CUDA initialised by torch"),
    ),
}


def process(body: str, caches: Path) -> list[list[dict[str, Any]]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(HEAD) + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{") or line == "[]"]


@pytest.mark.parametrize("which", ROWS)
def test_each_call_is_as_cold_as_it_was(which: str, tmp_path: Path) -> None:
    """Two fresh processes with one cache; and no false cold in 300 hot calls of each."""
    row = ROWS[which]
    for state, expected in (("empty", row.empty), ("filled", row.filled)):
        calls, not_hot = process(row.body, tmp_path)
        seen, costs = [call["tier"] for call in calls], [(call["compile_ns"] or 0) / 1e6 for call in calls]
        show(f"torch, {which}", state, expected, seen, costs)
        print(json.dumps(calls, indent=1), file=sys.stderr)
        assert len(calls) == len(expected), (state, calls)
        for call, tiers in zip(calls, expected, strict=True):
            assert call["tier"] in tiers.split("|"), (state, calls)
            if tiers == "loaded|built" and call["tier"] == "built":
                assert any("tuned by coordinate descent" in cause for cause in call["causes"]), (state, calls)
        texts = [text for call in calls for text in (*call["causes"], *call["details"])]
        if state == "empty":
            for text in row.says:
                assert any(text in each for each in texts), (text, texts)
        if which == "limit":
            assert not_hot == []
            assert ["compile_limit_reached" in call["quality"] for call in calls] == [False, False, True, True, True]
            assert all("reached recompile_limit (2)" in call["reason"] for call in calls[2:])
        elif which == "cudnn benchmark":
            assert not_hot == []
            new = ["new_shape_cudnn_benchmark" in call["quality"] for call in calls]
            assert new == [True, False, True, False, False]
        elif which == "lazy backward":
            assert [call["name"] for call in calls] == ["f", "f", "f", "wait"]
        else:
            assert not_hot == []
