"""The names under which a record appears in a trace, one documented constant each."""

from __future__ import annotations

from typing import Final

from gpu_timed.record import NOT_SET, Cause, Missing, Record, Vitals
from gpu_timed.values import AttributeValue

HW_ID: Final = "hw.id"
"""UUID of the GPU (OpenTelemetry semantic conventions, hardware)."""
HW_TYPE: Final = "hw.type"
"""``gpu``; ``cpu`` where a runtime without device events works there."""
HW_NAME: Final = "hw.name"
"""Product name of the GPU."""
ERROR_TYPE: Final = "error.type"
"""Class of what the call raised (stable semantic convention)."""
THREAD_ID: Final = "thread.id"
"""Python's identifier of the thread that entered the span."""

DEVICE_DURATION: Final = "gpu_timed.device.duration_ns"
"""Nanoseconds from start mark to end mark on the device."""
DEVICE_MIN: Final = "gpu_timed.device.min_ns"
"""What remains of it if the device waited for the host whenever it could have."""
FLOOR: Final = "gpu_timed.floor_ns"
"""What an empty pair of marks reads at the least on the device: so much of its duration may be the marks' own."""
DEVICE_INDEX: Final = "gpu_timed.device.index"
"""Index of the device, as the runtime counts."""
DEVICE_STREAM: Final = "gpu_timed.device.stream"
"""Raw handle of the stream, as text in hexadecimal; ``0x0`` is the default stream."""
DEVICE_MISSING: Final = "gpu_timed.device.missing"
"""Why there is no device time."""
LAUNCH_DURATION: Final = "gpu_timed.launch.duration_ns"
"""Host nanoseconds from entering the function to its return."""
QUEUE_DURATION: Final = "gpu_timed.queue.duration_ns"
"""Nanoseconds the start mark waited behind earlier work."""
SYNC_DURATION: Final = "gpu_timed.sync.duration_ns"
"""Host nanoseconds spent waiting at the span boundary."""
SYNC_POLICY: Final = "gpu_timed.sync.policy"
"""``boundary``, ``deferred`` or ``device``."""
UNCERTAINTY: Final = "gpu_timed.uncertainty_ns"
"""How far the device span's true position may lie from the one shown."""
LAUNCH_GAPS: Final = "gpu_timed.launch_gaps_included"
"""Whether the device duration holds time in which the device waited for the host: yes, no, unknown."""
CLOCK: Final = "gpu_timed.clock"
"""Where the device's marks come from."""
WARMTH: Final = "gpu_timed.warmth"
"""``cold``, ``warm`` or ``unknown``."""
WARMTH_TIER: Final = "gpu_timed.warmth.tier"
"""``built``, ``loaded``, ``initialised`` or ``hot``."""
WARMTH_CAUSES: Final = "gpu_timed.warmth.causes"
"""What made the call cold, one text for each cause."""
WARMTH_CONCURRENT: Final = "gpu_timed.warmth.concurrent"
"""What was compiled, tuned, loaded or initialised on other threads meanwhile, and made this call no colder."""
COMPILE_DURATION: Final = "gpu_timed.compile.duration_ns"
"""Host nanoseconds in compiling, tuning and loading."""
MODE: Final = "gpu_timed.mode"
"""How the work was launched."""
MODE_REQUESTED: Final = "gpu_timed.mode.requested"
"""The mode that was asked for, where it is not the one that ran."""
MODE_REASON: Final = "gpu_timed.mode.reason"
"""Why another mode ran."""
GRAPH_MEMORY: Final = "gpu_timed.mode.graph_memory_bytes"
"""Bytes of the device's memory that the CUDA Graphs of the site hold, of a call that was a replay of one."""
BOUND: Final = "gpu_timed.bound"
"""What limits the call."""
CALL_INDEX: Final = "gpu_timed.call.index"
"""How many calls of the site came before."""
FIRST_CALL: Final = "gpu_timed.first_call"
"""Whether this was the site's first call in the process."""
RESUMPTIONS: Final = "gpu_timed.resumptions"
"""How many times a coroutine ran between suspensions."""
IDLE_BEFORE: Final = "gpu_timed.idle_before_ns"
"""Nanoseconds of device time since the last span of ours on this stream: it was idle at most so long."""
SM_CLOCK: Final = "gpu_timed.vitals.sm_clock_mhz"
"""Clock of the multiprocessors in MHz, read near the call; the lowest, where it was read several times meanwhile."""
THROTTLE_REASONS: Final = "gpu_timed.vitals.throttle_reasons"
"""What held the clocks near the call, in NVML's words; an empty list: nothing did; left out: not known."""
POWER: Final = "gpu_timed.vitals.power_w"
"""Watts that the GPU drew near the call."""
TEMPERATURE: Final = "gpu_timed.vitals.temperature_c"
"""Degrees Celsius of the GPU near the call."""
HOST_LOAD: Final = "gpu_timed.vitals.host_load"
"""Load average of the last minute for each CPU of the machine."""
QUALITY: Final = "gpu_timed.quality"
"""Notes on what is doubtful about the numbers."""
WORK_FLOPS: Final = "gpu_timed.work.flops"
"""Floating-point operations of the call, as stated or counted."""
WORK_BYTES: Final = "gpu_timed.work.bytes"
"""Bytes the call reads and writes, as stated."""
WORK_FLOPS_PER_S: Final = "gpu_timed.work.flops_per_s"
"""Operations in a second of device time: a lower bound."""
WORK_BYTES_PER_S: Final = "gpu_timed.work.bytes_per_s"
"""Bytes in a second of device time: a lower bound."""
WORK_SHARE: Final = "gpu_timed.work.share_of_peak"
"""The larger of both as a part of what this device was measured to do on this machine."""
WORK_PEAK: Final = "gpu_timed.work.flops_peak"
"""Type of number whose peak the operations are held against."""
WORK_EXCEEDS: Final = "gpu_timed.work.exceeds_peak"
"""Whether the device cannot have done it in that time: nobody waited for this work."""
WORK_MISSING: Final = "gpu_timed.work.missing"
"""Why it is not known what the call had to do."""


