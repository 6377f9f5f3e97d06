"""Launches of kernels on the fake device, by stand-ins of the shape of Numba's and Triton's; and full launch queues."""

from __future__ import annotations

import copy
import ctypes
import functools
import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_timed import gpu_timed
from gpu_timed.testing import FakeDevice, capture

START_NS = 1_000_000_000  # what a fake host's clock shows at first


class Handle:
    """A stream's handle as cuda.bindings has it: no int, but it can be made one."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __int__(self) -> int:
        return self.number


SHAPES: dict[str, Callable[[int], Any]] = {
    "int": int,
    "binding": Handle,
    "object with an int": lambda n: SimpleNamespace(handle=n),
    "object with a pointer": lambda n: SimpleNamespace(handle=ctypes.c_void_p(n)),
    "object with a binding": lambda n: SimpleNamespace(handle=Handle(n)),
}


class Configured:
    """What a dispatcher gives for ``[…]``: calling it launches on its stream, which it shows in some shape."""

    def __init__(self, kernel: Any, griddim: Any, stream: int) -> None:
        self.kernel, self.griddim, self.on = kernel, griddim, stream
        self.stream = SHAPES[kernel.shape](stream) if isinstance(kernel.shape, str) else kernel.shape

    def __call__(self, device: FakeDevice, *args: Any) -> None:
        with device.use(stream=self.on):
            self.kernel.body(device, *args)


class CUDADispatcher:
    """Of the shape of Numba's, and seemingly from there."""

    __module__ = "numba.cuda.dispatcher"

    def __init__(self, body: Callable[..., None], shape: Any = "int") -> None:
        functools.update_wrapper(self, body)
        self.body, self.shape, self.made = body, shape, 0

    def configure(self, griddim: Any, blockdim: Any, stream: int = 0, sharedmem: int = 0) -> Configured:
        self.made += 1
        return Configured(self, griddim, stream)

    def forall(self, ntasks: int, tpb: int = 0, stream: int = 0, sharedmem: int = 0) -> Configured:
        return Configured(self, ntasks, stream)

    def __getitem__(self, configuration: Any) -> Configured:
        return self.configure(*configuration)

    def specialize(self, *args: Any) -> Any:
        return dispatcher(self.body, self.shape)

    def __call__(self, *args: Any) -> None:
        raise ValueError("launched without a configuration")

    def __reduce__(self) -> Any:
        return dispatcher, (self.body, self.shape)


def dispatcher(body: Callable[..., None], shape: Any = "int") -> Any:
    """Return a stand-in: what pickle can find by name, which the class cannot be."""
    return CUDADispatcher(body, shape)


class KernelInterface:
    """Of the shape of Triton's: it holds a function, or another kernel and what that is tuned to."""

    __module__ = "triton.runtime.jit"

    def __init__(self, fn: Any, **tuned: Any) -> None:
        self.fn, self.tuned = fn, tuned
        self.__qualname__ = "kernel"

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if isinstance(self.fn, KernelInterface):
            return self.fn.run(*args, grid=grid, warmup=warmup, **kwargs, **self.tuned)
        return "compiled" if warmup else self.fn(*args)

    def warmup(self, *args: Any, grid: Any, **kwargs: Any) -> Any:
        return self.run(*args, grid=grid, warmup=True, **kwargs)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)


def work(device: FakeDevice, duration_ns: int = 5_000, error: Exception | None = None) -> None:
    """Launch, and perhaps fail."""
    device.launch(duration_ns)
    if error is not None:
        raise error


seen = lambda records: [(record.name, record.stream, record.device_ns) for record in records]


