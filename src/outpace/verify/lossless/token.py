"""Token-level speculative sampling.

Leviathan, Kalman and Matias 2022 (arXiv 2211.17192); Chen et al. 2023 (arXiv 2302.01318).
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from outpace.core.proposal import Drawn, Point, Proposal
from outpace.verify.base import (
    Rule,
    at_parent,
    first_failure,
    normalised,
    of_token,
    proposed_mass,
    ratio,
    rows_of,
)


class TokenRule(Rule):
    """Accept each token with probability min(1, p / q); at the first failure draw from the
    residual.

        stop_n = a_1 ... a_n (1 - a_{n+1}),  a_i = min(1, p_i(x_i) / q_i(x_i))
        next   = norm([p - q]_+) after a failure, p after the last token

    A point proposal has q = 1 at its token, so a_i = p_i(x_i) and the residual is p without it. The
    expected acceptance at a position is 1 - TV(p, q).
    """

    name: ClassVar[str] = "token"
    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Drawn]] = frozenset({Drawn.POINT, Drawn.IID, Drawn.WITHOUT})
    trees: ClassVar[bool] = False

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        accept = of_token(at_parent(p, proposal.tree), proposal.tokens)
        if not isinstance(proposal.law, Point):
            accept = ratio(accept, of_token(proposal.law.q.to(p.dtype), proposal.tokens))
        return first_failure(accept, proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        return residual_next(p, proposal, node)


def residual_next(p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
    """Returns ``[B, V]``: norm([p - q]_+) where a drafted token follows the node of a chain, else
    p.

    q is the law of that following token.
    """
    here = rows_of(p, node)
    if proposal.tokens.shape[1] == 0:
        return here
    following = node.clamp(max=proposal.tokens.shape[1] - 1)
    q = rows_of(proposed_mass(proposal, p.shape[-1], p.dtype), following)
    residual = normalised(here - q, fallback=here)
    return residual.where((node < proposal.counts)[:, None], here)
