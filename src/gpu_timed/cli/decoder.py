"""A decoder small enough for two CPU cores: attention with a cache and an MLP, random weights."""

from __future__ import annotations

import importlib
from typing import Any

from gpu_timed.errors import ConfigurationError, missing_extra, unknown_value

_LAYERS, _WIDTH, _HEADS, _VOCABULARY, _LONGEST = 6, 512, 8, 4096, 2048


def load_torch() -> Any:
    """Return torch, or raise MissingExtraError with the pip command."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise missing_extra("the demo", "torch", "demo") from None


def pick_device(torch: Any, asked: str) -> str:
    """Return ``cpu`` or ``cuda`` for what was asked.

    Raises:
        ConfigurationError: A GPU was asked for and torch has none, or the word is unknown.
    """
    if asked not in ("auto", "cpu", "cuda"):
        raise unknown_value("device", asked, ("auto", "cpu", "cuda"))
    available = bool(torch.cuda.is_available())
    if asked == "cuda" and not available:
        raise ConfigurationError("--device cuda: torch finds no CUDA device here. Use --device cpu.")
    return "cuda" if available and asked != "cpu" else "cpu"


class Decoder:
    """A transformer decoder with a key-value cache."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self._device = device
        torch.manual_seed(0)
        kind = torch.float16 if device == "cuda" else torch.float32

        def weights(*shape: int) -> Any:
            return (torch.randn(*shape) / shape[0] ** 0.5).to(device, kind)

        self._embedding = weights(_VOCABULARY, _WIDTH)
        self._layers = [
            (
                weights(_WIDTH, 3 * _WIDTH),
                weights(_WIDTH, _WIDTH),
                weights(_WIDTH, 4 * _WIDTH),
                weights(4 * _WIDTH, _WIDTH),
            )
            for _ in range(_LAYERS)
        ]
        cache = (1, _HEADS, _LONGEST, _WIDTH // _HEADS)
        self._cache = [
            (torch.zeros(cache, dtype=kind, device=device), torch.zeros(cache, dtype=kind, device=device))
            for _ in range(_LAYERS)
        ]
        self._length = 0
        held = [self._embedding, *(matrix for layer in self._layers for matrix in layer)]
        self.parameters_m = sum(tensor.numel() for tensor in held) / 1e6

    def prompt(self, length: int) -> Any:
        """Return *length* random token numbers."""
        return self._torch.randint(_VOCABULARY, (1, length), device=self._device)

    def prefill(self, tokens: Any) -> Any:
        """Read a prompt from an empty cache, and return the next token."""
        self._length = 0
        return self._step(tokens)

    def decode(self, token: Any) -> Any:
        """Read one token, and return the next."""
        return self._step(token)

    def replayed(self, token: Any) -> Any:
        """Return a call that decodes *token* by replaying a CUDA graph of one step, or None without a GPU.

        A graph repeats what was captured, so every replay writes the same place of the cache: right for
        timing, not for text.
        """
        torch = self._torch
        if self._device != "cuda":
            return None
        begun = self._length
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # torch's own recipe: warm up on a side stream, then capture
            for _ in range(3):
                self._length = begun
                self._step(token)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self._length = begun
        with torch.cuda.graph(graph):
            self._step(token)
        return graph.replay

    def _step(self, tokens: Any) -> Any:
        torch = self._torch
        functional = torch.nn.functional
        with torch.inference_mode():
            x = self._embedding[tokens]
            begin, end = self._length, self._length + tokens.shape[1]
            for (into, out, up, down), (keys, values) in zip(self._layers, self._cache, strict=True):
                heads = (functional.layer_norm(x, (_WIDTH,)) @ into).view(1, -1, 3, _HEADS, _WIDTH // _HEADS)
                query, key, value = (heads[:, :, part].transpose(1, 2) for part in range(3))
                keys[:, :, begin:end], values[:, :, begin:end] = key, value
                attended = functional.scaled_dot_product_attention(
                    query, keys[:, :, :end], values[:, :, :end], is_causal=begin == 0 and end > 1
                )
                x = x + attended.transpose(1, 2).reshape(1, -1, _WIDTH) @ out
                x = x + functional.gelu(functional.layer_norm(x, (_WIDTH,)) @ up) @ down
            self._length = end
            return (x[:, -1:] @ self._embedding.T).argmax(-1)
