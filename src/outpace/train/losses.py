"""Divergences between a drafter's distributions and the target's, and losses over distributions
that are too large to be held for all places at once.

DistillSpec (Zhou et al. 2023, arXiv 2310.08461) compares the first four; which of them serves best
depends on the task. The last two aim at the acceptance rate itself, which is ``sum min(p, q)`` at
each position, 1 minus the total variation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import ConfigError, did_you_mean

FORWARD_KL = "forward_kl"
ETA = 3.0
"""How fast `lk` goes over from the divergence to the total variation, as acceptance grows."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""From log-probabilities of the target's distributions ``[..., V]`` and of the drafter's to
``[...]``."""


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q): the drafter has to give chances to all that the target may say."""
    return _expected(log_p, log_p - log_q)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p): the drafter must not say what the target would not."""
    return _expected(log_q, log_q - log_p)


def jsd(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The Jensen-Shannon divergence: of both distributions from their mean."""
    middle = torch.logaddexp(log_p, log_q) - math.log(2)
    return (_expected(log_p, log_p - middle) + _expected(log_q, log_q - middle)) / 2


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """1 minus the chance that a drafted token is accepted."""
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def lk(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The forward divergence at first and the total variation later: each has a share that follows
    from the mean acceptance. Total variation alone has next to no gradient where the two
    distributions hardly overlap, as at the start."""
    missed = total_variation(log_p, log_q)
    share = torch.exp(-ETA * (1 - missed.detach().mean()))
    return share * forward_kl(log_p, log_q) + (1 - share) * missed


LOSSES: Mapping[str, Loss] = {
    FORWARD_KL: forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tv": total_variation,
    "lk": lk,
}


def find_loss(name: str) -> Loss:
    """Returns the loss of this name; ``ConfigError`` with a suggestion if there is none."""
    if name not in LOSSES:
        raise ConfigError(f"unknown loss {name!r}{did_you_mean(name, LOSSES)}.")
    return LOSSES[name]


def _expected(log_probs: Tensor, values: Tensor) -> Tensor:
    """The mean of values under a distribution; a token of no chance counts nothing, whatever its
    value."""
    distribution = log_probs.exp()
    return torch.where(distribution > 0, distribution * values, 0.0).sum(-1)


# -- chunk by chunk --------------------------------------------------------------------------------


ChunkLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes the learner's own states at P places and the target's, both ``[P, H]``; returns the sum of
the losses there, and ``[P]`` whatever is wanted of each place."""


def chunked_loss(
    chunk_loss: ChunkLoss, own: Tensor, theirs: Tensor, size: int, weights: Sequence[nn.Parameter]
) -> tuple[Tensor, Tensor]:
    """Returns the sum of the losses over all chunks of ``size`` places, and what is said of each
    place, side by side.

    Each chunk is derived as soon as it is made, so that no distribution is kept and none is made
    twice: what checkpointing would do on the way back. weights: those that a chunk uses and that
    learn.
    """
    if not torch.is_grad_enabled():
        pairs = zip(torch.split(own, size), torch.split(theirs, size), strict=True)
        made = [chunk_loss(*pair) for pair in pairs]
        return torch.stack([loss for loss, _ in made]).sum(), torch.cat([said for _, said in made])
    apply: Any = _ChunkedLoss.apply  # untyped
    found: tuple[Tensor, Tensor] = apply(chunk_loss, size, own, theirs, *weights)
    return found


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chunk_loss: ChunkLoss, size: int, own: Tensor, theirs: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        slopes = [torch.zeros_like(weight) for weight in weights]
        total, said, back = own.new_zeros(()), [], []
        for mine, target in zip(torch.split(own, size), torch.split(theirs, size), strict=True):
            with torch.enable_grad():
                begin = mine.detach().requires_grad_(True)
                loss, each = chunk_loss(begin, target)
            first, *others = torch.autograd.grad(loss, [begin, *weights], materialize_grads=True)
            back.append(first)
            for slope, more in zip(slopes, others, strict=True):
                slope.add_(more)
            total = total + loss.detach()
            said.append(each)
        ctx.save_for_backward(torch.cat(back), *slopes)
        places = torch.cat(said)
        ctx.mark_non_differentiable(places)
        return total, places

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        by = slopes[0]
        own, *weights = ctx.saved_tensors
        return (None, None, own * by, None, *(weight * by for weight in weights))
