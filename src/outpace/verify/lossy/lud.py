"""Lexical units: where the drafter is sure enough, its tokens are the text.

Sun et al. 2024, "Decoding at the speed of thought: harnessing parallel decoding of lexical units
for LLMs" (LUD, arXiv 2405.15208).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.options import option
from outpace.core.proposal import Drawn, Proposal, Sampled
from outpace.errors import ConfigError
from outpace.verify.base import Rule, deepest, reached, stop_at, target_probs
from outpace.verify.evidence import RuleNeeds
from outpace.verify.options import require


@dataclass(frozen=True)
class LudRule(Rule):
    """Accepts drafted tokens up to the first whose distribution is less sure than a threshold,
    whatever the target says of them.

        x passes if max q >= threshold and it is the first child of its node
        next = p

    Lossy, greedy texts too: a token is drawn from q where q is sure, and from p elsewhere. q is the
    drafter's distribution before the argmax. In the paper the drafter is the target itself, which
    has been trained to guess at places that hold no token yet; the method "pass" drafts so. Tokens
    that were chosen and not drawn (look-ups, frames) have no such q, so that their drafters are
    refused.
    """

    threshold: float = option(0.9, "A token passes if max q is at least this.")

    name: ClassVar[str] = "lud"
    lossless: ClassVar[bool] = False
    takes: ClassVar[frozenset[Drawn]] = frozenset({Drawn.IID, Drawn.WITHOUT})
    trees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.name, "threshold", self.threshold, 0, 1, above=True)

    @property
    def needs(self) -> RuleNeeds:
        return RuleNeeds(draft_probs=True)

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        tree = proposal.tree
        sure = torch.ge(self._probs(proposal, p).amax(-1), self.threshold)  # [B, N]
        passes = sure & proposal.valid & ~tree.elder.any(-1)
        return stop_at(deepest(reached(passes, tree), tree), p.shape[1], torch.float64)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        return target_probs(p, node)

    def _probs(self, proposal: Proposal, p: Tensor) -> Tensor:
        """The drafter's distributions ``[B, N, V]``, before the argmax of greedy rows."""
        if self.evidence.draft is not None:
            return self.evidence.draft
        if isinstance(proposal.distribution, Sampled):
            return proposal.distribution.q
        if proposal.tokens.shape[1]:
            raise ConfigError(
                "verify='lud' accepts tokens by how sure the drafter is of them, and this drafter "
                "does not say it of greedy texts: use the method 'pass' or 'draft_model'."
            )
        return p[:, :0]
