"""What can be set and how, what every bad input answers, and what the package shows and loads."""

from __future__ import annotations

import ast
import functools
import http.server
import importlib.util
import inspect
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import gpu_timed as library
from gpu_timed import (
    ConfigurationError,
    GpuTimedError,
    MissingExtraError,
    NotCallableError,
    WaitTimeout,
    configure,
    current,
    errors,
    flush,
    gpu_span,
    gpu_timed,
    record,
    settings,
    shutdown,
    testing,
)
from gpu_timed.delivery import FlushResult
from gpu_timed.testing import capture

needs_exporters = pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry.exporter") is None, reason="the exporters are an extra"
)


def plain() -> int:
    """Stand for any function."""
    return 7


async def coroutine() -> int:
    """Stand for any coroutine function."""
    return 7


def loudly(action: object) -> str:
    """Run *action*, which must raise an error of ours, and return its message."""
    with pytest.raises(GpuTimedError) as caught:
        action()
    return str(caught.value)


# -- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "wrong", "right"),
    [
        (lambda: gpu_timed(sync="defered")(plain), "defered", "deferred"),
        (lambda: gpu_timed(late="devise_only")(plain), "devise_only", "device_only"),
        (lambda: gpu_timed(mode="eagre")(plain), "eagre", "eager"),
        (lambda: gpu_span("x", sync="bundary"), "bundary", "boundary"),
        (lambda: gpu_span("x", late="hots"), "hots", "host"),
        (lambda: configure(sync="devise"), "devise", "device"),
        (lambda: configure(late="hosts"), "hosts", "host"),
        (lambda: configure(exporter="oltp"), "oltp", "otlp"),
        (lambda: configure(exporter="json"), "json", "jsonl"),
        (lambda: configure(exporter="consol"), "consol", "console"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_nearest(action, wrong, right):
    """A word that is nearly right names what was meant, and all the choices."""
    with pytest.raises(ConfigurationError) as caught:
        action()
    message = str(caught.value)
    assert f"{wrong!r}" in message
    assert f"did you mean {right!r}?" in message
    assert "Use one of: " in message


def test_a_word_that_is_like_nothing_gets_the_choices_alone():
    """A word that is like none of the choices gets all of them and no guess."""
    message = loudly(lambda: gpu_timed(sync="zzz")(plain))
    assert "did you mean" not in message
    for choice in ("'boundary'", "'deferred'", "'device'"):
        assert choice in message


def test_the_message_without_a_guess_is_made_of_sentences():
    """The value and the choices stand in sentences of their own."""
    assert ". Use one of: " in loudly(lambda: gpu_timed(sync="zzz")(plain))


@pytest.mark.parametrize("every", [0, -1, 1.5, "2", True, None])
def test_every_must_be_a_whole_number_from_one_up(every):
    """``every=`` takes whole numbers from 1 up, and the message shows how it is meant."""
    message = loudly(lambda: gpu_timed(every=every)(plain))
    assert repr(every) in message
    assert "every=10 records one call in ten" in message


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (lambda: gpu_timed(name=5)(plain), "a span's name must be a text"),
        (lambda: gpu_span(""), "a span's name must be a text with something in it"),
        (lambda: gpu_timed(attributes=[("a", 1)])(plain), "attributes must be a mapping or a function"),
        (lambda: gpu_span("x", attributes=[("a", 1)]), "attributes must be a mapping, not list"),
        (lambda: gpu_timed(sync="device")(coroutine), "use 'boundary' or 'deferred'"),
        (lambda: gpu_span("x")(plain), "@gpu_timed(name='x')"),
        (lambda: configure(path="x.jsonl"), "path= needs exporter="),
        (lambda: configure(endpoint="http://localhost:4318"), "endpoint= needs exporter="),
        (lambda: configure(service_name="llm"), "service_name= needs exporter="),
        (lambda: configure(exporter="otlp", path="x.jsonl"), "path= belongs to exporter='jsonl', not to 'otlp'"),
        (lambda: configure(exporter="console", path="x"), "path= belongs to exporter='jsonl'"),
        (lambda: configure(exporter="none", endpoint="x"), "endpoint= belongs to exporter='otlp', not to 'none'"),
        (lambda: configure(exporter="jsonl"), "exporter='jsonl' needs path="),
        pytest.param(
            lambda: configure(exporter="jsonl", path="/no/such/place/x.jsonl"),
            "'/no/such/place/x.jsonl' cannot be",
            marks=needs_exporters,
        ),
        pytest.param(
            lambda: configure(exporter="jsonl", path="/"), "path='/' cannot be written", marks=needs_exporters
        ),
        (lambda: configure(max_pending=0), "max_pending must be greater than 0, not 0"),
        (lambda: configure(max_queue=-1), "max_queue must be greater than 0, not -1"),
        (lambda: configure(poll_ms=float("nan")), "poll_ms must be greater than 0, not nan"),
        (lambda: configure(exit_timeout_s=0), "exit_timeout_s must be greater than 0, not 0"),
    ],
)
def test_a_bad_option_names_the_option_and_the_fix(action, says):
    """Every option that cannot be used raises ConfigurationError, which is a ValueError, and says what to write."""
    with pytest.raises(ConfigurationError) as caught:
        action()
    assert isinstance(caught.value, ValueError)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (lambda: gpu_timed("decode"), "with gpu_span('decode'):"),
        (lambda: gpu_timed(name="x")("decode"), "with gpu_span('decode'):"),
        (lambda: gpu_timed(5), "not int 5"),
        (lambda: gpu_timed(sync="deferred")([1]), "not list [1]"),
        (lambda: gpu_timed(list(range(1_000))), "not list [0, 1, 2"),
        (lambda: gpu_span(plain), "To decorate, use @gpu_timed"),
        (lambda: gpu_span(5), "takes the name of a block, not int"),
    ],
)
def test_something_that_cannot_be_called_names_the_way(action, says):
    """Decorating a text or a value raises NotCallableError, which is a TypeError, and says which call is meant."""
    with pytest.raises(NotCallableError) as caught:
        action()
    assert isinstance(caught.value, TypeError)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_device_wide_wait_on_an_event_loop_is_refused():
    """``async with gpu_span(sync="device")`` would block the loop, and says what to use."""
    block = gpu_span("x", sync="device")
    entering = block.__aenter__()
    with pytest.raises(ConfigurationError, match="use 'boundary' or 'deferred'"):
        entering.send(None)


