"""Torch's probes one by one, on modules that look like torch's; and cuDNN's benchmark mode on a pretended device."""

from __future__ import annotations

import importlib
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_timed import current, gpu_span, gpu_timed
from gpu_timed.imports import ImportWatch
from gpu_timed.ports import Interval, Lasting, Launch
from gpu_timed.record import NOT_SET
from gpu_timed.testing import FakeDevice, capture
from gpu_timed.warmth import first_imports, torch_caches, torch_compile, torch_cuda, torch_tuning
from gpu_timed.warmth.probe import Probe, replace
from gpu_timed.warmth.ring import Ring

MS = 1_000_000


class Told:
    """Collects what a probe tells."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str, str]] = []
        self.timed: list[bool] = []
        self.lasting: list[Lasting] = []
        self.generation = 0

    def __call__(
        self,
        what: str,
        tier: str,
        duration_ns: Any = NOT_SET,
        detail: str = "",
        *,
        lasting: Any = None,
        undone: Any = (),
    ) -> None:
        self.generation += 1
        self.all.append((what, tier, detail))
        self.timed.append(isinstance(duration_ns, int))
        for each in undone:
            each.until = self.generation
        if lasting is not None:
            self.lasting.append(lasting)


def attach(probe: Probe, **held: Any) -> tuple[Any, Told, Callable[[], None]]:
    """Attach *probe* to a module that holds *held*."""
    module, told = types.ModuleType(probe.module), Told()
    vars(module).update(held)
    return module, told, probe.attach(module, told)


def metrics(compile_id: str, **held: Any) -> Any:
    return types.SimpleNamespace(compile_id=compile_id, duration_us=5, is_forward=True, **held)


LIMITS = {
    "recompile_limit (8)": {
        "fail_type": "Unsupported",
        "fail_reason": "Dynamo recompile limit exceeded\n  Explanation: … exceeding the recompile_limit cache size "
        "limit (currently set to 8). Excessive …\n  Hint: increasing torch._dynamo.config.recompile_limit",
    },
    "accumulated_recompile_limit (256)": {
        "fail_type": "Unsupported",
        "fail_reason": "… exceeding the accumulated_recompile_limit cache size limit (currently set to 256).",
    },
    "cache_size_limit": {"fail_type": "Unsupported", "fail_reason": "cache_size_limit reached"},
    "the recompile limit": {"fail_type": "FailOnRecompileLimitHit", "fail_reason": "Hard failure due to fullgraph"},
}


@pytest.mark.parametrize("which", LIMITS)
def test_each_wording_of_the_limit_is_understood_and_it_holds_until_frames_begin_anew(which: str) -> None:
    """The event of the limit has no name of its own; other frames' compiles do not lift it, a reset does."""
    module, told, _ = attach(torch_compile.PROBES[0], log_compilation_event=lambda _: None)
    log = module.log_compilation_event
    log(metrics("0/0", co_name="f"))
    log(metrics("3/0", co_name="g"))
    log(metrics("3/1", **LIMITS[which]))
    assert told.all[-1][:2] == (f"g [3/1] reached {which}: not compiled any more", "built")
    log(metrics("4/0", co_name="h"))
    log(metrics("0/1", co_name="f", recompile_reason="why\nand where"))
    assert told.all[-1] == ("f [0/1] recompiled", "built", "why")
    (limit,) = told.lasting
    assert (limit.note, limit.until) == ("compile_limit_reached", None)
    log(metrics("0/0", co_name="another"))
    assert limit.until == told.generation
    assert not limit.holds(told.generation)
    assert limit.holds(told.generation - 1)


def test_a_limit_that_is_reached_again_is_told_once() -> None:
    """Each call with other inputs that torch tries and gives up reaches it: on a span the last of them stands."""
    module, told, _ = attach(torch_compile.PROBES[0], log_compilation_event=lambda _: None)
    module.log_compilation_event(metrics("3/0", co_name="g"))
    for attempt in (1, 2, 3):
        module.log_compilation_event(metrics(f"3/{attempt}", **LIMITS["recompile_limit (8)"]))
    assert [limit.holds(told.generation) for limit in told.lasting] == [False, False, True]


def test_hits_misses_and_parts() -> None:
    """Any miss is a build; what was found beside it is said."""
    module, told, _ = attach(torch_compile.PROBES[0], log_compilation_event=lambda _: None)
    hit, miss = "inductor_fx_local_cache_hit_count", "inductor_fx_local_cache_miss_count"
    for held in ({hit: 1}, {miss: 1}, {hit: 1, miss: 1}, {}, {"aotautograd_remote_cache_hit_count": 1}):
        module.log_compilation_event(metrics("1/0", co_name="f", **held))
    assert [tier for _, tier, _ in told.all] == ["loaded", "built", "built", "built", "loaded"]
    assert "in part" in told.all[2][0]
    module.log_compilation_event(metrics("1/0", is_runtime=True, runtime_cudagraphify_time_us=7))
    assert told.all[-1] == ("CUDA Graph set up for backward [1/0]", "initialised", "")
    module.log_compilation_event(types.SimpleNamespace(compile_id="1/0", is_forward=False, co_name=None))
    assert told.all[-1][0] == "backward [1/0] compiled"


