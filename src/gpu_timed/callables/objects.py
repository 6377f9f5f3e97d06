"""Callable objects: partials, bound methods, builtins, instances with ``__call__``, classes. By wrapt's proxy."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import wrapt

from gpu_timed.callables import functions
from gpu_timed.ports import Door
from gpu_timed.site import Site


def wrap(target: Callable[..., Any], site: Site, door: Door) -> Any:
    """Return a transparent proxy of *target*, each call of which is a span."""
    return _Timed(target, site, door)


class _Timed(wrapt.FunctionWrapper):  # type: ignore[type-arg] # not generic at run time
    """A proxy that can be copied and pickled: a copy wraps a copy of the object, with the same site."""

    def __init__(self, target: Callable[..., Any], site: Site, door: Door) -> None:
        template = functions.template_for(target)
        made = template(target, site, door)

        def call(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG001 - wrapt's
            timed = made if wrapped is target else template(wrapped, site, door)  # bound to an instance
            return timed(*args, **kwargs)

        super().__init__(target, call)
        self._self_made_of = (site, door)

    def __getattr__(self, name: str) -> Any:
        """Let a method that returns its object (``module.eval()``, ``module.to(…)``) return the timed one."""
        found = getattr(self.__wrapped__, name)
        if not isinstance(found, types.MethodType) or found.__self__ is not self.__wrapped__:
            return found
        method = found.__func__

        @functools.wraps(method)
        def call(timed: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(timed.__wrapped__, *args, **kwargs)
            return timed if result is timed.__wrapped__ else result

        return types.MethodType(call, self)

    def __copy__(self) -> Any:
        return wrap(copy.copy(self.__wrapped__), *self._self_made_of)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return wrap(copy.deepcopy(self.__wrapped__, memo), *self._self_made_of)

    def __reduce__(self) -> Any:
        return wrap, (self.__wrapped__, *self._self_made_of)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()
