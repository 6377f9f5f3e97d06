"""The host's two clocks: the monotonic one that durations come from, and its distance to Unix time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_TRIALS = 5
_MOST_TRIALS = 200
_TIGHT_NS = 1_000
_KEEP_NS = 1_000_000_000


class HostClock:
    """Monotonic nanoseconds, placed on the realtime axis by an offset that is refreshed as clocks drift.

    ``time.perf_counter_ns`` never goes back and is slewed together with ``CLOCK_REALTIME`` on Linux, so
    the offset changes only when the realtime clock is stepped. It is therefore kept until a new reading
    contradicts it, or is much tighter: two spans of one trace are then placed with the same offset, to the nanosecond.
    """

    def __init__(
        self,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.now_ns = now_ns
        self._unix_ns = unix_ns
        self._lock = threading.RLock()
        self._offset, self._bracket = self._read()
        self._read_at = now_ns()

    def to_unix(self, monotonic_ns: int) -> int:
        """Return the Unix time in nanoseconds of a *monotonic_ns* of this clock."""
        return monotonic_ns + self._offset

    def refresh(self) -> None:
        """Read the realtime clock again if the last reading is older than a second."""
        if self.now_ns() - self._read_at < _KEEP_NS:
            return
        with self._lock:
            offset, bracket = self._read()
            contradicts = abs(offset - self._offset) > bracket + self._bracket
            if contradicts or (self._bracket > _TIGHT_NS and bracket < self._bracket):
                self._offset, self._bracket = offset, bracket
            self._read_at = self.now_ns()

    def _read(self) -> tuple[int, int]:
        """Return the offset, and the width of the tightest of a few brackets around the reading."""
        best = None
        for trial in range(_MOST_TRIALS):
            if best is not None and trial >= _TRIALS and best[1] <= _TIGHT_NS:
                break  # under load, where the reading is interrupted again and again, it takes more
            before = self.now_ns()
            unix = self._unix_ns()
            after = self.now_ns()
            width = after - before
            if best is None or width < best[1]:
                best = (unix - (before + after) // 2, width)
        assert best is not None  # noqa: S101 - the loop ran
        return best
