"""The protocol of a target: what the engine, the policy and the audit know of a model.

A target keeps rows, each with its own committed length. Between rounds it admits rows and reads
their prompts in chunks; in a round it scores the drafts in one pass (`ScoreInputs`), and then
commits each row's accepted path. It never decides anything about a text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from outpace.core.proposal import AuxTokens, Precomputed
from outpace.core.request import EncoderInputs, MultiModalInputs
from outpace.core.trees.tree import Tree
from outpace.core.trees.tree_shape import MAX_TREE_NODES

KVCacheDtype = Literal["auto", "int8", "fp8"]
"""In what keys and values are held: as the model computes them, or in 8 bits."""

HiddenStates = Mapping[int, Tensor]
"""Hidden states by layer, ``[B, T, H]`` each. 0 is the embedding, i what layer i
puts out, -1 what the output matrix reads: the last layer's output through the norm after it."""


@dataclass(frozen=True)
class PromptInputs:
    """What a new row begins with."""

    token_ids: Sequence[int]
    """The tokens that the decoder continues; for an encoder-decoder at least its start token."""
    max_cached_prefix: int = 0
    """How many tokens, at most, may be taken over from the cache of an earlier text that begins
    alike. `Target.prefill` returns no hidden states of those that were."""
    source: EncoderInputs | None = None
    """What the encoder reads; None for a model without an encoder."""
    media: MultiModalInputs | None = None
    """The prompt's images, for a vision-language model; None for a prompt without images."""


@dataclass(frozen=True, eq=False)
class PrefillChunk:
    """A part of the prompts that `Target.prefill` has read."""

    rows: Sequence[int]
    tokens: Sequence[Sequence[int]]
    """The tokens that were read of each of these rows, in order and for the first time."""
    hidden_states: HiddenStates = field(default_factory=dict)
    """Their hidden states, of the layers that were asked for. A row's tokens come first, then
    padding."""


@dataclass(frozen=True, eq=False)
class ScoreInputs:
    """One pass over all ready rows: what is fed, and what is wanted of it.

    pending: each row's committed tokens that are not cached yet, as many in all rows; the last of
    them is the root. tokens, tree: the drafted nodes after it. aux_tokens: further columns that see
    the draft and that nothing sees. layers: those whose hidden states are wanted. precomputed:
    columns that have been through the first layers; a target may compute them all the same.
    """

    pending: Sequence[Sequence[int]]
    tokens: Tensor  # [B, N]
    tree: Tree
    aux_tokens: AuxTokens | None = None
    layers: frozenset[int] = frozenset()
    precomputed: Precomputed | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """What a pass over `ScoreInputs` says."""

    logits: Tensor  # [B, M, V], at the root and at each node
    hidden_states: HiddenStates = field(default_factory=dict)
    """Hidden states of the pending tokens and the nodes, ``[B, P + N, H]`` by layer."""
    aux_logits: Tensor | None = None  # [B, R, V]

    def node_hidden_states(self, layers: Iterable[int]) -> Tensor:
        """Returns ``[B, M, H]``: the states of root and nodes, the layers side by side."""
        nodes = self.logits.shape[1]
        return torch.cat([self.hidden_states[layer][:, -nodes:] for layer in layers], -1)


