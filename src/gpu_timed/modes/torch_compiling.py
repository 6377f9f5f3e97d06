"""What is asked of ``torch.compile``. The leaf: torch is imported here.

Private, versions seen 2.6 to 2.13: ``torch._TorchCompileInductorWrapper``, subclassed so that a graph it cannot
compile runs as it is (where it is not there, the failure is torch's own); ``torch._dynamo.exc``, for what a failure
looks like; ``torch._dynamo.eval_frame.skip_code``, for what tells of graph breaks (where it is not there, only those
are told that leave two graphs or more); of ``torch._dynamo.utils.counters`` what ``frames`` says of frames that Dynamo
has met, and ``inductor`` of ``cudagraph_skips`` and, since 2.8 or so, ``cudagraph_partitions``, the parts of graphs
that were split, counted as they are compiled; and of CUDA Graph trees ``torch._inductor.cudagraph_trees.local``, which
up to 2.11 only threads have that imported it or work for autograd.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch._dynamo import eval_frame, exc
from torch._dynamo.utils import counters

from gpu_timed.mode_values import Compile
from gpu_timed.modes.torch_around import around_compiled as around  # noqa: F401 - asked for here, with all else

_LIMIT: Final[Any] = getattr(exc, "FailOnRecompileLimitHit", ())
FAILURES: Final[tuple[type[BaseException], ...]] = tuple(
    found
    for found in (getattr(exc, name, None) for name in ("TorchDynamoException", "FailOnRecompileLimitHit"))
    if found is not None
)
"""What Dynamo raises where it cannot compile."""
_skip_code: Final[Any] = getattr(eval_frame, "skip_code", None)
_Inductor: Any = getattr(torch, "_TorchCompileInductorWrapper", None)
_CONTROL: Final = (exc.TorchDynamoException,)
"""Passes between Dynamo and its backends, and is no failure."""
_THREAD: Final = (
    "the CUDA Graphs of torch.compile work only on the thread that first used them, in this version of torch"
)

ToText = Callable[[BaseException], str]


UNCOMPILED: Final = "torch ran it uncompiled"


class Seen:
    """How a call ran."""

    __slots__ = ("graphs", "in_parts", "prepared", "uncompiled")

    def __init__(self, prepared: threading.Event | None = None) -> None:
        #: What is to be set as the call comes to code of the user's.
        self.prepared = prepared
        #: Why it, or a part of it, ran uncompiled: ``UNCOMPILED`` where torch does not say; or nothing.
        self.uncompiled = ""
        #: How many graphs were compiled in it.
        self.graphs = 0
        #: Whether graph breaks split it: what torch compiled are parts of it.
        self.in_parts = False


class _Seeing(threading.local):
    def __init__(self) -> None:
        self.call = Seen()


_seeing: Final = _Seeing()


def _ran_uncompiled() -> None:
    _seeing.call.uncompiled = UNCOMPILED
    _prepared()


def _ran_in_parts() -> None:
    _seeing.call.in_parts = True
    _prepared()


def _prepared() -> None:
    prepared = _seeing.call.prepared
    if prepared is not None:
        prepared.set()


def begin(prepared: threading.Event | None = None) -> Seen:
    """Begin to watch, on this thread, how a call runs; returns what :func:`end` takes.

    *prepared* is set as soon as all that comes before the function's own code has been compiled.
    """
    before = _seeing.call
    _seeing.call = Seen(prepared)
    return before


def end(before: Seen) -> Seen:
    """Return how the call ran."""
    found = _seeing.call
    _seeing.call = before
    return found


def compile_for_site(function: Callable[..., Any], name: str, mode: Compile, to_text: ToText) -> Callable[..., Any]:
    """Return *function*, compiled as *mode* says. *to_text* puts into words why a backend could not compile."""
    backend: Any = mode.backend
    if backend == "inductor" and _Inductor is not None:
        backend = _Kept(mode, to_text)
    elif backend != "inductor":
        backend = _Guarded(backend, to_text)
    options: dict[str, Any] = {"backend": backend}
    if backend == "inductor" and mode.mode != "default":
        options["mode"] = mode.mode
    made: Callable[..., Any] = torch.compile(
        _around(function, name), fullgraph=mode.fullgraph, dynamic=mode.dynamic, **options
    )
    return made


def _around(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function of its own code around *function* that tells when it is not compiled, or in parts.

    Of a function with a graph break Dynamo runs the outermost call that it cannot take whole as it is, frame by frame:
    here that of ``inside``, a frame that it is not to compile.
    """
    is_compiled, ran_uncompiled, ran_in_parts = torch.compiler.is_dynamo_compiling, _ran_uncompiled, _ran_in_parts

    def inside(args: Any, kwargs: Any) -> Any:
        if not is_compiled():  # Dynamo takes it for True; and is_compiling() is so as long as any thread compiles
            ran_in_parts()
        return function(*args, **kwargs)

    if _skip_code is not None:
        _skip_code(inside.__code__)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_compiled():
            ran_uncompiled()
        return inside(args, kwargs)

    called = getattr(function, "__name__", None) or name
    if called == "_wrapped_call_impl":  # of every module of torch
        called = name
    code = call.__code__.replace(co_name=called, co_qualname=name)
    return types.FunctionType(code, globals(), called, None, call.__closure__)


