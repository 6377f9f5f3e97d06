"""The sampler: reads the machine's state now and then, on a thread of its own.

Started by the first span that is read with a device time, and by nothing before; it rests while no spans come. The
thread that reads spans only looks into a list: an NVML call that hangs keeps nobody but this thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from gpu_timed.bounds import Limit, fullest
from gpu_timed.ledger import Ledger
from gpu_timed.ports import Sighting
from gpu_timed.record import Missing
from gpu_timed.vitals.glance import vitals_of
from gpu_timed.vitals.load import HostLoad
from gpu_timed.vitals.nvml import Card, Nvml, nothing
from gpu_timed.vitals.ring import MOST, Ring

THREAD: Final = "gpu_timed-vitals"
_REACH: Final = 2
"""Intervals that a reading may lie from a span."""
_REST_AFTER: Final = 60
"""Intervals without a span, after which nothing is read until one comes."""
MOST_DEVICES: Final = 64
"""Devices whose state is read."""
_MOST_FAULTS: Final = 5
_GRACE_S: Final = 0.2
_STARTING: Final = Missing("starting")
_NO_UUID: Final = Missing("unsupported", "the runtime tells no UUID of this device")
_TOO_MANY: Final = Missing("overflow")
_ENDED: Final = Missing("internal_fault", "reading the machine's state has failed again and again")
_LOST: Final = Missing("nvml_error", "NVML failed again and again")


class Sampler:
    """Reads the state of every device it was asked about, and of the host.

    Args:
        ledger: Where its faults are counted.
        interval_s: Seconds between two readings.
        now_ns: The host's monotonic clock, whose axis spans are on.
        unix_ns: Unix time.
        nvml: Opens NVML.
        rest_after: Intervals without a span, after which it rests.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        interval_s: float = 1.0,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        unix_ns: Callable[[], int] = time.time_ns,
        nvml: Callable[[], Nvml] = Nvml,
        rest_after: int = _REST_AFTER,
    ) -> None:
        self._ledger = ledger
        self._interval_s = interval_s
        self._now_ns = now_ns
        self._unix_ns = unix_ns
        self._open = nvml
        self._rest_after = rest_after
        self._rings: dict[str | None, Ring] = {}
        self._cards: dict[str, Card | Missing] = {}
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._wake = threading.Event()
        self._asked = False
        self._resting = False
        self._stopping = False
        self._ended = False
        self._retry_ns = 0

    # -- from the thread that reads spans -------------------------------------------------------------

    def at(self, device_uuid: str | None, start_ns: int, end_ns: int) -> Sighting:
        """Return what was read nearest to that time. See :meth:`gpu_timed.ports.VitalsSource.at`."""
        self._asked = True
        if self._resting:
            self._wake.set()
        ring = self._rings.get(device_uuid)
        if ring is None:
            return self._begin(device_uuid)
        if self._thread is None:
            self._start()
        found = ring.near(start_ns, end_ns)
        if self._ended and isinstance(found.vitals, Missing):
            return Sighting(_ENDED, _ENDED)
        return found

    def limits(self) -> Iterator[Limit]:
        """Say of how many devices the state is read, and how many readings are kept of each."""
        held = list(self._rings.values())
        beyond = self._ledger.snapshot().get("vitals_too_many", 0)
        yield Limit("vitals_devices", MOST_DEVICES, len(held), beyond, "devices whose state is read", loses=True)
        yield Limit("vitals_readings", MOST, fullest(map(len, held)), None, "readings of a device's state")

    def stop(self) -> None:
        """Read no more, and wait for the thread a moment; one that hangs in NVML is left behind."""
        self._stopping = True
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_GRACE_S)

    # -- inside ---------------------------------------------------------------------------------------

    def _begin(self, device_uuid: str | None) -> Sighting:
        """Read *device_uuid* as well from now on."""
        if len(self._rings) >= MOST_DEVICES:
            self._ledger.count("vitals_too_many")
            return Sighting(_TOO_MANY, _TOO_MANY)
        self._rings[device_uuid] = Ring(round(_REACH * self._interval_s * 1e9))
        if self._thread is None:
            self._start()
        self._wake.set()
        return Sighting(_STARTING, _STARTING)

    def _start(self) -> None:
        if not self._starting.acquire(blocking=False):
            return  # another thread does it, or a forked child was left with the lock: nobody waits for it
        try:
            now = self._now_ns()
            if self._thread is not None or self._stopping or now < self._retry_ns:
                return
            thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads for now
                self._retry_ns = now + round(self._interval_s * 1e9)
                self._ledger.count("vitals_not_started")
            else:
                self._thread = thread
        finally:
            self._starting.release()

    def _run(self) -> None:
        nvml: Nvml | None = None
        try:
            nvml = self._open()
            self._go_on(nvml)
        except Exception as error:  # noqa: BLE001 - nothing of this may be felt
            self._ledger.fault("vitals", error)
        finally:
            self._ended = not self._stopping
            self._close(nvml)

    def _close(self, nvml: Nvml | None) -> None:
        try:
            if nvml is not None:
                nvml.close()
        except Exception as error:  # noqa: BLE001
            self._ledger.fault("vitals", error)

    def _go_on(self, nvml: Nvml) -> None:
        load = HostLoad()
        faults = idle = 0
        while True:
            self._wake.clear()
            if self._stopping:  # looked at after the clearing: whoever stops us sets this first
                return
            idle = 0 if self._asked else idle + 1
            self._asked = False
            try:
                self._read(nvml, load)
                faults = 0
            except Exception as error:  # noqa: BLE001
                self._ledger.fault("vitals", error)
                faults += 1
                if faults >= _MOST_FAULTS:
                    return
            self._pause(rest=idle >= self._rest_after)

    def _pause(self, *, rest: bool) -> None:
        if not rest:
            self._wake.wait(self._interval_s)
            return
        self._resting = True
        if not self._asked:  # one that came before _resting was set did not wake us
            self._wake.wait()
        self._resting = False

    def _read(self, nvml: Nvml, load: HostLoad) -> None:
        host = load.read()
        for uuid, ring in list(self._rings.items()):
            if self._stopping:
                return
            card = self._card(nvml, uuid)
            began = self._now_ns()
            reading = card.read() if isinstance(card, Card) else nothing(card)
            ended = self._now_ns()
            if ended - began > self._interval_s * 1e9:
                self._ledger.count("vitals_late")  # nobody knows what moment it shows
            else:
                ring.add((began + ended) // 2, vitals_of(reading, host, self._unix_ns()))
            if uuid is not None and isinstance(card, Card) and card.lost:
                self._cards[uuid] = _LOST
                self._ledger.count("vitals_given_up")

    def _card(self, nvml: Nvml, uuid: str | None) -> Card | Missing:
        if uuid is None:
            return _NO_UUID
        card = self._cards.get(uuid)
        if card is None:
            card = self._cards[uuid] = nvml.card(uuid)
        return card
