"""Device spans on the host's axis, against CUPTI's own realtime stamps. Needs one GPU and cupti-python."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gpu_timed import gpu_span
from gpu_timed.testing import capture

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


class _Cupti:
    """Kernel records, as (start, end) in Unix nanoseconds."""

    def __init__(self) -> None:
        self._cupti = pytest.importorskip("cupti.cupti")
        self.kernels: list[tuple[int, int, str]] = []
        cupti = self._cupti

        def requested() -> tuple[int, int]:
            return 8 << 20, 0

        def completed(activities: Any) -> None:
            for activity in activities:
                if activity.kind == cupti.ActivityKind.CONCURRENT_KERNEL:
                    self.kernels.append((activity.start, activity.end, activity.name))

        cupti.activity_register_callbacks(requested, completed)

    def __enter__(self) -> _Cupti:
        self._cupti.activity_enable(self._cupti.ActivityKind.CONCURRENT_KERNEL)
        return self

    def __exit__(self, *_: object) -> None:
        self._cupti.activity_flush_all(1)
        self._cupti.activity_disable(self._cupti.ActivityKind.CONCURRENT_KERNEL)
        self._cupti.finalize()  # left attached, it makes every later launch several times slower


def test_device_spans_hold_their_kernel_and_lie_in_their_host_span(spin: Any) -> None:
    """CUPTI's kernel lies in the device span ± stated, and unclamped device spans lie in their host spans."""
    import torch

    with capture() as records, _Cupti() as cupti:
        for index in range(600):
            if index % 3 == 0:
                torch.cuda.synchronize()
                time.sleep(0.01)
            with gpu_span("kernel", sync="boundary" if index % 2 else "deferred"):
                spin(20_000 + 1_000 * (index % 50))
        torch.cuda.synchronize()
    kernels = sorted(kernel for kernel in cupti.kernels if "spin" in kernel[2])
    assert len(kernels) == len(records) == 600
    ordered = sorted(records, key=lambda record: record.start_ns)
    within = nested = truly_nested = 0
    worst = 0
    for record, (start, end, _) in zip(ordered, kernels, strict=True):
        stated = record.uncertainty_ns
        within += record.device_start_ns - stated <= start and end <= record.device_end_ns + stated + 1_300
        nested += record.start_ns <= record.device_start_ns and record.device_end_ns <= record.end_ns
        truly_nested += record.start_ns <= start and end <= record.end_ns + stated
        worst = max(worst, record.device_start_ns - start, end - record.device_end_ns)
    stated = sorted(record.uncertainty_ns for record in records)
    print(
        "within",
        within,
        "nested",
        nested,
        "true",
        truly_nested,
        "worst",
        worst,
        "stated",
        stated[0],
        stated[300],
        stated[-1],
    )
    assert within >= 0.99 * len(records)
    assert nested == len(records)
    assert truly_nested == len(records)
    assert not [record for record in records if "anchor_fault" in record.quality]
