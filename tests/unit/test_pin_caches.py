"""Pinning every cache below one directory: what is set, what wins, when it is too late; and that it keeps."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpu_timed import ConfigurationError, compile_caches, pin_caches
from gpu_timed.cache_facts import PinReport
from gpu_timed.cli import run as run_room
from gpu_timed.clocks import cuda_devices
from gpu_timed.kernel_caches import known, pinning
from gpu_timed.kernel_caches.places import Surroundings

SOURCE = str(Path(__file__).parents[2] / "src")
PINNED = {entry.key: entry for entry in known.KNOWN if entry.pinned_as}


def around(variables: Any, modules: dict[str, Any], installed: tuple[str, ...] | None) -> Surroundings:
    """Return surroundings in which these packages are installed, or all."""
    return Surroundings(
        variables=variables,
        home="/home/me",
        current="/srv/app",
        temporary="/scratch",
        user="me",
        modules=modules,
        platform="linux",
        installed=lambda package: installed is None or package in installed,
        driver=True,
    )


def pin(
    directory: Any,
    variables: dict[str, str] | None = None,
    modules: dict[str, Any] | None = None,
    *,
    override: bool = False,
    strict: bool = False,
    driver_initialised: bool = False,
    installed: tuple[str, ...] | None = None,
) -> tuple[PinReport, dict[str, str]]:
    """Pin in surroundings where everything is installed; returns the report and the environment afterwards."""
    environment = dict(variables or {})
    report = pinning.pin(
        directory,
        around(environment, modules or {}, installed),
        environment,
        override=override,
        strict=strict,
        driver_initialised=driver_initialised,
    )
    return report, environment


def module(name: str, **held: Any) -> dict[str, Any]:
    """Return a stand-in for an imported module as ``sys.modules`` has it."""
    made = ModuleType(name)
    vars(made).update(held)
    return {name: made}


def test_everything_is_below_one_directory(tmp_path: Path) -> None:
    """Each runtime's variable, absolute, each in a directory of its own that is there and can be written."""
    report, environment = pin(tmp_path / "made" / "here")
    assert report
    assert {told.key: told.status for told in report.pins} == dict.fromkeys(PINNED, "pinned")
    assert (
        environment
        == report.variables
        == {entry.variable: str(tmp_path / "made" / "here" / entry.pinned_as) for entry in PINNED.values()}
    )
    folders = [Path(path).parent if path.endswith(".csv") else Path(path) for path in environment.values()]
    assert all(folder.is_dir() for folder in folders)
    assert len({str(folder) for folder in folders}) == len(PINNED)
    again, unchanged = pin(tmp_path / "made" / "here", environment)
    assert (bool(again), unchanged) == (True, environment)
    assert report.get("none") is None


