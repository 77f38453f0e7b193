"""Multi-token prediction: one decoder layer that goes on where the target's last one ends.

DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437, section 2.2. A module that is used again and
again, on its own outputs, is FastMTP (Cai et al. 2025, arXiv 2509.18362).
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from outpace.core.options import Reads
from outpace.core.request import Request
from outpace.draft.base import Drafter, Setup
from outpace.draft.prefix_cache import PrefixCache
from outpace.errors import ConfigError, UnsupportedModel
from outpace.heads.base import (
    Head,
    HeadConfig,
    SharedLMHeadMixin,
    SharedModules,
    TargetShape,
    init_identity_on_last,
)
from outpace.heads.checkpoint import KIND, find_head_kind
from outpace.heads.decoder import DecoderLayer
from outpace.heads.folder import CONFIG, HeadFolder
from outpace.heads.layers import AttentionContext, KeyValues, LayerConfig, RMSNorm
from outpace.methods.heads.base import TreeHeadOptions, trained_head
from outpace.methods.heads.decoder_heads import (
    DecoderHead,
    DecoderHeadDrafter,
    DecoderHeadRecipe,
    UncomputedEntries,
)
from outpace.methods.heads.mtp_modules import MtpDraftSteps, step_all
from outpace.targets.base import Target
from outpace.targets.cpu.native_layers.blocks import dequantize_blocks
from outpace.targets.hf.loading.files import weight_files
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.loading.nextn import decoder_of, read_modules
from outpace.targets.hf.loading.source import names_gguf
from outpace.targets.hf.nextn import NextN, NextNLayers
from outpace.train.recipe import DepthLosses, LossOutput, Recipe
from outpace.train.teacher import TeacherBatch

# -- the network -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MtpConfig(LayerConfig):
    """What a module is built from. Sizes that are 0 follow from the target's width."""

    depths: int = 3
    """Tokens after the root that it is trained for; it drafts as far as it is asked to."""
    family: dict[str, Any] = field(default_factory=dict)
    """The configuration of a text model of the target's family that has its layers; empty: a layer
    of Qwen3's kind."""
    states_first: bool = False
    """Whether it joins the state and the embedding in this order."""
    chained: bool = False
    """Whether each depth has a module of its own, which goes on from the one before it, as in
    DeepSeek-V3; otherwise one is used over and over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chained and self.draft_vocab_size:
            raise ValueError("chained modules know all tokens, and draft_vocab_size is not 0")


class Block(Protocol):
    """A decoder layer."""

    def begin(self, rows: int) -> KeyValues:
        """Returns no entries of ``rows`` rows."""

    def __call__(self, x: Tensor, attn_context: AttentionContext) -> tuple[Tensor, KeyValues]:
        """As `heads.decoder.DecoderLayer`."""


@dataclass(frozen=True, eq=False)
class Parts:
    """What a module is made of; `nn.Module`, all of them."""

    enorm: nn.Module
    """Normalises the embedding of a token."""
    hnorm: nn.Module
    """Normalises the state before it."""
    eh_proj: nn.Module
    """Joins the two, ``[..., 2 H]`` to ``[..., H]``."""
    block: Block
    post_norm: nn.Module
    """Makes of the layer's output what the target's head reads."""
    embed: nn.Module | None = None
    """The embeddings that it reads; None: the target's."""
    head: nn.Linear | None = None
    """The output matrix that makes its logits; None: the target's."""

    @classmethod
    def new(cls, size: int, config: MtpConfig) -> Parts:
        """Returns those of a module with new weights."""
        if config.family:
            layers = NextNLayers(decoder_of(config.family))
            enorm, hnorm = (copy.deepcopy(layers.norm) for _ in range(2))
            return cls.brought(NextN(enorm, hnorm, nn.Linear(2 * size, size, bias=False), layers))
        enorm, hnorm, post_norm = (RMSNorm(size, eps=config.norm_eps) for _ in range(3))
        joined = nn.Linear(2 * size, size, bias=False)
        return cls(enorm, hnorm, joined, DecoderLayer(size, config, normed=True), post_norm)

    @classmethod
    def brought(cls, found: NextN) -> Parts:
        """Returns those of a module that a checkpoint brings."""
        block, after = _OfTarget(found.layers), nn.Identity()
        return cls(found.enorm, found.hnorm, found.eh_proj, block, after, found.embed, found.head)


