"""Caches of compiled code: :func:`caches` says where they are, :func:`pin_caches` puts them below one directory.

A cache that moves with the current directory, or with a temporary one, is a cold start each time the program is
started from elsewhere, and nothing in the program shows it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from gpu_timed import current
from gpu_timed._version import VERSION
from gpu_timed.cache_facts import CacheReport, PinReport
from gpu_timed.clocks import cuda_devices, cuda_driver
from gpu_timed.kernel_caches import looking, pinning
from gpu_timed.kernel_caches.places import surroundings


def caches() -> CacheReport:
    """Say where every compile and autotune cache that this process would use lies, and what decided it.

    Reads the environment, the directories (each for at most half a second and 20,000 entries), and the live settings of
    runtimes that the process has imported. Imports no runtime, touches no device, changes nothing.

    Returns:
        One :class:`~gpu_timed.cache_facts.CacheFacts` for each cache: path, what decided it, what it moves with, size.
    """
    around = surroundings(os.environ, driver=cuda_driver.device_present())
    return CacheReport(VERSION, around.current, looking.look(around))


def pin_caches(directory: str | os.PathLike[str], *, override: bool = False, strict: bool = False) -> PinReport:
    """Put all caches of compiled code below *directory*, whatever the current or temporary directory is.

    To be called first, before anything is compiled and before the device is used. Sets the variable of every runtime
    that is installed, and the live setting of those that are imported; children, forked or spawned, inherit them. Each
    runtime gets a directory of its own, and tells versions and devices apart by itself: one pinned directory serves
    several. Numba finds its entries by the path of the source file, so that has to stay as well.

    Nothing is switched on that its owner has switched off, but for JAX, and Numba's ``cache=True``, which keep
    something wherever they are given a directory.

    Args:
        directory: Made where it is not there. A relative path is taken below the current directory, and that is said.
        override: Replace variables and settings of the user's own; else they win, and are reported as ``kept``.
        strict: Raise where it is too late for a runtime, and change nothing.

    Returns:
        What became of each cache. It is false if it was too late for one, which is logged as well.

    Raises:
        ConfigurationError: The directory is a file or cannot be written; or *strict*, and it is too late.
    """
    around = surroundings(os.environ, driver=cuda_driver.device_present())
    report = pinning.pin(
        directory,
        around,
        os.environ,
        override=override,
        strict=strict,
        driver_initialised=cuda_devices.initialised(),
    )
    for note in report.notes:
        current.ledger().say(f"gpu_timed: pin_caches: {note}.")
    if not report:
        late = "; ".join(f"{told.key}: {told.reason}" for told in report.too_late)
        current.ledger().say(
            f"gpu_timed: pin_caches came too late for some caches, which stay where they are ({late}). "
            "Call it before anything is compiled."
        )
    return report


def watch_cache(directory: str | os.PathLike[str], name: str | None = None) -> Callable[[], None]:
    """Take files that appear in *directory* while a call runs for a sign that something was built in it.

    For caches of runtimes that have no probe: CubeCL's ``target/environment``, a shader cache, TensorRT engines. The
    directory is looked at afterwards, on gpu_timed's own thread, and only for a call that is suspect: one of the first
    of its site, or one that took much longer than usual. A call in whose time a file was written is ``cold`` and
    ``built``; the cause names the directory and how many files. What another process, or another thread, wrote there
    meanwhile cannot be told from it, and the cause says so: watch a directory that this program has to itself. Nor is
    a cache for it that writes when it reads. With ``late="device_only"`` the device span says it, not the host span.

    Args:
        directory: Taken as absolute at once; need not be there yet. Walked to at most 10,000 entries.
        name: What to call it in causes; else its last part.

    Returns:
        A function that ends the watching.

    Raises:
        ConfigurationError: It is no path, or too many directories are watched.
    """
    return current.directories().watch(directory, name)
