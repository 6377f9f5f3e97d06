"""Kernels launched by Numba and Triton, against event pairs of their own runtimes."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from gpu_timed import flush, gpu_timed
from gpu_timed.record import Record
from gpu_timed.testing import capture

pytest.importorskip("numba.cuda")
pytest.importorskip("triton")
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from card_kernels import SIZE, cuda, numba_work, triton_tuned, triton_work  # noqa: E402
from workloads import captured, mlp_graph  # noqa: E402

pytestmark = pytest.mark.gpu
CALLS = 200
ROUNDS = 20_000
GRID = (SIZE // 256, 256)


def numba_pair(launch: Callable[[], None], stream: Any) -> float:
    """Return microseconds of one launch by a pair of Numba's events."""
    start, end = cuda.event(timing=True), cuda.event(timing=True)
    start.record(stream)
    launch()
    end.record(stream)
    end.synchronize()
    return float(cuda.event_elapsed_time(start, end)) * 1e3


def torch_pair(launch: Callable[[], None]) -> float:
    """Return microseconds of one launch by a pair of torch's events on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream()
    start.record(stream)
    launch()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def agree(pairs: list[float], records: list[Record], what: str) -> None:
    """The medians lie within max(2 µs, 0.5 %)."""
    assert len(records) == len(pairs)
    assert all(isinstance(record.device_ns, int) for record in records), records[0]
    pair = statistics.median(pairs)
    ours = statistics.median(record.device_ns for record in records) / 1e3
    print(f"{what}: pair {pair:.1f} us, ours {ours:.1f} us, off by {ours - pair:+.2f}")
    assert abs(ours - pair) <= max(2.0, 0.005 * pair), what


@pytest.mark.parametrize("sync", ["boundary", "deferred"])
@pytest.mark.parametrize("where", ["default", "side"])
@pytest.mark.parametrize("how", ["[] idle", "[] queued", "forall queued"])
def test_a_numba_kernel_reads_as_its_own_event_pair(where: str, sync: str, how: str) -> None:
    """On the default stream and on a side stream, both arms in turn; forall's launch is slow: behind other work."""
    a = cuda.to_device(torch.ones(SIZE).numpy())
    stream = cuda.stream() if where == "side" else 0
    timed = gpu_timed(numba_work, sync=sync)

    def launcher(kernel: Any) -> Callable[[], None]:
        if how.startswith("forall"):
            configured = kernel.forall(SIZE, 256, stream)
            return lambda: configured(a, ROUNDS)
        return lambda: kernel[(*GRID, stream)](a, ROUNDS)

    def ahead() -> None:
        cuda.synchronize()
        if how.endswith("queued"):
            numba_work[(*GRID, stream)](a, ROUNDS)

    bare, ours = launcher(numba_work), launcher(timed)
    for launch in (bare, ours):
        launch()
    flush(30)
    pairs = []
    with capture() as records:
        for _ in range(CALLS):
            ahead()
            pairs.append(numba_pair(bare, stream))
            ahead()
            ours()
        cuda.synchronize()
    agree(pairs, records, f"numba {how} {where} {sync}")
    assert {record.stream for record in records} == ({0} if where == "default" else {int(stream.handle)})
    assert {record.name for record in records} == {"numba_work"}


