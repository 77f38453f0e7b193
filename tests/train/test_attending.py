"""What a head that attends over the text is given while it drafts, against all at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outpace import LLM, SamplingParams
from outpace.draft.base import Round, Rows
from outpace.draft.registry import find_drafter
from outpace.heads.layers import AttentionContext
from outpace.methods.heads.decoder_heads import MAX_UNCOMPUTED, DecoderHeadDrafter
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.train.teacher import Teacher
from targets.families import CONTEXT, VOCABULARY, target


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "s2d"])
def test_a_draft_begins_as_if_the_whole_text_were_read_at_once(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged rows, texts that are read in parts, rows that end, and samples of one prompt."""
    loaded = LoadedModel(target("llama"), None, "llama")
    options = find_drafter(method).dummy_options(loaded)
    config = {"method": method, "num_speculative_tokens": 4, **options}
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)
    head, checked = options["model"], 0
    teacher = Teacher(loaded, head.hidden_layers)
    begin = DecoderHeadDrafter.draft_steps

    def draft_steps(self: DecoderHeadDrafter, rows: Rows) -> object:
        nonlocal checked
        made = begin(self, rows)
        found = made.first()
        for row in range(len(rows)):
            text = torch.tensor([rows.since(row, 0)])
            if text.shape[1] == 1:
                continue  # such a row has no entry yet
            count = text.shape[1] - 1
            features = head.combine_hidden_states(teacher.read(text).hidden_states[:, :-1])
            attn_context = AttentionContext.causal(head.begin(1), count)
            outputs, _ = head.step(features, text[:, 1:], attn_context, teacher)
            assert torch.allclose(found[row], head.logits(outputs[0, -1], teacher), atol=1e-9)
            checked += 1
        return made

    monkeypatch.setattr(DecoderHeadDrafter, "draft_steps", draft_steps)
    torch.manual_seed(0)
    prompts = [torch.randint(VOCABULARY, (n,)).tolist() for n in (1, 2, MAX_UNCOMPUTED + 20, 9)]
    given = [
        SamplingParams(temperature=1.0, max_tokens=length, n=n, seed=3, ignore_eos=True)
        for length, n in ((12, 1), (5, 3), (12, 2), (20, 1))
    ]
    llm.generate(prompts, given)
    assert checked > 20


def test_what_a_row_remembers_of_its_prompt_keeps_no_whole_pass_alive() -> None:
    """Its states are not views of those of all tokens that were read together."""
    options = find_drafter("eagle").dummy_options(LoadedModel(target("llama"), None, "llama"))
    config = {"method": "eagle", "num_speculative_tokens": 2, **options}
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=1, max_model_len=CONTEXT)
    drafter: Any = llm.engine.drafter
    seen: list[int] = []

    def watch(round: Round) -> None:
        held = drafter._texts[round.requests[0]].after_prompt.states
        assert held
        seen.extend(one.untyped_storage().nbytes() - one.nbytes for one in held)

    llm.engine.observers.append(watch)
    llm.generate(list(range(MAX_UNCOMPUTED + 8)), SamplingParams(max_tokens=3, ignore_eos=True))
    assert seen
    assert set(seen) == {0}
