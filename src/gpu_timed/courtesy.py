"""How a background thread lets go of the interpreter, so that callers need not wait for it."""

from __future__ import annotations

import time
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
