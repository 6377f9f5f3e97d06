"""``gpu-timed run``: the program is what it would be without us, and what was named is timed."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path

import pytest
from opentelemetry import trace

from gpu_timed import ConfigurationError, current, flush, gpu_span, shutdown, testing
from gpu_timed.cli import command as command_line
from gpu_timed.cli import program
from gpu_timed.cli import run as room

pytest.importorskip("opentelemetry.exporter.otlp.json.file")

SOURCE = str(Path(__file__).parents[2] / "src")
RUN = (sys.executable, "-m", "gpu_timed", "run")

LOOK = """
    \"\"\"Says what a program can see of itself.\"\"\"
    from __future__ import annotations
    import builtins, json, sys, threading

    def bare(function):
        return getattr(function, "__wrapped__", function)

    @(lambda function: function)

    def f(x: int):
        return sys._getframe().f_lineno

    seen = {
        "name": __name__, "file": globals().get("__file__"), "argv": sys.argv, "path": sys.path, "doc": __doc__,
        "package": __package__, "cached": str(globals().get("__cached__")), "loader": getattr(__loader__, "__name__", 0)
        or type(__loader__).__name__, "spec": __spec__ and [__spec__.name, __spec__.origin, __spec__.parent],
        "builtins": __builtins__ is builtins, "main": sys.modules["__main__"].__dict__ is globals(),
        "thread": threading.current_thread() is threading.main_thread(),
        "dunders": sorted(name for name in globals() if name.startswith("__") and "gpu_timed" not in name),
        "hook": sys.excepthook is sys.__excepthook__, "annotations": bare(f).__annotations__,
        "lines": [bare(f).__code__.co_firstlineno, f(1), bare(f).__code__.co_filename],
    }
    print(json.dumps(seen, sort_keys=True))
    sys.exit(int(sys.argv[1]) if sys.argv[1:] else 0)
