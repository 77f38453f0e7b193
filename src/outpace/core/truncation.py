"""Which tokens a truncated law keeps: to the letter what transformers' warpers keep.

Each function returns the scores ``[B, M, V]`` with the rest at minus infinity; the setting is a
``[B, 1, 1]`` column, and a row in which it is off keeps all. Sorting is stable, so that which of
several tied tokens is cut does not depend on the rest of the batch.
"""

from __future__ import annotations

from torch import Tensor

NEVER = float("-inf")


def keep_top_k(scores: Tensor, k: Tensor, largest: int) -> Tensor:
    """Keeps the k highest and their ties. largest: the largest k of a row that cuts; others keep
    all."""
    top = scores.topk(largest, dim=-1).values
    rank = (k.clamp(max=largest) - 1).expand(*top.shape[:-1], 1)
    kth = top.gather(-1, rank).masked_fill(k > largest, NEVER)
    return scores.masked_fill(scores < kth, NEVER)


def keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the fewest most probable tokens whose mass reaches top_p."""
    ascending, order = scores.sort(dim=-1, stable=True)
    tail = ascending.softmax(-1).cumsum(-1)
    drop = tail <= (1 - top_p).to(tail.dtype)
    drop[..., -1].fill_(False)
    drop &= (top_p < 1).expand_as(drop)
    return scores.masked_fill(drop.scatter(-1, order, drop), NEVER)


def keep_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    """Keeps the tokens with at least min_p times the mass of the most probable one."""
    law = scores.softmax(-1)
    floor = min_p.to(law.dtype) * law.amax(-1, keepdim=True)
    return scores.masked_fill(law < floor, NEVER)


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
    return scores.masked_fill(drop.scatter(-1, order, drop), NEVER)
