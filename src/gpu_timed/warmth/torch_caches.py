"""torch.compile's caches: why one was passed by, and code that was loaded without any compile.

Private. ``ChromiumEventLogger.log_instant_event`` of ``torch._dynamo.utils`` (2.6 to 2.14) is told
``fx_graph_cache_bypass``, ``fx_graph_cache_disabled`` and ``autograd_cache_bypass`` with the reason, on the compiling
thread; it runs only while something is compiled. ``CompilePackage.install`` and ``DiskDynamoCache.load`` of
``torch._dynamo.package`` (2.9 to 2.14): with ``caching_precompile`` a call, or ``torch.compile`` itself, takes
everything from disk there, and Dynamo compiles nothing. AOTInductor's packages load in C++ and tell nobody.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any, Final

from gpu_timed.record import NOT_SET
from gpu_timed.warmth.probe import Detach, Probe, Tell, replace

_PASSED_BY: Final = {
    "fx_graph_cache_bypass": "Inductor's cache passed by",
    "fx_graph_cache_disabled": "Inductor's cache is switched off",
    "autograd_cache_bypass": "AOTAutograd's cache passed by",
}


def _attach_bypass(module: ModuleType, tell: Tell) -> Detach:
    def make(original: Any) -> Any:
        def log_instant_event(self: Any, event_name: str, *args: Any, **kwargs: Any) -> Any:
            what = _PASSED_BY.get(event_name)
            if what is not None:
                tell(what, "built", NOT_SET, _reason(args, kwargs))
            return original(self, event_name, *args, **kwargs)

        return log_instant_event

    logger: Any = module.ChromiumEventLogger
    return replace(logger, "log_instant_event", make)


def _reason(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    metadata = kwargs.get("metadata") or (args[1] if len(args) > 1 else None)
    reason = metadata.get("cache_bypass_reason") if isinstance(metadata, dict) else None
    return str(reason or "").partition("\n")[0]


def _attach_precompile(module: ModuleType, tell: Tell) -> Detach:
    def maker(what: str) -> Any:
        def make(original: Any) -> Any:
            def step(self: Any, *args: Any, **kwargs: Any) -> Any:
                began = time.perf_counter_ns()
                found = original(self, *args, **kwargs)
                if found is not None or what == _INSTALLED:
                    tell(what, "loaded", time.perf_counter_ns() - began)
                return found

            return step

        return make

    package: Any = module.CompilePackage
    store: Any = module.DiskDynamoCache
    undo = [replace(package, "install", maker(_INSTALLED)), replace(store, "load", maker(_READ))]

    def detach() -> None:
        for each in undo:
            each()

    return detach


_INSTALLED: Final = "precompiled code installed"
_READ: Final = "precompiled code read from disk"

PROBES: Final = (
    # Neither is needed to tell cold from warm: a bypass is a compile, and without the other there is no precompile.
    Probe("torch.compile bypass", "torch._dynamo.utils", _attach_bypass, needed=False),
    Probe("torch.compile precompiled", "torch._dynamo.package", _attach_precompile, needed=False),
)
