"""One way to run the function: as it is, or by a launcher of a mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gpu_timed.mode_values import EAGER, Compile, Eager, Mode, Ran
from gpu_timed.modes.compiled import Compiled
from gpu_timed.modes.graphed import Graphed
from gpu_timed.modes.launcher import Launcher, Notes
from gpu_timed.site import Site

AS_GIVEN: Final = "as_given"
"""The mode of an arm that is a function of its own."""


def name_of(function: Any) -> str:
    """Return what *function* is called, or its class."""
    return getattr(function, "__name__", None) or type(function).__name__


class Unsaid:
    """The *notes* of the process, but for one thing: how an arm did not run is left to the comparison.

    It is neither logged nor counted.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def note(self, name: str, mode: str, why: str) -> None:
        """Leave it to the comparison."""

    def __getattr__(self, name: str) -> Any:
        """Leave everything else to the process."""
        return getattr(self._notes, name)


class _Opened:
    """Stands for a span: it is told what ran."""

    ran: Ran | None = None


class Contestant:
    """Calls *function* in *mode*.

    Args:
        name: Of the arm.
        function: What is called.
        mode: How; None for a function that is an arm by itself.
        notes: :class:`Unsaid`, of the process; not needed for what no launcher runs.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        mode: Mode | None,
        notes: Any = None,
    ) -> None:
        self.name = name
        self.function = function
        self.mode = AS_GIVEN if mode is None else mode.name
        self._opened = _Opened()
        self._launcher: Launcher | None = None
        self.call: Callable[..., Any] = function
        if mode is not None and notes is not None and not isinstance(mode, Eager):
            kind: type[Launcher] = Compiled if isinstance(mode, Compile) else Graphed
            self._launcher = launcher = kind(function, Site(name_of(function)), mode, notes)
            opened = self._opened
            if isinstance(launcher, Compiled):
                launcher.load()

            def call(*arguments: Any, **named: Any) -> Any:
                return launcher.run(opened, arguments, named)

            self.call = call

    @property
    def ran(self) -> Ran:
        """How the last call was launched."""
        if self._launcher is None:
            as_it_is = AS_GIVEN if self.mode == AS_GIVEN else EAGER.name
            return Ran(as_it_is, self.mode)
        return self._opened.ran or Ran(EAGER.name, self.mode, "not called yet")

    def close(self) -> None:
        """Let go of graphs and compiled code."""
        self._launcher, self.call = None, self.function


Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
