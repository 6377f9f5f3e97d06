"""Where a device's clock stands on the host's, as an interval that is never wrong by more than it says.

An event pair gives differences only: CUDA has no call that says when, on the host's clock, an event
happened. What is always known is the order of things: an event cannot happen before the call that
placed it began, nor after the host saw it done. Each such fact bounds the distance between the two
clocks; the timeline keeps the intersection of the bounds (set-membership estimation: Schweppe 1968),
and widens it by what the clocks may have drifted apart since. The rate of drift is learned from the
same intervals. 3.5 µs/s was seen between an H200 and its host.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

RATE_BOUND: Final = 50e-6
"""Crystals of both sides are good to about 20 ppm each; a host under NTP may be slewed further."""
WANDER: Final = 0.3e-6
"""How far today's rate may lie from the one learned over the last minutes (temperature)."""
_BASELINE_NS: Final = 5_000_000_000
_HISTORY: Final = 24


class Timeline:
    """The set of distances (host minus device, in nanoseconds) that every fact so far allows.

    Bounds are kept as floats relative to the first distance seen: whole nanoseconds would lose the drift
    between facts a few microseconds apart, and a float of the distance itself its last digits.
    """

    __slots__ = ("_at", "_base", "_high", "_history", "_low", "_rate", "_slack", "faults")

    def __init__(self) -> None:
        self._base: int | None = None
        self._at = 0
        self._low = -math.inf
        self._high = math.inf
        self._rate = 0.0
        self._slack = RATE_BOUND
        self._history: deque[tuple[int, float, float]] = deque(maxlen=_HISTORY)
        self.faults = 0

    @property
    def bounded(self) -> bool:
        """Whether the distance is known from both sides."""
        return math.isfinite(self._low) and math.isfinite(self._high)

    def not_before(self, device_ns: int, host_ns: int) -> bool:
        """Learn that what the device stamped *device_ns* happened at or after *host_ns*.

        Returns False if that contradicts what was known; the older knowledge is then forgotten.
        """
        return self._learn(device_ns, self._distance(device_ns, host_ns), math.inf)

    def not_after(self, device_ns: int, host_ns: int) -> bool:
        """Learn that what the device stamped *device_ns* happened at or before *host_ns*."""
        return self._learn(device_ns, -math.inf, self._distance(device_ns, host_ns))

    def place(self, device_ns: int) -> tuple[int, int]:
        """Return the host's time of *device_ns*, and how far the truth may lie from it, in nanoseconds.

        Only of a timeline that is :attr:`bounded`.
        """
        low, high = self._range(device_ns)
        assert self._base is not None  # noqa: S101 - bounded
        return device_ns + self._base + math.floor((low + high) / 2), math.ceil((high - low) / 2) + 1

    def span(self, device_ns: int, elapsed_ns: int, called_ns: int, seen_ns: int) -> tuple[int, int, bool]:
        """Learn from one span, and place its start.

        Args:
            device_ns: Device time of the span's start mark.
            elapsed_ns: Device time from there to its end mark.
            called_ns: Host time before which the start mark cannot have been reached.
            seen_ns: Host time after which the end mark cannot have been reached.

        Returns:
            The host's time of the start mark, how far the truth may lie from it (nanoseconds), and whether
            the span contradicted what was known.
        """
        agreed = self.not_before(device_ns, called_ns)
        agreed = self.not_after(device_ns + elapsed_ns, seen_ns) and agreed
        # The bounds this span itself gives are exact at its two ends; what the timeline keeps of them is
        # widened by the drift in between, so they are put in once more.
        low = self._distance(device_ns, called_ns)
        high = self._distance(device_ns, seen_ns - elapsed_ns) + RATE_BOUND * elapsed_ns
        if low > high:  # the device says it worked for longer than the host knows of
            self.faults += agreed
            return called_ns, math.ceil(low - high), True
        if self.bounded and agreed:
            known_low, known_high = self._range(device_ns)
            low = max(low, known_low)
            high = max(low, min(high, known_high))
        assert self._base is not None  # noqa: S101 - _distance set it
        middle = (low + high) / 2
        # Of what is possible, prefer what does not end after it was seen to have ended.
        chosen = max(low, min(middle, self._distance(device_ns, seen_ns - elapsed_ns)))
        half = (high - low) / 2 + abs(chosen - middle)
        return device_ns + self._base + math.floor(chosen), math.ceil(half) + 1, not agreed

    def settle(self) -> None:
        """Learn the rate of drift from how the interval moved. Call after a fresh pair of tight bounds."""
        history = self._history
        if not self.bounded or (history and self._at - history[-1][0] < _BASELINE_NS):
            return
        slowest, fastest = -RATE_BOUND, RATE_BOUND
        for at, low, high in history:
            span = self._at - at
            slowest = max(slowest, (self._low - high) / span - WANDER)
            fastest = min(fastest, (self._high - low) / span + WANDER)
        history.append((self._at, self._low, self._high))
        if slowest <= fastest:
            self._rate = (slowest + fastest) / 2
            self._slack = (fastest - slowest) / 2
        else:  # the rate itself changed (temperature, NTP): start over from here
            self._rate, self._slack = 0.0, RATE_BOUND
            history.clear()
            history.append((self._at, self._low, self._high))

    # -- inside ---------------------------------------------------------------------------------------

    def _distance(self, device_ns: int, host_ns: int) -> float:
        if self._base is None:
            self._base, self._at = host_ns - device_ns, device_ns
        return float(host_ns - device_ns - self._base)

    def _range(self, device_ns: int) -> tuple[float, float]:
        away = device_ns - self._at
        middle, widen = self._rate * away, self._slack * abs(away)
        return self._low + middle - widen, self._high + middle + widen

    def _learn(self, device_ns: int, low: float, high: float) -> bool:
        if device_ns >= self._at:
            known_low, known_high = self._range(device_ns)
            self._at = device_ns
        else:  # a fact about the past: bring it to where the rest of the knowledge stands
            away = self._at - device_ns
            middle, widen = self._rate * away, self._slack * away
            low, high = low + middle - widen, high + middle + widen
            known_low, known_high = self._low, self._high
        self._low, self._high = max(known_low, low), min(known_high, high)
        if self._low <= self._high:
            return True
        self.faults += 1
        self._low, self._high = low, high
        self._rate, self._slack = 0.0, RATE_BOUND
        self._history.clear()
        return False
