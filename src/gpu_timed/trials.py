"""What the self-test compares and what it says: single spans beside the truth, rows, and the whole.

:meth:`SelfTest.to_json` has a stable shape. What is there keeps its name and meaning; more may come.

::

    {"schema": 1, "gpu_timed": "0.1.0",
     "verdict": {"level": "fail", "text": "...", "exit_code": 1},
     "environment": {"card": "NVIDIA H200", "driver": "580.95.05", "date": "...", "torch": "2.11.0", ...},
     "rows": [{"section": "regime", "name": "queued", "sync": "boundary", "duration_ns": 20000, "verdict": "ok",
               "text": "...", "spans": 100,
               "checks": [{"name": "interval", "verdict": "ok", "value": 1.0, "budget": 0.99, "text": "..."}],
               "values": {"bias_ns": 1200, "spread_ns": 96, ...}}]}

Times end in ``_ns`` (nanoseconds); what is not known is ``null``. Verdicts are those of :data:`VERDICTS`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from gpu_timed.record import Answer, Measured

Verdict: TypeAlias = Literal["ok", "info", "skipped", "fail", "error"]

VERDICTS: Final[tuple[Verdict, ...]] = ("ok", "info", "skipped", "fail", "error")
"""Within its budget; shown, with no budget of its own; not tested, and why; outside its budget; could not be run."""
SCHEMA: Final = 1
FLOOR_NS: Final = 1_300
"""What a pair of marks may add to work that was queued: 1.25 µs on an H200, by steps of 32 ns. Where the device's own
floor was measured that counts, but never more than this."""
SHARE: Final = 0.99
"""Of the spans of a row: how many must keep each promise."""


class Stamp(NamedTuple):
    """What a kernel of known duration says of itself, in nanoseconds."""

    begin_ns: int | None
    """On the device's own timer, which has its own zero; None of a kernel that writes no stamps."""
    end_ns: int | None
    true_ns: int
    """How long it ran in truth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One span beside the truth about its one kernel. Nanoseconds."""

    true_ns: int
    """How long the kernel ran, by itself."""
    device_ns: Measured
    """As in :class:`~gpu_timed.record.Record`, and the next three too."""
    device_min_ns: Measured
    uncertainty_ns: Measured
    gaps: Answer = "unknown"
    reason: str = ""
    """Why there is no device time."""
    fault: bool = False
    """Whether its place on the host's axis contradicts the order of events."""
    right_place: bool = True
    """Whether the record names the device and the stream that the kernel was put on."""
    lead_ns: int | None = None
    """From the placed start of the span to the begin of the kernel, on the host's axis; None where nobody knows."""
    tail_ns: int | None = None
    """From the end of the kernel to the placed end of the span."""
    anchor_ns: int = 0
    """How far off the two before may be, for what is known of the kernel's own place."""
    host_ns: int = 0
    """What the span cost the calling thread: without the call itself, and without waiting for the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instrument:
    """How good the truth itself is, as measured on this machine. Nanoseconds."""

    floor_ns: int = FLOOR_NS
    """What a pair of marks may add: as measured of this device, or :data:`FLOOR_NS` where it could not be."""
    tick_ns: int = 1
    """Smallest step of the timer that the kernels spin on."""
    turnaround_ns: int = 0
    """From the end of a kernel to the begin of one queued right behind it: what starting and ending a kernel takes
    the device, which is work, and which no kernel can see of itself."""
    doubt: float = 0.0
    """By what part of itself the truth may be off: of kernels that do not time themselves."""
    least_ns: int = 0
    """Shorter kernels cannot be told from the steps of the timer."""


class Check(NamedTuple):
    """One promise held against one row."""

    name: str
    """``measured``, ``place``, ``interval``, ``exact``, ``placement`` or ``order``; in rows of the section ``cupti``,
    which are of all durations, with an underscore and the kernel's duration in nanoseconds behind it."""
    verdict: Verdict
    value: float | None
    budget: float | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing that was measured, held against its budget if it has one."""

    section: str
    """``host``, ``device``, ``regime`` or ``cupti``: the same regimes, held against CUPTI's kernel records."""
    name: str
    """What was measured; of a regime, how the work was launched."""
    verdict: Verdict
    """The worst of its checks; of a row without checks, what became of it."""
    text: str
    """The same in words."""
    sync: str | None = None
    """Sync policy of the spans of a regime."""
    duration_ns: int | None = None
    """How long the kernels of a regime were asked to run; None of all durations together."""
    spans: int = 0
    """How many spans were looked at."""
    checks: tuple[Check, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    """Figures: plain JSON values."""

    @property
    def failed(self) -> bool:
        """Whether it is outside its budget, or could not be run."""
        return self.verdict in ("fail", "error")

    def check(self, name: str) -> Check | None:
        """Return the check called *name*, or None."""
        return next((check for check in self.checks if check.name == name), None)


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What :func:`gpu_timed.run_selftest` found."""

    version: str
    """Version of gpu_timed."""
    environment: Mapping[str, Any]
    """Card, driver, versions, date, how the kernels of known duration were made."""
    rows: tuple[Row, ...]

    @property
    def exit_code(self) -> int:
        """What the command line answers: 1 where a row failed, else 0."""
        return int(any(row.failed for row in self.rows))

    @property
    def verdict(self) -> str:
        """One sentence: what was proved, and what was not."""
        counts = Counter(row.verdict for row in self.rows)
        tested = [row for row in self.rows if row.section == "regime" and row.verdict in ("ok", "fail", "error")]
        bad = counts["fail"] + counts["error"]
        if bad:
            named = ", ".join(dict.fromkeys(row.name for row in self.rows if row.failed))
            return f"Failed: {bad} of {counts['ok'] + bad} rows with a budget are outside it ({named})."
        if not tested:
            return "Nothing of a device was tested: " + next(
                (row.text for row in self.rows if row.section == "device" and row.verdict == "skipped"), "there is none"
            )
        spans = sum(row.spans for row in tested if row.duration_ns is not None)
        return (
            f"Passed: {counts['ok']} rows within their budgets, {spans} spans held against kernels of known duration."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dictionaries and lists, in the shape shown at the top of this module."""
        return {
            "schema": SCHEMA,
            "gpu_timed": self.version,
            "verdict": {
                "level": worst(row.verdict for row in self.rows),
                "text": self.verdict,
                "exit_code": self.exit_code,
            },
            "environment": dict(self.environment),
            "rows": [
                {
                    "section": row.section,
                    "name": row.name,
                    "sync": row.sync,
                    "duration_ns": row.duration_ns,
                    "verdict": row.verdict,
                    "text": row.text,
                    "spans": row.spans,
                    "checks": [check._asdict() for check in row.checks],
                    "values": dict(row.values),
                }
                for row in self.rows
            ],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON text, in ASCII; *indent* as in :func:`json.dumps`."""
        return json.dumps(self.to_dict(), indent=indent, default=str)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of *verdicts*; ``ok`` where none is worse than shown or skipped, and one is."""
    found = set(verdicts)
    for verdict in ("error", "fail", "ok", "skipped", "info"):
        if verdict in found:
            return verdict
    return "info"
