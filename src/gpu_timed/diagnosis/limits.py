"""How much of each limit of the process is used, and what was dropped for want of room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gpu_timed.bounds import Limit
from gpu_timed.findings import Finding

_NEARLY: Final = 0.9
"""Part of a limit from which on it is said: what is lost beyond it, is not lost yet."""


def findings(limits: Sequence[Limit]) -> Iterator[Finding]:
    """Report *limits*: all of them in one finding, and each that costs or soon may cost the user numbers in its own."""
    values = {
        each.name: {"limit": each.most, "in_use": each.in_use, "dropped": each.dropped, "what": each.what}
        for each in limits
    }
    sized = [each for each in limits if each.in_use is not None]
    first = max(sized, key=_part, default=None)
    shown = "" if first is None else f"; the fullest: {first.in_use:,} of {first.most:,} {first.what}"
    short = [each for each in limits if each.loses and (each.dropped or _part(each) >= _NEARLY)]
    text = f"{len(limits)} limits on what gpu_timed keeps, {len(short) or 'none'} of them a loss{shown}"
    yield Finding("bounds", "ok", text, values={"limits": values})
    for each in short:
        held = "" if each.in_use is None else f"{each.in_use:,} of {each.most:,} in use, "
        yield Finding(
            f"bounds.{each.name}",
            "warning" if each.dropped else "note",
            f"{each.what}: {held}{each.dropped or 0:,} beyond the limit of {each.most:,}",
            "see the findings above: what was dropped is counted there too" if each.dropped else "",
            {"limit": each.most, "in_use": each.in_use, "dropped": each.dropped},
        )


def _part(limit: Limit) -> float:
    return (limit.in_use or 0) / limit.most
