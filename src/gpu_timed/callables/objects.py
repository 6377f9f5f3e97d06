"""Callable objects: partials, builtins, instances with ``__call__``, classes. Wrapped by wrapt's proxy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

from gpu_timed.callables import functions
from gpu_timed.ports import Door
from gpu_timed.site import Site


def wrap(target: Callable[..., Any], site: Site, door: Door) -> Any:
    """Return a transparent proxy of *target*, each call of which is a span."""
    template = functions.template_for(target)

    def call(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG001 - wrapt's signature
        return template(wrapped, site, door)(*args, **kwargs)

    return wrapt.FunctionWrapper(target, call)
