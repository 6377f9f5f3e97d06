"""How a background thread lets go of the interpreter, so that callers need not wait for it; and how it is woken."""

from __future__ import annotations

import contextlib
import time
from queue import Empty, SimpleQueue
from typing import Final

_CALM: Final = 256
_SPANS_A_STEP: Final = 32


class Courtesy:
    """Lets go after each step of work, or a caller that wants the interpreter waits for 5 ms until it is taken away.

    To get it back from a caller that computes takes 5 ms as well: more rarely, therefore, as the queue grows.
    """

    def __init__(self) -> None:
        self._steps = 0

    def after_a_step(self, queued: int) -> None:
        """Let go now, if it is time for it with *queued* spans waiting."""
        self._steps += 1
        if self._steps % (1 + max(0, queued - _CALM) // _SPANS_A_STEP) == 0:
            time.sleep(0)


class Bell:
    """Wakes a thread that waits for it, as an event does, and can be rung at any moment.

    An event is Python: an interrupt, or a signal's handler that sets it too, may come while its inner lock is held, and
    whoever sets it after that waits for ever. This one takes its lock in C, where nothing comes in between.
    """

    def __init__(self) -> None:
        self._rung: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """Wake the thread, or have its next wait end at once."""
        if self._rung.empty():
            self._rung.put(None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is rung, at most *timeout_s* seconds; returns whether it was. The next wait begins anew."""
        try:
            self._rung.get(timeout=None if timeout_s is None else max(0.0, timeout_s))
        except Empty:
            return False
        return True

    def clear(self) -> None:
        """Forget that it was rung."""
        with contextlib.suppress(Empty):
            while True:
                self._rung.get_nowait()
