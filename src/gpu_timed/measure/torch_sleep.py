"""Where nothing else is there: torch's own sleep, in cycles, whose length is known from a calibration only.

Private name used: ``torch.cuda._sleep`` (2.6 to 2.13), which spins on the multiprocessor's cycles. It leaves no
stamps, and is as long as it was calibrated only while the clock stays the same.
"""

from __future__ import annotations

import statistics
from typing import Any, Final

import torch

from gpu_timed.measure.rig import NotTestable

_CYCLES: Final = 20_000_000
_TRIALS: Final = 5


class TorchSleep:
    """Sleeps on torch's current stream."""

    name = "torch.cuda._sleep"
    stamped = False

    def __init__(self) -> None:
        self._cycles_per_ns = 1.0
        for _ in range(2):  # the clock goes up
            torch.cuda._sleep(_CYCLES)  # noqa: SLF001 - versions in the module's docstring
        self._cycles_per_ns = statistics.median(self._rate() for _ in range(_TRIALS))

    def launch(self, duration_ns: int, stamps: Any) -> None:  # noqa: ARG002 - it writes none
        """Queue a sleep of about *duration_ns*."""
        torch.cuda._sleep(round(duration_ns * self._cycles_per_ns))  # noqa: SLF001

    def read_timer(self, reads: Any) -> None:  # noqa: ARG002 - the shape of a kernel
        """Refuse: there is no timer to read."""
        raise NotTestable("torch's sleep has no timer")

    def _rate(self) -> float:
        """Return cycles in a nanosecond, by an event pair behind other work: without a launch gap."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_CYCLES)  # noqa: SLF001
        begin.record()
        torch.cuda._sleep(_CYCLES)  # noqa: SLF001
        end.record()
        end.synchronize()
        return float(_CYCLES / (begin.elapsed_time(end) * 1e6))
