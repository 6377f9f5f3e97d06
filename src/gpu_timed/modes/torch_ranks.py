"""Processes that are one of several ranks. Torch is not imported here, and asked where it is.

Graphs go before the communicators that they hold: else the end of those waits for the end of these, for ever.

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


def has_ranks() -> bool:
    """Return whether this process is one of several that exchange data by torch."""
    found: Any = sys.modules.get("torch.distributed")
    return found is not None and found.is_available() and found.is_initialized() and found.get_world_size() > 1


def hold(ground: Any, holder: Any) -> None:
    """Have the graphs of *holder* go before what they may hold, where this process is one of several ranks.

    Never raises.
    """
    try:
        if has_ranks():
            ground.hold(holder)
            _before_they_end(ground.let_go)
    except Exception as error:  # noqa: BLE001 - rule 1: the call has been made
        holder.notes.fault("mode", error)


def _before_they_end(let_go: Callable[[], None]) -> None:
    """Have *let_go* called before process groups end, and as the process does."""
    with _lock:
        if let_go in _put:
            return
        _put.add(let_go)
    atexit.register(let_go)
    holder: Any = getattr(sys.modules.get("torch.distributed"), "ProcessGroup", None)
    names: tuple[str, ...] = _ENDS
    if not hasattr(holder, _ENDS[0]):
        holder, names = sys.modules.get("torch.distributed.distributed_c10d"), _ENDS_BEFORE
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
