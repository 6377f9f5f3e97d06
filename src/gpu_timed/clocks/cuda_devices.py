"""For the doctor: which devices there are, and a bench on one of them.

What the library never does is done here, and only where the user asks for a diagnosis: ``cuInit``, and a
context on a device that has none. Both are undone as far as they can be: the context is released
afterwards; ``cuInit`` stays, and CUDA does not survive a fork after it.

Names: CUDA driver API reference, modules Initialization, Device Management, Primary Context Management,
Memory Management.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from gpu_timed.clocks import cuda_driver as driver
from gpu_timed.clocks import nvml
from gpu_timed.clocks.cuda_event import CudaEventClock
from gpu_timed.errors import DeviceFault
from gpu_timed.findings import DeviceFacts, Inventory
from gpu_timed.ports import Bench, Place

_NOT_INITIALISED: Final = 3
_NO_DEVICE: Final = 100
_COMPUTE_MODE: Final = 20
"""``CU_DEVICE_ATTRIBUTE_COMPUTE_MODE``."""
_SCRATCH_BYTES: Final = 64 << 20
_FILLS: Final = 32
"""Filling 64 MiB takes an H200 some 15 µs, a MIG slice longer: together, several times what queueing marks takes."""
_VERSION_FILES: Final = (Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version"))

_pointer = ctypes.c_void_p
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDriverGetVersion": (_pointer,),
    "cuDeviceGetCount": (_pointer,),
    "cuDeviceGetAttribute": (_pointer, ctypes.c_int, ctypes.c_int),
    "cuDeviceTotalMem_v2": (_pointer, ctypes.c_int),
    "cuStreamSynchronize": (_pointer,),
    "cuMemAlloc_v2": (_pointer, ctypes.c_size_t),
    "cuMemFree_v2": (ctypes.c_uint64,),
    "cuMemsetD8Async": (ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, _pointer),
}


def load() -> ctypes.CDLL | None:
    """Return ``libcuda`` with the signatures that a diagnosis needs as well, or None without a driver."""
    library = driver.load()
    if library is None:
        return None
    try:
        for function, arguments in _SIGNATURES.items():
            entry = getattr(library, function)
            entry.argtypes, entry.restype = arguments, ctypes.c_int
    except AttributeError:  # a driver too old to know them, as in driver.load
        return None
    return library


def driver_cuda(library: Any) -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver runs, or None. Initialises nothing."""
    version = ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(version)) != driver.SUCCESS or not version.value:
        return None
    return version.value // 1000, version.value % 1000 // 10


def initialised() -> bool:
    """Return whether this process has initialised the driver, without doing so, and without loading it anew."""
    if sys.platform.startswith("linux"):
        try:  # a library that nobody has loaded is initialised by nobody
            ctypes.CDLL("libcuda.so.1", mode=getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_LAZY)
        except OSError:
            return False
    library = load()
    count = ctypes.c_int()
    return library is not None and library.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALISED


def driver_version(files: tuple[Path, ...] = _VERSION_FILES) -> str | None:
    """Return the kernel driver's version, such as ``580.95.05``, as far as the kernel shows it."""
    for file in files:
        try:
            match = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
        if match:
            return match[0]
    return None


def inventory(library: Any, *, initialise: bool, ask_nvml: Callable[[], Inventory] = nvml.inventory) -> Inventory:
    """Return the devices that this process sees.

    Args:
        library: As :func:`load` returns it.
        initialise: Whether the driver may be initialised. Where it is not and must not be, NVML is asked alone.
        ask_nvml: Where the rest of the answers come from.
    """
    if library is None:
        return Inventory(absent="no_driver")
    asked = ask_nvml()
    version = driver_version() or asked.driver_version
    code = library.cuInit(0) if initialise else driver.SUCCESS
    count = ctypes.c_int()
    if code == driver.SUCCESS:
        code = library.cuDeviceGetCount(ctypes.byref(count))
    if code == _NOT_INITIALISED and not initialise:
        absent = "" if asked.devices else "not_initialised"
        return dataclasses.replace(asked, absent=absent, driver_version=version)
    if code != driver.SUCCESS or not count.value:
        absent = "no_device" if code in (driver.SUCCESS, _NO_DEVICE) else driver.error_name(library, code)
        return Inventory(absent=absent, driver_version=version, nvml=asked.nvml)
    of_nvml = {_digits(held.uuid): held for held in asked.devices if held.uuid}
    devices = tuple(_facts(library, index, of_nvml) for index in range(count.value))
    return Inventory(devices=devices, source="driver", driver_version=version, nvml=asked.nvml)


