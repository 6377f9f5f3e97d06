"""What the leaf files for arrays of each kind answer."""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """How two arrays differ."""

    text: str
    """What is wrong; empty where they agree."""
    max_abs: float = 0.0
    max_rel: float = 0.0
    exact: bool = True
