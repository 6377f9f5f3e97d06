"""Everything that can grow has a limit, says how much of it is used, and counts what it drops."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import importlib
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace

import gpu_timed as library
from gpu_timed import current, diagnose, flush, gpu_span, gpu_timed
from gpu_timed.bounds import Limit
from gpu_timed.clocks import cuda_event
from gpu_timed.clocks.cuda_event import CudaEventClock
from gpu_timed.clocks.cuda_places import MOST_PLACES, CudaPlaces
from gpu_timed.context.recording import MOST_WRITES
from gpu_timed.diagnosis import limits
from gpu_timed.ledger import MOST_KINDS, OTHER, Ledger
from gpu_timed.ports import MOST_WATCHERS, Place
from gpu_timed.reader import MOST_CLOCKS
from gpu_timed.sites import MOST_UNTIMED
from gpu_timed.span import MOST_INTERVALS, MOST_SEGMENTS, Span
from gpu_timed.testing import FakeDevice, capture, use_device

US = 1_000


def table() -> dict[str, Limit]:
    """Return every limit of the process by its name."""
    found = current.limits()
    assert len({each.name for each in found}) == len(found), "a name came twice"
    return {each.name: each for each in found}


def open_spans() -> int:
    """Return how many spans anybody still holds."""
    gc.collect()
    return sum(type(each) is Span for each in gc.get_objects())


# -- chains of contexts -----------------------------------------------------------------------------------


def test_a_chain_of_contexts_keeps_no_chain_of_spans(exporter: Any, device: FakeDevice) -> None:
    """A task that starts the next one from inside its span: each is the child of the last, and none keeps it alive."""
    context = contextvars.copy_context()
    before = open_spans()

    @gpu_timed(sync="deferred")
    def tick() -> None:
        nonlocal context
        device.launch(US)
        context = contextvars.copy_context()

    for _ in range(50):
        context.run(tick)
        device.run_dry()
        flush(10)
    assert open_spans() - before <= 2
    spans = [span for span in exporter.get_finished_spans() if "[" not in span.name]
    assert len(spans) == 50
    assert [span.parent.span_id for span in spans[1:]] == [span.context.span_id for span in spans[:-1]]
    assert {span.context.trace_id for span in spans} == {spans[0].context.trace_id}


def test_a_chain_of_spans_that_overlap_keeps_none_either(exporter: Any, device: FakeDevice) -> None:
    """Each begins inside the one before and outlives it: who lies around it is known while that one is open."""
    before = open_spans()
    context, held = contextvars.copy_context(), None
    for _ in range(50):
        block = gpu_span("link", sync="deferred")
        span = context.run(block.__enter__)
        context = context.run(contextvars.copy_context)
        if held is not None:
            assert span.admission.ancestor is held[1]
            held[2].run(held[0].__exit__, None, None, None)
            device.run_dry()
            flush(10)
        held = block, span, context
    assert open_spans() - before <= 3
    held[0].__exit__(None, None, None)


def test_a_span_that_was_handed_over_still_knows_its_parent(exporter: Any, device: FakeDevice) -> None:
    """Ids and trace state of the parent are the same afterwards, and the parent itself can go."""
    state = trace.TraceState([("vendor", "1")])
    far = trace.SpanContext(5, 7, is_remote=True, trace_flags=trace.TraceFlags(1), trace_state=state)
    with trace.use_span(trace.NonRecordingSpan(far)), gpu_span("outer") as outer, gpu_span("inner") as inner:
        said = outer.parent, inner.parent
        device.launch(US)
    assert flush(10)
    assert (outer.parent, inner.parent) == said
    assert inner.parent == outer.get_span_context()
    assert inner.parent.trace_state == state
    assert inner.get_span_context().trace_state == state
    assert inner.admission.parent is not outer


def test_without_a_provider_a_parent_is_known_too(device: FakeDevice) -> None:
    """Spans that go nowhere have ids all the same."""
    with gpu_span("root") as root, gpu_span("outer") as outer, gpu_span("inner") as inner:
        said = root.parent, outer.parent, inner.parent
    flush(10)
    after = root.parent, outer.parent, inner.parent
    assert [each and (each.trace_id, each.span_id) for each in after] == [
        each and (each.trace_id, each.span_id) for each in said
    ]


# -- strangers on a stream --------------------------------------------------------------------------------


def apart(name: str) -> tuple[Any, contextvars.Context]:
    """Open a block in a context of its own; returns it and the context."""
    context = contextvars.Context()
    block = gpu_span(name, sync="deferred")
    context.run(block.__enter__)
    return block, context


def test_who_was_told_of_a_stranger_is_not_asked_again(device: FakeDevice) -> None:
    """However many spans are open on a stream, each is told once: a mark costs nothing for those that know."""
    with capture() as records:
        held = [apart(f"s{number}") for number in range(40)]
        (place,) = device._places.values()
        assert len(place.watchers) == 1, "all but the last have been told"
        for block, context in held:
            context.run(block.__exit__, None, None, None)
        assert place.watchers == []
    assert [record.quality for record in sorted(records, key=lambda record: record.name)] == [("interleaved",)] * 40


def test_the_last_of_two_is_told_by_the_first_one_s_end(device: FakeDevice) -> None:
    """The first was told and is watched no more; its own end mark is still told to the second."""
    with capture() as records:
        first, second = apart("first"), apart("second")
        for block, context in (first, second):
            context.run(block.__exit__, None, None, None)
    assert [record.quality for record in records] == [("interleaved",)] * 2


def test_ancestors_are_known_in_whatever_order_they_stand(device: FakeDevice) -> None:
    """An outer coroutine that goes on later than an inner one stands behind it, and is an ancestor all the same."""
    with capture() as records, gpu_span("a"), gpu_span("b"):
        (place,) = device._places.values()
        place.watchers.reverse()
        with gpu_span("c"):
            device.launch(US)
    assert [record.quality for record in records] == [()] * 3


def test_beyond_the_limit_a_span_is_not_watched_and_that_is_counted(device: FakeDevice) -> None:
    """Spans without end, one inside the other, cost room for 1,024."""
    blocks = [gpu_span("deep", sync="deferred") for _ in range(MOST_WATCHERS + 3)]
    for block in blocks:
        block.__enter__()
    assert (table()["watched"].in_use, table()["watched"].dropped) == (MOST_WATCHERS, 3)
    for block in reversed(blocks):
        block.__exit__(None, None, None)
    assert table()["watched"].in_use == 0


# -- what one span keeps ----------------------------------------------------------------------------------


def test_writes_beyond_the_limit_are_counted(device: FakeDevice) -> None:
    """An endless loop of attributes costs room for 10,000, and the rest is said."""
    with gpu_span("loop") as span:
        for number in range(MOST_WRITES + 7):
            span.set_attribute("n", number)
    flush(10)
    assert len(span.writes) == MOST_WRITES
    assert current.ledger().snapshot()["writes_dropped"] == 7
    assert table()["writes"].dropped == 7
    assert diagnose().section("process").get("bounds.writes").level == "warning"


def test_resumptions_beyond_the_limit_are_counted(device: FakeDevice) -> None:
    """A generator without end: its time is overflow, and the resumptions without marks are told."""

    @gpu_timed
    def many() -> Any:
        yield from range(MOST_SEGMENTS + 5)

    for _ in many():
        pass
    device.run_dry()
    flush(10)
    assert table()["segments"].dropped == 6, "as many, and the one in which it ended"


def test_pieces_in_which_something_was_compiled_are_bounded(device: FakeDevice) -> None:
    """The latest are kept, and nothing that was forgotten is called warm."""
    ring = current._state.ring

    @gpu_timed
    def many(step: int) -> Any:
        for number in range(MOST_INTERVALS + 50):
            if number % step == 0:
                thread = threading.Thread(target=ring.emit, args=("torch.compile", "another's", "built"))
                thread.start()
                thread.join()
            yield number

    with capture() as records:
        list(many(10_000))  # the first call of a site is never warm
        list(many(10_000))
        list(many(1))
    assert [record.warmth for record in records] == ["unknown", "warm", "unknown"]
    assert table()["events_of_warmth"].in_use == MOST_INTERVALS + 52


# -- what the process keeps -------------------------------------------------------------------------------


def test_kinds_beyond_the_limit_are_counted_together() -> None:
    """Kinds may be named by classes of the application's; they are counted, and the log stays short."""
    ledger = Ledger()
    for number in range(MOST_KINDS + 5):
        ledger.count(f"sink_{number}")
        ledger.count(f"sink_{number}")
    counts = ledger.snapshot()
    assert (len(counts), counts[OTHER], sum(counts.values())) == (MOST_KINDS, 12, 2 * (MOST_KINDS + 5))
    (limit,) = ledger.limits()
    assert (limit.in_use, limit.dropped) == (MOST_KINDS, 12)


