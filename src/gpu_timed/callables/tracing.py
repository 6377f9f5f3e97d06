"""Whether this very call is being traced or compiled by torch, in which nothing can be timed.

``torch.compiler.is_compiling()`` alone does not tell: it is a flag of the whole process, up as long as *any* thread
compiles. Dynamo takes it for a constant, as it does ``is_dynamo_compiling()``, which is False wherever Python runs.
What else is traced on a thread, as by ``torch.export``, has a context of its own there.

Private, versions seen 2.6 to 2.13: ``torch._guards.TracingContext.try_get``, of this thread, and
``torch._C._get_dispatch_stack_at`` and ``_len_torch_dispatch_stack`` for the modes that trace, which are all that
``torch.export`` of 2.6 has. Where they are not to be had the flag is believed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final


def compiling() -> bool:
    """Return whether this very code is being traced, of which Dynamo takes the answer for a constant."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and bool(torch.compiler.is_compiling())
        and (bool(torch.compiler.is_dynamo_compiling()) or _is_traced_here())
    )


_TRACERS: Final = frozenset({"FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode"})
Question = Callable[[], bool]


def questions() -> tuple[Question, Question, Question]:
    """Return what :func:`compiling` asks: the first and one of the others. Called straight, that takes half the time.

    Where torch is not there yet the first is that function itself.
    """
    torch = sys.modules.get("torch")
    try:
        found: Question = torch.compiler.is_compiling  # type: ignore[union-attr]
        by_dynamo: Question = torch.compiler.is_dynamo_compiling  # type: ignore[union-attr]
    except AttributeError:  # or it is being imported
        return compiling, compiling, compiling
    return found, by_dynamo, _is_traced_here


def _is_traced_here() -> bool:
    torch, guards = sys.modules.get("torch"), sys.modules.get("torch._guards")
    try:
        if guards.TracingContext.try_get() is not None:  # type: ignore[union-attr]
            return True
        at, count = torch._C._get_dispatch_stack_at, torch._C._len_torch_dispatch_stack()  # type: ignore[union-attr] # noqa: SLF001
        return any(type(at(index)).__name__ in _TRACERS for index in range(count))
    except AttributeError:
        return True
