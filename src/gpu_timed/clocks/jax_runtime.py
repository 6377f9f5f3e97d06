"""JAX: it has no events and names no streams, but every result can say whether it is there.

Public names used: ``jax.Array.is_ready``, ``is_deleted``, ``jax.block_until_ready``, ``jax.live_arrays``,
``jax.tree_util.tree_leaves``, ``jax.core.Tracer``; private, feature-detected, jax 0.6 to 0.11 seen:
``jax._src.xla_bridge.backends_are_initialized`` and ``jax._src.core.trace_state_clean``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from gpu_timed.bounds import Limit
from gpu_timed.clocks.fence import FenceClock, GoneError
from gpu_timed.ports import NOT_GIVEN, DeviceInfo, Launch, Place
from gpu_timed.record import Missing

NOT_INITIALISED: Final = Missing("not_initialised")
TRACED: Final = Missing("captured", "JAX is tracing this call: nothing runs")
_NO_UUID: Final = Missing("no_device", "JAX tells no UUID")


class JaxLocator:
    """JAX's default device, once the application has initialised its backend."""

    def __init__(self) -> None:
        self._place: Place | None = None
        self._clock: FenceClock | None = None
        self._trace_state_clean: Any = None

    def locate(self, launch: Launch | None = None) -> Place | Missing:  # noqa: ARG002 - the default device says it
        """Return the place that stands for all of JAX's work, or why there is none."""
        place = self._place
        if place is None:
            place = self._attach()
            if place is None:
                return NOT_INITIALISED
        if self._trace_state_clean is not None and not self._trace_state_clean():
            return TRACED
        return place

    def limits(self) -> Iterator[Limit]:
        """Say how much is kept of JAX's place, once there is one."""
        if self._clock is not None:
            yield from self._clock.limits()

    def device_of(self, value: Any) -> int | None:  # noqa: ARG002 - one place stands for all devices
        """Return None: a result on another device is waited for all the same."""
        return None

    def _attach(self) -> Place | None:
        jax: Any = sys.modules.get("jax")
        bridge: Any = sys.modules.get("jax._src.xla_bridge")
        initialised = getattr(bridge, "backends_are_initialized", None)
        if not hasattr(jax, "live_arrays") or initialised is None or not initialised():
            return None
        self._trace_state_clean = getattr(sys.modules.get("jax._src.core"), "trace_state_clean", None)
        self._clock = FenceClock(JaxRuntime(jax))
        self._place = Place(self._clock, int(jax.local_devices()[0].id), 0)
        return self._place


class JaxRuntime:
    """What the fence clock asks of JAX."""

    def __init__(self, jax: Any) -> None:
        self._jax = jax

    def flush(self, values: Any) -> None:
        """Nothing to do: JAX starts work as it is called."""

    def results(self, values: Any) -> list[Any]:
        """Return the concrete arrays among the leaves of *values*, or all that are not there yet."""
        jax = self._jax
        if values is NOT_GIVEN:
            return [array for array in jax.live_arrays() if not array.is_deleted() and not array.is_ready()]
        try:
            leaves = jax.tree_util.tree_leaves(values)
        except (TypeError, ValueError):  # a dictionary whose keys have no order, or another odd tree
            return []
        kind, traced = jax.Array, jax.core.Tracer
        arrays = [leaf for leaf in leaves if isinstance(leaf, kind) and not isinstance(leaf, traced)]
        return [array for array in arrays if not array.is_deleted()]

    def is_ready(self, result: Any) -> bool:
        """Return whether *result* is there.

        Raises:
            GoneError: It was donated to another computation before it was there.
        """
        if result.is_deleted():
            raise GoneError
        return bool(result.is_ready())

    def wait(self, results: list[Any]) -> None:
        """Block until *results* are there. Raises what computing them raised."""
        self._jax.block_until_ready([result for result in results if not result.is_deleted()])

    def describe(self, place: Place) -> DeviceInfo:
        """Return what JAX calls its default device."""
        device = self._jax.local_devices()[0]
        kind = "gpu" if device.platform in ("gpu", "cuda", "rocm") else str(device.platform)
        return DeviceInfo(place.device, _NO_UUID, str(device.device_kind), kind)
