"""A watched directory: a file that was written while a suspect call ran was built in it, and nothing else was."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpu_timed as library
from gpu_timed import ConfigurationError, current, flush, gpu_timed
from gpu_timed.diagnosis.process import KINDS
from gpu_timed.ports import Verdict
from gpu_timed.record import NOT_SET, Cause
from gpu_timed.site import Site
from gpu_timed.testing import FakeDevice, capture, use_device
from gpu_timed.warmth import directory_probe
from gpu_timed.warmth.directory_probe import DirectoryProbe

S = 1_000_000_000
MS = 1_000_000
NOW = 1_900_000_000 * S + 123_456_789
"""A Unix time whose stamps are no whole seconds."""
WARM = Verdict("warm", "hot", (), 0)
UNKNOWN = Verdict("unknown", NOT_SET, ())


class Watch:
    """A probe with clocks that stand still until they are moved, and a directory whose times are set by hand."""

    def __init__(self, path: Path) -> None:
        self.path = path / "cache"
        self.path.mkdir()
        self.counts: Counter[str] = Counter()
        self.unix = NOW + 3600 * S
        self.monotonic = 0
        self.steps = 0
        self.site = Site("f")
        self.probe = DirectoryProbe(self._count, lambda: self.unix, self._tick)
        self.end = self.probe.watch(self.path, "kernels")

    def _count(self, kind: str) -> None:
        self.counts[kind] += 1

    def _tick(self) -> int:
        self.monotonic += self.steps
        return self.monotonic

    def look(self, began: int, ended: int, verdict: Verdict = UNKNOWN, site: Site | None = None) -> Verdict:
        """Look at a call that lasted from *began* to *ended*, after a rest."""
        self.unix += S
        self.monotonic += 60 * S
        self.probe._looks.clear()  # a file that is written later, with an earlier time, would not be seen
        return self.probe.second_look(site or self.site, began, ended, verdict)

    def settle(self, taken: int = MS) -> None:
        """Let the site have its usual time."""
        for _ in range(40):
            assert self.look(NOW - 100 * S, NOW - 100 * S + taken, WARM) == WARM


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """A watched directory in which a file's time is its mtime: its ctime cannot be set."""
    real = os.scandir

    class Entry:
        def __init__(self, held: Any) -> None:
            self.path, self.is_dir = held.path, held.is_dir
            self._held = held

        def stat(self, **_: Any) -> Any:
            state = self._held.stat(follow_symlinks=False)
            return type("State", (), {"st_mtime_ns": state.st_mtime_ns, "st_ctime_ns": 0})

    class Scan:
        def __init__(self, path: str) -> None:
            self._held = real(path)

        def __enter__(self) -> Any:
            return (Entry(held) for held in list(self._held))

        def __exit__(self, *_: object) -> None:
            self._held.close()

    monkeypatch.setattr(directory_probe.os, "scandir", Scan)
    return Watch(tmp_path)


def write(path: Path, at: int) -> None:
    """Write a file that bears the time *at* (Unix, nanoseconds)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("kernel")
    os.utime(path, ns=(at, at))


def test_a_file_written_in_a_first_call_makes_it_built(watch: Watch) -> None:
    """The cause names the directory, how many files and some of them, and who else may have written them."""
    write(watch.path / "0" / "tuned.json", NOW + MS)
    write(watch.path / "1" / "tuned.json", NOW + 2 * MS)
    found = watch.look(NOW, NOW + 3 * MS)
    assert (found.warmth, found.tier, found.compile_ns) == ("cold", "built", NOT_SET)
    (cause,) = found.causes
    assert (cause.probe, cause.tier, cause.duration_ns) == ("kernels", "built", NOT_SET)
    assert cause.what == f"2 files written in {watch.path}"
    assert {"0/tuned.json", "1/tuned.json"} <= set(cause.detail.partition(";")[0].split(", "))
    assert "another process or thread may have written them" in cause.detail


@pytest.mark.parametrize(
    ("offset", "inside"),
    [(-11 * MS, False), (-9 * MS, True), (0, True), (5 * MS, True), (5 * MS + 1, False), (S, False)],
)
def test_only_what_was_written_in_its_time(watch: Watch, offset: int, inside: bool) -> None:
    """A stamp may lie a tick of the kernel's before the truth, and never after it."""
    write(watch.path / "kernel", NOW + offset)
    assert (watch.look(NOW, NOW + 5 * MS).tier == "built") is inside


