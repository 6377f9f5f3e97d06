"""The process's current tracer: the one place of mutable process-wide state, and it can be reset.

Nothing here runs at import but defining it. The tracer is made by the first recorded call, and made
anew in a forked child, whose device, threads and locks are not the parent's.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from gpu_timed.assembly import assemble, assemble_probes, limits_of, switch
from gpu_timed.bounds import Limit
from gpu_timed.clocks.host import HostClock
from gpu_timed.delivery import Deliveries, FlushResult
from gpu_timed.diagnosis.process import Process
from gpu_timed.endings import Endings
from gpu_timed.errors import ConfigurationError
from gpu_timed.export import handover
from gpu_timed.imports import ImportWatch
from gpu_timed.ledger import Ledger
from gpu_timed.ports import Door, Launch, Locator, Sink
from gpu_timed.reading import blank
from gpu_timed.record import Record
from gpu_timed.settings import Settings, from_environment
from gpu_timed.site import Site
from gpu_timed.sites import Sites
from gpu_timed.tracer import Opened, Tracer
from gpu_timed.warmth.directory_probe import DirectoryProbe
from gpu_timed.warmth.probes import Probes
from gpu_timed.warmth.ring import Ring

_NO_ARGUMENTS: Final[Mapping[str, Any]] = {}


class _State:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.settings: Settings | None = None
        self.ledger = Ledger()
        self.imports = ImportWatch(lambda kind, error: self.ledger.fault(kind, error))  # noqa: PLW0108 - reset() makes another
        self.ring = Ring()
        self.probes: Probes | None = None
        self.directories = DirectoryProbe(lambda kind: self.ledger.count(kind))  # noqa: PLW0108 - as above
        self.targets: list[Any] = []
        self.endings = Endings(_at_exit, _at_worker_end)
        self.flusher = handover.Flusher()
        self.tracer: Tracer | None = None
        self.sites = Sites()
        self.fork_hook = self.installed = self.ended = False
        self.standby: Any = None
        self.deliveries = Deliveries(lambda: modes.tell_unmatched(_state.sites.calls()))


def ledger() -> Ledger:
    """Return the counts of this process."""
    return _state.ledger


def settings() -> Settings:
    """Return the process's settings, read from the environment the first time.

    Raises:
        ConfigurationError: A ``GPU_TIMED_*`` variable cannot be used.
    """
    if _state.settings is None:
        _state.settings = from_environment()
        modes.set_rules(_state.settings.mode)
    return _state.settings


def set_settings(**values: Any) -> None:
    """Change the given settings; spans that are open keep the ones they began with."""
    with _state.lock:
        _state.settings = settings().with_values(**values)
        modes.set_rules(_state.settings.mode)
        if _state.tracer is not None:
            _state.tracer.settings = _state.tracer.resolver.settings = _state.settings
            _state.tracer.otel.device_spans = _state.settings.device_spans


def tracer() -> Tracer:
    """Return the process's tracer, made on first use."""
    return _state.tracer or _make()


