"""Canonical decomposition: choose one draft by weights, then verify that one.

Khisti et al. 2024, "Multi-draft speculative sampling: canonical decomposition and theoretical
limits" (arXiv 2410.18234).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.proposal import Drawn, Proposal
from outpace.errors import ConfigError
from outpace.verify.base import Rule, normalised, of_token, ratio, rows_of
from outpace.verify.lossless.match import MatchRule
from outpace.verify.lossless.selection import Pairing, best_pairing
from outpace.verify.siblings import (
    as_match,
    at_drafted,
    child,
    children,
    children_law,
    merged,
    reach_merged,
)


@dataclass(frozen=True)
class CanonicalRule(Rule):
    """At each node choose one child by weights, and verify it against the law of the choice.

        p_I = law of the token chosen among the k children
        a(y) = min(1, p(y) / p_I(y)) for the chosen y
        stop_n = (product over the path of weight times a) (1 - sum of weight times a)
        next   = norm([p - p_I]_+)

    The choice is a knock-out: the winner so far, with law q_1, meets the next child, with law q_2 =
    q. Of the pair {i, j} token i is taken with the weight w_ij, so that

        p_I(y) = q_1(y) q_2(y) + sum over j of (q_1(y) q_2(j) + q_1(j) q_2(y)) w_yj

    For pairs of the ``alphabet`` tokens of most drafted mass, the weights maximise sum min(p, p_I)
    by linear programme; for all other pairs the token with the larger p / q is taken. Exact
    whatever the weights, since p_I is the law that they really have. With two children and an
    alphabet that covers the vocabulary no rule accepts more. Slow (a programme for each node, on
    the CPU): a reference. One child: the token rule. Points: the match rule. Trees: as for
    `KSeqRule`.
    """

    alphabet: int = 12

    name: ClassVar[str] = "canonical"
    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Drawn]] = frozenset({Drawn.POINT, Drawn.IID})
    trees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if (
            isinstance(self.alphabet, bool)
            or not isinstance(self.alphabet, int)
            or self.alphabet < 0
        ):
            raise ConfigError(
                f"verify='canonical': alphabet must be a whole number >= 0, not {self.alphabet!r}."
            )

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        if as_match(proposal):
            return MatchRule().stop(p, proposal)
        pooled, stands, chance, induced = self.weighed(p, proposal)
        law = of_token(induced.gather(1, _as_rows(pooled.tree.parents, p)), pooled.tokens)
        step = chance * ratio(at_drafted(p, pooled), law)
        leave: Tensor = (pooled.tree.child_of * step[:, None, :]).sum(-1)
        return reach_merged(step, pooled.tree, stands) * (1 - leave).clamp(min=0)

    def weigh(self, p: Tensor, proposal: Proposal) -> tuple[Proposal, Tensor, Tensor, Tensor]:
        pooled, stands = merged(proposal)
        return pooled, stands, *self._choose(p.double(), children_law(pooled), pooled)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        if as_match(proposal):
            return MatchRule().next(p, proposal, node)
        # All nodes, so that both functions solve the same programmes and come to the same weights.
        induced: Tensor = self.weighed(p, proposal)[3]
        here = rows_of(p, node).double()
        return normalised(here - rows_of(induced, node), fallback=here)

    def _choose(self, p: Tensor, q: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
        """Returns the chance of each child ``[B, N]``, and p_I of each node ``[B, M, V]``."""
        tree, count = proposal.tree, children(proposal)
        chance = ((tree.sibling_rank == 0) & proposal.valid).double()
        induced = q
        for rank in range(1, tree.width):
            meets = count > rank  # [B, M]
            pairing = best_pairing(
                p.flatten(0, 1),
                induced.flatten(0, 1),
                q.flatten(0, 1),
                self.alphabet,
                meets.flatten(),
            )
            induced = pairing.induced.view_as(q).where(meets[..., None], induced)
            chance = _meet(chance, pairing, child(proposal, rank), proposal)
        return chance, induced


def _meet(chance: Tensor, pairing: Pairing, index: Tensor, proposal: Proposal) -> Tensor:
    """Returns the chances of all children once each node's child ``index`` [B, M] has been met."""
    tree, tokens = proposal.tree, proposal.tokens
    rival = index.gather(1, tree.parents)  # [B, N], of each child: the sibling that it meets
    row = (
        torch.arange(tokens.shape[0], device=tokens.device)[:, None] * (tree.size + 1)
        + tree.parents
    )
    weight = pairing.weight(row, tokens, tokens.gather(1, rival.clamp(min=0)))
    kept = chance * torch.where(rival >= 0, weight, 1.0)
    won = torch.zeros_like(chance).scatter_add(1, rival.clamp(min=0), chance - kept)
    return kept + won


def _as_rows(parents: Tensor, laws: Tensor) -> Tensor:
    return parents[..., None].expand(-1, -1, laws.shape[-1])
