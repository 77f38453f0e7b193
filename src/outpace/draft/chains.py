"""The chains that a round drafts, a token of each at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core.gumbel import gumbel_sample
from outpace.core.logits_pipeline import Branches
from outpace.core.proposal import Deterministic, DraftDistribution, Proposal, Sampled, StoppingFn
from outpace.core.rng import Role, inverse_cdf, uniform
from outpace.core.transfer import padded, to_device
from outpace.core.trees.tree import Tree
from outpace.draft.base import Rows


class Chains:
    """Draws the drafted tokens of one round from their distributions, as the rows' options and the
    rule ask.

    Greedy and coupled rows' tokens are fixed once the distribution is (`Deterministic`); all others
    are sampled. A chain ends after a token that would end the text, since nothing can follow
    there. Nothing leaves another device than the CPU, where that is not looked at, unless the terms
    of the round or the drafter say where chains end.
    """

    def __init__(
        self,
        rows: Rows,
        counts: Sequence[int],
        random_stream: int = 0,
        stopping_fn: StoppingFn | None = None,
    ) -> None:
        """counts: how many tokens each row may draft; some row at least one. random_stream: the
        one that the drafter draws from. stopping_fn: the drafter's own condition, besides that of
        the round's terms."""
        self.counts = list(counts)
        self.tokens = rows.seeds.new_empty(len(rows), 0)  # [B, N]
        self._rows = rows
        self._stopping_fns: list[StoppingFn] = []  # all that may end a chain after a token
        if rows.terms.make_stopping_fn is not None:
            self._stopping_fns.append(rows.terms.make_stopping_fn(counts))
        if stopping_fn is not None:
            self._stopping_fns.append(stopping_fn)
        self._stop_token_ids = rows.all_stop_token_ids if rows.seeds.device.type == "cpu" else ()
        self._sampled = not (rows.coupled or rows.pipeline.all_greedy)
        self._probs: list[Tensor] = []  # [B, 1, V] each, of what was sampled
        self._chosen: list[Tensor] = []  # [B, 1] bool each, one for each distribution
        self._softmax_probs: list[Tensor] = []  # [B, 1, V] each, before any argmax
        if self._sampled:
            self._u = uniform(
                rows.seeds_of(random_stream), rows.positions, Role.DRAFT, max(counts)
            )  # [B, N]

    @property
    def length(self) -> int:
        """How many tokens the longest chain has."""
        return self.tokens.shape[1]

    def grow(
        self, logits: Tensor, fixed: Tensor | None = None, states: Tensor | None = None
    ) -> bool:
        """Draws one token more in each chain, if any is to go on; returns whether another is due.

        logits: ``[B, V']``, after the tokens so far. fixed: ``[B]``, tokens that were chosen and
        are not drawn; -1 where there is none. states: ``[B, H]``, the last hidden states that the
        logits were made from, if `DraftingTerms.continue_on_hidden` asks for them.
        """
        rows, tokens = self._rows, self.tokens[:, None]
        if states is not None and not self._continue_on_hidden(states):
            return False
        here = (
            logits[:, None],
            Branches(tokens, tokens.new_ones(tokens.shape, dtype=torch.bool)),
            rows.history,
        )
        by_probs = rows.terms.wants_probs or self._stopping_fns
        softmax_probs = rows.pipeline.softmax_probs(*here) if by_probs else None  # [B, 1, V]
        if softmax_probs is not None and not self._continue_on_probs(softmax_probs):
            return False
        if softmax_probs is not None and rows.terms.draft_probs:
            self._softmax_probs.append(softmax_probs)
        if rows.pipeline.all_greedy:
            token = rows.pipeline.argmax_tokens(*here)
        elif softmax_probs is None or rows.pipeline.any_greedy:
            token = self._draw(rows.pipeline(*here))
        else:
            token = self._draw(softmax_probs)
        if fixed is not None:
            token = self._take(fixed[:, None], token)
        if not self.length:
            self.counts = rows.pipeline.limit_draft_counts(self.counts)
        self.tokens = torch.cat([self.tokens, token], 1)
        if softmax_probs is not None:
            self._end_after(softmax_probs[:, 0], token[:, 0])
        self._end_texts(token[:, 0])
        return self.length < max(self.counts)

    def _continue_on_hidden(self, states: Tensor) -> bool:
        """Ends the chains whose states say so (`DraftingTerms.continue_on_hidden`); returns whether
        any goes on."""
        continue_on_hidden = self._rows.terms.continue_on_hidden
        if continue_on_hidden is not None:
            self._end(continue_on_hidden(states).tolist())
        return self.length < max(self.counts)

    def _end(self, keep: Sequence[bool]) -> None:
        """Ends the chains of the rows for which ``keep`` is false before their next token."""
        pairs = zip(self.counts, keep, strict=True)
        self.counts = [count if on else min(count, self.length) for count, on in pairs]

    def _continue_on_probs(self, softmax_probs: Tensor) -> bool:
        """Ends the chains whose next distribution says so (`DraftingTerms.continue_on_probs`);
        returns whether any goes on. softmax_probs: ``[B, 1, V]``."""
        continue_on_probs = self._rows.terms.continue_on_probs
        if continue_on_probs is not None:
            self._end(continue_on_probs(softmax_probs[:, 0]).tolist())
        return self.length < max(self.counts)

    def _end_after(self, softmax_probs: Tensor, token: Tensor) -> None:
        """Ends the chains for which these tokens are the last. softmax_probs: ``[B, V]``; token:
        ``[B]``."""
        for ends in self._stopping_fns:
            if self.length < max(self.counts):
                self._end((~ends(softmax_probs, token)).tolist())

    def _end_texts(self, token: Tensor) -> None:
        """Ends the chains whose texts end with these tokens ``[B]``."""
        if self._stop_token_ids and self.length < max(self.counts):
            pairs = zip(token.tolist(), self._stop_token_ids, strict=True)
            self._end([each not in last for each, last in pairs])

    def _draw(self, q: Tensor) -> Tensor:
        """Returns the next token of each chain, ``[B, 1]``, from its distribution ``[B, 1, V]``."""
        rows = self._rows
        if not self._sampled:
            return gumbel_sample(q, rows.seeds, rows.positions[:, None] + self.length)
        self._probs.append(q)
        return inverse_cdf(q, self._u[:, self.length, None])

    def _take(self, fixed: Tensor, drawn: Tensor) -> Tensor:
        """Returns the tokens ``[B, 1]`` that were chosen, and the drawn ones where none was."""
        chosen = fixed >= 0
        token = torch.where(chosen, fixed, drawn)
        if self._sampled:
            distribution = self._probs[-1]
            certain = torch.zeros_like(distribution).scatter_(2, token[..., None], 1.0)
            self._probs[-1] = torch.where(chosen[..., None], certain, distribution)
            self._chosen.append(chosen)
        return token

    def proposal(self, tree: Tree) -> Proposal:
        """Returns what was drafted. tree: the chain of this `length`."""
        if not self.length:
            return Proposal.empty(len(self._rows), self.tokens.device)
        distribution: DraftDistribution = Deterministic()
        if self._sampled:
            fixed = torch.cat(self._chosen, 1) if self._chosen else None
            distribution = Sampled(torch.cat(self._probs, 1), fixed=fixed)
        draft_probs = torch.cat(self._softmax_probs, 1) if self._rows.terms.draft_probs else None
        counts = to_device(self.counts, self.tokens.device)
        return Proposal(self.tokens, tree, counts, distribution, draft_probs=draft_probs)


def deterministic_chains(drafts: Sequence[Sequence[int]], device: torch.device) -> Proposal:
    """Returns fixed chains, one per row, of any lengths, as a proposal."""
    tokens = padded(drafts, device)  # [B, N]
    counts = to_device([len(draft) for draft in drafts], device)
    return Proposal(
        tokens, Tree.chain(len(drafts), tokens.shape[1], device), counts, Deterministic()
    )
