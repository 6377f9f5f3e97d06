"""Work and its throughput, on a device made of arithmetic, with peaks from a file of the test's own."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider, sampling
from opentelemetry.trace import set_tracer_provider

import gpu_timed as package
from gpu_timed import ConfigurationError, Missing, Work, flush, gpu_span, gpu_timed, peaks
from gpu_timed.analysis import throughput
from gpu_timed.peaks import NOT_MEASURED, DevicePeaks, PeakBook
from gpu_timed.record import NOT_SET, Record, WorkDone
from gpu_timed.site import Site
from gpu_timed.testing import FakeDevice, capture, use_device

MS = 1_000_000
PEAKS = DevicePeaks(
    uuid="GPU-fake-0",
    name="Fake GPU",
    driver=None,
    torch="2.0",
    measured="2026-01-31",
    flops_per_s={"bf16": 700e12, "fp32": 50e12, "tf32": 400e12},
    bytes_per_s={"memory": 4e12, "cache": 6e12},
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where peaks are looked for; there are none yet."""
    monkeypatch.setenv("GPU_TIMED_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def known(folder: Path) -> Path:
    """The file of the fake device's peaks."""
    return peaks.save(PEAKS, folder)


@pytest.fixture(autouse=True)
def _never_the_users_own(folder: Path) -> None:
    """No test reads what was measured on the machine it runs on."""


def one(device: FakeDevice, duration_ns: int, *args: Any, **options: Any) -> Record:
    """Run one timed call that takes the device so long; return its record."""
    with capture() as records:
        gpu_timed(name="work", **options)(lambda *_: device.launch(duration_ns))(*args)
    (record,) = records
    return record


# -- Work -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "give flops=, bytes= or both"),
        ({"dtype": "bf16"}, "give flops=, bytes= or both"),
        ({"flops": -1}, "0 or more"),
        ({"bytes": -0.5}, "0 or more"),
        ({"flops": float("nan")}, "finite"),
        ({"flops": float("inf")}, "finite"),
        ({"flops": "1e9"}, "must be a number, not str"),
        ({"flops": True}, "must be a number, not bool"),
        ({"flops": 1, "dtype": "bf61"}, "did you mean 'bf16'"),
        ({"flops": 1, "dtype": "complex64"}, "unknown dtype"),
        ({"flops": 1, "dtype": object()}, "unknown dtype"),
    ],
)
def test_work_that_cannot_be_is_refused_with_the_fix(options, says) -> None:
    """Neither amount, a negative or endless one, or a dtype that nobody knows: said at once."""
    with pytest.raises(ConfigurationError, match=says):
        Work(**options)


def test_an_amount_on_a_device_is_not_read_back() -> None:
    """A tensor is refused by its type: its value is never asked for."""

    class Tensor:
        def __index__(self) -> int:
            raise AssertionError("read back")

        __float__ = __int__ = __index__

    with pytest.raises(ConfigurationError, match="must be a number, not Tensor: work it out from shapes"):
        Work(flops=Tensor())  # type: ignore[arg-type]


def test_numpy_numbers_become_plain_ones() -> None:
    """A NumPy scalar is taken, and kept as a number of Python's."""
    numpy = pytest.importorskip("numpy")
    held = Work(flops=numpy.int64(7), bytes=numpy.float32(0.5))
    assert (held.flops, type(held.flops), held.bytes, type(held.bytes)) == (7, int, 0.5, float)


@pytest.mark.parametrize(
    ("given_as", "found"),
    [
        ("bf16", "bf16"),
        ("bfloat16", "bf16"),
        ("Half", "fp16"),
        ("float32", "fp32"),
        ("float8_e4m3fn", "fp8"),
        ("torch.float16", "fp16"),
        ("tf32", "tf32"),
    ],
)
def test_a_dtype_goes_by_many_names(given_as, found) -> None:
    """Texts of torch and of ours mean the same."""
    assert Work(flops=1, dtype=given_as).dtype == found


def test_dtypes_of_torch_numpy_and_jax_are_taken() -> None:
    """As objects, by their names."""
    torch, numpy = pytest.importorskip("torch"), pytest.importorskip("numpy")
    assert Work(flops=1, dtype=torch.bfloat16).dtype == "bf16"
    assert Work(flops=1, dtype=torch.float8_e5m2).dtype == "fp8"
    assert Work(flops=1, dtype=torch.float64).dtype == "fp64"
    assert Work(flops=1, dtype=numpy.dtype("float16")).dtype == "fp16"
    assert Work(flops=1, dtype=numpy.float32).dtype == "fp32"
    assert Work(flops=1, dtype=numpy.int8).dtype == "int8"
    jnp = pytest.importorskip("jax.numpy")
    assert Work(flops=1, dtype=jnp.bfloat16).dtype == "bf16"