@pytest.mark.parametrize("sync", ["boundary", "deferred"])
@pytest.mark.parametrize("where", ["default", "side"])
@pytest.mark.parametrize("which", ["jit", "autotune", "grid function"])
def test_a_triton_kernel_reads_as_an_event_pair(where: str, sync: str, which: str) -> None:
    """On the default stream and on a side stream; launches of both arms in turn."""
    a = torch.ones(SIZE, device="cuda")
    stream = torch.cuda.Stream() if where == "side" else torch.cuda.default_stream()
    kernel: Any = triton_tuned if which == "autotune" else triton_work

    def launcher(kernel: Any) -> Callable[[], None]:
        if which == "autotune":
            return lambda: kernel[lambda meta: (SIZE // meta["BLOCK"],)](a, SIZE, ROUNDS)
        if which == "jit":
            return lambda: kernel[(SIZE // 256,)](a, SIZE, ROUNDS, BLOCK=256)
        return lambda: kernel[lambda meta: (SIZE // meta["BLOCK"],)](a, SIZE, ROUNDS, BLOCK=256)

    timed = gpu_timed(kernel, name="work", sync=sync)
    assert isinstance(timed, type(kernel))
    bare, ours = launcher(kernel), launcher(timed)
    with torch.cuda.stream(stream):
        for launch in (bare, ours):
            launch()
        torch.cuda.synchronize()
        flush(30)
        pairs = []
        with capture() as records:
            for _ in range(CALLS):
                pairs.append(torch_pair(bare))
                ours()
                torch.cuda.synchronize()
    agree(pairs, records, f"triton {which} {where} {sync}")
    assert {record.stream for record in records} == {stream.cuda_stream}


def test_a_compiled_region_takes_a_timed_triton_kernel_and_reports_it_once() -> None:
    """fullgraph holds, values are right, the kernel's name is reported, nothing is timed in there."""
    timed = gpu_timed(triton_work, name="inner_kernel")

    def f(a: Any) -> Any:
        b = a.clone()
        timed[(SIZE // 256,)](b, SIZE, 10, BLOCK=256)
        return b + 1

    compiled = torch.compile(f, fullgraph=True)
    a = torch.full((SIZE,), 3.0, device="cuda")
    with warnings.catch_warnings(), capture() as records:
        warnings.simplefilter("ignore")  # what Inductor says of itself
        for _ in range(3):
            out = compiled(a)
    torch.testing.assert_close(out, f(a))
    assert records == []
    assert flush(10).counts["not_timed_in_compiled_region"] == 1


def test_a_stream_of_tokens_reads_the_sum_of_its_steps() -> None:
    """A generator of 64 tokens, one graph replay each: bare with an event pair a token, and decorated, in turn."""
    step = mlp_graph()
    foreign = captured(lambda: torch.ones(1 << 24, device="cuda").sin_())
    stream = torch.cuda.current_stream()

    def tokens(pairs: list[tuple[Any, Any]] | None = None) -> Any:
        for token in range(64):
            if pairs is not None:
                pairs.append(tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)))
                pairs[-1][0].record(stream)
            step()
            if pairs is not None:
                pairs[-1][1].record(stream)
            yield token

    timed = gpu_timed(tokens, name="stream")
    sums = []
    with capture() as records:
        for _ in range(30):
            pairs: list[tuple[Any, Any]] = []
            for stream_of_tokens in (tokens(pairs), timed()):
                for _ in stream_of_tokens:
                    foreign.replay()  # between two tokens: none of its business
                torch.cuda.synchronize()
            sums.append(sum(start.elapsed_time(end) for start, end in pairs) * 1e3)
    assert all(record.resumptions == 65 for record in records)
    agree(sums, records, "64 tokens")


def test_the_launch_queue_fills_and_device_times_stay_flat() -> None:
    """4,000 unsynchronised Numba launches: the host's part bends, the device's does not, and the bend is noted (A5)."""
    a = cuda.to_device(torch.ones(SIZE).numpy())
    launch = gpu_timed(numba_work, sync="deferred")[GRID]
    for _ in range(10):
        launch(a, ROUNDS)
        cuda.synchronize()
    with capture(60) as records:
        for _ in range(4000):
            launch(a, ROUNDS)
        cuda.synchronize()
    records.sort(key=lambda record: record.call_index)
    device = [record.device_ns for record in records]
    host = [after.start_ns - before.start_ns for before, after in itertools.pairwise(records)]
    noted = [index for index, record in enumerate(records) if "launch_queue_full" in record.quality]
    early, late = statistics.median(device[100:300]), statistics.median(device[3000:])
    quick, slow = statistics.median(host[100:300]), statistics.median(host[3000:])
    print(f"A5: device {early / 1e3:.1f} then {late / 1e3:.1f} us; host {quick / 1e3:.1f} then {slow / 1e3:.1f} us")
    print(f"A5: first noted {noted[:1]}, noted {len(noted)}")
    assert abs(late - early) <= max(2_000, 0.02 * early)
    assert slow > 3 * quick
    assert noted
    assert noted[0] >= 330
    assert len(noted) >= 0.7 * (4000 - noted[0])


def test_the_launch_queue_of_torch_fills_too() -> None:
    """The same for a decorated torch function of four kernels behind 0.1 s of foreign work."""
    x = torch.ones(1 << 24, device="cuda")

    @gpu_timed(sync="deferred")
    def f() -> None:
        for _ in range(4):
            torch.sin_(x)

    for _ in range(10):
        f()
        torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    with capture(60) as records:
        for _ in range(1000):
            f()
        torch.cuda.synchronize()
    records.sort(key=lambda record: record.call_index)
    noted = [index for index, record in enumerate(records) if "launch_queue_full" in record.quality]
    print(f"torch: first noted {noted[:1]}, noted {len(noted)}, device {records[500].device_ns / 1e3:.1f} us")
    assert noted
    assert noted[0] > 50  # the queue is full after 170 calls; how many kernels a call has can only be bounded


def test_a_function_that_waits_for_its_result_has_no_full_queue() -> None:
    """A function that ends in .item() behind a long backlog is slow on the host, and that is not the queue."""
    x = torch.ones(1 << 20, device="cuda")

    @gpu_timed(sync="deferred")
    def f() -> float:
        return float(x.sum().item())

    for _ in range(8):
        f()
    with capture(60) as records:
        for _ in range(20):
            torch.cuda._sleep(20_000_000)
            f()
    assert not [record for record in records if "launch_queue_full" in record.quality]


def run_alone(body: str) -> str:
    """Run *body* in a process without torch; return what it printed."""
    head = """
        import sys
        import numpy as np
        if not hasattr(np, "row_stack"): setattr(np, "row_stack", np.vstack)
        from gpu_timed import gpu_timed, gpu_span
        from gpu_timed.testing import capture
    """
    tail = "\nassert 'torch' not in sys.modules\nprint('fine')\n"
    code = textwrap.dedent(head) + textwrap.dedent(body) + tail
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_numba_alone_in_a_process() -> None:
    """Without torch: a span before the context exists has no time; later ones do, with an eager signature too."""
    out = run_alone("""
        from numba import cuda
        @gpu_timed
        @cuda.jit
        def lazy(a):
            i = cuda.grid(1)
            if i < a.size: a[i] += 1
        @gpu_timed
        def block(a): lazy[4, 256](a)
        host = np.zeros(1024, np.float32)
        with capture() as records:
            lazy[4, 256](host)
        assert host[0] == 1 and records[0].device_ns.reason == "not_initialised", records
        a = cuda.to_device(host)
        eager = gpu_timed(cuda.jit("void(float32[:], int32)")(lambda a, n: None), name="eager")
        stream = cuda.stream()
        with capture() as records:
            lazy[4, 256](a); lazy[4, 256, stream](a); lazy.forall(1024)(a); eager[1, 1](a, 1); block(a)
            with gpu_span("span"): lazy[4, 256](a)
        for record in records: print(record)
        assert len(records) == 8 and all(isinstance(r.device_ns, int) for r in records)
        assert records[1].stream == int(stream.handle) != 0
        assert records[0].device_uuid.startswith("GPU-") and records[0].clock == "cuda_event"
        import threading
        with capture() as records:
            t = threading.Thread(target=lambda: lazy[4, 256](a)); t.start(); t.join()
        assert isinstance(records[0].device_ns, int), records
        assert a.copy_to_host()[0] == 7
    """)
    assert "fine" in out


def test_cupy_alone_in_a_process() -> None:
    """Without torch: a decorated function over CuPy is marked on CuPy's current stream."""
    pytest.importorskip("cupy")
    out = run_alone("""
        import cupy
        @gpu_timed
        def f(x): return cupy.sin(x)
        x = cupy.ones(1 << 24)
        stream = cupy.cuda.Stream(non_blocking=True)
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        ours, pairs = [], []
        with stream:
            for _ in range(20):
                with capture() as records:
                    f(x)
                start.record(); cupy.sin(x); end.record(); end.synchronize()
                pairs.append(cupy.cuda.get_elapsed_time(start, end) * 1e6)
                ours.append(records[0].device_ns)
                assert records[0].stream == stream.ptr
        pair, mine = sorted(pairs)[10], sorted(ours)[10]
        print(records[0], pair, mine)
        assert 0.8 * pair < mine < 1.2 * pair + 20_000
    """)
    assert "fine" in out


def test_jax_alone_in_a_process() -> None:
    """Without torch: a decorated JAX function is fenced by its results, on a GPU as on a CPU."""
    pytest.importorskip("jax")
    out = run_alone("""
        import os, time
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        import jax, jax.numpy as jnp
        x = jnp.ones((4096, 4096))
        g = jax.jit(lambda x: x @ x @ x @ x)
        f = gpu_timed(g, name="f")
        f(x).block_until_ready()
        took = []
        with capture() as records:
            for _ in range(20):
                begin = time.perf_counter_ns(); g(x).block_until_ready(); took.append(time.perf_counter_ns() - begin)
                f(x)
        ours, truth = sorted(r.device_ns for r in records)[10], sorted(took)[10]
        print(records[0], ours, truth, jax.devices())
        assert records[0].clock == "fence" and 0.8 * truth < ours < 1.3 * truth + 200_000
    """)
    assert "fine" in out
    print(out)
