"""Sources of random numbers, set alike before calls that are held against each other, and put back afterwards."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Iterator
from typing import Any


def _torch() -> Any:
    return importlib.import_module("gpu_timed.measure.torch_seeds") if "torch" in sys.modules else None


def _numpy() -> Any:
    numpy: Any = sys.modules.get("numpy")
    return getattr(numpy, "random", None)


def seed(number: int) -> None:
    """Set every source that this process has used to *number*: those of Python, NumPy and torch."""
    random.seed(number)
    numpy, torch = _numpy(), _torch()
    if numpy is not None:
        numpy.seed(number % (1 << 32))
    if torch is not None:
        torch.seed(number)


def drawn_since(number: int) -> bool:
    """Return whether any number was drawn since :func:`seed` was called with *number*."""
    before = _states()
    with kept():
        seed(number)
        fresh = _states()
    return bool(before != fresh)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Put every source back, as the block ends, to where it was."""
    python, numpy, torch = random.getstate(), _numpy(), _torch()
    of_numpy = None if numpy is None else numpy.get_state()
    of_torch = None if torch is None else torch.states()
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(of_numpy)
        if torch is not None:
            torch.put_back(of_torch)


def _states() -> Any:
    numpy, torch = _numpy(), _torch()
    of_numpy = None if numpy is None else [str(part) for part in numpy.get_state(legacy=False)["state"].values()]
    of_torch = None if torch is None else [state.tolist() for state in torch.states()]
    return random.getstate(), of_numpy, of_torch
