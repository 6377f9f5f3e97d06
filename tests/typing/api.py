"""Never executed: mypy and pyright read it. The public surface keeps the types of what it decorates."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import assert_type

from gpu_timed import (
    CacheReport,
    Comparison,
    Compile,
    CudaGraph,
    DevicePeaks,
    Diagnosis,
    Missing,
    PinReport,
    Record,
    SelfTest,
    Work,
    WorkDone,
    caches,
    carry,
    compare,
    diagnose,
    extracted,
    flush,
    gpu_span,
    gpu_timed,
    inject,
    measure_peaks,
    pin_caches,
    run_selftest,
    use_mode,
    watch_cache,
)
from gpu_timed.propagation import ContextExecutor
from gpu_timed.testing import FakeDevice, capture, use_device


@gpu_timed
def bare(x: int, *, y: str = "") -> float:
    return x + len(y)


@gpu_timed(name="options", sync="deferred", late="device_only", every=2, attributes={"model": "m"})
def with_options(x: int) -> list[int]:
    return [x]


@gpu_timed
async def coroutine(x: int) -> bytes:
    return bytes(x)


@gpu_timed
def generator() -> Iterator[int]:
    yield 1


@gpu_timed(attributes=lambda x: {"x": x})
async def async_generator(x: int) -> AsyncIterator[int]:
    yield x


class Model:
    @gpu_timed
    def forward(self, x: int) -> str:
        return str(x)

    @gpu_timed
    @staticmethod
    def static(x: int) -> int:
        return x

    @gpu_timed
    @classmethod
    def create(cls) -> Model:
        return cls()


assert_type(bare(1, y="a"), float)
assert_type(with_options(1), list[int])
assert_type(Model().forward(1), str)
assert_type(gpu_timed(bare, name="n")(1), float)
assert_type(list(generator()), list[int])


async def use() -> None:
    assert_type(await coroutine(1), bytes)
    async with gpu_span("block", sync="boundary") as span:
        pass
    assert_type(span.wait(1.0), Record)


with gpu_span("block", attributes={"a": 1}) as opened:
    opened.set_attribute("k", 1)

with use_device(FakeDevice()) as device, capture() as records:
    device.launch(1)
assert_type(records, list[Record])
assert_type(records[0].device_ns, int | Missing)
assert_type(flush().complete, bool)
assert_type(diagnose(send=True, endpoint="http://localhost:4318"), Diagnosis)
assert_type(diagnose().exit_code, int)
assert_type(caches(), CacheReport)
assert_type(caches().caches[0].path, str | None)
assert_type(pin_caches(Path(), override=True, strict=True), PinReport)
assert_type(pin_caches("caches").variables, dict[str, str])
assert_type(watch_cache("target/environment", name="burn"), Callable[[], None])
assert_type(run_selftest(quick=True, seconds=10), SelfTest)
assert_type(run_selftest().exit_code, int)
assert_type(carry(bare)(1, y="a"), float)
assert_type(list(carry(generator)()), list[int])
with ContextExecutor() as pool:
    assert_type(pool.submit(bare, 1, y="a").result(), float)
assert_type(inject(), dict[str, str])
with extracted(inject()):
    pass
with extracted([(b"traceparent", b"")]):
    pass


async def carried() -> None:
    assert_type(await carry(coroutine)(1), bytes)


@gpu_timed(work=Work(flops=1, dtype="bf16"))
def with_work(x: int) -> float:
    return float(x)


@gpu_timed(work=lambda x: Work(bytes=x))
def with_work_function(x: int) -> float:
    return float(x)


@gpu_timed(work="count")
def with_count(x: int) -> float:
    return float(x)


assert_type(with_work(1) + with_work_function(1) + with_count(1), float)
assert_type(records[0].work, WorkDone | Missing)
assert_type(measure_peaks(seconds=2.0), DevicePeaks)
with gpu_span("block", work=Work(flops=1)) as worked:
    worked.set_work(Work(bytes=1))


@gpu_timed(mode=CudaGraph(warmup=2, outputs="alias"))
def in_a_mode(x: int) -> str:
    return str(x)


@gpu_timed(mode=lambda x: "cuda_graph" if x < 8 else None)
def in_a_mode_of_its_arguments(x: int) -> str:
    return str(x)


assert_type(in_a_mode(1), str)
assert_type(in_a_mode_of_its_arguments(1), str)
with use_mode(Compile("reduce-overhead", fullgraph=True), match="decode*"):
    in_a_mode(1)
assert_type(use_mode("compile")(in_a_mode)(1), str)

compared = compare(in_a_mode, (1,), modes=("eager", CudaGraph()), sweep=None)
assert_type(compared, Comparison)
assert_type(compare({"a": abs, "b": float}, args=lambda batch: (batch,), sweep={"batch": [1, 8]}), Comparison)
assert_type(compared.arms[0].samples.wall_ns, tuple[int, ...])
assert_type(compared.verdicts[0].ratio, float | Missing)
assert_type(compared.points[0].comparison, Comparison)
