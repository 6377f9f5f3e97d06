"""Whether a function does the same every time: else its arms cannot be compared, whatever the clock says.

A function that counts, fills a cache or moves a position does other work in its thousandth call than in its first;
and a mode can change what it does (a replayed graph does not count). So it is called twice from the same inputs, with
equal seeds: outputs, inputs, and what it reaches on the host must be the same. Where they are not, ``reset=`` makes it
so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from gpu_timed.arms import Agreement
from gpu_timed.measure import outputs, seeds
from gpu_timed.modes import host_places, host_state
from gpu_timed.option_names import given

MOST_BYTES: Final = 1 << 28
"""Of arrays that are copied, to see whether a call changes them: 256 MiB."""
Call = Callable[..., Any]


class Steady(NamedTuple):
    """What two calls from the same inputs have shown."""

    why_not: str
    """Why arms of this function cannot be compared; empty where they can."""
    expected: list[outputs.Leaf]
    """What a call gives."""
    agreement: Agreement
    """Of both calls."""
    draws: bool
    """Whether it draws random numbers."""
    note: str = ""


def check(
    function: Call,
    call: Call,
    arguments: tuple[Any, ...],
    named: Mapping[str, Any],
    *,
    reset: Callable[[], object] | None,
    seed: int,
    tolerance: float | None = None,
    compared: bool = True,
) -> Steady:
    """Call it twice, and a third time where it changes what may turn out to be the same. Random numbers are put back.

    Args:
        function: What is looked at.
        call: Calls it, and waits.
        arguments: What it takes by position.
        named: What it takes by name.
        reset: Puts its state back.
        seed: That sources of random numbers are set to.
        tolerance: As in :func:`gpu_timed.measure.outputs.agreement`.
        compared: Whether outputs count. What it changes counts in any case.

    Raises:
        Exception: What *function* or *reset* raises.
    """
    with seeds.kept():

        def once(watch: _Watch | None) -> Any:
            if reset is not None:
                reset()
            if watch is not None:
                watch.look()
            seeds.seed(seed)
            return call(*arguments, **named)

        first = _Watch(function, arguments, named)
        expected = outputs.kept(once(first))
        touched = first.touched()
        second = _Watch(function, arguments, named, touched)
        agreement = outputs.agreement(expected, once(second), tolerance)
        draws = seeds.drawn_since(seed)
        moved = second.changed()
    why_not, resets = "", given("reset")
    remedy = f"give {resets}, which puts it back before each call"
    if compared and not agreement.equal:
        said = f"though {resets} was called before each" if reset is not None else remedy
        why_not = f"two calls from the same inputs differ: {agreement.text} ({said})"
    elif moved and reset is None:
        why_not = f"a call changes {moved}, so that no two of them are alike ({remedy})"
    note = ""
    if moved and reset is not None:
        note = f"{resets} is called before each call, outside of what is timed; a call changes {moved}."
    return Steady(why_not, expected, agreement, draws, note)


class _Watch:
    """What a call may change: what it takes, and what the function reaches.

    Arrays among the arguments are copied. Tensors that the function reaches otherwise, such as a module's, are known by
    the count that torch keeps of changes in place; where that has moved in a call, the next call's are copied as well:
    to write the same again is no change.
    """

    def __init__(
        self, function: Call, arguments: Any, named: Any, touched: list[tuple[str, Any]] | None = None
    ) -> None:
        self._function = function
        self._taken = (arguments, dict(named))
        self._touched = touched or []

    def look(self) -> None:
        """See what there is before the call."""
        taken = list(outputs.leaves(self._taken[0], "argument ")) + list(outputs.leaves(self._taken[1], "argument "))
        positional, named = self._taken
        self._snapshot = host_state.Snapshot(self._function, [*positional, *named.values()], _is_array)
        self._copies: list[tuple[str, Any, Any]] = []
        self._too_large: list[str] = []
        spent = 0
        arrays = [(leaf.where, leaf.value) for leaf in taken if outputs.arrays_of(leaf.value) is not None]
        for name, array in [*arrays, *self._touched]:
            known = outputs.arrays_of(array)
            spent += known.size(array)
            if spent > MOST_BYTES:
                self._too_large.append(name)
            else:
                self._copies.append((name, array, known.copied(array)))
        self._versions = [
            (name, tensor, outputs.arrays_of(tensor).version(tensor)) for name, tensor in _tensors(self._snapshot)
        ]

    def touched(self) -> list[tuple[str, Any]]:
        """Return the tensors that the function reaches and has written to."""
        return [
            (name, tensor)
            for name, tensor, version in self._versions
            if outputs.arrays_of(tensor).version(tensor) != version
        ]

    def changed(self) -> str:
        """Return what is not as it was; empty if all of it is."""
        for name, array, before in self._copies:
            difference = outputs.arrays_of(array).difference(outputs.arrays_of(array).copied(array), before, 0.0)
            if difference.text:
                return f"{name} in place"
        moved = self._snapshot.changed()
        if moved:
            return f"host state ({moved.removeprefix('.')})"
        copied = {id(array) for _, array, _ in self._copies}
        for name, tensor in self.touched():
            if id(tensor) not in copied:
                return f"{name} in place"
        return ""


def _tensors(snapshot: host_state.Snapshot) -> list[tuple[str, Any]]:
    """Return the arrays that a snapshot knows, with names; each once."""
    found: dict[int, tuple[str, Any]] = {}
    for name, _, key, was in snapshot.held:
        if type(was) is host_places.WasTensor:
            shown = f"{name}.{key}".removeprefix(".") if isinstance(key, str) else name or "a tensor"
            found.setdefault(id(was.tensor), (shown, was.tensor))
    return list(found.values())


def _is_array(value: Any) -> bool:
    """Return whether *value* is a tensor that is known by its address."""
    return outputs.arrays_of(value) is not None and hasattr(value, "data_ptr")
