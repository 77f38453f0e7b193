"""Gemma 4's assistants: small decoders that attend to what the target has cached.

Google 2026; Gemma 4 in transformers, where the class is of the same name. An assistant has no keys
and values of its own: its layers attend to those of the target's last layer of the same type, from
the place of the root whatever the depth. A step goes on from the target's last hidden state, or
from what it has made of the one before, and the embedding of the last token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from outpace.core.transfer import to_device
from outpace.draft.base import Rows, Setup
from outpace.errors import ConfigError
from outpace.heads.base import Head, HeadConfig, SharedModules, TargetShape
from outpace.heads.checkpoint import Format, HeadCheckpoint
from outpace.heads.folder import HeadFolder
from outpace.methods.heads.base import NOISE, DraftSteps
from outpace.methods.heads.published import FULL, SLIDING
from outpace.methods.heads.steps import StepHead, StepHeadDrafter, StepHeadDraftSteps
from outpace.targets.base import Target
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.loading.sharing import sharing_layers
from outpace.targets.hf.weights import weight_bytes

NAME = "gemma4_assistant"
TYPES = (NAME, "gemma4_unified_assistant")
"""Types of models that are assistants."""

# -- the network -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Context:
    """What a draft sees of the target."""

    target: SharedModules
    positions: Tensor  # [B, 1], of the roots
    entries: Mapping[str, tuple[Tensor, Tensor]]
    """By type of layer, keys and values ``[B, G, L, D]``."""
    visible: Mapping[str, Tensor]
    """By type of layer, which of them are seen, ``[B, L]`` bool."""

    def embed(self, tokens: Tensor) -> Tensor:
        return self.target.embed(tokens)

    @property
    def embedding_scale(self) -> float:
        return self.target.embedding_scale

    def compute_logits(self, states: Tensor) -> Tensor:
        return self.target.compute_logits(states)

    def apply_soft_cap(self, logits: Tensor) -> Tensor:
        return self.target.apply_soft_cap(logits)


class Centroids(nn.Module):
    """Which tokens are scored: those of the centroids that a state is most like."""

    token_ordering: Tensor  # [V]: the tokens of each centroid, one centroid after the other

    def __init__(self, size: int, tokens: int, centroids: int, chosen: int) -> None:
        super().__init__()
        if centroids < 1 or tokens % centroids or not 1 <= chosen <= centroids:
            raise ValueError(f"{chosen} of {centroids} centroids do not fit {tokens} tokens")
        self.chosen = chosen
        self.centroids = nn.Linear(size, centroids, bias=False)
        self.register_buffer("token_ordering", torch.arange(tokens))

    def forward(self, states: Tensor, output: Tensor) -> Tensor:
        """Returns logits ``[..., V]``, those of all other tokens 1 below the least that was scored.
        output: the output matrix ``[V, H]``."""
        by_centroid = self.token_ordering.view(self.centroids.out_features, -1)
        best = self.centroids(states).topk(self.chosen, -1).indices  # [..., C]
        tokens = by_centroid[best].flatten(-2)  # [..., T]
        scores = (output[tokens] @ states[..., None])[..., 0]  # [..., T]
        least = scores.amin(-1, keepdim=True) - 1
        return least.expand(*tokens.shape[:-1], len(output)).scatter(-1, tokens, scores)


class Gemma4Assistant(StepHead):
    """transformers' layers of Gemma 4, all of which share the target's keys and values."""

    kind: ClassVar[str] = NAME
    Config: ClassVar[type[HeadConfig]] = HeadConfig
    learns_online: ClassVar[bool] = False

    def __init__(self, target: TargetShape, about: Mapping[str, Any]) -> None:
        """about: its public configuration. Raises one of `heads.folder.CONFIG_ERRORS`, or
        ``ImportError`` where transformers does not know Gemma 4."""
        super().__init__(target, HeadConfig())
        self.model: Any = sharing_layers(about["text_config"])
        self.text: Any = self.model.config
        wide, own = target.hidden_size, self.text.hidden_size
        self.pre_projection = nn.Linear(2 * wide, own, bias=False)
        self.post_projection = nn.Linear(own, wide, bias=False)
        self.masked_embedding: Centroids | None = None
        if about.get("use_ordered_embeddings"):
            counts = about["num_centroids"], about["centroid_intermediate_top_k"]
            self.masked_embedding = Centroids(own, target.vocab_size, *counts)

    @property
    def types(self) -> set[str]:
        """The types of its layers."""
        return set(self.text.layer_types)

    def window(self, kind: str) -> int:
        """Returns how many of the last tokens layers of a type see, 0 for all."""
        return int(self.text.sliding_window) + 1 if kind == SLIDING else 0

    def step(
        self, memory: Tensor, tokens: Tensor, depth: int, shared: SharedModules
    ) -> tuple[Tensor, Tensor]:
        """shared: a `Context`."""
        seen, wide = cast(Context, shared), tokens.shape[1]
        joined = torch.cat([seen.embed(tokens).to(memory.dtype), memory], -1)
        masks = {
            kind: visible[:, None, None].expand(-1, 1, wide, -1)
            for kind, visible in seen.visible.items()
        }
        x = self.model(
            inputs_embeds=self.pre_projection(joined),
            attention_mask=masks,
            position_ids=seen.positions.expand(-1, wide),
            shared_kv_states=dict(seen.entries),
            use_cache=False,
        ).last_hidden_state
        output = self.model.embed_tokens.weight
        scored = self.masked_embedding
        logits = linear(x, output) if scored is None else scored(x, output)
        return logits, self.post_projection(x)


# -- how it drafts ---------------------------------------------------------------------------------


class Gemma4AssistantDrafter(StepHeadDrafter):
    """Drafts with a `Gemma4Assistant`, in chains and trees: no node sees another one but through
    the state that it goes on from."""

    name: ClassVar[str] = NAME

    def __init__(self, head: Head, target: Target, vocabulary: int) -> None:
        super().__init__(head, target, vocabulary)
        own = cast(Gemma4Assistant, self._head)
        if own.masked_embedding is None:  # the embeddings are its output matrix
            self.pass_bytes += weight_bytes(own.model.embed_tokens)

    @property
    def max_depth(self) -> None:  # type: ignore[override]
        return None

    @classmethod
    def head_for(cls, setup: Setup) -> Head:
        head = cast(Gemma4Assistant, super().head_for(setup))
        missing = head.types - setup.target.kv_layers.keys()
        if missing:
            raise ConfigError(
                f"the assistant reads keys and values of layers of type {min(missing)!r}, which "
                f"{setup.loaded.name or 'this target'} does not show, nor does a recurrent, split "
                "or encoder-decoder model: use it with the Gemma 4 that it was made for."
            )
        for kind in head.types:
            _check_shape(head.text, setup.loaded.config, kind, setup.target.kv_layers[kind])
        return head

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        config = loaded.config
        heads, groups, width = _attention_of(config, config.num_hidden_layers - 1)
        text = {
            "vocab_size": config.vocab_size, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": groups,
            "head_dim": width, "global_head_dim": width, "num_global_key_value_heads": groups,
            "layer_types": [FULL], "hidden_size_per_layer_input": 0, "pad_token_id": None,
            "vocab_size_per_layer_input": 0,
        }  # fmt: skip
        torch.manual_seed(0)
        head = Gemma4Assistant(TargetShape.of(config, "a dummy"), {"text_config": text})
        for parameter in head.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=NOISE)
        return {"model": head.to(loaded.dtype).eval().requires_grad_(False)}

    def draft_steps(self, rows: Rows) -> DraftSteps:
        memory, roots = self.starts(rows)
        return StepHeadDraftSteps(
            self.head, self._context(rows), self._vocab_mapping, memory, roots
        )

    def _context(self, rows: Rows) -> Context:
        target, head = self._target, cast(Gemma4Assistant, self._head)
        entries = target.key_values(head.types)
        device = target.device
        lengths = to_device(list(target.lengths[: len(rows)]), device)[:, None]
        visible = {}
        for kind, (keys, _) in entries.items():
            at = torch.arange(keys.shape[2], device=device)
            seen, window = at < lengths.clamp_min(1), head.window(kind)  # [B, L]
            visible[kind] = seen & (at >= lengths - window) if window else seen
        return Context(target, rows.positions[:, None] - 1, entries, visible)


def _attention_of(config: Any, layer: int) -> tuple[int, int, int]:
    """Heads of queries, of keys and values, and their width, in a layer of a target."""
    by_layer = getattr(config, "per_layer_config", None)
    here = config if by_layer is None else by_layer[layer]
    heads = config.num_attention_heads
    groups = getattr(here, "num_key_value_heads", None) or heads
    return heads, groups, getattr(here, "head_dim", None) or config.hidden_size // heads


def _check_shape(own: Any, target: Any, kind: str, layer: int) -> None:
    """Raises ``ConfigError`` where the target's keys and values are not those that layers of a type
    read."""
    _, *wanted = _attention_of(own, own.layer_types.index(kind))
    _, *found = _attention_of(target, layer)
    if wanted != found:
        raise ConfigError(
            f"the assistant reads {wanted[0]} heads of keys of the width {wanted[1]} in layers of "
            f"the type {kind!r}, and this target has {found[0]} of {found[1]}: use it with the "
            "Gemma 4 that it was made for."
        )


# -- its published format --------------------------------------------------------------------------


class Gemma4AssistantFormat(Format):
    """The folder of transformers' class, in which the output matrix is the embeddings. The target
    is known by its width and its vocabulary."""

    name: ClassVar[str] = NAME

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        return about.get("model_type") in TYPES

    @classmethod
    def read(cls, folder: HeadFolder, about: Mapping[str, Any]) -> Head:
        weights = folder.read_weights("model.safetensors")
        with folder.describing(NAME):
            vocabulary = about["text_config"]["vocab_size"]
            target = TargetShape(about["backbone_hidden_size"], vocabulary, 0)
            try:
                head = Gemma4Assistant(target, about)
            except ImportError as error:
                raise folder.unfit(NAME, "this version of transformers has no Gemma 4") from error
        weights.pop("lm_head.weight", None)
        ordering = "masked_embedding.token_ordering"
        if ordering in weights:
            weights[ordering] = weights[ordering].long()
            if sorted(weights[ordering].tolist()) != list(range(vocabulary)):
                raise folder.damaged(f"{ordering} does not name each of {vocabulary} tokens once")
        return folder.fill(head, {**weights, "d2t": head.d2t})

    @classmethod
    def write(cls, head: Head) -> HeadCheckpoint:
        raise ConfigError("an assistant of Gemma 4 is kept as it was published.")
