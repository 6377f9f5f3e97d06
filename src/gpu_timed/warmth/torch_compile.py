"""torch.compile: every frame and backward that Dynamo compiles, and what Inductor tunes or captures at run time.

Private, the same in torch 2.6 to 2.14: ``torch._dynamo.utils`` calls its global ``log_compilation_event`` with the
metrics of each compile, on the compiling thread. ``torch._dynamo.config.log_compilation_metrics`` (on by default)
switches that off. Fields are read where they are there.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from gpu_timed.record import NOT_SET, Measured, Tier
from gpu_timed.warmth.probe import Detach, Probe, Tell, replace

_HITS: Final = (
    "inductor_fx_local_cache_hit_count",
    "inductor_fx_remote_cache_hit_count",
    "aotautograd_local_cache_hit_count",
    "aotautograd_remote_cache_hit_count",
)
_MISSES: Final = tuple(name.replace("_hit_", "_miss_") for name in _HITS)


def _attach(module: ModuleType, tell: Tell) -> Detach:
    def make(original: Any) -> Any:
        def log_compilation_event(metrics: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                _tell(metrics, tell)
            except Exception as error:  # noqa: BLE001 - a version whose metrics look otherwise: cold all the same
                tell("a compile that could not be read", "built", NOT_SET, type(error).__name__)
            return original(metrics, *args, **kwargs)

        return log_compilation_event

    return replace(module, "log_compilation_event", make)


def _tell(metrics: Any, tell: Tell) -> None:
    held: dict[str, Any] = vars(metrics)
    micros = held.get("duration_us")
    duration: Measured = int(micros) * 1000 if isinstance(micros, int | float) else NOT_SET
    which = held.get("co_name") or "backward"
    if held.get("compile_id"):
        which = f"{which} [{held['compile_id']}]"
    if held.get("is_runtime"):
        for name, what, how in _AT_RUN_TIME:
            spent = held.get(name)
            if spent:
                tell(f"{what} for {which}", how, int(spent) * 1000)
        return
    if held.get("fail_type"):
        reason = str(held.get("fail_reason") or "").partition("\n")[0]
        tell(f"{which} failed to compile and runs as it is", "built", duration, f"{held['fail_type']}: {reason}")
        return
    hits, misses = (sum(held.get(name) or 0 for name in names) for names in (_HITS, _MISSES))
    reason = str(held.get("recompile_reason") or "").partition("\n")[0]
    # Neither hit nor miss: the cache was passed by, or the backend has none. Compiled either way.
    tier: Tier = "loaded" if hits and not misses else "built"
    verb = "recompiled" if reason else "compiled"
    if tier == "loaded":
        verb = f"{verb} with code from the disk cache"
    tell(f"{which} {verb}", tier, duration, reason)


_AT_RUN_TIME: Final[tuple[tuple[str, str, Tier], ...]] = (
    ("runtime_triton_autotune_time_us", "tuned Triton kernels", "built"),
    ("runtime_cudagraphify_time_us", "CUDA Graph set up", "initialised"),
)

PROBES: Final = (Probe("torch.compile", "torch._dynamo.utils", _attach),)
