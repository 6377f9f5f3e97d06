"""Work beside the device's measured peak, on a real device. Needs one GPU and torch; less than a minute, half of it
the self-test in a process of its own.

The limits of the peaks are those of an H200 (data sheet: 989 TFLOP/s dense in bf16, 4.8 TB/s): there only.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpu_timed import DevicePeaks, Missing, Record, Work, WorkDone, gpu_span, gpu_timed, measure_peaks
from gpu_timed.testing import capture, reset

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this file's peaks are kept."""
    return tmp_path_factory.mktemp("peaks")


@pytest.fixture(scope="module")
def peaks(folder: Path) -> DevicePeaks:
    """The device's peaks, measured once for all tests of this file."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPU_TIMED_CACHE_DIR", str(folder))
        before, reserved = time.monotonic(), torch.cuda.memory_reserved()
        found = measure_peaks()
        print(f"measured in {time.monotonic() - before:.1f} s", found)
        assert torch.cuda.memory_reserved() <= reserved + (256 << 20)  # cuBLAS keeps workspaces
    return found


@pytest.fixture(autouse=True)
def _here(folder: Path, peaks: DevicePeaks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for the peaks where this file keeps them."""
    monkeypatch.setenv("GPU_TIMED_CACHE_DIR", str(folder))
    reset()


def done(record: Record) -> WorkDone:
    """Return the work of *record*, which must have some."""
    assert isinstance(record.work, WorkDone), record.work
    return record.work


def number(value: float | Missing) -> float:
    """Return *value*, which must have been measured."""
    assert not isinstance(value, Missing), value
    return value


def test_the_peaks_are_plausible(peaks: DevicePeaks, folder: Path) -> None:
    """Half of the data sheet or more, and no more than it; halves of precision are faster; the cache is no slower."""
    assert len(list(folder.glob("*.json"))) == 1
    rates, widths = peaks.flops_per_s, peaks.bytes_per_s
    print({name: f"{rate / 1e12:.0f} TFLOP/s" for name, rate in rates.items()}, widths)
    assert {"bf16", "fp16", "tf32", "fp32", "fp64"} <= set(rates)
    assert set(widths) == {"memory", "cache"}
    assert rates["bf16"] > rates["tf32"] > rates["fp32"]
    if "H200" in peaks.name:
        assert 500e12 < rates["bf16"] < 1000e12
        assert 30e12 < rates["fp32"] < 70e12
        assert 3e12 < widths["memory"] < 5e12
        assert widths["cache"] > 0.8 * widths["memory"]


def test_measuring_changes_no_setting_of_torch(peaks: DevicePeaks) -> None:
    """How fp32 is multiplied is as it was before; a second measurement agrees within a quarter."""
    import torch

    before = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
    again = measure_peaks(seconds=1.0)
    assert (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32) == before
    ratio = again.flops_per_s["bf16"] / peaks.flops_per_s["bf16"]
    print("bf16 again:", ratio)
    assert 0.75 < ratio < 1.25  # clocks and power move; MARGIN is as wide


def test_the_share_of_a_large_product(peaks: DevicePeaks) -> None:
    """A product of 4096² in bf16 reaches half of the peak or more, and not more than its margin: median of 20."""
    import torch

    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    work = Work(flops=2 * 4096**3, dtype=torch.bfloat16)
    timed = gpu_timed(name="mm", work=work)(torch.mm)
    with capture() as records:
        for _ in range(25):
            timed(a, b)
    shares = [number(done(record).flops_share) for record in records[5:]]
    print("share of peak:", statistics.median(shares), min(shares), max(shares))
    assert 0.5 < statistics.median(shares) < 1.1
    assert [record.quality for record in records[5:] if "exceeds_peak" in record.quality] == []
    assert done(records[-1]).flops_peak == "bf16"


def test_the_share_of_a_large_copy(peaks: DevicePeaks) -> None:
    """A copy of 512 MiB reaches nearly what copies were measured to reach: median of 20."""
    import torch

    source = torch.ones(128 << 20, device="cuda")
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    with capture() as records:
        for _ in range(25):
            with gpu_span("copy", work=Work(bytes=2 * size)):
                target.copy_(source)
    shares = [number(done(record).share_of_peak) for record in records[5:]]
    print("share of memory bandwidth:", statistics.median(shares))
    assert 0.7 < statistics.median(shares) < 1.1
    assert {done(record).exceeds_peak for record in records[5:]} == {False}


def _twenty(side: Any, product: Any) -> Record:
    """Launch twenty products, on *side* or the marked stream, in a deferred span."""
    import torch

    work = Work(flops=20 * 2 * 2048**3, dtype="bf16")
    with capture() as records:
        with gpu_span("twenty", sync="deferred", work=work), torch.cuda.stream(side):
            product()
        torch.cuda.synchronize()
    return records[0]


