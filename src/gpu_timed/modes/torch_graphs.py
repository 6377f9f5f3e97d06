"""CUDA Graphs of torch. The leaf that touches the device.

Captured is on a stream of the graph's own, in a pool of its own, in the capture mode ``thread_local``: what other
threads do cannot break it, and it breaks no capture of theirs. ``torch.cuda.graph`` is not used, which waits for the
whole device and empties the allocator's cache.

Private, versions seen 2.6 to 2.13: ``torch._C._cuda_getCurrentRawStream``, and after a capture that failed
``torch._C._cuda_endAllocateToPool`` and ``_cuda_releasePool`` (pytorch#190348).
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


class Graph:
    """One captured graph, and the stream it was replayed on last."""

    def __init__(self, graph: Any, index: int, outputs: Any, nbytes: int) -> None:
        self._graph = graph
        self._index = index
        self._stream: Any = None
        self._raw = -1
        self.outputs = outputs
        #: What its pool took of the device's memory.
        self.nbytes = nbytes

    def order(self) -> None:
        """Have what is queued now on the current stream come after its last replay, wherever that was."""
        raw = torch._C._cuda_getCurrentRawStream(self._index)  # noqa: SLF001
        if raw != self._raw:
            here = torch.cuda.current_stream(self._index)
            if self._stream is not None:
                here.wait_stream(self._stream)
            self._stream, self._raw = here, raw

    def replay(self) -> None:
        """Queue it on the current stream."""
        self._graph.replay()

    def release(self) -> None:
        """Wait for its last replay, and give its memory back."""
        if self._stream is not None:
            self._stream.synchronize()
        self.outputs = None
        self._graph.reset()


class Device:
    """What the CUDA Graph mode asks of the device.

    Args:
        relaxed: A context in which waiting cannot break another thread's capture.
    """

    def __init__(self, relaxed: Callable[[], AbstractContextManager[None]]) -> None:
        self.relaxed = relaxed

    @staticmethod
    def holds(tensor: Any) -> bool:
        """Return whether *tensor* lives where a graph can work on it."""
        return bool(tensor.is_cuda)

    @staticmethod
    def refusal() -> str:
        """Return why no graph can be captured or replayed here and now, or nothing."""
        if not torch.cuda.is_available():
            return "no CUDA device"
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return "the caller is capturing a graph itself"
        return ""

    @staticmethod
    def compile_in_use() -> bool:
        """Return whether ``torch.compile`` is used in this process, whose kernels the dispatcher cannot see."""
        dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
        backends = getattr(dynamo, "cached_backends", None)
        return dynamo is not None and (backends is None or any(map(callable, backends.values())))

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

    @staticmethod
    def capture(tensor: Any, function: Callable[[], Any]) -> Graph:
        """Capture *function* on the device of *tensor*; its outputs are the graph's. Raises what it raises."""
        index = tensor.device.index
        gc.collect()  # or a collection in between might free what must not be freed in a capture
        with torch.cuda.device(index):
            before = torch.cuda.memory_reserved(index)
            stream, here = torch.cuda.Stream(index), torch.cuda.current_stream(index)
            graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
            stream.wait_stream(here)
            ended = False
            try:
                with torch.cuda.stream(stream):
                    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                    try:
                        outputs = function()
                    except BaseException:
                        with contextlib.suppress(Exception):  # the capture is void: what broke it is to be heard of
                            graph.capture_end()
                        raise
                    graph.capture_end()
                ended = True
            finally:
                if not ended:
                    _clean_up(graph, index, pool)
            here.wait_stream(stream)
            return Graph(graph, index, outputs, max(0, torch.cuda.memory_reserved(index) - before))


def _clean_up(graph: Any, index: int, pool: Any) -> None:
    """Leave nothing of a capture that failed in the allocator: each step may have been done already."""
    for step in (
        lambda: torch._C._cuda_endAllocateToPool(index, pool),  # noqa: SLF001
        graph.reset,
        lambda: torch._C._cuda_releasePool(index, pool),  # noqa: SLF001
    ):
        try:
            step()
        except Exception:  # noqa: BLE001, S112 - done already, or not known to this version
            continue
