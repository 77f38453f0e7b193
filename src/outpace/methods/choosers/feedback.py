"""Feedback on each drafter: the chance that its draft is accepted at each committed token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.core.proposal import Sampled
from outpace.draft.base import Round
from outpace.methods.choosers.base import ChildProposal


@dataclass(frozen=True, eq=False)
class Committed:
    """What a round committed, and the target's distributions there."""

    tokens: list[list[int]]  # by row: the accepted tokens and the extra one
    nodes: list[list[int]]  # by row: the node that each of them was chosen at, the root first
    probs: Tensor  # [B, M, V], of all nodes, before any argmax
    greedy: list[bool]  # by row

    @classmethod
    def of(cls, round: Round) -> Committed:
        """Returns what a round committed; its distributions must have been asked for
        (`Needs.softmax_probs`)."""
        round = round.scored
        assert round.softmax_probs is not None
        tokens = [list(outcome.tokens) for outcome in round.outcomes]
        nodes = [[0, *outcome.path] for outcome in round.outcomes]
        greedy = [options.params.greedy for options in round.rows.pipeline.rows]
        return cls(tokens, nodes, round.softmax_probs, greedy)

    def of_draft(self, asked: ChildProposal, row: int) -> list[float]:
        """Returns, for each committed token, the chance that the child's draft was accepted there:
        the overlap of both distributions if the draft was sampled, else whether it was that token.
        It is 0 after the draft's first other token, or its end."""
        nodes, tokens = asked.nodes[row], self.tokens[row]
        path = nodes.follow(tokens)
        distribution = asked.proposal.distribution
        if not isinstance(distribution, Sampled) or self.greedy[row]:
            return [float(place < len(path)) for place in range(len(tokens))]
        first = nodes.eldest()
        pairs = [
            (node, first[parent])
            for node, parent in zip(self.nodes[row], [0, *path], strict=False)
            if parent in first
        ]
        if not pairs:
            return [0.0] * len(tokens)
        p = self.probs[row, [node for node, _ in pairs]]  # [T, V]
        q = distribution.q[row, [child - 1 for _, child in pairs]]
        found: list[float] = torch.minimum(p.double(), q.double()).sum(-1).tolist()
        return [*found, *[0.0] * (len(tokens) - len(found))]

    def of_probs(self, probs: Tensor, row: int) -> list[float]:
        """Returns the same for a child that did not draft, from the distributions ``[B, T, V]``
        that it would have drawn the tokens from. Rows are padded to T tokens."""
        count = len(self.tokens[row])
        p, q = self.probs[row, self.nodes[row]].double(), probs[row, :count].double()  # [T, V]
        if self.greedy[row]:
            return (p.argmax(-1) == q.argmax(-1)).double().tolist()
        return torch.minimum(p, q).sum(-1).tolist()
