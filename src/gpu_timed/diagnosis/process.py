"""What has happened to the spans of this process so far, in words, and what mends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from gpu_timed.findings import Finding, Level
from gpu_timed.mode_values import parse_rules, unmatched

_SITES_SHOWN: Final = 20
_NAMES_SHOWN: Final = 50
ASK_INSIDE: Final = "to see those of a service, call gpu_timed.diagnose() inside it"


class Process(NamedTuple):
    """The state of the process, as counts and names."""

    started: bool
    """Whether a call was ever measured, so that there is an engine."""
    resolving: bool
    """Whether the resolver's thread runs."""
    pending: int
    """Spans that wait for the device or to be handed on."""
    max_pending: int
    """How many may."""
    captures: int
    """``capture()`` blocks begun so far."""
    counts: Mapping[str, int]
    """The ledger."""
    sites: Mapping[str, int]
    """Calls of each site so far, unsampled ones included."""
    not_timed: Sequence[str]
    """Names met inside compiled regions."""


class _Kind(NamedTuple):
    level: Level
    words: str
    fix: str = ""


KINDS: Final[Mapping[str, _Kind]] = {
    "handed_over": _Kind("ok", "spans handed to the OpenTelemetry provider"),
    "exported": _Kind("ok", "spans taken by the receiver"),
    "batched": _Kind("ok", "spans queued for export"),
    "no_provider": _Kind(
        "warning",
        "spans measured and sent nowhere: no provider is set",
        "set one, or call gpu_timed.configure(exporter=...)",
    ),
    "overflow": _Kind(
        "warning",
        "spans without a device time: too many were waiting for the device",
        "raise max_pending (GPU_TIMED_MAX_PENDING), or thin with every=",
    ),
    "dropped_queue_full": _Kind(
        "warning",
        "spans dropped: they came faster than they could be handed on",
        "thin with every= or sampling, or raise max_queue (GPU_TIMED_MAX_QUEUE)",
    ),
    "dropped_in_batch": _Kind(
        "warning", "spans dropped by OpenTelemetry's full batch queue", "raise OTEL_BSP_MAX_QUEUE_SIZE"
    ),
    "export_failed": _Kind(
        "warning", "spans that the receiver refused or did not take in time", "see the export section"
    ),
    "rejected": _Kind("warning", "spans that the collector took in and rejected", "see the log for what it said"),
    "collector_rejected": _Kind("warning", "answers that said that spans were rejected", "see the log for the first"),
    "collector_redirected": _Kind(
        "warning", "answers that sent us elsewhere: nothing was delivered", "name the address it redirects to"
    ),
    "grpc_after_fork": _Kind(
        "warning",
        "exports over gRPC in a child of a process that had exported: gRPC does not survive that",
        "use protocol='http/protobuf', or configure in the child",
    ),
    "lost_in_sink": _Kind("warning", "spans lost because what they were handed to raised", "see the log for the first"),
    "pending_at_exit": _Kind("warning", "spans given up at the end, waiting for the device", "raise exit_timeout_s"),
    "after_shutdown": _Kind("warning", "spans that ended after shutdown()", "call shutdown() last"),
    "device_error": _Kind(
        "warning",
        "spans that met an error of the device",
        "it may come from earlier work: CUDA_LAUNCH_BLOCKING=1 tells",
    ),
    "mark_failed": _Kind("warning", "spans that the driver refused to mark", "their records say why (device_ns)"),
    "anchor_fault": _Kind("note", "spans whose place in time contradicted what was known of the device's clock"),
    "context_moved": _Kind("note", "spans whose caller had left another context behind"),
    "boundary_without_asyncio": _Kind(
        "note", "coroutine spans not awaited at their end: the event loop is not asyncio's"
    ),
    "not_timed_in_compiled_region": _Kind("note", "names inside compiled regions, not timed: see targets"),
    "sampler_raised": _Kind("warning", "calls not recorded because the sampler raised", "see the log for the first"),
    "write_raised": _Kind(
        "warning", "writes to a span that its provider did not take: a status or link that is none", "see the log"
    ),
    "attributes_raised": _Kind("warning", "calls whose attributes= function raised", "see the log for the first"),
    "work_raised": _Kind(
        "warning", "calls whose work= function raised, or returned no Work", "see the log for the first"
    ),
    "mode_not_honoured": _Kind(
        "warning", "calls that ran in another mode than they were asked to", "their spans say why (mode_reason)"
    ),
    "mode_raised": _Kind("warning", "calls whose mode= function raised, or returned no mode", "see the log"),
    "use_mode_disabled": _Kind(
        "note", "use_mode() blocks under GPU_TIMED_DISABLED", "give the sites they are about mode='eager'"
    ),
    "profiled_pass": _Kind(
        "note",
        "passes of compare() that recorded kernels: launches are slower in this process since then",
        "compare in a process of its own",
    ),
    "inputs_unreadable": _Kind("note", "calls with a tensor whose shape could not be read while cuDNN tunes itself"),
    "propagation": _Kind(
        "warning",
        "times that a trace did not go along with a request: a propagator raised",
        "see the log for the first",
    ),
    "provider_raised": _Kind("warning", "times that the provider raised while flushing", "see the log for the first"),
    "vitals_given_up": _Kind(
        "warning",
        "devices whose state is no longer read: NVML failed again and again",
        "look at nvidia-smi; everything else is measured as before",
    ),
    "vitals_late": _Kind("note", "readings of the machine's state that took longer than their interval: not used"),
    "vitals_not_started": _Kind("note", "times that no thread for the machine's state could be started"),
    "vitals_too_many": _Kind("note", "spans on devices beyond the limit, whose state is not read"),
    "writes_dropped": _Kind(
        "warning", "attributes and events beyond 10,000 of one span, dropped", "open a span for each part of the work"
    ),
    "segments_overflow": _Kind(
        "note", "resumptions beyond 4,096 of one call, not measured", "open a gpu_span for each part of the work"
    ),
    "other": _Kind("warning", "losses or faults of further kinds, not told apart", "see the log"),
    "sites_overflow": _Kind("warning", "span names beyond the limit", "take names from code, never from data"),
    "thread_not_started": _Kind("warning", "times that no thread could be started", "raise the limit on threads"),
    "resolver_stuck": _Kind("warning", "times that gpu_timed's thread did not end in time", "see the log"),
    "no_room_on_the_stack": _Kind("note", "calls too deep in recursion to be measured as well"),
    "logging_failed": _Kind("note", "warnings that the application's logging did not take"),
    "cache_watch_skipped": _Kind(
        "note", "times that a watched cache was not looked at, to spare the time: what was built then is not told"
    ),
    "cache_watch_incomplete": _Kind(
        "note",
        "times that a watched cache was too large to be looked at as a whole",
        "name a directory below it to gpu_timed.watch_cache()",
    ),
    "import_hook": _Kind(
        "warning", "reactions to an import that failed", "please report it, with the log's first line"
    ),
}
"""Every kind that is counted and is no fault of gpu_timed's own."""
SINK: Final = "sink_"
INTERNAL: Final = frozenset(
    {
        *("start", "enter", "leave", "mend", "wait", "submit", "settle", "suspend", "resume", "detach"),
        *(
            "asking",
            "reading",
            "describing",
            "release",
            "unhindered",
            "resolver",
            "unreadable",
            "probe_attach",
            "probe_detach",
            "vitals",
            "memory",
            "counting",
            "mode",
        ),
    }
)
"""Kinds that are a fault inside gpu_timed."""


