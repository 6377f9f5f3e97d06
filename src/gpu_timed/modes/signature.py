"""What is known of one input signature of one function: of calls that one CUDA Graph can serve."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final

from gpu_timed.modes.capturing import PLAIN, Captured
from gpu_timed.modes.host_places import has_attributes

_MOST_SIGNATURES: Final = 1024
_CAPTURES: Final = 4
"""Captures of a site, in multiples of its ``max_graphs``, after which none is made any more."""
_WATCHED: Final = 16
"""Calls of a site that are watched, in multiples of those that so many graphs need, after which none is any more."""
_PAY: Final = 64
"""Replays that pay for a watched call more, and for the capture of their graph, which is not counted then: either takes
several times as long as the call, so some 5 % at most."""


class Signature:
    """What is known of one input signature."""

    def __init__(self) -> None:
        self.refused = ""
        self.runs = 0
        self.captured: Captured | None = None
        #: How many replays there were of a graph that went with what the signature knows by identity.
        self.went = 0
        #: The outputs of a call that are no tensors, and how all are nested.
        self.said: tuple[list[Any], Any] | None = None
        #: What tells its calls at a glance, or False.
        self.alike: Any = None
        #: How often it was captured anew; how often that failed for a passing cause; and replays, one after another.
        self.again = 0
        self.failed_captures = 0
        self.failed_replays = 0
        #: How many calls are looked at, now that its graph was let go, before it is refused for what one of them did.
        self.looks = 0
        #: What the signature holds identities of. It does not keep them alive: a cache of a request is one of them.
        self._named: list[weakref.ref[Any]] = []
        self._kept: list[Any] = []

    def holds(self, leaves: list[Any]) -> None:
        """Take *leaves* as what it knows the identities of: as one of them goes, its graph does and what that holds."""
        me = weakref.ref(self)

        def goes(_: Any) -> None:
            signature = me()
            captured = None if signature is None else signature.captured
            if signature is not None and captured is not None:
                signature.captured, signature.went = None, captured.replays

        for leaf in leaves:
            if not isinstance(leaf, PLAIN) or has_attributes(leaf):
                try:
                    self._named.append(weakref.ref(leaf, goes))
                except TypeError:
                    self._kept.append(leaf)

    @property
    def gone(self) -> bool:
        """Whether something it knows by identity is no more, so that another thing may have that identity."""
        return bool(self._named) and any(named() is None for named in self._named)


LetGo = Callable[[Signature], None]


class Signatures:
    """What is known of all input signatures of one function, the one that came last at the end.

    *let_go* lets the graph of a signature go. It is not held: who has it holds this, and is to go at once when it does.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Signature] = OrderedDict()
        #: How many graphs were captured, those that have paid for it left out, and how many calls were watched.
        self.captures = self.watched = 0
        #: How many replays there were of graphs that are gone.
        self._replayed = 0

    def of(self, key: Hashable, mode: Any, objects: Callable[[], list[Any]], let_go: LetGo) -> tuple[Any, str]:
        """Return what is known of the signature *key*; or why no more is to be known of any that has no graph.

        *objects* returns what is to be known by identity.
        """
        known = self._known.get(key)
        if known is not None and not known.gone:
            self._known.move_to_end(key)
            if known.captured is not None or known.refused:
                return known, ""
            return known, self._too_many(mode, watches=known.runs < mode.warmup)
        for each in [each for each, one in self._known.items() if one.gone]:
            let_go(self._known.pop(each))
        why = self._too_many(mode)
        if why:  # of which each call may have another: a text, say
            return None, why
        if len(self._known) >= _MOST_SIGNATURES:
            let_go(self._known.popitem(last=False)[1])
        known = self._known[key] = Signature()
        known.holds(objects())
        return known, ""

    def _too_many(self, mode: Any, *, watches: bool = True) -> str:
        if self.captures >= _CAPTURES * mode.max_graphs:
            return (
                f"{self.captures} graphs were captured for few replays: too many input signatures in turn (max_graphs=)"
            )
        over = self.watched - _WATCHED * mode.max_graphs * mode.warmup
        if watches and over >= 0 and over >= self._replays() // _PAY:
            return f"{self.watched:,} calls were watched for {self.captures} graphs: too many input signatures"
        return ""

    def _replays(self) -> int:
        graphs = [one.captured for one in self._known.values()]  # once: each may go at any moment
        return self._replayed + sum(one.replays for one in graphs if one is not None)

    def take_graph(self, known: Signature, *, stale: bool = False) -> Captured | None:
        """Return the graph of *known*, if it has one, which has none any more: *stale*, or for another reason."""
        captured, known.captured = known.captured, None
        replays, known.went = known.went if captured is None else captured.replays, 0
        known.looks, known.said = 1, None
        self._replayed += replays
        if replays >= _PAY:
            self.captures -= 1
        elif stale:
            known.again += 1
        return captured

    def make_room(self, most: int, let_go: LetGo) -> None:
        """Let the graph go that was replayed longest ago, where there are *most* already, for another."""
        graphs = [key for key, one in self._known.items() if one.captured is not None]
        if len(graphs) >= most:
            let_go(self._known.pop(graphs[0]))

    def with_graphs(self) -> list[Signature]:
        """Return those that have a graph."""
        return [one for one in self._known.values() if one.captured is not None]

    def stale_with(self, known: Signature) -> list[Signature]:
        """Return *known* and those whose graphs are as stale: each would keep what was, a model, alive."""
        others = [(one, one.captured) for one in self._known.values() if one is not known]
        return [known, *(one for one, captured in others if captured is not None and captured.guards.stale())]
