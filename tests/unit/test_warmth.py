"""Cold or warm, how cold, and why: the ring on its own, and the probes in the runtimes that run on a CPU."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_timed import current, gpu_span, gpu_timed
from gpu_timed.ports import Interval
from gpu_timed.record import NOT_SET, Missing
from gpu_timed.testing import FakeDevice, capture
from gpu_timed.warmth.probes import Probes
from gpu_timed.warmth.ring import Ring

MS = 1_000_000
ME = threading.get_ident()


def between(ring: Ring, began: int, *, first_call: bool = False, thread: int = ME) -> Any:
    """Return the verdict from *began* until now."""
    held = (Interval(began, ring.generation, thread),) if ring.generation != began else ()
    return ring.verdict(held, first_call=first_call)


def test_nothing_seen_is_warm_but_for_a_first_call() -> None:
    """A first call of a site is never warm: nobody has seen why it would be."""
    assert between(Ring(), 0) == ("warm", "hot", (), 0, ())
    assert between(Ring(), 0, first_call=True)[:2] == ("unknown", NOT_SET)


@pytest.mark.parametrize(
    ("tiers", "tier"),
    [
        (["initialised"], "initialised"),
        (["loaded", "initialised"], "loaded"),
        (["initialised", "built", "loaded"], "built"),
    ],
)
def test_the_coldest_tier_wins(tiers: list[Any], tier: str) -> None:
    """Built is colder than loaded, loaded colder than initialised; every cause is told, in order."""
    ring = Ring()
    ring.emit("before", "not mine", "built")
    began = ring.generation
    for each in tiers:
        ring.emit("probe", each, each)
    found = between(ring, began, first_call=True)
    assert (found.warmth, found.tier) == ("cold", tier)
    assert [cause.what for cause in found.causes] == tiers


def test_nested_durations_are_united_and_not_added() -> None:
    """A compile that contains another lasts as long as itself; what has no duration adds none."""
    ring = Ring()
    ring.emit("inner", "a", "built", 0)
    at = ring._events[-1].ended_ns
    ring._events.clear()
    for ended, lasted in ((at + 50 * MS, 20 * MS), (at + 60 * MS, 60 * MS), (at + 100 * MS, 30 * MS)):
        ring.emit("probe", "x", "built", lasted)
        ring._events[-1] = ring._events[-1]._replace(ended_ns=ended)
    ring.emit("probe", "no duration", "built")
    assert between(ring, 1).compile_ns == 90 * MS


def test_another_threads_compile_is_not_mine_and_a_workers_is_everybodys() -> None:
    """Python threads answer for themselves; a native thread works for whoever is open."""
    ring = Ring()
    other = threading.Thread(target=ring.emit, args=("probe", "elsewhere", "built"))
    other.start()
    other.join()
    assert between(ring, 0).warmth == "warm"
    import _thread

    done = threading.Event()

    def native() -> None:
        ring.emit("probe", "backward", "built")
        done.set()

    _thread.start_new_thread(native, ())  # Python's threading does not know it, as it does not know autograd's
    assert done.wait(5)
    assert [cause.what for cause in between(ring, 0).causes] == ["backward"]


def elsewhere(emit: Any, *arguments: Any) -> None:
    """Run *emit* on another thread of Python."""
    thread = threading.Thread(target=emit, args=arguments)
    thread.start()
    thread.join()


def test_what_other_threads_did_meanwhile_is_listed_whatever_this_one_was() -> None:
    """Beside a warm, an unknown and a cold verdict; not what ended before or after, and not mine."""
    ring = Ring()
    elsewhere(ring.emit, "probe", "before", "built")
    began = ring.generation
    elsewhere(ring.emit, "probe", "theirs", "built", 5)
    ended = ring.generation
    elsewhere(ring.emit, "probe", "after", "built")
    held = (Interval(began, ended, ME),)
    for first_call, warmth in ((False, "warm"), (True, "unknown")):
        found = ring.verdict(held, first_call=first_call)
        assert (found.warmth, [cause.what for cause in found.concurrent]) == (warmth, ["theirs"])
        assert found.causes == ()
    began = ring.generation
    ring.emit("probe", "mine", "loaded", 3)
    elsewhere(ring.emit, "probe", "theirs", "built", 5)
    found = between(ring, began)
    assert (found.tier, found.compile_ns) == ("loaded", 3)
    assert [[cause.what for cause in each] for each in (found.causes, found.concurrent)] == [["mine"], ["theirs"]]


def test_of_many_concurrent_causes_the_costliest_are_listed() -> None:
    """Eight, in the order in which they ended."""
    ring = Ring()
    for number in (5, 1, 9, 2, 8, 3, 7, 4, 6, 0):
        elsewhere(ring.emit, "probe", str(number), "built", number)
    assert [cause.what for cause in between(ring, 0).concurrent] == list("59283746")


def test_equal_causes_are_one_with_their_number_and_the_time_of_all() -> None:
    """Ten modules loaded in a call are no ten texts; what differs in its detail or tier stays apart."""
    ring = Ring()
    for detail in ("a", "a", "b", "a"):
        ring.emit("probe", "loaded", "initialised", NOT_SET, detail)
    ring.emit("probe", "loaded", "built", NOT_SET, "a")
    told = [(cause.what, cause.detail, cause.duration_ns) for cause in between(ring, 0).causes]
    assert told == [("loaded, 3 times", "a", NOT_SET), ("loaded", "b", NOT_SET), ("loaded", "a", NOT_SET)]
    ring = Ring()
    for lasted in (3, 4):
        ring.emit("probe", "x", "built", lasted)
        ring._events[-1] = ring._events[-1]._replace(ended_ns=1_000 * lasted)
    assert [(cause.what, cause.duration_ns) for cause in between(ring, 0).causes] == [("x, 2 times", 7)]


def test_telling_waits_for_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that tells may hold a lock that whoever holds the ring waits for; on one thread both may be the same."""
    from gpu_timed.warmth import ring as page

    monkeypatch.setattr(page, "_PATIENCE_S", 0.01)
    ring = Ring()
    raised: list[BaseException] = []

    def tell() -> None:
        try:
            ring.emit("probe", "x", "built")
        except TimeoutError as error:
            raised.append(error)

    with ring._lock:
        elsewhere(tell)
        ring.emit("probe", "on the same thread", "built")
    assert len(raised) == 1
    assert [cause.what for cause in between(ring, 0).causes] == ["on the same thread"]


