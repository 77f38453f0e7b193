"""Drafter-invariant sampling: the text does not depend on what was drafted.

Daliri, Musco and Suresh 2024, "Coupling without communication and drafter-invariant speculative
decoding" (arXiv 2408.07978).
"""

from __future__ import annotations

from typing import ClassVar

from outpace.core.proposal import DraftSampling
from outpace.verify.lossless.match import MatchRule


class CoupledRule(MatchRule):
    """The token at position t is argmax(log p_t + g_t), with Gumbel noise g_t keyed by (seed, t).

    A drafted token is accepted iff it is that token; the drafter proposes with the same noise. The
    text is the same with speculation on or off, with any drafter, length or batch. At each position
    the acceptance is at least (1 - d) / (1 + d) for d = TV(p, q); the token rule's is 1 - d.

    Without the noise, `stop` and `next` are those of "match": what the walk does on average. With
    it every node's token is fixed, and the walk is deterministic.
    """

    name: ClassVar[str] = "coupled"
    lossless: ClassVar[bool] = True
    coupled: ClassVar[bool] = True
    takes: ClassVar[frozenset[DraftSampling]] = frozenset({DraftSampling.DETERMINISTIC})