@pytest.mark.parametrize(
    "action",
    [
        lambda: configure(max_pending="10"),
        lambda: configure(poll_ms="fast"),
        lambda: gpu_timed(sync=["deferred"])(plain),
        lambda: gpu_span("x", sync=["deferred"]),
        lambda: configure(late=["host"]),
        lambda: configure(exporter=["jsonl"]),
    ],
)
def test_a_value_of_the_wrong_type_is_a_configuration_error(action):
    """A value of a type that cannot be right is answered like any other bad value."""
    with pytest.raises(ConfigurationError):
        action()


@pytest.mark.parametrize("option", ["poll_ms", "exit_timeout_s"])
def test_a_time_without_end_is_refused(option):
    """An infinite interval or limit is a bad value: the waits that get it cannot take it."""
    with pytest.raises(ConfigurationError):
        configure(**{option: float("inf")})


@needs_exporters
def test_an_endpoint_without_a_scheme_is_refused():
    """``endpoint="localhost:4318"`` can never be sent to, and says that http:// is missing."""
    try:
        with pytest.raises(ConfigurationError, match="http://"):
            configure(exporter="otlp", endpoint="localhost:4318")
    finally:
        shutdown(1)


def test_a_refused_configuration_changes_nothing():
    """A call of ``configure()`` that raises leaves everything as it was."""
    loudly(lambda: configure(sync="deferred", exporter="oltp"))
    assert current.settings().sync is None


def test_a_second_provider_is_refused():
    """Where a provider is set already, ``exporter=`` says so, and that leaving it out uses that provider."""
    provider = TracerProvider(shutdown_on_exit=False)
    trace.set_tracer_provider(provider)
    message = loudly(lambda: configure(exporter="none"))
    assert "tracer provider already" in message
    assert "Leave exporter= out" in message
    assert trace.get_tracer_provider() is provider
    configure(sync="deferred")


def test_a_second_exporter_is_refused():
    """``configure(exporter=…)`` twice is one provider too many."""
    configure(exporter="none")
    assert "was called before" in loudly(lambda: configure(exporter="none"))
    assert shutdown(1)


