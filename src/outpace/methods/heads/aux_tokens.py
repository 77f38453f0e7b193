"""Base of heads that are no network of their own, but columns in the target's pass.

After the root and after each drafted node a few columns ride, which nothing else sees. What the
target says at those after the node where a round ends are the guesses of the next round. So a
guess costs columns of a pass that is made anyway, and hardly any weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from outpace.core.proposal import AuxTokens, Capabilities, Proposal
from outpace.core.request import PerRequest
from outpace.core.transfer import to_device
from outpace.draft.base import Drafter, Round, Rows, Setup
from outpace.heads.base import Head
from outpace.methods.heads.base import HeadDrafter, ParallelDraftSteps
from outpace.targets.base import Target
from outpace.train.recipe import AuxTarget, DepthLosses, LossOutput, Recipe, joined
from outpace.train.teacher import TeacherBatch

# -- the network -----------------------------------------------------------------------------------


class AuxHead(Head):
    """Guesses by columns of its own in the target's pass, ``config.depths`` after each node.

    The column of depth d stands d positions after its node, where the d-th next token will stand,
    and the target says there what comes after it: at the node's own root that is the guess at
    depth d. It has not seen the tokens in between.
    """

    learns_online: ClassVar[bool] = False

    @classmethod
    def recipe(cls) -> type[Recipe]:
        return AuxRecipe

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """None: it reads no states that were there before the pass."""
        return ()

    @property
    def entry_layer(self) -> int:
        """The target's layer at which the columns join."""
        return 0

    @abstractmethod
    def columns(self, states: Tensor) -> Tensor:
        """Returns what the columns join with, ``[B, P, depths, H]``.

        states: ``[B, P, H]``, what the layer is given of the P nodes that they stand after; of no
        meaning where they join at the first layer.
        """

    def aux_tokens(self, after: Tensor, first: int, rows: int) -> AuxTokens:
        """Returns the columns after P nodes, the same in all rows.

        after: ``[P]``, their numbers (0 is the root). first: the number of the first column.
        """
        places, depths = len(after), self.config.depths
        number = first + torch.arange(places * depths, device=after.device).view(places, depths)
        parents = torch.cat([after[:, None], number[:, :-1]], 1)
        parents = parents.flatten().expand(rows, -1)
        if self.entry_layer:
            return AuxTokens(
                parents,
                entry_layer=self.entry_layer,
                made=lambda states: self.columns(states[:, after]).flatten(1, 2),
            )
        nowhere = torch.empty(rows, places, 0, device=after.device)
        return AuxTokens(parents, embeddings=self.columns(nowhere).flatten(1, 2))


# -- how it is trained -----------------------------------------------------------------------------


PLACES = 64
"""Places of a block after which columns ride, at most: each brings ``depths`` columns, and
gradients go through all that the target computes of them."""


