"""The memory of tensors: where it is, whether it is another's too, and a copy of it that lies as it does."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any

import torch


def is_made_of_others(kind: type) -> bool:
    """Return whether tensors of this class have no memory of their own: distributed, quantised, jagged ones, say.

    Private, versions seen 2.6 to 2.13: ``torch._C._disabled_torch_dispatch_impl``, which a class has whose tensors are
    as any other.
    """
    dispatch = getattr(kind, "__torch_dispatch__", None)
    return dispatch is not None and dispatch is not torch._C._disabled_torch_dispatch_impl  # noqa: SLF001


def memory_behind(tensors: Iterable[Any], most_bytes: int) -> list[Any] | None:
    """Return the memory behind *tensors*, which is not freed as long as that is held; None if it is more than that."""
    found = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors if has(tensor))}
    return list(found.values()) if sum(map(torch.UntypedStorage.nbytes, found.values())) <= most_bytes else None


class Shares:
    """Tells whether arguments share memory that a call changes, by the addresses of their first and last elements.

    Args:
        like: The arguments of one such call.
        changed: Which of them it changes.
        written: What else it changes.
        read: What else it may read. Of both all of the memory behind them counts.
    """

    def __init__(self, like: list[Any], changed: list[bool], written: Iterable[Any], read: Iterable[Any]) -> None:
        self._lengths = [_extent(tensor) * tensor.element_size() if tensor.numel() else 0 for tensor in like]
        self._changed = changed
        written = list(map(_memory, written))
        self._written = _merged(written)
        self._all = _merged([*written, *map(_memory, filter(has, read))]) if any(changed) else self._written
        self._apart: list[int] = []

    def __call__(self, tensors: Sequence[Any]) -> bool:
        """Return whether *tensors*, which are like those, do."""
        starts = list(map(torch.Tensor.data_ptr, tensors))
        if starts == self._apart:  # as in the last call, mostly
            return False
        last = last_changed = 0
        for start, length, changed in sorted(zip(starts, self._lengths, self._changed, strict=True)):
            if not length:
                continue
            end = start + length
            if start < (last if changed else last_changed):
                return True
            last = max(last, end)
            last_changed = max(last_changed, end) if changed else last_changed
            others = self._all if changed else self._written
            index = bisect.bisect_left(others, (end, 0)) - 1
            if index >= 0 and others[index][1] > start:
                return True
        self._apart = starts
        return False


def has(tensor: Any) -> bool:
    """Return whether *tensor* has memory: one made of others has none, and its storage raises when asked for it."""
    return bool(tensor.data_ptr())


def _memory(tensor: Any) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(set(ranges)):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif start < end:
            found.append((start, end))
    return found


def _extent(tensor: Any) -> int:
    """Return how many elements lie from the first of *tensor* to its last, those between them included."""
    steps: list[int] = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return 1 + sum(steps)


def standing_in(tensor: Any) -> Any:
    """Return a tensor of the same shape, strides and content as *tensor*, of its own."""
    with torch.no_grad():
        base = torch.empty(max(1, _extent(tensor)), dtype=tensor.dtype, device=tensor.device)
        made = base.as_strided(tensor.shape, tensor.stride())
        made.copy_(tensor)
    return made


def overlaps(tensor: Any) -> bool:
    """Return whether two elements of *tensor* are one place in memory, as in what ``expand`` gives."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
