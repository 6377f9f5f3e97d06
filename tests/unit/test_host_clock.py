"""The host clock: durations from the monotonic clock, positions on the Unix axis, both steady."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from gpu_timed.clocks.host import HostClock

S = 1_000_000_000
EPOCH = 1_700_000_000 * S


class Machine:
    """Two clocks of a host: the monotonic one moves by *read_ns* at each look, the realtime one can be stepped."""

    def __init__(self, read_ns: int = 100) -> None:
        self.mono = 5 * S
        self.step = EPOCH
        self.read_ns = read_ns
        self.unix_reads = 0
        self.slow: dict[int, int] = {}

    def now_ns(self) -> int:
        self.mono += self.read_ns
        return self.mono

    def unix_ns(self) -> int:
        self.unix_reads += 1
        self.mono += self.slow.get(self.unix_reads, 0)  # preempted before the clock is read …
        shown = self.mono + self.step
        self.mono += self.slow.get(-self.unix_reads, 0)  # … or after
        return shown

    def clock(self) -> HostClock:
        return HostClock(self.now_ns, self.unix_ns)


def test_to_unix_adds_the_distance_between_the_clocks() -> None:
    """A monotonic time is placed on the Unix axis within the width of one reading."""
    machine = Machine()
    clock = machine.clock()
    for moment in (0, 5 * S, 900 * S):
        assert abs(clock.to_unix(moment) - (moment + EPOCH)) <= 2 * machine.read_ns


def test_differences_survive_the_placement() -> None:
    """Two times placed with one offset lie exactly as far apart as they were measured."""
    clock = Machine().clock()
    assert clock.to_unix(7 * S + 123) - clock.to_unix(7 * S) == 123


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("undisturbed", range(1, 6))
def test_the_tightest_reading_is_taken(side: int, undisturbed: int) -> None:
    """Four of five readings preempted for milliseconds cost nothing: the one that was not is used."""
    machine = Machine()
    machine.slow = {side * reading: 7_000_000 for reading in range(1, 6) if reading != undisturbed}
    assert abs(machine.clock().to_unix(0) - EPOCH) <= 2 * machine.read_ns


def test_the_offset_is_kept_while_readings_agree() -> None:
    """Readings that differ by no more than they are wide leave the offset as it is, to the nanosecond."""
    machine = Machine(read_ns=100)
    clock = machine.clock()
    before = clock.to_unix(0)
    for wobble in (60, -60, 130, -130, 200, -200):
        machine.mono += 2 * S
        machine.step = EPOCH + wobble
        clock.refresh()
        assert clock.to_unix(0) == before


@pytest.mark.parametrize("step", [37 * S, -37 * S, 2_000_000, -2_000_000])
def test_a_stepped_realtime_clock_is_followed(step: int) -> None:
    """After a step of the realtime clock, forward or back, the next refresh places times where they now belong."""
    machine = Machine()
    clock = machine.clock()
    machine.mono += 2 * S
    machine.step += step
    clock.refresh()
    assert abs(clock.to_unix(0) - (EPOCH + step)) <= 2 * machine.read_ns
    machine.mono += 2 * S
    machine.step -= step
    clock.refresh()
    assert abs(clock.to_unix(0) - EPOCH) <= 2 * machine.read_ns


def test_a_creeping_offset_is_followed_once_it_shows() -> None:
    """A drift too small to see in one reading is taken in when it has added up: it never grows without bound."""
    machine = Machine(read_ns=100)
    clock = machine.clock()
    for creep in range(200):
        machine.mono += 2 * S
        machine.step = EPOCH + 50 * creep
        clock.refresh()
        assert abs(clock.to_unix(0) - machine.step) <= 1_000


def test_a_preempted_refresh_does_not_move_the_offset() -> None:
    """When all five readings of a refresh are wide the old, tight offset stays."""
    machine = Machine()
    clock = machine.clock()
    before = clock.to_unix(0)
    machine.mono += 2 * S
    machine.slow = dict.fromkeys(range(6, 11), 3000000)
    clock.refresh()
    assert clock.to_unix(0) == before


def test_a_preempted_first_reading_is_mended_later() -> None:
    """When all five readings at the start were wide, a later tight one takes their place."""
    machine = Machine()
    machine.slow = dict.fromkeys(range(1, 6), 3000000)
    clock = machine.clock()
    machine.mono += 2 * S
    clock.refresh()
    assert abs(clock.to_unix(0) - EPOCH) <= 2 * machine.read_ns


def test_the_realtime_clock_is_read_at_most_once_a_second() -> None:
    """A refresh within a second of the last one reads nothing; a later one reads again."""
    machine = Machine()
    clock = machine.clock()
    reads = machine.unix_reads
    for _ in range(1_000):
        clock.refresh()
    assert machine.unix_reads == reads
    machine.mono += 2 * S
    clock.refresh()
    assert machine.unix_reads > reads


def test_the_real_clocks_agree_with_the_system() -> None:
    """With its defaults, now places itself at the system's time."""
    clock = HostClock()
    before = time.time_ns()
    placed = clock.to_unix(clock.now_ns())
    after = time.time_ns()
    assert before - 5_000_000 <= placed <= after + 5_000_000


def test_refreshing_from_many_threads_never_places_a_time_elsewhere() -> None:
    """Eight threads refresh and place while another steps the clock: every answer is one of the two truths."""
    machine = Machine(read_ns=0)
    clock = machine.clock()
    start, stop = threading.Barrier(9), threading.Event()
    wrong: list[int] = []

    def place(to_unix: Callable[[int], int]) -> None:
        start.wait(30)
        while not stop.is_set():
            clock.refresh()
            found = to_unix(0)
            if found not in (EPOCH, EPOCH + 9 * S):
                wrong.append(found)

    threads = [threading.Thread(target=place, args=(clock.to_unix,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    start.wait(30)
    for turn in range(20):
        machine.step = EPOCH + 9 * S * (turn % 2)
        machine.mono += 2 * S
        time.sleep(0.0005)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert wrong == []
