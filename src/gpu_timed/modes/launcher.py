"""What runs the calls of one function in one mode, and what every kind of it has in common."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from threading import Condition, RLock, local
from typing import Any, Final, Protocol

from gpu_timed.errors import ModeError
from gpu_timed.mode_values import EAGER, Ran
from gpu_timed.site import Site


class _Inside(local):
    depth = 0


inside: Final = _Inside()
"""How many calls this thread is in that are being watched or captured for a CUDA Graph."""
LONGEST_S: Final = 0.1
"""How long a capture, and a wait for a whole device, make way for one another."""


class ForNow(str):
    """Why a call runs as it is though its mode is to be honoured: nothing to raise or to log, were it strict."""

    __slots__ = ()


INSIDE: Final = ForNow("inside the CUDA Graph of another site")


class Passing(Exception):  # noqa: N818 - a cause, not a fault
    """Why something cannot be done now, and may be the next time."""


class Turn:
    """That this thread is the one that captures."""

    __slots__ = ("__weakref__",)


class Ground:
    """What the captures of one process share: they are made one at a time, each on a stream that is nobody else's.

    A wait for the whole device ends every capture that is under way, whatever its mode. So those of our own do not
    begin in the midst of one, and a capture does not begin in the midst of them; but nobody is kept for longer than
    ``LONGEST_S``, and what is broken then is tried again.
    """

    def __init__(self) -> None:
        # An exception that a signal's handler raises may come after any call, that of a method that takes a lock, too.
        # A lock of C's own that is taken by ``with`` is given back whatever comes; a condition of Python's may not be.
        self._lock = RLock()
        self._quiet = Condition(self._lock)
        self._turn: weakref.ref[Turn] | None = None
        self._waiting = 0
        self._capturing = False
        self._streams: dict[int, list[int]] = {}
        #: Whose graphs may hold communicators of other libraries.
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()

    def take_turn(self) -> Turn | None:
        """Return what is held for the length of a capture and of the call before it; None while another holds it."""
        with self._lock:
            if self._turn is not None and self._turn() is not None:
                return None
            turn = Turn()
            self._turn = weakref.ref(turn)
            return turn

    def end_turn(self) -> None:
        """Give it back. It is given back as it goes, too: by no way can it be lost."""
        self._turn = None

    @contextmanager
    def waiting(self) -> Iterator[bool]:
        """Wait for the whole device in here: no capture of another thread is under way, if that could be had.

        Yields whether one was, so that its end was awaited.
        """
        if inside.depth:  # a capture of this thread's: it would wait for itself
            yield False
            return
        quiet, counted = self._quiet, False
        try:
            with self._lock:
                was = self._capturing
                quiet.wait_for(lambda: not self._capturing, LONGEST_S)
                self._waiting += 1
                counted = True
            yield was
        finally:
            if counted:
                with self._lock:
                    self._waiting -= 1
                    quiet.notify_all()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture in here: of our own waits for a whole device none is under way.

        Raises:
            Passing: One does not end.
        """
        quiet = self._quiet
        try:
            with self._lock:
                self._capturing = True  # from now on none begins
                if not quiet.wait_for(lambda: not self._waiting, LONGEST_S):
                    raise Passing("another thread is waiting for the device")
            yield
        finally:
            with self._lock:
                self._capturing = False
                quiet.notify_all()

    def hold(self, holder: Any) -> None:
        """Take *holder* as one whose graphs may keep others waiting for their end: it has ``let_all_go()``."""
        with self._lock:
            self._holders.add(holder)

    def let_go(self) -> None:
        """Let the graphs of all of them go: they are captured anew by the next calls. Never raises."""
        with self._lock:  # not for longer: what a graph holds is freed as it goes
            holders = list(self._holders)
        for holder in holders:
            holder.let_all_go()

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
        if self.mode.strict:
            raise self.refused(opened, why)
        self.tell(opened, EAGER.name, why)
        return self.function(*arguments, **named)

    def for_now(self, opened: Any, arguments: Any, named: Any, why: str) -> Any:
        """Run the call as it is for a cause that passes: the mode is honoured later, and nothing is to be said."""
        if opened is not None:
            opened.ran = Ran(EAGER.name, self.asked.mode, why)
        return self.function(*arguments, **named)

    def cold(self, opened: Any, what: str, began_ns: int) -> None:
        """Say that this call ran eagerly on the way to a graph, which is no failure."""
        if opened is not None:
            opened.ran = Ran(EAGER.name, self.asked.mode, what)
        self.notes.cold(what, time.perf_counter_ns() - began_ns)

    def tell(self, opened: Any, ran: str, why: str) -> None:
        """Tell *opened* that *ran* is how the call was launched: it has run already.

        Raises:
            ModeError: The mode is ``strict``, and *ran* another.
        """
        asked = self.asked
        if ran == asked.mode and not why:
            if opened is not None:
                opened.ran = asked
            return
        if ran != asked.mode and not self.mode.strict:  # else the error says it
            self.notes.note(self.name, asked.mode, why)
        if opened is not None:
            opened.ran = Ran(ran, asked.mode, why)
        if ran != asked.mode and self.mode.strict:
            raise self._refusal(why)

    def refused(self, opened: Any, why: str) -> ModeError:
        """Tell *opened* that nothing ran, and return what says so to the caller."""
        if opened is not None:
            opened.ran = Ran("", self.asked.mode, why)
        return self._refusal(why)

    def _refusal(self, why: str) -> ModeError:
        return ModeError(f"{self.name} cannot run as {self.asked.mode}: {why}.")
