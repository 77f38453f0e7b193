"""The method "diffusion": a small diffusion model drafts a block (`heads.blocks.diffusion`).

Christopher et al. 2024, arXiv 2408.05636.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch

from outpace.core.proposal import Drawn, Proposal
from outpace.core.transfer import to_device
from outpace.draft.base import Rows
from outpace.draft.chains import Chains
from outpace.heads.base import Head
from outpace.heads.blocks.diffusion import Denoised, Diffusion
from outpace.methods.heads.base import TrainedDrafter
from outpace.targets.base import Target
from outpace.targets.hf.loading.loaded import Loaded
from outpace.targets.hf.plain import read_plainly


class DiffusionDrafter(TrainedDrafter):
    """Drafts chains, all tokens of which are made at once.

    Tokens that were settled before the last pass were chosen and not drawn: they count as given.
    The others are drawn from what the last pass says, each on its own, which is the distribution
    that they are verified against. With the distributions of earlier passes in its place
    verification would be biased.
    """

    name: ClassVar[str] = "diffusion"
    draws: frozenset[Drawn] = frozenset({Drawn.IID})
    trees: bool = False
    ends_chains: bool = True
    default_rule: ClassVar[str] = "token"

    def __init__(self, head: Head, target: Target, vocabulary: int) -> None:
        super().__init__(head, target, vocabulary)
        self.head = cast(Diffusion, self._head)
        self.longest = head.config.depths
        # A few passes make all depths: this is the share of one.
        self.pass_bytes = self.pass_bytes * self.head.passes // self.longest

    @classmethod
    @torch.no_grad()
    def specimen(cls, loaded: Loaded) -> Mapping[str, Any]:
        """One that prefers what the target says most often; its other weights are random."""
        options = super().specimen(loaded)
        head = cast(Diffusion, options["model"])
        logits = read_plainly(loaded.model, range(min(64, loaded.vocabulary)))
        often = logits.softmax(-1).mean(0).log().to(head.output.weight.device)
        head.norm.bias.fill_(1.0)
        head.output.weight += often[head.d2t, None] / head.output.in_features
        return options

    def knows(self, row: int) -> bool:
        return True

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        counts = [min(budget, self.longest) for budget in budgets]
        if not any(counts):
            return Proposal.empty(len(rows), rows.seeds.device)
        made = self._denoised(rows)
        logits = self._vocabulary.logits(made.logits)  # [B, D, V]
        known = self.head.d2t[made.settled.clamp_min(0)]
        given = torch.where(made.settled >= 0, known, -1)
        chains = Chains(rows, counts, self.random_stream)
        while chains.grow(logits[:, chains.length], given[:, chains.length]):
            pass
        return chains.proposal(self._plans.chain(len(rows), chains.length))

    @torch.inference_mode()
    def _denoised(self, rows: Rows) -> Denoised:
        context = self.head.context
        texts = [rows.since(row, max(0, rows.length(row) - context)) for row in range(len(rows))]
        padded = [[self.head.mask] * (context - len(text)) + text for text in texts]
        windows = to_device(padded, rows.seeds.device)
        return self.head.denoise(windows, len(self._vocabulary))[-1]
