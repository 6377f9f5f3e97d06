"""The parent across threads, executors, event loops, processes and HTTP, told by what is exported."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import http.client
import http.server
import json
import multiprocessing
import os
import pickle
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
from opentelemetry import baggage, propagate, trace
from opentelemetry import context as otel_context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult

from gpu_timed import ConfigurationError, NotCallableError, carry, configure, extracted, flush, gpu_span, gpu_timed
from gpu_timed import inject as injected
from gpu_timed.propagation import ContextExecutor

WHERE = contextvars.ContextVar("where", default="nowhere")


@gpu_timed
def work(x=0):
    return x + 1


@gpu_timed
async def awork(x=0):
    await asyncio.sleep(0)
    return x + 1


@gpu_timed
def steps():
    return [(yield 0), (yield 1)]


@gpu_timed
async def asteps(count=2):
    for item in range(count):
        await asyncio.sleep(0)
        yield item


def fails(kind):
    raise kind("inside")


@pytest.fixture
def spans(exporter):
    """Returns what was exported so far, by name, without the spans of devices."""

    def look():
        assert flush(10)
        found = {}
        for span in exporter.get_finished_spans():
            if not span.name.endswith("]"):
                found.setdefault(span.name, []).append(span)
        return found

    return look


def parents(spans):
    """The ids of the parents of *spans*, None for roots."""
    return [None if span.parent is None else span.parent.span_id for span in spans]


# -- threads ----------------------------------------------------------------------------------------------


def test_a_thread_gets_the_parent_it_is_given(spans):
    """A span in a thread is the child of the span that was current where carry() was called."""
    with gpu_span("request"):
        thread = threading.Thread(target=carry(work))
    thread.start()
    thread.join()
    found = spans()
    assert parents(found["work"]) == [found["request"][0].context.span_id]
    assert found["work"][0].context.trace_id == found["request"][0].context.trace_id


def test_a_pool_keeps_the_parent_of_each_and_invents_none(spans):
    """On one reused worker: each carried call has its own request's parent, what is not carried is a root."""
    with ThreadPoolExecutor(1) as pool:
        order = []
        for turn in range(3):
            with gpu_span(f"request {turn}"):
                assert pool.submit(carry(work), turn).result(5) == turn + 1
                order.append(turn)
                assert pool.submit(work).result(5) == 1
                order.append(None)
        assert pool.submit(work).result(5) == 1
    found = spans()
    expected = [None if turn is None else found[f"request {turn}"][0].context.span_id for turn in [*order, None]]
    assert parents(found["work"]) == expected
    roots = [span.context.trace_id for span in found["work"] if span.parent is None]
    assert len(set(roots)) == 4


def test_inside_a_decorated_function_its_own_span_is_the_parent(spans):
    """The span that a decorated function is in is gpu_timed's own object: what it submits hangs under it."""

    @gpu_timed(sync="deferred")
    def outer(pool):
        return pool.submit(carry(work), 4)

    with ThreadPoolExecutor(1) as pool:
        assert outer(pool).result(5) == 5
    found = spans()
    assert parents(found["work"]) == [found[outer.__qualname__.replace(".<locals>", "")][0].context.span_id]


def test_one_carried_function_runs_many_times_at_once(spans):
    """Carried once, it runs in eight threads at the same time, and in none is the context already entered."""
    barrier = threading.Barrier(8, timeout=10)

    def together(x):
        barrier.wait()
        WHERE.set(str(x))
        return work(x), WHERE.get()

    with gpu_span("request"):
        WHERE.set("outside")
        carried = carry(together)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(carried, range(8)))
    assert answers == [(x + 1, str(x)) for x in range(8)]
    assert carried.__name__ == "together"
    found = spans()
    assert parents(found["work"]) == [found["request"][0].context.span_id] * 8


def test_every_context_variable_is_carried(device):
    """What else is set where carry() is called is seen in the thread, and nothing of it stays there."""
    with ThreadPoolExecutor(1) as pool:
        token = WHERE.set("here")
        try:
            carried = carry(WHERE.get)
        finally:
            WHERE.reset(token)
        assert pool.submit(carried).result(5) == "here"
        assert pool.submit(WHERE.get).result(5) == "nowhere"