def test_work_is_frozen_equal_by_value_and_can_be_pickled() -> None:
    """Work is a value."""
    held = Work(flops=1, dtype="half")
    with pytest.raises(dataclasses.FrozenInstanceError):
        held.flops = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(held)) == held == Work(flops=1, dtype="fp16")


@pytest.mark.parametrize("work", [1e12, "counted", Work, {"flops": 1}, 2 + 3j])
def test_what_is_no_work_is_refused_where_it_is_decorated(work) -> None:
    """The message says how it is written."""
    with pytest.raises(ConfigurationError, match=r"work=Work\(flops="):
        gpu_timed(work=work)(lambda: None)


@pytest.mark.parametrize("work", ["count", lambda: Work(flops=1), 3])
def test_a_block_takes_work_and_nothing_else(work) -> None:
    """A block has no arguments to count by, or to call a function with."""
    with pytest.raises(ConfigurationError, match="a block has no arguments"):
        gpu_span("block", work=work)


def test_counting_without_torch_names_the_extra(monkeypatch) -> None:
    """``work="count"`` where torch is not installed is refused as it is decorated, with the pip command."""
    import importlib.util
    import sys

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(package.MissingExtraError, match=r"gpu-timed\[torch\]"):
        gpu_timed(work="count")(lambda: None)


def test_a_site_keeps_its_work_when_it_is_pickled() -> None:
    """A copy in another process has the same work, and its own counts."""
    for work in (Work(flops=3), "count"):
        made = pickle.loads(pickle.dumps(Site("s", work=work)))
        assert (made.work or made.work_source) == work
        assert made.counted == ({} if work == "count" else None)


# -- the numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["boundary", "deferred", "device"])
def test_a_rate_and_its_share_of_the_measured_peak(device: FakeDevice, known: Path, sync: str) -> None:
    """3.5e11 operations in a millisecond are 350 TFLOP/s, half of what was measured; bytes likewise."""
    record = one(device, MS, sync=sync, work=Work(flops=3.5e11, bytes=1e9, dtype="bf16"))
    work = record.work
    assert isinstance(work, WorkDone)
    assert (work.flops, work.bytes, work.dtype, work.flops_peak) == (3.5e11, 1e9, "bf16", "bf16")
    assert work.flops_per_s == pytest.approx(350e12)
    assert work.bytes_per_s == pytest.approx(1e12)
    assert work.flops_share == pytest.approx(0.5)
    assert work.bytes_share == pytest.approx(0.25)
    assert work.share_of_peak == work.flops_share
    assert work.exceeds_peak is False
    assert record.quality == ()


def test_without_a_dtype_the_highest_peak_stands_and_is_named(device: FakeDevice, known: Path) -> None:
    """The share is of the highest, which is said; exceeding takes twice as much as with a dtype."""
    work = one(device, MS, work=Work(flops=7e11)).work
    assert (work.flops_peak, work.dtype) == ("bf16", NOT_SET)
    assert work.flops_share == pytest.approx(1.0)
    assert one(device, MS, work=Work(flops=1.7e12)).work.exceeds_peak is False
    assert one(device, MS, work=Work(flops=1.8e12)).work.exceeds_peak is True


def test_twenty_products_that_nobody_waited_for(device: FakeDevice, known: Path) -> None:
    """Twenty products of 2048² on another stream "take" 122 µs, 2,800 TFLOP/s: flagged. On the marked one: not."""

    def twenty(other: bool) -> Record:
        work, stream = Work(flops=20 * 2 * 2048**3, dtype="fp16"), 7 if other else 0
        with capture() as records, gpu_span("twenty", work=work), device.use(stream=stream):
            for _ in range(20):
                device.launch(2 * MS)
                device.host_clock.advance(6_100)
        (record,) = records
        return record

    peaks.save(dataclasses.replace(PEAKS, flops_per_s={"fp16": 8.7e12}), known.parent)
    late = twenty(other=True)
    assert late.work.flops_per_s == pytest.approx(2.8e15, rel=0.01)
    assert late.work.exceeds_peak is True
    assert late.quality == ("exceeds_peak",)
    waited = twenty(other=False)
    assert waited.work.flops_per_s == pytest.approx(8.59e12, rel=0.01)
    assert (waited.work.exceeds_peak, waited.quality) == (False, ())


