"""A probe for any cache that is a directory: what was written there while a call ran was built in it.

For runtimes that have no hook (CubeCL, Metal, TensorRT). A call pays nothing: the directory is looked at afterwards, on
the resolver's thread, and only where the call is suspect: among the first of its site, or much longer than usual.
What a file's own time says decides, so that a look that comes late is none the worse: file systems stamp with the time
of the kernel's last tick (4 to 10 ms on Linux; whole seconds on some), which lies before the truth and never after it.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from gpu_timed.bounds import Limit, fullest
from gpu_timed.errors import ConfigurationError
from gpu_timed.ports import Verdict
from gpu_timed.record import NOT_SET, Cause
from gpu_timed.site import Site

MOST_DIRECTORIES: Final = 16
"""Directories that are watched."""
MOST_ENTRIES: Final = 10_000
"""Entries of a directory that are looked at."""
_LONGEST_NS: Final = 50_000_000
"""A look is given up after this: it holds up the records of other calls, no call."""
_REST: Final = 4
"""After a look none for so many times as long: at most a fifth of the resolver's time goes into looking."""
_FIRST: Final = 3
_TIMES: Final = 3
_LONGER_NS: Final = 1_000_000
"""A call is suspect that took the host three times its usual time and a millisecond more: what compiles or tunes a
kernel takes longer than that, and a look costs about as much."""
_KEPT: Final = 32
_TICK_NS: Final = 10_000_000
_SECOND_NS: Final = 1_000_000_000
_SHOWN: Final = 3


class _Watched(NamedTuple):
    name: str
    path: str


class _Files(NamedTuple):
    """One look at a directory."""

    begun_ns: int
    stamped: tuple[tuple[int, str], ...]
    """When each file was last written (Unix time, nanoseconds), and its path below the directory."""
    complete: bool


class _Usual:
    """What the calls of a site usually take the host."""

    __slots__ = ("median_ns", "seen", "taken")

    def __init__(self) -> None:
        self.taken: deque[int] = deque(maxlen=_KEPT)
        self.median_ns = 0
        self.seen = 0

    def is_suspect(self, taken_ns: int) -> bool:
        """Return whether a call that took so long may have built something, and take it into account."""
        self.seen += 1
        suspect = self.seen <= _FIRST or taken_ns > max(_TIMES * self.median_ns, self.median_ns + _LONGER_NS)
        self.taken.append(taken_ns)
        if self.seen <= _KEPT or self.seen % _KEPT == 0:  # else a median for every call
            self.median_ns = round(statistics.median(self.taken))
        return suspect


