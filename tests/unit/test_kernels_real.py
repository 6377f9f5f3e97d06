"""Kernels of Numba and Triton themselves, without a GPU: both simulators, and what is real short of the launch.

They run in processes of their own, many checks to a process, because a simulator is chosen before the import.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HEAD = """
import copy, inspect, json, os, pickle, runpy, sys, traceback
import numpy as np
if not hasattr(np, "row_stack"): setattr(np, "row_stack", np.vstack)
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from gpu_timed import NotCallableError, flush, gpu_timed
from gpu_timed.record import Missing
from gpu_timed.testing import FakeDevice, capture, use_device
exporter = InMemorySpanExporter()
trace.set_tracer_provider(TracerProvider())
trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(exporter))
if os.environ.get("WITHOUT_NUMBA_CUDA"):
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "NumbaCudaFinder"]
names = lambda records: [record.name for record in records]
def raised(error, call, *args, **kwargs):
    try: call(*args, **kwargs)
    except error as caught: return str(caught)
    raise AssertionError(f"nothing raised {error}")
"""
TAIL = """
results = {}
for name, check in [(name, held) for name, held in globals().items() if name.startswith("check_")]:
    try: results[name] = check()
    except BaseException: results[name] = traceback.format_exc()
print("\\n" + json.dumps(results))
"""
SIMULATED = '''
from numba import cuda
assert ("numba_cuda" in cuda.__file__) != bool(os.environ.get("WITHOUT_NUMBA_CUDA")), cuda.__file__
zeros = lambda: np.zeros(8, np.int32)
@gpu_timed
@cuda.jit
def add(a, n):
    """Adds n."""
    i = cuda.grid(1)
    if i < a.size: a[i] += n
@gpu_timed(name="named", sync="deferred", every=2, attributes={"model": "m"})
@cuda.jit("void(int32[:], int32)")
def eager(a, n): a[cuda.grid(1)] += n
twice = cuda.jit(device=True)(lambda x: 2 * x)
@gpu_timed
@cuda.jit
def doubles(a): a[cuda.grid(1)] = twice(a[cuda.grid(1)] + 1)
@gpu_timed
@cuda.jit
def fails(a): raise KeyError("in the kernel")
@gpu_timed
def outer(a): add[2, 4](a, 1); add[2, 4](a, 1)
def check_a12_every_way_to_launch_is_one_record():
    a, configure = zeros(), getattr(add.__wrapped__, "configure", None)
    with capture() as records:
        add[2, 4](a, 1); add[2, 4, cuda.stream()](a, 1); add[(2,), (4,), 0, 64](a, 1); add[[2], [4]](a, 1)
        add.forall(8)(a, 1); add.specialize(a, 1)[2, 4](a, 1); (add.configure(2, 4) if configure else add[2, 4])(a, 1)
    assert list(a) == [7] * 8 and names(records) == ["add"] * 7
    assert [record.call_index - records[0].call_index for record in records] == list(range(7))
def check_a12_a_stored_launch_runs_with_its_own_configuration():
    a, one, everywhere, few = zeros(), add[1, 1], add.forall(8), add[1, 3]
    with capture() as records:
        for launch in (one, everywhere, one, few, everywhere): launch(a, 1)
    assert list(a) == [5, 3, 3] + [2] * 5 and len(records) == 5
def check_a12_options_and_unsampled_launches():
    a = zeros()
    with capture() as records:
        for _ in range(4): eager[1, 8](a, 1)
    assert list(a) == [4] * 8 and names(records) == ["named"] * 2
    assert {(record.sync, record.attributes["model"]) for record in records} == {("deferred", "m")}
def check_a12_it_stays_a_kernel():
    assert isinstance(add, type(add.__wrapped__)) and type(add.__wrapped__).__name__ == "FakeCUDAKernel"
    assert (add.__name__, add.__doc__, add.overloads) == ("add", "Adds n.", {})
    assert add.py_func is add.__wrapped__.py_func and list(inspect.signature(add).parameters) == ["a", "n"]
def check_a13_the_span_says_simulated():
    exporter.clear()
    with capture() as records: add[1, 1](zeros(), 1)
    assert flush(10)
    record, (span,) = records[0], exporter.get_finished_spans()
    assert {getattr(record, name) for name in ("device_ns", "queue_ns", "stream", "device")} == {Missing("simulated")}
    assert (record.warmth, record.clock, record.status, record.quality) == ("unknown", "host", "ok", ())
    assert isinstance(record.launch_ns, int) and record.launch_ns > 0 and record.sync_ns == 0
    assert span.name == "add" and span.attributes["gpu_timed.device.missing"] == "simulated"
    assert "gpu_timed.device.duration_ns" not in span.attributes
    assert span.attributes["code.function.name"].endswith(".add")
def check_a13_what_a_kernel_raises_comes_out():
    with capture() as records:
        assert "in the kernel" in raised(KeyError, fails[1, 1], zeros())
        add[1, 1](zeros(), 1)
    assert [record.status for record in records] == ["error", "ok"] and "in the kernel" in records[0].error
    for wrong in (lambda kernel: kernel[5], lambda kernel: kernel["a", "b"], lambda kernel: kernel.forall(-1)):
        assert raised(Exception, wrong, add) == raised(Exception, wrong, add.__wrapped__)
def check_a_kernel_inside_a_timed_function_nests():
    a = zeros()
    with capture() as records: outer(a)
    *inner, whole = sorted(records, key=lambda record: record.parent_id is None)
    assert list(a) == [2] * 8 and names([*inner, whole]) == ["add", "add", "outer"]
    assert {record.parent_id for record in inner} == {whole.span_id}
def check_device_functions():
    assert "Decorate the kernel that calls it" in raised(NotCallableError, gpu_timed, twice)
    a = zeros()
    with capture() as records: doubles[1, 8](a)
    assert list(a) == [2] * 8 and names(records) == ["doubles"]
'''
REAL = """
from numba import cuda
from numba.cuda.dispatcher import CUDADispatcher
from cuda.core import Stream
CUDADispatcher.call = lambda kernel, args, launch: args[0](int(launch.stream.handle), launch.griddim)
@gpu_timed
@cuda.jit
def work(a): pass
def check_the_mark_goes_on_the_stream_of_the_launch():
    side = Stream.from_handle(7)
    with use_device(FakeDevice()) as device, capture() as records:
        def run(stream, grid):
            with device.use(stream=stream): device.launch(1_000 * grid[0])
        device.launch(10**9)
        work[1, 1, side](run); work[(2, 1), (1, 1), side, 0](run); work.configure(3, 1, side)(run); work[4, 1](run)
    assert [(record.stream, record.device_ns) for record in records] == [(7, 1_000), (7, 2_000), (7, 3_000), (0, 4_000)]
