"""Triton kernels: each launch, ``kernel[grid](…)`` or ``kernel.run(…)``, is a span.

A timed kernel is a copy whose class is a subclass of the kernel's own, so that whatever asks for a
``JITFunction`` or an ``Autotuner`` (Dynamo, an autotuner above, a kernel that calls this one as a function)
finds one. Its ``run`` is the launch; a ``warmup`` launches nothing and is passed through.

Triton is not imported: kernels are told by their class ``KernelInterface``. Seen: triton 3.3 to 3.9. Private
names used: ``device_caches`` (made anew for the copy, which else would skip Triton's check that globals
are unchanged) and ``torch._guards.TracingContext`` (2.6 to 2.13), by which Dynamo's look at a kernel is known.
"""

from __future__ import annotations

import collections
import sys
from typing import Any, Final

from gpu_timed.callables import functions
from gpu_timed.ports import Door, Launch
from gpu_timed.record import Missing
from gpu_timed.site import Site

_INTERFACE: Final = "KernelInterface"
_INTERPRETED: Final = "InterpretedFunction"
_LAUNCH: Final = Launch("triton")
_INTERPRETER: Final = Launch("triton", None, Missing("simulated", "Triton's interpreter"))


def is_kernel(target: Any) -> bool:
    """Return whether *target* is a Triton kernel: jitted, autotuned, or with heuristics."""
    return any(kind.__name__ == _INTERFACE and kind.__module__.startswith("triton.") for kind in type(target).__mro__)


def wrap(target: Any, site: Site, door: Door) -> Any:
    """Return a copy of the kernel *target*, each launch of which is a span."""
    kind = _timed_class(type(target))
    timed: Any = object.__new__(kind)
    vars(timed).update(vars(target))
    timed.__wrapped__ = target
    timed.gpu_timed_site = site
    timed.gpu_timed_door = door
    if hasattr(target, "device_caches") and hasattr(timed, "create_binder"):
        timed.device_caches = collections.defaultdict(timed.create_binder)
    return timed


def is_timed(target: Any) -> bool:
    """Return whether *target* is a copy that :func:`wrap` made."""
    return isinstance(target, _TimedLaunches)


def _is_interpreted(kernel: Any) -> bool:
    while kernel is not None:
        if any(kind.__name__ == _INTERPRETED for kind in type(kernel).__mro__):
            return True
        kernel = getattr(kernel, "fn", None)
    return False


class _TimedLaunches:
    """Goes before a kernel's own class."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch, as one span."""
        run = super().run  # type: ignore[misc] # the class this one is put before has it
        if kwargs.get("warmup"):
            return run(*args, **kwargs)
        held: Any = self
        where = _INTERPRETER if _is_interpreted(held.__wrapped__) else _LAUNCH
        site, door = held.gpu_timed_site, held.gpu_timed_door
        opened = door.enter(site, args, kwargs, launch=where)
        if site.moded or door.modes.in_force:
            functions.decline(door.modes, site, opened, functions.LAUNCH)
        if opened is None:
            return run(*args, **kwargs)
        try:
            try:
                result = run(*args, **kwargs)
            except BaseException as error:
                opened.owner.leave(opened, error)
                raise
            opened.owner.leave(opened)
        except BaseException:  # the user's own; or an interrupt on the way into leave()
            opened.owner.mend(opened)
            raise
        return result

    def __hash__(self) -> int:
        # Dynamo puts every kernel that it meets into a table; nothing else hashes one while a region is traced.
        guards: Any = sys.modules.get("torch._guards")
        context = getattr(guards, "TracingContext", None)
        if context is not None and context.try_get() is not None:
            held: Any = self
            held.gpu_timed_door.traced(held.gpu_timed_site.name)
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __reduce__(self) -> Any:
        held: Any = self
        return wrap, (held.__wrapped__, held.gpu_timed_site, held.gpu_timed_door)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()

    def __copy__(self) -> Any:
        held: Any = self
        return wrap(held.__wrapped__, held.gpu_timed_site, held.gpu_timed_door)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__copy__()


def _timed_class(kind: type[Any]) -> type[Any]:
    """Return a subclass of *kind* whose launches are timed."""
    return type(kind.__name__, (_TimedLaunches, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
