"""Timing by name: ``GPU_TIMED_TARGETS="pkg.mod:infer,pkg.mod:Model.forward[sync=deferred,every=10]"``.

A target is put in its place once its module has been imported, which is never done here: the attribute of the
module or class is replaced by the timed one. ``from pkg.mod import infer`` elsewhere gets the timed one if it runs
after that, as it does in every module that imports ``pkg.mod`` by itself; a name that was bound to the bare function
before, by a module imported earlier or by a decorator that registers it somewhere, goes on calling the bare one.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Literal, TypeAlias

from gpu_timed import current
from gpu_timed.callables import classes, kinds
from gpu_timed.errors import ConfigurationError, GpuTimedError
from gpu_timed.settings import TARGETS_VARIABLE
from gpu_timed.target_names import Target, parse_targets
from gpu_timed.timed import gpu_timed

__all__ = ["AppliedTargets", "Target", "TargetState", "apply_targets", "parse_targets", "target_states"]

Status: TypeAlias = Literal["waiting", "timed", "timed_already", "missing", "refused", "disabled", "undone"]

MAIN: Final = "__main__"
_ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class TargetState:
    """What became of a target so far."""

    target: str
    """``module:name``, as it was written."""
    status: Status
    """``timed``; ``waiting`` for its module; ``timed_already`` by a decorator in the code; ``missing`` in its module;
    ``refused`` with a reason; ``disabled`` by ``GPU_TIMED_DISABLED``; ``undone``."""
    detail: str
    """The same in words: ``waiting for pkg.mod``."""


def apply_targets(targets: str | Iterable[str] | None = None, *, script: bool = False) -> AppliedTargets:
    """Time what *targets* name, each as soon as its module is imported; at once if it is already.

    What goes wrong with a target later is said once in the log, by its name: it never reaches the import.

    Args:
        targets: As :func:`parse_targets` reads them; None means those of ``GPU_TIMED_TARGETS``.
        script: Whether the caller offers the definitions of ``__main__`` as they are made, as ``gpu-timed run`` does.

    Returns:
        What was applied; ``undo()`` takes it back.

    Raises:
        ConfigurationError: A target cannot be read.
    """
    if targets is None:
        text = os.environ.get(TARGETS_VARIABLE, "")
        try:
            parsed = parse_targets(text)
        except ConfigurationError as error:
            raise ConfigurationError(f"{TARGETS_VARIABLE}={text!r} cannot be used: {error}") from None
    else:
        parsed = parse_targets(targets if isinstance(targets, str) else ",".join(targets))
    attempts = [_Attempt(target) for target in parsed]
    current.targets().extend(attempts)
    for attempt in attempts:
        attempt.begin(script=script)
    return AppliedTargets(attempts)


def target_states() -> tuple[TargetState, ...]:
    """Return what became of every target that was applied in this process, in the order they were applied."""
    current.imports().look_again()
    return tuple(attempt.state for attempt in current.targets())


class AppliedTargets:
    """Targets that were applied together."""

    def __init__(self, attempts: list[_Attempt]) -> None:
        self._attempts = attempts

    @property
    def states(self) -> tuple[TargetState, ...]:
        """What became of each."""
        current.imports().look_again()
        return tuple(attempt.state for attempt in self._attempts)

    def undo(self) -> None:
        """Put back exactly what was there, where what is there now is still ours, and wait for nothing any more."""
        for attempt in reversed(self._attempts):
            attempt.undo()

    @property
    def script_names(self) -> frozenset[str]:
        """Top-level names of ``__main__`` whose definitions are to be offered."""
        return frozenset(attempt.target.path[0] for attempt in self._attempts if attempt.target.module == MAIN)

    def offer(self, name: str, found: Any) -> Any:
        """Return what the script's definition *found* of *name* is to be replaced by: the timed one, or itself."""
        for attempt in self._attempts:
            if attempt.target.module == MAIN and attempt.target.path[0] == name:
                found = attempt.on_definition(found)
        return found

    def not_defined(self, names: Iterable[str], known: Iterable[str]) -> None:
        """Say that the script defines none of *names*, and what is like them among the *known* ones."""
        for attempt in self._attempts:
            if attempt.target.module == MAIN and attempt.target.path[0] in names:
                attempt.miss(attempt.target.path[0], known, "the script has no def or class at its top level called")


