"""Numba on the CPU and on CUDA: a signature compiled, or loaded from its disk cache; a module loaded on the device.

Private: ``Dispatcher.compile`` (numba 0.61 to 0.68) and ``CUDADispatcher.compile`` (numba-cuda 0.4 to 0.30), called
only where no compiled signature fits; inside, the counter ``_cache_hits`` moves on a hit. ``UFuncDispatcher.compile``
of ``numba.np.ufunc.ufuncbuilder`` does the same for ``@vectorize`` and has no such counter: there
``Cache.load_overload`` of ``numba.core.caching`` says whether there was something on disk. (numba 0.61 to 0.68, both.)

A signature given to the decorator compiles there, outside any call; on CUDA it is loaded there too, on the device of
that moment. ``Context.create_module_image`` of ``numba.cuda.cudadrv.driver`` (numba-cuda 0.20 to 0.30) loads what came
from the disk cache, or was compiled for another device, at its first launch; launches after that do not pass it.
"""

from __future__ import annotations

import time
import weakref
from types import ModuleType
from typing import Any, Final

from gpu_timed.warmth.probe import Detach, Probe, Tell, replace


class _Reads:
    """How many times something was found in each disk cache: for what does not count that itself."""

    def __init__(self) -> None:
        self._hits: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def attach(self, module: ModuleType, tell: Tell) -> Detach:  # noqa: ARG002 - the shape of an attach
        """Count from now on."""

        def make(original: Any) -> Any:
            def load_overload(cache: Any, *args: Any, **kwargs: Any) -> Any:
                found = original(cache, *args, **kwargs)
                if found is not None:
                    self._hits[cache] = self._hits.get(cache, 0) + 1
                return found

            return load_overload

        cache: Any = module.Cache
        return replace(cache, "load_overload", make)

    def of(self, dispatcher: Any) -> int:
        """Return how many times *dispatcher* found something on disk."""
        counter = getattr(dispatcher, "_cache_hits", None)
        if counter is not None:
            return int(sum(counter.values()))
        cache = getattr(dispatcher, "cache", None)
        return 0 if cache is None else self._hits.get(cache, 0)


def _attach_to(kind: str, reads: _Reads) -> Any:
    def attach(module: ModuleType, tell: Tell) -> Detach:
        def make(original: Any) -> Any:
            def compile_(self: Any, sig: Any, *args: Any, **kwargs: Any) -> Any:
                hits, known, began = reads.of(self), _known(self), time.perf_counter_ns()
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
                    elif reads.of(self) != hits:
                        tell(f"{name} from the disk cache", "loaded", took, str(sig))
                    elif _known(self) != known:
                        tell(f"{name} compiled", "built", took, str(sig))

            return compile_

        return replace(getattr(module, kind), "compile", make)

    return attach


def _attach_loading(module: ModuleType, tell: Tell) -> Detach:
    def make(original: Any) -> Any:
        def create_module_image(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            found = original(*args, **kwargs)
            tell("a module loaded on the device", "initialised", time.perf_counter_ns() - began)
            return found

        return create_module_image

    context: Any = module.Context
    return replace(context, "create_module_image", make)


def _known(dispatcher: Any) -> int:
    return len(getattr(dispatcher, "overloads", ()))


_reads: Final = _Reads()

PROBES: Final = (
    Probe("numba", "numba.core.dispatcher", _attach_to("Dispatcher", _reads)),
    Probe("numba vectorize", "numba.np.ufunc.ufuncbuilder", _attach_to("UFuncDispatcher", _reads)),
    # Without it a ufunc from the disk cache is called built.
    Probe("numba cache", "numba.core.caching", _reads.attach, needed=False),
    Probe("numba cuda", "numba.cuda.dispatcher", _attach_to("CUDADispatcher", _reads)),
    # Not needed: what it sees at a first launch was compiled, or came from the disk cache, in a call that is told; and
    # the simulator has a module of this name without the hook.
    Probe("numba cuda load", "numba.cuda.cudadrv.driver", _attach_loading, needed=False),
)