def test_the_launch_time_of_a_lazy_device_is_never_a_rate(device: FakeDevice, known: Path) -> None:
    """Without a device time there is no rate, no share and no verdict, each for the reason of the time."""
    device.disappear("unsupported_runtime")
    record = one(device, MS, work=Work(flops=1e15, bytes=1e12))
    work = record.work
    assert (work.flops, work.bytes) == (1e15, 1e12)
    for value in (work.flops_per_s, work.bytes_per_s, work.flops_share, work.bytes_share, work.exceeds_peak):
        assert value == Missing("unsupported_runtime")
    assert record.quality == ()


def test_no_peak_measured_is_said_with_the_remedy(device: FakeDevice) -> None:
    """The rate is there; its share is Missing, with the command that measures."""
    work = one(device, MS, work=Work(flops=1e9)).work
    assert work.flops_per_s == pytest.approx(1e12)
    assert work.flops_share == work.exceeds_peak == work.flops_peak == NOT_MEASURED
    assert "gpu-timed selftest" in work.share_of_peak.detail
    assert (work.bytes, work.bytes_per_s, work.bytes_share) == (NOT_SET, NOT_SET, NOT_SET)


def test_a_peak_of_another_dtype_is_none(device: FakeDevice, known: Path) -> None:
    """What was not measured for this type of number is not taken from another."""
    work = one(device, MS, work=Work(flops=1e15, dtype="int8")).work
    assert work.exceeds_peak == work.flops_share == Missing("peak_not_measured", "not of int8")


def test_fp32_may_have_run_as_tf32(device: FakeDevice, known: Path) -> None:
    """A share above 1 of the fp32 peak is no proof of anything, while tf32 could have done it."""
    work = one(device, MS, work=Work(flops=3e11, dtype="fp32")).work
    assert work.flops_share == pytest.approx(6.0)
    assert work.exceeds_peak is False
    assert one(device, MS, work=Work(flops=6e11, dtype="fp32")).work.exceeds_peak is True


def test_bytes_from_a_cache_exceed_nothing(device: FakeDevice, known: Path) -> None:
    """Twice the memory's bandwidth is what a cache gives; beyond twice the fastest copy nothing does."""
    work = one(device, MS, work=Work(bytes=8e9)).work
    assert (work.bytes_share, work.exceeds_peak) == (pytest.approx(2.0), False)
    assert one(device, MS, work=Work(bytes=12.1e9)).work.exceeds_peak is True


def test_a_work_function_is_asked_for_each_recorded_call(device: FakeDevice, known: Path) -> None:
    """Of its arguments, on the calling thread, and for recorded calls only."""
    asked = []

    def work(n: int, *, scale: int = 1) -> Work:
        asked.append((n, scale))
        return Work(flops=n * scale)

    with capture() as records:
        timed = gpu_timed(name="w", every=2, work=work)(lambda n, scale=1: device.launch(MS))
        for n in range(4):
            timed(n, scale=10)
    assert asked == [(0, 10), (2, 10)]
    assert [record.work.flops for record in records] == [0, 20]


@pytest.mark.parametrize("answer", [ValueError("no"), 12, {"flops": 1}])
def test_a_work_function_that_fails_is_counted_and_never_felt(device: FakeDevice, answer: Any) -> None:
    """The call goes on and is timed; its work is Missing."""

    def work() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with capture() as records:
        assert gpu_timed(name="w", work=work)(lambda: 5)() == 5
    (record,) = records
    assert record.work == Missing("work_raised")
    assert record.status == "ok"
    assert isinstance(record.device_ns, int)
    assert flush().counts["work_raised"] == 1


def test_a_work_function_may_not_know(device: FakeDevice) -> None:
    """None means that this call's work is not known: as if nobody had asked."""
    assert one(device, MS, work=lambda: None).work == NOT_SET


def test_set_work_says_it_inside_and_stands_above_what_was_said_before(device: FakeDevice, known: Path) -> None:
    """What is known only at the end replaces what was given; anything but a Work is refused."""
    with capture() as records:
        with gpu_span("block", work=Work(flops=1)) as span:
            device.launch(MS)
            span.set_work(Work(bytes=4e9))
            with pytest.raises(ConfigurationError, match=r"set_work\(\) takes a Work, not int"):
                span.set_work(3)  # type: ignore[arg-type]
        with gpu_span("block", work=Work(flops=2)):
            device.launch(MS)
    first, second = (record.work for record in records)
    assert (first.flops, first.bytes_share) == (NOT_SET, pytest.approx(1.0))
    assert second.flops == 2


