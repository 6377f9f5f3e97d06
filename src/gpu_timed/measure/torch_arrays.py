"""Tensors of torch, copied and held against each other. The leaf: torch is imported here.

Private, versions seen 2.6 to 2.13: ``Tensor._version``, which autograd counts every change in place by.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from gpu_timed.measure.difference import Difference

TOLERANCE: Final[dict[Any, float]] = {
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}
"""Part of a number, and of the root mean square of its tensor, by which it may differ: some ten times what
``torch.testing.assert_close`` allows for one operation, since compiled code fuses and adds up in another order, and a
model is many operations deep. Whole numbers and truth values must be equal."""


def copied(tensor: Any) -> Any:
    """Return a tensor of its own with the same content."""
    return tensor.detach().clone()


def size(tensor: Any) -> int:
    """Return how many bytes it has."""
    return int(tensor.numel() * tensor.element_size())


def version(tensor: Any) -> int | None:
    """Return how often it was changed in place by operations of torch; None where nobody counts."""
    try:
        return int(tensor._version)  # noqa: SLF001 - versions in the module's docstring
    except (RuntimeError, AttributeError):  # inference tensors have none
        return None


def difference(expected: Any, found: Any, tolerance: float | None = None) -> Difference:
    """Return how *found* differs from *expected*; NaN is equal to NaN. Waits for the device."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        text = f"{tuple(found.shape)} of {found.dtype} in place of {tuple(expected.shape)} of {expected.dtype}"
        return Difference(text, exact=False)
    if expected.layout is not torch.strided or expected.is_quantized:
        expected, found = (each.dequantize() if each.is_quantized else each.to_dense() for each in (expected, found))
    with torch.no_grad():
        found = found.to(expected.device)
        if torch.equal(expected, found):
            return Difference("")
        if not (expected.is_floating_point() or expected.is_complex()):
            apart = (found.long() - expected.long()).abs()
            most = float(apart.max())
            return Difference(f"whole numbers differ by up to {most:.0f}", most, exact=False)
        allowed = TOLERANCE.get(expected.dtype, 1e-1) if tolerance is None else tolerance
        wide = torch.complex128 if expected.is_complex() else torch.float64
        mine, other = expected.to(wide), found.to(wide)
        same = (mine == other) | (mine.isnan() & other.isnan())
        apart = torch.where(same, 0.0, (other - mine).abs())
        sizes = torch.where(mine.isfinite(), mine.abs(), 0.0)
        usual = sizes.square().mean().sqrt()
        rel = torch.where(same, 0.0, apart / torch.maximum(sizes, usual))
        wrong = ~same & ~(apart <= allowed * (sizes + usual))  # so that a NaN is wrong
        most, most_rel = float(apart.nan_to_num(nan=float("inf")).max()), float(rel.nan_to_num(nan=float("inf")).max())
        count = int(wrong.sum())
    text = (
        f"{count:,} of {expected.numel():,} numbers of {expected.dtype} differ, by up to {most:.3g} "
        f"({most_rel:.2g} of their size)"
        if count
        else ""
    )
    return Difference(text, most, most_rel, bool(same.all()))


def is_tensor(value: Any) -> bool:
    """Return whether *value* is a tensor."""
    return isinstance(value, torch.Tensor)