def check_it_and_its_copies_stay_dispatchers():
    assert work.__name__ == "work" and not work.overloads and work[1, 1].dispatcher is work.__wrapped__
    assert raised(Exception, work) == raised(Exception, work.__wrapped__)
    for again in (work, copy.copy(work), copy.deepcopy(work), pickle.loads(pickle.dumps(work))):
        with use_device(FakeDevice()), capture() as records: again[1, 1](lambda *_: None)
        assert names(records) == ["work"] and isinstance(again, CUDADispatcher)
def check_a_configured_launch_can_be_copied_and_pickled():
    launch = work[1, 1]
    assert pickle.loads(pickle.dumps(launch.__wrapped__)).griddim == (1, 1, 1)
    assert pickle.loads(pickle.dumps(launch)).griddim == copy.copy(launch).griddim == (1, 1, 1)
def check_a_device_function_is_refused():
    assert "Decorate the kernel" in raised(NotCallableError, gpu_timed, cuda.jit(device=True)(lambda x: x))
"""
TRITON = '''
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
class Driver:
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
triton.runtime.driver.set_active(Driver())
triton.knobs.runtime.jit_cache_hook = lambda **_: True  # stops before it compiles
tune = triton.autotune(configs=[triton.Config({"B": 4})], key=["n"])
choose = triton.heuristics({"B": lambda _: 4})
@triton.jit
def work(a, n, B: tl.constexpr):
    """Works."""
    tl.store(a + tl.arange(0, B), n)
work.add_pre_run_hook(lambda run, *_, **__: run())
@triton.jit
def inner(x): return x + 1
@triton.jit
def calls(a): tl.store(a, inner(1))
class Run:
    """An argument that launches: the hook before a kernel calls it."""
    dtype = "fp32"
    data_ptr = lambda self: 0
    def __init__(self, device): self.device = device
    def __call__(self): self.device.launch(5_000)
def launches(launch, *expected):
    with use_device(FakeDevice()) as device, device.use(stream=3), capture() as records: launch(Run(device))
    assert [(record.name, record.device_ns, record.stream) for record in records] == [(n, 5_000, 3) for n in expected]
    return records
def check_it_stays_a_jit_function():
    timed = gpu_timed(work)
    assert isinstance(timed, JITFunction) and timed.__wrapped__ is work and type(timed).__name__ == "JITFunction"
    for name in ("fn", "arg_names", "params", "src", "__name__", "__qualname__", "__module__", "__doc__", "cache_key"):
        assert getattr(timed, name) == getattr(work, name), name
    assert hash(timed) == hash(work) and timed != work and {timed: 1}[timed] == 1 and repr(timed) == repr(work)
    assert timed.device_caches is not work.device_caches
    assert "outside of the scope" in raised(RuntimeError, timed, 1)
def check_each_way_to_launch_is_one_record_and_a_warmup_is_none():
    timed = gpu_timed(work)
    launches(lambda run: timed[(1,)](run, 4, B=4), "work")
    launches(lambda run: timed[lambda meta: (1,)](run, n=4, B=4), "work")
    launches(lambda run: timed.run(run, 4, B=4, grid=(1,), warmup=False), "work")
    launches(lambda run: timed.warmup(run, 4, B=4, grid=(1,)))
def check_an_autotuner_over_a_timed_kernel():
    timed = gpu_timed(work)
    tuned = tune(timed)
    launches(lambda run: tuned[(1,)](run, 4), "work")
    launches(lambda run: tuned.warmup(run, 4, grid=(1,)))
    assert tuned.fn is timed
def check_timed_autotuners_and_heuristics():
    for kernel in (tune(work), choose(work)):
        timed = gpu_timed(kernel, name="tuned")
        for again in (timed, copy.copy(timed), copy.deepcopy(timed)):
            launches(lambda run: again[(1,)](run, 4), "tuned")
            launches(lambda run: again.warmup(run, 4, grid=(1,)))
        assert isinstance(timed, type(kernel)) and timed.fn is work and timed != kernel and {timed: 1}[timed] == 1
def check_an_autotuner_is_named_after_its_kernel():
    launches(lambda run: gpu_timed(tune(work))[(1,)](run, 4), "work")
def check_nesting():
    both = gpu_timed(choose(gpu_timed(work)), name="outside")
    inside, outside = launches(lambda run: both[(1,)](run, 4), "work", "outside")
    assert inside.parent_id == outside.span_id
def check_copies_unsampled_launches_and_errors():
    timed = gpu_timed(work, every=2)
    for again in (copy.copy(timed), copy.deepcopy(timed)):
        ran = []
        launches(lambda run: [ran.append(again[(1,)](run, 4, B=4)) for _ in range(2)], "work")
        assert again.__wrapped__ is work and len(ran) == 2
    launch = lambda run: raised(KeyError, gpu_timed(work)[(1,)], run, 4, B=4, nonsense=1)
    assert launches(launch, "work")[0].status == "error"
def check_a_timed_kernel_can_be_a_function_of_another():
    before = calls.cache_key
    for globals()["inner"], same in ((gpu_timed(inner), True), (work, False)):
        calls.hash = None
        assert (calls.cache_key == before) == (gpu_timed(calls).cache_key == before) == same
'''
INTERPRETED = """
import torch, triton, triton.language as tl
@triton.jit
def plus(x): return x + 1
timed_plus = gpu_timed(plus, name="never")
@triton.jit
def work(a, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(a + i, timed_plus(plus(tl.load(a + i, mask=i < n))), mask=i < n)
tuned = triton.autotune(configs=[triton.Config({"B": 4})], key=["n"])(work)
def check_values_and_records():
    a, timed = torch.zeros(6), gpu_timed(work, name="work")
    with capture() as records:
        timed[(2,)](a, 6, B=4); timed[lambda meta: (triton.cdiv(6, meta["B"]),)](a, 6, B=4)
        gpu_timed(tuned, name="work")[(1,)](a, 6); timed.warmup(a, 6, B=4, grid=(2,))
    assert a.tolist() == [6.0] * 4 + [4.0] * 2 and names(records) == ["work"] * 3
    assert {record.device_ns.reason for record in records} == {"simulated"}
    with capture() as records: raised(TypeError, timed[(1,)], a)
    assert records[0].status == "error"
def check_it_is_named_after_its_kernel():
    with capture() as records: gpu_timed(work)[(1,)](torch.zeros(4), 4, B=4)
    assert names(records) == ["work"]
"""
SCRIPTS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "numba-cuda's simulator": (SIMULATED, ("numba_cuda",), {"NUMBA_ENABLE_CUDASIM": "1"}),
    "numba's simulator": (SIMULATED, ("numba",), {"NUMBA_ENABLE_CUDASIM": "1", "WITHOUT_NUMBA_CUDA": "1"}),
    "numba": (REAL, ("numba_cuda",), {"NUMBA_DISABLE_PERFORMANCE_WARNINGS": "1"}),
    "triton": (TRITON, ("triton",), {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}),
    "triton's interpreter": (INTERPRETED, ("triton", "torch"), {"TRITON_INTERPRET": "1"}),
}


def run_script(folder: Path, body: str, needs: tuple[str, ...], env: dict[str, str]) -> dict[str, Any]:
    """Run a script in a process of its own; return what each of its checks gave, or raised, as text."""
    for name in needs:  # not importorskip: none of them is to be loaded here
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    path = folder / "kernels_script.py"
    path.write_text(HEAD + body + TAIL)
    env = {**os.environ, **env}
    ran = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False, env=env)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return the results of a script, which is run once."""
    return functools.cache(lambda script: run_script(tmp_path_factory.mktemp("kernels"), *SCRIPTS[script]))


@pytest.mark.parametrize(
    ("script", "check"),
    [
        pytest.param(script, check, id=f"{script}: {check[6:]}")
        for script, (body, *_) in SCRIPTS.items()
        for check in re.findall(r"^def (check_\w+)", body, re.MULTILINE)
    ],
)
def test_real_kernels(results: Callable[[str], dict[str, Any]], script: str, check: str) -> None:
    """One check of a script passes, with Numba's or Triton's own kernels."""
    raised = results(script)[check]
    assert not raised, raised
