"""Base of step heads, which go on from the target's last hidden state.

Such a head starts from a single state, the one from which the target drew the root. It may have a
decoder layer of its own between the two, the prefix layer, which attends over the whole text: what
the target's last state says about the next token is then made into what the head needs to know of
the tokens after it (the prefix attention of Hydra++, the augmenting block of Clover).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from outpace.core.request import PerRequest, Request
from outpace.core.transfer import to_device
from outpace.draft.base import Rows
from outpace.draft.vocab_mapping import VocabMapping
from outpace.heads.base import Head, HeadConfig, SharedModules, TargetShape, parse_config
from outpace.heads.decoder import DecoderLayer, NormedLayer
from outpace.heads.layers import AttentionContext, LayerConfig
from outpace.methods.heads.base import (
    DraftSteps,
    HeadDrafter,
    SequentialDraftSteps,
    TrainedDrafter,
    TreeHeadOptions,
)
from outpace.methods.heads.head_kv_cache import MAX_UNCOMPUTED, PrefixLayerCache
from outpace.targets.base import Target
from outpace.targets.hf.weights import pass_bytes
from outpace.train.recipe import DepthLosses, LossOutput, Recipe
from outpace.train.teacher import TeacherBatch

# -- the network -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PrefixConfig(HeadConfig):
    """What a head with a prefix layer is built from."""

    prefix: bool = False
    """Whether a decoder layer over the whole text makes the state that the guesses start from."""
    prefix_layer: dict[str, Any] = field(default_factory=dict)
    """The sizes of that layer, those of `LayerConfig`; what is not given follows from the target's
    width."""
    prefix_norm: bool = False
    """Whether a norm comes after it."""


class StateHead(Head):
    """Guesses from the target's last hidden state of one place."""

    def __init__(self, target: TargetShape, config: HeadConfig) -> None:
        super().__init__(target, config)
        self.prefix: DecoderLayer | None = None
        """The layer between the target's states and the head, if there is one."""
        if isinstance(config, PrefixConfig) and config.prefix:
            kind = NormedLayer if config.prefix_norm else DecoderLayer
            self.prefix = kind(target.hidden_size, parse_config(LayerConfig, config.prefix_layer))

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        return () if self.prefix is None else (self.prefix,)

    def begin_at(self, states: Tensor) -> Tensor:
        """Returns what the guesses start from at each place of texts, ``[B, T, H]``.

        states: ``[B, T, H]``, the target's, from the beginning of each text on.
        """
        if self.prefix is None:
            return states
        attn_context = AttentionContext.causal(self.prefix.begin(len(states)), states.shape[1])
        return attn_context.through([self.prefix], states)[0]

    @torch.no_grad()
    def init_from_lm_head(self, shared_head: Tensor | None) -> None:
        """The prefix layer begins as the identity."""
        if self.prefix is not None:
            nn.init.zeros_(self.prefix.self_attn.o_proj.weight)
            nn.init.zeros_(self.prefix.mlp.down_proj.weight)


class StepHead(StateHead):
    """Guesses depth by depth, from a state and the tokens drafted since."""

    @classmethod
    def recipe(cls) -> type[Recipe]:
        return StepRecipe

    @abstractmethod
    def step(
        self, memory: Tensor, tokens: Tensor, depth: int, shared: SharedModules
    ) -> tuple[Tensor, Tensor]:
        """Returns the logits ``[B, W, V']`` of the tokens at a depth, and the memory there.

        memory: ``[B, W, M]``, what the step before returned for each column's path; at depth 1 the
        state ``[B, W, H]`` that the guesses start from. tokens: ``[B, W]``, the last token of each
        path, at depth 1 the root; they are the target's tokens. depth: from 1 to
        ``config.depths``.
        """


# -- how it is trained -----------------------------------------------------------------------------


class StepRecipe(Recipe):
    """The loss of a `StepHead`: each place starts from the target's state there."""

    def __init__(self, head: StepHead, shared: SharedModules) -> None:
        self._head, self._shared = head, shared

    def compute_loss(self, batch: TeacherBatch) -> LossOutput:
        depths = self._head.config.depths
        places = batch.tokens.shape[1] - depths
        losses = DepthLosses(self._head, batch, places)
        memory = self._head.begin_at(batch.hidden_states[:, :places].float())
        for depth in range(1, depths + 1):
            logits, memory = self._head.step(memory, losses.path(), depth, self._shared)
            losses.add(logits)
        return losses.output()


# -- how it drafts ---------------------------------------------------------------------------------


@dataclass
class LatestState:
    """The latest state that was read of a row."""

    unread: int
    """Tokens of the prompt that are still to come, the last one apart: it is the first root."""
    latest: Tensor | None = None  # [H], what the guesses after the root start from
    after_prompt: Tensor | None = None  # [H], what this was before the first round

    def take(self, latest: Tensor) -> None:
        """Takes what the guesses start from now."""
        self.latest = latest
        if self.unread == 0:
            self.after_prompt = latest

    def again(self) -> LatestState:
        """Returns what is known of another row with the same prompt."""
        return LatestState(0, self.after_prompt, self.after_prompt)