def test_a_file_system_that_counts_in_seconds(watch: Watch) -> None:
    """Its stamps may lie two seconds before the truth."""
    whole = NOW - NOW % S
    write(watch.path / "kernel", whole)
    assert watch.look(whole + 1_500 * MS, whole + 1_600 * MS).tier == "built"
    assert watch.look(whole + 2_100 * MS, whole + 2_200 * MS, site=Site("g")) == UNKNOWN


def test_a_usual_call_is_not_looked_at(watch: Watch) -> None:
    """After the first three: only one that took three times the usual time, and a millisecond more."""
    watch.settle(MS)
    write(watch.path / "kernel", NOW + MS)
    for taken, suspect in ((MS, False), (2 * MS, False), (2_900_000, False), (3_100_000, True)):
        assert (watch.look(NOW, NOW + taken, WARM).tier == "built") is suspect
    site = Site("quick")
    for _ in range(40):
        watch.look(NOW - S, NOW - S + 10_000, WARM, site)
    write(watch.path / "kernel", NOW + 1)
    assert watch.look(NOW, NOW + 900_000, WARM, site) == WARM  # ninety times, and less than a millisecond
    assert watch.look(NOW, NOW + 1_100_000, WARM, site).tier == "built"


def test_the_first_three_calls_are_suspect(watch: Watch) -> None:
    """However quick they are: a new shape, a second variant."""
    seen = []
    for number in range(5):
        begun = NOW + number * 10 * S
        write(watch.path / f"kernel{number}", begun)
        seen.append(watch.look(begun, begun + MS).tier == "built")
    assert seen == [True, True, True, False, False]


def test_what_another_probe_saw_is_kept(watch: Watch) -> None:
    """Built is not looked at again; a lesser tier becomes built, with both causes."""
    write(watch.path / "kernel", NOW)
    built = Verdict("cold", "built", (Cause("x", "y", "built", 5),), 5)
    assert watch.look(NOW, NOW + MS, built) is built
    loaded = Verdict("cold", "loaded", (Cause("x", "y", "loaded", 5),), 5)
    found = watch.look(NOW, NOW + MS, loaded)
    assert (found.tier, [cause.probe for cause in found.causes], found.compile_ns) == ("built", ["x", "kernels"], 5)


def test_nothing_written_changes_nothing(watch: Watch) -> None:
    """A first call in which nothing was seen stays unknown, a slow warm one warm: an empty directory too."""
    assert watch.look(NOW, NOW + MS) == UNKNOWN
    watch.path.rmdir()
    assert watch.look(NOW, NOW + MS, WARM) == WARM
    assert watch.counts == {}


