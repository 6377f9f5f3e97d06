"""What the place of a cache is worked out from, and the few ways in which runtimes do so."""

from __future__ import annotations

import getpass
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpu_timed.cache_facts import DecidedBy, MovesWith


class Surroundings(NamedTuple):
    """What a process has around it, as far as caches depend on it."""

    variables: Mapping[str, str]
    home: str
    """As ``~`` is expanded: a path, or ``~`` itself where there is no home."""
    current: str
    """The current directory."""
    temporary: str
    user: str
    """The user's name as Inductor writes it into a path."""
    modules: Mapping[str, Any]
    """What this process has imported."""
    platform: str
    """As in ``sys.platform``."""
    installed: Callable[[str], bool]
    """Whether a top-level package could be imported; imports nothing."""
    driver: bool
    """Whether there is a CUDA driver."""


class Place(NamedTuple):
    """Where a cache lies, and why there."""

    path: str | None
    decided_by: DecidedBy
    by: str = ""
    moves_with: MovesWith = "nothing"
    enabled: bool = True
    note: str = ""

    def saying(self, note: str) -> Place:
        """Return the same with *note* added."""
        return self._replace(note="; ".join(filter(None, (self.note, note))))

    def off(self, note: str) -> Place:
        """Return the same with nothing kept there, and *note* to say why."""
        return self._replace(enabled=False).saying(note)


def surroundings(variables: Mapping[str, str], *, driver: bool) -> Surroundings:
    """Return what this process has around it, with *variables* for its environment."""
    return Surroundings(
        variables=variables,
        home=os.path.expanduser("~"),  # noqa: PTH111 - what the runtimes do: without a home the ~ stays
        current=_current(),
        temporary=tempfile.gettempdir(),
        user=user_name(),
        modules=sys.modules,
        platform=sys.platform,
        installed=_installed,
        driver=driver,
    )


def user_name() -> str:
    """Return the user's name as Inductor puts it into a path (``torch._inductor``, torch 2.13)."""
    try:
        name = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # a container's user without a name
        name = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return re.sub(r'[\\/:*?"<>|]', "_", name)


def joined(*parts: str) -> str:
    """Return the path of *parts*; an absolute one begins it anew."""
    return str(Path(*parts))


def named(around: Surroundings, variable: str, *, empty: bool = False, tilde: bool = False) -> Place | None:
    """Return the place that *variable* names, or None where it is not set.

    Args:
        around: The surroundings.
        variable: Name of the variable.
        empty: Whether the runtime takes an empty value for a path, which is then the current directory.
        tilde: Whether it expands ``~``.
    """
    said = around.variables.get(variable)
    if said is None or not (said or empty):
        return None
    note = ""
    if said.startswith("~"):
        if tilde:
            said = around.home + said[1:]
        else:
            note = f"{variable} begins with ~, which this runtime does not expand"
    return given(around, said, "variable", variable, note)


def given(around: Surroundings, path: str, decided_by: DecidedBy, by: str, note: str = "") -> Place:
    """Return the place *path*, which somebody has named: a relative one lies below the current directory."""
    if "://" in path or Path(path).is_absolute():
        return Place(path, decided_by, by, note=note)
    return Place(joined(around.current, path), "current directory", by, "current directory", note=note)


def below_home(around: Surroundings, *parts: str) -> Place:
    """Return a default place below the user's home."""
    path = joined(around.home, *parts)
    if Path(path).is_absolute():
        return Place(path, "default", moves_with="home")
    where = joined(around.current, path)
    return Place(where, "current directory", "", "current directory", note="there is no home directory")


def user_cache(around: Surroundings, *parts: str, mac: bool = True) -> Place:
    """Return a default place in the user's cache directory: ``XDG_CACHE_HOME``, else ``~/.cache``.

    Args:
        around: The surroundings.
        parts: Below that directory.
        mac: Whether the runtime knows macOS' ``~/Library/Caches``.
    """
    if mac and around.platform == "darwin":
        return below_home(around, "Library", "Caches", *parts)
    base = named(around, "XDG_CACHE_HOME")
    if base is None or base.path is None:
        return below_home(around, ".cache", *parts)
    return base._replace(path=joined(base.path, *parts))


def is_on(around: Surroundings, variable: str, *, default: bool = False) -> bool:
    """Return whether a switch is on, as most runtimes read one."""
    said = around.variables.get(variable, "").strip().lower()
    return default if not said else said in {"1", "true", "yes", "on", "y"}


def live(around: Surroundings, module: str, *names: str) -> Any:
    """Return an attribute of a *module* that is imported already, or None. Imports nothing, never raises."""
    try:
        found: Any = around.modules.get(module)
        for name in names:
            found = getattr(found, name)
    except Exception:  # noqa: BLE001 - a runtime's own attribute access, in any version
        return None
    return found


def _current() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - a text
    except OSError:  # it was removed
        return os.sep


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # half imported, or put into sys.modules by hand
        return package in sys.modules