def test_what_stays_cold_though_pinned_is_said(tmp_path: Path) -> None:
    """JAX keeps no quick compile and Triton no tuning, unless they are told to."""

    def reasons(**variables: str) -> dict[str, str]:
        return {told.key: told.reason for told in pin(tmp_path, variables)[0].pins if told.reason}

    assert set(reasons()) == {"jax", "triton"}
    assert "less than 1.0 s is not kept" in reasons()["jax"]
    assert "TRITON_CACHE_AUTOTUNING=1" in reasons()["triton"]
    told = {"TRITON_CACHE_AUTOTUNING": "1", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    assert "less than 0 s" in reasons(**told)["jax"]
    assert "triton" not in reasons(**told)


def test_what_is_not_installed_is_left_alone(tmp_path: Path) -> None:
    """No variable and no directory for a runtime that is not here."""
    report, environment = pin(tmp_path, installed=("numba",))
    assert set(environment) == {"NUMBA_CACHE_DIR", "CUDA_CACHE_PATH"}
    told = report.get("triton")
    assert told is not None
    assert (told.status, told.path) == ("not_applicable", None)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cuda", "numba"]


def test_the_users_own_variables_win(tmp_path: Path) -> None:
    """They are kept and reported, a relative one with what it does; override= replaces them."""
    own = {"TRITON_CACHE_DIR": "/theirs", "CUPY_CACHE_DIR": "relative"}
    report, environment = pin(tmp_path, own)
    assert report  # nothing was too late
    assert {key: environment[key] for key in own} == own
    kept = report.get("triton"), report.get("cupy")
    assert [told and (told.status, told.path) for told in kept] == [("kept", "/theirs"), ("kept", "/srv/app/relative")]
    assert kept[1] is not None
    assert "moves with the current directory" in kept[1].reason
    report, environment = pin(tmp_path, own, override=True)
    assert environment["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    assert [told.status for told in report.pins if told.status != "pinned"] == []


def test_the_users_own_settings_win(tmp_path: Path) -> None:
    """What code has set in a runtime that is imported."""
    config = SimpleNamespace(jax_compilation_cache_dir="/code")
    config.update = lambda name, value: setattr(config, name, value)
    knobs = SimpleNamespace(dir="/code")
    modules = {
        **module("numba.core.config", CACHE_DIR="/code"),
        **module("jax", config=config),
        **module("triton.knobs", cache=knobs),
    }
    report, environment = pin(tmp_path, modules=modules)
    for key in ("numba", "jax", "triton"):
        told = report.get(key)
        assert told is not None
        assert (told.status, told.path) == ("kept", "/code")
    assert {"NUMBA_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR", "TRITON_CACHE_DIR"}.isdisjoint(environment)
    pin(tmp_path, modules=modules, override=True)
    assert str(tmp_path / "numba") == modules["numba.core.config"].CACHE_DIR
    assert config.jax_compilation_cache_dir == str(tmp_path / "jax")
    assert vars(knobs) == {}  # the variable decides again


def test_a_runtime_that_is_imported_is_told(tmp_path: Path) -> None:
    """Numba on the CPU and on CUDA, and JAX, have read their variables already."""
    config = SimpleNamespace(jax_compilation_cache_dir=None)
    config.update = lambda name, value: setattr(config, name, value)
    modules = {
        **module("numba.core.config", CACHE_DIR=""),
        **module("numba.cuda.core.config", CACHE_DIR=""),
        **module("jax", config=config),
    }
    report, _ = pin(tmp_path, modules=modules)
    assert (
        modules["numba.core.config"].CACHE_DIR == modules["numba.cuda.core.config"].CACHE_DIR == str(tmp_path / "numba")
    )
    assert config.jax_compilation_cache_dir == str(tmp_path / "jax")
    told = report.get("numba")
    assert told is not None
    assert "decorated with cache=True before keep" in told.reason


def test_a_variable_of_a_parent_that_came_after_the_import(tmp_path: Path) -> None:
    """It says what is asked for and was not read: the live setting is made, and nothing is called the user's own."""
    modules = module("numba.core.config", CACHE_DIR="")
    report, _ = pin(tmp_path, {"NUMBA_CACHE_DIR": str(tmp_path / "numba")}, modules)
    told = report.get("numba")
    assert told is not None
    assert told.status == "pinned"
    assert str(tmp_path / "numba") == modules["numba.core.config"].CACHE_DIR


LATE: dict[str, tuple[dict[str, Any], bool]] = {
    "inductor": (module("torch._inductor.codecache", PyCodeCache=SimpleNamespace(modules=[1])), False),
    "cupy": (module("cupy.cuda.compiler", _kernel_cache_backend=SimpleNamespace(_cache_dir="/opened")), False),
    "jax": (module("jax._src.compilation_cache", _cache=object()), False),
    "cuda": ({}, True),
}


@pytest.mark.parametrize("key", LATE)
def test_too_late_is_said_for_each(key: str, tmp_path: Path) -> None:
    """It stays where it is, everything else is pinned; strict raises and has changed nothing."""
    modules, initialised = LATE[key]
    report, environment = pin(tmp_path, modules=modules, driver_initialised=initialised)
    assert not report
    assert [told.key for told in report.too_late] == [key]
    assert report.too_late[0].reason
    assert PINNED[key].variable not in environment
    assert len(environment) == len(PINNED) - 1
    target = tmp_path / "strict"
    with pytest.raises(ConfigurationError, match=r"too late to pin .*Nothing was changed"):
        pin(target, modules=modules, driver_initialised=initialised, strict=True)
    assert list(target.iterdir()) == []


def test_inductor_in_a_version_that_cannot_be_asked_is_too_late(tmp_path: Path) -> None:
    """No guess: a code cache that does not say whether it was used counts as used. Unused, it is not too late."""
    report, _ = pin(tmp_path, modules=module("torch._inductor.codecache"))
    assert [told.key for told in report.too_late] == ["inductor"]
    unused = module("torch._inductor.codecache", PyCodeCache=SimpleNamespace(modules=[]))
    report, environment = pin(tmp_path, {"TORCHINDUCTOR_CACHE_DIR": "/scratch/torchinductor_me"}, unused)
    assert report
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")  # torch wrote the other, no user


def test_inductor_takes_triton_along(tmp_path: Path) -> None:
    """Once Inductor has compiled it has named Triton's place too: that is not the user's word, and too late."""
    inside = "/scratch/torchinductor_me"
    variables = {"TORCHINDUCTOR_CACHE_DIR": inside, "TRITON_CACHE_DIR": f"{inside}/triton/0"}
    report, _ = pin(tmp_path, variables, LATE["inductor"][0])
    assert [told.key for told in report.too_late] == ["inductor", "triton"]


def test_a_runtime_that_refuses_leaves_the_others_pinned(tmp_path: Path) -> None:
    """One that raises is reported with what it said; its variable is not set."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("not now")

    config = SimpleNamespace(jax_compilation_cache_dir=None, update=refuse)
    report, environment = pin(tmp_path, modules=module("jax", config=config))
    assert [(told.key, told.reason) for told in report.too_late] == [("jax", "could not be set: not now")]
    assert "JAX_COMPILATION_CACHE_DIR" not in environment
    assert len(environment) == len(PINNED) - 1


def test_the_public_function_says_what_was_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log, and by a report that is false; it sets the process's own environment."""
    for entry in PINNED.values():
        monkeypatch.setenv(entry.variable, "")
        monkeypatch.delenv(entry.variable)
    held = around(os.environ, {}, ("triton",))
    monkeypatch.setattr(compile_caches, "surroundings", lambda _, driver: held._replace(driver=True))
    monkeypatch.setattr(cuda_devices, "initialised", lambda: True)
    assert not pin_caches(tmp_path)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    assert "too late for some caches" in caplog.text
    assert "the CUDA driver is initialised already" in caplog.text
    with pytest.raises(ConfigurationError, match="too late"):
        pin_caches(tmp_path, strict=True)


def test_whether_the_driver_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of a driver that is loaded already, by a call that initialises nothing; without a driver it is not."""
    loaded: list[Any] = []
    monkeypatch.setattr(cuda_devices.ctypes, "CDLL", lambda name, mode=0: loaded.append((name, mode)))
    for answer, said in ((3, False), (0, True), (100, True)):
        library = SimpleNamespace(cuDeviceGetCount=lambda _, answer=answer: answer)
        monkeypatch.setattr(cuda_devices, "load", lambda library=library: library)
        assert cuda_devices.initialised() is said
    monkeypatch.setattr(cuda_devices, "load", lambda: None)
    assert not cuda_devices.initialised()
    if sys.platform.startswith("linux"):
        assert all(mode & os.RTLD_NOLOAD for _, mode in loaded)

        def absent(*_: Any, **__: Any) -> Any:
            raise OSError("not loaded")

        monkeypatch.setattr(cuda_devices.ctypes, "CDLL", absent)
        monkeypatch.setattr(cuda_devices, "load", lambda: pytest.fail("loaded anew"))
        assert not cuda_devices.initialised()


# -- the directory ----------------------------------------------------------------------------------------


def test_a_relative_path_is_made_absolute_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else pinning would bring back what it is to end."""
    monkeypatch.chdir(tmp_path)
    report, environment = pin("kept")
    assert report.directory == str(tmp_path / "kept")
    assert environment["TRITON_CACHE_DIR"] == str(tmp_path / "kept" / "triton")
    assert len(report.notes) == 1
    assert "relative" in report.notes[0]
    assert pin(tmp_path / "kept")[0].notes == ()


@pytest.mark.parametrize("bad", ["", "  ", None, 3, b"bytes"])
def test_what_is_no_path_is_refused(bad: Any) -> None:
    """By an error that says what it must be."""
    with pytest.raises(ConfigurationError, match="must be a path"):
        pin(bad)


def test_a_file_and_a_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each error names the path and what to do."""
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigurationError, match=r"no directory.*name a directory"):
            pin(bad)

    def read_only(*_: Any, **__: Any) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(pinning.tempfile, "TemporaryFile", read_only)
    with pytest.raises(ConfigurationError, match=r"cannot be written \(Read-only file system\).*chown"):
        pin(tmp_path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root can write anywhere")
def test_a_read_only_directory(tmp_path: Path) -> None:
    """With the access bits of a real one."""
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(ConfigurationError, match="cannot be written"):
            pin(tmp_path / "below")
    finally:
        tmp_path.chmod(0o755)


def test_a_directory_that_everybody_can_write_is_noted(tmp_path: Path) -> None:
    """What lies in a cache is run as code."""
    tmp_path.chmod(0o777)
    assert "run as code" in pin(tmp_path)[0].notes[0]
    tmp_path.chmod(stat.S_IRWXU)
    assert pin(tmp_path)[0].notes == ()


# -- real runtimes, in fresh processes --------------------------------------------------------------------

HEAD = """
    import json, os, sys
    import gpu_timed as library
    if os.environ.get("PIN"): report = library.pin_caches(os.environ["PIN"])
    from gpu_timed import gpu_timed
    from gpu_timed.testing import capture
    gpu_timed(lambda: None, sync="deferred")()
    def calls(f, *args):
        f = gpu_timed(f, name="f")
        with capture() as records:
            for _ in range(2): f(*args)
        print(json.dumps([r.tier if isinstance(r.tier, str) else r.warmth for r in records]))
"""
INDUCTOR = """
    import torch, torch._inductor.config
    torch._inductor.config.cpp_cache_precompile_headers = False
    calls(torch.compile(lambda x: torch.sin(x) + x), torch.ones(8))
"""
NUMBA = "sys.path.insert(0, os.environ['CODE'])\nfrom held import double\ncalls(double, 3)"
JAX = """
    import jax, jax.numpy as jnp
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    x = jnp.ones(64)
    calls(jax.jit(lambda x: jnp.sin(x) * 3), x)
"""


def process(code: str, folder: Path, name: str, **variables: str) -> Any:
    """Run *code* in a process with a current and a temporary directory of its own; returns what it printed."""
    (folder / name).mkdir(exist_ok=True)
    dropped = {entry.variable for entry in known.KNOWN} | {"TMPDIR", "PIN"}
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    own = {"PYTHONPATH": SOURCE, "TMPDIR": str(folder / name), "JAX_PLATFORMS": "cpu", **variables}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(HEAD) + textwrap.dedent(code)],
        cwd=folder / name,
        env={**kept, **own},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", '"'))]


@pytest.mark.timeout(360)  # three processes, two of which run a C++ compiler
def test_inductor_stays_loaded_when_started_elsewhere(tmp_path: Path) -> None:
    """Another current and another temporary directory: pinned, the code is loaded; without, it is compiled anew.

    And in the one that has compiled without, it is too late to pin.
    """
    pytest.importorskip("torch")
    pinned = {"PIN": str(tmp_path / "pinned")}
    assert process(INDUCTOR, tmp_path, "one", **pinned) == [["built", "hot"]]
    assert process(INDUCTOR, tmp_path, "two", **pinned) == [["loaded", "hot"]]
    assert list((tmp_path / "pinned" / "inductor").iterdir())
    tiers, (late, path) = process(textwrap.dedent(INDUCTOR) + pin_and_tell(tmp_path), tmp_path, "three")
    assert (tiers, late) == (["built", "hot"], ["inductor"])
    assert path.startswith(str(tmp_path / "three" / "torchinductor_"))


def test_inductor_imported_is_not_too_late(tmp_path: Path) -> None:
    """Its default is in its variable already, and is not taken for the user's."""
    pytest.importorskip("torch")
    found = process(f"import torch, torch._inductor.codecache\n{pin_and_tell(tmp_path)}", tmp_path, "one")
    assert found == [[[], str(tmp_path / "pinned" / "inductor")]]


def pin_and_tell(folder: Path) -> str:
    """Return code that pins, and prints what was too late and where Inductor's cache then is."""
    return (
        f"report = library.pin_caches({str(folder / 'pinned')!r})\n"
        "print(json.dumps([[p.key for p in report.too_late], library.caches().get('inductor').path]))\n"
    )


def test_numba_stays_loaded_beside_read_only_code(tmp_path: Path) -> None:
    """Pinned, nothing lies beside the source; code that was moved is cold again, as is said of it."""
    pytest.importorskip("numba")
    source = "from numba import njit\n\n@njit(cache=True)\ndef double(x):\n    return 2 * x\n"
    for name in ("code", "moved"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "held.py").write_text(source)
    pinned = {"PIN": str(tmp_path / "pinned"), "CODE": str(tmp_path / "code")}
    assert process(NUMBA, tmp_path, "one", **pinned) == [["built", "hot"]]
    assert process(NUMBA, tmp_path, "two", **pinned) == [["loaded", "hot"]]
    later = f"import numba; library.pin_caches({pinned['PIN']!r})\n{NUMBA}"
    assert process(later, tmp_path, "three", CODE=pinned["CODE"]) == [["loaded", "hot"]]
    assert list((tmp_path / "code").rglob("*.nbi")) == []
    assert process(NUMBA, tmp_path, "four", **{**pinned, "CODE": str(tmp_path / "moved")}) == [["built", "hot"]]


def test_jax_keeps_something_at_all(tmp_path: Path) -> None:
    """Without a directory it keeps nothing; pinned, the second process loads, also where JAX came first."""
    pytest.importorskip("jax")
    assert process(JAX, tmp_path, "one") == process(JAX, tmp_path, "one") == [["built", "hot"]]
    pinned = {"PIN": str(tmp_path / "pinned")}
    assert process(JAX, tmp_path, "two", **pinned) == [["built", "hot"]]
    assert process(JAX, tmp_path, "three", **pinned) == [["loaded", "hot"]]
    later = f"import jax; library.pin_caches({str(tmp_path / 'pinned')!r})\n" + textwrap.dedent(JAX)
    assert process(later, tmp_path, "four") == [["loaded", "hot"]]


def test_children_inherit_it(tmp_path: Path) -> None:
    """By the environment: what a child finds is what its parent pinned."""
    code = """
        import subprocess
        tell = "import gpu_timed; print(gpu_timed.caches().get('numba').path)"
        out = subprocess.run([sys.executable, "-c", tell], capture_output=True, text=True, cwd="/", check=True)
        print(json.dumps(out.stdout.strip()))
    """
    found = process(code, tmp_path, "one", PIN=str(tmp_path / "pinned"))
    assert found == [str(tmp_path / "pinned" / "numba")]


# -- gpu-timed run ----------------------------------------------------------------------------------------


def run_command(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``gpu-timed run`` with a program that prints where Numba would keep its code."""
    (folder / "app.py").write_text("import os; print(os.environ.get('NUMBA_CACHE_DIR'))\n")
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    return subprocess.run(
        [sys.executable, "-m", "gpu_timed", "run", *words, "--", "app.py"],
        cwd=folder,
        env={**kept, "PYTHONPATH": SOURCE, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_run_pins_before_the_program_starts(tmp_path: Path) -> None:
    """By the variable or the option, which goes before it; a relative path is said to be one."""
    pytest.importorskip("numba")
    done = run_command(tmp_path, GPU_TIMED_PIN_CACHES=str(tmp_path / "pinned"))
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "pinned" / "numba"))
    assert "unknown setting" not in done.stderr
    done = run_command(tmp_path, "--pin-caches", "here", GPU_TIMED_PIN_CACHES=str(tmp_path / "pinned"))
    assert done.stdout.strip() == str(tmp_path / "here" / "numba")
    assert "relative" in done.stderr
    assert run_command(tmp_path).stdout.strip() == "None"


def test_run_refuses_a_directory_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the program starts, with exit code 2 and the fix."""
    (tmp_path / "file").write_text("")
    done = run_command(tmp_path, "--pin-caches", "file")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no directory" in done.stderr
    monkeypatch.setenv("GPU_TIMED_PIN_CACHES", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match="no directory"):
        run_room.prepare(["-c", "0"], targets=(), exporter=None, out=None, service_name=None)
