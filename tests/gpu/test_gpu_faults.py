"""A card in error, and a context that goes away under open spans: the user's own error comes out, and nothing hangs.

Each in a process of its own, which it ends. Needs one GPU and torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

_HEAD = """
    import ctypes, json, sys, threading
    import torch
    import gpu_timed as library
    from gpu_timed import current, flush, gpu_span, gpu_timed
    from gpu_timed.export.memory import MemorySink

    sink = MemorySink(0)
    current.tracer().resolver.add_sink(sink)
    x = torch.ones(1 << 20, device="cuda")
    with gpu_span("before"):
        x.add_(1)

    def tell(**more):
        result = flush(10)
        told = [[r.name, r.status, str(r.device_ns), r.error] for r in sink.records]
        print(json.dumps({"told": told, "pending": result.pending, "counts": dict(result.counts), **more}), flush=True)
"""


def run(body: str) -> dict[str, Any]:
    """Run *body* in a fresh process; return what its ``tell()`` told. It must end by itself within 60 s."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_HEAD) + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, f"rc {done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    found: dict[str, Any] = json.loads(lines[-1])
    assert "Exception ignored" not in done.stderr, done.stderr[-3000:]
    return found


@pytest.mark.parametrize("sync", ["boundary", "deferred", "device"])
def test_a_device_assert_inside_open_spans(sync: str) -> None:
    """An assert on the device under nested spans: the user's own call raises it, and every span is told as an error."""
    found = run(f"""
        @gpu_timed(name="inner", sync={sync!r})
        def inner():
            index = torch.full((4,), 1 << 30, device="cuda")
            torch.zeros(4, device="cuda")[index]

        came = ""
        try:
            with gpu_span("outer", sync={sync!r}):
                inner()
                torch.cuda.synchronize()
        except RuntimeError as error:
            came = type(error).__name__ + ": " + str(error).splitlines()[0]
        after = []
        for _ in range(3):
            with gpu_span("after", sync={sync!r}):
                after.append(1)
        tell(came=came, after=len(after))
    """)
    assert "assert" in found["came"], found
    assert found["after"] == 3
    assert found["pending"] == 0
    told = {name: (status, device) for name, status, device, _ in found["told"]}
    assert told["before"][0] == "ok"
    assert told["inner"][1].startswith("Missing('device_error'"), found
    assert told["outer"][0] == "error"
    assert all("Missing" in device for name, _, device, _ in found["told"] if name == "after"), found
    assert len(found["told"]) == 6


def test_an_illegal_address_under_other_threads() -> None:
    """An illegal access in one thread while two others are measured: all threads end, with the driver's own error."""
    found = run("""
        errors, stop = [], threading.Event()

        @gpu_timed(name="steady", sync="deferred")
        def steady(y):
            y.add_(1)

        def work():
            y = torch.ones(1024, device="cuda")
            try:
                while not stop.is_set():
                    steady(y)
            except Exception as error:
                errors.append(str(error).splitlines()[0])

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        import time
        time.sleep(0.3)
        cuda = ctypes.CDLL("libcuda.so.1")
        came = ""
        try:
            with gpu_span("culprit"):
                index = torch.full((4,), 1 << 30, device="cuda")
                torch.zeros(4, device="cuda")[index]
                torch.cuda.synchronize()
        except Exception as error:
            came = str(error).splitlines()[0]
        time.sleep(0.3)
        stop.set()
        for thread in threads:
            thread.join(20)
        tell(came=came, errors=errors, alive=sum(thread.is_alive() for thread in threads))
    """)
    assert "assert" in found["came"] or "illegal" in found["came"], found
    assert found["alive"] == 0
    assert found["errors"], "the threads' own calls raised nothing"
    assert all("CUDA" in error or "assert" in error for error in found["errors"]), found["errors"]
    assert found["pending"] == 0
    assert any(device.isdigit() for name, _, device, _ in found["told"] if name == "steady")


@pytest.mark.parametrize("how", ["reset", "release"])
def test_a_primary_context_that_goes_away(how: str) -> None:
    """The context is destroyed while deferred spans wait: each is told, with a time or without, and nothing hangs."""
    call = {
        "reset": "cuda.cuDevicePrimaryCtxReset_v2(0)",
        "release": "cuda.cuDevicePrimaryCtxRelease_v2(0)",
    }[how]
    found = run(f"""
        cuda = ctypes.CDLL("libcuda.so.1")
        flush(10)
        library.configure(poll_ms=200)
        for _ in range(20):
            with gpu_span("waiting", sync="deferred"):
                torch.cuda._sleep(1_000_000)
        code = {call}
        opened = 0
        for sync in ("boundary", "deferred", "device"):
            with gpu_span("after", sync=sync):
                opened += 1
        tell(code=code, opened=opened)
        import os
        os._exit(0)  # torch itself may not end well without its context
    """)
    assert found["opened"] == 3
    assert found["pending"] == 0
    assert sum(name == "waiting" for name, *_ in found["told"]) == 20
    for name, status, device, error in found["told"]:
        assert device.isdigit() or device.startswith("Missing("), (name, status, device, error)
