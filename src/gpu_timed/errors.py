"""The errors gpu_timed raises, one family.

GpuTimedError
├── ConfigurationError   an option or a setting that cannot be used (also a ValueError)
├── NotCallableError     a decorator put on something that cannot be called (also a TypeError)
├── MissingExtraError    a feature whose optional package is not installed (also an ImportError)
├── UnknownArmError      a comparison has no arm of that name (also a KeyError)
├── ModeError            a mode that cannot be honoured, where ``strict`` asks for it (also a RuntimeError)
├── WaitTimeout          a record that was not there in time (also a TimeoutError)
└── DeviceFault          the device answered with an error while gpu_timed asked it something

Each message says what was wrong and which change mends it. None of them but ModeError, which has to be
asked for, is ever raised out of a decorated call: they come from decorating, configuring, waiting.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GpuTimedError(Exception):
    """Base of every error that gpu_timed raises."""


class ConfigurationError(GpuTimedError, ValueError):
    """An option or a setting has a value that cannot be used."""


class NotCallableError(GpuTimedError, TypeError):
    """Something that cannot be called was decorated."""


class MissingExtraError(GpuTimedError, ImportError):
    """A feature was asked for whose optional package is not installed."""


class UnknownArmError(GpuTimedError, KeyError):
    """A comparison was asked for an arm that it does not have."""

    def __str__(self) -> str:
        """Return the message: a KeyError would show its repr."""
        return str(self.args[0]) if self.args else ""


class ModeError(GpuTimedError, RuntimeError):
    """A call cannot be launched in the mode that was asked for, and ``strict=True`` says not to run it otherwise."""


class WaitTimeout(GpuTimedError, TimeoutError):  # noqa: N818 - reads as what happened, like TimeoutError's own kin
    """A record was not resolved within the time the caller gave."""


class DeviceFault(GpuTimedError):  # noqa: N818 - the CUDA documentation's own word for a sticky error
    """The device answered with an error, most often one that earlier work caused.

    Kept inside: it becomes the status of a span and is never raised at the user.
    """


def unknown_value(what: str, value: object, known: Iterable[str]) -> ConfigurationError:
    """Build the error for a word that is not among the *known* ones, naming the nearest."""
    choices = sorted(known)
    given = str(value).lower()
    near = difflib.get_close_matches(given, choices, n=1) or [
        word for word in choices if given and word.startswith(given)
    ]
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return ConfigurationError(f"unknown {what} {value!r}{hint} Use one of: {', '.join(map(repr, choices))}.")


def missing_extra(feature: str, package: str, extra: str) -> MissingExtraError:
    """Build the error for an optional *package* that *feature* needs, naming the pip command."""
    return MissingExtraError(
        f"{feature} needs {package}. Install it with:\n    pip install 'gpu-timed[{extra}]'\n"
        f"or by itself:\n    pip install {package}"
    )
