"""A runtime that is first imported inside a call: a second or two of ``import torch`` is not the call's own time."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Final

from gpu_timed.imports import ImportWatch
from gpu_timed.warmth.ring import Ring

RUNTIMES: Final = ("torch", "torch._dynamo", "triton", "numba", "numba.cuda", "cupy", "jax")
"""Each takes 0.1 to 2 seconds. ``torch._dynamo`` comes with the first ``torch.compile``, ``AdamW`` or checkpoint."""


def watch(imports: ImportWatch, ring: Ring) -> None:
    """Have *ring* told of each import of a runtime that begins from now on."""
    for name in RUNTIMES:
        imports.when_imported(name, _teller(imports, ring, name))


def _teller(imports: ImportWatch, ring: Ring, name: str) -> Callable[[ModuleType], None]:
    def tell(_: ModuleType) -> None:
        took = imports.took_ns(name)
        if took is not None:  # else it was there already
            ring.emit("import", f"{name} imported", "initialised", took)

    return tell
