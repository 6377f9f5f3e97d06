"""Where the other runtimes keep compiled code: Numba, CuPy, JAX, the CUDA driver, Warp, TensorRT, CubeCL, Metal.

Read in Numba 0.68, numba-cuda 0.30, CuPy 13 and 14, JAX 0.10, CubeCL 0.10. Of a runtime that is imported its live
setting counts: ``numba.core.config.CACHE_DIR`` (read once, at import), ``jax.config.jax_compilation_cache_dir``
(public), and, private, the ``_kernel_cache_backend`` of ``cupy.cuda.compiler`` (CuPy 14, which opens its directory
once; CuPy 13 reads its variable every time) and ``jax._src.compilation_cache._cache``.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, Final

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

_NUMBA_KEY: Final = "for cache=True only; entries are found by the source file's path, so code at another place is cold"
_METAL: Final = 65538
"""``_CS_DARWIN_USER_CACHE_DIR`` of macOS' ``unistd.h``."""


def numba(around: Surroundings) -> Place:
    """What ``cache=True`` keeps: beside each source file, unless one directory is named."""
    held = live(around, "numba.core.config", "CACHE_DIR")
    place = named(around, "NUMBA_CACHE_DIR")
    if isinstance(held, str) and held != around.variables.get("NUMBA_CACHE_DIR", ""):
        place = given(around, held, "setting", "numba.config.CACHE_DIR") if held else None
    if place is None:
        beside = "beside each source file, in __pycache__; in the user's cache directory where that cannot be written"
        note = f"for cache=True only: {beside}"
        if around.variables.get("NUMBA_CACHE_DIR"):
            note += "; NUMBA_CACHE_DIR was set after Numba was imported, and is not read"
        return Place(None, "default", moves_with="source file", note=note)
    moves = place.moves_with if place.moves_with == "current directory" else "source file"
    return place._replace(moves_with=moves).saying(_NUMBA_KEY)


def cupy(around: Surroundings) -> Place:
    """CuPy's kernels."""
    place = named(around, "CUPY_CACHE_DIR", empty=True) or below_home(around, ".cupy", "kernel_cache")
    held = cupy_directory(around)
    if held is not None and held != around.variables.get("CUPY_CACHE_DIR", place.path):
        place = given(around, held, "setting", "CuPy, as it opened its cache")
    if is_on(around, "CUPY_CACHE_IN_MEMORY"):
        return place.off("switched off by CUPY_CACHE_IN_MEMORY: compiled anew in every process")
    return place


def cupy_directory(around: Surroundings) -> str | None:
    """Return the directory that CuPy 14 has opened, or None."""
    held = live(around, "cupy.cuda.compiler", "_kernel_cache_backend", "_cache_dir")
    return held if isinstance(held, str) else None


def jax(around: Surroundings) -> Place:
    """JAX's persistent cache: none, unless a directory is named."""
    place = named(around, "JAX_COMPILATION_CACHE_DIR")
    known = live(around, "jax", "config") is not None
    held: Any = live(around, "jax", "config", "jax_compilation_cache_dir")
    if isinstance(held, str) and held and held != around.variables.get("JAX_COMPILATION_CACHE_DIR"):
        place = given(around, held, "setting", "jax_compilation_cache_dir")
    late = known and held is None and place is not None
    if place is None or late:
        note = "JAX keeps nothing between processes"
        note += "; its variable was set after JAX was imported, and is not read" if late else ""
        return Place(None, "none", enabled=False, note=note)
    on: Any = live(around, "jax", "config", "jax_enable_compilation_cache")
    if not (on if isinstance(on, bool) else is_on(around, "JAX_ENABLE_COMPILATION_CACHE", default=True)):
        return place.off("switched off by jax_enable_compilation_cache")
    least: Any = live(around, "jax", "config", "jax_persistent_cache_min_compile_time_secs")
    if not isinstance(least, int | float):
        least = around.variables.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", 1.0)
    note = f"what compiles in less than {least} s is not kept (jax_persistent_cache_min_compile_time_secs)"
    return place.saying(note)