def test_async_blocks_and_coroutines_have_work_too(device: FakeDevice, known: Path) -> None:
    """Over all resumptions, by the sum of their device times."""

    @gpu_timed(name="c", work=lambda n: Work(flops=n, dtype="bf16"))
    async def call(n: int) -> None:
        device.launch(MS)
        await asyncio.sleep(0)
        device.launch(MS)

    async def main() -> None:
        await call(1.4e12)
        async with gpu_span("block", work=Work(flops=7e11, dtype="bf16")):
            device.launch(MS)

    with capture() as records:
        asyncio.run(main())
    assert [record.work.flops_share for record in records] == [pytest.approx(1.0)] * 2


def test_nothing_is_asked_of_calls_that_are_not_recorded(device: FakeDevice, monkeypatch) -> None:
    """Unsampled or disabled, the function is never called, and set_work takes no note."""
    set_tracer_provider(TracerProvider(sampler=sampling.ALWAYS_OFF, shutdown_on_exit=False))

    def never(*_: Any) -> Work:
        raise AssertionError("asked")

    assert gpu_timed(name="w", work=never)(lambda: 5)() == 5
    with gpu_span("block", work=Work(flops=1)) as span:
        span.set_work(Work(flops=1))
    assert span.record.work == NOT_SET
    assert "work_raised" not in flush().counts
    package.testing.reset()
    monkeypatch.setenv("GPU_TIMED_DISABLED", "1")

    def bare() -> None:
        """Do nothing."""

    assert gpu_timed(work=never)(bare) is bare
    with gpu_span("block", work=Work(flops=1)) as span:
        span.set_work(Work(flops=1))


def test_the_trace_shows_it_on_both_spans(device: FakeDevice, known: Path, exporter: Any) -> None:
    """Every attribute, under its documented name, on the host span and the device span."""
    one(device, MS, work=Work(flops=3.5e12, bytes=1e9, dtype="bf16"))
    flush()
    for span in exporter.get_finished_spans():
        found = {key: value for key, value in span.attributes.items() if key.startswith("gpu_timed.work")}
        assert found == {
            "gpu_timed.work.flops": 3.5e12,
            "gpu_timed.work.bytes": 1e9,
            "gpu_timed.work.flops_per_s": pytest.approx(3.5e15),
            "gpu_timed.work.bytes_per_s": pytest.approx(1e12),
            "gpu_timed.work.share_of_peak": pytest.approx(5.0),
            "gpu_timed.work.flops_peak": "bf16",
            "gpu_timed.work.exceeds_peak": True,
        }, span.name
        assert span.attributes["gpu_timed.quality"] == ("exceeds_peak",)
    assert len(exporter.get_finished_spans()) == 2


def test_what_is_missing_is_no_attribute_but_why(device: FakeDevice, exporter: Any) -> None:
    """Without a peak no share; where the work itself is not known, the reason; without work nothing at all."""
    one(device, MS, work=Work(flops=1e9))
    one(device, MS, work=lambda: 3)
    one(device, MS)
    flush()
    found = [
        {key.removeprefix("gpu_timed.work.") for key in span.attributes if key.startswith("gpu_timed.work.")}
        for span in exporter.get_finished_spans()
        if not span.name.endswith("[gpu]")
    ]
    assert found == [{"flops", "flops_per_s"}, {"missing"}, set()]


def test_device_only_spans_say_the_work_late(device: FakeDevice, known: Path, exporter: Any) -> None:
    """The host span that ends on time has the work, and the device span the rate."""
    one(device, MS, sync="deferred", late="device_only", work=Work(flops=7e11, dtype="bf16"))
    flush()
    host, late = sorted(exporter.get_finished_spans(), key=lambda span: span.name)
    assert host.attributes["gpu_timed.work.flops"] == 7e11
    assert "gpu_timed.work.flops_per_s" not in host.attributes
    assert late.attributes["gpu_timed.work.share_of_peak"] == pytest.approx(1.0)


# -- the arithmetic ---------------------------------------------------------------------------------------

