"""CUDA modules loaded in a call, told by CUPTI. In processes of their own. Needs one GPU, torch and cupti-python.

About 10 seconds a test. What would stand still ends after 50 seconds, with every thread's stack.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from warmth_table import show

import gpu_timed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

HEAD = """
    import faulthandler, json, os, sys, threading, time
    faulthandler.dump_traceback_later(50, exit=True)
    from gpu_timed import current, gpu_timed
    from gpu_timed.testing import capture
    gpu_timed(lambda: None, sync="deferred")()
    import torch
    ring = current._state.ring
    x = torch.ones(256, 256, device="cuda")
    torch.cuda.synchronize()
    def told(records):
        return [[r.tier if isinstance(r.tier, str) else r.warmth, [f"{c.probe}: {c.what}" for c in r.causes],
                 [c.what for c in r.concurrent]] for r in records]
    def calls(work):
        f = gpu_timed(work, name="f", sync="deferred")
        with capture() as records:
            for _ in range(4): f()
        with capture() as hot:
            for _ in range(1000): f()
        print(json.dumps([told(records), [each for each in told(hot) if each[0] != "hot"]]))
"""


@pytest.fixture(autouse=True)
def _cupti_python() -> None:
    pytest.importorskip("cupti")


def run(body: str, *, on: bool = True, head: str = HEAD) -> list[Any]:
    """Run *body* in a fresh process; return the JSON lines it printed. It must come to its end."""
    path = os.pathsep.join(
        part for part in (str(Path(gpu_timed.__file__).parents[1]), os.environ.get("PYTHONPATH", "")) if part
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(head) + textwrap.dedent(body) + "\nprint('[\"DONE\"]')"],
        env={**os.environ, "PYTHONPATH": path, "GPU_TIMED_MODULE_LOADS": "1" if on else "0"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    print(done.stdout, done.stderr[-4_000:])
    assert done.returncode == 0
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert found.pop() == ["DONE"]
    return found


@pytest.mark.parametrize("work", ["x @ x", "torch.softmax(x, 0)"])
def test_an_eager_first_call_is_explained_by_what_it_loaded(work: str) -> None:
    """With the probe initialised, and why; without it unknown; hot calls, 1,000 of each, are hot."""
    for on, first in ((True, "initialised"), (False, "unknown")):
        ((calls, not_hot),) = run(f"calls(lambda: {work})", on=on)
        expected, seen = [first, "hot", "hot", "hot"], [call[0] for call in calls]
        show(f"`{work}`", f"module_loads={on}", expected, seen, [])
        assert seen == expected, calls
        assert not_hot == []
        assert any(cause.startswith("cuda modules: CUDA module loaded") for cause in calls[0][1]) == on


def test_measuring_loads_nothing_itself() -> None:
    """The first span of a process, around nothing, has no cause: what is told is the call's own."""
    ((calls, not_hot),) = run("calls(lambda: None)")
    assert calls[0] == ["unknown", [], []]
    assert not_hot == []


def test_loading_on_one_thread_while_another_launches_and_measures() -> None:
    """300 modules, told inside the driver, while two threads launch and record events: nobody waits for ever.

    What one thread loads makes no other's call cold; it is listed beside some of them.
    """
    ((loaded, generations, cold, listed),) = run(
        """
        import ctypes
        cuda = ctypes.CDLL("libcuda.so.1")
        done = threading.Event()
        loaded = [0]
        def load():
            torch.ones(1, device="cuda")  # the thread's context
            for index in range(300):
                text = f".version 7.0\\n.target sm_80\\n.address_size 64\\n.visible .entry k{index}() {{ ret; }}\\n"
                module, function = ctypes.c_void_p(), ctypes.c_void_p()
                assert cuda.cuModuleLoadData(ctypes.byref(module), text.encode()) == 0
                assert cuda.cuModuleGetFunction(ctypes.byref(function), module, f"k{index}".encode()) == 0
                loaded[0] += 1
            done.set()
        def record():
            event = torch.cuda.Event(enable_timing=True)
            while not done.is_set():
                for _ in range(100): event.record()
                event.query()
        x @ x
        f = gpu_timed(lambda: x.add_(1), name="f", sync="deferred")
        f(), f()
        torch.cuda.synchronize()
        before = ring.generation
        with capture() as records:
            threads = [threading.Thread(target=each) for each in (load, record)]
            for thread in threads: thread.start()
            while not done.is_set():
                f()
                if len(records) > 200_000: break
            for thread in threads: thread.join()
        found = told(records)
        print(json.dumps([loaded[0], ring.generation - before, [each for each in found if each[0] != "hot"][:5],
                          sum(bool(each[2]) for each in found)]))
        """
    )
    print("loaded", loaded, "told", generations, "calls beside", listed)
    assert loaded == 300
    assert generations >= 100  # each is told; some versions may put off loading one without code
    assert cold == []
    assert listed > 0


def test_being_attached_initialises_nothing() -> None:
    """A child forked after torch was imported, and the probe attached, can use CUDA, and its parent too."""
    run(
        """
        child = os.fork()
        if not child:
            try:
                code = 0 if torch.ones(4, device="cuda").sum().item() == 4 else 1
            except Exception as error:
                print(error, file=sys.stderr)
                code = 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        seen = current._state.ring.generation
        assert (torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")).sum().item() == 512
        assert current._state.ring.generation > seen
        """,
        head="""
        import faulthandler, os, sys
        faulthandler.dump_traceback_later(50, exit=True)
        from gpu_timed import current, gpu_timed
        gpu_timed(lambda: None, sync="deferred")()
        import torch
        assert current.probes()["cuda modules"] == "attached", current.probes()
        assert not torch.cuda.is_initialized()
        """,
    )


def test_it_makes_way_for_kernel_records_and_comes_back() -> None:
    """Records are refused while it is attached, whole within the block, and modules are told again afterwards."""
    ((records, first, state),) = run(
        """
        from gpu_timed.clocks.cupti_activity import KernelRecords, RecordsUnavailable
        try:
            KernelRecords().start()
        except RecordsUnavailable as error:
            assert "module_loads" in str(error), error
        else:
            raise SystemExit("a second subscriber was let in")
        x.add_(1)
        torch.cuda.synchronize()
        with current.without_module_loads(), KernelRecords() as session:
            for _ in range(10): x.add_(1)
            torch.cuda.synchronize()
        assert session.found.complete, session.found.note
        f = gpu_timed(lambda: torch.softmax(x, 0), name="f", sync="deferred")
        with capture() as records: f(), f()
        print(json.dumps([len(session.found.executions), told(records), current.probes()["cuda modules"]]))
        """
    )
    assert state == "attached"
    assert records == 10
    assert [call[0] for call in first] == ["initialised", "hot"]


def test_torch_profiler_beside_it_harms_nobody() -> None:
    """A profile taken meanwhile may lack the device's part; taken while it makes way, it is whole."""
    ((beside, alone, total),) = run(
        """
        from torch.profiler import ProfilerActivity, profile
        def profiled():
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
                for _ in range(7): x.add_(1)
                torch.cuda.synchronize()
            kinds = torch.autograd.DeviceType.CUDA
            return len([e for e in prof.events() if e.device_type == kinds and "elementwise" in e.name])
        if os.environ["GPU_TIMED_MODULE_LOADS"] == "1":
            with current.without_module_loads(): alone = profiled()
        beside = profiled()
        print(json.dumps([beside, alone, x[0, 0].item()]))
        """
    )
    print("kernels in a profile beside it", beside, "while it makes way", alone, "of 7")
    assert alone == 7
    assert total == 15
