"""Measuring what a device can do at most, on a bench made of arithmetic; and who is told of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_timed import ConfigurationError, GpuTimedError, Work, gpu_span, measure_peaks, peaks, selftest
from gpu_timed.clocks import cuda_driver
from gpu_timed.diagnosis import peaks as room
from gpu_timed.findings import DeviceFacts, Inventory
from gpu_timed.measure import ceilings, peak_taking
from gpu_timed.peaks import DevicePeaks, PeakBook
from gpu_timed.testing import FakeDevice, capture

GIB = 1 << 30
CARD = {"uuid": "GPU-fake-0", "card": "Fake GPU"}


class FakeBench:
    """A device with given rates; its clock is the time that the work takes, no more."""

    def __init__(self, rates: dict[str, float], *, free: int = 64 * GIB, best: int = 4096) -> None:
        self.rates, self.free, self.best = rates, free, best
        self.now = 0.0
        self.sizes: list[tuple[str, int]] = []
        self.copies: list[int] = []
        self.cold = 3
        self.odd: list[float] = []

    def free_bytes(self) -> int:
        return self.free

    def dtypes(self) -> list[tuple[str, float]]:
        return [("bf16", 2.0), ("fp32", 4.0), ("fp8", 1.0)]

    def product_ns(self, dtype: str, size: int) -> Callable[[], float]:
        if dtype not in self.rates:
            raise RuntimeError(f"no {dtype} here")
        self.sizes.append((dtype, size))
        rate = self.rates[dtype] * (1.0 if size == self.best else 0.8)
        return self._run(2.0 * size**3 / rate * 1e9)

    def copy_ns(self, nbytes: int) -> Callable[[], float]:
        self.copies.append(nbytes)
        return self._run(2.0 * nbytes / (4e12 if nbytes >= ceilings.SMALLEST_COPY else 6e12) * 1e9)

    def _run(self, each_ns: float) -> Callable[[], float]:
        left = [self.cold, *self.odd]

        def run() -> float:
            slow = 10.0 if left[0] > 0 else 1.0
            left[0] -= 1
            if left[0] < 0 and len(left) > 1:
                slow = left.pop()
            self.now += each_ns * slow / 1e9
            return each_ns * slow

        return run


def flops(bench: FakeBench, seconds: float = 2.0) -> dict[str, float]:
    """Measure within *seconds* of the bench's own time."""
    return ceilings.flops(bench, seconds)


def test_the_best_size_of_each_type_of_number_stands() -> None:
    """Its median, without the first trials and whatever a single one did; a type that is not there is left out."""
    bench = FakeBench({"bf16": 700e12, "fp32": 50e12})
    bench.odd = [0.01, 50.0, 50.0, 50.0]  # one reading far too fast, some far too slow
    assert flops(bench, seconds=1_000) == {"bf16": pytest.approx(700e12), "fp32": pytest.approx(50e12)}


def test_a_slow_device_is_not_kept_for_minutes() -> None:
    """A size that would take longer than there is time is left out: of what it could do, the smaller ones tell."""
    fast, slow = FakeBench({"bf16": 700e12}), FakeBench({"bf16": 1e12, "fp32": 0.25e12})
    flops(fast)
    assert [size for _, size in fast.sizes] == list(ceilings.SIZES)
    found = flops(slow)
    assert max(size for _, size in slow.sizes) < 8192
    assert slow.now < 2 * 2.0
    assert set(found) == {"bf16", "fp32"}


def test_memory_is_bounded() -> None:
    """No more than a quarter of what is free is taken; with too little, what does not fit is left out."""
    bench = FakeBench({"bf16": 700e12}, free=1 * GIB)
    flops(bench)
    assert {size for _, size in bench.sizes} == {1024, 2048, 4096}
    found = ceilings.bandwidths(bench)
    assert max(bench.copies) == 32 << 20
    assert found == {"cache": pytest.approx(6e12)}
    roomy = FakeBench({}, free=3 * GIB)
    assert set(ceilings.bandwidths(roomy)) == {"memory", "cache"}
    assert max(roomy.copies) == 256 << 20
    ample = FakeBench({}, free=80 * GIB)
    ceilings.bandwidths(ample)
    assert max(ample.copies) == GIB


def test_copies_count_reading_and_writing() -> None:
    """A byte copied is two bytes moved."""
    assert ceilings.bandwidths(FakeBench({})) == {"memory": pytest.approx(4e12), "cache": pytest.approx(6e12)}


def test_nothing_measured_is_an_error_that_says_why() -> None:
    """With the words of the last attempt; so is a clock that does not move."""
    with pytest.raises(GpuTimedError, match="no fp8 here"):
        flops(FakeBench({}))
    with pytest.raises(GpuTimedError, match="did not move"):
        flops(FakeBench(dict.fromkeys(("bf16", "fp32", "fp8"), float("inf"))))


