"""Captures and waits for a whole device make way for one another, and neither for ever."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gpu_timed import current, gpu_timed
from gpu_timed.clocks.fake import FakeDevice
from gpu_timed.modes import launcher
from gpu_timed.modes.launcher import Ground, Passing, inside
from gpu_timed.testing import capture, use_device

PATIENCE_S = 10.0


def beside(action: Any) -> tuple[threading.Thread, threading.Event]:
    """Run *action* in another thread; returns it and what is set when it is through."""
    through = threading.Event()

    def run() -> None:
        action()
        through.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, through


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LONGEST_S", PATIENCE_S)


@pytest.mark.usefixtures("patient")
def test_a_wait_begins_after_the_capture_that_is_under_way() -> None:
    ground, order = Ground(), list[str]()

    def wait() -> None:
        with ground.waiting() as delayed:
            order.append("waited" if delayed else "did not wait")

    wait()
    with ground.capturing():
        thread, through = beside(wait)
        assert not through.wait(0.05)
        order.append("captured")
    thread.join(PATIENCE_S)
    assert order == ["did not wait", "captured", "waited"]


@pytest.mark.usefixtures("patient")
def test_a_capture_begins_after_the_waits_that_are_under_way_and_before_others() -> None:
    ground, order, wanted = Ground(), list[str](), threading.Event()

    def capture() -> None:
        wanted.set()
        with ground.capturing():
            order.append("captured")

    def wait() -> None:
        with ground.waiting():
            order.append("waited")

    with ground.waiting(), ground.waiting():
        first, through = beside(capture)
        wanted.wait(PATIENCE_S)
        while not ground._capturing:
            pass
        second, _ = beside(wait)
        assert not through.wait(0.05)
        order.append("the first waits end")
    first.join(PATIENCE_S)
    second.join(PATIENCE_S)
    assert order == ["the first waits end", "captured", "waited"]


def test_neither_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LONGEST_S", 0.01)
    ground = Ground()
    with ground.waiting(), pytest.raises(Passing, match="waiting for the device"), ground.capturing():
        pass
    assert not ground._capturing
    with ground.capturing(), ground.waiting():
        pass
    with ground.capturing():
        pass


def test_a_thread_does_not_wait_for_its_own_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    ground, asked = Ground(), list[int]()
    inside.depth += 1
    try:
        with ground.capturing():
            monkeypatch.setattr(ground._quiet, "wait_for", lambda *_: asked.append(1))
            with ground.waiting():
                pass
    finally:
        inside.depth -= 1
    assert asked == []


def test_spans_that_wait_for_the_device_do_so_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LONGEST_S", 0.01)
    seen: list[int] = []
    with use_device(FakeDevice()):
        timed = gpu_timed(lambda: None, name="f", sync="device")
        tracer = current.tracer()
        held = current.modes.ground
        place: Any = tracer.locator.locate()
        clock = place.clock
        monkeypatch.setattr(type(clock), "wait_device", lambda *_: seen.append(held._waiting))
        with capture() as records:
            timed()
            with held.capturing():
                timed()
    assert seen == [1, 1]
    assert [record.quality for record in records] == [(), ("capture_awaited",)]
    assert held._waiting == 0