class DirectoryProbe:
    """Watches directories for one process.

    Args:
        count: Told what could not be looked at: ``cache_watch_skipped``, ``cache_watch_incomplete``.
        unix_ns: The realtime clock.
        now_ns: The monotonic clock.
    """

    def __init__(
        self,
        count: Callable[[str], None],
        unix_ns: Callable[[], int] = time.time_ns,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._count = count
        self._unix_ns = unix_ns
        self._now_ns = now_ns
        self._watched: tuple[_Watched, ...] = ()
        self._usual: weakref.WeakKeyDictionary[Site, _Usual] = weakref.WeakKeyDictionary()
        self._looks: dict[str, _Files] = {}
        self._rested_ns = 0
        self._lock = threading.RLock()

    def watch(self, directory: str | os.PathLike[str], name: str | None) -> Callable[[], None]:
        """Watch *directory*; returns what ends it. See :func:`gpu_timed.watch_cache`.

        Raises:
            ConfigurationError: It is no path, or there are too many.
        """
        try:
            said = os.fspath(directory)
        except TypeError:
            said = ""
        if not isinstance(said, str) or not said:
            raise ConfigurationError(f"watch_cache() needs the path of a directory, not {directory!r}.")
        path = os.path.abspath(os.path.expanduser(said))  # noqa: PTH100, PTH111 - links stay
        if os.path.exists(path) and not os.path.isdir(path):  # noqa: PTH112
            raise ConfigurationError(f"{path} is no directory: watch_cache() watches the one that a cache lies in.")
        made = _Watched(name or os.path.basename(path) or path, path)  # noqa: PTH119
        with self._lock:
            others = tuple(held for held in self._watched if held.path != path)
            if len(others) >= MOST_DIRECTORIES:
                raise ConfigurationError(f"more than {MOST_DIRECTORIES} directories cannot be watched.")
            self._watched = (*others, made)

        def end() -> None:
            with self._lock:
                self._watched = tuple(held for held in self._watched if held is not made)
                self._looks.pop(path, None)

        return end

    def limits(self) -> Iterator[Limit]:
        """Say how many directories are watched, and how much was seen of the fullest."""
        looks = list(self._looks.values())
        yield Limit("directories", MOST_DIRECTORIES, len(self._watched), None, "caches watched")
        yield Limit("files", MOST_ENTRIES, fullest(len(look.stamped) for look in looks), None, "files of such a cache")

    @property
    def watching(self) -> bool:
        """Whether anything is watched."""
        return bool(self._watched)

    def forget(self) -> None:
        """Watch nothing any more."""
        with self._lock:
            self._watched = ()
            self._looks.clear()
            self._usual.clear()

    def restart(self) -> None:
        """Begin anew in a forked child, whose copy of the lock may be held by a thread it does not have."""
        self._lock = threading.RLock()

    def second_look(self, site: Site, began_ns: int, ended_ns: int, verdict: Verdict) -> Verdict:
        """Return *verdict*, or a colder one if a file was written between two times (Unix, nanoseconds)."""
        with self._lock:
            usual = self._usual.get(site)
            if usual is None:
                usual = self._usual[site] = _Usual()
            if not usual.is_suspect(ended_ns - began_ns) or verdict.tier == "built":
                return verdict
            found = [self._cause(watched, began_ns, ended_ns) for watched in self._watched]
        causes = tuple(cause for cause in found if cause is not None)
        if not causes:
            return verdict
        took = verdict.compile_ns if verdict.warmth == "cold" else NOT_SET
        return Verdict("cold", "built", (*verdict.causes, *causes), took, verdict.concurrent)

    def _cause(self, watched: _Watched, began_ns: int, ended_ns: int) -> Cause | None:
        files = self._files(watched.path, ended_ns)
        if files is None:
            return None
        names = [name for stamp, name in files.stamped if _reach(stamp, began_ns) <= stamp <= ended_ns]
        if not names:
            return None
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        what = f"{len(names)} {'file' if len(names) == 1 else 'files'} written in {watched.path}"
        detail = f"{shown}; another process or thread may have written {'it' if len(names) == 1 else 'them'}"
        return Cause(watched.name, what, "built", NOT_SET, detail)

    def _files(self, path: str, ended_ns: int) -> _Files | None:
        """Return a look at *path* begun after *ended_ns*: the last one, if it was; None where it must rest."""
        held = self._looks.get(path)
        if held is not None and held.begun_ns > ended_ns:
            return held
        began = self._now_ns()
        if began < self._rested_ns:
            self._count("cache_watch_skipped")
            return None
        begun_ns = self._unix_ns()
        stamped, complete = _look(path, began + _LONGEST_NS, self._now_ns)
        if not complete:
            self._count("cache_watch_incomplete")
        ended = self._now_ns()
        self._rested_ns = ended + _REST * (ended - began)
        made = self._looks[path] = _Files(begun_ns, stamped, complete)
        return made


def _reach(stamp: int, began_ns: int) -> int:
    """Return the earliest stamp that a file can bear which was written after *began_ns*."""
    coarse = stamp % _SECOND_NS == 0
    return began_ns - (2 * _SECOND_NS if coarse else _TICK_NS)


def _look(path: str, until_ns: int, now_ns: Callable[[], int]) -> tuple[tuple[tuple[int, str], ...], bool]:
    """Return when each file below *path* was written, and whether these are all."""
    found: list[tuple[int, str]] = []
    entries = 0
    waiting = [path]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as held:
                for entry in held:
                    entries += 1
                    if entries > MOST_ENTRIES or now_ns() > until_ns:
                        return tuple(found), False
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        state = entry.stat(follow_symlinks=False)
                        # A file that was written elsewhere and moved here has its move in its ctime.
                        stamp = max(state.st_mtime_ns, state.st_ctime_ns)
                        found.append((stamp, os.path.relpath(entry.path, path)))
        except OSError:  # not there yet, or gone meanwhile
            continue
    return tuple(found), True