@pytest.mark.parametrize(
    ("exporter", "options", "module", "package"),
    [
        (
            "jsonl",
            {"path": os.devnull},
            "opentelemetry.exporter.otlp.json.file",
            "opentelemetry-exporter-otlp-json-file",
        ),
        ("otlp", {}, "opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry-exporter-otlp-proto-http"),
    ],
)
def test_a_missing_extra_names_the_pip_command(exporter, options, module, package, monkeypatch):
    """An exporter whose package is not installed raises MissingExtraError with the command that installs it."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError) as caught:
        configure(exporter=exporter, **options)
    assert isinstance(caught.value, ImportError)
    assert f"exporter={exporter!r}" in str(caught.value)
    assert package in str(caught.value)
    assert "pip install 'gpu-timed[otlp]'" in str(caught.value)
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider), "half a provider was left behind"


def test_the_extra_that_is_named_exists_and_holds_the_package():
    """The extra in the message is one of ``pyproject.toml`` and installs both exporters."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    (extra,) = re.findall(r"^otlp = \[(.*)\]$", text, re.MULTILINE)
    assert "opentelemetry-exporter-otlp-proto-http" in extra
    assert "opentelemetry-exporter-otlp-json-file" in extra


def test_errors_are_one_family():
    """Every public error is a GpuTimedError, and one of Python's own that says the same."""
    kinds = {
        ConfigurationError: ValueError,
        NotCallableError: TypeError,
        MissingExtraError: ImportError,
        WaitTimeout: TimeoutError,
        errors.UnknownArmError: KeyError,
        errors.ModeError: RuntimeError,
        errors.DeviceFault: Exception,
    }
    defined = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__}
    assert defined == {*kinds, GpuTimedError}
    for kind, built_in in kinds.items():
        assert issubclass(kind, GpuTimedError)
        assert issubclass(kind, built_in)


def test_a_record_that_is_not_there_in_time_is_a_timeout(device):
    """``span.wait(timeout_s)`` raises WaitTimeout and says which span, and whether it is open or the device late."""
    with gpu_span("late", sync="deferred") as span:
        message = loudly(lambda: span.wait(0))
        assert "'late'" in message
        assert "still open" in message
        device.launch(1_000)
    message = loudly(lambda: span.wait(0.01))
    assert "has not been reached by the device" in message
    device.run_dry()
    assert span.wait(5).device_ns == 1_000


# -- the environment --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("GPU_TIMED_SYNC", "defered", "did you mean 'deferred'?"),
        ("GPU_TIMED_LATE", "devices_only", "did you mean 'device_only'?"),
        ("GPU_TIMED_DISABLED", "maybe", "write 1 or 0"),
        ("GPU_TIMED_DEVICE_SPANS", "2", "write 1 or 0"),
        ("GPU_TIMED_MAX_PENDING", "ten", "write a whole number"),
        ("GPU_TIMED_MAX_PENDING", "1.5", "write a whole number"),
        ("GPU_TIMED_MAX_QUEUE", "-1", "must be greater than 0"),
        ("GPU_TIMED_POLL_MS", "fast", "write a number"),
        ("GPU_TIMED_POLL_MS", "0", "must be greater than 0"),
        ("GPU_TIMED_EXIT_TIMEOUT_S", "nan", "must be greater than 0"),
    ],
)
@pytest.mark.parametrize(
    "door", [lambda: gpu_timed(plain), lambda: gpu_span("x"), lambda: configure(device_spans=True)]
)
def test_an_unreadable_variable_is_named_with_its_fix(door, variable, text, says, monkeypatch):
    """A ``GPU_TIMED_*`` variable that cannot be used is named with its value and what to write instead."""
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigurationError) as caught:
        door()
    assert f"{variable}={text!r} cannot be used: " in str(caught.value)
    assert says in str(caught.value)


