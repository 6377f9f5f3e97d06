"""What an option of :func:`gpu_timed.compare` is called where it was given: in Python, or on the command line.

A message that names an option is made deep inside a comparison, and must name what the reader can type. The command
line says so around the comparison (:func:`on_the_command_line`); whoever makes a message asks here for the name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

COMMAND_LINE: Final = {
    "args": "--args-from",
    "baseline": "--baseline",
    "budget_s": "--budget",
    "by": "--by",
    "modes": "--modes",
    "outputs": "--outputs",
    "reset": "--reset",
    "seed": "--seed",
    "sweep": "--sweep",
}
"""Options of ``gpu-timed compare``, by the names of :func:`gpu_timed.compare`. It has no others of those."""
_typed: Final[ContextVar[bool]] = ContextVar("gpu_timed_options_are_typed", default=False)


@contextlib.contextmanager
def on_the_command_line() -> Iterator[None]:
    """Call options by the names of the command line for the length of the block, in this context."""
    token = _typed.set(True)
    try:
        yield
    finally:
        _typed.reset(token)


def called(option: str) -> str:
    """Return the name of *option*: ``budget_s``, or ``--budget``."""
    return COMMAND_LINE.get(option, option) if _typed.get() else option


def given(option: str, value: str | tuple[str, ...] = "") -> str:
    """Return how *option* is given: ``by='wall'``, or ``--by wall``; without a *value* ``reset=``, or ``--reset``."""
    if not _typed.get() or option not in COMMAND_LINE:
        return f"{option}={value!r}" if value else f"{option}="
    text = value if isinstance(value, str) else ",".join(value)
    return f"{COMMAND_LINE[option]} {text}".rstrip()
