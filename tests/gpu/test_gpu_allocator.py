"""A call in which torch's allocator goes to the device for memory says that it may have been that."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_timed import flush, gpu_timed
from gpu_timed.testing import capture
from gpu_timed.warmth.torch_allocator import GREW, RETRIED

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def test_new_memory_is_noted_and_memory_from_the_cache_is_not() -> None:
    import time

    import torch

    torch.ones(1, device="cuda")  # before anything is marked, or the first call is not seen
    torch.cuda.empty_cache()

    @gpu_timed(name="allocate", sync="boundary")
    def step(mib: int, pause_s: float = 0.0) -> Any:
        time.sleep(pause_s)  # long for this site, whatever memory costs on this host
        return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

    with capture() as records:
        for mib, pause_s in ((64, 0.002), *[(64, 0.0)] * 6, (64, 0.02), (4096, 0.02), (4096, 0.02)):
            step(mib, pause_s)
            flush()  # the counters are read when a record is made, which is after the call
    grew = [GREW in record.quality for record in records]
    assert grew[-3:] == [False, True, False], grew
    assert grew[0]
    assert not any(RETRIED in record.quality for record in records)
