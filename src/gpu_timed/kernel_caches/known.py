"""Every cache that is known: whose it is, where it lies, and under which name it is pinned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from gpu_timed.kernel_caches import other_caches, torch_caches
from gpu_timed.kernel_caches.places import Place, Surroundings


class Known(NamedTuple):
    """One cache."""

    key: str
    title: str
    find: Callable[[Surroundings], Place]
    packages: tuple[str, ...]
    """Top-level packages of the runtime; without any, see :func:`here`."""
    variable: str = ""
    """Names its place."""
    pinned_as: str = ""
    """What the variable gets below the pinned directory; empty where it is not pinned."""
    core: bool = False
    """Of a runtime that gpu_timed watches."""
    scanned: bool = True
    """Whether everything in its directory is its own."""


KNOWN: Final = (
    Known(
        "inductor",
        "torch.compile (Inductor)",
        torch_caches.inductor,
        ("torch",),
        torch_caches.INDUCTOR,
        "inductor",
        core=True,
    ),
    Known("inductor_remote", "torch.compile, remote", torch_caches.inductor_remote, ("torch",)),
    Known("triton", "Triton", torch_caches.triton, ("triton",), torch_caches.TRITON, "triton", core=True),
    Known("triton_autotune", "Triton, tuned choices", torch_caches.triton_autotune, ("triton",), scanned=False),
    Known("numba", "Numba", other_caches.numba, ("numba",), "NUMBA_CACHE_DIR", "numba", core=True),
    Known("cupy", "CuPy", other_caches.cupy, ("cupy",), "CUPY_CACHE_DIR", "cupy", core=True),
    Known("jax", "JAX", other_caches.jax, ("jax",), "JAX_COMPILATION_CACHE_DIR", "jax", core=True),
    Known("cuda", "CUDA driver (PTX)", other_caches.cuda, (), "CUDA_CACHE_PATH", "cuda", core=True),
    Known(
        "torch_extensions",
        "torch, extensions",
        torch_caches.extensions,
        ("torch",),
        "TORCH_EXTENSIONS_DIR",
        "torch_extensions",
    ),
    Known(
        "jiterator",
        "torch, jiterator",
        torch_caches.jiterator,
        ("torch",),
        "PYTORCH_KERNEL_CACHE_PATH",
        "torch_kernels",
    ),
    Known(
        "tunableop",
        "torch, TunableOp",
        torch_caches.tunable,
        ("torch",),
        "PYTORCH_TUNABLEOP_FILENAME",
        "tunableop/tunableop_results.csv",
        scanned=False,
    ),
    Known("vllm", "vLLM", torch_caches.vllm, ("vllm",), "VLLM_CACHE_ROOT", "vllm"),
    Known(
        "flashinfer",
        "FlashInfer",
        torch_caches.flashinfer,
        ("flashinfer",),
        "FLASHINFER_WORKSPACE_BASE",
        "flashinfer",
    ),
    Known("warp", "Warp", other_caches.warp, ("warp",), "WARP_CACHE_PATH", "warp"),
    Known(
        "tensorrt",
        "TensorRT",
        other_caches.tensorrt,
        ("tensorrt", "onnxruntime", "torch_tensorrt"),
        "ORT_TENSORRT_CACHE_PATH",
        "tensorrt",
    ),
    Known("cudnn", "cuDNN, cuBLAS", other_caches.cudnn, ()),
    Known("cubecl", "CubeCL (burn)", other_caches.cubecl, ()),
    Known("metal", "Metal shaders", other_caches.metal, ()),
)
"""In the order in which they are shown."""


def of_this_platform(around: Surroundings) -> tuple[Known, ...]:
    """Return those that there can be on this platform."""
    foreign = {"cuda", "cudnn"} if around.platform == "darwin" else {"metal"}
    return tuple(known for known in KNOWN if known.key not in foreign)


def here(known: Known, around: Surroundings) -> bool | None:
    """Return whether the runtime of *known* is installed here; None where nobody can tell."""
    if known.packages:
        return any(around.installed(package) for package in known.packages)
    if known.key in ("cuda", "cudnn"):
        return around.driver
    if known.key == "cubecl":
        return other_caches.cubecl_here(around) or None
    return None