class _Attempt:
    """The life of one target in this process. Nothing in here raises into an import."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._status: Status = "waiting"
        self._detail = f"waiting for {target.module}"
        self._places: list[tuple[Any, str, Any, Any]] = []

    @property
    def state(self) -> TargetState:
        return TargetState(self.target.text, self._status, self._detail)

    def begin(self, *, script: bool) -> None:
        """Wait for the module; of a script that offers its definitions, for these."""
        try:
            if self.target.module != MAIN:
                current.imports().when_imported(self.target.module, self.on_module)
            elif not script:
                self.on_module(sys.modules[MAIN])
        except Exception as error:  # noqa: BLE001 - a fault of ours must not keep the program from starting
            self._fail("refused", f"cannot be waited for ({type(error).__name__}).")

    def on_module(self, module: ModuleType) -> None:
        """Put the timed one in the place of what *module* holds."""
        if self._status == "waiting":
            self._try(lambda: self._replace_in(module, self.target.path, module.__name__))

    def on_definition(self, found: Any) -> Any:
        """Return the timed one of what the script just defined under the first name of the path."""
        if self._status not in ("waiting", "timed"):  # defined twice, in two branches say: both are timed
            return found
        first, *rest = self.target.path
        made = found
        if rest:
            self._try(lambda: self._replace_in(found, tuple(rest), first))
        elif isinstance(found, type) and not classes.is_builtin(found):
            self._try(lambda: self._replace_call(found))
        else:

            def decorate() -> None:
                nonlocal made
                made = self._timed(found)
                self._places.append((sys.modules[MAIN], first, found, made))

            self._try(decorate)
        return made

    def undo(self) -> None:
        for owner, name, before, ours in reversed(self._places):
            if vars(owner).get(name, _ABSENT) is not ours:
                continue  # somebody put something else there: it is theirs now
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._places.clear()
        self._status, self._detail = "undone", "undone"

    def miss(self, name: str, known: Iterable[str], words: str) -> None:
        near = difflib.get_close_matches(name, {str(other): None for other in known}, n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
        self._fail("missing", f"{words} {name!r}{hint}")

    # -- inside ---------------------------------------------------------------------------------------

    def _try(self, action: Callable[[], None]) -> None:
        try:
            self._do(action)
        except Exception as error:  # noqa: BLE001 - an error or a name of the user's that has no text
            self._fail("refused", f"cannot be replaced ({type(error).__name__}).")

    def _do(self, action: Callable[[], None]) -> None:
        try:
            action()
        except _NotThereError as error:
            self.miss(error.name, error.known, error.words)
        except _TimedAlreadyError:
            self._fail("timed_already", "is timed by a decorator or another target already, and left at that.")
        except _DisabledError:
            self._status, self._detail = "disabled", "GPU_TIMED_DISABLED is set"
        except GpuTimedError as error:
            self._fail("refused", str(error))
        except Exception as error:  # noqa: BLE001 - a metaclass or module of the user's that takes no attribute
            self._fail("refused", f"cannot be replaced ({type(error).__name__}: {error}).")
        else:
            self._status, self._detail = "timed", "timed"

    def _fail(self, status: Status, detail: str) -> None:
        self._status, self._detail = status, detail
        current.ledger().count(f"target_{status}")
        current.ledger().say(f"gpu_timed: target {self.target.text}: {detail}")

    def _replace_in(self, owner: Any, path: tuple[str, ...], where: str) -> None:
        for name in path[:-1]:
            owner = _held(owner, name, where)
            where = f"{where}.{name}"
            if not isinstance(owner, type):
                raise ConfigurationError(
                    f"{where} is not a class but {type(owner).__name__}: only what is in a module or a class can be "
                    "replaced. Name the class and its method."
                )
        raw = _held(owner, path[-1], where)
        if isinstance(raw, type) and not classes.is_builtin(raw):
            self._replace_call(raw)
        else:
            self._replace(owner, path[-1], raw)

    def _replace_call(self, found: type[Any]) -> None:
        """Time calling the instances of a class, as decorating it does, so that it can be taken back."""
        classes.refuse(found)
        name = classes.method_of(found)
        self._replace(found, name, _held(found, name, found.__qualname__), called=found.__qualname__)

    def _replace(self, owner: Any, name: str, raw: Any, *, called: str | None = None) -> None:
        made = self._timed(raw, called)
        before = vars(owner).get(name, _ABSENT)  # absent: a base class has it, and keeps it
        setattr(owner, name, made)
        self._places.append((owner, name, before, made))

    def _timed(self, raw: Any, called: str | None = None) -> Any:
        if kinds.is_timed(raw):
            raise _TimedAlreadyError
        made = gpu_timed(raw, **{"name": called, **self.target.options})
        if made is raw or getattr(made, "__func__", made) is getattr(raw, "__func__", raw):
            raise _DisabledError
        return made


class _NotThereError(Exception):
    def __init__(self, name: str, known: Iterable[str], words: str) -> None:
        super().__init__(name)
        self.name, self.known, self.words = name, known, words


class _TimedAlreadyError(Exception):
    pass


class _DisabledError(Exception):
    pass


def _held(owner: Any, name: str, where: str) -> Any:
    """Return what *owner*, or a base of it, holds under *name*, without running any code of the user's."""
    lines = owner.__mro__ if isinstance(owner, type) else (owner,)
    for kind in lines:
        if name in vars(kind):
            return vars(kind)[name]
    if owner is sys.modules.get(MAIN):
        raise _NotThereError(
            name,
            vars(owner),
            "the functions of a script are timed by `gpu-timed run --target … -- python script.py`, or by a decorator: "
            "by the time it was asked for, __main__ had no",
        )
    lazy = (
        " of its own (if it is loaded lazily, name the module that defines it)" if "__getattr__" in vars(owner) else ""
    )
    known = (other for kind in lines for other in vars(kind))
    raise _NotThereError(name, known, f"{where} has{lazy} no")
