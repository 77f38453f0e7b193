"""What comes back: ids, ends, log-probabilities with their texts, a progress bar."""

from __future__ import annotations

import math

import pytest

from api.words import word_tokenizer
from outpace import LLM, SamplingParams
from targets.families import target

PARAMS = SamplingParams(temperature=0, max_tokens=4, logprobs=2)
PROMPTS = [[5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(target("llama"), tokenizer=word_tokenizer())


def test_each_prompt_has_an_id_of_its_own_and_is_finished() -> None:
    llm = LLM(target("llama"))
    first, second = llm.generate(PROMPTS, PARAMS), llm.generate(PROMPTS, PARAMS)
    assert [output.request_id for output in (*first, *second)] == ["0", "1", "2", "3"]
    assert all(output.finished for output in (*first, *second))


def test_logprobs_have_the_texts_of_their_tokens(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], PARAMS)
    assert output.logprobs is not None
    probs = [distribution for position in output.logprobs for distribution in position.items()]
    decoder = llm.input_processor.decoder
    assert decoder is not None
    assert {distribution.decoded_token for _, distribution in probs} == {
        decoder.token(t) for t, _ in probs
    }


def test_logprobs_without_a_tokenizer_have_no_texts() -> None:
    (output,) = LLM(target("llama")).generate(PROMPTS[0], PARAMS)
    assert output.logprobs is not None
    assert {
        distribution.decoded_token
        for position in output.logprobs
        for distribution in position.values()
    } == {None}


def test_the_cumulative_logprob_is_that_of_the_whole_text(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], PARAMS)
    assert output.logprobs is not None
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    probability = math.prod(math.exp(probs[token].logprob) for token, probs in pairs)
    found = output.outputs[0].cumulative_logprob
    assert found is not None
    assert math.exp(found) == pytest.approx(probability)
    plain = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=2))[0]
    assert plain.outputs[0].cumulative_logprob is None


def test_a_progress_bar_is_shown_when_asked_for(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = llm.generate(PROMPTS, PARAMS)
    assert capsys.readouterr().err == ""
    shown = llm.generate(PROMPTS, PARAMS, use_tqdm=True)
    captured = capsys.readouterr()
    assert "100%" in captured.err
    assert captured.out == ""
    assert [o.token_ids for o in shown] == [o.token_ids for o in quiet]
