"""``gpu-timed run``: a program with some of its functions timed, and no change to its code."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpu_timed import current
from gpu_timed.cli import command as words
from gpu_timed.cli import program
from gpu_timed.compile_caches import pin_caches
from gpu_timed.delivery import LOSSES
from gpu_timed.errors import ConfigurationError, unknown_value
from gpu_timed.mode_values import parse_rules, unmatched
from gpu_timed.settings import PIN_CACHES_VARIABLE, TARGETS_VARIABLE
from gpu_timed.targets import AppliedTargets, apply_targets

_EXPORTERS: Final = ("console", "jsonl", "none", "otlp")
_OTEL: Final = "OTEL_TRACES_EXPORTER"
_DROPPED: Final = tuple(kind for kind in LOSSES if kind != "no_provider")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A program that can be run: everything that could be refused has been looked at."""

    program: words.Program
    targets: AppliedTargets

    def run(self) -> None:
        """Run it to its end. Raises SystemExit as the program does.

        SIGTERM, as long as the program leaves it as it is, ends it by SystemExit(143) in place of at once: exit
        handlers then deliver the spans, which is what a container's stop would else take from them.
        """
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _end)
        program.run(self.program, self.targets.script_names, self.targets.offer, self.targets.not_defined)


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)  # as a shell reports the end by a signal


def prepare(
    command: Sequence[str],
    *,
    targets: Sequence[str],
    exporter: str | None,
    out: Path | None,
    service_name: str | None,
    pin: str | None = None,
) -> Prepared:
    """Pin the caches, apply the targets and have an exporter ready.

    Raises:
        ConfigurationError: The command, a target or an option cannot be used.
        MissingExtraError: The exporter's package is not installed.
    """
    parsed = words.parse(command)
    asked = _exporter(exporter, out)
    if asked is None and service_name is not None:
        raise ConfigurationError(
            "--service-name needs --exporter: without one, spans go to the program's own provider."
        )
    named = [text for text in (os.environ.get(TARGETS_VARIABLE, ""), *targets) if text.strip()]
    current.settings()  # a GPU_TIMED_* variable that cannot be used is told now, and not by the program
    directory = pin if pin is not None else os.environ.get(PIN_CACHES_VARIABLE, "")
    if pin is not None or directory.strip():
        pin_caches(directory)
    if asked is not None:
        current.stand_by_exporter(asked, service_name=service_name, path=out, endpoint=None)
    applied = apply_targets(named, script=True)
    # The first to be registered is the last to run: after the spans were delivered, ours or the application's way.
    atexit.register(_summarise, applied, os.getpid())
    return Prepared(parsed, applied)


def _exporter(asked: str | None, out: Path | None) -> str | None:
    """Return which exporter is wanted: as asked, jsonl for a file, or what OpenTelemetry's variable says."""
    if asked is None and out is not None:
        return "jsonl"
    if asked is None:
        asked = os.environ.get(_OTEL, "").strip() or None
        if asked is not None and asked not in ("console", "none", "otlp"):
            raise ConfigurationError(
                f"{_OTEL}={asked!r} cannot be used by gpu-timed run, which knows console, none and otlp. "
                "Write --exporter, or run the program by opentelemetry-instrument, which knows more."
            )
    if asked is not None and asked not in _EXPORTERS:
        raise unknown_value("exporter", asked, _EXPORTERS)
    if asked == "jsonl" and out is None:
        raise ConfigurationError("--exporter jsonl needs --out: the file to append OTLP JSON lines to.")
    if out is not None and asked != "jsonl":
        raise ConfigurationError(f"--out belongs to --exporter jsonl, not to {asked}.")
    return asked


def _summarise(applied: AppliedTargets, process: int) -> None:
    """Say in one line what became of the spans and the targets."""
    if os.getpid() != process:
        return  # a child that was forked and ends by itself
    counts = current.ledger().snapshot()
    dropped = sum(counts.get(kind, 0) for kind in _DROPPED)
    if current.has_own_provider():
        said = f"{counts.get('exported', 0)} spans exported"
    elif counts.get("no_provider"):
        said = f"{counts['no_provider']} calls timed and sent nowhere (give --exporter or --out)"
    elif counts.get("handed_over"):
        said = f"{counts['handed_over']} calls handed to the program's own OpenTelemetry provider"
    else:
        said = "no call was timed"
    parts = [said, f"{dropped} dropped"]
    unseen = [state for state in applied.states if state.status in ("waiting", "missing", "refused")]
    words = {"waiting": "never imported", "missing": "not found", "refused": "refused"}
    if unseen:
        parts.append("targets not timed: " + ", ".join(f"{state.target} ({words[state.status]})" for state in unseen))
    elif not applied.states:
        parts.append("no targets (--target module:function)")
    held = current.held_settings()
    if held is not None and (lost := unmatched(parse_rules(held.mode), current.process_state().sites)):
        parts.append(f"modes of names that no span has: {', '.join(lost)}")
    try:
        sys.stderr.write(f"gpu-timed: {'; '.join(parts)}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # the program closed it
