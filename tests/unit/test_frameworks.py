"""What frameworks, executors, functools, data classes and picklers do with a decorated callable still works."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import contextvars
import copy
import dataclasses
import enum
import functools
import gc
import inspect
import operator
import pickle
import subprocess
import sys
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry import trace

from gpu_timed import flush, gpu_timed
from gpu_timed.record import Record
from gpu_timed.testing import FakeDevice, capture

MS = 1_000_000
REQUEST = trace.NonRecordingSpan(trace.SpanContext(7, 9, is_remote=True, trace_flags=trace.TraceFlags(1)))
OPTIONS: dict[str, Any] = {"name": "it", "sync": "deferred", "every": 2, "attributes": {"model": "m"}}
label: Callable[[Any], str] = lambda each: getattr(each, "__qualname__", type(each).__qualname__)
it: Callable[[Any], Any] = functools.partial(gpu_timed, name="it")


@pytest.fixture(autouse=True)
def _no_mark_is_lost(device: FakeDevice) -> Iterator[None]:
    """Every test is on the fake device, and whatever it does, every mark is given back in the end."""
    yield
    device.run_dry()
    assert (flush(5).pending, device.marks_in_use) == (0, 0)


def told(records: list[Record], *names: str) -> list[Any]:
    """What each record says under the given names, sorted by the first."""
    return sorted((operator.attrgetter(*names)(record) for record in records), key=str)


def function(q: int) -> int:
    return q + 1


async def coroutine(q: int) -> int:
    return q + 1


def generator(q: int) -> Iterator[int]:
    yield q + 1


async def async_generator(q: int) -> AsyncIterator[int]:
    yield q + 1


class Plain:
    """A callable object with methods; *Timed* is the same with each of them decorated."""

    def method(self, q: int) -> int:
        return q + 1

    async def async_method(self, q: int) -> int:
        return q + 1

    @classmethod
    def class_method(cls, q: int) -> int:
        return q + 1

    __call__ = method


METHODS = ["method", "async_method", "class_method"]
Timed = type("Timed", (Plain,), {name: gpu_timed(vars(Plain)[name], **OPTIONS) for name in METHODS})
FUNCTIONS: list[Any] = [function, coroutine, generator, async_generator]
PARTIALS: list[Any] = [functools.partial(each) for each in FUNCTIONS]
OBJECTS: list[Any] = [Plain(), type("Async", (Plain,), {"__call__": Plain.async_method})()]
CALLABLES: list[Any] = [*FUNCTIONS, *PARTIALS, *OBJECTS, *(getattr(Plain(), name) for name in METHODS)]
PAIRS = [(each, it(each)) for each in CALLABLES] + [(getattr(Plain(), n), getattr(Timed(), n)) for n in METHODS]


# -- FastAPI ----------------------------------------------------------------------------------------------
def ask(target: Any, *, dependency: bool) -> dict[str, Any]:
    """Serve *target* as an endpoint or as a dependency of one; tell everything a client can see of it."""
    fastapi, httpx = pytest.importorskip("fastapi"), pytest.importorskip("httpx")
    app, needed = fastapi.FastAPI(), fastapi.Depends(target)

    def endpoint(got: int = needed) -> int:
        return got

    async def main() -> dict[str, Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            asked = {path: await client.get(path) for path in ("/?q=2", "/?q=two", "/openapi.json", "/?q=2&again")}
        return {path: (answer.status_code, answer.json()) for path, answer in asked.items()}

    app.get("/")(endpoint if dependency else target)
    return asyncio.run(main())


@pytest.mark.parametrize("dependency", [False, True], ids=["endpoint", "dependency"])
@pytest.mark.parametrize(("plain", "timed"), PAIRS, ids=[label(plain) for plain, _ in PAIRS])
def test_fastapi_sees_no_difference(plain: Any, timed: Any, dependency: bool) -> None:
    """Endpoint or dependency: parameters are parsed, bad ones refused, the schema is equal; one span for each call."""
    with capture() as records:
        answers = ask(timed, dependency=dependency)
    assert answers == ask(plain, dependency=dependency)
    assert (answers["/?q=2"], answers["/?q=two"][0], answers["/openapi.json"][0]) == ((200, 3), 422, 200)
    assert told(records, "name", "status") == [("it", "ok")] * (1 if "model" in records[0].attributes else 2)  # every=2


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_an_async_object_is_awaited_by_starlette() -> None:
    """A decorated object whose ``__call__`` is a coroutine function is run as a background task, as undecorated."""
    background = pytest.importorskip("starlette.background")
    with capture() as records:
        asyncio.run(background.BackgroundTask(it(OBJECTS[1]), 1)())
        gc.collect()  # what was never awaited complains here
    assert told(records, "name") == ["it"]


# -- D5: streams ------------------------------------------------------------------------------------------
def serve(handler: Any, *, spec: str, leave_after: int) -> list[bytes]:
    """Send one request under the span REQUEST; the client leaves after so many chunks. Returns what it got."""
    app, chunks, gone = pytest.importorskip("fastapi").FastAPI(), [], asyncio.Event()
    app.get("/", response_model=None)(handler)
    scope = {"type": "http", "asgi": {"spec_version": spec}, "method": "GET", "path": "/", "query_string": b""}

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if len(chunks) == leave_after:
            gone.set()
            if spec == "2.4":
                raise OSError
            await asyncio.sleep(10)  # until cancelled
        chunks.extend(filter(None, [message.get("body")]))

    async def main() -> None:
        with trace.use_span(REQUEST), contextlib.suppress(pytest.importorskip("starlette.requests").ClientDisconnect):
            await app({**scope, "headers": []}, receive, send)

    asyncio.run(main())
    return chunks


def body(device: FakeDevice) -> Iterator[bytes]:
    for number in b"012":
        device.launch(20 * MS)
        device.host_clock.advance(5 * MS)
        yield bytes([number])


async def async_body(device: FakeDevice) -> AsyncIterator[bytes]:
    for chunk in body(device):
        await asyncio.sleep(0)
        yield chunk


@pytest.mark.parametrize("whole", [body, async_body])
@pytest.mark.parametrize("case", ["server starts", "handler starts", "undecorated", "left: error", "left: cancelled"])
def test_d5_a_stream_is_a_span_to_its_last_chunk(device: FakeDevice, whole: Any, case: str) -> None:
    """A decorated body is a span of its own, under what was current when it *started*; the handler's is the handler."""
    response = pytest.importorskip("fastapi.responses").StreamingResponse

    def handler() -> Any:
        return response(whole(device) if case == "undecorated" else gpu_timed(whole, name="body")(device))

    async def starting_handler() -> Any:
        chunks = handler().body_iterator
        first = await anext(chunks)

        async def rest() -> AsyncIterator[bytes]:
            yield first
            async for chunk in chunks:
                yield chunk

        return response(rest())

    leaves, starts, spec = "left" in case, case == "handler starts", "2.0" if "cancelled" in case else "2.4"
    timed = gpu_timed(starting_handler if starts else handler, name="handler")
    with capture() as records:
        assert serve(timed, spec=spec, leave_after=1 if leaves else 9) == [b"0", b"1", b"2"][: 1 if leaves else 3]
        gc.collect()
    spans = {record.name: record for record in records}
    steps = int(
        starts and whole is async_body
    )  # starlette runs a plain body in a thread, while the handler is suspended
    of_handler = ("handler", 7, 9, "ok", 20 * MS * steps, 5 * MS * steps)
    of_body = ("body", 7, spans["handler"].span_id if starts else 9, "ok", 60 * MS, 15 * MS)
    if leaves:  # its second chunk was sent in vain
        of_body = ("body", 7, 9, "cancelled", 40 * MS, 10 * MS)
    expected = [of_handler] if case == "undecorated" else [of_body, of_handler]
    assert told(records, "name", "trace_id", "parent_id", "status", "device_ns", "launch_ns") == expected
    assert case == "undecorated" or spans["body"].end_ns - spans["body"].start_ns >= of_body[-1]