def test_what_is_measured_is_kept_and_spans_of_this_process_know_it(
    device: FakeDevice, tmp_path: Path, monkeypatch
) -> None:
    """The row says the figures and the file; a span that found none before finds them now."""
    monkeypatch.setenv("GPU_TIMED_CACHE_DIR", str(tmp_path))

    def share() -> Any:
        with capture() as records, gpu_span("block", work=Work(flops=7e11, dtype="bf16")):
            device.launch(1_000_000)
        return records[0].work.flops_share

    assert share().reason == "peak_not_measured"
    bench = FakeBench({"bf16": 700e12, "fp32": 50e12})
    (row,) = peak_taking.rows(bench, CARD)
    assert share() == pytest.approx(1.0)
    assert (row.section, row.name, row.verdict) == ("device", "peak", "info")
    assert "at most bf16 700 TFLOP/s, fp32 50 TFLOP/s, memory 4,000 GB/s, cache 6,000 GB/s; kept in" in row.text
    held = json.loads(Path(row.values["path"]).read_text(encoding="utf-8"))
    assert held["flops_per_s"]["bf16"] == pytest.approx(700e12)
    assert (held["uuid"], held["name"], held["schema"]) == ("GPU-fake-0", "Fake GPU", 1)
    json.dumps(row.values)


def test_a_home_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch) -> None:
    """The figures are shown; that they are not kept is said with the fix, and is no failure of the test."""
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("GPU_TIMED_CACHE_DIR", str(file / "below"))
    (row,) = peak_taking.rows(FakeBench({"bf16": 700e12}), CARD)
    assert (row.verdict, row.values["path"]) == ("info", None)
    assert "not kept" in row.text
    assert "set GPU_TIMED_CACHE_DIR" in row.text
    monkeypatch.setattr(peaks, "directory", lambda: None)
    (row,) = peak_taking.rows(FakeBench({"bf16": 700e12}), CARD)
    assert "no home directory" in row.text


@pytest.mark.parametrize(("rates", "card"), [({}, CARD), ({"bf16": 1e12}, {"card": "Fake GPU"})])
def test_what_cannot_be_measured_is_a_row_and_no_failure(rates, card) -> None:
    """The self-test is about times; a device without a UUID, or without products, passes it."""
    (row,) = peak_taking.rows(FakeBench(rates), card)
    assert (row.verdict, row.failed) == ("skipped", False)
    assert "could not be measured" in row.text


@pytest.mark.parametrize("seconds", [0, -1, "2", True, 601])
def test_a_time_that_cannot_be_is_refused(seconds) -> None:
    """Before torch is looked for."""
    with pytest.raises(ConfigurationError, match="seconds must be"):
        measure_peaks(seconds=seconds)


def test_without_a_gpu_nothing_is_measured_and_it_is_said(monkeypatch) -> None:
    """No driver: one sentence. A driver, but a torch without CUDA: another."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(cuda_driver, "device_present", lambda: False)
    with pytest.raises(GpuTimedError, match="peaks cannot be measured: there is no NVIDIA GPU"):
        measure_peaks()
    if torch.version.cuda is None:
        monkeypatch.setattr(selftest, "_absent", lambda: "")
        with pytest.raises(GpuTimedError, match="built without CUDA"):
            measure_peaks()


def test_what_was_not_loaded_yet_costs_no_size() -> None:
    """Ten slow first trials, as of a library that is loaded, leave the larger sizes their time: it is the device's."""
    import time

    class Loading(FakeBench):
        def product_ns(self, dtype: str, size: int) -> Callable[[], float]:
            if not self.sizes:
                time.sleep(0.1)  # more than a type has
            return super().product_ns(dtype, size)

    bench = Loading({"bf16": 700e12})
    assert flops(bench, seconds=0.09 * 3) == {"bf16": pytest.approx(700e12)}


def test_the_doctor_says_when_they_were_measured(tmp_path: Path) -> None:
    """Or that they were not, with the command; a device without a UUID is passed over."""
    facts = DeviceFacts(index=0, uuid="GPU-fake-0", name="Fake GPU", memory_bytes=None, compute_mode="default")
    inventory = Inventory(devices=(facts, dataclasses.replace(facts, index=1, uuid=None)))
    book = PeakBook(lambda: tmp_path, lambda: "580.1", lambda: "2.11")
    (finding,) = room.findings(inventory, book)
    assert (finding.key, finding.level, finding.fix) == ("peak.0", "note", "gpu-timed selftest")
    assert finding.text == "peak of device 0: not measured: spans with work= show no share of it"
    found = DevicePeaks(
        uuid="GPU-fake-0",
        driver="580.1",
        torch="2.11",
        measured="2026-01-31",
        flops_per_s={"bf16": 7.123e14, "fp32": 5e13},
        bytes_per_s={"memory": 4.1e12},
    )
    peaks.save(found, tmp_path)
    book.forget()
    (finding,) = room.findings(inventory, book)
    assert finding.level == "ok"
    assert finding.text == (
        "peak of device 0: 712 TFLOP/s in bf16, 4,100 GB/s of memory; measured 2026-01-31 with torch 2.11"
    )
    assert finding.values["flops_per_s"] == {"bf16": 7.123e14, "fp32": 5e13}
    other = PeakBook(lambda: tmp_path, lambda: "590.1", lambda: "2.11")
    (finding,) = room.findings(inventory, other)
    assert "measured with driver 580.1, and this is 590.1" in finding.text
