"""Lengths that end chains by the drafter's distributions, tokens or hidden states so far."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor

from outpace.core.options import Options, Reads
from outpace.core.proposal import DraftingTerms, StoppingFn
from outpace.core.request import PerRequest, Request
from outpace.core.values import shown
from outpace.draft.base import Drafter
from outpace.draft.exits import FIRST, PAPER, ExitThreshold, ThresholdRule, below, probability
from outpace.draft.round import Outcome
from outpace.errors import ConfigError
from outpace.heads.classifiers import Classifier, load_classifier
from outpace.policy.acceptance import Calibration, Confidences
from outpace.policy.lengths.base import LengthPolicy, StoppingPolicy


@dataclass(frozen=True, kw_only=True)
class ConfidenceOptions(Options):
    """What a user may set."""

    threshold: Annotated[float, Ge(0), Le(1)] = 0.4
    """The probability below which a token is the last of its chain."""


class Confidence(StoppingPolicy):
    """Ends a chain after a token that has less than ``threshold`` in the drafter's distribution.

    The token stays in the draft: dropping it would be a choice made after it was drawn, and what is
    left would not follow the drafter's distribution any more.

    ``assistant_confidence_threshold`` of transformers; Mamou et al. 2024, "Dynamic speculation
    lookahead" (arXiv 2405.04304).
    """

    name: ClassVar[str] = "confidence"
    default_count: ClassVar[int] = 20
    Options: ClassVar[type[Any]] = ConfidenceOptions

    def begin_round(self, requests: Sequence[Request]) -> Callable[[Sequence[int]], StoppingFn]:
        threshold = self.options.threshold
        return lambda counts: (
            lambda distribution, token: probability(distribution, token) < threshold
        )


@dataclass(frozen=True, kw_only=True)
class EntropyOptions(Options):
    """What a user may set."""

    threshold: Annotated[float, Ge(0), Le(100)] = 2.0
    """The entropy of the drafter's next distribution, in nats, above which nothing more is
    drafted."""


class Entropy(LengthPolicy):
    """Ends a chain before drawing from a distribution with an entropy above ``threshold``.

    Since the distribution alone decides, before anything is drawn from it, all tokens that were
    drawn follow their distributions.

    Agrawal et al. 2024, "AdaEDL: early draft stopping by an entropy-based lower bound on token
    acceptance probability" (arXiv 2410.18351).
    """

    name: ClassVar[str] = "entropy"
    can_stop_early: ClassVar[bool] = True
    default_count: ClassVar[int] = 20
    Options: ClassVar[type[Any]] = EntropyOptions

    def budgets(self, requests: Sequence[Request]) -> list[int]:
        return [self.count] * len(requests)

    def terms(self, requests: Sequence[Request], terms: DraftingTerms) -> DraftingTerms:
        of_rule = terms.continue_on_probs

        def continue_on_probs(distribution: Tensor) -> Tensor:
            on = torch.le(torch.special.entr(distribution).sum(-1), self.options.threshold)
            return on if of_rule is None else on.logical_and(of_rule(distribution))

        return replace(terms, continue_on_probs=continue_on_probs)


@dataclass(frozen=True, kw_only=True)
class DraftExitOptions(Options):
    """What a user may set; the defaults are the paper's."""

    threshold: Annotated[float, Ge(0), Le(1)] = FIRST
    """The first threshold: a less likely token ends its chain."""
    target_acceptance: Annotated[float, Ge(0), Le(1)] = PAPER.wanted
    """The acceptance rate below which the threshold rises, and above which it falls."""
    step: Annotated[float, Ge(0), Le(1)] = PAPER.step
    """By how much it rises or falls before it is smoothed."""
    rate_memory: Annotated[float, Ge(0), Le(1)] = PAPER.rate_memory
    """Share of the old acceptance rate that is kept (beta 1)."""
    threshold_memory: Annotated[float, Ge(0), Le(1)] = PAPER.threshold_memory
    """Share of the old threshold that is kept (beta 2)."""


class DraftExit(StoppingPolicy):
    """Adaptive draft-exiting: ends a chain after a token that has less than a threshold in the
    drafter's distribution, and moves the threshold towards a wanted acceptance rate:

        rate      <- beta_1 rate + (1 - beta_1) accepted / drafted
        threshold <- beta_2 threshold + (1 - beta_2) (threshold + step), or - step if rate is above

    A draft of full length says nothing against the threshold, which is then not lowered, and a
    draft of a look-up that drafts with the model says nothing at all. All requests share one
    threshold, except sampled ones with a seed of their own.

    Zhang et al. 2024, "Draft & Verify" (arXiv 2309.08168), section 3.4.
    """

    name: ClassVar[str] = "draft_exit"
    default_count: ClassVar[int] = 12
    Options: ClassVar[type[Any]] = DraftExitOptions

    def __init__(self, count: int, options: Any) -> None:
        super().__init__(count, options)
        first = ExitThreshold(options.threshold)
        self._states = PerRequest(lambda request: first, lasting=True, common=first)
        self._counts: dict[Request, int] = {}  # tokens that chains of this round may have
        self._rule = ThresholdRule(
            options.target_acceptance, options.step, options.rate_memory, options.threshold_memory
        )

    def threshold(self, request: Request) -> float:
        """Returns the present threshold of a request."""
        return self._states[request].threshold

    def begin_round(self, requests: Sequence[Request]) -> Callable[[Sequence[int]], StoppingFn]:
        thresholds = [self.threshold(request) for request in requests]
        self._counts = allowed = dict[Request, int]()

        def begin(counts: Sequence[int]) -> StoppingFn:
            pairs = zip(requests, counts, strict=True)
            allowed.update((request, count) for request, count in pairs if count)
            return below(thresholds)

        return begin

    def learn(self, request: Request, outcome: Outcome) -> None:
        if request not in self._counts:  # a look-up drafted, whose tokens no threshold ends
            return
        full_length = outcome.drafted >= self._counts[request]
        exit = self._states[request]
        moved = exit.after(self._rule, outcome.drafted, outcome.accepted, full_length)
        self._states[request] = moved