@pytest.mark.parametrize("sync", ["boundary", "deferred"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stream", [0, 7])
def test_numba_the_mark_goes_on_the_stream_of_the_launch(
    device: FakeDevice, shape: str, sync: Any, stream: int
) -> None:
    """Each way to configure names its stream; another one, long busy, is neither waited for nor in the time."""
    timed = gpu_timed(dispatcher(work, shape), sync=sync)
    began = device.host_clock.now_ns()
    with device.use(stream=3):
        device.launch(10**9)
        with capture() as records:
            for launch in (timed[1, 2, stream], timed.configure(1, 2, stream=stream), timed.forall(9, 0, stream)):
                launch(device)
            timed.specialize(device)[1, 2, stream, 0](device, 6_000)
            assert device.host_clock.now_ns() - began == (21_000 if sync == "boundary" else 0)
    assert seen(records) == [("work", stream, 5_000)] * 3 + [("work", stream, 6_000)]


@pytest.mark.parametrize("shape", [None, object(), SimpleNamespace(handle="text")])
def test_numba_a_stream_of_unknown_shape_is_missing(device: FakeDevice, shape: Any) -> None:
    """A version of Numba that hides the stream costs the time, and not the launch."""
    with capture() as records:
        gpu_timed(dispatcher(work, shape))[1, 1, 7](device)
    assert {records[0].device_ns.reason, records[0].stream.reason} == {"unsupported_runtime"}
    assert device._stream((0, 7)).ready_at - START_NS == 5_000


def test_numba_threads_errors_and_unsampled_launches(device: FakeDevice) -> None:
    """Each thread's launches go to its own stream; what a launch raises comes out; one left out still runs."""
    timed, fault = gpu_timed(dispatcher(work), sync="deferred", every=2), ValueError("bad argument")

    def launch(stream: int) -> None:
        for _ in range(4):
            timed[1, 1, stream](device, 1_000 * stream)

    with capture() as records:
        threads = [threading.Thread(target=launch, args=(stream,)) for stream in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(ValueError, match="bad argument") as caught:
            timed[1, 1, 4](device, 9, fault)
    assert caught.value is fault
    found = [(record.stream, record.device_ns, record.status) for record in records]
    assert len(found) == 5
    assert set(found) <= {(1, 1_000, "ok"), (2, 2_000, "ok"), (4, 9, "error")}
    assert (4, 9, "error") in found
    left = [device._stream((0, stream)).ready_at - START_NS for stream in (1, 2)]
    assert left == [4_000, 8_000]


def test_numba_configurations_are_kept_but_not_without_bound(device: FakeDevice) -> None:
    """The same one is made once, a list is no key, and each of five hundred is what was asked for."""
    kernel = dispatcher(work)
    timed = gpu_timed(kernel)
    assert timed[1, 1] is timed[1, 1]
    assert kernel.made == 1
    assert [timed[size, 1].griddim for size in range(500)] == list(range(500))
    with capture() as records:
        timed[[3], [4]](device)
    assert seen(records) == [("work", 0, 5_000)]
    assert 0 < len(timed._self_kept) <= 128


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda timed: pickle.loads(pickle.dumps(timed))])
def test_numba_a_copy_is_timed(device: FakeDevice, how: Callable[[Any], Any]) -> None:
    """With the same options, and the same kind of thing."""
    again = how(gpu_timed(dispatcher(work), name="named", sync="deferred"))
    with capture() as records:
        again[1, 1, 7](device)
    assert seen(records) == [("named", 7, 5_000)]
    assert (records[0].sync, isinstance(again, CUDADispatcher)) == ("deferred", True)


def test_triton_one_record_a_launch_and_none_of_a_warmup(device: FakeDevice) -> None:
    """Jitted, tuned over a timed one, and copied: on the current stream, and what a launch raises comes out."""
    inner, fault = gpu_timed(KernelInterface(work)), ValueError("bad argument")
    assert isinstance(inner, KernelInterface)
    with device.use(stream=9), capture() as records:
        for kernel in (inner, KernelInterface(inner, BLOCK=4), copy.copy(inner), copy.deepcopy(inner)):
            kernel[(1,)](device)
            assert kernel.warmup(device, grid=(1,)) == "compiled"
        with pytest.raises(ValueError, match="bad argument") as caught:
            inner[(1,)](device, 5_000, fault)
    assert caught.value is fault
    assert seen(records) == [("kernel", 9, 5_000)] * 5
    assert [record.status for record in records] == ["ok"] * 4 + ["error"]


def test_triton_nests_and_an_unsampled_launch_runs(device: FakeDevice) -> None:
    """A timed tuner over a timed kernel is two records, every other time."""
    tuned = gpu_timed(KernelInterface(gpu_timed(KernelInterface(work))), name="tuned", sync="deferred", every=2)
    with capture() as records:
        for _ in range(4):
            tuned.run(device, grid=(1,), warmup=False)
    outside = {record.span_id for record in records if record.name == "tuned"}
    assert (len(records), len(outside)) == (6, 2)
    assert [record.parent_id in outside for record in records if record.name == "kernel"].count(True) == 2


# -- full launch queues ---------------------------------------------------------------------------------------------


def busy(device: FakeDevice, host_ns: int = 1_000, work_ns: int = 20_000, waits: bool = False) -> None:
    """Launch one kernel, which takes the host *host_ns*, and perhaps wait for it."""
    device.launch(work_ns)
    device.host_clock.advance(host_ns)
    if waits:
        device.synchronize()


HELD, WAITS = (100_000,), (1_000, 20_000, True)


def noted(device: FakeDevice, calls: int, slow: dict[int, Any], usual: Any = (), *, kernel: bool = True) -> set[int]:
    """Make *calls* in a row, some *slow*, of a kernel or a function; return which say that the queue was full."""
    timed: Any = gpu_timed(dispatcher(busy) if kernel else busy, sync="deferred")
    call = timed[1, 1] if kernel else timed
    with capture() as records:
        for index in range(calls):
            call(device, *slow.get(index, usual))
    assert len(records) == calls
    return {record.call_index for record in records if record.quality == ("launch_queue_full",)}


def test_a_call_held_up_behind_a_full_queue_says_so(device: FakeDevice) -> None:
    """One in twenty leaves the queue meanwhile: from the 360th on 341 spans wait. Calls before or beside are quiet."""
    slow = {300: HELD, 310: HELD, 380: HELD, 400: HELD, 401: HELD, 402: (20_000,)}
    assert noted(device, 420, slow) == {380, 400, 401}


@pytest.mark.parametrize(
    ("calls", "slow", "usual"),
    [
        pytest.param(100, {50: HELD, 99: (1_000_000,)}, (1_000, 1_000_000), id="a hiccup behind a short queue"),
        pytest.param(420, {400: WAITS}, (), id="a call that waits for its result"),
        pytest.param(420, {}, (100_000, 2_000_000), id="a function that is always slow"),
        pytest.param(420, {400: (5_000,)}, (), id="a little slower"),
        pytest.param(420, {400: (300_000,)}, (100_000, 2_000_000), id="three times as slow"),
        pytest.param(420, {400: HELD}, (10, 2_000), id="not far behind"),
    ],
)
def test_other_slow_calls_say_nothing(device: FakeDevice, calls: int, slow: Any, usual: Any) -> None:
    """What is slow for another reason than a full queue."""
    assert noted(device, calls, slow, usual) == set()


@pytest.mark.parametrize(("host_ns", "first"), [(20_000, 84), (4_000, 250), (1_000, 400)])
def test_a_function_has_no_more_kernels_than_its_time_allows(device: FakeDevice, host_ns: int, first: int) -> None:
    """A launch takes 2 µs or more, which bounds how many there were; with two marks a call, 1,000 fill the queue."""
    usual, held = (host_ns, 10**9), (200_000, 10**9)
    few, many = first - 3, first + 3
    assert noted(device, many + 20, {few: held, many: held}, usual, kernel=False) == {many}


def test_a_function_of_a_thousand_kernels_fills_the_queue_alone_unless_it_waits(device: FakeDevice) -> None:
    """Only that the device caught up tells the call that waits from the one that was held up."""
    usual, held, waits = (2_000_000, 10**7), (9_000_000, 10**7), (2_000_000, 10**7, True)
    assert noted(device, 30, {10: held, 20: waits}, usual, kernel=False) == {10}


def test_a_queue_that_stays_full_does_not_become_the_usual(device: FakeDevice) -> None:
    """As many calls held up as are remembered of a site, and more."""
    slow = dict.fromkeys(range(400, 450), (100_000, 10**6))
    assert noted(device, 450, slow, (1_000, 10**6)) == set(slow)


def test_no_call_is_judged_by_fewer_than_three_others(device: FakeDevice) -> None:
    """Behind another site's full queue: the third call has two before it, the fourth three."""
    other = gpu_timed(dispatcher(busy), sync="deferred", name="other")[1, 1]
    found = []
    for slow in (2, 3):
        for _ in range(500):
            other(device)
        found.append(noted(device, 10, {slow: HELD}))
    assert found == [set(), {3}]


def test_a_fence_cannot_tell(device: FakeDevice) -> None:
    """A clock that sees results only knows nothing of a queue."""
    device.name = "fence"
    assert noted(device, 420, {400: HELD}) == set()
