"""Reading: turns the marks of a finished span into its record.

What the marks say is worked out in :mod:`gpu_timed.timing`, and doubts about it in :mod:`gpu_timed.noting`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

from gpu_timed.analysis import throughput
from gpu_timed.mode_values import Ran
from gpu_timed.noting import note_floor, note_full_queue
from gpu_timed.peaks import NOT_MEASURED, PeakBook
from gpu_timed.ports import DeviceInfo, Sighting, Verdict
from gpu_timed.record import NOT_SAMPLED, NOT_SET, Bound, Measured, Missing, Record, Status, Vitals, WorkDone
from gpu_timed.site import Site
from gpu_timed.span import Span
from gpu_timed.timing import Device, idle_before, launch_of, nothing, read_marks

DEVICE_ERROR_HINT: Final = "may come from earlier work"
_PROVEN: Final = 0.9
"""Share of the device time that must be proven work before the device is called the bound."""
_UNKNOWN: Final = Verdict("unknown", NOT_SET, ())
_REFUSED: Final = Missing("not_run", "nothing of the call ran: mode_reason says why")
_NO_DEVICE: Final = Missing("no_device")
_NOT_READ: Final = Sighting(NOT_SET, NOT_SET)

Near = Callable[[str | None, int, int], Sighting]
"""Says what state the machine was in: :meth:`gpu_timed.ports.VitalsSource.at`."""
Fault = Callable[[str, BaseException], None]
_UNDESCRIBED: Final = Missing("internal_fault")


def _untold(kind: str, error: BaseException) -> None:
    """Tell nobody."""


def read(
    span: Span,
    seen_ns: int,
    verdict: Verdict = _UNKNOWN,
    *,
    near: Near | None = None,
    peaks: PeakBook | None = None,
    mode_reason: str = "",
    fault: Fault = _untold,
) -> Record:
    """Build the record of *span*.

    Args:
        span: A span whose last mark was reached, or that can have no device time.
        seen_ns: The host's monotonic time at which its last mark was known to be reached.
        verdict: What the warmth probes saw.
        near: Says what state the machine was in; None where that is not read.
        peaks: What devices were measured to do at most.
        mode_reason: Why compiled code did not run as it was to be launched.
        fault: Told of what went wrong in here and costs the span no time.
    """
    if span.interleaved:
        span.note("interleaved")
    missing = span.missing()
    if missing is not None and missing.reason == "device_error" and not span.device_error:
        span.device_error = missing.detail or "device error"
    if span.device_error:
        missing = Missing("device_error", span.device_error)
    if missing is not None and missing.reason == "simulated":
        verdict = _UNKNOWN  # nothing is compiled there, and nothing is warm
    found = nothing(missing) if missing is not None else read_marks(span, seen_ns)
    idle_before_ns: Measured = NOT_SET if missing is None else missing
    if missing is None:
        idle_before_ns = idle_before(span, found)
        note_full_queue(span, found)
        note_floor(span, found)
    to_unix = span.host.to_unix
    ended_ns = max(span.returned_ns, span.started_ns) + span.sync_ns
    if isinstance(found.end_ns, int) and span.late == "host":
        ended_ns = max(ended_ns, found.end_ns)
    place = span.segments[0].place if span.segments else None
    info = None if place is None else _describe(place, fault)
    unknown = _NO_DEVICE if missing is None else missing
    sighting = _NOT_READ if near is None else _sighting(near, info, found)
    if isinstance(sighting.vitals, Vitals) and sighting.vitals.slowed:
        span.note("throttled")
    error = span.error
    if span.device_error and not error:
        error = f"{span.device_error} ({DEVICE_ERROR_HINT})"
    work = _work(span, found.device_ns, info, peaks)
    kept = span.admission
    ran = span.ran
    return Record(
        name=span.site.name,
        trace_id=kept.trace_id,
        span_id=kept.span_id,
        parent_id=kept.parent_id,
        process_id=os.getpid(),
        thread_id=span.thread_id,
        attributes=MappingProxyType(dict(span.start_attributes)),
        clock="host" if place is None else place.clock.name,
        device=unknown if place is None else place.device,
        device_uuid=unknown if info is None else info.uuid,
        device_name=unknown if info is None else info.name,
        device_type="gpu" if info is None else info.kind,
        stream=unknown if place is None else place.stream,
        start_ns=to_unix(span.started_ns),
        end_ns=to_unix(ended_ns),
        launch_ns=launch_of(span),
        queue_ns=found.queue_ns,
        device_ns=found.device_ns,
        device_min_ns=found.min_ns,
        floor_ns=found.floor_ns,
        sync_ns=span.sync_ns,
        device_start_ns=to_unix(found.start_ns) if isinstance(found.start_ns, int) else found.start_ns,
        device_end_ns=to_unix(found.end_ns) if isinstance(found.end_ns, int) else found.end_ns,
        uncertainty_ns=found.uncertainty_ns,
        launch_gaps_included=found.gaps,
        idle_before_ns=idle_before_ns,
        warmth=verdict.warmth,
        tier=verdict.tier,
        causes=verdict.causes,
        compile_ns=verdict.compile_ns,
        concurrent=verdict.concurrent,
        first_call=span.index == 0,
        call_index=span.index,
        mode=NOT_SET if ran is None else ran.mode or _REFUSED,
        mode_requested=NOT_SET if ran is None else ran.requested,
        mode_reason=_reasons(ran, mode_reason),
        graph_memory_bytes=NOT_SET if ran is None or ran.graph_memory_bytes is None else ran.graph_memory_bytes,
        bound=_bound(found),
        vitals=sighting.vitals,
        vitals_age_ns=sighting.age_ns,
        sync=span.sync,
        resumptions=len(span.segments) + span.unmarked,
        status=_status(span, error),
        error=error,
        quality=span.quality,
        work=work,
    )


def _reasons(ran: Ran | None, more: str) -> str:
    return "; ".join(filter(None, ("" if ran is None else ran.reason, more)))


def blank(site: Site, unix_ns: int, reason: Missing = NOT_SAMPLED) -> Record:
    """Build the record of a call of *site* of which nothing is known, for one *reason*."""
    no = reason
    return Record(
        name=site.name,
        trace_id=0,
        span_id=0,
        parent_id=None,
        process_id=os.getpid(),
        thread_id=0,
        attributes=MappingProxyType(dict(site.attributes)),
        clock="host",
        device=no,
        device_uuid=no,
        device_name=no,
        stream=no,
        start_ns=unix_ns,
        end_ns=unix_ns,
        launch_ns=no,
        queue_ns=no,
        device_ns=no,
        device_min_ns=no,
        floor_ns=no,
        sync_ns=no,
        device_start_ns=no,
        device_end_ns=no,
        uncertainty_ns=no,
        first_call=False,
        call_index=0,
        sync="deferred",
    )


def _sighting(near: Near, info: DeviceInfo | None, found: Device) -> Sighting:
    if isinstance(found.start_ns, Missing) or isinstance(found.end_ns, Missing):
        reason = found.start_ns if isinstance(found.start_ns, Missing) else NOT_SET
        return Sighting(reason, reason)
    uuid = info.uuid if info is not None else None
    return near(uuid if isinstance(uuid, str) else None, found.start_ns, found.end_ns)


def _work(span: Span, device_ns: Measured, info: DeviceInfo | None, peaks: PeakBook | None) -> WorkDone | Missing:
    """Set what the call had to do beside its device time; say so where the device cannot have done it."""
    work = span.work if span.work is not None else span.site.work
    if work is None:
        return NOT_SET
    if isinstance(work, Missing):
        return work
    found = throughput.done(work, device_ns, NOT_MEASURED if peaks is None or info is None else peaks.of(info.uuid))
    if found.exceeds_peak is True:
        span.note("exceeds_peak")
    return found


def _status(span: Span, error: str) -> Status:
    if span.cancelled and not span.device_error:
        return "cancelled"
    return "error" if error else "ok"


def _bound(found: Device) -> Bound:
    """Say ``device`` when at least nine tenths of the device time cannot have been launch gaps."""
    if isinstance(found.device_ns, Missing) or isinstance(found.proven_ns, Missing) or found.device_ns == 0:
        return "unknown"
    if found.below_floor:  # the marks may be all that was
        return "unknown"
    return "device" if found.proven_ns >= _PROVEN * found.device_ns else "unknown"


def _describe(place: Any, fault: Fault) -> DeviceInfo:
    try:
        info: DeviceInfo = place.clock.describe(place)
    except Exception as error:  # noqa: BLE001 - what it is called must not cost the span its times
        fault("describing", error)
        info = DeviceInfo(place.device, _UNDESCRIBED, _UNDESCRIBED)
    return info
