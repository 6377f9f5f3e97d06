"""The calls of the CUDA driver that make and launch a graph, straight from ``libcuda``.

Not ``torch.cuda.CUDAGraph``, where that can be helped: up to torch 2.11 at least its ``capture_begin`` puts the default
random generator of the device into capture mode, for all threads. Until it ends, whoever draws a random number there
or replays any graph of torch's gets "Offset increment outside graph capture encountered unexpectedly"; and after a
capture that failed, for good.

Names and signatures: CUDA driver API reference, modules Stream Management and Graph Management, CUDA 12.0 to 13.0.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from typing import Any, Final

_THREAD_LOCAL: Final = 1
_NON_BLOCKING: Final = 1
_FLAGS: Final = 1 | 8
"""``AUTO_FREE_ON_LAUNCH`` and ``USE_NODE_PRIORITY``, as torch instantiates its own."""
_OUT_OF_MEMORY: Final = 2
_INVALIDATED: Final = 901
_NO_CONTEXT: Final = 201
_pointer = ctypes.c_void_p
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuStreamCreate": (_pointer, ctypes.c_uint),
    "cuStreamIsCapturing": (_pointer, _pointer),
    "cuStreamBeginCapture_v2": (_pointer, ctypes.c_int),
    "cuStreamEndCapture": (_pointer, _pointer),
    "cuThreadExchangeStreamCaptureMode": (_pointer,),
    "cuGraphInstantiateWithFlags": (_pointer, _pointer, ctypes.c_ulonglong),
    "cuGraphLaunch": (_pointer, _pointer),
    "cuGraphDestroy": (_pointer,),
    "cuGraphExecDestroy": (_pointer,),
    "cuGetErrorName": (ctypes.c_int, _pointer),
}


class Refused(Exception):  # noqa: N818 - the driver did
    """The driver refused something.

    Args:
        what: What was asked of it.
        code: Its ``CUresult``.
    """

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what}: {_name_of(code)}")
        #: Whether it may go well the next time: another thread broke the capture, or memory was short.
        self.passing = code in {_INVALIDATED, _OUT_OF_MEMORY}
        #: Whether this thread has not yet touched a device.
        self.no_context = code == _NO_CONTEXT


@functools.cache
def load() -> Any:
    """Return ``libcuda`` with its signatures set, or None where this machine's driver has not all of them."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        for function, arguments in _SIGNATURES.items():
            entry = getattr(library, function)
            entry.argtypes, entry.restype = arguments, ctypes.c_int
    except (OSError, AttributeError):
        return None
    return library


def _name_of(code: int) -> str:
    name = ctypes.c_char_p()
    library = load()
    if library is not None:
        library.cuGetErrorName(code, ctypes.byref(name))
    return (name.value or b"").decode() or f"error {code}"


def _ask(what: str, *arguments: Any) -> None:
    code = getattr(load(), what)(*arguments)
    if code:
        raise Refused(what, code)


def new_stream() -> int:
    """Return a stream on the current device that is nobody else's: torch hands out each of its 32 again and again."""
    stream = _pointer()
    _ask("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
    return int(stream.value or 0)


def is_capturing(stream: int) -> bool:
    """Return whether *stream* is being captured; or whether that cannot be known, which is taken for the same."""
    status = ctypes.c_int()
    return bool(load().cuStreamIsCapturing(stream, ctypes.byref(status))) or status.value != 0


@contextlib.contextmanager
def strict_for_this_thread_alone() -> Iterator[None]:
    """Have what a capture forbids break a capture of this thread, and no other thread's."""
    library, mode = load(), ctypes.c_int(_THREAD_LOCAL)
    library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def begin(stream: int) -> None:
    """Begin to capture *stream*: no other thread's calls break it."""
    _ask("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL)


def abandon(stream: int) -> None:
    """End a capture that is of no use, whatever is left of it."""
    graph = _pointer()
    load().cuStreamEndCapture(stream, ctypes.byref(graph))
    if graph.value:
        load().cuGraphDestroy(graph)


def end(stream: int) -> int:
    """End the capture of *stream*; return what can be launched."""
    graph, executable = _pointer(), _pointer()
    _ask("cuStreamEndCapture", stream, ctypes.byref(graph))
    try:
        _ask("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, _FLAGS)
    finally:
        load().cuGraphDestroy(graph)
    return int(executable.value or 0)


def launch(executable: int, stream: int) -> None:
    """Queue it on *stream*, which belongs to the current device."""
    code = load().cuGraphLaunch(executable, stream)
    if code:
        raise Refused("cuGraphLaunch", code)


def destroy(executable: int) -> None:
    """Let it go. What is running of it runs to its end: the driver frees it then."""
    load().cuGraphExecDestroy(executable)
