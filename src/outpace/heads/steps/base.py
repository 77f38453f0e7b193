"""What heads that go on from the target's last hidden state have in common.

Such a head starts from a single state, the one from which the target drew the root. It may have a
decoder layer of its own between the two, the prefix layer, which attends over the whole text: what
the target's last state says about the next token is then made into what the head needs to know of
the tokens behind it (the prefix attention of Hydra++, the augmenting block of Clover).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from outpace.heads.attending.base import Sight
from outpace.heads.base import Head, HeadConfig, Shared, TargetShape
from outpace.heads.layers import DecoderLayer, LayerConfig


@dataclass(frozen=True, kw_only=True)
class PrefixConfig(HeadConfig):
    """What a head with a prefix layer is built from."""

    prefix: bool = False
    """Whether a decoder layer over the whole text makes the state that the guesses start from."""


class StateHead(Head):
    """Guesses from the target's last hidden state of one place."""

    def __init__(self, target: TargetShape, config: HeadConfig) -> None:
        super().__init__(target, config)
        wanted = isinstance(config, PrefixConfig) and config.prefix
        self.prefix = DecoderLayer(target.hidden_size, LayerConfig()) if wanted else None
        """The layer between the target's states and the head, if there is one."""

    def begin_at(self, states: Tensor) -> Tensor:
        """Returns what the guesses start from at each place of texts, ``[B, T, H]``.

        states: ``[B, T, H]``, the target's, from the beginning of each text on.
        """
        if self.prefix is None:
            return states
        sight = Sight.of_texts(self.prefix.begin(len(states)), states.shape[1])
        found: Tensor = self.prefix(states, sight)[0]
        return found

    @torch.no_grad()
    def begin_from(self, shared_head: Tensor | None) -> None:
        """The prefix layer begins as the identity."""
        if self.prefix is not None:
            nn.init.zeros_(self.prefix.self_attn.o_proj.weight)
            nn.init.zeros_(self.prefix.mlp.down_proj.weight)


class StepHead(StateHead):
    """Guesses depth by depth, from a state and the tokens drafted since."""

    recipe: ClassVar[str] = "step"

    @abstractmethod
    def step(
        self, memory: Tensor, tokens: Tensor, depth: int, shared: Shared
    ) -> tuple[Tensor, Tensor]:
        """Returns the logits ``[B, W, V']`` of the tokens at a depth, and the memory there.

        memory: ``[B, W, M]``, what the step before returned for each column's path; at depth 1 the
        state ``[B, W, H]`` that the guesses start from. tokens: ``[B, W]``, the last token of each
        path, at depth 1 the root; they are the target's tokens. depth: from 1 to
        ``config.depths``.
        """
