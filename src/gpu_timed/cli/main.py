"""The ``gpu-timed`` command."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help="True GPU time in distributed traces.")


@app.callback()
def _main() -> None:
    """Keep subcommands subcommands while there is only one."""
