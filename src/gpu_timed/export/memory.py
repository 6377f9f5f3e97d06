"""Keeps records in memory, for tests and for looking at them in a notebook."""

from __future__ import annotations

from typing import Any

from gpu_timed.record import Record


class MemorySink:
    """Appends records to ``records``, the oldest first, up to *limit*; further ones are counted.

    Spans that had returned before the *epoch* began are left out: they may be resolved later than that.
    """

    def __init__(self, epoch: int = 0, limit: int = 1_000_000) -> None:
        self._epoch = epoch
        self.records: list[Record] = []
        self.dropped = 0
        self._limit = limit

    def announce(self, span: Any, record: Record) -> None:
        """Keep nothing: the finished record is still to come."""

    def emit(self, span: Any, record: Record) -> None:
        """Keep *record*."""
        if span.epoch < self._epoch:
            return
        if len(self.records) < self._limit:
            self.records.append(record)
        else:
            self.dropped += 1
