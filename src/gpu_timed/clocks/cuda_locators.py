"""Where the work of CUDA runtimes other than torch goes: Numba, CuPy, Triton without torch.

Their contexts are the devices' primary ones, so the driver itself says which device the calling thread
uses; only the stream is the runtime's own. None of them is imported or initialised here. Public names
used: ``cupy.cuda.get_current_stream().ptr`` (13 and 14 seen), ``NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM``
and ``NUMBA_ENABLE_CUDASIM`` (Numba's documented variables; numba 0.61 to 0.68, numba-cuda to 0.30 seen).
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from gpu_timed.clocks.cuda_places import CudaPlaces
from gpu_timed.ports import Launch, Locator, Place
from gpu_timed.record import Missing

SIMULATED: Final = Missing("simulated")
_PER_THREAD: Final = 2
"""``CU_STREAM_PER_THREAD``."""


class _ByTorch:
    def device_of(self, value: Any) -> int | None:  # noqa: ARG002 - results are tensors, and torch knows those
        """Return None: not known here."""
        return None


class NumbaLocator(_ByTorch):
    """Numba's default stream in the thread's context, or the stream that a launch names."""

    def __init__(self, cuda: CudaPlaces) -> None:
        self._cuda = cuda
        per_thread = os.environ.get("NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM", "0")
        self._default = 0 if per_thread in ("", "0") else _PER_THREAD
        self._simulated: bool | None = None

    def locate(self, launch: Launch | None = None) -> Place | Missing:
        """Return where a launch in this thread goes, or why it goes nowhere."""
        if self._simulated is None:
            jit: Any = getattr(sys.modules.get("numba.cuda"), "jit", None)
            self._simulated = "simulator" in (getattr(jit, "__module__", None) or "")
        if self._simulated:
            return SIMULATED
        stream = launch.stream if launch is not None else None
        return self._cuda.of_thread(stream or self._default)


class CupyLocator(_ByTorch):
    """CuPy's current stream."""

    def __init__(self, cuda: CudaPlaces) -> None:
        self._cuda = cuda

    def locate(self, launch: Launch | None = None) -> Place | Missing:  # noqa: ARG002 - the current stream says it
        """Return where CuPy's work in this thread goes, or why it goes nowhere."""
        cupy: Any = sys.modules.get("cupy")
        stream = getattr(getattr(cupy, "cuda", None), "get_current_stream", None)
        if stream is None:  # half imported
            return self._cuda.not_yet()
        return self._cuda.of_thread(int(stream().ptr))


class TritonLocator(_ByTorch):
    """Triton launches on torch's current stream; in a process without torch on the context's default one."""

    def __init__(self, cuda: CudaPlaces, torch: Locator) -> None:
        self._cuda = cuda
        self._torch = torch

    def locate(self, launch: Launch | None = None) -> Place | Missing:  # noqa: ARG002 - it names no stream
        """Return where a Triton launch in this thread goes, or why it goes nowhere."""
        if "torch" in sys.modules:
            return self._torch.locate()
        return self._cuda.of_thread(0)
