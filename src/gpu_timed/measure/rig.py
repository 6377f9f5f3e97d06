"""What the self-test needs of a device: kernels of known duration, and ways to be idle or busy.

A fake device passes through the same code as a real one: both are a :class:`Rig`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol

from gpu_timed.errors import GpuTimedError
from gpu_timed.trials import Stamp

STAMPS_KEPT: Final = 4096
"""Kernels whose stamps are kept on the device until they are read. A power of two."""


class NotTestable(GpuTimedError):  # noqa: N818 - reads as what was found
    """There is no way to make kernels of known duration here; the message says why."""


class Kernel(Protocol):
    """A kernel that runs for a given time and writes down when it began and ended. On torch's current stream."""

    name: str
    stamped: bool
    """Whether it stamps at all: else its duration is known from a calibration only."""

    def launch(self, duration_ns: int, stamps: Any) -> None:
        """Queue it for *duration_ns*; its stamps go behind those in *stamps*, a tensor of 64-bit integers.

        ``stamps[0]`` is how many there are, then come begin, end and cycles of each.
        """
        ...

    def read_timer(self, reads: Any) -> None:
        """Queue a kernel that fills the tensor *reads* with readings of its timer, one after the other."""
        ...


class Rig(Protocol):
    """A device to test on. Nothing but :meth:`settle` and :meth:`stamps` waits for it."""

    device: int
    """Its index."""
    cycles_per_ns: float
    """Cycles of the multiprocessor in a nanosecond, by which kernels too short for the timer are known; or 0."""

    def measure_timer(self) -> int | None:
        """Return the smallest step of the kernels' timer in nanoseconds, and learn ``cycles_per_ns``.

        None where kernels have no timer.
        """
        ...

    def launch(self, duration_ns: int) -> None:
        """Queue one kernel of known duration on the current stream."""
        ...

    def replay(self, duration_ns: int) -> Callable[[], None]:
        """Return the launch of a CUDA graph that holds one kernel of known duration."""
        ...

    def occupy(self, duration_ns: int) -> None:
        """Queue other work of about that long on the current stream; it leaves no stamps."""
        ...

    def occupy_other(self, duration_ns: int) -> None:
        """Queue such work on another stream, beside which the current one runs."""
        ...

    def on_side_stream(self) -> AbstractContextManager[int]:
        """Make a stream of its own the current one; gives its raw handle."""
        ...

    def stream(self) -> int:
        """Return the raw handle of the current stream."""
        ...

    def busy_host(self) -> AbstractContextManager[None]:
        """Keep a thread of this process busy meanwhile."""
        ...

    def rest(self, duration_ns: int) -> None:
        """Leave everything alone for so long."""
        ...

    def settle(self) -> None:
        """Wait until all streams are idle."""
        ...

    def stamps(self) -> Sequence[Stamp]:
        """Wait, and return the stamps of the kernels of known duration since the last call, in their order.

        Raises:
            NotTestable: There are not as many as kernels were launched.
        """
        ...


@contextmanager
def spinning_thread() -> Iterator[None]:
    """Keep a Python thread in a loop that never gives the interpreter up by itself."""
    stop: list[bool] = []

    def spin() -> None:
        count = 0
        while not stop:
            count += 1

    thread = threading.Thread(target=spin, name="gpu_timed-busy-host", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.append(True)
        thread.join()
