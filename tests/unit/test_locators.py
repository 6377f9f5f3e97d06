"""Which runtime is asked where work goes: the chain of locators, with make-believe modules and driver."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from types import SimpleNamespace as Fake
from typing import Any

import pytest

from gpu_timed.clocks import cuda_driver, cuda_places
from gpu_timed.clocks.cuda_locators import SIMULATED, CupyLocator, NumbaLocator, TritonLocator
from gpu_timed.clocks.cuda_places import NO_DEVICE, NOT_INITIALISED, CudaPlaces
from gpu_timed.clocks.locators import Locators
from gpu_timed.ports import Launch, Place
from gpu_timed.record import Missing

RUNTIMES = ("torch", "cupy", "numba", "triton", "jax")
ERROR = Missing("device_error", "out of order")
SOMEWHERE = Place(Fake(), 0, 0)  # type: ignore[arg-type]

Load = Callable[..., Any]


class Answer:
    """A locator that gives one answer, and remembers what it was asked."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[Launch | None] = []

    def locate(self, launch: Launch | None = None) -> Any:
        self.asked.append(launch)
        return self.answer


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Make modules look imported, with the given attributes; no runtime is to begin with."""
    for name in (*RUNTIMES, "numba.cuda"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def make(*names: str, **attributes: Any) -> Any:
        for name in names:
            monkeypatch.setitem(sys.modules, name, made := types.ModuleType(name))
            made.__dict__.update(attributes)
        return made

    return make


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver whose calling thread has a context on device ``current``; ``captured`` streams are being captured."""
    state = Fake(current=1, present=True, captured=set())
    state.clock = Fake(cuda_library=None, is_capturing=lambda place: place.stream in state.captured)
    monkeypatch.setattr(cuda_driver, "current_device", lambda library: state.current)
    monkeypatch.setattr(cuda_driver, "device_present", lambda: state.present)
    monkeypatch.setattr(cuda_places, "_cuda_clock", lambda: state.clock)
    return state


def chain(**answers: Any) -> tuple[Locators, dict[str, Answer]]:
    """The locators of a process, with make-believe ones in it."""
    made, held = Locators(), {name: Answer(answers.get(name, NO_DEVICE)) for name in RUNTIMES}
    made._of, made._torch = dict(held), held["torch"]  # type: ignore[assignment]
    return made, held


@pytest.mark.parametrize("torch", [SOMEWHERE, ERROR, Missing("captured")], ids=["place", "error", "captured"])
def test_torch_is_first(load: Load, torch: Any) -> None:
    """Where torch has a device in use, whatever it says of it, nobody else is asked."""
    load(*RUNTIMES, "numba.cuda")
    made, held = chain(torch=torch, cupy=SOMEWHERE, numba=SOMEWHERE, jax=SOMEWHERE)
    assert made.locate() is torch
    assert [name for name in held if held[name].asked] == ["torch"]


@pytest.mark.parametrize("reason", ["no_device", "not_initialised", "unsupported_runtime"])
def test_the_others_are_asked_in_order_where_torch_has_none(load: Load, reason: str) -> None:
    """The first that is loaded and has a device, or something to say of it, answers; those behind are not asked."""
    absent = Missing(reason, "says torch")
    made, held = chain(torch=absent, cupy=NOT_INITIALISED, numba=ERROR, jax=SOMEWHERE)
    assert made.locate() is absent
    assert not held["jax"].asked
    load("cupy", "numba")  # numba without its CUDA part is not asked
    assert made.locate() is absent
    load("jax")
    assert made.locate() is SOMEWHERE
    load("numba.cuda")
    assert made.locate() is ERROR
    assert [len(held[name].asked) for name in RUNTIMES] == [4, 3, 1, 0, 1]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_launch_says_whom_to_ask(load: Load, runtime: str) -> None:
    """The runtime of a launch is asked alone and told of it; a launch that goes nowhere is answered by itself."""
    load(*RUNTIMES, "numba.cuda")
    made, held = chain(torch=SOMEWHERE)
    launch, absent = Launch(runtime, 9), Missing("simulated", "in Python")
    assert made.locate(launch) is held[runtime].answer
    assert made.locate(Launch(runtime, 9, absent)) is absent
    assert {name: one.asked for name, one in held.items() if one.asked} == {runtime: [launch]}


def test_a_half_imported_cupy_is_not_there_yet(load: Load, driver: Any) -> None:
    """CuPy without its current stream is not initialised, with it a place on that stream; no device stays no device."""
    made, cupy = Locators(), load("cupy")
    assert made.locate() == NOT_INITIALISED
    cupy.cuda = Fake()
    assert CupyLocator(CudaPlaces()).locate() == NOT_INITIALISED
    driver.present = False
    assert CupyLocator(CudaPlaces()).locate() == NO_DEVICE
    cupy.cuda.get_current_stream = lambda: Fake(ptr=40)
    found = made.locate()
    assert isinstance(found, Place)
    assert (found.device, found.stream, found.clock) == (1, 40, driver.clock)


@pytest.mark.parametrize(("value", "stream"), [("", 0), ("0", 0), ("1", 2)])
def test_numbas_default_stream(load: Load, driver: Any, monkeypatch: Any, value: str, stream: int) -> None:
    """The variable of the per-thread stream says where a launch without one goes; the simulator goes nowhere."""
    monkeypatch.setenv("NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM", value)
    made = NumbaLocator(CudaPlaces())
    found = [made.locate(launch) for launch in (None, Launch("numba"), Launch("numba", 0), Launch("numba", 31))]
    assert [one.stream for one in found if isinstance(one, Place)] == [stream, stream, stream, 31]
    load("numba.cuda", jit=Fake(__module__="numba.cuda.simulator.api"))
    assert NumbaLocator(CudaPlaces()).locate(Launch("numba", 0)) is SIMULATED


def test_one_stream_is_one_place_for_every_runtime(load: Load, driver: Any) -> None:
    """Numba, CuPy and Triton on one stream of one device get the same place; another device or stream is another."""
    cuda = CudaPlaces()
    load("cupy", cuda=Fake(get_current_stream=lambda: Fake(ptr=0)))
    numba, triton = NumbaLocator(cuda), TritonLocator(cuda, Answer(ERROR))  # type: ignore[arg-type]
    assert {id(one.locate()) for one in (numba, CupyLocator(cuda), triton)} == {id(cuda.at(1, 0))}
    driver.captured.add(6)
    assert numba.locate(Launch("numba", 6)) == Missing("captured")
    driver.current = 2
    assert len({id(place) for place in (numba.locate(), cuda.at(1, 0), cuda.at(1, 6))}) == 3
    load("torch")
    assert triton.locate() is ERROR


def test_places_are_bounded(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that are made and dropped without end start the table over, and it stays the same table."""
    monkeypatch.setattr(cuda_places, "MOST_PLACES", 4)
    cuda = CudaPlaces()
    table, kept = cuda.held, [cuda.at(0, stream) for stream in range(4)]
    assert [cuda.at(0, stream) for stream in range(4)] == kept
    again = cuda.at(0, 4)
    assert (cuda.held is table, list(table)) == (True, [(0, 4)])
    assert cuda.at(0, 4) is again
