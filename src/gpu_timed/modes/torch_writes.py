"""Which dicts were written to, told without looking into them.

Torch counts writes to dicts, for Dynamo's guards: from Python 3.12 on as a watcher of the interpreter's
(``PyDict_Watch``), of those it was asked about; before that the interpreter itself keeps a number with each dict.
There is one counter for all. So where a write of our own gets the number next to that of the one before, nothing was
written in between to any dict that is watched: one question for all of them.

Not counted is that an empty dict takes over the parts of another (``PyDict_EVENT_CLONED``): ask those themselves.

Private, versions seen 2.6 to 2.13: ``torch._C._dynamo.guards.dict_version``. Whether it does what is said here is
tried out once, and it is not used where it does not.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from threading import RLock
from typing import Any, Final

import torch

_MOST_TRIED: Final = 100
"""Writes by one piece of code, after which the interpreter has put what is made for such dicts in its place."""


class Count:
    """The writes to dicts that *version* is asked about.

    Args:
        version: Returns a number that is another one after each write to a dict.
    """

    def __init__(self, version: Callable[[dict[Any, Any]], int]) -> None:
        self._version = version
        self._lock = RLock()  # a finalizer or a signal handler may come to it in the midst of it
        self._ours = {0: False}
        self._next = -1
        self._moment = object()

    def moment(self) -> object:
        """Return the same object as the last time, if no dict that it is asked about was written to since."""
        with self._lock:
            ours = self._ours
            ours[0] = not ours[0]
            number = self._version(ours)
            if number != self._next:
                self._moment = object()
            self._next = number + 1
            return self._moment

    def numbers(self, dicts: list[dict[Any, Any]]) -> list[int]:
        """Return the number of each."""
        return list(map(self._version, dicts))


class Writes:
    """Tells which of *dicts* were written to since it was said that they are well. At first all of them.

    Some 0.2 µs where none was, of any that is watched in the process; else 40 ns for each.
    """

    def __init__(self, dicts: list[dict[Any, Any]], count: Count) -> None:
        self._dicts = dicts
        self._count = count
        self._moment: object = None
        self._numbers: list[int] = [-1] * len(dicts)
        self._seen: tuple[object, list[int]] = None, self._numbers

    def look(self) -> list[int]:
        """Return the positions of those that were written to."""
        moment = self._count.moment()
        if moment is self._moment:
            return []
        numbers = self._count.numbers(self._dicts)  # after the moment: what comes in between is seen the next time
        if numbers == self._numbers:
            self._moment = moment
            return []
        self._seen = moment, numbers
        return [place for place, pair in enumerate(zip(numbers, self._numbers, strict=True)) if pair[0] != pair[1]]

    def well(self) -> None:
        """Take what was last seen as well: what was written before that look is not told again."""
        self._moment, self._numbers = self._seen


def writes(dicts: list[dict[Any, Any]]) -> Writes | None:
    """Return what tells which of *dicts* were written to; None where torch cannot tell."""
    count = known()
    return Writes(dicts, count) if count is not None else None


@functools.cache
def known() -> Count | None:
    """Return the count of this process; None where torch has none, or it misses a write."""
    try:
        guards: Any = torch._C._dynamo.guards  # noqa: SLF001 - see the docstring
        count = Count(guards.dict_version)
        return count if does_count(count) else None
    except Exception:  # noqa: BLE001 - not in this version, or something else by that name
        return None


class _Object:
    """Something with attributes: few, which Python 3.13 keeps in the object itself, or more than it can keep there."""

    def __init__(self, more: int) -> None:
        self.__dict__.update({f"more{index}": index for index in range(more)})
        self.one = self.two = 0


def _anew(write: Callable[..., None]) -> Callable[..., None]:
    """Return a copy of *write* that the interpreter has not yet fitted to any kind of object."""
    code = write.__code__.replace()
    return types.FunctionType(code, globals(), write.__name__)


def _by_attribute(made: Any, value: int) -> None:
    made.one = value


def _another(made: Any, value: int) -> None:
    made.three = value
    del made.three


def _by_name(made: Any, value: int) -> None:
    setattr(made, "two", value)  # noqa: B010 - another way into the interpreter than the assignment


def _put(held: dict[Any, Any], value: int) -> None:
    held["one"] = value


def _update(held: dict[Any, Any], value: int) -> None:
    held.update(two=value)


def _add_and_take(held: dict[Any, Any], value: int) -> None:
    held.setdefault("four", value)
    del held["four"]


def does_count(count: Count) -> bool:
    """Return whether *count* tells of each kind of write to a dict, and of none where there was none."""
    plain: dict[Any, Any] = {"one": 0, "two": 0}
    ordered: OrderedDict[Any, Any] = OrderedDict(plain)
    tried: list[tuple[dict[Any, Any], Callable[[int], Any]]] = []
    for made in (_Object(0), _Object(_MOST_TRIED)):
        tried += [(vars(made), functools.partial(_anew(write), made)) for write in (_by_attribute, _another, _by_name)]
        tried += [(vars(made), functools.partial(write, vars(made))) for write in (_put, _update, _add_and_take)]
    for held in (plain, ordered):
        tried += [(held, functools.partial(write, held)) for write in (_put, _update, _add_and_take)]
    for held, write in tried:
        for value in range(1, _MOST_TRIED):
            before, at = count.numbers([held]), count.moment()
            if count.numbers([held]) != before:
                return False
            write(value)
            if count.numbers([held]) == before or count.moment() is at:
                return False
    for held in (plain, ordered):
        before, at = count.numbers([held]), count.moment()
        held.clear()
        if count.numbers([held]) == before or count.moment() is at:
            return False
    return True