@dataclass(frozen=True, kw_only=True)
class RiskOptions(Options):
    """What a user may set."""

    threshold: Annotated[float, Ge(0), Le(1)] = 0.7
    """The chance of any rejection so far above which nothing more is drafted."""


class Risk(StoppingPolicy):
    """Ends a chain once the chance that any of its tokens is rejected is above ``threshold``.

    A token's chance of acceptance is that of earlier tokens of like confidence, the probability in
    the drafter's distribution. The token that passes the threshold stays in the draft. All requests
    learn together, except sampled ones with a seed of their own.

    Huang et al. 2024, "SpecDec++" (arXiv 2405.19715), where a trained head predicts acceptance
    (`StopHead` uses one). Here it is learned from the rounds that are run.
    """

    name: ClassVar[str] = "risk"
    default_count: ClassVar[int] = 20
    Options: ClassVar[type[Any]] = RiskOptions

    def __init__(self, count: int, options: Any) -> None:
        super().__init__(count, options)
        first = Calibration()
        self._known = PerRequest(lambda request: first, lasting=True, common=first)
        self._confidences = Confidences(())

    def check_drafter(self, drafter: Drafter) -> None:
        if drafter.capabilities.joins_drafts:
            raise ConfigError(
                f"length='risk' learns from whole chains of one drafter, and method="
                f"{drafter.name!r} has several draft for a row at once: choose another length."
            )

    def calibration(self, request: Request) -> Calibration:
        """Returns what is known for a request."""
        return self._known[request]

    def begin_round(self, requests: Sequence[Request]) -> Callable[[Sequence[int]], StoppingFn]:
        self._confidences = of_round = Confidences(requests)
        chances = [self.calibration(request).chances() for request in requests]

        def risky(joint_acceptance: Tensor) -> Tensor:
            return torch.gt(1 - joint_acceptance, self.options.threshold)

        return lambda counts: of_round.watch(counts, chances, risky)

    def learn(self, request: Request, outcome: Outcome) -> None:
        ranges = self._confidences.ranges(request, outcome.depth)
        if ranges is not None:
            known = self.calibration(request).with_draft(ranges, outcome.accepted)
            self._known[request] = known


def _head(name: str, value: Any) -> Classifier:
    if isinstance(value, (str, os.PathLike)):
        return load_classifier(value, "stop_head")
    if not isinstance(value, Classifier):
        raise ConfigError(
            f"{name} must be the folder that 'outpace train stop_head' wrote for this draft model, "
            f"not {shown(value)}."
        )
    return value


@dataclass(frozen=True, kw_only=True)
class StopHeadOptions(Options):
    """What a user may set."""

    head: Annotated[Any, Reads(_head)]
    """The folder that 'outpace train stop_head' wrote."""
    threshold: Annotated[float, Ge(0), Le(1)] = 0.7
    """The chance of any rejection so far above which nothing more is drafted."""


class StopHead(LengthPolicy):
    """Ends a chain once the chance that any of its tokens is rejected is above ``threshold``.

    A token's chance of acceptance comes from the paper's acceptance prediction head
    (`AcceptancePredictionHead`), which reads the draft model's hidden state at the token. That is
    done before the next token is drawn, and all tokens that were drawn stay in the draft.

    Huang et al. 2024, "SpecDec++: boosting speculative decoding via adaptive candidate lengths"
    (arXiv 2405.19715).
    """

    name: ClassVar[str] = "stop_head"
    can_stop_early: ClassVar[bool] = True
    default_count: ClassVar[int] = 20
    Options: ClassVar[type[Any]] = StopHeadOptions

    def __init__(self, count: int, options: Any) -> None:
        super().__init__(count, options)
        self._head: Classifier = options.head

    def check_drafter(self, drafter: Drafter) -> None:
        model = drafter.model_signature()
        if model is None:
            raise ConfigError(
                f"length='stop_head' looks at the hidden states of a draft model, and "
                f"method={drafter.name!r} shows none: use 'draft_model' with a model that has the "
                "target's tokenizer and does not learn online, or another length."
            )
        self._head.model_signature.check(model, "the stop head")
        if drafter.loaded is not None:
            self._head = self._head.to(drafter.loaded.device)

    def budgets(self, requests: Sequence[Request]) -> list[int]:
        return [self.count] * len(requests)

    def terms(self, requests: Sequence[Request], terms: DraftingTerms) -> DraftingTerms:
        return replace(terms, continue_on_hidden=self._watching())

    def _watching(self) -> Callable[[Tensor], Tensor]:
        """What decides in one round, from the states of one token after another."""
        least = 1 - self.options.threshold
        joint_acceptance: Tensor | None = None  # [B], the chance that nothing was rejected

        @torch.no_grad()
        def continue_on_hidden(states: Tensor) -> Tensor:
            nonlocal joint_acceptance
            if joint_acceptance is None:  # at the root, which is no part of the draft
                joint_acceptance = torch.ones_like(states[:, 0], dtype=torch.float64)
            else:
                joint_acceptance = joint_acceptance * self._head(states.float()).double().sigmoid()
            return torch.ge(joint_acceptance, least)

        return continue_on_hidden
