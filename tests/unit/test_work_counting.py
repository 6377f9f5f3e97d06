"""``work="count"``: torch's own counter on real torch without a GPU, with device times from a fake device."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider, sampling
from opentelemetry.trace import set_tracer_provider

from gpu_timed import Missing, Record, Work, flush, gpu_span, gpu_timed
from gpu_timed.callables import counting
from gpu_timed.callables.counting import MOST_SIGNATURES, signature_of
from gpu_timed.testing import FakeDevice, capture

torch = pytest.importorskip("torch")

MS = 1_000_000


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No peaks of this machine; and as if nobody had compiled anything before: other tests of this process have."""
    monkeypatch.setenv("GPU_TIMED_CACHE_DIR", str(tmp_path))
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None:
        monkeypatch.setattr(dynamo, "cached_backends", {})


@pytest.fixture(autouse=True)
def _no_mode_is_left() -> Any:
    """Whatever happens, no dispatch mode of ours stays on the thread."""
    yield
    assert torch._C._len_torch_dispatch_stack() == 0


def counted(device: FakeDevice, work: Any, *args: Any, calls: int = 1) -> list[Record]:
    """Call *work* some times, each taking the device a millisecond; return the records."""

    def run(*given: Any) -> Any:
        device.launch(MS)
        return work(*given)

    with capture() as records:
        timed = gpu_timed(name="w", work="count")(run)
        for _ in range(calls):
            timed(*args)
    return records


def flops(record: Record) -> Any:
    """Return what was counted, or why nothing was."""
    return record.work if isinstance(record.work, Missing) else record.work.flops


def test_a_product_is_2mnk_and_is_counted_once(device: FakeDevice) -> None:
    """The first call is counted and says so; the later ones of the same shapes use it, and are as they were."""
    a, b = torch.randn(3, 5), torch.randn(5, 7)
    records = counted(device, lambda x, y: x @ y, a, b, calls=3)
    assert [flops(record) for record in records] == [2 * 3 * 5 * 7] * 3
    assert [record.quality for record in records] == [("flops_counted",), (), ()]
    assert records[1].work.flops_per_s == pytest.approx(2 * 3 * 5 * 7 * 1e3)


def test_the_counter_runs_in_the_first_call_only(device: FakeDevice, monkeypatch) -> None:
    """Of each signature: three shapes, three counts."""
    from gpu_timed.callables import torch_flops

    made = []
    real = torch_flops.TorchCounting
    monkeypatch.setattr(torch_flops, "TorchCounting", lambda: made.append(1) or real())
    with capture() as records:
        timed = gpu_timed(name="w", work="count")(lambda x: x @ x)
        for size in (2, 3, 2, 4, 3, 2):
            timed(torch.ones(size, size))
    assert [flops(record) for record in records] == [2 * size**3 for size in (2, 3, 2, 4, 3, 2)]
    assert len(made) == 3


@pytest.mark.parametrize("grad", [True, False])
def test_modules_convolutions_and_gradients(device: FakeDevice, grad: bool) -> None:
    """A network's layers are counted as torch counts them, with and without gradients, backwards too."""
    from torch.utils.flop_counter import FlopCounterMode

    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 6 * 6, 10))
    x = torch.randn(2, 3, 8, 8)

    def step(model: Any, batch: Any) -> Any:
        with torch.set_grad_enabled(grad):
            out = model(batch).sum()
            if grad:
                out.backward()
            return out

    with FlopCounterMode(display=False) as truth:
        step(net, x)
    (record,) = counted(device, step, net, x)
    forward = 2 * 2 * 6 * 6 * 8 * 3 * 9 + 2 * 2 * 288 * 10
    assert flops(record) == truth.get_total_flops()
    assert flops(record) == forward if not grad else flops(record) > 2 * forward


