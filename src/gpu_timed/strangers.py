"""Strangers: spans on one stream, neither of which lies around the other, mark in between each other's marks."""

from __future__ import annotations

from typing import Any


def tell_strangers(span: Any, watchers: list[Any]) -> None:
    """Tell every one of *watchers* (the spans open on a stream) that is not around *span* that this one marks it too.

    Whoever has been told is taken out: else 64 threads on one stream would each ask 64 others at every mark. Spans
    around this one mostly stand in the order in which they lie around it, so that each is found at once.
    """
    nearest: Any = span.admission.ancestor
    for other in reversed(tuple(watchers)):
        if other is nearest:
            nearest = nearest.admission.ancestor
        elif other is not span and not _lies_around(other, span):
            other.interleaved = True  # no note: another thread may be making one
            try:
                watchers.remove(other)
            except ValueError:
                pass  # another thread has told it, or its segment ended


def _lies_around(other: Any, span: Any) -> bool:
    ancestor: Any = span.admission.ancestor
    while ancestor is not None:
        if ancestor is other:
            return True
        ancestor = ancestor.admission.ancestor
    return False
