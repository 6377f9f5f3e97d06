"""Which mode a call is to run in: values, rules, who goes before whom; and that measuring never changes it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import functools
import gc
import inspect
import pickle
import sys
import threading
import types
import weakref
from typing import Any

import pytest
from make_believe import soon

import gpu_timed as package
from gpu_timed import (
    Compile,
    CudaGraph,
    ModeError,
    configure,
    current,
    diagnose,
    flush,
    gpu_span,
    gpu_timed,
    shutdown,
    use_mode,
)
from gpu_timed.errors import ConfigurationError, MissingExtraError, NotCallableError
from gpu_timed.mode_values import EAGER, MODES, Ran, Rule, matches, mode_of, parse_rules, unmatched
from gpu_timed.modes import choice
from gpu_timed.modes.launcher import Launcher
from gpu_timed.record import Missing
from gpu_timed.testing import FakeDevice, capture


class Noting(Launcher):
    """A launcher that stands for those of torch: it runs the function, and tells that it did."""

    seen: list[tuple[str, str]]

    def run(self, opened: Any, arguments: Any, named: Any) -> Any:
        self.seen.append((self.name, self.mode.name))
        result = self.function(*arguments, **named)
        self.tell(opened, self.mode.name, "")
        return result


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The calls that a launcher was asked to run, as (site, mode)."""
    found: list[tuple[str, str]] = []
    kind = type("Here", (Noting,), {"seen": found})
    monkeypatch.setattr(choice, "Compiled", kind)
    monkeypatch.setattr(choice, "Graphed", kind)
    return found


def plain(x: int = 0) -> int:
    return x + 1


# -- values -----------------------------------------------------------------------------------------------


