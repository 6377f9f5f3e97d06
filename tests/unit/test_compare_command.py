"""``gpu-timed compare``: what was named is what is compared, and what cannot be is refused before anything runs."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import make_believe_comparison as believe
import pytest
from click.testing import Result
from typer.testing import CliRunner

from gpu_timed.cli import compare as room
from gpu_timed.cli.main import app
from gpu_timed.errors import ConfigurationError
from gpu_timed.views import plots

pytest.importorskip("scipy")

MODULE = """
    class Model:
        def forward(self, x):
            return x + 1

    model = Model()
    nothing = 3

    def step(x):
        return x * 2

    def other(x):
        return x * 2

    def make(batch=1):
        return (batch,)

    def needy(size):
        return (size,)

    def bare():
        return 3

    def failing():
        raise OSError("no data")

    def undo():
        pass

    held = [0]

    def counts(x):
        held[0] += 1
        return held[0]

    def back():
        held[0] = 0
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a module in it, to be the current one."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken.py").write_text("import mine\nraise KeyError('of its own')\n")
    (tmp_path / "needs.py").write_text("import not_there_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("mine", "broken", "needs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """What compare() was asked, which answers at once."""
    held: list[tuple[Any, dict[str, Any]]] = []

    def compare(what: Any, **options: Any) -> Any:
        options.pop("progress")(50, 100, "block 1")
        held.append((what, options))
        return believe.comparison(kernels=20)

    monkeypatch.setattr(room, "compare", compare)
    return held


def run(*arguments: str) -> Result:
    """Run the command."""
    return CliRunner().invoke(app, ["compare", *arguments])


def test_everything_that_was_asked_for_reaches_compare(asked: list[tuple[Any, dict[str, Any]]]) -> None:
    done = run(
        *("mine:step", "--args-from", "mine:make", "--modes", "eager, cuda_graph", "--baseline", "eager"),
        *("--budget", "3", "--reset", "mine:undo", "--sweep", "batch=1,8,0.5,x", "--by", "device", "--seed", "5"),
        *("--outputs", "ignore", "--no-profile"),
    )
    assert done.exit_code == 0, done.output
    ((what, options),) = asked
    mine = sys.modules["mine"]
    assert what is mine.step
    assert options.pop("args")(batch=3) == mine.make(batch=3)
    assert options == {
        "modes": ("eager", "cuda_graph"),
        "baseline": "eager",
        "budget_s": 3.0,
        "reset": mine.undo,
        "sweep": {"batch": [1, 8, 0.5, "x"]},
        "by": "device",
        "outputs": "ignore",
        "seed": 5,
        "profile": False,
    }
    assert "cuda_graph is faster than eager" in done.output


def test_several_functions_are_compared_by_name_and_methods_are_found(asked: list[tuple[Any, dict[str, Any]]]) -> None:
    assert run("mine:step", "mine:model.forward", "--args-from", "mine:make").exit_code == 0
    ((what, options),) = asked
    assert list(what) == ["mine:step", "mine:model.forward"]
    assert what["mine:model.forward"](1) == 2
    assert options["modes"] is None


@pytest.mark.usefixtures("asked")
def test_json_and_the_page_are_written_and_json_can_go_to_stdout(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    step = ("mine:step", "--args-from", "mine:make")
    done = run(*step, "--json", "found.json", "--html", "found.html")
    assert done.exit_code == 0, done.output
    assert json.loads((folder / "found.json").read_text())["name"] == "decode"
    assert "<!DOCTYPE html>" in (folder / "found.html").read_text()
    assert "Wrote found.html." in done.output
    assert json.loads(run(*step, "--json", "-").stdout)["name"] == "decode"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mine.step"], "did you mean 'mine:step'?"),
        (["mine:stepp"], "there is no 'stepp' in it; did you mean 'step'?"),
        (["mine:model.forwards"], "did you mean 'forward'?"),
        (["mine:nothing"], "is no function, but of type int"),
        (["mine:step[sync=deferred]"], "leave them out here"),
        (["absent_module:step"], "no module 'absent_module' was found"),
        (["mine.inner:step"], "no module 'mine.inner' was found"),
        (["broken:step"], "importing 'broken' raised KeyError, as shown above"),
        (["needs:step"], "No module named 'not_there_at_all'"),
        (["mine:step", "--reset", "mine:undone"], "--reset 'mine:undone': there is no 'undone' in it; did you mean"),
        (["mine:step", "--sweep", "batch=1"], "--sweep needs --args-from module:function, a function of batch"),
        (["mine:step", "--sweep", "batch", "--args-from", "mine:make"], "as in batch=1,8,32"),
        (["mine:step", "--sweep", "size=1", "--args-from", "mine:make"], "unexpected keyword argument 'size' (it is"),
        (["mine:step", "--args-from", "mine:needy"], "missing a required argument: 'size' (give them defaults, or"),
        (["mine:step", "--args-from", "mine:failing"], "--args-from 'mine:failing' raised OSError, as shown above"),
        (["mine:step", "mine:other", "--modes", "eager"], "--modes is for one function"),
        (["mine:step"], "target 'mine:step' needs arguments (missing a required argument: 'x'): name what makes them"),
        (["mine:step", "--args-from", "mine:bare"], "must return a tuple, not int: return (x,) for one"),
        (["mine:step", "--sweep", "batch=1", "--args-from", "mine:undo"], "unexpected keyword argument 'batch' (it is"),
        (["mine:step", "--json", "nowhere/found.json"], "--json nowhere/found.json: the directory is not there"),
        (["mine:step", "--args-from", "mine:make,mine:undo"], "name one function"),
        (["mine:step", "--args-from", "mine:make", "--modes", "eagr"], "did you mean 'eager'?"),
        (["mine:step", "--args-from", "mine:make", "--budget", "0"], "--budget must be a number greater than 0"),
        (["mine:step", "--args-from", "mine:make", "--seed", "-1"], "--seed must be a whole number"),
        (
            ["mine:step", "--args-from", "mine:make", "--modes", ","],
            "--modes is empty: name at least one, as in --modes eager,cuda_graph",
        ),
    ],
)
def test_what_cannot_be_used_is_told_with_what_mends_it(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())