def test_the_result_is_the_same_and_so_is_the_exception(device: FakeDevice) -> None:
    """Counted or not, bit for bit; what the function raises comes out as it is, and nothing is kept of that call."""
    x = torch.randn(16, 16)
    plain = torch.softmax(x @ x, 0)
    timed = gpu_timed(name="w", work="count")(lambda v, fail: torch.softmax(v @ v, 0) if not fail() else 1 / 0)
    failing = [True]
    error = ZeroDivisionError
    with capture() as records:
        with pytest.raises(error):
            timed(x, failing.pop)
        failing += [False, False]
        first, second = timed(x, failing.pop), timed(x, failing.pop)
    assert torch.equal(first, plain)
    assert torch.equal(second, plain)
    assert [flops(record) for record in records] == [Missing("not_counted", "the call raised"), 2 * 16**3, 2 * 16**3]
    assert [record.quality for record in records] == [("flops_counted",), ("flops_counted",), ()]
    assert records[0].status == "error"


def test_no_operation_that_counts_is_missing_and_no_zero(device: FakeDevice) -> None:
    """Elementwise work, or none: torch counts nothing there, and that is no 0."""
    for work in (lambda v: v + 1, lambda v: None):
        records = counted(device, work, torch.ones(4), calls=2)
        assert {flops(record).reason for record in records} == {"not_counted"}
        assert "no operation that it counts" in flops(records[0]).detail


def test_decorated_functions_inside_each_other_count_their_own(device: FakeDevice) -> None:
    """The outer has the inner's operations too; both are counted in the same call."""
    inner = gpu_timed(name="inner", work="count")(lambda x: x @ x)
    outer = gpu_timed(name="outer", work="count")(lambda x: inner(x) @ x)
    with capture() as records:
        outer(torch.ones(4, 4))
        outer(torch.ones(4, 4))
    found = [(record.name, flops(record)) for record in records]
    assert sorted(found) == [("inner", 128)] * 2 + [("outer", 256)] * 2


def test_threads_count_their_own_calls_only(device: FakeDevice) -> None:
    """What another thread computes meanwhile is not in it."""
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        inside.wait(10)
        torch.ones(64, 64) @ torch.ones(64, 64)
        done.set()

    def work(x: Any) -> Any:
        inside.set()
        assert done.wait(10)
        return x @ x

    thread = threading.Thread(target=other)
    thread.start()
    (record,) = counted(device, work, torch.ones(4, 4))
    thread.join()
    assert flops(record) == 128


def test_modules_of_other_threads_get_no_hooks(device: FakeDevice) -> None:
    """Torch's own way to tell modules apart would put hooks on every module of the process."""
    from torch.nn.modules import module

    seen = []

    def work(x: Any) -> Any:
        seen.append((len(module._global_forward_pre_hooks), len(module._global_forward_hooks)))
        return x @ x

    counted(device, work, torch.ones(2, 2))
    assert seen == [(0, 0)]


# -- what cannot be counted -------------------------------------------------------------------------------


def in_a_process_of_its_own(code: str) -> str:
    """Run *code* where nothing was compiled before; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PRELUDE = """
        import sys, torch
        from gpu_timed import gpu_timed
        from gpu_timed.testing import FakeDevice, capture, use_device
        a = torch.randn(8, 8)
"""


def test_compiled_functions_are_not_counted_and_compile_as_ever() -> None:
    """Torch's counter alone keeps Dynamo from compiling what is called first inside it, for good."""
    told = in_a_process_of_its_own(f"""{PRELUDE}
        from torch._dynamo.utils import counters
        f = torch.compile(lambda x: torch.relu(x @ x), backend="eager")
        timed = gpu_timed(name="w", work="count")(lambda x: f(x) @ x)
        with use_device(FakeDevice()), capture() as records:
            timed(a)
            timed(a)
        print([record.work.reason for record in records], dict(counters["frames"]), [r.quality for r in records])
        print(records[0].work.detail)
    """)
    assert told.startswith("['not_counted', 'not_counted'] {'total': 1, 'ok': 1} [(), ()]")
    assert "torch.compile is in use" in told


def test_what_is_compiled_inside_the_counted_call_compiles_too() -> None:
    """A model that compiles itself on its first call does so, is run compiled, and its count is not used."""
    told = in_a_process_of_its_own(f"""{PRELUDE}
        held = []
        def work(x):
            if not held:
                held.append(torch.compile(lambda x: torch.relu(x @ x), backend="eager"))
            return held[0](x) @ x
        timed = gpu_timed(name="w", work="count")(work)
        with use_device(FakeDevice()), capture() as records:
            results = [timed(a) for _ in range(3)]
        from torch._dynamo.utils import counters
        print([record.work.reason for record in records], dict(counters["frames"]))
        print([torch.equal(result, torch.relu(a @ a) @ a) for result in results])
    """)
    assert told.splitlines() == ["['not_counted', 'not_counted', 'not_counted'] {'total': 1, 'ok': 1}", str([True] * 3)]


