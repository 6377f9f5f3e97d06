"""What runs the calls of one function in one mode, and what every kind of it has in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from threading import Lock, local
from typing import Any, Final, Protocol

from gpu_timed.errors import ModeError
from gpu_timed.mode_values import EAGER, Ran
from gpu_timed.site import Site


class _Inside(local):
    depth = 0


inside: Final = _Inside()
"""How many calls this thread is in that are being watched or captured for a CUDA Graph."""
INSIDE: Final = "inside the CUDA Graph of another site"


class Passing(Exception):  # noqa: N818 - a cause, not a fault
    """Why something cannot be done now, and may be the next time."""


class Ground:
    """What the captures of one process share: they are made one at a time, each on a stream that is nobody else's."""

    def __init__(self) -> None:
        #: Held for the length of a capture by whoever gets it at once.
        self.lock = Lock()
        self._streams: dict[int, list[int]] = {}

    def free_stream(self, index: int) -> int | None:
        """Return a stream of device *index* that was given back, if there is one."""
        try:
            return self._streams[index].pop()
        except (KeyError, IndexError):
            return None

    def give_back(self, index: int, stream: int) -> None:
        """Let others have *stream*, whose pool is gone. Torch keeps a workspace for each: a new one is another."""
        self._streams.setdefault(index, []).append(stream)


class Notes(Protocol):
    """What a launcher tells and asks the process: :class:`gpu_timed.modes.choice.Switch`."""

    ground: Ground

    def note(self, name: str, mode: str, why: str) -> None:
        """Count it, and say it once."""
        ...

    def fault(self, kind: str, error: BaseException) -> None:
        """Count a fault of gpu_timed's own."""
        ...

    def cold(self, what: str, duration_ns: int, /) -> None:
        """Take note that something was prepared in this call, so that it is no warm one."""
        ...

    def relaxed(self) -> AbstractContextManager[None]:
        """Return a context in which this thread's waiting cannot break another thread's graph capture."""
        ...


class Launcher:
    """Runs calls of *function* in *mode*."""

    def __init__(self, function: Callable[..., Any], site: Site, mode: Any, notes: Notes) -> None:
        self.function = function
        self.name = site.name  # not the site, which holds this
        self.mode: Any = mode  # Compile or CudaGraph
        self.notes = notes
        self.asked = Ran(mode.name, mode.name)

    def run(self, opened: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Call the function, and tell *opened*, the call's span or None, what ran."""
        raise NotImplementedError

    def eagerly(self, opened: Any, arguments: tuple[Any, ...], named: Mapping[str, Any], why: str) -> Any:
        """Call the function as it is, and say *why*.

        Raises:
            ModeError: The mode is ``strict``.
        """
        self.tell(opened, EAGER.name, why)
        return self.function(*arguments, **named)

    def tell(self, opened: Any, ran: str, why: str) -> None:
        """Tell *opened* that *ran* is how the call was launched.

        Raises:
            ModeError: The mode is ``strict``, and *ran* another.
        """
        asked = self.asked
        if ran == asked.mode and not why:
            if opened is not None:
                opened.ran = asked
            return
        if ran != asked.mode:
            self.notes.note(self.name, asked.mode, why)
        if opened is not None:
            opened.ran = Ran(ran, asked.mode, why)
        if ran != asked.mode and self.mode.strict:
            raise ModeError(f"{self.name} cannot run as {asked.mode}: {why}.")