class Target(ABC):
    """Rows of one model.

    Rows are numbered from 0. ``admit`` and ``fork`` append a row, ``retain`` keeps some of them and
    numbers them anew. The first ``num_ready_rows`` rows take part in passes: their prompts are read
    but for what is pending, the tokens that are committed and not cached yet.
    """

    device: torch.device
    dtype: torch.dtype
    """The dtype of the weights that are not quantised, and of hidden states and logits."""
    max_rows: int
    """How many rows there can be at once."""
    max_length: int
    """How many tokens a row can hold, those of the prompt included."""
    max_nodes: int = MAX_TREE_NODES
    """Drafted nodes that a pass can score in a row, at most."""
    chains_only: bool = False
    """Whether its passes score chains, and no other trees and no auxiliary tokens."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """In what it holds keys and values."""
    has_prefix_cache: bool = False
    """Whether it keeps the caches of texts that have ended, for texts that begin alike."""

    @property
    def failure_reason(self) -> str | None:
        """Why it cannot compute anything any more, as a sentence; None as long as it can. It may
        be asked at any time, in any thread."""
        return None

    def forget_texts(self) -> None:
        """Forgets the caches of texts that have ended, if it keeps any."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """How many rows there are."""

    @property
    @abstractmethod
    def num_ready_rows(self) -> int:
        """How many rows, from the first on, take part in the next pass."""

    @property
    @abstractmethod
    def lengths(self) -> Sequence[int]:
        """How many tokens of each row are cached."""

    @abstractmethod
    def admit(self, inputs: PromptInputs) -> int:
        """Adds a row that has yet to read its prompt, and returns its number.

        Raises ``PromptError`` or ``UnsupportedModel``, and adds nothing, where the model cannot
        read what comes with the prompt.
        """

    @abstractmethod
    def prefill(
        self, token_budget: int, layers: frozenset[int] = frozenset(), full: bool = False
    ) -> list[PrefillChunk]:
        """Reads up to about ``token_budget`` tokens of the prompts that are not read yet, row after
        row, and returns what was read.

        The last token of a prompt stays pending: it is the root of the row's first round. So may
        more of it, if the first pass can read it as well and ``full`` does not forbid that.
        """

    @abstractmethod
    def fork(self, row: int, with_output: bool = False) -> int:
        """Adds a row with the same prompt as a ready one, which is not read again; returns its
        number. All rows must be ready.

        with_output: with all that the other row has cached, its text included, as beams need it.
        """

    @abstractmethod
    def score(self, inputs: ScoreInputs) -> Scores:
        """Returns what one pass over the ready rows says. It commits nothing."""

    @abstractmethod
    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Commits the pending tokens of the last pass and, of its nodes, each row's accepted
        path."""

    @abstractmethod
    def retain(self, rows: Sequence[int], texts: Mapping[int, Sequence[int]] | None = None) -> None:
        """Keeps only these rows (ascending), numbered anew from 0.

        texts: the tokens of rows that leave, by row; a target may save what it has cached of them
        for rows that begin alike (`PromptInputs.max_cached_prefix`).
        """

    @abstractmethod
    def reset(self) -> None:
        """Forgets all rows, whatever state an interruption in the middle of anything has left."""

    def step_context(self) -> AbstractContextManager[None]:
        """Returns a context in which everything of a step is computed, drafts and verdicts too, for
        a target that has to set the machine up for that."""
        return nullcontext()

    # -- what it costs -------------------------------------------------------------------------

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of the weights."""

    @property
    @abstractmethod
    def pass_bytes(self) -> int:
        """Bytes of weights that a pass over one token reads, the same on every machine."""

    @property
    def expert_bytes(self) -> tuple[float, float]:
        """Bytes of experts that a pass over one token reads, and the share of all experts that the
        token chooses: each further token of a pass chooses others too. (0, 0): it has none."""
        return 0.0, 0.0

    @property
    @abstractmethod
    def lm_head_bytes(self) -> int:
        """Bytes of the weights that the logits are made with."""

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Bytes that the rows occupy."""

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling or recording passes so far."""
        return 0.0

    # -- capabilities that a target may lack -----------------------------------------------------

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings ``[..., H]`` of tokens ``[...]``."""
        raise NotImplementedError(f"{type(self).__name__} has no embeddings to show.")

    @property
    def embedding_scale(self) -> float:
        """By what `embed` multiplies the rows of the model's table."""
        return 1.0

    def compute_logits(self, states: Tensor) -> Tensor:
        """Returns the logits ``[..., V]`` of states ``[..., H]`` as the last layer leaves them."""
        raise NotImplementedError(f"{type(self).__name__} has no head to show.")

    def apply_soft_cap(self, logits: Tensor) -> Tensor:
        """Returns logits ``[..., V']`` that a copy of some rows of the head has made, scaled, with
        the soft bound that `compute_logits` gives its own."""
        return logits

    @property
    def kv_layers(self) -> Mapping[str, int]:
        """By type of layer, the layer whose keys and values `key_values` shows: the last one that
        computes its own. Empty where it shows none."""
        return {}

    def key_values(self, types: Iterable[str]) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Returns by type of layer what is cached of the ready rows, keys and values
        ``[B, G, L, D]`` of as many tokens as the longest row has. They may be views, which the next
        pass writes over; what comes after a row's length is anything."""
        raise NotImplementedError(f"{type(self).__name__} has no keys and values to show.")

    def view(self, skipped: SubLayers) -> PartialView:
        """Returns the target without some of its sub-layers: the same weights and slots."""
        raise NotImplementedError(f"{type(self).__name__} cannot leave out layers.")

    def early_exit(self, layers: int) -> EarlyExitView:
        """Returns the first ``layers`` layers of the target, followed by its head: the same weights
        and slots, so that the target's own pass can go on from where they ended."""
        raise NotImplementedError(f"{type(self).__name__} cannot stop after some layers.")

    def forward_uncached(self, token_ids: Sequence[int], last: int | None = None) -> Tensor:
        """Returns the logits ``[T, V]`` after each token of a text, or ``[last, V]`` after each of
        its last tokens. The text is read in one forward, without any cache."""
        raise NotImplementedError(f"{type(self).__name__} cannot read a text plainly.")

    def forward_aux(self, token_ids: Sequence[int], aux_tokens: AuxTokens) -> Tensor:
        """Returns the logits ``[R, V]`` of auxiliary tokens of one text, read in one forward,
        without any cache. The auxiliary tokens' parents are numbered as if the text were a chain
        after its first token: 0 is that token, ``len(token_ids)`` the first auxiliary token."""
        raise NotImplementedError(
            f"{type(self).__name__} computes no auxiliary tokens without a cache."
        )

    def new_target(self, rows: int) -> Target:
        """Returns a target of the same model, as long, with ``rows`` rows of its own."""
        raise NotImplementedError(f"{type(self).__name__} has no more rows to give.")


@dataclass(frozen=True)
class SubLayers:
    """Parts of decoder layers, by the number of their layer (from 0)."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @classmethod
    def of_layers(cls, layers: Iterable[int]) -> SubLayers:
        """Returns both parts of these layers."""
        numbers = frozenset(layers)
        return cls(numbers, numbers)

    @property
    def complete_layers(self) -> frozenset[int]:
        """The layers of which both parts are named."""
        return self.attention & self.mlp


NO_SUBLAYERS = SubLayers()
"""No part of any layer."""


class PartialView(ABC):
    """A target without some of its sub-layers, for drafting.

    It reads what the target has cached and writes after it, into slots that the next pass of the
    target overwrites. So it holds nothing from round to round.
    """

    pass_bytes: int
    """Bytes of weights that one pass reads."""

    @abstractmethod
    def begin(self) -> None:
        """Goes back to what the target has cached."""

    @abstractmethod
    def forward(self, tokens: Tensor, keep: int | None = None) -> Tensor:
        """Returns the logits ``[B, keep, V]`` of the last of tokens ``[B, T]`` (default: of all)
        that follow what was fed since `begin`, for all ready rows."""


class EarlyExitView(PartialView):
    """The first layers of a target, which its own pass does not compute again."""

    @property
    @abstractmethod
    def precomputed(self) -> Precomputed:
        """What the layers made of all tokens that were fed since `begin`."""
