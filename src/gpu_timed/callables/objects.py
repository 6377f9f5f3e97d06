"""Callable objects: partials, builtins, instances with ``__call__``, classes. Wrapped by wrapt's proxy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

from gpu_timed.callables.functions import Enter
from gpu_timed.site import Site


def wrap(target: Callable[..., Any], site: Site, enter: Enter) -> Any:
    """Return a transparent proxy of *target*, each call of which is a span."""

    def call(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG001 - wrapt's signature
        opened = enter(site, args, kwargs)
        if opened is None:
            return wrapped(*args, **kwargs)
        try:
            result = wrapped(*args, **kwargs)
        except BaseException as error:
            opened.owner.leave(opened, error)
            raise
        opened.owner.leave(opened, None, result)
        return result

    return wrapt.FunctionWrapper(target, call)
