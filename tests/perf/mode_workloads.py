"""Functions of the shapes that inference is made of, for the modes: what they are called with, and what they keep.

No weights are loaded and no library but torch is needed: random weights, the shapes of the models named.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

INPUTS = 8
"""How many sets of arguments each has: calls go through them in turn."""


class Workload:
    """A function, and arguments for it.

    Args:
        function: What is called.
        arguments: Positional and named ones, of each call in turn.
        reset: Puts its state back to what it was at first.
        random: Whether it draws random numbers.
        tolerance: How far from eager the outputs of compiled code may be, relative to the largest value.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: list[tuple[tuple[Any, ...], dict[str, Any]]],
        *,
        reset: Callable[[], object] = lambda: None,
        random: bool = False,
        tolerance: float = 0.0,
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.reset = reset
        self.random = random
        self.tolerance = tolerance


def half(device: str) -> torch.dtype:
    """Return what inference computes in there."""
    return torch.float16 if device == "cuda" else torch.float32


class Attention(nn.Module):
    """One layer of a Llama, for one new token: grouped queries, rotary positions, a cache of its own."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, length: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.each = heads, kv_heads, width // heads
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.each, bias=False)
        self.v = nn.Linear(width, kv_heads * self.each, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.register_buffer("keys", torch.zeros(1, kv_heads, length, self.each), persistent=False)
        self.register_buffer("values", torch.zeros(1, kv_heads, length, self.each), persistent=False)

    def rotated(self, x: Any, cos: Any, sin: Any) -> Any:
        """Return *x* turned by its position."""
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def forward(self, x: Any, at: Any, cos: Any, sin: Any, mask: Any) -> Any:
        """Return the layer's output for the token at position *at*, which enters the cache."""
        normed = self.before(x)
        q = self.rotated(self.q(normed).view(1, 1, self.heads, self.each).transpose(1, 2), cos, sin)
        k = self.rotated(self.k(normed).view(1, 1, self.kv_heads, self.each).transpose(1, 2), cos, sin)
        v = self.v(normed).view(1, 1, self.kv_heads, self.each).transpose(1, 2)
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        shape = (1, self.kv_heads, self.heads // self.kv_heads, self.keys.shape[2], self.each)
        keys, values = (
            held[:, :, None].expand(shape).reshape(1, self.heads, -1, self.each) for held in (self.keys, self.values)
        )
        found = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + self.o(found.transpose(1, 2).reshape(1, 1, -1))
        normed = self.after(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """One decode step of a Llama: a token and its position in, logits out, cache kept inside."""

    def __init__(self, layers: int, shape: tuple[int, int, int, int, int, int]) -> None:
        super().__init__()
        width, heads, kv_heads, hidden, words, length = shape
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Attention(width, heads, kv_heads, hidden, length) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        each = width // heads
        rates = 10_000 ** (-torch.arange(0, each, 2) / each)
        angles = torch.outer(torch.arange(length), torch.cat((rates, rates)))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("places", torch.arange(length), persistent=False)

    def forward(self, token: Any, at: Any) -> Any:
        """Return the logits after *token*, of shape (1, 1), at position *at*, of shape (1,)."""
        x = self.words(token)
        mask = (self.places <= at)[None, None, None]
        cos, sin = self.cos.index_select(0, at), self.sin.index_select(0, at)
        for layer in self.layers:
            x = layer(x, at, cos, sin, mask)
        return self.head(self.norm(x))

    def reset(self) -> None:
        """Empty the cache."""
        for layer in self.layers:
            layer.keys.zero_()
            layer.values.zero_()


def decode(device: str = "cuda", *, layers: int = 22, small: bool = False) -> Workload:
    """A decode step of TinyLlama-1.1B's shape, with its cache: batch 1, up to 1,024 tokens."""
    torch.manual_seed(0)
    shape = (128, 4, 2, 256, 500, 64) if small else (2048, 32, 4, 5632, 32_000, 1024)
    with torch.device(device):
        model = Decoder(layers, shape).to(half(device)).eval()
        model.places = torch.arange(shape[-1])
        calls = [
            ((torch.full((1, 1), 7 + index), torch.full((1,), index, dtype=torch.long)), {}) for index in range(INPUTS)
        ]
    return Workload(model, calls, reset=model.reset, tolerance=0.05)


def mlp(device: str = "cuda", *, small: bool = False) -> Workload:
    """24 layers of 2048 by 2048 with ReLU, batch 1."""
    torch.manual_seed(0)
    width = 64 if small else 2048
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(24)]
    model = nn.Sequential(*layers).to(device, half(device)).eval()
    calls = [((torch.randn(1, width, device=device, dtype=half(device)),), {}) for _ in range(INPUTS)]
    return Workload(model, calls, tolerance=0.02)


class Encoder(nn.Module):
    """A sentence encoder of MiniLM-L6's shape: token ids and a mask in, one unit vector for each sentence out."""

    def __init__(self, layers: int, width: int, heads: int, words: int) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(512, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "qkv": nn.Linear(width, 3 * width),
                    "o": nn.Linear(width, width),
                    "first": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                    "second": nn.LayerNorm(width),
                }
            )
            for _ in range(layers)
        )

    def forward(self, ids: Any, mask: Any) -> Any:
        """Return the sentences' vectors; *mask* is True where there is a token."""
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            q, k, v = (one.view(*ids.shape, self.heads, -1).transpose(1, 2) for one in layer["qkv"](x).chunk(3, dim=-1))
            found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
            x = layer["first"](x + layer["o"](found.transpose(1, 2).reshape(x.shape)))
            x = layer["second"](x + layer["down"](functional.gelu(layer["up"](x))))
        weights = mask[..., None].to(x.dtype)
        return functional.normalize((x * weights).sum(1) / weights.sum(1), dim=-1)


