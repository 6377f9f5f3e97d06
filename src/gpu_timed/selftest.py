"""The self-test: :func:`run_selftest` holds spans against kernels whose duration is known, on this very machine.

Beside it :func:`measure_peaks`, which finds what the device can do at most, for the shares of peak that spans show.
"""

from __future__ import annotations

import contextlib
import importlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from typing import Any, Final

from gpu_timed import current
from gpu_timed._version import VERSION
from gpu_timed.clocks import cuda_devices, cuda_driver, cupti_activity
from gpu_timed.clocks.cuda_places import CudaPlaces
from gpu_timed.clocks.host import HostClock
from gpu_timed.clocks.torch_locator import TorchLocator
from gpu_timed.diagnosis import clock as clock_diagnosis
from gpu_timed.diagnosis.versions import installed_version
from gpu_timed.errors import ConfigurationError, GpuTimedError, missing_extra
from gpu_timed.measure import campaign, known, peak_taking, reference
from gpu_timed.measure.campaign import Plan, Progress
from gpu_timed.measure.rig import Kernel, NotTestable, Rig
from gpu_timed.measure.session import Session
from gpu_timed.peaks import DevicePeaks
from gpu_timed.ports import Launch
from gpu_timed.record import Missing
from gpu_timed.settings import SyncPolicy
from gpu_timed.trials import FLOOR_NS, Instrument, Row, SelfTest
from gpu_timed.vitals import glance

_LONGEST_S: Final = 600.0
_QUICK_S: Final = 15.0
_ENDING_S: Final = 3.0
"""What is left for the last row, and for the process to end."""
_CUPTI_S: Final = 8.0
"""What is left for the rows about CUPTI, where there are any."""
_COST_CALLS: Final = 1_000
_PACKAGES: Final = (
    "torch",
    "triton",
    "numba",
    "numba-cuda",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "cupti-python",
    "opentelemetry-sdk",
)
_LEAVES: Final = {
    "Triton": ("triton_spin", "TritonSpin"),
    "CuPy": ("cupy_spin", "CupySpin"),
    "Numba": ("numba_spin", "NumbaSpin"),
    "torch.cuda._sleep": ("torch_sleep", "TorchSleep"),
}
"""Kernels of known duration, in the order in which they are tried: file and class."""


def run_selftest(
    *, quick: bool = False, seconds: float = 60.0, cupti: bool = True, progress: Progress | None = None
) -> SelfTest:
    """Hold spans against kernels of known duration on this machine's GPU, in every circumstance they must be right in.

    Ends with measuring what the device can do at most, and keeps that for the spans of later processes: see
    :func:`measure_peaks`. Uses torch's current device, and initialises CUDA on it if nobody has. Nothing goes to
    OpenTelemetry, and sampling and ``GPU_TIMED_*`` settings have no say, but for ``GPU_TIMED_CACHE_DIR``. Without a
    GPU only the host's rows are measured.

    Args:
        quick: Four durations in place of seven, fewer spans, and 15 seconds at the most.
        seconds: How long all of it may take, as far as that can be kept: every row has a few spans in any case.
        cupti: At the end, hold spans against CUPTI's kernel records as well, where cupti-python is installed. It is
            attached to the process for some seconds; launches may stay a little slower after it.
        progress: Called with rows done, rows in all, and what comes next.

    Returns:
        Every row, with a verdict. What fails is a row; it is not raised.

    Raises:
        ConfigurationError: *seconds* cannot be used.
    """
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds <= _LONGEST_S:
        raise ConfigurationError(f"seconds must be a number greater than 0 and at most 600, not {seconds!r}.")
    limit_s = min(seconds, _QUICK_S) if quick else seconds
    peaks_s = min(peak_taking.PEAKS_S, 0.1 * limit_s)
    until_s = time.monotonic() + limit_s - min(_ENDING_S, 0.1 * limit_s) - peaks_s
    environment = _environment()
    rows = [*_isolated("host", _host_rows)]
    absent = _absent()
    if absent:
        rows.append(Row(section="device", name="none", verdict="skipped", text=absent))
    else:
        plan = campaign.QUICK if quick else campaign.FULL
        rows += _isolated("device", lambda: _device_rows(environment, plan, until_s, progress, cupti=cupti))
        rows += _isolated("device", lambda: _peaks_of(environment, peaks_s))
    return SelfTest(VERSION, environment, tuple(rows))


