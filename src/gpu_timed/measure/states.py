"""The state of the card after each turn: clocks, and what held them. NVML, where it is there; a few µs a look."""

from __future__ import annotations

import time
from typing import Final

from gpu_timed.arms import Turn
from gpu_timed.record import Missing
from gpu_timed.vitals.glance import vitals_of
from gpu_timed.vitals.load import HostLoad, Load
from gpu_timed.vitals.nvml import Card, Nvml

_NOT_LOOKED: Final = Missing("not_set")


class States:
    """Looks at the card with that *uuid*; of one that is not known, and where NVML is not there, it knows nothing."""

    def __init__(self, uuid: str | Missing) -> None:
        self._nvml = Nvml()
        self._card: Card | Missing = uuid if isinstance(uuid, Missing) else self._nvml.card(uuid)
        self._host = HostLoad()

    def after(self, block: int) -> Turn:
        """Return its state after a turn of block number *block*."""
        card = self._card
        if isinstance(card, Missing):
            return Turn(block, card, card, card)
        vitals = vitals_of(card.read(), _NO_LOAD, time.time_ns())
        slowed = vitals.throttle if isinstance(vitals.throttle, Missing) else vitals.slowed
        return Turn(block, vitals.sm_clock_mhz, vitals.throttle, slowed)

    def host_load(self) -> float | Missing:
        """Return the load average of the last minute for each CPU."""
        return self._host.read().host_load

    def close(self) -> None:
        """Let NVML go."""
        self._nvml.close()


_NO_LOAD: Final = Load(_NOT_LOOKED, _NOT_LOOKED, _NOT_LOOKED)
