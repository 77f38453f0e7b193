"""Modules of every family that publishes some, drafted with and held against the published formula
(`draft.mtp_checkpoints`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draft.mtp_checkpoints import BROUGHT, Reference, loaded, whole, without_float32, write
from outpace import LLM
from outpace.core.trees.tree import Tree
from outpace.draft.base import Rows
from outpace.methods.heads.decoder_heads import DecoderDraftSteps
from outpace.methods.heads.mtp import MtpDrafter
from outpace.methods.heads.mtp_modules import MtpDraftSteps
from targets.families import CONTEXT, PROMPTS
from targets.generating import greedy, ids

LENGTH = 12
TREE = {"num_speculative_tokens": 6}
CHECKED = 8
"""Drafted distributions that are computed anew, of each depth."""


class Watch:
    """What a module says after texts, and after what was drafted there."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: dict[int, list[tuple[list[int], Tensor, list[int], Tensor]]] = {}
        self._texts: list[list[int]] = []
        self._states: dict[Any, Tensor] = {}
        self._known: list[Tensor] = []
        draft_steps, read = MtpDrafter.draft_steps, MtpDrafter.read

        def watched_read(drafter: MtpDrafter, requests: Any, tokens: Any, states: Tensor) -> None:
            for request, new, own in zip(requests, tokens, states, strict=True):
                before = self._states.get(request, own[:0])
                self._states[request] = torch.cat([before, own[: len(new)]])
            read(drafter, requests, tokens, states)

        def watched(drafter: MtpDrafter, rows: Rows) -> Any:
            made = draft_steps(drafter, rows)
            self._texts = [rows.since(row, 0) for row in range(len(rows))]
            self._known = [self._states.get(each, torch.empty(0)) for each in rows.requests]
            for row, logits in enumerate(made.first()):
                self._note(row, [], logits)
            return made

        def watching(next_logits: Any) -> Any:
            def watched_deeper(at: Any, fed: Tensor, tree: Tree, parents: Tensor) -> Tensor:
                found: Tensor = next_logits(at, fed, tree, parents)
                self._note_level(fed, tree, found)
                return found

            return watched_deeper

        patch.setattr(MtpDrafter, "read", watched_read)
        patch.setattr(MtpDrafter, "draft_steps", watched)
        for kind in (DecoderDraftSteps, MtpDraftSteps):
            patch.setattr(kind, "next_logits", watching(kind.next_logits))

    def _note_level(self, fed: Tensor, tree: Tree, found: Tensor) -> None:
        width = found.shape[1]
        for row in range(len(self._texts)):
            related = tree.ancestors[row if len(tree.ancestors) > 1 else 0]
            for column in range(width):
                node = fed.shape[1] - width + column + 1
                path = [n - 1 for n in range(1, node + 1) if related[node, n]]
                self._note(row, fed[row, path].tolist(), found[row, column])

    def _note(self, row: int, drafted: list[int], logits: Tensor) -> None:
        text, states = self._texts[row], self._known[row]
        if len(text) > 1:  # a text of one token has no entry yet
            self.seen.setdefault(len(drafted), []).append((text, states, drafted, logits))


@pytest.mark.parametrize("family", list(BROUGHT))
def test_modules_draft_by_the_published_formula(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    larger = whole(family)
    target = loaded(write(tmp_path, family, larger))
    reference = Reference(family, larger, target)
    most = BROUGHT[family].modules if BROUGHT[family].modules > 1 else LENGTH
    limits = {"max_num_seqs": 4, "max_model_len": CONTEXT, "enable_prefix_caching": False}
    plain = LLM(target, speculative_config={"method": "none"}, **limits)
    expected = ids(plain.generate(PROMPTS, greedy(LENGTH)))
    for config in ({"num_speculative_tokens": 3}, {"branching": [2, 2], **TREE}):
        llm = LLM(target, speculative_config={"method": "mtp", **config}, **limits)
        assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == expected
        with monkeypatch.context() as patch:
            without_float32(patch)
            watch = Watch(patch)
            llm.generate(PROMPTS, greedy(LENGTH))
            check(watch, reference, min(2 if "branching" in config else 3, most))


def check(watch: Watch, reference: Reference, depths: int) -> None:
    """Computes some of the drafted distributions anew."""
    assert len(watch.seen) == depths
    for known in watch.seen.values():
        assert len(known) > CHECKED
        for text, states, drafted, logits in known[:: len(known) // CHECKED]:
            wanted = reference.logits(text, states, drafted)
            assert float((logits - wanted).abs().max()) < 1e-10, (drafted, text)
