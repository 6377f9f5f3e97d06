"""What is known of the caches of compiled code: where each lies, what decided it, and what became of pinning it.

:meth:`CacheReport.to_json` has a stable shape. What is there keeps its name and meaning; more may come.

::

    {"schema": 1, "gpu_timed": "0.1.0", "current_directory": "/srv/app",
     "caches": [{"key": "triton", "title": "Triton", "path": "/home/me/.triton/cache", "variable": "TRITON_CACHE_DIR",
                 "decided_by": "default", "by": "", "moves_with": "home", "cold_elsewhere": "another user, ...",
                 "enabled": true, "installed": true, "imported": false, "exists": true, "writable": true,
                 "size_bytes": 1200, "entries": 7, "complete": true, "free_bytes": 10000000, "note": ""}],
     "verdict": {"moving": ["tunableop"], "not_writable": [], "exit_code": 1}}

Sizes are bytes, and what is not known or not there is ``null``. ``complete`` is false where the walk ended at its
limit: then ``size_bytes`` and ``entries`` are "at least".
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias

DecidedBy: TypeAlias = Literal["variable", "setting", "default", "current directory", "none"]
MovesWith: TypeAlias = Literal["nothing", "current directory", "temporary directory", "home", "source file"]
PinStatus: TypeAlias = Literal["pinned", "kept", "too_late", "not_applicable"]

SCHEMA: Final = 1
COLD_ELSEWHERE: Final[dict[MovesWith, str]] = {
    "nothing": "a machine or container without this directory",
    "current directory": "another current directory",
    "temporary directory": "another temporary directory, another user, a restart that empties it, another container",
    "home": "another user, a home that cannot be written, another container",
    "source file": "the source file at another place",
}
"""Where the next process finds nothing, by what the place of a cache depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """One cache of compiled or tuned code, as this process would use it."""

    key: str
    """Names it, stable between versions."""
    title: str
    """Whose it is."""
    path: str | None
    """Absolute path or URL; None where nothing is kept, or beside each source file."""
    variable: str
    """The environment variable that names its place; empty where there is none."""
    decided_by: DecidedBy
    """What decided the place. ``current directory`` where a relative path did, whoever gave it."""
    by: str
    """The variable or setting that did, where one did."""
    moves_with: MovesWith
    """What the place depends on: another one, and the next process is cold."""
    enabled: bool
    """Whether anything is kept there."""
    installed: bool | None
    """Whether the runtime is installed here; None where nobody can tell."""
    imported: bool
    """Whether this process has imported it: then its live settings were looked at."""
    core: bool
    """Whether it belongs to a runtime that gpu_timed itself watches."""
    exists: bool | None = None
    """Whether there is such a directory."""
    obstructed: bool = False
    """Whether something stands in its place that is no directory."""
    writable: bool | None = None
    """Whether it can be written or, where it is not there, made."""
    size_bytes: int | None = None
    """Bytes below it, as far as it was looked at."""
    entries: int | None = None
    """Files and directories below it, as far as it was looked at."""
    complete: bool = True
    """Whether everything was looked at."""
    free_bytes: int | None = None
    """Bytes that are free on its file system for this user."""
    note: str = ""
    """What else there is to know: a switch that turns it off, a key that holds a path."""

    @property
    def in_use(self) -> bool:
        """Whether this process may use it: its runtime is installed, or somebody has named its place."""
        said = self.decided_by == "setting" or (bool(self.by) and self.by == self.variable)
        return self.installed is True or self.imported or said

    @property
    def moving(self) -> bool:
        """Whether it is in use, and another one as soon as the program is started from elsewhere."""
        return self.in_use and self.enabled and self.moves_with == "current directory"

    @property
    def unusable(self) -> bool:
        """Whether it is in use and cannot be written: every process compiles anew."""
        return self.in_use and self.enabled and self.writable is False

    @property
    def cold_elsewhere(self) -> str:
        """Where the next process would find nothing, in words."""
        return COLD_ELSEWHERE[self.moves_with] if self.enabled else "always: nothing is kept"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as a plain dictionary, in the shape shown at the top of this module."""
        return {**asdict(self), "cold_elsewhere": self.cold_elsewhere, "in_use": self.in_use}


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What :func:`gpu_timed.caches` found."""

    version: str
    """Version of gpu_timed."""
    current_directory: str
    """Where the process stood."""
    caches: tuple[CacheFacts, ...]
    """Every cache that gpu_timed knows on this platform, in use or not."""

    def get(self, key: str) -> CacheFacts | None:
        """Return the cache named *key*, or None."""
        return next((cache for cache in self.caches if cache.key == key), None)

    @property
    def moving(self) -> tuple[str, ...]:
        """Keys of the caches in use that move with the current directory."""
        return tuple(cache.key for cache in self.caches if cache.moving)

    @property
    def not_writable(self) -> tuple[str, ...]:
        """Keys of the caches in use that cannot be written."""
        return tuple(cache.key for cache in self.caches if cache.unusable)

    @property
    def exit_code(self) -> int:
        """What ``gpu-timed caches --check`` answers: 1 where a cache in use moves or cannot be written, else 0."""
        return int(bool(self.moving or self.not_writable))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dictionaries and lists, in the shape shown at the top of this module."""
        return {
            "schema": SCHEMA,
            "gpu_timed": self.version,
            "current_directory": self.current_directory,
            "caches": [cache.to_dict() for cache in self.caches],
            "verdict": {
                "moving": list(self.moving),
                "not_writable": list(self.not_writable),
                "exit_code": self.exit_code,
            },
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON text, in ASCII; *indent* as in :func:`json.dumps`."""
        return json.dumps(self.to_dict(), indent=indent)


@dataclass(frozen=True, slots=True)
class Pin:
    """What became of pinning one cache."""

    key: str
    """As in :class:`CacheFacts`."""
    status: PinStatus
    """``pinned``; ``kept``, where the user's own variable or setting wins; ``too_late``, where the runtime has read its
    place already; ``not_applicable``, where the runtime is not here."""
    path: str | None
    """Where the cache lies now, as far as it is known."""
    variable: str
    """The variable that was set, or would have been."""
    reason: str = ""
    """Why it was not pinned, or what to know of it."""


@dataclass(frozen=True, slots=True)
class PinReport:
    """What :func:`gpu_timed.pin_caches` did. True if nothing was too late."""

    directory: str
    """Absolute path of the directory below which everything lies."""
    pins: tuple[Pin, ...]
    """What became of each cache."""
    notes: tuple[str, ...] = ()
    """What to know about the directory."""

    def __bool__(self) -> bool:
        return not self.too_late

    def __str__(self) -> str:
        lines = [f"compile caches below {self.directory}:"]
        for pin in self.pins:
            where = f" {pin.path}" if pin.path and pin.status in ("pinned", "kept") else ""
            lines.append(f"  {pin.key}: {pin.status}{where}{f' ({pin.reason})' if pin.reason else ''}")
        return "\n".join((*lines, *self.notes))

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that hold the pinned places: what another process needs to be given."""
        return {pin.variable: pin.path for pin in self.pins if pin.status == "pinned" and pin.path is not None}

    @property
    def too_late(self) -> tuple[Pin, ...]:
        """Those whose runtime had read its place already."""
        return tuple(pin for pin in self.pins if pin.status == "too_late")

    def get(self, key: str) -> Pin | None:
        """Return what became of the cache named *key*, or None."""
        return next((pin for pin in self.pins if pin.key == key), None)
