"""The doctor on a real device. Needs one GPU and torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpu_timed
from gpu_timed import diagnose

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


def digits(uuid: object) -> str:
    """Return a UUID without its prefix, in lower case: torch writes none."""
    return str(uuid).lower().removeprefix("gpu-").removeprefix("mig-")


def environment() -> dict[str, str]:
    """Return the variables of a process that finds this checkout first."""
    source = str(Path(gpu_timed.__file__).parents[1])
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([source, before] if before else [source])}


def check_clock(told: dict[str, Any]) -> None:
    """Check the figures of device 0."""
    findings = {f["key"]: f for section in told["sections"] for f in section["findings"] if section["name"] == "clock"}
    print(json.dumps(findings, indent=1))
    figures = findings["floor.0"]["values"]
    assert findings["open.0"]["level"] == "ok"
    assert figures["clock"] == "cuda_event"
    assert 500 <= figures["floor_idle_ns"] <= 30_000
    assert 500 <= figures["floor_queued_ns"] <= 30_000
    assert figures["floor_queued_ns"] <= figures["floor_idle_ns"] + 500  # where the floor is high, both read it
    assert 0 < figures["resolution_ns"] <= 1_000
    assert 0 < figures["uncertainty_ns"] < 50_000
    assert 0 < figures["latency_ns"] < 100_000
    assert 0 < figures["mark_ns"] < 50_000


def test_the_command_on_a_machine_with_a_gpu() -> None:
    """In a process of its own, without torch: device, UUID as torch has it, and a clock that can be read."""
    import torch

    pytest.importorskip("typer")
    done = subprocess.run(
        [sys.executable, "-m", "gpu_timed", "doctor", "--json", "--no-send"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    told = json.loads(done.stdout)
    assert done.returncode == told["verdict"]["exit_code"] == 0, done.stdout + done.stderr
    assert told["verdict"]["text"].startswith("Ready: the GPU's time on NVIDIA"), told["verdict"]
    check_clock(told)
    (devices,) = (section for section in told["sections"] if section["name"] == "devices")
    (device,) = (finding for finding in devices["findings"] if finding["key"] == "device.0")
    assert digits(device["values"]["uuid"]) == digits(torch.cuda.get_device_properties(0).uuid)
    assert device["values"]["name"] == torch.cuda.get_device_name(0)


def test_inside_a_process_that_uses_the_device() -> None:
    """Measuring beside torch's own context leaves that as it was, and the device is shown as in use."""
    import torch

    x = torch.ones(1024, device="cuda")
    torch.cuda.synchronize()
    for _ in range(2):
        found = diagnose(measure=True)
        device = found.section("devices").get("device.0")
        assert device is not None
        assert device.values["in_use"]
        check_clock(found.to_dict())
    assert float((x + 1).sum()) == 2048.0
    torch.cuda.synchronize()


def test_looking_alone_makes_no_context() -> None:
    """In a process without CUDA, ``diagnose()`` leaves the driver as it is: a fork can still use the device."""
    script = """
import ctypes
from gpu_timed import diagnose
from gpu_timed.clocks import cuda_devices
found = diagnose()
library = cuda_devices.load()
print(library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())), found.exit_code)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["3", "0"], done.stdout + done.stderr
