"""Lossy rules that sample exactly, but from another distribution than p: the token rule against
it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from outpace.core.proposal import ONE_DISTRIBUTION, DraftSampling, Proposal, Sampled
from outpace.errors import ConfigError
from outpace.verify.base import Rule, RuleNeeds
from outpace.verify.lossless.token import TokenRule, residual, stop_where_one_fails
from outpace.verify.probs import (
    draft_probs_at,
    gather_probs,
    map_in_chunks,
    normalize,
    select_node,
)
from outpace.verify.siblings import is_deterministic


# Wang et al. 2025, "Think before you accept: semantic reflective verification for faster
# speculative decoding" (arXiv 2505.18629).
@dataclass(frozen=True)
class ReflectiveRule(Rule):
    """The token rule against a distribution that also uses what the target says after it has read
    the draft.

        fused = norm(p^(1 - weight) p_2^weight), that is, (1 - weight) l_1 + weight l_2 in logits
        stop, next = those of the token rule with fused for p

    p_2 is the target's distribution at the same tokens in a second copy of the draft, after
    ``prompt``. Samples exactly from the fused distribution, which is p only for weight 0: lossy. In
    greedy rows the fused distribution is made from the distributions before the argmax, if the
    engine brings them, and its argmax is taken.
    """

    weight: Annotated[float, Ge(0), Le(1)] = 0.3
    """The weight of what the target says after reading the draft; 0 is lossless."""
    prompt: str = "\nRead the text again and give the same continuation, corrected if needed:\n"
    """Stands between the draft and its second copy."""

    name: ClassVar[str] = "reflective"
    lossless: ClassVar[bool] = False
    takes: ClassVar[frozenset[DraftSampling]] = ONE_DISTRIBUTION
    trees: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = True

    @property
    def needs(self) -> RuleNeeds:
        return RuleNeeds(second_copy_prompt=self.prompt, softmax_probs=True)

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        def at(p: Tensor, second: Tensor, softmax_probs: Tensor, tokens: Tensor) -> Tensor:
            return gather_probs(self.fused(p, second, softmax_probs), tokens)

        before = [probs[:, :-1] for probs in (p, *self._seen(p))]  # the rule takes chains
        return stop_where_one_fails(map_in_chunks(at, *before, proposal.tokens).double(), proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        here = [select_node(probs, node) for probs in (p, *self._seen(p))]
        return residual(self.fused(*here), proposal, node)

    def _seen(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """The distributions at the second copy, and those at the first before any argmax, if they
        are there."""
        second, softmax_probs = self.evidence.second_copy_probs, self.evidence.softmax_probs
        if second is None:
            raise ConfigError(
                "verify='reflective' needs evidence.second_copy_probs in every round."
            )
        return second, p if softmax_probs is None else softmax_probs

    def fused(self, p: Tensor, second: Tensor, softmax_probs: Tensor) -> Tensor:
        """Returns the distribution that is sampled from.

        p, second, softmax_probs: ``[..., V]``, the target's distributions at the first and at the
        second copy, and at the first before any argmax.
        """
        distribution = _between(softmax_probs, second, self.weight)
        best = torch.zeros_like(distribution).scatter(
            -1, distribution.argmax(-1, keepdim=True), 1.0
        )
        return torch.where(p.amax(-1, keepdim=True) == 1, best, distribution)


def _between(first: Tensor, second: Tensor, weight: float) -> Tensor:
    """norm(first^(1 - weight) second^weight), the first where they have no token in common."""
    if weight == 0:
        return first
    return normalize(first ** (1 - weight) * second.to(first) ** weight, fallback=first)


# Narasimhan et al. 2024, "Faster cascades via speculative decoding" (arXiv 2405.19261).
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

    Samples exactly from the mixture, of the tokens that a request's options leave. Since that is
    not p, the rule is lossy. After the last drafted token there is no q, and the distribution is p.
    Greedy texts stay exact. Needs a sampled draft.
    """

    defer: Literal["chow", "diff", "opt", "token"] = "opt"
    """When q stands for p: 'chow', 'diff', 'opt' or 'token'."""
    alpha: Annotated[float, Ge(0), Le(1)] = 0.1
    """How much worse q may be than p and still stand for it, 0 to 1."""

    name: ClassVar[str] = "cascade"
    lossless: ClassVar[bool] = False
    keeps_greedy: ClassVar[bool] = True
    takes: ClassVar[frozenset[DraftSampling]] = frozenset(
        {DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT}
    )
    trees: ClassVar[bool] = False

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        if not isinstance(
            proposal.distribution, Sampled
        ):  # all rows are greedy, or nothing was drafted
            return TokenRule().stop(p, proposal)

        def at(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
            return gather_probs(self.mixture(p, q), tokens)

        mixed = map_in_chunks(at, p[:, :-1], proposal.distribution.q, proposal.tokens)  # [B, N]
        return stop_where_one_fails(mixed.double(), proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        here = select_node(p, node)
        if is_deterministic(proposal):
            return here
        following = node.clamp(max=proposal.tokens.shape[1] - 1)
        mixed = self.mixture(here, draft_probs_at(proposal, following, here))
        here = torch.where((node < proposal.counts)[:, None], mixed, here)
        return residual(here, proposal, node)

    def mixture(self, p: Tensor, q: Tensor) -> Tensor:
        """Returns the mixture, which is sampled from in place of p. All: ``[..., V]``.

        Among sampled rows a greedy row's q is one-hot like its p. Whether q is sure or only the
        likeliest token was asked for does not follow from it, so that such a row keeps its p.
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
