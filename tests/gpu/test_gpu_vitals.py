"""The machine's state and the idle time before a span, on a real device. Needs one GPU, torch and nvidia-ml-py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from gpu_timed import configure, current, gpu_timed
from gpu_timed.record import Missing, Record, Vitals
from gpu_timed.testing import capture
from gpu_timed.vitals import glance, nvml
from gpu_timed.vitals.load import HostLoad
from gpu_timed.vitals.ring import Ring

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(120)]

INTERVAL_S = 0.1


def digits(uuid: object) -> str:
    """Return a UUID without its prefix, in lower case: torch writes none."""
    return str(uuid).lower().removeprefix("gpu-").removeprefix("mig-")


@pytest.fixture
def matmul() -> Callable[[], Any]:
    """A product of some 100 µs, whose kernel is loaded."""
    import torch

    pytest.importorskip("pynvml")
    configure(vitals_interval_s=INTERVAL_S)
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)

    def work() -> Any:
        return x @ x

    for _ in range(5):
        work()
    torch.cuda.synchronize()
    return work


def run(work: Callable[[], Any], times: int, *, pause_s: float = 0.0, sync: Any = "boundary") -> list[Record]:
    """Return the records of so many spans."""
    timed = gpu_timed(name="work", sync=sync)(work)
    with capture() as records:
        for _ in range(times):
            time.sleep(pause_s)
            timed()
    return records


def with_vitals(work: Callable[[], Any]) -> Record:
    """Return the first record that has a reading: NVML is opened after the first span."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        record = run(work, 20)[-1]
        if isinstance(record.vitals, Vitals) and not isinstance(record.vitals.process_cpus, Missing):
            return record
    raise AssertionError(record.vitals)


def test_a_record_carries_the_state_of_its_card(matmul):
    """The clock is one that the card can have, and the card is the one that torch runs on, by its UUID."""
    import torch

    record = with_vitals(matmul)
    held = record.vitals
    print(record)
    assert digits(record.device_uuid) == digits(torch.cuda.get_device_properties(0).uuid)
    opened = nvml.Nvml()
    card = opened.card(record.device_uuid)
    assert isinstance(card, nvml.Card)
    assert digits(card.uuid) == digits(record.device_uuid)
    assert opened.card("GPU-00000000-0000-0000-0000-000000000000").reason == "not_found"
    opened.close()
    assert 100 <= held.sm_clock_mhz <= held.sm_clock_max_mhz
    assert isinstance(held.throttle, tuple)
    assert not any(reason.startswith("unknown") for reason in held.throttle)
    assert 10 < held.power_w < 3_000
    assert 5 < held.temperature_c < 110
    assert held.host_load >= 0
    assert held.process_cpus > 0
    assert held.cpus_allowed >= 1
    assert 0 <= record.vitals_age_ns <= 2 * INTERVAL_S * 1e9
    assert abs(record.device_start_ns - held.taken_ns) < 5e9


def test_dense_then_sparse(matmul):
    """A7: sparse spans carry how long the stream was idle, and the clock; none of them is cold for it."""
    with_vitals(matmul)
    dense = run(matmul, 300)[100:]
    sparse = run(matmul, 3, pause_s=1.0)
    for name, records in (("dense", dense), ("sparse", sparse)):
        median = statistics.median(record.device_ns for record in records)
        clocks = sorted({r.vitals.sm_clock_mhz for r in records if isinstance(r.vitals, Vitals)}, key=str)
        reasons = sorted({one for r in records if isinstance(r.vitals, Vitals) for one in r.vitals.throttle or ()})
        idle = statistics.median(record.idle_before_ns for record in records)
        print(f"{name}: device {median / 1e3:.1f} µs, idle before {idle / 1e3:.1f} µs, SM {clocks} MHz, {reasons}")
    # The host launches one behind the other within some 50 µs; a loaded one needs a hundred times that at most.
    assert statistics.median(record.idle_before_ns for record in dense) < 5_000_000
    assert all(1_000_000_000 <= record.idle_before_ns + record.uncertainty_ns < 2_000_000_000 for record in sparse)
    assert all(isinstance(record.vitals, Vitals) for record in sparse)
    assert {record.warmth for record in (*dense, *sparse)} <= {"warm", "unknown"}


