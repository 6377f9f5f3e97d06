"""A CUDA device by way of torch: streams, graphs, and memory for stamps; the kernels come from elsewhere.

Names used: ``torch.cuda.Stream``, ``stream``, ``graph``, ``CUDAGraph``, ``synchronize``, ``current_stream``
(public; torch 2.6 to 2.13 read).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from gpu_timed.measure.known import TICKS, smallest_step
from gpu_timed.measure.rig import STAMPS_KEPT, Kernel, NotTestable, spinning_thread
from gpu_timed.trials import Stamp

_READS: Final = 4_096
_PER_KERNEL: Final = 3
_RATE_NS: Final = 2_000_000


def usable() -> str:
    """Return why torch cannot use a CUDA device here; empty where it can."""
    if getattr(torch.version, "hip", None):
        return "torch is built for ROCm, whose events are not read yet"
    if torch.version.cuda is None:
        return "torch is built without CUDA"
    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


def synchronized() -> int:
    """Initialise CUDA, and return the index of the current device."""
    torch.cuda.init()
    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    return int(torch.cuda.current_device())


class TorchRig:
    """Launches *kernel* on torch's current device."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.device = synchronized()
        self._memory, self._scratch, self._other_scratch = (self._new_stamps() for _ in range(3))
        self._side, self._other = torch.cuda.Stream(), torch.cuda.Stream()
        self._graphs: dict[int, Any] = {}
        self._asked: list[int] = []
        #: Smallest step of the kernels' timer; 1 until it is measured.
        self.tick_ns = 1
        #: Cycles of the multiprocessor in a nanosecond, as the last long kernel had it; 0 while it is not known.
        self.cycles_per_ns = 0.0

    # -- the rig ----------------------------------------------------------------------------------------

    def launch(self, duration_ns: int) -> None:
        """Queue one kernel of known duration on torch's current stream."""
        self._asked.append(duration_ns)
        self.kernel.launch(duration_ns, self._memory)

    def replay(self, duration_ns: int) -> Callable[[], None]:
        """Return the replay of a graph with one kernel of known duration, captured the first time."""
        graph = self._graphs.get(duration_ns)
        if graph is None:
            self.settle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.kernel.launch(duration_ns, self._memory)
            self._graphs[duration_ns] = graph
        asked, replay = self._asked, graph.replay

        def again() -> None:
            asked.append(duration_ns)
            replay()

        return again

    def occupy(self, duration_ns: int) -> None:
        """Queue a kernel whose stamps nobody reads."""
        self.kernel.launch(duration_ns, self._scratch)

    def occupy_other(self, duration_ns: int) -> None:
        """Queue such a kernel on another stream."""
        with torch.cuda.stream(self._other):
            self.kernel.launch(duration_ns, self._other_scratch)

    @contextlib.contextmanager
    def on_side_stream(self) -> Iterator[int]:
        """Make a stream of the rig's own torch's current one."""
        with torch.cuda.stream(self._side):
            yield self.stream()

    def stream(self) -> int:
        """Return the raw handle of torch's current stream."""
        return int(torch.cuda.current_stream().cuda_stream)

    def busy_host(self) -> contextlib.AbstractContextManager[None]:
        """Keep a Python thread in a loop."""
        return spinning_thread()

    def rest(self, duration_ns: int) -> None:
        """Sleep."""
        time.sleep(duration_ns / 1e9)

    def settle(self) -> None:
        """Synchronise the device."""
        torch.cuda.synchronize()

    def stamps(self) -> Sequence[Stamp]:
        """Wait for, read and forget the stamps so far."""
        self.settle()
        asked, count = list(self._asked), len(self._asked)
        self._asked.clear()
        if not self.kernel.stamped:
            return [Stamp(None, None, duration_ns) for duration_ns in asked]
        if count > STAMPS_KEPT:
            raise NotTestable(f"{count} kernels were launched before their stamps were read: {STAMPS_KEPT} are kept")
        words = self._memory[: 1 + _PER_KERNEL * max(1, count)].tolist()
        self._memory[:1].zero_()
        self.settle()
        if words[0] != count:
            raise NotTestable(f"{count} kernels were launched, and {words[0]} left stamps")
        each = zip(asked, words[1::3], words[2::3], words[3::3], strict=False)
        return [self._stamp(duration_ns, begin, end, cycles) for duration_ns, begin, end, cycles in each]

    # -- the truth --------------------------------------------------------------------------------------

    def measure_timer(self) -> int | None:
        """Measure the smallest step of the timer, and the rate of the cycles; returns the step in nanoseconds.

        None where the kernel has no timer to read.
        """
        if not self.kernel.stamped:
            return None
        reads = torch.zeros(_READS, dtype=torch.int64, device="cuda")
        for _ in range(2):  # the first loads the kernel
            self.kernel.read_timer(reads)
        self.settle()
        step = smallest_step(reads.tolist())
        if step is None:
            raise NotTestable(f"the device's timer did not move in {_READS} reads")
        self.tick_ns = step
        self._measure_cycles()
        return step

    def _measure_cycles(self) -> None:
        self.stamps()
        for _ in range(3):
            self.kernel.launch(_RATE_NS, self._memory)
        self.settle()
        begin, end, cycles = self._memory[1 + 2 * _PER_KERNEL : 1 + 3 * _PER_KERNEL].tolist()
        self._memory[:1].zero_()
        self.settle()
        self.cycles_per_ns = cycles / (end - begin) if cycles > 0 and end > begin else 0.0

    def _stamp(self, duration_ns: int, begin: int, end: int, cycles: int) -> Stamp:
        true = end - begin
        if duration_ns < TICKS * self.tick_ns and self.cycles_per_ns > 0:
            true = round(cycles / self.cycles_per_ns)
        return Stamp(begin, end, true)

    def _new_stamps(self) -> Any:
        return torch.zeros(1 + _PER_KERNEL * STAMPS_KEPT, dtype=torch.int64, device="cuda")
