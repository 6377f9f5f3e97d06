"""The CUDA Graph mode: one graph for each input signature, after calls that have shown that one can hold the call.

Nothing is run that the user did not call, but for one replay of each graph, whose effects are undone:

* The first calls of a signature run eagerly, watched by torch's dispatcher: that is the warm-up, and shows what the
  call changes and whether a graph can hold it.
* The next one runs eagerly, too, and is then captured (which runs the host's part once more, and nothing on the
  device) and replayed on the state from before the call; outputs and state must be those of the eager run, which stay.
* From then on calls are replays, as long as what the function sees on the host is what it was.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from threading import RLock
from typing import Any, Final

from gpu_timed.mode_values import EAGER, CudaGraph, Ran
from gpu_timed.modes import torch_ranks
from gpu_timed.modes.capturing import PLAIN, STALE, Captured, Capturing, Launched
from gpu_timed.modes.launcher import INSIDE, ForNow, Launcher, Notes, Passing, inside
from gpu_timed.modes.signature import Signature, Signatures
from gpu_timed.site import Site

_MOST_AGAIN: Final = 8
"""Captures anew of one signature because of what changed on the host, after few replays."""
_MOST_FAILURES: Final = 8
"""Captures of one signature that fail for a cause that may pass, or replays of it one after another, before no more
are tried."""
_LOOKS: Final = 2
"""Calls of a signature, of those of its warm-up, that are looked at before it is refused for what one of them did."""
_PART: Final = 4
"""What is set aside for a capture is at most one part in so many of the memory that is free: the rest is the call's."""
_LONGEST_S: Final = 5.0  # that the end of a process group waits for a replay: which may wait for just that
_MOST_TEXT: Final = 300


