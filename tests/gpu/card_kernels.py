"""The same work as a Numba kernel and as a Triton kernel: every thread multiplies and adds so many times."""

from __future__ import annotations

from typing import Any

import numpy as np

if not hasattr(np, "row_stack"):  # numba-cuda up to 0.30 asks for what NumPy 2.5 took away
    setattr(np, "row_stack", np.vstack)  # noqa: B010 - written plainly, ruff's fix would change the name as well

import triton
import triton.language as tl
from numba import cuda

SIZE = 132 * 4 * 256


@cuda.jit
def numba_work(a: Any, rounds: Any) -> None:
    i = cuda.grid(1)
    if i < a.size:
        x = a[i]
        for _ in range(rounds):
            x = x * 0.999 + 0.001
        a[i] = x


@triton.jit
def triton_work(a, size, rounds, BLOCK: tl.constexpr):  # noqa: N803 - Triton's own language
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(a + i, mask=i < size)
    for _ in range(rounds):
        x = x * 0.999 + 0.001
    tl.store(a + i, x, mask=i < size)


triton_tuned = triton.autotune(configs=[triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 512})], key=["size"])(
    triton_work
)


@triton.autotune(
    configs=[triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 512})], key=["size"], restore_value=["a"]
)
@triton.jit
def triton_add_one(a, size, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(a + i, tl.load(a + i, mask=i < size) + 1, mask=i < size)
