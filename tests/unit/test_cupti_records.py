"""Kernel records, out of make-believe buffers and by a make-believe CUPTI."""

from __future__ import annotations

import atexit
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from make_believe_cupti import (
    API,
    KERNEL,
    MEMCPY,
    MULTIPLE_SUBSCRIBERS,
    RUNTIME,
    Buffer,
    CuptiError,
    FakeCupti,
    kernel,
)

from gpu_timed.clocks import cupti_activity, cupti_records
from gpu_timed.clocks.cupti_activity import KernelRecords, RecordsUnavailable, clock_error_ns
from gpu_timed.clocks.cupti_records import Execution
from gpu_timed.errors import ConfigurationError, MissingExtraError

KNOWN = cupti_records.layouts(FakeCupti(), ("kernel", "memcpy", "runtime"))
LARGE = 1 << 20


def read(*buffers: Buffer, began_ns: int = 0, ended_ns: int = 1_000_000) -> cupti_records.Records:
    chunks = []
    for buffer in buffers:
        chunks += cupti_records.copied(buffer.activities, KNOWN, LARGE)
        buffer.free()
    return cupti_records.checked(chunks, began_ns=began_ns, ended_ns=ended_ns)


# -- decoding ---------------------------------------------------------------------------------------------


def test_every_field_of_a_kernel_comes_out_and_the_buffer_may_be_gone():
    made = kernel(
        100, 250, "_Z3addPf", device_id=1, context_id=2, stream_id=7, correlation_id=33, graph_id=5, graph_node_id=6
    )
    assert read(Buffer(made)).executions == (Execution(100, 250, "kernel", "_Z3addPf", 1, 2, 7, 33, 5, 6),)
    assert read().executions == read(Buffer()).executions == ()


def test_records_are_put_in_the_order_in_which_they_began():
    found = read(Buffer(kernel(300, 310, "c"), kernel(100, 110, "a")), Buffer(kernel(200, 210, "b")))
    assert [one.name for one in found.executions] == ["a", "b", "c"]
    assert found.complete
    assert found.note == ""


def test_names_belong_to_their_kernels():
    names = ["b", "a", "b", "c", "a", "b"]
    found = read(Buffer(*(kernel(index + 1, index + 2, name) for index, name in enumerate(names))))
    assert [one.name for one in found.executions] == names


def test_kinds_may_be_mixed_in_a_buffer():
    copy = MEMCPY, {"start": 50, "end": 60, "device_id": 0, "stream_id": 3, "correlation_id": 9, "bytes": 4096}
    call = RUNTIME, {"start": 10, "end": 20, "cbid": 211, "thread_id": 99, "correlation_id": 9}
    found = read(Buffer(call, kernel(70, 80), copy, kernel(90, 95), call))
    assert [(one.kind, one.name, one.start_ns, one.stream) for one in found.executions] == [
        ("memcpy", "memcpy", 50, 3),
        ("kernel", "k", 70, 0),
        ("kernel", "k", 90, 0),
    ]
    assert found.others["runtime"]["cbid"].tolist() == [211, 211]
    assert found.others["runtime"].dtype.names == API.names


def test_records_nobody_asked_for_are_passed_over():
    """Kinds that were not asked for, also at the end of a buffer, where nothing says how long they are."""
    buffer = Buffer(kernel(10, 20), (RUNTIME, {}), kernel(30, 40), (RUNTIME, {}))
    known = cupti_records.layouts(FakeCupti(), ("kernel",))
    chunks = cupti_records.copied(buffer.activities, known, LARGE)
    assert [chunk.table["start"].tolist() for chunk in chunks] == [[10, 30]]


def test_what_cupti_python_makes_no_object_of_does_not_shift_the_rest():
    """Of equally long records that are not equally far apart: each is asked for its place."""
    rows = [kernel(10, 20), kernel(30, 40), (RUNTIME, {}), kernel(50, 60), kernel(70, 80)]
    assert [one.start_ns for one in read(Buffer(*rows, skip=(RUNTIME,))).executions] == [10, 30, 50, 70]


def test_places_that_only_look_regular_are_noticed():
    """Two gaps that cancel out: the record in the middle is not where an even stride would put it."""
    buffer = Buffer(*(kernel(10 * n + 1, 10 * n + 2, f"k{n}") for n in range(7)))
    buffer.activities[:] = [buffer.activities[n] for n in (0, 3, 6)]
    assert [one.name for one in read(buffer).executions] == ["k0", "k3", "k6"]
    for there in ((0, 2, 6, 7, 8), (0, 1, 4, 7, 8)):  # evenly: 0, 2, 4, 6, 8
        buffer = Buffer(*(kernel(10 * n + 1, 10 * n + 2, f"k{n}") for n in range(9)))
        buffer.activities[:] = [buffer.activities[n] for n in there]
        assert [one.name for one in read(buffer).executions] == [f"k{n}" for n in there]


