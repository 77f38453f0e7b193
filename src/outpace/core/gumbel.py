"""Keyed Gumbel noise, and the tokens that it picks: what the coupled rule decodes with.

The token of a distribution p is the largest of ``log p(x) + noise(x)``, where the noise depends on
nothing but a row's seed and the position where the token will stand. So plain and speculative
decoding pick the same token wherever they have the same distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.core.logits.pieces import pieces
from outpace.core.rng import FEW, Role, keys, uniform, uniforms_at

SPARSE = 16
"""Noise is made for the tokens with mass alone where at most one token in this many has any."""


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Returns ``[..., V]`` standard Gumbel noise for the token at each position."""
    return _gumbel_(uniform(seeds, positions, Role.TOKEN, vocabulary))


def gumbel_sample(probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns ``[B, M]``: the token that keyed noise picks from each distribution.

    probs: ``[B, M, V]``; seeds: ``[B]``; positions: ``[B, M]``, where each token will stand.
    """
    rows, nodes, vocabulary = probs.shape
    found = [
        _picked(probs[:, part], seeds[:, None], positions[:, part])
        for part in pieces(nodes, rows * vocabulary, probs.device)
    ]
    return torch.cat(found, 1)


def _picked(probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    # On other devices noise for all tokens costs less than to wait for how many have mass.
    if probs.device.type == "cpu" and probs.shape[-1] > FEW:
        some = probs > 0
        if int(some.sum()) * SPARSE <= some.numel():
            return _among_few(probs, some, seeds, positions)
    noise = gumbel(seeds, positions, probs.shape[-1])
    return noise.add_(probs.double().log()).argmax(-1)


def _among_few(probs: Tensor, some: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The same tokens, with noise for those only that have mass. some: ``[B, M, V]`` bool, which
    ones; a distribution without any picks its first token."""
    some[..., 0] = True
    row, token = some.flatten(0, 1).nonzero(as_tuple=True)
    streams = keys(seeds, positions, (Role.TOKEN,)).flatten()  # [N]
    noise = _gumbel_(uniforms_at(streams[row], token))
    values = noise.add_(probs[some].double().log())
    return token[_largest(values, row, len(streams))].view(positions.shape)


def _largest(values: Tensor, row: Tensor, rows: int) -> Tensor:
    """``[N]``: where the first of the largest values of each row is. values, row: ``[K]``, each
    row's side by side, and one of each at least."""
    counts = torch.bincount(row, minlength=rows)
    begins = counts.cumsum(0) - counts
    table = values.new_full((rows, int(counts.max())), -torch.inf)
    table[row, torch.arange(len(row), device=row.device) - begins[row]] = values
    return begins + table.argmax(-1)


def _gumbel_(uniforms: Tensor) -> Tensor:
    """Overwrites the uniforms."""
    return uniforms.log_().neg_().log_().neg_()
