"""CUDA Graphs of torch's work. The leaf that touches the device.

Captured is on a stream that is nobody else's, in the capture mode ``thread_local``, without a wait for the device and
without emptying the allocator's cache, as ``torch.cuda.graph`` does both: what other threads do cannot break it, and it
breaks no capture of theirs. All that waits, frees or allocates beside the user's own code happens in relaxed mode, and
the user's code in a mode in which what it must not do breaks this capture alone.

The graphs of one function share one pool of the allocator, one stream, and so one workspace of cuBLAS (32 MiB on a
Hopper, kept by torch for each handle and stream). That is sound since their replays never overlap, whatever streams
they are on, and what they give is copied before the next. A pool of each one's own would keep all that for each.

A call that draws random numbers, or works on streams of its own, is captured by torch's own ``CUDAGraph``, which knows
about both: see :mod:`gpu_timed.modes.cuda_graphs` for why not every call.

Private, versions seen 2.6 to 2.13: ``torch._C._cuda_getCurrentRawStream``, ``_cuda_getDevice``,
``_cuda_isCurrentStreamCapturing``, ``_cuda_beginAllocateCurrentStreamToPool``, ``_cuda_endAllocateToPool``,
``_cuda_releasePool`` (the first of these three is one user of the pool more, the last one less);
``torch._dynamo.eval_frame.cached_backends``.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from gpu_timed.modes import cuda_graphs
from gpu_timed.modes.launcher import Ground, Passing

_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001 - see the docstring
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # noqa: SLF001
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)  # noqa: SLF001
_use_pool: Any = getattr(torch._C, "_cuda_beginAllocateCurrentStreamToPool", None)  # noqa: SLF001
_leave_pool: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)  # noqa: SLF001
_release_pool: Any = getattr(torch._C, "_cuda_releasePool", None)  # noqa: SLF001
_BROKEN: Final = (
    "previous error during capture",  # 901: the capture was broken before
    "Offset increment outside graph capture",  # torch's generator is in another capture
    "generator not in capture mode",  # or another capture ended in the middle of this one
)


class Pool:
    """What the graphs of one function on one device share: memory, the stream of their captures, an order."""

    def __init__(self, index: int, ground: Ground, relaxed: Callable[[], AbstractContextManager[None]]) -> None:
        self.index = index
        with torch.cuda.device(index):
            self.stream = ground.free_stream(index) or cuda_graphs.new_stream()
            self.torch_stream = torch.cuda.ExternalStream(self.stream, device=index)
            self.id = torch.cuda.graph_pool_handle()
            with torch.cuda.stream(self.torch_stream):  # one user from the start: it does not go with the last graph
                _use_pool(index, self.id)
                _leave_pool(index, self.id)
        #: Bytes of the device's memory that it held after the last capture.
        self.held = 0
        #: Where its last replay was queued.
        self.last: Any = None
        self.raw = -1
        done = weakref.finalize(self, _let_pool_go, index, self.id, self.stream, ground, relaxed)
        done.atexit = False

    def order(self) -> None:
        """Have what is queued now on the current stream come after its last replay, wherever that was."""
        raw = _current_stream(self.index)
        if raw != self.raw:
            here = torch.cuda.current_stream(self.index)
            if self.last is not None:
                if cuda_graphs.is_capturing(self.raw):
                    raise Passing("the stream of its last replay is being captured")
                here.wait_stream(self.last)
            self.last, self.raw = here, raw

    def nbytes(self) -> int:
        """Return what it takes of the device's memory."""
        return sum(
            int(segment["total_size"])
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == self.index and tuple(segment.get("segment_pool_id", ())) == tuple(self.id)
        )


