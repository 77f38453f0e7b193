"""The rule protocol, the draw that all rules share, and the helpers that most of them need."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from outpace.core.logits.pieces import pieces
from outpace.core.options import read_options
from outpace.core.proposal import Deterministic, Drawn, Proposal, Sampled, Verdict
from outpace.core.rng import Role, inverse_cdf, uniform, uniforms
from outpace.core.trees.tree import Tree
from outpace.errors import ConfigError, IncompatibleRule

if TYPE_CHECKING:
    from outpace.heads.classifiers import Origin


@dataclass(frozen=True)
class RuleNeeds:
    """What a rule asks of the round, declared once. Most rules ask for nothing."""

    states: tuple[int, ...] = ()
    """The layers whose hidden states are wanted at every node, numbered as in transformers: 0 is
    the embedding, -1 what the output matrix reads."""
    second_pass: str | None = None
    """Score the draft a second time: context, draft, this text, the draft again."""
    soft: bool = False
    """The distributions of greedy rows before the argmax too. Without them such a rule uses p."""
    draft_probs: bool = False
    """The drafter's distributions before any argmax, even where its tokens are deterministic. A
    drafter without distributions (prompt look-up) has none to give, and then q is 1 at the
    token."""
    keeps_drafting: Callable[[Tensor], Tensor] | None = None
    """Whether a chain goes on, from its next distribution alone: see `DraftingTerms`. Chains
    only."""


NO_NEEDS = RuleNeeds()


@dataclass(frozen=True, eq=False)
class Evidence:
    """One round's answer to `RuleNeeds`; fields that nobody asked for stay ``None``."""

    states: Tensor | None = None  # [B, M, H], the layers side by side, in the order asked for
    second: Tensor | None = None  # [B, M, V], the target's at the nodes of the second copy
    soft: Tensor | None = None  # [B, M, V]
    draft: Tensor | None = None  # [B, N, V]

    def missing(self, needs: RuleNeeds) -> str | None:
        """Returns the name of a field that the rule cannot do without and that is not here."""
        if needs.states and self.states is None:
            return "states"
        return "second" if needs.second_pass is not None and self.second is None else None


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
    takes: ClassVar[frozenset[Drawn]]
    trees: ClassVar[bool]
    """Whether a node may have several children."""
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

    def check_target(self, model: Callable[[], Origin]) -> None:
        """Raises ``ConfigError`` where the rule was trained for another target; most rules are not
        trained. model: says which target it is, which takes a pass."""

    def check(self, drawn: Drawn, tree: bool) -> None:
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
        if tree and self.needs.keeps_drafting is not None:
            raise IncompatibleRule(
                f"verify={self.name!r} decides where a chain of drafts ends, and this drafter "
                "proposes trees, whose shape is given beforehand: choose another rule or a chain."
            )


def draw(rule: Rule, p: Tensor, proposal: Proposal, seeds: Tensor, positions: Tensor) -> Verdict:
    """Returns the verdict: one uniform picks the node to stop at, another the next token.

    seeds, positions: ``[B]``, the keys of each row's streams for this round.
    """
    if rule.lossless and not proposal.tree.size:  # plain decoding
        u = uniform(seeds, positions, Role.NEXT, 1)[:, 0]  # [B]
        return Verdict(torch.zeros_like(positions), inverse_cdf(p[:, 0], u))
    u = uniforms(seeds, positions, (Role.STOP, Role.NEXT), 1)[..., 0]  # [B, 2]
    rule = rule.prepared(p, proposal)
    node = inverse_cdf(rule.stop(p, proposal), u[:, 0])
    token = inverse_cdf(rule.next(p, proposal, node), u[:, 1])
    return Verdict(node, token)


def walk(realised: Tensor, proposal: Proposal) -> Verdict:
    """Returns the verdict when each node's next token is already known: follow it while drafted.

    The deterministic case of every lossless rule: greedy decoding (``realised`` is the argmax) and
    the coupled rule (``realised`` is drawn with keyed noise). realised: ``[B, M]``.
    """
    if not proposal.tree.size:  # plain decoding
        return Verdict(torch.zeros_like(realised[:, 0]), realised[:, 0])
    tree, rows = proposal.tree, torch.arange(realised.shape[0], device=realised.device)
    parent_choice = realised.gather(1, tree.parents)
    hit = (parent_choice == proposal.tokens) & proposal.valid
    if tree.is_chain:
        node = hit.long().cumprod(1).sum(1)
    else:  # of equal siblings the eldest is followed
        node = deepest(reached(hit & ~repeated(hit, tree), tree), tree)
    return Verdict(node, realised[rows, node])


def repeated(chosen: Tensor, tree: Tree) -> Tensor:
    """``[B, N]`` bool: chosen nodes that have a chosen elder sibling."""
    return (tree.elder & chosen[:, None, :]).any(-1) & chosen


# -- helpers for stop and next -----------------------------------------------------------------


