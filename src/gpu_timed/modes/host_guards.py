"""What is to be as it was: places on the host, known by holder and key, and what stood there.

Nothing of the user's is run to compare: plain values by value, all else by identity.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import starmap
from typing import Any, Final, NamedTuple

PLAIN: Final = (int, float, complex, bool, str, bytes, range, type(None))
_PLAIN_KINDS: Final = frozenset(map(id, PLAIN))
"""By identity: a class may say that it is equal to any."""
_VALUES: Final = (*PLAIN, tuple, frozenset)
_MOST_BYTES: Final = 1 << 16
"""Of an array of the host, say: some 3 µs to compare. What is in a larger one is not looked at."""
_MOST_NESTED: Final = 8
_FEWEST_WATCHED: Final = 8
"""Dicts that are asked sooner than whether any was written to."""
_TRUE_IF_FULL: Final = (dict, OrderedDict)
_BUILT_IN: Final = (OrderedDict, dict, list, tuple, set, frozenset, deque)
_LENGTHS: Final = frozenset(kind.__len__ for kind in (*_BUILT_IN, types.MappingProxyType))
_OF_PYTHON: Final = (bytearray, array)
_BY_VALUE: Final = frozenset({("torch", "device"), ("torch", "dtype")})


class Special:
    """A key that is none: how to ask a holder."""

    def __init__(self, shown: str, get: Callable[[Any], Any]) -> None:
        self.shown = shown
        self.get = get


class Slot(Special):
    """A slot of an object."""

    def __init__(self, name: str) -> None:
        super().__init__(f".{name}", lambda holder: object.__getattribute__(holder, name))
        self.name = name

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(name: str) -> Slot:
        """Return the slot of this name, one and the same for each."""
        return Slot(name)


class Absent(Special):
    """A key of a namespace: those of *names* that stand in it, of which there was none.

    They are looked for where there are more or fewer names in it than before: one that comes as another goes is missed.
    """

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__("'s names", lambda space: tuple(sorted(names & space.keys())))


class Behind(Special):
    """A key of what a weak reference is to."""

    def __init__(self, key: Any) -> None:
        super().__init__(key.shown if isinstance(key, Special) else f"[{key!r}]", lambda weak: get(weak(), key))
        self.key = key


class Members(frozenset[int]):
    """The identities of what is in a set, which are nobody else's as long as this is kept."""

    __slots__ = ("kept",)
    kept: list[Any]


class WasTensor(NamedTuple):
    """A tensor that stood there, and the address that it had."""

    tensor: Any
    address: int


def _built_in(holder: Any) -> Any:
    """Return the container that *holder* is, of whose methods none is the user's."""
    return next((kind for kind in _BUILT_IN if issubclass(type(holder), kind)), None)


def _length(holder: Any) -> int:
    kind = _built_in(holder)
    return len(holder) if kind is None else kind.__len__(holder)


def members(holder: Any) -> list[Any]:
    """Return what is in a container, of a dict its keys, and run no method of a class of the user's."""
    return list(_built_in(holder).__iter__(holder))


def _contents(holder: Any) -> Any:
    if issubclass(type(holder), set):
        kept = members(holder)
        found = Members(map(id, kept))
        found.kept = kept
        return found
    if isinstance(holder, _OF_PYTHON):
        return bytes(holder) if memoryview(holder).nbytes <= _MOST_BYTES else b""
    return holder.shape, holder.dtype.str, holder.tobytes() if holder.nbytes <= _MOST_BYTES else b""


_cell_contents: Final = operator.attrgetter("cell_contents")
LENGTH: Final = Special("'s length", _length)
ORDER: Final = Special("'s order", lambda holder: tuple(members(holder)))
"""Which keys a dict has, one after another."""
VALUES: Final = Special("'s values", lambda holder: tuple(dict.values(holder)))
"""In place of each by its key, where to look for that would be to run code of the user's: a hash."""
_code: Final = operator.attrgetter("__code__")
CODE: Final = Special("'s code", _code)
"""What reloads a module as it is edited puts other code into the functions that there are."""
CELL: Final = Special("", _cell_contents)
CONTENTS: Final = Special("'s contents", _contents)
ITSELF: Final = Special("", lambda holder: holder)
CLASS: Final = Special("'s class", type)
ATTRIBUTES: Final = Special("'s __dict__", lambda holder: object.__getattribute__(holder, "__dict__"))
_ONE_BY_ONE: Final = frozenset({CONTENTS, ORDER, VALUES, ATTRIBUTES})
GONE: Final = object()
"""In place of what does not stand there."""


