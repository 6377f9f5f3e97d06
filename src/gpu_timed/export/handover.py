"""Flushing and ending the application's provider, bounded in time whatever it does.

Knows OpenTelemetry's API alone: it must not load the SDK into a process that has none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from opentelemetry import trace

from gpu_timed.ledger import Ledger


def force_flush(timeout_s: float, ledger: Ledger) -> bool | None:
    """Flush the application's provider, within *timeout_s* whatever the provider does.

    The SDK's own ``force_flush`` may ignore its timeout for half a minute (opentelemetry-python#4568), so
    it runs on a thread that is left behind when time is up.

    Returns:
        What the provider answered, False when time ran out, None when there is nothing to flush.
    """
    flush = getattr(trace.get_tracer_provider(), "force_flush", None)
    if flush is None:
        return None
    return _within(lambda: bool(flush(max(1, int(timeout_s * 1000)))), timeout_s, ledger)


def shut_down(timeout_s: float, ledger: Ledger) -> bool | None:
    """Shut the application's provider down, within *timeout_s*. Returns as :func:`force_flush` does."""
    shutdown = getattr(trace.get_tracer_provider(), "shutdown", None)
    return None if shutdown is None else _within(lambda: shutdown() is None, timeout_s, ledger)


def _within(work: Callable[[], bool], timeout_s: float, ledger: Ledger) -> bool:
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
    return bool(answer and answer[0])