def test_an_unreadable_variable_does_not_break_a_call(monkeypatch):
    """A variable that turns bad after decorating costs the measurement, and not the call."""
    work = gpu_timed(plain)
    testing.reset()
    monkeypatch.setenv("GPU_TIMED_POLL_MS", "fast")
    assert work() == 7
    assert flush(1).counts["start"] == 1


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("GPU_TIMED_DISABLED", "1", "disabled", True),
        ("GPU_TIMED_DISABLED", " Yes ", "disabled", True),
        ("GPU_TIMED_DISABLED", "off", "disabled", False),
        ("GPU_TIMED_DISABLED", "", "disabled", False),
        ("GPU_TIMED_MODE", "decode*=compile,eager", "mode", "decode*=compile,eager"),
        ("GPU_TIMED_SYNC", "deferred", "sync", "deferred"),
        ("GPU_TIMED_LATE", "device_only", "late", "device_only"),
        ("GPU_TIMED_DEVICE_SPANS", "0", "device_spans", False),
        ("GPU_TIMED_MAX_PENDING", "17", "max_pending", 17),
        ("GPU_TIMED_MAX_QUEUE", "17", "max_queue", 17),
        ("GPU_TIMED_POLL_MS", "2.5", "poll_ms", 2.5),
        ("GPU_TIMED_WARMTH", "0", "warmth", False),
        ("GPU_TIMED_MODULE_LOADS", "1", "module_loads", True),
        ("GPU_TIMED_VITALS", "0", "vitals", False),
        ("GPU_TIMED_VITALS_INTERVAL_S", "0", "vitals_interval_s", 0.0),
        ("GPU_TIMED_EXIT_TIMEOUT_S", "0.5", "exit_timeout_s", 0.5),
    ],
)
def test_a_variable_sets_its_setting(variable, text, field, value):
    """Each setting has a variable named after it."""
    found = settings.from_environment({variable: text})
    assert getattr(found, field) == value
    assert type(getattr(found, field)) is type(value)


def test_every_setting_has_a_variable_and_an_option():
    """Each setting but ``disabled`` is an option of ``configure()`` too, and each is covered by the test above."""
    fields = set(settings.Settings.__dataclass_fields__)
    options = set(inspect.signature(configure).parameters)
    assert fields - options == {"disabled"}
    mark = next(m for m in test_a_variable_sets_its_setting.pytestmark if m.name == "parametrize")
    assert {case[2] for case in mark.args[1]} == fields


def test_code_goes_before_the_environment_and_a_site_before_both(monkeypatch):
    """The site's own option wins over ``configure()``, and that over the environment."""
    monkeypatch.setenv("GPU_TIMED_SYNC", "device")
    by_default, by_site = gpu_timed(name="default")(plain), gpu_timed(name="site", sync="boundary")(plain)
    with testing.use_device(testing.FakeDevice()), capture() as records:
        by_default()
        configure(sync="deferred")
        by_default()
        by_site()
    found = sorted((r.name, r.call_index, r.sync) for r in records)
    assert found == [("default", 0, "device"), ("default", 1, "deferred"), ("site", 0, "boundary")]


def test_what_is_left_out_keeps_its_value():
    """``configure()`` changes what it is given and nothing else, and may be called again and again."""
    configure(max_pending=5, late="device_only")
    configure(max_queue=6)
    held = current.settings()
    assert (held.max_pending, held.late, held.max_queue, held.device_spans) == (5, "device_only", 6, True)
    configure(device_spans=False)
    assert current.settings().device_spans is False


def test_an_open_span_keeps_the_policy_it_began_with(device):
    """A change of settings is for the spans after it."""
    with capture() as records, gpu_span("work"):
        configure(sync="deferred")
    assert [record.sync for record in records] == ["boundary"]


# -- switched off -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_disabled_returns_the_function_itself(text, monkeypatch):
    """Under ``GPU_TIMED_DISABLED=1`` a decorator gives back the very thing it was put on."""
    monkeypatch.setenv("GPU_TIMED_DISABLED", text)
    partial = functools.partial(plain)
    for target in (plain, coroutine, partial, len, dict):
        assert gpu_timed(target) is target
        assert gpu_timed(name="x", sync="deferred", every=3)(target) is target
    for kind in (staticmethod, classmethod):
        assert gpu_timed(kind(plain)).__func__ is plain


@pytest.mark.parametrize("text", ["0", "false", "No", "off", ""])
def test_not_disabled_wraps(text, monkeypatch):
    """Any way of writing no leaves measuring on."""
    monkeypatch.setenv("GPU_TIMED_DISABLED", text)
    wrapped = gpu_timed(plain)
    assert wrapped is not plain
    assert wrapped.__wrapped__ is plain


