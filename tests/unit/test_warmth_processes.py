"""What the probes leave alone: imports, forked children, counts of others; and that the doctor shows all of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fresh_process import run

from gpu_timed import current, gpu_timed
from gpu_timed.doctor import hooks
from gpu_timed.testing import FakeDevice, capture
from gpu_timed.warmth.probes import PROBES


def test_all_probes_together_import_nothing() -> None:
    """Attached in a process that uses no runtime, with the one that is asked for as well: none is there afterwards."""
    body = """
        import os
        state = os.environ["STATE"]
        with capture() as records:
            for _ in range(3): gpu_timed(lambda: None, name="f", sync="deferred")()
        roots = {"torch", "triton", "numba", "cupy", "cupyx", "jax", "jaxlib", "cupti", "numpy", "llvmlite"}
        assert not roots & {name.partition(".")[0] for name in sys.modules}, roots & set(sys.modules)
        assert set(current.probes().values()) <= {"waiting", state}
        assert current.probes()["cuda modules"] == state
        show([])
    """
    assert run(body, STATE="off") == [[]]
    assert run(body, STATE="waiting", GPU_TIMED_MODULE_LOADS="1") == [[]]


def test_the_doctor_shows_the_state_of_every_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """One finding for each, whatever became of it; before the first call it says that there are none yet."""
    (before,) = hooks()
    assert before.level == "note"
    current.tracer()
    assert [finding.key for finding in hooks()] == [*(probe.name for probe in PROBES), "cuda modules"]
    probes = current._state.probes
    assert probes is not None
    for name, state, level, words in (
        ("cupy", "waiting", "ok", "waits"),
        ("numba", "attached", "ok", "attached"),
        ("triton", "no hook in this version: gone", "warning", "unknown, not warm"),
        ("triton load", "no hook in this version: gone", "note", "not told"),
    ):
        probes.state[name] = state
        (found,) = (finding for finding in hooks() if finding.key == name)
        assert (found.level, words in found.text) == (level, True), found.text


def test_the_counter_of_causes_knows_every_tier_and_no_cause_of_others(device: FakeDevice) -> None:
    """Built, loaded and initialised apart, by probe; what another thread did is in no count and no time."""
    import threading

    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.util._once import Once

    ring = current._state.ring
    metrics._internal._METER_PROVIDER_SET_ONCE, metrics._internal._METER_PROVIDER = Once(), None
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    try:

        @gpu_timed(name="f", sync="deferred")
        def f(own: Any, others: Any = ()) -> None:
            for each in own:
                ring.emit(*each)
            for each in others:
                thread = threading.Thread(target=ring.emit, args=each)
                thread.start()
                thread.join()

        with capture():
            f([("numba", "f compiled", "built", 4_000_000)])
            f([("numba", "f from the disk cache", "loaded", 2_000_000)])
            f([("cuda modules", "CUDA module loaded", "initialised")] * 3, [("jax", "theirs", "built", 8_000_000)])
            device.disappear()
            f([], [("jax", "theirs", "built", 8_000_000)])
            device.appear()
        data = reader.get_metrics_data()
        assert data is not None
        points = {
            metric.name: list(metric.data.data_points)
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }
        causes = {
            (point.attributes["gpu_timed.probe"], point.attributes["gpu_timed.warmth.tier"]): point.value
            for point in points["gpu_timed.cold"]
        }
        assert causes == {("numba", "built"): 1, ("numba", "loaded"): 1, ("cuda modules", "initialised"): 1}
        (compiling,) = points["gpu_timed.compile.duration"]
        assert (compiling.count, round(compiling.sum, 9)) == (2, 0.006)
        warmth = {point.attributes["gpu_timed.warmth"]: point.count for point in points["gpu_timed.launch.duration"]}
        assert warmth == {"cold": 3, "warm": 1}
    finally:
        provider.shutdown()
        metrics._internal._METER_PROVIDER_SET_ONCE, metrics._internal._METER_PROVIDER = Once(), None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.timeout(120)
def test_a_forked_child_sees_its_own_compiles_and_hooks_come_out_on_either_side(tmp_path: Path) -> None:
    """The child compiles and is cold, the parent's ring knows nothing of it; a reset of one leaves the other hooked."""
    pytest.importorskip("numba")
    body = """
        import os, numba
        from numba.core.dispatcher import Dispatcher
        from gpu_timed.testing import reset
        f = numba.njit(lambda a: a + 1)
        timed = gpu_timed(f, name="f", sync="deferred")
        with capture() as records: timed(1), timed(1)
        show(records)
        before = current._state.ring.generation
        sys.stdout.flush()
        child = os.fork()
        if not child:
            with capture() as records: timed(1.0), timed(1.0), timed(1)
            show(records)
            reset()
            print(json.dumps([]) if not hasattr(Dispatcher.compile, "__wrapped__") else "hooked")
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert current._state.ring.generation == before
        with capture() as records: timed(1.0), timed(1.0)
        show(records)
        reset()
        assert not hasattr(Dispatcher.compile, "__wrapped__")
    """
    parent, child, unhooked, again = run(body, NUMBA_CACHE_DIR=str(tmp_path))
    assert [call["tier"] for call in parent] == ["built", "hot"]
    assert [call["tier"] for call in child] == ["built", "hot", "hot"]
    assert unhooked == []
    assert [call["tier"] for call in again] == ["built", "hot"]
