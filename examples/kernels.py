"""Decorate Numba and Triton kernels: a span for each launch, on the launch's own stream.

    pip install -e ".[demo,numba]" && python examples/kernels.py

Without a GPU they run in Numba's simulator and Triton's interpreter, and their device time says ``simulated``.
"""

from __future__ import annotations

import os
from pathlib import Path

GPU = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()  # the latter under WSL
if not GPU:  # both look at these when they are imported
    os.environ["NUMBA_ENABLE_CUDASIM"] = os.environ["TRITON_INTERPRET"] = "1"

import numpy as np  # noqa: E402 - after the variables above, as what follows
import torch  # noqa: E402
from numba import cuda  # noqa: E402

from gpu_timed import configure, flush, gpu_timed  # noqa: E402
from gpu_timed.testing import capture  # noqa: E402

try:
    import triton
    import triton.language as tl
except ImportError:  # comes with torch for CUDA on Linux, not with every torch
    triton = None
if GPU and not torch.cuda.is_available():  # a torch for CPUs: nothing to hand to Triton's kernel
    triton = None

SIZE = 1024


@gpu_timed(name="numba add")  # above the kernel compiler: what is timed is the launch
@cuda.jit
def add(x, y, out):
    at = cuda.grid(1)
    if at < out.size:
        out[at] = x[at] + y[at]


if triton is not None:

    @gpu_timed(name="triton add", sync="deferred")
    @triton.jit
    def add_blocks(x, y, out, size, block: tl.constexpr):
        at = tl.program_id(0) * block + tl.arange(0, block)
        inside = at < size
        tl.store(out + at, tl.load(x + at, inside) + tl.load(y + at, inside), inside)


def main() -> None:
    configure(service_name="kernels", exporter="jsonl", path="gpu_timed-spans.jsonl")
    with capture() as records:
        x, y = (cuda.to_device(np.arange(SIZE, dtype=np.float32)) for _ in range(2))
        out = cuda.device_array_like(x)
        for _ in range(2):
            add[SIZE // 128, 128](x, y, out)
        print(f"numba: {out.copy_to_host()[-1]:.0f}")
        if triton is not None:
            a, b = (torch.arange(SIZE, dtype=torch.float32, device="cuda" if GPU else "cpu") for _ in range(2))
            total = torch.empty_like(a)
            for _ in range(2):
                add_blocks[(SIZE // 128,)](a, b, total, SIZE, block=128)
            print(f"triton: {total[-1].item():.0f}")
    for record in records:
        device = f"{record.device_ns} ns" if isinstance(record.device_ns, int) else record.device_ns.reason
        print(f"{record.name}, launch {record.call_index}: host {record.launch_ns} ns, device {device}")
    print("delivered" if flush(10) else "not delivered")


if __name__ == "__main__":
    main()