# -- D2: executors ----------------------------------------------------------------------------------------
LEFT: dict[str, Callable[[], Any]] = {
    "a call": lambda: gpu_timed(function, name="left")(1),
    "an exception": lambda: gpu_timed(divmod, name="left")(1, 0),
    "an open generator": lambda: [made := gpu_timed(generator, name="left")(1), next(made)],
    "an open coroutine": lambda: [made := gpu_timed(asyncio.sleep, name="left")(0), made.send(None)],
}


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("bare", [False, True], ids=["under a span", "under none"])
def test_d2_a_call_in_a_pool_is_a_root_unless_its_context_is_carried(left: str, bare: bool) -> None:
    """submit and run_in_executor give a root, whatever the thread did before; copy_context and to_thread a child."""
    root, child = gpu_timed(function, name="root"), gpu_timed(function, name="child")

    async def main() -> None:
        loop, run = asyncio.get_running_loop(), contextvars.copy_context().run
        loop.set_default_executor(pool)
        held = pool.submit(LEFT[left]) if bare else pool.submit(run, LEFT[left])
        await loop.run_in_executor(None, root, 1)
        await asyncio.to_thread(child, 1)
        await loop.run_in_executor(None, run, child, 1)
        await asyncio.wrap_future(pool.submit(root, 1))
        if "open" in left:
            held.result()[0].close()

    with capture() as records, ThreadPoolExecutor(1) as pool, trace.use_span(REQUEST):
        asyncio.run(main())
    expected = [("child", 9), ("child", 9), ("left", None if bare else 9), ("root", None), ("root", None)]
    assert told(records, "name", "parent_id") == expected
    assert all((record.trace_id == 7) == (record.parent_id == 9) for record in records)


