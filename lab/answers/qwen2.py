"""Qwen2 from a GGUF file in plain torch, for a GPU: reading many texts at once, and writing them in slots.

It computes in bfloat16 what transformers' Qwen2 computes, and keeps keys and values of all slots in one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, eq=False)
class Layer:
    """The weights of a decoder layer."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(heads + 2 groups) D, H]
    qkv_bias: Tensor
    out: Tensor  # [H, heads D]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2 I, H]
    down: Tensor  # [H, I]


class Qwen2:
    """The model; `read` for whole texts, `step` for one more token of each slot."""

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        reader = gguf.GGUFReader(path)
        names = ("qwen2.", "tokenizer.ggml.eos")
        fields = {
            name: field.contents()
            for name, field in reader.fields.items()
            if name.startswith(names)
        }
        self.eps = float(fields["qwen2.attention.layer_norm_rms_epsilon"])
        self.heads = int(fields["qwen2.attention.head_count"])
        self.groups = int(fields["qwen2.attention.head_count_kv"])
        self.size = int(fields["qwen2.embedding_length"])
        self.dim = self.size // self.heads
        self.device, self.dtype = device, dtype
        self.base = float(fields["qwen2.rope.freq_base"])
        self.ends = {int(fields["tokenizer.ggml.eos_token_id"]), 151643, 151645}

        found = {
            one.name: widened(one.tensor_type.name, torch.tensor(one.data).to(device)).to(dtype)
            for one in reader.tensors
        }
        self.embeddings = found["token_embd.weight"]
        self.output = found.get("output.weight", self.embeddings)
        self.output_norm = found["output_norm.weight"]
        self.layers = [
            self._layer(found, f"blk.{at}.") for at in range(int(fields["qwen2.block_count"]))
        ]

    @staticmethod
    def _layer(found: dict[str, Tensor], at: str) -> Layer:
        def joined(names: str, end: str) -> Tensor:
            return torch.cat([found[f"{at}{name}.{end}"] for name in names.split()])

        attention = "attn_q attn_k attn_v"
        return Layer(
            found[f"{at}attn_norm.weight"],
            joined(attention, "weight"),
            joined(attention, "bias"),
            found[f"{at}attn_output.weight"],
            found[f"{at}ffn_norm.weight"],
            joined("ffn_gate ffn_up", "weight"),
            found[f"{at}ffn_down.weight"],
        )

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines ``[..., 1, D]`` for positions ``[...]``."""
        steps = torch.arange(0, self.dim, 2, device=self.device).float() / self.dim
        angle = positions[..., None].float() / self.base**steps
        angle = torch.cat([angle, angle], -1)[..., None, :]
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.eps)

    def _split(
        self, x: Tensor, layer: Layer, turn: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[..., heads, D]``, keys and values ``[..., groups, D]``."""
        every = functional.linear(x, layer.qkv, layer.qkv_bias)
        every = every.view(*x.shape[:-1], self.heads + 2 * self.groups, self.dim)
        turned, values = every.split([self.heads + self.groups, self.groups], -2)
        cos, sin = turn
        left, right = turned.chunk(2, -1)
        turned = turned * cos + torch.cat([-right, left], -1) * sin
        queries, keys = turned.split([self.heads, self.groups], -2)
        return queries, keys, values

    def _after(self, x: Tensor, attended: Tensor, layer: Layer) -> Tensor:
        x = x + functional.linear(attended.flatten(-2), layer.out)
        inner = functional.linear(self.norm(x, layer.post_norm), layer.gate_up)
        gate, up = inner.chunk(2, -1)
        return x + functional.linear(functional.silu(gate) * up, layer.down)

    @torch.no_grad()
    def read(
        self, tokens: Tensor, wanted: tuple[int, ...] = (), cache: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Reads texts ``[B, T]`` that begin at position 0; returns the normalised last states
        ``[B, T, H]``, and those after the first ``n`` layers for each n wanted. cache: ``[layers,
        2, B, groups, T, D]``, which gets keys and values."""
        turn = self.turn(torch.arange(tokens.shape[1], device=self.device))
        x = self.embeddings[tokens]
        kept = {}
        for at, layer in enumerate(self.layers):
            if at in wanted:
                kept[at] = x
            queries, keys, values = self._split(self.norm(x, layer.input_norm), layer, turn)
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)  # [B, groups, T, D]
            if cache is not None:
                cache[at, 0], cache[at, 1] = keys, values
            attended = functional.scaled_dot_product_attention(
                queries.transpose(1, 2),
                keys.repeat_interleave(self.heads // self.groups, 1),
                values.repeat_interleave(self.heads // self.groups, 1),
                is_causal=True,
            )
            x = self._after(x, attended.transpose(1, 2), layer)
        return self.norm(x, self.output_norm), [kept[at] for at in wanted]

    @torch.no_grad()
    def step(self, tokens: Tensor, positions: Tensor, cache: Tensor, extent: int) -> Tensor:
        """Reads one more token of each slot; returns the logits ``[N, V]`` after them.

        tokens, positions: ``[N]``. cache: ``[layers, 2, N, groups, S, D]``; each slot sees its
        entries up to its own position, which are among the first ``extent``.
        """
        count, share = len(tokens), self.heads // self.groups
        turn = self.turn(positions)
        slots = torch.arange(count, device=self.device)
        hidden = torch.arange(extent, device=self.device) > positions[:, None]  # [N, E]
        bias = torch.zeros(count, 1, 1, extent, device=self.device).masked_fill_(
            hidden[:, None, None], float("-inf")
        )
        x = self.embeddings[tokens]
        for at, layer in enumerate(self.layers):
            queries, keys, values = self._split(self.norm(x, layer.input_norm), layer, turn)
            cache[at, 0][slots, :, positions] = keys
            cache[at, 1][slots, :, positions] = values
            seen_keys = cache[at, 0].flatten(0, 1)[:, :extent]  # [N groups, E, D]
            seen_values = cache[at, 1].flatten(0, 1)[:, :extent]
            mine = queries.reshape(count * self.groups, share, self.dim) * self.dim**-0.5
            scores = torch.bmm(mine, seen_keys.transpose(1, 2)).float()
            scores = scores.view(count, self.groups, share, extent) + bias
            chances = scores.softmax(-1).to(self.dtype).flatten(0, 1)
            attended = torch.bmm(chances, seen_values).view(count, self.heads, self.dim)
            x = self._after(x, attended, layer)
        return functional.linear(self.norm(x, self.output_norm), self.output)


def widened(kind: str, raw: Tensor) -> Tensor:
    """Returns the float32 values of a tensor in a GGUF file. raw: as it lies there, by rows."""
    if kind == "F32":
        return raw
    of_kind = {"Q4_K": (144, _four_bits), "Q6_K": (210, _six_bits)}
    size, widen = of_kind[kind]
    return widen(raw.view(-1, size)).view(*raw.shape[:-1], -1)


def _halves(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16).float()


def _four_bits(raw: Tensor) -> Tensor:
    """Blocks of Q4_K ``[N, 144]`` -> ``[N, 256]``: eight parts of 32 with a scale and a minimum."""
    scale, least = _halves(raw[:, :2]), _halves(raw[:, 2:4])
    low, middle, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]  # twelve bytes: 6 bits each
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], 1)
    minima = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)
    nibbles = raw[:, 16:].view(-1, 4, 32)
    values = torch.stack([nibbles & 15, nibbles >> 4], 2).flatten(1, 2)  # [N, 8, 32]
    return (scale * scales)[..., None] * values - (least * minima)[..., None]


def _six_bits(raw: Tensor) -> Tensor:
    """Blocks of Q6_K ``[N, 210]`` -> ``[N, 256]``: sixteen parts of 16 with a scale."""
    low, high = raw[:, :128].view(-1, 2, 2, 32), raw[:, 128:192].view(-1, 2, 1, 32)
    four = torch.stack([low & 15, low >> 4], 2)  # [N, 2, 2, 2, 32]
    shifts = torch.tensor([0, 2, 4, 6], device=raw.device)[:, None]
    two = high >> shifts & 3  # [N, 2, 4, 32]
    values = (four.flatten(2, 3) | two << 4).view(-1, 16, 16).float() - 32
    scales = raw[:, 192:208].view(torch.int8).float() * _halves(raw[:, 208:])
    return (values * scales[..., None]).flatten(1)
