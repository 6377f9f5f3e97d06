"""The profiled pass: what torch exports is read to the nanosecond, and what went wrong is told, not raised."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import numpy as np
import pytest
from make_believe_cupti import API

from gpu_timed.analysis import kineto_trace
from gpu_timed.clocks.cupti_records import Execution, Records
from gpu_timed.measure import step_profile, torch_profile
from gpu_timed.record import Missing
from gpu_timed.step_timeline import ProfiledSteps

torch = pytest.importorskip("torch")
CPU = [torch.profiler.ProfilerActivity.CPU]


def event(cat: str, name: str, ts: str, dur: str, tid: int = 7, **args: int) -> str:
    """Return one complete event, written with the digits that Kineto writes."""
    where = f'"pid": 1, "tid": {tid}, "ts": {ts}, "dur": {dur}, "args": {json.dumps(args)}'
    return f'{{"ph": "X", "cat": "{cat}", "name": "{name}", {where}}}'


def trace(*events: str) -> bytes:
    """Return a trace as Kineto writes it, with what else stands in one."""
    more = ('{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}', '{"ph": "s", "cat": "ac2g"}')
    return (
        '{"schemaVersion": 1, "baseTimeNanoseconds": 1764000000000000000, "traceEvents": ['
        + ",\n".join((*more, *events))
        + ', {"name": "tab\there", "ph": "i"}]}'  # Kineto does not escape what a name has in it
    ).encode()


def steps(count: int, *, base_us: int = 1_764_000_000_000_000, device: bool = True) -> bytes:
    """Return a trace of steps with two kernels each, launched by two operators, with the second launched late."""
    found = [event("user_annotation", "the caller's own", f"{base_us - 50}.000", "100000.000")]
    for index in range(count):
        at, one = base_us + 1000 * index, 10 * (index + 1)
        found += [
            event("user_annotation", torch_profile.STEP, f"{at}.000", "500.000"),
            event("gpu_user_annotation", torch_profile.STEP, f"{at}.000", "500.000"),
            event("cpu_op", "aten::linear", f"{at + 5}.250", "200.000"),
            event("cpu_op", "aten::addmm", f"{at + 6}.000", "150.125"),
            event("cuda_runtime", "cudaLaunchKernel", f"{at + 7}.000", "3.000", correlation=one),
            event("cuda_runtime", "cudaLaunchKernel", f"{at + 100}.000", "3.001", correlation=one + 1),
            event("cuda_runtime", "cudaDeviceSynchronize", f"{at + 300}.000", "100", correlation=one + 2),
        ]
        if device:
            found += [
                event("kernel", "gemm", f"{at + 110}.001", "20.500", correlation=one + 1, device=0, stream=9),
                event("gpu_memset", "Memset", f"{at + 12}.000", "8", correlation=one, device=0, stream=7),
            ]
    return trace(*found)


def test_times_are_exact_though_they_count_from_the_epoch() -> None:
    found = kineto_trace.read(steps(1), torch_profile.STEP)
    base = 1_764_000_000_000_000_000
    assert found.steps == ((base, base + 500_000),)
    assert [(one.start_ns - base, one.duration_ns, one.kind) for one in found.executions] == [
        (110_001, 20_500, "kernel"),
        (12_000, 8_000, "memset"),
    ]
    assert [one.name for one in found.operators] == ["the caller's own", "aten::linear", "aten::addmm"]
    assert (found.calls[1].end_ns - base, found.calls[1].correlation) == (103_001, 11)
    assert found.unread == 0


@pytest.mark.parametrize("written", ["12.5", "12.500", "1.25e1", "12.5000"])
def test_a_time_may_be_written_in_other_ways(written: str) -> None:
    found = kineto_trace.read(trace(event("kernel", "k", written, "1", correlation=1)), "step")
    assert found.executions[0].start_ns == 12_500


def test_what_cannot_be_understood_is_counted() -> None:
    text = trace(
        event("kernel", "k", '"soon"', "1"), event("cuda_runtime", "call", "1", "1"), event("kernel", "k", "1", "1")
    )
    found = kineto_trace.read(text, "step")
    assert (found.unread, len(found.executions)) == (2, 1)
    with pytest.raises(ValueError, match="traceEvents"):
        kineto_trace.read("{}", "step")


def test_the_last_steps_are_taken_and_the_first_one_is_thrown_away() -> None:
    found = torch_profile.understood(steps(4), 3)
    assert isinstance(found, ProfiledSteps)
    assert len(found.steps) == 3
    assert (found.source, found.kernels, found.copies, found.launches) == ("kineto", 1, 1, 2)
    assert (found.busy_ns, found.span_ns, found.gap_ns, found.late_ns) == (28_500, 118_501, 90_001, 90_001)
    (operator,) = found.operators
    assert (operator.operator, operator.within, operator.gaps) == ("aten::addmm", "aten::linear", 1)
    assert found.steps[0].wall_ns == 500_000


def test_a_trace_without_device_work_gives_a_reason_and_no_zero() -> None:
    assert torch_profile.understood(steps(3, device=False), 2) == Missing(
        "needs_kernel_records", torch_profile.NO_KERNELS
    )
    few = torch_profile.understood(steps(2), 3)
    assert isinstance(few, Missing)
    assert few.detail == "of 3 steps torch's profiler recorded 2"
    assert isinstance(torch_profile.understood(b"[", 1), Missing)


def test_a_trace_that_torch_writes_itself_is_understood() -> None:
    """On a CPU: no kernels, but its own words for operators, steps and times."""
    seen: list[str] = []
    x = torch.ones(8, 8)
    enabled: list[bool] = []

    def call() -> None:
        seen.append("call")
        enabled.append(gc.isenabled())
        with torch.profiler.record_function("mine"):
            torch.nn.functional.linear(x, x)

    text = torch_profile.recorded(call, CPU, lambda: seen.append("wait"), steps=2, before=lambda: seen.append("before"))
    assert isinstance(text, bytes)
    found = kineto_trace.read(text, torch_profile.STEP)
    assert seen == ["before", "wait", "call", "wait"] * 2
    assert enabled == [False, False]
    assert gc.isenabled()
    assert len(found.steps) == 2
    assert found.unread == 0
    names = [one.name for one in found.operators]
    assert names.count("mine") == names.count("aten::linear") == 2
    inner = next(one for one in found.operators if one.name == "aten::linear")
    outer = next(one for one in found.operators if one.name == "mine")
    assert found.steps[0][0] <= outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns <= found.steps[0][1]
    assert inner.thread == outer.thread


def test_what_the_call_raises_is_raised_and_the_profiler_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []

    class Profiler(torch.profiler.profile):  # type: ignore[misc, name-defined]
        def stop(self) -> None:
            super().stop()
            stopped.append("stopped")

    def call() -> None:
        raise KeyError("mine")

    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    with pytest.raises(KeyError, match="mine"):
        torch_profile.recorded(call, CPU, lambda: None, steps=1)
    assert stopped == ["stopped"]
    assert gc.isenabled()
    assert isinstance(torch_profile.recorded(lambda: None, CPU, lambda: None, steps=1), bytes)


@pytest.mark.parametrize(("teardown", "more"), [("1", True), ("0", False), (None, False)])
def test_torch_may_detach_cupti_before_the_next_pass(
    monkeypatch: pytest.MonkeyPatch, teardown: str | None, more: bool
) -> None:
    """Where it is to, it waits for calls of CUDA after the pass; a device that fails by then takes no trace away."""
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    if teardown is not None:
        monkeypatch.setenv("TEARDOWN_CUPTI", teardown)
    order: list[str] = []

    class Profiler(torch.profiler.profile):  # type: ignore[misc, name-defined]
        def stop(self) -> None:
            super().stop()
            order.append("stop")

    def wait() -> None:
        order.append("wait")
        if order.count("wait") == 5:
            raise RuntimeError("device")

    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(torch_profile, "_BETWEEN_S", 0.0)
    assert isinstance(torch_profile.recorded(lambda: None, CPU, wait, steps=1), bytes)
    assert order == ["wait", "wait", "stop", *["wait"] * 3 * more]


def test_a_profiler_that_is_at_work_already_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Profiler:
        def __init__(self, **_: Any) -> None:
            pass

        def start(self) -> None:
            raise RuntimeError("Profiler is already enabled on this thread")

    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    found = torch_profile.recorded(lambda: None, CPU, lambda: None, steps=1)
    assert isinstance(found, Missing)
    assert "already enabled" in found.detail


def test_the_first_steps_are_thrown_away_and_so_is_the_first_pass_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    held: list[Any] = []

    def recorded(*_: Any, **options: Any) -> bytes | Missing:
        passes.append(options["steps"])
        return held.pop() if held else steps(options["steps"])

    monkeypatch.setattr(torch_profile, "usable", lambda: None)
    monkeypatch.setattr(torch_profile, "recorded", recorded)
    found = torch_profile.profile(lambda: None, steps=5)
    assert isinstance(found, ProfiledSteps)
    assert len(found.steps) == 5
    assert passes == [7]
    passes.clear()
    assert torch_profile.profile(lambda: None, steps=5, rehearse=True)
    assert passes == [2, 7]
    passes.clear()
    held.append(Missing("needs_kernel_records", "another one is at work"))
    assert torch_profile.profile(lambda: None, steps=5, rehearse=True) == Missing(
        "needs_kernel_records", "another one is at work"
    )
    assert passes == [2]


def test_without_a_device_the_reason_is_given_and_nothing_is_called() -> None:
    found = torch_profile.profile(pytest.fail, steps=1)
    assert isinstance(found, Missing)
    assert found.reason == "no_device"


def test_without_torch_or_cupti_the_reason_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    found = step_profile.profile(pytest.fail, wait=pytest.fail)
    assert isinstance(found, Missing)
    assert "gpu-timed[cupti]" in found.detail


def records(count: int, **more: Any) -> Records:
    """Return what CUPTI would have recorded of steps with two kernels each, at 1000, 2000, …"""
    rows, executions = [], []
    for index in range(1, count + 1):
        at = 1000 * index
        for launched, begins, lasts, correlation in ((10, 20, 30, index), (100, 110, 40, 100 + index)):
            rows.append((correlation, at + launched, at + launched + 5))
            executions.append(Execution(at + begins, at + begins + lasts, "kernel", "k", 0, 1, 7, correlation, 0, 0))
        rows.append((900 + index, at + 200, at + 300))  # a call that launched nothing
    table = np.zeros(len(rows), dtype=API)
    for index, (correlation, start, end) in enumerate(rows):
        table[index]["correlation_id"], table[index]["start"], table[index]["end"] = correlation, start, end
    return Records(executions=tuple(executions), others={"runtime": table}, **more)


def test_cupti_alone_knows_launches_and_no_operators() -> None:
    found = step_profile.understood(records(3), [(2000, 2400), (3000, 3400)])
    assert isinstance(found, ProfiledSteps)
    assert (found.source, found.kernels, found.launches, found.busy_ns, found.gap_ns) == ("cupti", 2, 2, 70, 60)
    assert [gap.host_late for step in found.steps for gap in step.gaps] == ["yes", "yes"]
    assert found.operators == ()
    assert found.notes == ("Recorded by CUPTI alone, which knows no operators.",)


def test_records_that_are_missing_are_told() -> None:
    found = step_profile.understood(records(1, dropped=3), [(1000, 1400)])
    assert isinstance(found, ProfiledSteps)
    assert "3 dropped by CUPTI" in found.notes[1]
    none = step_profile.understood(Records(executions=(), dropped=2), [(0, 1)])
    assert isinstance(none, Missing)
    assert "2 dropped by CUPTI" in none.detail


def test_cupti_steps_are_the_last_ones_and_the_session_ends_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[str] = []

    class Session:
        def __init__(self, **_: Any) -> None:
            pass

        def start(self) -> None:
            sessions.append("start")

        def stop(self) -> Records:
            sessions.append("stop")
            return Records(executions=())

    monkeypatch.setattr(step_profile, "KernelRecords", Session)
    asked: list[Any] = []
    monkeypatch.setattr(step_profile, "understood", lambda _, held: asked.append(held))
    step_profile.by_cupti(lambda: None, wait=lambda: None, steps=2)
    assert len(asked[0]) == 2

    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        step_profile.by_cupti(fails, wait=lambda: None)
    assert sessions == ["start", "stop"] * 2
