"""The record: one finished measurement, frozen, in integer nanoseconds, honest about gaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeAlias

Warmth: TypeAlias = Literal["cold", "warm", "unknown"]
Tier: TypeAlias = Literal["built", "loaded", "initialised", "hot"]
Bound: TypeAlias = Literal["launch", "device", "unknown"]
Answer: TypeAlias = Literal["yes", "no", "unknown"]
Status: TypeAlias = Literal["ok", "error", "cancelled"]


@dataclass(frozen=True, slots=True)
class Missing:
    """A value that was not measured, and why. Never a number, never zero.

    It is false in a condition, and arithmetic or ordering with it raises ``TypeError``.

    Reasons in use:

    ``no_device``            this process has no device gpu_timed can ask
    ``not_initialised``      the runtime had not set up its device when the span began; we do not do it for it
    ``unsupported_runtime``  the runtime drives a kind of device that no clock here can read
    ``captured``             the stream was being captured into a graph: nothing ran
    ``device_changed``       the span began on one device and ended on another
    ``device_error``         the device answered with an error
    ``mark_failed``          the driver refused to place a mark
    ``overflow``             too many spans were waiting for the device already
    ``lost``                 the marks were gone before they could be read (fork, shutdown, reset)
    ``pending``              the device had not finished when the process stopped waiting
    ``anchor_fault``         the device's position on the host's time axis contradicts the order of events
    ``internal_fault``       something failed inside gpu_timed during the span; ``flush().counts`` says what
    ``disabled``             measuring is switched off (``GPU_TIMED_DISABLED``)
    ``not_sampled``          the sampler decided against this span
    ``needs_kernel_records`` only a record of every kernel could tell
    ``not_set``              nobody asked for it
    ``no_nvml``              NVML cannot be asked: ``nvidia-ml-py`` is not installed, or there is no driver for it
    ``not_found``            NVML knows no device by the UUID that the runtime gave
    ``unsupported``          this device, driver or machine has no answer to that question
    ``nvml_error``           NVML had an answer before, and failed this time
    ``starting``             the first reading of the machine's state was still to come
    ``stale``                the nearest reading of the machine's state was too far away
    ``no_earlier_span``      no span is known to have ended on this stream before
    ``simulated``            Numba's simulator or Triton's interpreter ran the kernel, in Python
    ``no_results``           the runtime shows its work by its results only, and the call left none
    ``not_measured``         what would tell was not measured yet, or cannot be with this clock
    ``peak_not_measured``    what the device can do at most was not measured on this machine
    ``not_counted``          torch could not count the call's operations
    ``work_raised``          the function given as ``work=`` raised, or returned no ``Work``
    ``not_run``              nothing of the call ran: its mode was refused, or compiling it raised
    ``unwatched``            a compiler is in use, or just being imported, that gpu_timed does not watch: nobody can say
                             whether it compiled in this call
    ``no_time``              the device time is 0, by which no work can be divided
    """

    reason: str
    detail: str = ""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"Missing({self.reason!r})" if not self.detail else f"Missing({self.reason!r}, {self.detail!r})"

    def __format__(self, spec: str) -> str:
        """Show the reason whatever format a number would have had: a log line must not fail for a missing time."""
        return repr(self)

    def _no_number(self, *_: object) -> NoReturn:
        raise TypeError(f"{self!r} is no number: this was not measured. Test it with isinstance(value, int) first.")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _no_number
    __floordiv__ = __rfloordiv__ = __int__ = __float__ = __lt__ = __le__ = __gt__ = __ge__ = _no_number


Measured: TypeAlias = int | Missing

NEEDS_KERNEL_RECORDS: Final = Missing("needs_kernel_records")
NOT_SET: Final = Missing("not_set")
NOT_SAMPLED: Final = Missing("not_sampled")
NO_RESULTS: Final = Missing("no_results", "this runtime shows its work by its results only, and there were none")


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that made a call cold.

    ``duration_ns`` is host time in nanoseconds, or :class:`Missing` where the probe cannot know it.
    """

    probe: str
    what: str
    tier: Tier
    duration_ns: Measured = NOT_SET
    detail: str = ""


