"""Which call a thread of autograd's works for: a backward is compiled there when it is first needed, not by the caller.

A thread that called ``.backward()`` waits inside ``torch.autograd.graph._engine_run_backward`` (private, 2.3 to
2.14), which stands on its Python stack: asked for when something was compiled, and never else. Where several wait,
the one from whose outputs the node can be reached that is being computed (``torch._C._current_autograd_node``,
private, 2.1 to 2.14).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any, Final

from gpu_timed.warmth.ring import Ring

_MOST_NODES: Final = 20_000
"""Of one graph that are looked at: some 10 ms, of a compile's seconds."""
_MOST_FRAMES: Final = 1_000


def attach(module: ModuleType, ring: Ring) -> None:
    """Have *ring* ask, for an event on a thread that is not Python's, which of Python's waits for it."""
    code = getattr(getattr(module, "_engine_run_backward", None), "__code__", None)
    if code is not None:
        ring.works_for = lambda: _caller(code)


def _caller(code: Any) -> int | None:
    """Return the thread of Python's that waits for the calling one in a backward; None where that cannot be told."""
    try:
        return _find_caller(code)
    except Exception:  # noqa: BLE001 - a version whose graphs or frames look otherwise: then it is everybody's
        return None


def _find_caller(code: Any) -> int | None:
    regular = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}  # noqa: SLF001
    waiting = {
        thread: frames
        for thread, top in sys._current_frames().items()  # noqa: SLF001 - the only way to another thread's stack
        if thread in regular and (frames := list(_backwards(top, code)))
    }
    if len(waiting) == 1:
        return next(iter(waiting))
    found = [thread for thread, frames in waiting.items() if any(map(_reaches_the_node, frames))]
    return found[0] if len(found) == 1 else None


def _backwards(frame: FrameType | None, code: Any) -> Iterator[FrameType]:
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        if frame.f_code is code:
            yield frame
        frame = frame.f_back


def _reaches_the_node(frame: FrameType) -> bool:
    """Return whether the node that this thread computes belongs to the graph of the backward in *frame*."""
    native: Any = sys.modules["torch"]._C  # noqa: SLF001 - versions in the module's docstring
    node = native._current_autograd_node()  # noqa: SLF001
    if node is None:
        return False
    outputs: Any = frame.f_locals.get("t_outputs") or ()
    left = [getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs]
    seen: set[Any] = set()
    while left and len(seen) < _MOST_NODES:
        each = left.pop()
        if each is None or each in seen:
            continue
        if each is node or each == node:
            return True
        seen.add(each)
        left += [following for following, _ in each.next_functions]
    return False
