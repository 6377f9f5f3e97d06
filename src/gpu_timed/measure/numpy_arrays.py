"""Arrays of NumPy, and of JAX and CuPy by way of it, copied and held against each other. The leaf: NumPy comes here."""

from __future__ import annotations

import importlib
from typing import Any, Final

from gpu_timed.measure.difference import Difference

TOLERANCE: Final = {"float64": 1e-7, "complex128": 1e-7, "float32": 1e-4, "complex64": 1e-4, "float16": 2e-2}
"""As of tensors: see :mod:`gpu_timed.measure.torch_arrays`. Types with fewer bits (``bfloat16``): 0.05."""
_OTHER: Final = 5e-2


def _numpy(array: Any) -> Any:
    numpy: Any = importlib.import_module("numpy")
    if not isinstance(array, numpy.ndarray | numpy.generic) and hasattr(type(array), "get"):  # CuPy
        array = array.get()
    return numpy.asarray(array)


def copied(array: Any) -> Any:
    """Return an array of NumPy's with the same content. Waits for the device."""
    return _numpy(array).copy()


def size(array: Any) -> int:
    """Return how many bytes it has."""
    return int(array.nbytes)


def version(array: Any) -> int | None:  # noqa: ARG001 - nobody counts
    """Return None: nobody counts the changes of an array."""
    return None


def difference(expected: Any, found: Any, tolerance: float | None = None) -> Difference:
    """Return how *found* differs from *expected*; NaN is equal to NaN."""
    numpy: Any = importlib.import_module("numpy")
    mine, other = _numpy(expected), _numpy(found)
    if mine.shape != other.shape or mine.dtype != other.dtype:
        return Difference(f"{other.shape} of {other.dtype} in place of {mine.shape} of {mine.dtype}", exact=False)
    name = mine.dtype.name
    is_number = mine.dtype.kind in "fc" or name.startswith(("bfloat", "float8"))
    if not is_number:
        if numpy.array_equal(mine, other):
            return Difference("")
        if mine.dtype.kind not in "iub":
            return Difference(f"arrays of {name} differ", exact=False)
        most = float(numpy.abs(other.astype("float64") - mine.astype("float64")).max())
        return Difference(f"whole numbers differ by up to {most:.0f}", most, exact=False)
    allowed = TOLERANCE.get(name, _OTHER) if tolerance is None else tolerance
    wide = "complex128" if mine.dtype.kind == "c" else "float64"
    mine, other = mine.astype(wide), other.astype(wide)
    with numpy.errstate(all="ignore"):
        same = (mine == other) | (numpy.isnan(mine) & numpy.isnan(other))
        if same.all():
            return Difference("")
        apart = numpy.where(same, 0.0, numpy.abs(other - mine))
        sizes = numpy.where(numpy.isfinite(mine), numpy.abs(mine), 0.0)
        usual = numpy.sqrt(numpy.square(sizes).mean())
        rel = numpy.where(same, 0.0, apart / numpy.maximum(sizes, usual))
        count = int((~same & ~(apart <= allowed * (sizes + usual))).sum())
        most = float(numpy.nan_to_num(apart, nan=numpy.inf).max())
        most_rel = float(numpy.nan_to_num(rel, nan=numpy.inf).max())
    text = (
        f"{count:,} of {mine.size:,} numbers of {name} differ, by up to {most:.3g} ({most_rel:.2g} of their size)"
        if count
        else ""
    )
    return Difference(text, most, most_rel, exact=False)