_SLOWING: Final = frozenset(
    {"sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What state the machine was in, as it was read beside the call: not during it, but near it.

    What could not be read is :class:`Missing`: never "no". Several records share one of these. For a call so
    long that the machine was read several times meanwhile, all those readings together.
    """

    taken_ns: int
    """When it was read (Unix time); of several readings, the first."""
    readings: int = 1
    """How many readings this sums up."""
    sm_clock_mhz: Measured
    """Clock of the multiprocessors in MHz; of several readings, the lowest."""
    sm_clock_max_mhz: Measured
    """The highest clock in MHz that the device can be set to."""
    throttle: tuple[str, ...] | Missing
    """What held the clocks, in NVML's words (``gpu_idle``, ``sw_power_cap``, ``hw_thermal_slowdown`` …), empty if
    nothing did; of several readings, every reason seen. Of a MIG instance, those of its card."""
    power_w: float | Missing
    """Power drawn in watts, of a MIG instance's whole card. From Ampere on NVML gives the mean of the last second;
    of several readings, the highest."""
    temperature_c: Measured
    """Temperature of the GPU in degrees Celsius; of several readings, the highest."""
    host_load: float | Missing
    """Load average of the last minute for each CPU of the machine: above 1, threads wait for one. Of several
    readings, the highest."""
    process_cpus: float | Missing
    """How many CPUs this process kept busy since the reading before; of several readings, the most."""
    cpus_allowed: float | Missing
    """How many CPUs this process may use: by its affinity and its control group's quota."""

    @property
    def slowed(self) -> bool:
        """Whether heat, power or a brake held the clocks down: no rest of an idle device, no setting of somebody's."""
        return not isinstance(self.throttle, Missing) and not _SLOWING.isdisjoint(self.throttle)


class WorkDone(NamedTuple):
    """What a call had to do, set beside its device time and beside what the device was measured to do at most.

    ``device_ns`` may hold time in which the device waited, so that rates and shares are lower bounds.
    """

    flops: float | Missing
    """Floating-point operations, as stated or counted."""
    bytes: float | Missing
    """Bytes read and written, as stated."""
    dtype: str | Missing
    """Type of number of the operations, as stated."""
    flops_per_s: float | Missing
    """Operations in a second of device time."""
    bytes_per_s: float | Missing
    """Bytes in a second of device time."""
    flops_share: float | Missing
    """``flops_per_s`` as a part of the measured peak called ``flops_peak``."""
    bytes_share: float | Missing
    """``bytes_per_s`` as a part of the measured bandwidth of the memory. Above 1 when much came from a cache."""
    flops_peak: str | Missing
    """Which peak: that of ``dtype`` or, where none was stated, of the type of number with the highest."""
    exceeds_peak: bool | Missing
    """Whether the device cannot have done it in that time: nobody waited for this work. It ran on another stream, or
    had not been launched yet; or less was done than was stated."""

    @property
    def share_of_peak(self) -> float | Missing:
        """The larger of the two shares: how close the call came to what limits it."""
        known = [share for share in (self.flops_share, self.bytes_share) if not isinstance(share, Missing)]
        if known:
            return max(known)
        return self.bytes_share if self.flops_share == NOT_SET else self.flops_share


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Record:
    """What one call did. Every ``*_ns`` is integer nanoseconds, or :class:`Missing`.

    Positions (``start_ns``, ``end_ns``, ``device_start_ns``, ``device_end_ns``) are Unix time, so that
    they stand on the same axis as every other span of the trace. Durations never come from subtracting
    positions: they come from monotonic clocks and from pairs of marks.
    """

    name: str
    """Name of the site."""
    trace_id: int
    """128-bit trace id; 0 when the call was not sampled."""
    span_id: int
    """64-bit span id; 0 when the call was not sampled."""
    parent_id: int | None
    """Span id of the parent, ``None`` at a root."""
    process_id: int
    """Operating-system process id."""
    thread_id: int
    """Python's identifier of the thread that entered the span."""
    attributes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """What the site was given as ``attributes=``."""

    clock: str
    """Where the device's marks come from; ``host`` when there were none."""
    device: Measured
    """Index of the device, as the runtime counts them."""
    device_uuid: str | Missing
    """UUID of the device (of the MIG instance, if it is one)."""
    device_name: str | Missing
    """Product name of the device."""
    device_type: str = "gpu"
    """``gpu``; another kind where a runtime without device events works elsewhere, such as ``cpu`` for JAX."""
    stream: Measured
    """Raw handle of the stream the marks were placed on; 0 is CUDA's legacy default stream."""

    start_ns: int
    """Host time at which the span began (Unix time)."""
    end_ns: int
    """Host time at which the span ended, the sync at its boundary included (Unix time)."""
    launch_ns: Measured
    """Host time from entering the function to its return; for a coroutine, the time it was running."""
    queue_ns: Measured
    """From the host placing the start mark to the device reaching it: the wait behind earlier work."""
    device_ns: Measured
    """From the start mark to the end mark, on the device. Never negative; of it, ``floor_ns`` may be the marks' own."""
    device_min_ns: Measured
    """What remains of ``device_ns`` if the device waited for the host whenever it could have, that is until
    the end mark, placed just after the function returned, could reach it; and if handing over from mark to work and
    from work to mark took the device 6 µs more than the floor, as with a graph of many kernels (a kernel: 1 to 2 µs).
    The truth lies between the two, within ``uncertainty_ns`` and ``floor_ns``."""
    floor_ns: Measured
    """What an empty pair of marks reads at the least on this device, once for each resumption, which has a pair of its
    own: of ``device_ns`` that much may be the marks' own. It is the least of what was ever read in this process, so it
    may become less, never more."""
    sync_ns: Measured
    """Host time spent waiting at the span boundary; 0 when the policy is not to wait."""
    busy_ns: Measured = NEEDS_KERNEL_RECORDS
    """Device time with a kernel running."""
    idle_ns: Measured = NEEDS_KERNEL_RECORDS
    """Device time with none running."""
    kernel_count: Measured = NEEDS_KERNEL_RECORDS
    """Kernels run."""
    idle_before_ns: Measured = NOT_SET
    """Device time from the end mark of the last span **of ours** on this stream to this start mark. What anybody
    else had running meanwhile, and an enclosing span's own work, is not known: the stream was idle at most so long."""
    device_start_ns: Measured
    """Device start on the host's axis (Unix time), true within ``uncertainty_ns``."""
    device_end_ns: Measured
    """Device end on the host's axis (Unix time), true within ``uncertainty_ns``."""
    uncertainty_ns: Measured
    """Half-width of the interval in which the true device start lies."""
    launch_gaps_included: Answer = "unknown"
    """Whether ``device_ns`` holds time in which the device waited for the host to launch. With ``no`` it is the work,
    and the device's own handing over."""

    warmth: Warmth = "unknown"
    """``cold`` when something was compiled, tuned, loaded, captured or initialised during the span."""
    tier: Tier | Missing = NOT_SET
    """How cold."""
    causes: tuple[Cause, ...] = ()
    """What made it cold."""
    compile_ns: Measured = NOT_SET
    """Host time in compiling, tuning and loading; overlapping causes counted once."""
    concurrent: tuple[Cause, ...] = ()
    """What ended on other threads of Python while the call ran: it makes this call no colder, but may have held a lock
    or a CPU that the call waited for. The eight costliest, in the order in which they ended."""
    first_call: bool
    """Whether this was the first call of its site in this process."""
    call_index: int
    """How many calls of the site came before, unsampled ones included."""

    mode: str | Missing = NOT_SET
    """How the work was launched, where gpu_timed decided it."""
    mode_requested: str | Missing = NOT_SET
    """The mode that was asked for."""
    mode_reason: str = ""
    """Why the mode that ran is not the one that was asked for, or what else is to be known of how it ran."""
    graph_memory_bytes: Measured = NOT_SET
    """What the CUDA Graphs of this site hold of the device's memory, of a call that was a replay of one: as of the
    last capture, their outputs and what they compute in included, copies of inputs and outputs not."""
    bound: Bound = "unknown"
    """What limits the call. From marks alone only ``device`` can be told, and nothing where ``device_ns`` is
    ``below_floor``."""

    vitals: Vitals | Missing = NOT_SET
    """State of the machine near the call: clocks, throttling, power, load."""
    vitals_age_ns: Measured = NOT_SET
    """How far its reading lies from the device's time of this call; 0 when it was read meanwhile."""

    sync: str
    """The sync policy: ``boundary``, ``deferred`` or ``device``."""
    resumptions: int = 1
    """How many times the call ran between suspensions; 1 for anything but a coroutine."""
    status: Status = "ok"
    """``error`` when the call raised an ``Exception`` or the device answered with an error; ``cancelled`` when it
    ended by something that is no ``Exception``: a cancellation, a ``close()``, an interrupt."""
    error: str = ""
    """What was raised, as ``type: message``."""
    quality: tuple[str, ...] = ()
    """Notes on what is doubtful about the numbers: ``interleaved``, ``result_on_other_device``, ``anchor_fault``,
    ``segments_overflow``, ``launch_queue_full`` (the launch waited for room in the device's queue: ``launch_ns``
    is not what launching costs), ``throttled`` (heat, power or a brake held the clocks down near the call),
    ``exceeds_peak`` (nobody waited for this work: it ran on another stream, or had not been launched yet),
    ``flops_counted`` (torch counted the operations of this very call, which costs time), ``capture_awaited`` (before it
    waited for the whole device, the call waited for the end of another thread's CUDA Graph capture, 0.1 s at the most:
    that is in ``device_ns``), and these:

    ``cudagraphs_skipped``: torch made no CUDA Graph of something it compiled in this or an earlier call of the site;
    ``mode_reason`` says why.

    ``compile_limit_reached``: torch compiles this function for no further inputs, in this or an earlier call of the
    site; ``not_compiled``: it could not compile it. Such calls are warm and may have run uncompiled; ``mode_reason``
    says which function.

    ``new_shape_cudnn_benchmark``: ``torch.backends.cudnn.benchmark`` is on and the tensors of the call differ in shape,
    strides, dtype, device, alignment or thread from those of the site's recorded calls before: a convolution may have
    tuned itself, so the call is not ``warm``. ``inputs_unseen_cudnn_benchmark``: it is on, and the call shows no
    tensors by which to tell.

    Two are told by the floor:

    ``below_floor``: ``device_ns`` is hardly more than ``floor_ns``: what is left is less than handing over to a kernel
    takes (1.25 µs), and may be the marks' own: take it for "next to nothing", and compare it with nothing.

    ``no_work_on_stream``: the call took the host long, and still ``device_ns`` is hardly more than ``floor_ns``. What
    the call did, it did on another stream, on the host, or not at all; ``sync="device"`` counts other streams.
    It is told only where the device was behind when the call began. On an idle stream the pair of marks lasts as
    long as the call, whatever is in it: there ``device_min_ns`` of 0 says that it may be nothing, and no note is
    made, for a function of many small launches reads the same."""
    work: WorkDone | Missing = NOT_SET
    """What the call had to do, where ``work=`` or ``span.set_work()`` said it, and how fast that was."""

    def __repr__(self) -> str:
        """Show what was measured, and each reason for what was not once."""
        shown: list[str] = []
        missing: dict[str, list[str]] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Missing):
                if value not in (NOT_SET, NEEDS_KERNEL_RECORDS):
                    missing.setdefault(value.reason, []).append(item.name)
            elif value != item.default and item.name not in _IDENTITY:
                shown.append(f"{item.name}={dict(value) if isinstance(value, Mapping) else value!r}")
        shown += [f"{'/'.join(names)}=Missing({reason!r})" for reason, names in missing.items()]
        return f"Record({', '.join(shown)})"


_IDENTITY: Final = frozenset({"process_id", "thread_id", "attributes"})
