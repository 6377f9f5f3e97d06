"""A fake device as the self-test sees one: kernels whose true duration is known, and a host that takes its time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from gpu_timed.testing import FakeDevice
from gpu_timed.trials import Stamp

LAUNCH_NS = 4_000
"""What a launch costs the fake host."""


class FakeRig:
    """Launches on a fake device, whose clock stands still but for what is done to it."""

    device = 0
    cycles_per_ns = 1.98

    def __init__(self, fake: FakeDevice) -> None:
        self.fake = fake
        self._stamps: list[Stamp] = []
        self._launch_ns = LAUNCH_NS

    def measure_timer(self) -> int:
        """Say that it moves by the nanosecond."""
        return 1

    def launch(self, duration_ns: int) -> None:
        """Queue it, after the time that a launch takes the host."""
        self._queue(duration_ns, self._launch_ns)

    def replay(self, duration_ns: int) -> Callable[[], None]:
        """Return a launch that is cheap."""
        return lambda: self._queue(duration_ns, self._launch_ns // 4)

    def occupy(self, duration_ns: int) -> None:
        """Queue it without a stamp."""
        self.fake.launch(duration_ns)

    def occupy_other(self, duration_ns: int) -> None:
        """Queue it on stream 9."""
        with self.fake.use(stream=9):
            self.fake.launch(duration_ns)

    @contextlib.contextmanager
    def on_side_stream(self) -> Iterator[int]:
        """Make stream 5 the current one."""
        with self.fake.use(stream=5):
            yield 5

    def stream(self) -> int:
        """Return the current stream."""
        return self.fake._where()[1]

    @contextlib.contextmanager
    def busy_host(self) -> Iterator[None]:
        """Let launches take a hundred times as long."""
        self._launch_ns = 100 * LAUNCH_NS
        yield
        self._launch_ns = LAUNCH_NS

    def rest(self, duration_ns: int) -> None:
        """Let time pass."""
        self.fake.host_clock.advance(duration_ns)

    def settle(self) -> None:
        """Let time pass until everything is done."""
        self.fake.run_dry()

    def stamps(self) -> list[Stamp]:
        """Return those since the last call."""
        self.settle()
        found, self._stamps = self._stamps, []
        return found

    def _queue(self, duration_ns: int, launch_ns: int) -> None:
        fake = self.fake
        fake.host_clock.advance(launch_ns)
        begin = max(fake.host_clock.now_ns() + fake.launch_latency_ns, fake._stream().ready_at)
        first, last = fake._device_time(begin), fake._device_time(begin + duration_ns)
        fake.launch(duration_ns)
        self._stamps.append(Stamp(first, last, last - first))
