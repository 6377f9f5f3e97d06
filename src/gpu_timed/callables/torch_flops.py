"""Torch's own FLOP counter around one call, without the harm it does by itself.

By itself it would (seen with torch 2.13)

* put hooks on every module of the process, to tell modules apart: calls in other threads meet them;
* keep ``torch.compile`` from compiling what is called first inside it, *for good*: Dynamo skips a frame for ever
  that it meets under a dispatch mode;
* import Dynamo, for two seconds, within the first call;
* read lengths back from the device for attention over sequences of different lengths, which waits for it;
* pass over operators that it has no formula for, and say a number that is too low.

So modules are not told apart here, compiled code runs as if nobody counted, and what the counter cannot see makes
the count Missing: operators from outside torch, compiled code, and a call in which nothing was counted at all.
Kernels that are launched past torch (a Triton or CuPy kernel, a graph's replay) cannot be noticed beside
operations that are counted: the count is then of these only.

Private names, seen in torch 2.5 to 2.13 where nothing else is said: ``torch.utils.flop_counter._FlopCounterMode``,
``TorchDispatchMode.is_infra_mode`` (2.6), ``ignore_compile_internals`` and ``_should_skip_dynamo`` (later),
``torch.utils._python_dispatch._get_current_dispatch_mode``, ``_pop_mode`` and ``_push_mode``, and
``torch._dynamo.eval_frame.cached_backends``. Without one of these nothing is counted.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch
from torch.utils import _python_dispatch, flop_counter

from gpu_timed.callables.tracing import compiling
from gpu_timed.record import Missing
from gpu_timed.work import Work

_OF_TORCH: Final = frozenset(
    {"aten", "prim", "prims", "profiler", "inductor", "_c10d_functional", "c10d", "debugprims"}
)
_BUSY: Final = Missing("not_counted", "another dispatch mode of torch is active")
_CAPTURING: Final = Missing("not_counted", "the call is captured into a graph")
_COMPILING: Final = Missing("not_counted", "the call is being compiled or traced")
_COMPILED: Final = Missing(
    "not_counted", "torch.compile is in use, whose kernels torch's counter cannot see: give it work=Work(...)"
)
_NOTHING: Final = Missing("not_counted", "torch's counter saw no operation that it counts")
_UNKNOWN: Final = Missing("not_counted", "the counter of this torch is not known")
_DYNAMO: Final = "torch._dynamo"
_Base: Any = getattr(flop_counter, "_FlopCounterMode", None)


def why_not() -> Missing | None:
    """Return why a call that begins now must not be counted, or None."""
    if _Base is None or not hasattr(_python_dispatch, "_get_current_dispatch_mode"):
        return _UNKNOWN
    mode = _python_dispatch._get_current_dispatch_mode()  # noqa: SLF001 - versions in the module's docstring
    if mode is not None and not isinstance(mode, _Mode):
        return _BUSY
    if compiling() or torch.jit.is_tracing():
        return _COMPILING
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return _CAPTURING
    return _COMPILED if _compile_in_use() else None


class TorchCounting:
    """Counts on this thread, from being made until :meth:`stop`."""

    def __init__(self) -> None:
        self._counter = flop_counter.FlopCounterMode(display=False)
        # Not entered itself: that is what would tell modules apart.
        self._mode = _Mode(self._counter)
        self._mode.__enter__()

    def stop(self, spoilt: Missing | None) -> Work | Missing:
        """Take the counter off this thread; returns the count, or why there is none."""
        self._leave()
        if spoilt is not None:
            return spoilt
        if self._mode.unseen:
            return Missing("not_counted", f"torch's counter does not know {self._mode.unseen}")
        if _compile_in_use():
            return _COMPILED
        total = self._counter.get_total_flops()
        return Work(flops=total) if total > 0 else _NOTHING

    def _leave(self) -> None:
        """Leave the mode; those that user code has entered meanwhile and not left stay where they are."""
        above = []
        while True:
            top = _python_dispatch._get_current_dispatch_mode()  # noqa: SLF001
            if top is None or top is self._mode:
                break
            above.append(_python_dispatch._pop_mode())  # noqa: SLF001
        if top is self._mode:
            self._mode.__exit__(None, None, None)
        for mode in reversed(above):
            _python_dispatch._push_mode(mode)  # noqa: SLF001


class _Mode(_Base or object):  # type: ignore[misc]
    """Torch's mode, which Dynamo does not take for one of the user's, and which notes what it cannot count."""

    unseen = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say whether the method below is to be hidden from Dynamo, which would have to be imported for it."""
        return _DYNAMO in sys.modules

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Say that compiled code may be compiled and run as ever."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Say the same, to a newer torch."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count *func* as torch does."""
        if not self.unseen:
            self.unseen = self._unseen(func, args, kwargs or {})
        return _base_dispatch()(self, func, types, args, kwargs)

    def _unseen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the name of *func* where torch would count nothing, or would have to read from the device."""
        packet = getattr(func, "_overloadpacket", func)
        formula = flop_counter.flop_registry.get(packet)
        if formula is None:
            namespace = getattr(func, "namespace", "")
            return "" if namespace in _OF_TORCH else str(func)
        # A formula that is given shapes is wrapped; the others look into tensors, and some read them.
        if not hasattr(formula, "__wrapped__") and any(map(_is_index, (*args, *kwargs.values()))):
            self.counter.flop_registry = {
                key: held for key, held in self.counter.flop_registry.items() if key != packet
            }
            return f"{func} of sequences of different lengths"
        return ""


def _base_dispatch() -> Any:
    """Return torch's own method; while Dynamo is not there, as it is inside what hides it from Dynamo.

    What hides it imports Dynamo, which takes two seconds.
    """
    method = _Base.__torch_dispatch__
    return method if _DYNAMO in sys.modules else getattr(method, "__wrapped__", method)


def _is_index(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def _compile_in_use() -> bool:
    """Return whether anything was given to ``torch.compile`` in this process."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    backends = getattr(dynamo, "cached_backends", None)
    return backends is None or any(map(callable, backends.values()))
