"""llama.cpp's layouts of weights, for families that transformers' own functions leave out.

A layout says which tensors of a file a weight of the model is, where the library's table of names
does not, and turns a tensor into the layout that the model has. What llama.cpp's converter does to
a weight is undone here.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from transformers.modeling_gguf_pytorch_utils import (
    GGUFTensor,
    LlamaTensorProcessor,
    TensorProcessor,
)

_LLAMA: Any = LlamaTensorProcessor
_TENSOR: Any = GGUFTensor

EXPERTS = ("blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight")

PLACES = (
    (
        r"model\.layers\.(\d+)\.\w+\.experts\.(gate|up|down)_proj\.(weight|bias)",
        ("blk.{}.ffn_{}_exps.{}",),
    ),
    (
        r"model\.layers\.(\d+)\.mlp\.experts\.gate_up_proj_bias",
        ("blk.{}.ffn_gate_exps.bias", "blk.{}.ffn_up_exps.bias"),
    ),
    (r"model\.layers\.(\d+)\.mlp\.experts\.down_proj_bias", ("blk.{}.ffn_down_exps.bias",)),
    (r"model\.layers\.(\d+)\.mlp\.gate\.e_score_correction_bias", ("blk.{}.exp_probs_b.bias",)),
    (r"model\.layers\.(\d+)\.\w+\.experts\.gate_up_proj", EXPERTS),
    (r"model\.layers\.(\d+)\.\w+\.experts\.down_proj", ("blk.{}.ffn_down_exps.weight",)),
    (r"model\.layers\.(\d+)\.\w+\.expert_bias", ("blk.{}.exp_probs_b.bias",)),
    (r"model\.layers\.(\d+)\.\w+\.router\.weight", ("blk.{}.ffn_gate_inp.weight",)),
    (
        r"model\.layers\.(\d+)\.shared_mlp\.input_linear\.weight",
        ("blk.{}.ffn_gate_shexp.weight", "blk.{}.ffn_up_shexp.weight"),
    ),
    (r"model\.layers\.(\d+)\.shared_mlp\.output_linear\.weight", ("blk.{}.ffn_down_shexp.weight",)),
    (r"model\.layers\.(\d+)\.self_attn\.kv_b_proj\.keys\.weight", ("blk.{}.attn_k_b.weight",)),
    (r"model\.layers\.(\d+)\.self_attn\.kv_b_proj\.values\.weight", ("blk.{}.attn_v_b.weight",)),
    (
        r"model\.layers\.(\d+)\.self_attn\.kv_b_proj\.weight",
        ("blk.{}.attn_k_b.weight", "blk.{}.attn_v_b.weight"),
    ),
    (r"\w+\.layers\.(\d+)\.\w+\.A_log", ("blk.{}.ssm_a",)),
    (r"\w+\.layers\.(\d+)\.\w+\.D", ("blk.{}.ssm_d",)),
    (r"\w+\.layers\.(\d+)\.\w+\.dt_bias", ("blk.{}.ssm_dt.bias",)),
    (
        r"transformer\.h\.(\d+)\.post_attention_layernorm\.(weight|bias)",
        ("blk.{}.ffn_norm.{}",),
    ),
    (r"transformer\.word_embeddings_layernorm\.(weight|bias)", ("token_embd_norm.{}",)),
)
"""Weights by patterns of their names, and the tensors that each of them is put together from."""

HALVES = re.compile(r".*\.ffn_(?P<half>gate|up)(_exps|_shexp)?\.(weight|bias)")
"""Tensors that a model may hold in one weight, the gate first."""

LATENT = re.compile(r"blk\.\d+\.attn_(?P<part>k|v)_b\.weight")
"""Tensors that make the keys (the other way round, ``[H, K, N]``) and the values of heads from
latents. A model holds each head's key and its value in one weight."""

MERGED = ("gate_up_proj", "gate_up_proj_bias", "input_linear.weight")
"""How the names of such weights end."""

SPARE = re.compile(r"blk\.(\d{1,9})\.attn_(k|v|k_norm)\.weight")

SHORT = ("ssm_conv1d.weight", "shortconv.conv.weight")
"""Kernels of convolutions, which models hold with a dimension more."""


BY_HEAD = (".ssm_a", ".ssm_d", ".ssm_norm.weight")
"""Weights of Mamba-2, which files hold with a dimension more, of 1 or of groups of heads."""

TILED = ("attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias")
"""Weights that have rows for the value heads of linear attention, and no others."""


