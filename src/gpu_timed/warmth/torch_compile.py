"""torch.compile: every frame and backward that Dynamo compiles, and what Inductor captures at run time.

Private, the same in torch 2.6 to 2.14: ``torch._dynamo.utils`` calls its global ``log_compilation_event`` with the
metrics of each compile, on the compiling thread, and so for one that failed or met the recompile limit.
``torch._dynamo.config.log_compilation_metrics`` (on by default) switches that off. Fields are read where present.

What Inductor leaves to its worker processes is part of the compile that waits for them. A code object that met the
limit, or that could not be compiled, makes no more events: what it told then lasts, until ``torch._dynamo.reset()``,
after which the first compile is ``0/0`` again. So does that torch made no CUDA Graph of it (``cudagraph_skip_reason``,
where the metrics have it).
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from types import ModuleType
from typing import Any, Final

from gpu_timed.ports import Lasting
from gpu_timed.record import NOT_SET, Measured, Tier
from gpu_timed.warmth.probe import Detach, Probe, Tell, replace

COMPILE_LIMIT_REACHED: Final = "compile_limit_reached"
NOT_COMPILED: Final = "not_compiled"
CUDAGRAPHS_SKIPPED: Final = "cudagraphs_skipped"

_HITS: Final = (
    "inductor_fx_local_cache_hit_count",
    "inductor_fx_remote_cache_hit_count",
    "aotautograd_local_cache_hit_count",
    "aotautograd_remote_cache_hit_count",
)
_MISSES: Final = tuple(name.replace("_hit_", "_miss_") for name in _HITS)
_LIMIT: Final = re.compile(r"\b(\w*(?:recompile|cache_size)_limit)\b(?:.*?currently set to (\d+))?", re.DOTALL)
"""In ``fail_reason``: "… exceeding the recompile_limit cache size limit (currently set to 8)", or only the name; its
name was ``cache_size_limit`` in torch 2.5."""
_HARD_LIMIT: Final = "FailOnRecompileLimitHit"
_FRAMES_KEPT: Final = 1024


class _Frames:
    """What is known of the frames that Dynamo has met: their names, and what lasts of them. By Dynamo's numbers."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, str] = OrderedDict()
        self._lasting: OrderedDict[str, Lasting] = OrderedDict()
        self._lock = threading.RLock()

    def meet(self, compile_id: str, name: str | None) -> tuple[str | None, list[Lasting]]:
        """Return the name of the code that *compile_id* is about, and what lasts no more now that it was met again."""
        frame, _, attempt = compile_id.partition("/")
        if name is None:  # not every event says it
            return self._names.get(frame), []
        undone: list[Lasting] = []
        if frame == "0" and attempt.partition("_")[0] == "0":  # after a reset, which makes Dynamo forget all frames
            undone += self._lasting.values()
            self._lasting.clear()
            self._names.clear()
        held = self._lasting.pop(frame, None)
        if held is not None:
            undone.append(held)
        self._names[frame] = name
        _bound(self._names)
        return name, undone

    def last(self, compile_id: str, note: str, text: str, undone: list[Lasting]) -> Lasting:
        """Keep that *text* holds for the frame of *compile_id* from now on, in place of what another thread told."""
        frame = compile_id.partition("/")[0]
        lasting = Lasting(note, text)
        with self._lock:
            held, self._lasting[frame] = self._lasting.get(frame), lasting
        if held is not None:
            undone.append(held)
        _bound(self._lasting)
        return lasting


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
    name, undone = (None, []) if backward else frames.meet(compile_id, held.get("co_name"))
    which = _name(name, compile_id)
    if held.get("fail_type"):
        what, detail, lasting = _failure(held, which, compile_id, frames, undone)
        tell(what, "built", duration, detail, lasting=lasting, undone=undone)
        return
    hits, misses = (sum(held.get(name) or 0 for name in names) for names in (_HITS, _MISSES))
    reason = str(held.get("recompile_reason") or "").partition("\n")[0]
    # Neither hit nor miss: the cache was passed by (torch_caches says why), or the backend has none. Compiled, then.
    tier: Tier = "loaded" if hits and not misses else "built"
    verb = "recompiled" if reason else "compiled"
    if tier == "loaded":
        verb = f"{verb} with code from the disk cache"
    elif hits:
        verb = f"{verb} in part, with code from the disk cache"
    skipped = str(held.get("cudagraph_skip_reason") or "").partition("\n")[0]
    holds = frames.last(compile_id, CUDAGRAPHS_SKIPPED, f"{which}: {skipped}", undone) if skipped else None
    tell(f"{which} {verb}", tier, duration, reason, lasting=holds, undone=undone)


def _failure(
    held: dict[str, Any], which: str, compile_id: str, frames: _Frames, undone: list[Lasting]
) -> tuple[str, str, Lasting]:
    """Return what failed, the detail, and what that means for later calls; what it is in place of goes to *undone*."""
    reason = str(held.get("fail_reason") or "")
    detail = f"{held['fail_type']}: {reason.partition(chr(10))[0]}"
    limit = _LIMIT.search(reason)
    if limit is None and held["fail_type"] != _HARD_LIMIT:
        what = f"{which} failed to compile"
        return what, detail, frames.last(compile_id, NOT_COMPILED, f"{what}: {detail}", undone)
    most = f" ({limit[2]})" if limit and limit[2] else ""
    what = f"{which} reached {limit[1] if limit else 'the recompile limit'}{most}: not compiled any more"
    text = f"{what}; inputs that no code was compiled for run uncompiled"
    return what, detail, frames.last(compile_id, COMPILE_LIMIT_REACHED, text, undone)


def _name(name: Any, compile_id: str) -> str:
    which = str(name or "backward")
    return f"{which} [{compile_id}]" if compile_id else which


PROBES: Final = (Probe("torch.compile", "torch._dynamo.utils", _attach),)
