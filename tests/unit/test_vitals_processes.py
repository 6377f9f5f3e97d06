"""The sampler in the life of a process: it starts with a span only, is made anew after a fork, and holds up no end."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

HEAD = """
import os, sys, threading, time
sys.path.insert(0, {here!r})
from make_believe_nvml import FakeNvml
cards = sys.modules["pynvml"] = FakeNvml({{"GPU-fake-0": 1500}})
import gpu_timed
from gpu_timed import configure, flush, shutdown
from gpu_timed.record import Vitals
from gpu_timed.testing import FakeDevice, capture, use_device

def one():
    with capture() as records:
        gpu_timed.gpu_timed(name="work")(lambda: device.launch(10_000))()
    return records[0]

def with_vitals():
    for _ in range(4_000):
        record = one()
        if isinstance(record.vitals, Vitals):
            return record.vitals.sm_clock_mhz
        time.sleep(0.005)
    raise AssertionError(record.vitals)

def samplers():
    return [thread.name for thread in threading.enumerate() if thread.name == "gpu_timed-vitals"]
"""


def run(script: str) -> str:
    """Run *script* in a process of its own, and return what it printed."""
    head = HEAD.format(here=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = [line for line in done.stderr.splitlines() if "no OpenTelemetry provider" not in line]
    assert (done.returncode, told) == (0, [])
    return done.stdout


def test_nothing_starts_before_the_first_span():
    """Neither the import, nor decorating, nor configuring asks NVML or starts a thread."""
    assert (
        run("""
    work = gpu_timed.gpu_timed(lambda: None)
    configure(vitals_interval_s=0.01)
    print(samplers(), cards.asked)
    """)
        == "[] []\n"
    )


def test_a_forked_child_reads_for_itself():
    """A fork leaves the child without the thread; its own first span starts one, which sees the same card."""
    assert (
        run("""
    configure(vitals_interval_s=0.01)
    with use_device(FakeDevice(realtime=True)) as device:
        assert with_vitals() == 1500
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert samplers() == []
            cards.clocks["GPU-fake-0"] = 700
            with use_device(FakeDevice(realtime=True)) as device:
                assert with_vitals() == 700
            assert len(samplers()) == 1
            shutdown()
            assert samplers() == []
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with use_device(FakeDevice(realtime=True)) as device:
        print(with_vitals(), len(samplers()))
    """)
        == "1500 1\n"
    )


def test_nvml_that_hangs_does_not_hold_up_the_end():
    """The process ends though the thread is still in NVML; nothing is reported as stuck or lost."""
    assert (
        run("""
    configure(vitals_interval_s=0.01)
    cards.hang = threading.Event()
    with use_device(FakeDevice(realtime=True)) as device:
        while not cards.looks():
            record = one()
        assert samplers() and not isinstance(record.vitals, Vitals)
    print("told")
    """)
        == "told\n"
    )


def test_after_a_shutdown_the_next_span_starts_anew():
    """One thread at a time."""
    assert (
        run("""
    configure(vitals_interval_s=0.01)
    for _ in range(3):
        with use_device(FakeDevice(realtime=True)) as device:
            assert with_vitals() == 1500
        assert len(samplers()) == 1
        shutdown()
        assert samplers() == [] and cards.open == 0
    print("done")
    """)
        == "done\n"
    )
