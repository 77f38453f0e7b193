"""Token-level speculative sampling.

Leviathan, Kalman and Matias 2022 (arXiv 2211.17192); Chen et al. 2023 (arXiv 2302.01318).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.proposal import ONE_DISTRIBUTION, DraftSampling, Proposal
from outpace.verify.base import Rule
from outpace.verify.probs import (
    draft_probs_at,
    first_rejection_probs,
    normalize,
    p_of_drafted,
    q_of_drafted,
    ratio,
    select_node,
)


class TokenRule(Rule):
    """Accept each token with probability min(1, p / q); at the first failure draw from the
    residual.

        stop_n = a_1 ... a_n (1 - a_{n+1}),  a_i = min(1, p_i(x_i) / q_i(x_i))
        next   = norm([p - q]_+) after a failure, p after the last token

    A deterministic proposal has q = 1 at its token, so a_i = p_i(x_i) and the residual is p without
    it. The expected acceptance at a position is 1 - TV(p, q).
    """

    name: ClassVar[str] = "token"
    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[DraftSampling]] = ONE_DISTRIBUTION
    trees: ClassVar[bool] = False

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        return stop_where_one_fails(p_of_drafted(p, proposal), proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        return residual_next(p, proposal, node)


def stop_where_one_fails(at: Tensor, proposal: Proposal) -> Tensor:
    """Returns ``[B, M]``: the distribution of where the token rule stops.

    at: ``[B, N]`` float64, what the distribution that is verified against gives each drafted token.
    """
    return first_rejection_probs(ratio(at, q_of_drafted(proposal, torch.float64)), proposal)


def residual_next(p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
    """Returns ``[B, V]``: norm([p - q]_+) where a drafted token follows the node of a chain, else
    p.

    q is the distribution of that following token.
    """
    return residual(select_node(p, node), proposal, node)


def residual(here: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
    """Returns what `residual_next` does. here: ``[B, V]``, the distribution p at each row's
    node."""
    if proposal.tokens.shape[1] == 0:
        return here
    following = node.clamp(max=proposal.tokens.shape[1] - 1)
    left = normalize(here - draft_probs_at(proposal, following, here), fallback=here)
    return left.where((node < proposal.counts)[:, None], here)
