"""JAX: what XLA compiled, or took from JAX's persistent cache, for op-by-op calls too.

Public: ``jax.monitoring`` (jax 0.6 to 0.11). ``backend_compile_duration`` is recorded for hits as well; a
``cache_hits`` event on the same thread before it says which it was. ``clear_event_listeners`` drops us: then
nothing is seen any more, which ``doctor`` cannot tell.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any, Final

from gpu_timed.warmth.probe import Detach, Probe, Tell

_COMPILED: Final = "/jax/core/compile/backend_compile_duration"
_HIT: Final = "/jax/compilation_cache/cache_hits"


def _attach(module: ModuleType, tell: Tell) -> Detach:
    held = threading.local()
    active = [True]

    def on_event(name: str, **_: Any) -> None:
        if name == _HIT:
            held.hit = True

    def on_duration(name: str, seconds: float, **more: Any) -> None:
        if name == _COMPILED and active:
            hit, held.hit = getattr(held, "hit", False), False
            what = f"{more.get('fun_name') or 'a computation'} {'from the disk cache' if hit else 'compiled'}"
            tell(what, "loaded" if hit else "built", round(seconds * 1e9))

    module.register_event_listener(on_event)
    module.register_event_duration_secs_listener(on_duration)
    return active.clear  # there is no public way to take a listener out


PROBES: Final = (Probe("jax", "jax.monitoring", _attach),)
