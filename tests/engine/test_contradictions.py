"""Options that contradict each other on the way end one text, and no other."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from outpace import LLM, SamplingParams
from outpace.errors import ParamsError
from targets.families import drafter, target

PROMPTS = [[1, 2, 3], [4, 5], [6]]
CONFIGS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "draft_model": {"num_speculative_tokens": 3},
    "draft_tree": {"method": "draft_tree", "branching": [2, 2], "num_speculative_tokens": 6},
}


def gives_up_after(tokens: int, prompt: int) -> Any:
    """A processor that forbids everything once n tokens have been generated."""

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        over = ids.shape[1] - prompt >= tokens
        return scores.fill_(float("-inf")) if over else scores

    return processor


def engine(method: str) -> LLM:
    config = dict(CONFIGS[method])
    if method.startswith("draft"):
        config["model"] = drafter("llama")
    return LLM(target("llama"), speculative_config=config, max_num_seqs=3)


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_others_go_on(method: str, temperature: float) -> None:
    llm = engine(method)
    asked = [
        SamplingParams(temperature=temperature, seed=row, max_tokens=12, ignore_eos=True)
        for row in range(3)
    ]
    expected = llm.generate(PROMPTS, asked)
    broken = SamplingParams(
        temperature=temperature, seed=1, max_tokens=12, ignore_eos=True,
        logits_processors=[gives_up_after(5, len(PROMPTS[1]))],
    )  # fmt: skip
    found = llm.generate(PROMPTS, [asked[0], broken, asked[2]])
    assert [output.finish_reason for output in found] == ["length", "error", "length"]
    assert len(found[1].token_ids) == 5
    assert "forbid every token" in (found[1].outputs[0].error or "")
    for row in (0, 2):
        assert found[row].token_ids == expected[row].token_ids
        assert found[row].outputs[0].error is None
    assert llm.generate(PROMPTS, asked)[1].token_ids == expected[1].token_ids, "it goes on working"


@pytest.mark.parametrize("method", CONFIGS)
def test_the_only_text_raises(method: str) -> None:
    llm = engine(method)
    broken = SamplingParams(
        temperature=0, max_tokens=12, logits_processors=[gives_up_after(3, 3)], ignore_eos=True
    )
    with pytest.raises(ParamsError, match="forbid every token"):
        llm.generate(PROMPTS[0], broken)
    with pytest.raises(ParamsError, match="forbid every token"):
        list(llm.stream(PROMPTS[0], broken))
    assert not llm.engine.has_unfinished_requests
