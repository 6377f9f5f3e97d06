"""Triton: kernels compiled or loaded from its disk cache, cubins loaded, configurations benchmarked.

Semi-public: ``triton.knobs.compilation.listener`` (3.4 to 3.9, one slot: the listener that is there is called as
well), ``triton.knobs.runtime.kernel_load_start_hook`` and ``_end_hook`` (3.5.1 on). Private:
``Autotuner._bench``, called for each configuration while it is being benchmarked and never on a hit; and
``Autotuner.run``'s result ``best_config``.
"""

from __future__ import annotations

import threading
import time
from types import ModuleType
from typing import Any, Final

from gpu_timed.record import NOT_SET
from gpu_timed.warmth.probe import MARK, Detach, Probe, Tell, replace


def _attach_compiler(module: ModuleType, tell: Tell) -> Detach:
    knobs: Any = module.compilation
    before = knobs.listener

    def listener(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool, **more: Any) -> None:
        micros = getattr(times, "total", None)
        name = metadata.get("name") if isinstance(metadata, dict) else getattr(src, "name", None)
        what = f"kernel {name or 'without a name'} {'from the disk cache' if cache_hit else 'compiled'}"
        tell(what, "loaded" if cache_hit else "built", int(micros) * 1000 if micros is not None else NOT_SET)
        if before is not None:
            before(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit, **more)

    if getattr(before, MARK, False):
        return lambda: None
    setattr(listener, MARK, True)
    knobs.listener = listener

    def detach() -> None:
        if knobs.listener is listener:
            knobs.listener = before

    return detach


def _attach_loader(module: ModuleType, tell: Tell) -> Detach:
    starts, ends = module.runtime.kernel_load_start_hook, module.runtime.kernel_load_end_hook
    began = threading.local()

    def start(*_: Any) -> None:
        began.at = time.perf_counter_ns()

    def end(_module: Any, _function: Any, name: Any, *_: Any) -> None:
        at = getattr(began, "at", None)
        tell(f"kernel {name} loaded on the device", "initialised", time.perf_counter_ns() - at if at else NOT_SET)

    starts.add(start)
    ends.add(end)

    def detach() -> None:
        starts.remove(start)
        ends.remove(end)

    return detach


def _attach_autotuner(module: ModuleType, tell: Tell) -> Detach:
    def make(original: Any) -> Any:
        def bench(self: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return original(self, *args, **kwargs)
            finally:
                name = getattr(getattr(self, "base_fn", None), "__name__", "a kernel")
                tell(f"{name} benchmarked with {kwargs.get('config')}", "built", time.perf_counter_ns() - began)

        return bench

    autotuner: Any = module.Autotuner
    return replace(autotuner, "_bench", make)


PROBES: Final = (
    Probe("triton", "triton.knobs", _attach_compiler, in_use="triton.runtime.jit"),  # before 3.4 there are no knobs
    Probe("triton load", "triton.knobs", _attach_loader, needed=False),  # what is loaded was compiled, or a hit, before
    Probe("triton autotune", "triton.runtime.autotuner", _attach_autotuner),
)