def test_a_name_is_shorthand_for_a_value_and_equal_values_are_the_same_object() -> None:
    for name in MODES:
        assert mode_of(name).name == name
        assert mode_of(name) is mode_of(mode_of(name))
    assert mode_of("cuda_graph") == CudaGraph()
    assert mode_of("reduce-overhead") == Compile("reduce-overhead")
    assert mode_of(CudaGraph(warmup=5)) is mode_of(CudaGraph(warmup=5))
    assert mode_of(CudaGraph(warmup=5)) is not mode_of(CudaGraph(warmup=6))
    assert [mode_of(name).uses_graphs for name in ("reduce-overhead", "max-autotune")] == [True, True]  # type: ignore[union-attr]
    assert not Compile("max-autotune-no-cudagraphs").uses_graphs


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CudaGraph(warmup=0), "warmup must be a whole number from 1 up"),
        (lambda: CudaGraph(max_graphs=True), "max_graphs"),
        (lambda: CudaGraph(max_graphs=10_001), "at most 10,000"),
        (lambda: CudaGraph(audit_every=0), "audit_every"),
        (lambda: CudaGraph(inputs="copies"), "did you mean 'copy'"),
        (lambda: CudaGraph(outputs="cloned"), "did you mean 'clone'"),
        (lambda: CudaGraph(strict=1), "strict must be True or False"),
        (lambda: CudaGraph(reset=3), "reset must be a function without arguments, not 3"),
        (lambda: CudaGraph(mutates=[]), "function of the call's arguments, that returns the tensors, not []"),
        (lambda: CudaGraph(max_state_bytes=-1), "max_state_bytes"),
        (lambda: Compile("reduce_overhead"), "did you mean 'reduce-overhead'"),
        (lambda: Compile(fullgraph=1), "fullgraph"),
        (lambda: Compile(dynamic="yes"), "dynamic"),
        (lambda: Compile(backend=3), "backend"),
        (lambda: Compile("max-autotune", backend="eager"), "leave out backend="),
        (lambda: mode_of("cuda-graph"), "did you mean 'cuda_graph'"),
        (lambda: mode_of(CudaGraph), "write CudaGraph()"),
        (lambda: mode_of(int), "unknown mode"),
        (lambda: use_mode(Compile), "write Compile()"),  # type: ignore[arg-type]
        (lambda: gpu_timed(mode=Compile)(plain), "write Compile()"),
        (lambda: mode_of(Compile(backend=_Unhashable())), "hashable"),
        (lambda: parse_rules("=cuda_graph"), "names no span"),
        (lambda: parse_rules("a=eagre"), "did you mean 'eager'"),
        (lambda: gpu_timed(mode="reduce_overhead")(plain), "did you mean 'reduce-overhead'"),
        (lambda: configure(mode="f=x"), "unknown mode 'x'"),
        (lambda: configure(mode="f=Compile(fullgraph=True)"), "options is given in code"),
        (lambda: configure(mode="f=cuda_graph[strict=1]"), "options is given in code"),
        (lambda: configure(mode="f=CudaGraph[warmup=1,strict=1]"), "options is given in code"),
        (lambda: configure(mode="CudaGraph[warmup=1,strict=1]"), "options is given in code"),
        (lambda: configure(mode="f:compile"), "by the name of the span: write 'f=compile'"),
        (lambda: configure(mode="pkg.m:f:compile"), "by the name of the span: write 'f=compile'"),
        (lambda: configure(mode="__main__:K.f=compile"), "by the name of the span: write 'K.f=compile'"),
        (lambda: configure(mode="__main__:f"), "by the name of the span: write it like decode*=cuda_graph"),
        (lambda: configure(mode="a*=cuda_graph;b=eager"), "separate with commas"),
        (lambda: configure(mode="a*=cuda_graph b=eager"), "separate with commas"),
        (lambda: configure(mode="a*=cuda_graph;b"), "separate with commas"),
        (lambda: configure(mode="eager;"), "separate with commas"),
        (lambda: configure(mode="a;b=eager"), "separate with commas"),
        (lambda: configure(mode="a b=eager"), "separate with commas"),
        (lambda: configure(mode="a=b=eager"), "separate with commas"),
        (lambda: use_mode("graph"), "unknown mode"),
        (lambda: use_mode("eager", match=""), "match must be"),
        (lambda: use_mode(lambda x: "eager"), "a function of the arguments goes to @gpu_timed(mode=…)"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_used_is_refused_by_name(make: Any, says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert says in str(caught.value)


class _Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, module: Any, inputs: Any) -> Any:
        return module


def test_rules_of_a_text() -> None:
    assert parse_rules(" decode*=cuda_graph, prefill=compile,eager ") == (
        Rule("decode*", CudaGraph()),
        Rule("prefill", Compile()),
        Rule("*", EAGER),
    )
    assert parse_rules("") == ()
    assert parse_rules("step_[ab] = eager,a?b=eager") == (Rule("step_[ab]", EAGER), Rule("a?b", EAGER))
    assert matches("decode*", "decode_step")
    assert not matches("decode*", "Decode")


# -- who goes before whom ---------------------------------------------------------------------------------


def test_the_span_says_what_ran_and_what_was_asked_for(device: FakeDevice, seen: list[Any]) -> None:
    step = gpu_timed(name="step", mode=CudaGraph(warmup=2))(plain)
    bare = gpu_timed(name="bare")(plain)
    with capture() as records:
        assert step(1) == 2
        assert bare(1) == 2
        with use_mode("eager"):
            assert step(1) == 2
            assert bare(1) == 2
    told = [(r.name, r.mode, r.mode_requested, r.mode_reason) for r in records]
    assert told[0] == ("step", "cuda_graph", "cuda_graph", "")
    assert told[1][1].reason == told[1][2].reason == "not_set"  # type: ignore[union-attr]
    assert told[2:] == [("step", "eager", "eager", ""), ("bare", "eager", "eager", "")]
    assert seen == [("step", "cuda_graph")]


def test_the_innermost_block_goes_before_the_variable_and_that_before_the_code(
    seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_TIMED_MODE", "a*=compile,ab=eager")
    first, second = gpu_timed(name="ab", mode="cuda_graph")(plain), gpu_timed(name="b", mode="cuda_graph")(plain)

    def both() -> list[str]:
        with capture() as records:
            first()
            second()
        return [str(record.mode) for record in records]

    assert both() == ["compile", "cuda_graph"]
    with use_mode("max-autotune", match="?"):
        assert both() == ["compile", "max-autotune"]
        with use_mode("reduce-overhead", match="*"):
            assert both() == ["reduce-overhead", "reduce-overhead"]
            with use_mode("eager", match="ab"):
                assert both() == ["eager", "reduce-overhead"]
        assert both() == ["compile", "max-autotune"]
    assert both() == ["compile", "cuda_graph"]
    configure(mode="b=eager")
    assert both() == ["cuda_graph", "eager"]
    configure(mode="")
    assert both() == ["cuda_graph", "cuda_graph"]


def test_a_function_of_the_arguments_says_the_mode_of_each_call(device: FakeDevice, seen: list[Any]) -> None:
    choose = lambda x: "cuda_graph" if x < 8 else None if x < 16 else "nonsense"
    step = gpu_timed(name="step", mode=choose)(plain)
    with capture() as records:
        assert [step(x) for x in (1, 9, 17)] == [2, 10, 18]
    assert [r.mode if isinstance(r.mode, str) else None for r in records] == ["cuda_graph", None, "eager"]
    assert records[2].mode_requested == "unknown"
    assert "unknown mode 'nonsense'" in records[2].mode_reason
    assert flush().counts["mode_raised"] == 1
    with use_mode("eager"), capture() as records:
        step(1)
    assert records[0].mode == "eager"


def test_a_function_of_modes_that_raises_is_named_once_for_each_site(
    device: FakeDevice, seen: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise KeyError

    def mute() -> str:
        raise MuteError

    one = gpu_timed(name="one", mode=lambda x: CudaGraph(warmup=x))(plain)
    two = gpu_timed(name="two", mode=lambda: 1 / 0)(plain)  # type: ignore[arg-type,return-value]
    three = gpu_timed(name="three", mode=lambda: "nonsense")(plain)
    four = gpu_timed(name="four", mode=mute)(plain)
    with capture() as records:
        for _ in range(2):
            assert [one(0), two(), three(), four()] == [1, 1, 1, 1]
    said = [each.getMessage() for each in caplog.records]
    assert said == [
        (
            "gpu_timed: one: its mode= raised ConfigurationError: warmup must be a whole number from 1 up, not 0; "
            "it runs eagerly. Said once."
        ),
        "gpu_timed: two: its mode= raised ZeroDivisionError: division by zero; it runs eagerly. Said once.",
        said[2],
        "gpu_timed: four: its mode= raised MuteError; it runs eagerly. Said once.",
    ]
    assert said[2].startswith(
        "gpu_timed: three: its mode= returned no mode: ConfigurationError: unknown mode 'nonsense'"
    )
    assert records[1].mode_reason == "its mode= raised ZeroDivisionError: division by zero"
    assert flush().counts["mode_raised"] == 8


def test_a_block_is_for_its_context_and_for_copies_of_it(device: FakeDevice, seen: list[Any]) -> None:
    """Not for another thread; for a task or a context that was copied inside, also when the block has ended."""
    step = gpu_timed(name="step")(plain)
    with use_mode("compile"):
        inside = contextvars.copy_context()
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        assert seen == []
    step()
    assert seen == []
    inside.run(step)
    assert seen == [("step", "compile")]


def test_a_decorator_is_a_block_for_the_length_of_each_call(device: FakeDevice, seen: list[Any]) -> None:
    step = gpu_timed(name="step")(plain)

    @use_mode("compile", match="st*")
    def both(x: int, *, deep: int = 0) -> int:
        """Documented."""
        return both(x, deep=deep - 1) if deep else step(x) + step(x)

    class Holder:
        @use_mode("compile")
        @use_mode("eager")
        @staticmethod
        def static() -> int:
            return step(1)

        @use_mode("cuda_graph")
        def method(self) -> int:
            return step(1)

    assert (both(1, deep=2), both.__name__, both.__doc__) == (4, "both", "Documented.")
    assert (Holder.static(), Holder().static(), Holder().method()) == (2, 2, 2)
    step()
    assert seen == [("step", "compile"), ("step", "compile"), ("step", "cuda_graph")]

    @use_mode("compile")
    def failing() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        failing()
    step()
    assert len(seen) == 3


def test_a_decorated_coroutine_has_its_mode_from_first_to_last_and_no_other_task_has(
    device: FakeDevice, seen: list[Any]
) -> None:
    step = gpu_timed(name="step")(plain)
    turn = asyncio.Event

    class Called:
        async def __call__(self, own: asyncio.Event, others: asyncio.Event) -> None:
            await work(own, others)

    async def work(own: asyncio.Event, others: asyncio.Event) -> None:
        own.set()
        await others.wait()
        step()

    async def together() -> None:
        block = use_mode("compile")
        for worker in (block(work), block(Called())):
            first, second, third = turn(), turn(), turn()
            async with asyncio.timeout(10) if hasattr(asyncio, "timeout") else contextlib.AsyncExitStack():
                # The one that begins first ends first: blocks of one stack would be left in the wrong order.
                await asyncio.gather(worker(first, second), worker(second, third), work(third, first))
                first.set()
                await worker(second, first)  # in this very task
            step()

    assert inspect.iscoroutinefunction(use_mode("compile")(work))
    asyncio.run(together())
    assert seen == [("step", "compile")] * 6


def test_one_block_may_be_entered_by_many_tasks_and_left_in_any_order_and_context(
    device: FakeDevice, seen: list[Any]
) -> None:
    """A request that ends before another does must not get an error of ours, nor end the other's mode."""
    block = use_mode("cuda_graph")
    f = gpu_timed(name="f")(lambda: None)
    ran: list[tuple[str, bool]] = []

    async def request(name: str, begins: asyncio.Event, ends: asyncio.Event) -> None:
        await begins.wait()
        with block:
            await ends.wait()
            f()
            ran.append((name, len(seen) == len(ran) + 1))
        f()

    async def serve() -> None:
        events = {key: asyncio.Event() for key in ("a", "b", "a ends", "b ends")}
        tasks = [asyncio.create_task(request(name, events[name], events[f"{name} ends"])) for name in "ab"]
        for key in ("a", "b", "a ends", "b ends"):
            events[key].set()
            for _ in range(5):
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    asyncio.run(serve())
    assert ran == [("a", True), ("b", True)]
    assert len(seen) == 2  # and none after the blocks

    @use_mode("compile")
    async def waits() -> None:
        await types.coroutine(lambda: (yield))()

    coroutine = waits()
    contextvars.copy_context().run(coroutine.send, None)
    coroutine.close()  # in another context
    with block, block:
        f()
    f()
    assert len(seen) == 3


def test_what_no_block_can_be_put_around_is_no_place_for_the_decorator() -> None:
    async def stream() -> Any:
        yield 1

    def values() -> Any:
        yield 1

    for target in (stream, values):
        with pytest.raises(ConfigurationError, match="around the calls inside it"):
            use_mode("eager")(target)
    with pytest.raises(ConfigurationError, match="cannot decorate a class"):
        use_mode("eager")(Counter)
    with pytest.raises(NotCallableError, match="not int"):
        use_mode("eager")(3)  # type: ignore[type-var]


def test_before_any_mode_nobody_is_asked(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hot path without a mode reads one flag of the site's and one of the process's."""
    step = gpu_timed(name="step")(plain)
    monkeypatch.setattr(choice.Switch, "run", lambda *_: pytest.fail("asked"))
    with capture() as records:
        step()
    assert len(records) == 1
    assert not current.modes.in_force


# -- measuring never changes the mode ---------------------------------------------------------------------


def test_unsampled_left_out_and_disabled_calls_run_in_their_mode(
    device: FakeDevice, seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    thinned = gpu_timed(name="thinned", mode="cuda_graph", every=3)(plain)
    with capture() as records:
        for _ in range(6):
            thinned()
    assert (len(records), len(seen)) == (2, 6)
    seen.clear()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    configure(exporter="none")
    gpu_timed(name="unsampled", mode="compile")(plain)()
    assert seen == [("unsampled", "compile")]


def test_a_disabled_decorator_with_a_mode_still_launches_in_it(
    seen: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GPU_TIMED_DISABLED", "1")
    monkeypatch.setenv("GPU_TIMED_MODE", "named=compile")
    assert gpu_timed(plain) is plain
    gpu_timed(name="own", mode="cuda_graph")(plain)()
    gpu_timed(name="named")(plain)()
    assert seen == [("own", "cuda_graph"), ("named", "compile")]
    with use_mode("compile"):
        gpu_timed(name="own", mode="eager")(plain)()
    assert seen[2:] == [("own", "compile")]
    assert "mode= of its own" in caplog.text


def test_inside_an_unsampled_parent_the_mode_holds(device: FakeDevice, seen: list[Any], exporter: Any) -> None:
    from opentelemetry import trace

    unsampled = trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=False, trace_flags=trace.TraceFlags(0)))
    step = gpu_timed(name="step", mode="compile")(plain)
    with trace.use_span(unsampled):
        assert step(1) == 2
    flush()
    assert seen == [("step", "compile")]
    assert exporter.get_finished_spans() == ()


# -- kinds ------------------------------------------------------------------------------------------------


class Counter:
    def __init__(self) -> None:
        self.total = 0

    @gpu_timed(name="method", mode="compile")
    def add(self, x: int) -> int:
        self.total += x
        return self.total

    @gpu_timed(name="static", mode="compile")
    @staticmethod
    def twice(x: int) -> int:
        return 2 * x


def test_methods_objects_and_copies_have_the_mode(device: FakeDevice, seen: list[Any]) -> None:
    counter = Counter()
    assert [counter.add(1), counter.add(2), Counter.twice(4)] == [1, 3, 8]
    timed = gpu_timed(name="object", mode="compile")(functools.partial(plain, 3))
    assert timed() == 4
    assert copy.copy(timed)() == 4
    assert [name for name, _ in seen] == ["method", "method", "static", "object", "object"]


def test_what_a_mode_holds_goes_with_it(device: FakeDevice, seen: list[Any]) -> None:
    """A model, that is, with its weights on the device."""

    class Model:
        def reset(self) -> None:
            """Put back what a call changes."""

        def step(self) -> None:
            """Work."""

    model = Model()
    step = gpu_timed(model.step, mode=CudaGraph(reset=model.reset))
    step()
    assert mode_of(CudaGraph(reset=model.reset)) is mode_of(CudaGraph(reset=model.reset))
    gone = weakref.ref(model)
    del model, step
    flush()

    def is_gone() -> bool:
        gc.collect()
        return gone() is None

    assert soon(is_gone)  # the thread that handed the span over may still be about to put it down


def test_one_launcher_for_a_function_and_a_mode_and_not_without_end(device: FakeDevice, seen: list[Any]) -> None:
    step = gpu_timed(name="kept", mode=lambda x: CudaGraph(warmup=1 + x % 100))(plain)
    site = next(held for held in current._state.sites._every if held.name == "kept")
    for _ in range(3):
        step(5)
    assert len(site.launchers) == 1
    for x in range(100):
        step(x)
    assert len(site.launchers) == choice._MOST_LAUNCHERS


def pickled(x: int = 0) -> int:
    return x


TIMED = gpu_timed(name="pickled", mode=CudaGraph(max_graphs=2))(functools.partial(pickled, 3))


def test_a_pickled_object_keeps_its_mode_and_the_switch_is_that_of_the_process(
    device: FakeDevice, seen: list[Any]
) -> None:
    found = pickle.loads(pickle.dumps(TIMED))
    assert found() == 3
    assert seen == [("pickled", "cuda_graph")]
    assert pickle.loads(pickle.dumps(current.door)) == current.door


def test_what_suspends_is_refused_where_it_is_decorated_and_says_so_where_it_is_not(
    device: FakeDevice, seen: list[Any]
) -> None:
    async def coroutine() -> int:
        return 7

    def generator() -> Any:
        yield 7

    for target in (coroutine, generator):
        with pytest.raises(ConfigurationError, match="Decorate the function that it calls"):
            gpu_timed(mode="cuda_graph")(target)
        gpu_timed(mode="eager")(target)
    timed = gpu_timed(name="c")(coroutine)
    with capture() as records, use_mode("cuda_graph"):
        assert asyncio.run(timed()) == 7  # type: ignore[arg-type]
        assert list(gpu_timed(name="g")(generator)()) == [7]
    assert [(r.name, r.mode, r.mode_requested) for r in records] == [
        ("c", "eager", "cuda_graph"),
        ("g", "eager", "cuda_graph"),
    ]
    assert "suspended now and then" in records[0].mode_reason
    assert flush().counts["mode_not_honoured"] == 2
    with capture() as records, use_mode(CudaGraph(strict=True)), pytest.raises(ModeError, match="g cannot run as"):
        list(gpu_timed(name="g")(generator)())
    assert records[0].status == "error"
    assert isinstance(records[0].mode, Missing)
    assert (records[0].mode.reason, records[0].mode_requested) == ("not_run", "cuda_graph")
    assert seen == []


def test_a_block_of_code_has_no_mode(device: FakeDevice, seen: list[Any]) -> None:
    with capture() as records, use_mode("compile"), gpu_span("block"):
        pass
    assert not isinstance(records[0].mode, str)


# -- the user's program comes first -----------------------------------------------------------------------


def test_an_exception_is_the_users_and_a_fault_of_ours_is_not_felt(
    device: FakeDevice, seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing() -> None:
        raise KeyError("mine")

    with capture() as records, pytest.raises(KeyError, match="mine"):
        gpu_timed(name="failing", mode="compile")(failing)()
    assert records[0].status == "error"
    monkeypatch.setattr(choice, "Compiled", lambda *_: 1 / 0)
    assert gpu_timed(name="other", mode="compile")(plain)(1) == 2
    assert flush().counts["mode"] == 1


def test_what_is_not_honoured_is_said_once_and_counted(device: FakeDevice, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        current.modes.note("step", "cuda_graph", "no CUDA device")
    assert caplog.text.count("step was asked to run as cuda_graph and does not: no CUDA device") == 1
    current.modes.note("step", "max-autotune", "no CUDA device")  # two modules of one class have one name
    assert caplog.text.count("step was asked to run as max-autotune and does not: no CUDA device") == 1
    assert flush().counts["mode_not_honoured"] == 4


def test_a_launcher_that_is_strict_raises_what_the_span_says_too(caplog: pytest.LogCaptureFixture) -> None:
    site = current.new_site("step")
    launcher = Noting(plain, site, CudaGraph(strict=True), current.modes)
    opened = types.SimpleNamespace(ran=None)
    with pytest.raises(ModeError, match="step cannot run as cuda_graph: why"):
        launcher.eagerly(opened, (), {}, "why")
    assert opened.ran == Ran("", "cuda_graph", "why")
    assert caplog.text == ""  # the error says it
    assert "mode_not_honoured" not in flush().counts  # nothing ran
    Noting(plain, site, CudaGraph(), current.modes).eagerly(opened, (), {}, "why")
    assert "step was asked to run as cuda_graph and does not: why" in caplog.text
    assert issubclass(ModeError, package.GpuTimedError)


def test_without_torch_a_mode_of_torchs_is_refused_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"gpu-timed\[torch\]"):
        gpu_timed(mode="compile")(plain)
    gpu_timed(mode="eager")(plain)


def test_the_doctor_names_a_mode_that_no_span_has(device: FakeDevice) -> None:
    configure(mode="decode*=eager,prefil=compile")
    gpu_timed(name="decode 1")(plain)(1)
    gpu_timed(name="prefill")(plain)(1)
    found = [finding for finding in diagnose().section("process").findings if finding.key.startswith("mode.")]
    assert [finding.key for finding in found] == ["mode.prefil"]
    assert found[0].level == "warning"


def test_a_mode_that_no_span_had_is_said_once_at_the_end(device: FakeDevice, caplog: pytest.LogCaptureFixture) -> None:
    configure(mode="decode*=eager,prefil=compile,prefil=eager,gon?=eager")
    assert unmatched(parse_rules("a=eager"), ()) == ()  # nothing is decorated: there is no name to compare with
    kept = [gpu_timed(name="decode 1")(plain), gpu_timed(name="prefill")(plain)]
    gpu_timed(name="gone")(plain)(1)
    kept[0](1)
    flush()
    assert "prefil" not in caplog.text  # it may come yet
    for _ in range(2):
        shutdown()
    said = [each.getMessage() for each in caplog.records if "a mode was given" in each.getMessage()]
    assert len(said) == 1
    assert "'prefil'" in said[0]


def test_a_block_for_a_span_that_there_was_none_of_is_said_once_at_the_end(
    device: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    timed = gpu_timed(name="decode 1")(plain)
    for match in ("decoed", "decode*", "*", "decoed"):
        with use_mode("eager", match=match):
            timed(1)
    for _ in range(2):
        shutdown()
    said = [each.getMessage() for each in caplog.records if "a mode was given" in each.getMessage()]
    assert len(said) == 1
    assert "'decoed' (use_mode(match=…))" in said[0]


def test_a_block_keeps_no_mode_alive(device: FakeDevice) -> None:
    """A ``reset=`` of a model, for one request."""

    class Model:
        def reset(self) -> None: ...

    model = Model()
    with use_mode(CudaGraph(reset=model.reset), match="tenant*"):
        gpu_timed(name="another")(plain)(1)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
