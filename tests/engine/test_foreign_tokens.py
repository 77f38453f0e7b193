"""Prompts with token ids that the model reads and never writes: the padding of its matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outpace import LLM, SamplingParams
from outpace.core.proposal import Deterministic, Proposal
from outpace.core.trees.tree import Tree

from .texts import SIZE, helper, tokenizer, writer

PADDED = SIZE + 7
PROMPT = [5, SIZE + 1, 6, 7, SIZE + 6, 5, SIZE + 1, 6, 7, SIZE + 6, 5]
CONFIGS: list[dict[str, Any]] = [
    {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
    {"method": "suffix", "num_speculative_tokens": 3},
    {"method": "suffix", "verify": "coupled", "num_speculative_tokens": 3},
    {"method": "recycling", "num_speculative_tokens": 6},
    {"method": "lookahead", "num_speculative_tokens": 3},
    {
        "method": "ensemble",
        "drafters": [{"method": "ngram"}, {"method": "suffix"}],
        "num_speculative_tokens": 4,
    },
    {"method": "draft_model", "model": helper(PADDED), "tokenizer": tokenizer()},
    {"method": "auto"},
    {"method": "auto", "model": helper(PADDED), "tokenizer": tokenizer()},
]


def llm(config: dict[str, Any]) -> LLM:
    return LLM(writer(PADDED), tokenizer=tokenizer(), speculative_config=config, max_num_seqs=3)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config['method']}")
def test_what_is_copied_from_a_prompt_is_only_what_can_be_written(config: dict[str, Any]) -> None:
    prompts = [PROMPT, [5, 6, 7], PROMPT[2:]]
    sampled = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    drafting = llm(config)
    plain = llm({"method": "none"}).generate(prompts, greedy)
    for params in (sampled, greedy, sampled):  # what was learned of one text serves the next
        texts = drafting.generate(prompts, params)
        written = [token for text in texts for token in text.outputs[0].token_ids]
        assert len(written) == 72
        assert max(written) < SIZE
        if params is greedy:
            assert [text.outputs[0].token_ids for text in texts] == [
                text.outputs[0].token_ids for text in plain
            ]


@pytest.mark.parametrize("combine", [None, "precedence", "merge"])
def test_rows_of_a_look_up_and_of_a_model_are_joined(combine: str | None) -> None:
    model = {"method": "draft_model", "model": helper(PADDED), "tokenizer": tokenizer()}
    config: dict[str, Any] = {"method": "auto", "drafter": model}
    if combine is not None:
        drafters = [{"method": "ngram", "prompt_lookup_min": 1}, model]
        config = {"method": "ensemble", "drafters": drafters, "combine": combine}
    drafting = llm(config)
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, speculative=4)
    for _ in range(3):
        texts = drafting.generate([PROMPT, [9, 8, 7], PROMPT[1:]], params)
        assert all(max(text.outputs[0].token_ids) < SIZE for text in texts)


def test_a_proposal_ends_where_a_token_is_none() -> None:
    tokens = torch.tensor([[1, 9, 2], [1, 2, 3], [-1, 2, 3], [1, 2, 9]])
    tree, counts = Tree.chain(4, 3, tokens.device), torch.tensor([3, 2, 3, 2])
    assert Proposal(tokens.clone(), tree, counts, Deterministic()).cut_to_vocabulary_(
        10
    ).counts.tolist() == [
        3,
        2,
        0,
        2,
    ]
    proposal = Proposal(tokens, tree, counts, Deterministic())
    cut = proposal.cut_to_vocabulary_(9)
    assert cut.counts.tolist() == [1, 2, 0, 2]
    assert cut.tokens.tolist() == [[1, 0, 2], [1, 2, 3], [0, 2, 3], [1, 2, 0]]
    assert cut.cut_to_vocabulary_(9) is cut
    assert cut.tokens is proposal.tokens, "by which a round is known as a drafter's own"