def of_both_spans(record: Record) -> tuple[dict[str, AttributeValue], dict[str, AttributeValue]]:
    """Return the attributes of the span that covers the call, and of the one that shows the device's work."""
    device = _device(record)
    _put_work(device, record)
    return _of_host_span(record, device), _of_device_span(record, device)


def of_host_span(record: Record) -> dict[str, AttributeValue]:
    """Return the attributes of the span that covers the call."""
    device = _device(record)
    _put_work(device, record)
    return _of_host_span(record, device)


def _of_host_span(record: Record, device: dict[str, AttributeValue]) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        CLOCK: record.clock,
        WARMTH: record.warmth,
        BOUND: record.bound,
        CALL_INDEX: record.call_index,
        SYNC_POLICY: record.sync,
        THREAD_ID: record.thread_id,
    }
    _put_measured(found, record)
    if record.first_call:
        found[FIRST_CALL] = True
    if record.resumptions != 1:
        found[RESUMPTIONS] = record.resumptions
    if record.causes:
        found[WARMTH_CAUSES] = tuple(_in_words(cause) for cause in record.causes)
    if record.concurrent:
        found[WARMTH_CONCURRENT] = tuple(_in_words(cause) for cause in record.concurrent)
    if record.mode_requested != record.mode and isinstance(record.mode_requested, str):
        found[MODE_REQUESTED] = record.mode_requested
    if record.mode_reason:
        found[MODE_REASON] = record.mode_reason
    if not isinstance(record.graph_memory_bytes, Missing):
        found[GRAPH_MEMORY] = record.graph_memory_bytes
    if record.status != "ok":
        found[ERROR_TYPE] = record.error.partition(":")[0]
    vitals = record.vitals
    if isinstance(vitals, Vitals):
        if not isinstance(vitals.sm_clock_mhz, Missing):
            found[SM_CLOCK] = vitals.sm_clock_mhz
        if not isinstance(vitals.throttle, Missing):
            found[THROTTLE_REASONS] = vitals.throttle
        if not isinstance(vitals.power_w, Missing):
            found[POWER] = vitals.power_w
        if not isinstance(vitals.temperature_c, Missing):
            found[TEMPERATURE] = vitals.temperature_c
        if not isinstance(vitals.host_load, Missing):
            found[HOST_LOAD] = vitals.host_load
    found.update(device)
    return found


def _of_device_span(record: Record, found: dict[str, AttributeValue]) -> dict[str, AttributeValue]:
    if isinstance(record.device_ns, int):
        found[DEVICE_DURATION] = record.device_ns
    if isinstance(record.floor_ns, int):
        found[FLOOR] = record.floor_ns
    if isinstance(record.uncertainty_ns, int):
        found[UNCERTAINTY] = record.uncertainty_ns
    found[CLOCK] = record.clock
    found[WARMTH] = record.warmth
    if not isinstance(record.mode, Missing):
        found[MODE] = record.mode
    return found


def _in_words(cause: Cause) -> str:
    return f"{cause.probe}: {cause.what} ({cause.detail})" if cause.detail else f"{cause.probe}: {cause.what}"


def _put_measured(found: dict[str, AttributeValue], record: Record) -> None:
    """Put in what was measured; a missing value is left out, and why the device time is missing is said."""
    measured = {
        DEVICE_DURATION: record.device_ns,
        DEVICE_MIN: record.device_min_ns,
        FLOOR: record.floor_ns,
        LAUNCH_DURATION: record.launch_ns,
        QUEUE_DURATION: record.queue_ns,
        SYNC_DURATION: record.sync_ns,
        UNCERTAINTY: record.uncertainty_ns,
        IDLE_BEFORE: record.idle_before_ns,
        COMPILE_DURATION: record.compile_ns or NOT_SET,
        WARMTH_TIER: record.tier,
        MODE: record.mode,
    }
    found.update({name: value for name, value in measured.items() if not isinstance(value, Missing)})
    if isinstance(record.device_ns, Missing):
        found[DEVICE_MISSING] = record.device_ns.reason
    else:
        found[LAUNCH_GAPS] = record.launch_gaps_included


def _put_work(found: dict[str, AttributeValue], record: Record) -> None:
    """Put in what the call had to do and how fast that was, as far as it is known."""
    work = record.work
    if isinstance(work, Missing):
        if work != NOT_SET:
            found[WORK_MISSING] = work.reason
        return
    values = {
        WORK_FLOPS: work.flops,
        WORK_BYTES: work.bytes,
        WORK_FLOPS_PER_S: work.flops_per_s,
        WORK_BYTES_PER_S: work.bytes_per_s,
        WORK_SHARE: work.share_of_peak,
        WORK_PEAK: work.flops_peak,
        WORK_EXCEEDS: work.exceeds_peak,
    }
    found.update({name: value for name, value in values.items() if not isinstance(value, Missing)})


def _device(record: Record) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {}
    if isinstance(record.device, int):
        found[HW_TYPE] = record.device_type
        found[DEVICE_INDEX] = record.device
    if isinstance(record.stream, int):
        found[DEVICE_STREAM] = hex(record.stream)
    if isinstance(record.device_uuid, str):
        found[HW_ID] = record.device_uuid
    if isinstance(record.device_name, str):
        found[HW_NAME] = record.device_name
    if record.quality:
        found[QUALITY] = record.quality
    return found
