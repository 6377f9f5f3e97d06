"""CUDA modules that are loaded in a call: why an eager first call is slow, which no compiler's hook can say.

Opt-in. What tells is CUPTI, which has one subscriber in a process; it is attached once a runtime that uses CUDA has
been imported, and can make way for somebody else for a while. How long loading took is not known: CUPTI tells its end.

It tells inside the driver, which may hold a lock of its own while Python's is waited for. A library that held the
interpreter while it waited for the driver would then stand still, and the loading thread with it; none is known.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Final

from gpu_timed.errors import GpuTimedError
from gpu_timed.imports import ImportWatch
from gpu_timed.warmth.probe import Detach, Tell

NAME: Final = "cuda modules"
OFF: Final = "off"
"""State of the probe that nobody asked for."""
REFUSED: Final = "refused: "
"""How its state begins where it could not be attached; why follows."""
_RUNTIMES: Final = ("torch", "cupy", "numba.cuda", "jax")

Source = Callable[[Callable[[], None]], Detach]
"""Attaches what calls the given function after each module, on the thread that loaded it; returns what detaches it.
Raises GpuTimedError where it cannot: :class:`gpu_timed.clocks.cupti_callbacks.ModuleLoads` does."""


class CudaModules:
    """The probe, attached by the first runtime's import.

    Args:
        source: What tells of modules.
        tell: Takes note of one.
        state: Told what became of the probe.
        fault: Told of a fault that is nobody's refusal.
    """

    def __init__(
        self,
        source: Source,
        tell: Tell,
        state: Callable[[str], None],
        fault: Callable[[str, BaseException], None],
    ) -> None:
        self._source = source
        self._tell = tell
        self._state = state
        self._fault = fault
        self._lock = threading.Lock()
        self._detach: Detach | None = None
        self._tried = self._closed = False

    def watch(self, imports: ImportWatch) -> None:
        """Attach with the first of the runtimes, now if one is imported already."""
        self._state("waiting")
        for name in _RUNTIMES:
            imports.when_imported(name, self._imported)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave CUPTI to others for the length of the block; what is loaded meanwhile is not told."""
        with self._lock:
            attached, self._detach = self._detach, None
        if attached is None:
            yield
            return
        attached()
        try:
            yield
        finally:
            with self._lock:
                if not self._closed:
                    self._attach()

    def close(self) -> None:
        """Detach for good."""
        with self._lock:
            self._closed = True
            attached, self._detach = self._detach, None
        if attached is not None:
            attached()

    def restart(self) -> None:
        """Begin anew in a forked child, whose copy of the lock may be held by a thread it does not have."""
        self._lock = threading.Lock()

    def _imported(self, _: ModuleType) -> None:
        with self._lock:
            if not self._tried and not self._closed:
                self._tried = True
                self._attach()

    def _attach(self) -> None:
        try:
            self._detach = self._source(self._loaded)
        except GpuTimedError as error:
            self._state(REFUSED + " ".join(str(error).split()))
        except Exception as error:  # noqa: BLE001 - a version that is not understood: the user's import goes on
            self._fault("probe_attach", error)
            self._state(f"{REFUSED}{type(error).__name__}: {error}")
        else:
            self._state("attached")

    def _loaded(self) -> None:
        self._tell("CUDA module loaded", "initialised")