def test_twenty_products_that_nobody_waited_for(peaks: DevicePeaks) -> None:
    """On a side stream their time is not in the span: thousands of TFLOP/s, flagged. On the marked one: not flagged.

    As one graph launch, so that what the span does hold is one launch, and no queue of twenty.
    """
    import torch

    a, b = (torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(20):
            torch.mm(a, b, out=out)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    late = [_twenty(side, graph.replay) for _ in range(5)]
    rates = [number(done(record).flops_per_s) for record in late]
    print("implied on another stream:", [f"{rate / 1e12:,.0f} TFLOP/s" for rate in rates])
    assert statistics.median(rates) > 2_000e12
    assert sum("exceeds_peak" in record.quality for record in late) >= 4  # one may have been held up by the host
    waited = [_twenty(torch.cuda.current_stream(), graph.replay) for _ in range(5)]
    print("on the marked one:", [number(done(record).flops_per_s) / 1e12 for record in waited])
    assert [record.quality for record in waited if "exceeds_peak" in record.quality] == []
    assert {done(record).exceeds_peak for record in waited} == {False}


def test_eager_products_on_a_side_stream_are_flagged(peaks: DevicePeaks) -> None:
    """Launched one by one the span holds the time of twenty launches, and is still far too short for the work."""
    import torch

    # Larger than in the lesson: launching takes the host some 5 µs each, whatever is launched.
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    side = torch.cuda.Stream()
    torch.mm(a, b, out=out)
    with torch.cuda.stream(side):
        torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    with capture() as records:
        with (
            gpu_span("twenty", sync="deferred", work=Work(flops=20 * 2 * 8192**3, dtype="bf16")),
            torch.cuda.stream(side),
        ):
            for _ in range(20):
                torch.mm(a, b, out=out)
        torch.cuda.synchronize()
    print(done(records[0]))
    assert done(records[0]).exceeds_peak is True


def test_torch_counts_on_the_device(peaks: DevicePeaks) -> None:
    """The counted call returns the same and says so; captures are not counted, and capture as ever."""
    import torch

    a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    timed = gpu_timed(name="w", work="count")(lambda x: torch.relu(x @ x))
    with capture() as records:
        results = [timed(a) for _ in range(3)]
    assert [done(record).flops for record in records] == [2 * 1024**3] * 3
    assert ["flops_counted" in record.quality for record in records] == [True, False, False]
    assert torch.equal(results[0], results[1])
    fresh = gpu_timed(name="w2", work="count")(lambda x: torch.relu(x @ x))
    graph = torch.cuda.CUDAGraph()
    with capture() as records:
        with torch.cuda.graph(graph):
            out = fresh(a)
        graph.replay()
        torch.cuda.synchronize()
        fresh(a)
    assert torch.equal(out, results[0])
    assert isinstance(records[0].work, Missing)
    assert "captured" in records[0].work.detail
    assert done(records[1]).flops == 2 * 1024**3


def test_attention_is_counted_without_a_read_back(peaks: DevicePeaks) -> None:
    """Scaled dot-product attention, dense: counted, with no synchronisation."""
    import torch

    q, k, v = (torch.randn(2, 8, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    attend(q, k, v)
    timed = gpu_timed(name="sdpa", sync="deferred", work="count")(attend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with capture() as records:
            timed(q, k, v)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert done(records[0]).flops == 2 * 2 * 2 * 8 * 512 * 512 * 64


def test_the_self_test_keeps_peaks_and_the_doctor_names_them(tmp_path: Path) -> None:
    """``gpu-timed selftest --quick`` ends with a row ``peak``; ``gpu-timed doctor`` then says when it was."""
    import os

    import gpu_timed as package

    pytest.importorskip("typer")
    environment = {
        **os.environ,
        "GPU_TIMED_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(Path(package.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }

    def told(*arguments: str) -> dict[str, Any]:
        ran = subprocess.run(
            [sys.executable, "-m", "gpu_timed", *arguments, "--json"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        found: dict[str, Any] = json.loads(ran.stdout)
        return found

    (row,) = (row for row in told("selftest", "--quick")["rows"] if row["name"] == "peak")
    print(row["text"])
    assert row["verdict"] == "info"
    assert Path(row["values"]["path"]).parent == tmp_path
    (devices,) = (section for section in told("doctor")["sections"] if section["name"] == "devices")
    (finding,) = (finding for finding in devices["findings"] if finding["key"] == "peak.0")
    print(finding["text"])
    assert finding["level"] == "ok"
