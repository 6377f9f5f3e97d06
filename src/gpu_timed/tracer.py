"""The tracer: opens and closes spans around user code, by the policy chosen, and never lets a fault out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Final

from gpu_timed import effort
from gpu_timed.clocks.host import HostClock
from gpu_timed.context.gate import Gate
from gpu_timed.context.recording import LEFT, Admission
from gpu_timed.errors import DeviceFault
from gpu_timed.ledger import Ledger
from gpu_timed.ports import NOT_GIVEN, Launch, Locator, Mark, WarmthSource, WorkCounter
from gpu_timed.reading import blank
from gpu_timed.record import NOT_SAMPLED, Missing, Record
from gpu_timed.resolver import Resolver
from gpu_timed.settings import LatePolicy, Settings, SyncPolicy
from gpu_timed.site import Site
from gpu_timed.span import CAPTURE_AWAITED, FAULT, INPUTS_UNSEEN, NEW_SHAPE, Span
from gpu_timed.unrecorded import Unrecorded
from gpu_timed.values import AttributeValue, clean_all

DISABLED: Final = Missing("disabled")
_SHORTEST_PAUSE_S: Final = 0.0002
_LONGEST_PAUSE_S: Final = 0.002
_NO_ARGUMENTS: Final[Mapping[str, Any]] = {}

Opened = Span | Unrecorded | None


class Tracer:
    """Everything a call passes through. One for a process; tests make their own."""

    def __init__(
        self,
        *,
        settings: Settings,
        ledger: Ledger,
        gate: Gate,
        locator: Locator,
        host: HostClock,
        resolver: Resolver,
        otel: Any,
        warmth: WarmthSource | None = None,
        counter: WorkCounter | None = None,
        quiet: Callable[[], AbstractContextManager[bool | None]] = nullcontext,
    ) -> None:
        self.settings = settings
        self.ledger = ledger
        self.gate = gate
        self.locator = locator
        self.host = host
        self.resolver = resolver
        self.otel = otel
        self.warmth = warmth
        self.counter = counter
        self._quiet = quiet
        self.dead = False
        #: Counts the captures begun so far, so that each can tell the spans that returned before it.
        self.epoch = 0

    # -- entering -------------------------------------------------------------------------------------

    def enter(  # noqa: PLR0917 - by position: the hot path
        self,
        site: Site,
        arguments: tuple[Any, ...] = (),
        named: Mapping[str, Any] = _NO_ARGUMENTS,
        extra: Mapping[str, Any] | None = None,
        suspends: bool = False,  # noqa: FBT001, FBT002 - by position: the hot path
        launch: Launch | None = None,
    ) -> Opened:
        """Decide about one call of *site*, and open its span if it is recorded.

        *suspends* says that the call is a coroutine: it is then never waited for on its own thread.
        *launch* says where its work goes, where that is not the runtime's current stream.
        Returns None when nothing has to be undone afterwards. Never raises.
        """
        index = next(site.calls)
        settings = self.settings
        if settings.disabled or (site.every > 1 and index % site.every):
            return None
        opened: Opened = None
        try:
            attributes: Mapping[str, AttributeValue] = site.attributes
            if extra:
                attributes = {**attributes, **self._cleaned(lambda: extra)}
            if site.variable_attributes is not None:
                attributes = {**attributes, **self._cleaned(site.variable_attributes, arguments, named)}
            admission = self.gate.admit(site.name, attributes)
            if admission is None:
                return None
            if not isinstance(admission, Admission):
                opened = silent = Unrecorded(self, site)
                silent.caller_context = self.gate.current()
                silent.token = self.gate.attach_context(admission)
                return silent
            if not admission.recorded:
                opened = silent = Unrecorded(self, site, admission)
                silent.token = self.gate.attach(silent)
                return silent
            sync: SyncPolicy = site.sync or settings.sync or ("deferred" if suspends else "boundary")
            if suspends and sync == "device":
                sync = "boundary"  # the process's policy would block the event loop
            late: LatePolicy = (site.late or settings.late) if settings.device_spans else "host"
            opened = span = Span(self, site, index, admission, attributes, sync, late)
            span.token = self.gate.attach(span)
            if launch is not None or site.launch is not None:
                span.launch = launch or site.launch
            warmth = self.warmth
            if warmth is not None:
                tunes = warmth.tunes_by_shape
                if tunes is not None and tunes():
                    self._look_at_inputs(span, warmth, arguments, named)
            full = self.resolver.full
            if full:
                self.ledger.count("overflow")
            if site.work_source is not None:
                effort.find(span, self.counter, self.ledger, arguments, named, suspends=suspends)
            span.begin((arguments, named) if arguments or named else NOT_GIVEN, marked=not full)
            if span.counting is not None and span.captured:
                effort.stop_counting(span, self.ledger, effort.CAPTURED)
            return span
        except Exception as error:  # noqa: BLE001 - rule 1: the user's call goes on
            self.gate.restore(opened)  # first of all, and no deeper on the stack than it was attached: there was room
            self.ledger.fault("enter", error)
            self._forget(opened)
            return None
        except BaseException:  # an interrupt of the user's
            self.gate.restore(opened)
            self._forget(opened)
            raise

    def wait(self, span: Span, timeout_s: float | None) -> Record:
        """Block until *span* has its record. See :meth:`gpu_timed.span.Span.wait`."""
        return self.resolver.wait(span, timeout_s)

    def record_of_unsampled(self, site: Site) -> Record:
        """Return a record that says of a call of *site* that it was not recorded."""
        reason = DISABLED if self.settings.disabled else NOT_SAMPLED
        return blank(site, self.host.to_unix(self.host.now_ns()), reason)

    # -- leaving --------------------------------------------------------------------------------------

    def leave(self, opened: Any, error: BaseException | None = None, result: Any = None) -> None:
        """Close what :meth:`enter` opened, as the call returned *result* or raised *error*. Never raises."""
        if type(opened) is Unrecorded:  # not isinstance, which asks the abstract base class of spans: 0.2 µs
            self._leave_context(opened)
            if opened.admission is not None:
                opened.admission.let_go()
            return
        try:
            self._end(opened, error, result)
            self._leave_context(opened)
            if not self.dead:
                if opened.sync == "deferred":
                    self.submit(opened)
                else:
                    self.wait_and_submit(opened)
        except BaseException:  # an interrupt of the user's
            self.mend(opened)
            raise

    def mend(self, opened: Any) -> None:
        """Do what is left to do of closing *opened*, after an interrupt of the user's in the midst of it.

        For whoever called :meth:`leave`, :meth:`close`, :meth:`settle` and their like: an interrupt can come
        before the first line of them. Does nothing where nothing is left.
        """
        try:
            self.gate.restore(opened)
            if isinstance(opened, Span) and not opened.submitted and not self.dead:
                if opened.counting is not None:
                    effort.stop_counting(opened, self.ledger, effort.RAISED)
                if opened.place is not None:
                    opened.spoil()
                opened.end()
                self.resolver.take_in(opened)
                opened.submitted = True
        except Exception as fault:  # noqa: BLE001 - rule 1
            self.ledger.fault("mend", fault)

    def close(self, opened: Span | Unrecorded, error: BaseException | None = None, result: Any = None) -> bool:
        """End the last segment and give the caller its context back; returns whether a span is to be submitted."""
        if isinstance(opened, Span):
            self._end(opened, error, result)
        self._leave_context(opened)
        if isinstance(opened, Span):
            return not self.dead
        if opened.admission is not None:
            opened.admission.let_go()
        return False

    def wait_and_submit(self, span: Span) -> None:
        """Wait at the boundary if that is the policy, then pass the span on. Raises nothing but an interrupt."""
        try:
            if span.sync != "deferred":
                self._wait_at_boundary(span)
        except Exception as fault:  # noqa: BLE001 - rule 1
            self.ledger.fault("wait", fault)
            span.spoil()
        finally:  # an interrupt of the user's, too, leaves the span behind
            self.submit(span)

    def submit(self, span: Span) -> None:
        """Pass *span* on without waiting for anything. Never raises."""
        try:
            if span.late == "host" or not self.resolver.hand_over_now(span):
                self.resolver.submit(span)
        except Exception as fault:  # noqa: BLE001 - rule 1
            self.ledger.fault("submit", fault)
            self.resolver.take_in(span)
        span.submitted = True

    def _end(self, span: Span, error: BaseException | None, result: Any) -> None:
        try:
            returned_ns = self.host.now_ns()
            if span.counting is not None:  # before anything of ours is counted as well
                effort.stop_counting(span, self.ledger, None if error is None else effort.RAISED)
            if span.sync == "device":
                try:
                    self._wait_device(span)
                finally:
                    span.finish(returned_ns, NOT_GIVEN if result is None else result)
            else:
                span.finish(returned_ns, NOT_GIVEN if result is None else result)
        except Exception as fault:  # noqa: BLE001 - rule 1
            self.ledger.fault("leave", fault)
            span.spoil()
        finally:
            try:
                if result is not None:
                    span.look_at(result)
                if error is not None:
                    span.fail(error)
            except Exception as fault:  # noqa: BLE001 - rule 1
                self.ledger.fault("leave", fault)
            finally:
                span.epoch = self.epoch
                span.end()

    def _leave_context(self, opened: Span | Unrecorded) -> None:
        """Give the caller its own context back. Never raises."""
        token = opened.token
        if token is not None and token is not LEFT:
            try:
                self.gate.detach(token)
            except Exception as fault:  # noqa: BLE001 - rule 1
                self.ledger.fault("detach", fault)
            opened.token = LEFT

    def _forget(self, span: Opened) -> None:
        """Undo a span whose entering failed half-way, and whose context was given back. Never raises."""
        if type(span) is not Span:
            return
        try:
            if span.counting is not None:
                effort.stop_counting(span, self.ledger, effort.RAISED)
            span.spoil()
            if span.admission.foreign is not None:
                span.admission.foreign.end()
            self.resolver.abandon(span, FAULT)
            span.admission.let_go()
        except Exception as fault:  # noqa: BLE001 - a provider of the user's, or no room on the stack
            self.ledger.fault("enter", fault)

    def _wait_at_boundary(self, span: Span) -> None:
        with ExitStack() as stack:
            for place, mark in span.last_marks():
                stack.enter_context(place.clock.unhindered())
                self._wait_for(span, place.clock.wait, mark)
            span.seen_ns = self.host.now_ns()

    def _wait_for(self, span: Span, wait: Any, what: Mark) -> None:
        before = self.host.now_ns()
        try:
            wait(what)
        except DeviceFault as fault:
            span.device_error = str(fault)
        span.sync_ns += self.host.now_ns() - before

    def _wait_device(self, span: Span) -> None:
        place = span.place
        if place is None or place.clock.is_capturing(place):
            return
        with self._quiet() as delayed, place.clock.unhindered():  # a wait for the device would end a capture
            if delayed:
                span.note(CAPTURE_AWAITED)
            self._wait_for(span, place.clock.wait_device, place)

    # -- suspending -----------------------------------------------------------------------------------

    def suspend(self, opened: Span | Unrecorded) -> None:
        """End a segment at an ``await`` or ``yield``: mark, and put the caller's context back. Never raises."""
        try:
            if isinstance(opened, Span):
                if opened.counting is not None:
                    opened.site.counted = None  # nor will any other of its calls be
                    effort.stop_counting(opened, self.ledger, effort.SUSPENDED)
                opened.finish(self.host.now_ns())
            # What user code attached inside must still be there when it goes on.
            opened.saved_context = self.gate.current()
        except Exception as fault:  # noqa: BLE001 - rule 1
            self._spoil("suspend", opened, fault)
        except BaseException:  # an interrupt of the user's: what ends the span must not end this segment again
            if isinstance(opened, Span):
                opened.spoil()
            raise
        finally:
            self._leave_context(opened)

    def resume(self, opened: Span | Unrecorded) -> None:
        """Begin a segment after an ``await`` or ``yield``. Never raises."""
        try:
            if opened.saved_context is not None:
                saved, opened.saved_context = opened.saved_context, None
                opened.caller_context, opened.token = self.gate.current(), None
                opened.token = self.gate.attach_context(saved)
            if isinstance(opened, Span) and not opened.spoiled:
                opened.begin(marked=not self.resolver.full)
        except Exception as fault:  # noqa: BLE001 - rule 1
            self._spoil("resume", opened, fault)

    def _spoil(self, where: str, opened: Span | Unrecorded, fault: Exception) -> None:
        self.ledger.fault(where, fault)
        if isinstance(opened, Span):
            opened.spoil()

    async def settle(self, span: Span) -> None:
        """Pass *span* on; for ``boundary``, once its record is there, without blocking the event loop.

        The loop looks now and then by itself, so that neither a slow span processor nor a missing thread
        can make it wait.
        """
        try:
            if span.sync != "deferred" and self._has_asyncio():
                span.awaited = True
                pause = _SHORTEST_PAUSE_S
                while not self._is_resolved(span):
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_S)
        finally:
            self.submit(span)

    def _is_resolved(self, span: Span) -> bool:
        try:
            return self.resolver.reader.resolve_if_done(span)
        except Exception as fault:  # noqa: BLE001 - rule 1
            self.ledger.fault("settle", fault)
            return True

    def _has_asyncio(self) -> bool:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self.ledger.count("boundary_without_asyncio")  # another event loop: resolved later, as deferred
            return False
        return True

    # -- inside ---------------------------------------------------------------------------------------

    def _look_at_inputs(
        self, span: Span, warmth: WarmthSource, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        """Take note of inputs that are new to a site, while a library tunes itself for each new shape, unseen."""
        if span.launch is not None:
            return  # a kernel of its own, and none of that library's
        try:
            signature = warmth.signature(arguments, named)
            if signature is None:
                span.input_doubt = INPUTS_UNSEEN
            elif span.site.is_new(signature):
                span.input_doubt = NEW_SHAPE
        except Exception as error:  # noqa: BLE001 - a tensor subclass that has no shape or strides
            span.input_doubt = INPUTS_UNSEEN
            self.ledger.fault("inputs_unreadable", error)

    def _cleaned(
        self,
        make: Callable[..., Mapping[str, Any]],
        arguments: tuple[Any, ...] = (),
        named: Mapping[str, Any] = _NO_ARGUMENTS,
    ) -> dict[str, AttributeValue]:
        try:
            return clean_all(make(*arguments, **named))
        except Exception as error:  # noqa: BLE001 - the user's function of attributes, or mapping
            self.ledger.fault("attributes_raised", error)
            return {}
