"""Joint acceptance: the longest prefix that the target finds likely enough as a whole.

Qin et al. 2024, "Optimized multi-token joint decoding" (MTAD, MJSD; arXiv 2407.09722).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.options import option
from outpace.core.proposal import ONE_DISTRIBUTION, Drawn, Proposal
from outpace.verify.base import (
    Rule,
    at_drafted,
    drafted_mass,
    of_token,
    stop_at,
    target_probs,
)
from outpace.verify.evidence import RuleNeeds
from outpace.verify.options import require


@dataclass(frozen=True)
class JointRule(Rule):
    """Accept the longest prefix whose joint likelihood ratio is above a threshold.

        stop at the largest i with (p_1(x_1) ... p_i(x_i)) / (q_1(x_1) ... q_i(x_i)) > threshold
        next = p

    A longer prefix may pass where a shorter one does not. Lossy, and nothing is drawn from a
    residual. It is meant for drafts of high joint probability (beams), where it makes texts
    likelier. For points, q is the drafter's distribution if the engine has it, else 1; p is the
    distribution before the argmax in greedy rows, if the engine has it.
    """

    threshold: float = option(0.5, "The ratio p / q of a whole prefix has to be above this.")

    name: ClassVar[str] = "joint"
    lossless: ClassVar[bool] = False
    takes: ClassVar[frozenset[Drawn]] = ONE_DISTRIBUTION
    trees: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.name, "threshold", self.threshold, 0, float("inf"), above=True)

    @property
    def needs(self) -> RuleNeeds:
        return RuleNeeds(soft=True, draft_probs=True)

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        distribution = p if self.evidence.soft is None else self.evidence.soft
        draft = self.evidence.draft
        q = drafted_mass(proposal, torch.float64)
        if draft is not None:
            q = of_token(draft, proposal.tokens).double()
        gain = (at_drafted(distribution, proposal).log() - q.log()).nan_to_num(nan=float("-inf"))
        likely = gain.cumsum(1).exp() > self.threshold
        lengths = torch.arange(1, gain.shape[1] + 1, device=p.device)
        longest = torch.where(likely & proposal.valid, lengths, 0)
        node = torch.nn.functional.pad(longest, (1, 0)).amax(1)
        return stop_at(node, p.shape[1], torch.float64)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        return target_probs(p, node)
