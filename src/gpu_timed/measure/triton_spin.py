"""A kernel of known duration in Triton: it spins on the device's own timer, and says when it began and ended.

``%globaltimer`` and ``%clock64`` are PTX special registers (PTX ISA, chapter Special Registers: nanoseconds, and
cycles of the multiprocessor). The whole spin is one piece of inline PTX, so that no two threads of the program can
see it end at different times, and nothing is between its two stamps but the loop.

Layout of *stamps*, 64-bit integers: how many kernels have stamped so far; then begin, end and cycles of each, in a
ring of :data:`~gpu_timed.measure.rig.STAMPS_KEPT`. Triton 3.6 and 3.9 were seen to compile it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from gpu_timed.measure.rig import STAMPS_KEPT


# Without annotations, which Triton would look up on the device.
@triton.jit(do_not_specialize=["duration_ns"])  # type: ignore[untyped-decorator]
def _spin(stamps, duration_ns, KEPT: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202, N803
    turn = tl.load(stamps)  # on its way while the loop runs: it adds nothing to the time between the stamps
    begin, end, cycles = tl.inline_asm_elementwise(
        """
        {
            .reg .u64 first, last, now, waited;
            .reg .pred early;
            mov.u64 first, %clock64;
            mov.u64 $0, %globaltimer;
        AGAIN:
            mov.u64 now, %globaltimer;
            sub.u64 waited, now, $0;
            setp.lt.u64 early, waited, $3;
            @early bra AGAIN;
            mov.u64 last, %clock64;
            mov.u64 $1, now;
            sub.u64 $2, last, first;
        }
        """,
        "=&l,=&l,=&l,l",
        [duration_ns.to(tl.int64)],
        dtype=(tl.int64, tl.int64, tl.int64),
        is_pure=False,
        pack=1,
    )
    slot = stamps + 1 + 3 * (turn & (KEPT - 1))
    tl.store(slot, begin)
    tl.store(slot + 1, end)
    tl.store(slot + 2, cycles)
    tl.store(stamps, turn + 1)


@triton.jit(do_not_specialize=["count"])
def _read_timer(reads, count):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    for index in range(count):
        now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
        tl.store(reads + index, now)


class TritonSpin:
    """Launches by Triton's own launcher, on torch's current stream."""

    name = "Triton"
    stamped = True

    def launch(self, duration_ns: int, stamps: Any) -> None:
        """Queue a kernel of *duration_ns* that adds its stamps to the tensor *stamps*."""
        spin: Any = _spin
        spin[(1,)](stamps, duration_ns, STAMPS_KEPT, num_warps=1)

    def read_timer(self, reads: Any) -> None:
        """Queue a kernel that fills the tensor *reads* with readings of the timer, one after the other."""
        read_timer: Any = _read_timer
        read_timer[(1,)](reads, reads.numel(), num_warps=1)
