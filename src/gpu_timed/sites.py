"""The sites of a process: found again by their key, and their calls counted for good."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from gpu_timed.ledger import Ledger
from gpu_timed.site import Site, calls_in

_MOST: Final = 10_000


class Sites:
    """Knows every site as long as it is there, and how often the sites of each name were called."""

    def __init__(self) -> None:
        self._by_key: dict[Any, Site] = {}
        self._every: weakref.WeakSet[Site] = weakref.WeakSet()
        self._calls_of_the_gone: Counter[str] = Counter()

    def new(self, name: str, **options: Any) -> Site:
        """Make a site. See :class:`gpu_timed.site.Site`."""
        made = Site(name, **options)
        self._keep(made)
        return made

    def find(self, key: Any, make: Callable[[], Site], ledger: Ledger) -> Site:
        """Return the site kept under *key*, made by *make* the first time. Beyond 10,000 none is kept."""
        found = self._by_key.get(key)
        if found is None:
            if len(self._by_key) >= _MOST:
                ledger.fault("sites_overflow", f"more than {_MOST} span names: names must come from code, not data")
                return make()
            found = self._by_key.setdefault(key, make())
        return found

    def calls(self) -> dict[str, int]:
        """Return how often the sites of each name were called in this process, those that are gone included."""
        found = Counter(self._calls_of_the_gone)
        for held in self._known():
            found[held.name] += held.called
        return dict(found)

    def forget(self) -> None:
        """Begin anew: no site is found by its key, and no call was made."""
        self._by_key = {}
        self.forget_calls()

    def forget_calls(self) -> None:
        """Begin to count anew, as a forked child does."""
        self._calls_of_the_gone = Counter()
        for held in self._known():
            held.calls = itertools.count()
            self._keep(held)

    def _known(self) -> list[Site]:
        while True:
            try:
                return list(self._every)
            except RuntimeError:  # another thread is decorating just now
                continue

    def _keep(self, made: Site) -> None:
        gone = weakref.finalize(made, _count_the_gone, self._calls_of_the_gone, made.name, made.calls)
        gone.atexit = False
        self._every.add(made)


def _count_the_gone(kept: Counter[str], name: str, counter: itertools.count[int]) -> None:
    """Add up the calls of a site that is gone; names without end are counted together."""
    kept[name if len(kept) < _MOST or name in kept else "other"] += calls_in(counter)