def findings(process: Process) -> Iterator[Finding]:
    """Report what became of the spans of *process*."""
    if not process.started and not process.sites and not process.counts:
        yield Finding(
            "sites", "note", f"nothing is decorated or measured in this process; {ASK_INSIDE}", values={"sites": {}}
        )
    else:
        yield _sites(process.sites)
    full = process.pending >= process.max_pending
    yield Finding(
        "pending",
        "warning" if full else "ok",
        f"{process.pending} spans are waiting for the device or to be handed on, of {process.max_pending:,} that may",
        "raise max_pending (GPU_TIMED_MAX_PENDING), or thin with every=" if full else "",
        {"pending": process.pending, "max_pending": process.max_pending},
    )
    yield Finding(
        "engine",
        "ok",
        f"gpu_timed's thread {'runs' if process.resolving else 'is not running'}; {process.captures} captures so far",
        values={"started": process.started, "resolving": process.resolving, "captures": process.captures},
    )
    for kind, count in sorted(process.counts.items()):
        if count:
            yield _count(kind, count)


def unmatched_modes(process: Process, rules: str) -> Iterator[Finding]:
    """Report those of *rules* (``GPU_TIMED_MODE``, ``configure(mode=…)``) that name no span of *process* so far."""
    for match in unmatched(parse_rules(rules), process.sites):
        yield Finding(
            f"mode.{match}",
            "warning",
            f"the mode of {match!r} is given, and no span has that name so far",
            "look at the names among the sites; a match may be a glob, as in 'decode*=compile'",
            {"match": match},
        )


def targets(process: Process) -> Iterator[Finding]:
    """Report the names that cannot be timed where they are called."""
    names = sorted(process.not_timed)
    for name in names[:_NAMES_SHOWN]:
        yield Finding(
            f"not_timed.{name}",
            "warning",
            f"{name} is called inside a compiled region and not timed there",
            "decorate what you compile instead: gpu_timed(torch.compile(f))",
            {"name": name},
        )
    if len(names) > _NAMES_SHOWN:
        yield Finding("not_timed", "note", f"and {len(names) - _NAMES_SHOWN} more names", values={"names": len(names)})
    if not names:
        yield Finding("not_timed", "ok", f"no decorated call met inside a compiled region; {ASK_INSIDE}")


def _sites(sites: Mapping[str, int]) -> Finding:
    called = sorted(sites.items(), key=lambda item: -item[1])[:_SITES_SHOWN]
    shown = ", ".join(f"{name} ({calls:,})" for name, calls in called[:5])
    more = f", and {len(sites) - 5} more" if len(sites) > 5 else ""  # noqa: PLR2004 - as many as stand in a line
    text = f"{len(sites)} sites, {sum(sites.values()):,} calls so far: {shown}{more}"
    return Finding("sites", "ok", text, values={"known": len(sites), "sites": dict(called)})


def _count(kind: str, count: int) -> Finding:
    values = {"kind": kind, "count": count}
    known = KINDS.get(kind)
    if known is None and kind.startswith(SINK):
        known = _Kind("warning", f"times that {kind.removeprefix(SINK)} raised", "see the log for the first")
    if known is None:
        fix = "please report it, with the log's first line about it"
        return Finding(kind, "warning", f"{count:,} faults inside gpu_timed, of kind {kind!r}", fix, values)
    return Finding(kind, known.level, f"{count:,} {known.words}", known.fix, values)
