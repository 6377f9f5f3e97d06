"""A message names the option that its reader can type: of the function, or of the command line."""

from __future__ import annotations

import inspect
import threading

import typer

from gpu_timed import compare
from gpu_timed.cli.main import app
from gpu_timed.option_names import COMMAND_LINE, called, given, on_the_command_line


def test_every_option_is_there_under_both_names() -> None:
    typed = {name for each in typer.main.get_command(app).commands["compare"].params for name in each.opts}  # type: ignore[attr-defined]
    assert set(COMMAND_LINE.values()) <= typed
    assert set(COMMAND_LINE) <= set(inspect.signature(compare).parameters)


def test_names_are_those_of_the_interface_in_use() -> None:
    def said() -> tuple[str, ...]:
        modes = given("modes", ("eager", "cuda_graph"))
        return called("budget_s"), called("tolerance"), given("reset"), given("by", "wall"), given("work"), modes

    python = ("budget_s", "tolerance", "reset=", "by='wall'", "work=", "modes=('eager', 'cuda_graph')")
    assert said() == python
    elsewhere: list[tuple[str, ...]] = []
    with on_the_command_line():
        assert said() == ("--budget", "tolerance", "--reset", "--by wall", "work=", "--modes eager,cuda_graph")
        thread = threading.Thread(target=lambda: elsewhere.append(said()))
        thread.start()
        thread.join()
    assert elsewhere == [python]  # which calls compare() itself
    assert said() == python
