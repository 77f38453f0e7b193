"""Speculative cascades: exact sampling from a mixture of the two models, chosen at each position.

Narasimhan et al. 2024, "Faster cascades via speculative decoding" (arXiv 2405.19261).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.options import option
from outpace.core.proposal import Drawn, Proposal, Sampled
from outpace.verify.base import Rule, in_pieces, of_token, proposed_at, rows_of
from outpace.verify.lossless.token import TokenRule, residual, stop_where_one_fails
from outpace.verify.options import require, require_one_of
from outpace.verify.siblings import as_match


@dataclass(frozen=True)
class CascadeRule(Rule):
    """The token rule against a mixture of p and q.

        "chow"   mixture = q if max q >= 1 - alpha, else p
        "diff"   mixture = q if max q >= max p - alpha, else p
        "opt"    mixture = q if max q >= max p - alpha TV(p, q), else p
        "token"  mixture = q on the tokens with p >= (1 - alpha) max p, and the rest of q's mass
                 redrawn from p
                 mixture = p where p is certain of one token, as in greedy rows
        stop, next = those of the token rule with the mixture for p

    Samples exactly from the mixture. Since that is not p, the rule is lossy. After the last drafted
    token there is no q, and the distribution is p. Greedy texts stay exact. Needs a sampled draft.
    """

    defer: str = option("opt", "When q stands for p: 'chow', 'diff', 'opt' or 'token'.")
    alpha: float = option(0.1, "How much worse q may be than p and still stand for it, 0 to 1.")

    name: ClassVar[str] = "cascade"
    lossless: ClassVar[bool] = False
    takes: ClassVar[frozenset[Drawn]] = frozenset({Drawn.IID, Drawn.WITHOUT})
    trees: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_one_of(self.name, "defer", self.defer, _MIXTURES)
        require(self.name, "alpha", self.alpha, 0, 1, above=False)

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        if not isinstance(
            proposal.distribution, Sampled
        ):  # all rows are greedy, or nothing was drafted
            return TokenRule().stop(p, proposal)

        def at(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
            return of_token(self.mixture(p, q), tokens)

        mixed = in_pieces(at, p[:, :-1], proposal.distribution.q, proposal.tokens)  # [B, N]
        return stop_where_one_fails(mixed.double(), proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        here = rows_of(p, node)
        if as_match(proposal):
            return here
        following = node.clamp(max=proposal.tokens.shape[1] - 1)
        mixed = self.mixture(here, proposed_at(proposal, following, here))
        here = torch.where((node < proposal.counts)[:, None], mixed, here)
        return residual(here, proposal, node)

    def mixture(self, p: Tensor, q: Tensor) -> Tensor:
        """Returns the mixture, which is sampled from in place of p. All: ``[..., V]``.

        Beside sampled rows a greedy row's q is one-hot like its p. Whether q is sure or only the
        likeliest token was asked for cannot be told from it, so that such a row keeps its p.
        """
        mixed = _MIXTURES[self.defer](p, q.to(p.dtype), self.alpha)
        return torch.where(p.amax(-1, keepdim=True) == 1, p, mixed)


def _chow(p: Tensor, q: Tensor, alpha: float) -> Tensor:
    return torch.where(q.amax(-1, keepdim=True) >= 1 - alpha, q, p)


def _diff(p: Tensor, q: Tensor, alpha: float) -> Tensor:
    return torch.where(_lead(p, q) <= alpha, q, p)


def _opt(p: Tensor, q: Tensor, alpha: float) -> Tensor:
    distance = (p - q).clamp(min=0).sum(-1, keepdim=True)
    return torch.where(_lead(p, q) <= alpha * distance, q, p)


def _token(p: Tensor, q: Tensor, alpha: float) -> Tensor:
    kept = torch.where(p >= (1 - alpha) * p.amax(-1, keepdim=True), q, 0.0)
    return kept + p * (1 - kept.sum(-1, keepdim=True)).clamp(min=0)


def _lead(p: Tensor, q: Tensor) -> Tensor:
    return p.amax(-1, keepdim=True) - q.amax(-1, keepdim=True)


_MIXTURES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "chow": _chow,
    "diff": _diff,
    "opt": _opt,
    "token": _token,
}
