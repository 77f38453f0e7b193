"""`audit diff` tells near-ties from bugs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from tests.audit_engine.pairs import PROMPTS, pair_llm

from outpace import LLM, SamplingParams
from outpace.audit.diff import Difference, DiffReport, Mode, audit_diff
from outpace.audit.letters import LETTERS, LetterTokenizer, letter_model
from outpace.engine.engine import Engine

SETUPS = {
    "chain": {},
    "tree": {"method": "draft_tree", "branching": [2, 2], "tokens": 6},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "windowed": {"family": "mistral"},
}
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, frequency_penalty=0.3, top_p=0.9)


def diff_of(params: SamplingParams = PARAMS, **setup: object) -> DiffReport:
    engines: dict[Mode, LLM] = {
        "greedy": pair_llm(**setup),
        "coupled": pair_llm(**{**setup, "verify": "coupled"}),
    }
    return audit_diff(engines, PROMPTS, params)


@pytest.mark.parametrize("setup", SETUPS)
def test_in_float64_there_is_no_difference(setup: str) -> None:
    report = diff_of(**SETUPS[setup])
    assert report.ok
    assert report.differences == []
    assert report.tokens == {"greedy": 96, "coupled": 96}
    assert report.noise.tolerance < 1e-9


def test_a_wrong_token_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    emit = Engine._emit

    def worse(self, played, decisions, *rest):
        if played[0].params.speculative != "off":
            decisions = [replace(d, next_token=(d.next_token + 1) % 5) for d in decisions]
        return emit(self, played, decisions, *rest)

    monkeypatch.setattr(Engine, "_emit", worse)
    report = diff_of()
    assert not report.ok
    found = report.differences[0]
    assert found.verdict.startswith("BUG: gap")
    assert found.plain != found.speculative
    assert found.speculative_text == "abcde"[found.speculative]


def test_a_tie_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens with the same logits: whichever is taken, the texts are equally right."""
    model, twin = letter_model(), len(LETTERS) - 1
    config = {"method": "ngram", "prompt_lookup_min": 1}
    llm = LLM(model, tokenizer=LetterTokenizer(), speculative_config=config)
    prompts = [[i, j] for i in range(6) for j in range(2)]
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    texts = [output.token_ids for output in llm.generate(prompts, params)]
    common = Counter(token for text in texts for token in text if token < twin).most_common(1)[0][0]
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[common]
    emit = Engine._emit

    def other(self, played, decisions, *rest):
        if played[0].params.speculative != "off":
            decisions = [
                replace(d, next_token=twin) if d.next_token == common else d for d in decisions
            ]
        return emit(self, played, decisions, *rest)

    monkeypatch.setattr(Engine, "_emit", other)
    report = audit_diff({"greedy": llm}, prompts, params)
    assert report.differences
    assert all("near-tie" in found.verdict for found in report.differences)
    assert report.ok


def test_a_text_that_ends_elsewhere_is_a_bug() -> None:
    found = Difference("greedy", 0, 3, plain=None, speculative=4, gap=float("inf"),
                       tolerance=1e-3, scoring=0.0)  # fmt: skip
    assert found.bug
    assert "goes on" in found.verdict
