"""Work: how much a call has to do, as its user states it. Set beside the device's time it is a throughput."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

from gpu_timed.errors import ConfigurationError, unknown_value

COUNT: Final = "count"
"""``work="count"``: torch's own counter counts the first call of each input signature."""

DTYPES: Final = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4", "int4")
"""Types of number that a device may have a peak of its own for: what goes *into* its multipliers."""
_ALIASES: Final = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "tensorfloat32": "tf32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "uint8": "int8",
}


@dataclass(frozen=True, slots=True)
class Work:
    """How much one call has to do. Give ``flops``, ``bytes`` or both.

    ``Work(flops=2 * M * N * K, dtype="bf16")`` is a matrix product; a copy of n bytes is ``Work(bytes=2 * n)``:
    every byte is read and written.

    Args:
        flops: Floating-point operations of one call; a multiply and an add are two.
        bytes: Bytes that one call must read and write in the device's memory.
        dtype: Type of number of the multiplications, which says which peak ``flops`` are held against: one of
            :data:`DTYPES`, or a dtype of torch, NumPy or JAX. Without it, the highest peak of the device.

    Raises:
        ConfigurationError: Neither is given, or a value cannot be used.
    """

    flops: float | None = None
    bytes: float | None = None
    dtype: Any = None

    def __post_init__(self) -> None:
        if self.flops is None and self.bytes is None:
            raise ConfigurationError(
                "Work() says nothing: give flops=, bytes= or both, as in Work(flops=2 * M * N * K)."
            )
        for name in ("flops", "bytes"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _amount(name, value))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))


def _amount(name: str, value: Any) -> float:
    # Nothing is asked of a tensor: turning one into a number would wait for the device.
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ConfigurationError(
            f"Work({name}=...) must be a number, not {type(value).__name__}: work it out from shapes, "
            "which are plain numbers and cost no wait."
        )
    plain: float = operator.index(value) if isinstance(value, Integral) else float(value)
    if not (plain >= 0 and math.isfinite(plain)):
        raise ConfigurationError(
            f"Work({name}={value!r}) must be 0 or more, and finite: give what one call does, as in 2 * M * N * K."
        )
    return plain


def dtype_name(value: Any) -> str:
    """Return which of :data:`DTYPES` *value* names, a text or a dtype of torch, NumPy or JAX.

    Raises:
        ConfigurationError: None of them.
    """
    if isinstance(value, str):
        text = value
    else:  # numpy.dtype has a name, numpy.float32 and jax.numpy.bfloat16 a __name__; torch's own text is torch.float32
        text = str(getattr(value, "name", None) or getattr(value, "__name__", None) or value)
    short = text.lower().rpartition(".")[2]
    for begin, found in (("float8", "fp8"), ("float4", "fp4"), ("qint8", "int8"), ("quint8", "int8")):
        if short.startswith(begin):
            return found
    short = _ALIASES.get(short, short)
    if short not in DTYPES:
        raise unknown_value("dtype", text, DTYPES)
    return short


def check_work(value: Any) -> None:
    """Raise ConfigurationError unless *value* can be a site's ``work=``."""
    if not (isinstance(value, Work) or value == COUNT or (callable(value) and not isinstance(value, type))):
        shown = repr(value) if isinstance(value, str) else type(value).__name__
        raise ConfigurationError(
            f"work must be a Work, a function of the call's arguments that returns one, or {COUNT!r}, not {shown}: "
            "write work=Work(flops=2 * M * N * K)."
        )


def one_work(work: Any) -> Work:
    """Return *work*.

    Raises:
        ConfigurationError: It is no :class:`Work`.
    """
    if not isinstance(work, Work):
        raise ConfigurationError(
            f"set_work() takes a Work, not {type(work).__name__}: span.set_work(Work(flops=2 * M * N * K))."
        )
    return work
