"""For tests: look at the records, and measure on a device that needs no GPU.

::

    from gpu_timed.testing import FakeDevice, capture, use_device

    def test_my_model():
        with use_device(FakeDevice()) as device, capture() as records:
            my_decorated_function()
        assert [record.name for record in records] == ["my_decorated_function"]
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gpu_timed import current
from gpu_timed.clocks.fake import FakeDevice, FakeHost
from gpu_timed.errors import GpuTimedError, WaitTimeout
from gpu_timed.export.memory import MemorySink
from gpu_timed.record import Record

__all__ = ["FakeDevice", "FakeHost", "capture", "reset", "use_device"]


@contextlib.contextmanager
def capture(timeout_s: float = 30.0) -> Iterator[list[Record]]:
    """Collect the record of every span that ends inside the block, in the order in which they ended.

    The list fills as spans are resolved, by another thread and now and then, and is complete when the block has
    ended: read it there. Leaving the block, by an error too, waits for the device, at most *timeout_s* seconds, and
    lets a fake one that stands still finish what was queued. A thread or generator that still runs then is not in it.

    Raises:
        WaitTimeout: The device had not finished in time.
        GpuTimedError: There were more records than are kept, a million: the list lacks the later ones.
    """
    tracer = current.tracer()
    tracer.epoch += 1
    sink = MemorySink(tracer.epoch)

    def complete() -> int:
        locator = tracer.locator
        if isinstance(locator, FakeDevice):
            locator.run_dry()
        return tracer.resolver.flush(timeout_s)

    with current.sink(sink):
        try:
            yield sink.records
        except Exception:  # the user's goes first, and what was measured before it is there
            complete()
            raise
        left = complete()
    if left:
        raise WaitTimeout(f"{left} spans were not reached by the device within {timeout_s} s.")
    if sink.dropped:
        raise GpuTimedError(
            f"capture() keeps {len(sink.records)} records, and {sink.dropped} more were dropped. Capture a shorter "
            "part of the run, or record one call in N with every=N."
        )


@contextlib.contextmanager
def use_device(device: FakeDevice) -> Iterator[FakeDevice]:
    """Measure on *device*, with its clock as the host's, for the length of the block.

    Leaving the block lets the device finish what was queued on it.
    """
    with current.device(device, device.host):
        yield device
    device.run_dry()


def reset() -> None:
    """Forget all state of the process: settings, counts, pending spans. Between tests."""
    current.reset()
