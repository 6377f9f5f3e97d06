"""A comparison for a terminal: the answer first, then the figures, then what is to be known about them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gpu_timed.arms import Comparison, Verdict
from gpu_timed.views import words

_STYLES: Final = {"faster": "green", "slower": "red", "same": "cyan", "ambiguous": "yellow", None: "yellow"}
_NAME_COLUMNS: Final = 24
_BEYOND_ASCII: Final = {"µ": "u", "\N{MULTIPLICATION SIGN}": "x", "\N{EN DASH}": "-", "─": "-", "…": "."}


def show(console: Console, found: Comparison) -> None:
    """Print *found*."""
    encoding = getattr(console.file, "encoding", None) or "utf-8"
    try:
        "".join(_BEYOND_ASCII).encode(encoding)
    except (UnicodeEncodeError, LookupError):  # a terminal that cannot show a character must not end in a traceback
        plain = {ord(sign): ascii_ for sign, ascii_ in _BEYOND_ASCII.items()}
        console.file.write(text(found, console.width).translate(plain).encode("ascii", "replace").decode("ascii"))
    else:
        _show(console, found)


def text(found: Comparison, width: int = 100) -> str:
    """Return what :func:`show` prints, without colours, for a terminal of *width* columns."""
    held = io.StringIO()
    _show(Console(file=held, width=width, no_color=True), found)
    return held.getvalue()


def _show(console: Console, found: Comparison) -> None:
    _line(console, Text(found.name, "bold").append(_where(found), "dim"))
    if found.points:
        _swept(console, found)
    else:
        _answer(console, found)
        if found.arms and not found.refused:
            console.print(_figures(found))
    console.print()
    for sentence in words.honesty(found):
        _line(console, Text(sentence, "dim"), indent=2)
    for name, value in words.conditions(found):
        _line(console, Text(f"{name}: {value}", "dim"), indent=2)


def _answer(console: Console, found: Comparison, said: Sequence[str] = ()) -> None:
    """Print what was found, but for what has been *said*."""
    if found.refused and words.headline(found)[0] not in said:
        _line(console, Text(words.headline(found)[0], "bold yellow"))
    for verdict, sentence in () if found.refused else zip(found.verdicts, words.headline(found), strict=True):
        if sentence not in said:
            _line(console, Text(sentence, _style(verdict)))
    for sentence in words.troubles(found):
        if sentence not in said:
            _line(console, Text(sentence, "yellow"), indent=2)
    for heading, sentences in words.limits(found):
        _line(console, Text(heading, "bold"), indent=2)
        for sentence in sentences:
            _line(console, Text(sentence), indent=4)


def _figures(found: Comparison) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("")
    for arm in found.arms:
        table.add_column(Text(arm.name), justify="right", overflow="fold")
    for row in words.rows(found):
        table.add_row(row.name, *(Text(cell) for cell in row.cells))
    return table


def _swept(console: Console, found: Comparison) -> None:
    """Print a line for each arm at each value, then what each point says."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False)
    longest = max(len(arm.name) for point in found.points for arm in point.comparison.arms)
    table.add_column(Text(found.sweep))
    table.add_column(Text("arm"), min_width=min(longest, _NAME_COLUMNS), overflow="fold")
    for name in words.swept_names(found):
        table.add_column(Text(name), justify="right")
    before = None
    for value, arm, cells in words.swept(found):
        table.add_row("" if value == before else Text(value), Text(arm), *map(Text, cells))
        before = value
    console.print(table)
    everywhere = words.everywhere(found)
    if everywhere:
        _line(console, Text(f"\nAt every {found.sweep}", "bold"))
    for sentence in everywhere:
        _line(console, Text(sentence, "yellow"))
    for point in found.points:
        _line(console, Text(f"\n{found.sweep} = {point.value}", "bold"))
        _answer(console, point.comparison, everywhere)


def _where(found: Comparison) -> str:
    card = found.environment.card
    return f", on {card}" if isinstance(card, str) else ", on the host alone: no device was there"


def _style(verdict: Verdict) -> str:
    return f"bold {_STYLES[verdict.word]}"


def _line(console: Console, text: Text, *, indent: int = 0) -> None:
    """Print a line; on a terminal one that is too long goes on below itself, elsewhere it stays whole for ``grep``."""
    if console.is_terminal:
        console.print(Padding(text, (0, 0, 0, indent)), highlight=False)
    else:
        console.print(Text(" " * indent).append(text), soft_wrap=True, highlight=False)