@contextlib.contextmanager
def bench(library: Any, index: int, now_ns: Callable[[], int] = time.perf_counter_ns) -> Iterator[Bench]:
    """Open device *index* for the length of the block, with a stream, a clock and work of its own.

    Raises:
        DeviceFault: The device cannot be opened; the driver's name for why.
    """
    ordinal, context = ctypes.c_int(), _pointer()
    _check(library, library.cuInit(0))
    _check(library, library.cuDeviceGet(ctypes.byref(ordinal), index))
    _check(library, library.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal))
    with contextlib.ExitStack() as stack:
        stack.callback(library.cuDevicePrimaryCtxRelease_v2, ordinal)
        _check(library, library.cuCtxPushCurrent_v2(context))
        stack.callback(library.cuCtxPopCurrent_v2, ctypes.byref(_pointer()))
        clock = CudaEventClock(library, now_ns)
        stack.enter_context(clock.unhindered())  # a capture in another thread must not notice
        stack.callback(clock.close)
        stream = driver.create_stream(library)
        if not stream:
            raise DeviceFault("no stream could be created")
        stack.callback(library.cuStreamDestroy_v2, stream)
        memory = ctypes.c_uint64()
        busy = None
        if library.cuMemAlloc_v2(ctypes.byref(memory), _SCRATCH_BYTES) == driver.SUCCESS:
            stack.callback(library.cuMemFree_v2, memory.value)
            stack.callback(library.cuStreamSynchronize, stream)
            busy = _filler(library, memory.value, stream)
        yield Bench(Place(clock, index, stream), now_ns, busy)


def _filler(library: Any, memory: int, stream: int) -> Callable[[], None]:
    def fill() -> None:
        for _ in range(_FILLS):
            library.cuMemsetD8Async(memory, 0, _SCRATCH_BYTES, stream)

    fill()  # the first loads the driver's kernel
    library.cuStreamSynchronize(stream)
    return fill


def _facts(library: Any, index: int, of_nvml: dict[str, DeviceFacts]) -> DeviceFacts:
    ordinal, mode, memory = ctypes.c_int(), ctypes.c_int(-1), ctypes.c_size_t()
    library.cuDeviceGet(ctypes.byref(ordinal), index)
    library.cuDeviceGetAttribute(ctypes.byref(mode), _COMPUTE_MODE, ordinal)
    sized = library.cuDeviceTotalMem_v2(ctypes.byref(memory), ordinal) == driver.SUCCESS
    uuid, name = driver.describe(library, index)
    known = of_nvml.get(_digits(uuid)) if uuid else None
    return DeviceFacts(
        index=index,
        uuid=known.uuid if known else uuid,  # NVML knows for certain whether it is GPU-… or MIG-…
        name=name,
        memory_bytes=memory.value if sized else None,
        compute_mode=nvml.COMPUTE_MODES.get(mode.value, "unknown"),
        mig=known.mig if known else (True if uuid and uuid.startswith("MIG-") else None),
        in_use=driver.primary_context(library, index) is not None,
    )


def _digits(uuid: str | None) -> str:
    return (uuid or "").partition("-")[2].lower()


def _check(library: Any, code: int) -> None:
    if code != driver.SUCCESS:
        raise DeviceFault(driver.error_name(library, code))
