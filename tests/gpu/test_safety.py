"""Nothing that worked without us stops working: captures, errors, devices. Needs one GPU; A4 needs two."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from typing import Any

import pytest

from gpu_timed import flush, gpu_span, gpu_timed
from gpu_timed.testing import capture

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


def test_captures_survive_spans_in_other_threads() -> None:
    """100 captures of 100 succeed in the default capture mode beside boundary and deferred spans in two threads."""
    import torch

    stop = threading.Event()
    entered: Counter[str] = Counter()
    errors: list[BaseException] = []
    ready = threading.Barrier(3)

    def work(sync: str, side: bool) -> None:
        torch.cuda.set_device(0)
        stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
        x = torch.ones(1024, device="cuda")
        y = torch.empty_like(x)
        name = f"{sync}-{'side' if side else 'default'}"

        @gpu_timed(name=name, sync=sync)
        def call() -> None:
            torch.add(x, 1, out=y)

        with torch.cuda.stream(stream):
            call()
            entered[name] += 1
            ready.wait()
            while not stop.is_set():
                try:
                    entered[name] += 1
                    call()
                except BaseException as error:
                    errors.append(error)
                    return

    x = torch.ones(64, device="cuda")
    succeeded = 0
    for pair in ((("boundary", False), ("deferred", True)), (("deferred", False), ("boundary", True))):
        stop.clear()
        with capture() as records:
            threads = [threading.Thread(target=work, args=one) for one in pair]
            for thread in threads:
                thread.start()
            ready.wait()
            before = sum(entered.values())
            for _ in range(50):
                graph = torch.cuda.CUDAGraph()
                try:
                    with torch.cuda.graph(graph):
                        y = x
                        for _ in range(20):
                            y = y + 1
                        time.sleep(0.002)
                    graph.replay()
                    succeeded += 1
                except RuntimeError as error:
                    errors.append(error)
            stop.set()
            for thread in threads:
                thread.join()
            during = sum(entered.values()) - before
            torch.cuda.synchronize()
        assert during > 0
        assert all(isinstance(record.device_ns, int) for record in records), Counter(
            str(record.device_ns) for record in records if not isinstance(record.device_ns, int)
        )
        assert Counter(record.name for record in records) == entered
        entered.clear()
    assert errors == []
    assert succeeded == 100
    counts = flush().counts
    assert not [kind for kind in counts if kind not in {"handed_over", "no_provider"}], counts


def test_a11_an_error_of_earlier_work_is_not_ours_to_raise() -> None:
    """A11: an error of earlier work is raised by the user's own next call, not by us; later spans give no time."""
    script = textwrap.dedent(
        """
        import torch
        from gpu_timed import gpu_span
        from gpu_timed.testing import capture
        x = torch.ones(4, device="cuda")
        torch.cuda.synchronize()
        with capture() as records:
            index = torch.tensor([10**9], device="cuda")
            torch.zeros(4, device="cuda")[index]           # asynchronous device-side assert
            with gpu_span("innocent"):
                pass
            with gpu_span("innocent deferred", sync="deferred"):
                pass
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                print("USER", "device-side assert" in str(error))
            with gpu_span("later"):
                pass
        for record in records:
            print(record.name, record.status, record.device_ns, record.error)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "USER True" in done.stdout, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("innocent error Missing('device_error'") and "earlier work" in line for line in lines), (
        lines
    )
    assert any(line.startswith("later") and "Missing(" in line for line in lines), lines


def test_a_thread_that_never_used_the_device_can_be_timed() -> None:
    """In a thread with no CUDA context yet, marks on the default stream are placed all the same."""
    import torch

    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    found: list[Any] = []

    def run() -> None:
        with gpu_span("fresh") as span:
            pass
        found.append(span.wait(5).device_ns)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert isinstance(found[0], int)


def test_first_span_does_not_initialise_the_device() -> None:
    """Before torch initialised CUDA a span says not_initialised, and CUDA stays as it was."""
    script = textwrap.dedent(
        """
        import torch
        from gpu_timed import gpu_span
        with gpu_span("before") as span:
            pass
        print(span.record.device_ns, torch.cuda.is_initialized())
        with gpu_span("during") as span:
            torch.ones(1, device="cuda")
        print(span.record.device_ns)
        with gpu_span("after") as span:
            torch.ones(1, device="cuda")
        print(type(span.record.device_ns).__name__, span.record.device_uuid, span.record.device_name)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.splitlines()
    assert lines[0] == "Missing('not_initialised') False", done.stdout + done.stderr
    assert lines[1] == "Missing('not_initialised')"
    assert lines[2].startswith("int GPU-"), lines


def test_uuid_is_the_one_that_nvml_and_torch_know() -> None:
    """The device's UUID is torch's own."""
    import torch

    x = torch.ones(1, device="cuda")
    with gpu_span("x") as span:
        x.add_(1)
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    assert span.record.device_uuid == f"GPU-{uuid}"


@pytest.mark.two_gpus
def test_a4_marks_never_cross_devices() -> None:
    """A4: 100 calls alternating between two devices: no error, each span carries its own device."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one device")

    @gpu_timed
    def on(device: int) -> Any:
        with torch.cuda.device(device):
            return torch.ones(1 << 20, device=f"cuda:{device}").sum()

    on(0), on(1)
    with capture() as records:
        for index in range(100):
            on(index % 2)
    assert len(records) == 100
    for index, record in enumerate(records):
        assert record.device == 0
        assert isinstance(record.device_ns, int)
        assert ("result_on_other_device" in record.quality) == (index % 2 == 1)

    @gpu_timed(sync="deferred")
    def inside(x: Any) -> Any:
        return (x @ x).sum()

    tensors = [torch.randn(2048, 2048, device=f"cuda:{device}") for device in (0, 1)]
    with capture() as records:
        for index in range(100):
            with torch.cuda.device(index % 2):
                inside(tensors[index % 2])
    assert [record.device for record in records if record.device == 1].__len__() == 50
    assert len({record.device_uuid for record in records}) == 2
    assert all(isinstance(record.device_ns, int) and record.device_ns > 50_000 for record in records)

    with capture() as records, gpu_span("moved"):
        torch.cuda.set_device(1)
    torch.cuda.set_device(0)
    assert records[0].device_ns.reason == "device_changed"


@pytest.mark.two_gpus
def test_no_context_on_a_device_the_user_has_not_used() -> None:
    """Timing work on device 0 leaves device 1 without a context."""
    script = textwrap.dedent(
        """
        import ctypes, torch
        from gpu_timed import gpu_span
        x = torch.ones(8, device="cuda:0")
        for sync in ("boundary", "deferred", "device"):
            with gpu_span("x", sync=sync) as span:
                x.add_(1)
            span.wait(5)
        cuda = ctypes.CDLL("libcuda.so.1")
        flags, active = ctypes.c_uint(), ctypes.c_int()
        cuda.cuDevicePrimaryCtxGetState(1, ctypes.byref(flags), ctypes.byref(active))
        print(torch.cuda.device_count(), active.value)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    if done.stdout.startswith("1 "):
        pytest.skip("one device")
    assert done.stdout.strip() == "2 0", done.stdout + done.stderr
