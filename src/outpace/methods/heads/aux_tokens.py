"""What heads that are no network of their own, but columns in the target's pass, have in common.

After the root and after each drafted node a few columns ride, which nothing else sees. What the
target says at those after the node where a round ends are the guesses of the next round. So a
guess costs columns of a pass that is made anyway, and hardly any weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from outpace.core.proposal import AuxTokens, Proposal
from outpace.core.transfer import to_device
from outpace.draft.base import Drafter, Round, RowInfo, Rows, Setup
from outpace.draft.remembered import KEPT
from outpace.heads.base import Head
from outpace.methods.heads.base import ByDepth, HeadDrafter
from outpace.targets.base import Target
from outpace.train.recipe import AuxShared, DepthLosses, LossOutput, Recipe, joined
from outpace.train.teacher import Batch

# -- the network -----------------------------------------------------------------------------------


class AuxHead(Head):
    """Guesses by columns of its own in the target's pass, ``config.depths`` after each node.

    The column of depth d stands d positions after its node, where the d-th next token will stand,
    and the target says there what comes after it: at the node's own root that is the guess at
    depth d. It has not seen the tokens in between.
    """

    learns_online: ClassVar[bool] = False
    recipe: ClassVar[str] = "aux"

    @property
    def layers(self) -> tuple[int, ...]:
        """None: it reads no states that were there before the pass."""
        return ()

    @property
    def enter(self) -> int:
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
        if self.enter:
            return AuxTokens(
                parents,
                enter=self.enter,
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

    def __init__(self, head: AuxHead, target: AuxShared) -> None:
        self._head, self._target = head, target

    def compute_loss(self, batch: Batch) -> LossOutput:
        count = batch.tokens.shape[1] - self._head.config.depths
        at = torch.arange(count, device=batch.tokens.device)
        if torch.is_grad_enabled():
            return self._after(batch, at[:: -(-count // PLACES)])
        # Nothing rides before the first round of a text, which is a plain one.
        first = min(1, count - 1)
        drafted = torch.split(at[first:], PLACES)
        output = joined([self._after(batch, places) for places in drafted])
        return replace(output, first=first)

    def _after(self, batch: Batch, places: Tensor) -> LossOutput:
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


@dataclass
class _Text:
    """What is known of a row."""

    id: int
    end: int
    """The length of the text that the guesses follow."""
    guesses: Tensor | None = None  # [depths, V], logits, those after the root first
    missing: bool = False
    """Whether there were guesses, which were lost when the text left the batch."""


class _Lost:
    """Which texts outside the batch had guesses, by their ids: leaving it has cost these."""

    def __init__(self) -> None:
        self._had_guesses: dict[int, int] = {}  # the length of the text that had guesses
        self._boarded: dict[int, int] = {}  # the length in whose round columns rode

    def enter(self, texts: Sequence[_Text], boarded: Mapping[int, int]) -> None:
        """Learns of texts that leave, and of those with columns in a round that may not have
        ended."""
        known = (text for text in texts if text.missing or text.guesses is not None)
        self._had_guesses |= {text.id: text.end for text in known}
        self._boarded |= boarded
        for lost in (
            self._had_guesses,
            self._boarded,
        ):  # some of them have ended, and do not come again
            for oldest in list(lost)[: max(0, len(lost) - KEPT)]:
                del lost[oldest]

    def has(self, info: RowInfo) -> bool:
        """Returns whether a text that joins again would have guesses; forgets it."""
        length = len(info.prompt)
        # The round has ended for a text if tokens were appended to it.
        ended = self._boarded.pop(info.id, length) < length
        return self._had_guesses.pop(info.id, None) == length or ended


class AuxHeadDrafter(HeadDrafter):
    """Drafts what the target said at a head's columns in the round before.

    Columns ride after the root and after every drafted node, so that wherever the round ends,
    there are guesses after its end. They hold for the next round only. The first round of a text
    has none: it is a plain one in which columns ride, and so is the round after one without
    drafts.

    A text that has to follow from its own history alone must get the same drafts if its batch was
    interrupted or it was put aside. Then, and only then, the columns are computed anew in a pass of
    their own.
    """

    aux_per_node: int = 1  # at least: as many as the head has depths
    rides: bool = True

    def __init__(self, head: Head, target: Target, vocabulary: int) -> None:
        super().__init__(head, target, vocabulary)
        self.head = cast(AuxHead, self._head)
        self.aux_per_node = self.longest = head.config.depths
        self.pass_bytes = 0  # there is no pass but the target's
        self._texts: list[_Text] = []
        self._lost = _Lost()
        self._boarded: dict[int, int] = {}  # in the present round: the lengths of texts, by id
        self._riding: list[bool] = []  # by row, whether its columns are part of the present round

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
    def deepest(self) -> int:
        return self.head.config.depths

    def admit(self, rows: Sequence[RowInfo]) -> None:
        for info in rows:
            missing = self._lost.has(info)
            self._texts.append(_Text(info.id, len(info.prompt), missing=missing))

    def retain(self, rows: Sequence[int]) -> None:
        staying = set(rows)
        self._lost.enter([text for n, text in enumerate(self._texts) if n not in staying], {})
        self._texts = [self._texts[row] for row in rows]

    def reset(self) -> None:
        self._lost.enter(self._texts, self._boarded)
        self._texts, self._riding, self._boarded = [], [], {}

    def rewind(self, rows: Rows) -> None:
        self._riding, self._boarded = [], {}

    def knows(self, row: int) -> bool:
        return self._texts[row].guesses is not None

    def walk(self, rows: Rows) -> ByDepth:
        found = [text.guesses for text in self._texts[: len(rows)]]
        blank = torch.zeros_like(next(each for each in found if each is not None))
        return ByDepth(torch.stack([blank if each is None else each for each in found]))

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        for row, budget in enumerate(budgets):
            if budget and self._texts[row].missing:
                self._recover(rows, row)
        proposal = super().propose(rows, budgets)
        if not any(budgets):
            return proposal
        self._riding = [budget > 0 for budget in budgets]
        self._boarded = {
            self._texts[row].id: rows.length(row) for row, rides in enumerate(self._riding) if rides
        }
        nodes = torch.arange(1 + proposal.tree.size, device=rows.seeds.device)
        with torch.inference_mode():
            aux_tokens = self.head.aux_tokens(nodes, len(nodes), len(rows))
        return replace(proposal, aux_tokens=aux_tokens)

    def observe(self, rows: Rows, round: Round) -> None:
        riding, self._riding = self._riding, []
        for text in self._texts[: len(rows)]:
            text.guesses, text.missing = None, False
        aux_tokens, said = round.proposal.aux_tokens, round.aux_logits
        if said is not None and aux_tokens is not None and any(riding):
            self._keep(rows, round, said, riding)
        self._boarded = {}

    def _keep(self, rows: Rows, round: Round, said: Tensor, riding: Sequence[bool]) -> None:
        """Keeps what the target said ``[B, M depths, V]`` after the node where the round ended."""
        tree = round.proposal.tree
        said = said.view(len(said), 1 + tree.size, -1, said.shape[-1])
        row = torch.arange(len(said), device=said.device)
        at = to_device(list(round.verdict.nodes), said.device)
        guesses = self._guesses(said[row, at])
        accepted = tree.depth[row, at].tolist()
        for number, rides in enumerate(riding):
            if rides:
                text = self._texts[number]
                text.guesses = guesses[number]
                text.end = rows.length(number) + accepted[number] + 1

    def _guesses(self, logits: Tensor) -> Tensor:
        """The target's logits ``[..., V]`` as far as the head's own tokens go."""
        known = self.head.d2t
        own = logits[..., known] if len(known) < logits.shape[-1] else logits
        return self._vocabulary.logits(own)

    def _recover(self, rows: Rows, row: int) -> None:
        """Makes the guesses of a row that were lost, where its text asks for it."""
        text = self._texts[row]
        text.missing = False
        if not rows.is_reproducible(row):
            return
        before = rows.since(row, 0)[:-1]
        last = to_device([len(before) - 1], rows.seeds.device)
        with torch.inference_mode():
            aux_tokens = self.head.aux_tokens(last, len(before), 1)
        text.guesses = self._guesses(self._target.forward_aux(before, aux_tokens))