# -- functools, and classes of every kind -----------------------------------------------------------------
class Owner:
    """Attributes by way of functools, a method that tells whose it is, and classes of other kinds that have it too."""

    total = functools.cached_property(it(lambda _: 6))
    add_two = functools.partialmethod(it(lambda _, n, q: n + q), 2)
    run = it(lambda self, q: (type(self).__name__, q))

    @gpu_timed(**OPTIONS)
    @functools.lru_cache  # noqa: B019 - it is asked whether it can be reached
    def kept(self, q: int) -> int:
        return q + 1

    class Point(typing.NamedTuple):
        x: int = 1
        run = it(lambda self, q: (type(self).__name__, q))

    @typing.runtime_checkable
    class Runs(typing.Protocol):
        run = it(lambda self, q: (type(self).__name__, q))


def layers(**options: bool) -> list[int]:
    """Call a dataclass whose fields hold decorated callables, through a decorated method; and copies of it."""
    own = {"run": it(lambda self, q: self.second(self.first(q)))}
    fields = [("first", Any, it(function)), ("second", Any, it(Plain()))]
    made = (kind := dataclasses.make_dataclass("Layer", fields, namespace=own, **options))()
    copies = [copy.deepcopy(made), dataclasses.replace(made), kind(**dataclasses.asdict(made))]
    return [each.run(1) for each in (made, *copies)]


def concrete(method: Any) -> tuple[int, bool]:
    """Derive from an abstract class with *method*, and ask a protocol whether the result has it."""
    base = abc.ABCMeta("Base", (), {"run": method})
    with pytest.raises(TypeError, match="abstract"):
        base()
    made = type("Made", (base,), {"run": it(lambda _: 2)})()
    return made.run(), isinstance(made, Owner.Runs)


def validated(target: Any, *, above: bool) -> int:
    """Validate the arguments of *target* above or below @gpu_timed: one call is refused, one good."""
    check = pytest.importorskip("pydantic").validate_call
    timed = check(it(target)) if above else it(check(target))
    with pytest.raises(ValueError, match="valid integer"):
        timed("two")
    return timed("2")