def test_names_in_compiled_regions_are_bounded() -> None:
    """Beyond a thousand they are counted and not kept."""
    for number in range(MOST_UNTIMED + 3):
        current.traced(f"f{number}")
    current.traced("f0")
    assert (table()["untimed_names"].in_use, table()["untimed_names"].dropped) == (MOST_UNTIMED, 3)


def test_clocks_come_and_go() -> None:
    """A test suite makes a device for each test: the resolver keeps the latest few, and leaves the others' contexts."""
    left: list[int] = []

    class Watched(FakeDevice):
        def unhindered(self) -> Any:
            stack = contextlib.ExitStack()
            stack.callback(left.append, id(self))
            return stack

    made = [Watched() for _ in range(MOST_CLOCKS + 4)]
    for each in made:
        with use_device(each), gpu_span("f", sync="deferred"):
            each.launch(US)
        flush(10)
    limit = table()["clocks"]
    assert (limit.in_use, limit.dropped) == (MOST_CLOCKS, 4)
    assert left == [id(each) for each in made[:4]]
    library.shutdown()
    assert sorted(left) == sorted(id(each) for each in made)


def test_streams_without_end_are_forgotten_and_counted() -> None:
    """Beyond 4,096 streams the table starts over."""
    places = CudaPlaces(lambda: CudaEventClock(Driver()))  # type: ignore[arg-type]
    for stream in range(MOST_PLACES + 1):
        places.at(0, stream).unwatched = 1
    found = {each.name: each for each in places.limits()}
    assert (found["places"].in_use, found["places"].dropped) == (1, MOST_PLACES)
    assert found["watched"].dropped == MOST_PLACES + 1