class LatestStates(PerRequest[LatestState]):
    """The `LatestState` of each request."""

    def __init__(self) -> None:
        super().__init__(lambda request: LatestState(request.length - 1))

    def begin(self, request: Request) -> None:
        """Takes a request that joins the batch."""
        new = LatestState(request.length - 1 - request.cached_prefix)
        parent = request.forked_from
        self[request] = new if parent is None else self[parent].again()

    def read(self, request: Request, states: Tensor) -> None:
        """Takes the states ``[T, H]`` of committed tokens, the last of which is the latest."""
        seen = self[request]
        seen.unread -= len(states)
        if len(states):
            seen.take(states[-1].clone())  # a view would keep the states of the whole pass


class StateDrafter(TrainedDrafter):
    """Drafts from the state that the target drew the root from, or from what a head's prefix layer
    makes of it.

    That state comes with the root's predecessor (`Drafter.read`), so nothing is computed twice. A
    row without one, whose prompt is a single token, proposes nothing in its first round.
    """

    def __init__(self, head: Head, target: Target, vocabulary: int) -> None:
        super().__init__(head, target, vocabulary)
        self._seen = LatestStates()
        layer = cast(StateHead, self._head).prefix
        self._cache: PrefixLayerCache | None = (
            None if layer is None else PrefixLayerCache(layer, target.max_rows)
        )
        if layer is not None:  # it is read once for a draft, whatever the other parts are
            read, depths = pass_bytes(layer), self._head.config.depths
            self.pass_bytes += read // depths - read // self._head.num_parallel_depths

    def begin(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._seen.begin(request)
            if self._cache is not None:
                self.begin_row(request, request.length - 1)

    def read(
        self, requests: Sequence[Request], tokens: Sequence[Sequence[int]], states: Tensor
    ) -> None:
        due = []
        for place, request in enumerate(requests):
            new = states[place, : len(tokens[place])]
            if self._cache is None:
                self._seen.read(request, new)
                continue
            seen, row = self._seen[request], self._rows[request]
            seen.unread -= len(new)
            self._cache.add(row, new)
            if seen.unread == 0 or self._cache.waiting(row) > MAX_UNCOMPUTED:
                due.append(request)
        self.compute_entries(due)

    def compute_entries(self, requests: Sequence[Request]) -> None:
        waiting = [request for request in requests if self._waits(request)]
        if self._cache is not None and waiting:
            found = self._cache.latest(self._rows.of(waiting))
            for request, latest in zip(waiting, found, strict=True):
                self._seen[request].take(latest)

    def _waits(self, request: Request) -> bool:
        return self._cache is not None and self._cache.waiting(self._rows[request]) > 0

    def end(self, requests: Sequence[Request], interrupted: bool = False) -> None:
        super().end(requests, interrupted)
        self._seen.forget(requests)  # of one that joins again all is read again

    def can_draft(self, rows: Rows, row: int) -> bool:
        request = rows.requests[row]
        return self._seen[request].latest is not None or self._waits(request)

    def starts(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Returns these states ``[B, 1, H]`` and the roots ``[B, 1]``; some row has a state."""
        self.compute_entries(rows.requests)
        states = [self._seen[request].latest for request in rows.requests]
        blank = torch.zeros_like(next(state for state in states if state is not None))
        found = torch.stack([blank if state is None else state for state in states])
        roots = [rows.since(row, rows.lengths[row] - 1) for row in range(len(rows))]
        return found[:, None].to(self._head.dtype), to_device(roots, found.device)


class StepHeadDrafter(StateDrafter, HeadDrafter):
    """Drafts with a `StepHead`."""

    Options: ClassVar[type[Any]] = TreeHeadOptions

    def __init__(self, head: Head, target: Target, vocabulary: int) -> None:
        super().__init__(head, target, vocabulary)
        self.head = cast(StepHead, self._head)

    @property
    def max_depth(self) -> int:
        return self.head.config.depths

    def draft_steps(self, rows: Rows) -> DraftSteps:
        return StepHeadDraftSteps(self.head, self._target, self._vocab_mapping, *self.starts(rows))


class StepHeadDraftSteps(SequentialDraftSteps):
    """The steps of a head through one draft."""

    def __init__(
        self,
        head: StepHead,
        shared: SharedModules,
        vocabulary: VocabMapping,
        states: Tensor,
        roots: Tensor,
    ) -> None:
        """states: ``[B, 1, H]``, those to begin from; roots: ``[B, 1]``."""
        super().__init__(vocabulary, roots, states)
        self._head, self._shared = head, shared

    def step(self, tokens: Tensor, memory: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        return self._head.step(memory, tokens, depth + 1, self._shared)
