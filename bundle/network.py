"""A lean Llama for training: weights are stacked, and one layer's code is compiled for all layers.

The arithmetic is that of `LlamaForCausalLM`; `export.py` checks the logits against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizer import VOCABULARY
from torch import Tensor, nn

EPSILON = 1e-5
THETA = 10_000.0
STACKS = ("before", "after", "qkv", "gate_up", "out", "down")


@dataclass(frozen=True)
class Shape:
    """Sizes of a network."""

    hidden: int
    layers: int
    inner: int
    heads: int
    groups: int
    width: int = 64


TARGET = Shape(hidden=256, layers=20, inner=640, heads=4, groups=2)
DRAFTER = Shape(hidden=192, layers=1, inner=768, heads=3, groups=3)


def rotary(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary positions, one row per position."""
    rates = THETA ** (-torch.arange(0, width, 2, device=device).float() / width)
    angles = torch.outer(torch.arange(length, device=device).float(), rates)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPSILON)


def enter(
    x: Tensor, before: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer up to its attention, token by token: rotated queries and keys, and values."""
    mixed = F.linear(norm(x, before), qkv).view(len(x), heads + 2 * groups, -1)
    q, k, v = mixed.split([heads, groups, groups], dim=1)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    repeat = heads // groups
    return q, k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)


def leave(
    x: Tensor, seen: Tensor, out: Tensor, after: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """A layer from its attention on, token by token."""
    x = x + F.linear(seen, out)
    gate, up = F.linear(norm(x, after), gate_up.flatten(0, 1)).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, down)


def attend(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Causal attention among the tokens of each row."""
    q, k, v = (part.view(-1, length, *part.shape[1:]).transpose(1, 2) for part in (q, k, v))
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return seen.transpose(1, 2).flatten(2).flatten(0, 1)


@dataclass(frozen=True)
class Parts:
    """The two halves of a layer; both see tokens, not rows, so one compilation fits any length."""

    enter: Callable[..., tuple[Tensor, Tensor, Tensor]] = enter
    leave: Callable[..., Tensor] = leave

    @staticmethod
    def compiled() -> Parts:
        return Parts(torch.compile(enter, dynamic=False), torch.compile(leave, dynamic=False))


class Network(nn.Module):
    """A decoder whose head is its embedding."""

    def __init__(self, shape: Shape, layers: int) -> None:
        super().__init__()
        hidden, inner = shape.hidden, shape.inner
        inside = shape.heads * shape.width
        mixed = (shape.heads + 2 * shape.groups) * shape.width
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, hidden) * 0.02)
        self.final = nn.Parameter(torch.ones(hidden))
        self.before = nn.Parameter(torch.ones(layers, hidden))
        self.after = nn.Parameter(torch.ones(layers, hidden))
        self.qkv = nn.Parameter(torch.randn(layers, mixed, hidden) * hidden**-0.5)
        self.gate_up = nn.Parameter(torch.randn(layers, 2, inner, hidden) * hidden**-0.5)
        self.out = nn.Parameter(torch.zeros(layers, hidden, inside))
        self.down = nn.Parameter(torch.zeros(layers, hidden, inner))
        self.parts = Parts()

    @property
    def layers(self) -> int:
        return self.qkv.shape[0]

    def matrices(self) -> list[nn.Parameter]:
        """The stacked matrices of the layers."""
        return [self.qkv, self.out, self.gate_up, self.down]

    def others(self) -> list[nn.Parameter]:
        """The embedding and the norms."""
        return [self.embedding, self.final, self.before, self.after]

    def forward(self, tokens: Tensor) -> Tensor:
        """Normed hidden states, row by row; the logits are these times the embedding."""
        rows, length = tokens.shape
        heads, groups = self.shape.heads, self.shape.groups
        waves = rotary(length, self.shape.width, tokens.device)
        cos, sin = (wave.repeat(rows, 1)[:, None] for wave in waves)
        x = F.embedding(tokens.flatten(), self.embedding)
        stacks = (self.before, self.qkv, self.out, self.after, self.gate_up, self.down)
        layers = zip(*(stack.unbind(0) for stack in stacks), strict=True)
        for before, qkv, out, after, gate_up, down in layers:
            q, k, v = self.parts.enter(x, before, qkv, cos, sin, heads, groups)
            x = self.parts.leave(x, attend(q, k, v, length), out, after, gate_up, down)
        return norm(x, self.final).view(rows, length, -1)


@torch.no_grad()
def grow(network: Network, layers: int) -> Network:
    """A deeper network that computes the same function.

    Each layer is followed by copies of itself whose output matrices are zero, so they start as
    the identity yet learn at once.
    """
    deeper = Network(network.shape, layers).to(network.embedding.device)
    deeper.parts = network.parts
    source, fresh = _groups(network.layers, layers)
    for name in STACKS:
        getattr(deeper, name).copy_(getattr(network, name)[source])
    deeper.out[fresh] = 0
    deeper.down[fresh] = 0
    deeper.embedding.copy_(network.embedding)
    deeper.final.copy_(network.final)
    return deeper


@torch.no_grad()
def cut(network: Network, layers: int) -> Network:
    """The inverse of `grow`: the layers that were there before, whatever the others learnt."""
    _, fresh = _groups(layers, network.layers)
    shallow = Network(network.shape, layers).to(network.embedding.device)
    for name in STACKS:
        getattr(shallow, name).copy_(getattr(network, name)[~fresh])
    shallow.embedding.copy_(network.embedding)
    shallow.final.copy_(network.final)
    return shallow


def _groups(few: int, many: int) -> tuple[Tensor, Tensor]:
    """For each of `many` layers, which of `few` it comes from, and whether it is an added one."""
    source = torch.arange(many) * few // many
    return source, torch.cat([torch.tensor([False]), source[1:] == source[:-1]])
