"""What an examination finds: findings, in sections, with a verdict. Made of plain values.

:meth:`Diagnosis.to_json` has a stable shape. What is there keeps its name and meaning; more may come.

::

    {"schema": 1, "gpu_timed": "0.1.0",
     "verdict": {"level": "problem", "text": "Not ready: ...", "exit_code": 1},
     "sections": [{"name": "versions", "level": "ok",
                   "findings": [{"key": "torch", "level": "ok", "text": "torch 2.11.0, built for CUDA 13.0",
                                 "fix": "", "values": {"version": "2.11.0", "cuda": "13.0"}}]}]}

Every section of :data:`SECTIONS` is there, in that order. Levels are those of :data:`LEVELS`. ``key`` names a
finding within its section, ``fix`` is what to do about it or empty. Times in ``values`` end in ``_ns``
(nanoseconds), sizes in ``_bytes`` or ``_mb`` (10^6 bytes); what is not known is ``null``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

Level: TypeAlias = Literal["ok", "note", "warning", "problem"]

LEVELS: Final[tuple[Level, ...]] = ("ok", "note", "warning", "problem")
"""From good to bad: as it should be, worth knowing, may not be what you want, will not work."""
SECTIONS: Final = (
    "versions",
    "devices",
    "clock",
    "vitals",
    "export",
    "settings",
    "process",
    "hooks",
    "caches",
    "targets",
)
SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at, and what is to be done about it."""

    key: str
    """Names it within its section, stable between versions."""
    level: Level
    """One of :data:`LEVELS`."""
    text: str
    """What was found, in words."""
    fix: str = ""
    """The command or change that mends it, where there is something to mend."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs: plain JSON values."""


Source: TypeAlias = Callable[[], Iterable[Finding]]
"""The port by which a room reports its findings: called without arguments; may be slow, and may raise."""


@dataclass(frozen=True, slots=True)
class Section:
    """The findings about one subject."""

    name: str
    """One of :data:`SECTIONS`."""
    findings: tuple[Finding, ...]
    """In the order in which they are to be read."""

    @property
    def level(self) -> Level:
        """The worst level among the findings."""
        return worst(finding.level for finding in self.findings)

    def get(self, key: str) -> Finding | None:
        """Return the first finding named *key*, or None."""
        return next((finding for finding in self.findings if finding.key == key), None)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What :func:`gpu_timed.diagnose` found."""

    version: str
    """Version of gpu_timed."""
    sections: tuple[Section, ...]
    """Every section of :data:`SECTIONS`, in that order."""
    verdict: str
    """One sentence: whether calls will be measured and delivered, and if not, why."""

    @property
    def level(self) -> Level:
        """The worst level of all sections."""
        return worst(section.level for section in self.sections)

    @property
    def exit_code(self) -> int:
        """What the command line answers: 1 where there is a problem, else 0."""
        return int(self.level == "problem")

    def section(self, name: str) -> Section:
        """Return the section called *name*.

        Raises:
            KeyError: There is none of that name.
        """
        for section in self.sections:
            if section.name == name:
                return section
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dictionaries and lists, in the shape shown at the top of this module."""
        return {
            "schema": SCHEMA,
            "gpu_timed": self.version,
            "verdict": {"level": self.level, "text": self.verdict, "exit_code": self.exit_code},
            "sections": [
                {
                    "name": section.name,
                    "level": section.level,
                    "findings": [
                        {
                            "key": finding.key,
                            "level": finding.level,
                            "text": finding.text,
                            "fix": finding.fix,
                            "values": dict(finding.values),
                        }
                        for finding in section.findings
                    ],
                }
                for section in self.sections
            ],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON text, in ASCII; *indent* as in :func:`json.dumps`."""
        return json.dumps(self.to_dict(), indent=indent, default=str)


def worst(levels: Iterable[Level]) -> Level:
    """Return the worst of *levels*; ``ok`` of none."""
    found = set(levels)
    for level in reversed(LEVELS):
        if level in found:
            return level
    return "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What is known of a device without making a context on it."""

    index: int
    """As CUDA counts, so after ``CUDA_VISIBLE_DEVICES``; as NVML counts where only NVML could be asked."""
    uuid: str | None
    """``GPU-…`` or, of an instance, ``MIG-…``."""
    name: str | None
    """Product name."""
    memory_bytes: int | None
    """Memory of the device or instance."""
    compute_mode: str
    """``default``, ``exclusive``, ``prohibited`` or ``unknown``."""
    mig: bool | None = None
    """Whether it is a MIG instance; None where nobody could tell."""
    in_use: bool = False
    """Whether this process has a context on it already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The devices of this process, or why there are none."""

    devices: tuple[DeviceFacts, ...] = ()
    """In the order of their indices."""
    source: str = "none"
    """Who told: ``driver``, ``nvml`` or ``none``."""
    absent: str = ""
    """Why there are none: ``no_driver``, ``no_device``, ``not_initialised``, or the driver's own error name."""
    driver_version: str | None = None
    """Version of the kernel driver, such as ``580.95.05``."""
    nvml: str = ""
    """Why NVML could not be asked; empty where it could."""
