"""Block verification: judge the whole chain at once.

Sun, Mendlovic, Leviathan, Aharoni, Beirami, Ro and Suresh 2024, "Block verification accelerates
speculative decoding" (arXiv 2403.10444).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from outpace.core.proposal import ONE_DISTRIBUTION, DraftSampling, Proposal, Sampled
from outpace.verify.base import Rule
from outpace.verify.lossless.match import MatchRule
from outpace.verify.probs import (
    map_in_chunks,
    normalize,
    p_of_drafted,
    q_of_drafted,
    select_node,
)
from outpace.verify.siblings import (
    TINY,
    children_probs_at,
    excess,
    is_deterministic,
    quotient,
)


class BlockRule(Rule):
    """Accept the longest prefix that passes a test of its own, whatever shorter ones did.

        a_0 = 1,  a_i = min(1, a_{i-1} p_i(x_i) / q_i(x_i))
        S_i = sum [a_i p_{i+1} - q_{i+1}]_+
        h_i = S_i / (S_i + 1 - a_i) before the last token (0 / 0 = 1), a_i at the last
        stop_n = h_n (1 - h_{n+1}) ... (1 - h_last),  h_0 = 1
        next   = norm([a_n p_{n+1} - q_{n+1}]_+) before the last token, p after it

    Exact, and never accepts fewer tokens on average than the token rule: no rule for one sampled
    chain accepts more. The same as the token rule for one token and for deterministic tokens.
    """

    name: ClassVar[str] = "block"
    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[DraftSampling]] = ONE_DISTRIBUTION
    trees: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = True

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        if is_deterministic(proposal):
            return MatchRule().stop(p, proposal)
        assert isinstance(proposal.distribution, Sampled)
        joint = self.shared(p, proposal)  # [B, M]
        pass_ = torch.ones_like(joint)
        pass_[:, 1:-1] = map_in_chunks(
            _pass, p[:, 1:-1], proposal.distribution.q[:, 1:], joint[:, 1:-1]
        )
        nodes = torch.arange(joint.shape[1], device=p.device)
        last = proposal.counts[:, None]
        pass_ = torch.where(nodes == last, joint, pass_).where(nodes <= last, 0.0)
        pass_[:, 0].fill_(1)
        overruled = (1 - pass_).flip(1).cumprod(1).flip(1)[:, 1:]  # nothing later passed
        return pass_ * torch.cat([overruled, torch.ones_like(pass_[:, :1])], 1)

    def compute_shared(self, p: Tensor, proposal: Proposal) -> Tensor:
        return joint_ratio(p, proposal)

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        if is_deterministic(proposal):
            return MatchRule().next(p, proposal, node)
        here = select_node(p, node).double()
        joint = self.shared(p, proposal).gather(1, node[:, None])
        q = children_probs_at(proposal, node)
        return normalize(excess(here, q, 1 / joint[:, 0].clamp(min=TINY)), fallback=here)


def _pass(p: Tensor, q: Tensor, joint: Tensor) -> Tensor:
    """Returns h ``[B, L]`` of L nodes before the last.

    p, q: ``[B, L, V]``, the distributions of the token after each of them; joint: ``[B, L]``, their
    a.
    """
    # S_i / a_i, which does not lose p where a_i is small
    left = excess(p.double(), q.double(), 1 / joint.clamp(min=TINY)).sum(-1) * joint
    # The brackets matter: left + 1 would lose a small left, and leave 0 to divide by.
    return torch.where((left <= 0) & (joint >= 1), 1.0, quotient(left, left + (1 - joint)))


def joint_ratio(p: Tensor, proposal: Proposal) -> Tensor:
    """Returns ``[B, M]`` float64: a_0 = 1 and a_i = min(1, a_{i-1} p_i(x_i) / q_i(x_i))."""
    step = quotient(p_of_drafted(p, proposal), q_of_drafted(proposal, torch.float64))
    found = [torch.ones_like(p[:, 0, 0], dtype=torch.float64)]
    for i in range(step.shape[1]):
        found.append((found[-1] * step[:, i]).clamp(max=1))
    return torch.stack(found, 1)
