"""The record and Missing: what can be done with them, and what cannot."""

from __future__ import annotations

import operator

import pytest

from gpu_timed import Missing, gpu_timed
from gpu_timed.settings import from_environment
from gpu_timed.testing import FakeDevice, capture

GONE = Missing("no_device", "no CUDA")


def test_missing_is_false_and_is_no_zero() -> None:
    """Missing is false in a condition, equal to itself alone, and shown by its reason in any format."""
    assert not GONE
    assert GONE != 0
    assert f"{GONE:.1f} {GONE:>9} {GONE}" == " ".join(["Missing('no_device', 'no CUDA')"] * 3)


@pytest.mark.parametrize("do", [operator.add, operator.sub, operator.mul, operator.truediv, operator.lt, operator.ge])
@pytest.mark.parametrize("left", [True, False])
def test_arithmetic_with_missing_says_why(do, left) -> None:
    """Arithmetic and ordering raise TypeError, with the reason in it."""
    with pytest.raises(TypeError, match="no_device"):
        do(GONE, 5) if left else do(5, GONE)


def test_a_record_shows_what_was_measured_and_each_reason_once(device: FakeDevice) -> None:
    """repr names what was measured; what was not is grouped by its reason, and defaults are left out."""
    device.disappear("not_initialised")
    with capture() as records:
        gpu_timed(name="work")(lambda: device.host_clock.advance(7_000))()
    text = repr(records[0])
    assert text.startswith("Record(name='work', ")
    assert "launch_ns=7000" in text
    assert text.count("Missing('not_initialised')") == 1
    assert "kernel_count" not in text
    assert len(text) < 700


@pytest.mark.parametrize("sync", ["boundary", "deferred", "device"])
def test_without_a_gpu_no_device_time_is_a_host_time(sync) -> None:
    """On real torch without CUDA every time of the device is Missing("no_device"), and the clock is the host's."""
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    x = torch.ones(64, 64)
    with capture() as records:
        gpu_timed(name="work", sync=sync)(lambda: x @ x)()
    (record,) = records
    assert record.clock == "host"
    for name in (
        "device_ns",
        "device_min_ns",
        "queue_ns",
        "device_start_ns",
        "device_end_ns",
        "uncertainty_ns",
        "device",
    ):
        assert getattr(record, name).reason == "no_device", name
    assert record.launch_ns > 0


def test_an_empty_variable_is_an_unset_one(caplog: pytest.LogCaptureFixture) -> None:
    """As OpenTelemetry has it, an empty variable means unset; an unknown one is named with its nearest."""
    assert from_environment({"GPU_TIMED_SYNC": "", "GPU_TIMED_MAX_QUEUE": " "}) == from_environment({})
    from_environment({"GPU_TIMED_SYNK": "deferred"})
    assert "gpu_timed: unknown setting GPU_TIMED_SYNK; did you mean GPU_TIMED_SYNC?" in caplog.text
