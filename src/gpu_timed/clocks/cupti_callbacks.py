"""Modules that CUDA loads, told by CUPTI at the moment, on the thread that loads: by NVIDIA's own ``cupti-python``.

With lazy loading (the driver's default since CUDA 12.2) a kernel's code is loaded by its first launch, and no library
says so. On an H200 the first matrix product of a process loaded 4 modules in 123 ms and the second none; a hot
``add_`` took as long with the callback as without.

Names of ``cupti.cupti`` used beside those of :mod:`gpu_timed.clocks.cupti_activity`, as of cupti-python 13.0.1
(public; they follow CUPTI's C interface): ``enable_callback``, ``CallbackDomain.RESOURCE`` and
``CallbackIdResource.MODULE_LOADED``.
A callback is called with the user's data, the domain, the callback's number, and data that is valid meanwhile.

CUPTI has one subscriber in a process, so that this and kernel records exclude each other, and so do this and another
profiler. It is only ever unsubscribed: finalising CUPTI would detach it under other threads' calls.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable
from typing import Any, Final

from gpu_timed.clocks.cupti_activity import RecordsUnavailable, load, subscribe

_NAME: Final = "gpu_timed module_loads"


class ModuleLoads:
    """One subscription to modules being loaded, from its making to :meth:`end`.

    Args:
        loaded: Called after each, on the thread that loads, inside the driver: it must be quick, call no CUDA and wait
            for nothing. What it raises is lost.

    Raises:
        MissingExtraError: cupti-python is not installed.
        RecordsUnavailable: It does not work here, or somebody else has CUPTI.
    """

    def __init__(self, loaded: Callable[[], None]) -> None:
        self._loaded = loaded
        self._process = os.getpid()
        self._subscriber: int | None = None
        self._cupti = cupti = load("Telling what CUDA loads")
        self._callback = self._called  # held: CUPTI keeps no reference that counts
        try:
            wanted = int(cupti.CallbackDomain.RESOURCE), int(cupti.CallbackIdResource.MODULE_LOADED)
            self._subscriber = subscribe(cupti, self._callback, _NAME)
            cupti.enable_callback(1, self._subscriber, *wanted)
        except RecordsUnavailable:
            raise
        except Exception as error:
            self.end()
            raise RecordsUnavailable(f"CUPTI refused: {type(error).__name__}: {error}") from error
        atexit.register(self.end)

    def end(self) -> None:
        """Leave CUPTI to others. Never raises; a forked child, whose CUPTI is the parent's, leaves it alone."""
        atexit.unregister(self.end)
        subscriber, self._subscriber = self._subscriber, None
        if subscriber is not None and os.getpid() == self._process:
            with contextlib.suppress(Exception):  # the driver is gone, or was never there
                self._cupti.unsubscribe(subscriber)

    def _called(self, *_: Any) -> None:
        """React to the one callback that is enabled. An exception would have nowhere to go."""
        with contextlib.suppress(Exception):
            if self._subscriber is not None:
                self._loaded()
