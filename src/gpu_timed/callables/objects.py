"""Callable objects: partials, bound methods, builtins, instances with ``__call__``. By wrapt's proxy."""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Callable
from typing import Any, cast

import wrapt

from gpu_timed.callables import functions
from gpu_timed.ports import Door
from gpu_timed.site import Site


def wrap(target: Callable[..., Any], site: Site, door: Door) -> Any:
    """Return a transparent proxy of *target*, each call of which is a span."""
    kind = _TimedDescriptor if hasattr(type(target), "__get__") else _Timed
    return kind(target, site, door)


def is_timed(target: Any) -> bool:
    """Return whether *target* is a proxy that :func:`wrap` made."""
    return issubclass(type(target), _Timed)  # a proxy's ``__class__`` is that of what it stands for


class _Timed(wrapt.CallableObjectProxy):  # type: ignore[type-arg] # not generic at run time
    """A proxy that can be copied and pickled: a copy wraps a copy of the object, with the same site."""

    def __init__(self, target: Callable[..., Any], site: Site, door: Door) -> None:
        super().__init__(target)
        self._self_made_of = (site, door)
        self._self_call = functions.wrap(target, site, door)

    @property
    def __call__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The wrapper, a function of the same kind as the object's own ``__call__``: some ask for that."""
        return self._self_call

    def __getattr__(self, name: str) -> Any:
        """Let a method that returns its object return the timed one."""
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
        """Pickle by name what stands under its name where it was defined, as functions do; else by what it wraps."""
        name = getattr(self.__wrapped__, "__qualname__", None)
        found: Any = sys.modules.get(getattr(self.__wrapped__, "__module__", None) or "")
        for part in (name or "").split("."):
            found = getattr(found, part, None)
        return name if found is self else (wrap, (self.__wrapped__, *self._self_made_of))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


class _TimedDescriptor(_Timed):
    """A proxy of what binds to an instance when it is found on its class, as a cached method does."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind as the object itself would: what is bound calls this proxy."""
        bound = self.__wrapped__.__get__(instance, owner)
        if bound is self.__wrapped__:
            return self
        if isinstance(bound, types.MethodType) and bound.__func__ is self.__wrapped__:
            return types.MethodType(cast("Callable[..., Any]", self), instance)
        return wrap(bound, *self._self_made_of)
