"""One matrix: kind of callable x decorator or block x sync x ending x caller, each cell made from small tables.

Each does the same work in two steps. If it suspends, others work on the stream in between: a decorated call leaves that
out, a block holds it. What awaits is driven by hand from plain code; on a loop it is a task, closed by cancelling it.
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
import types
from collections.abc import AsyncIterator, Callable, Iterator
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace

from gpu_timed import flush, gpu_span, gpu_timed
from gpu_timed.testing import FakeDevice, capture

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")
STEP_NS, LAUNCH_NS = 5_000, 1_000  # what a step launches, and the host time it takes to
OTHERS_NS, AWAY_NS = 700, 300  # what others launch between two steps, and the host time that passes
NOW: list[Work] = []  # where TorchScript, which takes tensors only, finds the work
DONE, STATUS = "done", {"returns": "ok", "raises": "error", "closed": "cancelled"}


class Work:
    """What one cell does on the device, and what it sees of the context meanwhile."""

    def __init__(self, device: FakeDevice, error: Exception | None, *, unseen_between: bool) -> None:
        self.device, self.error, self.unseen_between = device, error, unseen_between
        self.callers = otel_context.get_current()
        self.inside: list[int] = []

    def step(self) -> None:
        """Launch, let the host's time pass, and note the current span."""
        self.inside.append(trace.get_current_span().get_span_context().span_id)
        self.device.launch(STEP_NS)
        self.device.host_clock.advance(LAUNCH_NS)

    def last(self) -> str:
        """Do the last step, and return or raise. The clock stands still: on a loop it is moved once this is over."""
        self.step()
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop().call_soon(self.device.run_dry)
        if self.error is not None:
            raise self.error
        return DONE

    def whole(self) -> str:
        """Do both steps at once."""
        self.step()
        return self.last()

    def others(self) -> None:
        """Do what the rest of the process does between the two steps."""
        self.device.launch(OTHERS_NS)
        self.device.host_clock.advance(AWAY_NS)
        assert otel_context.get_current() is self.callers or not self.unseen_between


def body(*given: Any) -> str:
    """Work without suspending, as a function or a method."""
    return given[-1].whole()


def steps(work: Work) -> Iterator[None]:
    """Work as a generator."""
    work.step()
    yield
    return work.last()


async def coroutine(*given: Any) -> str:
    """Work as a coroutine, as a function or a method."""
    given[-1].step()
    await asyncio.sleep(0)
    return given[-1].last()


async def items(work: Work) -> AsyncIterator[int]:
    """Work as an async generator that awaits too."""
    work.step()
    await asyncio.sleep(0)
    yield 1
    work.last()


def made(name: str, *bases: type, **members: Any) -> Any:
    """Return an object of a new class with *members*."""
    return type(name, bases, members)()


def torch() -> Any:
    """Import torch, or skip."""
    return pytest.importorskip("torch")


def computing() -> Any:
    """Return a function or ``forward`` for torch to compile, in which the work is left as it is."""
    torch().compiler.reset()
    ones, hook = torch().ones, torch().compiler.disable(body)
    return lambda *given: (ones(2) + 1, hook(given[-1]))[1]


def optimized() -> Any:
    """Return a module compiled as such."""
    return torch().compile(made("Layer", torch().nn.Module, forward=computing()), backend="eager")


def scripted() -> Any:
    """Return a scripted function that calls back into Python. What is not annotated is a tensor there."""

    @torch().jit.ignore
    def hook(x):
        NOW[0].whole()
        return x

    def script(x):
        return hook(x) + 1

    return torch().jit.script(script)


def traced() -> Any:
    """Return a traced module. A trace keeps no Python: the work is in a hook of its call."""
    module = torch().jit.trace(torch().nn.Linear(2, 2), torch().ones(1, 2))
    module.register_forward_pre_hook(lambda *_: NOW[0].whole() and None)
    return module


def on_a_tensor(target: Any, work: Work) -> str:
    """Call what takes a tensor only."""
    NOW[:] = [work]
    target(torch().ones(1, 2))
    return DONE