# -- the pool of events -----------------------------------------------------------------------------------


class Driver:
    """As much of a driver as marks need. Says when a handle is recorded that somebody else holds."""

    def __init__(self) -> None:
        self.made = 0
        self.destroyed: list[int] = []
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0

    def cuDevicePrimaryCtxGetState(self, ordinal: Any, flags: Any, active: Any) -> int:  # noqa: N802
        active._obj.value = 1
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, ordinal: Any) -> int:  # noqa: N802
        context._obj.value = 99
        return 0

    def cuEventCreate(self, where: Any, flags: int) -> int:  # noqa: N802
        with self._lock:
            self.made += 1
            where._obj.value = self.made
        return 0

    def cuEventDestroy_v2(self, event: int) -> int:  # noqa: N802
        self.destroyed.append(event)
        return 0


def test_no_two_threads_hold_one_event() -> None:
    """16 threads that take and give back: each event has one holder, and no more are made than are held at once."""
    driver = Driver()
    clock = CudaEventClock(driver)  # type: ignore[arg-type]
    place = Place(clock, 0, 0)
    holders: dict[int, int] = {}
    clashes: list[int] = []
    ready = threading.Barrier(16)

    def work() -> None:
        ready.wait()
        for _ in range(60):
            marks: list[Any] = [clock.mark(place) for _ in range(8)]
            me = threading.get_ident()
            clashes.extend(mark.handle for mark in marks if holders.setdefault(mark.handle, me) != me)
            for mark in marks:
                del holders[mark.handle]
            clock.release(*marks)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    device = clock._devices[0]
    assert len(device.free) == device.made == driver.made <= 16 * 8 + 32
    (limit,) = clock.limits()
    assert (limit.in_use, limit.dropped) == (driver.made, 0)


def test_a_pool_that_others_empty_at_once_still_gives_a_mark() -> None:
    """Between filling the pool and looking into it, 64 threads may have taken everything: that is no failed mark."""
    clock = CudaEventClock(Driver())  # type: ignore[arg-type]
    place = Place(clock, 0, 0)
    taken: list[Any] = []

    class Raided(list):  # type: ignore[type-arg]
        def extend(self, marks: Any) -> None:
            if taken:
                super().extend(marks)
            else:
                taken.extend(marks)

    clock.release(clock.mark(place))
    clock._devices[0].free = Raided()
    assert isinstance(clock.mark(place), cuda_event.CudaMark)
    assert len(taken) == 32


def test_who_waited_for_the_pool_to_be_filled_does_not_fill_it_again() -> None:
    """One thread fills it; the others find it full."""
    driver = Driver()
    clock = CudaEventClock(driver)  # type: ignore[arg-type]
    clock._grow(0)
    assert driver.made == 32
    clock._grow(0)
    assert driver.made == 32


