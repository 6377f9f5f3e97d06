"""How long the stream had been idle before a span: exact on a device made of arithmetic, and never too short."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_timed import current, flush, gpu_span, gpu_timed
from gpu_timed.ports import Place
from gpu_timed.record import Missing, Record
from gpu_timed.testing import FakeDevice, capture, use_device

US = 1_000
MS = 1_000_000
S = 1_000_000_000
NONE = Missing("no_earlier_span")


@pytest.fixture(autouse=True)
def _no_mark_is_lost(device: FakeDevice) -> Iterator[None]:
    yield
    device.run_dry()
    assert flush(5).pending == 0
    assert device.marks_in_use == 0


def idle(records: list[Record]) -> list[object]:
    return [record.idle_before_ns for record in records]


def test_dense_then_sparse(device):
    """A7: calls a second apart say so and are not cold for it; those one behind the other say 0."""

    @gpu_timed
    def f() -> None:
        device.launch(2 * MS)

    f()
    with capture() as records:
        for _ in range(50):
            f()
        for _ in range(10):
            device.host_clock.advance(S)
            f()
    dense, sparse = records[:50], records[50:]
    assert idle(dense) == [0] * 50
    assert all(abs(record.idle_before_ns - S) <= 2 * record.uncertainty_ns for record in sparse)
    assert {record.warmth for record in records} == {"warm"}


@pytest.mark.parametrize("sync", ["boundary", "deferred"])
@pytest.mark.parametrize("gap", [0, 7 * US, 3 * MS])
def test_the_time_from_end_to_start(device, sync, gap):
    """Whoever waits or does not."""
    with capture() as records:
        for _ in range(3):
            gpu_timed(name="work", sync=sync)(lambda: device.launch(MS))()
            device.synchronize()
            device.host_clock.advance(gap)
    first, *others = idle(records)
    assert first == NONE
    assert all(abs(value - gap) <= 2 * records[0].uncertainty_ns for value in others)


def test_calls_that_queue_up_have_no_idle_time(device):
    """Behind a busy device a span starts where the last one ended."""
    with capture() as records:
        for _ in range(20):
            gpu_timed(name="work", sync="deferred")(lambda: device.launch(10 * MS))()
    assert idle(records) == [NONE] + [0] * 19


def test_each_stream_for_itself(device):
    """A span on another stream is no end on this one."""
    with capture() as records:
        gpu_timed(name="a")(lambda: device.launch(MS))()
        with device.use(stream=7):
            gpu_timed(name="b")(lambda: device.launch(MS))()
        gpu_timed(name="c")(lambda: device.launch(MS))()
    found = {record.name: record.idle_before_ns for record in records}
    assert (found["a"], found["b"]) == (NONE, NONE)
    assert abs(found["c"] - MS) <= 2 * records[0].uncertainty_ns


def test_spans_inside_a_span(device):
    """The outer one looks back past those inside it, however short they are; the inner ones at what ended before."""
    gpu_timed(name="before")(lambda: device.launch(MS))()
    device.host_clock.advance(S)
    with capture() as records, gpu_span("outer"):
        device.host_clock.advance(1)  # a mark takes time, on a real host
        for _ in range(100):
            with gpu_span("inner"):
                device.launch(US)
        device.host_clock.advance(40 * US)
    assert len(records) == 101
    outer = next(record for record in records if record.name == "outer")
    inner = [record.idle_before_ns for record in records if record.name == "inner"]
    slack = 2 * outer.uncertainty_ns
    assert abs(outer.idle_before_ns - S) <= slack
    assert abs(inner[0] - S - 1) <= slack
    assert all(0 <= value <= slack for value in inner[1:])


def test_without_a_device_time_there_is_none(device):
    """For the reason that the time is missing; and such a span is no end to the next one."""
    gpu_timed(name="before")(lambda: device.launch(MS))()
    with capture() as records:
        with device.capture():
            gpu_timed(name="captured")(lambda: device.launch(MS))()
        device.disappear("no_device")
        gpu_timed(name="gone")(lambda: None)()
        device.appear()
        device.host_clock.advance(S)
        gpu_timed(name="after")(lambda: device.launch(MS))()
    found = {record.name: record for record in records}
    assert found["captured"].idle_before_ns == Missing("captured")
    assert found["gone"].idle_before_ns == Missing("no_device")
    assert abs(found["after"].idle_before_ns - S) <= 2 * found["after"].uncertainty_ns


def test_an_error_of_the_device_is_no_end(device, monkeypatch):
    """After marks that could not be read, the last end that is known counts."""
    gpu_timed(name="before")(lambda: device.launch(MS))()
    assert flush(5).pending == 0
    place = device.locate()
    assert isinstance(place, Place)
    with capture() as records:
        monkeypatch.setattr(device, "elapsed_ns", lambda start, end: Missing("overwritten"))
        gpu_timed(name="lost")(lambda: device.launch(MS))()
        current.tracer().resolver.flush(5)
        monkeypatch.undo()
    assert records[0].idle_before_ns == Missing("overwritten")
    assert len(place.ends) == 1
    assert all(end > 0 for end, _ in place.ends)


@given(
    gaps=st.lists(st.integers(0, 10 * MS), min_size=1, max_size=8),
    works=st.lists(st.integers(0, 10 * MS), min_size=9, max_size=9),
    strangers=st.lists(st.integers(0, MS), min_size=9, max_size=9),
)
def test_it_is_never_less_than_the_truth(gaps, works, strangers):
    """With a stranger's work in between it is what lies between the two marks: idle time and that work."""
    with use_device(FakeDevice()) as device, capture() as records:
        for gap, work, stranger in zip([0, *gaps], works, strangers, strict=False):
            device.host_clock.advance(gap)
            device.launch(stranger)
            gpu_timed(name="work")(lambda work=work: device.launch(work))()
    for before, after, gap, stranger in zip(records, records[1:], gaps, strangers[1:], strict=False):
        assert abs(after.idle_before_ns - gap - stranger) <= before.uncertainty_ns + after.uncertainty_ns
