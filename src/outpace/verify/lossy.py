"""Rules that may change the text; used only where the user names one.

A drafted token passes where another test than the target's own distribution lets it, and the extra
token comes from one of two places. q is the drafter's distribution, h the target's last hidden
state.

    rule         a drafted token x passes                                    the extra token
    lenient      with min(1, p / (lenience q))                               residual
    ears         with min(1, p / q + tolerance (1 - max p))                  residual
    judge        if the judge's score of h is high, else with min(1, p / q)  residual
    bild         if -log p <= rollback or x = argmax p                       p
    confidence   if p >= strict + (loose - strict) C                         p
    typical      if p is above a level that falls with the entropy           p
    joint        if p / q of the whole prefix is above a threshold           p
    lud          if max q >= threshold                                       p

"Residual" is norm([p - q]_+) after a failure and p after the last token, as in the token rule. The
two rules that sample exactly, but from another distribution than p, are in `verify.mixtures`.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from outpace.core.options import Reads
from outpace.core.proposal import ONE_DISTRIBUTION, DraftSampling, Proposal, Sampled
from outpace.core.trees.tree import Tree
from outpace.core.values import shown
from outpace.errors import ConfigError
from outpace.heads.classifiers import JudgeHead, ModelSignature
from outpace.verify.base import Rule, RuleNeeds
from outpace.verify.lossless.token import residual_next
from outpace.verify.probs import (
    deepest,
    first_rejection_probs,
    gather_probs,
    map_in_chunks,
    p_of_drafted,
    q_of_drafted,
    ratio,
    reached,
    stop_at,
    target_probs,
)


class _LossyRule(Rule):
    """Draws the extra token from p."""

    lossless: ClassVar[bool] = False
    takes: ClassVar[frozenset[DraftSampling]] = ONE_DISTRIBUTION
    trees: ClassVar[bool] = False

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        return target_probs(p, node)


class _OneByOne(_LossyRule):
    """Stops at the first token of a chain that does not pass."""

    @abstractmethod
    def accept(self, p: Tensor, proposal: Proposal) -> Tensor:
        """Returns ``[B, N]``: whether each token passes, given that those before it did, or with
        which probability."""

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        return first_rejection_probs(self.accept(p, proposal).double(), proposal)


class _WithResidual(_OneByOne):
    """Draws the extra token from the residual of the token rule."""

    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        return residual_next(p, proposal, node)


# -- the extra token comes from the residual -------------------------------------------------------


# Leviathan, Kalman and Matias 2022, appendix A.5 (arXiv 2211.17192).
@dataclass(frozen=True)
class LenientRule(_WithResidual):
    """The token rule with q scaled down by ``lenience``.

        a_i = min(1, p_i(x_i) / (lenience q_i(x_i)))
        next = norm([p - q]_+) after a failure, p after the last token

    Lossy unless lenience is 1; no token becomes more probable than p / lenience. Greedy decoding
    stays exact, since p is then 0 or 1.
    """

    lenience: Annotated[float, Gt(0), Le(1)] = 0.8
    """What q is multiplied by; 1 is lossless."""

    name: ClassVar[str] = "lenient"
    keeps_greedy: ClassVar[bool] = True

    def accept(self, p: Tensor, proposal: Proposal) -> Tensor:
        allowed = self.lenience * q_of_drafted(proposal, torch.float64)
        return ratio(p_of_drafted(p, proposal), allowed)


# Sun, Chen and Xu 2025, "Efficient adaptive rejection sampling for accelerating speculative
# decoding in large language models" (arXiv 2512.13194).
@dataclass(frozen=True)
class EarsRule(_WithResidual):
    """The token rule with an allowance for uncertainty added to the ratio.

        a_i = min(1, p_i(x_i) / q_i(x_i) + tolerance (1 - max p_i))
        next = norm([p - q]_+) after a failure, p after the last token

    Lossy unless tolerance is 0. Greedy decoding stays exact, since max p is then 1.
    """

    tolerance: Annotated[float, Ge(0), Le(1)] = 0.1
    """Added to the ratio p / q where the target is uncertain; 0 is lossless."""

    name: ClassVar[str] = "ears"
    keeps_greedy: ClassVar[bool] = True

    def accept(self, p: Tensor, proposal: Proposal) -> Tensor:
        passes = ratio(p_of_drafted(p, proposal), q_of_drafted(proposal, torch.float64))
        doubt = 1 - p.amax(-1).double()[:, :-1]  # [B, N], the rule takes chains
        return (passes + self.tolerance * doubt).clamp(max=1)


def _head(name: str, value: Any) -> JudgeHead:
    if isinstance(value, (str, os.PathLike)):
        return JudgeHead.load(os.fspath(value))
    if not isinstance(value, JudgeHead):
        raise ConfigError(
            f"{name} must be the folder that 'outpace train judge' wrote for this target, or a "
            f"JudgeHead, not {shown(value)}."
        )
    return value


# Bachmann et al. 2025, "Judge decoding: faster speculative sampling requires going beyond model
# alignment" (arXiv 2501.19309).
@dataclass(frozen=True)
class JudgeRule(_WithResidual):
    """Accept a token if the judge does, or if the token rule does.

        a_i = 1 if score(h_i) > threshold, else min(1, p_i(x_i) / q_i(x_i))
        next = norm([p - q]_+) after a failure, p after the last token

    h_i is the target's last hidden state at the drafted token (the paper takes it before the final
    norm, transformers gives it after). Lossy; exact with threshold 1, because the judge then
    accepts nothing. `outpace train judge` writes the head to a folder, which is what is given here;
    one of another target is refused. A `JudgeHead` of your own may be given as it is, or as a file
    that `JudgeHead.save` wrote.
    """

    head: Annotated[JudgeHead | str | os.PathLike[str], Reads(_head)]
    """The folder that 'outpace train judge' wrote for this target, or a JudgeHead."""
    threshold: Annotated[float, Ge(0), Le(1)] = 0.5
    """A token passes if the judge's score is above this; 1 is lossless."""

    name: ClassVar[str] = "judge"

    @property
    def needs(self) -> RuleNeeds:
        return RuleNeeds(hidden_layers=(-1,))

    def check_target(self, model: Callable[[], ModelSignature]) -> None:
        assert isinstance(self.head, JudgeHead)
        if self.head.model_signature is not None:
            self.head.model_signature.check(model(), "the judge")

    def accept(self, p: Tensor, proposal: Proposal) -> Tensor:
        assert isinstance(self.head, JudgeHead)
        if self.evidence.hidden_states is None:
            raise ConfigError(
                "verify='judge' needs evidence.hidden_states in every round: "
                "rule.with_evidence(...)."
            )
        judged = self.head.score(self.evidence.hidden_states)[:, 1:] > self.threshold  # [B, N]
        passes = ratio(p_of_drafted(p, proposal), q_of_drafted(proposal, torch.float64))
        return torch.where(judged, 1.0, passes)


