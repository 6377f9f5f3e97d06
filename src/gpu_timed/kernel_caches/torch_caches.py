"""Where torch, Triton and what is built on them keep compiled code. Read in torch 2.13 and Triton 3.9, vLLM 0.13.

Private, and unknown where they are not there: ``torch._inductor.config``, the instance dictionary of
``triton.knobs.cache`` (an override in code), ``PyCodeCache.modules`` of ``torch._inductor.codecache``.
Inductor writes its default into ``TORCHINDUCTOR_CACHE_DIR`` as soon as it is used, and a directory of its own into
``TRITON_CACHE_DIR``: neither is the user's word, and both are told apart here.
"""

from __future__ import annotations

import os
import re

from gpu_timed.kernel_caches.places import (
    Place,
    Surroundings,
    below_home,
    given,
    is_on,
    joined,
    live,
    named,
    user_cache,
)

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
TRITON = "TRITON_CACHE_DIR"


def inductor(around: Surroundings) -> Place:
    """``torch.compile``: FX graphs, AOTAutograd, generated code, tuned choices, PGO and precompiled artifacts."""
    default = joined(around.temporary, f"torchinductor_{around.user}")
    place = named(around, INDUCTOR, empty=True)
    if place is None or by_torch_itself(around):
        place = Place(default, "default", moves_with="temporary directory")
    off = [
        text
        for text, is_off in (
            ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", _forced_off(around)),
            ("fx_graph_cache", _graphs_off(around)),
        )
        if is_off
    ]
    if off:
        return place.off(f"switched off by {' and '.join(off)}: compiled anew in every process")
    if around.variables.get("TORCHINDUCTOR_AUTOGRAD_CACHE") == "0":
        return place.saying("AOTAutograd's part is switched off by TORCHINDUCTOR_AUTOGRAD_CACHE=0")
    return place


def by_torch_itself(around: Surroundings) -> bool:
    """Return whether it was Inductor that put its default into its variable."""
    default = joined(around.temporary, f"torchinductor_{around.user}")
    loaded = any(name == "torch._inductor" or name.startswith("torch._inductor.") for name in tuple(around.modules))
    return loaded and around.variables.get(INDUCTOR) == default


def inductor_used(around: Surroundings) -> bool:
    """Return whether Inductor has compiled or loaded something in this process; where nobody can tell, it has."""
    if live(around, "torch._inductor.codecache") is None:
        return False
    modules = live(around, "torch._inductor.codecache", "PyCodeCache", "modules")
    return modules is None or bool(modules)


def inductor_remote(around: Surroundings) -> Place:
    """Inductor's caches on a Redis server, each switched on by its own variable."""
    switches = (
        "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE",
        "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE",
        "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE",
        "TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE",
    )
    on = [name for name in switches if around.variables.get(name) == "1"]
    if not on:
        return Place(None, "none", enabled=False, note=f"off, unless {switches[0]}=1 or one of its kin")
    host = around.variables.get("TORCHINDUCTOR_REDIS_HOST", "localhost")
    port = around.variables.get("TORCHINDUCTOR_REDIS_PORT", "6379")
    url = around.variables.get("TORCHINDUCTOR_REDIS_URL")
    server = re.sub(r"//[^/@]*@", "//", url) if url else f"redis://{host}:{port}"  # without a password
    return Place(server, "variable", on[0])