cached: Callable[[Any], Any] = lambda timed: [timed(1), timed(1), timed(2), timed.cache_info().hits]
Slots = type("Slots", (), {"__slots__": ("x",), "run": Owner.run})
Color = enum.Enum("Color", {"RED": 1, "run": Owner.run})
size = functools.singledispatch(it(lambda _: "any"))
size.register(int, it(lambda _: "int"))
AROUND: dict[str, tuple[Callable[[], Any], Any, int]] = {
    "cache above": (lambda: cached(functools.cache(it(function))), [2, 2, 3, 1], 2),
    "lru_cache below": (lambda: cached(it(functools.lru_cache(2)(function))), [2, 2, 3, 1], 3),
    "cached property": (lambda: [(own.total, own.total, vars(own)) for own in [Owner()]], [(6, 6, {"total": 6})], 1),
    "cached method": (lambda: [(f(1), f(1), f.cache_info().maxsize) for f in [Owner().kept]], [(2, 2, 128)], 1),
    "singledispatch": (lambda: [size(1.5), size(1), size.dispatch(bool)(1)], ["any", "int", "int"], 3),
    "singledispatch below": (lambda: [it(size)(1), it(size).registry is size.registry], ["int", True], 2),
    "contextmanager": (lambda: contextlib.contextmanager(it(generator))(1)(function)(2), 3, 1),
    "partial": (functools.partial(it(functools.partial(operator.add, 1)), 2), 3, 1),
    "partialmethod": (lambda: [Owner().add_two(1)], [3], 1),
    "wraps": (functools.wraps(it(function))(functools.partial(it(function), 1)), 2, 1),
    "named tuple": (lambda: [Owner.Point().run(2), Owner.Point._fields], [("Point", 2), ("x",)], 1),
    "slots": (lambda: [Slots().run(2), hasattr(Slots(), "__dict__")], [("Slots", 2), False], 1),
    "enum": (lambda: [Color.RED.run(2), [member.name for member in Color]], [("Color", 2), ["RED"]], 1),
    "dataclass": (layers, [3] * 4, 12),
    "frozen dataclass with slots": (functools.partial(layers, frozen=True, slots=True), [3] * 4, 12),
    "abstract above": (lambda: concrete(abc.abstractmethod(it(lambda _: 1))), (2, True), 1),
    "abstract below": (lambda: concrete(it(abc.abstractmethod(lambda _: 1))), (2, True), 1),
    "abstract classmethod": (lambda: concrete(it(classmethod(abc.abstractmethod(lambda _: 1)))), (2, True), 1),
    "validate_call above": (lambda: validated(function, above=True), 3, 1),
    "validate_call below": (lambda: validated(function, above=False), 3, 2),
    "validate_call above a partial": (lambda: validated(PARTIALS[0], above=True), 3, 1),
    "validate_call above a method": (lambda: validated(Plain().method, above=True), 3, 1),
}


@pytest.mark.parametrize("around", AROUND)
def test_functools_and_classes_around_a_decorated_function(around: str) -> None:
    """Whatever it is put into calls through to the decorated function and is what it would be; each call is a span."""
    call, result, spans = AROUND[around]
    with capture() as records:
        assert call() == result
    assert told(records, "name") == ["it"] * spans


def test_a_decorated_object_can_be_the_value_of_an_enum_member() -> None:
    """An object or partial is the value of a member, decorated as undecorated."""
    assert len(enum.Enum("Made", {"A": Plain(), "B": it(Plain()), "C": it(functools.partial(function))})) == 3


def test_pydantic_models() -> None:
    """Methods, validators over and under classmethod, and fields that hold decorated callables; copies of a model."""
    pydantic = pytest.importorskip("pydantic")

    def check(cls: type, value: int) -> int:
        return value + 1

    class Layer(pydantic.BaseModel):
        a: int
        first: Callable[[int], int] = it(function)
        second: Callable[[int], int] = it(Plain())
        check_1 = pydantic.field_validator("a")(classmethod(it(check)))
        check_2 = pydantic.field_validator("a")(it(classmethod(check)))
        check_3 = pydantic.field_validator("a")(it(check))
        run = it(lambda self, q: self.second(self.first(q)))
        make = it(classmethod(lambda cls, a: cls(a=a)))
        triple = it(staticmethod(lambda q: 3 * q))

    with capture() as records:
        layer = Layer.make("1")
        assert [each.triple(each.run(each.a)) for each in (layer, layer.model_copy(deep=True))] == [18, 18]
    assert told(records, "name") == ["it"] * (4 + 2 * 4)


KINDS = [inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction]
TOLD = [inspect.signature, inspect.getsource, inspect.getdoc, inspect.unwrap, inspect.ismethod, typing.get_type_hints]


def answer(question: Any, target: Any) -> Any:
    try:
        return question(target)
    except (TypeError, ValueError) as error:  # what cannot be said of it undecorated cannot be said of it decorated
        return type(error)


@pytest.mark.parametrize("target", [*CALLABLES, functools.cache(function), len], ids=label)
def test_introspection_answers_as_undecorated(target: Any) -> None:
    """What inspect and typing say of the decorated is what they say of the original."""
    assert [answer(ask, it(target)) for ask in KINDS + TOLD] == [answer(ask, target) for ask in KINDS + TOLD]


