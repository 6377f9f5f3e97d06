"""A comparison as plain dictionaries and lists, of a stable shape: what is there keeps its name and meaning.

::

    {"schema": 1, "gpu_timed": "0.1.0", "name": "decode", "baseline": "eager", "refused": "",
     "arms": [{"name": "eager", "mode": "eager", "ran": "eager",
               "samples": {"block": [...], "wall_ns": [...], "launch_ns": [...], "device_ns": [...]},
               "timeline": {"source": "kineto", "kernels": 1105, "busy_ns": 2540000, ..., "typical": {...}}, ...}],
     "verdicts": [{"arm": "cuda_graph", "against": "eager", "word": "faster", "ratio": 0.14, "low": ..., ...}],
     "diagnoses": {"eager": {"bound": "launch", "sentences": [...], ...}},
     "break_evens": {...}, "environment": {...}, "notes": [...],
     "sweep": "batch", "points": [{"value": 1, "comparison": {...}}]}

The fields are those of :mod:`gpu_timed.arms`. Times end in ``_ns`` (nanoseconds). What was not measured is
``{"missing": reason, "detail": text}``, and never a number. Of the profiled steps only the typical one has its
kernels, as rows under ``columns``; ``name``, ``operator`` and ``within`` in them are indices into ``texts``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from gpu_timed._version import VERSION
from gpu_timed.arms import Comparison
from gpu_timed.record import Missing
from gpu_timed.step_timeline import ProfiledSteps, StepTimeline

SCHEMA: Final = 1
_COLUMNS: Final = ("start_ns", "end_ns", "name", "kind", "device", "stream", "operator", "within", "launch")
_TEXTS: Final = frozenset({"name", "operator", "within"})


def to_dict(found: Comparison) -> dict[str, Any]:
    """Return everything as plain dictionaries and lists."""
    return {"schema": SCHEMA, "gpu_timed": VERSION, **_fields(found)}


def to_json(found: Comparison, indent: int | None = None) -> str:
    """Return :func:`to_dict` as JSON text, in ASCII; *indent* as in :func:`json.dumps`."""
    return json.dumps(to_dict(found), indent=indent, allow_nan=False)


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, Missing):
        return {"missing": value.reason, "detail": value.detail}
    if isinstance(value, float) and not math.isfinite(value):
        return {"missing": "not_finite", "detail": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, ProfiledSteps):
        return _profiled(value)
    if is_dataclass(value):
        return _fields(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(held) for key, held in value.items()}
    if (as_dict := getattr(value, "_asdict", None)) is not None:  # a named tuple
        return {key: _plain(held) for key, held in as_dict().items()}
    if isinstance(value, (tuple, list)):
        return [_plain(held) for held in value]
    return repr(value)  # a swept value of the user's own


def _profiled(found: ProfiledSteps) -> dict[str, Any]:
    plain = {field.name: _plain(getattr(found, field.name)) for field in fields(found) if field.name != "steps"}
    plain["steps"] = [
        {
            "kernels": step.kernel_count,
            "copies": step.copy_count,
            "launches": step.launches,
            "busy_ns": step.busy_ns,
            "span_ns": step.span_ns,
            "gaps": len(step.gaps),
            "wall_ns": step.wall_ns,
        }
        for step in found.steps
    ]
    plain["typical"] = _step(found.typical)
    return plain


def _step(step: StepTimeline) -> dict[str, Any]:
    texts: dict[str, int] = {}
    rows = [
        [
            texts.setdefault(getattr(kernel, name), len(texts)) if name in _TEXTS else getattr(kernel, name)
            for name in _COLUMNS
        ]
        for kernel in step.kernels
    ]
    return {"columns": list(_COLUMNS), "rows": rows, "texts": list(texts), "busy_ns": step.busy_ns}