def triton(around: Surroundings) -> Place:
    """Triton's compiled kernels; those of torch.compile lie in Inductor's, unless the variable is set."""
    overridden = live(around, "triton.knobs", "cache", "__dict__")
    override = overridden.get("dir") if isinstance(overridden, dict) else None
    place = named(around, TRITON, empty=True)
    if isinstance(override, str):
        place = given(around, override, "setting", "triton.knobs.cache.dir")
    elif place is not None and by_inductor(around):
        moves = inductor(around).moves_with
        place = Place(place.path, "setting", "torch.compile", moves, note="Inductor set TRITON_CACHE_DIR")
    elif place is None:
        home = named(around, "TRITON_HOME", empty=True)
        if home is None or home.path is None:
            place = below_home(around, ".triton", "cache")
        else:
            place = home._replace(path=joined(home.path, ".triton", "cache"))
        place = place.saying("kernels of torch.compile lie below Inductor's, unless TRITON_CACHE_DIR is set")
    if is_on(around, "TRITON_ALWAYS_COMPILE"):
        return place.off("switched off by TRITON_ALWAYS_COMPILE: compiled anew every time")
    if around.variables.get("TRITON_CACHE_MANAGER"):
        return place.saying("TRITON_CACHE_MANAGER names another manager, which may keep it elsewhere")
    return place


def by_inductor(around: Surroundings) -> bool:
    """Return whether it was Inductor that put a directory of its own into Triton's variable."""
    inside = joined(around.variables.get(INDUCTOR, os.sep), "triton") + os.sep
    said = around.variables.get(TRITON, "")
    return said.startswith(inside) and said[len(inside) :].isdigit()


def triton_autotune(around: Surroundings) -> Place:
    """What ``@triton.autotune`` found: kept only on request, beside the kernels."""
    place = triton(around)
    if is_on(around, "TRITON_CACHE_AUTOTUNING"):
        return place
    return place.off("benchmarked anew in every process, unless TRITON_CACHE_AUTOTUNING=1 or cache_results=True")


def extensions(around: Surroundings) -> Place:
    """C++ and CUDA extensions that torch builds while the program runs."""
    return named(around, "TORCH_EXTENSIONS_DIR", empty=True) or user_cache(around, "torch_extensions")


def jiterator(around: Surroundings) -> Place:
    """Kernels that ``torch.cuda.jiterator`` and some operators compile by NVRTC."""
    place = named(around, "PYTORCH_KERNEL_CACHE_PATH", empty=True) or user_cache(around, "torch", "kernels", mac=False)
    if around.variables.get("USE_PYTORCH_KERNEL_CACHE") == "0":
        return place.off("switched off by USE_PYTORCH_KERNEL_CACHE=0")
    return place


def tunable(around: Surroundings) -> Place:
    """The results of TunableOp: files in the current directory, unless they are named."""
    place = named(around, "PYTORCH_TUNABLEOP_FILENAME")
    if place is None:
        place = Place(
            joined(around.current, "tunableop_results.csv"),
            "current directory",
            moves_with="current directory",
            note="a file for each device",
        )
    if not is_on(around, "PYTORCH_TUNABLEOP_ENABLED"):
        return place.off("off, unless PYTORCH_TUNABLEOP_ENABLED=1")
    return place


def vllm(around: Surroundings) -> Place:
    """Compiled graphs of vLLM, below its own root."""
    place = named(around, "VLLM_CACHE_ROOT", tilde=True) or user_cache(around, "vllm", mac=False)
    if is_on(around, "VLLM_DISABLE_COMPILE_CACHE"):
        return place.off("switched off by VLLM_DISABLE_COMPILE_CACHE")
    return place


def flashinfer(around: Surroundings) -> Place:
    """FlashInfer's kernels, below ``.cache/flashinfer`` of its base."""
    base = named(around, "FLASHINFER_WORKSPACE_BASE")
    if base is None or base.path is None:
        return below_home(around, ".cache", "flashinfer")
    return base._replace(path=joined(base.path, ".cache", "flashinfer"))


def _forced_off(around: Surroundings) -> bool:
    held = live(around, "torch._inductor.config", "force_disable_caches")
    if isinstance(held, bool):
        return held
    names = ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TORCH_COMPILE_FORCE_DISABLE_CACHES")
    return any(around.variables.get(name) == "1" for name in names)


def _graphs_off(around: Surroundings) -> bool:
    held = live(around, "torch._inductor.config", "fx_graph_cache")
    if isinstance(held, bool):
        return not held
    return around.variables.get("TORCHINDUCTOR_FX_GRAPH_CACHE") == "0"