def test_events_beyond_the_limit_are_destroyed_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst of spans does not keep its events for good."""
    monkeypatch.setattr(cuda_event, "POOL_LIMIT", 40)
    driver = Driver()
    clock = CudaEventClock(driver)  # type: ignore[arg-type]
    place = Place(clock, 0, 0)
    marks: list[Any] = [clock.mark(place) for _ in range(64)]
    clock.release(*marks)
    (limit,) = clock.limits()
    assert (limit.in_use, limit.dropped, len(driver.destroyed)) == (40, 24, 24)
    assert "; 0 more are in use" in limit.what


# -- many threads -----------------------------------------------------------------------------------------


def test_threads_lose_no_record_and_cross_no_parent(device: FakeDevice) -> None:
    """16 threads, nested two deep, on one stream: every record there once, under its own thread's parent."""
    inner = gpu_timed(name="inner", sync="deferred")(lambda: device.launch(10))

    def call() -> None:
        inner()
        with gpu_span("block", sync="deferred"):
            device.launch(10)

    outer = gpu_timed(name="outer", sync="deferred")(call)
    ready = threading.Barrier(16)

    def work() -> None:
        ready.wait()
        for _ in range(100):
            outer()

    with capture() as records:
        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert Counter(record.name for record in records) == {"outer": 1600, "inner": 1600, "block": 1600}
    assert len({record.span_id for record in records}) == 4800
    outers = {record.span_id: record for record in records if record.name == "outer"}
    for record in records:
        if record.name != "outer":
            parent = outers[record.parent_id]
            assert (parent.thread_id, parent.trace_id) == (record.thread_id, record.trace_id)
    children = Counter(record.parent_id for record in records if record.name != "outer")
    assert set(children.values()) == {2}
    assert sorted(record.call_index for record in outers.values()) == list(range(1600))
    assert device.marks_in_use == 0
    assert table()["watched"].in_use == 0


# -- the table --------------------------------------------------------------------------------------------

SHOWN = {
    "callables/counting.py": {},
    "clocks/cuda_event.py": {"POOL_LIMIT": "events_ready"},
    "clocks/cuda_places.py": {"MOST_PLACES": "places"},
    "clocks/fence.py": {"MOST_PENDING": "fence_marks"},
    "context/recording.py": {"MOST_WRITES": "writes"},
    "ledger.py": {"MOST_KINDS": "kinds"},
    "peaks.py": {"MOST_DEVICES": "peaks"},
    "ports.py": {"ENDS_KEPT": "ends", "MOST_WATCHERS": "watched"},
    "reader.py": {"MOST_CLOCKS": "clocks"},
    "site.py": {
        "QUIET_CALLS": "quiet_calls",
        "MOST_INPUTS": "inputs_of_site",
        "MOST_LASTING": "lasting_of_site",
        "MOST_SIGNATURES": "counted_of_site",
    },
    "sites.py": {"MOST_NAMES": "block_names", "MOST_UNTIMED": "untimed_names"},
    "span.py": {"MOST_SEGMENTS": "segments", "MOST_INTERVALS": "cold_pieces"},
    "vitals/ring.py": {"MOST": "vitals_readings"},
    "vitals/sampler.py": {"MOST_DEVICES": "vitals_devices"},
    "warmth/directory_probe.py": {"MOST_DIRECTORIES": "directories", "MOST_ENTRIES": "files"},
    "warmth/ring.py": {"EVENTS_KEPT": "events_of_warmth", "LASTING_KEPT": "lasting"},
}
"""Limits of what the engine keeps, and the name under which the table shows each."""
NOT_SHOWN = {
    "callables/counting.py": {"MOST_FAILURES", "_MOST_PARTS"},  # a decision about one signature; parts of one
    "callables/numba_kernels.py": {"_MOST_KEPT"},  # of one kernel, beyond them it is configured anew
    "clocks/timeline.py": {"_HISTORY"},  # of one device
    "context/recording.py": {"_INNERMOST", "_LONGEST_TRACE"},  # of one text
    "mode_values.py": {"_MOST"},  # of what may be asked for
    "reader.py": {"_MOST_REASONS"},  # of one text
    "values.py": {"LONGEST", "_MOST_DIMENSIONS"},  # of one value
    "views/drawing.py": {"MOST_DOTS", "_MOST_LANES"},  # of one plot
    "vitals/sampler.py": {"_MOST_FAULTS"},  # a decision
    "warmth/directory_probe.py": {"_KEPT", "_SHOWN"},  # of one site, as its quiet calls; of one text
    "warmth/ring.py": {"_MOST_CAUSES", "_MOST_CONCURRENT", "_MOST_TEXT"},  # of one record
    "warmth/torch_autograd.py": {"_MOST_NODES", "_MOST_FRAMES"},  # of one search
    "warmth/torch_compile.py": {"_FRAMES_KEPT"},  # torch's own frames, the latest
    "warmth/torch_inputs.py": {"_MOST_TENSORS"},  # of one signature
}
"""Limits within one value, text, search or decision: nothing that adds up."""
ELSEWHERE = ("analysis", "cli", "diagnosis", "export", "kernel_caches", "measure", "modes")
"""Rooms that keep nothing while calls are measured, but for what OpenTelemetry keeps by its own limits."""
NAMED = re.compile(
    r"^(_?[A-Z_]*(?:MOST|LIMIT|KEPT|KEEP|LONGEST|QUIET_CALLS|HISTORY|SHOWN)[A-Z_]*): Final(?:\[int\])? = [\d_]+$",
    re.MULTILINE,
)


