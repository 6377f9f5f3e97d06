"""Records and spans are handed over as their calls ended, whatever streams they are on and whoever asked for them."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gpu_timed import configure, flush, gpu_span, gpu_timed
from gpu_timed.resolver import Resolver
from gpu_timed.testing import FakeDevice, capture

US = 1_000


@pytest.fixture(autouse=True)
def _seldom_looked_at() -> None:
    """All of a test's spans have arrived before the first is looked at."""
    configure(poll_ms=60_000)


def on_streams(device: FakeDevice, sync: Any, streams: list[int]) -> None:
    for index, stream in enumerate(streams):
        with device.use(stream=stream), gpu_span(f"{index}", sync=sync):
            device.launch(US)


@pytest.mark.parametrize("sync", ["boundary", "deferred", "device"])
@pytest.mark.parametrize("streams", [[1, 2, 1, 2, 1, 3, 2], [0] * 5, [5, 4, 3, 2, 1], [1, 1, 2, 2, 1]])
def test_calls_on_several_streams(device: FakeDevice, sync: Any, streams: list[int]) -> None:
    with capture() as records:
        on_streams(device, sync, streams)
        device.run_dry()
    assert [record.name for record in records] == [str(index) for index in range(len(streams))]


@pytest.mark.parametrize("sync", ["boundary", "deferred"])
def test_a_child_on_another_stream_is_there_before_its_parent(
    device: FakeDevice, exporter: InMemorySpanExporter, sync: Any
) -> None:
    """Processors put a trace together when its root ends."""

    @gpu_timed(sync=sync)
    def parent() -> None:
        device.launch(US)
        with device.use(stream=7), gpu_span("child", sync=sync):
            device.launch(US)

    for _ in range(3):
        parent()
        with gpu_span("elsewhere", sync=sync):
            device.launch(US)
    device.run_dry()
    flush(10)
    names = [span.name for span in exporter.get_finished_spans() if "[" not in span.name]
    assert [name.rpartition(".")[2] for name in names] == ["child", "parent", "elsewhere"] * 3


def test_what_is_late_holds_up_its_own_stream_alone(device: FakeDevice) -> None:
    with capture() as records:
        with device.use(stream=1), device.held():
            on_streams(device, "deferred", [1, 2, 1, 3, 2])
            device.run_dry()
            flush(0.2)
            assert [record.name for record in records] == ["1", "3", "4"]
        device.run_dry()
    assert [record.name for record in records] == ["1", "3", "4", "0", "2"]


def test_what_was_asked_for_keeps_its_place(device: FakeDevice) -> None:
    with capture() as records:
        on_streams(device, "deferred", [1, 2])
        with gpu_span("asked", sync="deferred") as span:
            device.launch(US)
        device.run_dry()
        span.wait(5)
        on_streams(device, "deferred", [1])
        device.run_dry()
    assert [record.name for record in records] == ["0", "1", "asked", "0"]


def test_what_is_known_as_it_comes_is_looked_at_as_one(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them, each looked for among all, would take the interpreter from the program."""
    lanes: list[int] = []
    real = Resolver._look

    def look(self: Any) -> None:
        lanes.append(len(self._lanes))
        real(self)

    monkeypatch.setattr(Resolver, "_look", look)
    with capture() as records:
        for index in range(300):
            with gpu_span(f"{index}", sync="deferred") as span:
                device.launch(US)
            device.run_dry()
            span.wait(5)
    assert [record.name for record in records] == [str(index) for index in range(300)]
    assert max(lanes) == 1


def test_what_was_asked_for_waits_for_no_other(device: FakeDevice) -> None:
    """Not even for one of its own stream that is being read elsewhere, or that nobody can read."""
    with capture() as records:
        with device.use(stream=1), device.held():
            on_streams(device, "deferred", [1])
            with device.use(stream=2), gpu_span("asked", sync="deferred") as span:
                device.launch(US)
            device.run_dry()
            span.wait(5)
            flush(0.2)
            assert [record.name for record in records] == ["asked"]
        device.run_dry()
    assert [record.name for record in records] == ["asked", "0"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_that_leaves_the_block_takes_no_record_along(device: FakeDevice, error: type[BaseException]) -> None:
    """An interrupt is not made to wait for the device."""

    @gpu_timed(sync="deferred")
    def fails() -> None:
        device.launch(US)
        raise error("mine")

    with pytest.raises(error, match="mine"), capture() as records:
        fails()
    assert len(records) == (error is ValueError)


def test_the_users_error_goes_before_that_of_a_device_that_is_late(device: FakeDevice) -> None:
    def run() -> None:
        with capture(timeout_s=0.05):
            on_streams(device, "deferred", [0])
            raise ValueError("mine")

    with device.held(), pytest.raises(ValueError, match="mine"):
        run()