def reached(passes: Tensor, tree: Tree) -> Tensor:
    """Returns ``[B, M]`` bool: the nodes whose whole path passes; the root always does.

    passes: ``[B, N]`` bool, of each drafted node by itself.
    """
    every = torch.cat([torch.ones_like(passes[:, :1]), passes], 1)
    return (every[:, None, :] | ~tree.ancestors).all(-1)


def deepest(among: Tensor, tree: Tree) -> Tensor:
    """Returns ``[B]``: the deepest of some nodes, of equally deep ones the first.

    among: ``[B, M]`` bool, with the root.
    """
    return torch.where(among, tree.depth, -1).argmax(1)


def target_probs(p: Tensor, node: Tensor) -> Tensor:
    """Returns ``[B, V]``: the target's own distribution at each row's node, for rules that draw the
    extra token from it.

    p: ``[B, M, V]``; node: ``[B]``.
    """
    here = rows_of(p, node)
    return normalised(here, fallback=here)


def at_drafted(p: Tensor, proposal: Proposal) -> Tensor:
    """Returns ``[B, N]`` float64: what the target gives each drafted token, at its parent.

    p: ``[B, M, V]``. Only the drafted tokens' own numbers are read, so that no distribution is
    copied.
    """
    if proposal.tree.is_chain:
        return of_token(p[:, :-1], proposal.tokens).double()
    rows = torch.arange(p.shape[0], device=p.device)[:, None]
    return p[rows, proposal.tree.parents, proposal.tokens].double()


def in_pieces(of: Callable[..., Tensor], probs: Tensor, *others: Tensor) -> Tensor:
    """Returns ``of(probs, *others)``, computed for a few nodes at a time.

    What ``of`` holds in between then stays small, however many nodes there are.

    of: takes parts of all arguments and returns ``[B, n]`` for n nodes; probs: ``[B, N, V]``;
    others: ``[B, N, ...]`` each.
    """
    rows, nodes, vocabulary = probs.shape
    given = (probs, *others)
    parts = list(pieces(nodes, rows * vocabulary, probs.device))
    if len(parts) <= 1:
        return of(*given)
    return torch.cat([of(*(each[:, part] for each in given)) for part in parts], 1)


def of_token(probs: Tensor, tokens: Tensor) -> Tensor:
    """Returns ``[B, N]``: each drafted token's probability in its row of ``probs`` [B, N, V]."""
    return probs.gather(-1, tokens[..., None])[..., 0]


def drafted_mass(proposal: Proposal, dtype: torch.dtype) -> Tensor:
    """Returns ``[B, N]``: the chance that each token had to be drafted, 1 if deterministic."""
    if isinstance(proposal.distribution, Deterministic):
        return torch.ones_like(proposal.tokens, dtype=dtype)
    return of_token(proposal.distribution.q, proposal.tokens).to(dtype)


def ratio(p: Tensor, q: Tensor) -> Tensor:
    """Returns min(1, p / q), and 0 for 0 / 0: a token that neither model can produce."""
    return (p / q).nan_to_num(nan=0.0).clamp(max=1)


def rows_of(probs: Tensor, node: Tensor) -> Tensor:
    """Returns ``[B, ...]``: each row's entry at its node. probs: ``[B, M, ...]``, node: ``[B]``."""
    return probs[torch.arange(node.shape[0], device=node.device), node]


def normalised(mass: Tensor, fallback: Tensor) -> Tensor:
    """Returns ``mass`` clamped at 0 and divided by its sum; ``fallback`` where nothing is left.

    An empty residual means that p and q agree up to rounding, and then p itself is the distribution
    to use.
    """
    mass = mass.clamp(min=0)
    total = mass.sum(-1, keepdim=True)
    some = total > 0
    return torch.where(some, mass.div_(total.where(some, 1.0)), fallback)


def proposed_at(proposal: Proposal, index: Tensor, like: Tensor) -> Tensor:
    """Returns ``[B, V]``: the distribution that one drafted token of each row was drawn from.

    It is one-hot where the tokens are deterministic.

    index: ``[B]``, which token it is in each row (its node - 1); like: ``[B, V]``, any tensor of
    the dtype that the distribution is wanted in.
    """
    if isinstance(proposal.distribution, Sampled):
        return rows_of(proposal.distribution.q, index).to(like.dtype)
    return torch.zeros_like(like).scatter_(1, rows_of(proposal.tokens, index)[:, None], 1.0)


def first_failure(accept: Tensor, proposal: Proposal) -> Tensor:
    """Returns ``[B, M]``, the distribution of where a chain stops when its tokens pass one after
    another.

    accept: ``[B, N]``, the probability that each token passes, given that those before it did.
    """
    accept = torch.where(proposal.valid, accept, torch.zeros_like(accept))
    one = accept.new_ones(accept.shape[0], 1)
    reach = torch.cat([one, accept.cumprod(1)], 1)
    fail = torch.cat([1 - accept, one], 1)
    return reach * fail


def stop_at(node: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Returns ``[B, size]``: the distribution of a walk that is sure to end at ``node``."""
    one_hot: Tensor = torch.nn.functional.one_hot(node, size)
    return one_hot.to(dtype)
