"""States that go on by themselves, and tokens that are put into them afterwards.

Chen et al. 2026, "Lyanna", arXiv 2602.21224: a draft's states that do not depend on its tokens
outlive a mismatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

import torch
from annotated_types import Ge
from torch import Tensor, nn

from outpace.core.proposal import Proposal
from outpace.core.request import PerRequest, Request
from outpace.draft.base import Round, Rows
from outpace.draft.vocab_mapping import VocabMapping
from outpace.heads.base import Head, HeadConfig, SharedModules, TargetShape
from outpace.heads.layers import RMSNorm
from outpace.methods.heads.base import DraftSteps, HeadOptions, SequentialDraftSteps
from outpace.methods.heads.steps import StepHead, StepHeadDrafter
from outpace.targets.base import Target
from outpace.targets.hf.loading.loaded import LoadedModel

# -- the network -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LyannaConfig(HeadConfig):
    """What such a head is built from."""

    depths: int = 6
    """Tokens after the root that it guesses."""
    blocks: int = 2
    """Residual blocks from a state to the next one."""
    inner_size: int = 0
    """Width of their feed-forward parts; 0: twice the target's."""


class Lyanna(StepHead):
    """``s_d = f(s_(d-1))``, whatever the tokens are; the guess at depth d is made of s_d and of
    what is remembered of the tokens, ``u_d = a u_(d-1) + W E[token]``.

    f is the same at all depths. So a state that was made for one place serves there whichever
    tokens come before it: with the right ones, once they are known.
    """

    kind: ClassVar[str] = "lyanna"
    Config: ClassVar[type[HeadConfig]] = LyannaConfig

    def __init__(self, target: TargetShape, config: LyannaConfig) -> None:
        super().__init__(target, config)
        size = target.hidden_size
        inner = config.inner_size or 2 * size
        self.blocks = nn.Sequential(*(StateBlock(size, inner) for _ in range(config.blocks)))
        self.token_norm = RMSNorm(size, eps=1e-6)
        self.token = nn.Linear(size, size, bias=False)
        self.kept = nn.Parameter(torch.zeros(size))  # a is its sigmoid
        self.state_norm = RMSNorm(size, eps=1e-6)
        self.joined = nn.Linear(2 * size, size)
        self.result = nn.Linear(size, size, bias=False)
        self.output = nn.Linear(size, self.vocabulary, bias=False)

    def step(
        self, memory: Tensor, tokens: Tensor, depth: int, shared: SharedModules
    ) -> tuple[Tensor, Tensor]:
        size = self.target.hidden_size
        state = self.advance(memory[..., :size])
        remembered = memory[..., size:] if depth > 1 else torch.zeros_like(state)
        remembered = self.remember(remembered, tokens, shared)
        return self.say(state, remembered), torch.cat([state, remembered], -1)

    def advance(self, states: Tensor) -> Tensor:
        """Returns the next states ``[..., H]``."""
        found: Tensor = self.blocks(states)
        return found

    def remember(self, remembered: Tensor, tokens: Tensor, shared: SharedModules) -> Tensor:
        """Returns what is remembered of tokens ``[...]``, and of those before, ``[..., H]``."""
        embedded = self.token_norm(shared.embed(tokens).to(remembered.dtype))
        found: Tensor = self.kept.sigmoid() * remembered + self.token(embedded)
        return found

    def say(self, states: Tensor, remembered: Tensor) -> Tensor:
        """Returns the logits ``[..., V']`` of the tokens after these, all ``[..., H]``."""
        both = self.joined(torch.cat([self.state_norm(states), remembered], -1))
        found: Tensor = self.output(states + self.result(nn.functional.silu(both)))
        return found

    @torch.no_grad()
    def init_from_lm_head(self, shared_head: Tensor | None) -> None:
        """Each depth begins as the target's own head on the unchanged state."""
        nn.init.zeros_(self.result.weight)
        for name, weight in self.blocks.named_parameters():
            if name.endswith("down.weight"):
                nn.init.zeros_(weight)
        if shared_head is not None:
            self.output.weight.copy_(shared_head)


class StateBlock(nn.Module):
    """A residual feed-forward part."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.norm = RMSNorm(size, eps=1e-6)
        self.up = nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: ``[..., H]`` -> the same shape."""
        found: Tensor = x + self.down(nn.functional.silu(self.up(self.norm(x))))
        return found


# -- how it drafts ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LyannaOptions(HeadOptions):
    """What a user may set."""

    reuse: Annotated[int, Ge(0)] = 0
    """Rounds in a row that may draft from the states of an earlier one, with the right tokens
    put into them; 0: each begins anew from the target's latest state."""


