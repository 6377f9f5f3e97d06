"""Flushing and ending the application's provider, bounded in time whatever it does.

Knows OpenTelemetry's API alone: it must not load the SDK into a process that has none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from opentelemetry import trace

from gpu_timed.ledger import Ledger


class Flusher:
    """Flushes the application's provider, within a time whatever the provider does.

    The SDK's own ``force_flush`` may ignore its timeout for half a minute (opentelemetry-python#4568), so
    it runs on a thread that is left behind when time is up. There is one such thread at most: a flush that
    finds the one before still at it waits for that one first.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._left_behind: threading.Thread | None = None

    def flush(self, timeout_s: float, ledger: Ledger) -> bool | None:
        """Flush.

        Returns:
            What the provider answered, False when *timeout_s* seconds had passed, None when there is nothing to flush.
        """
        flush = getattr(trace.get_tracer_provider(), "force_flush", None)
        if flush is None:
            return None
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            return False
        try:
            before = self._left_behind
            if before is not None:
                before.join(max(0.0, deadline - time.monotonic()))
                if before.is_alive():
                    return False
            rest = left(deadline)
            answered, self._left_behind = _within(lambda: bool(flush(max(1, int(rest * 1000)))), rest, ledger)
            return answered
        finally:
            self._lock.release()


def left(deadline: float) -> float:
    """Return the seconds until *deadline* (monotonic), never none at all: a provider that is idle answers at once."""
    return max(0.05, deadline - time.monotonic())


def shut_down(timeout_s: float, ledger: Ledger) -> bool | None:
    """Shut the application's provider down, within *timeout_s*. Returns as :meth:`Flusher.flush` does."""
    shutdown = getattr(trace.get_tracer_provider(), "shutdown", None)
    return None if shutdown is None else _within(lambda: shutdown() is None, timeout_s, ledger)[0]


def _within(work: Callable[[], bool], timeout_s: float, ledger: Ledger) -> tuple[bool, threading.Thread | None]:
    """Return what *work* answered within *timeout_s*, else False, and its thread if that is still at it."""
    answer: list[bool] = []

    def run() -> None:
        try:
            answer.append(work())
        except Exception as error:  # noqa: BLE001 - a provider or processor of the application's
            ledger.fault("provider_raised", error)

    thread = threading.Thread(target=run, name="gpu_timed-flush", daemon=True)
    try:
        thread.start()
        thread.join(timeout_s)
    except RuntimeError:  # the interpreter is ending and starts no more threads
        run()
        return bool(answer and answer[0]), None
    return bool(answer and answer[0]), thread if thread.is_alive() else None
