"""The allocator's counters: read after suspect calls only, and told as what may have been."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_timed import current, flush, gpu_timed
from gpu_timed.testing import FakeDevice, capture, use_device
from gpu_timed.warmth import torch_allocator
from gpu_timed.warmth.torch_allocator import GREW, RETRIED, AllocatorWatch

MS = 1_000_000
USUAL = [MS] * 8


class Torch:
    """torch as far as the allocator goes: its counters, and how often they were read."""

    def __init__(self) -> None:
        self.counts: dict[str, Any] = {"num_device_alloc": 0, "num_alloc_retries": 0}
        self.read = 0
        self.initialised = True
        self.cuda = SimpleNamespace(is_initialized=lambda: self.initialised)
        self._C = SimpleNamespace(_cuda_memoryStats=self._stats)

    def _stats(self, device: int) -> dict[str, Any]:
        self.read += 1
        return dict(self.counts)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    made = Torch()
    monkeypatch.setitem(sys.modules, "torch", made)  # type: ignore[arg-type]
    return made


def test_what_grew_since_the_last_reading_is_noted_once(torch: Torch) -> None:
    watch = AllocatorWatch()
    torch.counts["num_device_alloc"] = 3
    assert watch.notes(0, 5 * MS, [], first=True) == (GREW,)
    assert watch.notes(0, 5 * MS, USUAL, first=False) == ()
    torch.counts.update(num_device_alloc=4, num_alloc_retries=1)
    assert watch.notes(0, 5 * MS, USUAL, first=False) == (GREW, RETRIED)
    assert watch.notes(1, 5 * MS, USUAL, first=False) == (GREW, RETRIED), "of another device nothing was read before"


@pytest.mark.parametrize(
    ("taken", "usual", "first"),
    [
        (5 * MS, [2 * MS] * 8, False),
        (5 * MS, [MS] + [2 * MS] * 7, False),
        (5 * MS, [MS, MS], False),
        (99_000, USUAL, True),
        (99_000, [1_000] * 8, False),
    ],
    ids=["usual", "usual but for one", "too few known", "short though first", "short"],
)
def test_a_call_that_is_not_suspect_reads_nothing(torch: Torch, taken: int, usual: list[int], first: bool) -> None:
    torch.counts["num_device_alloc"] = 3
    assert AllocatorWatch().notes(0, taken, usual, first=first) == ()
    assert torch.read == 0


def test_a_torch_that_cannot_tell_says_nothing(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = AllocatorWatch()
    torch.initialised = False
    assert watch.notes(0, 5 * MS, [], first=True) == ()
    torch.initialised = True
    torch.counts = {"num_device_alloc": 3}
    assert watch.notes(0, 5 * MS, [], first=True) == ()
    torch._C = SimpleNamespace()
    assert watch.notes(0, 5 * MS, [], first=True) == ()
    monkeypatch.delitem(sys.modules, "torch")
    assert watch.notes(0, 5 * MS, [], first=True) == ()


def test_the_note_is_on_the_span_that_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [0, 0]
    monkeypatch.setattr(torch_allocator, "_counters", lambda _: tuple(counts))
    with use_device(FakeDevice()) as device, capture() as records:

        @gpu_timed(sync="boundary")
        def step(host_ns: int) -> None:
            device.launch(MS)
            device.host_clock.advance(host_ns)

        step(MS)
        for _ in range(5):
            step(MS)
        flush()  # the counters are read when a record is made, which is after the call
        counts[0] = 1
        step(MS)
        step(20 * MS)
        flush()
        step(20 * MS)
    assert [GREW in record.quality for record in records] == [False] * 7 + [True, False]
    assert all(record.warmth != "cold" for record in records)
    assert current.ledger().snapshot().get("memory", 0) == 0
