"""A device for CUDA Graphs on the CPU: captures the operations of torch instead of running them, and replays them.

What it has in common with the real one: a capture changes nothing, the host's part runs once and in no replay, inputs
and outputs stay where they were, and what the host reads inside is an error. Tensors of float64 stand for those that
live on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from gpu_timed.modes.torch_watching import Watch, key_of, memory_of


class Recorder(Watch):
    """Keeps every operation, and undoes what it changed."""

    def __init__(self) -> None:
        super().__init__(lambda _: True, 1 << 40)
        self.ops: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::_local_scalar_dense":
            raise RuntimeError("operation not permitted when stream is capturing")
        rearranges = torch.Tag.inplace_view in func.tags
        if rearranges:  # no kernel does, and those before it know how the tensor lay
            was = args[0].detach()
            self.ops = pytree.tree_map(lambda one: was if one is args[0] else one, self.ops)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented and not rearranges:
            self.ops.append((func, args, kwargs or {}, result))
        return result


class Graph:
    """What was captured."""

    def __init__(self, device: Device, ops: list[Any], outputs: Any) -> None:
        self._device = device
        self._ops = ops
        self.outputs = outputs
        self.nbytes = 1 << 20
        self.released = False

    def order(self) -> None:
        self._device.asked.append("order")

    def replay(self) -> None:
        assert not self.released, "replayed after it was released"
        self._device.replays += 1
        with torch.no_grad():
            for func, args, kwargs, results in self._ops:
                again = func(*args, **kwargs)
                taken = {key_of(one) for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
                for old, new in zip(pytree.tree_leaves(results), pytree.tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and key_of(old) not in taken:
                        old.copy_(new)
        torch.rand(self._device.draws_more)

    def release(self) -> None:
        self.released = True
        self._device.released += 1


class Device:
    """As :class:`gpu_timed.modes.torch_graphs.Device`."""

    def __init__(self) -> None:
        self.captures = self.replays = self.released = 0
        self.asked: list[str] = []
        self.by_torch: list[bool] = []
        self.stream = 0
        self.why = ""
        self.failing: Exception | None = None
        self.compiles = False
        #: How many random numbers a replay draws more than the call: torch's counts for the whole graph.
        self.draws_more = 0
        self.graphs: list[Graph] = []
        self.free = 1 << 40

    def relaxed(self) -> Any:
        return contextlib.nullcontext()

    def holds(self, tensor: Any) -> bool:
        return tensor.dtype is not torch.float64

    def refusal(self) -> str:
        return self.why

    def is_capturing(self) -> bool:
        return bool(self.why)

    def compile_in_use(self) -> bool:
        return self.compiles

    def room(self, tensor: Any, enough: int) -> int:
        return self.free

    def random_state(self, tensor: Any) -> Any:
        return torch.get_rng_state()

    def set_random_state(self, tensor: Any, state: Any) -> None:
        torch.set_rng_state(state)

    def is_same_state(self, before: Any, after: Any) -> bool:
        return bool(torch.equal(before, after))

    def mend_solver(self, tensor: Any) -> None:
        self.asked.append("mend")

    def held(self) -> int:
        return sum(graph.nbytes for graph in self.graphs if not graph.released)

    def where(self, tensor: Any) -> Callable[[], int]:
        return lambda: self.stream

    def capture(self, inputs: list[Any], function: Callable[[], Any], *, by_torch: bool) -> Graph:
        self.captures += 1
        self.by_torch.append(by_torch)
        if self.failing is not None:
            raise self.failing
        recorder, drawn = Recorder(), torch.get_rng_state()
        try:
            with recorder:
                outputs = function()
        finally:
            torch.set_rng_state(drawn)
            for key, one in recorder.changed.items():
                memory_of(one).copy_(recorder.before[key])
        graph = Graph(self, recorder.ops, outputs)
        self.graphs.append(graph)
        return graph