amounts = st.one_of(st.none(), st.integers(0, 10**18), st.floats(0, 1e18))
times = st.one_of(st.integers(0, 10**12), st.just(Missing("pending")))
some_peaks = st.one_of(
    st.just(NOT_MEASURED),
    st.builds(
        lambda flops, memory, cache: DevicePeaks(
            uuid="u",
            flops_per_s=flops,
            bytes_per_s={name: rate for name, rate in (("memory", memory), ("cache", cache)) if rate},
        ),
        st.dictionaries(st.sampled_from(["fp32", "bf16", "fp8"]), st.floats(1.0, 1e16), max_size=3),
        st.one_of(st.none(), st.floats(1.0, 1e14)),
        st.one_of(st.none(), st.floats(1.0, 1e14)),
    ),
)


@given(amounts, amounts, times, st.sampled_from([None, "fp32", "bf16"]), some_peaks)
def test_rates_shares_and_verdicts_agree(flops, nbytes, device_ns, dtype, held) -> None:
    """A rate times its time is the work; a share times its peak the rate; a verdict only where there is both."""
    if flops is None and nbytes is None:
        return
    found = throughput.done(Work(flops=flops, bytes=nbytes, dtype=dtype), device_ns, held)
    for amount, rate, share in (
        (flops, found.flops_per_s, found.flops_share),
        (nbytes, found.bytes_per_s, found.bytes_share),
    ):
        if amount is None:
            assert rate == share == NOT_SET
        elif isinstance(device_ns, Missing):
            assert rate == share == device_ns
        elif device_ns == 0:
            assert rate.reason == "no_time"
        else:
            assert rate * device_ns / 1e9 == pytest.approx(amount)
    if not isinstance(found.flops_share, Missing):
        assert found.flops_share * held.flops_per_s[found.flops_peak] == pytest.approx(found.flops_per_s)
        assert found.flops_peak == (dtype or max(held.flops_per_s, key=held.flops_per_s.__getitem__))
        if found.flops_share > 2 * 1.25:
            assert found.exceeds_peak is True
    if found.exceeds_peak is True and not isinstance(found.share_of_peak, Missing):
        assert found.share_of_peak > 1
    shares = [share for share in (found.flops_share, found.bytes_share) if not isinstance(share, Missing)]
    if shares and max(shares) <= 1:
        assert found.exceeds_peak is False
    if isinstance(device_ns, Missing) or held is NOT_MEASURED:
        assert isinstance(found.exceeds_peak, Missing)
    assert found.exceeds_peak != NOT_SET


def test_work_in_no_time_at_all_exceeds_every_peak() -> None:
    """A device time of 0 gives no rate, and still a verdict: nothing is done in no time."""
    found = throughput.done(Work(flops=1.0, dtype="bf16"), 0, PEAKS)
    assert (found.flops_per_s.reason, found.exceeds_peak) == ("no_time", True)
    assert throughput.done(Work(flops=0), 0, PEAKS).exceeds_peak is False


def test_one_verdict_is_enough() -> None:
    """Where the peak of one kind is not known, the other decides; either one exceeding is exceeding."""
    both = Work(flops=1e9, bytes=1e9, dtype="int8")
    assert throughput.done(both, MS, PEAKS).exceeds_peak is False
    assert throughput.done(both, 10, PEAKS).exceeds_peak is True


# -- the files --------------------------------------------------------------------------------------------


def test_what_is_saved_is_found_again(tmp_path: Path) -> None:
    """By UUID and driver; of several torches the installed one's, else the newest."""
    import os

    old = dataclasses.replace(PEAKS, driver="580.1", torch="2.6", measured="2025-01-01")
    new = dataclasses.replace(PEAKS, driver="580.1", torch="2.11+cu130", measured="2026-01-01")
    saved = [peaks.save(each, tmp_path / "deep") for each in (old, new)]
    os.utime(saved[0], (1, 1))
    folder = tmp_path / "deep"

    def date(*key: Any) -> str:
        return peaks.load(folder, "GPU-fake-0", *key).measured

    assert date("580.1", "2.6") == "2025-01-01"
    assert date("580.1", "2.11+cu130") == "2026-01-01"
    assert date("580.1", "2.9") == date(None, None) == "2026-01-01"
    assert peaks.load(folder, "GPU-fake-1", "580.1", "2.6") == NOT_MEASURED
    found = peaks.load(folder, "GPU-fake-0", "580.1", "2.6")
    assert dataclasses.replace(found, path="") == old
    assert found.path == str(saved[0])
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in saved)


