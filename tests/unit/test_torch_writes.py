"""Whether dicts were written to is told by torch's count of writes, or not told at all."""

from __future__ import annotations

import itertools
import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gpu_timed.modes import host_guards, host_places, torch_writes  # noqa: E402
from gpu_timed.modes.torch_writes import Count, Writes, does_count  # noqa: E402


def test_torch_counts_what_is_to_be_counted() -> None:
    assert torch_writes.known() is not None


def by_content(held: dict[Any, Any]) -> int:
    """A version as seen by what is in a dict: of a dict put down again as it was it tells nothing."""
    return hash(tuple(held.items()))


def by_torch(held: dict[Any, Any]) -> int:
    return int(torch._C._dynamo.guards.dict_version(held))


NUMBERS = itertools.count()
LIES: dict[str, Callable[[dict[Any, Any]], int]] = {
    "nothing is counted": lambda _: 7,
    "reading is counted": lambda _: next(NUMBERS),
    "only how many there are": len,
    "only which keys": lambda held: hash(tuple(held)),
    "not in objects with many attributes": lambda held: 7 if len(held) > 50 else by_torch(held),
    "not in ordered ones": lambda held: 7 if type(held) is OrderedDict else by_torch(held),
    "not what an attribute is": lambda held: len(held) if "three" not in held and "one" in held else by_content(held),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_misses_a_write_is_not_used(lie: str) -> None:
    assert does_count(Count(by_torch))
    assert not does_count(Count(LIES[lie]))


def test_torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_writes.known.cache_clear()
    monkeypatch.delattr(torch._C._dynamo.guards, "dict_version")
    try:
        assert torch_writes.known() is None
        assert torch_writes.writes([{}]) is None
    finally:
        torch_writes.known.cache_clear()


class Watched(dict[Any, Any]):
    """A dict as Python 3.12 and torch count it: all draw from one counter, and only if written to."""

    counter = 0

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.number = self.draw()

    @classmethod
    def draw(cls) -> int:
        cls.counter += 1
        return cls.counter

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.number = self.draw()


def counted() -> tuple[Count, list[Any]]:
    asked: list[Any] = []

    def version(held: Any) -> int:
        asked.append(held)
        return int(held.number)

    count = Count(version)
    count._ours = Watched({0: False})
    return count, asked


def test_where_nothing_was_written_one_question_is_enough() -> None:
    count, asked = counted()
    dicts: list[Any] = [Watched(a=index) for index in range(5)]
    one, other = Writes(dicts, count), Writes(dicts[:2], count)
    for each in (one, other):
        assert each.look() == list(range(len(each._dicts)))  # nothing is known of them yet
        assert each.look() == list(range(len(each._dicts)))  # nor was it said that they are well
        each.well()
        assert each.look() == []
    asked.clear()
    for _ in range(3):
        assert one.look() == other.look() == []
    assert asked == [count._ours] * 6
    dicts[3]["a"] = 9
    assert (one.look(), other.look()) == ([3], [])
    assert (one.look(), other.look()) == ([3], [])
    one.well()
    asked.clear()
    assert (one.look(), other.look()) == ([], [])
    assert asked == [count._ours] * 2


def test_a_write_between_the_look_and_that_it_was_well_is_told_next_time() -> None:
    count, _ = counted()
    held = Watched(a=1)
    writes = Writes([held], count)
    assert writes.look() == [0]
    held["a"] = 2
    writes.well()
    assert writes.look() == [0]


def test_a_write_in_the_midst_of_a_look_is_told_next_time() -> None:
    """By another thread."""
    count, _ = counted()
    first, second = Watched(a=1), Watched(a=1)
    writes = Writes([first, second], count)
    writes.look()
    writes.well()
    real = count.numbers

    def numbers(dicts: list[Any]) -> list[int]:
        found = real(dicts)
        first["a"] = 3
        return found

    second["a"] = 2
    count.numbers = numbers  # type: ignore[method-assign]
    assert writes.look() == [1]
    writes.well()
    count.numbers = real  # type: ignore[method-assign]
    assert writes.look() == [0]


def test_a_call_by_a_finalizer_in_the_midst_of_the_count_does_not_wait_for_it() -> None:
    """Nor does what that writes go unnoticed."""
    count, _ = counted()
    held = Watched(a=1)
    writes = Writes([held], count)
    real = count._version

    def version(of: Any) -> int:
        number = real(of)
        count._version = real
        writes.look()
        writes.well()
        held["a"] = 2
        return number

    count._version = version
    thread = threading.Thread(target=count.moment, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert writes.look() == [0]


@pytest.mark.parametrize("seed", range(20))
def test_guards_say_the_same_with_it_and_without(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whatever is written, in whatever way, a stale one is stale for both."""
    monkeypatch.setattr(host_guards, "_FEWEST_WATCHED", 0)
    chance = random.Random(seed)
    made: list[dict[Any, Any]] = [{"a": 1, "b": None, "c": (1, 2)} for _ in range(6)]
    made += [OrderedDict(a=1, b=2.5), {}, OrderedDict(), {}]
    guards = [(held, host_places.LENGTH, len(held)) for held in made]
    guards += [(held, key, value) for held in made for key, value in held.items()]
    one = host_guards.Guards(guards)
    other = host_guards.Guards(guards, writes=torch_writes.writes)
    assert other._writes is not None
    ways: list[Callable[[dict[Any, Any]], Any]] = [
        lambda held: held.update(a=chance.choice([1, 2])),
        lambda held: held.__setitem__("b", chance.choice([None, 3])),
        lambda held: held.pop("a", None),
        lambda held: held.update({"z": 1}),
        lambda held: held.pop("z", None),
        lambda held: held.setdefault("a", 1),
        lambda held: held.__setitem__("c", (1, 2)),
        lambda held: held.clear() if chance.random() < 0.1 else None,
    ]
    answers = []
    for _ in range(300):
        chance.choice(ways)(chance.choice(made[:3] + made[-2:]))
        if chance.random() < 0.2:  # all back to what it was, as far as values tell
            for holder, _, _ in guards:
                holder.clear()
            for holder, key, value in guards:
                if not isinstance(key, host_places.Special):
                    holder[key] = value
        answers.append(one.rebound())
        assert other.rebound() == answers[-1]
    assert 20 < sum(answers) < 290