def test_the_idle_time_against_events_of_our_own(matmul):
    """Two events between two spans lie inside the time that the second one states, and fill it but for what the
    host takes to place the marks: some 10 µs, 300 at the most in the median."""
    import torch

    timed = gpu_timed(name="work", sync="deferred")(matmul)
    pairs = []
    with capture() as records:
        timed()
        for _ in range(40):
            torch.cuda.synchronize()
            first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            time.sleep(0.002)
            second.record()
            timed()
            pairs.append((first, second))
    torch.cuda.synchronize()
    over = []
    for (first, second), record in zip(pairs, records[1:], strict=True):
        between_ns = first.elapsed_time(second) * 1e6
        over.append(record.idle_before_ns - between_ns)
    slack = max(record.uncertainty_ns for record in records)
    median = statistics.median(over)
    print(f"beyond the two events: median {median / 1e3:.1f} µs, least {min(over) / 1e3:.1f}; uncertainty {slack} ns")
    # Before the first event lies a synchronize, too, which sees the end some 10 to 30 µs late.
    assert min(over) >= -2 * slack - 1_000
    assert median < 300_000


def test_deferred_calls_one_behind_the_other_have_no_idle_time(matmul):
    """Behind a busy device the next start mark is reached with the last end mark, to the uncertainty of both."""
    records = run(matmul, 100, sync="deferred")[10:]
    queued = [record for record in records if isinstance(record.queue_ns, int) and record.queue_ns > 500_000]
    print(f"{len(queued)} of {len(records)} queued; idle {sorted(record.idle_before_ns for record in queued)[-5:]}")
    for record in queued:
        assert record.idle_before_ns <= 2 * record.uncertainty_ns + 5_000  # two marks one behind the other: some 2 µs


def test_what_reading_costs(matmul):
    """Measured and printed. A reading costs microseconds: were it a millisecond, it would be the wrong question."""
    import pynvml

    record = with_vitals(matmul)
    opened = nvml.Nvml()
    card = opened.card(record.device_uuid)
    handle = pynvml.nvmlDeviceGetHandleByUUID(card.uuid)
    ring = Ring(2_000_000_000)
    now = time.perf_counter_ns()
    for number in range(400):
        ring.add(now + number * 1_000_000_000, record.vitals)
    end = now + 350_200_000_000
    sampler = current.tracer().resolver.reader.vitals
    host = HostLoad()
    costs = {
        "SM clock": lambda: pynvml.nvmlDeviceGetClockInfo(handle, 1),
        "reasons": lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        "power": lambda: pynvml.nvmlDeviceGetPowerUsage(handle),
        "temperature": lambda: pynvml.nvmlDeviceGetTemperature(handle, 0),
        "a reading of the card": card.read,
        "a reading of the host": host.read,
        "near, of 400": lambda: ring.near(end - 100_000, end),
        "Sampler.at": lambda: sampler.at(record.device_uuid, now - 100_000, now),
    }
    for name, ask in costs.items():
        ask()
        taken = []
        for _ in range(300):
            before = time.perf_counter_ns()
            ask()
            taken.append(time.perf_counter_ns() - before)
        median = statistics.median(taken)
        print(f"{name}: {median / 1e3:.2f} µs, p99 {sorted(taken)[-3] / 1e3:.2f}")
        assert median < 1_000_000
    before = time.perf_counter_ns()
    energy = nvml.read_energy_mj(record.device_uuid)
    print(f"total energy, with opening and closing: {energy} mJ, {(time.perf_counter_ns() - before) / 1e6:.1f} ms")
    before = time.perf_counter_ns()
    glance.look([record.device_uuid])
    print(f"one look, with opening and closing: {(time.perf_counter_ns() - before) / 1e6:.1f} ms")
    opened.close()
