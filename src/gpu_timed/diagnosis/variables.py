"""The effective settings, where each came from, and ``GPU_TIMED_*`` variables that mean nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Final

from gpu_timed.errors import ConfigurationError
from gpu_timed.findings import Finding
from gpu_timed.settings import READ_ELSEWHERE, Settings, from_environment

PREFIX: Final = "GPU_TIMED_"
_DEFAULTS: Final = Settings()


def findings(environment: Mapping[str, str], held: Settings | None) -> Iterator[Finding]:
    """Report every setting and its origin.

    Args:
        environment: The process's variables.
        held: The settings in force, where the process has any yet; else they are read from *environment*.
    """
    known = {f"{PREFIX}{field.name.upper()}": field.name for field in fields(Settings)}
    for variable, name in known.items():
        yield _one(variable, name, environment, held)
    for variable, text in sorted(environment.items()):
        if variable.startswith(PREFIX) and variable not in known and variable not in READ_ELSEWHERE:
            # Without the prefix, which would make any two of them alike.
            names = {other.removeprefix(PREFIX): other for other in known}
            near = [names[name] for name in difflib.get_close_matches(variable.removeprefix(PREFIX), names, n=1)]
            yield Finding(
                f"unknown.{variable}",
                "warning",
                f"{variable} is no setting of gpu_timed and is ignored",
                f"did you mean {near[0]}={text}?" if near else f"unset {variable}",
                {"variable": variable, "near": near[0] if near else None},
            )


def _one(variable: str, name: str, environment: Mapping[str, str], held: Settings | None) -> Finding:
    text = environment.get(variable)
    origin, value, fault = "default", getattr(_DEFAULTS, name), ""
    if text is not None and text.strip():
        try:
            value = getattr(from_environment({variable: text}), name)
            origin = "variable"
        except ConfigurationError as error:
            fault = str(error)
    if held is not None and getattr(held, name) != value:
        origin, value = "configure", getattr(held, name)
    values: dict[str, Any] = {"value": value, "origin": origin, "variable": variable}
    if fault and held is None:
        return Finding(name, "problem", fault, f"correct {variable} or unset it", values)
    if name == "disabled" and value:
        return Finding(
            name,
            "warning",
            f"gpu_timed is switched off ({variable}={text}): calls run as they are, and nothing is measured",
            f"unset {variable}",
            values,
        )
    says = {"default": "the default", "variable": f"from {variable}", "configure": "set by configure()"}[origin]
    return Finding(name, "ok", f"{name} = {_shown(value)}, {says}", values=values)


def _shown(value: object) -> str:
    if value is None:
        return "not set: boundary, and deferred for coroutines"
    return str(value) or "not set"
