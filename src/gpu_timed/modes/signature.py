"""What is known of one input signature of one function: of calls that one CUDA Graph can serve."""

from __future__ import annotations

import weakref
from typing import Any, Final

from gpu_timed.modes.capturing import Captured
from gpu_timed.modes.host_places import has_attributes

PLAIN: Final = (int, float, bool, str, bytes, complex, type(None))
"""Kinds of values that are told apart by what they are, not by identity."""


class Signature:
    """What is known of one input signature."""

    def __init__(self) -> None:
        self.refused = ""
        self.runs = 0
        self.captured: Captured | None = None
        #: The outputs of a call that are no tensors, and how all are nested.
        self.said: tuple[list[Any], Any] | None = None
        #: What tells its calls at a glance, or False.
        self.alike: Any = None
        #: How often it was captured anew; how often that failed for a passing cause; and replays, one after another.
        self.again = 0
        self.failed_captures = 0
        self.failed_replays = 0
        #: What the signature holds identities of. It does not keep them alive: a cache of a request is one of them.
        self._named: list[weakref.ref[Any]] = []
        self._kept: list[Any] = []

    def holds(self, leaves: list[Any]) -> None:
        """Take *leaves* as what it knows the identities of."""
        for leaf in leaves:
            if not isinstance(leaf, PLAIN) or has_attributes(leaf):
                try:
                    self._named.append(weakref.ref(leaf))
                except TypeError:
                    self._kept.append(leaf)

    @property
    def gone(self) -> bool:
        """Whether something it knows by identity is no more, so that another thing may have that identity."""
        return bool(self._named) and any(named() is None for named in self._named)
