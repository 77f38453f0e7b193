"""S2D: one small decoder whose first layers are drafters by themselves, too.

Kavehzadeh et al. 2024, arXiv 2407.01955. It reads nothing of a target but its tokens, so that one
of them serves every target with the same vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, cast

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from outpace.draft.base import Setup
from outpace.heads.base import Head, HeadConfig, SharedModules, TargetShape
from outpace.heads.decoder import DecoderLayer
from outpace.heads.layers import AttentionContext, KeyValues, LayerConfig, RMSNorm
from outpace.methods.heads.base import NOISE, TreeHeadOptions
from outpace.methods.heads.decoder_heads import DecoderHead, DecoderHeadDrafter
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.train.recipe import DepthLosses, LossOutput, Recipe
from outpace.train.teacher import TeacherBatch

# -- the network -----------------------------------------------------------------------------------


AT_ONCE = 256
"""Columns whose logits are made at once to see how sure an exit is: over a large vocabulary they
take much memory."""


@dataclass(frozen=True, kw_only=True)
class S2dConfig(LayerConfig):
    """What the decoder is built from. Sizes of layers that are 0 follow from its own width."""

    depths: int = 5
    """Tokens after the root for which its guesses are counted in training; it drafts as far as it
    is asked to."""
    width: int = 256
    """Width of its embeddings and layers."""
    layers: int = 6
    """All of its decoder layers."""
    first: int = 2
    """Layers of its smallest part."""
    every: int = 2
    """Layers from one part to the next larger one; the largest has them all."""
    confidence: float = 0.7
    """The probability of its first guess with which a part is content; with less, the next larger
    one guesses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (1 <= self.first <= self.layers and self.every >= 1):
            raise ValueError(
                f"no parts of {self.first} and each {self.every} more of {self.layers}"
            )
        if (self.layers - self.first) % self.every:
            raise ValueError(f"parts of {self.first} and each {self.every} more miss {self.layers}")
        if not 0 <= self.confidence <= 1:
            raise ValueError(f"confidence is {self.confidence}, and no probability")
        if not self.width:
            raise ValueError("width is 0")

    @property
    def exits(self) -> tuple[int, ...]:
        """After how many layers there is a guess."""
        return tuple(range(self.first, self.layers + 1, self.every))


class S2d(DecoderHead):
    """A small Llama with embeddings and an output matrix of its own, which all parts share.

    A token goes through the layers until a part is sure of what follows. Keys and values in the
    layers above are then made of the state that it has left with, so that deeper tokens find
    something there. What a column gives depends on nothing but what it sees.
    """

    kind: ClassVar[str] = "s2d"
    Config: ClassVar[type[HeadConfig]] = S2dConfig

    @classmethod
    def recipe(cls) -> type[Recipe]:
        return S2dRecipe

    def __init__(self, target: TargetShape, config: S2dConfig) -> None:
        # Neither the target's width nor its layers matter.
        super().__init__(replace(target, hidden_size=0, layers=0), config)
        self.exits = config.exits
        self.confidence = config.confidence
        width = config.width
        self.embed_tokens = nn.Embedding(target.vocab_size, width)
        self.stack = nn.ModuleList(DecoderLayer(width, config) for _ in range(config.layers))
        self.norm = RMSNorm(width, eps=config.norm_eps)
        self.lm_head = nn.Linear(width, self.vocabulary, bias=False)
        nn.init.normal_(self.embed_tokens.weight, std=width**-0.5)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's embeddings, because the tokens come with them; only the tokens are used."""
        return (0,)

    def combine_hidden_states(self, states: Tensor) -> Tensor:
        return states[..., :0]

    def begin(self, rows: int) -> KeyValues:
        return KeyValues.join_layers([layer.begin(rows) for layer in self._layers])

    def step(
        self,
        features: Tensor,
        tokens: Tensor,
        attn_context: AttentionContext,
        shared: SharedModules,
    ) -> tuple[Tensor, KeyValues]:
        x = self.embed_tokens(tokens)
        settled = torch.zeros_like(tokens, dtype=torch.bool)
        found, text = [], attn_context.before.split_layers(len(self.stack))
        for count, layer in enumerate(self._layers, 1):
            if count > self.exits[0] and bool(settled.all()):
                found.append(layer.entries(x, attn_context.positions))
                continue
            deeper, entries = layer(x, replace(attn_context, before=text[count - 1]))
            x = torch.where(settled[..., None], x, deeper)
            found.append(entries)
            if count in self.exits[:-1]:
                settled = settled | self._sure(x)
        return x, KeyValues.join_layers(found)

    def parts(self, tokens: Tensor) -> list[Tensor]:
        """Returns the outputs ``[B, T, width]`` of each part, the smallest first, at all places of
        texts ``[B, T]``: what `logits` takes."""
        rows, length = tokens.shape
        x, found = self.embed_tokens(tokens), []
        for count, layer in enumerate(self._layers, 1):
            x, _ = layer(x, AttentionContext.causal(layer.begin(rows), length))
            if count in self.exits:
                found.append(x)
        return found

    def logits(self, outputs: Tensor, shared: SharedModules) -> Tensor:
        found: Tensor = self.lm_head(self.norm(outputs))
        return found

    @torch.no_grad()
    def _sure(self, x: Tensor) -> Tensor:
        """``[B, W]`` bool: whether the likeliest token at each state is likely enough."""
        pieces = torch.split(x.flatten(0, 1), AT_ONCE)
        best = [self.lm_head(self.norm(piece)).float().softmax(-1).amax(-1) for piece in pieces]
        return torch.cat(best).view(x.shape[:2]) >= self.confidence

    @property
    def _layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.stack))