def test_a_library_whose_records_have_grown_is_read_all_the_same():
    rows = [kernel(10, 20, "a"), kernel(30, 40, "b"), kernel(50, 60, "c")]
    assert [one.name for one in read(Buffer(*rows, grown=16)).executions] == ["a", "b", "c"]


def test_the_newest_layout_is_taken_and_an_unknown_one_refused():
    assert KNOWN[KERNEL].dtype.itemsize == 216
    assert KNOWN[MEMCPY].dtype.itemsize == 96
    fake = FakeCupti()
    fake.activity_kernel11_dtype = np.dtype([("kind", "<i4"), ("start", "<u8")])
    with pytest.raises(LookupError, match="no end, device_id"):
        cupti_records.layouts(fake, ("kernel",))
    with pytest.raises(LookupError, match="memset"):
        cupti_records.layouts(fake, ("memset",))


def test_zero_stamps_and_other_times_are_counted_and_left_out():
    """0 is what CUPTI writes for what it could not collect; a second off the session is another clock."""
    began, ended = 10_000_000_000, 20_000_000_000
    rows = [
        kernel(0, began + 5),
        kernel(began + 5, 0),
        kernel(began + 9, began + 8),
        kernel(began - 1_500_000_000, began),
        kernel(ended, ended + 1_500_000_000),
        kernel(began - 500_000_000, began + 1, "slewed"),
        kernel(began + 1, began + 2, "good"),
    ]
    found = read(Buffer(*rows), began_ns=began, ended_ns=ended)
    assert [one.name for one in found.executions] == ["slewed", "good"]
    assert (found.unfinished, found.misplaced, found.complete) == (3, 2, False)
    assert found.note == "3 without a start or an end; 2 outside the time of the session"


# -- a session --------------------------------------------------------------------------------------------


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> FakeCupti:
    fake = FakeCupti()
    package = ModuleType("cupti")
    package.__spec__ = ModuleSpec("cupti", None)
    monkeypatch.setitem(sys.modules, "cupti", package)
    monkeypatch.setitem(sys.modules, "cupti.cupti", fake)  # type: ignore[arg-type]
    return fake


def now_kernel(name: str) -> tuple[int, dict[str, Any]]:
    now = time.time_ns()
    return kernel(now, now + 1_000, name)


def test_a_session_attaches_reads_and_detaches_in_order(cupti: FakeCupti):
    """Disabled before the last flush, and only then given up: a buffer that is freed while CUPTI writes is a crash."""
    session = KernelRecords(kinds=("kernel", "memcpy", "kernel"), buffer_bytes=LARGE)
    with session:
        assert cupti.calls == ["subscribe", "register", f"enable {KERNEL}", f"enable {MEMCPY}"]
        assert cupti.buffer_bytes == LARGE
        cupti.deliver(Buffer(now_kernel("early")))
        cupti.pending = [Buffer(now_kernel("late"))]
        cupti.calls.clear()
    assert cupti.calls == [
        "flush",
        f"disable {MEMCPY}",
        f"disable {KERNEL}",
        "flush",
        "dropped",
        "unsubscribe",
        "finalize",
    ]
    assert session.found is not None
    assert [one.name for one in session.found.executions] == ["early", "late"]
    assert session.found.complete


def test_a_second_session_begins_with_nothing(cupti: FakeCupti):
    session = KernelRecords()
    session.start()
    cupti.deliver(Buffer(now_kernel("first")))
    cupti.dropped = 3
    assert session.stop().dropped == 3
    session.start()
    cupti.deliver(Buffer(now_kernel("second")))
    found = session.stop()
    assert ([one.name for one in found.executions], found.dropped) == (["second"], 0)
    assert session.stop().executions == ()
    assert cupti.calls.count("finalize") == 2


def test_take_hands_over_what_there_is_and_goes_on(cupti: FakeCupti):
    session = KernelRecords()
    with pytest.raises(RecordsUnavailable, match="start"):
        session.take()
    session.start()
    with pytest.raises(RecordsUnavailable, match="stop"):
        session.start()
    cupti.pending, cupti.dropped = [Buffer(now_kernel("a"))], 2
    first = session.take()
    cupti.pending = [Buffer(now_kernel("b"))]
    second = session.take()
    assert ([one.name for one in first.executions], first.dropped) == (["a"], 2)
    assert ([one.name for one in second.executions], second.dropped) == (["b"], 0)
    assert "unsubscribe" not in cupti.calls
    session.stop()


def test_what_was_dropped_is_told(cupti: FakeCupti):
    cupti.dropped = 12
    with KernelRecords() as session:
        pass
    assert session.found is not None
    assert (session.found.dropped, session.found.complete) == (12, False)
    assert session.found.note == "12 dropped by CUPTI for want of room"


def test_no_more_are_kept_than_was_asked_for(cupti: FakeCupti):
    session = KernelRecords(keep=5)
    session.start()
    for _ in range(4):
        cupti.deliver(Buffer(now_kernel("a"), now_kernel("b"), now_kernel("c")))
    found = session.stop()
    assert (len(found.executions), found.over, found.complete) == (5, 7, False)


