"""The rule protocol, and the draw that all rules share."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from outpace.core.options import read_options
from outpace.core.proposal import DraftSampling, Proposal, Verdict
from outpace.core.rng import Role, inverse_cdf, uniform, uniforms
from outpace.errors import ConfigError, IncompatibleRule
from outpace.verify.probs import (
    deepest,
    next_within,
    p_of_drafted,
    reached,
    repeated,
    select_node,
    stop_within,
)

if TYPE_CHECKING:
    from outpace.heads.classifiers import ModelSignature


@dataclass(frozen=True)
class RuleNeeds:
    """What a rule asks of the round, declared once. Most rules ask for nothing."""

    hidden_layers: tuple[int, ...] = ()
    """The layers whose hidden states are wanted at every node, numbered as in transformers: 0 is
    the embedding, -1 what the output matrix reads."""
    second_copy_prompt: str | None = None
    """Score the draft a second time: context, draft, this text, the draft again."""
    softmax_probs: bool = False
    """The distributions of greedy rows before the argmax too. Without them such a rule uses p."""
    draft_probs: bool = False
    """The drafter's distributions before any argmax, even where its tokens are deterministic. A
    drafter without distributions (prompt look-up) has none to give, and then q is 1 at the
    token."""
    continue_on_probs: Callable[[Tensor], Tensor] | None = None
    """Whether a chain goes on, from its next distribution alone: see `DraftingTerms`. Chains
    only."""


NO_NEEDS = RuleNeeds()


@dataclass(frozen=True, eq=False)
class Evidence:
    """One round's answer to `RuleNeeds`; fields that nobody asked for stay ``None``."""

    hidden_states: Tensor | None = None  # [B, M, H], the layers side by side, as asked for
    second_copy_probs: Tensor | None = None  # [B, M, V], at the nodes of the second copy
    softmax_probs: Tensor | None = None  # [B, M, V]
    draft_probs: Tensor | None = None  # [B, N, V]

    def missing(self, needs: RuleNeeds) -> str | None:
        """Returns the name of a field that the rule cannot do without and that is not here."""
        if needs.hidden_layers and self.hidden_states is None:
            return "hidden_states"
        if needs.second_copy_prompt is not None and self.second_copy_probs is None:
            return "second_copy_probs"
        return None


@dataclass(eq=False)
class _Work:
    """What `stop` and `next` of one round share; computed when the first of them asks."""

    p: Tensor
    proposal: Proposal
    found: Any = None


