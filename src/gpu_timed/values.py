"""What may become an attribute value: plain numbers, booleans, text, and short sequences of those.

A tensor is never turned into text: that would read it back from the device (a hidden sync) and leak
data into the trace. It is named by its shape and type instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, Final, TypeAlias

AttributeValue: TypeAlias = (
    str | bool | int | float | tuple[str, ...] | tuple[bool, ...] | tuple[int, ...] | tuple[float, ...]
)

LONGEST: Final = 4096
"""Characters of a text, and items of a sequence, that are kept."""

_PLAIN: Final = frozenset({str, bool, int, float})
_DEEPEST: Final = 2
"""Sequences inside sequences are looked into so far: one that contains itself has no end."""
_ITEMS: Final = {2: LONGEST, 1: 16}
"""Items kept by how much deeper it may go: a list of lists must not take seconds."""
_MOST_DIMENSIONS: Final = 64
_INT64: Final = 1 << 63
"""What OTLP has room for: beyond it the encoder raises, and a whole batch is lost."""


def clean(value: Any) -> AttributeValue | None:
    """Return *value* as something that can stand in a span, without touching a device.

    Numbers stay numbers (NumPy scalars too), sequences become tuples of one type, tensors and arrays
    become their type, shape and dtype, other objects their type's name. None stays None. Never raises.
    """
    kind = type(value)
    if kind is int and not -_INT64 <= value < _INT64:
        return _large(value)
    if kind in _PLAIN:
        return value if kind is not str or len(value) <= LONGEST else value[:LONGEST]  # type: ignore[no-any-return]
    if value is None:
        return None
    try:
        return _clean(value, _DEEPEST)
    except Exception:  # noqa: BLE001 - an object of the user's whose properties raise
        return _name(kind)


def _large(value: int) -> str:
    return hex(value) if value.bit_length() < LONGEST else f"int({value.bit_length()} bits)"


def _name(kind: type[Any]) -> str:
    try:
        return f"{kind.__module__}.{kind.__qualname__}"[:LONGEST]
    except Exception:  # noqa: BLE001 - a metaclass of the user's
        return "object"


def _clean(value: Any, deeper: int) -> AttributeValue | None:
    kind = type(value)
    if isinstance(value, str | bool | int | float):  # subclasses: str enums, torch.Size members, numpy.float64
        if isinstance(value, str):
            return clean(str.__str__(value))  # the text of a text enum, not its Python name
        return float(value) if isinstance(value, float) else clean(int(value))
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _array(value)
    if isinstance(value, tuple | list):
        return _sequence(value, deeper) if deeper else _name(kind)
    if isinstance(value, bytes):
        return value[:LONGEST].decode("utf-8", "replace")
    return _name(kind)


def clean_all(values: Mapping[str, Any]) -> dict[str, AttributeValue]:
    """Return *values* with each key a text and each value cleaned; None is left out, as OpenTelemetry has it."""
    found: dict[str, AttributeValue] = {}
    for key, value in values.items():
        kept = clean(value)
        if kept is not None:
            try:
                found[str(key)] = kept
            except Exception:  # noqa: BLE001, S112 - a key of the user's that has no text: it is left out
                continue
    return found


def _array(value: Any) -> AttributeValue | None:
    shape = tuple(int(size) for size in islice(value.shape, _MOST_DIMENSIONS))
    if not shape and type(value).__module__.partition(".")[0] == "numpy" and type(value).__name__ != "ndarray":
        return clean(value.item())  # a NumPy scalar lives in host memory; a 0-d tensor may not
    return f"{type(value).__name__}(shape={shape}, dtype={value.dtype})"[:LONGEST]


def _sequence(value: tuple[Any, ...] | list[Any], deeper: int) -> AttributeValue:
    items = [item for item in (_item(each, deeper - 1) for each in value[: _ITEMS[deeper]]) if item is not None]
    if not items:
        return ()
    for plain in (bool, int, float, str):
        if all(type(item) is plain for item in items):
            return tuple(items)  # type: ignore[return-value]
    if all(type(item) in (int, float) for item in items):
        return tuple(float(item) for item in items)  # type: ignore[arg-type]
    return tuple(str(item)[:LONGEST] for item in items)


def _item(value: Any, deeper: int) -> AttributeValue | None:
    if isinstance(value, tuple | list):
        try:
            return _clean(value, deeper)
        except Exception:  # noqa: BLE001 - as for any other value
            return _name(type(value))
    return clean(value)
