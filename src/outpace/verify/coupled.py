"""Drafter-invariant sampling: the text does not depend on what was drafted.

Daliri, Musco and Suresh 2024, "Coupling without communication and drafter-invariant speculative
decoding" (arXiv 2408.07978).
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from outpace.core.rng import gumbel
from outpace.verify.base import Drawn
from outpace.verify.match import MatchRule


class CoupledRule(MatchRule):
    """The token at position t is argmax(log p_t + g_t), with Gumbel noise g_t keyed by (seed, t).

    A drafted token is accepted iff it is that token; the drafter proposes with the same noise. The
    text is the same with speculation on or off, with any drafter, length or batch. At each position
    the acceptance is at least (1 - d) / (1 + d) for d = TV(p, q); the token rule's is 1 - d.

    Without the noise, `stop` and `next` are those of "match": what the walk does on average. With
    it every node's token is fixed by `realise`, and the walk is deterministic.
    """

    name: ClassVar[str] = "coupled"
    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Drawn]] = frozenset({Drawn.POINT})


def realise(laws: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns ``[B, M]``: the token that keyed noise picks from each law.

    laws: ``[B, M, V]``; seeds: ``[B]``; positions: ``[B, M]``, where each token will stand.
    """
    noise = gumbel(seeds[:, None], positions, laws.shape[-1])
    return (laws.double().log() + noise).argmax(-1)
