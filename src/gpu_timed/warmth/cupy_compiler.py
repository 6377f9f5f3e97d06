"""CuPy: kernels compiled by NVRTC, or loaded from its disk cache.

Private, cupy 13 and 14: every kernel goes through ``cupy.cuda.compiler._compile_module_with_cache``, looked up at
call time and below the in-memory cache; whether NVRTC ran says which it was.
"""

from __future__ import annotations

import threading
import time
from types import ModuleType
from typing import Any, Final

from gpu_timed.warmth.probe import Detach, Probe, Tell, replace

_COMPILERS: Final = ("_compile_using_nvrtc_no_warning", "compile_using_nvrtc", "compile_using_nvcc")


def _attach(module: ModuleType, tell: Tell) -> Detach:
    held = threading.local()

    def mark(original: Any) -> Any:
        def compile_(*args: Any, **kwargs: Any) -> Any:
            held.built = True
            return original(*args, **kwargs)

        return compile_

    def make(original: Any) -> Any:
        def compile_module(*args: Any, **kwargs: Any) -> Any:
            held.built, began = False, time.perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                took = time.perf_counter_ns() - began
                if held.built:
                    tell("a kernel compiled", "built", took)
                else:
                    tell("a kernel from the disk cache", "loaded", took)

        return compile_module

    undo = [replace(module, "_compile_module_with_cache", make)]
    undo += [replace(module, name, mark) for name in _COMPILERS if hasattr(module, name)]

    def detach() -> None:
        for each in undo:
            each()

    return detach


PROBES: Final = (Probe("cupy", "cupy.cuda.compiler", _attach),)