def test_counting_imports_no_compiler() -> None:
    """Torch's counter alone imports Dynamo, for seconds, in the first call."""
    told = in_a_process_of_its_own(f"""{PRELUDE}
        with use_device(FakeDevice()), capture() as records:
            gpu_timed(name="w", work="count")(lambda x: x @ x)(a)
        print(records[0].work.flops, "torch._dynamo" in sys.modules)
    """)
    assert told.split() == ["1024", "False"]


def test_calls_under_another_dispatch_mode_are_left_alone(device: FakeDevice) -> None:
    """Not counted, and not kept: the next call outside of it is."""
    from torch.utils.flop_counter import FlopCounterMode

    timed = gpu_timed(name="w", work="count")(lambda x: x @ x)
    with capture() as records:
        with FlopCounterMode(display=False) as theirs:
            timed(torch.ones(4, 4))
        timed(torch.ones(4, 4))
    assert theirs.get_total_flops() == 128
    assert "another dispatch mode" in flops(records[0]).detail
    assert flops(records[1]) == 128


def test_a_mode_that_the_call_leaves_on_stays_on(device: FakeDevice) -> None:
    """User code that enters a mode and does not leave it keeps it; ours goes from under it."""
    from torch.utils.flop_counter import FlopCounterMode

    theirs = FlopCounterMode(display=False)

    def work(x: Any) -> Any:
        theirs.__enter__()
        return x @ x

    (record,) = counted(device, work, torch.ones(4, 4))
    assert flops(record) == 128
    assert torch._C._len_torch_dispatch_stack() == 1
    torch.ones(4, 4) @ torch.ones(4, 4)
    theirs.__exit__(None, None, None)
    assert theirs.get_total_flops() == 256