def test_a_module_that_raises_shows_where(folder: Path) -> None:
    done = run("broken:step")
    assert "importlib" not in done.output
    assert 'broken.py", line 2' in done.output
    assert "of its own" in done.output


def test_arguments_that_cannot_be_made_show_where() -> None:
    done = run("mine:step", "--args-from", "mine:failing")
    assert "in failing" in done.output
    assert "cli/compare.py" not in done.output
    assert "OSError: no data" in done.output


def test_a_page_without_its_package_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, asked: list[tuple[Any, dict[str, Any]]]
) -> None:
    def refuse() -> None:
        raise ConfigurationError("install matplotlib")

    monkeypatch.setattr(plots, "load", refuse)
    done = run("mine:step", "--html", "found.html")
    assert done.exit_code == 2
    assert asked == []


def test_a_file_that_cannot_be_written_is_told(folder: Path, asked: list[tuple[Any, dict[str, Any]]]) -> None:
    (folder / "found.json").mkdir()
    done = run("mine:step", "--args-from", "mine:make", "--json", "found.json")
    assert done.exit_code == 2
    assert "found.json cannot be written" in done.output
    assert "is faster than" in done.output  # what was measured is not lost with it
    assert len(asked) == 1


def test_a_real_comparison_on_this_machine() -> None:
    done = run("mine:step", "mine:other", "--args-from", "mine:make", "--budget", "0.2", "--json", "-")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [arm["name"] for arm in found["arms"]] == ["mine:step", "mine:other"]
    assert found["verdicts"][0]["word"] in ("same", "ambiguous", "faster", "slower")


def test_what_is_said_names_the_options_of_the_command_line() -> None:
    counts = ("mine:counts", "--modes", "eager", "--args-from", "mine:make", "--budget", "0.05")
    done = run(*counts)
    assert done.exit_code == 1
    assert "(give --reset, which puts it back before each call)" in " ".join(done.output.split())
    done = run(*counts, "--reset", "mine:undo")
    assert "though --reset was called" in " ".join(done.output.split())
    done = run(*counts, "--reset", "mine:back", "--by", "device", "--json", "-")
    found = json.loads(done.stdout)
    assert found["notes"][0].startswith("--reset is called before each call")
    assert found["refused"].endswith("use --by wall")
    assert "reset=" not in done.stdout


def test_a_refusal_is_exit_code_one_and_one_arm_alone_is_none() -> None:
    assert believe.refused().exit_code == 1
    assert believe.comparison(kernels=10).exit_code == 0
    assert believe.swept((1, 8), kernels=10).exit_code == 0
    held = believe.comparison(kernels=10)
    assert believe.comparison(kernels=10, verdicts=held.verdicts[1:]).exit_code == 1
    assert believe.comparison(kernels=10, verdicts=()).exit_code == 0
