"""The ledger: how often something went wrong inside gpu_timed, or was dropped, by kind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Final

from gpu_timed.bounds import Limit

MOST_KINDS: Final = 256
"""Kinds told apart: some are named by classes of the application's."""
OTHER: Final = "other"
logger: Final = logging.getLogger("gpu_timed")
_LOGGING: Final = "logging_failed"


class Ledger:
    """Counts by kind, and says each kind once in the log.

    A fault inside gpu_timed never reaches the user's call; here is where it can be seen instead.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._unnamed = 0
        # One that its holder may take again: a signal's handler, and a generator that the collector finalises, run
        # on a thread that may be in here.
        self._lock = threading.RLock()
        #: Calls that were made so deep that the stack had no room for us. Raised without calling anything.
        self.cramped = 0

    def count(self, kind: str, amount: int = 1) -> None:
        """Add *amount* to *kind*, silently: for things that are expected to happen under load."""
        with self._lock:
            kind = self._room_for(kind)
            self._counts[kind] = self._counts.get(kind, 0) + amount

    def fault(self, kind: str, error: BaseException | str) -> None:
        """Count a fault of *kind* and log it the first time it happens in this process."""
        # Here calls go to C alone: of what is deeper, a call near the end of the stack has no room for any.
        with self._lock:
            kind = self._room_for(kind)
            before = self._counts.get(kind, 0)
            self._counts[kind] = before + 1
        if before:
            return
        try:
            detail = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        except Exception:  # noqa: BLE001 - an exception of the user's that has no text
            detail = type(error).__name__
        try:
            self.say(f"gpu_timed: {kind} ({detail}). Counted from here on, not logged again.")
        except RecursionError:
            with self._lock:
                self._counts[_LOGGING] = self._counts.get(_LOGGING, 0) + 1

    def say(self, message: str) -> None:
        """Log a warning. A handler or filter of the application's that raises is not felt."""
        try:
            logger.warning("%s", message)
        except Exception:  # noqa: BLE001 - not the decorated call's affair
            self.count(_LOGGING)

    def restart(self) -> None:
        """Begin anew in a forked child, whose copy of the lock may be held by a thread it does not have."""
        self._lock = threading.RLock()
        self._counts = {}
        self.cramped = 0
        self._unnamed = 0

    def limits(self) -> Iterator[Limit]:
        """Say how many kinds are counted."""
        yield Limit(
            "kinds", MOST_KINDS, len(self._counts), self._unnamed, "kinds of losses and faults told apart", loses=True
        )

    def _room_for(self, kind: str) -> str:
        """Return *kind*, or the one under which those beyond the limit are counted. Under the lock."""
        if kind in self._counts or len(self._counts) < MOST_KINDS - 1:  # the last is for all others
            return kind
        self._unnamed += 1
        return OTHER

    def snapshot(self) -> dict[str, int]:
        """Return the counts by kind."""
        with self._lock:
            found = dict(self._counts)
        if self.cramped:
            found["no_room_on_the_stack"] = self.cramped
        return found
