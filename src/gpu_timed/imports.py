"""Runs something once a module has been imported, without importing it.

A finder in front of ``sys.meta_path`` looks for nothing by itself: for a module that somebody waits for, it
lets the other finders find it, and puts itself between for the length of the import. Afterwards loader and
spec are the module's own again. (wrapt's own hooks leave a proxy of the loader behind.)
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Then = Callable[[ModuleType], None]
Fault = Callable[[str, BaseException], None]


class ImportWatch(importlib.abc.MetaPathFinder):
    """Waits for modules. One for a process; :meth:`close` takes it out again.

    Args:
        fault: Told of what somebody's reaction raised; it never reaches the import.
    """

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._waiting: dict[str, list[Then]] = {}
        self._took: dict[str, int] = {}
        self._lock = threading.RLock()
        self._finding = threading.local()

    def when_imported(self, name: str, then: Then) -> None:
        """Call *then* with the module *name* once it is imported: now, if it is already.

        A module whose import has begun and not ended cannot be waited for: *then* is called with the next
        :meth:`look_again`.
        """
        with self._lock:
            if _is_ready(sys.modules.get(name)):
                self._call(sys.modules[name], then)
                return
            self._waiting.setdefault(name, []).append(then)
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)

    def look_again(self) -> None:
        """React to modules that were imported past this finder."""
        with self._lock:
            for name in list(self._waiting):
                if _is_ready(sys.modules.get(name)):
                    self._react(sys.modules[name], name)

    def took_ns(self, name: str) -> int | None:
        """Return how long the import of module *name* took, in nanoseconds of host time; None if it was not seen."""
        return self._took.get(name)

    @property
    def waiting(self) -> frozenset[str]:
        """Names that nobody has imported yet."""
        return frozenset(self._waiting)

    def close(self) -> None:
        """Wait for nothing any more."""
        with self._lock:
            self._waiting.clear()
            self._took.clear()
            if self in sys.meta_path:
                sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find what the other finders find, and be told when it has been executed."""
        del path, target
        if fullname not in self._waiting or getattr(self._finding, "name", None) == fullname:
            return None
        self._finding.name = fullname
        try:
            spec = importlib.util.find_spec(fullname)
        except Exception:  # noqa: BLE001 - the other finders are asked after us, and raise it themselves
            return None
        finally:
            self._finding.name = None
        try:
            if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
                spec.loader = _Between(spec.loader, self, fullname)
        except Exception as error:  # noqa: BLE001 - a loader of the user's that cannot be looked at
            self.failed(error)
        return spec

    def failed(self, error: Exception) -> None:
        """Count what went wrong here: the user's import goes on."""
        self._fault("import_hook", error)

    def executed(self, module: ModuleType, name: str, took_ns: int) -> None:
        """Take note that *module* was executed under *name*, within *took_ns* nanoseconds."""
        with self._lock:
            self._took[name] = took_ns
            self._react(module, name)

    def _react(self, module: ModuleType, name: str) -> None:
        for then in self._waiting.pop(name, ()):
            self._call(module, then)
        if not self._waiting and self in sys.meta_path:
            sys.meta_path.remove(self)

    def _call(self, module: ModuleType, then: Then) -> None:
        try:
            then(module)
        except Exception as error:  # noqa: BLE001
            self.failed(error)


class _Between(importlib.abc.Loader):
    """Stands for a loader until the module is executed, then gives the place back to it."""

    def __init__(self, inner: Any, watch: ImportWatch, name: str) -> None:
        self._inner = inner
        self._watch = watch
        self._name = name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does: an extension needs that."""
        found: ModuleType | None = self._inner.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module by its own loader, which is the only one it sees."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        began = time.perf_counter_ns()
        self._inner.exec_module(module)
        took_ns = time.perf_counter_ns() - began
        try:
            self._watch.executed(module, self._name, took_ns)
        except Exception as error:  # noqa: BLE001
            self._watch.failed(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _is_ready(module: ModuleType | None) -> bool:
    """Return whether *module* is there and no longer being imported."""
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)