def test_what_a_carried_function_raises_comes_out(device):
    """The exception is the function's own, object and all."""
    error = KeyError("mine")

    def raises():
        raise error

    with pytest.raises(KeyError) as caught:
        carry(raises)()
    assert caught.value is error


@pytest.mark.parametrize("wrong", [None, 5, "work", [work]])
def test_what_cannot_be_called_is_refused(wrong):
    """carry(f(x)) instead of carry(f) is answered at once, with the way to write it."""
    with pytest.raises(NotCallableError, match=r"pool.submit\(carry\(f\), x\)"):
        carry(wrong)


def test_the_executor_carries_what_it_is_given(spans):
    """ContextExecutor keeps the parent in submit() and map()."""
    with ContextExecutor(2) as pool:
        with gpu_span("request"):
            assert pool.submit(work, x=1).result(5) == 2
            assert list(pool.map(work, [1, 2])) == [2, 3]
        assert pool.submit(work).result(5) == 1
    found = spans()
    parent = found["request"][0].context.span_id
    assert sorted(map(str, parents(found["work"]))) == sorted(map(str, [parent, parent, parent, None]))


# -- event loops ------------------------------------------------------------------------------------------


def test_to_thread_keeps_the_parent_and_run_in_executor_needs_help(spans):
    """asyncio.to_thread carries by itself; run_in_executor gives a root, and with carry() the parent."""

    async def main():
        loop = asyncio.get_running_loop()
        async with gpu_span("request"):
            await asyncio.to_thread(work, 1)
            await loop.run_in_executor(None, work, 2)
            await loop.run_in_executor(None, carry(work), 3)
            loop.set_default_executor(ContextExecutor())
            await loop.run_in_executor(None, work, 4)

    asyncio.run(main())
    found = spans()
    parent = found["request"][0].context.span_id
    assert parents(found["work"]) == [parent, None, parent, parent]


def test_coroutines_run_where_they_were_carried(spans):
    """On another thread's loop a carried coroutine function is the child of where it was carried."""
    with gpu_span("request"):
        carried = carry(awork)
    assert asyncio.iscoroutinefunction(carried)

    async def main():
        return await asyncio.gather(*(carried(x) for x in range(5)), awork(9))

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(asyncio.run, main()).result(10) == [1, 2, 3, 4, 5, 10]
    found = spans()
    parent = found["request"][0].context.span_id
    assert parents(found["awork"]).count(parent) == 5
    assert parents(found["awork"]).count(None) == 1


def test_a_carried_coroutine_can_be_cancelled_and_timed_out(device):
    """Cancelling reaches the coroutine inside, its clean-up runs in the carried context, and the task is itself."""
    seen = []

    async def waits():
        seen.append(asyncio.current_task())
        try:
            async with asyncio.timeout(5):
                await asyncio.sleep(60)
        finally:
            seen.append(WHERE.get())

    async def main():
        token = WHERE.set("carried")
        carried = carry(waits)
        WHERE.reset(token)
        task = asyncio.create_task(carried())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(carried(), 0.01)
        assert seen[0] is task

    asyncio.run(main())
    assert seen[1::2] == ["carried", "carried"]


def test_generators_run_where_they_were_carried(spans):
    """A generator made in another thread sends, returns, and has the parent; between its steps the context is ours."""
    with gpu_span("request"):
        carried = carry(steps)

    def consume():
        made = carried()
        got = [next(made)]
        assert trace.get_current_span() is trace.INVALID_SPAN
        got.append(made.send("a"))
        with pytest.raises(StopIteration) as end:
            made.send("b")
        return [*got, end.value.value]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(consume).result(5) == [0, 1, ["a", "b"]]
    found = spans()
    assert parents(found["steps"]) == [found["request"][0].context.span_id]


def test_async_generators_run_where_they_were_carried(spans):
    """An async generator on another loop has the parent, to its end and when it is closed early."""
    with gpu_span("request"):
        carried = carry(asteps)

    async def main():
        got = [item async for item in carried(3)]
        early = carried(3)
        got.append(await anext(early))
        assert trace.get_current_span() is trace.INVALID_SPAN
        await early.aclose()
        return got

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(asyncio.run, main()).result(10) == [0, 1, 2, 0]
    found = spans()
    assert parents(found["asteps"]) == [found["request"][0].context.span_id] * 2


