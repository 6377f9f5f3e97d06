"""How the engine's parts are put together for a process. Nothing is kept here."""

from __future__ import annotations

import functools
from collections.abc import Callable

from gpu_timed import _version, peaks
from gpu_timed.callables.counting import Counter
from gpu_timed.clocks import cuda_devices, cuda_driver
from gpu_timed.clocks.host import HostClock
from gpu_timed.clocks.locators import Locators
from gpu_timed.context.gate import Gate
from gpu_timed.diagnosis.versions import installed_version
from gpu_timed.export.metrics import MetricsSink
from gpu_timed.export.otel import OtelSink
from gpu_timed.ledger import Ledger
from gpu_timed.modes.choice import Switch
from gpu_timed.ports import WarmthSource
from gpu_timed.resolver import Resolver
from gpu_timed.settings import Settings
from gpu_timed.sites import Sites
from gpu_timed.tracer import Tracer
from gpu_timed.vitals.sampler import Sampler
from gpu_timed.warmth.ring import Ring


def assemble(settings: Settings, ledger: Ledger, warmth: WarmthSource | None, sites: Sites) -> Tracer:
    """Return a tracer that measures whatever runtimes this process has, and exports by OpenTelemetry."""
    host = HostClock()
    vitals = None
    if settings.vitals and settings.vitals_interval_s:
        vitals = Sampler(ledger, interval_s=settings.vitals_interval_s, now_ns=host.now_ns)
    resolver = Resolver(settings, ledger, warmth, vitals, peak_book())
    otel = OtelSink(ledger, device_spans=settings.device_spans)
    resolver.add_sink(otel)
    resolver.add_sink(MetricsSink(_version.VERSION, sites.calls, ledger.snapshot))
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
    )


def switch(module: str, name: str, ledger: Callable[[], Ledger], ring: Callable[[], Ring]) -> Switch:
    """Return what chooses and runs modes, found under *name* in *module*; *ledger* and *ring* return the process's."""

    def prepared(what: str, duration_ns: int) -> None:
        ring().emit("cuda_graph", what, "initialised", duration_ns)

    return Switch(module, name, ledger=ledger, cold=prepared, relaxed=cuda_driver.relaxed)


def peak_book() -> peaks.PeakBook:
    """Return the peaks of this machine's devices; nothing is read before a record needs it."""
    return peaks.PeakBook(peaks.directory, cuda_devices.driver_version, functools.partial(installed_version, "torch"))
