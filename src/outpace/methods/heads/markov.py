"""Logit biases from the earlier tokens of a block: DSpark's Markov heads, and Domino's GRU."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

VANILLA, GATED, RNN, GRU = KINDS = ("vanilla", "gated", "rnn", "gru")
"""The last one is Domino's, the others are DSpark's."""


class MarkovHead(nn.Module):
    """What the tokens before say of the next one."""

    def __init__(self, size: int, tokens: int, vocabulary: int, rank: int, kind: str) -> None:
        """tokens: the target's; vocabulary: those that are guessed."""
        super().__init__()
        self.kind, self.remembered = kind, rank
        self.markov_w1 = nn.Embedding(tokens, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)
        if self.kind == GATED:
            self.gate_proj = nn.Linear(size + rank, rank)
        elif self.kind == RNN:
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    @property
    def projection(self) -> nn.Linear:
        """The matrix that makes the bias."""
        return self.markov_w2

    def forward(self, outputs: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the bias ``[..., V']`` of the tokens after these, and the memory ``[..., R]`` to
        go on with.

        outputs: ``[..., H]``, what the block says there; tokens: ``[...]`` of the target; memory:
        zeros after the root, which only the kind "rnn" changes.
        """
        before = self.markov_w1(tokens).to(outputs.dtype)
        if self.kind == GATED:
            before = before * self.gate_proj(torch.cat([outputs, before], -1)).sigmoid()
        elif self.kind == RNN:
            joined = self.joint_proj(torch.cat([memory, before, outputs], -1))
            gate, new, said = joined.chunk(3, -1)
            gate, before = gate.sigmoid(), said.tanh()
            memory = gate * memory + (1 - gate) * new.tanh()
        return self.markov_w2(before), memory


class PrefixGru(nn.Module):
    """What all tokens since the root say of the next one, by a recurrent network over the target's
    embeddings (Domino, SpecForge 2026)."""

    def __init__(
        self, size: int, vocabulary: int, rank: int, remembered: int, unbiased: int
    ) -> None:
        """unbiased: the first tokens of a block that get no bias."""
        super().__init__()
        self.remembered, self.unbiased = remembered, unbiased
        self.prefix_gru = nn.GRU(size, remembered, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(size + remembered, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, vocabulary, bias=False),
        )

    @property
    def projection(self) -> nn.Linear:
        """The matrix that makes the bias."""
        return cast(nn.Linear, self.embed_proj[2])

    def forward(
        self, depth: int, outputs: Tensor, embedded: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `MarkovHead.forward`. depth: of the tokens, 0 for the root; embedded: ``[..., H]``,
        the tokens' embeddings."""
        fed = embedded.reshape(-1, 1, embedded.shape[-1])
        _, after = self.prefix_gru(fed, memory.reshape(1, len(fed), self.remembered))
        memory = after.view(memory.shape)
        if depth < self.unbiased:
            return outputs.new_zeros(()), memory
        return self.embed_proj(torch.cat([outputs, memory], -1)), memory
