"""CUDA modules loaded in a call, told by a make-believe CUPTI: who attaches when, and who makes way for whom."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from make_believe_cupti import CuptiError, FakeCupti

from gpu_timed import configure, current, gpu_timed
from gpu_timed.clocks import cupti_activity, cupti_callbacks
from gpu_timed.clocks.cupti_activity import KernelRecords, RecordsUnavailable
from gpu_timed.clocks.cupti_callbacks import ModuleLoads
from gpu_timed.doctor import hooks
from gpu_timed.errors import MissingExtraError
from gpu_timed.record import NOT_SET
from gpu_timed.testing import FakeDevice, capture

RUNTIMES = ("torch", "cupy", "numba.cuda", "jax")


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupti]:
    """A CUPTI that somebody asked for, and no runtime imported yet."""
    monkeypatch.setenv("GPU_TIMED_MODULE_LOADS", "1")
    current.reset()
    made = FakeCupti()
    for page in (cupti_activity, cupti_callbacks):
        monkeypatch.setattr(page, "load", lambda *_: made)
    for name in RUNTIMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield made
    current.reset()
    assert made.holders == []


def arrive(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let a runtime be there, as after its import."""
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    current.imports().look_again()


def state() -> str:
    return current.probes()["cuda modules"]


def told() -> dict[str, Any]:
    return {finding.key: (finding.level, finding.text) for finding in hooks()}


