"""A head that guesses depth by depth from one hidden state of the target drafts chains or trees."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from outpace.core.proposal import Drawn, Needs, Proposal
from outpace.core.transfer import to_device
from outpace.core.tree import Tree
from outpace.core.tree_shape import TreeShape
from outpace.draft.base import Drafter, RowInfo, Rows, Setup
from outpace.draft.options import option
from outpace.draft.trees import TreePlans, draw_tree
from outpace.draft.vocabulary import Vocabulary
from outpace.errors import ConfigError
from outpace.heads.base import StepHead, TargetShape
from outpace.heads.checkpoint import check_fits, load_head
from outpace.heads.registry import find_head
from outpace.targets.base import Target
from outpace.targets.hf.load import Loaded

NOISE = 0.02
"""What is added to the weights of a specimen."""


@dataclass(frozen=True, kw_only=True)
class StepHeadOptions:
    """What a user may set."""

    model: Any = option(None, "The trained head: the folder that 'outpace train' wrote.")

    def __post_init__(self) -> None:
        if not isinstance(self.model, (str, os.PathLike, StepHead)):
            raise ConfigError(
                "a trained head needs 'model': the folder that 'outpace train' wrote for this "
                "target."
            )


@dataclass
class _Seen:
    """What was read of a row."""

    unread: int
    """Tokens of the prompt that are still to come, the last one apart: it is the first root."""
    latest: Tensor | None = None  # [H], the state of the root's predecessor
    of_prompt: Tensor | None = None  # [H], what this was before the first round

    def read(self, states: Tensor) -> None:
        """Takes the states ``[T, H]`` of the tokens that come next."""
        if len(states):
            self.latest = states[-1]
        self.unread -= len(states)
        if self.unread == 0:
            self.of_prompt = self.latest

    def again(self) -> _Seen:
        """Returns what is known of another row with the same prompt."""
        return _Seen(0, self.of_prompt, self.of_prompt)


class StepHeadDrafter(Drafter):
    """Drafts with a `StepHead`, whose steps cost little beside a pass of the target.

    The head starts from the state that the target drew the root from. That state comes with the
    root's predecessor (`Drafter.read`), so nothing is computed twice. A row without one, whose
    prompt is a single token, proposes nothing in its first round.

    How many nodes are drafted, and as which tree, is the controller's choice.
    """

    draws: frozenset[Drawn] = frozenset({Drawn.WITHOUT})
    trees: bool = True
    any_shape = True
    default_rule: ClassVar[str] = "recursive"
    Options: ClassVar[type[Any]] = StepHeadOptions
    copies_prompts = True

    def __init__(self, head: StepHead, target: Target, vocabulary: int) -> None:
        """vocabulary: tokens that the target can generate."""
        self.head = head.to(target.device)
        self.needs = Needs(states=head.layers)
        self._target = target
        self._vocabulary = _known(head.d2t, vocabulary)
        self._rows: list[_Seen] = []
        self._plans = TreePlans(target.device)
        parts = {name: value.nbytes for name, value in head.named_parameters()}
        self.weight_bytes = self.pass_bytes = sum(parts.values())

    @classmethod
    def build(cls, setup: Setup) -> StepHeadDrafter:
        given = setup.options.model
        head = given if isinstance(given, StepHead) else load_head(given)
        what = "the head" if isinstance(given, StepHead) else f"the head in {str(given)!r}"
        if head.kind != cls.name:
            raise ConfigError(f"{what} is of the kind {head.kind!r}: use that as the method.")
        check_fits(head, TargetShape.of(setup.loaded.config), what)
        return cls(head, setup.target, setup.loaded.vocabulary)

    @classmethod
    def specimen(cls, loaded: Loaded) -> Mapping[str, Any]:
        kind, model = find_head(cls.name), cast(Any, loaded.model)
        torch.manual_seed(0)
        head = kind(TargetShape.of(loaded.config, "a specimen"), kind.Config(depths=3))
        head = head.to(loaded.dtype).eval().requires_grad_(False)
        head.begin_from(model.get_output_embeddings().weight)
        for parameter in head.parameters():  # so that all parts of it matter
            parameter.add_(torch.randn_like(parameter), alpha=NOISE)
        return {"model": head}

    @property
    def nbytes(self) -> int:
        return self.weight_bytes

    def admit(self, rows: Sequence[RowInfo]) -> None:
        for info in rows:
            source = info.forked_from
            new = _Seen(len(info.prompt) - 1) if source is None else self._rows[source].again()
            self._rows.append(new)

    def read(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], states: Tensor) -> None:
        for place, row in enumerate(rows):
            self._rows[row].read(states[place, : len(tokens[place])])

    def retain(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        wanted = rows.shape or TreeShape.chain(max(budgets))
        shape = wanted.up_to(self.head.config.depths)
        states = [row.latest for row in self._rows[: len(rows)]]
        counts = [
            0 if state is None else min(budget, shape.size)
            for state, budget in zip(states, budgets, strict=True)
        ]
        if not any(counts):
            return Proposal.empty(len(rows), rows.seeds.device)
        plan = self._plans.of(shape.first(max(counts)))
        blank = torch.zeros_like(next(state for state in states if state is not None))
        memory = torch.stack([blank if state is None else state for state in states])
        roots = [rows.since(row, rows.length(row) - 1) for row in range(len(rows))]
        walk = _Walk(self.head, self._target, self._vocabulary, memory[:, None])
        logits = walk.step(to_device(roots, memory.device))[:, 0]
        tokens, law = draw_tree(
            plan, rows, logits, walk.deeper, lane=self.lane, with_replacement=False
        )
        return Proposal(tokens, plan.tree(len(rows)), to_device(counts, tokens.device), law)


class _Walk:
    """The steps of a head through one draft."""

    def __init__(
        self, head: StepHead, target: Target, vocabulary: Vocabulary, memory: Tensor
    ) -> None:
        """memory: ``[B, 1, H]``, the states to begin from."""
        self._head, self._target, self._vocabulary = head, target, vocabulary
        self._memory = memory.to(next(head.parameters()).dtype)
        self._depth = 0

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Returns the logits ``[B, W, V]`` behind tokens ``[B, W]`` at the depth reached."""
        self._depth += 1
        found = self._head.step(self._memory, tokens, self._depth, self._target)
        logits, self._memory = found
        return self._vocabulary.logits(logits)

    def deeper(self, fed: Tensor, tree: Tree, parents: Tensor) -> Tensor:
        """Returns the same for the last tokens that were fed; parents: which columns of the step
        before they belong to."""
        self._memory = self._memory[:, parents]
        return self.step(fed[:, -len(parents) :])


def _known(d2t: Tensor, vocabulary: int) -> Vocabulary:
    """The map of a head's own tokens, without those that are padding in the target."""
    if bool((d2t >= vocabulary).any()):
        if not torch.equal(d2t, torch.arange(len(d2t), device=d2t.device)):
            raise ConfigError("the head guesses tokens that the target's tokenizer does not have.")
        d2t = d2t[:vocabulary]
    return Vocabulary(d2t, vocabulary)
