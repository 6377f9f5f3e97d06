"""The instrumentor, by itself and under ``opentelemetry-instrument``, which changes no line of the program."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from gpu_timed import ConfigurationError
from gpu_timed.testing import capture

pytest.importorskip("opentelemetry.instrumentation")
from gpu_timed.instrumentation import GpuTimedInstrumentor

ROOT = Path(__file__).parents[2]
LAUNCHER = Path(sys.executable).parent / "opentelemetry-instrument"
needs_launcher = pytest.mark.skipif(
    not (LAUNCHER.exists() and importlib.util.find_spec("opentelemetry.distro")), reason="needs opentelemetry-distro"
)
GROUP = "opentelemetry_instrumentor"


@pytest.fixture
def instrumentor():
    """The instrumentor, which is one for a process, switched off afterwards."""
    made = GpuTimedInstrumentor()
    yield made
    if made.is_instrumented_by_opentelemetry:
        made.uninstrument()


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "instrumented_module.py").write_text("def infer(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "instrumented_module"
    sys.modules.pop("instrumented_module", None)


def names_of_calls(module):
    with capture() as records:
        assert importlib.import_module(module).infer(1) == 2
    return [record.name for record in records]


def test_it_depends_on_nothing(instrumentor):
    """Whatever is named can be timed, so that no package has to be there."""
    assert instrumentor.instrumentation_dependencies() == ()


def test_targets_in_the_code(instrumentor, module, device):
    """``instrument(targets=…)`` times, ``uninstrument()`` puts back, and again."""
    for _ in range(2):
        instrumentor.instrument(targets=f"{module}:infer[name=n]")
        assert names_of_calls(module) == ["n"]
        instrumentor.uninstrument()
        assert names_of_calls(module) == []


def test_targets_in_the_environment(instrumentor, module, monkeypatch, device):
    """Without targets= it is those of the variable."""
    monkeypatch.setenv("GPU_TIMED_TARGETS", f"{module}:infer")
    instrumentor.instrument()
    assert names_of_calls(module) == ["infer"]


def test_a_bad_variable_is_told_and_raises_nothing(instrumentor, monkeypatch, caplog):
    """Raised, it would keep every other instrumentation from being loaded."""
    monkeypatch.setenv("GPU_TIMED_TARGETS", "infer")
    instrumentor.instrument()
    assert "did you mean 'module:infer'? No target is timed." in caplog.text


def test_bad_targets_in_the_code_are_raised(instrumentor):
    """A mistake in the code is the programmer's to see."""
    with pytest.raises(ConfigurationError, match="did you mean 'module:infer'"):
        instrumentor.instrument(targets="infer")
    assert not instrumentor.is_instrumented_by_opentelemetry


def test_a_provider_of_its_own_is_not_used_and_that_is_told(instrumentor, caplog):
    """OpenTelemetry's usual argument has no silent non-effect."""
    instrumentor.instrument(targets=(), tracer_provider=object())
    assert "tracer_provider= is not used" in caplog.text


