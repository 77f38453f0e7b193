"""A small discrete diffusion model that drafts a block of tokens in a few passes of its own.

Christopher et al. 2024, "Speculative Diffusion Decoding" (SpecDiff), arXiv 2408.05636, with masked
diffusion (Sahoo et al. 2024, arXiv 2406.07524).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from outpace.heads.base import Head, HeadConfig, TargetShape
from outpace.heads.layers import most_heads


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig(HeadConfig):
    """What a diffusion drafter is built from."""

    depths: int = 6
    """Tokens of a block."""
    passes: int = 2
    """Passes in which a block is made; the surest tokens are settled between them."""
    context: int = 32
    """Tokens before the block that it reads."""
    width: int = 192
    """The width of its embeddings and layers."""
    blocks: int = 2
    """Transformer layers."""


@dataclass(frozen=True, eq=False)
class Denoised:
    """A block after a pass."""

    logits: Tensor  # [B, D, V']; at a settled token, the logits by which it was settled
    settled: Tensor  # [B, D], the head's own tokens; -1 where nothing is settled


class Diffusion(Head):
    """A transformer that sees the end of a text and a block behind it, in both directions.

    At first all tokens of the block are masked. After each pass but the last the surest ones are
    settled, and the next pass sees them. It reads tokens only, and nothing of the target.
    """

    kind: ClassVar[str] = "diffusion"
    recipe: ClassVar[str] = "diffusion"
    Config: ClassVar[type[HeadConfig]] = DiffusionConfig
    learns_online: ClassVar[bool] = False

    def __init__(self, target: TargetShape, config: DiffusionConfig) -> None:
        super().__init__(target, config)
        if not 1 <= config.passes <= config.depths or not config.context:
            raise ValueError(
                f"passes is {config.passes} and context {config.context}: there is one pass at "
                f"least, one for each of {config.depths} tokens at most, and a context"
            )
        width = config.width
        self.passes, self.context, self.mask = config.passes, config.context, target.vocab_size
        self.embedding = nn.Embedding(target.vocab_size + 1, width)
        self.places = nn.Parameter(torch.empty(config.context + config.depths, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, most_heads(width), 4 * width, dropout=0.0, activation="gelu",
                batch_first=True, norm_first=True,
            )
            for _ in range(config.blocks)
        )  # fmt: skip
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, self.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.places, std=0.02)

    @property
    def layers(self) -> tuple[int, ...]:
        """None: it reads tokens."""
        return ()

    def window(self, tokens: Tensor) -> Tensor:
        """Returns the last ``context`` of tokens ``[B, T]``; masks stand before a shorter text."""
        return pad(tokens, (self.context, 0), value=self.mask)[:, -self.context :]

    def denoise(self, windows: Tensor, known: int | None = None) -> list[Denoised]:
        """Returns blocks behind windows ``[B, context]`` after each pass.

        known: only the first n of the head's own tokens are settled; others are padding.
        """
        depths, found = self.config.depths, list[Denoised]()
        settled = windows.new_full((len(windows), depths), -1)
        kept: Tensor | None = None
        for number in range(1, self.passes + 1):
            logits = self._read(windows, settled)
            if kept is not None:
                logits = torch.where((settled >= 0)[..., None], kept, logits)
            found.append(Denoised(logits, settled))
            if number < self.passes:
                wanted, kept = depths * number // self.passes, logits
                settled = self._settled(logits[..., :known], settled, wanted)
        return found

    def _read(self, windows: Tensor, settled: Tensor) -> Tensor:
        """The logits ``[B, D, V']`` of a block of which some tokens are settled."""
        block = torch.where(settled >= 0, self.d2t[settled.clamp_min(0)], self.mask)
        x = self.embedding(torch.cat([windows, block], 1)) + self.places
        # Of a short text there is nothing to see before its first token.
        hidden = pad(windows == self.mask, (0, block.shape[1]), value=False)
        for layer in self.blocks:
            x = layer(x, src_key_padding_mask=hidden)
        found: Tensor = self.output(self.norm(x[:, -block.shape[1] :]))
        return found

    @staticmethod
    @torch.no_grad()
    def _settled(logits: Tensor, settled: Tensor, count: int) -> Tensor:
        """Returns ``settled`` with the surest tokens added, ``count`` of each block in all. logits:
        ``[B, D, V']``."""
        best = logits.softmax(-1).max(-1)
        # Tokens that are settled already stay so.
        sure = torch.where(settled >= 0, 2.0, best.values)
        chosen = torch.zeros_like(settled, dtype=torch.bool)
        chosen.scatter_(1, sure.topk(count, 1).indices, True)
        return torch.where(chosen & (settled < 0), best.indices, settled)