def test_operators_from_elsewhere_make_the_count_missing(device: FakeDevice) -> None:
    """A custom operator has no formula: a figure without it would be too low."""
    from torch import library

    custom_op = library.custom_op

    @custom_op("gpu_timed_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    (record,) = counted(device, lambda x: twice(x) @ x, torch.ones(4, 4))
    assert flops(record).reason == "not_counted"
    assert "gpu_timed_test" in flops(record).detail


def test_lengths_are_not_read_back(device: FakeDevice) -> None:
    """A formula that looks into a tensor of lengths is not asked: on a GPU it would wait for it."""
    from torch import library
    from torch.utils import flop_counter

    asked = []
    with library._scoped_library("gpu_timed_test2", "FRAGMENT") as operators:
        operators.define("attend(Tensor q, Tensor lengths) -> Tensor")
        operators.impl("attend", lambda q, lengths: q.clone(), "CPU")
        attend = torch.ops.gpu_timed_test2.attend
        flop_counter.register_flop_formula(attend, get_raw=True)(lambda *_, **__: asked.append(1) or 5)
        try:
            (record,) = counted(device, attend, torch.ones(4, 4), torch.ones(4, dtype=torch.int32))
        finally:
            del flop_counter.flop_registry[attend]
    assert asked == []
    assert "different lengths" in flops(record).detail


def test_captured_calls_are_not_counted(device: FakeDevice) -> None:
    """Nothing is counted while a stream is captured, nor kept."""
    timed = gpu_timed(name="w", work="count")(lambda x: x @ x)
    with capture() as records:
        with device.capture():
            timed(torch.ones(4, 4))
        timed(torch.ones(4, 4))
    assert "captured" in flops(records[0]).detail
    assert flops(records[1]) == 128


def test_coroutines_and_generators_are_not_counted(device: FakeDevice) -> None:
    """A mode would be on for others while they are suspended; the call itself is as ever."""

    async def coroutine(x: Any) -> Any:
        await asyncio.sleep(0)
        return x @ x

    def generator(x: Any) -> Any:
        yield x @ x
        assert torch._C._len_torch_dispatch_stack() == 0
        yield x @ x

    with capture() as records:
        asyncio.run(gpu_timed(name="c", work="count")(coroutine)(torch.ones(4, 4)))
        steps = gpu_timed(name="g", work="count")(generator)(torch.ones(4, 4))
        next(steps)
        assert torch._C._len_torch_dispatch_stack() == 0
        assert len(list(steps)) == 1
    assert len(records) == 2
    assert all("suspended" in flops(record).detail for record in records)


def test_a_counter_is_not_begun_again_for_calls_that_come_to_no_count(device: FakeDevice, monkeypatch) -> None:
    """A coroutine is never counted, a generator once; a call that always raises some times, and then no more."""
    from gpu_timed.callables import torch_flops

    made: list[str] = []
    real = torch_flops.TorchCounting
    monkeypatch.setattr(torch_flops, "TorchCounting", lambda: made.append("") or real())

    async def coroutine(x: Any) -> Any:
        return x @ x

    def generator(x: Any) -> Any:
        yield x @ x

    x = torch.ones(2, 2)
    with capture() as records:
        for timed in (gpu_timed(name="c", work="count")(coroutine), gpu_timed(name="g", work="count")(generator)):
            for _ in range(3):
                asyncio.run(timed(x)) if asyncio.iscoroutinefunction(timed) else list(timed(x))
    assert len(made) == 1
    assert {flops(record).reason for record in records} == {"not_counted"}
    assert [record.quality for record in records[4:]] == [(), ()]
    made.clear()
    failing = gpu_timed(name="f", work="count")(lambda v: v @ v / 0 if v is None else 1 / 0)
    for _ in range(40):
        with pytest.raises(ZeroDivisionError):
            failing(x)
    assert len(made) == counting.MOST_FAILURES


def test_functions_without_torch_say_so(device: FakeDevice, monkeypatch) -> None:
    """Where torch is not loaded nothing is counted, and torch is not imported for it."""
    monkeypatch.delitem(sys.modules, "torch")
    (record,) = counted(device, lambda: None)
    assert "torch is not loaded" in flops(record).detail


def test_calls_that_are_not_recorded_are_not_counted(device: FakeDevice, monkeypatch) -> None:
    """Unsampled, thinned and disabled calls run without a counter."""
    monkeypatch.setattr(counting.Counter, "begin", lambda *_: pytest.fail("begun"))
    set_tracer_provider(TracerProvider(sampler=sampling.ALWAYS_OFF, shutdown_on_exit=False))
    gpu_timed(name="w", work="count")(lambda x: x @ x)(torch.ones(2, 2))


def test_a_fault_of_the_counter_is_counted_and_not_felt(device: FakeDevice, monkeypatch) -> None:
    """As it begins or ends: the call returns what it would, and is timed."""
    from gpu_timed.callables import torch_flops

    real = torch_flops.TorchCounting.stop

    def stop(self: Any, spoilt: Any) -> Any:
        real(self, spoilt)
        raise ValueError("broken")

    monkeypatch.setattr(torch_flops.TorchCounting, "stop", stop)
    (record,) = counted(device, lambda x: x @ x, torch.ones(2, 2))
    assert (flops(record).reason, record.device_ns, record.status) == ("not_counted", MS, "ok")
    monkeypatch.setattr(torch_flops, "why_not", lambda: 1 / 0)
    (record,) = counted(device, lambda x: x @ x, torch.ones(2, 2))
    assert (flops(record).reason, record.device_ns, record.status) == ("not_counted", MS, "ok")
    assert flush().counts["counting"] == 2


def test_what_the_call_says_of_itself_stands_above_the_count(device: FakeDevice) -> None:
    """``set_work`` inside a block inside: the block's own; the count of the function stays the function's."""

    def work(x: Any) -> Any:
        with gpu_span("inside") as span:
            span.set_work(Work(flops=7))
            return x @ x

    with capture() as records:
        gpu_timed(name="w", work="count")(work)(torch.ones(4, 4))
    assert [(record.name, flops(record)) for record in records] == [("inside", 7), ("w", 128)]


# -- the signature ----------------------------------------------------------------------------------------


class Batch:
    """Holds tensors, as requests do."""

    def __init__(self, x: Any, name: str = "") -> None:
        self.x, self.name = x, name


@dataclasses.dataclass(slots=True)
class Slotted:
    """The same without a dictionary."""

    x: Any


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.ones(2, 3), torch.zeros(2, 3), True),
        (torch.ones(2, 3), torch.ones(3, 2), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (3, 4, False),
        (True, 1, False),
        ("a", "b", False),
        (None, 0, False),
        (0.5, 0.7, True),
        ([torch.ones(2)], [torch.ones(3)], False),
        ([torch.ones(2)], [torch.ones(2)], True),
        ([torch.ones(2)], (torch.ones(2),), False),
        ([[1], 2], [[1, 2]], False),
        ({"a": torch.ones(2)}, {"a": torch.ones(3)}, False),
        ({"a": 1}, {"b": 1}, False),
        (Batch(torch.ones(2)), Batch(torch.ones(3)), False),
        (Batch(torch.ones(2)), Batch(torch.zeros(2)), True),
        (Slotted(torch.ones(2)), Slotted(torch.ones(3)), False),
        (Slotted(torch.ones(2)), Slotted(torch.ones(2)), True),
    ],
)
def test_what_tells_calls_apart(one, other, same) -> None:
    """Shapes, dtypes, whole numbers, texts and flags, at any depth; not values, nor numbers with a fraction."""
    assert (signature_of((one,), {})[0] == signature_of((other,), {})[0]) is same
    assert (signature_of((), {"x": one})[0] == signature_of((), {"x": other})[0]) is same
    assert signature_of((one,), {})[0] != signature_of((), {"x": one})[0]


