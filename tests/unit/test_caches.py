"""Where caches of compiled code lie, what decided it, and what they move with: every variable and default."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import gpu_timed
from gpu_timed.cache_facts import COLD_ELSEWHERE, CacheFacts, CacheReport
from gpu_timed.cli.main import app
from gpu_timed.kernel_caches import known, looking
from gpu_timed.kernel_caches.places import Surroundings

SOURCE = str(Path(__file__).parents[2] / "src")
PLACES = [entry for entry in known.KNOWN if entry.variable]


def around(variables: dict[str, str] | None = None, **changed: Any) -> Surroundings:
    """Return surroundings with nothing installed, nothing imported and nothing set."""
    plain = Surroundings(
        variables=variables or {},
        home="/home/me",
        current="/srv/app",
        temporary="/scratch/mine",
        user="me",
        modules={},
        platform="linux",
        installed=lambda _: False,
        driver=False,
    )
    return plain._replace(**changed)


def facts(key: str, variables: dict[str, str] | None = None, **changed: Any) -> CacheFacts:
    """Return what is known of the cache *key* in these surroundings."""
    return next(found for found in looking.look(around(variables, **changed)) if found.key == key)


def module(name: str, **held: Any) -> dict[str, Any]:
    """Return a stand-in for an imported module, and its parents, as ``sys.modules`` has them."""
    parts = name.split(".")
    made = {".".join(parts[: end + 1]): ModuleType(parts[end]) for end in range(len(parts))}
    vars(made[name]).update(held)
    return made


@pytest.mark.parametrize(
    ("key", "path", "moves_with", "enabled"),
    [
        ("inductor", "/scratch/mine/torchinductor_me", "temporary directory", True),
        ("inductor_remote", None, "nothing", False),
        ("triton", "/home/me/.triton/cache", "home", True),
        ("triton_autotune", "/home/me/.triton/cache", "home", False),
        ("numba", None, "source file", True),
        ("cupy", "/home/me/.cupy/kernel_cache", "home", True),
        ("jax", None, "nothing", False),
        ("cuda", "/home/me/.nv/ComputeCache", "home", True),
        ("torch_extensions", "/home/me/.cache/torch_extensions", "home", True),
        ("jiterator", "/home/me/.cache/torch/kernels", "home", True),
        ("tunableop", "/srv/app/tunableop_results.csv", "current directory", False),
        ("vllm", "/home/me/.cache/vllm", "home", True),
        ("flashinfer", "/home/me/.cache/flashinfer", "home", True),
        ("warp", "/home/me/.cache/warp", "home", True),
        ("tensorrt", None, "nothing", False),
        ("cudnn", None, "nothing", False),
        ("cubecl", "/srv/app/target/environment", "current directory", True),
    ],
)
def test_the_default_of_each(key: str, path: str | None, moves_with: str, enabled: bool) -> None:
    """Nothing is set: the place, what it moves with, and whether anything is kept there."""
    found = facts(key)
    assert (found.path, found.moves_with, found.enabled) == (path, moves_with, enabled)
    assert found.decided_by in ("default", "none", "current directory")


@pytest.mark.parametrize("entry", PLACES, ids=lambda entry: entry.key)
def test_a_variable_that_names_a_place(entry: known.Known) -> None:
    """An absolute path moves with nothing but, for Numba, the source; a relative one with the current directory."""
    switches = {"ORT_TENSORRT_ENGINE_CACHE_ENABLE": "1"}
    below = ".cache/flashinfer" if entry.key == "flashinfer" else ""
    found = facts(entry.key, {entry.variable: "/shared/cache", **switches})
    assert found.path == str(Path("/shared/cache") / below)
    assert (found.decided_by, found.by) == ("variable", entry.variable)
    assert found.moves_with == ("source file" if entry.key == "numba" else "nothing")
    found = facts(entry.key, {entry.variable: "cache", **switches})
    assert found.path == str(Path("/srv/app/cache") / below)
    assert (found.decided_by, found.moves_with) == ("current directory", "current directory")


@pytest.mark.parametrize("entry", PLACES, ids=lambda entry: entry.key)
def test_a_tilde_is_expanded_by_those_that_do_only(entry: known.Known) -> None:
    """A container's ENV has no shell: ``~`` then is a directory of that name, where the program was started."""
    found = facts(entry.key, {entry.variable: "~/cache", "ORT_TENSORRT_ENGINE_CACHE_ENABLE": "1"})
    assert found.path is not None
    if entry.key == "vllm":
        assert found.path == "/home/me/cache"
    else:
        assert found.path.startswith("/srv/app/~/cache")
        assert (found.moves_with, "does not expand" in found.note) == ("current directory", True)


