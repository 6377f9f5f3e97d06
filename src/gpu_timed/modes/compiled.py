"""The ``torch.compile`` modes: compiled once for each site, and honest about what ran.

What is given to torch is a function of one line around the user's, with a code object of its own for each site (torch
caches compiled code by code object, and stops after eight). That line knows whether it is traced or run: run means
that torch runs the call uncompiled, because of the recompile limit, a stance, or a switch.

A failure to compile costs nobody a call. Of a backend, the graph it could not compile runs operation by operation,
whatever ran before it. Of Dynamo under ``fullgraph=True`` nothing of the call ran yet, and it runs as it is.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping
from threading import Event, Lock, get_ident
from typing import Any, Final

from gpu_timed.mode_values import EAGER, Compile, Ran
from gpu_timed.modes.launcher import INSIDE, Launcher, Notes, inside
from gpu_timed.site import Site

_MOST_FAILURES: Final = 8
_MOST_TEXT: Final = 300
_WHOLE: Final = "; without fullgraph=True what can be is compiled"
_LONGEST_S: Final = 60.0
"""For which calls wait for the first one. Torch would have them wait for what it compiles, too."""
_NO_CUDA: Final = "no CUDA device"
_OR_ELSE: Final = (
    "at the recompile limit (where a shape or a value that it reads on the host changes, Compile(dynamic=True) may "
    "help; where several threads came with new inputs at once, make one such call before); or by a stance, or a switch"
)


class _First:
    """The first call, which compiles. Threads that came with it would each compile the same, and reach the limit.

    They wait until its code has been compiled, as far as that is one piece: code of the user's, which may wait for one
    of them, runs only after that.
    """

    def __init__(self) -> None:
        self._by: dict[str, tuple[int, int]] = {}
        self.done = Event()

    def is_mine(self) -> bool:
        """Return whether this thread makes it; the first that asks does."""
        me = os.getpid(), get_ident()
        return self._by.setdefault("me", me) == me

    def wait(self) -> None:
        """Wait until it is done. In a forked process the thread that made it is not there."""
        if self._by["me"][0] == os.getpid():
            self.done.wait(_LONGEST_S)


class Compiled(Launcher):
    """Runs calls of a function through ``torch.compile``."""

    mode: Compile

    def __init__(self, function: Callable[..., Any], site: Site, mode: Any, notes: Notes) -> None:
        super().__init__(function, site, mode, notes)
        self._lock = Lock()
        self._leaf: Any = None
        self._compiled: Any = None
        #: Why it is not tried any more.
        self._given_up = ""
        self._failures = 0
        self._worked = False
        #: Whether torch made no CUDA Graphs of what it compiled, or not of all.
        self._skipped = False
        #: Into how many parts torch split what is no CUDA Graph in one piece; not all need be CUDA Graphs.
        self._parts = 0
        #: The most graphs that were compiled in one call: more than one is a function that Dynamo split.
        self._graphs = 0
        self._first: _First | None = _First()
        #: Why torch runs calls uncompiled, as far as one of them told; until one runs compiled.
        self._why_uncompiled = ""

    @staticmethod
    def load() -> None:
        """Import what compiles, which takes seconds, so that it is no part of a first call. Never raises."""
        for name in ("gpu_timed.modes.torch_compiling", "torch._inductor.compile_fx"):
            with contextlib.suppress(Exception):  # the call says why it cannot be had
                importlib.import_module(name)

    def run(self, opened: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """See :meth:`Launcher.run`."""
        compiled = self._compiled or self._make()
        if self._given_up:
            return self.eagerly(opened, arguments, named, self._given_up)
        leaf = self._leaf
        why, skips, parts = "", 0, 0
        if self.mode.uses_graphs:
            why = INSIDE if inside.depth else leaf.why_no_graphs()
            skips, parts = leaf.skips(), leaf.partitions()
            if why:
                return self.eagerly(opened, arguments, named, why)
            if self.mode.strict and not leaf.has_cuda():
                raise self.refused(opened, f"{_NO_CUDA}: strict=True is for hosts that have one")
        around = leaf.around()
        if around:  # torch would give the function up for good
            return self.for_now(opened, arguments, named, around)
        first = self._first
        if first is not None and not first.is_mine():
            first.wait()
            first = self._first = None  # whatever became of it
        tried, before, result, raised = leaf.attempts(), leaf.begin(first and first.done), None, None
        try:
            result = compiled(*arguments, **named)
        except leaf.FAILURES as error:
            if not self.mode.fullgraph:  # some of it may have run: it is torch's own, as without us
                raised = error
                raise
            why = self._fail(error)
            if self.mode.strict:
                raise self.refused(opened, why) from error
        except BaseException as error:
            raised = error
            raise
        finally:
            seen = leaf.end(before)
            if first is not None:
                self._first = None if leaf.attempts() != tried else _First()  # else it compiled nothing
                first.done.set()
            if raised is not None:
                self._raised(opened, leaf, seen, raised, tried)
                raised = None
        if why:
            return self.eagerly(opened, arguments, named, why)
        if self.mode.uses_graphs:
            self._skipped = self._skipped or leaf.skips() != skips
            self._parts += leaf.partitions() - parts
        self._graphs = max(self._graphs, seen.graphs)
        if not seen.uncompiled:
            self._worked, self._why_uncompiled = True, ""
        self.tell(opened, *self._what_ran(leaf, seen))
        if self.mode.uses_graphs and self.mode.outputs == "clone" and not seen.uncompiled:
            return leaf.cloned(result)
        return result

    def _raised(self, opened: Any, leaf: Any, seen: Any, error: BaseException, tried: int) -> None:
        """Say what ran of a call that raised: it may have been to compile it that failed."""
        if seen.uncompiled and not self._why_uncompiled and leaf.attempts() != tried:
            self._why_uncompiled = f"it gave it up in a call that raised {type(error).__name__}: check inputs before it"
        if opened is None:
            return
        if isinstance(error, leaf.FAILURES) and not seen.uncompiled and not leaf.has_run(error):
            opened.ran = Ran("", self.asked.mode, failure_text(error))
        else:
            ran, why = self._what_ran(leaf, seen)
            opened.ran = Ran(ran, self.asked.mode, why)

    def _what_ran(self, leaf: Any, seen: Any) -> tuple[str, str]:
        """Return what ran, and why not what was asked for, or not as it might be."""
        if seen.uncompiled:
            if seen.uncompiled != leaf.UNCOMPILED:
                return EAGER.name, seen.uncompiled
            return EAGER.name, f"{leaf.UNCOMPILED}: {self._why_uncompiled or _OR_ELSE}"
        ran, why = self.asked.mode, ""
        if self.mode.uses_graphs and not leaf.has_cuda():
            ran, why = self._without_graphs, f"{_NO_CUDA}: compiled, without CUDA Graphs"
        elif self._skipped:
            ran, why = self._without_graphs, "torch skipped CUDA Graphs in this or an earlier call"
        elif self._parts:
            why = f"torch split it into {self._parts} parts for CUDA Graphs"
        split = ""
        if self._graphs > 1:
            split = f"graph breaks: torch compiled it as {self._graphs} graphs"
        elif seen.in_parts:
            split = "graph breaks: torch compiled it in parts"
        return ran, "; ".join(filter(None, (why, split and f"{split} (TORCH_LOGS=graph_breaks says where)")))

    @property
    def _without_graphs(self) -> str:
        return "max-autotune-no-cudagraphs" if self.mode.mode == "max-autotune" else "compile"

    def _make(self) -> Any:
        """Give the function to torch, once. What goes wrong is kept as the reason."""
        with self._lock:
            if self._compiled is None and not self._given_up:
                try:
                    self._leaf = importlib.import_module("gpu_timed.modes.torch_compiling")
                    self._compiled = self._leaf.compile_for_site(self.function, self.name, self.mode, failure_text)
                except ImportError as error:
                    self._given_up = f"torch is not there: {str(error)[:_MOST_TEXT]}"
                except Exception as error:  # noqa: BLE001 - a callable that torch does not take
                    self._given_up = failure_text(error)
            return self._compiled

    def _fail(self, error: BaseException) -> str:
        """Take note of a call that Dynamo could not compile; after the first, or some between others, give up."""
        self._failures += 1
        why = failure_text(error)
        if self._leaf.is_limit(error):
            return why
        why = f"{why[: _MOST_TEXT - len(_WHOLE)]}{_WHOLE}"
        if not self._worked or self._failures >= _MOST_FAILURES:
            self._given_up = why
        return why


def failure_text(error: BaseException) -> str:
    """Return in words that *error* kept something from being compiled."""
    said = str(error).strip().partition("\n")[0]
    return f"could not be compiled ({type(error).__name__}: {said})"[:_MOST_TEXT]