def test_disabled_measures_nothing(monkeypatch, exporter):
    """Under ``GPU_TIMED_DISABLED=1`` blocks, and calls with a mode, run and leave nothing behind."""
    monkeypatch.setenv("GPU_TIMED_DISABLED", "1")
    with capture() as records:
        assert gpu_timed(mode="eager")(plain)() == 7
        with gpu_span("block") as span:
            assert not trace.get_current_span().is_recording()
            span.set_attribute("k", 1)
        assert span.wait(0).device_ns == library.Missing("disabled")
    assert records == []
    assert exporter.get_finished_spans() == ()
    assert flush(1).counts == {}


def test_disabled_still_refuses_bad_options(monkeypatch):
    """A mistake in an option is one with measuring switched off too, so that it is not found in production first."""
    monkeypatch.setenv("GPU_TIMED_DISABLED", "1")
    loudly(lambda: gpu_timed(sync="zzz")(plain))
    loudly(lambda: gpu_timed(every=0)(plain))
    loudly(lambda: gpu_timed("decode"))


# -- what is loaded and shown -----------------------------------------------------------------------------

STAGES = """
import json, sys, threading
found = {}
def stage(name):
    watched = ("torch", "numpy", "wrapt", "opentelemetry.sdk", "opentelemetry.exporter", "typer", "rich")
    found[name] = [w for w in watched if w in sys.modules]
    found[name + " threads"] = threading.active_count()
import gpu_timed as library
stage("import")
import opentelemetry.trace  # which loads wrapt by itself in older versions
stage("api")
from gpu_timed import gpu_timed, gpu_span, configure
stage("names")
@gpu_timed
def function(): return 7
@gpu_timed(sync="deferred")
async def coroutine(): return 7
@gpu_timed
def generator(): yield 7
class Class:
    @gpu_timed
    def method(self): return 7
    @gpu_timed
    @staticmethod
    def static(): return 7
stage("decorate")
assert (function(), Class().method(), list(generator())) == (7, 7, [7])
stage("call")
gpu_timed(__import__("functools").partial(print))
stage("partial")
print(json.dumps(found))
"""


NOWHERE = (
    "gpu_timed: no OpenTelemetry provider is set: spans are measured and go nowhere. "
    "Set one, or call gpu_timed.configure(exporter=...).\n"
)


def in_a_new_process(script: str, **variables: str) -> str:
    """Run *script* in a fresh interpreter, and return what it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPU_TIMED_", "OTEL_"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr in ("", NOWHERE), done.stderr
    return done.stdout


def test_what_each_step_loads_and_starts():
    """Importing loads no torch, wrapt or SDK; decorating functions no wrapt; nothing starts a thread before a call."""
    found = json.loads(in_a_new_process(STAGES))
    assert found["import"] == []
    for stage in ("names", "decorate", "call"):
        loaded = set(found[stage]) - set(found["api"])
        assert not {"torch", "numpy", "wrapt", "typer", "rich", "opentelemetry.exporter"} & loaded, stage
    for stage in ("import", "names", "decorate"):
        assert found[f"{stage} threads"] == 1, stage
    assert "wrapt" in found["partial"], "the watch on wrapt sees nothing"


def test_decorating_does_not_load_the_sdk():
    """An application without OpenTelemetry's SDK in use does not load it by decorating or calling."""
    found = json.loads(in_a_new_process(STAGES))
    assert "opentelemetry.sdk" not in found["call"]


def test_the_test_helpers_load_no_runtime():
    """``gpu_timed.testing`` and a fake device need neither torch nor NumPy."""
    script = """
        import sys
        from gpu_timed.testing import FakeDevice, capture, use_device
        from gpu_timed import gpu_timed
        with use_device(FakeDevice()) as device, capture() as records:
            gpu_timed(name="work")(lambda: device.launch(5))()
        print([r.device_ns for r in records], "torch" in sys.modules, "numpy" in sys.modules)
    """
    assert in_a_new_process(script) == "[5] False False\n"


