"""A kernel of known duration in Numba, whose special registers are read by intrinsics of inline PTX.

Registers and layout of the stamps as in :mod:`gpu_timed.measure.triton_spin`. Names used:
``numba.cuda.extending.intrinsic`` (numba-cuda; before it ``numba.extending.intrinsic``), ``cuda.as_cuda_array``,
``cuda.external_stream``; numba-cuda 0.30 was read.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from llvmlite import ir
from numba import cuda, types

from gpu_timed.measure.rig import STAMPS_KEPT

try:
    from numba.cuda.extending import intrinsic
except ImportError:
    from numba.extending import intrinsic


def _register(name: str) -> Any:
    """Return a function for kernels that reads the special register *name*."""

    @intrinsic  # type: ignore[untyped-decorator]
    def read(typing_context: Any) -> Any:  # noqa: ARG001 - the shape of an intrinsic
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
            kind = ir.FunctionType(ir.IntType(64), [])
            return builder.call(ir.InlineAsm(kind, f"mov.u64 $0, %{name};", "=l", side_effect=True), [])

        return types.int64(), generate

    return read


_now = _register("globaltimer")
_cycles = _register("clock64")


@cuda.jit
def _spin(stamps, duration_ns, kept):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    turn = stamps[0]
    first = _cycles()
    begin = _now()
    now = begin
    while now - begin < duration_ns:
        now = _now()
    last = _cycles()
    slot = 1 + 3 * (turn & (kept - 1))
    stamps[slot] = begin
    stamps[slot + 1] = now
    stamps[slot + 2] = last - first
    stamps[0] = turn + 1


@cuda.jit
def _read_timer(reads, count):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    for index in range(count):
        reads[index] = _now()


class NumbaSpin:
    """Launches by Numba's own launcher, on torch's current stream."""

    name = "Numba"
    stamped = True

    def __init__(self) -> None:
        self._launchers: dict[tuple[Any, int], Any] = {}
        self._arrays: dict[int, Any] = {}

    def launch(self, duration_ns: int, stamps: Any) -> None:
        """Queue a kernel of *duration_ns* that adds its stamps to the tensor *stamps*."""
        self._on_stream(_spin)(self._array(stamps), duration_ns, STAMPS_KEPT)

    def read_timer(self, reads: Any) -> None:
        """Queue a kernel that fills the tensor *reads* with readings of the timer."""
        self._on_stream(_read_timer)(self._array(reads), reads.numel())

    def _on_stream(self, kernel: Any) -> Any:
        raw = int(torch.cuda.current_stream().cuda_stream)
        launcher = self._launchers.get((kernel, raw))
        if launcher is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # one thread is few, and all that is wanted
                launcher = kernel[1, 1, cuda.external_stream(raw) if raw else 0]
            self._launchers[kernel, raw] = launcher
        return launcher

    def _array(self, tensor: Any) -> Any:
        array = self._arrays.get(tensor.data_ptr())
        if array is None:
            array = self._arrays[tensor.data_ptr()] = cuda.as_cuda_array(tensor)
        return array