def measure_peaks(*, seconds: float = peak_taking.PEAKS_S) -> DevicePeaks:
    """Measure what torch's current device can do at most, and keep it for this machine's processes.

    By large matrix products of each type of number, and by copies within the device's memory; with a quarter of the
    memory that is free, at the most. Spans with ``work=`` then say what share of it they reached. The device should
    have nothing else to do meanwhile: never call this in a service that serves. Kept in ``GPU_TIMED_CACHE_DIR``, else
    ``XDG_CACHE_HOME/gpu_timed``, else ``~/.cache/gpu_timed``, by device, driver and torch.

    Args:
        seconds: How long it may take, about; kernels are loaded besides.

    Raises:
        ConfigurationError: *seconds* cannot be used.
        MissingExtraError: torch is not installed, by which it is measured.
        GpuTimedError: There is no device, it could not be measured, or the file cannot be written.
    """
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds <= _LONGEST_S:
        raise ConfigurationError(f"seconds must be a number greater than 0 and at most 600, not {seconds!r}.")
    try:
        torch_rig = importlib.import_module("gpu_timed.measure.torch_rig")
        torch_peaks = importlib.import_module("gpu_timed.measure.torch_peaks")
    except ImportError as error:
        raise missing_extra("measure_peaks()", "torch", "torch") from error
    why_not = _absent() or torch_rig.usable()
    if why_not:
        raise NotTestable(f"peaks cannot be measured: {why_not}")
    bench = torch_peaks.TorchPeaks()
    try:
        found = peak_taking.find(bench, _card(torch_rig.synchronized()), seconds)
    finally:
        bench.close()
    peak_taking.keep(found)
    return found


def figure_rows(rig: Rig, floor_ns: int | None = None) -> tuple[list[Row], Instrument]:
    """Measure how good the truth of *rig* is: its timer and its kernels; returns the rows, and what they mean.

    *floor_ns* is the floor of the device in nanoseconds, if it is known.
    """
    rows: list[Row] = []
    tick_ns: int | None = 1
    cycles = False
    try:
        tick_ns = step = rig.measure_timer()
        if step is None:
            text = (
                "the kernels have no timer: their duration is known from a calibration only, while clocks stay the same"
            )
            rows.append(Row(section="device", name="timer", verdict="info", text=text))
        else:
            cycles = rig.cycles_per_ns > 0
            rows.append(_timer_row(step, rig.cycles_per_ns))
    except Exception as error:  # noqa: BLE001 - one row less, and the others are told
        rows.append(_failed("device", "timer", error))
    turnaround_ns = 0
    try:
        turnaround_ns = known.turnaround(rig)
        text = (
            f"from the end of a kernel to the begin of the next one behind it: {turnaround_ns:,} ns, "
            "which no kernel can see of itself"
        )
        values = {"turnaround_ns": turnaround_ns}
        rows.append(Row(section="device", name="turnaround", verdict="info", text=text, values=values))
    except Exception as error:  # noqa: BLE001
        rows.append(_failed("device", "turnaround", error))
    return rows, known.instrument(tick_ns=tick_ns, turnaround_ns=turnaround_ns, cycles=cycles, floor_ns=floor_ns)


# -- the host -------------------------------------------------------------------------------------------------


class _Nowhere:
    """A locator of a process without a device."""

    def locate(self, launch: Launch | None = None) -> Missing:  # noqa: ARG002 - nowhere is nowhere
        return Missing("no_device")

    def device_of(self, value: Any) -> None:  # noqa: ARG002
        return None


