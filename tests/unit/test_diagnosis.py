"""The doctor as a whole: sections, verdict, JSON, the command line, and what happens when a part of it fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from rich.console import Console
from typer.testing import CliRunner

import gpu_timed as library
from gpu_timed import ConfigurationError, configure, current, diagnose, doctor, flush, gpu_span, gpu_timed
from gpu_timed.cli import doctor as room
from gpu_timed.cli.main import app
from gpu_timed.clocks import cuda_devices
from gpu_timed.diagnosis import process, variables
from gpu_timed.diagnosis.verdict import verdict
from gpu_timed.findings import LEVELS, SECTIONS, DeviceFacts, Diagnosis, Finding, Inventory, Section
from gpu_timed.settings import Settings
from gpu_timed.sites import Sites
from gpu_timed.testing import FakeDevice

GPU = DeviceFacts(index=0, uuid="GPU-1", name="NVIDIA H200", memory_bytes=1 << 37, compute_mode="default")


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about a machine without a GPU, wherever they run, and a process without other sites."""
    monkeypatch.setattr(cuda_devices, "load", lambda: None)
    monkeypatch.setattr(doctor.cuda_driver, "device_present", lambda: False)
    # Sites live as long as what was decorated: those of other tests' modules are not to be seen here.
    monkeypatch.setattr(current._state, "sites", Sites())


def one(*findings: Finding, name: str = "versions") -> Diagnosis:
    """Return a diagnosis of one section."""
    section = Section(name, findings)
    return Diagnosis("0", (section,), verdict([section]))


# -- as a whole -------------------------------------------------------------------------------------------


def test_every_section_is_there_in_its_order_and_nothing_is_touched():
    """``diagnose()`` by itself has all sections, and neither starts the engine nor reads the settings."""
    found = diagnose()
    assert tuple(section.name for section in found.sections) == SECTIONS
    assert all(section.findings for section in found.sections)
    assert current.held_settings() is None
    assert not current.process_state().started
    assert found.section("export").get("send").values == {"answer": "not_tried"}
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def test_a_machine_without_a_gpu_is_told_so_plainly():
    """No device is a warning, says what spans carry then, and is in the verdict; the exit code stays 0."""
    found = diagnose(measure=True)
    none = found.section("devices").get("none")
    assert none.level == "warning"
    assert 'Missing("no_device")' in none.text
    assert none.values == {"absent": "no_driver"}
    assert found.section("clock").get("no_device").level == "note"
    assert "without a GPU" in found.verdict
    assert found.exit_code == 0


def test_json_has_the_documented_shape():
    """Every finding has the five documented members, levels are known, keys are unique in their section."""
    told = json.loads(diagnose(measure=True).to_json())
    assert list(told) == ["schema", "gpu_timed", "verdict", "sections"]
    assert (told["schema"], told["gpu_timed"]) == (1, library.__version__)
    assert set(told["verdict"]) == {"level", "text", "exit_code"}
    assert [section["name"] for section in told["sections"]] == list(SECTIONS)
    for section in told["sections"]:
        assert set(section) == {"name", "level", "findings"}
        keys = [finding["key"] for finding in section["findings"]]
        assert len(keys) == len(set(keys)), keys
        for finding in section["findings"]:
            assert list(finding) == ["key", "level", "text", "fix", "values"]
            assert finding["level"] in LEVELS
            assert finding["text"]
            assert not finding["text"].endswith(".")
        assert section["level"] == max((f["level"] for f in section["findings"]), key=LEVELS.index)
    assert told["verdict"]["level"] == max((s["level"] for s in told["sections"]), key=LEVELS.index)


def test_json_is_ascii():
    """Text in any language can be printed anywhere."""
    assert one(Finding("x", "ok", "5 µs")).to_json().isascii()


