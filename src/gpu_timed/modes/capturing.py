"""One capture: made, held against the eager run of the same call, and replayed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

from gpu_timed.mode_values import CudaGraph
from gpu_timed.modes import host_guards, host_places, host_state
from gpu_timed.modes.launcher import Passing

STALE: Final = object()
"""In place of what a replay gives: the graph is not that of the function any more."""

PLAIN: Final = (int, float, bool, str, bytes, complex, type(None))
"""Kinds of values that are told apart by what they are, not by identity."""

_IN_PLACE: Final = "change it in place (a KV cache: one of a fixed size)"
CHANGES: Final = "an output that is no tensor changes from call to call"
SHARED: Final = "arguments share memory, with one another or with state, and the call changes some of it"

MOST_HELD: Final = 256 << 20
"""Bytes that a graph keeps from being freed, until the next call, when what it reads is moved: so that whether it was
may be asked while the device works. Of more it is asked before: what reads more takes the device longer, too."""


class Launched(Exception):  # noqa: N818 - what happened before
    """A replay was queued that changes state, and what followed failed: the call cannot be run again."""


class Captured:
    """A graph, and what a replay needs beside it."""

    def __init__(self, graph: Any, static: list[Any], keep: Any, is_tensor: Callable[[Any], bool]) -> None:
        self.graph = graph
        self.is_tensor = is_tensor
        #: The tensors that it reads its inputs from.
        self.static = static
        #: Which inputs the call changes, by position; and what else that was there before it.
        self.changed_inputs: list[int] = []
        self.changed: dict[int, Any] = {}
        #: How each output is made of the graph's, ``(kind, what)``, or what it is: of objects a weak reference; and how
        #: they are nested.
        self.plan: list[tuple[str, Any]] = []
        #: Which of them are one that came before: of such only one copy is made.
        self.again: list[tuple[int, int]] = []
        self.together: Callable[[list[Any]], Any] = list
        self.spec: Any = None
        #: Whether arguments share memory, so that a change of one, which is of a copy, would be one of another.
        self.shares: Callable[[Any], bool] | None = None
        #: What is to be as it was, and whether that is to be known before a replay: it changes what outlives the call,
        #: or might stop the device. Else it is looked at while that works, and nobody gets to see what a stale replay
        #: gave.
        self.guards = host_guards.Guards([])
        self.guards_first = True
        #: Whether it is to be known before a replay that what it reads is where it was, since nobody holds it.
        self.memory_first = True
        self.held: list[Any] = []
        #: What the graph knows the addresses of and does not own.
        self.keep = keep
        self.replays = 0

    def says(self, leaves: list[Any], spec: Any) -> str:
        """Return how what an eager run gave is another than what all replays give, its tensors left out."""
        if len(leaves) != len(self.plan):
            return "a replay gives another number of outputs"
        found = [_TENSOR if kind in _TENSORS or self.is_tensor(what) else what for kind, what in self.plan]
        return "" if is_as_said(said(leaves, spec, self.is_tensor), (found, self.spec)) else CHANGES

    def finished(self, leaves: list[Any]) -> Any:
        """Return outputs as the user gets them: what nests them may be code of the user's.

        Raises:
            Launched: That failed, and the replay has changed state.
        """
        try:
            return self.together(leaves)
        except Exception as error:
            if self.changed_inputs or self.changed:
                raise Launched from error
            raise

    def made(self, tensors: list[Any]) -> list[Any]:
        """Return the outputs of the last replay, for a call with *tensors*."""
        found = [
            what.clone()
            if kind == "clone"
            else tensors[what]
            if kind == "input"
            else what()
            if kind == "object"
            else what
            for kind, what in self.plan
        ]
        for place, earlier in self.again:
            found[place] = found[earlier]
        return found


_TENSOR: Final = object()
_TENSORS: Final = frozenset({"clone", "input"})


def _repeated(plan: list[tuple[str, Any]]) -> list[tuple[int, int]]:
    """Return which outputs are one that came before, and have no copy made of them in *plan*."""
    places: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    for place, (kind, what) in enumerate(plan):
        if kind == "clone" and places.setdefault(id(what), place) != place:
            found.append((place, places[id(what)]))
            plan[place] = "is", what
    return found


def said(leaves: list[Any], spec: Any, is_tensor: Callable[[Any], bool]) -> tuple[list[Any], Any]:
    """Return of what a call gave all that is no tensor, and how it is nested. Objects are known, and not kept alive."""
    return [
        _TENSOR if is_tensor(leaf) else leaf if isinstance(leaf, PLAIN) else weakref.ref(leaf) for leaf in leaves
    ], spec


def is_as_said(one: tuple[list[Any], Any], other: tuple[list[Any], Any]) -> bool:
    """Return whether two calls said the same: of what they gave, :func:`said`."""
    return len(one[0]) == len(other[0]) and all(map(host_places.same, one[0], other[0])) and bool(one[1] == other[1])


class Capturing:
    """Makes graphs of *function*.

    Args:
        function: What is captured.
        mode: How.
        device: :class:`gpu_timed.modes.torch_graphs.Device`, or what stands for it.
        values: :mod:`gpu_timed.modes.torch_values`.
        watching: :mod:`gpu_timed.modes.torch_watching`.
    """

    def __init__(self, function: Callable[..., Any], mode: CudaGraph, device: Any, values: Any, watching: Any) -> None:
        self._function = function
        self.mode = mode
        self._copies = mode.inputs == "copy"
        self._device = device
        self._values = values
        self._watching = watching

    def snapshot(self, taken: Any) -> host_state.Snapshot:
        """Return what the host state is for a call with the arguments *taken*."""
        values = self._values
        return host_state.Snapshot(self._function, taken.leaves, values.is_tensor, values.is_made_of_others)

    def obstacle(self, known: Any, watch: Any, before: host_state.Snapshot, result: Any) -> str:
        """Return why no graph can hold a call that was watched and gave *result*, or nothing.

        *known* is what is known of its signature, *before* what the host state was before it.
        """
        if watch.blocked:
            return str(watch.blocked)
        if watch.waits and not before.asks_whether_capturing:
            return str(watch.waits)
        if watch.talks == self._watching.EXCHANGES and not self.mode.collectives:
            return f"{watch.talks} (declare CudaGraph(collectives=True) if all of them make the same calls)"
        if len(watch.devices) > 1:
            return f"works on several devices: {', '.join(sorted(map(str, watch.devices)))}"
        replaced = before.replaced(watch.has_read)
        if replaced:  # whatever is put back for the capture
            return (
                f"puts another tensor in the place of {replaced}, which it reads, and a replay would not: {_IN_PLACE}"
            )
        if before.rearranged():
            return "changes the shape, strides, dtype or memory of an argument in place, which a replay would not"
        moved = before.changed()
        if moved and self.mode.reset is None:
            return f"changes host state, which a replay would not: {moved} (declare CudaGraph(reset=…))"
        leaves, spec = self._values.apart(result)
        for leaf in leaves:
            if self._values.is_tensor(leaf):
                if leaf.requires_grad:
                    return "an output requires grad, which a replay cannot give"
                if not self._device.holds(leaf):
                    return f"an output is a tensor on {leaf.device}"
            elif not isinstance(leaf, PLAIN) and not (type(leaf).__weakrefoffset__ and before.knows(leaf)):
                return f"an output is a {type(leaf).__name__}: return its tensors, say"
        gave = said(leaves, spec, self._values.is_tensor)
        if known.said is not None and not is_as_said(gave, known.said):
            return CHANGES
        known.said = gave
        return ""

    def too_much(self, watch: Any, taken: Any, state: list[Any]) -> str:
        """Return why what the call changes is more than can be undone. *state* is the tensors that it knows otherwise.

        Raises:
            Passing: Arguments of this call share memory, or there is little left of the device's.
        """
        if watch.too_much:
            if watch.most_bytes < self.mode.max_state_bytes:
                raise Passing("the device has too little memory left to set aside what the call changes")
            return f"changes more state than max_state_bytes={self.mode.max_state_bytes:,}"
        shares = self._shares(watch, taken, state)
        if shares is not None and shares(taken.tensors):
            raise Passing(SHARED)
        keys = [self._watching.key_of(tensor) for tensor in taken.tensors]
        if not self._copies and len(set(keys)) != len(keys) and any(key in watch.changed for key in keys):
            return "changes an argument that shares its memory with another"
        return ""

    def _shares(self, watch: Any, taken: Any, state: list[Any]) -> Callable[[Any], bool] | None:
        """Return what tells whether arguments share memory that the call changes; None if it changes none."""
        if not self._copies or not watch.changed:
            return None
        keys = [self._watching.key_of(tensor) for tensor in taken.tensors]
        changed = [key in watch.changed for key in keys]
        written = [one for key, one in watch.changed.items() if key not in keys]
        read = [one for key, one in watch.outside.items() if key not in keys]
        shares: Callable[[Any], bool] = self._values.Shares(
            taken.tensors, changed, written, filter(self._device.holds, [*read, *state])
        )
        return shares

    def make(self, taken: Any, static: list[Any], watch: Any, *, draws: bool) -> Captured:
        """Capture a call that was watched, with *static* as the graph's inputs. Raises what cannot be captured.

        *draws* says whether it drew random numbers.
        """
        positional, by_name = self._values.rebuilt(taken, static)
        if self.mode.reset is not None:
            self.mode.reset()
        # One that waits, and asks whether it is being captured, may leave out what it waits for: then it can be held.
        around = self._watching.WithoutReads() if watch.waits else nullcontext()

        def call() -> Any:
            with around:
                return self._function(*positional, **by_name)

        try:
            graph = self._device.capture(static, call, by_torch=draws or watch.streams)
        except BaseException:
            if watch.solves:
                self._device.mend_solver(static[0])
            raise
        values, of = self._values, self._watching.key_of
        keys = [of(tensor) for tensor in taken.tensors]
        made = Captured(graph, static, [one for key, one in watch.outside.items() if key not in keys], values.is_tensor)
        try:
            made.changed_inputs = [index for index, key in enumerate(keys) if key in watch.changed]
            made.changed = {key: one for key, one in watch.changed.items() if key not in keys}
            leaves, spec = values.apart(graph.outputs)
            snapshot = self.snapshot(taken)
            outside = set(watch.outside)
            if self.mode.reset is None:  # else there may be some that the call has put there
                outside.update(map(of, snapshot.tensors))
            made.plan = [self._plan(leaf, static, outside) for leaf in leaves]
            made.again = _repeated(made.plan)
            made.spec, made.together = spec, values.together(spec, graph.outputs)
            graph.outputs = None  # an object among them is not to be kept alive
            made.guards = snapshot.guards(made.keep, values.are_at, values.are_as_now, values.writes)
            made.shares = self._shares(watch, taken, snapshot.tensors)
            made.guards_first = (
                bool(watch.changed or draws or watch.streams or watch.may_stop or snapshot.launches)
                or not self.sees_all
            )
            if not made.guards_first:
                held = values.memory_behind(filter(self._device.holds, made.guards.tensors), MOST_HELD)
                made.memory_first, made.held = held is None, held or []
        except Exception:
            graph.release()
            raise
        return made

    def _plan(self, leaf: Any, static: list[Any], outside: set[int]) -> tuple[str, Any]:
        """Return how an output is made of the graph's, so that it is to its user what the eager one would be."""
        if not self._values.is_tensor(leaf):
            return ("is", leaf) if isinstance(leaf, PLAIN) else ("object", weakref.ref(leaf))
        of = self._watching.key_of
        for index, tensor in enumerate(static):
            if leaf is tensor:
                return "input", index
            if of(leaf) == of(tensor):
                raise ValueError("an output is a view of an argument")
        if of(leaf) in outside:
            return "is", leaf
        return ("clone" if self.mode.outputs == "clone" else "is"), leaf

    def replay(self, captured: Captured, tensors: Any) -> Any:
        """Replay for a call with *tensors*; returns the outputs one after another, or ``STALE``.

        Raises:
            Passing: The arguments share memory that the graph changes.
            Launched: What follows the replay failed, and the replay has changed state.
            Exception: It failed, and the call can be run as it is.
        """
        values, static, graph, guards = self._values, captured.static, captured.graph, captured.guards
        copies = self._copies
        # What may have been freed must not be read, and what lasts not be changed, by a graph that is stale. All else
        # may be asked while the device is at work on it.
        if captured.memory_first and (guards.moved() or (captured.guards_first and guards.rebound())):
            return STALE
        if captured.shares is not None and captured.shares(tensors):
            raise Passing(SHARED)
        graph.order()
        if copies:
            values.copy_into(static, tensors)
        graph.replay()
        changed = captured.changed_inputs
        try:
            if not captured.guards_first and (guards.rebound() or (not captured.memory_first and guards.moved())):
                return STALE
            if changed and copies:
                values.copy_into([tensors[index] for index in changed], [static[index] for index in changed])
            return captured.made(tensors)
        except Exception as error:
            if changed or captured.changed:
                raise Launched from error
            raise

    @property
    def sees_all(self) -> bool:
        """Whether all that a call may change is known: what compiled code and other kernels change is not seen."""
        return self.mode.mutates is None and not self._device.compile_in_use()

    def not_compared(self, watch: Any) -> str:
        """Return why no replay of a call that was watched is made but those that are asked for; or nothing.

        What compiled code changes is not seen, and must not be changed twice.
        """
        if watch.talks:
            return str(watch.talks)
        return "torch.compile is in use" if self.mode.mutates is None and self._device.compile_in_use() else ""

    def compare(  # noqa: PLR0917 - all that is known of the call
        self, captured: Captured, fresh: list[Any], watch: Any, taken: Any, gave: list[Any], drawn: Any
    ) -> str:
        """Replay on the state from before the call; returns how that differs from the eager run, whose state stays.

        *gave* is the outputs of the eager run, as many as the graph has; *drawn* is where the random numbers stood
        before and after the call, if it drew some. Else they are left alone: other threads draw from them, too.

        Raises:
            Passing: It differs, and another thread may have drawn random numbers in between.
        """
        values, watching, device = self._values, self._watching, self._device
        copies = self._copies
        if copies:
            with device.relaxed():
                for index, pair in enumerate(zip(taken.tensors, fresh, strict=True)):
                    if index not in captured.changed_inputs and not values.is_same(*pair):
                        return "it changes an argument by what is no operation of torch (declare CudaGraph(mutates=…))"
        if self.not_compared(watch):
            return ""
        first = taken.tensors[0]
        expected = [leaf.clone() if values.is_tensor(leaf) else leaf for leaf in gave]
        changed = captured.changed if copies else dict(watch.changed)
        done = {key: watching.content_of(tensor) for key, tensor in changed.items()}
        with device.relaxed():
            captured.graph.order()
            try:
                self._put(changed, watch.before)
                if drawn is not None:
                    device.set_random_state(first, drawn[0])
                if copies and fresh is not captured.static:
                    values.copy_into(captured.static, fresh)
                captured.graph.replay()
                found = captured.made(captured.static)
                pairs = list(zip(expected, found, strict=True))
                pairs += [(done[key], watching.memory_of(tensor)) for key, tensor in changed.items()]
                if copies:
                    pairs += [(taken.tensors[index], captured.static[index]) for index in captured.changed_inputs]
                why = next(filter(None, (values.differ(*pair) for pair in pairs)), "")
            finally:
                self._put(changed, done)
                if drawn is not None:
                    device.set_random_state(first, drawn[1])
        why = f"a replay does not do what the eager run did: {why}" if why else ""
        if why and drawn is not None and not captured.replays:
            raise Passing(why)
        return why

    def _put(self, tensors: dict[int, Any], contents: dict[int, Any]) -> None:
        for key, tensor in tensors.items():
            self._values.copy_into([self._watching.memory_of(tensor)], [contents[key]])