old_style = types.coroutine(types.FunctionType(steps.__code__, globals()))  # can be awaited; steps still cannot
KINDS: dict[str, tuple[str, str, Callable[[Any], Callable[[Work], Any]]]] = {  # how it runs, the span's name, its maker
    "function": ("plain", "body", lambda deco: deco(body)),
    "lambda": ("plain", "<lambda>.<lambda>", lambda deco: deco(lambda work: work.whole())),
    "method": ("plain", "body", lambda deco: made("C", call=deco(body)).call),
    "timed(staticmethod)": ("plain", "body", lambda deco: made("C", call=deco(staticmethod(body))).call),
    "staticmethod(timed)": ("plain", "body", lambda deco: made("C", call=staticmethod(deco(body))).call),
    "timed(classmethod)": ("plain", "body", lambda deco: made("C", call=deco(classmethod(body))).call),
    "classmethod(timed)": ("plain", "body", lambda deco: made("C", call=classmethod(deco(body))).call),
    "bound method": ("plain", "body", lambda deco: deco(made("C", call=body).call)),
    "object": ("plain", "Called", lambda deco: deco(made("Called", __call__=body))),
    "class": ("plain", "Made", lambda deco: deco(type("Made", (), {"__call__": body}))()),
    "partial": ("plain", "body", lambda deco: deco(partial(body))),
    "lru_cache": ("plain", "body", lambda deco: deco(lru_cache(body))),
    "methodcaller": ("plain", "methodcaller", lambda deco: deco(operator.methodcaller("whole"))),
    "generator": ("generator", "steps", lambda deco: deco(steps)),
    "partial of generator": ("generator", "steps", lambda deco: deco(partial(steps))),
    "coroutine": ("coroutine", "coroutine", lambda deco: deco(coroutine)),
    "async method": ("coroutine", "coroutine", lambda deco: made("C", call=deco(coroutine)).call),
    "async object": ("coroutine", "Awaited", lambda deco: deco(made("Awaited", __call__=coroutine))),
    "partial of coroutine": ("coroutine", "coroutine", lambda deco: deco(partial(coroutine))),
    "types.coroutine": ("coroutine", "steps", lambda deco: deco(old_style)),
    "async generator": ("async generator", "items", lambda deco: deco(items)),
    "nn.Module": ("plain", "Layer", lambda deco: deco(made("Layer", torch().nn.Module, forward=body))),
    "nn.Module.forward": ("plain", "body", lambda deco: made("Layer", torch().nn.Module, forward=deco(body))),
    "torch.compile": ("plain", "computing.<lambda>", lambda deco: deco(torch().compile(computing(), backend="eager"))),
    "OptimizedModule": ("plain", "Layer", lambda deco: deco(optimized())),
    "ScriptFunction": ("plain", "script", lambda deco: partial(on_a_tensor, deco(scripted()))),
    "traced module": ("plain", "Linear", lambda deco: partial(on_a_tensor, deco(traced()))),
}
RAISES = {"ScriptFunction": RuntimeError}  # TorchScript makes one of any exception, decorated or not


class Cell(NamedTuple):
    """One cell of the matrix."""

    kind: str
    taken: str
    sync: Any
    ending: str
    caller: str


EXCLUDED: dict[str, Callable[[Cell], bool]] = {
    "a plain call cannot be closed": lambda cell: cell.ending == "closed" and KINDS[cell.kind][0] == "plain",
    "a block has no order of decorators": lambda cell: cell.taken == "block" and cell.kind.endswith("method(timed)"),
}
ALL = [Cell(*c) for c in product(KINDS, ("decorator", "block"), ("boundary", "deferred"), STATUS, ("sync", "loop"))]
CELLS = [cell for cell in ALL if not any(rule(cell) for rule in EXCLUDED.values())]
NESTED = [cell for cell in CELLS if (cell.taken, cell.ending) == ("decorator", "returns")]
ON_A_LOOP = [cell for cell in CELLS if (cell.sync, cell.caller) == ("boundary", "loop")]
AWAITED = [cell for cell in ON_A_LOOP if KINDS[cell.kind][0] in ("coroutine", "async generator")]
each = partial(pytest.mark.parametrize, "cell", ids="-".join)


def around(runs: str, block: Callable[[], Any], call: Callable[[Work], Any]) -> Callable[[Work], Any]:
    """Return a function of the same kind as *call*, that calls it inside a *block*."""

    def plain(work: Work) -> Any:
        with block():
            return call(work)

    def generator(work: Work) -> Iterator[Any]:
        with block():
            return (yield from call(work))

    async def awaiting(work: Work) -> Any:
        async with block():
            return await call(work)

    async def async_generator(work: Work) -> AsyncIterator[Any]:
        async with block(), contextlib.aclosing(call(work)) as running:
            async for item in running:
                yield item

    return {"plain": plain, "generator": generator, "coroutine": awaiting, "async generator": async_generator}[runs]


def finish(running: Any) -> Any:
    """Run a generator or coroutine to its end, and return what it returns."""
    try:
        while True:
            running.send(None)
    except StopIteration as stop:
        return stop.value


def off_a_loop(cell: Cell, call: Callable[[Work], Any], work: Work) -> Any:
    """Run a call from plain code, by hand what suspends."""
    running = call(work)
    if KINDS[cell.kind][0] == "plain":
        return running
    if KINDS[cell.kind][0] == "async generator":
        return finish(consumed(running, cell, work))
    running.send(None)
    work.others()
    return running.close() if cell.ending == "closed" else finish(running)