def enter(
    site: Site,
    arguments: tuple[Any, ...] = (),
    named: Mapping[str, Any] = _NO_ARGUMENTS,
    *,
    suspends: bool = False,
    launch: Launch | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Opened:
    """Open a span for one call of *site*. See :meth:`gpu_timed.tracer.Tracer.enter`. Never raises."""
    current = _state.tracer
    if current is None:
        try:
            current = _make()
        except Exception as error:  # noqa: BLE001 - the user's call goes on
            _state.ledger.fault("start", error)
            return None
    try:
        return current.enter(site, arguments, named, extra, suspends, launch)  # by position: the hot path
    except RecursionError:  # no room on the stack for anything of ours: the user's function may still find it
        _state.ledger.cramped += 1
        return None


def record_of_unsampled(site: Site) -> Record:
    """Return a record that says of a call of *site* that it was not recorded."""
    running = _state.tracer
    return blank(site, time.time_ns()) if running is None else running.record_of_unsampled(site)


def traced(name: str) -> None:
    """Say once that *name* was met inside a compiled region, where nothing can be timed."""
    _state.sites.traced(name, _state.ledger)


# The mark of ``torch.compiler.assume_constant_result``, set without importing torch: Dynamo then calls
# this while it traces, instead of tracing it.
traced._dynamo_marked_constant = True  # type: ignore[attr-defined] # noqa: SLF001
modes: Final = switch(__name__, "modes", ledger, lambda: _state.ring)
door: Final = Door(enter, traced, modes)


def probes() -> Mapping[str, str]:
    """Return what became of each warmth probe: ``waiting`` for its runtime, ``attached``, or why it could not be."""
    return {} if _state.probes is None else _state.probes.told()


def without_module_loads() -> contextlib.AbstractContextManager[None]:
    """Leave CUPTI, which has one user in a process, to others for the length of a block."""
    return contextlib.nullcontext() if _state.probes is None else _state.probes.without_modules()


def directories() -> DirectoryProbe:
    """Return what watches caches that are directories in this process."""
    return _state.directories


def imports() -> ImportWatch:
    """Return what waits for modules in this process."""
    return _state.imports


def targets() -> list[Any]:
    """Return what is timed by name in this process, or waits for its module. See :mod:`gpu_timed.targets`."""
    return _state.targets


def process_state() -> Process:
    """Return what has happened in this process so far. Starts nothing."""
    running = _state.tracer
    most = _state.settings.max_pending if _state.settings is not None else Settings().max_pending
    return Process(
        started=running is not None,
        resolving=running is not None and running.resolver.running,
        pending=0 if running is None else running.resolver.pending,
        max_pending=most,
        captures=0 if running is None else running.epoch,
        counts=_state.ledger.snapshot(),
        sites=_state.sites.calls(),
        not_timed=sorted(_state.sites.untimed),
    )


def limits() -> list[Limit]:
    """Return every limit of this process, with how much of it is used. Starts nothing, asks no device."""
    return limits_of(_state.tracer, _state.ledger, _state.sites, _state.ring, _state.directories)


def floors() -> Mapping[int, int]:
    """Return what an empty pair of marks reads at the least (ns), by device, where that is known; asks no device."""
    known: Any = None if _state.tracer is None else getattr(_state.tracer.locator, "floors", None)
    return {} if known is None else dict(known())


def held_settings() -> Settings | None:
    """Return the process's settings if they were read or set before."""
    return _state.settings


def new_site(name: str, **options: Any) -> Site:
    """Make a site. See :class:`gpu_timed.site.Site`."""
    return _state.sites.new(name, **options)


def site(key: Any, make: Callable[[], Site]) -> Site:
    """Return the site kept under *key*, made by *make* the first time."""
    return _state.sites.find(key, make, _state.ledger)


def flush(timeout_s: float = 10.0) -> FlushResult:
    """Wait until the spans that have ended are resolved and handed on, at most *timeout_s* seconds.

    Returns:
        What became of those since the last flush. It is true only if nothing was left, lost or refused.
    """
    deadline = time.monotonic() + timeout_s
    pending = 0 if _state.tracer is None else _state.tracer.resolver.flush(timeout_s)
    answered = _state.flusher.flush(handover.left(deadline), _state.ledger)
    return _state.deliveries.tell(_state.ledger, pending=pending, answered=False if _state.ended else answered)


def shutdown(timeout_s: float = 10.0) -> FlushResult:
    """Resolve and hand on what is left, end gpu_timed's thread, and shut the provider down that it installed.

    A provider of the application's own is flushed and left running. Calls that are decorated go on working, and
    being measured: the next one starts anew. *timeout_s* bounds all of it, in seconds.

    Returns:
        As :func:`flush`, but about all spans of the process.
    """
    deadline = time.monotonic() + timeout_s
    with _state.lock:
        ending, _state.tracer = _state.tracer, None
    _state.endings.unwatch()
    pending = 0 if ending is None else ending.resolver.stop(timeout_s)
    answered = _state.flusher.flush(handover.left(deadline), _state.ledger)
    if _state.installed:
        answered = handover.shut_down(handover.left(deadline), _state.ledger) and answered
    answered = answered and not _state.ended  # the provider we made is shut down: nothing gets any further
    _state.ended = _state.installed
    return _state.deliveries.tell(_state.ledger, pending=pending, answered=answered, in_all=True)


def forget_peaks() -> None:
    """Have what this machine's devices can do at most read anew, as it was measured just now."""
    book = None if _state.tracer is None else _state.tracer.resolver.reader.peaks
    if book is not None:
        book.forget()


def install_exporter(exporter: str, **options: Any) -> None:
    """Make a provider for *exporter* the global one. See :func:`gpu_timed.export.provider.install`."""
    with _state.lock:
        if _state.installed:
            raise ConfigurationError(
                "configure(exporter=...) was called before in this process, and OpenTelemetry takes one provider only. "
                "Name the exporter once; further calls may set everything else."
            )
        from gpu_timed.export import provider  # noqa: PLC0415 - brings the SDK, which decorating must not

        provider.install(exporter, ledger=_state.ledger, **options)
        _state.installed = True
        _watch_ends()


def stand_by_exporter(exporter: str, **options: Any) -> None:
    """Have a provider for *exporter* ready, to be the global one if there is none when the first span is started.

    A call of ours, or a span of anybody's. One that the application sets before that is used as it is. The options and
    errors as in :class:`gpu_timed.export.provider.StandBy`.
    """
    with _state.lock:
        from gpu_timed.export import provider  # noqa: PLC0415 - brings the SDK, which decorating must not

        _state.standby = provider.StandBy(exporter, ledger=_state.ledger, action=_step_in, **options)
        if _state.tracer is not None:
            _state.tracer.gate.on_none = _step_in
        _watch_ends()


def has_own_provider() -> bool:
    """Return whether the global provider is one that gpu_timed made."""
    return _state.installed


@contextlib.contextmanager
def sink(added: Sink) -> Iterator[None]:
    """Pass finished spans to *added* as well, for the length of the block."""
    resolver = tracer().resolver
    resolver.add_sink(added)
    try:
        yield
    finally:
        resolver.remove_sink(added)


@contextlib.contextmanager
def device(locator: Locator, host: HostClock) -> Iterator[None]:
    """Measure with another device and host clock, for the length of the block."""
    current = tracer()
    before = current.locator, current.host
    current.locator, current.host = locator, host
    try:
        yield
    finally:
        current.locator, current.host = before


def reset() -> None:
    """Forget everything, as if the process had just started. For tests."""
    with _state.lock:
        ending, _state.tracer = _state.tracer, None
        _state.settings = None
        _state.ledger = Ledger()
        _state.sites.forget()
        modes.forget()
        _state.targets = []
        _state.imports.close()
        if _state.probes is not None:
            _state.probes.close()
        _state.probes, _state.ring = None, Ring()
        _state.directories.forget()
        _state.deliveries = Deliveries(lambda: modes.tell_unmatched(_state.sites.calls()))
        _state.installed = _state.ended = False
        if _state.standby is not None:
            _state.standby.withdraw()
            _state.standby = None
    if ending is not None:
        ending.resolver.stop(1.0)


def _make() -> Tracer:
    with _state.lock:
        if _state.tracer is not None:
            return _state.tracer
        held = settings()
        if held.warmth and _state.probes is None:
            _state.probes = assemble_probes(held, _state.ring, _state.imports, _state.ledger)
        made = assemble(held, _state.ledger, _state.ring if held.warmth else None, _state.sites, limits, modes=modes)
        # The last to register runs first at exit: ours must run before that of the provider, made by the application.
        made.gate.on_provider.append(_state.endings.watch)
        made.gate.on_none = None if _state.standby is None else _step_in
        made.resolver.reader.second_look = _state.directories
        _watch_ends()
        _state.tracer = made
        return made


def _step_in() -> None:
    with _state.lock:
        if _state.standby is not None and not _state.installed:
            _state.installed = _state.standby.step_in()


def _at_exit() -> None:
    """Deliver what is left, within the time the settings give: resolve, then shut down the provider we made."""
    ending, installed = _state.tracer, _state.installed and not _state.ended
    limit = settings().exit_timeout_s
    deadline = time.monotonic() + limit

    def last() -> None:
        handover.shut_down(handover.left(deadline), _state.ledger)

    if ending is not None and ending.resolver.running:
        # On the resolver's own thread, which can be left behind: no new one can be started any more.
        ending.resolver.stop(limit, last if installed else None)
    elif installed:
        last()
    if ending is not None and not ending.epoch:  # else a test has looked at the records
        _state.deliveries.warn(_state.ledger)


def _at_worker_end() -> None:
    """As a worker of ``multiprocessing`` ends: deliver what is left. Later finalizers start anew, on the provider."""
    with _state.lock:
        ending, _state.tracer = _state.tracer, None
    deadline = time.monotonic() + settings().exit_timeout_s
    if ending is not None:
        ending.resolver.stop(handover.left(deadline))
    _state.flusher.flush(handover.left(deadline), _state.ledger)
    if ending is not None and not ending.epoch:
        _state.deliveries.warn(_state.ledger)


def _watch_ends() -> None:
    _state.endings.watch()
    if not _state.fork_hook and hasattr(os, "register_at_fork"):
        _state.fork_hook = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    """In the child: the parent resolves its own spans; this process starts with nothing."""
    old = _state.tracer
    _state.lock = threading.RLock()
    _state.ledger.restart()
    _state.ring.restart()
    if _state.probes is not None:
        _state.probes.restart()
    _state.directories.restart()
    _state.flusher = handover.Flusher()
    _state.endings.after_fork()
    _state.tracer = None
    _state.deliveries.forget()
    _state.sites.forget_calls()
    if old is not None:
        old.dead = old.resolver.dead = True


_state: Final[_State] = _State()  # last: it holds functions of this page
