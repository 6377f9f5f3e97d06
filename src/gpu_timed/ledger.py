"""The ledger: how often something went wrong inside gpu_timed, or was dropped, by kind."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Final

logger: Final = logging.getLogger("gpu_timed")


class Ledger:
    """Counts by kind, and says each kind once in the log.

    A fault inside gpu_timed never reaches the user's call; here is where it can be seen instead.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, kind: str, amount: int = 1) -> None:
        """Add *amount* to *kind*, silently: for things that are expected to happen under load."""
        with self._lock:
            self._counts[kind] += amount

    def fault(self, kind: str, error: BaseException | str) -> None:
        """Count a fault of *kind* and log it the first time it happens in this process."""
        with self._lock:
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

    def snapshot(self) -> dict[str, int]:
        """Return the counts by kind."""
        with self._lock:
            return dict(self._counts)