def test_many_events_are_bounded_and_said() -> None:
    """The costliest causes are kept; what has fallen out of the ring leaves no false warm."""
    ring = Ring()
    for number in range(100):
        ring.emit("probe", str(number), "built", number)
    assert [cause.what for cause in between(ring, 0).causes] == [str(number) for number in range(84, 100)]
    ring.emit("probe", "mine", "built")
    began = ring.generation - 1
    for _ in range(3000):
        ring.generation += 1
        ring._events.append(ring._events[-1]._replace(generation=ring.generation, thread_id=-1))
    found = between(ring, began)
    assert (found.warmth, found.compile_ns) == ("unknown", Missing("overflow", "too many events to keep"))


def test_a_runtime_that_cannot_be_seen_makes_nobody_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler without a probe in this process, or a probe without its hook: unknown, not warm."""
    ring = Ring()
    assert between(ring, 0).warmth == "warm"
    ring.blind_to.add("sys")
    found = between(ring, 0)
    assert (found.warmth, found.compile_ns) == ("unknown", Missing("unwatched", "sys"))
    ring.blind_to.discard("sys")
    ring.blind_to.add("not.loaded")
    assert between(ring, 0).warmth == "warm"
    monkeypatch.setitem(sys.modules, "taichi", sys)
    assert between(ring, 0).warmth == "unknown"


def emit(*arguments: Any) -> None:
    """Tell the process's ring."""
    current._state.ring.emit("probe", *arguments)


