"""The losses of both models from one forward of each, with their gradients in closed form.

Logits over the vocabulary are the largest arrays of a step, so they are made and spent chunk by
chunk and autograd never keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1024


@dataclass(frozen=True)
class Weights:
    """What the drafter learns from: the text, the target's distribution, and the acceptance
    itself."""

    text: float
    distribution: float
    acceptance: float


@dataclass
class Heads:
    """Gradients for hidden states and embeddings, and the means of the batch."""

    target: Tensor
    target_embedding: Tensor
    drafter: Tensor
    drafter_embedding: Tensor
    means: Tensor


MEANS = ("target", "drafter", "divergence", "acceptance", "agreement")


def chunk(
    ht: Tensor, et: Tensor, hd: Tensor, ed: Tensor, labels: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the summed losses with respect to both logits, and the sums.

    The drafter's loss is `text * CE + distribution * KL(p, q) + acceptance * (1 - sum min(p, q))`.
    """
    text, distribution, acceptance = weights.unbind(0)
    zt, zd = (ht @ et.T).float(), (hd @ ed.T).float()
    logp = zt - zt.logsumexp(-1, keepdim=True)
    logq = zd - zd.logsumexp(-1, keepdim=True)
    p, q = logp.exp(), logq.exp()
    hit = (torch.arange(zt.shape[-1], device=zt.device) == labels[:, None]).float()
    below = q * (q < p)
    share = below.sum(-1, keepdim=True)
    gt = p - hit
    gd = text * (q - hit) + distribution * (q - p) - acceptance * (below - q * share)
    sums = torch.stack(
        [
            -(logp * hit).sum(),
            -(logq * hit).sum(),
            (p * (logp - logq)).sum(),
            torch.minimum(p, q).sum(),
            (zt.argmax(-1) == zd.argmax(-1)).float().sum(),
        ]
    )
    return gt, gd, sums


def heads(
    target: Tensor,
    target_embedding: Tensor,
    drafter: Tensor,
    drafter_embedding: Tensor,
    labels: Tensor,
    weights: Weights,
    per_chunk: Callable[..., tuple[Tensor, Tensor, Tensor]] = chunk,
) -> Heads:
    """Mean losses over the batch and their gradients, for detached hidden states."""
    mix = torch.tensor(
        [weights.text, weights.distribution, weights.acceptance], device=target.device
    )
    count = labels.numel()
    result = Heads(
        torch.empty_like(target),
        torch.zeros_like(target_embedding),
        torch.empty_like(drafter),
        torch.zeros_like(drafter_embedding),
        torch.zeros(len(MEANS), device=target.device),
    )
    for start in range(0, count, CHUNK):
        part = slice(start, start + CHUNK)
        ht, hd = target[part], drafter[part]
        gt, gd, sums = per_chunk(ht, target_embedding, hd, drafter_embedding, labels[part], mix)
        gt, gd = gt.to(ht.dtype) / count, gd.to(hd.dtype) / count
        torch.mm(gt, target_embedding, out=result.target[part])
        torch.mm(gd, drafter_embedding, out=result.drafter[part])
        result.target_embedding.addmm_(gt.T, ht)
        result.drafter_embedding.addmm_(gd.T, hd)
        result.means += sums
    result.means /= count
    return result
