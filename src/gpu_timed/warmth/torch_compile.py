"""torch.compile: every frame and backward that Dynamo compiles, and what Inductor captures at run time.

Private, the same in torch 2.6 to 2.14: ``torch._dynamo.utils`` calls its global ``log_compilation_event`` with the
metrics of each compile, on the compiling thread, and so for one that failed or met the recompile limit.
``torch._dynamo.config.log_compilation_metrics`` (on by default) switches that off. Fields are read where they are there.

What Inductor leaves to its worker processes is part of the compile that waits for them. A code object that met the
limit, or that could not be compiled, makes no more events: what it told then lasts, until ``torch._dynamo.reset()``,
after which the first compile is ``0/0`` again.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from types import ModuleType
from typing import Any, Final

from gpu_timed.ports import Lasting
from gpu_timed.record import NOT_SET, Measured, Tier
from gpu_timed.warmth.probe import Detach, Probe, Tell, replace

COMPILE_LIMIT_REACHED: Final = "compile_limit_reached"
NOT_COMPILED: Final = "not_compiled"

_HITS: Final = (
    "inductor_fx_local_cache_hit_count",
    "inductor_fx_remote_cache_hit_count",
    "aotautograd_local_cache_hit_count",
    "aotautograd_remote_cache_hit_count",
)
_MISSES: Final = tuple(name.replace("_hit_", "_miss_") for name in _HITS)
_LIMIT: Final = re.compile(r"\b(\w*(?:recompile|cache_size)_limit)\b(?:.*?currently set to (\d+))?", re.DOTALL)
"""In ``fail_reason``, e.g. "… exceeding the recompile_limit cache size limit (currently set to 8)"; ``cache_size_limit``
is what torch 2.5 called it."""
_FRAMES_KEPT: Final = 1024

class _Frames:
    """What is known of the code objects that Dynamo has met: their names, and what lasts."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, str] = OrderedDict()  # by Dynamo's number of the frame
        self._lasting: OrderedDict[str, Lasting] = OrderedDict()

    def meet(self, compile_id: str, name: str | None) -> str | None:
        """Return the name of the code that *compile_id* is about: not every event says it."""
        frame, _, attempt = compile_id.partition("/")
        if name is None:
            return self._names.get(frame)
        if frame == "0" and attempt.partition("_")[0] == "0":
            self._begin_anew()
        self._names[frame] = name
        _bound(self._names)
        return name

    def last(self, compile_id: str, note: str, text: str) -> Lasting:
        """Keep that *text* holds for the frame of *compile_id* from now on."""
        frame = compile_id.partition("/")[0]
        self.lift(compile_id)
        lasting = self._lasting[frame] = Lasting(note, text)
        _bound(self._lasting)
        return lasting

    def lift(self, compile_id: str) -> None:
        """The frame of *compile_id* was compiled: what held of it holds no more."""
        held = self._lasting.pop(compile_id.partition("/")[0], None)
        if held is not None:
            held.holds = False

    def _begin_anew(self) -> None:
        """After a reset Dynamo numbers its frames from 0 again, and compiles every one of them."""
        for held in tuple(self._lasting.values()):
            held.holds = False
        self._lasting.clear()
        self._names.clear()


def _bound(kept: OrderedDict[str, Any]) -> None:
    if len(kept) > _FRAMES_KEPT:
        kept.popitem(last=False)


def _attach(module: ModuleType, tell: Tell) -> Detach:
    frames = _Frames()

    def make(original: Any) -> Any:
        def log_compilation_event(metrics: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                _tell(metrics, tell, frames)
            except Exception as error:  # noqa: BLE001 - a version whose metrics look otherwise: cold all the same
                tell("a compile that could not be read", "built", NOT_SET, type(error).__name__)
            return original(metrics, *args, **kwargs)

        return log_compilation_event

    return replace(module, "log_compilation_event", make)


def _tell(metrics: Any, tell: Tell, frames: _Frames) -> None:
    held: dict[str, Any] = vars(metrics)
    micros = held.get("duration_us")
    duration: Measured = int(micros) * 1000 if isinstance(micros, int | float) else NOT_SET
    compile_id = str(held.get("compile_id") or "")
    if held.get("is_runtime"):
        which = _name(held.get("co_name"), compile_id)
        spent = held.get("runtime_cudagraphify_time_us")  # tuning at run time tells of itself: torch_tuning
        if spent:
            tell(f"CUDA Graph set up for {which}", "initialised", int(spent) * 1000)
        return
    backward = held.get("is_forward") is False
    which = _name(None if backward else frames.meet(compile_id, held.get("co_name")), compile_id)
    if held.get("fail_type"):
        _tell_failure(held, which, compile_id, duration, tell, frames)
        return
    if not backward:
        frames.lift(compile_id)
    hits, misses = (sum(held.get(name) or 0 for name in names) for names in (_HITS, _MISSES))
    reason = str(held.get("recompile_reason") or "").partition("\n")[0]
    # Neither hit nor miss: the cache was passed by (torch_caches says why), or the backend has none. Compiled either way.
    tier: Tier = "loaded" if hits and not misses else "built"
    verb = "recompiled" if reason else "compiled"
    if tier == "loaded":
        verb = f"{verb} with code from the disk cache"
    elif hits:
        verb = f"{verb} in part, with code from the disk cache"
    tell(f"{which} {verb}", tier, duration, reason)


def _tell_failure(  # noqa: PLR0917 - one step of _tell
    held: dict[str, Any], which: str, compile_id: str, duration: Measured, tell: Tell, frames: _Frames
) -> None:
    kind = str(held["fail_type"])
    reason = str(held.get("fail_reason") or "")
    limit = _LIMIT.search(reason) if "limit" in reason else None
    if limit is not None:
        most = f" ({limit[2]})" if limit[2] else ""
        what = f"{which} reached {limit[1]}{most}: not compiled any more"
        lasting = frames.last(
            compile_id, COMPILE_LIMIT_REACHED, f"{what}; inputs that no code was compiled for run uncompiled"
        )
        tell(what, "built", duration, f"{kind}: {reason.partition(chr(10))[0]}", lasting)
        return
    what = f"{which} failed to compile"
    first = reason.partition("\n")[0]
    lasting = frames.last(compile_id, NOT_COMPILED, f"{what} and runs uncompiled: {kind}: {first}")
    tell(f"{what} and runs as it is", "built", duration, f"{kind}: {first}", lasting)


def _name(name: Any, compile_id: str) -> str:
    which = str(name or "backward")
    return f"{which} [{compile_id}]" if compile_id else which


PROBES: Final = (Probe("torch.compile", "torch._dynamo.utils", _attach),)