class AuxRecipe(Recipe):
    """The loss of an `AuxHead`: copies of its columns ride after places all over the text.

    While it is measured, they ride after all places but the first, some at a time.
    """

    def __init__(self, head: AuxHead, target: AuxTarget) -> None:
        self._head, self._target = head, target

    def compute_loss(self, batch: TeacherBatch) -> LossOutput:
        count = batch.tokens.shape[1] - self._head.config.depths
        at = torch.arange(count, device=batch.tokens.device)
        if torch.is_grad_enabled():
            return self._after(batch, at[:: -(-count // PLACES)])
        # Nothing rides before the first round of a text, which is a plain one.
        first = min(1, count - 1)
        drafted = torch.split(at[first:], PLACES)
        output = joined([self._after(batch, places) for places in drafted])
        return replace(output, first=first)

    def _after(self, batch: TeacherBatch, places: Tensor) -> LossOutput:
        """The loss of columns after these places ``[P]``."""
        depths, (rows, length) = self._head.config.depths, batch.tokens.shape
        aux_tokens = self._head.aux_tokens(places, length, rows)
        said = self._target.forward_aux(batch.tokens, aux_tokens)[..., self._head.d2t]
        said = said.view(rows, len(places), depths, -1)  # [B, P, depths, V']
        losses = DepthLosses(self._head, batch, places)
        for depth in range(depths):
            losses.add(said[:, :, depth])
        return losses.output()


# -- how it drafts ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Guesses:
    """What the target said at a text's columns."""

    end: int
    """The length of the text that they follow."""
    logits: Tensor  # [depths, V], those after the root first


class AuxHeadDrafter(HeadDrafter):
    """Drafts what the target said at a head's columns in the round before.

    Columns ride after the root and after every drafted node, so that wherever the round ends,
    there are guesses after its end. They hold for the next round only. The first round of a text
    has none: it is a plain one in which columns ride, and so is the round after one without
    drafts.

    A text that has to follow from its own history alone must get the same drafts if its batch was
    interrupted. Then, and only then, the columns are computed anew in a pass of their own.
    """

    aux_per_node: int = 1  # at least: as many as the head has depths
    capabilities: Capabilities = replace(HeadDrafter.capabilities, uses_aux_tokens=True)

    def __init__(self, head: Head, target: Target, vocabulary: int) -> None:
        super().__init__(head, target, vocabulary)
        self.head = cast(AuxHead, self._head)
        self.aux_per_node = self.max_draft_tokens = head.config.depths
        self.pass_bytes = 0  # there is no pass but the target's
        self._guesses: PerRequest[_Guesses | None] = PerRequest(lambda request: None, lasting=True)
        self._rode: PerRequest[int | None] = PerRequest(lambda request: None, lasting=True)
        """The length of a text in whose latest round columns rode, until the round is observed. A
        text that is longer and still has one has lost its guesses to an interruption."""

    @classmethod
    def build(cls, setup: Setup) -> Drafter:
        """Tries a pass with columns; ``UnsupportedModel`` for a target that carries none."""
        made = super().build(setup)
        assert isinstance(made, AuxHeadDrafter)
        made.try_out()
        return made

    def try_out(self) -> None:
        """Lets columns ride after a text of one token."""
        at = torch.zeros(1, dtype=torch.long, device=self._target.device)
        with torch.inference_mode():
            self._target.forward_aux([0], self.head.aux_tokens(at, 1, 1))

    @property
    def max_depth(self) -> int:
        return self.head.config.depths

    def can_draft(self, rows: Rows, row: int) -> bool:
        return self._found(rows, row) is not None

    def _found(self, rows: Rows, row: int) -> Tensor | None:
        """The guesses ``[depths, V]`` that follow a row's text, if there are any."""
        guesses = self._guesses[rows.requests[row]]
        return guesses.logits if guesses and guesses.end == rows.lengths[row] else None

    def draft_steps(self, rows: Rows) -> ParallelDraftSteps:
        found = [self._found(rows, row) for row in range(len(rows))]
        blank = torch.zeros_like(next(each for each in found if each is not None))
        return ParallelDraftSteps(torch.stack([blank if each is None else each for each in found]))

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        for row, (request, budget) in enumerate(zip(rows.requests, budgets, strict=True)):
            rode = self._rode[request]
            if budget and rode is not None and rode < rows.lengths[row]:
                self._recover(rows, row)
        proposal = super().propose(rows, budgets)
        if not any(budgets):
            return proposal
        riding = rows.state[self] = [budget > 0 for budget in budgets]
        for row, request in enumerate(rows.requests):
            self._rode[request] = rows.lengths[row] if riding[row] else None
        nodes = torch.arange(1 + proposal.tree.size, device=rows.seeds.device)
        with torch.inference_mode():
            aux_tokens = self.head.aux_tokens(nodes, len(nodes), len(rows))
        return replace(proposal, aux_tokens=aux_tokens)

    def observe(self, round: Round) -> None:
        riding = round.rows.state.get(self, ())
        aux_tokens, said = round.proposal.aux_tokens, round.aux_logits
        new: list[_Guesses | None] = [None] * len(round.rows)
        if said is not None and aux_tokens is not None and any(riding):
            new = self._new_guesses(round, said, riding)
        for request, guesses in zip(round.requests, new, strict=True):
            self._guesses[request] = guesses
            self._rode[request] = None

    def _new_guesses(
        self, round: Round, said: Tensor, riding: Sequence[bool]
    ) -> list[_Guesses | None]:
        """What the target said ``[B, M depths, V]`` after the node where the round ended."""
        said = said.view(len(said), 1 + round.proposal.tree.size, -1, said.shape[-1])
        row = torch.arange(len(said), device=said.device)
        guesses = self._of_head(said[row, to_device(list(round.verdict.nodes), said.device)])
        ends = [
            round.rows.lengths[number] + len(outcome.path) + 1
            for number, outcome in enumerate(round.outcomes)
        ]
        return [
            _Guesses(ends[number], guesses[number]) if rides else None
            for number, rides in enumerate(riding)
        ]

    def _of_head(self, logits: Tensor) -> Tensor:
        """The target's logits ``[..., V]`` as far as the head's own tokens go."""
        known = self.head.d2t
        own = logits[..., known] if len(known) < logits.shape[-1] else logits
        return self._vocab_mapping.to_target_logits(own)

    def _recover(self, rows: Rows, row: int) -> None:
        """Makes the guesses of a row that were lost, where its text asks for it."""
        request = rows.requests[row]
        self._rode[request] = None
        if not request.reproducible:
            return
        before = rows.since(row, 0)[:-1]
        last = to_device([len(before) - 1], rows.seeds.device)
        with torch.inference_mode():
            aux_tokens = self.head.aux_tokens(last, len(before), 1)
        logits = self._of_head(self._target.forward_aux(before, aux_tokens))
        self._guesses[request] = _Guesses(rows.lengths[row], logits)
