"""Which mode a call runs in: the innermost ``use_mode`` that names its site, else the variable, else the site's own.

Asked of every call of a site that has a mode, and of every call once ``use_mode`` or the variable was used; whether
it is measured or not. Sampling and ``every=`` never change what runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, TypeVar, cast

from gpu_timed.errors import ConfigurationError, ModeError, NotCallableError
from gpu_timed.ledger import Ledger
from gpu_timed.mode_values import EAGER, Compile, Eager, Mode, Ran, Rule, matches, mode_of, parse_rules, unmatched
from gpu_timed.modes.compiled import Compiled
from gpu_timed.modes.graphed import Graphed
from gpu_timed.modes.launcher import Ground, Launcher
from gpu_timed.site import Site

_F = TypeVar("_F", bound=Callable[..., Any])
_MOST_LAUNCHERS: Final = 64
"""Launchers of a site that are kept: its modes, times the functions that share it."""
_MOST_SAID: Final = 1000
_MOST_TEXT: Final = 300
UNKNOWN: Final = "unknown"
"""What was asked for by a function of modes that raised."""


class Switch:
    """Chooses, and runs a call as chosen. One for a process: it is pickled by its name there, as functions are.

    Args:
        module: Where it is found, under the name *name*.
        ledger: Returns the counts of the process.
        cold: Takes note that something was prepared, and for how many nanoseconds.
        relaxed: Returns a context in which waiting cannot break another thread's graph capture.
    """

    def __init__(
        self,
        module: str,
        name: str,
        *,
        ledger: Callable[[], Ledger],
        cold: Callable[[str, int], None],
        relaxed: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.__module__ = module
        self._name = name
        self._ledger = ledger
        #: See :class:`~gpu_timed.modes.launcher.Notes`.
        self.cold = cold
        self.relaxed = relaxed
        self.ground = Ground()
        #: Whether anything but a site's own mode was ever in force in this process. Read by every call; stays, since
        #: a context copied inside a ``use_mode`` block outlives it.
        self.in_force = False
        self._rules: tuple[Rule, ...] = ()
        self._uses: ContextVar[tuple[Rule, ...]] = ContextVar("gpu_timed_modes", default=())
        self._said: set[tuple[str, str]] = set()
        #: The patterns of blocks, of which some may have named nothing.
        self._used: dict[str, None] = {}

    def __reduce__(self) -> str:
        """Pickle by name."""
        return self._name

    def set_rules(self, text: str) -> None:
        """Have the rules of *text* hold for the whole process, over the sites' own modes."""
        self._rules = parse_rules(text)
        if self._rules:
            self.in_force = True

    def forget(self) -> None:
        """Begin anew. Blocks that are open stay open."""
        self.in_force, self._rules, self._said, self._used = bool(self._uses.get()), (), set(), {}

    def use(self, rule: Rule) -> None:
        """Put *rule* before all others in this context."""
        self.in_force = True
        if rule.match not in self._used and len(self._used) < _MOST_SAID:
            self._used[rule.match] = None  # not the mode, which may hold a model
        self._uses.set((rule, *self._uses.get()))

    def unuse(self, rule: Rule) -> None:
        """Undo :meth:`use`. Where that was in another context, as of a coroutine that is collected, this one has none.

        Not by the token of the variable's: that is of one context, and whoever ends another's gets an error.
        """
        uses = self._uses.get()
        for place, one in enumerate(uses):
            if one is rule:
                self._uses.set((*uses[:place], *uses[place + 1 :]))
                return

    def names(self, site_name: str) -> bool:
        """Return whether a rule of the whole process is about sites of that name."""
        return any(matches(rule.match, site_name) for rule in self._rules)

    def choose(
        self, site: Site, arguments: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None
    ) -> Mode | str | None:
        """Return the mode that a call of *site* is to run in, None for as it is, or why its function gave none."""
        name = site.name
        for rule in (*self._uses.get(), *self._rules):
            if matches(rule.match, name):
                return rule.mode
        if site.mode_source is None:
            return site.mode
        how = "raised"
        try:
            found = site.mode_source(*arguments, **named or {})
            how = "returned no mode:"
            return None if found is None else mode_of(found)
        except Exception as error:  # noqa: BLE001 - the user's function of modes
            why = f"its mode= {how} {_described(error)}"[:_MOST_TEXT].rstrip(".")
            self._ledger().count("mode_raised")
            self._say_once(name, "mode_raised", f"gpu_timed: {name}: {why}; it runs eagerly. Said once.")
            return why

    def run(
        self,
        site: Site,
        function: Callable[..., Any],
        opened: Any,
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> Any:
        """Call *function* in the mode of this call, and tell *opened*, its span or None, what ran.

        Raises:
            ModeError: The mode cannot be honoured, and is ``strict``.
        """
        try:
            mode: Mode | str | None = site.mode
            if self.in_force or site.mode_source is not None:
                mode = self.choose(site, arguments, named)
            launcher = site.launchers.get((id(function), id(mode)))
            if launcher is None:
                launcher = self._launcher_of(site, function, opened, mode)
        except Exception as error:  # noqa: BLE001 - rule 1
            self._ledger().fault("mode", error)
            launcher = None
        if launcher is None:
            return function(*arguments, **named)
        return launcher.run(opened, arguments, named)

    def decline(self, site: Site, opened: Any, why: str) -> None:
        """Tell *opened* that a call of *site* runs as it is, whatever was asked for, and *why*.

        Raises:
            ModeError: What was asked for is ``strict``.
        """
        mode = self.choose(site)
        if mode is None:
            return
        if isinstance(mode, str):
            if opened is not None:
                opened.ran = Ran(EAGER.name, UNKNOWN, mode)
            return
        if isinstance(mode, Eager):
            why = ""
        elif mode.strict:
            if opened is not None:
                opened.ran = Ran("", mode.name, why)
            raise ModeError(f"{site.name} cannot run as {mode.name}: {why}.")
        else:
            self.note(site.name, mode.name, why)
        if opened is not None:
            opened.ran = Ran(EAGER.name, mode.name, why)

    def note(self, name: str, mode: str, why: str) -> None:
        """Count that a call ran in another mode than *mode*, and say so once for each site, mode and reason."""
        self._ledger().count("mode_not_honoured")
        self._say_once(
            name, f"{mode}: {why}", f"gpu_timed: {name} was asked to run as {mode} and does not: {why}. Said once."
        )

    def tell_unmatched(self, names: Iterable[str]) -> None:
        """Say once of each rule that none of *names*, those of the process's spans, is what it is about."""
        known = tuple(names)
        given = (
            (list(self._rules), "GPU_TIMED_MODE, or configure(mode=…)"),
            ([Rule(match, EAGER) for match in self._used], "use_mode(match=…)"),
        )
        for rules, by in given:
            for match in unmatched(rules, known):
                self._say_once(
                    "",
                    match,
                    f"gpu_timed: a mode was given for {match!r} ({by}), and no span of this process has that name.",
                )

    def _say_once(self, name: str, what: str, message: str) -> None:
        key = name, what
        if key not in self._said and len(self._said) < _MOST_SAID:
            self._said.add(key)
            self._ledger().say(message)

    def fault(self, kind: str, error: BaseException) -> None:
        """Count a fault of gpu_timed's own."""
        self._ledger().fault(kind, error)

    def _launcher_of(
        self, site: Site, function: Callable[..., Any], opened: Any, mode: Mode | str | None
    ) -> Launcher | None:
        """Return a launcher that is new; None where none is asked for, and tell *opened* so."""
        if mode is None:
            return None
        if isinstance(mode, Eager | str):
            if opened is not None:
                opened.ran = Ran(EAGER.name, UNKNOWN, mode) if isinstance(mode, str) else _EAGER
            return None
        kept = site.launchers
        kind: type[Launcher] = Compiled if isinstance(mode, Compile) else Graphed
        if len(kept) >= _MOST_LAUNCHERS:
            kept.pop(next(iter(kept)), None)
        # It holds both, so that their identities stay theirs. Of two threads that make one, one is kept.
        found: Launcher = kept.setdefault((id(function), id(mode)), kind(function, site, mode, self))
        return found


class UseMode:
    """A ``with`` block, or a decorator, in which matching sites run in a mode. See :func:`gpu_timed.use_mode`."""

    def __init__(self, switch: Switch, mode: object, match: object) -> None:
        if not isinstance(match, str) or not match:
            raise ConfigurationError(f"match must be a name or a glob such as 'decode*', not {match!r}.")
        if callable(mode) and not isinstance(mode, type):
            raise ConfigurationError(
                "use_mode takes a mode or its name: a function of the arguments goes to @gpu_timed(mode=…)."
            )
        self._switch = switch
        self._rule = Rule(match, mode_of(mode))

    def __enter__(self) -> None:
        self._switch.use(self._rule)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._switch.unuse(self._rule)

    def __call__(self, function: _F) -> _F:
        """Have every call of *function* be such a block, of a coroutine function from its first line to its last.

        Raises:
            ConfigurationError: It is a class, or a generator, whose caller would get the mode along with each value.
            NotCallableError: It cannot be called.
        """
        if isinstance(function, staticmethod | classmethod):
            return cast("_F", type(function)(self(function.__func__)))
        if not callable(function):
            raise NotCallableError(f"use_mode can only decorate what can be called, not {type(function).__name__}.")
        if isinstance(function, type):
            raise ConfigurationError("use_mode cannot decorate a class: decorate the method that does the work.")
        if _is(inspect.isgeneratorfunction, function) or _is(inspect.isasyncgenfunction, function):
            raise ConfigurationError(
                "use_mode cannot decorate a generator, between whose values the mode would be its caller's too: "
                "write with use_mode(…) around the calls inside it."
            )
        use, unuse, rule = self._switch.use, self._switch.unuse, self._rule

        async def in_mode_async(*arguments: Any, **named: Any) -> Any:
            use(rule)
            try:
                return await function(*arguments, **named)
            finally:
                unuse(rule)

        def in_mode(*arguments: Any, **named: Any) -> Any:
            use(rule)
            try:
                return function(*arguments, **named)
            finally:
                unuse(rule)

        made = in_mode_async if _is(inspect.iscoroutinefunction, function) else in_mode
        return cast("_F", functools.wraps(function)(made))


def _is(kind: Callable[[Any], bool], function: Callable[..., Any]) -> bool:
    """Return whether *function*, or what an object's class has it do when called, is of that *kind*."""
    return kind(function) or kind(type(function).__call__)


def _described(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - an exception of the user's that has no text
        return type(error).__name__


_EAGER: Final = Ran(EAGER.name, EAGER.name)
