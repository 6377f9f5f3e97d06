"""A kernel compiler's decorator above ours is refused with the fix, and nothing else is; by stand-ins and really."""

from __future__ import annotations

import functools
import json
import linecache
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpu_timed import NotCallableError, gpu_timed

BARE, NAMED = "@gpu_timed\ndef k(x): return x", "@gpu_timed(\n    name='s',\n)\ndef k(x): return x"
CUDA, NUMBA, TRITON = "from numba import cuda\n", "import numba\n", "import triton\n"
TUNE = "@triton.autotune([triton.Config({})], [])\n"
WRAP = lambda outside, text: f"{outside}:\n" + re.sub("^", "    ", text, flags=re.MULTILINE)
NESTED = WRAP("def f()", CUDA + WRAP("class A", "@cuda.jit\n" + BARE)) + "\nf()"
WRONG = {
    CUDA + "@cuda.jit\n" + BARE: "@cuda.jit",
    "from numba import cuda as c\n@c.jit('void(int32)')\n" + NAMED: "@c.jit",
    "from numba.cuda import jit\n@staticmethod\n@jit(\n    'void(int32)',\n)\n" + BARE: "@jit",
    CUDA + WRAP("class A", "@cuda.jit\n" + NAMED): "@cuda.jit",
    WRAP("def f()", CUDA + "@cuda.jit\n" + BARE) + "\nf()": "@cuda.jit",
    NESTED: "@cuda.jit",
    NUMBA + "@numba.njit\n" + BARE: "@numba.njit",
    "import numba as nb\n@nb.vectorize(['int32(int32)'])\n" + NAMED: "@nb.vectorize",
    TRITON + "@triton.jit\n" + BARE: "@triton.jit",
    TRITON + "@triton.jit(debug=True)\n" + NAMED: "@triton.jit",
    TRITON + TUNE + "@triton.jit\n" + BARE: "@triton.autotune",
}
OF_PY_FUNC = NUMBA + "@numba.njit\ndef k(x): return x\ngpu_timed(k.py_func)"
OF_DISABLED = NUMBA + "numba.config.DISABLE_JIT = True\n@numba.njit\ndef k(x): return x\nassert gpu_timed(k)(1) == 1"
FINE = [
    CUDA + "@gpu_timed\n@cuda.jit\ndef k(x): pass",
    CUDA + "@gpu_timed(name='s')\n@cuda.jit(\n    device=False,\n)\ndef k(x): pass",
    NUMBA + "@gpu_timed\n@numba.njit\ndef k(x): return x",
    NUMBA + "@gpu_timed\n@numba.vectorize\ndef k(x): return x",
    TRITON + "@gpu_timed\n@triton.jit\ndef k(x): pass",
    TRITON + "@gpu_timed\n" + TUNE + "@triton.jit\ndef k(x): pass",
    TRITON + TUNE + "@gpu_timed\n@triton.jit\ndef k(x): pass",
    "import types\nother = types.SimpleNamespace(jit=lambda f: f, njit=lambda f: f)\n@other.jit\n@other.njit\n" + BARE,
    "def jit(f): return f\njit.__module__ = 'numbalike.jit'\n@jit\n" + BARE,
    "@(lambda jit: jit)\n" + BARE,
    f"exec({CUDA + '@cuda.jit' + chr(10) + BARE!r}, {{'gpu_timed': gpu_timed}})",
    CUDA + "@cuda.jit\ndef k(x): pass\n" + BARE + "\ncuda.jit(lambda x: x)\ngpu_timed(lambda x: x)",
    OF_PY_FUNC,
    OF_DISABLED,  # the last: it stays switched off
]
CASES = [*WRONG.items(), *((source, "") for source in FINE)]
SCRIPT = """
import json, runpy, sys
import numpy as np
if not hasattr(np, "row_stack"): setattr(np, "row_stack", np.vstack)
import numba, triton
from gpu_timed import NotCallableError
found = {}
for path in sys.argv[1:]:
    try: runpy.run_path(path); found[path] = ""
    except NotCallableError as error: found[path] = str(error)
print("\\n" + json.dumps(found))
"""


def stand_in(module: str, name: str, give: Callable[..., Any] = lambda f: f) -> Any:
    """Return a decorator, to be used with arguments or without, that passes for one of *module*."""

    def decorator(*given: Any, **_: Any) -> Any:
        return give(given[0]) if given and callable(given[0]) else give

    decorator.__module__, decorator.__name__ = module, name
    return decorator


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba and Triton are loaded, or so it seems; Numba gives the function itself, as where it is switched off."""
    numba, cuda, triton = (ModuleType(name) for name in ("numba", "numba.cuda", "triton"))
    vars(cuda).update(jit=stand_in("numba.cuda.decorators", "jit"))
    for name in ("njit", "vectorize"):
        vars(numba)[name] = stand_in("numba.core.decorators", name, lambda f: [setattr(f, "py_func", f), f][1])
    vars(numba).update(cuda=cuda, config=SimpleNamespace())
    vars(triton).update(jit=stand_in("triton.runtime.jit", "jit", functools.partial), Config=dict)
    vars(triton).update(autotune=stand_in("triton.runtime.autotuner", "autotune", functools.partial))
    for module in (numba, cuda, triton):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the file of each case: a decorator above is read from the source."""
    folder = tmp_path_factory.mktemp("order")
    for index, (source, _) in enumerate(CASES):
        Path(folder, f"case_{index}.py").write_text("from gpu_timed import gpu_timed\n" + source)
    return [str(folder / f"case_{index}.py") for index in range(len(CASES))]


@pytest.fixture(scope="module")
def real(paths: list[str]) -> dict[str, str]:
    """Return what decorating says in each case, with Numba and Triton themselves, in a process of its own."""
    if find_spec("numba") is None or find_spec("triton") is None:
        pytest.skip("needs numba and triton")
    ran = subprocess.run([sys.executable, "-c", SCRIPT, *paths], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, str] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("which", ["stand-ins", "real"])
@pytest.mark.parametrize(
    ("index", "text"),
    [(i, text) for i, (_, text) in enumerate(CASES)],
)
def test_only_the_wrong_order_is_refused(
    request: pytest.FixtureRequest, paths: list[str], which: str, index: int, text: str
) -> None:
    """A compiler's decorator over ours raises, naming both and the fix; nothing else does."""
    said = ""
    if which == "real":
        said = request.getfixturevalue("real")[paths[index]]
    else:
        request.getfixturevalue("compilers")
        try:
            runpy.run_path(paths[index])
        except NotCallableError as error:
            said = str(error)
    assert bool(said) == bool(text), said
    assert not text or (said.startswith(f"{text} stands above @gpu_timed on ") and f"first and {text} below" in said)


def test_no_source_is_read_where_no_compiler_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decorating costs no look at the source until Numba or Triton is there."""
    read: list[str] = []
    monkeypatch.setattr(linecache, "getlines", lambda name, *_: [read.append(name), []][1])
    for name in ("numba", "triton"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    gpu_timed(lambda: None)
    assert read == []
    monkeypatch.setitem(sys.modules, "numba", ModuleType("numba"))
    gpu_timed(lambda: None)
    assert read == [__file__]
