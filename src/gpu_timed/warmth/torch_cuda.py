"""torch on CUDA: the first use of the device, and CUDA Graphs that the application captures itself.

``torch.cuda.CUDAGraph.capture_begin`` and ``.capture_end`` are public and called by ``torch.cuda.graph`` and
``make_graphed_callables``; replays pass neither. Private, 2.6 to 2.14: ``torch.cuda._lazy_init``, which C++ and most
of ``torch.cuda`` look up at call time, and ``torch.cuda._lazy_call``, which runs what was queued at the end of it;
the second sees it where somebody kept the function itself. The hook takes itself out once CUDA is initialised:
torch calls ``_lazy_init`` again in many of its calls.
"""

from __future__ import annotations

import threading
import time
from types import ModuleType
from typing import Any, Final

from gpu_timed.record import NOT_SET, Measured
from gpu_timed.warmth.probe import Detach, Probe, Tell, replace

_INITIALISED: Final = "CUDA initialised by torch"


def _attach_captures(module: ModuleType, tell: Tell) -> Detach:
    graph: Any = module.CUDAGraph
    held = threading.local()  # a capture ends on the thread on which it began

    def make_begin(original: Any) -> Any:
        def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            found = original(self, *args, **kwargs)
            held.began = began
            return found

        return capture_begin

    def make_end(original: Any) -> Any:
        def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
            failed = True
            try:
                found = original(self, *args, **kwargs)
                failed = False
                return found
            finally:
                began, held.began = getattr(held, "began", None), None
                took: Measured = NOT_SET if began is None else time.perf_counter_ns() - began
                tell("capture of a CUDA graph failed" if failed else "captured a CUDA graph", "initialised", took)

        return capture_end

    undo = [replace(graph, "capture_begin", make_begin), replace(graph, "capture_end", make_end)]

    def detach() -> None:
        for each in undo:
            each()

    return detach


def _attach_first_use(module: ModuleType, tell: Tell) -> Detach:
    cuda: Any = module
    if cuda.is_initialized():
        return lambda: None
    inside = threading.local()
    active = [True]

    def make(original: Any) -> Any:
        def lazy_init() -> None:
            if cuda.is_initialized() or getattr(inside, "it", False):  # a queued call may come back here
                original()
                return
            inside.it, began = True, time.perf_counter_ns()
            try:
                original()
            finally:
                inside.it = False
                if active and cuda.is_initialized():  # a thread that waited for another's initialising, too
                    tell(_INITIALISED, "initialised", time.perf_counter_ns() - began)
                    undo()

        return lazy_init

    undo = replace(cuda, "_lazy_init", make)

    def from_the_queue() -> None:
        if active and not getattr(inside, "it", False):
            tell(_INITIALISED, "initialised")

    cuda._lazy_call(from_the_queue)  # noqa: SLF001 - versions in the module's docstring

    def detach() -> None:
        active.clear()
        undo()

    return detach


PROBES: Final = (
    Probe("cuda graph", "torch.cuda.graphs", _attach_captures),
    Probe("cuda init", "torch.cuda", _attach_first_use, needed=False),  # before it no call is timed, or warm
)
