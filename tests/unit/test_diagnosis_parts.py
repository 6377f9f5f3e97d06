"""The parts of a diagnosis by themselves: clocks, devices, versions, caches."""

# ruff: noqa: N802 - the stand-ins are called as the driver's and NVML's functions are

from __future__ import annotations

import ctypes
import itertools
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_timed.clocks import cuda_devices, cuda_driver, nvml
from gpu_timed.diagnosis import caches, clock, devices, versions
from gpu_timed.errors import DeviceFault
from gpu_timed.findings import DeviceFacts, Finding, Inventory
from gpu_timed.kernel_caches import looking, places
from gpu_timed.kernel_caches.places import surroundings
from gpu_timed.ports import Bench
from gpu_timed.testing import FakeDevice

# -- the clock, on a device made of arithmetic ------------------------------------------------------------


def bench_on(device: FakeDevice, *, busy: bool = True) -> Bench:
    """Return a bench on *device*."""
    return Bench(device.locate(), device.host.now_ns, (lambda: device.launch(300_000)) if busy else None)


def test_the_figures_of_a_fake_clock_are_exact():
    """Where an empty pair takes no time, the floor is 0, and the latency is the device's own."""
    device = FakeDevice(launch_latency_ns=4_000)
    figures = clock.measure(bench_on(device))
    assert (figures.floor_idle_ns, figures.floor_queued_ns, figures.latency_ns) == (0, 0, 4_000)
    assert figures.mark_ns == 0
    assert figures.resolution_ns is None, "durations that are all the same have no smallest step"
    assert 0 < figures.uncertainty_ns <= figures.uncertainty_max_ns < 10_000
    assert device.marks_in_use == 0


def test_the_figures_of_a_clock_with_a_floor():
    """What a pair takes is the floor, idle and queued apart, and the smallest step is seen."""
    device = FakeDevice()
    times = itertools.cycle([1_248, 1_280, 1_344])
    device.elapsed_ns = lambda start, end: next(times)  # type: ignore[method-assign]
    figures = clock.measure(bench_on(device))
    assert (figures.floor_idle_ns, figures.floor_idle_min_ns, figures.resolution_ns) == (1_280, 1_248, 32)
    assert figures.floor_queued_min_ns == 1_248


def test_a_device_that_caught_up_gives_no_queued_floor():
    """Pairs that were not queued behind work are not shown as such."""
    device = FakeDevice()
    bench = bench_on(device)._replace(busy=lambda: None)
    assert clock.measure(bench).floor_queued_ns is None
    assert clock.measure(bench_on(device, busy=False)).floor_queued_ns is None
    text = next(iter(clock.findings(bench))).text
    assert "behind other work" not in text


def test_a_real_time_clock_passes_through_the_same_code():
    """On the machine's own clock every figure is there and positive."""
    device = FakeDevice(realtime=True, launch_latency_ns=20_000)
    figures = clock.measure(Bench(device.locate(), device.host.now_ns, lambda: device.launch(5_000_000)))
    assert figures.floor_queued_ns == 0
    assert figures.mark_ns > 0
    assert figures.uncertainty_ns > 0


def test_every_finding_of_the_clock_names_its_device():
    """Several devices can be told apart, by key and in the values."""
    device = FakeDevice()
    with device.use(device=3):
        found = list(clock.findings(bench_on(device)))
    assert [finding.key for finding in found] == ["floor.3", "placement.3", "cost.3"]
    assert all(finding.values["device"] == 3 for finding in found)
    assert found[0].values["clock"] == "fake"


def test_a_wide_uncertainty_is_a_warning(monkeypatch):
    """Beyond 50 µs something is in the way."""
    device = FakeDevice(realtime=True)
    monkeypatch.setattr(clock, "_WIDE_UNCERTAINTY_NS", 1)
    placement = list(clock.findings(bench_on(device)))[1]
    assert placement.level == "warning"
    assert placement.fix


