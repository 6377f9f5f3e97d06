"""The ``fence`` clock, for runtimes that have no device events: work is over when its results are there.

A mark holds what must be ready when it is reached: at the start of a call its arguments, at the end its
results. A thread of this clock looks at them, at intervals that grow with the wait, and so stamps each
mark within 100 µs or 1.6 % of the time waited, whichever is more; how wide the gap between the last look
and the stamp was, is part of the stated uncertainty. A wait at a span's boundary blocks in the runtime itself.

Results are kept alive until they are ready, and no longer. Nothing is read back from a device.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from gpu_timed.bounds import Limit
from gpu_timed.errors import DeviceFault
from gpu_timed.ports import NOT_GIVEN, DeviceInfo, Place, Position
from gpu_timed.ports import Mark as AnyMark
from gpu_timed.record import NO_RESULTS, Missing

GIVEN_AWAY: Final = Missing("no_results", "a result was given away (donated) before it was there")
NO_FLOOR: Final = Missing("not_measured", "results are looked at, no marks are put on a device")
_OVERFLOW: Final = Missing("overflow")
MOST_PENDING: Final = 10_000
"""Marks that may wait for their results at once."""
_SHORTEST_LOOK_S: Final = 0.000_05
_LONGEST_LOOK_S: Final = 0.001
_LOOKS_PER_WAIT: Final = 64
_ASKED_AT_ONCE: Final = 4
_LINGER_S: Final = 2.0


class Runtime(Protocol):
    """What has to be known of a runtime without device events."""

    def flush(self, values: Any) -> None:
        """Start work that has only been described so far. *values* as in :meth:`results`."""
        ...

    def results(self, values: Any) -> list[Any]:
        """Return the runtime's results among *values*; for ``NOT_GIVEN`` all that are not there yet."""
        ...

    def is_ready(self, result: Any) -> bool:
        """Return whether *result* is there. May raise what computing it raised.

        Raises:
            GoneError: It was given away before it was there, and nobody can tell any more.
        """
        ...

    def wait(self, results: list[Any]) -> None:
        """Block until *results* are there. May raise what computing them raised."""
        ...

    def describe(self, place: Place) -> DeviceInfo:
        """Return what the device is called."""
        ...


class GoneError(Exception):
    """A result that can no longer be asked."""


class FenceMark:
    """What must be ready, and when it was seen to be.

    ``placed_ns`` is the host's time before the first look at it, ``at_ns`` the stamp (0 until then), and
    ``window_ns`` how long before the stamp the last look was that found it not ready.
    """

    __slots__ = ("at_ns", "error", "gone", "pending", "placed_ns", "unready_ns", "window_ns", "window_of_pair_ns")

    def __init__(self, pending: list[Any], placed_ns: int) -> None:
        self.pending = pending
        self.placed_ns = self.unready_ns = placed_ns
        self.at_ns = 0
        self.window_ns = self.window_of_pair_ns = 0
        self.error = ""
        self.gone = False


