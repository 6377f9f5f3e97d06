"""Where compiled kernels are kept between processes: a cache that is not there is a cold start every time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpu_timed.cache_facts import CacheFacts
from gpu_timed.findings import Finding


def findings(caches: Iterable[CacheFacts]) -> Iterator[Finding]:
    """Report each cache: its path, what decided it, whether it can be written, and how much is in it."""
    for cache in caches:
        yield _one(cache)


def _one(cache: CacheFacts) -> Finding:
    size = cache.size_bytes or 0
    values: dict[str, object] = {
        "variable": cache.variable,
        "path": cache.path,
        "decided_by": cache.decided_by,
        "exists": cache.exists,
        "writable": cache.writable,
        "size_mb": round(size / 1e6, 3),
        "entries": cache.entries or 0,
        "complete": cache.complete,
        "moves_with": cache.moves_with,
        "enabled": cache.enabled,
    }
    note = f"; {cache.note}" if cache.note else ""
    if cache.path is None:
        return Finding(cache.key, "ok", f"{cache.variable or cache.title} is not set{note}", values=values)
    if cache.exists is None:
        return Finding(cache.key, "warning" if "://" not in cache.path else "ok", f"{cache.path}{note}", values=values)
    by = {"variable": f"from {cache.by}", "setting": f"set by {cache.by}", "default": "the default"}.get(
        cache.decided_by, f"{cache.by or cache.title} is relative, so below the current directory"
    )
    least = "" if cache.complete else "at least "
    holds = f"{least}{size / 1e6:.1f} MB in {cache.entries or 0:,} entries" if cache.exists else "not there yet"
    text = f"{cache.path} ({by}): {holds}"
    if not cache.enabled:
        return Finding(cache.key, "ok", f"{text}{note}", values=values)
    if cache.obstructed:
        return Finding(cache.key, "warning", f"{text}, and it is no directory", f"set {cache.variable}", values)
    if not cache.writable:
        return Finding(
            cache.key,
            "warning",
            f"{text}, and cannot be written: every process compiles anew",
            f"set {cache.variable} to a directory that can be written",
            values,
        )
    if cache.decided_by == "current directory":
        fix = f"set {cache.variable} to an absolute path, or call gpu_timed.pin_caches()"
        return Finding(cache.key, "note", f"{text}{note}", fix, values)
    return Finding(cache.key, "ok", f"{text}{note}", values=values)
