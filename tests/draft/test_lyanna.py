"""States of a draft that are used again after a mismatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from devices import on_device
from outpace import LLM, SamplingParams
from outpace.draft.base import Rows
from outpace.errors import ConfigError
from outpace.methods.heads.lyanna import Lyanna, LyannaDrafter
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.train.teacher import Teacher
from targets.families import CONTEXT, PROMPTS, target
from targets.generating import greedy, ids

LENGTH = 24


def decoder(reuse: int) -> LLM:
    options = LyannaDrafter.dummy_options(LoadedModel(target("llama"), None, "llama"))
    config = {"method": "lyanna", "num_speculative_tokens": 4, **options, "reuse": reuse}
    return LLM(target("llama"), speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)


def test_a_draft_from_kept_states_is_the_guess_behind_the_right_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, again = decoder(2), 0
    head: Lyanna = llm.engine.drafter.head
    teacher = Teacher(LoadedModel(target("llama"), None, "llama"), head.hidden_layers)
    begin = LyannaDrafter.draft_steps

    def draft_steps(self: LyannaDrafter, rows: Rows) -> Any:
        nonlocal again
        kept = [self._kept[request] for request in rows.requests]
        made = begin(self, rows)
        found = made.first()
        for row in range(len(rows)):
            text = on_device([rows.since(row, 0)])
            if text.shape[1] == 1:
                continue  # such a row has no state yet
            one = kept[row]
            root = text.shape[1] - 1 if one is None else one.begin
            again += one is not None
            memory = teacher.read(text).hidden_states[:, root - 1 : root]
            for depth, token in enumerate(text[0, root:], 1):
                logits, memory = head.step(memory, token.view(1, 1), depth, teacher)
            assert torch.allclose(found[row], logits[0, 0], atol=1e-9)
        return begin(self, rows)

    monkeypatch.setattr(LyannaDrafter, "draft_steps", draft_steps)
    expected = ids(LLM(target("llama"), max_num_seqs=4).generate(PROMPTS, greedy(LENGTH)))
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == expected
    assert again > 10


def test_kept_states_are_not_computed_again_and_not_used_for_seeded_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed = 0
    advance = Lyanna.advance

    def counted(self: Lyanna, states: torch.Tensor) -> torch.Tensor:
        nonlocal computed
        computed += 1
        return advance(self, states)

    monkeypatch.setattr(Lyanna, "advance", counted)
    seeded = SamplingParams(temperature=1.0, seed=3, max_tokens=LENGTH, ignore_eos=True)
    counts = []
    for params in (greedy(LENGTH), seeded):
        for reuse in (0, 2):
            computed, llm = 0, decoder(reuse)
            texts = ids(llm.generate(PROMPTS[:1], params))
            counts.append((computed, texts))
    (anew, greedy_text), (again, same), (seeded_anew, text), (seeded_again, also) = counts
    assert again < 0.8 * anew
    assert seeded_again == seeded_anew
    assert (greedy_text, text) == (same, also)


def test_reuse_is_a_number_of_rounds() -> None:
    with pytest.raises(ConfigError, match="reuse must be at least 0"):
        decoder(-1)