def test_others_in_the_same_slot_before_us_and_after_us() -> None:
    """Whoever wrapped before is called; whoever wraps after stays when we leave, and is called."""
    seen: list[str] = []

    def before(_: Any) -> str:
        seen.append("before")
        return "theirs"

    module, told, detach = attach(torch_compile.PROBES[0], log_compilation_event=before)
    ours = module.log_compilation_event

    def after(m: Any) -> Any:
        seen.append("after")
        return ours(m)

    module.log_compilation_event = after
    assert module.log_compilation_event(metrics("0/0", co_name="f")) == "theirs"
    assert (seen, len(told.all)) == (["after", "before"], 1)
    detach()
    assert module.log_compilation_event is after
    module.log_compilation_event = ours
    detach()
    assert module.log_compilation_event is before


def test_a_class_method_is_replaced_and_comes_back() -> None:
    """Bound by its class already, and called on an instance; a subclass's own stays its own."""

    class Owner:
        @classmethod
        def make(cls, x: int) -> tuple[str, int]:
            return cls.__name__, x

    raw = vars(Owner)["make"]
    undo = replace(Owner, "make", lambda original: lambda *args: (*original(*args), "ours"))
    assert Owner().make(1) == Owner.make(1) == ("Owner", 1, "ours")  # type: ignore[comparison-overlap]
    undo()
    assert vars(Owner)["make"] is raw


def test_a_capture_is_told_when_it_ends_and_a_replay_is_not() -> None:
    """With its duration; one that fails is told as well, and raises what it raised."""

    class CUDAGraph:
        def __init__(self, *, fails: bool = False) -> None:
            self.fails = fails

        def capture_begin(self, pool: Any = None) -> None: ...

        def capture_end(self) -> None:
            if self.fails:
                raise RuntimeError("operation not permitted when stream is capturing")

        def replay(self) -> None: ...

    module, told, detach = attach(torch_cuda.PROBES[0], CUDAGraph=CUDAGraph)
    graph = module.CUDAGraph()
    graph.capture_begin(pool=1)
    assert told.all == []
    graph.capture_end()
    for _ in range(1000):
        graph.replay()
    assert told.all == [("captured a CUDA graph", "initialised", "")]
    failing = module.CUDAGraph(fails=True)
    failing.capture_begin()
    with pytest.raises(RuntimeError, match="not permitted"):
        failing.capture_end()
    assert told.all[1:] == [("capture of a CUDA graph failed", "initialised", "")]
    assert told.timed == [True, True]
    detach()
    assert not hasattr(CUDAGraph.capture_end, "__wrapped__")


class Cuda:
    """What torch.cuda's first use looks like."""

    def __init__(self, *, up: bool = False) -> None:
        self.up, self.busy = up, False
        self.queue: list[Callable[[], None]] = []

    def is_initialized(self) -> bool:
        return self.up

    def lazy_call(self, then: Callable[[], None]) -> None:
        then() if self.up else self.queue.append(then)

    def lazy_init(self) -> None:
        if self.up or self.busy:
            return
        self.busy = True
        for then in self.queue:
            then()
        self.busy, self.up = False, True


def attach_first_use(cuda: Cuda) -> tuple[Any, Told, Callable[[], None]]:
    return attach(
        torch_cuda.PROBES[1], is_initialized=cuda.is_initialized, _lazy_call=cuda.lazy_call, _lazy_init=cuda.lazy_init
    )


def test_the_first_use_of_cuda_is_told_once_and_the_hook_goes() -> None:
    """With its duration where torch's function is looked up; without it where somebody kept the function."""
    cuda = Cuda()
    module, told, _ = attach_first_use(cuda)
    cuda.queue.append(module._lazy_init)  # a queued call comes back
    module._lazy_init()
    assert (told.all, told.timed) == ([("CUDA initialised by torch", "initialised", "")], [True])
    assert module._lazy_init == cuda.lazy_init  # nothing is left on a path that many calls take
    module._lazy_init()
    assert len(told.all) == 1

    cuda = Cuda()
    module, told, _ = attach_first_use(cuda)
    cuda.lazy_init()
    assert (len(told.all), told.timed) == (1, [False])
    module._lazy_init()
    assert len(told.all) == 1


