"""JAX on the CPU, by the fence clock; in a process of their own, see :mod:`jax_process`."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from jax_process import INSIDE, eventually, in_jax
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gpu_timed import flush, gpu_span, gpu_timed
from gpu_timed.record import Missing, Record
from gpu_timed.testing import capture

MS = 1_000_000
jax: Any = pytest.importorskip("jax") if INSIDE else None


@functools.cache
def matmul(**options: Any) -> Any:
    """A jitted function that takes some tens of milliseconds, compiled."""
    made = jax.jit(lambda x: x @ x / x.shape[0], **options)
    made(matrix() + 1).block_until_ready()
    return made


@functools.cache
def matrix() -> Any:
    return jax.numpy.ones((1500, 1500)).block_until_ready()


def measure(call: Callable[..., Any], *args: Any) -> Record:
    with capture() as records:
        call(*args)
    (record,) = records
    return record


def number(value: Any) -> int:
    assert isinstance(value, int), value
    return value


WAYS = {"jitted": lambda: matmul(), "python": lambda: lambda x: matmul()(x)}  # noqa: PLW0108 - Python around it
both = pytest.mark.parametrize("sync", ["boundary", "deferred"])
ways = pytest.mark.parametrize("way", WAYS)


@in_jax
@both
@ways
def test_a_call_has_the_time_of_its_result(way: str, sync: Any) -> None:
    """As long as around block_until_ready of the same call, and near to others; deferred returns long before."""

    def check() -> None:
        call, around, bare = gpu_timed(WAYS[way](), sync=sync), [], []
        with capture() as records:
            for _ in range(5):
                for function, taken in ((matmul(), bare), (call, around)):
                    before = time.perf_counter_ns()
                    function(matrix()).block_until_ready()
                    taken.append(time.perf_counter_ns() - before)
        device = statistics.median(number(record.device_ns) for record in records)
        assert 0.7 < device / statistics.median(around) < 1.05
        assert 0.5 < device / statistics.median(bare) < 2
        launch = statistics.median(number(record.launch_ns) for record in records)
        assert launch * 3 < device
        assert {record.sync_ns > 0 for record in records} == {sync == "boundary"}

    eventually(check)


@in_jax
def test_names_and_kinds(exporter: InMemorySpanExporter) -> None:
    """Clock, device and OpenTelemetry spans say that the work was the CPU's."""
    record = measure(gpu_timed(matmul(), name="f"), matrix())
    assert (record.clock, record.device, record.stream, record.device_type) == ("fence", 0, 0, "cpu")
    assert (record.device_name, record.status) == ("cpu", "ok")
    assert isinstance(record.device_uuid, Missing)
    assert flush()
    device, host = exporter.get_finished_spans()
    assert (host.name, device.name) == ("f", "f [cpu]")
    for attributes in (host.attributes, device.attributes):
        assert attributes is not None
        assert (attributes["hw.type"], attributes["gpu_timed.clock"]) == ("cpu", "fence")
        assert attributes["gpu_timed.device.duration_ns"] == record.device_ns


@in_jax
@both
def test_chained_calls_have_each_their_own_time(sync: Any) -> None:
    """The second call's queue time is the first one's work, its device time its own."""

    def check() -> None:
        with capture() as records:
            middle = gpu_timed(matmul(), name="first", sync="deferred")(matrix())
            gpu_timed(matmul(), name="second", sync=sync)(middle)
        first, second = (next(one for one in records if one.name == name) for name in ("first", "second"))
        assert number(second.queue_ns) > 0.5 * number(first.device_ns)
        assert 0.4 < number(second.device_ns) / number(first.device_ns) < 2.5
        assert second.launch_gaps_included == "no"
        assert second.device_min_ns == second.device_ns

    eventually(check)


@in_jax
@both
def test_a_block_has_the_time_of_what_it_began(sync: Any) -> None:
    """A with block has no result: it is over when everything under way is there."""

    def check() -> None:
        with gpu_span("block", sync=sync) as span:
            kept = matmul()(matrix())
        record = span.wait(30)
        assert (record.clock, record.status, kept.is_ready()) == ("fence", "ok", True)
        assert number(record.device_ns) > MS
        assert (number(record.sync_ns) > 0) == (sync == "boundary")

    eventually(check)


@dataclasses.dataclass
class Node:
    """A node of a pytree."""

    array: Any
    label: str = "n"


if INSIDE:
    jax.tree_util.register_dataclass(Node, data_fields=["array"], meta_fields=["label"])
    matrix()  # from here on there is a backend
    matmul()  # made here, and not inside somebody's trace

