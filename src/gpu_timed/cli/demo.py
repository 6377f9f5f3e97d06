"""``gpu-timed demo``: a small decoder in plain torch, with a span for the prefill and one for each token."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gpu_timed.cli.decoder import Decoder, load_torch, pick_device
from gpu_timed.configuration import configure
from gpu_timed.current import flush
from gpu_timed.errors import ConfigurationError
from gpu_timed.record import Measured, Missing, Record
from gpu_timed.testing import capture
from gpu_timed.timed import gpu_span, gpu_timed

PROMPT = 128


def run(console: Console, *, out: Path, tokens: int, device: str) -> None:
    """Run the demo and print its table.

    Raises:
        MissingExtraError: torch or the JSON-lines exporter is not installed.
        ConfigurationError: The device is not there, or *out* cannot be written.
    """
    torch = load_torch()
    place = pick_device(torch, device)
    if out.exists():
        try:
            out.unlink()
        except OSError as error:
            raise ConfigurationError(f"--out {out} cannot be written: {error.strerror}.") from error
    configure(service_name="gpu-timed-demo", exporter="jsonl", path=out)

    model = Decoder(torch, place)
    prefill = gpu_timed(model.prefill, name="prefill")
    decode = gpu_timed(model.decode, name="decode", sync="deferred")

    where = torch.cuda.get_device_name() if place == "cuda" else "CPU"
    console.print(f"A decoder of {model.parameters_m:.0f} M parameters, {PROMPT} tokens in, {tokens} out, on {where}.")
    with capture() as records, Progress(console=console, transient=True) as progress:
        task = progress.add_task("decoding", total=tokens + 1)
        for round_ in ("first", "second"):  # the second round is what a warmed-up service does
            with gpu_span("generate", attributes={"round": round_}):
                token = prefill(model.prompt(PROMPT))
                progress.advance(task)
                for _ in range(tokens):
                    token = decode(token)
                    progress.advance(task, 0.5)
        replay = model.replayed(token)
        if replay is not None:
            replay = gpu_timed(replay, name="replay", sync="deferred")
            for _ in range(tokens):
                replay()
    delivered = flush(30)
    console.print(_table(records))
    console.print("\n" + _explanation(records))
    lines = len(out.read_text().splitlines()) if out.exists() else 0
    if not delivered or not lines:
        raise ConfigurationError(f"the spans did not all reach {out}: {dict(delivered.counts)}.")
    console.print(
        f"\nWrote [bold]{out}[/]: the same spans as a trace. To see it, start Jaeger,\n"
        "    docker run --rm -p 16686:16686 cr.jaegertracing.io/jaegertracing/jaeger:latest\n"
        "open http://localhost:16686, choose Upload, and give it this file.",
        highlight=False,
        soft_wrap=True,  # or a long command would be broken in the middle
    )


def _table(records: Sequence[Record]) -> Table:
    table = Table(
        title="What each span says", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )
    table.add_column("span", no_wrap=True)
    table.add_column("calls", justify="right", no_wrap=True)
    for column in ("launch", "queue", "device", "sync"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    for name in ("generate", "prefill", "decode", "replay"):
        mine = [record for record in records if record.name == name]
        for label, group in (("first", mine[:1]), (f"{len(mine) - 1} later", mine[1:])):
            if group:
                table.add_row(name, label, *_cells(group))
    return table


def _cells(group: Sequence[Record]) -> list[str]:
    least, most = (_median([pick(record) for record in group]) for pick in (_device_min, _device))
    device = most if least == most else f"{least} to {most}"
    return [
        _median([record.launch_ns for record in group]),
        _median([record.queue_ns for record in group]),
        device,
        _median([record.sync_ns for record in group]),
        "/".join(sorted({record.bound for record in group})),
    ]


def _device_min(record: Record) -> Measured:
    return record.device_min_ns


def _device(record: Record) -> Measured:
    return record.device_ns


def _median(values: Sequence[Measured]) -> str:
    numbers = [value for value in values if isinstance(value, int)]
    if numbers:
        return _duration(statistics.median(numbers))
    return next(value.reason for value in values if isinstance(value, Missing))


def _duration(nanoseconds: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.0f} ns"


def _explanation(records: Sequence[Record]) -> str:
    text = (
        "[bold]launch[/]  host time in the function: Python, and handing the work over\n"
        "[bold]queue[/]   how long the device took to reach it, behind earlier work\n"
        "[bold]device[/]  what the device took: at least to at most. They differ by the time in\n"
        "        which it may have waited for the host to launch\n"
        "[bold]sync[/]    host time waiting at the end of the span; decode is deferred: no wait\n"
        "[bold]first[/]   is kept apart from the medians below it: it loads and initialises"
    )
    if any(record.name == "replay" for record in records):
        text += "\n[bold]replay[/]  the same step launched as one CUDA graph, by hand"
    if any(isinstance(record.device_ns, Missing) for record in records):
        text += (
            "\n\nThere is no GPU that torch can use here, so the device's columns say why\n"
            "they are empty: a host time is never shown as a device time."
        )
    return text
