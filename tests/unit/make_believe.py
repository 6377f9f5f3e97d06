"""A make-believe runtime without device events, controlled to the step: what the fence clock is tested on."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from gpu_timed.clocks.fence import FenceClock
from gpu_timed.ports import NOT_GIVEN, DeviceInfo, Launch, Place
from gpu_timed.record import Missing

MS: Final = 1_000_000
LONG_NS: Final = 1 << 62
"""Not before it is released by hand."""


class Thing:
    """A result: there *in_ns* from now, or from the flush that begins it if it is lazy; and maybe an error then."""

    def __init__(self, in_ns: int = LONG_NS, *, lazy: bool = False, error: Exception | None = None) -> None:
        self.in_ns = in_ns
        self.error = error
        self.ready_ns = LONG_NS
        if not lazy:
            self.begin()

    def begin(self) -> None:
        self.ready_ns = min(self.ready_ns, time.perf_counter_ns() + self.in_ns)


class MakeBelieve:
    """A runtime, and its locator. It notes what the thread that made it asks."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.all: weakref.WeakSet[Thing] = weakref.WeakSet()
        self.asleep: Callable[[], None] = lambda: time.sleep(0.000_02)
        self.owner = threading.get_ident()
        self.clock = FenceClock(self)
        self.place = Place(self.clock, 3, 0)

    def thing(self, in_ns: int = LONG_NS, **options: Any) -> Thing:
        made = Thing(in_ns, **options)
        self.all.add(made)
        return made

    def release(self) -> None:
        """Let everything be there."""
        for thing in list(self.all):
            thing.ready_ns = min(thing.ready_ns, time.perf_counter_ns())

    def flush(self, values: Any) -> None:
        self._note("flush")
        for thing in leaves(values):
            thing.begin()

    def results(self, values: Any) -> list[Thing]:
        self._note("results")
        return [thing for thing in self.all if not self._there(thing)] if values is NOT_GIVEN else leaves(values)

    def is_ready(self, result: Thing) -> bool:
        self._note("is_ready")
        if self._there(result) and result.error is not None:
            raise type(result.error)(*result.error.args)  # anew: a traceback would keep the result
        return self._there(result)

    def wait(self, results: list[Thing]) -> None:
        self._note("wait")
        for result in results:
            while not self.is_ready(result):
                self.asleep()

    def describe(self, place: Place) -> DeviceInfo:
        return DeviceInfo(place.device, Missing("no_device"), "Believe", "tpu")

    def locate(self, launch: Launch | None = None) -> Place:
        return self.place

    def device_of(self, value: Any) -> None:
        return None

    def _there(self, thing: Thing) -> bool:
        return thing.ready_ns <= time.perf_counter_ns()

    def _note(self, what: str) -> None:
        if threading.get_ident() == self.owner:
            self.asked.append(what)


def leaves(values: Any) -> list[Thing]:
    """Every thing in a nest of tuples, lists and dictionaries."""
    if isinstance(values, Thing):
        return [values]
    inside = values.values() if isinstance(values, dict) else values if isinstance(values, tuple | list) else ()
    return [thing for value in inside for thing in leaves(value)]


def soon(question: Callable[[], bool]) -> bool:
    """Whether *question* comes true within ten seconds."""
    deadline = time.monotonic() + 10
    while not question() and time.monotonic() < deadline:
        time.sleep(0.001)
    return question()