def is_array(value: Any) -> bool:
    """Return whether *value* is an array of NumPy's, or of bytes, whose contents are to be compared."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, _OF_PYTHON) or (numpy is not None and isinstance(value, getattr(numpy, "ndarray", ())))


def get(holder: Any, key: Any) -> Any:
    """Return what stands there, or something that is nothing else."""
    try:
        return key.get(holder) if isinstance(key, Special) else _getter_of(holder)(holder, key)
    except (ValueError, LookupError, AttributeError, TypeError, RuntimeError):
        return GONE


def same(value: Any, was: Any, depth: int = 0) -> bool:
    """Return whether *value* is what was there."""
    if type(was) is WasTensor:
        return value is was.tensor and value.data_ptr() == was.address
    if value is was:
        return True
    kind = type(was)
    if type(value) is not kind:
        return False
    if kind is tuple and len(value) == len(was) and all(map(operator.is_, value, was)):
        return True  # at a glance
    if kind is Members or (kind.__module__, kind.__name__) in _BY_VALUE:
        return bool(value == was)
    if not is_value(value) or not is_value(was) or depth >= _MOST_NESTED:
        return False
    if issubclass(kind, float | complex):
        shown = float.__repr__ if issubclass(kind, float) else complex.__repr__
        return shown(value) == shown(was)  # NaN is NaN, and 0.0 not -0.0
    if issubclass(kind, frozenset):
        return set(map(_told_by, members(value))) == set(map(_told_by, members(was)))
    if issubclass(kind, tuple):  # shapes, say, are made anew
        one, other = members(value), members(was)
        return len(one) == len(other) and all(same(*pair, depth + 1) for pair in zip(one, other, strict=True))
    plain: Any = next(each for each in PLAIN if issubclass(kind, each))
    return plain.__eq__(value, was) is True


def is_value(value: Any) -> bool:
    """Return whether *value* is told by its kind and by what it is or what is in it: it has no attributes."""
    return issubclass(type(value), _VALUES) and not has_attributes(value)


def has_attributes(value: Any) -> bool:
    """Return whether there is more to *value*, of a class that inherits from a plain one, than that."""
    kind = type(value)
    return id(kind) not in _PLAIN_KINDS and bool(kind.__dictoffset__ and object.__getattribute__(value, "__dict__"))


def is_plain(value: Any) -> bool:
    """Return whether *value* is told by its kind and by what it is, and will be: it can have no attributes."""
    kind = type(value)
    return id(kind) in _PLAIN_KINDS or (issubclass(kind, PLAIN) and not kind.__dictoffset__)


def _told_by(part: Any) -> Any:
    return (type(part), repr(part)) if id(type(part)) in _PLAIN_KINDS else id(part)


def _getter_of(holder: Any) -> Callable[[Any, Any], Any]:
    """Return what asks *holder* for a key, and runs no method of a class of the user's."""
    for kind in (dict, list, tuple, deque):
        if issubclass(type(holder), kind):
            return kind.__getitem__
    return operator.getitem


