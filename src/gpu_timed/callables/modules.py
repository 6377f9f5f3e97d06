"""Live ``nn.Module`` instances: a second view of the same module, whose calls are spans.

The view is an object of a subclass made for it, which shares the module's attributes. So it *is* a module to
everything that looks: Dynamo, export, FSDP, ``parent.named_modules()``; and what returns ``self``, such as
``eval()`` or ``to(…)``, returns the timed one. A proxy is looked through by some of these and refused by others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from gpu_timed.callables import functions
from gpu_timed.ports import Door
from gpu_timed.site import Site


def is_module(target: Any) -> bool:
    """Return whether *target* is a module of torch that lives in Python: not a ScriptModule, which does not."""
    kinds = type(target).__mro__
    return any(_is_from(kind, "Module", "torch.nn.") for kind in kinds) and not any(
        _is_from(kind, "ScriptModule", "torch.jit") or vars(kind).get("__slots__") for kind in kinds
    )


def wrap(target: Any, site: Site, door: Door) -> Any:
    """Return a view of the module *target*, each call of which, hooks included, is a span."""
    kind = type(target)

    def bare(timed: Any) -> Any:
        found = object.__new__(kind)
        found.__dict__ = timed.__dict__
        return found

    def copied(self: Any) -> Any:
        return wrap(copy.copy(bare(self)), site, door)

    def deepcopied(self: Any, memo: dict[int, Any]) -> Any:
        found = memo[id(self)] = wrap(copy.deepcopy(bare(self), memo), site, door)
        return found

    def reduced(self: Any, protocol: int) -> Any:  # noqa: ARG001 - wrap() is pickled by name
        return wrap, (bare(self), site, door)

    call: Callable[..., Any] = kind.__call__
    own = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__wrapped__": target,
        "__call__": functions.wrap(call, site, door),
        "__copy__": copied,
        "__deepcopy__": deepcopied,
        "__reduce_ex__": reduced,
    }
    metaclass: Any = type(kind)
    bases = (kind,) if issubclass(kind, _NotANewKind) else (_NotANewKind, kind)  # a view of a view
    view: Any = object.__new__(metaclass(kind.__name__, bases, own))
    view.__dict__ = target.__dict__
    return view


class _NotANewKind:
    """Keeps a base that registers its subclasses from hearing of the class made here."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Do nothing, and do not pass it on."""


def _is_from(kind: type[Any], name: str, package: str) -> bool:
    return kind.__name__ == name and kind.__module__.startswith(package)
