"""How far apart the plain and the drafted logits of a model are: nothing, unless slots are lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from outpace.audit import noise as noise_module
from outpace.audit.letters import letter_model
from outpace.audit.noise import measure
from outpace.targets.hf.cache import SlotCache
from outpace.targets.hf.slot_ranges import SLOT_GRANULARITY
from outpace.targets.hf.target import HFTarget

TEXTS = ([1, 2, 3, 4, 5], [6], [7, 8, 7, 8])


@pytest.mark.parametrize("tree", [False, True])
def test_a_text_longer_than_the_first_buffers_is_always_measured(
    tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    reserve = SlotCache.reserve

    def watched(self: SlotCache, first: int, needed: Sequence[int], shrink: bool = True) -> None:
        asked.extend(needed)
        reserve(self, first, needed, shrink)

    monkeypatch.setattr(SlotCache, "reserve", watched)
    noise = measure(HFTarget(letter_model(), 1, 512), TEXTS, 3, tree=tree)
    assert max(asked) > SLOT_GRANULARITY
    assert not noise.excessive


@pytest.mark.parametrize("tree", [False, True])
def test_a_model_with_a_short_context_is_measured_within_it(tree: bool) -> None:
    target = HFTarget(letter_model(), rows=1, max_length=12)
    assert not measure(target, TEXTS, 3, tree=tree).excessive


def test_what_is_no_number_is_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    target = HFTarget(letter_model(), 1, 64)
    scored = noise_module.score_as_drafted

    def broken(*given: object) -> torch.Tensor:
        found: torch.Tensor = scored(*given)  # type: ignore[arg-type]
        return torch.full_like(found, float("nan")) if found.shape[0] > 3 else found

    monkeypatch.setattr(noise_module, "score_as_drafted", broken)
    assert measure(target, TEXTS, 3).excessive
