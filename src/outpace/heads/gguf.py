"""Heads as GGUF files, as llama.cpp's converter writes them: seen as the folder that was converted.

A file's values become the entries of the published configuration, its tensors the published
weights, in the numbers that blocks stand for; so that the formats of folders read both.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from outpace.core.values import is_integer, shown
from outpace.errors import ModelLoadError
from outpace.heads.folder import HeadFolder
from outpace.targets.cpu.weights.blocks import dequantizes
from outpace.targets.hf.gguf.architecture import rotary_options
from outpace.targets.hf.gguf.file import GGUFModel
from outpace.targets.hf.gguf.header import StoredTensor, begins_as_gguf, read_header

EAGLE3, DFLASH, DSPARK = "eagle3", "dflash", "dspark"
ARCHITECTURES = (EAGLE3, DFLASH, DSPARK)
"""Those of heads, as `general.architecture` calls them."""

NAMED = {name.encode() for name in ARCHITECTURES}
BEGIN = 1 << 16
"""Bytes of a file in which its architecture is looked for."""
TEXT = (8).to_bytes(4, "little")
"""How a file says that a value is a text."""

SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
"""Entries that a configuration must have, and the values of a file."""

LAYERS = "eagle_aux_hidden_state_layer_ids"

NAMES = {
    "fc": "fc",
    "enc.output_norm": "hidden_norm",
    "output_norm": "norm",
    "output": "lm_head",
    "token_embd": "embed_tokens",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "conf_proj": "confidence_head.proj",
}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes of the kinds of numbers that are in no blocks."""
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""What tensors are called in files, and in folders."""


def is_head_gguf(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path leads to a GGUF file with a head. Only its beginning is read, where
    writers put the architecture: the whole header has all tokens in it."""
    place = Path(path)
    if not place.is_file() or not begins_as_gguf(place):
        return False
    with place.open("rb") as file:
        begin = file.read(BEGIN)
    _, found, rest = begin.partition(b"general.architecture" + TEXT)
    length = int.from_bytes(rest[:8], "little")
    return bool(found) and rest[8 : 8 + min(length, BEGIN)] in NAMED


