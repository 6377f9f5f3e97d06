"""Spans for measuring ourselves: by the engine that everybody's calls go through, and handed on to nobody.

Neither the application's provider, its sampler nor the settings of the process have a say: a self-test inside a
service puts nothing into its traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from gpu_timed._version import VERSION
from gpu_timed.clocks.host import HostClock
from gpu_timed.context.gate import AloneGate
from gpu_timed.ledger import Ledger
from gpu_timed.ports import Locator
from gpu_timed.record import Record
from gpu_timed.resolver import Resolver
from gpu_timed.settings import Settings, SyncPolicy
from gpu_timed.site import Site
from gpu_timed.span import Span
from gpu_timed.tracer import Tracer

PATIENCE_S: Final = 5.0
_LITTLE_PATIENCE_S: Final = 0.05
_COSTS_AT_ONCE: Final = 100


class Made(NamedTuple):
    """One span that was closed, and what the host's clock showed around it."""

    span: Span | None
    """None where the engine failed to open one."""
    began_ns: int
    ended_ns: int


class Session:
    """A tracer of its own.

    Args:
        locator: Where the work goes.
        host: The host's clock.
        patience_s: Seconds that records may take once the device is idle. Waited for once: a device that was
            too late before is given a twentieth of a second from then on.
    """

    def __init__(self, locator: Locator, host: HostClock, *, patience_s: float = PATIENCE_S) -> None:
        self.host = host
        self._locator = locator
        self._patience_s = patience_s
        self._tracer = self._new_tracer()

    def site(self, name: str, sync: SyncPolicy) -> Site:
        """Return a site for spans called *name*."""
        return Site(name, sync=sync)

    def measure(self, site: Site, work: Callable[[], Any]) -> Made:
        """Make *work* a span of *site*."""
        tracer, now_ns = self._tracer, self.host.now_ns
        began = now_ns()
        opened = tracer.enter(site)
        work()
        if opened is not None:
            tracer.leave(opened)
        ended = now_ns()
        return Made(opened if isinstance(opened, Span) else None, began, ended)

    def records(self, made: Sequence[Made]) -> list[Record | None]:
        """Wait for the records of *made*, whose work is done; None of those that did not come in time."""
        self._tracer.resolver.flush(self._patience_s)
        found = [one.span.found if one.span is not None else None for one in made]
        if None in found:  # what stands in line behind them must not be late as well
            self._patience_s = min(self._patience_s, _LITTLE_PATIENCE_S)
            self.close()
            self._tracer = self._new_tracer()
        return found

    def cost_ns(self, sync: SyncPolicy, calls: int, settle: Callable[[], None]) -> list[int]:
        """Return what each of *calls* empty spans took the calling thread, in nanoseconds.

        *settle* waits for the device, now and then: marks are used again, and none is waited for meanwhile.
        """
        site = self.site("gpu_timed.selftest.cost", sync)
        taken = []
        for _ in range(calls):
            made = self.measure(site, _nothing)
            taken.append(made.ended_ns - made.began_ns)
            if len(taken) % _COSTS_AT_ONCE == 0:
                settle()
                self._tracer.resolver.flush(self._patience_s)
        return taken

    def close(self) -> None:
        """End its thread."""
        self._tracer.resolver.stop(max(self._patience_s, _LITTLE_PATIENCE_S))

    def _new_tracer(self) -> Tracer:
        ledger = Ledger()
        settings = Settings(warmth=False)
        return Tracer(
            settings=settings,
            ledger=ledger,
            gate=AloneGate(ledger, VERSION),
            locator=self._locator,
            host=self.host,
            resolver=Resolver(settings, ledger),
            otel=None,
        )


def _nothing() -> None:
    """Do nothing: what remains is the span."""
