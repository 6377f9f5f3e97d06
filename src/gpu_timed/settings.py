"""Settings: what can be said once for the whole process, in code or by ``GPU_TIMED_*`` variables."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, TypeAlias, get_args, get_type_hints

from gpu_timed.errors import ConfigurationError, unknown_value
from gpu_timed.ledger import logger
from gpu_timed.mode_values import parse_rules

SyncPolicy: TypeAlias = Literal["boundary", "deferred", "device"]
LatePolicy: TypeAlias = Literal["host", "device_only"]

SYNC_POLICIES: Final = frozenset(get_args(SyncPolicy))
LATE_POLICIES: Final = frozenset(get_args(LatePolicy))

TARGETS_VARIABLE: Final = "GPU_TIMED_TARGETS"
"""What to time by name, which is read where that is done: by ``gpu-timed run``, or OpenTelemetry's instrumentation."""
CACHE_VARIABLE: Final = "GPU_TIMED_CACHE_DIR"
"""Directory for what is measured once on a machine, which is read where that is needed: see :mod:`gpu_timed.peaks`."""
PIN_CACHES_VARIABLE: Final = "GPU_TIMED_PIN_CACHES"
"""Directory that caches of compiled code are pinned below, which is read by ``gpu-timed run``."""
READ_ELSEWHERE: Final = (TARGETS_VARIABLE, CACHE_VARIABLE, PIN_CACHES_VARIABLE)
"""Variables that are no process-wide setting."""

_LARGEST: Final = 10_000_000
_SHORTEST_INTERVAL_S: Final = 0.01
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off", ""})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Process-wide settings. A site's own options go before them."""

    disabled: bool = False
    """Measure nothing: a decorator returns the function itself. Read when decorating."""
    mode: str = ""
    """Modes of sites by name, over those in the code: ``decode*=cuda_graph,prefill=compile``, or one for all."""
    sync: SyncPolicy | None = None
    """Sync policy where a site names none; None means ``boundary`` for plain calls, ``deferred`` for coroutines."""
    late: LatePolicy = "host"
    """Which span waits for a deferred device time: the host span, or the device span alone."""
    device_spans: bool = True
    """Whether a second span shows the device's work; its numbers stand on the host span either way."""
    warmth: bool = True
    """Whether compilers and caches are watched, to tell cold calls from warm ones."""
    module_loads: bool = False
    """Whether CUDA modules that are loaded in a call are told among its causes. Needs the extra ``cupti``, and CUPTI
    for itself: no Nsight, and no ``torch.profiler`` of CUDA, beside it."""
    vitals: bool = True
    """Whether the machine's state (clocks, throttling, power, load) is read in the background, and put on spans."""
    vitals_interval_s: float = 1.0
    """Seconds between two readings of the machine's state, at least 0.01; 0 switches them off."""
    max_pending: int = 10_000
    """Spans that may wait for the device at once; beyond it calls are exported without a device time."""
    max_queue: int = 100_000
    """Finished spans that may wait for their sinks; beyond it they are dropped and counted."""
    poll_ms: float = 250.0
    """Milliseconds between two looks at pending marks."""
    exit_timeout_s: float = 5.0
    """Seconds the end of the process may take to resolve and hand over what is left."""

    def __post_init__(self) -> None:
        if not isinstance(self.mode, str):
            raise ConfigurationError(f"mode must be a text like decode*=cuda_graph, not {self.mode!r}.")
        parse_rules(self.mode)
        if self.sync is not None:
            check_sync(self.sync)
        check_late(self.late)
        for name in ("disabled", "device_spans", "warmth", "module_loads", "vitals"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        for name, kind, kind_name in (
            ("max_pending", int, "a whole number"),
            ("max_queue", int, "a whole number"),
            ("poll_ms", int | float, "a number"),
            ("exit_timeout_s", int | float, "a number"),
            ("vitals_interval_s", int | float, "a number"),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ConfigurationError(f"{name} must be {kind_name}, not {value!r}.")
            if name == "vitals_interval_s":
                if value != 0 and not value >= _SHORTEST_INTERVAL_S:
                    raise ConfigurationError(f"{name} must be at least 0.01, or 0 for no readings, not {value!r}.")
            elif not value > 0:
                raise ConfigurationError(f"{name} must be greater than 0, not {value!r}.")
            if value > _LARGEST:
                raise ConfigurationError(f"{name} must be at most {_LARGEST:g}, not {value!r}.")

    def with_values(self, **values: Any) -> Settings:
        """Return a copy with the *values* that are not None put in."""
        return replace(self, **{name: value for name, value in values.items() if value is not None})


def from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read ``GPU_TIMED_<NAME>`` for every setting.

    Raises:
        ConfigurationError: A variable has a value that cannot be used; the message names variable and fix.
    """
    hints = get_type_hints(Settings)
    values: dict[str, Any] = {}
    known = [*(f"GPU_TIMED_{field.name.upper()}" for field in fields(Settings)), *READ_ELSEWHERE]
    for field in fields(Settings):
        variable = f"GPU_TIMED_{field.name.upper()}"
        text = environment.get(variable)
        if text is None or not text.strip():  # as OpenTelemetry has it, empty means unset
            continue
        try:
            values[field.name] = _parse(hints[field.name], text.strip())
            Settings(**{field.name: values[field.name]})
        except ValueError as error:
            raise ConfigurationError(f"{variable}={text!r} cannot be used: {error}") from None
    for variable in environment:
        if variable.startswith("GPU_TIMED_") and variable not in known:
            near = difflib.get_close_matches(variable, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            with contextlib.suppress(Exception):  # a handler or filter of the application's that raises
                logger.warning("gpu_timed: unknown setting %s%s", variable, hint)
    return Settings(**values)


def _parse(hint: Any, text: str) -> Any:
    if hint is bool:
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise ValueError("write 1 or 0")
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise ValueError("write a whole number" if hint is int else "write a number") from None
    return text


def check_sync(value: object) -> None:
    """Raise ConfigurationError unless *value* is a sync policy."""
    if not isinstance(value, str) or value not in SYNC_POLICIES:
        raise unknown_value("sync policy", value, SYNC_POLICIES)


def check_late(value: object) -> None:
    """Raise ConfigurationError unless *value* says which span may be late."""
    if not isinstance(value, str) or value not in LATE_POLICIES:
        raise unknown_value("late policy", value, LATE_POLICIES)
