"""Where compiled kernels are kept between processes: a cache that is not there is a cold start every time."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from gpu_timed.findings import Finding

MOST_ENTRIES: Final = 20_000
LONGEST_SCAN_S: Final = 0.5


class Cache(NamedTuple):
    """A cache of some runtime: its variable, and where it is without one."""

    key: str
    variable: str
    default: Path | None
    without: str
    """What happens where there is neither variable nor default."""


class Size(NamedTuple):
    """How much lies in a directory, as far as it was looked at."""

    bytes: int
    entries: int
    complete: bool


def known(environment: Mapping[str, str]) -> list[Cache]:
    """Return the caches of the runtimes that gpu_timed knows, with their defaults on this machine."""
    home = Path.home()
    triton = Path(environment["TRITON_HOME"]) if environment.get("TRITON_HOME") else home
    windows = os.name == "nt"
    cuda = home / "AppData/Roaming/NVIDIA/ComputeCache" if windows else home / ".nv/ComputeCache"
    return [
        Cache("inductor", "TORCHINDUCTOR_CACHE_DIR", Path(tempfile.gettempdir()) / f"torchinductor_{_user()}", ""),
        Cache("triton", "TRITON_CACHE_DIR", triton / ".triton" / "cache", ""),
        Cache("numba", "NUMBA_CACHE_DIR", None, "Numba keeps what cache=True asks for beside each source file"),
        Cache("cupy", "CUPY_CACHE_DIR", home / ".cupy" / "kernel_cache", ""),
        Cache("jax", "JAX_COMPILATION_CACHE_DIR", None, "JAX keeps nothing between processes"),
        Cache("cuda", "CUDA_CACHE_PATH", cuda, ""),
    ]


def findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Report each cache: its path, what decided it, whether it can be written, and how much is in it."""
    for cache in known(environment):
        yield _one(cache, environment)


def measure(path: Path, most: int = MOST_ENTRIES, longest_s: float = LONGEST_SCAN_S) -> Size:
    """Return how much lies below *path*: at most *most* entries are looked at, for at most *longest_s* seconds."""
    total = entries = 0
    until = time.monotonic() + longest_s
    waiting = [path]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as found:
                for entry in found:
                    if entries >= most or time.monotonic() > until:
                        return Size(total, entries, complete=False)
                    entries += 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError:  # gone meanwhile, or not ours to read
            continue
    return Size(total, entries, complete=True)


def _one(cache: Cache, environment: Mapping[str, str]) -> Finding:
    said = environment.get(cache.variable)
    path = Path(said).expanduser() if said else cache.default
    decided = "variable" if said else "default"
    values: dict[str, object] = {"variable": cache.variable, "path": None, "decided_by": decided}
    if path is None:
        return Finding(cache.key, "ok", f"{cache.variable} is not set: {cache.without}", values=values)
    if not path.is_absolute():
        decided, path = "current directory", Path.cwd() / path
    try:
        exists, there = path.is_dir(), path.exists()
        writable = _can_be_written(path)
    except OSError as error:
        return Finding(cache.key, "warning", f"{path} cannot be looked at: {error.strerror}", values=values)
    size = measure(path) if exists else Size(0, 0, complete=True)
    values |= {
        "path": str(path),
        "decided_by": decided,
        "exists": exists,
        "writable": writable,
        "size_mb": round(size.bytes / 1e6, 3),
        "entries": size.entries,
        "complete": size.complete,
    }
    by = {"variable": f"from {cache.variable}", "default": "the default"}.get(
        decided, f"{cache.variable} is relative, so below the current directory"
    )
    least = "" if size.complete else "at least "
    holds = f"{least}{size.bytes / 1e6:.1f} MB in {size.entries:,} entries" if exists else "not there yet"
    text = f"{path} ({by}): {holds}"
    if there and not exists:
        return Finding(cache.key, "warning", f"{text}, and it is no directory", f"set {cache.variable}", values)
    if not writable:
        return Finding(
            cache.key,
            "warning",
            f"{text}, and cannot be written: every process compiles anew",
            f"set {cache.variable} to a directory that can be written",
            values,
        )
    return Finding(cache.key, "note" if decided == "current directory" else "ok", text, values=values)


def _can_be_written(path: Path) -> bool:
    """Return whether *path* can be written or, where it is not there, made."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return os.access(path, os.W_OK | os.X_OK)


def _user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        name = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    return re.sub(r'[\\/:*?"<>|]', "_", name)
