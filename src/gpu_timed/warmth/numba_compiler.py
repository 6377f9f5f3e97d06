"""Numba on the CPU and on CUDA: a signature compiled, or loaded from its disk cache.

Private: ``Dispatcher.compile`` (numba 0.61 to 0.68) and ``CUDADispatcher.compile`` (numba-cuda 0.4 to 0.30), called
only where no compiled signature fits; inside, the counter ``_cache_hits`` moves on a hit. A signature given to the
decorator compiles there, outside any call.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any, Final

from gpu_timed.warmth.probe import Detach, Probe, Tell, replace


def _attach_to(kind: str) -> Any:
    def attach(module: ModuleType, tell: Tell) -> Detach:
        def make(original: Any) -> Any:
            def compile_(self: Any, sig: Any, *args: Any, **kwargs: Any) -> Any:
                hits, known, began = _hits(self), _known(self), time.perf_counter_ns()
                failed = True
                try:
                    result = original(self, sig, *args, **kwargs)
                    failed = False
                    return result
                finally:
                    took = time.perf_counter_ns() - began
                    name = getattr(getattr(self, "py_func", None), "__qualname__", "a function")
                    if failed:
                        tell(f"{name} failed to compile", "built", took, str(sig))
                    elif _hits(self) != hits:
                        tell(f"{name} from the disk cache", "loaded", took, str(sig))
                    elif _known(self) != known:
                        tell(f"{name} compiled", "built", took, str(sig))

            return compile_

        return replace(getattr(module, kind), "compile", make)

    return attach


def _hits(dispatcher: Any) -> int:
    counter = getattr(dispatcher, "_cache_hits", None)
    return sum(counter.values()) if counter else 0


def _known(dispatcher: Any) -> int:
    return len(getattr(dispatcher, "overloads", ()))


PROBES: Final = (
    Probe("numba", "numba.core.dispatcher", _attach_to("Dispatcher")),
    Probe("numba cuda", "numba.cuda.dispatcher", _attach_to("CUDADispatcher")),
)