# -- how it is trained -----------------------------------------------------------------------------

# How a decoder whose first layers draft by themselves, too, is trained: sorted fine-tuning.
#
# Kavehzadeh et al. 2024, arXiv 2407.01955, section 3.1.


class S2dRecipe(Recipe):
    """The loss of an `S2d`. While it learns, all parts count alike; while it is measured, each
    token has the part that is sure of it, as in a draft.

    It reads nothing but tokens, so that its guess after a token is the same at every depth.
    """

    def __init__(self, head: S2d, shared: SharedModules) -> None:
        self._head, self._shared = head, shared

    def compute_loss(self, batch: TeacherBatch) -> LossOutput:
        tokens = batch.tokens[:, 1:]  # the first token of a text is no entry
        count = tokens.shape[1]
        learning = torch.is_grad_enabled()
        outputs = []
        for each in self._head.parts(tokens) if learning else [self._drafted(tokens)]:
            losses = DepthLosses(self._head, batch, count)
            losses.add(self._head.logits(each, self._shared))
            outputs.append(losses.output())
        hits = outputs[-1].hits[..., 0].unfold(1, self._head.config.depths, 1)
        return LossOutput(torch.stack([each.loss for each in outputs]).mean(), hits)

    def _drafted(self, tokens: Tensor) -> Tensor:
        """What the drafter makes of texts ``[B, T]``."""
        rows, count = tokens.shape
        features = tokens.new_empty(rows, count, 0, dtype=self._head.dtype)
        attn_context = AttentionContext.causal(self._head.begin(rows), count)
        outputs, _ = self._head.step(features, tokens, attn_context, self._shared)
        return outputs


# -- how it drafts ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class S2dOptions(TreeHeadOptions):
    """What a user may set."""

    confidence: Annotated[float | None, Ge(0), Le(1)] = None
    """The probability of its first guess with which a part is content: 0 always drafts with the
    smallest, 1 with all layers; unset: as it was trained."""


class S2dDrafter(DecoderHeadDrafter):
    """Drafts with an `S2d`.

    Which part guesses is decided from the distributions of the smaller ones before anything is
    drawn, so that a token was drawn from the distribution that it comes with.
    """

    name: ClassVar[str] = "s2d"
    Options: ClassVar[type[Any]] = S2dOptions

    @classmethod
    def head_for(cls, setup: Setup) -> Head:
        head = cast(S2d, super().head_for(setup))
        if setup.options.confidence is not None:
            head = copy.copy(head)  # the same weights
            head.confidence = setup.options.confidence
        return head

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        """The target itself, if it is a Llama, with weights that are a little off."""
        given, model = loaded.config, cast(Any, loaded.model)
        config = S2dConfig(
            depths=3,
            width=given.hidden_size,
            layers=given.num_hidden_layers,
            first=1,
            every=1,
            confidence=0.4,
            heads=given.num_attention_heads,
            groups=getattr(given, "num_key_value_heads", None) or 0,
            inner_size=getattr(given, "intermediate_size", None) or 0,
        )
        torch.manual_seed(0)
        head = S2d(TargetShape.of(given, "a dummy"), config).to(loaded.dtype).eval()
        own = head.requires_grad_(False).state_dict()
        for name, value in model.state_dict().items():
            name = name.removeprefix("model.").replace("layers.", "stack.", 1)
            if name in own and own[name].shape == value.shape:
                own[name].copy_(value)
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=NOISE)
        return {"model": head}