class Mtp(SharedLMHeadMixin, DecoderHead):
    """The target's embedding of a token and the state before it, each normalised, joined, through
    one layer; the target's own output matrix makes the logits.

    A head that knows few tokens only has a copy of their rows.
    """

    kind: ClassVar[str] = "mtp"
    config: MtpConfig
    Config: ClassVar[type[HeadConfig]] = MtpConfig

    @classmethod
    def recipe(cls) -> type[Recipe]:
        return MtpRecipe

    def __init__(
        self,
        target: TargetShape,
        config: MtpConfig,
        parts: Parts | None = None,
    ) -> None:
        """parts: of a module that there is already."""
        super().__init__(target, config)
        size = target.hidden_size
        parts = parts or Parts.new(size, config)
        self.enorm, self.hnorm, self.eh_proj = parts.enorm, parts.hnorm, parts.eh_proj
        self.block, self.post_norm = parts.block, parts.post_norm
        self.embed = parts.embed
        self.lm_head = self.new_draft_lm_head() if parts.head is None else parts.head
        self.later = nn.ModuleList()
        """The modules after this one, where each depth has one of its own."""
        if config.chained:
            one = replace(config, chained=False)
            self.later.extend(type(self)(target, one) for _ in range(config.depths - 1))

    @property
    def modules_in_order(self) -> list[Mtp]:
        """This module and those after it."""
        return [self, *cast(list[Mtp], list(self.later))]

    def combine_hidden_states(self, states: Tensor) -> Tensor:
        return states.to(self.dtype)

    def begin(self, rows: int) -> KeyValues:
        return KeyValues.join_layers([each.block.begin(rows) for each in self.modules_in_order])

    @property
    def decoder_layers(self) -> list[nn.Module]:
        return [] if self.later else [cast(nn.Module, self.block)]

    def step(
        self,
        features: Tensor,
        tokens: Tensor,
        attn_context: AttentionContext,
        shared: SharedModules,
    ) -> tuple[Tensor, KeyValues]:
        embedded = shared.embed(tokens) if self.embed is None else self.embed(tokens)
        pair = [self.enorm(embedded.to(features.dtype)), self.hnorm(features)]
        joined = self.eh_proj(torch.cat(pair[::-1] if self.config.states_first else pair, -1))
        x, entries = attn_context.through([cast(nn.Module, self.block)], joined)
        return self.post_norm(x), entries

    def logits(self, outputs: Tensor, shared: SharedModules) -> Tensor:
        return self.compute_logits(outputs, shared)

    @classmethod
    def can_load_from(cls, path: str) -> bool:
        return holds_model(path)

    @classmethod
    def load_from_target(cls, loaded: LoadedModel, path: str) -> Mtp:
        head = load_mtp_module(loaded, path)
        modules = head.modules_in_order
        own = [
            part
            for each in modules
            for part in (each.embed, each.lm_head, getattr(each.eh_proj, "bias", None))
        ]
        unlike = any(each.config.family != head.config.family for each in modules)
        if unlike or any(part is not None for part in own):
            raise ConfigError(
                f"{path} brings a module with embeddings, an output matrix or a bias of its own, "
                "or several that are not built alike, which training does not take: leave --start "
                "out."
            )
        dequantize_blocks(head, torch.float32)
        return head

    @torch.no_grad()
    def init_from_lm_head(self, shared_head: Tensor | None) -> None:
        """The layer begins on the state as it is; a copy of the target's rows stays as it is."""
        super().init_from_lm_head(shared_head)
        for module in self.modules_in_order:
            init_identity_on_last(module.eh_proj)


# -- how it is trained -----------------------------------------------------------------------------


class MtpRecipe(DecoderHeadRecipe):
    """The loss of an `Mtp` head: unrolled over its own outputs, or where each depth has a module,
    all of them over the text at once (DeepSeek-V3, equation 24)."""

    def compute_loss(self, batch: TeacherBatch) -> LossOutput:
        head = cast(Mtp, self._head)
        if not head.later:
            return super().compute_loss(batch)
        depths, (rows, length) = head.config.depths, batch.tokens.shape
        places = length - depths
        features = head.combine_hidden_states(batch.hidden_states[:, :-1].float())
        nothing = features.new_zeros(rows, depths * features.shape[-1])
        attn_context = AttentionContext.causal(head.begin(rows), length - 1)
        modules, tokens = head.modules_in_order, batch.tokens[:, 1:]
        outputs, _ = step_all(modules, features, nothing, tokens, attn_context, self._shared)
        losses = DepthLosses(head, batch, places)
        for number, own in enumerate(outputs.chunk(depths, -1)):
            losses.add(modules[number].logits(own[:, number : number + places], self._shared))
        return losses.output()


# -- how it drafts ---------------------------------------------------------------------------------


NOT_ONLINE = (
    "the module that a checkpoint brings does not learn online: name one of 'outpace train mtp' as "
    "'model', or leave 'online' out."
)


