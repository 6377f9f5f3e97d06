"""Where torch's current work goes: its current device and that device's current stream.

Private names used, with the versions seen: ``torch._C._cuda_getDevice``, ``_cuda_getCurrentRawStream``
(which Inductor's generated code calls as well) and ``_cuda_isCurrentStreamCapturing``; 2.6 to 2.14.
Where one is missing the public, slower call does the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from gpu_timed.clocks.cuda_event import CAPTURED
from gpu_timed.clocks.cuda_places import NO_DEVICE, CudaPlaces
from gpu_timed.ports import Launch, Place
from gpu_timed.record import Missing

NO_CUDA_BUILD: Final = Missing("no_device", "this build of torch has no CUDA")
UNSUPPORTED: Final = Missing("unsupported_runtime", "torch for ROCm: its events are not read yet")


class TorchLocator:
    """Finds torch in the process without importing it, and waits for torch to initialise CUDA itself."""

    def __init__(self, cuda: CudaPlaces | None = None) -> None:
        self._cuda = cuda or CudaPlaces()
        self._places = self._cuda.held
        self._attached = False
        self._absent: Missing | None = None
        self._get_device: Callable[[], int]
        self._get_stream: Callable[[int], int]
        self._capturing: Callable[[], bool]
        self._tensor: type[Any] | None = None

    def locate(self, launch: Launch | None = None) -> Place | Missing:  # noqa: ARG002 - Triton's launches go where torch's do
        """Return torch's current device and stream, or why there is none."""
        if not self._attached:
            absent = self._attach()
            if absent is not None:
                return absent
        try:
            device = self._get_device()
            stream = self._get_stream(device)
            if self._capturing():
                return CAPTURED
        except RuntimeError as error:
            # The capture question fails on a stream that a foreign capture depends on, and in a process
            # whose device is in error.
            return CAPTURED if "captur" in str(error) else Missing("device_error", str(error).partition("\n")[0])
        place = self._places.get((device, stream))
        return place if place is not None else self._cuda.at(device, stream)

    def device_of(self, value: Any) -> int | None:
        """Return the device of a tensor, or of the first tensor in a tuple, list or dict."""
        tensor = self._tensor
        if tensor is None:
            self._attach()
            tensor = self._tensor
            if tensor is None:
                return None
        if isinstance(value, dict):
            value = next(iter(value.values()), None)
        elif isinstance(value, tuple | list):
            value = value[0] if value else None
        if isinstance(value, tensor) and value.is_cuda:
            return int(value.get_device())
        return None

    def _attach(self) -> Missing | None:
        """Take hold of torch once it has initialised CUDA; until then say why there is nothing to mark."""
        if self._absent is not None:
            return self._absent
        torch: Any = sys.modules.get("torch")
        cuda: Any = getattr(torch, "cuda", None)
        version: Any = getattr(torch, "version", None)
        if cuda is None or version is None or not hasattr(cuda, "is_initialized"):  # absent, or half imported
            return self._cuda.not_yet()
        if getattr(version, "hip", None):
            self._absent = UNSUPPORTED
        elif getattr(version, "cuda", None) is None:
            self._absent = NO_CUDA_BUILD
        if self._absent is not None:
            return self._absent
        if not cuda.is_initialized():
            return self._cuda.not_yet()
        native: Any = torch._C  # noqa: SLF001 - versions in the module's docstring
        self._get_device = getattr(native, "_cuda_getDevice", cuda.current_device)
        self._get_stream = getattr(
            native, "_cuda_getCurrentRawStream", lambda device: int(cuda.current_stream(device).cuda_stream)
        )
        self._capturing = getattr(native, "_cuda_isCurrentStreamCapturing", cuda.is_current_stream_capturing)
        self._tensor = torch.Tensor
        if self._cuda.clock() is None:
            self._absent = NO_DEVICE
        else:
            self._attached = True
        return self._absent
