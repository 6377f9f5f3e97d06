"""What became of the spans, told truthfully: complete only if nothing was left, lost or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from gpu_timed.ledger import Ledger

LOSSES: Final = (
    "no_provider",
    "dropped_queue_full",
    "dropped_in_batch",
    "export_failed",
    "rejected",
    "lost_in_sink",
    "pending_at_exit",
    "after_shutdown",
)
"""Kinds in the ledger that are spans lost."""


@dataclass(frozen=True, slots=True)
class FlushResult:
    """What became of the spans. True in a condition only if every one of them is known to be delivered."""

    complete: bool
    """Whether every span since the last flush got as far as this library can see: to the receiver under
    ``configure(exporter=…)``, else to the application's provider."""
    pending: int
    """Spans still waiting for the device, or for a slow span processor."""
    provider: str
    """``flushed``, ``failed`` (answered False, or had not answered in time) or ``none`` (nothing to flush)."""
    counts: Mapping[str, int]
    """Everything counted so far in this process: handed over, exported, dropped, lost, faults."""

    def __bool__(self) -> bool:
        return self.complete


class Deliveries:
    """Remembers what was told, so that each flush speaks of the spans since the one before.

    Args:
        at_end: Says what else is to be said as all spans of the process are delivered.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        self._told: Mapping[str, int] = {}
        self._warned = False

    def tell(self, ledger: Ledger, *, pending: int, answered: bool | None, in_all: bool = False) -> FlushResult:
        """Return what became of the spans since the last time, or *in_all* of the process's.

        Args:
            ledger: Counts them.
            pending: How many are left.
            answered: What the provider answered, None if there is none.
            in_all: Speak of all the process's spans, as at its end.
        """
        counts, told = ledger.snapshot(), self._told
        self._told = counts
        lost = sum(counts.get(kind, 0) - (0 if in_all else told.get(kind, 0)) for kind in LOSSES)
        self.warn(ledger, at_end=in_all)
        said = "none" if answered is None else "flushed" if answered else "failed"
        return FlushResult(
            complete=pending == 0 and answered is not False and lost == 0, pending=pending, provider=said, counts=counts
        )

    def warn(self, ledger: Ledger, *, at_end: bool = True) -> None:
        """Say once that spans go nowhere, if all of them do: who forgot to configure anything will not ask."""
        if at_end:
            self._at_end()
        counts = ledger.snapshot()
        if not self._warned and counts.get("no_provider", 0) and not counts.get("handed_over", 0):
            self._warned = True
            ledger.say(
                "gpu_timed: no OpenTelemetry provider is set: spans are measured and go nowhere. "
                "Set one, or call gpu_timed.configure(exporter=...)."
            )

    def forget(self) -> None:
        """Begin anew in a forked child, which has told nothing."""
        self._told = {}
