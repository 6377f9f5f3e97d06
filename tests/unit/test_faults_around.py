"""Faults around a call: imports, targets, what is carried, settings, metrics, sampling rules, the vitals' thread.

As in test_faults.py, part by part: each is made to raise, once or always, in a small service that is timed by name,
gets its parent with a request, works in a pool's thread and has metrics. Then: the user's import succeeded, the
function returned its own value or raised its own exception, nothing came out of any thread, the fault was counted under
a known name, and once the part is well again the next call is measured.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import logging
import pickle
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from make_believe_nvml import FakeNvml
from opentelemetry import context as otel_context
from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.util._once import Once
from test_faults import ALWAYS, LONG_S, ORDINARY, OWN, VALUE, Own, Sabotage

from gpu_timed import carry, configure, current, extracted, flush, gpu_timed, inject, shutdown, targets
from gpu_timed import errors as gpu_timed_errors
from gpu_timed.callables import kinds
from gpu_timed.context import gate as gating
from gpu_timed.context import sampling, wire
from gpu_timed.diagnosis.process import INTERNAL, KINDS, SINK
from gpu_timed.export import metrics as exported
from gpu_timed.export.metrics import MetricsSink
from gpu_timed.imports import ImportWatch
from gpu_timed.settings import Settings
from gpu_timed.targets import AppliedTargets, apply_targets
from gpu_timed.testing import FakeDevice, capture, reset, use_device
from gpu_timed.vitals import sampler as vitals
from gpu_timed.vitals.load import HostLoad
from gpu_timed.vitals.nvml import Card, Nvml
from gpu_timed.vitals.ring import Ring
from gpu_timed.vitals.sampler import THREAD, Sampler

SOURCE = """
from test_faults import OWN, VALUE

def infer(device, raises):
    device.launch(1000)
    device.host_clock.advance(2000)
    if raises:
        raise OWN
    return VALUE

class Model:
    def forward(self, device, raises):
        return infer(device, raises)
"""
_numbers = itertools.count()


class Service:
    """A service whose functions are timed by name, with all that is around a call of one."""

    def __init__(self, device: FakeDevice, folder: Any) -> None:
        self.device = device
        self.folder = folder
        self.reader = InMemoryMetricReader()
        self.pool = ThreadPoolExecutor(1)

    def journey(self, *, raises: bool = False) -> object:
        """Be set up, import, take a request and answer it; returns what the user's functions made of it."""
        name = f"around_module_{next(_numbers)}"
        (self.folder / f"{name}.py").write_text(textwrap.dedent(SOURCE))
        importlib.invalidate_caches()
        applied = apply_targets(f"{name}:infer[sync=deferred],{name}:Model.forward[sync=deferred]")
        try:
            module = importlib.import_module(name)
            with trace.get_tracer("web").start_as_current_span("request"):
                headers = inject()
            with extracted(headers):
                self.pool.submit(carry(module.infer), self.device, False).result(LONG_S)
                try:
                    return module.Model().forward(self.device, raises)
                except Own as own:
                    return own
        finally:
            applied.undo()
            sys.modules.pop(name, None)

    def measured(self) -> int:
        """Return how many records a healthy journey makes."""
        with capture() as records:
            assert self.journey() is VALUE
        return len([record for record in records if isinstance(record.device_ns, int)])


