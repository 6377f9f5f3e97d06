"""Decorators in the wrong order: a kernel compiler above ``@gpu_timed`` compiles our wrapper, or skips it.

``@cuda.jit`` over ``@gpu_timed`` would fail at the first launch with an error about byte code, and Triton's
``jit`` reads the source of the function inside and never calls the wrapper. The decorators above are read
from the source, only where Numba or Triton is loaded, and only for functions that name one of theirs.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import sys
import textwrap
from types import FunctionType
from typing import Any, Final

from gpu_timed.errors import NotCallableError

_COMPILERS: Final = ("numba", "triton")
_NAMES: Final = frozenset({"jit", "njit", "vectorize", "guvectorize", "cfunc", "stencil", "autotune", "heuristics"})


def refuse(function: FunctionType) -> None:
    """Raise if a kernel compiler stands above us.

    Raises:
        NotCallableError: ``@cuda.jit``, ``@triton.jit`` or another of theirs is over ``@gpu_timed``.
    """
    if not any(name in sys.modules for name in _COMPILERS):
        return
    for decorator in _decorators(function):
        if isinstance(decorator, ast.Call):
            decorator = decorator.func  # noqa: PLW2901 - with arguments or without
        found = _resolve(decorator, function)
        package = (getattr(found, "__module__", None) or "").partition(".")[0]
        if package == "gpu_timed":
            return  # what stands below is what we were given
        if package in _COMPILERS and getattr(found, "__name__", "") in _NAMES:
            text = ast.unparse(decorator)
            raise NotCallableError(
                f"@{text} stands above @gpu_timed on {function.__qualname__}, where no launch of the kernel would "
                f"come by gpu_timed: put @gpu_timed first and @{text} below it."
            )


def _decorators(function: FunctionType) -> list[ast.expr]:
    """Return the decorators of *function* as its source has them, top down; none if there is no source."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)[code.co_firstlineno - 1 :]
    head = list(itertools.takewhile(lambda line: not line.lstrip().startswith(("def ", "async ", "class ")), lines))
    if not any(name in line for line in head for name in _NAMES):
        return []
    try:
        tree = ast.parse(textwrap.dedent("".join(head)) + "def f(): pass")
    except SyntaxError:
        return []
    first = tree.body[0]
    return first.decorator_list if isinstance(first, ast.FunctionDef) else []


def _resolve(name: ast.expr, function: FunctionType) -> Any:
    """Return what a dotted *name* means where *function* was defined, None if that cannot be seen."""
    if isinstance(name, ast.Attribute):
        return getattr(_resolve(name.value, function), name.attr, None)
    if not isinstance(name, ast.Name):
        return None
    frame = sys._getframe(1)  # noqa: SLF001 - a decorator imported inside the function that defines the kernel
    while frame is not None and frame.f_code.co_filename != function.__code__.co_filename:
        frame = frame.f_back  # type: ignore[assignment] # None ends the loop
    local = {} if frame is None else frame.f_locals
    return local.get(name.id, function.__globals__.get(name.id))
