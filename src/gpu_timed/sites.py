"""The sites of a process: found again by their key, and their calls counted for good."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

from gpu_timed.bounds import Limit, fullest
from gpu_timed.ledger import Ledger
from gpu_timed.site import BEYOND, MOST_INPUTS, MOST_LASTING, MOST_SIGNATURES, QUIET_CALLS, Site, calls_in

MOST_NAMES: Final = 10_000
"""Names and blocks of code that are known."""
MOST_UNTIMED: Final = 1000
"""Names met inside compiled regions that are said: more is no help."""


class Sites:
    """Knows every site as long as it is there, and how often the sites of each name were called."""

    def __init__(self) -> None:
        self._by_key: dict[Any, Site] = {}
        #: Each with what counts its calls for good when it goes.
        self._every: weakref.WeakKeyDictionary[Site, weakref.finalize[..., Site]] = weakref.WeakKeyDictionary()
        self._calls_of_the_gone: Counter[str] = Counter()
        #: Names met inside compiled regions.
        self.untimed: set[str] = set()
        self._untimed_dropped = 0

    def new(self, name: str, **options: Any) -> Site:
        """Make a site. See :class:`gpu_timed.site.Site`."""
        made = Site(name, **options)
        self._keep(made)
        return made

    def find(self, key: Any, make: Callable[[], Site], ledger: Ledger) -> Site:
        """Return the site kept under *key*, made by *make* the first time. Beyond 10,000 none is kept."""
        found = self._by_key.get(key)
        if found is None:
            if len(self._by_key) >= MOST_NAMES:
                ledger.fault(
                    "sites_overflow", f"more than {MOST_NAMES} span names: names must come from code, not data"
                )
                return make()
            found = self._by_key.setdefault(key, make())
        return found

    def traced(self, name: str, ledger: Ledger) -> None:
        """Say once that *name* was met inside a compiled region, where nothing can be timed."""
        if name in self.untimed:
            return
        if len(self.untimed) >= MOST_UNTIMED:
            self._untimed_dropped += 1
        else:
            self.untimed.add(name)
            ledger.count("not_timed_in_compiled_region")
            ledger.say(
                f"gpu_timed: {name} is called inside a compiled region and not timed there. "
                "Decorate what you compile: gpu_timed(torch.compile(f)). If that is a call in the mode compile, it "
                "is part of that, whatever its own mode: use_mode(..., match=...) says which calls are compiled."
            )

    def calls(self) -> dict[str, int]:
        """Return how often the sites of each name were called in this process, those that are gone included."""
        found = Counter(self._calls_of_the_gone)
        for held in self._known():
            found[held.name] += held.called
        return dict(found)

    def limits(self, ledger: Ledger) -> Iterator[Limit]:
        """Say how much is kept of sites, and in the fullest of them."""
        known = self._known()
        beyond = ledger.snapshot().get("sites_overflow", 0)
        yield Limit("block_names", MOST_NAMES, len(self._by_key), beyond, "blocks of code known as sites")
        yield Limit(
            "untimed_names", MOST_UNTIMED, len(self.untimed), self._untimed_dropped, "names met inside compiled regions"
        )
        yield Limit("gone_names", MOST_NAMES, len(self._calls_of_the_gone), None, "names of sites that are gone")
        yield Limit("quiet_calls", QUIET_CALLS, fullest(len(held.quiet_ns) for held in known), None, "calls of a site")
        yield Limit(
            "lasting_of_site",
            MOST_LASTING,
            fullest(len(held.lasting) for held in known),
            sum(held.lasting_dropped for held in known),
            "events of a site that hold for later calls",
            loses=True,
        )
        yield Limit(
            "inputs_of_site",
            MOST_INPUTS,
            fullest(len(held.inputs) for held in known),
            sum(held.inputs_dropped for held in known),
            "inputs of a site remembered while cuDNN tunes itself",
        )
        yield Limit(
            "counted_of_site",
            MOST_SIGNATURES,
            fullest(len(held.counted or ()) for held in known),
            sum((held.counted or {}).get(BEYOND, 0) for held in known),
            "input signatures of a site whose operations are counted",
            loses=True,
        )

    def forget(self) -> None:
        """Begin anew: no site is found by its key, and no call was made."""
        self._by_key = {}
        self.untimed = set()
        self._untimed_dropped = 0
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
        before = self._every.get(made)
        if before is not None:
            before.detach()
        gone = weakref.finalize(made, _count_the_gone, self._calls_of_the_gone, made.name, made.calls)
        gone.atexit = False
        self._every[made] = gone


def _count_the_gone(kept: Counter[str], name: str, counter: itertools.count[int]) -> None:
    """Add up the calls of a site that is gone; names without end are counted together."""
    kept[name if len(kept) < MOST_NAMES or name in kept else "other"] += calls_in(counter)