class Layout(TensorProcessor):
    """The layout of one family's weights."""

    def __init__(
        self,
        config: Any = None,
        *,
        permuted: bool = False,
        grouped: bool = False,
        offset: float = 0.0,
        tiled: bool = False,
        turned: bool = False,
    ) -> None:
        """permuted: whether the rows of queries and keys are in Llama's order. grouped: whether the
        model holds query, key and value of each head side by side, which a file holds apart.
        offset: what the converter adds to the weights of norms. tiled: whether the value heads of
        linear attention stand in turns of the key heads, which the model holds together. turned:
        whether it holds experts as ``[K, N]``, and the outputs of gates in turns with the others.
        """
        self.config = config or {}
        self.permuted, self.grouped, self.offset = permuted, grouped, offset
        self.turned = turned
        self.tiled = tiled and self._values_per_key() > 1
        self.by_head = "mamba_n_heads" in self.config

    def places(self, weight: str) -> list[str]:
        """Returns the tensors that make up a weight, empty where the table of names knows."""
        for pattern, tensors in PLACES:
            found = re.fullmatch(pattern, weight)
            if found is not None:
                named = [tensor.format(*found.groups()) for tensor in tensors]
                # Granite's MLP that stands next to experts is the only one of a layer without.
                alone = self.config.get("num_local_experts") == 0
                return [name.replace("_shexp", "") for name in named] if alone else named
        return []

    def is_spare(self, name: str) -> bool:
        """Whether a model has no use for a tensor: keys and values of Gemma's last layers, which
        take those of others."""
        shared = self.config.get("num_kv_shared_layers") or 0
        found = SPARE.fullmatch(name)
        first = (self.config.get("num_hidden_layers") or 0) - shared
        return shared > 0 and found is not None and int(found[1]) >= first

    def moves_columns(self, name: str) -> bool:
        """Whether a matrix has its columns in another order than the model, which those of blocks
        cannot be put in."""
        return self.tiled and name.endswith("ssm_out.weight")

    def process(self, weights: Any, name: str, **more: Any) -> Any:
        """Returns a tensor as the model holds it, as transformers' own functions do: without a name
        if it went into those that are put together from several."""
        ours: str = more["tensor_key_mapping"][name.removesuffix(".weight")]
        half = HALVES.fullmatch(name)
        if half is not None and ours.endswith(MERGED):
            merged = more["parsed_parameters"]["tensors"]
            _put_half(weights, ours, half["half"] == "gate", merged, self.turned)
            return _TENSOR(weights, None, {})
        latent = LATENT.fullmatch(name)
        if latent is not None:
            self._put_latent(weights, ours, latent["part"], more["parsed_parameters"]["tensors"])
            return _TENSOR(weights, None, {})
        if "_exps." in name and ours.endswith("_proj.bias"):  # of a layer that holds all experts
            weights = weights.reshape(-1)
        elif "_exps." in name and self.turned and weights.ndim == 3:
            weights = weights.swapaxes(1, 2)
        if self.permuted and (".attn_q." in name or ".attn_k." in name):
            return _LLAMA(self.config).process(weights, name)
        if self.tiled:
            weights = self._untiled(weights, name)
        if self.grouped and ".attn_qkv." in name:
            heads = self.config.get("num_attention_heads") or self.config["n_head"]
            apart = weights.reshape(3, heads, -1, *weights.shape[1:])  # [3, H, D, ...]
            weights = apart.swapaxes(0, 1).reshape(weights.shape)
        else:
            weights = self._in_shape(weights, name)
        return _TENSOR(weights, name, {})

    def _in_shape(self, weights: Any, name: str) -> Any:
        """Returns a tensor with the model's dimensions, and norms and decays as it holds them."""
        if self.by_head and name.endswith(BY_HEAD):
            weights = weights.reshape(-1)
        if name.endswith(SHORT):
            return np.expand_dims(weights, axis=1)
        if name.endswith(".ssm_a"):
            return np.log(-weights)
        if name.endswith("ffn_gate_inp_shexp.weight"):
            return weights.reshape(1, -1)
        if self.offset and name.endswith("norm.weight") and "ssm_norm" not in name:
            return weights - self.offset
        return weights

    def _put_latent(
        self, weights: Any, ours: str, part: str, merged: dict[str, torch.Tensor]
    ) -> None:
        """Puts what makes keys or values of latents into the weight that makes both."""
        heads = self.config["num_attention_heads"]
        still, value = self.config["qk_nope_head_dim"], self.config["v_head_dim"]
        own = torch.from_numpy(np.array(weights))
        own = own.reshape(heads, -1, own.shape[-1])  # a dimension of 1 may have been left out
        own = own.transpose(1, 2) if part == "k" else own
        whole = merged.setdefault(ours, torch.zeros(heads * (still + value), own.shape[-1]))
        place = whole.view(heads, still + value, -1)
        (place[:, :still] if part == "k" else place[:, still:]).copy_(own)

    def _values_per_key(self) -> int:
        keys = self.config.get("linear_num_key_heads") or 1
        return int((self.config.get("linear_num_value_heads") or 1) // keys)

    def _untiled(self, weights: Any, name: str) -> Any:
        """Returns a weight of linear attention with the value heads of each key head together."""
        keys, each = self.config["linear_num_key_heads"], self._values_per_key()
        if name.endswith((".attn_qkv.weight", ".ssm_conv1d.weight")):
            before = 2 * keys * self.config["linear_key_head_dim"]  # queries and keys
            return np.concatenate([weights[:before], _together(weights[before:], keys, each)])
        if name.endswith(TILED):
            return _together(weights, keys, each)
        if name.endswith("ssm_out.weight"):
            return _together(weights.T, keys, each).T
        return weights


def _together(weights: Any, keys: int, each: int) -> Any:
    """Returns the rows of heads in groups by their key head, from turns of all key heads."""
    heads = weights.reshape(each, keys, -1, *weights.shape[1:])
    return heads.swapaxes(0, 1).reshape(weights.shape)


def _put_half(
    weights: Any, ours: str, gate: bool, merged: dict[str, torch.Tensor], turned: bool
) -> None:
    """Puts the rows of a gate before those of what it is multiplied with; turned: the columns of
    the two in turns."""
    own = torch.from_numpy(np.array(weights))
    last = own.dim() - 1
    if turned and last == 2:  # of experts; their biases are rows already
        own = own.transpose(1, 2)
    axis = last if turned else last - 1
    if ours not in merged:
        shape = list(own.shape)
        shape[axis] *= 2
        merged[ours] = torch.zeros(shape)
    whole, size = merged[ours], own.shape[axis]
    first = 0 if gate else 1
    place = whole[..., first::2] if turned else whole.narrow(axis, first * size, size)
    place.copy_(own)
