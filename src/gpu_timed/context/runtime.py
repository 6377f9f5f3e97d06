"""OpenTelemetry's current context, without the layers in between: they cost more than what they do.

Private names used, with the versions seen: ``opentelemetry.context._RUNTIME_CONTEXT``, and of its usual kind
(``ContextVarsRuntimeContext``) the ``ContextVar`` in ``_current_context``; api 1.30 to 1.45. With another kind,
chosen by ``OTEL_PYTHON_CONTEXT``, its own methods are called; without the name, the public functions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from opentelemetry import context as public
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.context.contextvars_context import ContextVarsRuntimeContext

_runtime: Final[Any] = getattr(public, "_RUNTIME_CONTEXT", None)
_variable: Final[Any] = getattr(_runtime, "_current_context", None)
_direct: Final = type(_runtime) is ContextVarsRuntimeContext and isinstance(_variable, ContextVar)

current: Final[Callable[[], Context]] = _variable.get if _direct else public.get_current
"""Returns the current context."""
attach: Final[Callable[[Context], Any]] = _variable.set if _direct else public.attach
"""Makes a context the current one; returns the token that undoes it."""
detach: Final[Callable[[Any], None]] = (
    _variable.reset if _direct else _runtime.detach if _runtime is not None else public.detach
)
"""Undoes an attach. Raises ValueError where the token belongs to another context, as it does when user code
finalises a coroutine elsewhere; the public function logs a stack trace instead."""


class _NoHolder:
    _TRACER_PROVIDER = None


holder: Final[Any] = trace if hasattr(trace, "_TRACER_PROVIDER") else _NoHolder
"""Holds the global provider as ``_TRACER_PROVIDER`` (api 1.30 to 1.45), or None: then ask the public function."""

_sample: Final[Any] = trace.SpanContext(3, 5, True, trace.TraceFlags(1))
in_order: Final = isinstance(_sample, tuple) and tuple(_sample)[:4] == (3, 5, True, 1) and tuple(_sample)[5:] == (True,)
"""Whether a ``SpanContext`` is a tuple of what :func:`fields` returns."""


def fields(known: trace.SpanContext) -> Any:
    """Return trace id, span id, whether it is remote, flags, trace state, and whether it is valid.

    That is the order in which a ``SpanContext`` keeps them (api 1.30 to 1.45); each property of it is a call.
    """
    if in_order:
        return known
    return known.trace_id, known.span_id, known.is_remote, known.trace_flags, known.trace_state, known.is_valid
