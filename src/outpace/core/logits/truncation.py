"""Truncation of distributions (top-k, top-p, min-p, typical), exactly as transformers' warpers do.

Each function returns the scores ``[B, M, V]`` with those of all other tokens at minus infinity. The
setting is a ``[B, 1, 1]`` column, and a row in which it is off keeps all. Of several tied tokens at
the cut those with the larger ids are kept, whatever else is in the batch.

Sorting 152,000 scores takes a CPU some 30 ms, and a distribution keeps a few dozen of them. So the
highest scores are looked at first, and the rest is sorted only where they do not decide. On other
devices sorting is cheap, and asking whether something is decided is not: ``waits`` is false there.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")
"""The score of a token that has probability 0."""

FIRST = (64, 1024, 16384)
"""How many of the highest scores are looked at, one number after the other, until they decide."""

MARGIN = {torch.float32: 2e-6, torch.float64: 1e-11}
"""By how much the mass of the highest scores must pass top_p, or miss it, to decide. It is more
than a softmax over the sorted scores is rounded by, so that this would have decided the same."""


def keep_top_k(scores: Tensor, k: Tensor, largest: int, waits: bool = True) -> Tensor:
    """Keeps the k highest and their ties. largest: the largest k of a row that cuts; others keep
    all."""
    size = scores.shape[-1]
    top, index = scores.topk(min(largest + 1, size), dim=-1)
    rank = (k.clamp(max=largest) - 1).expand(*top.shape[:-1], 1)
    kth = top.gather(-1, rank)
    # Whether no token beyond these ties with the last, or can be drawn at all.
    complete = (top[..., -1:] < kth) | (kth == NEG_INF) | (k > largest)
    if waits and bool(complete.all()):
        kept = _alone(scores, index, top.masked_fill(top < kth, NEG_INF))
        return torch.where(k > largest, scores, kept) if bool((k > largest).any()) else kept
    return scores.masked_fill(scores < kth.masked_fill(k > largest, NEG_INF), NEG_INF)


def keep_top_p(scores: Tensor, top_p: Tensor, waits: bool = True) -> Tensor:
    """Keeps the fewest most probable tokens whose mass reaches top_p."""
    if not waits:
        return _keep_top_p_sorted(scores, top_p)
    flat = scores.flatten(0, -2)  # [R, V]
    mass = top_p.expand(*scores.shape[:-1], 1).flatten()  # [R]
    kept = flat.clone()
    (left,) = (mass < 1).nonzero(as_tuple=True)
    seen = 0  # how many of the highest scores have been looked at, in vain
    held = last = mass[:0]  # the mass of these, and of the last of them, by row
    for count in FIRST:
        if not len(left) or count >= flat.shape[-1]:
            break
        if seen and not bool((held + last * (count - seen) > mass[left]).any()):
            continue  # distributions as flat as these are not decided by so few of their tokens
        found, decided, held, last = _keep_top_p_among(flat[left], mass[left], count)
        kept[left[decided]] = found[decided]
        open_ = ~decided
        seen, left, held, last = count, left[open_], held[open_], last[open_]
    if len(left):
        kept[left] = _keep_top_p_sorted(flat[left], mass[left, None])
    return kept.view_as(scores)


def _keep_top_p_among(scores: Tensor, top_p: Tensor, count: int) -> tuple[Tensor, ...]:
    """Returns `keep_top_p` of ``scores`` [R, V], as far as the ``count`` highest of them decide it,
    in which rows ``[R]`` they do, and the mass ``[R]`` of them all and of the last of them."""
    top, index = scores.topk(count, dim=-1)
    # By score, and tied tokens by their ids, the larger first.
    index, order = index.sort(dim=-1, descending=True)
    top, order = top.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    index = index.gather(-1, order)
    total = scores.double().logsumexp(-1, keepdim=True)
    each = (top.double() - total).exp_()  # [R, count]
    through = each.cumsum(-1)
    before = through - each  # the mass of what is more probable
    margin, wanted = MARGIN[scores.dtype], top_p[:, None]
    keep = before < wanted
    keep[:, 0].fill_(True)
    clear = ((before[:, 1:] - wanted).abs() > margin).all(-1)
    # What is not among them is dropped, and ties with nothing that is kept.
    enough = through[:, -1] > top_p + margin
    apart = top.masked_fill(~keep, float("inf")).amin(-1) > top[:, -1]
    found = _alone(scores, index, top.masked_fill(~keep, NEG_INF))
    return found, clear & enough & apart, through[:, -1], each[:, -1]


def _keep_top_p_sorted(scores: Tensor, top_p: Tensor) -> Tensor:
    ascending, order = scores.sort(dim=-1, stable=True)
    tail = ascending.softmax(-1).cumsum(-1)
    drop = tail <= (1 - top_p).to(tail.dtype)
    drop[..., -1].fill_(False)
    drop &= (top_p < 1).expand_as(drop)
    return scores.masked_fill(drop.scatter(-1, order, drop), NEG_INF)


def keep_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    """Keeps the tokens with at least min_p times the mass of the most probable one."""
    distribution = scores.softmax(-1)
    floor = min_p.to(distribution.dtype) * distribution.amax(-1, keepdim=True)
    return scores.masked_fill(distribution < floor, NEG_INF)


def keep_typical(scores: Tensor, mass: Tensor) -> Tensor:
    """Keeps the tokens whose surprise is nearest to the entropy, until they hold the mass."""
    logp = scores.log_softmax(-1)
    entropy = -(logp * logp.exp()).nansum(-1, keepdim=True)
    surprise, order = ((-logp) - entropy).abs().sort(dim=-1, stable=True)
    covered = scores.gather(-1, order).softmax(-1).cumsum(-1)
    last = (covered < mass.to(covered.dtype)).sum(-1, keepdim=True)
    limit = surprise.gather(-1, last.clamp(max=surprise.shape[-1] - 1))
    drop = (surprise > limit) & (mass < 1)
    drop[..., 0].fill_(False)
    return scores.masked_fill(drop.scatter(-1, order, drop), NEG_INF)


def _alone(scores: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """The scores of the tokens ``index`` [..., k], and minus infinity for all others."""
    return torch.full_like(scores, NEG_INF).scatter_(-1, index, values)