def test_the_call_of_an_object_is_of_its_kind() -> None:
    """``obj.__call__`` is a coroutine function if the original's is."""
    assert [kind(it(OBJECTS[1]).__call__) for kind in KINDS] == [kind(OBJECTS[1].__call__) for kind in KINDS]


# -- copies and pickles -----------------------------------------------------------------------------------
@gpu_timed(**OPTIONS)
def module_level(q: int) -> int:
    return q + 1


@functools.cache
def cached_function(q: int) -> int:
    return q + 1


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda what: pickle.loads(pickle.dumps(what)),
    "cloudpickle": lambda what: pickle.loads(pytest.importorskip("cloudpickle").dumps(what)),
}
cached_field = dataclasses.make_dataclass("Cached", [("f", Any, gpu_timed(cached_function, **OPTIONS))])().f
OTHERS = [functools.partial(operator.add, 1), Plain(), (1).__add__]
THINGS: list[Any] = [module_level, Timed().method, Timed.class_method, *(gpu_timed(each, **OPTIONS) for each in OTHERS)]
UNCOPIED = [Owner().kept, cached_field]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("thing", [*THINGS, functools.partial(THINGS[3]), *UNCOPIED], ids=label)
def test_what_comes_back_is_timed_as_before(thing: Any, way: str) -> None:
    """A copy, and what comes back from pickle and cloudpickle, works and has the name and options it had."""
    again = WAYS[way](thing)
    with capture() as records:
        assert [again(2), again(2)] == [3, 3]
    assert [(record.name, record.sync, record.attributes["model"]) for record in records] == [("it", "deferred", "m")]


DUMP = """
import cloudpickle, functools, operator, sys
from gpu_timed import gpu_timed
timed, one = gpu_timed(name="it", sync="deferred", every=2, attributes={"model": "m"}), 1
@timed
def function(q): return q + one if q > 1 else function(2)
@timed
async def coroutine(q): return q + one
@timed
def generator(q): yield q + one
@timed
async def async_generator(q): yield q + one
class Owner:
    @timed
    def method(self, q): return q + one
    def __call__(self, q): return q + one
def closure(n): return timed(lambda q: q + n)
made = [function, closure(1), Owner().method, timed(Owner()), timed(functools.partial(operator.add, 1)),
        timed(functools.partial(lambda n, q: n + q, 1)), timed(one.__add__), coroutine, generator, async_generator]
cloudpickle.dump(made, sys.stdout.buffer)
"""
LOAD = """
import asyncio, inspect, pickle, sys
from gpu_timed.testing import FakeDevice, capture, use_device
async def first(made): return [got async for got in made] if inspect.isasyncgen(made) else await made
for again in pickle.load(sys.stdin.buffer):
    with use_device(FakeDevice()), capture() as records:
        for made in (again(2), again(2)):
            got = list(made) if inspect.isgenerator(made) else made if type(made) is int else asyncio.run(first(made))
    print(got, *((record.name, record.sync, record.attributes["model"]) for record in records))
"""


def test_cloudpickle_carries_what_main_defines_into_another_process() -> None:
    """Functions, closures, methods and objects of ``__main__``, which has nothing of the kind in the other process."""
    pytest.importorskip("cloudpickle")
    run = functools.partial(subprocess.run, check=True, stdout=subprocess.PIPE)
    dumped = run([sys.executable, "-c", DUMP]).stdout
    said = run([sys.executable, "-c", LOAD], input=dumped).stdout.decode().splitlines()
    assert said == [f"{got} ('it', 'deferred', 'm')" for got in [3] * 8 + [[3]] * 2]


def test_objects_work_without_wrapts_extension() -> None:
    """The same with wrapt in pure Python, which is what it is where its extension cannot be built."""
    about = "(around or introspection or comes_back or enum_member or of_its_kind or test_objects.py) and not spawned"
    pure = f"""import os, pytest, sys
os.environ["WRAPT_DISABLE_EXTENSIONS"] = "1"
import wrapt
assert "wrapt._wrappers" not in sys.modules
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "{about}", *sys.argv[1:]]))"""
    files = [__file__.replace("test_frameworks", "test_objects"), __file__]
    done = subprocess.run([sys.executable, "-c", pure, *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
