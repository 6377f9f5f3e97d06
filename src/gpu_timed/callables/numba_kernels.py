"""Numba CUDA kernels: each launch, ``kernel[grid, block, stream, shared](…)`` or ``kernel.forall(n)(…)``, is a span.

A proxy stands before the dispatcher; what configures a launch gives back a proxy of the configured launch,
and calling that is what is timed, on the stream that it names. Everything else is the dispatcher's own.

Numba is not imported: kernels are told by the names of their classes. Seen: ``CUDADispatcher`` of numba 0.61
to 0.68 and numba-cuda 0.20 to 0.30, ``FakeCUDAKernel`` of their simulators. A configured launch shows its
stream as ``.stream``: an int, or an object with a ``handle`` that is an int or a ctypes pointer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import wrapt

from gpu_timed.callables import functions
from gpu_timed.errors import NotCallableError
from gpu_timed.ports import Door, Launch
from gpu_timed.record import Missing
from gpu_timed.site import Site

_DISPATCHER: Final = "CUDADispatcher"
_SIMULATED: Final = "FakeCUDAKernel"
_MOST_KEPT: Final = 128
"""Configured launches kept for re-use: as many as Numba itself keeps for a kernel."""
_SIMULATOR: Final = Launch("numba", None, Missing("simulated"))
_UNKNOWN: Final = Launch("numba", None, Missing("unsupported_runtime", "this version of Numba hides a launch's stream"))


def is_kernel(target: Any) -> bool:
    """Return whether *target* is a CUDA kernel of Numba, real or simulated."""
    return any(
        kind.__name__ in (_DISPATCHER, _SIMULATED) and kind.__module__.startswith("numba")
        for kind in type(target).__mro__
    )


def wrap(target: Any, site: Site, door: Door) -> Any:
    """Return a proxy of the kernel *target*, each launch of which is a span.

    Raises:
        NotCallableError: *target* is a device function, which no host code can launch.
    """
    options = getattr(target, "targetoptions", None) or {}
    if options.get("device") or getattr(target, "_device", False):
        raise NotCallableError(
            f"gpu_timed cannot time {site.name}: it is a device function, which runs inside a kernel. "
            "Decorate the kernel that calls it."
        )
    return _TimedKernel(target, site, door)


def is_timed(target: Any) -> bool:
    """Return whether *target* is a proxy that :func:`wrap` made."""
    return issubclass(type(target), _TimedKernel)


class _TimedKernel(wrapt.CallableObjectProxy):  # type: ignore[type-arg] # not generic at run time
    """A kernel whose launches are timed."""

    def __init__(self, target: Any, site: Site, door: Door) -> None:
        super().__init__(target)
        self._self_site = site
        self._self_door = door
        self._self_kept: dict[Any, Any] = {}

    def __getitem__(self, configuration: Any) -> Any:
        kept = self._self_kept
        try:
            found = kept.get(configuration)
        except TypeError:  # grid or block given as a list
            return self._self_launch(lambda kernel: kernel[configuration])
        if found is None:
            found = self._self_launch(lambda kernel: kernel[configuration])
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            kept[configuration] = found
        return found

    def configure(self, *args: Any, **kwargs: Any) -> Any:
        """Return a timed launch, as ``kernel[…]`` does."""
        return self._self_launch(lambda kernel: kernel.configure(*args, **kwargs))

    def forall(self, *args: Any, **kwargs: Any) -> Any:
        """Return a timed launch over as many threads as there are tasks."""
        return self._self_launch(lambda kernel: kernel.forall(*args, **kwargs))

    def specialize(self, *args: Any) -> Any:
        """Return a timed kernel that is compiled for the types of *args*."""
        return _TimedKernel(self.__wrapped__.specialize(*args), self._self_site, self._self_door)

    def _self_launch(self, configure: Callable[[Any], Any]) -> Any:
        return _TimedLaunch(configure(self.__wrapped__), self.__wrapped__, configure, self._self_site, self._self_door)

    def __copy__(self) -> Any:
        return self.__reduce__()[0](*self.__reduce__()[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__copy__()

    def __reduce__(self) -> Any:
        return _TimedKernel, (self.__wrapped__, self._self_site, self._self_door)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


class _TimedLaunch(wrapt.CallableObjectProxy):  # type: ignore[type-arg] # not generic at run time
    """A configured launch: calling it is one span, on its own stream."""

    def __init__(self, configured: Any, kernel: Any, configure: Callable[[Any], Any], site: Site, door: Door) -> None:
        super().__init__(configured)
        self._self_made_of = (kernel, configure, site, door)
        self._self_site = site
        self._self_enter = door.enter
        self._self_modes = door.modes
        self._self_call: Callable[..., Any]
        if configured is kernel:  # the simulator configures the kernel itself: again before each launch
            self._self_call = lambda *args: configure(kernel)(*args)  # noqa: PLW0108 - not before it is called
            self._self_where = _SIMULATOR
        else:
            self._self_call = configured
            self._self_where = _where(configured)

    def __call__(self, *args: Any) -> Any:
        site, modes = self._self_site, self._self_modes
        opened = self._self_enter(site, args, launch=self._self_where)
        if site.moded or modes.in_force:
            functions.decline(modes, site, opened, functions.LAUNCH)
        if opened is None:
            return self._self_call(*args)
        try:
            try:
                result = self._self_call(*args)
            except BaseException as error:
                opened.owner.leave(opened, error)
                raise
            opened.owner.leave(opened)
        except BaseException:  # the user's own; or an interrupt on the way into leave()
            opened.owner.mend(opened)
            raise
        return result

    def __copy__(self) -> Any:
        return _TimedLaunch(copy.copy(self.__wrapped__), *self._self_made_of)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _TimedLaunch(copy.deepcopy(self.__wrapped__, memo), *self._self_made_of)

    def __reduce__(self) -> Any:
        return _again, (self.__wrapped__, *self._self_made_of[2:])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


def _again(configured: Any, site: Site, door: Door) -> Any:
    """Make a timed launch of one that was pickled, configured as it was."""
    return _TimedLaunch(configured, None, lambda _: configured, site, door)


def _where(configured: Any) -> Launch:
    """Return what a configured launch says of its stream."""
    stream = getattr(configured, "stream", None)
    handle = getattr(stream, "handle", stream)
    handle = getattr(handle, "value", handle)  # ctypes
    if handle is None:  # a null pointer of ctypes: the default stream
        return Launch("numba", 0) if stream is not None else _UNKNOWN
    try:
        return Launch("numba", int(handle))
    except (TypeError, ValueError):
        return _UNKNOWN