class Graph:
    """One captured graph."""

    def __init__(
        self,
        pool: Pool,
        handle: Any,
        inputs: list[Any],
        outputs: Any,
        relaxed: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._pool = pool
        self._handle = handle  # what the driver launches, or a graph of torch's
        self._by_driver = isinstance(handle, int)
        #: Have what is queued now on the current stream come after the last replay from its pool.
        self.order = pool.order
        self._inputs = inputs
        #: Streams of replays, which the allocator was told of: it gives no input's memory away before they are done.
        self._told: set[int] = set()
        self.outputs = outputs
        #: By how much its pool grew for it, in bytes.
        self.nbytes = 0
        # Whoever drops the last reference, or collects garbage, may be in the middle of a capture.
        self._destroy = weakref.finalize(self, _destroy, handle, relaxed)
        self._destroy.atexit = False

    def replay(self) -> None:
        """Queue it on the stream that was current when :meth:`order` was called last, on this thread."""
        pool, handle = self._pool, self._handle
        if pool.raw not in self._told:
            self._told.add(pool.raw)
            for tensor in self._inputs:
                tensor.record_stream(pool.last)
        if not self._by_driver:
            _replay_by_torch(handle)
        elif _current_device() == pool.index:
            try:
                cuda_graphs.launch(handle, pool.raw)
            except cuda_graphs.Refused as error:
                if not error.no_context:
                    raise
                torch.empty(1, device=f"cuda:{pool.index}").zero_()  # the first this thread does with the device
                cuda_graphs.launch(handle, pool.raw)
        else:
            with torch.cuda.device(pool.index):
                cuda_graphs.launch(handle, pool.raw)

    def release(self) -> None:
        """Give it back, waiting for nothing: what is running of it runs to its end."""
        self.outputs, self._inputs = None, []
        self._destroy()


class Device:
    """What the CUDA Graph mode asks of the device, for one function.

    Args:
        relaxed: A context in which waiting cannot break another thread's capture.
        ground: What captures of this process share.
    """

    def __init__(self, relaxed: Callable[[], AbstractContextManager[None]], ground: Ground) -> None:
        self.relaxed = relaxed
        self._ground = ground
        self._pools: dict[int, Pool] = {}

    @staticmethod
    def holds(tensor: Any) -> bool:
        """Return whether *tensor* lives where a graph can work on it."""
        return bool(tensor.is_cuda)

    @staticmethod
    def refusal() -> str:
        """Return why no graph can be captured or replayed here and now, or nothing."""
        if torch.cuda.is_initialized():
            return "the caller is capturing a graph itself" if torch.cuda.is_current_stream_capturing() else ""
        return "" if torch.cuda.is_available() else "no CUDA device"

    @staticmethod
    def is_capturing() -> bool:
        """Return whether the caller is capturing the current stream. Only once torch has begun with the device."""
        if None in {_current_stream, _current_device, _is_capturing}:
            return bool(torch.cuda.is_current_stream_capturing())
        # The legacy stream, torch's default one, cannot be captured; and the question takes up to 2 µs.
        return bool(_current_stream(_current_device())) and bool(_is_capturing())

    @staticmethod
    def compile_in_use() -> bool:
        """Return whether ``torch.compile`` is used in this process, whose kernels the dispatcher cannot see."""
        dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
        backends = getattr(dynamo, "cached_backends", None)
        return dynamo is not None and (backends is None or any(map(callable, backends.values())))

    @staticmethod
    def where(tensor: Any) -> Callable[[], int]:
        """Return what tells the current stream on the device of *tensor*."""
        current, index = _current_stream, tensor.device.index
        return lambda: int(current(index))

    def room(self, tensor: Any, enough: int) -> int:
        """Return how many bytes the device of *tensor* has left, those included that torch keeps for all.

        If the driver has *enough*, nobody else is asked. What torch keeps for graphs is for no call but a capture.
        """
        with self.relaxed():
            free, _ = torch.cuda.mem_get_info(tensor.device)
            segments = torch.cuda.memory_snapshot() if free < enough else []
        return int(free) + sum(
            int(segment["total_size"] - segment["allocated_size"])
            for segment in segments
            if segment["device"] == tensor.device.index and not any(segment.get("segment_pool_id", ()))
        )

    @staticmethod
    def random_state(tensor: Any) -> Any:
        """Return where the random numbers of the device of *tensor* stand."""
        return torch.cuda.get_rng_state(tensor.device)

    @staticmethod
    def set_random_state(tensor: Any, state: Any) -> None:
        """Put the random numbers of the device of *tensor* back to *state*."""
        torch.cuda.set_rng_state(state, tensor.device)

    @staticmethod
    def is_same_state(before: Any, after: Any) -> bool:
        """Return whether no random number was drawn between two states."""
        return bool(torch.equal(before, after))

    def mend_solver(self, tensor: Any) -> None:
        """Have cuSOLVER work as ever on the device of *tensor*, after a capture failed in which it took part.

        The next call of its handle for this thread would fail, and only that (eigenvalues and singular values, after a
        capture by torch, too; seen with torch 2.11 and CUDA 13): so it is one of no consequence. Never raises.
        """
        with contextlib.suppress(Exception), self.relaxed():
            torch.linalg.cholesky_ex(torch.eye(2, device=tensor.device))

    def held(self) -> int:
        """Return how many bytes of memory all graphs of the function held after the last capture."""
        return sum(pool.held for pool in self._pools.values())

    def capture(self, inputs: list[Any], function: Callable[[], Any], *, by_torch: bool) -> Graph:
        """Capture *function* on the device of its *inputs*; its outputs are the graph's.

        Args:
            inputs: The tensors that it is called with.
            function: What is captured.
            by_torch: It draws random numbers, or works on streams of its own.

        Raises:
            Passing: Another thread broke the capture, or memory was short: it may go well the next time.
            Exception: What *function* raises.
        """
        if None in {_current_stream, _current_device, _use_pool, _leave_pool, _release_pool}:
            raise RuntimeError("torch's allocator has not what is needed, in this version")
        if cuda_graphs.load() is None:
            raise RuntimeError("the driver has not what is needed, in this version")
        index = inputs[0].device.index
        with self.relaxed(), torch.cuda.device(index):
            pool = self._pools.get(index)
            if pool is None:
                pool = self._pools[index] = Pool(index, self._ground, self.relaxed)
            before = pool.nbytes()
            try:
                with torch.cuda.stream(pool.torch_stream), _no_collection(), self._ground.capturing():
                    handle, outputs = (_by_torch if by_torch else _by_driver)(pool, function)
            except torch.OutOfMemoryError as error:
                raise Passing(f"no memory for a graph: {_first_line(error)}") from error
            except cuda_graphs.Refused as error:
                if error.passing:
                    raise Passing(f"another thread broke the capture, or memory was short ({error})") from error
                raise
            except RuntimeError as error:
                if any(said in str(error) for said in _BROKEN):
                    raise Passing(f"another thread broke the capture ({_first_line(error)})") from error
                raise
            if by_torch:  # it has written the generator's seed there
                torch.cuda.current_stream(index).wait_stream(pool.torch_stream)
            graph = Graph(pool, handle, inputs, outputs, self.relaxed)
            pool.held = pool.nbytes()
            graph.nbytes = max(0, pool.held - before)
            return graph


def _by_driver(pool: Pool, function: Callable[[], Any]) -> tuple[Any, Any]:
    """Capture on the current stream, that of *pool*. Nothing of torch's takes part but its allocator."""
    _use_pool(pool.index, pool.id)
    try:
        cuda_graphs.begin(pool.stream)
        try:
            with cuda_graphs.strict_for_this_thread_alone():
                outputs = function()
        except BaseException:
            cuda_graphs.abandon(pool.stream)
            raise
        return cuda_graphs.end(pool.stream), outputs
    finally:
        _leave_pool(pool.index, pool.id)
        _release_pool(pool.index, pool.id)  # the pool itself is a user of it


def _by_torch(pool: Pool, function: Callable[[], Any]) -> tuple[Any, Any]:
    graph = torch.cuda.CUDAGraph()
    scratch = torch.zeros(1, device=f"cuda:{pool.index}")
    ended = False
    try:
        graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
        try:
            with cuda_graphs.strict_for_this_thread_alone():
                outputs = function()
        except BaseException:
            with contextlib.suppress(Exception):  # the capture is void: what broke it is to be heard of
                graph.capture_end()
            raise
        graph.capture_end()
        ended = True
    finally:
        if not ended:
            _clean_up(graph, pool, scratch)
    return graph, outputs


def _replay_by_torch(graph: Any) -> None:
    try:
        graph.replay()
    except RuntimeError as error:
        if any(said in str(error) for said in _BROKEN):
            raise Passing(f"another thread is capturing a graph ({_first_line(error)})") from error
        raise


def _clean_up(graph: Any, pool: Pool, scratch: Any) -> None:
    """Leave nothing of a capture of torch's that failed: its use of the pool (pytorch#190348), the generator's mode.

    Only a capture that still allocates from the pool is counted as a user of it: one user too many keeps the pool's
    memory longer, one too few would give it away under the graphs.
    """
    try:
        _leave_pool(pool.index, pool.id)
        counted = True
    except Exception:  # noqa: BLE001 - it does not allocate any more
        counted = False
    with contextlib.suppress(Exception):
        graph.reset()
    if counted:
        with contextlib.suppress(Exception):
            _release_pool(pool.index, pool.id)
    with contextlib.suppress(Exception):  # a capture that goes well takes the generator out of capture mode
        cured = torch.cuda.CUDAGraph()
        cured.capture_begin(capture_error_mode="thread_local")
        scratch.zero_()
        cured.capture_end()
        cured.reset()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Let no garbage be collected: it might free in a capture what must not be freed in one."""
    if not gc.isenabled():
        yield
        return
    try:  # already: what a signal's handler raises may come after the next line
        gc.disable()
        yield
    finally:
        gc.enable()


def _destroy(handle: Any, relaxed: Callable[[], AbstractContextManager[None]]) -> None:
    with relaxed():
        if isinstance(handle, int):
            cuda_graphs.destroy(handle)
        else:
            handle.reset()


def _let_pool_go(
    index: int, pool_id: Any, stream: int, ground: Ground, relaxed: Callable[[], AbstractContextManager[None]]
) -> None:
    with relaxed():
        _release_pool(index, pool_id)
    ground.give_back(index, stream)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
