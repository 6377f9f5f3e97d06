"""Outputs held against each other: whatever is nested, down to tensors, arrays and numbers.

Of the runtimes nothing is known here: a leaf file for each kind of array copies and compares
(:mod:`~gpu_timed.measure.torch_arrays`, :mod:`~gpu_timed.measure.numpy_arrays`), and is asked only about what exists.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from gpu_timed.arms import Agreement
from gpu_timed.measure.difference import Difference
from gpu_timed.record import NOT_SET, Missing

_MOST_DEPTH: Final = 50
_MOST_LEAVES: Final = 100_000
_NUMBERS: Final = (int, float, complex)
_TOLERANCE: Final = 1e-7
_PLAIN: Final = (str, bytes, bool, type(None))


class Leaf(NamedTuple):
    """Something that is not taken apart any further, and where it stands."""

    where: str
    value: Any


def leaves(value: Any, where: str = "", depth: int = 0) -> Iterator[Leaf]:
    """Take *value* apart: mappings, tuples, lists, dataclasses."""
    if depth < _MOST_DEPTH:
        if isinstance(value, Mapping):
            for key in list(value):
                yield from leaves(value[key], f"{where}[{key!r}]", depth + 1)
            return
        if isinstance(value, tuple | list):
            for index, part in enumerate(value):
                yield from leaves(part, f"{where}[{index}]", depth + 1)
            return
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for each in dataclasses.fields(value):
                yield from leaves(getattr(value, each.name, None), f"{where}.{each.name}", depth + 1)
            return
    yield Leaf(where, value)


def arrays_of(value: Any) -> Any:
    """Return the leaf file that knows *value*; None for what is no array."""
    torch: Any = sys.modules.get("torch")
    tensor: Any = getattr(torch, "Tensor", None)
    if tensor is not None and isinstance(value, tensor):
        return importlib.import_module("gpu_timed.measure.torch_arrays")
    kind = type(value)
    if hasattr(kind, "dtype") and hasattr(kind, "shape") and (hasattr(kind, "__array__") or hasattr(kind, "get")):
        return importlib.import_module("gpu_timed.measure.numpy_arrays")
    return None


def kept(result: Any) -> list[Leaf]:
    """Return the leaves of *result*, with copies of its arrays: the next call may overwrite them."""
    found = []
    for leaf in leaves(result):
        arrays = arrays_of(leaf.value)
        found.append(leaf if arrays is None else Leaf(leaf.where, arrays.copied(leaf.value)))
        if len(found) >= _MOST_LEAVES:
            break
    return found


def agreement(expected: list[Leaf], result: Any, tolerance: float | None = None) -> Agreement:
    """Hold *result* against what was *expected*, of the same inputs.

    Args:
        expected: As :func:`kept` returns it.
        result: What another call gave.
        tolerance: Part of a number, and of the usual size of its array, by which it may differ; None for that of its
            type of number.
    """
    found: list[Leaf] = []
    for leaf in leaves(result):
        found.append(leaf)
        if len(found) >= _MOST_LEAVES:
            break
    if [leaf.where for leaf in expected] != [leaf.where for leaf in found]:
        text = f"{len(found)} outputs nested otherwise than the {len(expected)} that were expected"
        return Agreement(equal=False, text=text)
    most_abs = most_rel = 0.0
    exact, numbers, opaque = True, False, 0
    first: tuple[str, str] | None = None
    for mine, other in zip(expected, found, strict=True):
        difference = _difference(mine.value, other.value, tolerance)
        if difference is None:
            opaque += 1
            continue
        numbers = numbers or not isinstance(mine.value, _PLAIN)
        exact = exact and difference.exact
        most_abs, most_rel = _larger(most_abs, difference.max_abs), _larger(most_rel, difference.max_rel)
        if difference.text and first is None:
            first = mine.where or "the output", difference.text
    words = _words(first, most_abs, len(found) - opaque, opaque, exact=exact)
    shown: tuple[float | Missing, float | Missing] = (most_abs, most_rel) if numbers else (NOT_SET, NOT_SET)
    return Agreement(
        equal=first is None,
        exact=exact and first is None,
        max_abs=shown[0],
        max_rel=shown[1],
        where=first[0] if first is not None else "",
        text=words,
    )


def _words(first: tuple[str, str] | None, most_abs: float, compared: int, opaque: int, *, exact: bool) -> str:
    left = f"; {opaque} of an opaque type were not compared" if opaque else ""
    if first is not None:
        return f"{first[0]}: {first[1]}{left}"
    if compared == 0:
        return f"there was nothing to compare{left}"
    return f"{'equal to the bit' if exact else f'equal within tolerance (by up to {most_abs:.3g})'}{left}"


def _larger(one: float, other: float) -> float:
    return other if math.isnan(other) or other > one else one


def _difference(expected: Any, found: Any, tolerance: float | None) -> Difference | None:
    """Return how two leaves differ; None for what cannot be compared."""
    arrays = arrays_of(expected)
    if arrays is not None:
        if arrays_of(found) is not arrays:
            return Difference(f"a {type(found).__name__} in place of a {type(expected).__name__}", exact=False)
        held: Difference = arrays.difference(expected, found, tolerance)
        return held
    if isinstance(expected, _PLAIN) or isinstance(found, _PLAIN):
        same = type(expected) is type(found) and expected == found
        return Difference("" if same else f"{found!r:.80} in place of {expected!r:.80}", exact=same)
    if isinstance(expected, _NUMBERS) and isinstance(found, _NUMBERS):
        return _of_numbers(expected, found, tolerance)
    if type(expected) is not type(found):
        return Difference(f"a {type(found).__name__} in place of a {type(expected).__name__}", exact=False)
    return None


def _of_numbers(expected: complex, found: complex, tolerance: float | None) -> Difference:
    if expected == found or (expected != expected and found != found):  # noqa: PLR0124 - NaN
        return Difference("")
    apart = abs(found - expected)
    rel = apart / abs(expected) if expected else math.inf
    whole = isinstance(expected, int) and isinstance(found, int)
    allowed = _TOLERANCE if tolerance is None else tolerance
    near = not whole and apart <= allowed * max(abs(expected), abs(found))
    return Difference("" if near else f"{found!r} in place of {expected!r}", float(apart), float(rel), exact=False)