def test_modules_are_told_apart_by_identity_and_forgotten_with_it(device: FakeDevice) -> None:
    """Two layers of one class and other sizes, also where the second takes the first one's place in memory."""
    timed = gpu_timed(name="w", work="count")(lambda layer, x: layer(x))
    with capture() as records:
        for width in (2, 3, 4):
            timed(torch.nn.Linear(8, width, bias=False), torch.ones(1, 8))
    assert [flops(record) for record in records] == [2 * 8 * width for width in (2, 3, 4)]


def test_a_method_of_a_module_is_counted_for_each_module(device: FakeDevice) -> None:
    """``self`` is an argument."""

    class Layer(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(8, width, bias=False)

        @gpu_timed(name="f", work="count")
        def forward(self, x: Any) -> Any:
            return self.inner(x)

    layers = [Layer(2), Layer(3)]
    with capture() as records:
        for _ in range(2):
            for layer in layers:
                layer(torch.ones(1, 8))
    assert [flops(record) for record in records] == [32, 48, 32, 48]


def test_signatures_are_bounded(device: FakeDevice) -> None:
    """Beyond 64 of them the work of new ones is not known; that of the first ones is."""
    with capture() as records:
        timed = gpu_timed(name="w", work="count")(lambda x, n: x @ x)
        for n in range(MOST_SIGNATURES + 2):
            timed(torch.ones(2, 2), n)
        timed(torch.ones(2, 2), 0)
    assert [flops(record) for record in records[:MOST_SIGNATURES]] == [16] * MOST_SIGNATURES
    assert "more than 64" in flops(records[MOST_SIGNATURES]).detail
    assert flops(records[-1]) == 16


def test_arguments_too_large_to_tell_apart(device: FakeDevice) -> None:
    """A thousand parts, or a list that holds itself: not counted, and quickly said."""
    endless: list[Any] = []
    endless.append(endless)
    for argument in ([1] * 1_000, endless):
        (record,) = counted(device, lambda _: torch.ones(2, 2) @ torch.ones(2, 2), argument)
        assert "too large" in flops(record).detail


def test_the_signature_of_a_tensor_reads_no_value() -> None:
    """Shape and dtype are asked, and nothing that could wait."""

    class Tensor:
        shape, dtype = (2, 3), "float16"

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    key, held = signature_of((Tensor(),), {})
    assert key == ((Tensor, (2, 3), "float16"), 1)
    assert held == ()
