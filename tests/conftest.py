"""Fixtures for every test: a fresh process state before and after, and a provider whose spans can be looked at."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once

from gpu_timed.testing import FakeDevice, reset, use_device


def _forget_provider() -> None:
    """Let the next test set its own global provider: the API allows only one in a process."""
    trace._TRACER_PROVIDER_SET_ONCE = Once()
    trace._TRACER_PROVIDER = None


@pytest.fixture(autouse=True)
def _clean_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees another's settings, counts, provider or thread."""
    import os

    for name in list(os.environ):
        if name.startswith(("GPU_TIMED_", "OTEL_")):
            monkeypatch.delenv(name)
    _forget_provider()
    reset()
    yield
    reset()
    _forget_provider()
    assert [thread.name for thread in threading.enumerate() if thread.name == "gpu_timed-resolver"] == []


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    """What there is by now is not looked through by each collection: that of torch alone takes seconds."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the end of the process collect all there is: libraries complain of what is left."""
    gc.unfreeze()


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    """A fake device whose time stands still: every number is exact."""
    with use_device(FakeDevice()) as made:
        yield made


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    """The exporter of a global SDK provider. Call ``gpu_timed.flush()`` before looking."""
    held = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(held))
    trace.set_tracer_provider(provider)
    return held