def _host_rows() -> Iterator[Row]:
    step = clock_diagnosis.host(time.perf_counter_ns)
    yield Row(section="host", name="clock", verdict="info", text=step.text, values=dict(step.values))
    session = Session(_Nowhere(), HostClock())
    try:
        yield from _cost_rows("host", session, "without device marks", lambda: None)
    finally:
        session.close()


def _cost_rows(section: str, session: Session, words: str, settle: Callable[[], None]) -> Iterator[Row]:
    policies: tuple[SyncPolicy, ...] = ("deferred", "boundary")
    for sync in policies:
        session.cost_ns(sync, 100, settle)  # pools and caches
        taken = session.cost_ns(sync, _COST_CALLS, settle)
        median = round(statistics.median(taken))
        yield Row(
            section=section,
            name="span_cost",
            verdict="info",
            text=f"an empty {sync} span takes the calling thread {median / 1e3:.1f} µs, {words}",
            sync=sync,
            spans=len(taken),
            values={"host_ns": median, "host_p99_ns": sorted(taken)[int(0.99 * len(taken))]},
        )


# -- the device -----------------------------------------------------------------------------------------------


def _absent() -> str:
    """Return why there is no device to test; empty where there is one."""
    if cuda_driver.device_present():
        return ""
    return "there is no NVIDIA GPU on this machine, so only the host was measured"


def _device_rows(
    environment: dict[str, Any], plan: Plan, until_s: float, progress: Progress | None, *, cupti: bool
) -> Iterator[Row]:
    try:
        torch_rig = importlib.import_module("gpu_timed.measure.torch_rig")
    except ImportError as error:
        raise NotTestable(f"kernels of known duration need torch, which cannot be imported ({error})") from error
    why_not = torch_rig.usable()
    if why_not:
        raise NotTestable(why_not)
    device = torch_rig.synchronized()
    environment.update(_card(device))
    environment["vitals"] = {"start": _state(environment.get("uuid"))}
    floors = list(_isolated("device", lambda: _floor_rows(device)))
    yield from floors
    candidates = [(name, _maker(*leaf)) for name, leaf in _LEAVES.items()]
    found = known.find(candidates, torch_rig.TorchRig)
    environment["kernel"] = found.kernel
    environment["kernels_refused"] = found.refused
    environment["regimes"] = {regime.name: regime.words for regime in plan.regimes}
    rows, instrument = figure_rows(found.rig, next((row.values.get("floor_ns") for row in floors), None))
    yield from rows
    with _session() as session:
        words, settle = "with two device marks, nothing exported", found.rig.settle
        yield from _isolated("device", lambda: _cost_rows("device", session, words, settle))
        why_not = cupti_activity.usable() if cupti else "not asked for"
        left_s = 0.0 if why_not else min(_CUPTI_S, 0.2 * (until_s - time.monotonic()))
        campaign_s = until_s - left_s
        yield from campaign.run(found.rig, session, instrument, plan=plan, until_s=campaign_s, progress=progress)
        # Last, since it slows launches down.
        yield from _isolated(
            "cupti",
            lambda: _cupti_rows(found.rig, session, why_not, instrument, stamped=found.stamped, until_s=until_s),
        )
    environment["vitals"]["end"] = _state(environment.get("uuid"))


def _cupti_rows(
    rig: Rig, session: Session, why_not: str, instrument: Instrument, *, stamped: bool, until_s: float
) -> Iterator[Row]:
    """Hold spans, and the kernels' own stamps, against CUPTI's kernel records."""
    if not why_not:
        try:
            records = cupti_activity.KernelRecords()
            with current.without_module_loads():
                yield from reference.rows(
                    rig, session, records, stamped=stamped, instrument=instrument, until_s=until_s
                )
        except GpuTimedError as error:
            why_not = str(error)
    if why_not:
        text = f"not held against CUPTI's kernel records: {why_not}"
        yield Row(section="cupti", name="none", verdict="skipped", text=text)


@contextlib.contextmanager
def _session() -> Iterator[Session]:
    """Make spans by marks of their own clock, whose events are given back afterwards."""
    places = CudaPlaces()
    session = Session(TorchLocator(places), HostClock())
    try:
        yield session
    finally:
        session.close()
        clock = places.clock()
        if clock is not None:
            clock.close()


