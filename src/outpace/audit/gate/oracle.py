"""The largest probability with which any exact rule can accept one of k drafts of one token.

A rule can only emit a drafted token or a corrected one. For every set S of tokens, a drafted one
that it emits is either in S, which happens with probability p(S) at most, or outside, for which
some draft has to be there. The largest acceptance is therefore the smallest p(S) + P(some draft is
outside S), which a rule attains (Khisti et al. 2024, arXiv 2410.18234). For drafts from one
distribution it is enough to look at the sets of the tokens with the smallest p / q.
"""

from __future__ import annotations

import torch
from torch import Tensor


def best_acceptance(p: Tensor, q: Tensor, drafts: int, *, replacement: bool = True) -> Tensor:
    """Returns ``[...]``: the largest probability with which one of the drafts can be accepted.

    p, q: ``[..., V]``. Without replacement all V^k ordered drafts are listed, so that the
    vocabulary must be tiny.

    >>> best_acceptance(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]), drafts=2).item()
    0.5
    """
    p, q = p.double(), q.double()
    order = torch.where(q > 0, p / q.clamp(min=1e-300), float("inf")).argsort(-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    inside = _all_inside(q, drafts, replacement)  # [..., V + 1], of the first n tokens
    mass = torch.cat([torch.zeros_like(p[..., :1]), p.cumsum(-1)], -1)
    return (mass + 1 - inside).amin(-1).clamp(0, 1)


def best_of_several(p: Tensor, probs: Tensor) -> Tensor:
    """Returns ``[...]``: the same for drafts that are drawn independently, each from a distribution
    of its own. All sets S of tokens are listed, so that the vocabulary must be tiny.

    p: ``[..., V]``; probs: ``[k, ..., V]``.

    >>> p, certain = torch.tensor([0.5, 0.5]), torch.eye(2)
    >>> best_of_several(p, certain).item(), best_of_several(p, certain[:1]).item()
    (1.0, 0.5)
    """
    vocabulary = p.shape[-1]
    sets = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * vocabulary).double().to(p.device)
    inside = p.double() @ sets.T  # [..., 2^V]
    some_outside = 1 - (probs.double() @ sets.T).prod(0)
    return (inside + some_outside).amin(-1).clamp(0, 1)


def deterministic_acceptance(p: Tensor, tokens: Tensor) -> Tensor:
    """Returns ``[...]``: the largest probability of accepting one of some given tokens, which is
    the sum of their p.

    p: ``[..., V]``; tokens: ``[..., k]``.
    """
    offered = torch.zeros_like(p).scatter(-1, tokens, 1.0)
    return (p * offered).sum(-1)


def _all_inside(q: Tensor, drafts: int, replacement: bool) -> Tensor:
    """Returns ``[..., V + 1]``: the probability that all drafts are among the first 0, 1, ... V
    tokens."""
    if replacement:
        mass = torch.cat([torch.zeros_like(q[..., :1]), q.cumsum(-1)], -1)
        return mass.clamp(max=1) ** drafts
    vocabulary = q.shape[-1]
    tuples = torch.cartesian_prod(*[torch.arange(vocabulary, device=q.device)] * drafts)
    tuples = tuples.reshape(-1, drafts)  # [R, k]
    chance, left = torch.ones_like(q[..., :1]).expand(*q.shape[:-1], len(tuples)), q[..., None, :]
    left = left.expand(*q.shape[:-1], len(tuples), vocabulary)
    top = torch.full_like(tuples[:, 0], -1)
    for column in tuples.T:
        index = column.expand(left.shape[:-1])[..., None]
        total = left.sum(-1)
        drawn = left.gather(-1, index)[..., 0] / total.clamp(min=1e-300)
        # Once q has no token left nothing more is drawn: of the tuples that differ only there, the
        # one with token 0 counts.
        chance = chance * torch.where(total > 0, drawn, (column == 0).to(q.dtype))
        top = torch.where((total > 0) & (drawn > 0), torch.maximum(top, column), top)
        left = left.scatter(-1, index, 0.0)
    sizes = torch.arange(vocabulary + 1, device=q.device)
    return (chance[..., None] * (top[..., None] < sizes)).sum(-2)
