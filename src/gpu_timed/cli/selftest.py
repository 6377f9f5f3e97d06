"""``gpu-timed selftest``: what :func:`gpu_timed.run_selftest` found, for a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gpu_timed.measure.campaign import Progress as Told
from gpu_timed.trials import Row, SelfTest, Verdict, worst

_STYLES: Final[dict[Verdict, str]] = {
    "ok": "green",
    "info": "cyan",
    "skipped": "dim",
    "fail": "bold red",
    "error": "bold red",
}
_WIDTH: Final = max(map(len, _STYLES))
_MOST_FAILURES: Final = 40
_BEYOND_ASCII: Final = "µ±─"
_OTHERS: Final = (
    "Medians in µs. width: from device_min_ns to device_ns. spread: of the errors where\n"
    "no gap is included. placed: kernels that lie in their device spans, ± stated, which\n"
    "is known to so much by itself. host: what a span costs the calling thread"
)


@contextmanager
def watched(console: Console) -> Iterator[Told]:
    """Show how far the test is, on *console*, as long as the block runs."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    # Drawn between rows only: a thread that draws would take the interpreter from what is measured.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("preparing", total=None)
        bar.refresh()

        def tell(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what, refresh=True)

        yield tell


def show(console: Console, found: SelfTest) -> None:
    """Print the figures, the tables, what failed, and the verdict."""
    encoding = getattr(console.file, "encoding", None) or "utf-8"
    try:
        _BEYOND_ASCII.encode(encoding)
    except UnicodeEncodeError:  # a terminal that cannot show a character must not end in a traceback
        plain = Console(file=io.StringIO(), width=console.width, no_color=True)
        _show(plain, found)
        text = plain.file.getvalue().replace("µ", "u").replace("±", "+-").replace("─", "-")  # type: ignore[attr-defined]
        console.file.write(text.encode(encoding, "replace").decode(encoding))
    else:
        _show(console, found)


def _show(console: Console, found: SelfTest) -> None:
    held = found.environment
    named = (f"{key} {held[key]}" for key in ("card", "driver", "torch", "triton", "python", "kernel") if held.get(key))
    _print(console, Text(f"gpu_timed {found.version}, {held.get('date', '')}: ", "bold").append(", ".join(named), ""))
    for row in found.rows:
        if row.section != "regime":
            _print(console, Text(f"  {row.verdict:{_WIDTH}}  ", _STYLES[row.verdict]).append(row.text, ""))
    regimes = [row for row in found.rows if row.section == "regime"]
    if regimes:
        _table(console, regimes, "Spans that hold the truth, by duration of the kernel", _share)
        _table(
            console,
            regimes,
            "How far device_ns lies from the truth, µs (~ with a launch gap in it, maybe)",
            _error,
        )
        _others(console, regimes)
        console.print()
    failed = [row for row in regimes if row.failed]
    for row in failed[:_MOST_FAILURES]:
        _print(
            console, Text(f"  {row.verdict:{_WIDTH}}  ", _STYLES[row.verdict]).append(f"{_where(row)}: {row.text}", "")
        )
    if len(failed) > _MOST_FAILURES:
        _print(console, Text(f"  and {len(failed) - _MOST_FAILURES} more: --json has all of them"))
    _print(console, Text("Verdict: ", "bold").append(found.verdict, "bold red" if found.exit_code else "green"))


def _table(console: Console, rows: Sequence[Row], title: str, cell: Callable[[Row], Text]) -> None:
    durations: list[int | None] = [*sorted({row.duration_ns for row in rows if row.duration_ns is not None})]
    if cell is _share:
        durations.append(None)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("regime", no_wrap=True)
    table.add_column("sync", no_wrap=True)
    for duration in durations:
        table.add_column("all" if duration is None else _duration(duration), justify="right", no_wrap=True)
    for name, sync in dict.fromkeys((row.name, row.sync) for row in rows):
        mine = {row.duration_ns: row for row in rows if (row.name, row.sync) == (name, sync)}
        cells = [cell(mine[duration]) if duration in mine else Text() for duration in durations]
        table.add_row(Text(name, _STYLES[worst(row.verdict for row in mine.values())]), sync, *cells)
    _print(console, Text(f"\n{title}", "bold"))
    console.print(table)


def _share(row: Row) -> Text:
    """Return the share of the spans that hold the truth, or the name of another check that fails."""
    check = row.check("interval")
    if check is None or check.value is None:
        return Text(row.verdict, _STYLES[row.verdict])
    others = [other.name for other in row.checks if other.verdict == "fail"]
    share = f"{100 * check.value:.3g} %"
    return Text(share if not others or "interval" in others else others[0], _STYLES[row.verdict])


def _error(row: Row) -> Text:
    bias, excess = row.values.get("bias_ns"), row.values.get("excess_ns")
    exact = row.check("exact")
    if bias is not None:
        return Text(_signed(bias), _STYLES["fail"] if exact is not None and exact.verdict == "fail" else "")
    return Text("-" if excess is None else f"~{_signed(excess)}", "dim")


def _signed(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e3:+.3g}"


def _others(console: Console, rows: Sequence[Row]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in ("regime", "sync"):
        table.add_column(column, no_wrap=True)
    for column in ("spans", "width", "spread", "placed", "stated", "known to", "host"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, sync in dict.fromkeys((row.name, row.sync) for row in rows):
        mine = [row for row in rows if (row.name, row.sync) == (name, sync) and row.duration_ns is not None]
        together = [row for row in rows if (row.name, row.sync) == (name, sync) and row.duration_ns is None]
        checks = [
            check for row in together if (check := row.check("placement")) is not None and check.value is not None
        ]
        style = "bold red" if any(check.verdict == "fail" for check in checks) else ""
        placed = f"{100 * min(check.value or 0.0 for check in checks):.3g} %" if checks else "-"
        table.add_row(
            name,
            sync,
            str(sum(row.spans for row in mine)),
            _us(mine, "width_ns"),
            _us(mine, "spread_ns"),
            Text(placed, style),
            *(_us(mine, value) for value in ("uncertainty_ns", "anchor_ns", "host_ns")),
        )
    _print(console, Text(f"\n{_OTHERS}"))
    console.print(table)


def _us(rows: Sequence[Row], value: str) -> str:
    held = sorted(row.values[value] for row in rows if row.values.get(value) is not None)
    return f"{held[len(held) // 2] / 1e3:.3g}" if held else "-"


def _where(row: Row) -> str:
    return f"{row.name}, {row.sync}, {_duration(row.duration_ns) if row.duration_ns is not None else 'all durations'}"


def _duration(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:g} ms" if nanoseconds >= 1e6 else f"{nanoseconds / 1e3:g} µs"  # noqa: PLR2004 - a millisecond


def _print(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True, highlight=False)