def test_a_buffer_that_cannot_be_read_is_counted_and_raises_nothing_into_cupti(cupti: FakeCupti):
    session = KernelRecords(buffer_bytes=4096)
    session.start()
    far = Buffer(*(now_kernel("a") for _ in range(40)))  # 8,640 bytes: not of a buffer of 4,096
    cupti.deliver(far)
    cupti.deliver(Buffer(now_kernel("b")))

    class Torn:
        def __len__(self) -> int:
            raise RuntimeError("torn")

    cupti._completed(Torn())
    found = session.stop()
    assert [one.name for one in found.executions] == ["b"]
    assert found.faults == 2
    assert found.fault == "ValueError: records that are not of one buffer"
    assert "2 buffers could not be read" in found.note


def test_another_profiler_is_named_and_left_alone(cupti: FakeCupti):
    """Nothing is enabled, registered or finalised: that would end the other's session."""
    cupti.refuse["subscribe"] = CuptiError(MULTIPLE_SUBSCRIBERS, "ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED (39)")
    cupti.other = "CUPTI for Kineto"
    with pytest.raises(RecordsUnavailable, match=r"another profiler \(CUPTI for Kineto\).*TEARDOWN_CUPTI=1"):
        KernelRecords().start()
    assert cupti.calls == ["subscribe"]
    cupti.refuse["subscribe"] = CuptiError(35, "ERROR_INSUFFICIENT_PRIVILEGES (35)")
    with pytest.raises(RecordsUnavailable, match="INSUFFICIENT_PRIVILEGES"):
        KernelRecords().start()


def test_what_was_begun_is_undone_when_the_rest_is_refused(cupti: FakeCupti):
    cupti.refuse[f"enable {MEMCPY}"] = CuptiError(27, "not supported")
    session = KernelRecords(kinds=("kernel", "memcpy"))
    with pytest.raises(RecordsUnavailable, match="not supported"):
        session.start()
    assert cupti.calls[-5:] == [f"disable {KERNEL}", "flush", "dropped", "unsubscribe", "finalize"]
    cupti.refuse.clear()
    with session:
        pass


def test_detaching_goes_on_when_a_step_fails(cupti: FakeCupti):
    session = KernelRecords()
    session.start()
    cupti.deliver(Buffer(now_kernel("a")))
    cupti.refuse = {f"disable {KERNEL}": CuptiError(1, "no"), "unsubscribe": CuptiError(1, "no")}
    found = session.stop()
    assert cupti.calls[-1] == "finalize"
    assert (len(found.executions), found.faults) == (1, 2)


def test_a_clock_that_is_not_realtime_is_refused(cupti: FakeCupti):
    cupti.clock = lambda: time.time_ns() + 600_000
    with pytest.raises(RecordsUnavailable, match="off by"):
        KernelRecords().start()
    assert cupti.calls == ["subscribe", "dropped", "unsubscribe", "finalize"]


def test_the_narrowest_bracket_says_how_far_off_the_clock_is():
    def bracket(*moments: int) -> Any:
        return iter(moments).__next__

    assert clock_error_ns(lambda: 105, iter([100, 110] * 50).__next__) == 0
    assert clock_error_ns(lambda: 115, iter([100, 110] * 50).__next__) == 5
    assert clock_error_ns(lambda: 93, iter([100, 110] * 50).__next__) == -7
    stamps = iter([500] + [105] * 49)
    assert clock_error_ns(stamps.__next__, iter([100, 1_000] + [100, 104] * 49).__next__) == 1
    assert clock_error_ns(lambda: 500, iter([100, 50] + [100, 104] * 49).__next__) == 396


def test_a_process_that_ends_within_a_session_detaches_first(cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch):
    held: list[Any] = []
    monkeypatch.setattr(atexit, "register", held.append)
    monkeypatch.setattr(atexit, "unregister", held.remove)
    session = KernelRecords()
    session.start()
    (at_exit,) = held
    at_exit()
    assert cupti.calls[-1] == "finalize"
    assert held == []
    assert session.stop().executions == ()


def test_what_is_missing_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cupti_activity.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"gpu-timed\[cupti\]"):
        KernelRecords().start()
    assert "gpu-timed[cupti]" in cupti_activity.usable()
    assert "\n" not in cupti_activity.usable()


def test_a_cupti_that_is_too_old_says_so(monkeypatch: pytest.MonkeyPatch, cupti: FakeCupti):
    monkeypatch.setitem(sys.modules, "cupti.cupti", ModuleType("cupti.cupti"))
    assert "13.0 or later" in cupti_activity.usable()


def test_options_that_cannot_be_used_are_refused():
    for options in ({"kinds": ()}, {"kinds": ("kernels",)}, {"keep": 0}, {"buffer_bytes": 100}):
        with pytest.raises(ConfigurationError):
            KernelRecords(**options)
