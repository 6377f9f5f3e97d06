"""The circumstances in which a span must be right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from gpu_timed.measure.rig import Rig
from gpu_timed.settings import SyncPolicy

QUEUED_NS: Final = 500_000
"""Work in front of a span that is to find the device busy: several times what opening it and launching takes."""
REST_NS: Final = 20_000_000
POLICIES: Final[tuple[SyncPolicy, ...]] = ("boundary", "deferred")
DURATIONS_NS: Final = (1_000, 2_000, 5_000, 20_000, 100_000, 1_000_000, 10_000_000)
QUICK_DURATIONS_NS: Final = (5_000, 20_000, 100_000, 1_000_000)


@dataclass(frozen=True, slots=True)
class Regime:
    """How the kernel of a span is launched, and what else goes on."""

    name: str
    words: str
    before: Literal["idle", "rested", "queued", "beside"] = "idle"
    graph: bool = False
    side: bool = False
    busy_host: bool = False

    def prepare(self, rig: Rig, duration_ns: int) -> None:
        """Bring the device into the state in which a span of *duration_ns* is to begin."""
        if self.before == "queued":
            rig.occupy(QUEUED_NS)
            return
        rig.settle()
        if self.before == "rested":
            rig.rest(REST_NS)
        elif self.before == "beside":
            rig.occupy_other(duration_ns + QUEUED_NS)

    def work(self, rig: Rig, duration_ns: int) -> Callable[[], None]:
        """Return the call that is measured."""
        if self.graph:
            return rig.replay(duration_ns)
        return lambda: rig.launch(duration_ns)


REGIMES: Final = (
    Regime("eager", "on an idle stream"),
    Regime("graph", "as a CUDA graph, on an idle stream", graph=True),
    Regime("side_stream", "on a stream of its own", side=True),
    Regime("queued", "behind queued work", before="queued"),
    Regime("second_stream", "while another stream is busy", before="beside"),
    Regime("after_idle", "after 20 ms without work", before="rested"),
    Regime("busy_host", "while a Python thread is busy", busy_host=True),
)