"""


BARE = ("link.py", "-mpackage.look", "packed.zip", "cached.pyc")


def environment(**variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPU_TIMED_", "OTEL_"))}
    return {**kept, "PYTHONPATH": SOURCE, **variables}


@pytest.fixture
def run(tmp_path):
    """Runs ``gpu-timed run`` with these words, and returns the finished process."""

    def do(*words, under=RUN, cwd=tmp_path, text_in=None, **variables):
        return subprocess.run(
            [*under, *words],
            cwd=cwd,
            env=environment(**variables),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            input=text_in,
        )

    return do


@pytest.fixture
def write(tmp_path):
    """Writes a file and returns its path."""

    def do(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return do


def spans(path):
    """Names of the exported spans, with what is asked for."""
    found = {}
    for line in path.read_text().splitlines():
        (resource,) = json.loads(line)["resourceSpans"]
        attributes = {held["key"]: next(iter(held["value"].values())) for held in resource["resource"]["attributes"]}
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                found.setdefault(span["name"], []).append({**span, "service": attributes["service.name"]})
    return found


# -- the program is what it would be ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["python", "look.py"],
        ["python", "./look.py", "0", "--target", "x", "--", "-m", "y"],
        ["python", "sub/../look.py", "7"],
        ["python", "link.py", "1"],
        ["python", "-m", "look", "4", "-c"],
        ["python", "-mpackage.look", "4"],
        ["python", "-m", "package", "4"],
        ["python", "folder", "3"],
        ["python", "packed.zip", "3"],
        ["python", "cached.pyc", "3"],
        ["python", "-c", "CODE", "5", "x"],
    ],
    ids=" ".join,
)
def test_a_program_sees_what_it_would_see_without_us(words, run, write, tmp_path):
    """Everything a program can see of itself, and its exit code, are as under python itself, to the line numbers."""
    script = write("look.py", LOOK)
    for place in ("package/look.py", "package/__main__.py", "folder/__main__.py"):
        write(place, LOOK)
    write("package/__init__.py", "")
    (tmp_path / "sub").mkdir()
    write("elsewhere/real.py", LOOK)
    (tmp_path / "link.py").symlink_to("elsewhere/real.py")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.write(script, "__main__.py")
    if words[1] == "cached.pyc":
        import py_compile

        py_compile.compile(str(script), cfile=str(tmp_path / "cached.pyc"), doraise=True)
    words = [script.read_text() if word == "CODE" else word for word in words]
    plain = run(*words[1:], under=(sys.executable,))
    # With a function of the script timed, and without: both ways of loading it are looked at.
    ours = run(*(() if words[1] in BARE else ("--target", "__main__:f")), "--", *words)
    assert plain.stderr == ""
    assert json.loads(ours.stdout) == json.loads(plain.stdout)
    assert ours.returncode == plain.returncode
    assert [line.partition(":")[0] for line in ours.stderr.splitlines()][-1:] == ["gpu-timed"]


@pytest.mark.parametrize(
    "words",
    [
        ["missing.py"],
        ["-m", "missing"],
        ["-m", "package.missing"],
        ["-m", "package"],
        ["-m", "missing.package"],
        ["empty"],
        ["syntax.py"],
        ["raises.py"],
        ["-m", "raises"],
        ["-m", "broken.inner"],
        ["text.py"],
        ["chained.py"],
    ],
    ids=" ".join,
)
def test_a_program_that_fails_fails_as_it_would_without_us(words, run, write, tmp_path):
    """Exit code, message and traceback are those of python itself: not a frame of ours."""
    write("package/__init__.py", "")
    (tmp_path / "empty").mkdir()
    write("syntax.py", "x = 1\ndef f(:\n    pass\n")
    write("raises.py", "def f(x):\n    return 1 / x\n\nf(0)\n")
    write("broken/__init__.py", "import does_not_exist\n")
    write("broken/inner.py", "")
    write("text.py", "raise SystemExit('a text')\n")
    write("chained.py", "try:\n    {}[1]\nexcept KeyError as error:\n    raise ValueError('x') from error\n")
    plain = run(*words, under=(sys.executable,))
    ours = run("--", "python", *words)
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    *said, last = ours.stderr.splitlines()
    assert last.startswith("gpu-timed: ")
    told = plain.stderr.splitlines()
    if words == ["-m", "broken.inner"]:  # python shows the frames of its own runpy here
        said, told = said[-3:], told[-3:]
    elif words == ["-m", "raises"]:
        told = [told[0], *told[3:]]  # nor of its own runpy
        assert "runpy" not in "".join(told)
    assert said == told


def test_an_interrupt_ends_it_as_it_would_without_us(write, tmp_path):
    """Ctrl-C: the program's KeyboardInterrupt is shown, and the process ends by the signal."""
    write("waits.py", "import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    done = subprocess.Popen(
        [*RUN, "--", "python", "waits.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whatever runs the tests in the background may have it ignored, and a process inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509 - takes no lock
    )
    assert done.stdout.readline() == "ready\n"
    done.send_signal(signal.SIGINT)
    _, err = done.communicate(timeout=30)
    assert done.returncode == -signal.SIGINT
    first, second, *_ = err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert second.startswith(f'  File "{tmp_path}/waits.py", line ')
    assert "KeyboardInterrupt" in err
    assert "Aborted" not in err


def test_its_own_excepthook_is_asked(run, write):
    """A program that sets sys.excepthook gets its error there."""
    write("app.py", "import sys\nsys.excepthook = lambda kind, error, trace: print('mine', kind.__name__)\n1 / 0\n")
    done = run("--", "python", "app.py")
    assert (done.stdout, done.returncode) == ("mine ZeroDivisionError\n", 1)


def test_standard_input_is_the_programs(run, write):
    """What is piped in reaches the program."""
    write("app.py", "print(input())\n")
    assert run("--", "python", "app.py", text_in="hello\n").stdout == "hello\n"


def test_threads_and_exit_handlers_run_to_their_end(run, write, tmp_path):
    """What runs on after the last line is waited for, its spans are exported, and the summary is the last word."""
    write(
        "app.py",
        """
        import atexit, sys, threading, time
        def late(): return 1
        def end():
            time.sleep(0.2); late()
        threading.Thread(target=end).start()
        atexit.register(lambda: print("exit", file=sys.stderr, flush=True))
        """,
    )
    done = run("--target", "__main__:late", "--out", "s.jsonl", "--", "python", "app.py")
    assert done.stderr == "exit\ngpu-timed: 1 spans exported; 0 dropped\n"
    assert set(spans(tmp_path / "s.jsonl")) == {"late"}


def test_a_click_program_is_not_disturbed_by_ours(run, write):
    """A program made with typer or click parses its own arguments, and its errors and aborts are its own."""
    write(
        "app.py",
        """
        import click
        @click.command()
        @click.option("--target", default="none")
        def main(target):
            print(target, click.get_current_context().parent)
            raise click.Abort
        main()
        """,
    )
    done = run("--", "python", "app.py", "--target", "x")
    assert done.stdout == "x None\n"
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "Aborted!"


def test_processes_that_it_spawns_find_its_main(run, write):
    """multiprocessing imports the program's main module again in a spawned child, by its name or its file."""
    text = """
        import multiprocessing
        def double(x):
            return 2 * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
    """
    write("app.py", text)
    write("package/__init__.py", "")
    write("package/inner.py", text)
    for words in (["app.py"], ["-m", "package.inner"]):
        done = run("--target", "__main__:double", "--", "python", *words)
        assert done.stdout == "[2, 4]\n", done.stderr


def test_a_forked_child_says_nothing(run, write):
    """The summary is the program's, and comes once."""
    write("app.py", "import os, sys\nif os.fork() == 0:\n    sys.exit(0)\nos.wait()\n")
    done = run("--", "python", "app.py")
    assert done.stderr.count("gpu-timed:") == 1


def test_without_safe_path_nothing_is_put_into_the_path(run, write):
    """Under PYTHONSAFEPATH the folder of the program is not importable, as without us."""
    write("app.py", "import sys, json\nprint(json.dumps(sys.path))\n")
    variables = {"PYTHONSAFEPATH": "1"}
    plain = run("app.py", under=(sys.executable,), **variables)
    assert run("--", "python", "app.py", **variables).stdout == plain.stdout


# -- targets ----------------------------------------------------------------------------------------------

APP = """
    import functools
    import helper
    from helper import infer

    def counted(function):
        @functools.wraps(function)
        def call(*args):
            return function(*args)
        return call

    @counted
    def top(x):
        return infer(x)

    if True:
        def branch(x):
            return x
    else:
        def branch(x):
            return -x

    try:
        import does_not_exist
    except ImportError:
        async def fallback(x):
            return x

    class Base:
        def inherited(self):
            return 1

    class Model(Base):
        def forward(self, x):
            return top(x)
        @staticmethod
        def static(x):
            return x

    class Module:
        def __call__(self, x):
            return x

    def outer():
        def inner():
            return 1
        return inner()

    if __name__ == "__main__":
        import asyncio, pickle
        assert pickle.loads(pickle.dumps(top)) is top
        print(top(1), branch(2), asyncio.run(fallback(3)), Model().forward(4), Model.static(5), Model().inherited(),
              Module()(6), Base().inherited(), outer())
"""
ANSWERS = "2 2 3 5 5 1 6 1 1\n"


@pytest.fixture
def app(write):
    write("helper.py", "def infer(x):\n    return x + 1\n")
    write("tool/__init__.py", "")
    write("tool/__main__.py", APP)
    return write("app.py", APP)


@pytest.mark.parametrize("words", [["app.py"], ["-m", "tool"]], ids=" ".join)
def test_the_functions_of_the_script_and_of_its_modules_are_timed(words, app, run, tmp_path):
    """Functions, methods, inherited ones, classes, definitions in branches; nothing that was not named."""
    targets = [
        "__main__:top[name=TOP,attributes.model=m]",
        "__main__:branch",
        "__main__:fallback",
        "__main__:Model.forward",
        "__main__:Model.static",
        "__main__:Model.inherited",
        "__main__:Module",
        "helper:infer",
    ]
    options = [word for target in targets for word in ("--target", target)]
    done = run(*options, "--out", "s.jsonl", "--service-name", "svc", "--", "python", *words)
    assert (done.stdout, done.returncode) == (ANSWERS, 0), done.stderr
    assert done.stderr == "gpu-timed: 10 spans exported; 0 dropped\n"
    found = spans(tmp_path / "s.jsonl")
    counts = {name: len(held) for name, held in found.items()}
    assert counts == {
        "TOP": 2,
        "branch": 1,
        "fallback": 1,
        "Model.forward": 1,
        "Model.static": 1,
        "Base.inherited": 1,
        "Module": 1,
        "infer": 2,
    }
    assert {span["service"] for held in found.values() for span in held} == {"svc"}
    (forward,) = found["Model.forward"]
    assert forward["spanId"] in [span.get("parentSpanId") for span in found["TOP"]]


def test_the_variable_and_the_option_add_up(app, run, tmp_path):
    """GPU_TIMED_TARGETS and --target are both applied; one option can name several."""
    done = run(
        "--target",
        "__main__:branch,__main__:fallback",
        "--out",
        "s.jsonl",
        "--",
        "python",
        "app.py",
        GPU_TIMED_TARGETS="helper:infer",
    )
    assert set(spans(tmp_path / "s.jsonl")) == {"branch", "fallback", "infer"}, done.stderr


def test_what_was_never_seen_is_said_at_the_end(app, run):
    """Modules not imported, names not there and things that cannot be timed are in the last line."""
    targets = ["nowhere:f", "helper:infre", "__main__:outer.inner", "__main__:tpo", "__main__:inner"]
    done = run(*[word for target in targets for word in ("--target", target)], "--", "python", "app.py")
    assert done.stdout == ANSWERS
    *log, last = done.stderr.splitlines()
    assert last.endswith(
        "targets not timed: nowhere:f (never imported), helper:infre (not found), __main__:outer.inner (not found), "
        "__main__:tpo (not found), __main__:inner (not found)"
    )
    assert len(log) == 4
    assert any("called 'tpo'; did you mean 'top'?" in line for line in log)
    assert any("helper has no 'infre'; did you mean 'infer'?" in line for line in log)


def test_a_wrong_command_says_what_is_right(app, run):
    """Bad options and programs end with 2 before anything runs, and name the fix."""
    for words, says in [
        (["--target", "helper.infer", "--", "python", "app.py"], "did you mean 'helper:infer'?"),
        (["--exporter", "jsonl", "--", "python", "app.py"], "--exporter jsonl needs --out"),
        (["--exporter", "oltp", "--", "python", "app.py"], "did you mean 'otlp'?"),
        (["--out", "/no/such/place/s.jsonl", "--", "python", "app.py"], "cannot be written"),
        ([], "there is nothing to run"),
        (["--", "ls", "-l"], "is not a Python program"),
    ]:
        done = run(*words)
        assert done.returncode == 2
        assert says in done.stderr
        assert done.stdout == ""
        assert "Traceback" not in done.stderr


def test_console_scripts_are_programs_too(app, run, write, tmp_path):
    """A command of this environment, which is a script of this interpreter, is run as such."""
    script = write("serve", f"#!{sys.executable}\nimport sys\nsys.path.insert(0, '')\nimport helper\nhelper.infer(1)\n")
    script.chmod(0o755)
    for words, path in (["./serve"], os.environ["PATH"]), (["serve"], f"{tmp_path}:{os.environ['PATH']}"):
        done = run("--target", "helper:infer", "--out", "s.jsonl", "--", *words, PATH=path)
        assert done.returncode == 0, done.stderr
    assert len(spans(tmp_path / "s.jsonl")["infer"]) == 2


# -- where the spans go -----------------------------------------------------------------------------------

OWN_PROVIDER = """
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
    def infer(x):
        return x
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))
    trace.set_tracer_provider(provider)
    assert trace.get_tracer_provider() is provider
    infer(1)
"""


@pytest.mark.parametrize("options", [(), ("--out", "s.jsonl")], ids=["nothing asked", "a file asked"])
def test_a_program_that_sets_its_own_provider_is_not_refused(options, run, write, tmp_path):
    """Theirs wins, whatever was asked for, without a warning; the summary says where the spans went."""
    write("app.py", OWN_PROVIDER)
    done = run("--target", "__main__:infer", *options, "--", "python", "app.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"name": "infer"') == 1
    assert done.stderr == "gpu-timed: 1 calls handed to the program's own OpenTelemetry provider; 0 dropped\n"
    assert not options or spans(tmp_path / "s.jsonl") == {}


def test_spans_of_the_programs_own_go_the_same_way(run, write, tmp_path):
    """A program that uses the API without a provider, as frameworks do, finds ours from its very first span on."""
    write(
        "app.py",
        """
        from opentelemetry import trace
        tracer = trace.get_tracer("app")
        @tracer.start_as_current_span("decorated")
        def infer():
            return 1
        assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
        with tracer.start_as_current_span("request"):
            infer()
        """,
    )
    done = run("--target", "__main__:infer", "--out", "s.jsonl", "--", "python", "app.py")
    found = spans(tmp_path / "s.jsonl")
    assert set(found) == {"request", "infer", "decorated"}, done.stderr
    (request,), (infer,), (decorated,) = found["request"], found["infer"], found["decorated"]
    assert infer["parentSpanId"] == request["spanId"]
    assert decorated["parentSpanId"] == infer["spanId"]


def test_nothing_is_exported_unless_asked(app, run, tmp_path):
    """Without --exporter, --out or OTEL_TRACES_EXPORTER no provider is set, and the summary says so."""
    done = run("--target", "helper:infer", "--", "python", "app.py")
    assert done.stdout == ANSWERS
    assert "2 calls timed and sent nowhere (give --exporter or --out)" in done.stderr


def test_a_mode_of_a_name_that_no_span_has_is_told_at_the_end(app, run):
    """Once in the log as the process ends, as without run, and in the summary; of the names that are there, nothing."""
    named = ("--target", "helper:infer", "--out", "s.jsonl", "--", "python", "app.py")
    done = run(*named, GPU_TIMED_MODE="inf*=eager,infre=eager")
    assert done.stdout == ANSWERS
    assert done.stderr.count("a mode was given for 'infre'") == 1
    assert done.stderr.splitlines()[-1].endswith("2 spans exported; 0 dropped; modes of names that no span has: infre")
    assert "inf*" not in done.stderr
    done = run(*named, GPU_TIMED_MODE="infer=eager")
    assert "mode" not in done.stderr


def test_opentelemetrys_variable_asks_too(app, run):
    """OTEL_TRACES_EXPORTER=console exports; one that run does not know names the way."""
    done = run("--target", "helper:infer", "--", "python", "app.py", OTEL_TRACES_EXPORTER="console")
    assert done.stdout.count('"name": "infer"') == 2
    assert "2 spans exported" in done.stderr
    done = run("--", "python", "app.py", OTEL_TRACES_EXPORTER="zipkin")
    assert done.returncode == 2
    assert "opentelemetry-instrument" in done.stderr


def test_a_dead_collector_is_told_and_holds_nothing_up(app, run):
    """Spans that nobody took are dropped and counted, and the program ends within the exit timeout."""
    begun = time.monotonic()
    done = run(
        "--target",
        "helper:infer",
        "--exporter",
        "otlp",
        "--",
        "python",
        "app.py",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9",
        GPU_TIMED_EXIT_TIMEOUT_S="1",
    )
    assert time.monotonic() - begun < 30
    assert (done.stdout, done.returncode) == (ANSWERS, 0)
    assert "0 spans exported" in done.stderr


def test_the_exporter_stands_by_until_a_call_is_recorded(tmp_path, device):
    """No provider is set before the first recorded call; then it is ours, flushed and shut down as any of ours."""
    path = tmp_path / "s.jsonl"
    current.stand_by_exporter("jsonl", service_name="svc", path=path, endpoint=None)
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    assert not current.has_own_provider()
    for _ in range(2):
        with gpu_span("work"):
            device.launch(1_000)
    assert current.has_own_provider()
    result = shutdown(5)
    assert result
    assert result.counts["exported"] == 4
    assert {name: len(held) for name, held in spans(path).items()} == {"work": 2, "work [gpu]": 2}


def test_the_exporter_that_stands_by_gives_way(tmp_path, exporter, device):
    """Where the application has set a provider, nothing of ours is set, and flush() is about theirs."""
    current.stand_by_exporter("jsonl", service_name=None, path=tmp_path / "s.jsonl", endpoint=None)
    theirs = trace.get_tracer_provider()
    with gpu_span("work"):
        device.launch(1_000)
    assert flush(5)
    assert trace.get_tracer_provider() is theirs
    assert not current.has_own_provider()
    assert [span.name for span in exporter.get_finished_spans()] == ["work [gpu]", "work"]


def test_a_span_of_anybodys_brings_it_in(tmp_path):
    """The first span may be the application's own; after a reset nothing of ours is brought in any more."""
    proxy = trace.get_tracer("app")
    before = vars(trace.ProxyTracer)["_tracer"]
    current.stand_by_exporter("jsonl", service_name=None, path=tmp_path / "s.jsonl", endpoint=None)
    testing.reset()
    with proxy.start_as_current_span("after reset"):
        pass
    assert not current.has_own_provider()
    current.stand_by_exporter("jsonl", service_name=None, path=tmp_path / "s.jsonl", endpoint=None)
    with proxy.start_as_current_span("request"), gpu_span("work"):
        pass
    assert vars(trace.ProxyTracer)["_tracer"] is before
    assert current.has_own_provider()
    assert shutdown(5)
    found = spans(tmp_path / "s.jsonl")
    assert set(found) == {"request", "work"}
    assert found["work"][0]["parentSpanId"] == found["request"][0]["spanId"]


def test_the_exporter_that_stands_by_steps_in_once(tmp_path):
    """Many threads whose calls are the first: every call of theirs is exported."""
    path = tmp_path / "s.jsonl"
    current.stand_by_exporter("jsonl", service_name=None, path=path, endpoint=None)
    barrier = threading.Barrier(8, timeout=10)

    def first():
        barrier.wait()
        with gpu_span("work"):
            pass

    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shutdown(5)
    assert len(spans(path)["work"]) == 8


# -- reading the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "kind", "what", "arguments"),
    [
        (["python", "app.py", "-x"], "script", "app.py", ("-x",)),
        (["python3", "-m", "pkg", "-x"], "module", "pkg", ("-x",)),
        (["-m", "pkg"], "module", "pkg", ()),
        (["python", "-c", "print()", "a"], "code", "print()", ("a",)),
        ([sys.executable, "app.py"], "script", "app.py", ()),
        ([f"python{sys.version_info.major}.{sys.version_info.minor}", "x"], "script", "x", ()),
        ([__file__, "a"], "script", __file__, ("a",)),
    ],
)
def test_commands_are_read(command, kind, what, arguments):
    """With and without the word python, modules, code, and scripts."""
    assert command_line.parse(command) == command_line.Program(kind, what, arguments)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([], "there is nothing to run"),
        (["python"], "there is nothing to run"),
        (["python", "-"], "there is nothing to run"),
        (["python", "-m"], "-m needs something after it"),
        (["python", "-u", "app.py"], "python -u -m gpu_timed run … -- python app.py"),
        (["-O", "app.py"], "python -O -m gpu_timed run … -- python app.py"),
        (["python2.7", "app.py"], "python2.7 is another interpreter"),
        (["/no/bin/python", "app.py"], "/no/bin/python -m gpu_timed run"),
        (["no-such-command-here"], "no file and no command 'no-such-command-here'"),
        (["ls"], "is not a Python program"),
    ],
)
def test_what_cannot_be_run_names_the_way(command, says):
    """Flags of the interpreter, another interpreter, other programs."""
    with pytest.raises(ConfigurationError) as caught:
        command_line.parse(command)
    assert says in str(caught.value)


