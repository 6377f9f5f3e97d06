"""Graphs go before the communicators that they hold: else the end of those waits for the end of these, for ever.

NCCL's communicators count the graphs that their collectives were captured in, and to destroy or abort one is to wait
until there is none (NCCL 2.26 and others, ``commDestroySync``): ``destroy_process_group()`` never returns, at the end
of a program that has done all its work.

Put around ``torch.distributed.ProcessGroup.shutdown`` and ``abort``, by which ``destroy_process_group()`` ends each,
once graphs were captured in a process of several ranks. Versions seen 2.11 and 2.13; in 2.6 there are none, and it is
``torch.distributed.distributed_c10d._shutdown_backend``.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable
from threading import Lock
from typing import Any, Final

_ENDS: Final = ("shutdown", "abort")
_ENDS_BEFORE: Final = ("_shutdown_backend",)
_lock: Final = Lock()
_put: Final[set[Callable[[], None]]] = set()


def before_they_end(let_go: Callable[[], None]) -> None:
    """Have *let_go* called before process groups end, and as the process does."""
    with _lock:
        if let_go in _put:
            return
        _put.add(let_go)
    atexit.register(let_go)
    group = getattr(sys.modules.get("torch.distributed"), "ProcessGroup", None)
    for holder, names in (
        (group, _ENDS),
        (sys.modules.get("torch.distributed.distributed_c10d") if not hasattr(group, _ENDS[0]) else None, _ENDS_BEFORE),
    ):
        for name in names:
            ends = getattr(holder, name, None)
            if callable(ends):
                setattr(holder, name, _after(let_go, name, ends))


def _after(let_go: Callable[[], None], name: str, ends: Callable[..., Any]) -> Callable[..., Any]:
    def ends_after(group: Any, *arguments: Any, **named: Any) -> Any:
        let_go()
        return ends(group, *arguments, **named)

    # A group of a class in Python is asked for a method of that name by C++, but for one that calls it: pybind11 tells
    # that by the name of the code and its first argument. Else ``super().abort()`` in one would come back to it.
    made: Any = ends_after
    made.__code__ = made.__code__.replace(co_name=name)
    return functools.wraps(ends)(made)