class Guards:
    """What is to be the same at a replay: (holder, key, what it was). Asked before or beside each.

    Args:
        guards: Some 35 ns each, for a tensor five times that: in C, one call for all of them.
        read: Tensors that a graph reads, and that nobody may have found on the host.
        are_at: Returns what tells whether tensors are at given addresses.
        are_as_now: Returns what tells whether tensors have the shapes, strides and dtypes that they have now.
        writes: Returns what tells which dicts were written to, so that no other need be looked into; or None.
    """

    def __init__(
        self,
        guards: list[tuple[Any, Any, Any]],
        read: Iterable[Any] = (),
        are_at: Callable[[list[Any]], Callable[[list[int]], bool]] | None = None,
        are_as_now: Callable[[list[Any]], Callable[[], bool]] | None = None,
        writes: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._all = guards
        known = {id(was.tensor): was for _, _, was in guards if type(was) is WasTensor}
        known.update((id(one), WasTensor(one, one.data_ptr())) for one in read if id(one) not in known)
        #: All tensors among them.
        self.tensors = [one for one, _ in known.values()]
        self._addresses = [address for _, address in known.values()]
        self._are_at = (are_at or _are_at)(self.tensors)
        self._are_as_now = are_as_now(self.tensors) if are_as_now is not None and self.tensors else None
        #: Dicts that were empty, and lengths of what cannot be asked so.
        self._empty: list[Any] = []
        self._sized: list[Any] = []
        self._lengths: list[int] = []
        self._others: list[tuple[Any, Any, Any]] = []
        self._objects: list[Any] = []
        self._classes: list[Any] = []
        #: Of each way to ask: it, whom, for what, what it is to be; and which guards those are.
        self._groups: list[tuple[Callable[..., Any], list[Any], list[Any], list[Any]]] = []
        self._absent: list[tuple[Any, Any, Any]] = []
        self._sizes: list[int] = []
        self._functions: list[Any] = []
        self._codes: list[Any] = []
        self._cells: list[Any] = []
        self._in_cells: list[Any] = []
        self._indices: list[tuple[list[int], list[Any]]] = []
        #: What tells which dicts were written to, and which guards are in each.
        self._writes: Any = None
        self._within: list[list[tuple[Any, Any, Any]]] = []
        self._direct = self._without_watched(writes)
        self._sort([was.tensor if type(was) is WasTensor else was for _, _, was in self._direct])

    def _without_watched(self, writes: Callable[[list[Any]], Any] | None) -> list[tuple[Any, Any, Any]]:
        """Return the guards that are to be asked at each replay, one by one."""
        direct: list[tuple[Any, Any, Any]] = []
        within: dict[int, list[tuple[Any, Any, Any]]] = {}
        for guard in self._all:
            holder, key, was = guard
            if key is LENGTH and not was and issubclass(type(holder), dict):  # which may take over another's parts
                if type(holder) in _TRUE_IF_FULL:
                    self._empty.append(holder)
                else:
                    direct.append(guard)
            elif writes is not None and _is_counted(holder, key):
                within.setdefault(id(holder), []).append(guard)
            else:
                direct.append(guard)
        if writes is not None and len(within) >= _FEWEST_WATCHED:
            self._writes = writes([guards[0][0] for guards in within.values()])
        if self._writes is not None:
            self._within = list(within.values())
        else:
            direct += [guard for guards in within.values() for guard in guards]
        return direct

    def _sort(self, weres: list[Any]) -> None:
        by_getter: dict[Any, list[int]] = {}
        for index, (holder, key, was) in enumerate(self._direct):
            if key is LENGTH and type(holder).__len__ in _LENGTHS:
                self._sized.append(holder)
                self._lengths.append(was)
            elif key is CLASS:
                self._objects.append(holder)
                self._classes.append(was)
            elif isinstance(key, Absent):
                self._absent.append((holder, key, was))
            elif key is CODE:
                self._functions.append(holder)
                self._codes.append(was)
            elif was is GONE or key is LENGTH or _is_asked_alone(key):
                self._others.append((holder, key, was))
            elif key is not ITSELF:
                slot, cell = isinstance(key, Slot), key is CELL
                getter = object.__getattribute__ if slot else _cell_contents if cell else _getter_of(holder)
                by_getter.setdefault(getter, []).append(index)
        for getter, places in by_getter.items():
            holders, known = [self._direct[index][0] for index in places], [weres[index] for index in places]
            keys = [self._direct[index][1] for index in places]
            if getter is _cell_contents:
                self._cells, self._in_cells = holders, known
            else:
                keys = [key.name if isinstance(key, Slot) else key for key in keys]
                self._groups.append((getter, holders, keys, known))
            self._indices.append((places, known))

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._all)

    def moved(self) -> bool:
        """Return whether memory that the graph may read is not where it was: it must not be replayed."""
        return bool(self.tensors) and not self._are_at(self._addresses)

    def rebound(self) -> bool:
        """Return whether something else stands where what the graph knows stood, or another value."""
        are_as_now, writes = self._are_as_now, self._writes
        try:
            if are_as_now is not None and not are_as_now():
                return True
            if any(self._empty):
                return True
            if writes is not None:
                written = writes.look()
                if written:
                    if not all(_holds(guard) for place in written for guard in self._within[place]):
                        return True
                    writes.well()
            if self._sized and list(map(len, self._sized)) != self._lengths:
                return True
            if not all(map(operator.is_, map(type, self._objects), self._classes)):
                return True
            if not all(map(operator.is_, map(_code, self._functions), self._codes)):
                return True
            if self._absent:
                sizes = [len(space) for space, _, _ in self._absent]
                if sizes != self._sizes:
                    if not all(map(_holds, self._absent)):
                        return True
                    self._sizes = sizes
            if self._others and not all(map(_holds, self._others)):
                return True
            if not self._cells or all(map(operator.is_, map(_cell_contents, self._cells), self._in_cells)):
                for getter, holders, keys, known in self._groups:
                    if not all(map(operator.is_, map(getter, holders, keys), known)):
                        break
                else:
                    return False
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError):  # gone; or asked in another way
            pass
        return self._any_other()

    def _any_other(self) -> bool:
        if not all(_holds(guard) for guards in self._within for guard in guards):
            return True
        found = list(starmap(get, (each[:2] for each in self._direct)))
        if not all(map(same, found, (was for _, _, was in self._direct))):
            return True
        for places, known in self._indices:  # equal ones, which are known at a glance from now on
            known[:] = [found[index] for index in places]
        return False

    def stale(self) -> bool:
        """Return whether any of them does not hold any more."""
        return self.moved() or self.rebound()


def _holds(guard: tuple[Any, Any, Any]) -> bool:
    holder, key, was = guard
    return same(get(holder, key), was)


def _is_asked_alone(key: Any) -> bool:
    return isinstance(key, Behind) or (isinstance(key, Special) and key in _ONE_BY_ONE)


def _is_counted(holder: Any, key: Any) -> bool:
    """Return whether it is a write to a dict that changes what stands there: no slot, say, of an object that is one."""
    if not issubclass(type(holder), dict) or _is_namespace(holder):
        return False
    if key is ORDER:
        return not isinstance(holder, OrderedDict)  # which keeps it beside what is in it
    return key in {LENGTH, VALUES} if isinstance(key, Special) else True


def _is_namespace(holder: dict[Any, Any]) -> bool:
    """Return whether it is that of a module: much is written there that nobody asks for."""
    return dict.__contains__(holder, "__builtins__") or dict.__contains__(holder, "__spec__")


def _are_at(tensors: list[Any]) -> Callable[[list[int]], bool]:
    return lambda addresses: [tensor.data_ptr() for tensor in tensors] == addresses
