"""What a probe is: something that tells the ring, installed once its runtime has been imported."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol

from gpu_timed.ports import Lasting
from gpu_timed.record import NOT_SET, Measured, Tier

MARK: Final = "__gpu_timed_probe__"
Detach = Callable[[], None]


class Tell(Protocol):
    """:meth:`gpu_timed.warmth.ring.Ring.emit`, made so that it never raises into a compiler."""

    def __call__(
        self,
        what: str,
        tier: Tier,
        duration_ns: Measured = NOT_SET,
        detail: str = "",
        *,
        lasting: Lasting | None = None,
        undone: Sequence[Lasting] = (),
    ) -> None:
        """Take note of something that has just ended on this thread.

        With *lasting* it holds for later calls as well; what is *undone* holds no more.
        """
        ...


class Probe(NamedTuple):
    """One hook into one runtime."""

    name: str
    """Under which its causes appear."""
    module: str
    """The module that owns what is hooked."""
    attach: Callable[[ModuleType, Tell], Detach]
    """Hook into the module; returns what undoes it. Raises AttributeError where this version has no such hook."""
    needed: bool = True
    """Whether a call may be called warm without it."""
    in_use: str = ""
    """The module that is loaded where the runtime is in use, if versions without the hook have not the module above."""


def replace(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> Detach:
    """Put ``make(original)`` in the place of *owner*'s attribute *name*, once.

    Returns what puts the original back, if nobody has put another there meanwhile.

    Raises:
        AttributeError: *owner* has no such attribute.
    """
    original = getattr(owner, name)
    if getattr(original, MARK, False):
        return lambda: None
    ours = functools.wraps(original)(make(original))
    setattr(ours, MARK, True)
    held = vars(owner).get(name)
    of_class = isinstance(held, classmethod | staticmethod)  # then *original* is bound already
    setattr(owner, name, staticmethod(ours) if of_class else ours)

    def undo() -> None:
        if getattr(owner, name, None) is ours:
            setattr(owner, name, held if of_class else original)

    return undo