@dataclass(frozen=True, kw_only=True)
class MtpOptions(TreeHeadOptions):
    """What a user may set."""

    model: Annotated[Any, Reads(trained_head)] = None
    """A module of 'outpace train mtp', a GGUF file with modules alone (``mtp-*.gguf``), or a folder
    or file of the target with some; unset: what the target's own folder or file brings."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.online is not None and self.model is None:
            raise ConfigError(NOT_ONLINE)


MODULE = "its multi-token-prediction module"
"""What drafts, as `LLM.describe` calls it."""


class MtpDrafter(DecoderHeadDrafter):
    """Drafts with an `Mtp` module, over and over on its own outputs; where a checkpoint brings
    several, with one for each depth."""

    name: ClassVar[str] = "mtp"
    Options: ClassVar[type[Any]] = MtpOptions

    def __init__(self, head: Head, target: Target, vocabulary: int) -> None:
        super().__init__(head, target, vocabulary)
        self._modules = cast(Mtp, head).modules_in_order
        self.chained = len(self._modules) > 1
        if self.chained:
            self.steps_type = MtpDraftSteps

    @property
    def max_depth(self) -> int | None:
        return len(self._modules) if self.chained else None

    def _step(
        self,
        texts: Sequence[UncomputedEntries],
        features: Tensor,
        tokens: Tensor,
        attn_context: AttentionContext,
    ) -> tuple[Tensor, KeyValues]:
        if not self.chained:
            return super()._step(texts, features, tokens, attn_context)
        none = features.new_zeros(len(self._modules) * features.shape[-1])
        before = torch.stack([none if text.output is None else text.output for text in texts])
        return step_all(self._modules, features, before, tokens, attn_context, self._target)

    def cached_prefix(self, request: Request) -> int:
        # It lacks the outputs that entries of later modules go on from.
        return 0 if self.chained else super().cached_prefix(request)

    def _keep(self, leaving: Sequence[Request], prefixes: PrefixCache) -> None:
        if not self.chained:
            super()._keep(leaving, prefixes)

    @classmethod
    def build(cls, setup: Setup) -> Drafter:
        made = super().build(setup)
        if setup.options.model is None:
            made.target_module = MODULE
        return made

    @classmethod
    def head_for(cls, setup: Setup) -> Head:
        given = setup.options.model
        if given is None:
            return load_mtp_module(setup.loaded)
        if isinstance(given, Head) or not holds_model(given):
            return super().head_for(setup)
        if setup.options.online is not None:
            raise ConfigError(NOT_ONLINE)
        return load_mtp_module(setup.loaded, str(given))


def holds_model(given: Any) -> bool:
    """Returns whether a path leads to a model, a GGUF file or modules in a folder of the library
    `speculators`, and to no trained head."""
    named = isinstance(given, (str, os.PathLike)) and find_head_kind(given) in (None, Mtp.kind)
    own = named and not names_gguf(given) and (Path(given) / CONFIG).is_file()
    if own and KIND in HeadFolder(Path(given)).read_config():
        return False
    return named and (names_gguf(given) or bool(weight_files(Path(given))))


def load_mtp_module(loaded: LoadedModel, named: str | None = None) -> Mtp:
    """Returns the module in a target's folder or file, or in another one that is named. Raises
    ``UnsupportedModel`` where there is none, and ``ModelLoadError`` where its weights are missing
    or damaged."""
    shape = TargetShape.of(loaded.config, loaded.name)
    head, *later = [
        Mtp(shape, config_with(each), Parts.brought(each)) for each in read_modules(loaded, named)
    ]
    if later:
        head.config = replace(head.config, chained=True, depths=1 + len(later))
    if any(not _alike(head.block.begin(1), each.begin(1)) for each in later):
        raise UnsupportedModel(
            f"the multi-token-prediction modules of {loaded.name} have keys of different sizes, "
            "and only modules that are alike draft together: use another drafter."
        )
    head.later.extend(later)
    return head.to(loaded.device).eval().requires_grad_(False)


def config_with(found: NextN) -> MtpConfig:
    """Returns the configuration of a module that a checkpoint brings, by which it can be saved."""
    decoder: Any = found.layers.decoder
    known = json.loads(decoder.config.to_json_string(use_diff=False))
    return MtpConfig(family=known, states_first=found.states_first)


def _alike(one: KeyValues, two: KeyValues) -> bool:
    return one.keys.shape == two.keys.shape and one.values.shape == two.values.shape


class _OfTarget(nn.Module):
    """Layers of the target's own kind, as heads use layers."""

    def __init__(self, layers: NextNLayers) -> None:
        super().__init__()
        self.layers = layers

    def begin(self, rows: int) -> KeyValues:
        """Returns no entries of ``rows`` rows."""
        return KeyValues(*self.layers.begin(rows))

    def forward(self, x: Tensor, attn_context: AttentionContext) -> tuple[Tensor, KeyValues]:
        """As `heads.decoder.DecoderLayer`, with the norm after it."""
        before = attn_context.before
        found, keys, values = self.layers(
            x, attn_context.positions, before.keys, before.values, attn_context.visible
        )
        return found, KeyValues(keys, values)
