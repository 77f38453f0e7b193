"""Several multi-token-prediction modules, one for each depth of a draft.

DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437, section 2.2: module k foresees the k-th token
after the next one. It joins the output of module k - 1 at a token with the token k + 1 places
later. Here an entry of all modules is named by the token that they read, so that module k goes on
from the output of module k - 1 at the entry before it:

    entry j:  module 0 reads state j             and token j + 1
              module k reads output k - 1 at j - 1 and token j + 1

After the text module 0 has no states: at depth d only modules d - 1 and later go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outpace.core.trees.tree import Tree
from outpace.heads.base import SharedModules
from outpace.heads.layers import AttentionContext, KeyValues
from outpace.methods.heads.base import gather_parents
from outpace.methods.heads.decoder_heads import DecoderDraftSteps
from outpace.methods.heads.head_kv_cache import TensorDraftCache

if TYPE_CHECKING:
    from outpace.methods.heads.mtp import Mtp


def step_all(
    modules: Sequence[Mtp],
    features: Tensor,
    before: Tensor,
    tokens: Tensor,
    attn_context: AttentionContext,
    to: SharedModules,
) -> tuple[Tensor, KeyValues]:
    """Returns the outputs ``[B, W, N H]`` of N modules at entries of a text, side by side, and the
    entries.

    features: the target's states, ``[B, W, H]``; before: the outputs at the entry before the first,
    ``[B, N H]``; tokens: ``[B, W]``.
    """
    columns = torch.arange(len(attn_context.before), device=tokens.device).expand(len(tokens), -1)
    found, entries = [], []
    for number, (module, own) in enumerate(
        zip(modules, attn_context.before.split_layers(len(modules)), strict=True)
    ):
        visible = _without_first(attn_context, columns, number)
        output, new = module.step(
            features, tokens, AttentionContext(attn_context.positions, own, visible), to
        )
        found.append(output)
        entries.append(new)
        last = before.chunk(len(modules), -1)[number]
        features = torch.cat([last[:, None], output[:, :-1]], 1)
    return torch.cat(found, -1), KeyValues.join_layers(entries)


def _without_first(attn_context: AttentionContext, columns: Tensor, number: int) -> Tensor:
    """What entries of a module see: the first ``number`` of a text have nothing to go on from.

    columns: which entries of their texts those before are, ``[B, L]``.
    """
    if not number:
        return attn_context.visible
    first = torch.cat([columns, attn_context.positions], 1) < number  # [B, L + W]
    width = attn_context.positions.shape[1]
    itself = torch.eye(width, dtype=torch.bool, device=first.device)
    itself = torch.nn.functional.pad(itself, (columns.shape[1], 0))  # [W, L + W]
    return (attn_context.visible & ~first[:, None]) | itself


class MtpDraftSteps(DecoderDraftSteps):
    """The steps of several modules through one draft."""

    _columns: Tensor | None = None
    """Which entries of their texts those before are, ``[B, L]``."""
    _depth = 1

    @property
    def _modules(self) -> list[Mtp]:
        head: Mtp = self._head  # type: ignore[assignment]
        return head.modules_in_order

    def first(self) -> Tensor:
        return self._logits(self._outputs, 0)[:, 0]

    @torch.inference_mode()
    def next_logits(self, fed: Tensor, tree: Tree, parents: Tensor) -> Tensor:
        width, modules = parents.shape[-1], self._modules
        drafts = self._drafts
        assert isinstance(drafts, TensorDraftCache), "its layers are torch's to compute"
        if self._columns is None:
            count = torch.arange(len(drafts.entries), device=fed.device)
            self._columns = count.expand(len(fed), -1)
        whole = drafts.attn_context(tree.ancestors[:, -width:, 1:])
        outputs = list(gather_parents(self._outputs, parents).chunk(len(modules), -1))
        before, tokens = drafts.entries.split_layers(len(modules)), fed[:, -width:]
        found: list[Tensor] = []
        new: list[KeyValues] = []
        for number, module in enumerate(modules):
            if number < self._depth:  # nothing after the text for it to go on from
                found.append(torch.zeros_like(outputs[0]))
                new.append(_blank(before[number], width))
                continue
            seen = _without_first(whole, self._columns, number)
            attn_context = AttentionContext(whole.positions, before[number], seen)
            made = module.step(outputs[number - 1], tokens, attn_context, self._target)
            found.append(made[0])
            new.append(made[1])
        self._outputs = torch.cat(found, -1)
        drafts.add(KeyValues.join_layers(new))
        self._columns = torch.cat([self._columns, whole.positions], 1)
        self._depth += 1
        return self._logits(self._outputs, self._depth - 1)

    def _logits(self, outputs: Tensor, number: int) -> Tensor:
        modules = self._modules
        own = outputs.chunk(len(modules), -1)[number]
        return self._vocab_mapping.to_target_logits(modules[number].logits(own, self._target))


def _blank(like: KeyValues, width: int) -> KeyValues:
    """Entries that nobody attends to."""
    keys, values = (
        part.new_zeros(*part.shape[:2], width, part.shape[3]) for part in (like.keys, like.values)
    )
    return KeyValues(keys, values)
