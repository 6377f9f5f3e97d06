"""Work of known shape for the GPU tests: an MLP, a Llama of TinyLlama-1.1B's shape, a kernel of known duration."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

_SPIN = r"""
extern "C" __global__ void spin(long long ns, long long* stamps) {
    long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - begin < ns);
    stamps[0] = begin;
    stamps[1] = now;
}
"""


class Spin:
    """A kernel that runs for a given number of nanoseconds and says by its own timer how long it was.

    Launched straight through the driver, which takes a few microseconds: a slow launch would be a gap
    inside the measured time.
    """

    def __init__(self) -> None:
        import cupy

        self._kernel = cupy.RawKernel(_SPIN, "spin")
        self._kernel.compile()
        self.stamps = torch.zeros(2, dtype=torch.int64, device="cuda")
        self._duration = ctypes.c_longlong()
        self._stamps_pointer = ctypes.c_void_p(self.stamps.data_ptr())
        self._arguments = (ctypes.c_void_p * 2)(
            ctypes.addressof(self._duration), ctypes.addressof(self._stamps_pointer)
        )
        self._function = ctypes.c_void_p(self._kernel.kernel.ptr)
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
        self._launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
        self(1000)
        torch.cuda.synchronize()

    def __call__(self, duration_ns: int) -> None:
        """Queue it on torch's current stream."""
        self._duration.value = duration_ns
        stream = torch._C._cuda_getCurrentRawStream(0)
        code = self._launch(self._function, 1, 1, 1, 1, 1, 1, 0, stream, self._arguments, None)
        assert code == 0, code

    def lasted_ns(self) -> int:
        """Return how long the last one ran, by its own timer. Synchronises."""
        begin, end = self.stamps.tolist()
        return int(end - begin)


def captured(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Capture *step* into a graph by hand, warmed up on a side stream as torch's documentation says."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        step()
    return graph


def mlp_graph() -> Callable[[], None]:
    """Return the replay of a 24-layer fp16 MLP, batch 1: about 0.2 ms of device time."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2048, 2048, device="cuda", dtype=torch.float16) for _ in range(24)]
    x = torch.randn(1, 2048, device="cuda", dtype=torch.float16)

    def step() -> torch.Tensor:
        y = x
        for layer in layers:
            y = torch.relu(layer(y))
        return y

    graph = captured(step)
    graph.keeps = layers, x  # type: ignore[attr-defined] # a graph reads addresses and owns nothing
    return graph.replay


class LlamaStep:
    """One decode step of a Llama of TinyLlama-1.1B's shape: random fp16 weights, static cache, batch 1."""

    LENGTH = 1024

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=22,
            num_attention_heads=32,
            num_key_value_heads=4,
            max_position_embeddings=2048,
            attn_implementation="sdpa",
        )
        with torch.device("cuda"):
            self.model = LlamaForCausalLM(config).half().eval()
        self.cache = StaticCache(config=config, max_cache_len=self.LENGTH)
        self.token = torch.ones(1, 1, dtype=torch.long, device="cuda")
        self.position = torch.full((1, 1), 16, dtype=torch.long, device="cuda")
        self._calls = 0
        self.eager()
        self._graph = captured(self._forward)
        self.reset()

    def _forward(self) -> Any:
        with torch.no_grad():
            return self.model(
                input_ids=self.token, position_ids=self.position, past_key_values=self.cache, use_cache=True
            ).logits

    def reset(self) -> None:
        """Empty the cache, which counts its own position and must not run over its end."""
        self.cache.reset()
        self._calls = 0
        torch.cuda.synchronize()

    def before(self) -> None:
        """Call before each step, outside what is timed."""
        self._calls += 1
        if self._calls >= self.LENGTH - 8:
            self.reset()

    def eager(self) -> None:
        """Run one step eagerly."""
        self._forward()

    def replay(self) -> None:
        """Run one step as a graph replay."""
        self._graph.replay()
