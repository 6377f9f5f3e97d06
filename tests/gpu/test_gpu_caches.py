"""Pinned caches on a GPU: a second process, started elsewhere in every respect, loads what the first one built."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpu_timed
from gpu_timed.kernel_caches.known import KNOWN

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

HELD = """
import triton, triton.language as tl

@triton.jit
def add(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)
"""
CODE = """
import json, os, sys
import gpu_timed as library
pin = os.environ.get("PIN")
early = [p.key for p in library.pin_caches(pin).too_late] if pin else []
from gpu_timed import gpu_timed
from gpu_timed.testing import capture
import torch
sys.path.insert(0, os.environ["KERNELS"])
from held import add
gpu_timed(lambda: None, sync="deferred")()
x = torch.ones(256, 256, device="cuda")
y = torch.ones(1024, device="cuda")
found = {}

def calls(name, f, *args):
    f = gpu_timed(f, name=name)
    with capture() as records:
        for _ in range(3): f(*args)
    found[name] = [r.tier if isinstance(r.tier, str) else r.warmth for r in records]

calls("torch.compile", torch.compile(lambda x: torch.sin(x) * x + 1), x)
calls("triton", lambda: add[(8,)](y, 1024, BLOCK=128))
try:
    import cupy
except ImportError:
    pass
else:
    z = cupy.ones(1024)
    calls("cupy", lambda: cupy.sinh(z) + 1)
late = library.pin_caches(os.environ["LATER"], override=True)
paths = {p.key: p.path for p in library.caches().caches}
print(json.dumps([found, early, [p.key for p in late.too_late], paths]))
"""


def process(folder: Path, name: str, **variables: str) -> Any:
    """Run the workloads in a process with a current directory, a temporary one and a home of its own."""
    here = folder / name
    here.mkdir()
    dropped = {entry.variable for entry in KNOWN} | {"TRITON_HOME", "XDG_CACHE_HOME"}
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    parts = [str(Path(gpu_timed.__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    kept["PYTHONPATH"] = os.pathsep.join(str(Path(part).resolve()) for part in parts if part)  # it runs elsewhere
    own = {"TMPDIR": str(here), "HOME": str(here), "KERNELS": str(folder), "LATER": str(folder / "later" / name)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE],
        cwd=here,
        env={**kept, **own, **variables},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    print(name, told[:3])
    return told


def test_pinned_caches_keep_the_second_process_loaded(tmp_path: Path) -> None:
    """torch.compile, Triton and CuPy: built, then loaded from elsewhere; unpinned from there, built again."""
    (tmp_path / "held.py").write_text(HELD)
    pinned = tmp_path / "pinned"
    first, early, late, paths = process(tmp_path, "one", PIN=str(pinned))
    assert early == []
    assert {name: tiers[0] for name, tiers in first.items()} == dict.fromkeys(first, "built")
    assert all(tiers[1:] == ["hot", "hot"] for tiers in first.values())
    # The driver and Inductor were in use by then: that they do not listen any more is said, and they stay.
    assert {"inductor", "cuda"} <= set(late)
    assert (paths["inductor"], paths["cuda"]) == (str(pinned / "inductor"), str(pinned / "cuda"))
    for key in ("inductor", "triton", *(["cupy"] if "cupy" in first else [])):
        assert any((pinned / key).iterdir()), key
    second = process(tmp_path, "two", PIN=str(pinned))[0]
    assert {name: tiers[0] for name, tiers in second.items()} == dict.fromkeys(first, "loaded")
    assert all(tiers[1:] == ["hot", "hot"] for tiers in second.values())
    without = process(tmp_path, "three")[0]
    assert {name: tiers[0] for name, tiers in without.items()} == dict.fromkeys(first, "built")


def test_looking_at_caches_touches_no_device(tmp_path: Path) -> None:
    """caches() and pin_caches() initialise nothing: a fork afterwards can still use CUDA."""
    code = """
import os, sys
import gpu_timed, ctypes
gpu_timed.caches()
report = gpu_timed.pin_caches(os.environ["PIN"])
assert not report.too_late, report
assert "torch" not in sys.modules
code = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
assert code == 3, code  # CUDA_ERROR_NOT_INITIALIZED
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PIN": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
