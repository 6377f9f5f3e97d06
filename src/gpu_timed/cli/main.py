"""The ``gpu-timed`` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

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
def root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Hold the options that come before a command."""


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
        _refuse(console, error)


@app.command()
def doctor(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    endpoint: Annotated[
        str | None, typer.Option(help="Where to send the test span, such as http://localhost:4318.")
    ] = None,
    send: Annotated[bool, typer.Option("--send/--no-send", help="Send a test span.")] = True,
) -> None:
    """Say whether gpu_timed will measure and deliver here, and if not, why and what mends it.

    Makes a CUDA context on device 0 for its measurements, and sends one span. Exits with 0, or with 1 where
    there is a problem; 2 is an option that cannot be used.
    """
    from gpu_timed.cli import doctor as room  # noqa: PLC0415 - only for this command
    from gpu_timed.doctor import diagnose  # noqa: PLC0415

    try:
        diagnosis = diagnose(measure=True, send=send, endpoint=endpoint)
    except GpuTimedError as error:
        _refuse(Console(stderr=True), error)
    if json:
        typer.echo(diagnosis.to_json())
    else:
        room.show(Console(), diagnosis)
    raise typer.Exit(diagnosis.exit_code)


@app.command()
def caches(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print everything that is known as JSON.")] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Exit with 1 where a cache in use moves with the current directory, or is not writable."
        ),
    ] = False,
) -> None:
    """Say where every cache of compiled code lies that a program started here would use, and what would make it cold.

    Imports no runtime and touches no device. Exits with 0 but for --check; 2 is an option that cannot be used.
    """
    from gpu_timed.cli import caches as room  # noqa: PLC0415 - only for this command
    from gpu_timed.compile_caches import caches as find  # noqa: PLC0415

    found = find()
    if json:
        typer.echo(found.to_json())
    else:
        room.show(Console(), found)
    raise typer.Exit(found.exit_code if check else 0)


@app.command()
def selftest(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print all rows as JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer durations and spans: a quarter of a minute.")] = False,
    seconds: Annotated[float, typer.Option(help="How long it may take.")] = 60.0,
    cupti: Annotated[
        bool, typer.Option("--cupti/--no-cupti", help="Use CUPTI's kernel records too, if cupti-python is there.")
    ] = True,
) -> None:
    """Hold spans against kernels of known duration on this machine, in every circumstance they must be right in.

    Exits with 0, or with 1 where a row is outside its budget or could not be run; 2 is an option that cannot be
    used. Without a GPU it says so, measures the host's part, and exits with 0.
    """
    from gpu_timed.cli import selftest as room  # noqa: PLC0415 - only for this command
    from gpu_timed.selftest import run_selftest  # noqa: PLC0415

    errors = Console(stderr=True)
    try:
        with room.watched(errors) as progress:
            found = run_selftest(quick=quick, seconds=seconds, cupti=cupti, progress=progress)
    except GpuTimedError as error:
        _refuse(errors, error)
    if json:
        typer.echo(found.to_json())
    else:
        room.show(Console(), found)
    raise typer.Exit(found.exit_code)


@app.command()
def compare(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="MODULE:FUNCTION …", help="What to compare: one function in several modes, or several functions."
        ),
    ],
    *,
    args_from: Annotated[
        str | None, typer.Option(help="module:function that returns the arguments, as a tuple.")
    ] = None,
    modes: Annotated[
        str | None, typer.Option(help="With commas between; eager,cuda_graph,reduce-overhead unless given.")
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="Arm that the others are held against.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds to measure for; first calls come on top.")] = 20.0,
    reset: Annotated[
        str | None, typer.Option(help="module:function that puts back what a call changes; called before each.")
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(help="Keyword of the --args-from function and its values: batch=1,8,32.")
    ] = None,
    by: Annotated[str, typer.Option(help="The time that verdicts are about: wall or device.")] = "wall",
    outputs: Annotated[
        str, typer.Option(help="compare, or ignore: do not hold outputs against each other.")
    ] = "compare",
    seed: Annotated[int | None, typer.Option(help="By which blocks are shuffled.")] = None,
    profile: Annotated[
        bool, typer.Option("--profile/--no-profile", help="Record kernels of a few calls at the end.")
    ] = True,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write everything as JSON; - is stdout.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots.")] = None,
) -> None:
    """Say whether a function is launch-bound, and which mode or which of several functions is faster, by how much.

    For example: gpu-timed compare mine:step --args-from mine:make_args --html found.html

    Exits with 0, whatever is faster, or with 1 where nothing could be compared; 2 is an option that cannot be used.
    """
    from gpu_timed.cli import compare as room  # noqa: PLC0415 - brings the engine

    errors = Console(stderr=True)
    try:
        asked = room.prepare(
            targets,
            args_from=args_from,
            modes=modes,
            baseline=baseline,
            reset=reset,
            sweep=sweep,
            json=json,
            html=html,
            errors=errors,
            budget_s=budget,
            by=by,
            outputs=outputs,
            seed=seed,
            profile=profile,
        )
        found = asked.run(Console(), errors)
    except GpuTimedError as error:
        _refuse(errors, error)
    raise typer.Exit(found.exit_code)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    context: typer.Context,
    *,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- PROGRAM …", help="python app.py …, -m package.module …, app.py …, uvicorn app:app …"
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(help="What to time: module:function[option=value,…]; __main__:function of the script itself."),
    ] = None,
    exporter: Annotated[
        str | None,
        typer.Option(help="otlp, jsonl, console or none, unless the program sets a provider before the first span."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the spans, as OTLP JSON lines.")] = None,
    service_name: Annotated[str | None, typer.Option(help="service.name of the spans.")] = None,
    pin_caches: Annotated[
        str | None,
        typer.Option(help="Directory that all caches of compiled code are put below; else GPU_TIMED_PIN_CACHES."),
    ] = None,
) -> None:
    """Run a Python program with functions of it timed by name, and no change to its code."""
    from gpu_timed.cli import run as room  # noqa: PLC0415 - brings the engine

    try:
        prepared = room.prepare(
            command or (),
            targets=target or (),
            exporter=exporter,
            out=out,
            service_name=service_name,
            pin=pin_caches,
        )
    except GpuTimedError as error:
        _refuse(Console(stderr=True), error)
    if context.obj is None:  # the app was called by something else than main()
        prepared.run()
    else:
        context.obj.append(prepared)


def main() -> None:
    """Run the command line; a program that it is asked to run runs outside of it, whose handlers are not for that."""
    prepared: list[Any] = []
    hook = sys.excepthook
    try:
        app(obj=prepared)
    except SystemExit:
        if not prepared:
            raise
    sys.excepthook = hook
    prepared[0].run()


def _refuse(console: Console, error: GpuTimedError) -> NoReturn:
    console.print("error:", style="bold red", end=" ")
    console.print(str(error), markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(2) from None
