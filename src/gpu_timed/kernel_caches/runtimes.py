"""Telling a runtime that is imported already where its cache is to be, and whether it would still listen.

Private, and left alone where they are not there: ``numba.core.config.CACHE_DIR`` and its twin in numba-cuda (which are
read when a function is decorated with ``cache=True``). Public: ``jax.config.update``.
"""

from __future__ import annotations

from typing import Any

from gpu_timed.kernel_caches import other_caches, torch_caches
from gpu_timed.kernel_caches.places import Surroundings, live

_TUNED = "what @triton.autotune finds is kept with TRITON_CACHE_AUTOTUNING=1 only: else it is tuned in every process"
_NUMBA = ("numba.core.config", "numba.cuda.core.config")


def too_late(key: str, around: Surroundings, *, driver_initialised: bool) -> str:
    """Return why the runtime of the cache *key* would not listen any more; empty where it would."""
    if key in ("inductor", "triton") and torch_caches.inductor_used(around):
        if key == "inductor":
            return "torch.compile has compiled or loaded something already"
        if torch_caches.by_inductor(around):
            return "torch.compile has compiled already, and given Triton a directory of its own"
    if key == "cupy" and other_caches.cupy_directory(around) is not None:
        return "CuPy has opened its cache already, as it was imported or compiled its first kernel"
    if key == "jax" and other_caches.jax_opened(around):
        return "JAX has compiled something already, and opened its cache"
    if key == "cuda" and driver_initialised:
        return "the CUDA driver is initialised already, and reads its variable once"
    return ""


def own_setting(key: str, around: Surroundings) -> str:
    """Return the place that user code has set in a runtime, past the environment; empty where it has not."""
    place = {"triton": torch_caches.triton, "numba": other_caches.numba, "jax": other_caches.jax}.get(key)
    found = place(around) if place else None
    if found is None or found.path is None or found.by not in ("triton.knobs.cache.dir", *_SETTINGS):
        return ""
    return found.path


_SETTINGS = ("numba.config.CACHE_DIR", "jax_compilation_cache_dir")


def tell(key: str, path: str, around: Surroundings) -> str:
    """Set *path* in the runtime of the cache *key*, where it is imported; return what to know of that.

    Raises:
        Exception: Whatever the runtime raises.
    """
    if key == "numba":
        held = [around.modules[name] for name in _NUMBA if around.modules.get(name) is not None]
        for module in held:
            module.CACHE_DIR = path
        if held:
            return "functions that were decorated with cache=True before keep their place"
    if key == "jax":
        config: Any = live(around, "jax", "config")
        if config is not None:
            config.update("jax_compilation_cache_dir", path)
        return other_caches.jax(around._replace(variables={**around.variables, "JAX_COMPILATION_CACHE_DIR": path})).note
    if key == "triton":
        if isinstance(live(around, "triton.knobs", "cache", "__dict__"), dict):
            vars(around.modules["triton.knobs"].cache).pop("dir", None)  # an override in code would win
        return "" if torch_caches.triton_autotune(around).enabled else _TUNED
    if key == "jiterator" and "torch" in around.modules:
        return "read once: without effect if a kernel of its kind ran already"
    return ""