@pytest.fixture
def service(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A service with a tracer provider whose sampler must be asked, and a meter provider."""
    otel_context.attach(Context())
    monkeypatch.syspath_prepend(str(tmp_path))
    metrics._internal._METER_PROVIDER_SET_ONCE = Once()
    metrics._internal._METER_PROVIDER = None
    trace.set_tracer_provider(TracerProvider(sampler=TraceIdRatioBased(1.0), shutdown_on_exit=False))
    with use_device(FakeDevice()) as device:
        made = Service(device, tmp_path)
        provider = MeterProvider([made.reader], shutdown_on_exit=False)
        metrics.set_meter_provider(provider)
        yield made
        made.pool.shutdown()
        provider.shutdown()
    metrics._internal._METER_PROVIDER_SET_ONCE = Once()
    metrics._internal._METER_PROVIDER = None


@contextlib.contextmanager
def nothing_from_threads() -> Iterator[None]:
    """Fail if any thread ends by an exception."""
    came: list[Any] = []
    before, threading.excepthook = threading.excepthook, came.append
    try:
        yield
    finally:
        threading.excepthook = before
    assert came == []


def new_counts(before: dict[str, int]) -> set[str]:
    """Return what was counted since *before* and is no ordinary event."""
    counts = current.ledger().snapshot()
    return {kind for kind, count in counts.items() if count > before.get(kind, 0)} - ORDINARY


def told(kind: str) -> bool:
    """Return whether the doctor has words for *kind*."""
    return kind in KINDS or kind in INTERNAL or kind.startswith((SINK, "target_"))


# -- what a journey passes ---------------------------------------------------------------------------------

STRUCK: dict[str, tuple[Any, str, set[str]]] = {
    "finding the module": (importlib.util, "find_spec", set()),
    "standing between": (sys.modules["gpu_timed.imports"], "_Between", {"import_hook"}),
    "watch.executed": (ImportWatch, "executed", {"import_hook"}),
    "watch.when_imported": (ImportWatch, "when_imported", {"start", "target_refused"}),
    "a reaction": (ImportWatch, "_react", {"import_hook"}),
    "attempt.on_module": (targets._Attempt, "on_module", {"import_hook"}),
    "attempt.replace": (targets._Attempt, "_replace", {"target_refused"}),
    "attempt.timed": (targets._Attempt, "_timed", {"target_refused"}),
    "targets.held": (targets, "_held", {"target_refused"}),
    "kinds.is_timed": (kinds, "is_timed", {"target_refused"}),
    "wire.inject": (wire, "inject", {"propagation"}),
    "wire.extract": (wire, "extract", {"propagation"}),
    "wire.attach": (wire, "attach", {"propagation"}),
    "wire.detach": (wire, "detach", {"propagation"}),
    "the propagator's inject": (propagate, "inject", {"propagation"}),
    "the propagator's extract": (propagate, "extract", {"propagation"}),
    "metrics.announce": (MetricsSink, "announce", {"sink_MetricsSink"}),
    "metrics.emit": (MetricsSink, "emit", {"sink_MetricsSink", "lost_in_sink"}),
    "metrics.begin": (MetricsSink, "_begin", {"sink_MetricsSink", "lost_in_sink"}),
    "metrics' context": (exported, "_context_of", {"sink_MetricsSink", "lost_in_sink"}),
    "rules": (gating, "StaticRules", {"enter"}),
    "rules.bits": (sampling.StaticRules, "bits", {"enter"}),
}
"""What is made to raise, where it is kept, and under which names that is counted: none for what is the user's own."""


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("nth", [1, ALWAYS])
@pytest.mark.parametrize("what", list(STRUCK))
def test_a_fault_around_a_call_is_never_felt(
    service: Service, what: str, nth: int, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What holds for a journey without a fault holds with one."""
    owner, name, allowed = STRUCK[what]
    sabotage = Sabotage(nth, afterwards=what == "wire.detach")
    original = inspect.getattr_static(owner, name)
    before, counted = otel_context.get_current(), current.ledger().snapshot()
    with nothing_from_threads(), monkeypatch.context() as patch:
        patch.setattr(owner, name, sabotage.of(original))
        if what == "metrics.announce":
            configure(late="device_only")
        outcome = service.journey(raises=raises)
        flush(LONG_S)
    assert outcome is (OWN if raises else VALUE)
    assert otel_context.get_current() is before
    assert sabotage.fired
    new = new_counts(counted)
    assert new <= allowed
    assert bool(new) == bool(allowed)
    assert all(told(kind) for kind in new)
    assert flush(LONG_S).pending == 0
    assert service.device.marks_in_use == 0
    assert service.measured() == 3


PARTS: dict[str, type[Any]] = {
    "watch": ImportWatch,
    "attempt": targets._Attempt,
    "applied": AppliedTargets,
    "metrics": MetricsSink,
    "rules": sampling.StaticRules,
    "sampler": Sampler,
}
ELSEWHERE = {
    "watch.find_spec": "the import system's own way in: what it calls is struck",
    "watch.failed": "counts",
    "watch.took_ns": "asked by a reaction, whose faults are counted",
    "attempt.begin": "when_imported is struck in it",
    "attempt.on_definition": "test_names_and_errors_without_a_text",
    "applied.offer": "test_names_and_errors_without_a_text",
    "sampler.at": "test_faults.py, as any source of vitals",
    "sampler.stop": "at the end of the process",
    **dict.fromkeys(("watch.look_again", "watch.waiting", "watch.close"), "only who asks calls it"),
    **dict.fromkeys(("attempt.undo", "attempt.state", "attempt.miss"), "only who asks calls it"),
    **dict.fromkeys(("applied.states", "applied.undo", "applied.script_names"), "only who asks calls it"),
    **dict.fromkeys(("applied.not_defined", "sampler.limits"), "only who asks calls it"),
}
"""Methods that no journey passes, and why."""


def test_every_part_around_is_struck() -> None:
    """Each public method of each part is struck above: a new one is added there, or it is said why not."""
    known = {
        f"{part}.{name}"
        for part, kind in PARTS.items()
        for name, value in vars(kind).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }
    assert known - STRUCK.keys() == ELSEWHERE.keys()
    public = {
        name for name, value in vars(wire).items() if inspect.isfunction(value) and value.__module__ == wire.__name__
    }
    assert {name for name in public if f"wire.{name}" not in STRUCK} == {"_lower", "carrier"} & public


# -- imports and targets ----------------------------------------------------------------------------------


def test_a_module_that_raises_raises_its_own(service: Service) -> None:
    """The very exception, once, with nothing counted; and a finder's own too."""
    (service.folder / "raising_module.py").write_text("from test_faults import OWN\nraise OWN\n")
    applied = apply_targets("raising_module:infer,absent_module.inner:infer")
    with pytest.raises(Own) as caught:
        importlib.import_module("raising_module")
    assert caught.value is OWN
    with pytest.raises(ModuleNotFoundError, match="No module named 'absent_module'"):
        importlib.import_module("absent_module.inner")

    class Refusing:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "refused_module":
                raise OWN

    apply_targets("refused_module:infer")
    sys.meta_path.insert(1, Refusing())  # type: ignore[arg-type]
    try:
        with pytest.raises(Own) as caught:
            importlib.import_module("refused_module")
    finally:
        del sys.meta_path[1]
    assert caught.value is OWN
    assert new_counts({}) == set()
    assert [state.status for state in applied.states] == ["waiting", "waiting"]


class EvilError(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise LookupError("no text")


class EvilName(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise LookupError("no name")


class Closed(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        raise EvilError


def test_names_and_errors_without_a_text(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that takes no attribute and gives no reason, a module whose names cannot be shown: said, and no more."""

    class Shut(metaclass=Closed):
        def run(self) -> object:
            return VALUE

    applied = apply_targets("__main__:Shut.run,__main__:Shut", script=True)
    assert applied.offer("Shut", Shut) is Shut
    assert [state.status for state in applied.states] == ["refused", "refused"]
    (service.folder / "odd_module.py").write_text(
        "from test_faults_around import EvilName\nglobals()[EvilName('odd')] = 1\n"
    )
    applied = apply_targets("odd_module:absent")
    assert importlib.import_module("odd_module")
    assert [state.status for state in applied.states] == ["refused"]
    assert current.ledger().snapshot()["target_refused"] == 3
    del sys.modules["odd_module"]


def test_a_target_that_cannot_be_applied_costs_the_others_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two cannot be waited for: the program starts, and the second is timed."""
    with monkeypatch.context() as patch:
        patch.setattr(ImportWatch, "when_imported", Sabotage(1).of(ImportWatch.when_imported))
        applied = apply_targets("nowhere_module:infer,test_faults:step[sync=deferred]")
    try:
        assert [state.status for state in applied.states] == ["refused", "timed"]
    finally:
        applied.undo()


# -- what is carried --------------------------------------------------------------------------------------


def test_headers_are_looked_at_before_the_propagator(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds no headers is still refused, as the caller's mistake; a propagator's TypeError is not theirs."""
    monkeypatch.setattr(propagate, "extract", Sabotage(ALWAYS, error=TypeError).of(propagate.extract))
    with pytest.raises(gpu_timed_errors.ConfigurationError), extracted(5):  # type: ignore[arg-type]
        pass
    with trace.get_tracer("web").start_as_current_span("an earlier request's"):
        with extracted({"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}):
            assert not trace.get_current_span().get_span_context().is_valid
        assert trace.get_current_span().get_span_context().is_valid
    assert current.ledger().snapshot()["propagation"] == 1


def one() -> object:
    return trace.get_current_span().get_span_context().is_valid


@pytest.mark.parametrize("struck", ["inject", "extract"])
def test_what_is_sent_to_a_process_goes_without_its_trace(
    service: Service, struck: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pickled and back with a propagator that raises: the function is called all the same."""
    with trace.get_tracer("web").start_as_current_span("request"):
        sent = carry(one)
        assert pickle.loads(pickle.dumps(sent))() is True
        with monkeypatch.context() as patch:
            patch.setattr(propagate, struck, Sabotage(ALWAYS).of(getattr(propagate, struck)))
            assert pickle.loads(pickle.dumps(sent))() is False
    assert current.ledger().snapshot()["propagation"] == 1


# -- settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("target", ["settings", "assemble", "assemble_probes", "_watch_ends"])
def test_what_keeps_the_engine_from_starting_is_never_felt(
    service: Service, target: str, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings that cannot be read when the first call comes, or a part that cannot be made: counted, each time."""

    @gpu_timed(sync="deferred")
    def infer() -> object:
        service.device.launch(1000)
        if raises:
            raise OWN
        return VALUE

    reset()
    with monkeypatch.context() as patch:
        patch.setattr(current, target, Sabotage(ALWAYS).of(getattr(current, target)))
        for _ in range(2):
            try:
                outcome = infer()
            except Own as own:
                outcome = own
            assert outcome is (OWN if raises else VALUE)
        assert current.ledger().snapshot() == {"start": 2}
    with capture() as records, contextlib.suppress(Own):
        infer()
    assert [record.call_index for record in records] == [0]


def test_settings_that_change_half_way_leave_the_old_ones(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in configure() is the caller's to see; what was in force stays, and calls go on."""
    before = current.settings()
    with monkeypatch.context() as patch:
        patch.setattr(Settings, "with_values", Sabotage(2).of(Settings.with_values))
        with pytest.raises(RuntimeError, match="injected"):
            configure(sync="deferred")
    assert current.settings() is before
    assert service.measured() == 3


def test_a_warning_about_a_setting_that_cannot_be_logged(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown variable is warned of where it is read, maybe while decorating: a filter's fault is not felt."""

    def refuse(record: logging.LogRecord) -> bool:
        raise LookupError("the filter is broken")

    logger = logging.getLogger("gpu_timed")
    monkeypatch.setenv("GPU_TIMED_SINK", "jsonl")
    reset()
    logger.addFilter(refuse)
    try:
        assert gpu_timed(lambda: VALUE)() is VALUE
    finally:
        logger.removeFilter(refuse)


# -- metrics ----------------------------------------------------------------------------------------------


class Instruments:
    """A meter provider of the application's whose instruments raise, or that cannot make any."""

    def __init__(self, broken: str) -> None:
        self.broken = broken

    def get_meter(self, *_: Any, **__: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name == self.broken:
            raise LookupError(name)
        return lambda *_, **__: self


@pytest.mark.parametrize("broken", ["get_meter", "create_histogram", "create_observable_gauge", "record"])
def test_a_meter_provider_that_raises_costs_its_own_numbers(service: Service, broken: str) -> None:
    """Spans, and every other sink, get what they would have got."""
    made: Any = Instruments(broken)
    if broken == "get_meter":
        made.get_meter = Sabotage(ALWAYS).of(made.get_meter)
    metrics._internal._METER_PROVIDER = made
    with capture() as records:
        assert service.journey() is VALUE
        flush(LONG_S)
    assert len(records) == 3
    assert current.ledger().snapshot()["sink_MetricsSink"] == 3


@pytest.mark.parametrize("source", ["_calls", "_counts", "_limits"])
def test_counts_that_cannot_be_read_cost_their_own_series(
    service: Service, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection in which one of the callbacks raises still has the times of the spans."""
    assert service.journey() is VALUE
    flush(LONG_S)
    (sink,) = (held for held in current.tracer().resolver._sinks if isinstance(held, MetricsSink))
    with monkeypatch.context() as patch:
        patch.setattr(sink, source, Sabotage(ALWAYS).of(dict))
        data = service.reader.get_metrics_data()
    names = {metric.name for each in data.resource_metrics for scope in each.scope_metrics for metric in scope.metrics}
    assert exported.DEVICE_DURATION in names
    assert service.measured() == 3


# -- the vitals' thread -----------------------------------------------------------------------------------

READ: dict[str, tuple[Any, str]] = {
    "opening": (Nvml, "__init__"),
    "finding a card": (Nvml, "card"),
    "reading a card": (Card, "read"),
    "making the load": (HostLoad, "__init__"),
    "reading the load": (HostLoad, "read"),
    "putting it together": (vitals, "vitals_of"),
    "keeping it": (Ring, "add"),
    "the round": (Sampler, "_read"),
    "pausing": (Sampler, "_pause"),
    "starting": (Sampler, "_start"),
    "looking": (Ring, "near"),
    "closing": (Nvml, "close"),
}
"""What the sampler calls on its own thread, or is asked on the resolver's."""


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
@pytest.mark.parametrize("nth", [1, ALWAYS])
@pytest.mark.parametrize("what", list(READ))
def test_a_fault_of_the_vitals_is_never_felt(
    what: str, nth: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The span has its times, the thread ends by no exception, and the fault is counted."""
    owner, name = READ[what]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml({"GPU-fake-0": 1500}))
    configure(vitals_interval_s=0.01)
    sabotage = Sabotage(nth, error=error)

    def call() -> object:
        return gpu_timed(name="call", sync="boundary")(lambda: device.launch(1000) or VALUE)()

    with nothing_from_threads(), use_device(FakeDevice(realtime=True)) as device:
        monkeypatch.setattr(owner, name, sabotage.of(inspect.getattr_static(owner, name)))
        deadline = time.monotonic() + LONG_S
        while not (sabotage.fired and new_counts({})) and time.monotonic() < deadline:
            assert call() is VALUE
            assert flush(LONG_S).pending == 0
            time.sleep(0.005)
            if what == "closing":
                current.tracer().resolver.reader.vitals.stop()  # type: ignore[union-attr]
        assert (bool(sabotage.fired), new_counts({})) == (True, {"vitals"})
        with capture() as records:
            assert call() is VALUE
        assert [isinstance(record.device_ns, int) for record in records] == [True]
        shutdown(LONG_S)
        for thread in threading.enumerate():
            if thread.name == THREAD:
                thread.join(LONG_S)
