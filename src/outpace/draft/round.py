"""A round as drafters and controllers see it: the batch before it, and what came of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from outpace.core.logits_pipeline import History, LogitsPipeline, RowFault
from outpace.core.proposal import DraftingTerms, Proposal, Verdict
from outpace.core.request import Request
from outpace.core.rng import seeds_of_stream
from outpace.core.stats import Seconds
from outpace.core.transfer import to_device
from outpace.core.trees.tree_shape import TreeShape


@dataclass(frozen=True)
class DrafterChoice:
    """Who drafts in one row, and how many nodes at most; an empty name where nothing is drafted."""

    name: str = ""
    budget: int = 0


@dataclass(frozen=True)
class LookupDraft:
    """The chain that a look-up would draft in one row, and how sure it is of each token
    (`Proposal.confidence`); not sure of any where it does not say so."""

    tokens: Sequence[int] = ()
    confidence: Sequence[float] = ()


@dataclass(frozen=True, eq=False)
class Rows:
    """The batch as a drafter sees it at the start of a round.

    What is committed later in the round does not show here.
    """

    history: History
    pipeline: LogitsPipeline
    seeds: Tensor  # [B]
    terms: DraftingTerms = field(default_factory=DraftingTerms)
    """What is asked of this round's drafts."""
    shape: TreeShape | None = None
    """The tree of whose nodes each row drafts the first ones, for a drafter that leaves it open;
    see `shape_of`."""
    requests: Sequence[Request] = ()
    """The request of each row, in the order in which they joined the batch."""
    picks: Sequence[DrafterChoice] = ()
    """Who drafts how much in each row, where the controller has chosen among
    `Drafter.candidate_drafters`."""
    state: dict[Any, Any] = field(default_factory=dict)
    """What drafters keep until the round is over, each under itself. A round that comes to nothing
    and is run again has other rows."""
    lengths: Sequence[int] = field(init=False)
    """Committed tokens of each row."""

    def __post_init__(self) -> None:
        pairs = zip(self.history.prompts, self.history.outputs, strict=True)
        lengths = tuple(len(prompt) + len(output) for prompt, output in pairs)
        object.__setattr__(self, "lengths", lengths)

    @cached_property
    def positions(self) -> Tensor:
        """``[B]``: the lengths, on the device."""
        return to_device(list(self.lengths), self.seeds.device)

    @cached_property
    def all_stop_token_ids(self) -> Sequence[Collection[int]]:
        """By row, the tokens after which its text ends; empty where that is not known."""
        return [request.all_stop_token_ids for request in self.requests]

    @property
    def coupled(self) -> bool:
        """Whether tokens are drawn with the noise of the target's own."""
        return self.terms.coupled

    def __len__(self) -> int:
        return len(self.lengths)

    def shape_of(self, size: int) -> TreeShape:
        """Returns ``shape``, with a chain at its end where a row may draft more nodes: ``size``."""
        return (self.shape or TreeShape(())).extended(size)

    def seeds_of(self, random_stream: int) -> Tensor:
        """Returns the seeds ``[B]`` that a drafter in this random stream draws with."""
        return seeds_of_stream(self.seeds, random_stream)

    def since(self, row: int, start: int) -> list[int]:
        """Returns the committed tokens of a row, prompt then output, from ``start`` on."""
        prompt, output = self.history.prompts[row], self.history.outputs[row]
        end = self.lengths[row] - len(prompt)
        if start >= len(prompt):
            return list(output[start - len(prompt) : end])
        return [*prompt[start:], *output[:end]]

    def root(self, row: int) -> int:
        """Returns the last committed token of a row, after which drafts begin."""
        return self.since(row, self.lengths[row] - 1)[0]

    def history_before(self) -> History:
        """Returns the texts as they were when the round began. `history` grows as tokens are
        committed, so that in `Drafter.observe` it is longer."""
        pairs = zip(self.history.prompts, self.history.outputs, self.lengths, strict=True)
        outputs = [output[: length - len(prompt)] for prompt, output, length in pairs]
        return History(self.history.prompts, outputs)

    def is_reproducible(self, row: int) -> bool:
        """Returns whether what a row drafts must follow from its own history alone: what was
        learned from other rows must not change it (`Request.reproducible`)."""
        return bool(self.requests) and self.requests[row].reproducible

    def without_reproducible(self, budgets: Sequence[int]) -> list[int]:
        """Returns the budgets, but 0 for rows that have to be reproducible."""
        return [0 if self.is_reproducible(row) else budget for row, budget in enumerate(budgets)]


@dataclass
class Outcome:
    """What one row drafted in a round, and what came of it."""

    drafted: int  # nodes
    depth: int  # levels
    accepted: int = 0  # levels that the text took
    emitted: int = 0  # tokens that the text took, up to one that ends it
    path: Sequence[int] = ()
    """The accepted nodes, from the root down, whatever the text took of them."""
    method: str = ""
    """The name of the drafter: the child's, where one drafter stands for several."""
    tokens: Sequence[int] = ()
    """The accepted tokens and the extra one, whatever the text took of them."""
    predicted: bool = False
    """Whether the draft was from the text that was predicted for the request."""


@dataclass(frozen=True, eq=False)
class Round:
    """A round that is over, also one in which nothing was drafted: the controller, the drafter and
    all observers are shown the same one. Nothing in it may be changed."""

    rows: Rows
    """The batch as it was when the round began; its requests are as the round has left them."""
    budgets: Sequence[int]
    """How many nodes each row was allowed to draft."""
    proposal: Proposal
    verdict: Verdict
    outcomes: Sequence[Outcome]
    """What became of each row, on the host."""
    seconds: Seconds
    softmax_probs: Tensor | None = None
    """``[B, M, V]``, if asked for in `Needs`: the target's distributions before any argmax, at the
    root and at each node. Those of a round for several drafters are in `scored`."""
    aux_logits: Tensor | None = None  # [B, R, V], if the proposal had auxiliary tokens
    dead_ends: Mapping[int, Mapping[int, RowFault]] = field(default_factory=dict)
    """By row, the drafted nodes that have no distribution, each with the reason
    (`LogitsPipeline.dead_ends`)."""
    scored_as: Round | None = None
    """The round that the target scored, where this one tells a drafter what would have become of
    its own proposal, while another drafter's was scored. Only that one has distributions. Use
    `scored`."""

    @property
    def requests(self) -> Sequence[Request]:
        """The request of each row."""
        return self.rows.requests

    @property
    def scored(self) -> Round:
        """The round that the target scored: what it says of the text, whoever drafted it."""
        return self if self.scored_as is None else self.scored_as