# -- the extra token comes from p ------------------------------------------------------------------


# Kim et al. 2023, "Speculative decoding with big little decoder" (arXiv 2302.07863).
@dataclass(frozen=True)
class BildRule(_OneByOne):
    """Stop before the first token that the target finds too surprising and would not choose itself.

        x passes if -log p(x) <= rollback or x = argmax p
        next = p (which is the argmax in greedy rows)

    Lossy, and greedy in the paper: p is the distribution before the argmax. The engine hands it
    over for greedy rows, too; without it they are decoded exactly. rollback 0 is plain greedy
    decoding. The other half of BiLD happens while drafting: a chain ends before a token whose
    distribution has max q < ``fallback`` (q before the argmax, too). A drafter without q, such as
    look-up, never stops.
    """

    rollback: Annotated[float, Ge(0)] = 5.0
    """A token passes if -log p of it is at most this; 0 is plain greedy decoding."""
    fallback: Annotated[float, Ge(0), Le(1)] = 0.6
    """A draft ends before a token whose distribution has max q below this."""

    name: ClassVar[str] = "bild"

    @property
    def needs(self) -> RuleNeeds:
        return RuleNeeds(softmax_probs=True, continue_on_probs=self.continue_on_probs)

    def accept(self, p: Tensor, proposal: Proposal) -> Tensor:
        distribution = p if self.evidence.softmax_probs is None else self.evidence.softmax_probs
        best = p.argmax(-1)[:, :-1] == proposal.tokens  # [B, N]
        return (-p_of_drafted(distribution, proposal).log() <= self.rollback) | best

    def continue_on_probs(self, q: Tensor) -> Tensor:
        """Returns ``[B]`` bool: whether the drafter is sure enough of its next distribution q [B,
        V]."""
        return torch.ge(q.amax(-1), self.fallback)


