"""Every runtime of this process: the one that a launch names, else the first that has a device in use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from gpu_timed.bounds import Limit
from gpu_timed.clocks.cuda_locators import CupyLocator, NumbaLocator, TritonLocator
from gpu_timed.clocks.cuda_places import CudaPlaces
from gpu_timed.clocks.jax_runtime import JaxLocator
from gpu_timed.clocks.torch_locator import TorchLocator
from gpu_timed.ports import Launch, Locator, Place
from gpu_timed.record import Missing

_ABSENT: Final = frozenset({"no_device", "not_initialised", "simulated", "unsupported_runtime"})
_MODULES: Final = (("cupy", "cupy"), ("numba", "numba.cuda"), ("jax", "jax"))
"""Runtimes asked where torch has no device, in this order, and the module that says that they are there."""


class Locators:
    """Asks torch first, as nearly every caller uses it, and the others only where torch has no device.

    None of them is imported, and none initialised: what the application has not set up stays so.
    """

    def __init__(self) -> None:
        self._cuda = cuda = CudaPlaces()
        self._torch = TorchLocator(cuda)
        self._jax = JaxLocator()
        self._of: dict[str, Locator] = {
            "torch": self._torch,
            "cupy": CupyLocator(cuda),
            "numba": NumbaLocator(cuda),
            "triton": TritonLocator(cuda, self._torch),
            "jax": self._jax,
        }

    def locate(self, launch: Launch | None = None) -> Place | Missing:
        """Return where *launch*, or what this thread launches next, goes; or why it goes nowhere."""
        if launch is not None:
            return self._of[launch.runtime].locate(launch) if launch.absent is None else launch.absent
        place = self._torch.locate()
        if isinstance(place, Missing) and place.reason in _ABSENT:
            for runtime, module in _MODULES:
                if module in sys.modules:
                    other = self._of[runtime].locate()
                    if not isinstance(other, Missing) or other.reason not in _ABSENT:
                        return other
                    if other.reason == "simulated":
                        place = other  # unless another runtime has a device
        return place

    def device_of(self, value: Any) -> int | None:
        """Return the device on which *value* lives, as far as torch knows."""
        return self._torch.device_of(value)

    def limits(self) -> Iterator[Limit]:
        """Say how much is kept of streams and marks, and how much of it is used."""
        yield from self._cuda.limits()
        yield from self._jax.limits()

    def floors(self) -> dict[int, int]:
        """Return what an empty pair of marks reads at the least, in nanoseconds, by device, where that is known."""
        return self._cuda.floors()