def test_a_section_that_raises_is_a_finding_and_the_others_are_told():
    """An error inside a section stands in its place, names its type, and is a problem."""

    def broken() -> Any:
        yield Finding("first", "ok", "seen before it broke")
        raise ZeroDivisionError("of its own")

    found = doctor.examine({"versions": broken, "caches": lambda: [Finding("x", "ok", "fine")]})
    versions, caches = found.sections
    assert [finding.key for finding in versions.findings] == ["first", "failed"]
    assert "ZeroDivisionError: of its own" in versions.get("failed").text
    assert versions.level == found.level == "problem"
    assert (found.exit_code, caches.level) == (1, "ok")
    assert found.verdict.startswith("Not ready: this could not be examined")


def test_a_section_that_hangs_is_left_behind():
    """A section that does not return is a finding after its time, with what it had found until then."""
    release = threading.Event()

    def hangs() -> Any:
        yield Finding("first", "ok", "seen")
        release.wait(30)

    began = time.monotonic()
    try:
        found = doctor.examine({"devices": hangs}, {"devices": 0.05})
    finally:
        release.set()
    assert time.monotonic() - began < 5
    assert found.section("devices").get("timed_out").level == "problem"


def test_without_another_thread_the_sections_are_asked_all_the_same(monkeypatch):
    """Where the system grants no thread, everything is asked on the caller's."""
    monkeypatch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no more threads")))
    found = doctor.examine({"caches": lambda: [Finding("x", "ok", "fine")]})
    assert found.section("caches").get("x").text == "fine"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"endpoint": "http://localhost:1"}, "needs send=True"),
        ({"endpoint": "localhost:4318", "send": True}, "http://localhost:4318"),
        ({"endpoint": "http://[::1:4318", "send": True}, "is not the address of a collector"),
        ({"endpoint": 5, "send": True}, "must be a text"),
        ({"timeout_s": 0}, "greater than 0"),
        ({"timeout_s": float("nan")}, "greater than 0"),
        ({"timeout_s": True}, "must be a number"),
        ({"timeout_s": "5"}, "must be a number"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_is_done(options, says):
    """An argument that cannot be used raises ConfigurationError and names the fix."""
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        diagnose(**options)


def test_a_section_is_had_by_name():
    """``section()`` raises KeyError for a name that is none; ``get()`` answers None."""
    found = one(Finding("x", "ok", "fine"))
    assert found.section("versions").get("y") is None
    with pytest.raises(KeyError):
        found.section("version")


# -- the verdict ------------------------------------------------------------------------------------------


def _ready(*, answer: str = "accepted", level: Any = "ok") -> list[Section]:
    return [
        Section("devices", (Finding("device.0", "ok", "0: NVIDIA H200", values={"name": "NVIDIA H200"}),)),
        Section("clock", (Finding("placement.0", "ok", "placed", values={"uncertainty_ns": 5_200}),)),
        Section("export", (Finding("send", level, "nothing listens", values={"answer": answer, "url": "http://x"}),)),
    ]


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            _ready(),
            "on NVIDIA H200 can be measured, placed on the host's time to ± 5.2 µs; a test span arrived at http://x.",
        ),
        (_ready(answer="refused", level="warning"), "5.2 µs; but nothing listens."),
        (_ready(answer="not_tried", level="note"), "5.2 µs; whether spans arrive was not tried."),
        (_ready(answer="refused", level="problem"), "Not ready: nothing listens."),
        (
            [Section("versions", (Finding("a", "problem", "one"), Finding("b", "problem", "two")))],
            "Not ready: one (1 more below).",
        ),
        (
            [*_ready(), Section("settings", (Finding("disabled", "warning", "it is off", values={"value": True}),))],
            "Switched off: it is off.",
        ),
    ],
)
def test_the_verdict_says_it_in_one_sentence(sections, says):
    """Ready, not ready and why, or switched off; and whether spans arrive."""
    assert verdict(sections).endswith(says)


# -- settings ---------------------------------------------------------------------------------------------


def settings_of(environment: dict[str, str], held: Settings | None = None) -> dict[str, Finding]:
    """Return the findings about settings, by key."""
    return {finding.key: finding for finding in variables.findings(environment, held)}