def jax_opened(around: Surroundings) -> bool:
    """Return whether JAX has opened its cache in this process."""
    return live(around, "jax._src.compilation_cache", "_cache") is not None


def cuda(around: Surroundings) -> Place:
    """The driver's own cache, of what it compiles from PTX: CUDA programming guide, environment variables."""
    place = named(around, "CUDA_CACHE_PATH")
    if place is None:
        roaming = around.variables.get("APPDATA") if around.platform == "win32" else None
        if roaming:
            place = Place(joined(roaming, "NVIDIA", "ComputeCache"), "default", moves_with="home")
        else:
            place = below_home(around, ".nv", "ComputeCache")
    if is_on(around, "CUDA_CACHE_DISABLE"):
        return place.off("switched off by CUDA_CACHE_DISABLE: PTX is compiled in every process")
    limit = around.variables.get("CUDA_CACHE_MAXSIZE")
    note = "for code that has PTX only for this device" + (f"; at most {limit} bytes" if limit else "")
    return place.saying(note)


def warp(around: Surroundings) -> Place:
    """NVIDIA Warp's modules."""
    return named(around, "WARP_CACHE_PATH") or user_cache(around, "warp")


def tensorrt(around: Surroundings) -> Place:
    """TensorRT's engines and timings: kept where the program says; ONNX Runtime has variables for it."""
    if not is_on(around, "ORT_TENSORRT_ENGINE_CACHE_ENABLE"):
        return Place(None, "none", enabled=False, note="kept only where the program names a file or a directory")
    place = named(around, "ORT_TENSORRT_CACHE_PATH")
    return place or Place(around.current, "current directory", moves_with="current directory")


def cudnn(around: Surroundings) -> Place:
    """What cuDNN and cuBLAS chose, for their libraries keep nothing."""
    del around
    return Place(
        None, "none", enabled=False, note="they keep nothing on disk: what they choose is chosen in each process"
    )


def cubecl(around: Surroundings) -> Place:
    """CubeCL's tuned choices (burn, cubek): below the project that the *current directory* lies in, unless told."""
    file, said = _cubecl_file(around)
    if isinstance(said, dict) and isinstance(said.get("file"), str):
        return given(around, said["file"], "setting", file)
    if said == "global":
        return below_home(around, ".config", "cubecl")._replace(decided_by="setting", by=file)
    root = around.current
    if said != "local":
        project = next((held for held in _upwards(around.current) if (held / "Cargo.toml").is_file()), None)
        root = joined(str(project or around.current), "target")
    note = "cubecl.toml can name a file; the directory below it differs between versions"
    return Place(joined(root, "environment"), "current directory", file, "current directory", note=note)


def cubecl_here(around: Surroundings) -> bool:
    """Return whether something says that CubeCL is used here: its configuration, or what it has kept."""
    return bool(_cubecl_file(around)[0]) or Path(cubecl(around).path or os.devnull).is_dir()


def metal(around: Surroundings) -> Place:
    """The shaders that Metal has compiled for this user: macOS only."""
    try:
        base = os.confstr(_METAL)
    except (AttributeError, ValueError, OSError):
        base = None
    if around.platform != "darwin" or not base:
        return Place(None, "none", enabled=False)
    return Place(base, "default", moves_with="home", note="in com.apple.metal, below a directory for each program")


def _cubecl_file(around: Surroundings) -> tuple[str, Any]:
    """Return which configuration is read, and what it says of the place of tuned choices."""
    for held in _upwards(around.current):
        for name in ("cubecl.toml", "CubeCL.toml"):
            try:
                with (held / name).open("rb") as file:
                    read = tomllib.load(file)
            except (OSError, ValueError):
                continue
            section = read.get("autotune")
            return str(held / name), section.get("cache") if isinstance(section, dict) else None
    return "", None


def _upwards(path: str) -> list[Path]:
    return [Path(path), *Path(path).parents]
