"""The floor on a real device: measured right, and said of the spans that it is about. Needs one GPU and torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest

from gpu_timed import gpu_span, gpu_timed
from gpu_timed.clocks import cuda_devices
from gpu_timed.diagnosis.clock import _idle_pair
from gpu_timed.record import Record
from gpu_timed.testing import capture

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(120)]

LOW_NS, HIGH_NS = 900, 4_500
"""An H200 reads 1.25 µs by steps of 32 ns; 2.5 is what half a dozen bursts on an idle stream must stay below."""
BUSY_CYCLES = 30_000_000
"""15 ms at 2 GHz: several times what any call here takes the host."""
ROUNDS = 20
FEW = 1
"""Rounds of 20 that a hiccup of the host may spoil."""
TRUE_NS = 930
"""What CUPTI says of an addition to one element."""


def busy() -> None:
    """Queue some milliseconds of work on the current stream."""
    import torch

    torch.cuda._sleep(BUSY_CYCLES)


def queued_floor_ns() -> list[int]:
    """Return what empty pairs of torch's events read behind work, in nanoseconds."""
    import torch

    pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(50)]
    for start, end in pairs:  # an event is made as it is first recorded
        start.record()
        end.record()
    torch.cuda.synchronize()
    busy()
    for start, end in pairs:
        start.record()
        end.record()
    torch.cuda.synchronize()
    return [round(start.elapsed_time(end) * 1e6) for start, end in pairs]


def spans(call: Callable[[], Any], *, queued: bool) -> list[Record]:
    """Return the records of *call*, on an idle device or each behind other work, after a warm-up."""
    import torch

    call()
    torch.cuda.synchronize()
    found = []
    for _ in range(ROUNDS):
        if queued:
            busy()
        with gpu_span("call", sync="deferred") as span:
            call()
        torch.cuda.synchronize()
        found.append(span.wait(5))
    return found


def noted(records: list[Record], note: str) -> int:
    """Count the records that have *note*."""
    return sum(note in record.quality for record in records)


def test_the_floor_is_that_of_an_independent_queued_pair() -> None:
    """A new clock, which has seen no span but idle ones, agrees within 0.8 µs with torch's events."""
    import torch

    torch.zeros(1, device="cuda").add_(1)
    independent = queued_floor_ns()
    found = []
    for _ in range(5):
        with cuda_devices.bench(cuda_devices.load(), 0) as bench:
            _idle_pair(bench)
            found.append(bench.place.clock.floor_ns(bench.place))
    print("floor", found, "independent median", statistics.median(independent), "least", min(independent))
    assert all(isinstance(floor, int) for floor in found), found
    assert LOW_NS <= statistics.median(found) <= HIGH_NS
    assert abs(statistics.median(found) - min(independent)) <= 800


@pytest.mark.parametrize("sync", ["boundary", "deferred"])
def test_a6_kernels_shorter_than_the_marks(sync: str) -> None:
    """200 additions to one element: none negative, each with its floor, and the kernel's own time within the bounds."""
    import torch

    x = torch.zeros(1, device="cuda")

    @gpu_timed(sync=sync)
    def one() -> Any:
        return x.add_(1)

    one()
    torch.cuda.synchronize()
    with capture() as records:
        for _ in range(200):
            one()
    assert len(records) == 200
    for record in records:
        assert record.floor_ns <= record.device_ns
        assert 0 <= record.device_min_ns <= record.device_ns
        assert LOW_NS <= record.floor_ns <= HIGH_NS
    inside = [
        record.device_min_ns - record.uncertainty_ns - record.floor_ns <= TRUE_NS <= record.device_ns + record.floor_ns
        for record in records
    ]
    device_ns = [record.device_ns for record in records]
    print(sync, "median", statistics.median(device_ns), "least", min(device_ns), "inside", sum(inside))
    assert sum(inside) >= 198
    assert noted(records, "no_work_on_stream") == 0


def test_an_empty_span_behind_work_is_below_the_floor() -> None:
    """It reads about the floor; the same on an idle stream says by its lower bound that it may be nothing."""
    records = spans(lambda: None, queued=True)
    print("queued empty", [record.device_ns for record in records], "floor", records[-1].floor_ns)
    assert noted(records, "below_floor") >= ROUNDS - FEW
    assert noted(records, "no_work_on_stream") <= FEW  # too short a call to have had any, unless the host stalls in it
    assert all(record.bound == "unknown" for record in records if "below_floor" in record.quality)
    idle = spans(lambda: None, queued=False)
    assert sum(record.device_min_ns == 0 for record in idle) >= ROUNDS - FEW
    assert noted(idle, "no_work_on_stream") == 0


def test_the_shortest_kernel_behind_work_is_not_below_the_floor() -> None:
    """An addition to one element reads 1.9 µs more there than an empty pair does."""
    import torch

    x = torch.zeros(1, device="cuda")
    records = spans(lambda: x.add_(1), queued=True)
    print("queued kernel", [record.device_ns for record in records], "floor", records[-1].floor_ns)
    assert noted(records, "below_floor") <= FEW
    assert noted(records, "no_work_on_stream") == 0


def test_work_on_another_stream_is_missed_on_its_own() -> None:
    """20 products on a side stream leave nothing on the busy stream of the call, which is told; on its own, not."""
    import torch

    side = torch.cuda.Stream()
    a = torch.randn(512, 512, device="cuda", dtype=torch.float16)
    out = torch.empty_like(a)
    torch.cuda.synchronize()

    def products() -> None:
        for _ in range(20):
            torch.mm(a, a, out=out)

    def elsewhere() -> None:
        with torch.cuda.stream(side):
            products()

    records = spans(elsewhere, queued=True)
    print("elsewhere", [(record.device_ns, record.launch_ns, record.quality) for record in records[:5]])
    assert noted(records, "no_work_on_stream") >= ROUNDS - FEW
    for call, queued in ((products, True), (products, False), (elsewhere, False)):
        assert noted(spans(call, queued=queued), "no_work_on_stream") == 0, (call, queued)
