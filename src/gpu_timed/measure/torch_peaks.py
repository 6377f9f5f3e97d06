"""Large matrix products and copies by torch, timed by event pairs behind other work.

The same operation runs once before the first event, so that the pair holds no launch gap, then several times for one
reading. Names used (public; torch 2.6 to 2.13 read): ``torch.cuda.Event``, ``mem_get_info``,
``torch.backends.cuda.matmul.fp32_precision`` (2.9 on, else ``allow_tf32``). Private: ``torch._int_mm`` and
``torch._scaled_mm``; without them int8 and fp8 are not measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

_READING_NS: Final = 500_000
"""A reading takes about so long, so that the 1 µs of an event pair is nothing in it."""
_MOST: Final = 64
_DTYPES: Final = (
    ("bf16", "bfloat16", 2.0),
    ("fp16", "float16", 2.0),
    ("tf32", "float32", 4.0),
    ("fp32", "float32", 4.0),
    ("fp64", "float64", 8.0),
    ("fp8", "float8_e4m3fn", 1.0),
    ("int8", "int8", 1.0),
)


class TorchPeaks:
    """Works on torch's current device and stream."""

    def free_bytes(self) -> int:
        """Return how much of the device's memory nobody holds."""
        return int(torch.cuda.mem_get_info()[0])

    def dtypes(self) -> Sequence[tuple[str, float]]:
        """Return those that this torch has."""
        return [(name, width) for name, held, width in _DTYPES if hasattr(torch, held)]

    def product_ns(self, dtype: str, size: int) -> Callable[[], float]:
        """Prepare a product of random matrices."""
        torch.cuda.empty_cache()  # else cuBLAS takes its workspace, for good, out of what a large copy left behind
        held = getattr(torch, next(held for name, held, _ in _DTYPES if name == dtype))
        if dtype == "int8":
            a, b = (torch.randint(-64, 64, (size, size), device="cuda", dtype=held) for _ in range(2))
            return _repeated(lambda: torch._int_mm(a, b))  # noqa: SLF001 - versions in the module's docstring
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.float32).to(held) for _ in range(2))
        if dtype == "fp8":
            one, columns = torch.ones((), device="cuda"), b.t()
            return _repeated(
                lambda: torch._scaled_mm(  # noqa: SLF001
                    a, columns, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
                )
            )
        out = torch.empty_like(a)
        run = _repeated(lambda: torch.mm(a, b, out=out))
        if dtype not in ("tf32", "fp32"):
            return run

        def with_precision() -> float:
            with _precision("tf32" if dtype == "tf32" else "ieee"):
                return run()

        return with_precision

    def copy_ns(self, nbytes: int) -> Callable[[], float]:
        """Prepare a copy."""
        source, target = (torch.ones(nbytes // 4, dtype=torch.int32, device="cuda") for _ in range(2))
        return _repeated(lambda: target.copy_(source))

    def close(self) -> None:
        """Give torch's memory back to the device."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _repeated(operation: Callable[[], Any]) -> Callable[[], float]:
    """Return what runs *operation* often enough for one reading, for its nanoseconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count = [1]

    def run() -> float:
        with torch.no_grad():
            for _ in range(max(1, count[0] // 4)):  # what is measured is launched while these run
                operation()
            begin.record()
            for _ in range(count[0]):
                operation()
            end.record()
        end.synchronize()
        each = float(begin.elapsed_time(end)) * 1e6 / count[0]
        count[0] = max(1, min(_MOST, round(_READING_NS / max(each, 1.0))))
        return each

    return run


@contextlib.contextmanager
def _precision(name: str) -> Iterator[None]:
    """Have fp32 products computed as *name* says, ``tf32`` or ``ieee``, for the length of the block."""
    matmul: Any = torch.backends.cuda.matmul
    new = hasattr(matmul, "fp32_precision")
    setting, value = ("fp32_precision", name) if new else ("allow_tf32", name == "tf32")
    before = getattr(matmul, setting)
    setattr(matmul, setting, value)
    try:
        yield
    finally:
        setattr(matmul, setting, before)
