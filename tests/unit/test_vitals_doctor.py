"""What the doctor says of the machine's state."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from make_believe_nvml import NOT_SUPPORTED, FakeNvml

from gpu_timed import configure, diagnose
from gpu_timed import doctor as door
from gpu_timed.diagnosis import vitals
from gpu_timed.findings import DeviceFacts, Finding, Inventory
from gpu_timed.vitals import glance

CARDS = ("GPU-a", "GPU-b")


def told(*uuids: str | None, switched_on: bool = True) -> dict[str, Finding]:
    """Return the findings about the cards *uuids*, by key."""
    states, absent = glance.look([*uuids, None])
    seen = [vitals.Seen(number, uuid, state) for number, (uuid, state) in enumerate(zip(uuids, states, strict=False))]
    return {one.key: one for one in vitals.findings(seen, states[-1], absent, switched_on=switched_on)}


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """NVML with two cards."""
    held = FakeNvml({"GPU-a": 345, "GPU-b": 1410})
    monkeypatch.setitem(sys.modules, "pynvml", held)
    return held


def test_each_device_with_its_clock_and_what_holds_it(cards):
    """A resting clock is in order; one that is held down is worth a note."""
    cards.reasons.update({"GPU-a": 0x1, "GPU-b": 0x4 | 0x40})
    found = told(*CARDS)
    assert (found["nvml"].level, found["device.0"].level, found["device.1"].level) == ("ok", "ok", "note")
    assert found["device.0"].text == "0: GPU-a: SM clock 345 of 1980 MHz, held by: gpu_idle, 123.5 W, 41 °C"
    assert "held by: sw_power_cap, hw_thermal_slowdown" in found["device.1"].text
    assert found["device.1"].values == {
        "index": 1,
        "uuid": "GPU-b",
        "sm_clock_mhz": 1410,
        "sm_clock_max_mhz": 1980,
        "throttle_reasons": ["sw_power_cap", "hw_thermal_slowdown"],
        "power_w": 123.456,
        "temperature_c": 41,
    }
    assert "host" in found
    assert cards.open == 0


def test_what_is_not_known_is_unknown_and_not_none(cards):
    """Reasons that could not be read are not no reasons; a zero is a zero."""
    assert "held by: none" in told("GPU-a")["device.0"].text
    cards.clocks["GPU-a"] = 0
    for question in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        cards.refuses[question] = NOT_SUPPORTED
    found = told("GPU-a")["device.0"]
    assert "SM clock 0 of" in found.text
    assert "held by: unknown" in found.text
    assert found.values["throttle_reasons"] is None
    assert found.values["sm_clock_mhz"] == 0


def test_a_device_that_nvml_does_not_know(cards):
    """Is told as such, with its UUID; so is one without."""
    found = told("GPU-other", None)
    assert found["device.0"].level == found["device.1"].level == "note"
    assert "GPU-other" in found["device.0"].text
    assert "without a UUID" in found["device.1"].text


def test_without_nvml_there_is_a_command(monkeypatch):
    """Not installed: how to install it. No driver: there is nothing to install."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = told("GPU-a")
    assert list(found) == ["nvml", "host"]
    assert (found["nvml"].level, found["nvml"].fix) == ("note", "pip install 'gpu-timed[nvml]'")
    held = FakeNvml({})
    held.refuses["nvmlInit"] = 9
    monkeypatch.setitem(sys.modules, "pynvml", held)
    found = told("GPU-a")
    assert (found["nvml"].fix, found["nvml"].values) == ("", {"absent": "error 9"})


def test_a_crowded_host(monkeypatch):
    """More threads than CPUs is worth a note."""
    monkeypatch.setattr(glance.HostLoad, "read", lambda self: glance.Load(1.5, 0.0, 4))
    assert told()["host"].level == "note"
    monkeypatch.setattr(glance.HostLoad, "read", lambda self: glance.Load(0.5, 0.0, 4))
    assert told()["host"].level == "ok"
    assert told()["host"].values == {"host_load": 0.5, "cpus_allowed": 4}


@pytest.mark.parametrize("switched", [{"vitals": False}, {"vitals_interval_s": 0}])
def test_switched_off_is_said(cards, switched):
    """In the section of ``diagnose()``, which looks all the same."""
    found = diagnose().section("vitals")
    assert found.get("off") is None
    configure(**switched)
    found = diagnose().section("vitals")
    assert found.get("off").level == "note"
    assert found.get("host") is not None


def test_the_section_is_about_the_devices_that_are_there(cards, monkeypatch):
    """By their UUIDs, whatever their order; looking leaves NVML closed."""

    def inventory(*_: Any, **__: Any) -> Inventory:
        rest: dict[str, Any] = {"name": None, "memory_bytes": None, "compute_mode": "default"}
        found = [DeviceFacts(index=index, uuid=uuid, **rest) for index, uuid in enumerate(reversed(CARDS))]
        return Inventory(devices=tuple(found))

    monkeypatch.setattr(door.cuda_devices, "inventory", inventory)
    found = diagnose().section("vitals")
    assert found.get("failed") is None, found
    assert [found.get(f"device.{number}").values["sm_clock_mhz"] for number in (0, 1)] == [1410, 345]
    assert cards.open == 0