def test_the_package_declares_it():
    """The entry point in ``pyproject.toml`` is the instrumentor, and the extra that it needs is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entry = importlib.metadata.EntryPoint("gpu_timed", project["entry-points"][GROUP]["gpu_timed"], GROUP)
    assert entry.load() is GpuTimedInstrumentor
    assert any("opentelemetry-instrumentation" in need for need in project["optional-dependencies"]["instrumentation"])


def test_without_the_extra_the_pip_command_is_named():
    """Importing the module where OpenTelemetry's package is missing says what to install."""
    script = (
        "import sys; sys.modules['opentelemetry.instrumentation'] = None\n"
        "try:\n    import gpu_timed.instrumentation\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert "pip install 'gpu-timed[instrumentation]'" in done.stdout


# -- under opentelemetry-instrument -----------------------------------------------------------------------

PROGRAM = """
    import helper
    from helper import infer

    print("answer", infer(1), helper.Model().forward(2))
"""
HELPER = """
    def infer(x):
        return x + 1

    class Model:
        def forward(self, x):
            return infer(x)
"""


@pytest.fixture
def instrument(tmp_path):
    """Runs the program as an operator would, and returns what it printed to stdout and stderr."""
    (tmp_path / "app.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "helper.py").write_text(textwrap.dedent(HELPER))
    paths = [str(ROOT / "src")]
    if not importlib.metadata.entry_points(group=GROUP, name="gpu_timed"):
        # An editable installation from before the entry point was declared: declare it by the side.
        folder = tmp_path / "side" / "gpu_timed_side-0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: gpu-timed-side\nVersion: 0\n")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        (folder / "entry_points.txt").write_text(
            f"[{GROUP}]\ngpu_timed = {project['entry-points'][GROUP]['gpu_timed']}\n"
        )
        paths.append(str(folder.parent))

    def run(**variables):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPU_TIMED_", "OTEL_"))}
        kept |= {"OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none", "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(
            [str(LAUNCHER), "python", "app.py"],
            cwd=tmp_path,
            env={**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}", **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "answer 2 3" in done.stdout
        return done.stdout, done.stderr

    return run


def spans_in(text):
    """Name, id and parent's id of each span in OTLP JSON lines."""
    requests = [json.loads(line) for line in text.splitlines() if line.startswith('{"resourceSpans"')]
    return [
        (span["name"], span["spanId"], span.get("parentSpanId", ""))
        for request in requests
        for resource in request["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


@needs_launcher
def test_spans_come_out_with_no_change_to_the_program(instrument):
    """Two targets by the variable: their spans, parents and all, are exported by the distribution's provider."""
    out, err = instrument(
        GPU_TIMED_TARGETS="helper:infer[sync=deferred],helper:Model.forward", OTEL_TRACES_EXPORTER="otlp_json_file"
    )
    spans = spans_in(out)
    by_name = {name: span_id for name, span_id, _ in spans}
    assert [(name, parent) for name, _, parent in spans if name == "Model.forward"] == [("Model.forward", "")]
    assert sorted(parent for name, _, parent in spans if name == "infer") == ["", by_name["Model.forward"]]
    assert len(spans) == 3
    assert err == ""


@needs_launcher
def test_the_console_exporter_too(instrument):
    """``OTEL_TRACES_EXPORTER=console`` prints them."""
    out, _ = instrument(GPU_TIMED_TARGETS="helper:infer", OTEL_TRACES_EXPORTER="console")
    assert out.count('"name": "infer"') == 2


@needs_launcher
def test_it_can_be_switched_off(instrument):
    """``OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=gpu_timed`` leaves every function as it is."""
    out, err = instrument(
        GPU_TIMED_TARGETS="helper:infer",
        OTEL_TRACES_EXPORTER="otlp_json_file",
        OTEL_PYTHON_DISABLED_INSTRUMENTATIONS="gpu_timed",
    )
    assert spans_in(out) == []
    assert err == ""


@needs_launcher
def test_a_mistake_in_the_variable_leaves_the_program_running(instrument):
    """The program runs, and the log says what is wrong and that nothing is timed."""
    out, err = instrument(GPU_TIMED_TARGETS="helper.infer", OTEL_TRACES_EXPORTER="otlp_json_file")
    assert spans_in(out) == []
    assert "did you mean 'helper:infer'?" in err
    assert "Traceback" not in err


@needs_launcher
def test_without_targets_it_does_nothing(instrument):
    """Installed and not asked for anything, it is not felt."""
    out, err = instrument(OTEL_TRACES_EXPORTER="otlp_json_file")
    assert spans_in(out) == []
    assert err == ""


@needs_launcher
def test_the_function_of_a_script_is_told_the_way(instrument):
    """The script's own functions are not there yet when instrumentations are loaded: the log names the command."""
    _, err = instrument(GPU_TIMED_TARGETS="__main__:infer", OTEL_TRACES_EXPORTER="otlp_json_file")
    assert "gpu-timed run --target" in err