def test_one_look_serves_every_call_before_it(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backlog of suspect calls is one look; a call that ended after it needs another."""
    looks: list[str] = []
    real = directory_probe._look
    monkeypatch.setattr(directory_probe, "_look", lambda path, *rest: (looks.append(path), real(path, *rest))[1])
    write(watch.path / "kernel", NOW)
    for number in range(3):
        assert watch.probe.second_look(watch.site, NOW, NOW + MS, UNKNOWN).tier == "built"
        assert len(looks) == 1, number
    watch.probe.second_look(Site("later"), watch.unix, watch.unix + MS, UNKNOWN)
    assert len(looks) == 2


def test_looking_is_bounded(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """By entries and by time, both counted; and it rests afterwards for four times as long as it took."""
    monkeypatch.setattr(directory_probe, "MOST_ENTRIES", 3)
    for number in range(5):
        write(watch.path / str(number), NOW - S)
    assert watch.look(NOW, NOW + MS) == UNKNOWN
    assert watch.counts == {"cache_watch_incomplete": 1}
    monkeypatch.setattr(directory_probe, "MOST_ENTRIES", 100)
    watch.steps = 30 * MS  # every look at the clock costs so much
    assert watch.look(NOW, NOW + MS) == UNKNOWN
    assert watch.counts["cache_watch_incomplete"] == 2
    watch.unix += S
    assert watch.probe.second_look(Site("g"), watch.unix - 1, watch.unix - 1 + MS, UNKNOWN) == UNKNOWN
    assert watch.counts["cache_watch_skipped"] == 1
    assert set(watch.counts) <= set(KINDS)


def test_watching_ends(watch: Watch) -> None:
    """By what watch() returned; watching the same directory again takes its place."""
    write(watch.path / "kernel", NOW)
    other = watch.probe.watch(watch.path, "renamed")
    watch.end()  # of the first, which is gone
    assert [cause.probe for cause in watch.look(NOW, NOW + MS).causes] == ["renamed"]
    other()
    assert watch.look(NOW, NOW + MS) == UNKNOWN


def test_what_cannot_be_watched(tmp_path: Path) -> None:
    """No path, a file, too many; a directory that is not there yet is fine, and takes its name from its path."""
    probe = DirectoryProbe(lambda _: None)
    for bad in ("", None, 3, b"x"):
        with pytest.raises(ConfigurationError, match="needs the path"):
            probe.watch(bad, None)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="no directory"):
        probe.watch(tmp_path / "file", None)
    for number in range(16):
        probe.watch(tmp_path / str(number), None)
    with pytest.raises(ConfigurationError, match="more than 16"):
        probe.watch(tmp_path / "another", None)
    assert probe._watched[0].name == "0"


# -- in the engine ----------------------------------------------------------------------------------------


def build_in(path: Path) -> Callable[[bool], None]:
    """Return a function that writes a file there, if it is told to: a runtime that nobody can ask."""

    def work(builds: bool) -> None:
        if builds:
            (path / str(time.perf_counter_ns())).write_text("kernel")

    return work


def test_a_real_directory_and_real_calls(tmp_path: Path) -> None:
    """The file's own time decides, the record says it; other calls of the site stay as they were."""
    end = library.watch_cache(tmp_path)
    step = gpu_timed(build_in(tmp_path), name="step", sync="deferred")
    with capture() as records:
        step(builds=True)
        time.sleep(0.03)  # more than a tick: what was written just before a call cannot be told from it
        step(builds=False)
    assert [(record.warmth, record.tier) for record in records] == [("cold", "built"), ("warm", "hot")]
    (cause,) = records[0].causes
    assert cause.what == f"1 file written in {tmp_path}"
    end()
    with capture() as records:
        step(builds=True)
    assert records[0].warmth == "warm"


def test_it_can_be_watched_before_and_after_the_first_call(tmp_path: Path) -> None:
    """The engine may be there already or not; a reset forgets it."""
    gpu_timed(lambda: None, sync="deferred")()
    flush()
    library.watch_cache(tmp_path, "mine")
    with capture() as records:
        gpu_timed(build_in(tmp_path), name="step")(builds=True)
    assert [cause.probe for cause in records[0].causes] == ["mine"]
    current.reset()
    with capture() as records:
        gpu_timed(build_in(tmp_path), name="step")(builds=True)
    assert records[0].causes == ()


def test_no_look_for_a_call_without_a_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is watched by default: nothing is asked."""
    monkeypatch.setattr(DirectoryProbe, "second_look", lambda *_: pytest.fail("asked"))
    with capture() as records:
        gpu_timed(lambda: None, name="f")()
    assert records[0].quality == ()
    assert not flush().counts.get("reading")


def test_no_look_on_the_calling_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is announced as a call returns is not looked at; the record that follows is, on gpu_timed's own thread."""
    threads: list[str] = []
    real = directory_probe._look

    def look(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(*arguments)

    monkeypatch.setattr(directory_probe, "_look", look)
    library.watch_cache(tmp_path)
    with use_device(FakeDevice()) as device, capture():

        @gpu_timed(name="step", sync="deferred", late="device_only")
        def step() -> None:
            device.launch(1_000)

        with device.held():
            step()
            assert threads == []
    assert threads == ["gpu_timed-resolver"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_goes_on_watching(tmp_path: Path) -> None:
    """Also where the fork came while the lock was held."""
    library.watch_cache(tmp_path)
    gpu_timed(lambda: None, sync="deferred")()
    flush()
    with current.directories()._lock:
        child = os.fork()
        if child == 0:
            try:
                with capture() as records:
                    gpu_timed(build_in(tmp_path), name="step")(builds=True)
                os._exit(0 if records[0].tier == "built" else 1)
            finally:
                os._exit(2)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