@dataclass(frozen=True)
class _Kept:
    """States of an earlier round that are still ahead of a row's text."""

    begin: int  # the place of that round's root in the text
    states: list[Tensor]  # [H] each; the first one guesses the token after the present root
    times: int  # rounds that have drafted from them


class LyannaDrafter(StepHeadDrafter):
    """Drafts with a `Lyanna` head.

    After a mismatch the states after it are kept, and the next draft is made from them without
    computing any, as long as they last and ``reuse`` allows it. A text that has to follow from its
    own history alone always begins anew: where rounds ended is no part of it.
    """

    name: ClassVar[str] = "lyanna"
    Options: ClassVar[type[Any]] = LyannaOptions

    def __init__(self, head: Head, target: Target, vocabulary: int) -> None:
        super().__init__(head, target, vocabulary)
        self._lyanna, self._reuse = cast(Lyanna, head), 0
        self._kept: PerRequest[_Kept | None] = PerRequest(lambda request: None)

    def apply_options(self, options: LyannaOptions) -> None:
        self._reuse = options.reuse

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        return {**super().dummy_options(loaded), "reuse": 2}

    def end(self, requests: Sequence[Request], interrupted: bool = False) -> None:
        super().end(requests, interrupted)
        self._kept.forget(requests)

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        proposal = super().propose(rows, budgets)
        if (steps := rows.state.get(self)) is not None:
            steps.drafted = proposal.tokens
        return proposal

    def draft_steps(self, rows: Rows) -> DraftSteps:
        states, roots = self.starts(rows)
        kept = [None if one.reproducible else self._kept[one] for one in rows.requests]
        remembered = torch.stack([self._remembered(rows, *each) for each in enumerate(kept)])
        steps = rows.state[self] = _LyannaDraftSteps(
            self._lyanna,
            self._target,
            self._vocab_mapping,
            states,
            remembered[:, None],
            kept,
            roots,
        )
        return steps

    @torch.inference_mode()
    def _remembered(self, rows: Rows, row: int, kept: _Kept | None) -> Tensor:
        """What the head remembers of the tokens before the root, from where its states began."""
        weight = self._lyanna.kept
        found = torch.zeros_like(weight)
        for token in rows.since(row, kept.begin)[:-1] if kept is not None else []:
            tokens = torch.tensor(token, device=weight.device)
            found = self._lyanna.remember(found, tokens, self._target)
        return found

    def observe(self, round: Round) -> None:
        before = [self._kept[request] for request in round.requests]
        for request in round.requests:
            self._kept[request] = None
        steps: _LyannaDraftSteps | None = round.rows.state.get(self)
        if steps is None or not self._reuse or round.proposal.tokens is not steps.drafted:
            return
        for row, (request, outcome) in enumerate(zip(round.requests, round.outcomes, strict=True)):
            used = before[row] if row in steps.again else None
            times = used.times + 1 if used else 0
            ahead = steps.states[len(outcome.path) + 1 :]
            if outcome.drafted and times < self._reuse and ahead:
                begin = used.begin if used else round.rows.lengths[row] - 1
                self._kept[request] = _Kept(begin, [state[row] for state in ahead], times)


class _LyannaDraftSteps(SequentialDraftSteps):
    """The steps of a head through one draft. All nodes of a depth share a row's state."""

    def __init__(
        self,
        head: Lyanna,
        shared: SharedModules,
        vocabulary: VocabMapping,
        states: Tensor,
        remembered: Tensor,
        kept: Sequence[_Kept | None],
        roots: Tensor,
    ) -> None:
        """states: ``[B, 1, H]``, the target's; remembered: ``[B, 1, H]``; roots: ``[B, 1]``."""
        super().__init__(vocabulary, roots, remembered)
        self._head, self._shared, self._state = head, shared, states[:, 0]
        self._kept = [[] if one is None else one.states for one in kept]
        self.states: list[Tensor] = []
        """``[B, H]`` each, by depth."""
        self.again = {row for row, one in enumerate(kept) if one is not None}
        """The rows that begin with kept states."""
        self.drafted: Tensor | None = None
        """``[B, N]``: the tokens that were drafted."""

    def step(self, tokens: Tensor, memory: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        self._state = self._next()
        self.states.append(self._state)
        memory = self._head.remember(memory, tokens, self._shared)
        return self._head.say(self._state[:, None].expand_as(memory), memory), memory

    def _next(self) -> Tensor:
        """The states ``[B, H]`` of the next depth: kept ones where there are any."""
        depth = len(self.states)
        known = {row: kept[depth] for row, kept in enumerate(self._kept) if len(kept) > depth}
        if len(known) == len(self._kept):
            return torch.stack(list(known.values()))
        found = self._head.advance(self._state)
        if not known:
            return found
        return torch.stack([known.get(row, found[row]) for row in range(len(found))])
