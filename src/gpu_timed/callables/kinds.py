"""Which kind of callable a thing is, who takes hold of it, and which things are refused, with the reason."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from gpu_timed.callables import classes, functions, modules, order, triton_kernels
from gpu_timed.errors import NotCallableError
from gpu_timed.ports import Door, Launch
from gpu_timed.site import Site

_ABOVE: Final = {
    "property": "@property",
    "cached_property": "@cached_property",
    "partialmethod": "partialmethod",
    "singledispatchmethod": "@singledispatchmethod",
}
_RUNTIMES: Final = {"jaxlib": Launch("jax"), "jax": Launch("jax")}
"""Runtimes of their own whose compiled functions are known by the package of their class."""


def refuse(target: Any) -> None:
    """Raise for what cannot be timed, or not where it stands.

    Raises:
        NotCallableError: *target* cannot be called, or its calls would never come by here.
    """
    kind = type(target)
    if isinstance(target, str):
        raise NotCallableError(
            f"gpu_timed({target!r}) decorates a string. To name the spans of a function: @gpu_timed(name={target!r}). "
            f"For a block of code: with gpu_span({target!r}):"
        )
    if kind.__name__ in _ABOVE and not callable(target):
        above = _ABOVE[kind.__name__]
        raise NotCallableError(f"gpu_timed cannot decorate a {kind.__name__}: put {above} above @gpu_timed.")
    if kind.__name__ == "ExportedProgram" and kind.__module__.startswith("torch."):
        raise NotCallableError(
            "gpu_timed cannot time an exported program, which cannot be called: decorate what its .module() gives."
        )
    if not callable(target) and not triton_kernels.is_kernel(target):  # an autotuner can only be launched
        raise NotCallableError(
            f"gpu_timed can only decorate something that can be called, not {kind.__name__} {target!r:.60}."
        )
    if isinstance(target, type) and not classes.is_builtin(target):
        classes.refuse(target)
    elif inspect.isfunction(target):
        order.refuse(target)


def name_of(target: Any) -> str:
    """Return what the spans of *target* are called where the user says nothing: its name in the code."""
    for inside in ("func", "_orig_mod"):  # a partial, and what torch.compile makes of a module
        held = getattr(target, inside, None)
        if callable(held) and type(target).__name__ in ("partial", "OptimizedModule"):
            return name_of(held)
    if type(target).__name__ in ("ScriptFunction", "RecursiveScriptModule", "TopLevelTracedModule"):
        return str(getattr(target, "name", None) or getattr(target, "original_name", ""))
    if type(target).__name__ == "GraphModuleImpl":  # of torch.export and torch.fx, made in a function
        return "GraphModule"
    if triton_kernels.is_kernel(target) and not getattr(target, "__qualname__", None):
        return name_of(target.fn)  # an autotuner and its like go by the name of the kernel
    qualified: str = getattr(target, "__qualname__", None) or type(target).__qualname__
    return qualified.replace(".<locals>", "")


def launch_of(target: Any) -> Launch | None:
    """Return which runtime *target* launches on, where its class says so; None for most things."""
    return _RUNTIMES.get(type(target).__module__.partition(".")[0])


def suspends(target: Any) -> bool:
    """Return whether a call of *target* runs on an event loop."""
    if isinstance(target, type) and not classes.is_builtin(target):
        return classes.suspends(target)
    return functions.suspends(target)


def is_timed(target: Any) -> bool:
    """Return whether *target* is what :func:`wrap` made of something, or a ``staticmethod`` or the like around it."""
    inside = getattr(target, "__func__", target)
    if inspect.isfunction(inside):
        return functions.is_timed(inside)
    if triton_kernels.is_timed(inside):
        return True
    if modules.is_module(inside):
        return functions.is_timed(type(inside).__call__)
    from gpu_timed.callables import numba_kernels, objects  # noqa: PLC0415 - wrapt is loaded only where it is needed

    return numba_kernels.is_timed(inside) or objects.is_timed(inside)


def wrap(target: Callable[..., Any], site: Site, door: Door) -> Any:
    """Return *target*, each call of which is a span: the same kind of thing, in the way that its kind needs."""
    if inspect.isfunction(target):
        return functions.wrap(target, site, door)
    if isinstance(target, type) and not classes.is_builtin(target):
        return classes.wrap(target, site, door)
    if triton_kernels.is_kernel(target):
        return triton_kernels.wrap(target, site, door)
    if modules.is_module(target):
        return modules.wrap(target, site, door)
    from gpu_timed.callables import numba_kernels, objects  # noqa: PLC0415 - wrapt is loaded only where it is needed

    if numba_kernels.is_kernel(target):
        return numba_kernels.wrap(target, site, door)
    return objects.wrap(target, site, door)