def test_every_setting_says_where_it_came_from():
    """Default, variable and configure() are told apart."""
    found = settings_of({"GPU_TIMED_MAX_QUEUE": "7"}, Settings(max_queue=7, poll_ms=5.0))
    assert {name: found[name].values["origin"] for name in ("max_queue", "poll_ms", "late")} == {
        "max_queue": "variable",
        "poll_ms": "configure",
        "late": "default",
    }
    assert found["poll_ms"].values["value"] == 5.0
    assert set(found) == set(Settings.__dataclass_fields__)
    assert all(finding.level == "ok" for finding in found.values())


def test_a_broken_setting_is_a_problem_with_its_fix(monkeypatch):
    """A value that cannot be used is told with what to write, and everything else is told as well."""
    monkeypatch.setenv("GPU_TIMED_SYNC", "defered")
    found = diagnose()
    sync = found.section("settings").get("sync")
    assert sync.level == "problem"
    assert "did you mean 'deferred'?" in sync.text
    assert found.exit_code == 1
    assert found.verdict.startswith("Not ready: GPU_TIMED_SYNC='defered' cannot be used")
    assert found.section("caches").get("triton") is not None


def test_an_unknown_variable_is_a_warning_with_a_near_miss():
    """A misspelt name says what was meant; one that is like nothing is told to be unset."""
    found = settings_of({"GPU_TIMED_MAX_QUEU": "7", "GPU_TIMED_ZZZ": "1"})
    assert found["unknown.GPU_TIMED_MAX_QUEU"].fix == "did you mean GPU_TIMED_MAX_QUEUE=7?"
    assert found["unknown.GPU_TIMED_ZZZ"].fix == "unset GPU_TIMED_ZZZ"


def test_switched_off_is_told(monkeypatch):
    """``GPU_TIMED_DISABLED=1`` is in the verdict, as it is the answer to the question."""
    monkeypatch.setenv("GPU_TIMED_DISABLED", "1")
    found = diagnose()
    assert found.verdict.startswith("Switched off: gpu_timed is switched off (GPU_TIMED_DISABLED=1)")
    assert found.exit_code == 0


def test_looking_at_settings_logs_nothing(monkeypatch, caplog):
    """Unknown variables are findings here, not log lines."""
    monkeypatch.setenv("GPU_TIMED_MAX_QUEU", "7")
    diagnose()
    assert caplog.text == ""


# -- inside a process -------------------------------------------------------------------------------------


def test_what_happened_in_this_process_is_told(device: FakeDevice):
    """Sites with their calls, pending spans, counts and what they mean."""

    @gpu_timed(name="decode", sync="deferred", every=2)
    def decode() -> None:
        device.launch(1_000)

    for _ in range(4):
        decode()
    found = diagnose().section("process")
    assert found.get("pending").values["pending"] == 2
    assert found.get("engine").values["resolving"]
    with gpu_span("prefill"):
        pass
    device.run_dry()
    flush(5)
    found = diagnose().section("process")
    assert found.get("sites").values["sites"] == {"decode": 4, "prefill": 1}
    assert found.get("pending").values["pending"] == 0
    assert found.get("no_provider").values["count"] == 3
    assert found.get("no_provider").level == "warning"
    assert "configure(exporter=...)" in found.get("no_provider").fix


def test_asking_for_the_calls_of_a_site_does_not_count():
    """The count is the same however often it is asked for."""
    site = current.new_site("x")
    next(site.calls)
    assert [site.called, site.called] == [1, 1]
    assert next(site.calls) == 1


def test_too_many_pending_spans_are_a_warning(device: FakeDevice):
    """A queue that is full says which setting makes it longer."""
    configure(max_pending=2)
    with device.held():
        for _ in range(3):
            with gpu_span("x", sync="deferred"):
                device.launch(1_000)
        pending = diagnose().section("process").get("pending")
    assert (pending.level, pending.values["max_pending"]) == ("warning", 2)
    assert "GPU_TIMED_MAX_PENDING" in pending.fix