def test_nobody_asked_and_cupti_is_left_alone(cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default nothing of it is touched, and the doctor says how to switch it on."""
    monkeypatch.delenv("GPU_TIMED_MODULE_LOADS")
    current.reset()
    current.tracer()
    arrive(monkeypatch, "cupy")
    assert (cupti.calls, state()) == ([], "off")
    level, text = told()["cuda modules"]
    assert level == "ok"
    assert "GPU_TIMED_MODULE_LOADS=1" in text


@pytest.mark.parametrize("name", RUNTIMES)
def test_it_attaches_once_with_the_first_runtime(name: str, cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before there is a runtime that could load anything; and the option works as the variable does."""
    monkeypatch.delenv("GPU_TIMED_MODULE_LOADS")
    current.reset()
    configure(module_loads=True)
    current.tracer()
    assert (cupti.calls, state()) == ([], "waiting")
    arrive(monkeypatch, name)
    assert state() == "attached"
    for other in RUNTIMES:
        arrive(monkeypatch, other)
    assert cupti.calls == ["subscribe", "enable_callback"]
    assert told()["cuda modules"] == ("ok", "cuda modules: attached")
    current.reset()
    assert cupti.calls == ["subscribe", "enable_callback", "unsubscribe"]


def test_a_first_call_says_what_it_loaded(
    cupti: FakeCupti, device: FakeDevice, monkeypatch: pytest.MonkeyPatch, exporter: Any
) -> None:
    """Initialised, with their number; the second call is hot; another thread's load is listed and no more."""
    from gpu_timed import flush

    current.tracer()
    arrive(monkeypatch, "cupy")

    @gpu_timed(name="f", sync="deferred")
    def f(count: int) -> None:
        for _ in range(count):
            cupti.load_module()

    def elsewhere(count: int) -> None:
        thread = threading.Thread(target=f.__wrapped__, args=(count,))
        thread.start()
        thread.join()

    g = gpu_timed(elsewhere, name="g", sync="deferred")
    with capture() as records:
        f(4), f(0), f(1), g(1), g(2)
    found = [(r.name, r.warmth, r.tier, [c.what for c in r.causes], [c.what for c in r.concurrent]) for r in records]
    assert found == [
        ("f", "cold", "initialised", ["CUDA module loaded, 4 times"], []),
        ("f", "warm", "hot", [], []),
        ("f", "cold", "initialised", ["CUDA module loaded"], []),
        ("g", "unknown", NOT_SET, [], ["CUDA module loaded"]),
        ("g", "warm", "hot", [], ["CUDA module loaded, 2 times"]),
    ]
    assert {cause.probe for record in records for cause in record.causes} == {"cuda modules"}
    assert records[0].compile_ns == NOT_SET
    assert flush(10)
    first = next(span for span in exporter.get_finished_spans() if span.name == "f")
    assert first.attributes["gpu_timed.warmth.causes"] == ("cuda modules: CUDA module loaded, 4 times",)
    assert "gpu_timed.compile.duration_ns" not in first.attributes


def test_who_loads_never_meets_an_exception(cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback that raises would do so inside the driver. Faults are counted; after the end nothing is told."""

    def raises() -> None:
        raise RuntimeError("ours")

    ended = ModuleLoads(raises)
    cupti.load_module()
    ended._called()
    ended.end()
    seen: list[int] = []
    loads = ModuleLoads(lambda: seen.append(1))
    callback = cupti._callback
    cupti.load_module()
    loads.end()
    loads.end()
    callback(None, 3, 6, None)  # one that was under way
    assert seen == [1]
    assert cupti.calls.count("unsubscribe") == 2


@pytest.mark.parametrize("call", ["subscribe", "enable_callback"])
def test_what_cupti_refuses_is_said_and_nothing_is_kept(
    call: str, cupti: FakeCupti, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor shows why; the subscription does not stay; calls are measured as ever."""
    cupti.refuse[call] = CuptiError(1, "CUPTI_ERROR_NOT_INITIALIZED")
    current.tracer()
    arrive(monkeypatch, "cupy")
    with capture() as records:
        gpu_timed(lambda: None, name="f")()
    assert state() == "refused: CUPTI refused: CuptiError: CUPTI_ERROR_NOT_INITIALIZED"
    assert cupti.holders == []
    level, text = told()["cuda modules"]
    assert level == "warning"
    assert text.endswith("CUPTI_ERROR_NOT_INITIALIZED")
    assert "are not told" in text
    assert [record.warmth for record in records] == ["unknown"]


def test_another_profiler_and_a_missing_extra_are_said(cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name where CUPTI knows it; with the pip command where cupti-python is missing; other faults are counted."""
    cupti.holders.append("Kineto")
    current.tracer()
    arrive(monkeypatch, "cupy")
    assert "another profiler (Kineto)" in state()
    cupti.holders.clear()

    def again(error: Exception) -> str:
        def refuse(*_: str) -> Any:
            raise error

        monkeypatch.setattr(cupti_callbacks, "load", refuse)
        current.reset()
        monkeypatch.delitem(sys.modules, "cupy")
        current.tracer()
        arrive(monkeypatch, "cupy")
        return state()

    missing = again(MissingExtraError("it needs:\n  pip install 'gpu-timed[cupti]'"))
    assert missing == "refused: it needs: pip install 'gpu-timed[cupti]'"
    assert "probe_attach" not in current.ledger().snapshot()
    assert again(ZeroDivisionError("odd")) == "refused: ZeroDivisionError: odd"
    assert current.ledger().snapshot()["probe_attach"] == 1


def test_kernel_records_have_cupti_while_it_makes_way(
    cupti: FakeCupti, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without making way they are refused, and told by whom; within the block they are had, and it comes back."""
    current.tracer()
    arrive(monkeypatch, "cupy")
    with pytest.raises(RecordsUnavailable, match="gpu_timed module_loads"):
        KernelRecords().start()
    seen = current._state.ring.generation
    with current.without_module_loads():
        with KernelRecords():
            assert cupti.holders == ["gpu_timed"]
            cupti.load_module()
        assert current._state.ring.generation == seen
    assert (cupti.holders, state()) == (["gpu_timed module_loads"], "attached")
    cupti.load_module()
    assert current._state.ring.generation == seen + 1
    with current.without_module_loads():
        cupti.holders.append("another")
    assert state().startswith("refused: another profiler (another)")
    cupti.holders.clear()
    with current.without_module_loads():  # nothing to make way, nothing comes back
        pass
    assert cupti.holders == []


def test_the_self_test_has_cupti_for_its_records(cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows of kernel records run in such a block."""
    from gpu_timed import selftest

    current.tracer()
    arrive(monkeypatch, "cupy")
    held: list[list[str]] = []

    def rows(*_: Any, **__: Any) -> Iterator[Any]:
        held.append(list(cupti.holders))
        yield from ()

    monkeypatch.setattr(selftest.reference, "rows", rows)
    assert list(selftest._cupti_rows(None, None, "", None, stamped=True, until_s=0)) == []  # type: ignore[arg-type]
    assert held == [[]]
    assert cupti.holders == ["gpu_timed module_loads"]


def test_what_closes_meanwhile_does_not_come_back(cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset inside such a block is for good."""
    current.tracer()
    arrive(monkeypatch, "cupy")
    with current.without_module_loads():
        current.reset()
    assert cupti.holders == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_the_parents_subscription_alone(
    cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its lock nor its end hinders the child; the parent goes on."""
    current.tracer()
    arrive(monkeypatch, "cupy")
    probes = current._state.probes
    assert probes is not None
    assert probes.modules is not None
    with probes.modules._lock:
        child = os.fork()
        if child == 0:
            code = 1
            signal.alarm(10)  # rather than for ever, where it waits for the parent's lock
            try:
                probes.close()
                code = 0 if "unsubscribe" not in cupti.calls else 2
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert state() == "attached"
    cupti.load_module()
    assert current._state.ring.generation >= 1


def test_without_cupti_python_the_doctor_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for and not installed: said, with the command, and nothing else changes."""
    monkeypatch.setattr(cupti_activity.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"(?s)what CUDA loads.*gpu-timed\[cupti\]"):
        ModuleLoads(lambda: None)
