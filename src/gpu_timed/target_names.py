"""The words of ``GPU_TIMED_TARGETS``: ``pkg.mod:infer,pkg.mod:Model.forward[sync=deferred,every=10]``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gpu_timed.errors import ConfigurationError, unknown_value
from gpu_timed.site import Site

_OPTIONS: Final = ("every", "late", "mode", "name", "sync", "work")
_ATTRIBUTES: Final = "attributes."
_EXAMPLE: Final = "pkg.mod:infer or pkg.mod:Model.forward[sync=deferred,every=10]"


@dataclass(frozen=True, slots=True)
class Target:
    """One thing to be timed, by name."""

    text: str
    """As it was written, without options."""
    module: str
    """Module that holds it."""
    path: tuple[str, ...]
    """Names from the module to the function."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of :func:`gpu_timed.gpu_timed`."""


def parse_targets(text: str) -> tuple[Target, ...]:
    """Read ``module:name[option=value,…]``, several of them with commas (or line ends) between.

    The options are ``name``, ``sync``, ``late``, ``every``, ``mode``, ``work=count``, and ``attributes.KEY``
    for an attribute whose value is a text. A value has no comma and no bracket in it.

    Raises:
        ConfigurationError: A part cannot be read; the message names it and says how it is meant.
    """
    found = tuple(_parse(part) for part in _parts(text) if part)
    for index, target in enumerate(found):
        if target.text in (other.text for other in found[:index]):
            raise ConfigurationError(f"target {target.text!r} is named twice: leave one out.")
    return found


def _parts(text: str) -> Iterator[str]:
    """Split at the commas and line ends that stand outside of brackets."""
    depth, part = 0, ""
    for sign in text:
        depth += (sign == "[") - (sign == "]" and depth > 0)
        if sign in ",\n" and (depth == 0 or sign == "\n"):
            yield part.strip()
            part, depth = "", 0
        else:
            part += sign
    yield part.strip()


def _parse(text: str) -> Target:
    names, bracket, rest = (piece.strip() for piece in text.partition("["))
    try:
        module, path = _names(names)
        options = _options(_inside(rest)) if bracket else {}
        Site(options.get("name", "any"), **{name: value for name, value in options.items() if name != "name"})
    except ConfigurationError as error:  # a bad value is refused by the site, as it would be when decorating
        raise ConfigurationError(f"target {text!r} cannot be used: {error}") from None
    return Target(names, module, path, options)


def _inside(rest: str) -> str:
    """Return what stands in the brackets whose beginning is gone already."""
    inside, bracket, after = rest.rpartition("]")
    if not bracket:
        raise ConfigurationError("its [ has no ].")
    if after:
        raise ConfigurationError(f"{after.strip()!r} stands after its ]: a comma goes between two targets.")
    return inside


def _names(names: str) -> tuple[str, tuple[str, ...]]:
    module, colon, path = (part.strip() for part in names.partition(":"))
    if not colon:
        front, _, last = names.rpartition(".")
        meant = f"{front}:{last}" if front and last else f"module:{names or 'function'}"
        raise ConfigurationError(f"a colon goes between the module and the function: did you mean {meant!r}?")
    if module.endswith(".py") or "/" in module:
        raise ConfigurationError(
            f"{module!r} is a file: name the module as it is imported, or __main__ for the script that is run."
        )
    for what, whole in (("module", module), ("function or method", path)):
        if not whole or not all(name.isidentifier() for name in whole.split(".")):
            raise ConfigurationError(f"{whole!r} is not the name of a {what}. Write it like {_EXAMPLE}.")
    return module, tuple(path.split("."))


def _options(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    attributes: dict[str, str] = {}
    seen: set[str] = set()
    for part in text.split(","):
        if not part.strip():
            continue
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ConfigurationError(f"option {part.strip()!r} has no value: write option=value, like sync=deferred.")
        if "[" in value or "]" in value:
            raise ConfigurationError(f"option {part.strip()!r} has a bracket in it, which a value cannot have.")
        if name in seen:
            raise ConfigurationError(f"option {name!r} is given twice.")
        seen.add(name)
        if name.startswith(_ATTRIBUTES) and name != _ATTRIBUTES:
            attributes[name.removeprefix(_ATTRIBUTES)] = value
        elif name not in _OPTIONS:
            raise unknown_value("option", name, (*_OPTIONS, f"{_ATTRIBUTES}KEY"))
        else:
            found[name] = _whole_number(value) if name == "every" else value
    return {**found, "attributes": attributes} if attributes else found


def _whole_number(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigurationError(f"every={value} is no whole number: every=10 records one call in ten.") from None
