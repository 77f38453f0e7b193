"""How far apart the plain and the drafted logits of a model are: nothing, unless slots are lost."""

from __future__ import annotations

import pytest

from outpace.audit.letters import letter_model
from outpace.audit.noise import measure
from outpace.targets.hf.cache import BUCKET, SlotCache

TEXTS = ([1, 2, 3, 4, 5], [6], [7, 8, 7, 8])


@pytest.mark.parametrize("tree", [False, True])
def test_a_text_longer_than_the_first_buffers_is_always_measured(
    tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    reserve = SlotCache.reserve

    def watched(self: SlotCache, slots: int) -> None:
        asked.append(slots)
        reserve(self, slots)

    monkeypatch.setattr(SlotCache, "reserve", watched)
    noise = measure(letter_model(), TEXTS, 3, tree=tree)
    assert max(asked) > BUCKET
    assert not noise.excessive


@pytest.mark.parametrize("tree", [False, True])
def test_a_model_with_a_short_context_is_measured_within_it(tree: bool) -> None:
    model = letter_model()
    model.config.max_position_embeddings = 12
    assert not measure(model, TEXTS, 3, tree=tree).excessive
