"""How the engine's parts are put together for a process. Nothing is kept here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext

from gpu_timed import _version, peaks
from gpu_timed.bounds import Limit
from gpu_timed.callables.counting import Counter
from gpu_timed.clocks import cuda_devices, cuda_driver
from gpu_timed.clocks.cupti_callbacks import ModuleLoads
from gpu_timed.clocks.host import HostClock
from gpu_timed.clocks.locators import Locators
from gpu_timed.context.gate import Gate
from gpu_timed.context.recording import MOST_WRITES
from gpu_timed.diagnosis.versions import installed_version
from gpu_timed.export.metrics import MetricsSink
from gpu_timed.export.otel import OtelSink
from gpu_timed.imports import ImportWatch
from gpu_timed.ledger import Ledger
from gpu_timed.modes.choice import Switch
from gpu_timed.ports import WarmthSource
from gpu_timed.resolver import Resolver
from gpu_timed.settings import Settings
from gpu_timed.sites import Sites
from gpu_timed.span import MOST_INTERVALS, MOST_SEGMENTS
from gpu_timed.tracer import Tracer
from gpu_timed.vitals.sampler import Sampler
from gpu_timed.warmth.directory_probe import DirectoryProbe
from gpu_timed.warmth.probes import Probes
from gpu_timed.warmth.ring import Ring
from gpu_timed.warmth.torch_allocator import AllocatorWatch


def assemble(
    settings: Settings,
    ledger: Ledger,
    warmth: WarmthSource | None,
    sites: Sites,
    limits: Callable[[], Iterable[Limit]] = tuple,
    *,
    modes: Switch | None = None,
) -> Tracer:
    """Return a tracer that measures whatever runtimes this process has, and exports by OpenTelemetry.

    It waits for whole devices where the captures of *modes* allow it.
    """
    host = HostClock()
    vitals = None
    if settings.vitals and settings.vitals_interval_s:
        vitals = Sampler(ledger, interval_s=settings.vitals_interval_s, now_ns=host.now_ns)
    resolver = Resolver(settings, ledger, warmth, vitals, peak_book())
    if warmth is not None:
        resolver.reader.memory = AllocatorWatch()
    otel = OtelSink(ledger, device_spans=settings.device_spans)
    resolver.add_sink(otel)
    resolver.add_sink(MetricsSink(_version.VERSION, sites.calls, ledger.snapshot, limits))
    return Tracer(
        settings=settings,
        ledger=ledger,
        gate=Gate(ledger, _version.VERSION),
        locator=Locators(),
        host=host,
        resolver=resolver,
        otel=otel,
        warmth=warmth,
        counter=Counter(),
        quiet=nullcontext if modes is None else modes.ground.waiting,
    )


def assemble_probes(settings: Settings, ring: Ring, imports: ImportWatch, ledger: Ledger) -> Probes:
    """Return the probes of this process, waiting for their runtimes, which tell *ring*."""
    return Probes(ring, imports, ledger.fault, _tell_of_modules if settings.module_loads else None)


def limits_of(
    tracer: Tracer | None, ledger: Ledger, sites: Sites, ring: Ring, directories: DirectoryProbe
) -> list[Limit]:
    """Return every limit of a process made of these, with how much of it is used. Starts nothing, asks no device."""
    counts = ledger.snapshot()
    found = [*ledger.limits(), *sites.limits(ledger), *ring.limits(), *directories.limits()]
    found += [
        Limit("writes", MOST_WRITES, None, counts.get("writes_dropped", 0), "writes to one span", loses=True),
        Limit(
            "segments", MOST_SEGMENTS, None, counts.get("segments_overflow", 0), "resumptions of one call", loses=True
        ),
        Limit("cold_pieces", MOST_INTERVALS, None, None, "pieces of one call in which something was compiled"),
    ]
    if tracer is not None:
        reader = tracer.resolver.reader
        found += tracer.resolver.limits()
        for part in (tracer.locator, reader.vitals, reader.peaks):
            tell = getattr(part, "limits", None)  # a test's own locator need not
            found += () if tell is None else tell()
    return found


def switch(module: str, name: str, ledger: Callable[[], Ledger], ring: Callable[[], Ring]) -> Switch:
    """Return what chooses and runs modes, found under *name* in *module*; *ledger* and *ring* return the process's."""

    def prepared(what: str, duration_ns: int) -> None:
        ring().emit("cuda_graph", what, "initialised", duration_ns)

    return Switch(module, name, ledger=ledger, cold=prepared, relaxed=cuda_driver.relaxed)


def peak_book() -> peaks.PeakBook:
    """Return the peaks of this machine's devices; nothing is read before a record needs it."""
    return peaks.PeakBook(peaks.directory, cuda_devices.driver_version, functools.partial(installed_version, "torch"))


def _tell_of_modules(loaded: Callable[[], None]) -> Callable[[], None]:
    return ModuleLoads(loaded).end
