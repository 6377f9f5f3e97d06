"""Pinning: every cache below one directory, before any work, in the environment and in what is imported already."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from gpu_timed.cache_facts import Pin, PinReport
from gpu_timed.errors import ConfigurationError
from gpu_timed.kernel_caches import runtimes
from gpu_timed.kernel_caches.known import Known, here, of_this_platform
from gpu_timed.kernel_caches.places import Surroundings, joined
from gpu_timed.kernel_caches.torch_caches import INDUCTOR, TRITON, by_inductor, by_torch_itself


def prepare(directory: str | os.PathLike[str]) -> tuple[str, tuple[str, ...]]:
    """Make *directory* and return its absolute path, with what to know of it.

    Raises:
        ConfigurationError: It is no directory, or cannot be made or written; the message says which and what to do.
    """
    try:
        said = os.fspath(directory)
    except TypeError:
        said = ""
    if not isinstance(said, str) or not said.strip():
        raise ConfigurationError(f"the directory to pin caches in must be a path, not {directory!r}.")
    path = os.path.abspath(os.path.expanduser(said))  # noqa: PTH100, PTH111 - links stay: they are the user's
    notes = []
    if not Path(os.path.expanduser(said)).is_absolute():  # noqa: PTH111
        notes.append(f"{said!r} is relative: it was taken below the current directory, {path}. Name an absolute path")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):  # what the access bits say is not what a mount lets through
            pass
    except (FileExistsError, NotADirectoryError):
        raise ConfigurationError(
            f"{path} is no directory, or lies below something that is none: name a directory for the caches."
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"caches cannot be pinned in {path}: it cannot be written ({error.strerror}). Name a directory that this "
            "user can write, or make it and give it to this user (mkdir, chown)."
        ) from None
    mode = Path(path).stat().st_mode
    if os.name == "posix" and mode & stat.S_IWOTH:
        notes.append(f"everybody can write in {path}, and what lies there is run as code: chmod o-w {path}")
    return path, tuple(notes)


def pin(
    directory: str | os.PathLike[str],
    around: Surroundings,
    environment: MutableMapping[str, str],
    *,
    override: bool,
    strict: bool,
    driver_initialised: bool,
) -> PinReport:
    """Pin every cache below *directory*. See :func:`gpu_timed.pin_caches`.

    Args:
        directory: Where.
        around: What this process has around it.
        environment: Where variables are set: the process's own.
        override: Whether the user's own variables and settings are replaced.
        strict: Whether a cache for which it is too late is an error; nothing is changed then.
        driver_initialised: Whether the CUDA driver is.

    Raises:
        ConfigurationError: The directory cannot be used, or *strict* and it is too late.
    """
    path, notes = prepare(directory)
    decided = [
        (known, _decide(known, path, around, override=override, driver_initialised=driver_initialised))
        for known in of_this_platform(around)
        if known.pinned_as
    ]
    if strict:
        late = [f"{known.title}: {told.reason}" for known, told in decided if told.status == "too_late"]
        if late:
            raise ConfigurationError(
                f"too late to pin {'; '.join(late)}. Call pin_caches() before anything is compiled, or set "
                "GPU_TIMED_PIN_CACHES and start the program by gpu-timed run. Nothing was changed."
            )
    return PinReport(path, tuple(_carry_out(known, told, around, environment) for known, told in decided), notes)


def _decide(known: Known, directory: str, around: Surroundings, *, override: bool, driver_initialised: bool) -> Pin:
    """Return what is to become of one cache: nothing is changed here."""
    target = joined(directory, known.pinned_as)
    now = known.find(around)
    if here(known, around) is False:
        return Pin(known.key, "not_applicable", None, known.variable, f"{known.title} is not installed here")
    if now.path == target:
        return Pin(known.key, "pinned", target, known.variable)
    said = "" if _by_runtime(known.variable, around) else around.variables.get(known.variable, "")
    own = runtimes.own_setting(known.key, around)
    if (said not in ("", target) or own) and not override:
        moves = now.moves_with == "current directory"
        reason = f"set by {now.by or known.variable}" + (", and moves with the current directory" if moves else "")
        return Pin(known.key, "kept", now.path, known.variable, f"{reason}; override=True replaces it")
    late = runtimes.too_late(known.key, around, driver_initialised=driver_initialised)
    if late:
        return Pin(known.key, "too_late", now.path, known.variable, late)
    return Pin(known.key, "pinned", target, known.variable)


def _carry_out(known: Known, told: Pin, around: Surroundings, environment: MutableMapping[str, str]) -> Pin:
    if told.status != "pinned" or told.path is None:
        return told
    folder = Path(told.path) if known.scanned else Path(told.path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        reason = runtimes.tell(known.key, told.path, around)
    except Exception as error:  # noqa: BLE001 - one runtime's refusal leaves the others pinned
        why = f"could not be set: {getattr(error, 'strerror', None) or error}"
        return Pin(known.key, "too_late", known.find(around).path, known.variable, why)
    environment[known.variable] = told.path
    return Pin(known.key, "pinned", told.path, known.variable, told.reason or reason)


def _by_runtime(variable: str, around: Surroundings) -> bool:
    """Return whether the value of *variable* is what a runtime itself has put there."""
    return (variable == INDUCTOR and by_torch_itself(around)) or (variable == TRITON and by_inductor(around))
