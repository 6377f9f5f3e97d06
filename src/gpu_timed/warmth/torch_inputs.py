"""cuDNN's benchmark mode: with ``torch.backends.cudnn.benchmark`` on, a convolution tunes itself for each new shape.

No hook sees that. What it tunes for is the shape, strides, dtype, device and alignment (up to 16 bytes) of its input,
anew on each thread (torch's ``Conv_v8.cpp``), so a call with inputs that its site has not had yet may have tuned.
Private: ``torch._C._get_cudnn_benchmark`` (2.6 to 2.14; 20 ns, the public property takes 150).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Mapping
from types import ModuleType
from typing import Any, Final

from gpu_timed.warmth.ring import Ring

_MOST_TENSORS: Final = 32
_DEEPEST: Final = 3


def attach(module: ModuleType, ring: Ring) -> None:
    """Have *ring* say whether cuDNN tunes itself, and what of a call's inputs it does that for."""
    torch: Any = module
    tensor: type[Any] = torch.Tensor
    ring.sign = lambda arguments, named: _signature(tensor, arguments, named)
    ring.tunes_by_shape = getattr(torch._C, "_get_cudnn_benchmark", None)  # noqa: SLF001 - version above


def _signature(tensor: type[Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Hashable | None:
    found: list[Hashable] = []
    _collect(tensor, arguments, found, _DEEPEST)
    if named:
        _collect(tensor, named.values(), found, _DEEPEST)
    return (threading.get_ident(), *found) if found else None


def _collect(tensor: type[Any], values: Iterable[Any], found: list[Hashable], deeper: int) -> None:
    for value in values:
        if len(found) >= _MOST_TENSORS:
            return
        if isinstance(value, tensor):
            offset = value.storage_offset() * value.itemsize
            found.append((tuple(value.shape), value.stride(), value.dtype, value.device, offset & -offset & 15))
        elif deeper and isinstance(value, list | tuple):
            _collect(tensor, value[:_MOST_TENSORS], found, deeper - 1)
        elif deeper and isinstance(value, dict) and len(value) <= _MOST_TENSORS:
            _collect(tensor, value.values(), found, deeper - 1)
