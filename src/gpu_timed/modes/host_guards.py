"""What is to be as it was, so that a graph is still that of its function: asked before or beside each replay.

Python code for each of thousands of places would take longer than a replay: what is of one kind is asked by one call.
"""

from __future__ import annotations

import operator
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import starmap
from typing import Any, Final

from gpu_timed.modes.host_places import (
    ATTRIBUTES,
    BUILT_IN,
    CELL,
    CLASS,
    CODE,
    CONTENTS,
    GONE,
    ITSELF,
    LENGTH,
    ORDER,
    VALUES,
    Absent,
    Behind,
    Slot,
    Special,
    WasTensor,
    cell_contents,
    code_of,
    get,
    getter_of,
    same,
)

_FEWEST_WATCHED: Final = 8
"""Dicts that are asked sooner than whether any was written to."""
_TRUE_IF_FULL: Final = (dict, OrderedDict)
_LENGTHS: Final = frozenset(kind.__len__ for kind in (*BUILT_IN, types.MappingProxyType))
_ONE_BY_ONE: Final = frozenset({CONTENTS, ORDER, VALUES})


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
        known.update((id(one), WasTensor.of(one)) for one in read if id(one) not in known)
        #: All tensors among them.
        self.tensors = [was.tensor for was in known.values()]
        self._addresses = [was.address for was in known.values()]
        self._are_at = (are_at or _are_at)(self.tensors)
        self._are_as_now = are_as_now(self.tensors) if are_as_now is not None and self.tensors else None
        #: Dicts that were empty, and lengths of what cannot be asked so.
        self._empty: list[Any] = []
        self._sized: list[Any] = []
        self._lengths: list[int] = []
        self._ordered: list[Any] = []
        self._orders: list[list[Any]] = []
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
            elif key is ORDER and type(holder) is dict and all(type(name) is str for name in was):
                self._ordered.append(holder)
                self._orders.append(list(was))
            elif was is GONE or key is LENGTH or _is_asked_alone(key):
                self._others.append((holder, key, was))
            elif key is not ITSELF:
                named = isinstance(key, Slot) or key is ATTRIBUTES
                getter = object.__getattribute__ if named else cell_contents if key is CELL else getter_of(holder)
                by_getter.setdefault(getter, []).append(index)
        for getter, places in by_getter.items():
            holders, known = [self._direct[index][0] for index in places], [weres[index] for index in places]
            keys = [self._direct[index][1] for index in places]
            if getter is cell_contents:
                self._cells, self._in_cells = holders, known
            else:
                keys = [key.name if isinstance(key, Slot) else "__dict__" if key is ATTRIBUTES else key for key in keys]
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
            if self._ordered and list(map(list, self._ordered)) != self._orders:
                return True
            if not all(map(operator.is_, map(type, self._objects), self._classes)):
                return True
            if not all(map(operator.is_, map(code_of, self._functions), self._codes)):
                return True
            if self._absent:
                sizes = [len(space) for space, _, _ in self._absent]
                if sizes != self._sizes:
                    if not all(map(_holds, self._absent)):
                        return True
                    self._sizes = sizes
            if self._others and not all(map(_holds, self._others)):
                return True
            if not self._cells or all(map(operator.is_, map(cell_contents, self._cells), self._in_cells)):
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
