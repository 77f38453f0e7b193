"""Beam search: the groups of several prompts, side by side in the rows of one target."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.core.proposal import Proposal
from outpace.engine.beams.beam import Beam
from outpace.engine.beams.group import Group
from outpace.errors import PromptError, UnsupportedModel
from outpace.targets.base import Plan, PromptInputs, Target


@dataclass(frozen=True, eq=False)
class _Row:
    """What a row of the target holds: all tokens of a beam but the last."""

    group: Group
    beam: Beam


class BeamSearch:
    """Searches for the texts of several prompts, as many at once as the target has rows for.

    A prompt is read once, in one row. When a beam goes on in several ways, the row that it has is
    forked; what one beam alone goes on with stays where it is. The rows of a beam that nothing
    goes on from, and those of a prompt whose search is over, are free at once.
    """

    def __init__(
        self, target: Target, groups: Iterable[Group], width: int, tokens_at_once: int
    ) -> None:
        """target: nobody else uses its rows. width: rows that one prompt may need.
        tokens_at_once: about this many tokens of prompts are read before the next pass is begun."""
        self._target = target
        self._width = width
        self._tokens_at_once = tokens_at_once
        self._waiting = deque(groups)
        self._rows: list[_Row] = []

    @property
    def done(self) -> bool:
        """Whether all searches have come to their ends."""
        return not self._waiting and not self._rows

    @torch.inference_mode()
    def step(self) -> None:
        """Reads a part of the prompts that are not read yet or, if all are, goes one token further
        in all texts."""
        with self._target.computing():
            self._step()

    def _step(self) -> None:
        self._admit()
        if self._target.ready < self._target.active:
            self._target.fill(self._tokens_at_once)
        if self._rows and self._target.ready == self._target.active:
            logits, played = self._score(), self._by_group()
            for group, rows in played.items():
                group.step(logits[rows])
            self._follow(played)

    def _admit(self) -> None:
        """Lets waiting prompts in, as long as there is room for all the beams that they may get."""
        playing = len(self._by_group())
        while self._waiting and (playing + 1) * self._width <= self._target.rows:
            group = self._waiting.popleft()
            request = group.request
            inputs = PromptInputs(request.prompt_ids, source=request.source, media=request.media)
            try:
                self._target.admit(inputs)
            except (PromptError, UnsupportedModel) as error:
                group.fail(error)
                continue
            self._rows.append(_Row(group, group.beams[0]))
            playing += 1

    def _by_group(self) -> dict[Group, list[int]]:
        """The rows of each group, in the order of its beams."""
        found: dict[Group, dict[Beam, int]] = {}
        for number, row in enumerate(self._rows):
            found.setdefault(row.group, {})[row.beam] = number
        return {group: [at[beam] for beam in group.beams] for group, at in found.items()}

    def _score(self) -> Tensor:
        """The logits ``[rows, V']`` of the token after each beam."""
        lengths = self._target.lengths
        pending = [
            row.group.tokens_of(row.beam)[length:]
            for row, length in zip(self._rows, lengths, strict=True)
        ]
        nothing = Proposal.empty(len(pending), self._target.device)
        scores = self._target.score(Plan(pending, nothing.tokens, nothing.tree))
        self._target.commit([()] * len(pending))
        return scores.logits[:, -1]

    def _follow(self, played: Mapping[Group, Sequence[int]]) -> None:
        """Gives each of the new beams a row with what the beam that it continues has cached.

        played: the rows that each group had, in the order of its former beams.
        """
        heirs: dict[int, list[_Row]] = {}  # by row
        for group, rows in played.items():
            for beam in group.beams:
                heirs.setdefault(rows[beam.parent], []).append(_Row(group, beam))
        staying = sorted(heirs)
        if len(staying) < len(self._rows):
            self._target.retain(staying)
        self._rows = [heirs[row][0] for row in staying]
        for number, row in enumerate(staying):
            for heir in heirs[row][1:]:
                self._target.fork(number, whole=True)
                self._rows.append(heir)