KINDS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "pytree": lambda: (lambda tree: {"y": (matmul()(tree["x"][0]), None, 3)}, {"x": [matrix()]}),
    "odd_tree": lambda: (lambda tree: {1: matmul()(tree["x"]), "y": 2}, {"x": matrix(), 3: "has no order"}),
    "node": lambda: (lambda node: Node(matmul()(node.array)), Node(matrix())),
    "none": lambda: (lambda x: left.append(matmul()(x)), matrix()),
    "keyword": lambda: (functools.partial(lambda *, x: matmul()(x), x=matrix()),),
    "static": lambda: (jax.jit(lambda n, x: matmul()(x) * n, static_argnums=0), 2, matrix()),
    "donated": lambda: (matmul(donate_argnums=0), (matrix() + 1).block_until_ready()),
    "nothing_given": lambda: (lambda: matmul()(matrix()),),
}
left: list[Any] = []


@in_jax
@both
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_found_wherever_they_are(kind: str, sync: Any) -> None:
    """In nests, registered nodes, or nowhere; from static and donated arguments: the work has its time."""

    def check() -> None:
        function, *args = KINDS[kind]()
        with capture() as records:
            result = gpu_timed(function, sync=sync)(*args)
        assert [(record.status, record.clock) for record in records] == [("ok", "fence")]
        assert number(records[0].device_ns) > MS
        assert (result is None) == (kind == "none")
        assert kind != "donated" or args[0].is_deleted()

    eventually(check)


@in_jax
def test_a_donated_result_is_not_there_yet() -> None:
    """Steps that take over each other's state: none may claim a time that cannot be its own."""
    step = gpu_timed(matmul(donate_argnums=0), name="step", sync="deferred")
    before = time.perf_counter_ns()
    with capture() as records:
        state = matmul()(matrix())
        for _ in range(4):
            state = step(state)
        state.block_until_ready()
        whole = time.perf_counter_ns() - before
    times = [record.device_ns for record in records if isinstance(record.device_ns, int)]
    assert all(whole / 50 < taken < whole / 2 for taken in times), (times, whole)


@in_jax
def test_inside_a_trace_nothing_is_measured() -> None:
    """Under jit, grad and vmap, and compiled with the decorator inside: captured, and the values right."""
    square = jax.jit(lambda x: x * x)
    timed = gpu_timed(square, name="inner")
    x = jax.numpy.arange(3.0)
    with capture() as records:
        assert jax.jit(lambda x: timed(x).sum())(x) == 5.0
        assert jax.grad(lambda x: timed(x).sum())(x).tolist() == [0.0, 2.0, 4.0]
        assert jax.vmap(timed)(x).tolist() == [0.0, 1.0, 4.0]
        compiled = jax.jit(gpu_timed(lambda x: x + 1, name="inner"))
        assert [compiled(x).tolist() for _ in range(2)] == [[1.0, 2.0, 3.0]] * 2
    assert len(records) == 4
    assert {getattr(record.device_ns, "reason", None) for record in records} == {"captured"}
    assert {record.status for record in records} == {"ok"}


@in_jax
def test_coroutines_and_generators_are_measured() -> None:
    """Work begun in several steps is added up, whether items are yielded or one is returned."""

    def steps() -> Iterator[Any]:
        yield matmul()(matrix())
        yield matmul()(matrix())

    async def work() -> Any:
        begun = matmul()(matrix())
        await asyncio.sleep(0)
        return matmul()(begun)

    async def stream() -> AsyncIterator[Any]:
        yield matmul()(matrix())
        yield matmul()(matrix())

    async def drain() -> list[Any]:
        return [item async for item in gpu_timed(stream)()]

    def check(call: Callable[[], Any]) -> None:
        record = measure(call)
        assert number(record.device_ns) > MS
        assert (record.status, record.resumptions > 1) == ("ok", True)

    for call in (
        lambda: list(gpu_timed(steps)()),
        lambda: asyncio.run(gpu_timed(work)()),
        lambda: asyncio.run(drain()),
    ):
        eventually(functools.partial(check, call))


@in_jax
def test_numpy_alone_has_no_device_time() -> None:
    """Where JAX has a backend but no part in the call, the time is not made up."""
    import numpy as np

    record = measure(gpu_timed(lambda: np.ones(10_000).sum()))
    assert isinstance(record.device_ns, Missing)
    assert record.device_ns.reason == "no_results"
    assert number(record.launch_ns) > 0


def test_no_backend_is_initialised() -> None:
    """Decorating and calling what uses no JAX leaves JAX as it was, and says why there is no time."""
    script = """
import jax
from gpu_timed import gpu_timed
from gpu_timed.testing import capture
from jax._src import xla_bridge
with capture() as records:
    for sync in ("boundary", "deferred", "device"):
        assert gpu_timed(lambda: 3, sync=sync)() == 3
        assert gpu_timed(jax.jit(lambda x: x), sync=sync) is not None
assert not xla_bridge.backends_are_initialized()
print(*{record.device_ns.reason for record in records})
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() in ("no_device", "not_initialised"), done.stderr[-2_000:]
