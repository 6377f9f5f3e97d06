"""Programs in processes of their own, which send to the receivers of a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

PRELUDE = """
import atexit, json, os, signal, sys, threading, time
from gpu_timed import WaitTimeout, configure, current, flush, gpu_span, gpu_timed, shutdown
from opentelemetry import trace

def own_provider():
    "What an application does that sets OpenTelemetry up by itself, all of it by OTEL_* variables."
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    if os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)

def set_up():
    "As the test says: by configure(), or by the application's own provider."
    if os.environ["DOOR"] == "own":
        own_provider()
    else:
        configure(exporter="otlp")

def fake_device():
    from gpu_timed.testing import FakeDevice, use_device
    device = FakeDevice(realtime=True)
    using = use_device(device)
    using.__enter__()
    device.using = using  # or it would end with this function
    return device

def answer(**values):
    print(json.dumps(values), flush=True)

def wait_for(pid, limit_s=20):
    "Return the exit code of a child."
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"

def fork(child):
    "Run child() in a forked process; return its process id. It ends by os._exit(): 0 unless child() raised."
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        child()
        code = 0
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        os._exit(code)
"""


@dataclass(frozen=True)
class Ended:
    """A program that has ended."""

    code: int
    answers: list[dict[str, object]]
    out: str
    err: str
    took_s: float

    @property
    def answer(self) -> dict[str, object]:
        """The only thing it answered."""
        (found,) = self.answers
        return found


@pytest.fixture
def program() -> Callable[..., Ended]:
    """Run a script after the prelude in a process of its own, with the given variables, and return how it ended."""

    def run(script: str, *, code: int | None = 0, prelude: bool = True, limit_s: float = 60, **variables: str) -> Ended:
        ours = ("GPU_TIMED_", "OTEL_", "SLURM_", "OMPI_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        text = (PRELUDE if prelude else "") + textwrap.dedent(script)
        before = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", text],
            env={**kept, "DOOR": "configure", **variables},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        took_s = time.monotonic() - before
        assert code is None or done.returncode == code, done.stderr
        answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return Ended(done.returncode, answers, done.stdout, done.stderr, took_s)

    return run


@pytest.fixture(params=["configure", "own"])
def door(request: pytest.FixtureRequest) -> str:
    """By which of the two ways the program sets OpenTelemetry up."""
    return request.param
