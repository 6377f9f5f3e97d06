"""The span that user code finds in ``get_current_span()`` while a timed call runs.

An SDK span costs 10 to 17 µs on the calling thread. This one costs well under one: it holds the ids and
the sampler's decision, and queues what user code writes to it. Once the device's time is known the
exporting side lets the SDK's own ``start_span`` make the real span from it, in the caller's context, so
that processors, limits and baggage see what they would have seen.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from contextvars import copy_context
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context

from gpu_timed.ledger import logger
from gpu_timed.values import AttributeValue, clean, clean_all

Write = tuple[str, tuple[Any, ...], dict[str, Any]]

_LONGEST_TRACE: Final = 65_536
_DEEP: Final = 128
_INNERMOST: Final = 32
"""Of a trace of more than 128 frames only so many are shown: out of an endless recursion each level would show all that
are below it, at some 0.1 ms each."""
OURS: Final = otel_context.create_key("gpu_timed.span")
"""The key under which a context holds the nearest span of ours."""
LEFT: Final = object()
"""In the place of the token of a context that was left."""
MOST_WRITES: Final = 10_000
"""Writes kept for one span; the SDK's own limits (128 attributes, 128 events) are far below."""


class Admission:
    """What was decided at entry and is kept: identity, parent, sampling, and where the span will go."""

    __slots__ = (
        "ancestor",
        "caller",
        "context",
        "flags",
        "foreign",
        "parent",
        "parent_id",
        "recorded",
        "sampler",
        "sampling",
        "span_id",
        "trace_id",
        "tracer",
    )

    def __init__(  # noqa: PLR0917 - by position: the hot path
        self,
        tracer: Any,
        context: Context,
        parent: Any,
        parent_id: int | None,
        trace_id: int,
        span_id: int,
        flags: int,
        sampling: Any = None,
        sampler: Any = None,
        recorded: bool = True,  # noqa: FBT001, FBT002 - by position
        foreign: trace.Span | None = None,
    ) -> None:
        self.tracer = tracer
        self.context: Any = context
        #: The nearest span of gpu_timed's own around this one, the user's own spans in between or not.
        self.ancestor: Any = context.get(OURS)
        self.parent: Any = parent
        self.parent_id = parent_id
        self.trace_id = trace_id
        self.span_id = span_id
        self.flags = flags
        #: What the sampler answered; None where its answer was known without asking, and *sampler* is asked later.
        self.sampling = sampling
        self.sampler = sampler
        self.recorded = recorded
        self.foreign = foreign
        self.caller: Any = copy_context() if recorded and tracer is not None else None

    @property
    def trace_state(self) -> Any:
        """The W3C trace state that goes with the ids, or None."""
        if self.foreign is not None:
            return self.foreign.get_span_context().trace_state
        if self.sampling is not None:
            return self.sampling.trace_state
        parent = self.parent  # once: another thread may be letting it go
        return None if parent is None else parent.get_span_context().trace_state

    def let_go(self) -> None:
        """Keep the ids, and nothing by which this span holds others: it is over, and will not be exported again.

        What works in the context of a span that has ended is its child: a task that ever starts the next one makes a
        chain without end. Each link would keep all the links before it.
        """
        self.context = self.caller = None
        ancestor = self.ancestor
        while ancestor is not None and not ancestor.is_recording():  # one that has ended marks no stream any more
            ancestor = ancestor.admission.ancestor
        self.ancestor = ancestor
        parent = self.parent
        kept = getattr(parent, "admission", None)
        while kept is not None and kept.tracer is None and kept.parent is not parent:  # it is exported nowhere
            parent = kept.parent
            kept = getattr(parent, "admission", None)
        if type(kept) is Admission:
            parent = Gone(kept)
        self.parent = parent

    def span_context(self) -> trace.SpanContext:
        """Return ids, flags and trace state as OpenTelemetry has them."""
        return trace.SpanContext(self.trace_id, self.span_id, False, trace.TraceFlags(self.flags), self.trace_state)


class Gone(trace.NonRecordingSpan):
    """Stands for a parent that has ended: ids, and nothing that it held."""

    def __init__(self, kept: Admission) -> None:  # not what it inherits: that wants its ids made
        self._kept = kept.trace_id, kept.span_id, kept.flags, kept.trace_state

    def get_span_context(self) -> trace.SpanContext:
        """Return trace id, span id and flags."""
        trace_id, span_id, flags, state = self._kept
        return trace.SpanContext(trace_id, span_id, False, trace.TraceFlags(flags), state)

    def __repr__(self) -> str:
        return f"Gone({self.get_span_context()!r})"


