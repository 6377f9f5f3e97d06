"""The ``gpu-timed`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gpu_timed._version import VERSION
from gpu_timed.errors import GpuTimedError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="True GPU time in distributed traces.")


def _version(asked: bool) -> None:  # noqa: FBT001 - typer's signature
    if asked:
        typer.echo(VERSION)
        raise typer.Exit


@app.callback()
def main(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keep subcommands subcommands while there is only one."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="File for the spans, as OTLP JSON lines.")] = Path("gpu_timed-spans.jsonl"),
    tokens: Annotated[int, typer.Option(min=1, max=1000, help="Tokens to decode.")] = 32,
    device: Annotated[str, typer.Option(help="cpu or cuda; the default is a GPU where there is one.")] = "auto",
) -> None:
    """Decode a few tokens with a small model, and show what every span says."""
    from gpu_timed.cli import demo as room  # noqa: PLC0415 - brings torch

    console = Console()
    try:
        room.run(console, out=out, tokens=tokens, device=device)
    except GpuTimedError as error:
        console.print("error:", style="bold red", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
