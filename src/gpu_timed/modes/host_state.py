"""The host state that a function can reach: what it sees by its closure, its globals and its arguments.

A graph replays what the device did and nothing that the host did: a counter that goes up in every call stands still in
a replay. So a call that changes plain values here is not captured; and whoever changes one between two calls, or
puts another tensor in the place of one, has the graph captured anew.

What is looked at is bounded. Generators of random numbers on the host are not: they are the whole process's. What comes
of them differs from a replay, which the comparison with an eager run shows. A tensor is known by identity and address.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable
from typing import Any, Final

_PLAIN: Final = (int, float, bool, str, bytes, type(None))
_MOST: Final = 20_000
_MOST_PARTS: Final = 4_096
_NOT_STATE: Final = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_INSIDE: Final = frozenset({"_modules", "_parameters", "_buffers"})
_OURS: Final = "_gpu_timed_"
_FOREIGN: Final = frozenset({"builtins", "torch", "numpy", "gpu_timed", "triton", "numba", "cupy", "jax"})
"""Classes whose attributes are nobody's counters."""
_NEAR: Final = 1
_MOST_GUARDS: Final = 256
"""Plain values that are looked at before each replay, the nearest ones: some 80 ns each."""


def roots(function: Callable[..., Any], values: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return the namespaces and objects that *function*, called with *values*, can reach at once, with names."""
    reach = _Reach()
    if isinstance(function, types.MethodType):
        reach.found.append(("self", function.__self__))
    reach.look(function)
    if not isinstance(function, types.FunctionType | types.MethodType):
        reach.found.append((type(function).__name__, function))
    return reach.found + [("an argument", value) for value in values if not isinstance(value, _PLAIN)]


class _Reach:
    """What functions reach. A class, since two functions that call each other would keep the user's tensors alive."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Any]] = []
        self._seen: set[int] = set()

    def look(self, inside: Any) -> None:
        """Look into a function, or what stands around one."""
        inside = getattr(inside, "__func__", inside)
        if id(inside) in self._seen or len(self._seen) > _MOST_PARTS:
            return
        self._seen.add(id(inside))
        if isinstance(inside, types.FunctionType):
            code = inside.__code__
            if inside.__globals__.get("__name__", "").partition(".")[0] in ("torch", "gpu_timed"):
                return
            for name, cell in zip(code.co_freevars, inside.__closure__ or (), strict=False):
                if name.startswith(_OURS):  # a decorated function: what is inside follows
                    continue
                try:
                    self._add(name, cell.cell_contents)
                except ValueError:  # not filled yet
                    continue
            for name in code.co_names:
                if name in inside.__globals__:
                    self._add(name, inside.__globals__[name])
        for name in ("func", "__wrapped__", "args", "keywords"):
            held = getattr(inside, name, None) if not isinstance(inside, type) else None
            if held is not None:
                self._add(name, held)

    def _add(self, name: str, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self.look(value)
        elif isinstance(value, types.MethodType):
            self.look(value.__func__)
            self.found.append((name, value.__self__))
        elif not isinstance(value, _NOT_STATE):
            self.found.append((name, value))


class Snapshot:
    """What the host state was at a moment.

    Args:
        function: What is to be called.
        values: What it is to be called with.
        is_tensor: Whether something is a tensor.
    """

    def __init__(self, function: Callable[..., Any], values: Iterable[Any], is_tensor: Callable[[Any], bool]) -> None:
        self._is_tensor = is_tensor
        #: Plain values, lengths and tensors, by where they stand: (holder, key).
        self.held: list[tuple[str, Any, Any, Any]] = []
        self._near: list[tuple[Any, Any, Any]] = []
        self._tensors: list[tuple[Any, Any, Any]] = []
        self._seen: set[int] = set()
        self._keep: list[Any] = []
        self._cells(function)
        for name, value in roots(function, values):
            self._walk(name, value)

    def changed(self) -> str:
        """Return what of it is not as it was; nothing if all of it is."""
        for name, holder, key, was in self.held:
            if not _same(_get(holder, key), was):
                return f"{name}{_shown(key)}"
        return ""

    def guards(
        self, read: Iterable[Any] = (), are_at: Callable[[list[Any]], Callable[[list[int]], bool]] | None = None
    ) -> Guards:
        """Return what is to be the same at a replay. The arguments as of :class:`Guards`.

        Tensors wherever they stand, whether modules are training, and other plain values where they stand near.
        """
        return Guards(self._tensors + self._near[:_MOST_GUARDS], read, are_at)

    def _cells(self, function: Callable[..., Any]) -> None:
        inside: Any = getattr(function, "__func__", function)
        if not isinstance(inside, types.FunctionType):
            return
        for name, cell in zip(inside.__code__.co_freevars, inside.__closure__ or (), strict=False):
            self._note(name, cell, _CELL)
            self._class(name, _get(cell, _CELL))
        for name in inside.__code__.co_names:
            if name in inside.__globals__:
                self._note("", inside.__globals__, name)
                self._class(name, inside.__globals__[name])

    def _class(self, name: str, value: Any) -> None:
        """Note the plain values of a class that is named: a counter may stand there. They are no guards."""
        if isinstance(value, type) and value.__module__.partition(".")[0] not in _FOREIGN:
            for key in list(vars(value)):
                if not key.startswith("__"):
                    self._note(name, vars(value), key, _NEAR + 1)

    def _note(self, name: str, holder: Any, key: Any, depth: int = 0) -> None:
        value = _get(holder, key)
        if isinstance(value, _PLAIN):
            self.held.append((name, holder, key, value))
            if depth <= _NEAR:
                self._near.append((holder, key, value))
            elif key == "training":
                self._tensors.append((holder, key, value))
        elif self._is_tensor(value):
            was = value, value.data_ptr()
            self.held.append((name, holder, key, was))
            self._tensors.append((holder, key, was))

    def _walk(self, name: str, value: Any) -> None:
        todo: list[tuple[str, Any, int]] = [(name, value, 0)]
        while todo:
            name, value, depth = todo.pop()
            if id(value) in self._seen or isinstance(value, (*_PLAIN, *_NOT_STATE)) or self._is_tensor(value):
                continue
            if len(self.held) > _MOST or len(self._seen) > _MOST:
                return
            self._seen.add(id(value))
            self._keep.append(value)  # so that its identity stays its own
            if isinstance(value, dict):
                self.held.append((name, value, _LENGTH, len(value)))
                if len(value) > _MOST_PARTS:
                    continue
                parts: Any = [(key, value[key]) for key in list(value)]
                holder: Any = value
            elif isinstance(value, list):
                self.held.append((name, value, _LENGTH, len(value)))
                if len(value) > _MOST_PARTS:
                    continue
                parts, holder = list(enumerate(value)), value
            elif isinstance(value, tuple | set | frozenset):
                if len(value) <= _MOST_PARTS:
                    todo += [(name, each, depth) for each in value]
                continue
            else:
                holder = getattr(value, "__dict__", None)
                if type(holder) is not dict or type(value).__module__.partition(".")[0] == "gpu_timed":
                    continue
                parts = [(key, holder[key]) for key in list(holder)]
            for key, each in parts:
                self._note(name, holder, key, depth)
                if not isinstance(each, _PLAIN):
                    todo.append((name if key in _INSIDE else f"{name}{_shown(key)}", each, depth + 1))


class Guards:
    """What is to be the same at a replay: (holder, key, what it was). Asked before or beside each.

    Args:
        guards: Some 35 ns each, for a tensor three times that: in C, one call for all of them.
        read: Tensors that a graph reads, and that nobody may have found on the host.
        are_at: Returns what tells whether tensors are at given addresses.
    """

    def __init__(
        self,
        guards: list[tuple[Any, Any, Any]],
        read: Iterable[Any] = (),
        are_at: Callable[[list[Any]], Callable[[list[int]], bool]] | None = None,
    ) -> None:
        self._all = guards
        found = [guard for guard in guards if not isinstance(guard[1], _Special)]
        self._special = [guard for guard in guards if isinstance(guard[1], _Special)]
        self._holders = [holder for holder, _, _ in found]
        self._keys = [key for _, key, _ in found]
        self._were = [was[0] if type(was) is tuple else was for _, _, was in found]
        known = {id(was[0]): was for _, _, was in guards if type(was) is tuple}
        known.update((id(one), (one, one.data_ptr())) for one in read if id(one) not in known)
        #: All tensors among them.
        self.tensors = [one for one, _ in known.values()]
        self._addresses = [address for _, address in known.values()]
        self._are_at = (are_at or _are_at)(self.tensors)

    def moved(self) -> bool:
        """Return whether memory that the graph may read is not where it was: it must not be replayed."""
        return bool(self.tensors) and not self._are_at(self._addresses)

    def rebound(self) -> bool:
        """Return whether something else stands where what the graph knows stood, or another value."""
        try:
            if all(map(operator.is_, map(operator.getitem, self._holders, self._keys), self._were)) and not (
                self._special and _any_other(self._special)
            ):
                return False
        except (LookupError, TypeError):  # gone; or of a type that is asked in another way
            pass
        return _any_other(self._all)

    def stale(self) -> bool:
        """Return whether any of them does not hold any more."""
        return self.moved() or self.rebound()


def _are_at(tensors: list[Any]) -> Callable[[list[int]], bool]:
    return lambda addresses: [tensor.data_ptr() for tensor in tensors] == addresses


def _any_other(guards: list[tuple[Any, Any, Any]]) -> bool:
    return any(not _same(_get(holder, key), was) for holder, key, was in guards)


class _Special:
    def __init__(self, shown: str) -> None:
        self.shown = shown


_LENGTH: Final = _Special("'s length")
_CELL: Final = _Special("")
_GONE: Final = object()


def _get(holder: Any, key: Any) -> Any:
    if key is _LENGTH:
        return len(holder)
    try:
        return holder.cell_contents if key is _CELL else holder[key]
    except (ValueError, IndexError, KeyError):
        return _GONE


def _same(value: Any, was: Any) -> bool:
    if type(was) is tuple:  # a tensor, and its address
        return value is was[0] and value.data_ptr() == was[1]
    if type(value) is float and type(was) is float:
        return repr(value) == repr(was)  # NaN is NaN, and 0.0 not -0.0
    return type(value) is type(was) and bool(value == was)


def _shown(key: Any) -> str:
    if isinstance(key, _Special):
        return key.shown
    return f".{key}" if isinstance(key, str) else f"[{key!r}]"