def _floor_rows(device: int) -> Iterator[Row]:
    """Measure what an empty pair of marks reads, as ``gpu-timed doctor`` does."""
    with cuda_devices.bench(cuda_devices.load(), device) as bench:
        figures = clock_diagnosis.measure(bench)
        least = bench.place.clock.floor_ns(bench.place)
    # Behind other work, as the promises are about that; else the least that is known.
    read = [reading for reading in (least, figures.floor_idle_min_ns) if isinstance(reading, int)]
    floor_ns = round(figures.floor_queued_ns) if figures.floor_queued_ns is not None else min(read, default=None)
    queued = f"{figures.floor_queued_ns:,.0f} ns" if figures.floor_queued_ns is not None else "not measured"
    yield Row(
        section="device",
        name="floor",
        verdict="info",
        text=f"an empty span reads {figures.floor_idle_ns:,.0f} ns on an idle stream, {queued} behind other work; "
        + _floor_words(floor_ns),
        values={**asdict(figures), "floor_ns": floor_ns},
    )


def _floor_words(floor_ns: int | None) -> str:
    if floor_ns is None:
        return f"its floor could not be measured: {FLOOR_NS:,} ns are allowed for"
    return f"its floor of {floor_ns:,} ns is allowed for"


def _peaks_of(environment: dict[str, Any], seconds: float) -> Iterator[Row]:
    """Measure the peaks of the device that the rows before were about; nothing where there were none."""
    if environment.get("card") is None:
        return
    bench = importlib.import_module("gpu_timed.measure.torch_peaks").TorchPeaks()
    try:
        yield from peak_taking.rows(bench, environment, seconds)
    finally:
        bench.close()


def _timer_row(step_ns: int, cycles_per_ns: float) -> Row:
    least = known.TICKS * step_ns
    short = ", by the multiprocessor's cycles below that" if cycles_per_ns > 0 else ""
    return Row(
        section="device",
        name="timer",
        verdict="info",
        text=f"%globaltimer moves in steps of {step_ns:,} ns: kernels of {least:,} ns and more are known by it{short}",
        values={"resolution_ns": step_ns, "least_ns": least, "cycles_per_ns": cycles_per_ns or None},
    )


def _maker(module: str, kind: str) -> Callable[[], Kernel]:
    def make() -> Kernel:
        made: Kernel = getattr(importlib.import_module(f"gpu_timed.measure.{module}"), kind)()
        return made

    return make


# -- the rest -------------------------------------------------------------------------------------------------


def _environment() -> dict[str, Any]:
    versions = {name: installed_version(name) for name in _PACKAGES}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "card": None,
        "driver": cuda_devices.driver_version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "kernel": None,
        **{name: version for name, version in versions.items() if version},
    }


def _card(device: int) -> dict[str, Any]:
    library = cuda_driver.load()
    if library is None:
        return {}
    uuid, name = cuda_driver.describe(library, device)
    return {"card": name, "uuid": uuid, "device": device}


def _state(uuid: str | None) -> dict[str, Any]:
    """Look at the machine's state; what cannot be read is None, and ``absent`` says why nothing of the GPU can."""
    (seen,), absent = glance.look([uuid])
    values = {one.name: getattr(seen, one.name) for one in fields(seen)}
    values = {name: None if isinstance(value, Missing) else value for name, value in values.items()}
    return {**values, "absent": (absent.detail or absent.reason) if absent is not None else None}


def _isolated(section: str, rows: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Yield *rows*, and one that says so where they break off."""
    try:
        yield from rows()
    except Exception as error:  # noqa: BLE001 - shown in place of the rest
        yield _failed(section, "failed", error)


def _failed(section: str, name: str, error: Exception) -> Row:
    words = str(error) if isinstance(error, NotTestable) else f"{type(error).__name__}: {error}"
    return Row(section=section, name=name, verdict="error", text=f"could not be run: {words}")