class Rule(ABC):
    """A verification rule.

    Subclasses state what they are and write `stop` and `next`. Both are pure, batched and ragged;
    the padding nodes of a row (beyond ``proposal.counts``) must get probability 0. What both need
    goes into `compute_shared`, and they get it from `shared`.

    A rule with options is a frozen dataclass, whose fields are the options (`core.options`). A
    rule that needs more than (p, proposal) says so in ``needs``, and its round is verified by
    ``rule.with_evidence(evidence)``.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    takes: ClassVar[frozenset[DraftSampling]]
    trees: ClassVar[bool]
    """Whether a node may have several children."""
    keeps_greedy: ClassVar[bool] = False
    """Whether greedy texts stay the target's own under a lossy rule."""
    looks_ahead: ClassVar[bool] = False
    """Whether it looks at later tokens of a draft to decide on an earlier one. Then one seed gives
    another text, of the same distribution, where drafts end at other places."""
    coupled: ClassVar[bool] = False
    """Whether the engine draws each token with noise that depends on the request's seed and the
    token's position only, and follows the draft as long as it agrees, instead of asking the
    rule."""
    evidence: ClassVar[Evidence] = Evidence()
    """What `with_evidence` has put here, in a copy of the rule."""
    _work: ClassVar[_Work | None] = None
    """What `prepared` has put here, in a copy of the rule."""

    def __post_init__(self) -> None:
        """Checks the options of a rule that has any."""
        read_options(self, ConfigError)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def needs(self) -> RuleNeeds:
        """What the rule asks of each round beyond p and the proposal."""
        return NO_NEEDS

    @abstractmethod
    def stop(self, p: Tensor, proposal: Proposal) -> Tensor:
        """Returns ``[B, M]``: the probability that the walk ends at each node. Rows sum to 1.

        p: ``[B, M, V]``, the target's distribution at the root and at each drafted node.
        """

    @abstractmethod
    def next(self, p: Tensor, proposal: Proposal, node: Tensor) -> Tensor:
        """Returns ``[B, V]``: the distribution of the extra token if the walk of each row ended at
        ``node``.

        node: ``[B]`` with 0 <= node <= counts.
        """

    def with_evidence(self, evidence: Evidence) -> Self:
        """Returns the rule for one round: itself, with what it asked for in ``needs`` at hand."""
        lacking = evidence.missing(self.needs)
        if lacking is not None:
            raise ConfigError(f"verify={self.name!r} needs evidence.{lacking} in every round.")
        return self._with("evidence", evidence)

    def compute_shared(self, p: Tensor, proposal: Proposal) -> Any:
        """Returns what `stop` and `next` both need of these distributions; most rules share
        nothing."""
        return None

    def shared(self, p: Tensor, proposal: Proposal) -> Any:
        """Returns what `compute_shared` does. In a rule that is `prepared` for this round that runs
        once, and its result is kept."""
        work = self._work
        if work is None or work.p is not p or work.proposal is not proposal:
            return self.compute_shared(p, proposal)
        if work.found is None:
            work.found = self.compute_shared(p, proposal)
        return work.found

    def prepared(self, p: Tensor, proposal: Proposal) -> Self:
        """Returns the rule for one round, in which `compute_shared` runs once at most."""
        if type(self).compute_shared is Rule.compute_shared:
            return self
        return self._with("_work", _Work(p, proposal))

    def _with(self, name: str, value: object) -> Self:
        informed = copy.copy(self)
        object.__setattr__(informed, name, value)  # options are frozen, the copy is ours
        return informed

    def check_target(self, model: Callable[[], ModelSignature]) -> None:
        """Raises ``ConfigError`` where the rule was trained for another target; most rules are not
        trained. model: says which target it is, which takes a pass."""

    def check(self, drawn: DraftSampling, tree: bool) -> None:
        """Raises ``IncompatibleRule`` unless the rule can verify such a proposal."""
        if drawn not in self.takes:
            known = ", ".join(sorted(kind.value for kind in self.takes))
            raise IncompatibleRule(
                f"verify={self.name!r} takes proposals that are {known}; this drafter's are "
                f"{drawn.value}: choose another rule or drafter."
            )
        if tree and not self.trees:
            raise IncompatibleRule(
                f"verify={self.name!r} takes chains only and this drafter proposes trees: choose "
                f"another rule (for example 'recursive') or a chain."
            )
        if tree and self.needs.continue_on_probs is not None:
            raise IncompatibleRule(
                f"verify={self.name!r} decides where a chain of drafts ends, and this drafter "
                "proposes trees, whose shape is given beforehand: choose another rule or a chain."
            )


def draw_verdict(
    rule: Rule,
    p: Tensor,
    proposal: Proposal,
    seeds: Tensor,
    positions: Tensor,
    allowed: Tensor | None = None,
) -> Verdict:
    """Returns the verdict: one uniform picks the node to stop at, another the next token.

    seeds, positions: ``[B]``, the keys of each row's streams for this round. allowed:
    ``[B, M, V]``, for a lossy rule: the tokens that a request's options leave, above 0. The walk
    ends before a drafted token that they do not leave, and no other is drawn.
    """
    if rule.lossless and not proposal.tree.size:  # plain decoding
        u = uniform(seeds, positions, Role.NEXT, 1)[:, 0]  # [B]
        return Verdict(torch.zeros_like(positions), inverse_cdf(p[:, 0], u))
    u = uniforms(seeds, positions, (Role.STOP, Role.NEXT), 1)[..., 0]  # [B, 2]
    rule = rule.prepared(p, proposal)
    stop = rule.stop(p, proposal)
    if allowed is not None:
        stop = stop_within(stop, p_of_drafted(allowed, proposal) > 0, proposal.tree)
    node = inverse_cdf(stop, u[:, 0])
    following = rule.next(p, proposal, node)
    if allowed is not None:
        following = next_within(following, select_node(allowed, node))
    return Verdict(node, inverse_cdf(following, u[:, 1]))


def accept_matching(target_tokens: Tensor, proposal: Proposal) -> Verdict:
    """Returns the verdict when each node's next token is already known: follow it while drafted.

    The deterministic case of every lossless rule: greedy decoding (``target_tokens`` is the argmax)
    and the coupled rule (``target_tokens`` is drawn with keyed noise). target_tokens: ``[B, M]``.
    """
    if not proposal.tree.size:  # plain decoding
        return Verdict(torch.zeros_like(target_tokens[:, 0]), target_tokens[:, 0])
    tree, rows = proposal.tree, torch.arange(target_tokens.shape[0], device=target_tokens.device)
    parent_choice = target_tokens.gather(1, tree.parents)
    hit = (parent_choice == proposal.tokens) & proposal.valid
    if tree.is_chain:
        node = hit.long().cumprod(1).sum(1)
    else:  # of equal siblings the eldest is followed
        node = deepest(reached(hit & ~repeated(hit, tree), tree), tree)
    return Verdict(node, target_tokens[rows, node])
