"""Counting a call's operations once for each input signature, and knowing it again by the signature.

The signature is what work depends on in ordinary code: shapes and dtypes of tensors, whole numbers, texts and
flags, wherever they stand in the arguments. Modules are told apart by identity: their sizes stay. Plain numbers
with a fraction (a temperature, a learning rate) do not count.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Mapping
from typing import Any, Final

from gpu_timed.callables import modules
from gpu_timed.ports import Counting
from gpu_timed.record import Missing
from gpu_timed.site import BEYOND, MOST_SIGNATURES
from gpu_timed.work import Work

MOST_FAILURES: Final = 16
"""Calls of a site that may come to no count before each further one is the last of its signature."""
_FAILED: Final = "failed"
_MOST_PARTS: Final = 512
_DEEPEST: Final = 6

_TOO_MANY: Final = Missing("not_counted", f"more than {MOST_SIGNATURES} input signatures: give work= a function")
_NOT_TOLD: Final = Missing("not_counted", "the arguments are too large to tell calls apart: give work= a function")
_NO_TORCH: Final = Missing("not_counted", "torch is not loaded, whose operations are what can be counted")
_PLAIN: Final = frozenset({int, bool, str, bytes, type(None)})


class Counter:
    """See :class:`~gpu_timed.ports.WorkCounter`."""

    def begin(
        self, counted: dict[Any, Any], arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Work | Missing | Counting:
        """Return what was counted of such a call, or begin to count on this thread."""
        if "torch" not in sys.modules:
            return _NO_TORCH
        signature = signature_of(arguments, named)
        if signature is None:
            return _NOT_TOLD
        key, held = signature
        known = counted.get(key)
        if known is not None and all(one() is not None for one in known[1]):
            found: Work | Missing = known[0]
            return found
        if known is None and len(counted) >= MOST_SIGNATURES:
            counted[BEYOND] = counted.get(BEYOND, 0) + 1
            return _TOO_MANY
        leaf = importlib.import_module("gpu_timed.callables.torch_flops")
        why_not: Missing | None = leaf.why_not()
        if why_not is not None:
            return why_not
        return _Keeping(leaf.TorchCounting(), counted, key, held)


class _Keeping:
    """A count whose result is kept for the calls that come."""

    def __init__(self, inner: Counting, counted: dict[Any, Any], key: Any, held: tuple[weakref.ref[Any], ...]) -> None:
        self._inner = inner
        self._counted = counted
        self._key = key
        self._held = held

    def stop(self, spoilt: Missing | None) -> Work | Missing:
        """End the count, and keep it unless the call came to no ordinary end."""
        found = self._inner.stop(spoilt)
        if spoilt is None:
            self._counted[self._key] = found, self._held
        else:  # a call that always ends so must not be slowed down for ever
            tries = self._counted[_FAILED] = self._counted.get(_FAILED, 0) + 1
            if tries >= MOST_FAILURES:
                self._counted[self._key] = spoilt, self._held
        return found


def signature_of(
    arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], tuple[weakref.ref[Any], ...]] | None:
    """Return what tells a call's work from others', and the modules it holds for; None if that is too much.

    Nothing is read from a device, and no tensor is kept.
    """
    parts: list[Any] = []
    held: list[weakref.ref[Any]] = []
    for value in arguments:
        if not _add(parts, held, value, 0):
            return None
    for name in sorted(named) if named else ():
        parts.append(name)
        if not _add(parts, held, named[name], 0):
            return None
    parts.append(len(arguments))  # else a keyword could pass for an argument
    return tuple(parts), tuple(held)


def _add(parts: list[Any], held: list[weakref.ref[Any]], value: Any, depth: int) -> bool:
    """Add what tells *value* from others; returns whether there was room."""
    kind = type(value)
    if len(parts) >= _MOST_PARTS or depth > _DEEPEST:
        return False
    if kind in _PLAIN:
        parts.append((kind, value))
        return True
    if kind is list or kind is tuple:
        parts.append((kind, len(value)))
        return all(_add(parts, held, part, depth + 1) for part in value)
    own = getattr(value, "__dict__", {})
    if "_parameters" in own and modules.is_module(value):  # before it is asked for a shape, which it is slow to deny
        parts.append((kind, id(value), value.training))
        held.append(weakref.ref(value))
        return True
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        parts.append((kind, tuple(shape), dtype))
        return True
    parts.append(kind)
    inside: Any = ()
    if isinstance(value, Mapping):
        inside = [part for item in value.items() for part in item]
    elif isinstance(value, tuple | list | set | frozenset):
        inside = value
    elif not callable(value):
        inside = [part for item in own.items() for part in item]
        inside += [getattr(value, name, None) for name in getattr(kind, "__slots__", ()) if name != "__weakref__"]
    parts.append(len(inside))
    return all(_add(parts, held, part, depth + 1) for part in inside)