def test_all_is_what_there_is():
    """``__all__`` is sorted, complete, can be had name by name, and is what ``dir()`` shows."""
    assert library.__all__ == sorted(set(library.__all__))
    assert set(library.__all__) == set(library._HOMES)
    assert dir(library) == sorted([*library.__all__, "__version__"])
    for name in library.__all__:
        value = getattr(library, name)
        assert value.__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'gpu_timer'"):
        library.gpu_timer  # noqa: B018 - the access is what is tested
    assert re.fullmatch(r"\d+\.\d+\.\d+", library.__version__)


def test_what_type_checkers_see_is_what_there_is():
    """The names imported for type checkers are those of ``__all__``, from the modules they are loaded from."""
    tree = ast.parse(Path(library.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == {name: f"gpu_timed.{home}" for name, home in library._HOMES.items()}


def test_no_module_is_named_like_a_public_function():
    """No module shadows a public name: ``gpu_timed.configure`` is the function, whatever was imported before."""
    modules = {path.stem for path in Path(library.__file__).parent.iterdir()}
    assert not modules & set(library.__all__)


@pytest.mark.parametrize("name", [*library.__all__, *(f"testing.{name}" for name in testing.__all__)])
def test_every_public_name_is_documented(name):
    """Each public name has a docstring that names every parameter of it."""
    value = library
    for part in name.split("."):
        value = getattr(value, part)
    text = inspect.getdoc(value)
    assert text
    assert len(text) > 20
    if inspect.isfunction(value):
        for parameter in inspect.signature(value).parameters:
            assert re.search(rf"\b{parameter}\b", text), f"{name}({parameter}=) is not documented"


@pytest.mark.parametrize("kind", [record.Record, FlushResult, settings.Settings])
def test_every_field_is_documented(kind):
    """Each field of a public value class is followed by a text that says what it is."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    documented = {
        statement.target.id
        for statement, following in itertools.pairwise(tree.body)
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr)
    }
    assert documented == set(kind.__dataclass_fields__)


# -- exporters --------------------------------------------------------------------------------------------


def plain_values(attributes: list[dict[str, object]]) -> dict[str, object]:
    """Return OTLP's list of keys and values as a dict of plain ones."""
    return {held["key"]: next(iter(held["value"].values())) for held in attributes}


@needs_exporters
def test_jsonl_writes_one_request_a_line(tmp_path, device):
    """``exporter="jsonl"`` appends OTLP JSON requests, one a line, with the host in the resource, and counts them."""
    path = tmp_path / "spans.jsonl"
    path.write_text('{"resourceSpans":[]}\n', encoding="utf-8")
    configure(exporter="jsonl", path=path, service_name="llm")
    with capture() as records, trace.get_tracer("app").start_as_current_span("request"), gpu_span("work"):
        device.launch(5_000)
    assert flush(5)
    with gpu_span("second", sync="deferred"):
        device.launch(5_000)
    device.run_dry()
    result = shutdown(5)
    assert result
    assert (result.counts["handed_over"], result.counts["exported"]) == (2, 5)

    first, *lines = path.read_text(encoding="utf-8").splitlines()
    assert first == '{"resourceSpans":[]}', "the file was not appended to"
    assert len(lines) >= 2
    spans = {}
    for line in lines:
        (request,) = json.loads(line)["resourceSpans"]
        resource = plain_values(request["resource"]["attributes"])
        assert resource["service.name"] == "llm"
        assert resource["host.name"] == socket.gethostname()
        assert resource["process.pid"] == str(os.getpid())
        for scoped in request["scopeSpans"]:
            for span in scoped["spans"]:
                spans[span["name"]] = {**span, "scope": scoped["scope"]["name"]}
    assert set(spans) == {"request", "work", "work [gpu]", "second", "second [gpu]"}
    work, gpu, (record_,) = spans["work"], spans["work [gpu]"], records
    assert (spans["request"]["scope"], work["scope"]) == ("app", "gpu_timed")
    assert work["traceId"] == spans["request"]["traceId"] == f"{record_.trace_id:032x}"
    assert work["parentSpanId"] == spans["request"]["spanId"]
    assert gpu["parentSpanId"] == work["spanId"] == f"{record_.span_id:016x}"
    assert int(gpu["endTimeUnixNano"]) - int(gpu["startTimeUnixNano"]) == 5_000
    assert int(plain_values(work["attributes"])["gpu_timed.device.duration_ns"]) == 5_000


def resource_of_a_new_provider(**options: str) -> dict[str, object]:
    """Return the resource attributes under ``configure(exporter="none", …)``."""
    configure(exporter="none", **options)
    return dict(trace.get_tracer_provider().resource.attributes)


def test_the_resource_names_service_host_and_process():
    """Without any word from outside the resource names host and process, and the SDK's own default service."""
    held = resource_of_a_new_provider()
    assert held["host.name"] == socket.gethostname()
    assert held["process.pid"] == os.getpid()
    assert held["service.name"].startswith("unknown_service")
    assert held["telemetry.sdk.language"] == "python"


def test_the_environment_names_what_the_code_does_not(monkeypatch):
    """``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` go before what gpu_timed finds out for itself."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "from-environment")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.name=pod-7,service.name=lesser,deployment.environment=prod")
    held = resource_of_a_new_provider()
    assert held["service.name"] == "from-environment"
    assert held["host.name"] == "pod-7"
    assert held["deployment.environment"] == "prod"


def test_a_service_name_in_the_code_is_the_service_name(monkeypatch):
    """``configure(service_name=…)`` goes before ``OTEL_SERVICE_NAME``, as in the SDK's own ``Resource.create()``."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "from-environment")
    assert resource_of_a_new_provider(service_name="from-code")["service.name"] == "from-code"


def test_none_exports_nothing_and_is_a_provider(device):
    """``exporter="none"`` sets a provider whose spans record and go nowhere."""
    configure(exporter="none")
    with capture() as records, gpu_span("work"):
        assert trace.get_current_span().is_recording()
    assert len(records) == 1
    result = shutdown(2)
    assert result
    assert "exported" not in result.counts


def test_console_prints_spans():
    """``exporter="console"`` prints each span, those still waiting at the end of the process too."""
    script = """
        from gpu_timed.testing import FakeDevice, use_device
        from gpu_timed import configure, gpu_span
        configure(exporter="console")
        with use_device(FakeDevice()) as device, gpu_span("work"):
            device.launch(1_000)
    """
    printed = in_a_new_process(script)
    assert '"name": "work"' in printed
    assert '"name": "work [gpu]"' in printed


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes OTLP requests and answers as told."""

    paths: list[str]
    answer: int

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.paths.append(self.path)
        self.send_response(self.answer)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def collector() -> Iterator[http.server.ThreadingHTTPServer]:
    """A collector on this machine; set ``RequestHandlerClass.answer`` to change what it says."""
    handler = type("Handler", (Collector,), {"paths": [], "answer": 200})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@needs_exporters
@pytest.mark.parametrize("slash", ["", "/", "/custom/path"])
def test_otlp_sends_to_the_endpoint(slash, collector, device):
    """``endpoint=`` takes the address of a collector, with ``/v1/traces`` put on, or a path of its own."""
    configure(exporter="otlp", endpoint=f"http://127.0.0.1:{collector.server_port}{slash}")
    with gpu_span("work"):
        device.launch(1_000)
    result = shutdown(5)
    assert result
    assert result.counts["exported"] == 2
    assert set(collector.RequestHandlerClass.paths) == {"/custom/path" if "custom" in slash else "/v1/traces"}


@needs_exporters
def test_otlp_follows_opentelemetrys_own_variables(collector, device, monkeypatch):
    """Without ``endpoint=`` it is ``OTEL_EXPORTER_OTLP_ENDPOINT`` that says where spans go."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    configure(exporter="otlp")
    with gpu_span("work"):
        pass
    assert shutdown(5)
    assert collector.RequestHandlerClass.paths == ["/v1/traces"]


@needs_exporters
def test_a_collector_that_refuses_is_seen_in_the_flush(collector, device, caplog):
    """Spans that the receiver refused are counted, and the flush is false though the SDK says it flushed."""
    collector.RequestHandlerClass.answer = 400
    configure(exporter="otlp", endpoint=f"http://127.0.0.1:{collector.server_port}")
    with gpu_span("work"):
        device.launch(1_000)
    result = flush(5)
    assert not result
    assert result.provider == "flushed"
    assert result.counts["export_failed"] == 2
    collector.RequestHandlerClass.answer = 200
    with gpu_span("work"):
        device.launch(1_000)
    assert flush(5), "a loss that was reported is reported again"
    assert not shutdown(5), "at the end all is told"
    assert "Failed to export" in caplog.text
