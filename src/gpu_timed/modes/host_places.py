"""Places on the host, known by holder and key, and whether what stands there is what stood there.

Nothing of the user's is run to ask or to compare: plain values by value, all else by identity.
"""

from __future__ import annotations

import functools
import operator
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

PLAIN: Final = (int, float, complex, bool, str, bytes, range, type(None))
_PLAIN_KINDS: Final = frozenset(map(id, PLAIN))
"""By identity: a class may say that it is equal to any."""
_VALUES: Final = (*PLAIN, tuple, frozenset)
_MOST_BYTES: Final = 1 << 16
"""Of an array of the host, say: some 3 µs to compare. What is in a larger one is not looked at."""
_MOST_NESTED: Final = 8
BUILT_IN: Final = (OrderedDict, dict, list, tuple, set, frozenset, deque)
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
    """A tensor that stood there, the address that it had, and how it lay there: :func:`_lies`."""

    tensor: Any
    address: int
    lay: Any

    @classmethod
    def of(cls, tensor: Any) -> WasTensor:
        """Return what *tensor* is now."""
        return cls(tensor, tensor.data_ptr(), _lies(tensor))

    def is_alike(self, tensor: Any) -> bool:
        """Return whether *tensor*, it or another, is where it was, and lies there as it did."""
        return bool(tensor.data_ptr() == self.address and _lies(tensor) == self.lay)


def _lies(tensor: Any) -> Any:
    """Return the shape, strides and dtype of *tensor*, each of which an operation may change in place."""
    try:
        return tensor.shape, tensor.stride(), tensor.dtype
    except (RuntimeError, AttributeError, TypeError):
        return None  # a sparse one has no strides


def _built_in(holder: Any) -> Any:
    """Return the container that *holder* is, of whose methods none is the user's."""
    return next((kind for kind in BUILT_IN if issubclass(type(holder), kind)), None)


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


cell_contents: Final = operator.attrgetter("cell_contents")
LENGTH: Final = Special("'s length", _length)
ORDER: Final = Special("'s order", lambda holder: tuple(members(holder)))
"""Which keys a dict has, one after another."""
VALUES: Final = Special("'s values", lambda holder: tuple(dict.values(holder)))
"""In place of each by its key, where to look for that would be to run code of the user's: a hash."""
code_of: Final = operator.attrgetter("__code__")
CODE: Final = Special("'s code", code_of)
"""What reloads a module as it is edited puts other code into the functions that there are."""
CELL: Final = Special("", cell_contents)
CONTENTS: Final = Special("'s contents", _contents)
ITSELF: Final = Special("", lambda holder: holder)
CLASS: Final = Special("'s class", type)
ATTRIBUTES: Final = Special("'s __dict__", lambda holder: object.__getattribute__(holder, "__dict__"))
GONE: Final = object()
"""In place of what does not stand there."""


def is_array(value: Any) -> bool:
    """Return whether *value* is an array of NumPy's, or of bytes, whose contents are to be compared."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, _OF_PYTHON) or (numpy is not None and isinstance(value, getattr(numpy, "ndarray", ())))


def get(holder: Any, key: Any) -> Any:
    """Return what stands there, or something that is nothing else."""
    try:
        return key.get(holder) if isinstance(key, Special) else getter_of(holder)(holder, key)
    except (ValueError, LookupError, AttributeError, TypeError, RuntimeError):
        return GONE


def same(value: Any, was: Any, depth: int = 0) -> bool:
    """Return whether *value* is what was there."""
    if type(was) is WasTensor:
        return value is was.tensor and was.is_alike(value)
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


def getter_of(holder: Any) -> Callable[[Any, Any], Any]:
    """Return what asks *holder* for a key, and runs no method of a class of the user's."""
    for kind in (dict, list, tuple, deque):
        if issubclass(type(holder), kind):
            return kind.__getitem__
    return operator.getitem