@pytest.mark.parametrize(
    ("key", "variables", "path", "by"),
    [
        ("triton", {"TRITON_HOME": "/big"}, "/big/.triton/cache", "TRITON_HOME"),
        ("vllm", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/vllm", "XDG_CACHE_HOME"),
        ("jiterator", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/torch/kernels", "XDG_CACHE_HOME"),
        ("torch_extensions", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/torch_extensions", "XDG_CACHE_HOME"),
        ("inductor_remote", {"TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "1"}, "redis://localhost:6379", None),
        (
            "inductor_remote",
            {"TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE": "1", "TORCHINDUCTOR_REDIS_URL": "redis://u:secret@r:1"},
            "redis://r:1",
            None,
        ),
        ("jax", {"JAX_COMPILATION_CACHE_DIR": "gs://bucket/cache"}, "gs://bucket/cache", "JAX_COMPILATION_CACHE_DIR"),
        ("tensorrt", {"ORT_TENSORRT_ENGINE_CACHE_ENABLE": "1"}, "/srv/app", ""),
    ],
)
def test_other_ways_to_decide(key: str, variables: dict[str, str], path: str, by: str | None) -> None:
    """Homes of several runtimes, servers, buckets; a password is not shown."""
    found = facts(key, variables)
    assert (found.path, found.enabled) == (path, True)
    assert by is None or found.by == by
    if "://" in path:
        assert (found.exists, found.writable, found.moves_with) == (None, None, "nothing")


@pytest.mark.parametrize(
    ("key", "variable", "value"),
    [
        ("inductor", "TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1"),
        ("inductor", "TORCH_COMPILE_FORCE_DISABLE_CACHES", "1"),
        ("inductor", "TORCHINDUCTOR_FX_GRAPH_CACHE", "0"),
        ("triton", "TRITON_ALWAYS_COMPILE", "1"),
        ("cupy", "CUPY_CACHE_IN_MEMORY", "1"),
        ("cuda", "CUDA_CACHE_DISABLE", "1"),
        ("jiterator", "USE_PYTORCH_KERNEL_CACHE", "0"),
        ("vllm", "VLLM_DISABLE_COMPILE_CACHE", "1"),
    ],
)
def test_a_switch_that_turns_it_off(key: str, variable: str, value: str) -> None:
    """Nothing is kept, and what switched it off is named; the other value leaves it on."""
    found = facts(key, {variable: value})
    assert not found.enabled
    assert variable.lower().removeprefix("torchinductor_") in found.note.lower() or "FORCE_DISABLE" in found.note
    assert found.cold_elsewhere == "always: nothing is kept"
    assert facts(key, {variable: "1" if value == "0" else "0"}).enabled


@pytest.mark.parametrize(
    ("key", "variable"), [("triton_autotune", "TRITON_CACHE_AUTOTUNING"), ("tunableop", "PYTORCH_TUNABLEOP_ENABLED")]
)
def test_a_switch_that_turns_it_on(key: str, variable: str) -> None:
    """What is off by default says what would switch it on."""
    assert variable in facts(key).note
    assert facts(key, {variable: "1"}).enabled


def test_jax_can_be_switched_off_and_says_what_it_does_not_keep() -> None:
    """A directory alone is not everything: the switch, and the least time of a compile."""
    variables = {"JAX_COMPILATION_CACHE_DIR": "/jax"}
    assert "1.0 s is not kept" in facts("jax", variables).note
    assert "0 s is not" in facts("jax", {**variables, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}).note
    assert not facts("jax", {**variables, "JAX_ENABLE_COMPILATION_CACHE": "false"}).enabled


def test_no_home_at_all() -> None:
    """A container's user without a home: the runtimes write ``~`` where they were started."""
    found = facts("cupy", home="~")
    assert (found.path, found.moves_with) == ("/srv/app/~/.cupy/kernel_cache", "current directory")
    assert "no home" in found.note


# -- runtimes that are imported already -------------------------------------------------------------------


def test_live_settings_go_before_the_environment() -> None:
    """What code has set in a runtime counts, and is named."""
    numba = module("numba.core.config", CACHE_DIR="/code")
    found = facts("numba", {"NUMBA_CACHE_DIR": "/env"}, modules=numba)
    assert (found.path, found.decided_by, found.by) == ("/code", "setting", "numba.config.CACHE_DIR")
    jax = module("jax", config=SimpleNamespace(jax_compilation_cache_dir="here", jax_enable_compilation_cache=True))
    found = facts("jax", modules=jax)
    assert (found.path, found.moves_with, found.imported) == ("/srv/app/here", "current directory", True)
    triton = module("triton.knobs", cache=SimpleNamespace(dir="/knob"))
    assert facts("triton", {"TRITON_CACHE_DIR": "/env"}, modules=triton).path == "/knob"
    cupy = module("cupy.cuda.compiler", _kernel_cache_backend=SimpleNamespace(_cache_dir="/opened"))
    assert facts("cupy", {"CUPY_CACHE_DIR": "/env"}, modules=cupy).path == "/opened"
    for switch in ({"fx_graph_cache": False}, {"fx_graph_cache": True, "force_disable_caches": True}):
        assert not facts("inductor", modules=module("torch._inductor.config", **switch)).enabled
    on = module("torch._inductor.config", fx_graph_cache=True, force_disable_caches=False)
    assert facts("inductor", {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}, modules=on).enabled


def test_a_variable_that_came_too_late_is_said() -> None:
    """Numba and JAX read theirs at import: set afterwards, it is not what decides."""
    found = facts("numba", {"NUMBA_CACHE_DIR": "/env"}, modules=module("numba.core.config", CACHE_DIR=""))
    assert (found.path, "not read" in found.note) == (None, True)
    jax = module("jax", config=SimpleNamespace(jax_compilation_cache_dir=None))
    found = facts("jax", {"JAX_COMPILATION_CACHE_DIR": "/env"}, modules=jax)
    assert (found.path, "not read" in found.note) == (None, True)


def test_what_torch_writes_into_variables_is_not_the_users_word() -> None:
    """Inductor puts its default into its own variable, and a directory of its own into Triton's."""
    default = "/scratch/mine/torchinductor_me"
    variables = {"TORCHINDUCTOR_CACHE_DIR": default, "TRITON_CACHE_DIR": f"{default}/triton/0"}
    loaded = module("torch._inductor.codecache")
    found = facts("inductor", variables, modules=loaded)
    assert (found.decided_by, found.moves_with) == ("default", "temporary directory")
    assert facts("inductor", variables).decided_by == "variable"  # without torch, somebody else wrote it
    found = facts("triton", variables, modules=loaded)
    assert (found.decided_by, found.by, found.moves_with) == ("setting", "torch.compile", "temporary directory")
    found = facts("triton", {**variables, "TRITON_CACHE_DIR": f"{default}/triton/x"}, modules=loaded)
    assert (found.decided_by, found.moves_with) == ("variable", "nothing")


def test_a_runtime_whose_settings_raise_is_read_by_the_environment() -> None:
    """Another version, half imported: no guess and no error."""

    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    modules = dict.fromkeys(
        ("numba.core.config", "jax", "triton.knobs", "cupy.cuda.compiler", "torch._inductor.config"), Broken()
    )
    assert facts("numba", {"NUMBA_CACHE_DIR": "/env"}, modules=modules).path == "/env"
    assert facts("triton", modules=modules).path == "/home/me/.triton/cache"
    assert facts("inductor", modules=modules).enabled


# -- CubeCL, and what is installed ------------------------------------------------------------------------


def test_cubecl_follows_the_current_directory(tmp_path: Path) -> None:
    """Below the project where there is one, below the current directory where not, elsewhere by its own file."""
    inside = tmp_path / "project" / "src"
    inside.mkdir(parents=True)
    assert facts("cubecl", current=str(inside)).path == str(inside / "target" / "environment")
    (tmp_path / "project" / "Cargo.toml").write_text("")
    found = facts("cubecl", current=str(inside))
    assert (found.path, found.moving) == (str(tmp_path / "project/target/environment"), False)
    (tmp_path / "project/target/environment").mkdir(parents=True)
    assert facts("cubecl", current=str(inside)).moving  # something was kept there: it is in use
    settings = tmp_path / "project" / "cubecl.toml"
    for cache, path, moves in (
        ('"local"', str(inside / "environment"), "current directory"),
        ('"global"', "/home/me/.config/cubecl", "home"),
        ('{ file = "/kept" }', "/kept", "nothing"),
        ('{ file = "kept" }', str(inside / "kept"), "current directory"),
    ):
        settings.write_text(f"[autotune]\ncache = {cache}\n")
        found = facts("cubecl", current=str(inside))
        assert (found.path, found.moves_with, found.in_use) == (path, moves, True)
    settings.write_text("no toml [")
    assert facts("cubecl", current=str(inside)).path == str(tmp_path / "project/target/environment")


def test_what_is_not_installed_is_not_in_use() -> None:
    """Only an installed runtime, or a named place, can make anything cold."""
    assert not facts("cupy").in_use
    assert facts("cupy", installed=lambda package: package == "cupy").in_use
    assert facts("cupy", {"CUPY_CACHE_DIR": "/env"}).in_use
    assert facts("cupy", {"CUPY_CACHE_DIR": "env"}, installed=lambda package: package == "cupy").moving
    assert not facts("cupy", {"CUPY_CACHE_DIR": "env", "CUPY_CACHE_IN_MEMORY": "1"}).moving
    assert (facts("cuda").in_use, facts("cuda", driver=True).in_use) == (False, True)
    assert facts("tensorrt", installed=lambda package: package == "onnxruntime").installed


def test_another_platform() -> None:
    """A Mac has Metal's shaders and no CUDA; Windows keeps the driver's below APPDATA."""
    assert "metal" not in {found.key for found in looking.look(around())}
    on_mac = {found.key for found in looking.look(around(platform="darwin"))}
    assert ("metal" in on_mac, "cuda" in on_mac) == (True, False)
    found = facts("cuda", {"APPDATA": "/Roaming"}, platform="win32")
    assert found.path == "/Roaming/NVIDIA/ComputeCache"
    assert facts("warp", platform="darwin").path == "/home/me/Library/Caches/warp"


# -- what lies there --------------------------------------------------------------------------------------


def test_what_lies_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Size, entries, free space and whether it can be written; a walk that ends at its limit says so."""
    (tmp_path / "kernel").write_bytes(b"x" * 1000)
    found = facts("triton", {"TRITON_CACHE_DIR": str(tmp_path)})
    assert (found.exists, found.writable, found.size_bytes, found.entries, found.complete) == (
        True,
        True,
        1000,
        1,
        True,
    )
    assert found.free_bytes is not None
    assert abs(found.free_bytes - shutil.disk_usage(tmp_path).free) < 1 << 30
    found = facts("triton", {"TRITON_CACHE_DIR": str(tmp_path / "none" / "yet")})
    assert (found.exists, found.writable, found.size_bytes) == (False, True, None)
    assert found.free_bytes
    (tmp_path / "kernel").chmod(0o755)  # what could be written and entered, if it were a directory
    found = facts("triton", {"TRITON_CACHE_DIR": str(tmp_path / "kernel")})
    assert (found.exists, found.obstructed, found.writable) == (False, True, False)

    def broken(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shutil, "disk_usage", broken)
    assert facts("triton", {"TRITON_CACHE_DIR": str(tmp_path)}).note == "cannot be looked at: Input/output error"


def test_the_current_directory_itself_is_not_counted(tmp_path: Path) -> None:
    """Where a cache lies in it among everything else, its size would be somebody else's."""
    (tmp_path / "data").write_bytes(b"x")
    found = facts("tensorrt", {"ORT_TENSORRT_ENGINE_CACHE_ENABLE": "1"}, current=str(tmp_path))
    assert (found.exists, found.size_bytes, found.moves_with) == (True, None, "current directory")


def test_a_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, and it is what --check is for."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = facts("triton", {"TRITON_CACHE_DIR": str(tmp_path)}, installed=lambda _: True)
    assert found.unusable
    report = CacheReport("0", "/", (found,))
    assert (report.not_writable, report.exit_code) == (("triton",), 1)


# -- the report, and the command --------------------------------------------------------------------------


def test_the_shape_of_the_json() -> None:
    """Every key is there, sorted out by hand: what is there keeps its name."""
    told = json.loads(gpu_timed.caches().to_json())
    assert set(told) == {"schema", "gpu_timed", "current_directory", "caches", "verdict"}
    assert (told["schema"], set(told["verdict"])) == (1, {"moving", "not_writable", "exit_code"})
    for cache in told["caches"]:
        assert set(cache) >= {
            *("key", "title", "path", "variable", "decided_by", "by", "moves_with", "cold_elsewhere", "enabled"),
            *("installed", "imported", "exists", "writable", "size_bytes", "entries", "complete", "free_bytes", "note"),
        }
        assert cache["moves_with"] in COLD_ELSEWHERE
    assert gpu_timed.caches().get("triton") is not None
    assert gpu_timed.caches().get("none") is None


def test_the_same_program_from_two_directories(tmp_path: Path) -> None:
    """The caches that move are named, each with another path; and no runtime was imported to find out."""
    code = "import json, sys, gpu_timed; r = gpu_timed.caches(); print(r.to_json()); "
    code += "print(sorted({'torch', 'triton', 'numba', 'jax', 'cupy'} & set(sys.modules)), file=sys.stderr)"
    settings = {"PYTORCH_TUNABLEOP_ENABLED": "1", "TRITON_CACHE_DIR": "kernels", "CUPY_CACHE_DIR": "/fixed"}
    seen = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path / name,
            env={**os.environ, **settings, "PYTHONPATH": SOURCE},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stderr.strip() == "[]"
        seen.append(json.loads(done.stdout))
    one, two = ({cache["key"]: cache for cache in told["caches"]} for told in seen)
    moved = {key for key in one if one[key]["path"] != two[key]["path"]}
    told = {key for key in one if one[key]["moves_with"] == "current directory"}
    assert moved == told == {"triton", "triton_autotune", "tunableop", "cubecl"}
    assert one["triton"]["path"] == str(tmp_path / "one" / "kernels")
    assert "cubecl" not in seen[0]["verdict"]["moving"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 whatever is found, 1 only when asked to check, 2 for an option that does not exist."""
    monkeypatch.chdir(tmp_path)
    for entry in known.KNOWN:
        if entry.variable:
            monkeypatch.setenv(entry.variable, str(tmp_path / entry.key))
    calm = CliRunner().invoke(app, ["caches", "--check"])
    assert (calm.exit_code, "Nothing moves with the current directory" in calm.output) == (0, True)
    monkeypatch.setenv("TRITON_CACHE_DIR", "kernels")
    shown = CliRunner().invoke(app, ["caches"])
    assert shown.exit_code == 0
    assert str(tmp_path / "kernels") in shown.output
    assert "TRITON_CACHE_DIR is relative" in shown.output
    assert "Cold starts to expect: triton move" in shown.output
    checked = CliRunner().invoke(app, ["caches", "--check", "--json"])
    assert (checked.exit_code, json.loads(checked.output)["verdict"]["moving"]) == (1, ["triton"])
    assert CliRunner().invoke(app, ["caches", "--wrong"]).exit_code == 2


def test_the_doctor_tells_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One truth: the doctor's section is made of the same facts."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", "vllm")
    section = gpu_timed.diagnose().section("caches")
    for cache in gpu_timed.caches().caches:
        told = section.get(cache.key)
        if cache.core or cache.in_use:
            assert told is not None
            assert (told.values["path"], told.values["moves_with"]) == (cache.path, cache.moves_with)
        else:
            assert told is None
    noted = section.get("vllm")
    assert noted is not None
    assert (noted.level, "pin_caches" in noted.fix) == ("note", True)
