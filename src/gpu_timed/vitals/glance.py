"""One look at the machine's state, on the calling thread: for a diagnosis, not for spans."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gpu_timed.record import Missing, Vitals
from gpu_timed.vitals.load import HostLoad, Load
from gpu_timed.vitals.nvml import Card, Nvml, Reading, nothing


def vitals_of(reading: Reading, host: Load, taken_ns: int) -> Vitals:
    """Return what was read of a card and of the host, at *taken_ns* (Unix time), as one."""
    return Vitals(
        taken_ns=taken_ns,
        sm_clock_mhz=reading.sm_clock_mhz,
        sm_clock_max_mhz=reading.sm_clock_max_mhz,
        throttle=reading.throttle,
        power_w=reading.power_w,
        temperature_c=reading.temperature_c,
        host_load=host.host_load,
        process_cpus=host.process_cpus,
        cpus_allowed=host.cpus_allowed,
    )


def look(uuids: Sequence[str | None]) -> tuple[list[Vitals], Missing | None]:
    """Return the state of each device of *uuids*, and why NVML cannot be asked. May take as long as NVML does."""
    nvml = Nvml()
    try:
        host = HostLoad().read()
        found = []
        for uuid in uuids:
            card = Missing("unsupported", "its UUID is not known") if uuid is None else nvml.card(uuid)
            reading = card.read() if isinstance(card, Card) else nothing(card)
            found.append(vitals_of(reading, host, time.time_ns()))
        return found, nvml.absent
    finally:
        nvml.close()
