"""Base of decoder heads, which attend over the whole text: EAGLE and its relatives.

Such a head is a small decoder over entries. Entry i of a text joins the features of token i, which
are what the head makes of the target's states there, with token i + 1, and says something about
token i + 2. After the text, where the target has not been, the head's own output takes the place of
the features. Each entry attends over those before it, so that keys and values of a text are kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outpace.core.request import PerRequest, Request
from outpace.core.transfer import padded, to_device
from outpace.core.trees.tree import Tree
from outpace.draft.base import Rows
from outpace.draft.vocab_mapping import VocabMapping
from outpace.heads.base import Head, SharedModules
from outpace.heads.decoder import merge_projections
from outpace.heads.layers import AttentionContext, KeyValues
from outpace.methods.heads.base import HeadDrafter, TreeHeadOptions, gather_parents
from outpace.methods.heads.head_kv_cache import MAX_UNCOMPUTED, HeadKVCache
from outpace.targets.base import Target
from outpace.train.recipe import DepthLosses, LossOutput, Recipe
from outpace.train.teacher import TeacherBatch

# -- the network -----------------------------------------------------------------------------------


class DecoderHead(Head):
    """Guesses from all of a text, and the tokens drafted after it."""

    @classmethod
    def recipe(cls) -> type[Recipe]:
        return DecoderHeadRecipe

    @abstractmethod
    def combine_hidden_states(self, states: Tensor) -> Tensor:
        """Returns the features ``[..., H]`` for states ``[..., len(layers) H]`` of the target."""

    @abstractmethod
    def begin(self, rows: int) -> KeyValues:
        """Returns no entries of ``rows`` rows."""

    @abstractmethod
    def step(
        self,
        features: Tensor,
        tokens: Tensor,
        attn_context: AttentionContext,
        shared: SharedModules,
    ) -> tuple[Tensor, KeyValues]:
        """Returns the outputs ``[B, W, H]`` of W entries, and the entries themselves.

        features: ``[B, W, H]``, or outputs of earlier steps in their place. tokens: ``[B, W]``, the
        target's tokens after them.
        """

    @abstractmethod
    def logits(self, outputs: Tensor, shared: SharedModules) -> Tensor:
        """Returns the logits ``[..., V']`` of the next tokens for outputs ``[..., H]``."""

    def draft_inputs(self, outputs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns from features ``[B, W, H]`` and tokens ``[B, W]`` of entries after the text: the
        outputs of the entries before them, and what was drafted there. A head that guesses all
        depths at once has masks in their place."""
        return outputs, tokens


# -- how it is trained -----------------------------------------------------------------------------

# How heads that attend over the whole text are trained: the training-time test of EAGLE-3.
#
# A head that learned only from the target's states would be lost after the text, where its own
# outputs take their place. So it is unrolled as in a draft: in step d, each place goes on from its
# own output of step d - 1.


class DecoderHeadRecipe(Recipe):
    """The loss of a `DecoderHead`.

    Each place sees what it would see in a draft: the text's entries up to its own, which are those
    of the first step, and of each later step its own entry only.
    """

    def __init__(self, head: DecoderHead, shared: SharedModules) -> None:
        self._head, self._shared = head, shared

    def compute_loss(self, batch: TeacherBatch) -> LossOutput:
        depths = self._head.config.depths
        losses = DepthLosses(self._head, batch, batch.tokens.shape[1] - depths)
        for outputs in self._unrolled(batch.tokens, batch.hidden_states.float(), depths):
            losses.add(self._head.logits(outputs, self._shared))
        return losses.output()

    def _unrolled(self, tokens: Tensor, states: Tensor, depths: int) -> Iterator[Tensor]:
        """Yields the outputs ``[B, P, H]`` of the first ``depths`` steps, at all places that have
        text enough after them for the head's depths. tokens: ``[B, T]``; states: ``[B, T, H]``."""
        rows, places = tokens.shape[0], tokens.shape[1] - self._head.config.depths
        at = torch.arange(places, device=tokens.device)
        visible = at <= at[:, None]  # [P, P]
        alone = at == at[:, None]
        outputs = self._head.combine_hidden_states(states[:, :places])
        before = self._head.begin(rows)
        for depth in range(1, depths + 1):
            positions = (at + depth - 1).expand(rows, -1)
            attn_context = AttentionContext(positions, before, visible.expand(rows, -1, -1))
            fed = tokens[:, depth : depth + places]
            if depth > 1:
                outputs, fed = self._head.draft_inputs(outputs, fed)
            outputs, entries = self._head.step(outputs, fed, attn_context, self._shared)
            yield outputs
            before = before.then(entries)
            visible = torch.cat([visible, alone], -1)


# -- how it drafts ---------------------------------------------------------------------------------


@dataclass
class UncomputedEntries:
    """The entries of a row that are not computed yet, after those in the cache."""

    unread: int
    """Tokens of the prompt that are still to come, the last one apart: it is the first root."""
    states: list[Tensor] = field(default_factory=list)  # [layers * H] each
    tokens: list[int] = field(default_factory=list)
    """The token after each, the last one apart: that is the root, or not read yet."""
    after_prompt: UncomputedEntries | None = None
    """What this was before the first round."""
    cached: int = 0
    """Entries in the cache before the first round, if this is before it."""
    output: Tensor | None = None
    """The head's output at the last entry in the cache, of a head whose entries go on from it."""

    def read(self, tokens: Sequence[int], states: Tensor) -> None:
        """Takes the tokens that come next and their states ``[T, layers * H]``."""
        self.tokens += tokens if self.states else tokens[1:]
        self.states += states.unbind(0)
        self.unread -= len(tokens)

    def forget(self, count: int) -> None:
        """Drops the first ``count`` entries."""
        del self.states[:count], self.tokens[:count]

    def copy(self) -> UncomputedEntries:
        return replace(self, states=list(self.states), tokens=list(self.tokens))

    def compact(self) -> None:
        """Lets go of all other states of the passes that its own are views of."""
        self.states = [one.clone() for one in self.states]


class DecoderHeadDrafter(HeadDrafter):
    """Drafts with a `DecoderHead`, whose entries of committed tokens are kept.

    An entry needs the target's states of one token, which come with `Drafter.read`, and the token
    after it. In each round the entries that became known in the round before are computed together
    with the one of the root; entries of drafted tokens, with the head's own outputs in place of
    features, are dropped when the round is over. A row whose prompt is a single token has no entry
    and proposes nothing in its first round.
    """

    Options: ClassVar[type[Any]] = TreeHeadOptions
    chained: bool = False
    """Whether each entry also goes on from the output of the one before it."""

    def __init__(self, head: Head, target: Target, vocabulary: int) -> None:
        super().__init__(head, target, vocabulary)
        self.steps_type: type[DecoderDraftSteps] = DecoderDraftSteps
        self.head = cast(DecoderHead, self._head)
        merge_projections(self.head)
        self._cache: HeadKVCache = HeadKVCache(self.head, target.max_rows, ahead=1)
        self._texts = PerRequest(lambda request: UncomputedEntries(request.length - 1))

    def begin(self, requests: Sequence[Request]) -> None:
        for request in requests:
            parent = request.forked_from
            before = None if parent is None else self._texts[parent].after_prompt
            if before is None:
                self._texts[request] = UncomputedEntries(request.length - 1 - request.cached_prefix)
            else:
                self._texts[request] = replace(before.copy(), after_prompt=before)
            self.begin_row(request, 0 if before is None else before.cached)

    def read(
        self, requests: Sequence[Request], tokens: Sequence[Sequence[int]], states: Tensor
    ) -> None:
        for place, request in enumerate(requests):
            self._texts[request].read(tokens[place], states[place, : len(tokens[place])])
        many = [
            request for request in requests if len(self._texts[request].tokens) > MAX_UNCOMPUTED
        ]
        if many:
            self._compute(many, [self._texts[request].tokens for request in many])
            for request in many:
                self._texts[request].forget(len(self._texts[request].tokens))
        for request in requests:
            text = self._texts[request]
            if text.unread == 0 and text.after_prompt is None:
                text.compact()  # what it was is kept for as long as the request is in the batch
                cached = self._cache.lengths[self._rows[request]]
                text.after_prompt = replace(text.copy(), cached=cached)

    def end(self, requests: Sequence[Request], interrupted: bool = False) -> None:
        super().end(requests, interrupted)
        self._texts.forget(requests)  # of one that joins again all is read again

    def compute_entries(self, requests: Sequence[Request]) -> None:
        waiting: dict[Request, list[int]] = {}
        for request in requests:
            known = self._cache.lengths[self._rows[request]]
            # Where a stop condition has cut the text, there are states of tokens after its end.
            after = request.token_ids[known + 1 :][: len(self._texts[request].states)]
            if after:
                waiting[request] = after
        if waiting:
            self._compute(list(waiting), list(waiting.values()))

    def can_draft(self, rows: Rows, row: int) -> bool:
        return bool(self._texts[rows.requests[row]].states)

    def draft_steps(self, rows: Rows) -> DecoderDraftSteps:
        """Computes the entries that wait and those of the roots. These stay in the cache for this
        draft only: they wait on, as a round that comes to nothing is run again."""
        texts = [self._texts[request] for request in rows.requests]
        tokens = [
            [*text.tokens, *rows.since(row, rows.lengths[row] - 1)] if text.states else []
            for row, text in enumerate(texts)
        ]
        outputs = self._compute(rows.requests, tokens, dropped=1)
        last = to_device([max(0, len(each) - 1) for each in tokens], outputs.device)
        outputs = outputs.gather(1, last[:, None, None].expand(-1, 1, outputs.shape[-1]))
        steps = self.steps_type(self.head, self._target, self._vocab_mapping, self._cache, outputs)
        for row, text in enumerate(texts):
            if text.states:
                text.forget(len(text.tokens))
                self._cache.drop(row, 1)
        return steps

    @torch.inference_mode()
    def _compute(
        self, requests: Sequence[Request], tokens: Sequence[Sequence[int]], dropped: int = 0
    ) -> Tensor:
        """Puts the first entries that wait into the cache, those that have these tokens after
        them; returns their outputs ``[B, W, H]``, each row's first. dropped: how many of them the
        caller takes out again."""
        following = padded(tokens, self._target.device)  # [B, W]
        texts = [self._texts[request] for request in requests]
        blank = self._no_states(texts)
        states = pad_sequence(
            [
                torch.stack(text.states[: len(each)]) if each else blank
                for text, each in zip(texts, tokens, strict=True)
            ],
            batch_first=True,
        )
        rows, counts = self._rows.of(requests), [len(each) for each in tokens]
        attn_context = self._cache.next_of(rows, counts)
        outputs, entries = self._step(
            texts, self.head.combine_hidden_states(states), following, attn_context
        )
        self._cache.append(rows, entries, counts)
        for row, text in enumerate(texts):
            if self.chained and len(tokens[row]) > dropped:
                text.output = outputs[row, len(tokens[row]) - dropped - 1].clone()
        return outputs

    def _step(
        self,
        texts: Sequence[UncomputedEntries],
        features: Tensor,
        tokens: Tensor,
        attn_context: AttentionContext,
    ) -> tuple[Tensor, KeyValues]:
        """Returns the outputs of the next entries of some texts, and the entries themselves."""
        return self.head.step(features, tokens, attn_context, self._target)

    def _no_states(self, texts: Sequence[UncomputedEntries]) -> Tensor:
        """Returns what stands for the states of a text that has none, ``[1, layers * H]``."""
        for text in texts:
            for one in text.states:
                return torch.zeros_like(one)[None]
        width = len(self.needs.hidden_layers) * self.head.target.hidden_size
        return torch.zeros(1, width, dtype=self._target.dtype, device=self._target.device)


class DecoderDraftSteps:
    """The steps of a head through one draft."""

    def __init__(
        self,
        head: DecoderHead,
        target: Target,
        vocabulary: VocabMapping,
        cache: HeadKVCache,
        outputs: Tensor,
    ) -> None:
        """cache: with the entries of the roots; outputs: ``[B, 1, H]``, theirs."""
        self._head, self._target, self._vocab_mapping = head, target, vocabulary
        self._drafts = cache.drafts_of(range(outputs.shape[0]))
        self._outputs = outputs

    @torch.inference_mode()
    def first(self) -> Tensor:
        """Returns the logits ``[B, V]`` after the roots."""
        return self._vocab_mapping.to_target_logits(self._head.logits(self._outputs, self._target))[
            :, 0
        ]

    @torch.inference_mode()
    def next_logits(self, fed: Tensor, tree: Tree, parents: Tensor) -> Tensor:
        """Returns those after the last tokens that were fed, each of which sees its text and its
        ancestors; parents: ``[W]`` or ``[B, W]``, which columns of the step before they belong to.
        """
        width = parents.shape[-1]
        attn_context = self._drafts.attn_context(tree.ancestors[:, -width:, 1:])
        features, tokens = self._head.draft_inputs(
            gather_parents(self._outputs, parents), fed[:, -width:]
        )
        self._outputs, entries = self._head.step(features, tokens, attn_context, self._target)
        self._drafts.add(entries)
        return self._vocab_mapping.to_target_logits(self._head.logits(self._outputs, self._target))

    @torch.inference_mode()
    def ahead(self, depths: int) -> Tensor:
        """Returns the logits ``[B, depths, V]`` of all depths, from one step over masks, of a head
        that has these after the text."""
        outputs, masks = self._outputs, depths - 1
        if masks:
            columns = torch.arange(masks, device=outputs.device)
            causal = (columns <= columns[:, None]).expand(len(outputs), -1, -1)
            attn_context = self._drafts.attn_context(causal)
            attn_context = replace(attn_context, positions=self._drafts.positions + columns)
            nothing = columns.expand(len(outputs), -1)
            features, tokens = self._head.draft_inputs(outputs.expand(-1, masks, -1), nothing)
            more, _ = self._head.step(features, tokens, attn_context, self._target)
            outputs = torch.cat([outputs, more], 1)
        return self._vocab_mapping.to_target_logits(self._head.logits(outputs, self._target))
