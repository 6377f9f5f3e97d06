"""How busy the host is: load average, this process's share, and the CPUs it may use. Standard library only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from gpu_timed.record import Missing

_UNSUPPORTED: Final = Missing("unsupported")
_STARTING: Final = Missing("starting")
_GROUPS: Final = Path("/sys/fs/cgroup")
_MINE: Final = Path("/proc/self/cgroup")


class Load(NamedTuple):
    """What one look has shown; as in :class:`~gpu_timed.record.Vitals`."""

    host_load: float | Missing
    process_cpus: float | Missing
    cpus_allowed: float | Missing


class HostLoad:
    """Looks at the host, and remembers the last look. Raises nothing."""

    def __init__(
        self,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        used_ns: Callable[[], int] = time.process_time_ns,
    ) -> None:
        self._now_ns = now_ns
        self._used_ns = used_ns
        self._allowed = cpus_allowed()
        self._before: tuple[int, int] | None = None

    def read(self) -> Load:
        """Return the load now, and the CPUs used since the last call."""
        now, used = self._now_ns(), self._used_ns()
        share: float | Missing = _STARTING
        if self._before is not None and now > self._before[0]:
            share = (used - self._before[1]) / (now - self._before[0])
        self._before = now, used
        return Load(load_per_cpu(), share, self._allowed)


def load_per_cpu() -> float | Missing:
    """Return the load average of the last minute for each CPU of the machine."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (OSError, AttributeError):  # Windows has none
        return _UNSUPPORTED


def cpus_allowed(groups: Path = _GROUPS, mine: Path = _MINE) -> float | Missing:
    """Return how many CPUs this process may use at once: the least of its affinity and its control groups' quotas.

    Of quotas, those of cgroup v2 (``cpu.max`` of the process's group and of every one above it), and of v1 that of
    the root as a container sees it (``cpu.cfs_quota_us``). The files are described in the Linux kernel's
    documentation, "Control Group v2" and "CFS Bandwidth Control".
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or _UNSUPPORTED
    limits: list[float] = [len(os.sched_getaffinity(0))]
    for folder in _folders(groups, mine):
        limits += _limit(_text(folder / "cpu.max").split())
    limits += _limit([_text(groups / "cpu/cpu.cfs_quota_us"), _text(groups / "cpu/cpu.cfs_period_us")])
    return min(limits)


def _folders(groups: Path, mine: Path) -> list[Path]:
    """Return the folder of this process's group, and those above it."""
    path = next((line.removeprefix("0::/") for line in _text(mine).splitlines() if line.startswith("0::/")), "")
    folder = groups / path
    return [folder, *(above for above in folder.parents if above.is_relative_to(groups))]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _limit(quota_and_period: list[str]) -> list[float]:
    """Return CPUs by quota and period in microseconds; nothing for ``max``, -1, or what is no number."""
    try:
        quota, period = (int(text) for text in quota_and_period)
    except ValueError:
        return []
    return [quota / period] if quota > 0 and period > 0 else []
