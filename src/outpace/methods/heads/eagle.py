"""EAGLE: one decoder layer that foresees the target's last hidden states.

EAGLE-1 (Li et al. 2024, arXiv 2401.15077); EAGLE-2 (Li et al. 2024, arXiv 2406.16858) drafts other
trees with the same heads. The parts are named as in the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from outpace.heads.base import (
    Head,
    HeadConfig,
    SharedLMHeadMixin,
    SharedModules,
    TargetShape,
    init_identity_on_last,
    parse_config,
)
from outpace.heads.checkpoint import Format, HeadCheckpoint, architectures
from outpace.heads.decoder import DecoderLayer
from outpace.heads.folder import HeadFolder
from outpace.heads.layers import AttentionContext, KeyValues, LayerConfig
from outpace.methods.heads.decoder_heads import DecoderHead, DecoderHeadDrafter, DecoderHeadRecipe
from outpace.methods.heads.published import (
    check_supported,
    drop_inv_freq,
    has_full_vocab,
    layer_config_dict,
    layer_sizes,
    rename_prefixes,
)
from outpace.train.recipe import DepthLosses, LossOutput, Recipe
from outpace.train.teacher import TeacherBatch

# -- the network -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayerConfig):
    """What an EAGLE head is built from. Sizes that are 0 follow from the target's width."""

    depths: int = 5
    """Tokens after the root for which its guesses are counted in training; it drafts as far as it
    is asked to."""
    unrolled: int = 1
    """Steps over its own outputs that it learns from. EAGLE has one; with several it is trained as
    in HASS (Zhang et al. 2024, arXiv 2408.15766)."""
    fusion_bias: bool = True
    """Whether the layer that joins token and state has a bias."""
    bias: bool = False
    """Whether queries, keys and values have one, as in heads for Qwen2."""
    input_norm: bool = False
    """Whether attention reads its input normalised."""
    own_embedding: bool = False
    """Whether it has embeddings of its own instead of the target's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.unrolled <= self.depths:
            raise ValueError(f"unrolled is {self.unrolled}, and not from 1 to depths")


class Eagle(SharedLMHeadMixin, DecoderHead):
    """The target's embedding of a token and the state before it, joined, go through one layer.

    What comes out is the head's guess of the target's state at that token, and the target's own
    output matrix makes logits of it. A head that knows few tokens only has a copy of their rows.
    """

    kind: ClassVar[str] = "eagle"
    Config: ClassVar[type[HeadConfig]] = EagleConfig

    @classmethod
    def recipe(cls) -> type[Recipe]:
        return EagleRecipe

    def __init__(self, target: TargetShape, config: EagleConfig) -> None:
        super().__init__(target, config)
        self.unrolled = config.unrolled
        size = target.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.fusion_bias)
        self.layer = DecoderLayer(size, config, input_norm=config.input_norm, bias=config.bias)
        self.lm_head = self.new_draft_lm_head()
        self.embed_tokens = nn.Embedding(target.vocab_size, size) if config.own_embedding else None

    def combine_hidden_states(self, states: Tensor) -> Tensor:
        return states.to(self.dtype)

    def begin(self, rows: int) -> KeyValues:
        return self.layer.begin(rows)

    @property
    def decoder_layers(self) -> list[nn.Module]:
        return [self.layer]

    def step(
        self,
        features: Tensor,
        tokens: Tensor,
        attn_context: AttentionContext,
        shared: SharedModules,
    ) -> tuple[Tensor, KeyValues]:
        embed = shared.embed if self.embed_tokens is None else self.embed_tokens
        joined = self.fc(torch.cat([embed(tokens).to(features.dtype), features], -1))
        return attn_context.through(self.decoder_layers, joined)

    def logits(self, outputs: Tensor, shared: SharedModules) -> Tensor:
        return self.compute_logits(outputs, shared)

    @torch.no_grad()
    def init_from_lm_head(self, shared_head: Tensor | None) -> None:
        """The guess begins as the state before it; a copy of the target's rows stays as it is."""
        super().init_from_lm_head(shared_head)
        init_identity_on_last(self.fc)


# -- how it is trained -----------------------------------------------------------------------------

# How EAGLE heads are trained: to foresee the target's states, and the distributions that follow
# from them.
#
# Li et al. 2024, arXiv 2401.15077, section 4.1 and the published code.


CROSS_ENTROPY = 0.1
"""The weight of the cross entropy with the target's distributions; that of the states is 1."""
NOISE = 0.1
"""The largest noise on a state that the head reads, as a share of the states' mean square. With it
the head learns to go on from states that it has foreseen itself, which are a little wrong."""