def test_a_span_takes_what_happened_inside_it(device: FakeDevice) -> None:
    """Before and after are not in it; parent and child both are cold; causes reach the record."""
    inner = gpu_timed(lambda: emit("inside", "loaded", 5, "why"), name="inner", sync="deferred")

    @gpu_timed(name="outer")
    def outer() -> None:
        inner()

    with capture() as records:
        emit("before", "built")
        outer()
        emit("between", "built")
        with gpu_span("hot"):
            pass
        with gpu_span("hot"):
            pass
    told = sorted((record.name, record.warmth, record.tier, record.compile_ns) for record in records[:2])
    assert told == [("inner", "cold", "loaded", 5), ("outer", "cold", "loaded", 5)]
    assert [cause.detail for cause in records[0].causes] == ["why"]
    assert records[2].tier == NOT_SET  # another block: its first call
    assert records[2].first_call


def test_a_coroutine_takes_only_what_happened_while_it_ran(device: FakeDevice) -> None:
    """A neighbour's compile between two resumptions, on the same thread, is the neighbour's."""

    @gpu_timed
    async def one() -> None:
        await asyncio.sleep(0)

    @gpu_timed
    async def other() -> None:
        emit("compiled", "built")

    async def both() -> None:
        await one()
        await asyncio.gather(one(), other())

    with capture() as records:
        asyncio.run(both())
    told = [(record.name.rpartition(".")[2], record.warmth) for record in records]
    assert sorted(told) == [("one", "unknown"), ("one", "warm"), ("other", "cold")]
    assert [len(record.concurrent) for record in records if record.warmth == "warm"] == [1]


def test_what_a_coroutine_awaits_on_another_thread_is_listed_beside_it(device: FakeDevice) -> None:
    """It may have taken all of its time; what it compiled itself, before it and after it is not."""

    @gpu_timed
    async def handle(compiles: bool) -> None:
        if compiles:
            emit("its own", "built")
        await asyncio.to_thread(emit, "awaited", "loaded")
        await asyncio.sleep(0)
        await asyncio.to_thread(emit, "awaited too", "built")

    async def all_of_them() -> None:
        await handle(False)
        emit("between", "built")
        await handle(False)
        await handle(True)
        emit("after", "built")

    with capture() as records:
        asyncio.run(all_of_them())
    assert [record.warmth for record in records] == ["unknown", "warm", "cold"]
    assert [[cause.what for cause in record.concurrent] for record in records] == [["awaited", "awaited too"]] * 3
    assert [cause.what for cause in records[2].causes] == ["its own"]


def test_a_generator_that_moves_between_threads_keeps_its_causes(device: FakeDevice) -> None:
    """A server may take each item on another thread."""

    @gpu_timed
    def items() -> Iterator[int]:
        yield 1
        emit("compiled", "built")
        yield 2

    with capture() as records:
        running = items()
        next(running)
        thread = threading.Thread(target=next, args=(running,))
        thread.start()
        thread.join()
        running.close()
    assert [cause.what for cause in records[0].causes] == ["compiled"]


