"""On a real device: events come back to their pool, threads lose no span, and one event is never in two hands."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from gpu_timed import configure, current, flush, gpu_span, gpu_timed
from gpu_timed.record import Missing
from gpu_timed.testing import capture

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(120)]

STAMP_NS = 500
"""How far a stamp of an event may be off by NVIDIA's documentation."""


def pool() -> tuple[int, int]:
    """Return how many events were made, and how many of them are out."""
    devices = current.tracer().locator._cuda._clock._devices.values()  # type: ignore[attr-defined]
    made = sum(device.made - device.destroyed for device in devices)
    return made, made - sum(len(device.free) for device in devices)


def test_events_come_back_and_no_more_are_made() -> None:
    """After a warm-up, further pieces of the same load take no further event: the pool is as large as the load."""
    torch = pytest.importorskip("torch")
    values = torch.zeros(1 << 12, device="cuda")

    @gpu_timed(sync="deferred")
    def inner() -> None:
        values.add_(1.0)

    @gpu_timed(sync="deferred")
    def outer() -> None:
        inner()
        inner()

    def piece() -> tuple[int, int]:
        for _ in range(20):
            for _ in range(50):
                outer()
            torch.cuda.synchronize()
            assert flush(30).pending == 0
        return pool()

    piece()
    seen = [piece() for _ in range(4)]
    # Each piece of 150 spans waits with at most 300 marks, and one is kept by the device's timeline.
    assert {out for _, out in seen} == {seen[0][1]}
    assert seen[0][1] <= 1
    assert seen[-1][0] <= seen[0][0] + 32, "at most one more filling"


def test_threads_on_one_stream_lose_nothing() -> None:
    """16 threads, nested, on the default stream: every span once, timed, under its own thread's parent."""
    torch = pytest.importorskip("torch")
    configure(max_pending=50_000)
    threads, calls = 16, 60
    ready = threading.Barrier(threads)

    @gpu_timed(sync="deferred")
    def outer(values: Any) -> None:
        with gpu_span("inner", sync="deferred"):
            values.add_(1.0)

    def work() -> None:
        values = torch.zeros(256, device="cuda")
        ready.wait()
        for _ in range(calls):
            outer(values)

    torch.zeros(1, device="cuda")
    with capture() as records:
        started = [threading.Thread(target=work) for _ in range(threads)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        torch.cuda.synchronize()
    names = Counter("inner" if record.name == "inner" else "outer" for record in records)
    assert names == {"outer": threads * calls, "inner": threads * calls}
    by_id = {record.span_id: record for record in records}
    assert len(by_id) == len(records)
    for record in records:
        if record.name == "inner":
            assert by_id[record.parent_id].thread_id == record.thread_id
    missing = Counter(record.device_ns.reason for record in records if isinstance(record.device_ns, Missing))
    assert missing == {}
    # A parent's marks are placed around its child's on the same stream: it can have read no less.
    assert all(by_id[one.parent_id].device_ns + STAMP_NS >= one.device_ns for one in records if one.name == "inner")
    flush(30)
    assert pool()[1] <= 1
