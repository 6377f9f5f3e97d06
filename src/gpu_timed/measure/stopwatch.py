"""Times one call: on the host until it returns and until the device has done it, and on the device by marks.

The marks lie outside what the host's clock sees: the first is placed before it is read, and the second after the call
has returned. A call has the device to itself: the one before it was waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from gpu_timed.clocks.host import HostClock
from gpu_timed.ports import Locator
from gpu_timed.record import Measured, Missing

_LEFT_NS: Final = 20_000
"""Waiting for the whole device, after the call's own stream was waited for, takes no longer than waiting once more does
if nothing else runs (4 µs), but for what disturbs the host,"""
_LEFT_PART: Final = 0.02
"""and but for caches that the call itself has emptied: 30 µs behind a call of 2.3 ms, 70 behind one of 21 (H200)."""
_LOOKS: Final = 3


class Took(NamedTuple):
    """What one call took, in nanoseconds, and what it gave."""

    wall_ns: int
    launch_ns: int
    device_ns: Measured
    result: Any


class Stopwatch:
    """Times calls by *host* and by marks where *locator* says.

    Args:
        locator: Where the current work goes.
        host: The host's clock.
    """

    def __init__(self, locator: Locator, host: HostClock) -> None:
        self._locator = locator
        self.host = host
        #: Whether a call is over only when every stream of its device is idle.
        self.whole_device = False
        #: Name of the clock that marks come from; ``host`` as long as there were none.
        self.clock = "host"
        self.device_uuid: str | Missing = Missing("no_device")
        self.device_name: str | Missing = Missing("no_device")

    def time(self, call: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Took:
        """Call it, wait for the device, and return what it took.

        Raises:
            DeviceFault: The device answered with an error.
            Exception: What *call* raises.
        """
        now = self.host.now_ns
        place = self._locator.locate()
        if isinstance(place, Missing):
            begin = now()
            result = call(*arguments, **named)
            end = now()
            return Took(end - begin, end - begin, place, result)
        clock = place.clock
        start = clock.mark(place, (arguments, named))
        begin = now()
        result = call(*arguments, **named)
        returned = now()
        stop: Any = start if isinstance(start, Missing) else clock.mark(place, result, start)
        if isinstance(stop, Missing):
            clock.wait_device(place)
            return Took(now() - begin, returned - begin, stop, result)
        clock.wait(stop)
        if self.whole_device:
            clock.wait_device(place)
        done = now()
        device = clock.elapsed_ns(start, stop)
        clock.release(start, stop)
        return Took(done - begin, returned - begin, device, result)

    def look(self) -> None:
        """Find out which device it is."""
        place = self._locator.locate()
        if isinstance(place, Missing):
            self.device_uuid = self.device_name = place
            return
        info = place.clock.describe(place)
        self.clock, self.device_uuid, self.device_name = place.clock.name, info.uuid, info.name

    def goes_elsewhere(self, call: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
        """Call it a few times, and return whether its device has more to do when its stream has done all."""
        place = self._locator.locate()
        now = self.host.now_ns
        left: list[float] = []
        for _ in range(_LOOKS):
            took = self.time(call, arguments, named)
            if isinstance(place, Missing):
                return False
            begin = now()
            place.clock.wait_device(place)
            between = now()
            place.clock.wait_device(place)  # what waiting takes when there is nothing to wait for
            left.append((between - begin) - (now() - between) - _LEFT_PART * took.wall_ns)
        return min(left) > _LEFT_NS

    def settle(self) -> None:
        """Wait until the device is idle."""
        place = self._locator.locate()
        if not isinstance(place, Missing):
            place.clock.wait_device(place)
