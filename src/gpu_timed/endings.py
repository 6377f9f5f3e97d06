"""Being told that the process ends: by ``atexit``, and in a worker of ``multiprocessing`` by its own finalizers.

A worker that ``multiprocessing`` has forked, or that its fork server has, ends by ``os._exit()``, which
runs nothing of ``atexit``. What it does run are the finalizers of ``multiprocessing.util``. That module is
never imported from here: a process that is such a worker has it already.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any, Final

_PRIORITY: Final = 100
"""Before the finalizers of multiprocessing's own queues, pools and managers, which may wait for others."""


class Endings:
    """Calls back at the end of the process.

    Args:
        at_exit: What ``atexit`` is to call.
        at_worker_end: What is called as a worker of ``multiprocessing`` ends. ``atexit`` may follow, or may not.
    """

    def __init__(self, at_exit: Callable[[], None], at_worker_end: Callable[[], None]) -> None:
        self._at_exit = at_exit
        self._at_worker_end = at_worker_end
        self._finalizer: Any = None

    def watch(self) -> None:
        """Call back from now on. At exit the last to ask is called first: asking again moves to the front."""
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)
        self.watch_worker()

    def unwatch(self) -> None:
        """Call back no more, until :meth:`watch` is called again."""
        atexit.unregister(self._at_exit)
        if self._finalizer is not None:
            self._finalizer.cancel()
            self._finalizer = None

    def watch_worker(self) -> None:
        """Call back at the end of this worker, if this process is one."""
        process, util = sys.modules.get("multiprocessing.process"), sys.modules.get("multiprocessing.util")
        if process is None or util is None or process.parent_process() is None:
            return
        if self._finalizer is None or not self._finalizer.still_active():
            self._finalizer = util.Finalize(None, self._at_worker_end, exitpriority=_PRIORITY)

    def after_fork(self) -> None:
        """In the child of a fork: it is not known yet whether ``multiprocessing`` makes it a worker."""
        self._finalizer = None
        util = sys.modules.get("multiprocessing.util")
        if util is not None:  # it forgets all finalizers first, then calls this
            util.register_after_fork(self, Endings.watch_worker)