# Sen, Dasgupta and Waghela 2025, "Confidence-modulated speculative decoding for large language
# models" (CM-ASD, arXiv 2508.15371).
@dataclass(frozen=True)
class ConfidenceRule(_OneByOne):
    """Accepts a token whose probability under the target is above a threshold, which is lower where
    the drafter is confident.

        C = mean of 1 - H(q) / log V, max q, and the margin between the two largest of q
        x passes if p(x) >= strict + (loose - strict) C
        next = p

    Lossy. Greedy decoding stays exact for strict > 0. The paper names the three signals and asks
    for a threshold that is monotone in them; that it is a linear function of their mean is our
    choice. A deterministic token without the drafter's distribution counts as sure (C = 1).
    """

    strict: Annotated[float, Gt(0), Le(1)] = 0.3
    """Least p of a token of which the drafter is not sure at all."""
    loose: Annotated[float, Gt(0), Le(1)] = 0.05
    """Least p of a token of which the drafter is entirely sure."""

    name: ClassVar[str] = "confidence"
    keeps_greedy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loose > self.strict:
            raise ConfigError(
                f"verify='confidence': loose={self.loose} must not be above strict={self.strict}."
            )

    @property
    def needs(self) -> RuleNeeds:
        return RuleNeeds(draft_probs=True)

    def accept(self, p: Tensor, proposal: Proposal) -> Tensor:
        q = self.evidence.draft_probs
        if q is None and isinstance(proposal.distribution, Sampled):
            q = proposal.distribution.q
        sure = 1.0 if q is None else map_in_chunks(confidence, q)  # [B, N]
        return p_of_drafted(p, proposal) >= self.strict + (self.loose - self.strict) * sure


def confidence(q: Tensor) -> Tensor:
    """Returns ``[...]`` in [0, 1]: how sure distributions ``[..., V]`` are. 1 for a one-hot
    distribution."""
    size = q.shape[-1]
    if size < 2:
        return torch.ones_like(q[..., 0], dtype=torch.float64)
    order = 1 - torch.special.entr(q).sum(-1).double() / torch.tensor(float(size)).log().double()
    top = q.topk(2, -1).values.double()
    mean: Tensor = (order + top[..., 0] + top[..., 0] - top[..., 1]) / 3
    return mean.clamp(0, 1)


# Cai et al. 2024, "Medusa: simple LLM inference acceleration framework with multiple decoding
# heads" (arXiv 2401.10774).
@dataclass(frozen=True)
class TypicalRule(_LossyRule):
    """Accept a token whose probability is above a threshold that falls with the target's entropy.

        x passes if p(x) > min(posterior_threshold, posterior_alpha exp(-entropy of p))
        stop at the deepest node whose whole path passes, of several at the likeliest
        next = p

    Lossy; q plays no part. Greedy decoding stays exact. The defaults .09 and .3 are those of
    Medusa's paper and of vLLM. A function in Medusa's code has them swapped, which accepts more
    tokens and deviates more.
    """

    posterior_threshold: Annotated[float, Ge(0), Le(1)] = 0.09
    """p of a token above this is enough."""
    posterior_alpha: Annotated[float, Ge(0), Le(1)] = 0.3
    """Above this times exp(-entropy of p), too: less where the target is uncertain."""

    name: ClassVar[str] = "typical"
    keeps_greedy: ClassVar[bool] = True
    takes: ClassVar[frozenset[DraftSampling]] = frozenset(DraftSampling)
    trees: ClassVar[bool] = True

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        tree = proposal.tree
        entropy = map_in_chunks(
            lambda probs: torch.special.entr(probs).sum(-1), p
        ).double()  # [B, M]
        level = (self.posterior_alpha * (-entropy).exp()).clamp(max=self.posterior_threshold)
        at = p_of_drafted(p, proposal)
        passes = (at > level.gather(1, tree.parents)) & proposal.valid
        return stop_at(_likeliest(passes, at, tree), p.shape[1], torch.float64)


