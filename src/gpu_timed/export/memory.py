"""Keeps records in memory, for tests and for looking at them in a notebook."""

from __future__ import annotations

from typing import Any

from gpu_timed.record import Record


class MemorySink:
    """Appends every record to ``records``, the oldest first, up to *limit*; further ones are counted."""

    def __init__(self, limit: int = 1_000_000) -> None:
        self.records: list[Record] = []
        self.dropped = 0
        self._limit = limit

    def announce(self, span: Any, record: Record) -> None:
        """Keep nothing: the finished record is still to come."""

    def emit(self, span: Any, record: Record) -> None:  # noqa: ARG002 - the port's signature
        """Keep *record*."""
        if len(self.records) < self._limit:
            self.records.append(record)
        else:
            self.dropped += 1