def test_faults_inside_are_told_as_ours_and_others_as_theirs():
    """A kind that is no known one is a fault inside gpu_timed; a sink's is its own."""
    current.ledger().count("enter", 3)
    current.ledger().count("sink_Mine")
    found = diagnose().section("process")
    assert "3 faults inside gpu_timed" in found.get("enter").text
    assert "Mine raised" in found.get("sink_Mine").text


def test_every_kind_that_is_counted_has_words():
    """What is counted anywhere in the source is either explained or known to be a fault inside."""
    root = Path(library.__file__).parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in root.rglob("*.py"))
    literals = re.findall(r"(?:ledger|self)\.(?:count|fault)\(\s*\"([a-z_]+)\"", text)
    literals += re.findall(r"_fault\(\"([a-z_]+)\"|_spoil\(\"([a-z_]+)\"", text)
    kinds = {part for literal in literals for part in ([literal] if isinstance(literal, str) else literal) if part}
    assert len(kinds) > 25, "the search finds nothing"
    assert kinds - set(process.KINDS) - process.INTERNAL == set()


def test_names_in_compiled_regions_are_told_with_the_fix():
    """Each name that cannot be timed where it is called says what to decorate instead."""
    current.traced("attention")
    found = diagnose()
    target = found.section("targets").get("not_timed.attention")
    assert target.level == "warning"
    assert "gpu_timed(torch.compile(f))" in target.fix
    assert found.exit_code == 0


def test_the_provider_of_the_application_is_named():
    """The global provider's class and the host in its resource are told; it is not used."""
    provider = TracerProvider(shutdown_on_exit=False)
    trace.set_tracer_provider(provider)
    found = diagnose().section("export")
    assert found.get("provider").values["kind"] == "opentelemetry.sdk.trace.TracerProvider"
    resource = found.get("resource")
    assert resource.level == "warning"
    assert "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS=host" in resource.fix


def test_a_configured_process_names_its_host():
    """Under ``configure(exporter=…)`` the host is in the resource."""
    configure(exporter="none")
    assert diagnose().section("export").get("resource").level == "ok"


def test_diagnose_on_many_threads_while_sites_are_made():
    """Looking while others decorate gives an answer each time."""
    stop = threading.Event()

    def decorate() -> None:
        kept = []
        while not stop.is_set():
            kept = [*kept[-50:], gpu_timed(name=f"site{len(kept)}")(lambda: None)]

    thread = threading.Thread(target=decorate)
    thread.start()
    try:
        for _ in range(5):
            assert diagnose().section("process").get("failed") is None
    finally:
        stop.set()
        thread.join()


# -- the terminal -----------------------------------------------------------------------------------------


def shown(diagnosis: Diagnosis, **options: Any) -> str:
    """Return what a console of these options prints."""
    console = Console(record=True, file=open(os.devnull, "w", encoding="utf-8"), **options)  # noqa: PTH123, SIM115
    with console.file:
        room.show(console, diagnosis)
        return console.export_text()


def test_text_has_every_finding_its_fix_and_the_verdict():
    """One line for each finding, with its level in words, and one for its fix; long lines are not broken."""
    long = "x" * 300
    text = shown(one(Finding("a", "problem", long, "do [this]"), Finding("b", "ok", "fine")), width=80)
    lines = text.splitlines()
    assert lines[0] == "Versions"
    assert f"  problem  {long}" in lines
    assert f"  {'':7}  -> do [this]" in lines
    assert "  ok       fine" in lines
    assert lines[-1] == f"Verdict: Not ready: {long}."


def test_every_section_has_a_title():
    """No section is shown by its bare name."""
    assert set(room._TITLES) == set(SECTIONS)


