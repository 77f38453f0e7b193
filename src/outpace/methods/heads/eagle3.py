"""EAGLE-3: one decoder layer over the text, which reads three layers of the target.

Li et al. 2025, arXiv 2503.01840. The parts are named as in the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.heads.base import Head, HeadConfig, Shared, TargetShape, begin_as_last, config_of
from outpace.heads.checkpoint import Content, Format, architectures
from outpace.heads.folder import Folder
from outpace.heads.layers import Attention, Entries, FeedForward, LayerConfig, Norm, Sight
from outpace.methods.heads.attending import AttendingHead, AttendingHeadDrafter
from outpace.methods.heads.published import about_layers, check_only, layer_sizes, without_derived

# -- the network -----------------------------------------------------------------------------------


DEEP = 8
"""Layers from which on a target's three states are taken where the paper takes them."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """What an EAGLE-3 head is built from. Sizes that are 0 follow from the target's width."""

    depths: int = 5
    """Tokens after the root that it is trained for; it drafts as far as it is asked to."""
    reads: list[int] = field(default_factory=list)
    """The target's three layers that it reads; none: as `Eagle3.layers` says."""
    own_embedding: bool = False
    """Whether it has embeddings of its own instead of the target's."""
    normed: bool = False
    """Whether queries and keys are normalised, as in Qwen3."""
    norm_before_residual: bool = False
    """Whether what the layer does is added to the normalised guide, and not to the guide."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reads and (len(self.reads) != 3 or any(type(at) is not int for at in self.reads)):
            raise ValueError(f"reads is {self.reads!r}, and not three layers")


class Eagle3(AttendingHead):
    """One decoder layer on the target's embedding of a token and a guide, side by side."""

    kind: ClassVar[str] = "eagle3"
    Config: ClassVar[type[HeadConfig]] = Eagle3Config

    def __init__(self, target: TargetShape, config: Eagle3Config) -> None:
        super().__init__(target, config)
        size = target.hidden_size
        self._reads = tuple(config.reads)
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = MidLayer(size, config)
        self.norm = Norm(size, eps=config.norm_eps)
        self.lm_head = nn.Linear(size, self.vocabulary, bias=False)
        self.embed_tokens = nn.Embedding(target.vocab_size, size) if config.own_embedding else None

    @property
    def layers(self) -> tuple[int, ...]:
        """After two layers, in the middle, and three before the end. Where that does not make
        three places, a third and two thirds of the way up, and what the target's head reads."""
        count = self.target.layers
        if self._reads:
            return self._reads
        if count >= DEEP:
            return (2, count // 2, count - 3)
        return (count // 3, 2 * count // 3, -1)

    def guide(self, states: Tensor) -> Tensor:
        found: Tensor = self.fc(states.to(self.dtype))
        return found

    def begin(self, rows: int) -> Entries:
        return self.midlayer.self_attn.begin(rows)

    def step(
        self, guides: Tensor, tokens: Tensor, sight: Sight, shared: Shared
    ) -> tuple[Tensor, Entries]:
        embed = shared.embed if self.embed_tokens is None else self.embed_tokens
        embedded = embed(tokens).to(guides.dtype)
        found: tuple[Tensor, Entries] = self.midlayer(embedded, guides, sight)
        return found

    def logits(self, outputs: Tensor, shared: Shared) -> Tensor:
        found: Tensor = self.lm_head(self.norm(outputs))
        return found

    @torch.no_grad()
    def begin_from(self, shared_head: Tensor | None) -> None:
        """The guide begins as the highest of the three states, the head as the target's."""
        begin_as_last(self.fc)
        if shared_head is not None:
            self.lm_head.weight.copy_(shared_head)


class MidLayer(nn.Module):
    """A Llama layer whose attention reads embedding and guide, each normalised, side by side."""

    def __init__(self, size: int, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = Norm(size, eps=config.norm_eps)
        self.hidden_norm = Norm(size, eps=config.norm_eps)
        self.self_attn = Attention(size, config, inputs=2 * size, normed=config.normed)
        self._norm_first = config.norm_before_residual
        self.post_attention_layernorm = Norm(size, eps=config.norm_eps)
        self.mlp = FeedForward(size, config.inner_size or 3 * size)

    def forward(self, embedded: Tensor, guides: Tensor, sight: Sight) -> tuple[Tensor, Entries]:
        """As `AttendingHead.step`."""
        normed = self.hidden_norm(guides)
        seen = torch.cat([self.input_layernorm(embedded), normed], -1)
        attended, entries = self.self_attn(seen, sight)
        state = (normed if self._norm_first else guides) + attended
        return state + self.mlp(self.post_attention_layernorm(state)), entries


# -- how it drafts ---------------------------------------------------------------------------------


class Eagle3Drafter(AttendingHeadDrafter):
    """Drafts with an `Eagle3` head."""

    name: ClassVar[str] = "eagle3"


# -- its published format --------------------------------------------------------------------------

# EAGLE-3's published heads: ``config.json`` as of a Llama model with one layer.
#
# The weights are ``fc``, ``midlayer``, ``norm`` and ``lm_head``. A head that knows some of the
# target's tokens only brings ``d2t``, which is what to add to the number of each of its own tokens
# to get the target's, and ``t2d``, which says of each of the target's tokens whether it is one of
# them.


ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYERS = "eagle_aux_hidden_state_layer_ids"

ONLY: Mapping[str, Any] = {
    "num_hidden_layers": 1,
    "attention_bias": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
"""Entries by which a head that is built otherwise, and cannot be read, is told."""


class Eagle3Format(Format):
    """The target is known by its width and its vocabulary only."""

    name: ClassVar[str] = "eagle3"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        return ARCHITECTURE in architectures(about)

    @classmethod
    def read(cls, folder: Folder, about: Mapping[str, Any]) -> Head:
        weights = without_derived(folder.read_weights("model.safetensors", "pytorch_model.bin"))
        with folder.describing("eagle3"):
            head = eagle3_head(about, weights)
        return folder.fill(head, weights)

    @classmethod
    def write(cls, head: Head) -> Content:
        if not isinstance(head, Eagle3):
            raise cls.refuse(f"holds no {head.kind} heads")
        about = {"architectures": [ARCHITECTURE], "model_type": "llama", **about_eagle3(head)}
        return Content(about, eagle3_weights(head))


def eagle3_head(about: Mapping[str, Any], weights: dict[str, Tensor]) -> Eagle3:
    """Returns a head, still without its weights, from its public configuration, and gives the
    weights our ``d2t``. Raises one of `heads.folder.UNFIT` where they do not fit."""
    target = TargetShape(about["hidden_size"], about["vocab_size"], 0)
    head = Eagle3(target, _config(about, weights))
    weights["d2t"] = _to_target(weights, head)
    return head


def eagle3_weights(head: Eagle3) -> dict[str, Tensor]:
    """Returns the weights of a head by their public names."""
    weights = dict(head.state_dict())
    d2t = weights.pop("d2t")
    if head.config.draft_vocab_size:
        weights["d2t"] = d2t - torch.arange(len(d2t), device=d2t.device)
        weights["t2d"] = _known(d2t, head.target.vocab_size)
    return weights


def _config(about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Eagle3Config:
    check_only(about, ONLY)
    if about.get("target_hidden_size") not in (None, about["hidden_size"]):
        raise ValueError("its width is not its target's")
    given = {
        **layer_sizes(about),
        "depths": Eagle3Config().depths,
        "draft_vocab_size": about.get("draft_vocab_size") or 0 if "d2t" in weights else 0,
        "reads": list(about.get(LAYERS) or ()),
        "own_embedding": "embed_tokens.weight" in weights,
        "normed": "midlayer.self_attn.q_norm.weight" in weights,
        "norm_before_residual": about.get("norm_before_residual", False),
    }
    return config_of(Eagle3Config, given)


def _to_target(weights: dict[str, Tensor], head: Eagle3) -> Tensor:
    """The target's tokens for the head's own, from their distances."""
    offsets, mask = weights.pop("d2t", None), weights.pop("t2d", None)
    if offsets is None:
        return head.d2t
    if offsets.shape != head.d2t.shape:
        raise ValueError(f"d2t has {len(offsets)} entries, not {len(head.d2t)}")
    d2t = offsets.long() + torch.arange(len(offsets))
    size = head.target.vocab_size
    if int(d2t.min()) < 0 or int(d2t.max()) >= size or len(set(d2t.tolist())) != len(d2t):
        raise ValueError(f"d2t does not lead to {len(d2t)} of the {size} tokens")
    if mask is not None and not torch.equal(mask.bool(), _known(d2t, size)):
        raise ValueError("d2t and t2d disagree")
    return d2t


def _known(d2t: Tensor, size: int) -> Tensor:
    found = torch.zeros(size, dtype=torch.bool, device=d2t.device)
    found[d2t] = True
    return found


def about_eagle3(head: Eagle3) -> dict[str, Any]:
    """Returns the public configuration of a head."""
    attention, inner = head.midlayer.self_attn, head.midlayer.mlp.up_proj.out_features
    about = {
        "attention_bias": False,
        "mlp_bias": False,
        "norm_before_residual": head.config.as_dict()["norm_before_residual"],
        "draft_vocab_size": head.vocabulary,
        **about_layers(head, attention, inner),
    }
    if head.target.layers or head.config.as_dict()["reads"]:
        about[LAYERS] = list(head.layers)
    return about
