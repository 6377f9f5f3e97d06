# ruff: noqa: N802 - the names are NVML's
"""Stands for ``pynvml``: cards that answer, refuse, fail or hang, as a test says."""

from __future__ import annotations

import threading
from typing import Any

NOT_FOUND, NOT_SUPPORTED, UNINITIALIZED, GPU_IS_LOST = 6, 3, 1, 15


class NVMLError(Exception):
    """An answer that is none."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class FakeNvml:
    """NVML with the cards of *clocks*: MHz by UUID. A card of *parents* is an instance of another.

    ``refuses`` has by question (or by question and handle) the error that it is answered with.
    """

    NVMLError = NVMLError

    def __init__(self, clocks: dict[str, int], parents: dict[str, str] | None = None) -> None:
        self.clocks = clocks
        self.parents = parents or {}
        self.reasons: dict[str, int] = {}
        self.refuses: dict[Any, int] = {}
        self.asked: list[tuple[str, Any]] = []
        self.threads: set[str] = set()
        self.open = 0
        self.hang: threading.Event | None = None

    def nvmlInit(self) -> None:
        self._ask("nvmlInit", None)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._ask("nvmlDeviceGetHandleByUUID", uuid)
        if uuid not in self.clocks:
            raise NVMLError(NOT_FOUND)
        return uuid

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        self._ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        return self.parents[handle]

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert kind == 1
        self._ask("nvmlDeviceGetClockInfo", handle)
        return self.clocks[handle]

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        assert kind == 1
        self._ask("nvmlDeviceGetMaxClockInfo", handle)
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        return self.reasons.get(handle, 0)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return self.reasons.get(handle, 0)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._ask("nvmlDeviceGetPowerUsage", handle)
        return 123_456

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        assert sensor == 0
        self._ask("nvmlDeviceGetTemperature", handle)
        return 41

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        return 5_000

    def looks(self) -> int:
        """Return how often a clock was asked for."""
        return sum(name == "nvmlDeviceGetClockInfo" for name, _ in self.asked)

    def _ask(self, question: str, handle: Any) -> None:
        self.asked.append((question, handle))
        self.threads.add(threading.current_thread().name)
        if self.hang is not None and question == "nvmlDeviceGetClockInfo":
            self.hang.wait(60)
        error = self.refuses.get((question, handle), self.refuses.get(question))
        if error is not None:
            raise NVMLError(error)