def test_cuda_in_use_already_or_after_we_have_left_tells_nothing() -> None:
    """Nothing was initialised that we could have seen."""
    assert attach_first_use(Cuda(up=True))[1].all == []
    cuda = Cuda()
    module, told, detach = attach_first_use(cuda)
    detach()
    module._lazy_init()
    assert (cuda.up, told.all) == (True, [])


def test_a_runtime_imported_inside_a_call_is_told_and_one_that_is_there_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import's own thread and duration; an import that raises tells nothing, and raises."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "held_runtime.py").write_text("import time\ntime.sleep(0.001)\n")
    (tmp_path / "broken_runtime.py").write_text("1 / 0\n")
    monkeypatch.setattr(first_imports, "RUNTIMES", ("held_runtime", "broken_runtime", "json"))
    ring, imports = Ring(), ImportWatch(lambda *_: None)
    try:
        first_imports.watch(imports, ring)
        assert ring.generation == 0
        importlib.import_module("held_runtime")
        with pytest.raises(ZeroDivisionError):
            importlib.import_module("broken_runtime")
        importlib.import_module("held_runtime")
    finally:
        imports.close()
        sys.modules.pop("held_runtime", None)
    found = ring.verdict((Interval(0, ring.generation, threading.get_ident()),), first_call=True)
    assert [(cause.probe, cause.what, cause.tier) for cause in found.causes] == [
        ("import", "held_runtime imported", "initialised")
    ]
    assert isinstance(found.compile_ns, int)
    assert found.compile_ns >= MS


def test_caches_and_tuning_are_told() -> None:
    """Why a cache was passed by; which kernel was tuned; a coordinate descent with nothing to do is none."""

    class ChromiumEventLogger:
        def log_instant_event(self, event_name: str, time_ns: int, metadata: Any = None) -> str:
            return event_name

    module, told, _ = attach(torch_caches.PROBES[0], ChromiumEventLogger=ChromiumEventLogger)
    logger = module.ChromiumEventLogger()
    assert logger.log_instant_event("fx_graph_cache_hit", 1, {}) == "fx_graph_cache_hit"
    logger.log_instant_event("fx_graph_cache_bypass", 1, {"cache_bypass_reason": "frozen\nmore"})
    logger.log_instant_event("autograd_cache_bypass", 1, metadata=None)
    assert told.all == [
        ("Inductor's cache passed by", "built", "frozen"),
        ("AOTAutograd's cache passed by", "built", ""),
    ]

    class CachingAutotuner:
        inductor_meta, launchers = {"kernel_name": "triton_poi_add"}, (1, 2)

        def benchmark_all_configs(self) -> str:
            return "timings"

        def coordinate_descent_tuning(self, lasts: bool) -> None:
            if lasts:
                threading.Event().wait(0.001)

    class AlgorithmSelectorCache:
        @classmethod
        def make_benchmark_fn(cls, choices: Any) -> Any:
            return lambda each: dict.fromkeys(each, 1.0)

    module, told, _ = attach(torch_tuning.PROBES[0], CachingAutotuner=CachingAutotuner)
    tuner = module.CachingAutotuner()
    assert tuner.benchmark_all_configs() == "timings"
    tuner.coordinate_descent_tuning(lasts=False)
    tuner.coordinate_descent_tuning(lasts=True)
    assert [what for what, _, _ in told.all] == ["triton_poi_add tuned", "triton_poi_add tuned by coordinate descent"]
    assert told.all[0][1:] == ("built", "2 configurations")

    module, told, _ = attach(torch_tuning.PROBES[1], AlgorithmSelectorCache=AlgorithmSelectorCache)
    benchmark = module.AlgorithmSelectorCache().make_benchmark_fn(["a", "b"])
    assert told.all == []
    assert benchmark(["a", "b"]) == {"a": 1.0, "b": 1.0}
    assert told.all[0][:2] == ("2 choices of a kernel benchmarked", "built")


def test_what_lasts_is_said_of_later_calls_only_and_of_this_site_only(device: FakeDevice) -> None:
    """A call that came before it does not say it, even if it is read after it."""
    site, other = current.new_site("held"), current.new_site("other")
    site.lasting.append((1, Lasting("noted", "why")))
    with capture() as records:
        for each in (site, site, site, other):
            current.tracer().leave(current.enter(each))
    told = [(record.name, record.quality, record.mode_reason) for record in records]
    assert told == [("held", (), ""), *[("held", ("noted",), "why")] * 2, ("other", (), "")]