def invoke(*arguments: str) -> Any:
    """Run the command in this process."""
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_exit_codes(monkeypatch):
    """0 where there is no problem, 1 where there is one, 2 for an option that cannot be used."""
    assert invoke("--no-send").exit_code == 0
    assert invoke("--endpoint", "http://127.0.0.1:1").exit_code == 1
    wrong = invoke("--endpoint", "localhost:4318")
    assert wrong.exit_code == 2
    assert "http://localhost:4318" in wrong.output
    assert invoke("--endpoint", "http://localhost:4318", "--no-send").exit_code == 2
    assert invoke("--nosend").exit_code == 2
    monkeypatch.setenv("GPU_TIMED_POLL_MS", "fast")
    broken = invoke("--no-send")
    assert broken.exit_code == 1
    assert "write a number" in broken.output


def test_json_on_the_command_line_is_json_alone(monkeypatch):
    """``--json`` prints one JSON document whose exit code is the command's."""
    monkeypatch.setenv("GPU_TIMED_SYNC", "defered")
    done = invoke("--json", "--no-send")
    told = json.loads(done.stdout)
    assert told["verdict"]["exit_code"] == done.exit_code == 1


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_real_process_prints_plain_lines_and_no_traceback(encoding):
    """Into a pipe there are no colours; a terminal that cannot show a character gets another one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPU_TIMED_", "OTEL_"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "gpu_timed", "doctor", "--no-send"],
        env={**kept, "PYTHONIOENCODING": encoding, "GPU_TIMED_SYNC": "µ"},
        capture_output=True,
        encoding=encoding,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Verdict: Not ready: GPU_TIMED_SYNC=")
    assert "Traceback" not in done.stdout


def test_the_doctor_imports_no_runtime():
    """Versions are read without importing what they are of."""
    script = """
        import sys
        from gpu_timed import diagnose
        diagnose()
        print(sorted({"torch", "triton", "numba", "jax", "numpy", "cupy", "requests"} & set(sys.modules)))
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPU_TIMED_", "OTEL_"))}
    lines = [line.strip() for line in script.strip().splitlines()]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], env=kept, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_inventory_is_asked_once(monkeypatch):
    """Devices and clock look at the same answer: initialising a driver may take seconds."""
    asked: list[bool] = []

    def inventory(_: Any, *, initialise: bool) -> Inventory:
        asked.append(initialise)
        return Inventory(devices=(), absent="no_driver")

    monkeypatch.setattr(cuda_devices, "inventory", inventory)
    diagnose(measure=True)
    assert asked == [True]


def test_a_device_that_cannot_be_opened_is_a_problem(monkeypatch):
    """The driver's own name for the error is shown, and only device 0 and devices in use are tried."""
    devices = (GPU, DeviceFacts(**{**{n: getattr(GPU, n) for n in GPU.__dataclass_fields__}, "index": 1}))
    monkeypatch.setattr(cuda_devices, "inventory", lambda *_, **__: Inventory(devices=devices, source="driver"))
    tried: list[int] = []

    def bench(_: Any, index: int) -> Any:
        tried.append(index)
        raise library.DeviceFault("CUDA_ERROR_DEVICE_UNAVAILABLE")

    monkeypatch.setattr(cuda_devices, "bench", bench)
    found = diagnose(measure=True)
    assert "CUDA_ERROR_DEVICE_UNAVAILABLE" in found.section("clock").get("device.0").text
    assert tried == [0]
    assert found.section("clock").get("skipped.1").level == "note"
    assert found.exit_code == 1


def test_targets_are_shown_with_what_became_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that waits for its module is no problem; one that is not in it is a warning, by name."""
    from gpu_timed.targets import apply_targets

    apply_targets("never.imported:f,math:no_such_name")
    found = {f.key: f for s in doctor.diagnose().sections if s.name == "targets" for f in s.findings}
    assert found["target.never.imported:f"].level == "ok"
    assert "never.imported" in found["target.never.imported:f"].text
    assert found["target.math:no_such_name"].level == "warning"
