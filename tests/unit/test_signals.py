"""Signals, forks and the end of the process at random moments, each in a process of its own with a seed."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

_HEAD = """
    import os, random, signal, sys, threading, time
    from opentelemetry import context as otel_context
    from gpu_timed import current, flush, gpu_span, gpu_timed
    from gpu_timed.export.memory import MemorySink
    from gpu_timed.testing import FakeDevice, use_device

    chance = random.Random(int(sys.argv[1]))
    device = FakeDevice(realtime=True)
    entered = use_device(device)
    entered.__enter__()

    @gpu_timed(sync="boundary")
    def waits():
        device.launch(20_000)

    @gpu_timed(sync="deferred")
    def goes_on():
        device.launch(20_000)

    def both():
        waits()
        goes_on()
"""


def run(body: str, *, seed: int = 1, code: int = 0) -> str:
    """Run *body* in a fresh process, which must end within 60 s with *code* and without a word on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_HEAD) + textwrap.dedent(body), str(seed)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, f"rc {done.returncode}: {done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "Exception ignored" not in done.stderr, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("seed", [1, 2])
def test_interrupts_at_random_moments(seed: int) -> None:
    """Hundreds of Ctrl-C at random moments of timed calls: context, marks and the thread are as they should be."""
    out = run(
        """
        before = otel_context.get_current()
        both()
        caught = changed = 0
        armed = False

        def handle(number, frame):
            # Not inside the standard library, or the make-believe driver, which no real signal would find so.
            if armed and "gpu_timed" in frame.f_code.co_filename and "fake" not in frame.f_code.co_filename:
                if frame.f_code.co_name not in ("__exit__", "_count_the_gone", "calls_in"):
                    raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, handle)
        until = time.monotonic() + 3
        while time.monotonic() < until and caught < 400:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(20e-6, 400e-6))
            try:
                armed = True
                for _ in range(5):
                    both()
                armed = False
            except KeyboardInterrupt:
                armed = False
                caught += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            if otel_context.get_current() is not before:
                changed += 1
                otel_context.attach(before)
        device.run_dry()
        result = flush(20)
        threads = [thread.name for thread in threading.enumerate()].count("gpu_timed-resolver")
        watched = sum(len(place.watchers) for place in device._places.values())
        print(caught > 20, changed, result.pending, threads, watched)
        """,
        seed=seed,
    )
    assert out.split() == ["True", "0", "0", "1", "0"]


def test_a_handler_that_flushes_at_random_moments() -> None:
    """A handler that times, and flushes, in the midst of timed calls: it never waits for what it has interrupted."""
    out = run(
        """
        both()
        handled = 0

        def handle(number, frame):
            global handled
            handled += 1
            with gpu_span("handler"):
                pass
            if handled % 20 == 0:
                flush(5)

        signal.signal(signal.SIGALRM, handle)
        until = time.monotonic() + 30
        while handled <= 60 and time.monotonic() < until:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(20e-6, 400e-6))  # once: no handler inside a handler
            for _ in range(20):
                both()
            signal.setitimer(signal.ITIMER_REAL, 0)
        print(handled > 50, flush(20).pending, device.marks_in_use)
        """
    )
    assert out.split() == ["True", "0", "0"]


def test_daemon_threads_that_still_call_as_the_interpreter_ends() -> None:
    """Threads in timed calls, a generator left open and a finaliser that calls: the process ends, and says nothing."""
    run(
        """
        def forever():
            while True:
                both()

        for _ in range(3):
            threading.Thread(target=forever, daemon=True).start()

        @gpu_timed(sync="deferred")
        def left_open():
            yield 1
            yield 2

        class Last:
            def __del__(self):
                both()

        held, last = left_open(), Last()
        next(held)
        time.sleep(0.2)
        """
    )


def test_threads_that_die_with_open_generators() -> None:
    """A generator begun in a thread that has ended is finalised in another: nothing stays behind."""
    out = run(
        """
        @gpu_timed(sync="deferred")
        def parts():
            for _ in range(3):
                device.launch(1000)
                yield 1

        kept = []

        def begin():
            for _ in range(10):
                one = parts()
                next(one)
                kept.append(one)

        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
        before = otel_context.get_current()
        kept.clear()
        device.run_dry()
        print(otel_context.get_current() is before, flush(20).pending, device.marks_in_use)
        """
    )
    assert out.split() == ["True", "0", "0"]


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="forks")
def test_forks_at_random_moments_of_the_resolver() -> None:
    """Forked while gpu_timed's thread is at work: each child measures its own calls, and ends."""
    out = run(
        """
        good = 0
        for _ in range(20):
            for _ in range(chance.randrange(1, 50)):
                goes_on()
            child = os.fork()
            if not child:
                both()
                os._exit(0 if flush(20).pending == 0 else 1)
            good += os.waitpid(child, 0)[1] == 0
        print(good, flush(20).pending)
        """
    )
    assert out.split() == ["20", "0"]
