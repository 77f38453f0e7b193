"""A small discrete diffusion model that drafts a block of tokens in a few passes of its own.

Christopher et al. 2024, "Speculative Diffusion Decoding" (SpecDiff), arXiv 2408.05636, with masked
diffusion (Sahoo et al. 2024, arXiv 2406.07524).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from outpace.core.proposal import Capabilities, DraftSampling, Proposal
from outpace.core.transfer import to_device
from outpace.draft.base import Rows
from outpace.draft.chains import Chains
from outpace.heads.base import Head, HeadConfig, SharedModules, TargetShape
from outpace.heads.layers import default_num_heads
from outpace.methods.heads.base import TrainedDrafter
from outpace.targets.base import Target
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.plain import forward_uncached
from outpace.train.recipe import DepthLosses, LossOutput, Recipe, joined
from outpace.train.teacher import TeacherBatch

# -- the network -----------------------------------------------------------------------------------


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
    """A transformer that sees the end of a text and a block after it, in both directions.

    At first all tokens of the block are masked. After each pass but the last the surest ones are
    settled, and the next pass sees them. It reads tokens only, and nothing of the target.
    """

    kind: ClassVar[str] = "diffusion"
    Config: ClassVar[type[HeadConfig]] = DiffusionConfig
    learns_online: ClassVar[bool] = False

    @classmethod
    def recipe(cls) -> type[Recipe]:
        return DiffusionRecipe

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
                width, default_num_heads(width), 4 * width, dropout=0.0, activation="gelu",
                batch_first=True, norm_first=True,
            )
            for _ in range(config.blocks)
        )  # fmt: skip
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, self.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.places, std=0.02)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """None: it reads tokens."""
        return ()

    def window(self, tokens: Tensor) -> Tensor:
        """Returns the last ``context`` of tokens ``[B, T]``; masks stand before a shorter text."""
        return pad(tokens, (self.context, 0), value=self.mask)[:, -self.context :]

    def denoise(self, windows: Tensor, known: int | None = None) -> list[Denoised]:
        """Returns blocks after windows ``[B, context]`` after each pass.

        known: only the first ``known`` of the head's own tokens are settled; others are padding.
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


# -- how it is trained -----------------------------------------------------------------------------


PLACES = 64
"""Places of a text after which a block is made, at most: each reads a context of its own."""


class DiffusionRecipe(Recipe):
    """The loss of a `Diffusion` drafter.

    Diffusion models learn with tokens that are masked at random. This one learns with the masks
    that it meets in a draft: none of the tokens is settled at first, and then its surest ones are.
    """

    def __init__(self, head: Diffusion, shared: SharedModules) -> None:
        """shared: what other heads are given of the target; this one needs nothing."""
        self._head = head

    def compute_loss(self, batch: TeacherBatch) -> LossOutput:
        count = batch.tokens.shape[1] - self._head.config.depths
        at = torch.arange(count, device=batch.tokens.device)
        if torch.is_grad_enabled():
            return self._after(batch, at[:: -(-count // PLACES)])
        return joined([self._after(batch, places) for places in torch.split(at, PLACES)])

    def _after(self, batch: TeacherBatch, places: Tensor) -> LossOutput:
        """The loss of blocks after these places ``[P]``."""
        head, rows = self._head, len(batch.tokens)
        depths = head.config.depths
        windows = torch.cat([head.window(batch.tokens[:, : 2 + at]) for at in places.tolist()])
        losses, hits = [], torch.empty(0)
        for made in head.denoise(windows):
            logits = made.logits.view(len(places), rows, depths, -1).transpose(0, 1)
            guesses = DepthLosses(head, batch, places)
            for depth in range(depths):
                guesses.add(logits[:, :, depth])
            output = guesses.output()
            losses.append(output.loss)
            hits = output.hits
        return LossOutput(torch.stack(losses).mean(), hits)


# -- how it drafts ---------------------------------------------------------------------------------


class DiffusionDrafter(TrainedDrafter):
    """Drafts chains, all tokens of which are made at once.

    Tokens that were settled before the last pass were chosen and not drawn: they count as given.
    The others are drawn from what the last pass says, each on its own, which is the distribution
    that they are verified against. With the distributions of earlier passes in its place
    verification would be biased.
    """

    name: ClassVar[str] = "diffusion"
    sampling_kinds: frozenset[DraftSampling] = frozenset({DraftSampling.IID})
    trees: bool = False
    capabilities: Capabilities = replace(TrainedDrafter.capabilities, supports_early_stop=True)
    default_rule: ClassVar[str] = "token"

    def __init__(self, head: Head, target: Target, vocabulary: int) -> None:
        super().__init__(head, target, vocabulary)
        self.head = cast(Diffusion, self._head)
        self.max_draft_tokens = head.config.depths
        # A few passes make all depths: this is the share of one.
        self.pass_bytes = self.pass_bytes * self.head.passes // self.max_draft_tokens

    @classmethod
    @torch.no_grad()
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        """One that prefers what the target says most often; its other weights are random."""
        options = super().dummy_options(loaded)
        head = cast(Diffusion, options["model"])
        logits = forward_uncached(loaded.model, range(min(64, loaded.vocabulary)))
        often = logits.softmax(-1).mean(0).log().to(head.output.weight.device)
        head.norm.bias.fill_(1.0)
        head.output.weight += often[head.d2t, None] / head.output.in_features
        return options

    def can_draft(self, rows: Rows, row: int) -> bool:
        return True

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        counts = [min(budget, self.max_draft_tokens) for budget in budgets]
        if not any(counts):
            return Proposal.empty(len(rows), rows.seeds.device)
        made = self._denoised(rows)
        logits = self._vocab_mapping.to_target_logits(made.logits)  # [B, D, V]
        known = self.head.d2t[made.settled.clamp_min(0)]
        given = torch.where(made.settled >= 0, known, -1)
        chains = Chains(rows, counts, self.random_stream)
        while chains.grow(logits[:, chains.length], given[:, chains.length]):
            pass
        return chains.proposal(self._tree_levels.chain(len(rows), chains.length))

    @torch.inference_mode()
    def _denoised(self, rows: Rows) -> Denoised:
        context = self.head.context
        texts = [rows.since(row, max(0, rows.lengths[row] - context)) for row in range(len(rows))]
        padded = [[self.head.mask] * (context - len(text)) + text for text in texts]
        windows = to_device(padded, rows.seeds.device)
        return self.head.denoise(windows, len(self._vocab_mapping))[-1]
