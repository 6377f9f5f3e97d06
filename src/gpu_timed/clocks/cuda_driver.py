"""The few calls of the CUDA driver that marks need, straight from ``libcuda``.

Why the driver and not a framework: raw streams of every runtime (torch, Numba, CuPy, JAX) are driver
streams; a driver call is cheaper than ``torch.cuda.Event.record``; and it leaves the runtime's "last
error" alone, so that asking a question here can neither swallow nor plant an error that the user's next
call would raise. Loading the library initialises nothing: ``cuInit`` is never called.

Names and signatures: CUDA driver API reference, modules Event Management, Stream Management, Primary
Context Management; driver 580 (CUDA 13.0) was the one measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

SUCCESS: Final = 0
NOT_READY: Final = 600
INVALID_CONTEXT: Final = 201
INVALID_HANDLE: Final = 400

RELAXED: Final = 2
"""``CU_STREAM_CAPTURE_MODE_RELAXED``: this thread's calls are not held against other threads' captures."""
_NON_BLOCKING: Final = 1
_MIG_UNKNOWN: Final = b"\0" * 16

_pointer = ctypes.c_void_p
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuEventCreate": (_pointer, ctypes.c_uint),
    "cuEventDestroy_v2": (_pointer,),
    "cuEventRecord": (_pointer, _pointer),
    "cuEventQuery": (_pointer,),
    "cuEventSynchronize": (_pointer,),
    "cuEventElapsedTime": (_pointer, _pointer, _pointer),
    "cuStreamIsCapturing": (_pointer, _pointer),
    "cuStreamCreate": (_pointer, ctypes.c_uint),
    "cuStreamDestroy_v2": (_pointer,),
    "cuThreadExchangeStreamCaptureMode": (_pointer,),
    "cuCtxPushCurrent_v2": (_pointer,),
    "cuCtxPopCurrent_v2": (_pointer,),
    "cuCtxSynchronize": (),
    "cuCtxGetDevice": (_pointer,),
    "cuDeviceGet": (_pointer, ctypes.c_int),
    "cuDeviceGetName": (_pointer, ctypes.c_int, ctypes.c_int),
    "cuDeviceGetUuid_v2": (_pointer, ctypes.c_int),
    "cuDevicePrimaryCtxGetState": (ctypes.c_int, _pointer, _pointer),
    "cuDevicePrimaryCtxRetain": (_pointer, ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuGetErrorName": (ctypes.c_int, _pointer),
}


def load() -> ctypes.CDLL | None:
    """Return ``libcuda`` with its signatures set, or None where this machine has no driver."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
        for function, arguments in _SIGNATURES.items():
            entry = getattr(library, function)
            entry.argtypes, entry.restype = arguments, ctypes.c_int
    except (OSError, AttributeError):
        return None
    return library


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Let nothing that this thread asks the driver be held against another thread's graph capture."""
    library = load()
    if library is None:
        yield
        return
    mode = ctypes.c_int(RELAXED)
    library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def device_present() -> bool:
    """Return whether this machine has an NVIDIA driver and a device node, without touching either."""
    if load() is None:
        return False
    if not sys.platform.startswith("linux"):
        return True
    nodes = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl", "/dev/nvmap")  # desktop and server, WSL, Jetson
    return any(os.path.exists(node) for node in nodes)


def error_name(library: ctypes.CDLL, code: int) -> str:
    """Return the driver's own name for an error *code*, such as ``CUDA_ERROR_ILLEGAL_ADDRESS``."""
    text = ctypes.c_char_p()
    if library.cuGetErrorName(code, ctypes.byref(text)) != SUCCESS or text.value is None:
        return f"CUDA error {code}"
    return text.value.decode()


def primary_context(library: ctypes.CDLL, device: int) -> int | None:
    """Return the handle of the primary context of *device* if the application has made it active.

    It is never created here, and its reference count is left as it was.
    """
    ordinal, flags, active, context = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int(), _pointer()
    if library.cuDeviceGet(ctypes.byref(ordinal), device) != SUCCESS:
        return None
    if library.cuDevicePrimaryCtxGetState(ordinal, ctypes.byref(flags), ctypes.byref(active)) != SUCCESS:
        return None
    if not active.value or library.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal) != SUCCESS:
        return None
    library.cuDevicePrimaryCtxRelease_v2(ordinal)
    return context.value


def current_device(library: ctypes.CDLL) -> int | None:
    """Return the device of the calling thread's current context, or None where the thread has none."""
    ordinal = ctypes.c_int()
    return ordinal.value if library.cuCtxGetDevice(ctypes.byref(ordinal)) == SUCCESS else None


def create_event(library: ctypes.CDLL) -> int:
    """Return a new timing event of the current context, or 0 if the driver refused."""
    handle = _pointer()
    return (handle.value or 0) if library.cuEventCreate(ctypes.byref(handle), 0) == SUCCESS else 0


def create_stream(library: ctypes.CDLL) -> int:
    """Return a new stream of the current context that does not wait for the default stream, or 0."""
    handle = _pointer()
    return (handle.value or 0) if library.cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING) == SUCCESS else 0


def describe(library: ctypes.CDLL, device: int) -> tuple[str | None, str | None]:
    """Return UUID (as NVML writes it: ``GPU-…``) and product name of *device*."""
    ordinal = ctypes.c_int()
    if library.cuDeviceGet(ctypes.byref(ordinal), device) != SUCCESS:
        return None, None
    raw = ctypes.create_string_buffer(16)
    uuid = None
    if library.cuDeviceGetUuid_v2(raw, ordinal) == SUCCESS and raw.raw != _MIG_UNKNOWN:
        digits = raw.raw.hex()
        parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        prefix = "MIG" if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-") else "GPU"
        uuid = f"{prefix}-{'-'.join(parts)}"
    text = ctypes.create_string_buffer(256)
    name = text.value.decode() if library.cuDeviceGetName(text, 256, ordinal) == SUCCESS else None
    return uuid, name
