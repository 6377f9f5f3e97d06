"""``gpu-timed caches``: what :func:`gpu_timed.caches` found, for a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.text import Text

from gpu_timed.cache_facts import CacheFacts, CacheReport

_INDENT: Final = 4
_GIGA: Final = 1e9
_MEGA: Final = 1e6


def show(console: Console, report: CacheReport) -> None:
    """Print each cache that may be used here, then the others in one line, then what to do."""
    _print(
        console, Text(f"Started in {report.current_directory}, this program would keep compiled code here:\n", "bold")
    )
    others = []
    for cache in report.caches:
        if not cache.in_use:
            others.append(cache.title)
            continue
        _print(console, Text(f"  {cache.title}", "bold").append(f"  {_state(cache)}", _style(cache)))
        for line in _lines(cache):
            _print(console, Text(f"{'':{_INDENT}}{line}"))
    if others:
        _print(console, Text(f"\nNot found here: {'; '.join(others)}.", "dim"))
    _print(console, Text())
    _print(console, _verdict(report))


def _state(cache: CacheFacts) -> str:
    if not cache.enabled:
        return "nothing is kept"
    if cache.unusable:
        return "cannot be written"
    return "moves with the current directory" if cache.moving else f"moves with {cache.moves_with}"


def _style(cache: CacheFacts) -> str:
    if cache.moving or cache.unusable:
        return "yellow"
    return "green" if cache.enabled and cache.moves_with == "nothing" else "cyan"


def _lines(cache: CacheFacts) -> list[str]:
    lines = []
    if cache.path is not None:
        lines.append(f"{cache.path}  ({_decided(cache)})")
    if cache.exists:
        least = "" if cache.complete else "at least "
        if cache.size_bytes is not None:
            lines.append(f"{least}{cache.size_bytes / _MEGA:,.1f} MB in {cache.entries:,} entries{_free(cache)}")
    elif cache.obstructed:
        lines.append("something that is no directory stands there")
    elif cache.exists is False and cache.enabled:
        lines.append(f"not there yet{_free(cache)}")
    if cache.enabled:
        lines.append(
            f"cold again with {cache.cold_elsewhere}"
            if cache.moves_with != "source file"
            else "cold again where the source file lies elsewhere"
        )
    if cache.note:
        lines.append(cache.note)
    return lines


def _decided(cache: CacheFacts) -> str:
    if cache.decided_by == "current directory":
        return f"{cache.by} is relative" if cache.by else "below the current directory"
    if cache.decided_by in ("variable", "setting"):
        return f"{cache.by}"
    return f"the default; {cache.variable} names another" if cache.variable else "the default"


def _free(cache: CacheFacts) -> str:
    return "" if cache.free_bytes is None else f", {cache.free_bytes / _GIGA:,.1f} GB free"


def _verdict(report: CacheReport) -> Text:
    if not any(cache.in_use for cache in report.caches):
        return Text("No compiler that keeps a cache is installed here.")
    parts = []
    if report.moving:
        parts.append(f"{', '.join(report.moving)} move with the current directory")
    if report.not_writable:
        parts.append(f"{', '.join(report.not_writable)} cannot be written")
    if not parts:
        return Text("Nothing moves with the current directory. ", "green").append(
            "gpu_timed.pin_caches(directory) puts all of them in one place.", ""
        )
    text = f"Cold starts to expect: {'; '.join(parts)}. "
    return Text(text, "yellow").append("gpu_timed.pin_caches(directory), called first, puts them in one place.", "")


def _print(console: Console, text: Text) -> None:
    # A terminal that cannot show a character of a path must not end in a traceback.
    encoding = getattr(console.file, "encoding", None) or "utf-8"
    plain = text.plain
    if plain.encode(encoding, "replace").decode(encoding) != plain:
        text = Text(plain.encode(encoding, "replace").decode(encoding))
    console.print(text, soft_wrap=True, highlight=False)
