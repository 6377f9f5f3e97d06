"""Rows of the table of cold calls that ``pytest -m gpu -s`` prints, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

_told: list[str] = []


def show(runtime: str, cache: str, expected: Sequence[str], seen: Sequence[str], cost_ms: Sequence[float]) -> None:
    """Print one process's calls: the tiers that were expected, those seen, and what each cost the host."""
    if not _told:
        print("\n| runtime | caches | expected | seen | compile ms |\n|---|---|---|---|--:|")
        _told.append(runtime)
    costs = ", ".join(f"{cost:,.1f}" for cost in cost_ms)
    print(f"| {runtime} | {cache} | {', '.join(expected)} | {', '.join(seen)} | {costs} |")
