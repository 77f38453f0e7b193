"""EAGLE-3: a decoder layer or more over the text, which reads some layers of the target.

Li et al. 2025, arXiv 2503.01840; its edition 3.1 (norms of the states that are read, and of what is
read again) and P-EAGLE, which guesses all depths at once. The parts are named as in the published
checkpoints, but for the layers after the first, which are called ``stack`` here.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.draft.base import Rows, Setup
from outpace.errors import UnsupportedModel
from outpace.heads.base import (
    MAX_SIZE,
    Head,
    HeadConfig,
    SharedModules,
    TargetShape,
    init_identity_on_last,
)
from outpace.heads.decoder import DecoderLayer, MidLayer
from outpace.heads.folder import CONFIG
from outpace.heads.layers import Attention, AttentionContext, KeyValues, LayerConfig, RMSNorm
from outpace.methods.heads.base import ParallelDraftSteps, named
from outpace.methods.heads.decoder_heads import DecoderHead, DecoderHeadDrafter
from outpace.methods.heads.published import LAYERS
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.train.teacher import Teacher

if TYPE_CHECKING:
    from outpace.heads.latent import LatentAttention

# -- the network -----------------------------------------------------------------------------------


DEEP = 8
"""Layers from which on a target's three states are taken where the paper takes them."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """What an EAGLE-3 head is built from. Sizes that are 0 follow from the target's width."""

    depths: int = 5
    """Tokens after the root that it is trained for; it drafts as far as it is asked to, or as far
    as this if it guesses all depths at once."""
    reads: list[int] = field(default_factory=list)
    """The target's layers that it reads; none: three, as `Eagle3.hidden_layers` says."""
    layers: int = 1
    """Its own decoder layers."""
    hidden_size: int = 0
    """Its own width; 0: the target's."""
    own_embedding: bool = False
    """Whether it has embeddings of its own instead of the target's."""
    own_head: bool = True
    """Whether it has an output matrix of its own instead of the target's."""
    normed: bool = False
    """Whether queries and keys are normalised, as in Qwen3."""
    bias: bool = False
    """Whether queries, keys and values have a bias."""
    output_bias: bool = False
    """Whether what the attention heads say together has one."""
    windows: list[int] = field(default_factory=list)
    """How many entries each layer attends to, 0 for all; none: all layers to all."""
    latent: dict[str, Any] = field(default_factory=dict)
    """The sizes of DeepSeek's latent attention, as transformers calls them; empty: grouped
    attention."""
    norm_before_residual: bool = False
    """Whether what the layer does is added to the normalised features, and not to the features."""
    norm_before_fc: bool = False
    """Whether the states that it reads are normalised together."""
    fc_norm: bool = False
    """Whether each of them is normalised by itself."""
    norm_output: bool = False
    """Whether it goes on from its normalised output."""
    fused: bool = True
    """Whether ``fc`` makes the features; otherwise these are the one state that it reads."""
    fusion_bias: bool = False
    """Whether ``fc`` has a bias."""
    parallel: bool = False
    """Whether masks stand after the text, so that all depths are guessed at once (P-EAGLE)."""
    mask_token: int = 0
    """The target's token that a mask is, with a learned state before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(type(at) is not int or at < -1 for at in self.reads):
            raise ValueError(f"reads is {self.reads!r}, and not layers of the target")
        if self.layers < 1:
            raise ValueError("it has no layers")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"windows is {self.windows!r}, and it has {self.layers} layers")
        if self.latent and (self.layers > 1 or self.windows or self.normed or self.bias):
            raise ValueError("latent attention goes with one layer, without windows and biases")
        for name, size in self.latent.items():
            known = type(size) is int and 0 < size <= MAX_SIZE
            if not known and (name, size) != ("q_lora_rank", None):
                raise ValueError(f"{name} is {size!r}")
        if not self.fused and (len(self.reads) > 1 or self.norm_before_fc or self.fc_norm):
            raise ValueError("fused is false, and one state as it is can be its features only")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm do not go together")


class Eagle3(DecoderHead):
    """Decoder layers on the target's embedding of a token and features, side by side."""

    kind: ClassVar[str] = "eagle3"
    Config: ClassVar[type[HeadConfig]] = Eagle3Config
    config: Eagle3Config

    def __init__(self, target: TargetShape, config: Eagle3Config) -> None:
        super().__init__(target, config)
        size, eps = config.hidden_size or target.hidden_size, config.norm_eps
        if config.mask_token >= target.vocab_size:
            raise ValueError(f"mask_token is {config.mask_token} of {target.vocab_size} tokens")
        if size != target.hidden_size and not (config.own_embedding and config.own_head):
            raise ValueError(
                f"it is {size} wide and its target {target.hidden_size}, and it has no embeddings "
                "or no output matrix of its own"
            )
        if not config.own_head and config.draft_vocab_size:
            raise ValueError("it knows some tokens only, and has no output matrix of its own")
        self.names_no_layers = config.fused and not config.reads and not target.layers
        """Whether it comes from a file that says neither what it reads nor how many layers its
        target has: which ones it reads is a guess."""
        count = len(config.reads) or (3 if config.fused else 1)
        wide = count * target.hidden_size
        self.input_norm = RMSNorm(wide, eps=eps) if config.norm_before_fc else None
        norms = [
            RMSNorm(target.hidden_size, eps=eps) for _ in range(count if config.fc_norm else 0)
        ]
        self.fc_norm = nn.ModuleList(norms) if norms else None
        self.fc = nn.Linear(wide, size, bias=config.fusion_bias) if config.fused else None
        self.midlayer = MidLayer(size, config, _first(size, config), config.norm_before_residual)
        self.stack = nn.ModuleDict(  # numbered as in the files
            {
                str(number): DecoderLayer(size, config, **_attention(config, number))
                for number in range(1, config.layers)
            }
        )
        self.norm = RMSNorm(size, eps=eps)
        self.lm_head = nn.Linear(size, self.vocabulary, bias=False) if config.own_head else None
        self.embed_tokens = nn.Embedding(target.vocab_size, size) if config.own_embedding else None
        self.mask_hidden = nn.Parameter(torch.randn(wide)) if config.parallel else None

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """After two layers, in the middle, and three before the end. Where that does not make
        three places, a third and two thirds of the way up, and what the target's head reads."""
        count = self.target.layers
        if self.config.reads:
            return tuple(self.config.reads)
        if not self.config.fused:
            return (-1,)
        if count >= DEEP:
            return (2, count // 2, count - 3)
        return (count // 3, 2 * count // 3, -1)

    @property
    def num_parallel_depths(self) -> int:
        return self.config.depths if self.config.parallel else 1

    @property
    def shares_lm_head(self) -> bool:
        return self.lm_head is None

    def combine_hidden_states(self, states: Tensor) -> Tensor:
        states = states.to(self.dtype)
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, states.chunk(len(self.fc_norm), -1), strict=True)
            states = torch.cat([norm(part) for norm, part in parts], -1)
        found: Tensor = states if self.fc is None else self.fc(states)
        return found

    def begin(self, rows: int) -> KeyValues:
        return KeyValues.join_layers([self.midlayer.begin(rows)] * self.config.layers)

    @property
    def decoder_layers(self) -> list[nn.Module]:
        return [self.midlayer, *self.stack.values()]

    def step(
        self,
        features: Tensor,
        tokens: Tensor,
        attn_context: AttentionContext,
        shared: SharedModules,
    ) -> tuple[Tensor, KeyValues]:
        embed = shared.embed if self.embed_tokens is None else self.embed_tokens
        embeddings = embed(tokens).to(features.dtype)
        x, entries = attn_context.through(self.decoder_layers, features, embeddings)
        return self.norm(x) if self.config.norm_output else x, entries

    def logits(self, outputs: Tensor, shared: SharedModules) -> Tensor:
        x = outputs if self.config.norm_output else self.norm(outputs)
        found: Tensor = shared.compute_logits(x) if self.lm_head is None else self.lm_head(x)
        return found

    def draft_inputs(self, outputs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if self.mask_hidden is None:
            return outputs, tokens
        mask = self.combine_hidden_states(self.mask_hidden).expand_as(outputs)
        return mask, torch.full_like(tokens, self.config.mask_token)

    @torch.no_grad()
    def init_from_lm_head(self, shared_head: Tensor | None) -> None:
        """The features begin as the highest of the states, the head as the target's, in a head of
        the target's width."""
        if self.norm.weight.numel() != self.target.hidden_size:
            return
        if self.fc is not None:
            init_identity_on_last(self.fc)
        if shared_head is not None and self.lm_head is not None:
            self.lm_head.weight.copy_(shared_head)


def _first(size: int, config: Eagle3Config) -> Attention | LatentAttention:
    """The attention of the first layer."""
    if not config.latent:
        return Attention(size, config, inputs=2 * size, **_attention(config, 0))
    from outpace.heads.latent import LatentAttention  # and so a model of transformers

    return LatentAttention(size, config, 2 * size, config.latent)


def _attention(config: Eagle3Config, number: int) -> dict[str, Any]:
    window = config.windows[number] if config.windows else 0
    kinds = {"bias": config.bias, "output_bias": config.output_bias, "normed": config.normed}
    return {**kinds, "window": window}


# -- how it drafts ---------------------------------------------------------------------------------


class Eagle3Drafter(DecoderHeadDrafter):
    """Drafts with an `Eagle3` head."""

    name: ClassVar[str] = "eagle3"
    head: Eagle3

    @property
    def max_depth(self) -> int | None:
        return self.head.config.depths if self.head.config.parallel else None

    @classmethod
    def head_for(cls, setup: Setup) -> Head:
        head = super().head_for(setup)
        if isinstance(head, Eagle3) and head.names_no_layers:
            find_layers(head, setup.loaded, named(setup.options.model))
        return head

    def draft_steps(self, rows: Rows) -> Any:
        steps = super().draft_steps(rows)
        if self.max_depth is None:
            return steps
        return ParallelDraftSteps(steps.ahead(self.max_depth))


TEXT = """Once upon a time, there was a little girl who lived with her mother in a small house near
the forest. One day her mother said to her: "Please take this bread to your grandmother, and do not
stop on the way." So the girl put on her coat and went into the forest.

def mean(values):
    if not values:
        return 0.0
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

Question: What is the capital of France, and what is it known for?
Answer: The capital of France is Paris. It is known for the Eiffel Tower, the Louvre and its food.
"""
"""What a head that names no layers is tried on."""

CLEARLY = 0.1
"""By which share of its tokens other layers have to be better than those that are usual."""


def find_layers(head: Eagle3, loaded: LoadedModel, what: str) -> None:
    """Has a head whose file names no layers read the usual ones, or their neighbours, if it guesses
    clearly better from these, and warns that it is a guess. what: what errors call the head."""
    usual, count = head.hidden_layers, loaded.config.num_hidden_layers
    shifted = [tuple(at + step for at in usual) for step in (1, -1)] if -1 not in usual else []
    ways = [usual, *(way for way in shifted if way[0] >= 0 and way[-1] < count)]
    hits, places = _hits(head, loaded, ways)
    best = max(range(len(ways)), key=lambda way: (hits[way], -way))
    chosen = best if hits[best] - hits[0] > CLEARLY * places else 0
    head.config = replace(head.config, reads=[*ways[chosen]])
    head.names_no_layers = False
    told = f"; with them it guesses {hits[chosen]} of {places} tokens right" if places else ""
    warnings.warn(
        f"{what} does not say which layers of its target it reads: {list(ways[chosen])} are a "
        f"guess{told}. Add {LAYERS} to its {CONFIG} "
        "(in the format 'outpace': reads).",
        stacklevel=2,
    )


def _hits(
    head: Eagle3, loaded: LoadedModel, ways: Sequence[tuple[int, ...]]
) -> tuple[list[int], int]:
    """How many tokens of a text a head guesses as the target does, from each of some choices of
    layers, and how many there are; none where that cannot be tried."""
    nothing = [0] * len(ways)
    longest = loaded.max_length or len(TEXT)
    ids = [] if loaded.tokenizer is None else loaded.tokenizer(TEXT)["input_ids"][:longest]
    if len(ids) < 3:
        return nothing, 0
    layers = sorted({layer for way in ways for layer in way})
    try:
        teacher = Teacher(loaded, layers, top=1)
    except UnsupportedModel:
        return nothing, 0
    head = head.to(teacher.device)
    batch = teacher.read(torch.tensor([ids]))
    parts = dict(zip(layers, batch.hidden_states.chunk(len(layers), -1), strict=True))
    found = []
    with torch.no_grad():
        for way in ways:
            features = head.combine_hidden_states(
                torch.cat([parts[layer] for layer in way], -1)[:, :-1]
            )
            attn_context = AttentionContext.causal(head.begin(1), len(ids) - 1)
            outputs, _ = head.step(features, batch.tokens[:, 1:], attn_context, teacher)
            guesses = head.d2t[head.logits(outputs, teacher).argmax(-1)]
            found.append(int((guesses == batch.top_tokens[:, 1:, 0]).sum()))
    return found, len(ids) - 1