_FRAMES: Final = frozenset(
    part.co_firstlineno for part in _around.__code__.co_consts if isinstance(part, types.CodeType)
)
"""Where the frames around a function begin, which have its name."""


class _Guarded:
    """A backend of the user's, whose failure leaves the graph to run as it is."""

    def __init__(self, backend: Any, to_text: ToText) -> None:
        from torch._dynamo.backends.registry import lookup_backend  # noqa: PLC0415 - imports all of them

        self._backend = lookup_backend(backend) if isinstance(backend, str) else backend
        self._to_text = to_text
        self.__name__ = str(getattr(self._backend, "__name__", type(self._backend).__name__))

    def __call__(self, module: Any, inputs: Any, **options: Any) -> Any:
        _seeing.call.graphs += 1
        try:
            return self._backend(module, inputs, **options)
        except _CONTROL:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a backend raises
            return _as_it_is(module, self._to_text(error))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


if _Inductor is not None:

    class _Kept(_Inductor):  # type: ignore[misc]
        """Inductor, whose failure leaves the graph to run as it is."""

        def __init__(self, mode: Compile, to_text: ToText) -> None:
            super().__init__(mode.mode, None, mode.dynamic)
            self._to_text = to_text

        __hash__ = None  # type: ignore[assignment] # as torch's own
        __eq__ = _Inductor.__eq__

        def __call__(self, module: Any, inputs: Any) -> Any:
            _seeing.call.graphs += 1
            try:
                return super().__call__(module, inputs)
            except _CONTROL:
                raise
            except Exception as error:  # noqa: BLE001 - whatever Inductor raises
                return _as_it_is(module, self._to_text(error))


def _as_it_is(module: Any, why: str) -> Callable[..., Any]:
    """Return what runs the graph *module* operation by operation, and tells that and *why* each time."""

    def run(*args: Any) -> Any:
        _seeing.call.uncompiled = f"in part or in whole: {why}"
        return module.forward(*args)

    return run


def has_run(error: BaseException) -> bool:
    """Return whether *error* came out of compiled code, and not of compiling it: whether a frame of it is passed."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_globals is globals() and frame.f_code.co_firstlineno in _FRAMES:
            return True
        trace = trace.tb_next
    return False


def is_limit(error: BaseException) -> bool:
    """Return whether *error* is the recompile limit: inputs that are compiled for still are."""
    return isinstance(error, _LIMIT) or "recompile_limit" in str(error) or "cache_size_limit" in str(error)


def skips() -> int:
    """Return how many graphs torch has not made CUDA Graphs of in this process."""
    return int(counters["inductor"]["cudagraph_skips"])


def partitions() -> int:
    """Return into how many parts torch has split what it could not capture in one piece, in this process."""
    return int(counters["inductor"]["cudagraph_partitions"])


def attempts() -> int:
    """Return how many frames Dynamo has set out to compile in this process."""
    return int(counters["frames"]["total"])


@functools.cache
def has_cuda() -> bool:
    """Return whether there is a CUDA device. Asked once: torch asks the driver each time."""
    return bool(torch.cuda.is_available())


def why_no_graphs() -> str:
    """Return why torch's CUDA Graphs cannot be used on this thread, or nothing."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or hasattr(trees, "_initialize_tls"):
        return ""
    held = "tree_manager_containers"
    if hasattr(getattr(trees, "local", None), held) or torch._C._is_key_in_tls(held):  # noqa: SLF001
        return ""
    return _THREAD


def cloned(result: Any) -> Any:
    """Return *result* with a copy of each CUDA tensor in it, wherever it stands."""
    if isinstance(result, torch.Tensor):  # to take a tree apart costs some 10 µs
        return _clone(result)
    return pytree.tree_map(_clone, result)


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value.is_cuda else value
