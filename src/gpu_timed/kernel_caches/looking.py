"""Looking at the places of all caches: what is there, how much, and whether more can be written."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Final, NamedTuple

from gpu_timed.cache_facts import CacheFacts
from gpu_timed.kernel_caches.known import Known, here, of_this_platform
from gpu_timed.kernel_caches.places import Surroundings

MOST_ENTRIES: Final = 20_000
LONGEST_SCAN_S: Final = 0.5


class Size(NamedTuple):
    """How much lies in a directory, as far as it was looked at."""

    bytes: int
    entries: int
    complete: bool


def look(around: Surroundings, *, only_in_use: bool = False) -> tuple[CacheFacts, ...]:
    """Return what is known of every cache, in the order in which they are shown.

    Args:
        around: What this process has around it.
        only_in_use: Leave out what is neither of a runtime that gpu_timed watches nor in use here.
    """
    found = [_facts(known, around) for known in of_this_platform(around)]
    return tuple(facts for facts in found if not only_in_use or facts.core or facts.in_use)


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


def can_be_written(path: Path) -> bool:
    """Return whether *path* can be written or, where it is not there, made."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return os.access(path, os.W_OK | os.X_OK)


def _facts(known: Known, around: Surroundings) -> CacheFacts:
    place = known.find(around)
    note = place.note
    exists: bool | None = None
    writable: bool | None = None
    obstructed = False
    size: Size | None = None
    free: int | None = None
    if place.path is not None and "://" not in place.path:
        path = Path(place.path)
        try:
            there, exists = path.exists(), path.is_dir()
            obstructed = there and not exists and known.scanned
            writable = can_be_written(path) and not obstructed
            free = shutil.disk_usage(_above(path)).free
        except (OSError, ValueError) as error:
            note = "; ".join(filter(None, (note, f"cannot be looked at: {getattr(error, 'strerror', error)}")))
        if exists and known.scanned and place.path != around.current:
            size = measure(path)
    return CacheFacts(
        key=known.key,
        title=known.title,
        path=place.path,
        variable=known.variable,
        decided_by=place.decided_by,
        by=place.by,
        moves_with=place.moves_with,
        enabled=place.enabled,
        installed=here(known, around),
        imported=any(package in around.modules for package in known.packages),
        core=known.core,
        exists=exists,
        obstructed=obstructed,
        writable=writable,
        size_bytes=None if size is None else size.bytes,
        entries=None if size is None else size.entries,
        complete=size is None or size.complete,
        free_bytes=free,
        note=note,
    )


def _above(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
