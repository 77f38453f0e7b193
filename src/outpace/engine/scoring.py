"""The target's pass: logits at the root and each node, and what else the rule asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.core.proposal import Proposal
from outpace.core.transfer import to_device
from outpace.core.tree import Tree
from outpace.targets.hf.runner import Runner
from outpace.verify.evidence import RuleNeeds


@dataclass(frozen=True, eq=False)
class Scores:
    """What a pass of the target says about a proposal."""

    logits: Tensor  # [B, M, V]
    taps: Tensor | None = None  # [B, M, H], the layers that the rule asked for side by side
    second: Tensor | None = None  # [B, M, V], logits at the second copy of the draft


class Scorer:
    """Scores proposals with one target for one rule.

    For a rule with a second pass the draft is fed twice in the same pass, the second time behind
    ``reread``: the tokens of the text that is to be read in between.
    """

    def __init__(self, target: Runner, needs: RuleNeeds, reread: Sequence[int] = ()) -> None:
        self._target = target
        self._reread = list(reread) if needs.second_pass is not None else []
        self._options: dict[str, Any] = {}
        self._taps = needs.taps
        if needs.taps:
            self._options["output_hidden_states"] = list(needs.taps)

    def __call__(self, pending: Tensor, proposal: Proposal) -> Scores:
        """Returns the scores. pending: ``[B, P]``, each row's committed tokens that are not yet
        cached; the last of them is the root."""
        tokens, tree = torch.cat([pending, proposal.tokens], 1), proposal.tree
        nodes = 1 + tree.size
        if self._reread:
            tokens, tree = self._twice(tokens, proposal)
        output = self._target.forward(tokens, keep=1 + tree.size, tree=tree, **self._options)
        second = output.logits[:, -nodes:] if self._reread else None
        taps = self._tapped(output, pending.shape[1] - 1, nodes)
        return Scores(output.logits[:, :nodes], taps, second)

    def _tapped(self, output: Any, root: int, nodes: int) -> Tensor | None:
        if not self._taps:
            return None
        # Hidden states come for the pending tokens before the root, too.
        here = slice(root, root + nodes)
        layers = [output.hidden_states[layer][:, here] for layer in self._taps]
        return torch.cat(layers, -1)

    def _twice(self, tokens: Tensor, proposal: Proposal) -> tuple[Tensor, Tree]:
        """Root, draft, the text, draft again: the text follows each row's last valid node."""
        rows, size = proposal.tokens.shape
        text = to_device(self._reread, tokens.device).expand(rows, -1)
        behind = torch.arange(size + 1, size + text.shape[1], device=tokens.device)
        last = size + text.shape[1]
        copy = proposal.tree.parents + last  # the last token of the text stands for the root
        parents = torch.cat(
            [proposal.tree.parents, proposal.counts[:, None], behind.expand(rows, -1), copy], 1
        )
        return torch.cat([tokens, text, proposal.tokens], 1), Tree(parents)