def test_a_broken_device_is_a_fault():
    """A device that takes no marks, or breaks, raises its own error: the section shows it."""
    device = FakeDevice()
    bench = bench_on(device)
    device.break_down()
    with pytest.raises(DeviceFault, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        clock.measure(bench)


def test_the_hosts_clock_has_a_smallest_step():
    """The real one moves; one that stands still has none."""
    assert clock.host(time.perf_counter_ns).values["resolution_ns"] > 0
    assert clock.host(lambda: 5).values["resolution_ns"] is None


# -- the driver, played by an object ----------------------------------------------------------------------


class FakeDriver:
    """Answers as ``libcuda`` does, for one thread, and keeps count of what is made and not given back."""

    def __init__(self, *, count: int = 1, started: bool = False, refuses: dict[str, int] | None = None) -> None:
        self.count = count
        self.started = started
        self.refuses = refuses or {}
        self.references = 0
        self.handles = itertools.count(1)
        self.alive: set[tuple[str, int]] = set()
        self.pushed = 0
        self.mode = 0
        self.modes_at: list[int] = []
        self.times: dict[int, int] = {}
        self.ready_at: dict[int, int] = {}
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.refuses:
                return self.refuses[name]
            if not self.started and name not in ("cuInit", "cuGetErrorName", "cuThreadExchangeStreamCaptureMode"):
                return 3
            return getattr(self, f"do_{name}")(*arguments) or 0

        return call

    def make(self, kind: str, where: Any) -> None:
        self.modes_at.append(self.mode)
        where._obj.value = next(self.handles)
        self.alive.add((kind, where._obj.value))

    def do_cuInit(self, flags: int) -> None:
        self.started = True

    def do_cuGetErrorName(self, code: int, text: Any) -> int:
        text._obj.value = f"CUDA_ERROR_{code}".encode()
        return 0

    def do_cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0 if self.count else 100

    def do_cuDeviceGet(self, ordinal: Any, index: int) -> None:
        ordinal._obj.value = index

    def do_cuDeviceGetAttribute(self, value: Any, attribute: int, _: Any) -> None:
        assert attribute == 20
        value._obj.value = 0

    def do_cuDeviceTotalMem_v2(self, size: Any, _: Any) -> None:
        size._obj.value = 141 << 30

    def do_cuDeviceGetUuid_v2(self, raw: Any, ordinal: Any) -> None:
        raw.raw = bytes(range(16))

    def do_cuDeviceGetName(self, text: Any, size: int, _: Any) -> None:
        text.value = b"NVIDIA H200"

    def do_cuDevicePrimaryCtxGetState(self, _: Any, flags: Any, active: Any) -> None:
        active._obj.value = int(self.references > 0)

    def do_cuDevicePrimaryCtxRetain(self, context: Any, _: Any) -> None:
        self.references += 1
        context._obj.value = 77

    def do_cuDevicePrimaryCtxRelease_v2(self, _: Any) -> None:
        self.references -= 1

    def do_cuCtxPushCurrent_v2(self, _: Any) -> None:
        self.pushed += 1

    def do_cuCtxPopCurrent_v2(self, _: Any) -> None:
        self.pushed -= 1

    def do_cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
        self.mode, mode._obj.value = mode._obj.value, self.mode

    def do_cuEventCreate(self, where: Any, flags: int) -> None:
        assert self.pushed > 0
        self.make("event", where)

    def do_cuStreamCreate(self, where: Any, flags: int) -> None:
        assert self.pushed > 0
        self.make("stream", where)

    def do_cuMemAlloc_v2(self, where: Any, size: int) -> None:
        self.make("memory", where)

    def do_cuEventDestroy_v2(self, handle: int) -> None:
        self.alive.remove(("event", handle))

    def do_cuStreamDestroy_v2(self, handle: int) -> None:
        self.alive.remove(("stream", handle))

    def do_cuMemFree_v2(self, handle: int) -> None:
        self.alive.remove(("memory", handle))

    def do_cuStreamSynchronize(self, stream: int) -> None:
        self.sleep_until(self.ready_at.get(stream, 0))

    def do_cuMemsetD8Async(self, memory: int, value: int, size: int, stream: int) -> None:
        now = time.perf_counter_ns()
        self.ready_at[stream] = max(now, self.ready_at.get(stream, 0)) + 200_000

    def do_cuEventRecord(self, event: int, stream: int) -> None:
        assert ("event", event) in self.alive
        self.modes_at.append(self.mode)
        at = max(time.perf_counter_ns() + 3_000, self.ready_at.get(stream, 0) + 1_250)
        self.times[event] = self.ready_at[stream] = at

    def do_cuEventQuery(self, event: int) -> int:
        return 0 if time.perf_counter_ns() >= self.times[event] else 600

    def do_cuEventSynchronize(self, event: int) -> None:
        self.sleep_until(self.times[event])

    def do_cuEventElapsedTime(self, result: Any, start: int, end: int) -> None:
        result._obj.value = (self.times[end] - self.times[start]) / 1e6

    def sleep_until(self, at: int) -> None:
        while time.perf_counter_ns() < at:
            time.sleep(0)


def test_the_bench_measures_with_the_librarys_own_clock_and_leaves_nothing_behind():
    """On a driver that counts, every event, stream, byte and reference is given back, and questions were harmless."""
    library = FakeDriver()
    with cuda_devices.bench(library, 0) as bench:
        found = {finding.key: finding for finding in clock.findings(bench)}
    values = found["floor.0"].values
    assert values["clock"] == "cuda_event"
    assert values["floor_queued_ns"] == pytest.approx(1_250, abs=5)
    assert 0 <= values["floor_idle_min_ns"] <= values["floor_idle_ns"]
    assert values["uncertainty_ns"] > 0
    assert library.alive == set()
    assert (library.references, library.pushed, library.mode) == (0, 0, 0)
    assert set(library.modes_at) == {cuda_driver.RELAXED}
    assert "cuCtxSynchronize" not in library.calls


@pytest.mark.parametrize(
    "refused",
    ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuStreamCreate", "cuEventCreate"],
)
def test_a_driver_that_refuses_is_told_by_its_own_name(refused):
    """Whichever step fails, it is a DeviceFault, and what was taken before is given back."""
    library = FakeDriver(refuses={refused: 46})
    with pytest.raises(DeviceFault), cuda_devices.bench(library, 0) as bench:
        clock.measure(bench)
    assert library.alive == set()
    assert (library.references, library.pushed, library.mode) == (0, 0, 0)


def test_without_memory_there_is_no_queued_floor_but_all_the_rest():
    """A full device can be measured as far as that goes."""
    library = FakeDriver(refuses={"cuMemAlloc_v2": 2})
    with cuda_devices.bench(library, 0) as bench:
        figures = clock.measure(bench)
    assert figures.floor_queued_ns is None
    assert figures.floor_idle_ns is not None
    assert library.alive == set()


def test_a_context_in_use_is_left_as_it_was():
    """The reference that the application holds stays."""
    library = FakeDriver(started=True)
    library.references = 1
    with cuda_devices.bench(library, 0):
        assert library.references == 2
    assert library.references == 1


NOTHING = Inventory(nvml="nvidia-ml-py is not installed")


def test_the_inventory_of_the_driver():
    """Index, UUID as NVML writes it, name, memory and compute mode; whether it is in use."""
    found = cuda_devices.inventory(FakeDriver(count=2), initialise=True, ask_nvml=lambda: NOTHING)
    assert [device.index for device in found.devices] == [0, 1]
    assert found.source == "driver"
    first = found.devices[0]
    assert (first.uuid, first.name) == ("GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "NVIDIA H200")
    assert (first.memory_bytes, first.compute_mode, first.mig, first.in_use) == (141 << 30, "default", None, False)


def test_the_uuid_of_a_mig_instance_is_nvmls():
    """The driver gives sixteen bytes; NVML knows that they are a MIG instance's."""
    held = DeviceFacts(
        index=4,
        uuid="MIG-00010203-0405-0607-0809-0a0b0c0d0e0f",
        name="NVIDIA H200 MIG 1g.18gb",
        memory_bytes=1,
        compute_mode="default",
        mig=True,
    )
    asked = Inventory(devices=(held,), source="nvml", driver_version="580.95.05")
    found = cuda_devices.inventory(FakeDriver(), initialise=True, ask_nvml=lambda: asked)
    assert (found.devices[0].index, found.devices[0].uuid, found.devices[0].mig) == (0, held.uuid, True)


def test_looking_without_initialising_asks_nvml_alone():
    """Inside a service that has not set CUDA up, the driver stays as it is."""
    library = FakeDriver()
    found = cuda_devices.inventory(library, initialise=False, ask_nvml=lambda: NOTHING)
    assert found.absent == "not_initialised"
    assert not library.started
    assert "cuInit" not in library.calls
    held = DeviceFacts(index=0, uuid="GPU-1", name="x", memory_bytes=1, compute_mode="default")
    asked = Inventory(devices=(held,), source="nvml")
    found = cuda_devices.inventory(library, initialise=False, ask_nvml=lambda: asked)
    assert (found.devices, found.source, found.absent) == ((held,), "nvml", "")


@pytest.mark.parametrize(
    ("library", "absent"),
    [
        (None, "no_driver"),
        (FakeDriver(count=0), "no_device"),
        (FakeDriver(refuses={"cuInit": 100}), "no_device"),
        (FakeDriver(refuses={"cuInit": 803}), "CUDA_ERROR_803"),
    ],
)
def test_why_there_are_no_devices(library, absent):
    """No driver, no device, or the driver's own error."""
    assert cuda_devices.inventory(library, initialise=True, ask_nvml=lambda: NOTHING).absent == absent


def test_the_drivers_versions(tmp_path):
    """The newest CUDA it runs, and its own version as the kernel shows it."""
    library = SimpleNamespace(cuDriverGetVersion=lambda where: setattr(where._obj, "value", 13_010) or 0)
    assert cuda_devices.driver_cuda(library) == (13, 1)
    assert cuda_devices.driver_cuda(None) is None
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC 13.2.0\n")
    assert cuda_devices.driver_version((tmp_path / "none", file)) == "580.95.05"
    assert cuda_devices.driver_version((tmp_path / "none",)) is None


def test_the_signatures_are_of_the_right_shape():
    """Each function of the table takes as many arguments as it is called with here."""
    made: dict[str, Any] = {}
    library = FakeDriver()

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> int:
                made[name] = arguments
                return getattr(library, name)(*arguments)

            return call

    recorder: Any = Recorder()
    cuda_devices.inventory(recorder, initialise=True, ask_nvml=lambda: NOTHING)
    with cuda_devices.bench(recorder, 0) as bench:
        clock.measure(bench)
    table = {**cuda_driver._SIGNATURES, **cuda_devices._SIGNATURES}
    for name, arguments in made.items():
        assert len(arguments) == len(table[name]), name
        for argument, kind in zip(arguments, table[name], strict=True):
            kind.from_param(argument)  # raises ctypes.ArgumentError or TypeError where it does not fit
    assert {"cuMemsetD8Async", "cuMemFree_v2", "cuStreamDestroy_v2", "cuEventDestroy_v2"} <= set(made)
    assert ctypes.sizeof(ctypes.c_uint64) == 8


# -- NVML -------------------------------------------------------------------------------------------------


class Nvml:
    """Stands for ``pynvml``: one card cut into two instances, one that is not, one that is old."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> str:
        return f"card{number}"

    def nvmlDeviceGetComputeMode(self, handle: str) -> int:
        return 3 if handle == "card1" else 0

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if handle == "card1":
            raise self.NVMLError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, slot: int) -> str:
        if slot > 1:
            raise self.NVMLError("Not Found")
        return f"mig{slot}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return f"MIG-{handle}" if handle.startswith("mig") else f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(total=1 << 34)


def test_nvml_shows_instances_in_place_of_their_card(monkeypatch):
    """A card that is cut into instances is shown as those, and NVML is closed again."""
    import sys

    held = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", held)
    found = nvml.inventory()
    assert [device.uuid for device in found.devices] == ["MIG-mig0", "MIG-mig1", "GPU-card1"]
    assert [device.mig for device in found.devices] == [True, True, False]
    assert [device.index for device in found.devices] == [0, 1, 2]
    assert found.devices[2].compute_mode == "exclusive"
    assert (found.driver_version, found.source, held.open) == ("580.95.05", "nvml", 0)


def test_nvml_that_is_not_there_or_does_not_answer(monkeypatch):
    """Why it could not be asked is told; nothing is raised."""
    import sys

    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.inventory() == NOTHING
    held = Nvml()
    monkeypatch.setattr(held, "nvmlInit", lambda: (_ for _ in ()).throw(Nvml.NVMLError("Driver Not Loaded")))
    monkeypatch.setitem(sys.modules, "pynvml", held)
    assert nvml.inventory().nvml == "Driver Not Loaded"


# -- devices in words -------------------------------------------------------------------------------------


def told(inventory: Inventory, *, driver_present: bool = True, **environment: str) -> dict[str, Finding]:
    """Return the findings about *inventory*, by key."""
    return {f.key: f for f in devices.findings(inventory, environment, driver_present=driver_present)}


def facts(**changes: Any) -> DeviceFacts:
    """Return a device, with these *changes*."""
    held = {"index": 0, "uuid": "GPU-1", "name": "NVIDIA H200", "memory_bytes": 141 << 30, "compute_mode": "default"}
    return DeviceFacts(**{**held, **changes})


def test_a_device_is_shown_with_all_that_is_known():
    """Name, memory, UUID, and whether it is an instance or in use."""
    found = told(Inventory(devices=(facts(mig=True, uuid="MIG-1", in_use=True),), driver_version="580.95.05"))
    device = found["device.0"]
    assert device.text == "0: NVIDIA H200, a MIG instance, 141 GiB, MIG-1, in use by this process"
    assert device.values["driver_version"] == "580.95.05"
    assert device.level == "ok"


def test_a_prohibited_device_is_a_problem():
    """No process may open it, and the command that changes it is named."""
    device = told(Inventory(devices=(facts(compute_mode="prohibited"),)))["device.0"]
    assert device.level == "problem"
    assert "nvidia-smi -i 0 -c DEFAULT" in device.fix


@pytest.mark.parametrize(
    ("absent", "driver_present", "environment", "level", "fix"),
    [
        ("no_driver", False, {}, "warning", "--gpus all"),
        ("no_device", True, {}, "warning", "--gpus all"),
        ("no_device", True, {"CUDA_VISIBLE_DEVICES": ""}, "problem", "unset CUDA_VISIBLE_DEVICES"),
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", True, {}, "problem", "nvidia-smi"),
        ("not_initialised", True, {}, "note", ""),
    ],
)
def test_no_device_says_why_and_what_helps(absent, driver_present, environment, level, fix):
    """Each reason has its own level and way out."""
    none = told(Inventory(absent=absent), driver_present=driver_present, **environment)["none"]
    assert (none.level, none.values) == (level, {"absent": absent})
    assert fix in none.fix


def test_what_hides_devices_and_who_counted_them_is_noted():
    """``CUDA_VISIBLE_DEVICES``, NVML's own order, and NVML that is missing."""
    found = told(Inventory(devices=(facts(),), source="nvml", nvml="not installed"), CUDA_VISIBLE_DEVICES="3")
    assert {found[key].level for key in ("visible_devices", "order", "nvml")} == {"note"}
    assert "CUDA_VISIBLE_DEVICES=3" in found["visible_devices"].text


# -- versions ---------------------------------------------------------------------------------------------

GOOD = {"opentelemetry-api": "1.45.2", "opentelemetry-sdk": "1.45.2", "wrapt": "2.5.2"}


def version_findings(
    build: versions.TorchBuild | None = None,
    driver_cuda: tuple[int, int] | None = None,
    **held: str,
) -> dict[str, Finding]:
    """Return the findings about an installation of these versions."""
    installed = {**GOOD, **{name.replace("_", "-"): version for name, version in held.items()}}
    return {
        finding.key: finding
        for finding in versions.findings(
            "0.1.0",
            driver_version="580.95.05",
            driver_cuda=driver_cuda,
            device_present=driver_cuda is not None,
            installed=installed.get,
            torch_build=lambda: build,
        )
    }


@pytest.mark.parametrize(
    ("held", "key", "level"),
    [
        ({"numpy": "2.5.0", "numba_cuda": "0.30.4"}, "numpy_and_numba_cuda", "warning"),
        ({"numpy": "2.5.1rc1", "numba_cuda": "0.20.0"}, "numpy_and_numba_cuda", "warning"),
        ({"torch": "2.5.1"}, "torch", "problem"),
        ({"torch": "2.6.0"}, "torch", "ok"),
        ({"opentelemetry_api": "1.29.0"}, "opentelemetry-api", "problem"),
        ({"opentelemetry_sdk": "1.30.0"}, "opentelemetry-sdk", "ok"),
        ({"cupy_cuda13x": "14.0.1"}, "cupy", "ok"),
    ],
)
def test_versions_that_do_not_work_are_told(held, key, level):
    """Known combinations have their level, and those that are no fault have none of it."""
    found = version_findings(**held)
    assert found[key].level == level
    assert bool(found[key].fix) == (level != "ok")


@pytest.mark.parametrize(
    "held", [{"numpy": "2.4.6", "numba_cuda": "0.30.4"}, {"numpy": "2.5.0", "numba_cuda": "0.31.0"}]
)
def test_versions_that_work_are_not_told_as_a_combination(held):
    """Either side of the known combination is fine by itself."""
    assert "numpy_and_numba_cuda" not in version_findings(**held)


def test_a_required_package_that_is_missing_is_a_problem():
    """Without OpenTelemetry's SDK nothing can be exported."""
    found = list(
        versions.findings("0", driver_version=None, driver_cuda=None, device_present=False, installed=lambda _: None)
    )
    (missing,) = [finding for finding in found if finding.key == "opentelemetry-sdk"]
    assert (missing.level, missing.fix) == ("problem", "pip install opentelemetry-sdk")


def test_a_torch_without_cuda_beside_a_gpu_is_a_problem():
    """The commonest reason for no device times; without a GPU the same torch is fine."""
    build = versions.TorchBuild(None, None)
    assert version_findings(build, (13, 0), torch="2.11.0")["torch"].level == "problem"
    assert version_findings(build, None, torch="2.11.0")["torch"].level == "ok"
    assert version_findings(versions.TorchBuild(None, "7.0"), None, torch="2.11.0")["torch"].level == "warning"


def test_a_torch_that_is_too_new_for_the_driver_is_a_problem():
    """CUDA's major version is what counts."""
    found = version_findings(versions.TorchBuild("13.0", None), (12, 4), torch="2.11.0+cu130")
    assert found["torch_and_driver"].level == "problem"
    assert "torch_and_driver" not in version_findings(versions.TorchBuild("13.1", None), (13, 0), torch="2.11.0")


def test_what_torch_was_built_for_is_read_from_its_text(tmp_path):
    """The file's own notation, with and without CUDA; a file that is not there is not known."""
    file = tmp_path / "version.py"
    file.write_text("cuda: Optional[str] = '13.0'\ngit_version = 'x'\nhip: Optional[str] = None\n")
    assert versions.read_torch_build(file) == ("13.0", None)
    file.write_text("cuda = None\nhip: Optional[str] = '7.0.1'\n")
    assert versions.read_torch_build(file) == (None, "7.0.1")
    assert versions.read_torch_build(tmp_path / "none.py") is None


def test_a_version_is_its_leading_numbers():
    """Local parts and release candidates do not matter here."""
    assert versions.parse("2.11.0+cu130") == (2, 11, 0)
    assert versions.parse("2.5.0rc1") == (2, 5, 0)
    assert versions.parse("unknown") == ()


# -- caches -----------------------------------------------------------------------------------------------


def cache_findings(**environment: str) -> dict[str, Finding]:
    """Return the findings about caches under these variables."""
    around = surroundings(environment, driver=True)
    return {finding.key: finding for finding in caches.findings(looking.look(around, only_in_use=True))}


def test_a_cache_is_measured(tmp_path):
    """Path, what decided it, size and number of entries, links not followed."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "kernel").write_bytes(b"x" * 2_000_000)
    (tmp_path / "outside").symlink_to("/usr")
    found = cache_findings(TRITON_CACHE_DIR=str(tmp_path))["triton"]
    assert found.level == "ok"
    assert found.values["path"] == str(tmp_path)
    assert (found.values["decided_by"], found.values["exists"], found.values["writable"]) == ("variable", True, True)
    assert found.values["size_mb"] == pytest.approx(2.0, abs=0.01)
    assert (found.values["entries"], found.values["complete"]) == (3, True)


def test_a_relative_path_is_decided_by_the_current_directory(tmp_path, monkeypatch):
    """It changes with where the service is started, so it is noted."""
    monkeypatch.chdir(tmp_path)
    found = cache_findings(CUPY_CACHE_DIR="kernels")["cupy"]
    assert (found.level, found.values["decided_by"]) == ("note", "current directory")
    assert found.values["path"] == str(tmp_path / "kernels")
    assert (found.values["exists"], found.values["writable"]) == (False, True)


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    """Every process would compile anew; and a file in its place is told as such."""
    file = tmp_path / "file"
    file.write_text("")
    found = cache_findings(CUDA_CACHE_PATH=str(file), TRITON_CACHE_DIR=str(file / "below"))
    assert "no directory" in found["cuda"].text
    assert found["cuda"].level == found["triton"].level == "warning"
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = cache_findings(CUDA_CACHE_PATH=str(tmp_path))["cuda"]
    assert (found.level, found.values["writable"]) == ("warning", False)
    assert "CUDA_CACHE_PATH" in found.fix


def test_a_scan_is_bounded(tmp_path):
    """Only so many entries are looked at, and only for so long; the answer says that it is not all."""
    for number in range(20):
        (tmp_path / str(number)).write_bytes(b"x")
    assert looking.measure(tmp_path, most=5) == (5, 5, False)
    assert looking.measure(tmp_path) == (20, 20, True)
    assert not looking.measure(tmp_path, longest_s=-1).complete
    assert looking.measure(tmp_path / "none") == (0, 0, True)


def test_every_cache_is_told_and_has_its_default():
    """Each of the six, with a path or with what happens without one; triton's follows its home."""
    found = cache_findings(TRITON_HOME="/elsewhere")
    assert set(found) >= {"inductor", "triton", "numba", "cupy", "jax", "cuda"}
    assert found["triton"].values["path"] == str(Path("/elsewhere/.triton/cache"))
    assert "torchinductor_" in found["inductor"].values["path"]
    assert found["numba"].values["path"] is None
    assert "beside each source file" in found["numba"].text


def test_a_user_without_a_name(monkeypatch):
    """In a container the user may have none."""
    monkeypatch.setattr(places.getpass, "getuser", lambda: (_ for _ in ()).throw(KeyError("uid not found")))
    assert cache_findings()["inductor"].values["path"].endswith(f"torchinductor_uid_{os.getuid()}")