def test_another_driver_s_peaks_are_not_taken(tmp_path: Path) -> None:
    """It is said which driver they were measured with."""
    peaks.save(dataclasses.replace(PEAKS, driver="570.1"), tmp_path)
    found = peaks.load(tmp_path, "GPU-fake-0", "580.1", "2.0")
    assert found.reason == "peak_not_measured"
    assert "measured with driver 570.1, and this is 580.1" in found.detail


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"schema": 99}',
        json.dumps({"schema": 1, "uuid": "GPU-fake-0", "flops_per_s": {"bf16": -1}, "bytes_per_s": {}}),
        json.dumps({"schema": 1, "uuid": "GPU-fake-0", "flops_per_s": {"bf16": "x"}, "bytes_per_s": {}}),
        json.dumps({"schema": 1, "uuid": "GPU-fake-0", "flops_per_s": 3, "bytes_per_s": {}}),
        "[" * 100_000,
    ],
)
def test_a_file_that_cannot_be_read_is_said_and_not_felt(device: FakeDevice, known: Path, text: str) -> None:
    """Whatever is in it, the record is made, and says that the file cannot be read."""
    known.write_text(text, encoding="utf-8")
    work = one(device, MS, work=Work(flops=1e9)).work
    assert work.flops_share.reason == "peak_not_measured"
    assert "cannot be read" in work.flops_share.detail
    assert "reading" not in flush().counts


def test_a_file_that_is_half_written_is_never_seen(tmp_path: Path, monkeypatch) -> None:
    """What fails while it is written leaves the old file, and no other."""
    peaks.save(PEAKS, tmp_path)
    monkeypatch.setattr(json, "dump", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        peaks.save(dataclasses.replace(PEAKS, measured="later"), tmp_path)
    assert peaks.load(tmp_path, "GPU-fake-0", None, None).measured == PEAKS.measured
    assert len(list(tmp_path.iterdir())) == 1


def test_where_they_are_kept(tmp_path: Path, monkeypatch) -> None:
    """The variable, else XDG's cache, else the home's; a relative XDG path is ignored; without a home nowhere."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert peaks.directory({"GPU_TIMED_CACHE_DIR": "/a/b"}) == Path("/a/b")
    assert peaks.directory({"XDG_CACHE_HOME": "/c"}) == Path("/c/gpu_timed")
    assert peaks.directory({"XDG_CACHE_HOME": "c"}) == tmp_path / ".cache/gpu_timed"
    assert peaks.directory({"GPU_TIMED_CACHE_DIR": " "}) == tmp_path / ".cache/gpu_timed"

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    assert peaks.directory({}) is None
    assert peaks.load(None, "u", None, None) == NOT_MEASURED


def test_a_device_is_looked_up_once_and_again_when_told(tmp_path: Path) -> None:
    """The book reads a device's file once; a fault while it looks is an answer as well."""
    asked = []
    book = PeakBook(lambda: asked.append(1) or tmp_path, lambda: None, lambda: None)
    assert book.of("GPU-fake-0") == book.of("GPU-fake-0") == NOT_MEASURED
    assert len(asked) == 1
    peaks.save(PEAKS, tmp_path)
    assert book.of("GPU-fake-0") == NOT_MEASURED
    book.forget()
    assert book.of("GPU-fake-0").flops_per_s == PEAKS.flops_per_s
    assert book.of(Missing("no_device")).reason == "peak_not_measured"

    def fails() -> None:
        raise ValueError("broken")

    assert "broken" in PeakBook(fails, lambda: None, lambda: None).of("u").detail


def test_work_that_nobody_asked_for_reads_no_file(device: FakeDevice, monkeypatch) -> None:
    """The peaks are looked up for spans with work, and for no others; without a peak file nothing fails."""

    def never(*_: Any) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(peaks, "load", never)
    assert one(device, MS).work == NOT_SET
    with use_device(FakeDevice()) as other:
        assert one(other, MS).work == NOT_SET


def test_the_variable_is_known_to_settings_and_doctor(folder: Path, caplog) -> None:
    """``GPU_TIMED_CACHE_DIR`` is no spelling mistake."""
    import os

    from gpu_timed.diagnosis import variables
    from gpu_timed.settings import from_environment

    from_environment(os.environ)
    assert "unknown setting" not in caplog.text
    assert [finding.key for finding in variables.findings(os.environ, None) if finding.level == "warning"] == []


@pytest.fixture(autouse=True)
def _no_mark_is_lost(device: FakeDevice) -> Iterator[None]:
    """Whatever a test does with ``device``, every mark is given back in the end."""
    yield
    device.run_dry()
    flush(5)
    assert device.marks_in_use == 0
