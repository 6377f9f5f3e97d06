"""The CUDA Graph mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_timed.modes.launcher import Launcher


class Graphed(Launcher):
    """Runs calls of a function as replays of CUDA Graphs."""

    def run(self, opened: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """See :meth:`Launcher.run`."""
        return self.eagerly(opened, arguments, named, "CUDA Graphs are not in this version")
