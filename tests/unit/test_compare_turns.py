"""What a turn of an arm is made of, and that nothing is timed once kernels have been recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_believe_comparison import profile

from gpu_timed import compare, current
from gpu_timed.measure import contest, step_profile, turns
from gpu_timed.measure.stopwatch import Stopwatch
from gpu_timed.record import Missing
from gpu_timed.testing import FakeDevice

MS = 1_000_000
S = 1_000_000_000


@pytest.mark.parametrize(
    ("calls_ns", "left_s", "share"),
    [
        ((200_000, 3 * MS), 20, (1, 4)),
        ((21 * MS, 3 * MS, 2 * MS), 20, (1, 4)),  # a decode step of a small model: 20 blocks of 0.15 s
        ((100 * MS, 100 * MS), 20, (1, 4)),
        ((150 * MS, 150 * MS), 20, (1, 2)),
        ((250 * MS, 250 * MS), 20, (1, 1)),
        ((500 * MS, 500 * MS), 20, (0, 1)),
        ((5 * S, 5 * S), 20, (0, 1)),
    ],
)
def test_long_calls_get_as_long_a_turn_as_there_is_time_for(
    calls_ns: tuple[int, ...], left_s: int, share: tuple[int, int]
) -> None:
    assert turns.share_out(calls_ns, left_s * S) == share


def test_short_calls_fill_a_turn_and_two_of_them_do_not_count() -> None:
    for share in turns.SHARES:
        assert turns.fitting(200_000, share) == 100
        assert turns.settling(100, share) == 2
        assert turns.length_ns(200_000, share) == 102 * 200_000
        assert turns.fitting(10, share) == turns.MOST_CALLS
    assert turns.length_ns(21 * MS, turns.SHARES[0]) == 5 * 21 * MS
    assert turns.length_ns(21 * MS, turns.SHARES[-1]) == 21 * MS


@given(
    counted=st.integers(1, turns.MOST_CALLS),
    turn_ns=st.integers(1, 100 * S),
    share=st.sampled_from(turns.SHARES),
)
def test_the_next_turn_is_nearer_to_what_it_is_to_last(counted: int, turn_ns: int, share: turns.Share) -> None:
    found = turns.adjusted(counted, turn_ns, share)
    assert share.counted <= found <= turns.MOST_CALLS or found == counted
    if found > max(counted, share.counted):
        assert turn_ns < turns.TURN_NS
    if found < counted:
        assert turn_ns > turns.TURN_NS
        assert found >= counted // 2


def test_the_first_call_of_a_turn_counts_for_no_arm(device: FakeDevice) -> None:
    """It finds the caches as another arm left them: here it takes half as long again."""
    last: list[str] = []

    def arm(name: str, work_ns: int) -> Callable[[], int]:
        def call() -> int:
            device.host_clock.advance(work_ns if last == [name] else work_ns * 3 // 2)
            device.launch(1000)
            last[:] = [name]
            return 0

        return call

    found = compare({"long": arm("long", 21 * MS), "short": arm("short", MS)}, budget_s=8)
    assert found.calls_per_turn == {"long": 4, "short": 20}
    for one, work_ns in zip(found.arms, (21 * MS, MS), strict=True):
        assert max(one.samples.wall_ns) == work_ns + 1000
        assert set(Counter(one.samples.block).values()) == {found.calls_per_turn[one.name]}


# -- recording kernels comes last -----------------------------------------------------------------------------


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Hold what happens: each call that is timed, and each pass with kernel records."""
    seen: list[tuple[str, Any]] = []
    time = Stopwatch.time

    def timed(self: Stopwatch, *what: Any) -> Any:
        seen.append(("timed", None))
        return time(self, *what)

    def recorded(call: Callable[[], object], **options: Any) -> Any:
        seen.append(("recorded", options["rehearse"]))
        call()
        return profile(10, 1.0, launch_us=30.0)

    monkeypatch.setattr(Stopwatch, "time", timed)
    monkeypatch.setattr(step_profile, "profile", recorded)
    return seen


def order(events: list[tuple[str, Any]]) -> list[str]:
    """Return the kinds of what happened, each run of equal ones as one."""
    kinds = [kind for kind, _ in events]
    return [kind for index, kind in enumerate(kinds) if not index or kinds[index - 1] != kind]


def test_nothing_is_timed_once_kernels_were_recorded(device: FakeDevice, events: list[tuple[str, Any]]) -> None:
    def step() -> int:
        device.launch(200_000)
        return 0

    found = compare({"a": step, "b": step, "c": step})
    assert order(events) == ["timed", "recorded"]
    assert [rehearse for kind, rehearse in events if kind == "recorded"] == [True, False, False]
    assert all(one.timeline for one in found.arms)
    assert not any("earlier comparison" in note for note in found.notes)
    assert current.ledger().snapshot()[contest.PROFILED] == 3


def test_of_a_sweep_all_is_timed_before_kernels_are_recorded(device: FakeDevice, events: list[tuple[str, Any]]) -> None:
    def step(n: int) -> int:
        device.launch(100_000 * n)
        return n

    told: list[tuple[int, int, str]] = []
    found = compare(
        {"a": step, "b": step},
        args=lambda batch: (batch,),
        sweep={"batch": [1, 2, 3]},
        progress=lambda *what: told.append(what),
    )
    assert order(events) == ["timed", "recorded"]
    assert [rehearse for kind, rehearse in events if kind == "recorded"] == [True] + [False] * 5
    walls = [median(point.comparison.arm("b").samples.wall_ns) for point in found.points]
    assert walls == [100_000, 200_000, 300_000]
    assert all(one.timeline for point in found.points for one in point.comparison.arms)
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert {total for _, total, _ in told} == {300}
    assert [text for _, _, text in told if "kernels" in text] == [
        f"batch={batch}: {arm}: kernels" for batch in (1, 2, 3) for arm in "ab"
    ]
    assert all((done >= 270) == ("kernels" in text) for done, _, text in told)


def test_a_second_comparison_of_a_process_says_that_launches_are_slower(
    device: FakeDevice, events: list[tuple[str, Any]]
) -> None:
    def step() -> int:
        device.launch(200_000)
        return 0

    compare({"a": step, "b": step})
    again = compare({"a": step, "b": step}, profile=False)
    assert any("earlier comparison" in note for note in again.notes)


def test_a_pass_that_could_not_be_made_slows_nothing(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "profile", lambda *_, **__: Missing("needs_kernel_records"))
    for _ in range(2):
        found = compare({"a": lambda: device.launch(200_000), "b": lambda: device.launch(200_000)}, reset=int)
        assert not any("earlier comparison" in note for note in found.notes)
