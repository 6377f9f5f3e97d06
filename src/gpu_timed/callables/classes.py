"""Classes: what is timed is calling their instances, of an ``nn.Module`` its ``forward``.

The method is replaced on the class and the class itself comes back, so that it can be subclassed, pickled
and asked for as before.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

from gpu_timed.callables import functions
from gpu_timed.errors import NotCallableError
from gpu_timed.ports import Door
from gpu_timed.site import Site

_HEAP_TYPE: Final = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE``: every class made by a ``class`` statement has it, and some types of C."""
_IMMUTABLE: Final = 1 << 8
"""``Py_TPFLAGS_IMMUTABLETYPE``: a type of C that cannot be changed."""


def is_builtin(target: type[Any]) -> bool:
    """Return whether *target* is a type such as ``int``, which is used as a function and timed as one."""
    return target.__flags__ & (_HEAP_TYPE | _IMMUTABLE) != _HEAP_TYPE


def refuse(target: type[Any]) -> None:
    """Raise if calling an instance of *target* is nothing that could be timed.

    Raises:
        NotCallableError: Its instances cannot be called, or by something that is no Python function.
    """
    name = method_of(target)
    method = _find(target, name)
    if method is None or getattr(method, "__name__", "") == "_forward_unimplemented":
        raise NotCallableError(
            f"gpu_timed cannot time the class {target.__qualname__}: it has no {name} of its own. Decorate its "
            "methods, or put gpu_span around what you want to time."
        )
    if not inspect.isfunction(method):
        raise NotCallableError(
            f"gpu_timed cannot time the class {target.__qualname__}: its {name} is not a Python function. "
            "Decorate an instance instead."
        )


def wrap(target: type[Any], site: Site, door: Door) -> type[Any]:
    """Return *target*, each call of whose instances is a span."""
    name = method_of(target)
    method = _find(target, name)
    assert method is not None  # noqa: S101 - refuse() looked
    setattr(target, name, functions.wrap(method, site, door))
    return target


def suspends(target: type[Any]) -> bool:
    """Return whether a call of an instance of *target* runs on an event loop."""
    method = _find(target, method_of(target))
    return method is not None and functions.suspends(method)


def method_of(target: type[Any]) -> str:
    """Return which method a call of an instance runs: hooks and the like stand before a module's ``forward``."""
    is_module = any(kind.__name__ == "Module" and kind.__module__.startswith("torch.nn.") for kind in target.__mro__)
    return "forward" if is_module else "__call__"


def _find(target: type[Any], name: str) -> Any:
    """Return the method *name* as the class or a base of it holds it: ``getattr`` would find the metaclass's."""
    return next((vars(kind)[name] for kind in target.__mro__ if name in vars(kind)), None)