def encoder(device: str = "cuda", *, small: bool = False) -> Workload:
    """Eight sentences of 32 tokens, padded to it."""
    torch.manual_seed(0)
    model = Encoder(*((2, 64, 4, 500) if small else (6, 384, 12, 30_522))).to(device, half(device)).eval()
    calls = []
    for index in range(INPUTS):
        ids = torch.randint(0, 500, (8, 32), device=device)
        lengths = torch.arange(4 + index, 12 + index, device=device)
        calls.append(((ids, torch.arange(32, device=device) < lengths[:, None]), {}))
    return Workload(model, calls, tolerance=0.02)


def conv(device: str = "cuda", *, small: bool = False) -> Workload:
    """Four pictures of 64 by 64 through eight convolutions with batch norm."""
    torch.manual_seed(0)
    width = 8 if small else 64
    parts: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(8):
        parts += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(device, half(device)).eval()
    calls = [((torch.randn(4, 3, 64, 64, device=device, dtype=half(device)),), {}) for _ in range(INPUTS)]
    return Workload(model, calls, tolerance=0.02)


def random(device: str = "cuda", *, small: bool = False) -> Workload:
    """Dropout and noise: what it gives depends on where the random numbers stand."""
    torch.manual_seed(0)
    size = 1 << 10 if small else 1 << 18

    def function(x: Any) -> Any:
        y = x
        for _ in range(8):
            y = functional.dropout(y, 0.1) + 0.01 * torch.randn_like(y)
        return y

    return Workload(function, [((torch.ones(size, device=device),), {}) for _ in range(INPUTS)], random=True)


def nested(device: str = "cuda", *, small: bool = False) -> Workload:
    """Named arguments, a plain one among them, and outputs in a dictionary, a tuple and a list."""
    torch.manual_seed(0)
    width = 32 if small else 1024
    weight = torch.randn(width, width, device=device) / math.sqrt(width)

    def function(x: Any, *, other: Any, scale: float) -> dict[str, Any]:
        y = torch.relu(x @ weight) * scale
        return {"y": y, "parts": (y.mean(-1), [other + y, x.shape[0]]), "scale": scale}

    calls: list[Any] = [
        (
            (torch.randn(4, width, device=device),),
            {"other": torch.randn(4, width, device=device), "scale": 2.0},
        )
        for _ in range(INPUTS)
    ]
    return Workload(function, calls, tolerance=1e-2)


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "decode": decode,
    "mlp": mlp,
    "encoder": encoder,
    "conv": conv,
    "random": random,
    "nested": nested,
}


def tensors(result: Any) -> list[Any]:
    """Return the tensors in *result*."""
    from torch.utils import _pytree as pytree

    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def furthest(expected: list[list[Any]], found: list[list[Any]]) -> float:
    """Return by how much any value differs, relative to the largest of its tensor; 0.0 where all bits are equal."""
    worst = 0.0
    for one, other in zip(expected, found, strict=True):
        for was, is_ in zip(one, other, strict=True):
            assert was.shape == is_.shape, (was.shape, is_.shape)
            assert was.dtype == is_.dtype, (was.dtype, is_.dtype)
            if not torch.equal(was, is_):
                scale = max(was.double().abs().max().item(), 1e-30)
                worst = max(worst, (was.double() - is_.double()).abs().max().item() / scale)
    return worst
