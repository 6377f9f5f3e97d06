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
from types import FrameType, FunctionType
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
    above: ast.expr | None = None
    for decorator in _decorators(function):
        name = decorator.func if isinstance(decorator, ast.Call) else decorator
        found = _resolve(name, function)
        package = (getattr(found, "__module__", None) or "").partition(".")[0]
        if package == "gpu_timed":  # what stands below is what we were given
            if above is not None:
                text = ast.unparse(above)
                raise NotCallableError(
                    f"@{text} stands above @gpu_timed on {function.__qualname__}, where no launch of the kernel would "
                    f"come by gpu_timed: put @gpu_timed first and @{text} below it."
                )
            return
        if above is None and package in _COMPILERS and getattr(found, "__name__", "") in _NAMES:
            above = name


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
    # Outwards through the frames of the file: the decorator may have been imported in a function, whose names a
    # class body inside it does not have.
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - where it was decorated is on the stack
    while frame is not None:
        if frame.f_code.co_filename == function.__code__.co_filename and name.id in frame.f_locals:
            return frame.f_locals[name.id]
        frame = frame.f_back
    return function.__globals__.get(name.id)