class RecordingSpan(trace.Span):
    """An OpenTelemetry span that is written to now and made later."""

    admission: Admission
    name: str
    start_attributes: Mapping[str, AttributeValue]
    writes: list[Write] | None = None
    writes_dropped: int = 0
    _open: bool = True
    _span_context: trace.SpanContext | None = None

    # -- identity -------------------------------------------------------------------------------------

    def get_span_context(self) -> trace.SpanContext:
        """Return trace id, span id and flags, the same ones that will be exported."""
        found = self._span_context
        if found is None:
            found = self._span_context = self.admission.span_context()
        return found

    @property
    def context(self) -> trace.SpanContext:
        """The same as :meth:`get_span_context`, under the name the SDK's spans use."""
        return self.get_span_context()

    @property
    def parent(self) -> trace.SpanContext | None:
        """The parent's context, or None at a root."""
        kept = self.admission
        if kept.parent_id is None:
            return None
        parent = kept.parent  # once: another thread may be letting it go
        found: trace.SpanContext | None = None if parent is None else parent.get_span_context()
        if found is None or found.span_id != kept.parent_id:  # it went nowhere, and was let go
            return trace.SpanContext(kept.trace_id, kept.parent_id, False, trace.TraceFlags(kept.flags))
        return found

    @property
    def attributes(self) -> Mapping[str, Any]:
        """What the span holds so far; the measurements are not among it before the device is done."""
        held: dict[str, Any] = dict(self.start_attributes)
        for method, arguments, _ in self.writes or ():
            if method == "set_attributes":
                held.update(arguments[0])
        return held

    # -- what user code writes ------------------------------------------------------------------------

    def is_recording(self) -> bool:
        """Return True until the call has returned."""
        return self._open

    def set_attribute(self, key: str, value: Any) -> None:
        """Keep an attribute. A tensor is kept as its shape and type, never read back."""
        self._write("set_attributes", ({key: clean(value)},))

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Keep several attributes."""
        self._write("set_attributes", ({key: clean(value) for key, value in attributes.items()},))

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        """Keep an event, with the time of this call unless another is given."""
        kept = clean_all(attributes) if attributes else None
        self._write("add_event", (name, kept), timestamp=timestamp if timestamp is not None else time.time_ns())

    def add_link(self, context: trace.SpanContext, attributes: Any = None) -> None:
        """Keep a link."""
        self._write("add_link", (context, clean_all(attributes) if attributes else None))

    def update_name(self, name: str) -> None:
        """Rename the exported span. The record keeps the site's name."""
        self._write("update_name", (name,))

    def set_status(self, status: Any, description: str | None = None) -> None:
        """Keep a status; what the call itself does (raising) is added after it."""
        self._write("set_status", (status,) if description is None else (status, description))

    def record_exception(
        self,
        exception: BaseException,
        attributes: Any = None,
        timestamp: int | None = None,
        escaped: bool = False,  # noqa: FBT001, FBT002 - OpenTelemetry's signature
    ) -> None:
        """Keep an exception as an event. It is turned into text now: keeping it would keep its frames."""
        kind = type(exception)
        named = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        held = {
            "exception.type": named,
            "exception.message": message_of(exception),
            "exception.stacktrace": _stacktrace(exception),
            "exception.escaped": str(escaped),
            **clean_all(attributes or {}),
        }
        self._write("add_event", ("exception", held), timestamp=timestamp if timestamp is not None else time.time_ns())

    def end(self, end_time: int | None = None) -> None:  # noqa: ARG002 - OpenTelemetry's signature
        """Take no more writes. When the span really ends is what is being measured, so it is not settable."""
        self._open = False

    def __exit__(self, *exc_info: object) -> None:
        """Do not end on leaving a ``with`` of user code's own: the engine ends the span."""

    def _write(self, method: str, arguments: tuple[Any, ...], **named: Any) -> None:
        if not self._open:
            logger.warning("Calling %s on an ended span.", method)
            return
        writes = self.writes
        if writes is None:
            writes = self.writes = []
        if len(writes) < MOST_WRITES:
            writes.append((method, arguments, named))
        else:
            self.writes_dropped += 1


class SilentSpan(trace.NonRecordingSpan):
    """A span that takes every write and keeps none.

    Its ids are those of its *admission*, under which the calls inside learn that their trace is not sampled; or those
    of the span that is current instead of it.
    """

    _span_context: trace.SpanContext | None = None

    def __init__(self, admission: Admission | None = None) -> None:  # not what it inherits: that wants its ids made
        self.admission = admission
        if admission is None:
            self._span_context = trace.get_current_span().get_span_context()

    def get_span_context(self) -> trace.SpanContext:
        """Return trace id, span id and flags."""
        found = self._span_context
        if found is None:
            assert self.admission is not None  # noqa: S101 - else it was set
            found = self._span_context = self.admission.span_context()
        return found

    def __repr__(self) -> str:
        return f"SilentSpan({self.get_span_context()!r})"


def message_of(error: BaseException) -> str:
    """Return the text of *error*, or a note if its own ``__str__`` fails."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - the user's class, anything can happen
        return f"<{type(error).__name__} whose text raised {type(failure).__name__}>"


def _stacktrace(error: BaseException) -> str:
    try:
        depth, step = 0, error.__traceback__
        while step is not None and depth <= _DEEP:
            depth, step = depth + 1, step.tb_next
        limit = None if step is None else -_INNERMOST
        return "".join(traceback.format_exception(error, limit=limit))[-_LONGEST_TRACE:]  # the end says what was raised
    except Exception as failure:  # noqa: BLE001 - a broken __str__ or __repr__ of the user's class
        return f"<no stack trace: {type(failure).__name__}>"