async def on_a_loop(cell: Cell, call: Callable[[Work], Any], work: Work) -> Any:
    """Run a call from inside asyncio's loop, a coroutine in a task."""
    if KINDS[cell.kind][0] == "async generator":
        return await consumed(call(work), cell, work)
    if KINDS[cell.kind][0] != "coroutine":
        return off_a_loop(cell, call, work)

    async def caller() -> Any:
        try:
            return await call(work)
        finally:
            assert otel_context.get_current() is work.callers

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    work.others()
    if cell.ending != "closed":
        return await task
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return None


async def consumed(running: Any, cell: Cell, work: Work) -> Any:
    """Take the one item of an async generator, then close or exhaust it."""
    assert await anext(running) == 1
    work.others()
    if cell.ending == "closed":
        return await running.aclose()
    assert [item async for item in running] == []
    return DONE


def taken(cell: Cell) -> Callable[[Work], Any]:
    """Return the cell's callable, decorated or in a block."""
    runs, _, make = KINDS[cell.kind]
    if cell.taken == "decorator":
        return make(gpu_timed(sync=cell.sync))
    return around(runs, lambda: gpu_span("block", sync=cell.sync), make(lambda target: target))


def run(cell: Cell, call: Callable[[Work], Any], device: FakeDevice) -> Work:
    """Run the cell under a context of the caller's, and check how it ends for the caller."""
    token = otel_context.attach(otel_context.Context({"caller": cell}))
    error = LookupError("own") if cell.ending == "raises" else None
    work = Work(device, error, unseen_between=cell.taken == "decorator")
    raises = contextlib.nullcontext() if error is None else pytest.raises(RAISES.get(cell.kind, LookupError))
    with raises as caught:
        said = asyncio.run(on_a_loop(cell, call, work)) if cell.caller == "loop" else off_a_loop(cell, call, work)
        assert said == (None if cell.ending == "closed" else DONE)
    assert caught is None or caught.value is error or (cell.kind in RAISES and "own" in str(caught.value))
    assert otel_context.get_current() is work.callers
    otel_context.detach(token)
    return work


def test_the_matrix_is_whole() -> None:
    """There are as many cells as there should be, no kind is left out, and no rule is idle."""
    plain = sum(kind[0] == "plain" for kind in KINDS.values())
    assert len(CELLS) == plain * 16 - 2 * 8 + (len(KINDS) - plain) * 24 > 450
    assert {cell.kind for cell in CELLS} == set(KINDS)
    assert all(any(rule(cell) for cell in ALL) for rule in EXCLUDED.values())


@each(CELLS)
def test_a_call_is_one_span_and_stays_the_call_it_was(device: FakeDevice, cell: Cell) -> None:
    """One record with the right name, policy, status and times; the span is current inside, and only there."""
    runs, name, _ = KINDS[cell.kind]
    with capture() as records:
        work = run(cell, taken(cell), device)
    (record,) = records
    done = 1 if cell.ending == "closed" else 2
    away = cell.taken == "block" and runs != "plain"
    assert record.name == (name if cell.taken == "decorator" else "block")
    assert (record.sync, record.status) == (cell.sync, STATUS[cell.ending])
    assert record.device_ns == done * STEP_NS + away * OTHERS_NS
    assert record.launch_ns == done * LAUNCH_NS + away * AWAY_NS
    assert (work.inside, record.parent_id, record.quality) == ([record.span_id] * done, None, ())
    assert (flush(5).pending, device.marks_in_use) == (0, 0)


@each(NESTED)
def test_a_call_inside_a_decorated_function_is_its_child(device: FakeDevice, cell: Cell) -> None:
    """Called in a decorated function of its kind, the inner span has the outer as its parent, and its own time."""
    runs, name, _ = KINDS[cell.kind]
    outside = gpu_timed(around(runs, contextlib.nullcontext, taken(cell)), name="outer", sync=cell.sync)
    with capture() as records:
        work = run(cell, outside, device)
    outer, inner = sorted(records, key=lambda record: record.name != "outer")
    assert (outer.name, inner.name) == ("outer", name)
    assert (outer.parent_id, inner.parent_id) == (None, outer.span_id)
    assert (outer.trace_id, work.inside) == (inner.trace_id, [inner.span_id] * 2)
    assert (outer.device_ns, inner.device_ns) == (2 * STEP_NS, 2 * STEP_NS)


@each(AWAITED)
def test_a_boundary_never_blocks_the_event_loop(device: FakeDevice, cell: Cell) -> None:
    """With sync="boundary", nothing that is awaited waits for the device on the loop's thread."""
    waited: list[Any] = []
    device.wait = waited.append  # type: ignore[method-assign]
    with capture():
        run(cell, taken(cell), device)
    assert waited == []
