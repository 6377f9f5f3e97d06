"""The ledger: how often something went wrong inside gpu_timed, or was dropped, by kind."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Final

from gpu_timed.bounds import Limit

MOST_KINDS: Final = 256
"""Kinds told apart: some are named by classes of the application's."""
OTHER: Final = "other"
logger: Final = logging.getLogger("gpu_timed")


class Ledger:
    """Counts by kind, and says each kind once in the log.

    A fault inside gpu_timed never reaches the user's call; here is where it can be seen instead.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._unnamed = 0
        self._lock = threading.Lock()

    def count(self, kind: str, amount: int = 1) -> None:
        """Add *amount* to *kind*, silently: for things that are expected to happen under load."""
        with self._lock:
            self._counts[self._room_for(kind)] += amount

    def fault(self, kind: str, error: BaseException | str) -> None:
        """Count a fault of *kind* and log it the first time it happens in this process."""
        with self._lock:
            kind = self._room_for(kind)
            self._counts[kind] += 1
            first = self._counts[kind] == 1
        if first:
            try:
                detail = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
            except Exception:  # noqa: BLE001 - an exception of the user's that has no text
                detail = type(error).__name__
            self.say(f"gpu_timed: {kind} ({detail}). Counted from here on, not logged again.")

    def say(self, message: str) -> None:
        """Log a warning. A handler or filter of the application's that raises is not felt."""
        try:
            logger.warning("%s", message)
        except Exception:  # noqa: BLE001 - not the decorated call's affair
            self.count("logging_failed")

    def restart(self) -> None:
        """Begin anew in a forked child, whose copy of the lock may be held by a thread it does not have."""
        self._lock = threading.Lock()
        self._counts = Counter()
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
            return dict(self._counts)