def test_every_limit_in_the_source_is_in_the_table_or_explained() -> None:
    """Who adds a constant that limits something says under which name it is shown, or why it is not."""
    root = Path(library.__file__).parent
    found: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if name.partition("/")[0] in ELSEWHERE or name in ("clocks/cupti_activity.py", "selftest.py"):
            continue
        limiting = {each for each in NAMED.findall(path.read_text(encoding="utf-8")) if not each.endswith("_NS")}
        if limiting:
            found[name] = limiting
    assert sum(map(len, found.values())) > 25, "the search finds nothing"
    known = {name: set(SHOWN.get(name, ())) | NOT_SHOWN.get(name, set()) for name in SHOWN.keys() | NOT_SHOWN.keys()}
    assert found == {name: held for name, held in known.items() if held}


def test_every_deque_in_the_source_has_an_end() -> None:
    """Three have none of their own: what may be put into them is limited where it is put, and shown."""
    root = Path(library.__file__).parent
    endless = [
        f"{path.relative_to(root).as_posix()}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"\bdeque\((?!.*maxlen)", line)
    ]
    assert [line.partition(":")[0] for line in endless] == ["clocks/fence.py", "resolver.py", "resolver.py"], endless


def test_the_table_shows_each_with_its_own_constant(device: FakeDevice) -> None:
    """The number shown is the one in the source, by the name promised."""
    gpu_timed(lambda: device.launch(US), name="f")()
    flush(10)
    clock, fence = CudaEventClock(Driver()), importlib.import_module("gpu_timed.clocks.fence")  # type: ignore[arg-type]
    places = CudaPlaces(lambda: clock)
    clock.mark(places.at(0, 0))
    shown = {
        **{each.name: each for each in places.limits()},
        **{each.name: each for each in fence.FenceClock(None).limits()},
        **table(),
    }
    for module, names in SHOWN.items():
        held = importlib.import_module("gpu_timed." + module.removesuffix(".py").replace("/", "."))
        for constant, name in names.items():
            assert shown[name].most == getattr(held, constant), name
    settings = current.settings()
    assert (shown["pending"].most, shown["queue"].most) == (settings.max_pending, settings.max_queue)
    assert shown["ends"].in_use == 1


def test_the_doctor_tells_all_of_them_in_one_line_and_those_that_lose_in_their_own() -> None:
    """A ring that made room for newer events is no loss; a queue that turned spans away is."""
    several = [
        Limit("ring", 10, 10, 90, "events"),
        Limit("queue", 10, 2, 3, "spans", loses=True),
        Limit("nearly", 10, 9, 0, "marks", loses=True),
        Limit("each", 5, None, 0, "writes", loses=True),
    ]
    found = list(limits.findings(several))
    assert [(each.key, each.level) for each in found] == [
        ("bounds", "ok"),
        ("bounds.queue", "warning"),
        ("bounds.nearly", "note"),
    ]
    assert "4 limits" in found[0].text
    assert "10 of 10 events" in found[0].text
    assert found[0].values["limits"]["queue"] == {"limit": 10, "in_use": 2, "dropped": 3, "what": "spans"}
    assert "2 of 10 in use, 3 beyond" in found[1].text


def test_nothing_measured_yet_has_limits_too() -> None:
    """Asking starts nothing."""
    assert table()["kinds"].in_use == 0
    assert current._state.tracer is None
    assert diagnose().section("process").get("bounds").level == "ok"