class FenceClock:
    """Marks are sets of results of *runtime*."""

    name = "fence"
    in_order = False

    def __init__(self, runtime: Runtime, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._runtime = runtime
        self._now_ns = now_ns
        self._pending: deque[FenceMark] = deque()
        self._lock = threading.RLock()
        self._looking = False
        self._dropped = 0
        self._arrived = threading.Event()

    def mark(self, place: Place, values: Any = NOT_GIVEN, since: AnyMark | None = None) -> FenceMark | Missing:  # noqa: ARG002
        """Place a mark that is reached when the results among *values* are there.

        Where the end of a call holds none, everything that is not there yet counts; and if that is nothing,
        no work was seen, and no time is told.
        """
        runtime = self._runtime
        try:
            runtime.flush(values)
            found = runtime.results(values)
            if not found and since is not None:
                found = runtime.results(NOT_GIVEN)
                if not found:
                    return NO_RESULTS
            placed = self._now_ns()
            mark = FenceMark([result for result in found if not runtime.is_ready(result)], placed)
        except GoneError:
            return GIVEN_AWAY
        except Exception as error:  # noqa: BLE001 - whatever the runtime reports
            return Missing("device_error", _in_words(error))
        if mark.pending:
            if len(self._pending) >= MOST_PENDING:
                with self._lock:
                    self._dropped += 1
                return _OVERFLOW
            self._pending.append(mark)
            self._look()
        else:
            mark.at_ns = self._now_ns()
            mark.window_ns = mark.at_ns - placed if since is not None else 0
        return mark

    def is_capturing(self, place: Place) -> bool:  # noqa: ARG002 - the locator has looked
        """Return False: nothing is captured where there are no streams."""
        return False

    def is_done(self, mark: AnyMark) -> bool:
        """Return whether the results are there. Raises DeviceFault with what computing them raised."""
        held = _fence(mark)
        if not held.at_ns and not self._looking:  # no thread could be started: whoever asks looks
            self._is_there(held)
        if held.error:
            raise DeviceFault(held.error)
        return held.at_ns != 0

    def wait(self, mark: AnyMark) -> None:
        """Block until the results are there. Raises DeviceFault with what computing them raised."""
        held = _fence(mark)
        pending = held.pending
        if pending and not held.at_ns:
            try:
                self._runtime.wait(pending)
            except Exception as error:  # noqa: BLE001 - whatever the runtime reports
                self._stamp(held, _in_words(error))
            self._stamp(held)
        self.is_done(held)

    def wait_device(self, place: Place) -> None:  # noqa: ARG002 - there is one
        """Block until everything that this process has asked of the runtime is there. Raises DeviceFault."""
        try:
            self._runtime.flush(NOT_GIVEN)
            self._runtime.wait(self._runtime.results(NOT_GIVEN))
        except Exception as error:  # noqa: BLE001 - whatever the runtime reports
            raise DeviceFault(_in_words(error)) from None

    def elapsed_ns(self, start: AnyMark, end: AnyMark) -> int | Missing:
        """Return nanoseconds from *start* to *end*, on the host's own clock."""
        first, last = _fence(start), _fence(end)
        if not self.is_done(last):
            raise DeviceFault("the results are not there yet")
        if not first.at_ns:
            self._is_there(first)
        if first.error:
            raise DeviceFault(first.error)
        if first.gone or last.gone:
            return GIVEN_AWAY
        if not first.at_ns or first.at_ns > last.at_ns:
            # The arguments were seen later than the result: the work began between the last look that found them
            # missing and the end. Or the result needed none of them: then at any time since the mark.
            with self._lock:
                first.at_ns = min(first.unready_ns if first.at_ns else first.placed_ns, last.at_ns)
                first.window_ns = last.at_ns - first.at_ns
        first.window_of_pair_ns = first.window_ns + last.window_ns
        return last.at_ns - first.at_ns

    def position(self, start: AnyMark, elapsed_ns: int, called_ns: int, seen_ns: int) -> Position:  # noqa: ARG002
        """Return when *start* was reached: stamped on the host's axis to begin with."""
        mark = _fence(start)
        return Position(mark.at_ns, mark.window_of_pair_ns + 1, fault=False)

    def floor_ns(self, place: Place) -> Missing:  # noqa: ARG002 - of no place
        """Return that there is none: how far off a stamp may be is in the uncertainty of each span."""
        return NO_FLOOR

    def limits(self) -> Iterator[Limit]:
        """Say how many marks wait for their results."""
        yield Limit(
            "fence_marks", MOST_PENDING, len(self._pending), self._dropped, "marks that wait for results", loses=True
        )

    def release(self, *marks: AnyMark) -> None:
        """Let go of the results."""
        for mark in marks:
            _fence(mark).pending = []

    def describe(self, place: Place) -> DeviceInfo:
        """Return what the runtime calls its device."""
        return self._runtime.describe(place)

    def unhindered(self) -> contextlib.AbstractContextManager[None]:
        """Nothing here hinders a capture."""
        return contextlib.nullcontext()

    # -- the thread that looks ------------------------------------------------------------------------

    def _look(self) -> None:
        with self._lock:
            if not self._looking:
                try:
                    threading.Thread(target=self._run, name="gpu_timed-fence", daemon=True).start()
                except RuntimeError:  # no more threads, or the process is ending: who waits or asks looks
                    return
                self._looking = True
        self._arrived.set()

    def _run(self) -> None:
        while True:
            self._arrived.clear()
            while self._pending:
                self._sweep()
            if not self._arrived.wait(_LINGER_S):
                with self._lock:
                    if not self._pending:
                        self._looking = False
                        return

    def _sweep(self) -> None:
        """Stamp what is there by now, and sleep for a fraction of how long the oldest has waited.

        Work mostly ends in the order in which it was begun: only the oldest few are asked, each look costs the
        runtime something. What ends before its turn is stamped late, and its window says so.
        """
        waiting: list[FenceMark] = []
        for mark in tuple(self._pending):  # others append meanwhile
            if mark.pending and not mark.at_ns and not self._is_there(mark):
                waiting.append(mark)
                if len(waiting) == _ASKED_AT_ONCE:
                    break
            else:
                self._pending.remove(mark)
        if waiting:
            waited = (self._now_ns() - waiting[0].placed_ns) / 1e9
            time.sleep(min(_LONGEST_LOOK_S, max(_SHORTEST_LOOK_S, waited / _LOOKS_PER_WAIT)))

    def _is_there(self, mark: FenceMark) -> bool:
        now = self._now_ns()
        pending = mark.pending
        try:
            ready = all(self._runtime.is_ready(result) for result in pending)
            if ready:
                self._runtime.wait(pending)  # at once: what went wrong comes out here
        except GoneError:
            mark.gone = True
            self._stamp(mark)
            return True
        except Exception as error:  # noqa: BLE001 - whatever the runtime reports
            self._stamp(mark, _in_words(error))
            return True
        if ready:
            self._stamp(mark)
        else:
            mark.unready_ns = now
        return ready

    def _stamp(self, mark: FenceMark, error: str = "") -> None:
        with self._lock:
            if not mark.at_ns:
                mark.error = error
                now = self._now_ns()
                mark.window_ns = now - mark.unready_ns
                mark.at_ns = now
        mark.pending = []


def _in_words(error: Exception) -> str:
    """Return the first line of what *error* says, or what it is where it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _fence(mark: AnyMark) -> FenceMark:
    assert isinstance(mark, FenceMark)  # noqa: S101 - our own marks come back to us
    return mark
