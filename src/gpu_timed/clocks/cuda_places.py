"""The one CUDA clock of the process, and one place for each stream of each device, whatever runtime names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from gpu_timed.bounds import Limit
from gpu_timed.clocks import cuda_driver as driver
from gpu_timed.clocks.cuda_event import CAPTURED, CudaEventClock
from gpu_timed.ports import Place, limits_of
from gpu_timed.record import Missing

NO_DEVICE: Final = Missing("no_device")
NOT_INITIALISED: Final = Missing("not_initialised")

MOST_PLACES: Final = 4096
"""Streams that are known at once."""


class CudaPlaces:
    """Shared by the locators of all CUDA runtimes, so that two of them on one stream see each other's marks."""

    def __init__(self, make_clock: Callable[[], CudaEventClock | None] | None = None) -> None:
        self._make_clock = make_clock or _cuda_clock
        self._clock: CudaEventClock | None = None
        self._present: bool | None = None
        self._forgotten = self._unwatched = 0
        #: Every place so far, by device and raw stream.
        self.held: dict[tuple[int, int], Place] = {}

    def clock(self) -> CudaEventClock | None:
        """Return the clock, made the first time; None on a machine without a driver."""
        if self._clock is None:
            self._clock = self._make_clock()
        return self._clock

    def floors(self) -> dict[int, int]:
        """Return the floors that are known so far, by index of the device, in nanoseconds; makes no clock."""
        return {} if self._clock is None else self._clock.floors()

    def at(self, device: int, stream: int) -> Place:
        """Return the place of *stream* (a raw handle) of *device* (its ordinal). There must be a clock."""
        place = self.held.get((device, stream))
        if place is None:
            clock = self.clock()
            assert clock is not None  # noqa: S101 - the caller looked
            if len(self.held) >= MOST_PLACES:  # streams made and dropped without end: start over
                self._forgotten += len(self.held)
                self._unwatched += sum(gone.unwatched for gone in list(self.held.values()))
                self.held.clear()
            place = self.held.setdefault((device, stream), Place(clock, device, stream))
        return place

    def limits(self) -> Iterator[Limit]:
        """Say how many streams are known, how much is kept of the fullest, and how many events there are."""
        held = list(self.held.values())
        yield Limit("places", MOST_PLACES, len(held), self._forgotten, "streams known")
        yield from limits_of(held, self._unwatched)
        if self._clock is not None:
            yield from self._clock.limits()

    def of_thread(self, stream: int) -> Place | Missing:
        """Return the place of *stream* in the calling thread's current context.

        A thread without a context is taken to use device 0, as the CUDA runtime and Numba would, and only
        if the application has made that device's context already.
        """
        clock = self.clock()
        if clock is None:
            return NO_DEVICE
        library = clock.cuda_library
        device = driver.current_device(library)
        if device is None:
            if driver.primary_context(library, 0) is None:
                return self.not_yet()
            device = 0
        place = self.at(device, stream)
        return CAPTURED if clock.is_capturing(place) else place

    def not_yet(self) -> Missing:
        """Return why there is nothing to mark: no device, or one that nobody has set up yet."""
        if self._present is None:
            self._present = driver.device_present()
        return NOT_INITIALISED if self._present else NO_DEVICE


def _cuda_clock() -> CudaEventClock | None:
    library = driver.load()
    return None if library is None else CudaEventClock(library)