def test_switched_off_nothing_is_watched(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU_TIMED_WARMTH=0: no hook, and no claim."""
    monkeypatch.setenv("GPU_TIMED_WARMTH", "0")
    current.reset()
    f = gpu_timed(lambda: emit("inside", "built"), name="f")
    with capture() as records:
        f(), f()
    assert {record.warmth for record in records} == {"unknown"}
    assert current.probes() == {}


def test_a_probe_that_fails_never_reaches_the_compiler() -> None:
    """An exception in telling is counted; the compiler's hook returns."""
    current.tracer()
    current._state.ring.emit = None  # type: ignore[assignment,method-assign]
    module = type(sys)("torch._dynamo.utils")
    seen: list[Any] = []
    module.log_compilation_event = seen.append  # type: ignore[attr-defined]
    from gpu_timed.warmth.torch_compile import PROBES

    probes = current._state.probes
    assert probes is not None
    probes._attacher(PROBES[0])(module)
    module.log_compilation_event(type("M", (), {"duration_us": 1})())
    assert len(seen) == 1
    assert current.ledger().snapshot()["probe_torch.compile"] >= 1


def test_a_call_in_which_the_device_was_set_up_is_cold(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runtime did it; where torch's own probe says so, it is told once; no device is no cause."""

    @gpu_timed(name="f", sync="deferred")
    def f(does: Any) -> None:
        does()

    def torchs_own() -> None:
        current._state.ring.emit("cuda init", "CUDA initialised by torch", "initialised", 7)
        device.appear()

    def built() -> None:
        emit("compiled", "built", 9)
        device.appear()

    with capture() as records:
        for reason in ("not_initialised", "no_device"):
            device.disappear(reason)
            f(device.appear)
        device.disappear()
        f(lambda: None), f(torchs_own)
        device.disappear()
        f(built), f(lambda: None)
    told = [(record.warmth, record.tier, [cause.what for cause in record.causes]) for record in records]
    assert told == [
        ("cold", "initialised", ["device set up"]),
        ("warm", "hot", []),
        ("warm", "hot", []),
        ("cold", "initialised", ["CUDA initialised by torch"]),
        ("cold", "built", ["device set up", "compiled"]),
        ("warm", "hot", []),
    ]
    assert records[0].compile_ns == NOT_SET
    assert records[4].compile_ns == 9
    monkeypatch.setattr(device, "name", "cuda_event")
    with capture() as records:
        device.disappear()
        f(device.appear)
    assert [cause.what for cause in records[0].causes] == ["CUDA context created"]


SCRIPT = """
    import json, sys
    from gpu_timed import gpu_timed
    from gpu_timed.testing import capture
    gpu_timed(lambda: None, sync="deferred")()  # whoever compiles is imported after we are at work
    def show(records):
        print(json.dumps([[r.warmth, str(r.tier), r.first_call, [[c.probe, c.what, c.tier, c.detail, c.duration_ns]
              for c in r.causes], r.compile_ns if isinstance(r.compile_ns, int) else None] for r in records]))
"""


def run(body: str, **environment: str) -> list[list[Any]]:
    """Run *body* after SCRIPT in a fresh process; return the JSON lines it printed."""
    import json

    code = textwrap.dedent(SCRIPT) + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


@pytest.mark.timeout(240)
def test_inductor_is_built_then_loaded_in_a_second_process_and_hot_in_between(tmp_path: Path) -> None:
    """The same script twice with one cache directory; a new shape is a recompile with its reason; 1,000 hot calls."""
    pytest.importorskip("torch")
    body = """
        import torch
        f = gpu_timed(torch.compile(lambda x: torch.sin(x) + 1), name="f", sync="deferred")
        with capture() as records:
            f(torch.ones(8, 8)), f(torch.ones(8, 8)), f(torch.ones(4, 8)), f(torch.ones(4, 8))
        show(records)
        with capture() as records:
            for _ in range(1000): f(torch.ones(8, 8))
        show([r for r in records if (r.warmth, r.tier) != ("warm", "hot")])
    """
    for tier in ("built", "loaded"):
        calls, not_hot = run(body, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        assert [call[:3] for call in calls] == [
            ["cold", tier, True],
            ["warm", "hot", False],
            ["cold", tier, False],
            ["warm", "hot", False],
        ]
        assert not_hot == []
        (first,), (again,) = calls[0][3], calls[2][3]
        assert first[0] == again[0] == "torch.compile"
        assert "recompiled" in again[1]
        assert "size mismatch" in again[3]
        assert calls[0][4] > 1 * MS
        assert calls[1][4] == 0


def test_a_compile_on_another_thread_and_a_failing_one(tmp_path: Path) -> None:
    """Another thread's compile leaves an open span warm; a compile that fails is cold and says so."""
    pytest.importorskip("torch")
    calls, concurrent, failing = run(
        """
        import threading, torch
        compiled = torch.compile(lambda x: x + 1, backend="eager")
        go, done = threading.Event(), threading.Event()
        def other(): go.wait(); compiled(torch.ones(2)); done.set()
        threading.Thread(target=other).start()
        @gpu_timed
        def waits(again):
            if again: go.set(); assert done.wait(60)
        with capture() as records: waits(False), waits(True)
        show(records)
        print(json.dumps([[c.what for c in r.concurrent] for r in records]))
        def broken(gm, inputs): raise RuntimeError("no")
        g = gpu_timed(torch.compile(lambda x: x + 2, backend=broken), name="g")
        with capture() as records:
            try: g(torch.ones(2))
            except Exception: pass
        show(records)
        """
    )
    assert [call[0] for call in calls] == ["unknown", "warm"]
    assert [len(each) for each in concurrent] == [0, 1]
    assert "compiled" in concurrent[1][0]
    assert failing[0][:2] == ["cold", "built"]
    assert "failed to compile" in failing[0][3][0][1]


def test_numba_on_the_cpu_is_built_loaded_and_hot(tmp_path: Path) -> None:
    """Compiled, loaded from its cache in a second process, another type compiled; hot calls fire nothing."""
    pytest.importorskip("numba")
    (tmp_path / "held.py").write_text("import numba\n@numba.njit(cache=True)\ndef h(a): return a + 1\n")
    body = f"""
        sys.path.insert(0, {str(tmp_path)!r})
        import held
        f = gpu_timed(held.h, name="f", sync="deferred")
        with capture() as records: f(1), f(2), f(1.0), f(2.0)
        show(records)
    """
    for tier in ("built", "loaded"):
        (calls,) = run(body, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
        assert [call[1] for call in calls] == [tier, "hot", tier, "hot"]
        assert calls[2][3][0][:2] == ["numba", "h compiled" if tier == "built" else "h from the disk cache"]


@pytest.mark.timeout(240)
def test_what_numba_compiled_where_it_was_defined_is_no_cause_of_a_call(tmp_path: Path) -> None:
    """Signatures given to the decorator, compiled or from the cache: a first call nobody can explain, then hot ones.

    A ``@vectorize`` without signatures compiles in its calls, and finds what it compiled before on disk.
    """
    pytest.importorskip("numba")
    (tmp_path / "held.py").write_text(
        "import numba\n"
        "@numba.njit('int64(int64)', cache=True)\ndef eager(a): return a + 1\n"
        "@numba.njit(cache=True)\ndef inner(a): return a + 1\n"
        "@numba.vectorize(cache=True)\ndef ufunc(a): return inner(a) * 2\n"
    )
    body = f"""
        sys.path.insert(0, {str(tmp_path)!r})
        import numpy as np
        import held
        f = gpu_timed(held.eager, name="f", sync="deferred")
        with capture() as records: f(1), f(2), f(2)
        show(records)
        u = gpu_timed(lambda x: held.ufunc(x), name="u", sync="deferred")
        with capture() as records:
            for kind in ("i8", "i8", "f4", "f4"): u(np.ones(3, kind))
        show(records)
    """
    for tier in ("built", "loaded"):
        eager, ufunc = run(body, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
        assert [call[:2] for call in eager] == [["unknown", "Missing('not_set')"], ["warm", "hot"], ["warm", "hot"]]
        assert [call[1] for call in ufunc] == [tier, "hot", tier, "hot"], ufunc
        said = "ufunc compiled" if tier == "built" else "ufunc from the disk cache"
        assert ["numba vectorize", said] in [cause[:2] for cause in ufunc[0][3]]


def make_believe_driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a stand-in for Numba's driver module in its place, with the class whose method loads modules."""

    class Context:
        def create_module_image(self, image: str, setup: Any = None, teardown: Any = None) -> str:
            if image == "bad":
                raise RuntimeError("bad image")
            return f"module of {image}"

    made = type(sys)("numba.cuda.cudadrv.driver")
    made.Context = Context  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "numba.cuda.cudadrv.driver", made)
    return Context


def test_a_module_that_numba_loads_is_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a first launch that only loads: initialised; an error is the caller's, and nothing was loaded."""
    context = make_believe_driver(monkeypatch)
    plain = context.create_module_image
    current.tracer()
    began = current._state.ring.generation
    assert context().create_module_image("a", teardown=1) == "module of a"
    with pytest.raises(RuntimeError, match="bad image"):
        context().create_module_image("bad")
    found = between(current._state.ring, began)
    assert [(c.probe, c.what, c.tier) for c in found.causes] == [
        ("numba cuda load", "a module loaded on the device", "initialised")
    ]
    assert isinstance(found.compile_ns, int)
    current.reset()
    assert context.create_module_image is plain


def test_jax_is_built_and_hot() -> None:
    """XLA's compiles are seen through JAX's own monitoring."""
    pytest.importorskip("jax")
    (calls,) = run(
        """
        import jax, jax.numpy as jnp
        f = gpu_timed(jax.jit(lambda x: x * 2), name="f", sync="deferred")
        x, y = jnp.ones(3), jnp.ones(4)
        with capture() as records: f(x), f(x), f(y), f(y)
        show(records)
        """,
        JAX_PLATFORMS="cpu",
    )
    assert [call[1] for call in calls] == ["built", "hot", "built", "hot"]


def test_hooks_come_out_again() -> None:
    """After a reset every runtime is as it was, and a second start hooks in once."""
    numba = pytest.importorskip("numba.core.dispatcher")
    before = numba.Dispatcher.compile
    current.tracer()
    assert current.probes()["numba"] == "attached"
    assert numba.Dispatcher.compile is not before
    assert numba.Dispatcher.compile.__wrapped__ is before
    current.reset()
    assert numba.Dispatcher.compile is before
    current.tracer()
    current.tracer()
    assert numba.Dispatcher.compile.__wrapped__ is before
    current.reset()


def test_the_trace_says_why(exporter: Any, device: FakeDevice) -> None:
    """Warmth, tier, causes with their reason, and the compile time stand on the host span."""
    from gpu_timed import flush

    @gpu_timed(name="f")
    def f() -> None:
        emit("f recompiled", "built", 7, "size mismatch")
        elsewhere(emit, "g compiled", "built", 9, "theirs")

    f()
    assert flush(10)
    host = next(span for span in exporter.get_finished_spans() if span.name == "f")
    held = {key.removeprefix("gpu_timed."): value for key, value in host.attributes.items()}
    assert (held["warmth"], held["warmth.tier"], held["compile.duration_ns"]) == ("cold", "built", 7)
    assert held["warmth.causes"] == ("probe: f recompiled (size mismatch)",)
    assert held["warmth.concurrent"] == ("probe: g compiled (theirs)",)


def test_a_runtime_whose_hook_is_missing_makes_nobody_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version without the hook, or even without the module that would hold it: unknown, until a probe is attached."""
    import types

    ring, imports = Ring(), current.imports()
    for name in ("triton.knobs", "triton.runtime.jit", "numba.core.dispatcher"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    probes = Probes(ring, imports, lambda *_: None)
    try:
        before = between(ring, 0).warmth
        monkeypatch.setitem(sys.modules, "triton.runtime.jit", types.ModuleType("triton.runtime.jit"))
        assert (before, between(ring, 0).warmth) == ("warm", "unknown")
        assert probes.told()["triton"] == "no hook in this version: it has no triton.knobs"
        assert {probes.told()[name] for name in ("triton load", "numba")} == {"waiting"}
        knobs = types.ModuleType("triton.knobs")
        knobs.compilation = types.SimpleNamespace(listener=None)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
        imports.look_again()
        assert probes.state["triton"] == "attached"
        assert probes.state["triton load"].startswith("no hook")
        assert between(ring, 0).warmth == "warm"
        monkeypatch.setitem(sys.modules, "numba.core.dispatcher", types.ModuleType("numba.core.dispatcher"))
        imports.look_again()
        assert between(ring, 0).warmth == "unknown"
    finally:
        probes.close()