def _likeliest(passes: Tensor, at: Tensor, tree: Tree) -> Tensor:
    """Returns ``[B]``: the deepest node whose whole path passes, of equally deep ones the
    likeliest.

    passes, at: ``[B, N]``, of each node: whether it passes, and its probability.
    """
    depth = torch.where(reached(passes, tree), tree.depth, -1)  # [B, M]
    longest = depth == depth.amax(1, keepdim=True)
    step = torch.nn.functional.pad(at, (1, 0), value=1.0).log()
    likely = torch.where(tree.ancestors, step[:, None, :], 0.0).sum(-1)
    return torch.where(longest, likely, float("-inf")).argmax(1)


# Qin et al. 2024, "Optimized multi-token joint decoding" (MTAD, MJSD; arXiv 2407.09722).
@dataclass(frozen=True)
class JointRule(_LossyRule):
    """Accept the longest prefix whose joint likelihood ratio is above a threshold.

        stop at the largest i with (p_1(x_1) ... p_i(x_i)) / (q_1(x_1) ... q_i(x_i)) > threshold
        next = p

    A longer prefix may pass where a shorter one does not. Lossy, and nothing is drawn from a
    residual. It is meant for drafts of high joint probability (beams), where it makes texts
    likelier. For deterministic tokens, q is the drafter's distribution if the engine has it, else
    1; p is the distribution before the argmax in greedy rows, if the engine has it.
    """

    threshold: Annotated[float, Gt(0)] = 0.5
    """The ratio p / q of a whole prefix has to be above this."""

    name: ClassVar[str] = "joint"
    looks_ahead: ClassVar[bool] = True

    @property
    def needs(self) -> RuleNeeds:
        return RuleNeeds(softmax_probs=True, draft_probs=True)

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        distribution = p if self.evidence.softmax_probs is None else self.evidence.softmax_probs
        draft = self.evidence.draft_probs
        q = q_of_drafted(proposal, torch.float64)
        if draft is not None:
            q = gather_probs(draft, proposal.tokens).double()
        gain = (p_of_drafted(distribution, proposal).log() - q.log()).nan_to_num(nan=float("-inf"))
        likely = gain.cumsum(1).exp() > self.threshold
        lengths = torch.arange(1, gain.shape[1] + 1, device=p.device)
        longest = torch.where(likely & proposal.valid, lengths, 0)
        node = torch.nn.functional.pad(longest, (1, 0)).amax(1)
        return stop_at(node, p.shape[1], torch.float64)


# Sun et al. 2024, "Decoding at the speed of thought: harnessing parallel decoding of lexical
# units for LLMs" (LUD, arXiv 2405.15208).
@dataclass(frozen=True)
class LudRule(_LossyRule):
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

    threshold: Annotated[float, Gt(0), Le(1)] = 0.9
    """A token passes if max q is at least this."""

    name: ClassVar[str] = "lud"
    takes: ClassVar[frozenset[DraftSampling]] = frozenset(
        {DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT}
    )
    trees: ClassVar[bool] = True

    @property
    def needs(self) -> RuleNeeds:
        return RuleNeeds(draft_probs=True)

    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        tree = proposal.tree
        sure = torch.ge(self._probs(proposal, p).amax(-1), self.threshold)  # [B, N]
        passes = sure & proposal.valid & ~tree.elder.any(-1)
        return stop_at(deepest(reached(passes, tree), tree), p.shape[1], torch.float64)

    def _probs(self, proposal: Proposal, p: Tensor) -> Tensor:
        """The drafter's distributions ``[B, N, V]``, before the argmax of greedy rows."""
        if self.evidence.draft_probs is not None:
            return self.evidence.draft_probs
        if isinstance(proposal.distribution, Sampled):
            return proposal.distribution.q
        if proposal.tokens.shape[1]:
            raise ConfigError(
                "verify='lud' accepts tokens by how sure the drafter is of them, and this drafter "
                "does not say it of greedy texts: use the method 'pass' or 'draft_model'."
            )
        return p[:, :0]
