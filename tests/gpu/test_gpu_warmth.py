"""Cold or warm on a GPU, each runtime in fresh processes: caches empty, then filled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from warmth_table import show

pytestmark = pytest.mark.gpu

HEAD = """
    import json, sys
    import numpy as np
    if not hasattr(np, "row_stack"): setattr(np, "row_stack", np.vstack)
    from gpu_timed import gpu_timed
    from gpu_timed.testing import capture
    gpu_timed(lambda: None, sync="deferred")()
    def calls(f, *args):
        f = gpu_timed(f, name="f")
        with capture() as records:
            for _ in range(4): f(*args)
        print(json.dumps([[r.tier if isinstance(r.tier, str) else r.warmth, [f"{c.probe}: {c.what}" for c in r.causes],
                           round((r.compile_ns or 0) / 1e6, 1)] for r in records]))
        timed = gpu_timed(f.__wrapped__, name="hot", sync="deferred")
        with capture(100) as records:
            for _ in range(1001): timed(*args)
        print(json.dumps([r.warmth for r in records[1:] if r.tier != "hot"]))
"""

WORKLOADS: dict[str, tuple[str, list[str], list[str]]] = {  # body, tiers with empty caches, tiers with filled caches
    "torch.compile": (
        """
        import torch
        x = torch.ones(256, 256, device="cuda")
        calls(torch.compile(lambda x: torch.sin(x) @ x), x)
        """,
        ["built", "hot", "hot", "hot"],
        ["loaded", "hot", "hot", "hot"],
    ),
    "reduce-overhead": (
        """
        import torch
        x = torch.ones(256, 256, device="cuda")
        calls(torch.compile(lambda x: (torch.sin(x) @ x).cos(), mode="reduce-overhead"), x)
        """,
        ["built", "initialised", "hot", "hot"],
        ["loaded", "initialised", "hot", "hot"],
    ),
    "triton jit": (
        """
        import os, torch
        sys.path.insert(0, os.environ["KERNELS"])
        from held import add
        x = torch.ones(1024, device="cuda")
        calls(lambda: add[(8,)](x, 1024, BLOCK=128))
        """,
        ["built", "hot", "hot", "hot"],
        ["loaded", "hot", "hot", "hot"],
    ),
    "triton autotune": (
        """
        import os, torch
        sys.path.insert(0, os.environ["KERNELS"])
        from held import tuned
        x = torch.ones(1024, device="cuda")
        calls(lambda: tuned[lambda meta: (1024 // meta["BLOCK"],)](x, 1024))
        """,
        ["built", "hot", "hot", "hot"],
        ["built", "hot", "hot", "hot"],  # benchmarked anew in every process
    ),
    "numba cuda": (
        """
        import os
        sys.path.insert(0, os.environ["KERNELS"])
        from held_numba import add, cuda
        a = cuda.to_device(np.ones(1024, np.float32))
        calls(lambda: add[8, 128](a))
        """,
        ["built", "hot", "hot", "hot"],
        ["loaded", "hot", "hot", "hot"],
    ),
    "numba cuda, signature given": (  # compiled where it is defined, and loaded there; from the cache, at the launch
        """
        import os
        sys.path.insert(0, os.environ["KERNELS"])
        from held_numba import eager, cuda
        a = cuda.to_device(np.ones(1024, np.float32))
        calls(lambda: eager[8, 128](a))
        """,
        ["unknown", "hot", "hot", "hot"],
        ["initialised", "hot", "hot", "hot"],
    ),
    "numba cuda, context": (
        """
        from numba import cuda
        a = np.ones(1024, np.float32)
        calls(lambda: cuda.to_device(a))
        """,
        ["initialised", "hot", "hot", "hot"],
        ["initialised", "hot", "hot", "hot"],
    ),
    "cupy, context": (
        """
        import cupy
        calls(lambda: cupy.empty(1024))
        """,
        ["initialised", "hot", "hot", "hot"],
        ["initialised", "hot", "hot", "hot"],
    ),
    "cupy": (
        """
        import cupy
        x = cupy.ones(1024)
        calls(lambda: cupy.sinh(x) + 1)
        """,
        ["built", "hot", "hot", "hot"],
        ["loaded", "hot", "hot", "hot"],
    ),
    "jax": (
        """
        import jax, jax.numpy as jnp
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        x = jnp.ones((256, 256))
        calls(jax.jit(lambda x: jnp.sin(x) @ x), x)
        """,
        ["built", "hot", "hot", "hot"],
        ["loaded", "hot", "hot", "hot"],
    ),
}

HELD = """
import triton, triton.language as tl

@triton.jit
def add(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)

tuned = triton.autotune([triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])(add)
"""
HELD_NUMBA = """
from numba import cuda

@cuda.jit(cache=True)
def add(a):
    i = cuda.grid(1)
    if i < a.size: a[i] += 1

@cuda.jit("void(float32[::1])", cache=True)
def eager(a):
    i = cuda.grid(1)
    if i < a.size: a[i] += 2
"""


@pytest.mark.parametrize("which", WORKLOADS)
def test_the_tier_of_each_call(which: str, tmp_path: Path) -> None:
    """Two fresh processes with one cache; then no false cold in 1,000 hot calls of each."""
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "held_numba.py").write_text(HELD_NUMBA)
    caches = {
        "KERNELS": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "NUMBA_CACHE_DIR": str(tmp_path / "numba"),
        "CUPY_CACHE_DIR": str(tmp_path / "cupy"),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    body, empty, filled = WORKLOADS[which]
    code = textwrap.dedent(HEAD) + textwrap.dedent(body)
    for state, expected in (("empty", empty), ("filled", filled)):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
            env={**os.environ, **caches},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found: list[Any] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        calls, not_hot = found
        show(which, state, expected, [tier for tier, _, _ in calls], [cost for _, _, cost in calls])
        print(calls[0][1][:3], file=sys.stderr)
        assert len(calls) == len(expected)
        assert all(tier in tiers.split("|") for (tier, _, _), tiers in zip(calls, expected, strict=True)), calls
        assert not_hot == []
        if which.endswith("context"):
            assert calls[0][1][0] == "device: CUDA context created"
