"""A kernel of known duration in CUDA C, compiled by CuPy and launched straight through the driver.

Registers and layout of the stamps as in :mod:`gpu_timed.measure.triton_spin`. Names used: ``cupy.RawKernel``,
``.compile()``, ``.kernel.ptr`` (CuPy 13 and 14); ``cuLaunchKernel`` of the CUDA driver, which takes a few
microseconds where CuPy's own launch takes more.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import cupy
import torch

from gpu_timed.clocks import cuda_driver
from gpu_timed.errors import DeviceFault
from gpu_timed.measure.rig import STAMPS_KEPT, NotTestable

_SOURCE: Final = r"""
#define NOW(into) asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(into))
#define CYCLES(into) asm volatile("mov.u64 %0, %%clock64;" : "=l"(into))

extern "C" __global__ void gpu_timed_spin(long long* stamps, long long duration_ns, long long kept) {
    long long turn = stamps[0], first, last, begin, now;
    CYCLES(first);
    NOW(begin);
    do { NOW(now); } while (now - begin < duration_ns);
    CYCLES(last);
    long long* slot = stamps + 1 + 3 * (turn & (kept - 1));
    slot[0] = begin;
    slot[1] = now;
    slot[2] = last - first;
    stamps[0] = turn + 1;
}

extern "C" __global__ void gpu_timed_read_timer(long long* reads, long long count, long long unused) {
    long long now;
    for (long long i = 0; i < count; ++i) {
        NOW(now);
        reads[i] = now;
    }
}
"""
_pointer = ctypes.c_void_p


class CupySpin:
    """Launches on torch's current stream."""

    name = "CuPy"
    stamped = True

    def __init__(self) -> None:
        library = cuda_driver.load()
        if library is None:
            raise NotTestable("there is no CUDA driver")
        self._library = library
        self._launch = library.cuLaunchKernel
        self._launch.argtypes = [_pointer, *[ctypes.c_uint] * 7, *[_pointer] * 3]
        self._launch.restype = ctypes.c_int
        self._kernels: list[Any] = [cupy.RawKernel(_SOURCE, f"gpu_timed_{name}") for name in ("spin", "read_timer")]
        for kernel in self._kernels:
            kernel.compile()
        self._spin, self._read_timer = (_pointer(int(kernel.kernel.ptr)) for kernel in self._kernels)

    def launch(self, duration_ns: int, stamps: Any) -> None:
        """Queue a kernel of *duration_ns* that adds its stamps to the tensor *stamps*."""
        self._queue(self._spin, stamps.data_ptr(), duration_ns, STAMPS_KEPT)

    def read_timer(self, reads: Any) -> None:
        """Queue a kernel that fills the tensor *reads* with readings of the timer."""
        self._queue(self._read_timer, reads.data_ptr(), reads.numel(), 0)

    def _queue(self, function: Any, memory: int, number: int, other: int) -> None:
        held = (_pointer(memory), ctypes.c_longlong(number), ctypes.c_longlong(other))
        arguments = (_pointer * 3)(*(ctypes.addressof(value) for value in held))
        stream = torch.cuda.current_stream().cuda_stream
        code = self._launch(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, None)
        if code != cuda_driver.SUCCESS:
            raise DeviceFault(cuda_driver.error_name(self._library, code))
