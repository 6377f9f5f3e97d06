"""Reads what torch's profiler (Kineto) writes: Chrome's trace format, a public one, with times to the nanosecond.

What is taken of it, as torch 2.6 to 2.13 write it: complete events (``"ph": "X"``) with ``cat``, ``name``, ``tid``,
``ts`` and ``dur`` in microseconds since ``baseTimeNanoseconds``, and of ``args`` the ``correlation``, ``device`` and
``stream``. Categories: ``kernel``, ``gpu_memcpy``, ``gpu_memset``; ``cuda_runtime``, ``cuda_driver``; ``cpu_op``,
``user_annotation``.
"""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple

from gpu_timed.analysis.timeline import HostSpan
from gpu_timed.step_timeline import Execution, Kernel

_RAN: Final[dict[str, Execution]] = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_CALLS: Final = ("cuda_runtime", "cuda_driver")
_OPERATORS: Final = ("cpu_op", "user_annotation")
_DECIMALS: Final = 3
_MICROSECOND_NS: Final = 1000


class Recorded(NamedTuple):
    """What a trace holds. Nanoseconds since the trace's own zero."""

    executions: tuple[Kernel, ...]
    calls: tuple[HostSpan, ...]
    operators: tuple[HostSpan, ...]
    """Operators and annotations, without the steps."""
    steps: tuple[tuple[int, int], ...]
    """Begin and end of each annotation that marks a step, in order."""
    unread: int
    """Events of these kinds that could not be understood."""


def read(text: str | bytes, step: str) -> Recorded:
    """Read a trace.

    Args:
        text: The JSON.
        step: Name of the annotations that mark steps.

    Raises:
        ValueError: It is no such trace.
    """
    # A time of microseconds since the epoch has more digits than a float.
    trace = json.loads(text, strict=False, parse_float=str)
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise ValueError("it has no list of traceEvents")  # noqa: TRY004 - of its text, not of an argument's type
    executions: list[Kernel] = []
    calls: list[HostSpan] = []
    operators: list[HostSpan] = []
    steps: list[tuple[int, int]] = []
    unread = 0
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        kind = event.get("cat")
        try:
            if kind in _RAN:
                executions.append(_execution(event, _RAN[kind]))
            elif kind in _CALLS:
                calls.append(_host(event, int(event["args"]["correlation"])))
            elif kind in _OPERATORS:
                span = _host(event, 0)
                if span.name == step:
                    steps.append((span.start_ns, span.end_ns))
                else:
                    operators.append(span)
        except (KeyError, TypeError, ValueError, InvalidOperation):
            unread += 1
    return Recorded(tuple(executions), tuple(calls), tuple(operators), tuple(sorted(steps)), unread)


def _execution(event: dict[str, Any], kind: Execution) -> Kernel:
    args = event["args"]
    start = _nanoseconds(event["ts"])
    return Kernel(
        start,
        start + _nanoseconds(event["dur"]),
        str(event["name"]),
        kind,
        device=int(args.get("device", 0)),
        stream=int(args.get("stream", 0)),
        launch=int(args.get("correlation", 0)),
    )


def _host(event: dict[str, Any], correlation: int) -> HostSpan:
    start = _nanoseconds(event["ts"])
    thread = event.get("tid", 0)
    return HostSpan(
        start,
        start + _nanoseconds(event["dur"]),
        str(event["name"]),
        thread if isinstance(thread, int) else hash(thread),
        correlation,
    )


def _nanoseconds(microseconds: int | str) -> int:
    """Return a time of the trace in whole nanoseconds, exactly."""
    if isinstance(microseconds, int):
        return microseconds * _MICROSECOND_NS
    whole, point, rest = microseconds.partition(".")
    if point and rest.isdigit() and len(rest) == _DECIMALS and whole.isdigit():
        return int(whole + rest)
    return int(Decimal(microseconds) * _MICROSECOND_NS)
