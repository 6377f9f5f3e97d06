"""Tests with JAX, each file in a process of its own.

Once JAX has a backend, work without a device is JAX's (``no_results`` instead of ``no_device``), and every fork is
warned about: the other tests must see neither. Outside of it each test tells how it went inside.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

import pytest

INSIDE: Final = os.environ.get("JAX_TESTS") == "inside"

if importlib.util.find_spec("jax") is None:
    pytest.skip("no jax", allow_module_level=True)


@functools.cache
def told_inside(path: str) -> str:
    """What pytest says of the file *path* in a process with JAX."""
    arguments = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", path]
    environment = {**os.environ, "JAX_TESTS": "inside", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=115, check=False)
    return done.stdout + done.stderr


def in_jax(test: Callable[..., None]) -> Callable[..., None]:
    """Run *test* in the process with JAX; elsewhere it passes if all its cases passed, or failed as marked, there."""
    if INSIDE:
        return test

    def outside() -> None:
        told = told_inside(test.__code__.co_filename)
        cases = [line for line in told.splitlines() if f"::{test.__name__}[" in f"{line.replace(' ', '[', 2)}["]
        assert cases, told[-4_000:]
        assert all(line.startswith(("PASSED", "XFAIL")) for line in cases), told[-8_000:]

    outside.__name__, outside.__doc__ = test.__name__, test.__doc__
    return outside


def eventually(check: Callable[[], None]) -> None:
    """Let *check* pass once in five tries: the machine may be busy with something else."""
    for _ in range(4):
        try:
            return check()
        except AssertionError:
            time.sleep(0.2)
    return check()
