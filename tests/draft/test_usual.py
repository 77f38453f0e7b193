"""A draft model that scores the usual tokens only, where a text gets by with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from outpace import LLM, SamplingParams
from outpace.errors import ConfigError
from outpace.llm import BUNDLED
from outpace.methods.models.frequent_tokens import (
    MAX_RARE,
    MAX_REUSED,
    RECENT_WINDOW,
    REUSE_WINDOW,
    FrequentTokens,
    marks,
)
from outpace.targets.hf.logits import VocabularySubset
from targets.families import VOCABULARY, drafter, target
from targets.generating import ids

FEW = VOCABULARY // 2
USUAL_TEXT, RARE_TEXT = [1, 2, 3], [VOCABULARY - 1] * (MAX_RARE + 1)
CONFIGS: dict[str, dict[str, Any]] = {
    "a chain": {"method": "draft_model"},
    "a tree": {"method": "draft_tree", "branching": [2, 1]},
    "a dynamic tree": {"method": "draft_tree", "branching": "dynamic"},
    "a guessed chain": {"method": "staged"},
}


def decoder(config: dict[str, Any], size: Any = FEW) -> LLM:
    config = {"num_speculative_tokens": 4, **config, "model": drafter("llama")}
    return LLM(
        target("llama"), speculative_config={**config, "draft_vocab_size": size}, max_num_seqs=3
    )


NEG_INF = -torch.inf


def test_rare_tokens_that_no_text_has_are_left_out() -> None:
    usual, logits = FrequentTokens(4), torch.arange(12.0).view(2, 1, 6)
    usual.start_round([[1, 2, 3], [5] * 9], [True, False])
    assert usual.needed == VocabularySubset(4)
    assert torch.equal(usual.only(logits), logits[..., :4])


def test_a_text_keeps_the_rare_tokens_that_it_has_had() -> None:
    usual, logits = FrequentTokens(4), torch.arange(14.0).view(2, 1, 7)
    usual.start_round([[5, 1, 2], [6, 2, 6]], [True, True])
    assert usual.needed == VocabularySubset(4, (5, 6))
    found = usual.only(logits)[:, 0]
    assert found[0].tolist() == [0, 1, 2, 3, NEG_INF, 5, NEG_INF]
    assert found[1].tolist() == [7, 8, 9, 10, NEG_INF, NEG_INF, 13]
    usual.start_round([[4, *[1] * REUSE_WINDOW]], [True])
    assert usual.needed == VocabularySubset(4), "it is too long ago"


def test_only_the_latest_of_very_many_rare_tokens_are_kept() -> None:
    usual = FrequentTokens(4)
    usual.start_round([[*range(4, 4 + 2 * MAX_REUSED), *[1] * RECENT_WINDOW]], [True])
    assert usual.needed == VocabularySubset(4, tuple(range(4 + MAX_REUSED, 4 + 2 * MAX_REUSED)))


def test_a_text_with_many_rare_tokens_needs_them_all() -> None:
    usual, logits = FrequentTokens(4), torch.arange(12.0).view(2, 1, 6)
    common = [5] * MAX_RARE + [1] * (RECENT_WINDOW - MAX_RARE)
    usual.start_round([common, [*common, *[4] * 9]], [True, True])
    assert usual.needed is None
    found = usual.only(logits)
    assert found[0, 0].tolist() == [0, 1, 2, 3, NEG_INF, 5]
    assert torch.equal(found[1], logits[1])
    usual.start_round([[5] * 9] * 2, [True, True])
    assert usual.needed is None
    assert torch.equal(usual.only(logits), logits)


def test_some_tokens_are_usual_whatever_their_numbers() -> None:
    usual = FrequentTokens(4, always=[2, 5])
    usual.start_round([[1, 2, 3]], [True])
    assert usual.needed == VocabularySubset(4, (5,))
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    assert tokenizer.eos_token_id in marks(tokenizer)
    assert set(tokenizer.encode("```", add_special_tokens=False)) <= set(marks(tokenizer))
    assert marks(None) == []


@pytest.mark.parametrize("name", CONFIGS)
def test_rare_tokens_are_drafted_where_the_text_has_them(name: str) -> None:
    llm, drafted = decoder(CONFIGS[name]), set()

    def note(round: Any) -> None:
        tokens = round.proposal.tokens
        for row, count in enumerate(round.proposal.counts.tolist()):
            drafted.update(tokens[row, :count].tolist())

    for text in (USUAL_TEXT, RARE_TEXT):
        drafted.clear()
        with llm.engine.observing(note):
            llm.generate([text], SamplingParams(temperature=3.0, seed=3, max_tokens=4))
        assert any(token >= FEW for token in drafted) == (text is RARE_TEXT)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_drafts_the_same_in_any_company(name: str, temperature: float) -> None:
    llm = decoder(CONFIGS[name])
    texts = [USUAL_TEXT, RARE_TEXT, [4, 5]]
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=24, ignore_eos=True)
        for seed in range(3)
    ]
    together = llm.generate(texts, params)
    alone = [llm.generate([text], [one])[0] for text, one in zip(texts, params, strict=True)]
    assert ids(together) == ids(alone)
    if temperature == 0:
        assert ids(together) == ids(LLM(target("llama")).generate(texts, params))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_may_consist_of_rare_tokens_alone(name: str, temperature: float) -> None:
    rare = [VOCABULARY - 1, VOCABULARY - 2]
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=24, allowed_token_ids=rare, ignore_eos=True
    )
    found = decoder(CONFIGS[name]).generate([USUAL_TEXT], params)
    assert set(ids(found)[0]) <= set(rare)
    assert len(ids(found)[0]) == 24
    if temperature == 0:
        assert ids(found) == ids(LLM(target("llama")).generate([USUAL_TEXT], params))


def test_a_drafter_that_learns_refuses_it() -> None:
    with pytest.raises(ConfigError, match="online and draft_vocab_size exclude each other"):
        decoder({"method": "draft_model", "online": {}})


def test_a_drafter_with_other_tokens_refuses_it() -> None:
    model = decoder(CONFIGS["a chain"], None).engine.drafter
    model._vocab_mapping.is_same = False
    model._restrict_vocabulary("auto")
    with pytest.raises(ConfigError, match="with the target's own tokens"):
        model._restrict_vocabulary(FEW)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "some"])
def test_what_is_no_number_of_tokens_is_refused(size: Any) -> None:
    with pytest.raises(
        ConfigError, match="draft_vocab_size must be 'auto', a whole number from 1 or None"
    ):
        decoder(CONFIGS["a chain"], size)


@pytest.mark.parametrize(
    "option",
    [
        {"quantization": "int8"},
        {"draft_vocab_size": 5},
        {"vocabulary": "text"},
        {"trust_remote_code": True},
        {"online": {}},
    ],
)
def test_what_is_about_a_draft_model_is_refused_without_one(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"'{next(iter(option))}' is about a draft model"):
        LLM(target("llama"), speculative_config={"method": "auto", **option})