def test_what_is_thrown_into_a_carried_generator_arrives(device):
    """throw() reaches the generator inside, which can answer it; so it does in an async generator."""

    def answers():
        try:
            yield 1
        except KeyError:
            yield WHERE.get()

    async def aanswers():
        try:
            yield 1
        except KeyError:
            yield WHERE.get()

    token = WHERE.set("carried")
    made, amade = carry(answers)(), carry(aanswers)
    WHERE.reset(token)
    assert next(made) == 1
    assert made.throw(KeyError()) == "carried"
    assert list(made) == []

    async def main():
        inner = amade()
        assert await anext(inner) == 1
        return await inner.athrow(KeyError())

    assert asyncio.run(main()) == "carried"


# -- processes --------------------------------------------------------------------------------------------


def begin(folder):
    """Set a worker process up: each writes a file of its own."""
    configure(exporter="jsonl", path=f"{folder}/{os.getpid()}.jsonl")


def work_and_flush(x):
    answer = work(x)
    assert flush(10)
    return answer


def written(folder: Path):
    """All spans in the files of *folder*."""
    lines = [line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
    return [
        span
        for line in lines
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_pool_keeps_the_parent(method, spans, tmp_path, monkeypatch):
    """A function carried to another process is a child there; two requests on one worker have one parent each."""
    pytest.importorskip("opentelemetry.exporter.otlp.json.file")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    context = multiprocessing.get_context(method)
    target = work_and_flush
    if method == "fork":
        # The forked child has this process's provider; one of its own is set by starting from none.
        target = functools.partial(in_a_forked_worker, str(tmp_path))
        pool = ProcessPoolExecutor(1, mp_context=context)
    else:
        pool = ProcessPoolExecutor(1, mp_context=context, initializer=begin, initargs=(str(tmp_path),))
    with pool:
        for turn in range(2):
            with gpu_span(f"request {turn}"):
                assert pool.submit(carry(target), turn).result(60) == turn + 1
        if method == "spawn":
            with gpu_span("bare"):
                assert pool.submit(target, 7).result(60) == 8
    sent = spans()
    found = [span for span in written(tmp_path) if span["name"] == "work"]
    expected = [f"{sent[f'request {turn}'][0].context.span_id:016x}" for turn in range(2)]
    assert [span.get("parentSpanId", "") for span in found] == expected + ([""] if method == "spawn" else [])
    assert found[0]["traceId"] == f"{sent['request 0'][0].context.trace_id:032x}"


def in_a_forked_worker(folder, x):
    from opentelemetry.util._once import Once

    if not hasattr(in_a_forked_worker, "began"):
        in_a_forked_worker.began = True
        trace._TRACER_PROVIDER_SET_ONCE, trace._TRACER_PROVIDER = Once(), None
        begin(folder)
    return work_and_flush(x)


def test_what_is_pickled_is_the_function_and_the_trace(exporter):
    """Unpickled, a carried function has the trace's parent and baggage, whatever is current there."""
    with gpu_span("request") as span:
        token = otel_context.attach(baggage.set_baggage("tenant", "a"))
        sent = pickle.dumps(carry(current_ids))
        otel_context.detach(token)
        expected = (span.get_span_context().trace_id, span.get_span_context().span_id, "a")
    with gpu_span("another"):
        arrived = pickle.loads(sent)
        assert arrived() == arrived() == expected
        assert pickle.loads(pickle.dumps(arrived))() == expected


def current_ids():
    known = trace.get_current_span().get_span_context()
    return known.trace_id, known.span_id, baggage.get_baggage("tenant")


# -- requests ---------------------------------------------------------------------------------------------


class Server(http.server.BaseHTTPRequestHandler):
    """Does its work as a part of the trace that came with the request; ``/bare`` does not look."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/bare":
            work()
        else:
            with extracted(self.headers):
                work()
                self.server.baggage.append(baggage.get_baggage("tenant"))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    made = http.server.HTTPServer(("127.0.0.1", 0), Server)
    made.baggage = []
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_a_request_over_http_keeps_the_parent(server, spans):
    """One server thread, one connection: each request has its own parent; without headers or the helper, none."""
    client = http.client.HTTPConnection(*server.server_address)

    def get(path, headers):
        client.request("GET", path, headers=headers)
        client.getresponse().read()

    @gpu_timed(name="call")
    def call(path="/", more=()):
        headers = injected()
        assert headers["traceparent"].startswith("00-")
        get(path, {name.title(): value for name, value in headers.items()})

    call()
    token = otel_context.attach(baggage.set_baggage("tenant", "b"))
    call()
    otel_context.detach(token)
    get("/", {})
    call("/bare")
    client.close()
    found = spans()
    calls = [span.context.span_id for span in found["call"]]
    assert len(set(calls)) == 3
    assert parents(found["work"]) == [calls[0], calls[1], None, None]
    assert [span.context.trace_id for span in found["work"][:2]] == [s.context.trace_id for s in found["call"][:2]]
    assert server.baggage == [None, "b", None]


def test_the_headers_are_those_of_the_span_that_is_exported(spans):
    """Inside a decorated function traceparent names that function's own span, which is gpu_timed's object."""
    held = []
    gpu_timed(name="outer", sync="deferred")(lambda: held.append(injected()))()
    (outer,) = spans()["outer"]
    (headers,) = held
    version, trace_id, span_id, flags = headers["traceparent"].split("-")
    assert (version, trace_id, span_id) == (
        "00",
        f"{outer.context.trace_id:032x}",
        f"{outer.context.span_id:016x}",
    )
    assert int(flags, 16) & 1


def test_tracestate_comes_through(spans):
    """A tracestate that arrives is on the spans, and goes on with them."""
    headers = {"traceparent": f"00-{1:032x}-{2:016x}-01", "tracestate": "vendor=7"}
    with extracted(headers):
        with gpu_span("work"):
            assert injected()["tracestate"] == "vendor=7"
        assert injected() == headers
    (found,) = spans()["work"]
    assert (found.context.trace_id, found.parent.span_id) == (1, 2)
    assert found.context.trace_state.get("vendor") == "7"


@pytest.mark.parametrize(
    "carrier",
    [
        {"TraceParent": f"00-{1:032x}-{2:016x}-01"},
        [("Traceparent", f"00-{1:032x}-{2:016x}-01")],
        ((b"traceparent", f"00-{1:032x}-{2:016x}-01".encode()), (b"x", b"\xff")),
        [("traceparent", f"00-{1:032x}-{2:016x}-01"), ("tracestate", "a=1"), ("tracestate", "b=2")],
    ],
)
def test_headers_of_every_shape_are_read(carrier):
    """Names in any case, mappings and pairs, text and bytes as ASGI has them, repeated headers."""
    with extracted(carrier):
        known = trace.get_current_span().get_span_context()
    assert (known.trace_id, known.span_id, known.is_remote) == (1, 2, True)
    assert dict(known.trace_state) in ({}, {"a": "1", "b": "2"})
    assert bool(known.trace_state) == (len(carrier) == 3)


@pytest.mark.parametrize("carrier", [{}, [], {"traceparent": "rubbish"}, {"traceparent": f"00-{0:032x}-{0:016x}-01"}])
def test_without_a_readable_parent_there_is_none(carrier, spans):
    """What was current before is not taken for the parent of a request that names none; afterwards it is back."""
    with gpu_span("earlier"):
        before = trace.get_current_span()
        with extracted(carrier), gpu_span("work"):
            pass
        assert trace.get_current_span() is before
    assert parents(spans()["work"]) == [None]


@pytest.mark.parametrize("carrier", [None, 5, "traceparent", [1, 2]])
def test_what_holds_no_headers_is_refused(carrier):
    """Something that is neither a mapping nor pairs is named, and changes nothing."""
    before = otel_context.get_current()
    with pytest.raises(ConfigurationError, match="extracted\\(\\) takes headers"), extracted(carrier):
        pass
    assert otel_context.get_current() is before


def test_what_is_raised_in_the_block_comes_out_and_the_context_is_back():
    """An error goes through, and the context is as before."""
    before = otel_context.get_current()
    with pytest.raises(KeyError), extracted({"traceparent": f"00-{1:032x}-{2:016x}-01"}):
        fails(KeyError)
    assert otel_context.get_current() is before


def test_a_block_that_is_left_in_another_context_raises_nothing(caplog):
    """A generator that is finalised elsewhere leaves the block there: not a sound, not a stack trace."""

    def holds():
        with extracted({"traceparent": f"00-{1:032x}-{2:016x}-01"}):
            yield

    made = holds()
    contextvars.copy_context().run(next, made)
    made.close()
    assert caplog.records == []


def test_outside_of_any_trace_there_are_no_headers(exporter):
    """Nothing is invented where nothing is current."""
    assert injected() == {}


def test_a_span_that_goes_nowhere_is_nobodys_parent():
    """With no provider the ids of our spans are not sent along: what arrived goes on, or nothing does."""
    with gpu_span("work"), gpu_span("inner"):
        assert injected() == {}
    headers = {"traceparent": f"00-{1:032x}-{2:016x}-00"}
    with extracted(headers), gpu_span("work"), gpu_span("inner"):
        assert injected() == headers


def test_the_application_chooses_the_propagator(exporter, request):
    """What is written is the global propagator's affair, as OTEL_PROPAGATORS or the application set it."""
    from opentelemetry.propagators.composite import CompositePropagator

    before = propagate.get_global_textmap()
    propagate.set_global_textmap(CompositePropagator([]))
    request.addfinalizer(lambda: propagate.set_global_textmap(before))
    with gpu_span("work"):
        assert injected() == {}


# -- sampling ---------------------------------------------------------------------------------------------


class Requests(Sampler):
    """Samples every trace, but those that begin with a request only if told so."""

    def __init__(self, requests):
        self.requests = requests

    def should_sample(self, parent_context, trace_id, name, *_, **__):
        taken = self.requests or name != "request"
        return SamplingResult(Decision.RECORD_AND_SAMPLE if taken else Decision.DROP)

    def get_description(self):
        return "by name"


@pytest.mark.parametrize("sampled", [True, False])
def test_the_decision_is_carried(sampled):
    """An unsampled request has unsampled work, in a thread and behind HTTP headers, whatever the sampler would say."""
    held = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False, sampler=ParentBased(Requests(sampled)))
    provider.add_span_processor(SimpleSpanProcessor(held))
    trace.set_tracer_provider(provider)
    with ThreadPoolExecutor(1) as pool, gpu_span("request"):
        flags = trace.get_current_span().get_span_context().trace_flags
        headers = injected()
        pool.submit(carry(work)).result(5)
        pool.submit(pickle.loads(pickle.dumps(carry(work)))).result(5)
    with extracted(headers):
        work()
    assert bool(flags.sampled) == bool(int(headers["traceparent"][-2:], 16) & 1) == sampled
    work()
    assert flush(5)
    found = [span for span in held.get_finished_spans() if span.name == "work"]
    assert len(found) == (4 if sampled else 1)
    assert found[-1].parent is None


def test_nothing_of_this_is_loaded_before_it_is_used():
    """The names are there at once; OpenTelemetry's propagators, which search for plug-ins, come with their use."""
    import subprocess

    script = (
        "import sys, gpu_timed; assert 'opentelemetry.propagate' not in sys.modules; gpu_timed.carry; "
        "assert not {'torch', 'opentelemetry.sdk'} & set(sys.modules); "
        "assert 'wrapt' not in sys.modules or 'deprecated' in sys.modules"  # OpenTelemetry 1.30 brings it itself
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)


def test_many_at_once_over_many_requests(spans):
    """Twenty requests from four threads, each with five pieces of work on one pool: no piece has another's parent."""
    with ThreadPoolExecutor(3) as pool, ThreadPoolExecutor(4) as clients:

        def request(number):
            with gpu_span("request", attributes={"number": number}) as span:
                done = [pool.submit(carry(tagged), number) for _ in range(5)]
                concurrent.futures.wait(done)
                return number, span.get_span_context().span_id

        ids = dict(clients.map(request, range(20)))
    found = spans()["tagged"]
    assert len(found) == 100
    assert all(span.parent.span_id == ids[span.attributes["number"]] for span in found)


@gpu_timed(attributes=lambda number: {"number": number})
def tagged(number):
    return number