class Graphed(Launcher):
    """Runs calls of a function as replays of CUDA Graphs."""

    mode: CudaGraph

    def __init__(self, function: Callable[..., Any], site: Site, mode: Any, notes: Notes) -> None:
        super().__init__(function, site, mode, notes)
        #: Held for moments, and never while code of the user's runs.
        self._lock = RLock()
        self._in_the_midst: Callable[[], bool] = getattr(self._lock, "_is_owned", bool)
        self._signatures = Signatures()
        #: The signature that was replayed last, and what tells its calls.
        self._recent: tuple[Signature, Any] | None = None
        self._device: Any = None
        self._values: Any = None
        self._watching: Any = None
        self._capturing: Any = None
        self._given_up = ""

    def run(self, opened: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """See :meth:`Launcher.run`."""
        if self._in_the_midst():  # of a replay, which is about to be queued: its inputs are not to be overwritten
            return self.for_now(opened, arguments, named, "inside a replay of its own, say by a handler of a signal")
        recent = self._recent
        known: Signature | None = None
        taken: Any = None
        tensors: Any = None
        why = ""
        try:
            if recent is not None and not inside.depth and not self._device.is_capturing():
                known, alike = recent
                if known.captured is not None or known.refused:
                    tensors = alike.tensors(arguments, named)
                    why = known.refused
            if tensors is None:
                why, taken, known = self._find(arguments, named)
                if known is not None and known.refused:
                    self._remember(known, taken, arguments, named)
        except Exception as error:  # noqa: BLE001 - rule 1
            self.notes.fault("mode", error)
            why, known = _text("gpu_timed could not look at the arguments", error), None
        if isinstance(why, ForNow):  # its calls outside of that are replays as asked for
            return self.for_now(opened, arguments, named, why)
        if why or known is None:
            return self.eagerly(opened, arguments, named, why)
        if known.captured is None and known.runs < self.mode.warmup:
            return self._warm_up(opened, known, taken or self._take(arguments, named), arguments, named)
        result: Any = STALE
        failed: BaseException | None = None
        try:
            result = self._replay(known, taken.tensors if tensors is None else tensors)
        except Passing as error:
            return self.for_now(opened, arguments, named, str(error)[:_MOST_TEXT])
        except Launched as error:  # to run it now would be to run it twice
            failed = error.__cause__ or error
            known.refused = _text("a replay failed", failed)
            self.tell(opened, self.asked.mode, known.refused)
        except Exception as error:  # noqa: BLE001 - nothing has happened yet
            why = _text("a replay failed", error)
            known.failed_replays += 1
            if known.failed_replays >= _MOST_FAILURES:
                known.refused = why
            return self.eagerly(opened, arguments, named, why)
        if failed is not None:  # not where it was caught: it is as it was raised
            raise failed
        if result is not STALE:
            if taken is not None:
                self._remember(known, taken, arguments, named)
            if opened is not None:
                opened.ran = self.asked
            return result
        return self._without_graph(opened, known, taken or self._take(arguments, named), arguments, named)

    def _without_graph(self, opened: Any, known: Signature, taken: Any, arguments: Any, named: Any) -> Any:
        """Run a call that was watched often enough, and is to be captured, or compared, if that can be now."""
        if known.again > _MOST_AGAIN:
            known.refused = "what it sees on the host changes again and again between its calls"
        if known.refused:
            return self.eagerly(opened, arguments, named, known.refused)
        turn = self.notes.ground.take_turn()
        if turn is None:
            return self.for_now(opened, arguments, named, "another thread is capturing a graph: tried at a later call")
        try:
            return self._capture(opened, known, taken, arguments, named)
        finally:
            self.notes.ground.end_turn()

    # -- finding --------------------------------------------------------------------------------------

    def _find(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[str, Any, Signature | None]:
        """Return why the call is to run as it is, or nothing; its arguments; and what is known of the like."""
        device = self._device or self._make()
        if device is None:
            return self._given_up, None, None
        why = device.refusal() or self._values.around()
        if why:
            return why, None, None
        if inside.depth:
            return INSIDE, None, None
        taken = self._take(arguments, named)
        if taken.refused or not taken.tensors:
            return taken.refused or f"no argument is a tensor on the device{_not_opened(taken)}", taken, None
        with self._lock:
            self._recent = None  # the last in order is this one
            known, why = self._signatures.of(taken.key, self.mode, lambda: taken.others, self._let_go)
        return why or (known.refused if known is not None else ""), taken, known

    def _make(self) -> Any:
        with self._lock:
            if self._device is None and not self._given_up:
                try:
                    self._values = importlib.import_module("gpu_timed.modes.torch_values")
                    self._watching = importlib.import_module("gpu_timed.modes.torch_watching")
                    graphs = importlib.import_module("gpu_timed.modes.torch_graphs")
                    device = graphs.Device(self.notes.relaxed, self.notes.ground)
                    self._capturing = Capturing(self.function, self.mode, device, self._values, self._watching)
                    self._device = device
                except Exception as error:  # noqa: BLE001 - no torch, or one that is not known
                    self._given_up = _text("torch cannot be used", error)
            return self._device

    def _take(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        return self._values.take(arguments, named, self._device.holds, static=self.mode.inputs == "static")

    def _replay(self, known: Signature, tensors: Any) -> Any:
        """Replay the graph if it is still that of the function, and return what that gives; else let it go.

        ``STALE`` says that a capture, or a comparison with the graph that there is, is to come.
        """
        every = self.mode.audit_every
        result: Any = STALE
        with self._lock:
            captured = known.captured
            if captured is None:
                return STALE
            audits = every is not None and not captured.replays % every
            if not audits:
                result = self._capturing.replay(captured, tensors)
            if result is not STALE:
                captured.replays += 1
            elif not audits or captured.guards.stale():
                for one in self._signatures.stale_with(known):
                    self._let_go(one, stale=True)
        if result is STALE:
            return STALE
        finished = captured.finished(result)  # which may be the user's code: not with the lock
        known.failed_replays = 0
        return finished

    def _remember(self, known: Signature, taken: Any, arguments: Any, named: Any) -> None:
        """Have the next call of the same signature know it at a glance. Never raises."""
        try:
            if self.mode.inputs == "copy":
                if known.alike is None:
                    known.alike = self._values.alike(taken, arguments, named) or False
                if known.alike:
                    self._recent = known, known.alike
        except Exception as error:  # noqa: BLE001 - rule 1: the call has been made
            known.alike = False
            self.notes.fault("mode", error)

    def _let_go(self, known: Signature, *, stale: bool = False) -> None:
        with self._lock:
            self._recent = None
            captured = self._signatures.take_graph(known, stale=stale)
            if captured is not None:
                with self._device.relaxed():
                    captured.graph.release()

    def let_all_go(self) -> None:
        """Let all graphs go, unless one is being replayed that does not come to its end. Never raises."""
        if self._in_the_midst() or not self._lock.acquire(timeout=_LONGEST_S):
            return
        try:
            for known in self._signatures.with_graphs():
                self._let_go(known)
        except Exception as error:  # noqa: BLE001 - it is somebody else's call
            self.notes.fault("mode", error)
        finally:
            self._lock.release()

    # -- running --------------------------------------------------------------------------------------

    def _warm_up(self, opened: Any, known: Signature, taken: Any, arguments: Any, named: Any) -> Any:
        """Run the user's call, eagerly and watched."""
        began = time.perf_counter_ns()
        ready = self._watch(taken, None, arguments, named)
        if isinstance(ready, str):
            known.refused = ready
            return self.eagerly(opened, arguments, named, ready)
        before, watch = ready
        self._signatures.watched += 1
        result = self._watched(opened, watch, arguments, named)
        known.runs += 1
        why = self._why_not(known, watch, before, result)
        if why and known.runs < min(_LOOKS, self.mode.warmup):  # it may be what is done once: tuning, a cache made
            self.cold(opened, f"warm-up {known.runs} of {self.mode.warmup}, looked at again: {why}"[:_MOST_TEXT], began)
            return result
        known.refused = known.refused or why
        if known.refused:
            self.tell(opened, EAGER.name, known.refused)
            return result
        self.cold(opened, f"warm-up {known.runs} of {self.mode.warmup} before capture", began)
        return result

    def _watch(self, taken: Any, most_bytes: int | None, arguments: Any, named: Any) -> tuple[Any, Any] | str:
        """Return what the host state is, and what watches a call; or why neither can be had."""
        try:
            before = self._capturing.snapshot(taken)
            where = self._device.where(taken.tensors[0])
            watch = self._watching.Watch(self._device.holds, most_bytes, where, self._device.relaxed)
            if self.mode.mutates is not None:
                for tensor in self._values.apart(self.mode.mutates(*arguments, **named))[0]:
                    watch.will_change(tensor)
        except Exception as error:  # noqa: BLE001 - the user's function, or a fault of ours
            return _text("what it changes cannot be seen", error)
        return before.too_much or (before, watch)

    def _watched(self, opened: Any, watch: Any, arguments: Any, named: Any) -> Any:
        if opened is not None:
            opened.ran = Ran(EAGER.name, self.asked.mode, "the call raised before there was a graph")
        inside.depth += 1
        try:
            with watch:
                return self.function(*arguments, **named)
        except BaseException:
            watch.forget()  # who keeps the exception keeps this frame
            raise
        finally:
            inside.depth -= 1

    def _why_not(self, known: Signature, watch: Any, before: Any, result: Any) -> str:
        """Return why no graph can hold a call that was watched, or nothing. Never raises."""
        try:
            return str(self._capturing.obstacle(known, watch, before, result))
        except Exception as error:  # noqa: BLE001 - rule 1
            self.notes.fault("mode", error)
            return _text("gpu_timed could not look at what the call did", error)

    def _capture(self, opened: Any, known: Signature, taken: Any, arguments: Any, named: Any) -> Any:
        """Run the user's call eagerly; capture it, unless it is; and hold a replay against what it gave."""
        began = time.perf_counter_ns()
        ready = self._prepare(taken, arguments, named)
        if isinstance(ready, str):
            known.refused = ready
            return self.eagerly(opened, arguments, named, ready)
        fresh, drawn, before, watch = ready
        result = self._watched(opened, watch, arguments, named)
        captured, capturing = known.captured, self._capturing
        new = captured is None
        why = self._why_not(known, watch, before, result)
        if why and new and known.looks:  # it may be what is done once after a change: a cache made anew
            known.looks -= 1
            self.cold(opened, f"looked at again: {why}"[:_MOST_TEXT], began)
            return result
        try:
            why = why or capturing.too_much(watch, taken, before.tensors)
            if not why:
                drawn = self._drawn(watch, drawn, self._device.random_state(taken.tensors[0]))
                if captured is None:
                    captured = self._make_graph(taken, fresh, watch, draws=drawn is not None)
                leaves, spec = self._values.apart(result)  # which may be the user's code: not with the lock
                why = captured.says(leaves, spec)
                if not why:
                    with self._lock:
                        if not new and known.captured is not captured:
                            raise Passing("its graph was let go on another thread")  # noqa: TRY301
                        why = capturing.compare(captured, fresh, watch, taken, leaves, drawn)
                        if not why:
                            captured.replays += 1
                            known.captured = captured
        except Passing as error:
            if new:
                self._give_up(known, captured, "")
                captured = None
            known.failed_captures += 1
            if known.failed_captures < _MOST_FAILURES:
                self.cold(opened, f"not captured now, tried at a later call: {error}"[:_MOST_TEXT], began)
                return result
            why = _text("could not be captured", error)
        except Exception as error:  # noqa: BLE001 - what cannot be captured, and any fault of ours
            why = _text("could not be captured", error)
        if why or captured is None:
            self._give_up(known, captured, why)
            self.tell(opened, EAGER.name, why)
            return result
        torch_ranks.hold(self.notes.ground, self)
        self.asked = self.asked._replace(graph_memory_bytes=self._device.held())
        what = f"captured ({captured.graph.nbytes / (1 << 20):.1f} MiB) and " if new else ""
        compared = capturing.not_compared(watch)
        self.cold(opened, f"{what}{f'not compared: {compared}' if compared else 'compared with this run'}", began)
        return result

    def _drawn(self, watch: Any, before: Any, after: Any) -> tuple[Any, Any] | None:
        """Return where random numbers stood *before* and *after* the call, if it, and no other thread, drew some."""
        may = watch.draws or self._device.compile_in_use()
        return (before, after) if may and not self._device.is_same_state(before, after) else None

    def _prepare(self, taken: Any, arguments: Any, named: Any) -> tuple[list[Any], Any, Any, Any] | str:
        """Return the inputs as they are before the call, where random numbers stand, and what watches the call."""
        try:
            fresh = list(taken.tensors)
            if self.mode.inputs == "copy":
                if any(map(self._values.overlaps, fresh)):
                    return "an argument overlaps itself, as what expand() gives"
                with self._device.relaxed():
                    fresh = [self._values.standing_in(tensor) for tensor in fresh]
            drawn = self._device.random_state(taken.tensors[0])
            most = self.mode.max_state_bytes
            most = min(most, self._device.room(taken.tensors[0], _PART * most) // _PART)
        except Exception as error:  # noqa: BLE001 - no memory for it, say
            return _text("its inputs cannot be copied", error)
        ready = self._watch(taken, most, arguments, named)
        return ready if isinstance(ready, str) else (fresh, drawn, *ready)

    def _make_graph(self, taken: Any, fresh: list[Any], watch: Any, *, draws: bool) -> Captured:
        likely = not watch.waits  # else what it waits for may be left out in the capture, or not
        with self._lock:
            self._signatures.captures += 1
            if likely:
                self._signatures.make_room(self.mode.max_graphs, self._let_go)
        inside.depth += 1
        try:
            made: Captured = self._capturing.make(taken, fresh, watch, draws=draws)
        finally:
            inside.depth -= 1
        if not likely:
            with self._lock:
                self._signatures.make_room(self.mode.max_graphs, self._let_go)
        return made

    def _give_up(self, known: Signature, captured: Captured | None, why: str) -> None:
        known.refused, known.captured = why, None
        try:
            if captured is not None:
                with self._lock, self._device.relaxed():
                    captured.graph.release()
        except Exception as error:  # noqa: BLE001 - rule 1
            self.notes.fault("mode", error)


def _not_opened(taken: Any) -> str:
    kinds = sorted({type(each).__name__ for each in taken.others if not isinstance(each, PLAIN)})
    return f" ({', '.join(kinds)}: not taken apart, pass what is in it)" if kinds else ""


def _text(what: str, error: BaseException) -> str:
    said = str(error).strip().partition("\n")[0]
    return f"{what} ({type(error).__name__}: {said})"[:_MOST_TEXT]