def test_a_command_goes_before_a_folder_of_its_name(tmp_path, monkeypatch):
    """As in a shell, a bare word is a command; with a slash or a suffix it is what is there."""
    script = tmp_path / "bin" / "serve"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\n")
    script.chmod(0o755)
    (tmp_path / "serve").mkdir()
    monkeypatch.chdir(tmp_path)
    assert command_line.parse(["./serve"]).what == "./serve"
    assert command_line.parse(["serve"]).what == "serve"
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    assert command_line.parse(["serve", "x"]) == command_line.Program("script", str(script), ("x",))


def test_a_definition_keeps_every_line():
    """The tree with our decorators in it compiles to the same line numbers as without."""
    source = textwrap.dedent(APP)
    tree = ast.parse(source)
    defined = program._mark(tree, frozenset({"top", "branch", "fallback", "Model"}))
    assert list(dict.fromkeys(defined)) == list(defined)
    assert set(defined) >= {"counted", "top", "branch", "fallback", "Base", "Model", "Module", "outer"}
    assert "inner" not in defined

    def lines(code):
        inside = [lines(constant) for constant in code.co_consts if hasattr(constant, "co_code")]
        return code.co_name, code.co_firstlineno, sorted({line for *_, line in code.co_lines() if line}), inside

    assert lines(compile(tree, "x", "exec")) == lines(compile(source, "x", "exec"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"out": Path("x"), "exporter": "otlp"}, "--out belongs to --exporter jsonl, not to otlp"),
        ({"service_name": "x"}, "--service-name needs --exporter"),
        ({"targets": ["a"]}, "did you mean 'module:a'?"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, says):
    """Each names what is missing."""
    given = {"targets": (), "exporter": None, "out": None, "service_name": None, **options}
    with pytest.raises(ConfigurationError) as caught:
        room.prepare(["python", "app.py"], **given)
    assert says in str(caught.value)
    assert current.targets() == []