class EagleRecipe(DecoderHeadRecipe):
    """The loss of an `Eagle`.

    While it learns, it is unrolled over its own outputs as often as it says, in EAGLE once; while
    it is measured, to all of its depths.
    """

    _head: Eagle

    def compute_loss(self, batch: TeacherBatch) -> LossOutput:
        depths, learning = self._head.config.depths, torch.is_grad_enabled()
        states = batch.hidden_states.float()
        places = states.shape[1] - depths
        losses = DepthLosses(self._head, batch, places)
        read = _noisy(states) if learning else states
        steps = self._head.unrolled if learning else depths
        far = states.new_zeros(())
        for depth, outputs in enumerate(self._unrolled(batch.tokens, read, steps), 1):
            wanted = states[:, depth : depth + places]
            apart = smooth_l1_loss(outputs, wanted, reduction="none").mean(-1)  # [B, P]
            far = far + losses.mean(apart) / steps
            losses.add(self._head.logits(outputs, self._shared))
        output = losses.output()
        return LossOutput(far + CROSS_ENTROPY * output.loss, output.hits)


def _noisy(states: Tensor) -> Tensor:
    """States ``[B, T, H]`` with even noise, which the paper draws from -0.1 to 0.1: its targets'
    states have a mean square of about 1."""
    scale = states.square().mean().sqrt()
    return states + (2 * torch.rand_like(states) - 1) * (NOISE * scale)


# -- how it drafts ---------------------------------------------------------------------------------


class EagleDrafter(DecoderHeadDrafter):
    """Drafts with an `Eagle` head."""

    name: ClassVar[str] = "eagle"


# -- its published format --------------------------------------------------------------------------

# EAGLE's published heads, of its first and second edition: ``config.json`` of a Llama with one
# layer, or of a Qwen2.
#
# The weights are ``fc`` and ``layers.0``, whose attention reads its input as it is, and mostly a
# copy of the target's ``embed_tokens``. Nothing in the configuration says that it is a head; from a
# whole model of one layer it is recognised by its weights.


ARCHITECTURES = ("LlamaForCausalLMEagle", "LlamaForCausalLM", "Qwen2ForCausalLM")
OWN = {"layers.0.": "layer."}
PUBLIC = {"layer.": "layers.0."}
SUPPORTED_VALUES: Mapping[str, Any] = {"num_hidden_layers": 1}
TIED: Mapping[str, Any] = {"tie_word_embeddings": False}
"""What the configuration of a file with an output matrix of its own has to say."""


class EagleFormat(Format):
    """The target is known by its width and its vocabulary only."""

    name: ClassVar[str] = "eagle"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        known = architectures(about).intersection(ARCHITECTURES)
        return bool(known) and about.get("num_hidden_layers") == 1

    @classmethod
    def kind_of(cls, about: Mapping[str, Any]) -> str | None:
        return None  # a language model of one layer has the same configuration

    @classmethod
    def read(cls, folder: HeadFolder, about: Mapping[str, Any]) -> Head:
        found = folder.read_weights("model.safetensors", "pytorch_model.bin")
        weights = rename_prefixes(drop_inv_freq(found), OWN)
        with folder.describing("eagle"):
            # Often copied from the target, whose output matrix the head uses.
            own = "lm_head.weight" in weights
            check_supported(about, {**SUPPORTED_VALUES, **TIED} if own else SUPPORTED_VALUES)
            head = eagle_head(about, weights)
        return folder.fill(head, {**weights, "d2t": head.d2t})

    @classmethod
    def write(cls, head: Head) -> HeadCheckpoint:
        if not isinstance(head, Eagle):
            raise cls.refuse(f"holds no {head.kind} heads")
        if not has_full_vocab(head):
            raise cls.refuse("holds heads that know all tokens only")
        weights = rename_prefixes(head.state_dict(), PUBLIC)
        del weights["d2t"]
        attention, inner = head.layer.self_attn, head.layer.mlp.up_proj.out_features
        about = {
            "architectures": [ARCHITECTURES[0]],
            "model_type": "llama",
            **layer_config_dict(head, attention, inner),
            "bias": head.fc.bias is not None,
            "qkv_bias": attention.q_proj.bias is not None,
        }
        return HeadCheckpoint(about, weights)


def eagle_head(about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Eagle:
    """Returns a head, still without its weights, from its layer's public configuration. Which parts
    it has follows from the weights, by our own names. Raises one of `heads.folder.CONFIG_ERRORS`
    where they do not fit."""
    given = {
        **layer_sizes(about),
        "fusion_bias": "fc.bias" in weights,
        "bias": "layer.self_attn.q_proj.bias" in weights,
        "input_norm": "layer.input_layernorm.weight" in weights,
        "own_embedding": "embed_tokens.weight" in weights,
        "draft_vocab_size": about["vocab_size"] if "lm_head.weight" in weights else 0,
    }
    config = parse_config(EagleConfig, given)
    return Eagle(TargetShape(about["hidden_size"], about["vocab_size"], 0), config)