def test_of_much_that_lasts_some_is_said(device: FakeDevice) -> None:
    """Each of the parts that a function was split into may reach a limit: that is on every later span."""
    site = current.new_site("held")
    site.lasting.extend((1, Lasting("noted", f"why {index % 7}")) for index in range(9))
    with capture() as records:
        for _ in range(2):
            current.tracer().leave(current.enter(site))
    assert [record.mode_reason for record in records] == ["", "why 0; why 1; why 2; and 4 more"]


# -- cuDNN's benchmark mode -------------------------------------------------------------------------------


@pytest.fixture
def benchmark_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch with its flag on, as it can be on any machine."""
    torch: Any = pytest.importorskip("torch")
    current.tracer()
    torch.backends.cudnn.benchmark = True
    yield torch
    torch.backends.cudnn.benchmark = False


def test_each_new_shape_is_not_warm_while_cudnn_tunes_itself(device: FakeDevice, benchmark_on: Any) -> None:
    """Field case A8, and channels last, another dtype, a nested and a named tensor, another thread."""
    torch = benchmark_on
    f = gpu_timed(lambda x, *, more=None: device.launch(MS), name="f")
    with capture() as records:
        for h in (224, 224, 256, 256, 224):
            f(torch.empty(1, 3, h, h))
    assert [record.warmth for record in records] == ["unknown", "warm", "unknown", "warm", "warm"]
    new = "new_shape_cudnn_benchmark"
    assert [new in record.quality for record in records] == [True, False, True, False, False]
    x = torch.empty(1, 3, 8, 8)
    others: list[Callable[[], Any]] = [
        lambda: f(x),
        lambda: f(x.to(memory_format=torch.channels_last)),
        lambda: f(x.half()),
        lambda: f(torch.empty(200)[1:193].view(1, 3, 8, 8)),  # 4 bytes off
        lambda: f([{"a": x}, x]),
        lambda: f(x, more=x.half()),
    ]
    with capture() as records:
        for call in others:
            call(), call()
    assert [record.warmth for record in records] == ["unknown", "warm"] * len(others)
    with capture() as records:
        thread = threading.Thread(target=lambda: (f(x), f(x)))
        thread.start()
        thread.join()
        f(x)
        torch.backends.cudnn.benchmark = False
        f(torch.empty(9, 9))
    assert [record.warmth for record in records] == ["unknown", "warm", "warm", "warm"]


def test_inputs_that_cannot_be_seen_are_doubtful_and_not_called_new(device: FakeDevice, benchmark_on: Any) -> None:
    """A block, a call without tensors, and a tensor that refuses to be asked; and no doubt where nothing was marked."""
    torch = benchmark_on

    class Odd(torch.Tensor):  # type: ignore[misc,name-defined]
        @property
        def shape(self) -> Any:
            raise RuntimeError("none of your business")

    f = gpu_timed(lambda *_: device.launch(MS), name="f")
    odd = torch.empty(3).as_subclass(Odd)
    for call in (lambda: f(1, "text"), lambda: f(odd)):
        with capture() as records:
            call(), call()
        assert records[1].warmth == "warm"
        assert "inputs_unseen_cudnn_benchmark" in records[1].quality
    assert current.ledger().snapshot()["inputs_unreadable"] == 2
    with capture() as records:
        for _ in range(2):
            with gpu_span("block"):
                device.launch(MS)
    assert records[1].warmth == "warm"
    assert "inputs_unseen_cudnn_benchmark" in records[1].quality


def test_a_kernel_of_its_own_is_none_of_cudnns(device: FakeDevice, benchmark_on: Any) -> None:
    """What a launch takes tunes no convolution."""
    site = current.new_site("kernel")
    with capture() as records:
        for n in (1, 2, 3):
            opened = current.enter(site, (benchmark_on.empty(n),), launch=Launch("numba"))
            current.tracer().leave(opened)
    assert [(record.warmth, record.quality) for record in records[1:]] == [("warm", ())] * 2


def test_without_a_device_nothing_can_have_tuned_itself(benchmark_on: Any) -> None:
    """Marks on no device: the flag means nothing."""
    torch = benchmark_on
    f = gpu_timed(lambda _: None, name="f")
    with capture() as records:
        f(torch.empty(1)), f(torch.empty(2)), f(torch.empty(3))
    assert [(record.warmth, record.quality) for record in records[1:]] == [("warm", ())] * 2


def test_inputs_are_remembered_within_bounds(device: FakeDevice, benchmark_on: Any) -> None:
    """The oldest are forgotten; what was forgotten is new again."""
    torch = benchmark_on
    f = gpu_timed(lambda _: None, name="f", sync="deferred")
    with capture(1000) as records:
        for n in (*range(300), 299, 0):
            f(torch.empty(n))
    assert [record.warmth for record in records[-3:]] == ["unknown", "warm", "unknown"]