class GGUFHeadFile(HeadFolder):
    """A GGUF file with a head."""

    @cached_property
    def _model(self) -> GGUFModel:
        header = read_header(self.path)
        return GGUFModel(self.path, header.values, header.tensors)

    def read_config(self) -> dict[str, Any]:
        with self.describing(self._model.architecture):
            about = self._sizes()
            if self._model.architecture == EAGLE3:
                return {**about, **self._eagle3()}
            return {**about, **self._dflash()}

    def read_weights(self, *names: str) -> dict[str, Tensor]:
        tensors = self._model.tensors
        try:
            return {self._public(name): self._numbers(one) for name, one in tensors.items()}
        except ModelLoadError:
            raise
        except Exception as error:  # torch and gguf raise all sorts over a damaged file
            raise self.damaged(error) from error

    def _at(self, file: str) -> Path:
        return self.path

    # -- its configuration -------------------------------------------------------------------------

    def _sizes(self) -> dict[str, Any]:
        model = self._model
        found = {entry: model.number(name) for entry, name in SIZES.items()}
        for entry, value in found.items():
            if value is None:
                raise ValueError(f"it has no {model.architecture}.{SIZES[entry]}")
        if "rope_freqs.weight" in model.tensors or "blk.0.rope_freqs.weight" in model.tensors:
            raise ValueError("its rotary factors (rope_freqs) are not read: take its folder")
        usual = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}
        return {
            **found,
            "num_key_value_heads": model.number("attention.head_count_kv"),
            "head_dim": model.head_size,
            "vocab_size": self._vocabulary(),
            **rotary_options(model, usual),
        }

    def _vocabulary(self) -> int:
        """The target's tokens."""
        said = self._model.number("vocab_size")
        tokens = self._model.values.get("tokenizer.ggml.tokens")
        rows = [
            tensor.shape[0]
            for name, tensor in self._model.tensors.items()
            if name in ("token_embd.weight", "markov_w1.weight")
        ]
        found = next(
            (n for n in (*rows, said, tokens and len(tokens)) if is_integer(n) and n), None
        )
        if found is None:
            raise ValueError("it says nothing of its target's tokens")
        return int(found)

    def _layers_read(self, *names: str) -> list[int]:
        """Numbers of the target's hidden states."""
        for name in names:
            value = self._model.family_value(name)
            if value is not None:
                return [int(at) for at in np.atleast_1d(value)]
        raise ValueError(f"it has no {self._model.architecture}.{names[0]}")

    def _eagle3(self) -> dict[str, Any]:
        model = self._model
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "target_hidden_size": model.number("target_hidden_size"),
            LAYERS: self._layers_read("target_layers", "extract_layers"),
            "outpace_counts_states": True,
            **{
                name: bool(model.family_value(name))
                for name in ("norm_before_residual", "norm_before_fc")
            },
            "draft_vocab_size": None if self._d2t is None else len(self._d2t),
        }

    def _dflash(self) -> dict[str, Any]:
        model = self._model
        joined = "markov_w1.weight" in model.tensors
        for name in model.tensors:
            if name.startswith("selector_") or "_conv_" in name:
                raise ValueError("it is one of DFlash 2, which is read from its folder only")
        said, sure = model.family_value("sample_from_anchor"), "conf_proj.weight" in model.tensors
        window = model.number("attention.sliding_window")
        pattern = model.family_value("attention.sliding_window_pattern")
        about: dict[str, Any] = {
            "architectures": ["DSparkDraftModel" if joined else "DFlashDraftModel"],
            "block_size": model.number("block_size"),
            "mask_token_id": model.values.get("tokenizer.ggml.mask_token_id"),
            "target_layer_ids": [at - 1 for at in self._layers_read("target_layers")],
            "sample_from_anchor": joined if said is None else bool(said),
            "draft_vocab_size": None if self._d2t is None else len(self._d2t),
        }
        if window:
            layers = int(model.number("block_count"))
            kinds = [True] * layers if pattern is None else [*np.atleast_1d(pattern)]
            about |= {
                "sliding_window": window,
                "use_sliding_window": True,
                "layer_types": [
                    "sliding_attention" if kind else "full_attention" for kind in kinds
                ],
            }
        if window or model.family_value("attention.causal") is not None:
            about["is_causal"] = bool(model.family_value("attention.causal"))
        if joined:
            width = model.tensors["conf_proj.weight"].shape[-1] if sure else 0
            about |= {
                "markov_rank": model.tensors["markov_w1.weight"].shape[-1],
                "markov_head_type": model.family_value("markov_head_type") or "vanilla",
                "enable_confidence_head": sure,
                "confidence_head_with_markov": width != model.number("embedding_length"),
            }
        return about

    # -- its weights -------------------------------------------------------------------------------

    def _public(self, name: str) -> str:
        """What a tensor is called in a folder; its own name where that is not known."""
        if name in ("d2t", "d2t.weight"):
            return "d2t"
        stem, _, ending = name.rpartition(".")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".", 2)
            return f"layers.{layer}.{IN_LAYER.get(part, part)}.{ending}"
        if self._model.architecture == EAGLE3 and stem == "enc.output_norm":
            return f"input_norm.{ending}"
        return f"{NAMES.get(stem, stem)}.{ending}"

    def _numbers(self, stored: StoredTensor) -> Tensor:
        """The numbers of a tensor as a folder has them."""
        if stored.name in ("d2t", "d2t.weight"):
            found = torch.from_numpy(self._d2t)
            return found - torch.arange(len(found))
        if stored.kind not in DTYPES and not dequantizes(stored.kind):
            raise self.damaged(
                f"{shown(stored.name)} is of the kind {stored.kind}, which the installed gguf "
                "library does not dequantise"
            )
        kind = gguf.GGMLQuantizationType[stored.kind]
        if stored.kind in DTYPES:
            whole = stored.raw.clone().view(DTYPES[stored.kind]).view(stored.shape)
        else:
            whole = torch.from_numpy(gguf.quants.dequantize(stored.rows.numpy(), kind))
        part, _, _ = stored.name.rpartition(".")
        if part.endswith(("attn_q", "attn_k")) and self._model.architecture == EAGLE3:
            heads = "attention.head_count" + ("_kv" if "attn_k" in stored.name else "")
            count = int(self._model.number(heads))
            parts = whole.view(count, -1, 2, *whole.shape[1:])  # pairs side by side
            whole = parts.transpose(1, 2).reshape(whole.shape)
        return whole

    @cached_property
    def _d2t(self) -> Any:
        """The target's tokens, of a head that knows some; None of one that knows all."""
        tensors = self._model.tensors
        stored = tensors.get("d2t", tensors.get("d2t.weight"))
        if stored is None:
            return None
        dtypes = {"I64": np.int64, "I32": np.int32, "F32": np.float32}
        if stored.kind not in dtypes:
            raise self.damaged(f"d2t is of the kind {stored.kind}")
        return stored.raw.numpy().view(dtypes[stored.kind]).astype(np.int64)
