"""Texts that are predicted: look-ups search them first, and no text changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.core.beam_params import BeamSearchParams
from outpace.errors import ParamsError
from outpace.methods.lookup.prediction import REACH, TRUST, Prediction
from targets.families import CONTEXT, PROMPTS, VOCABULARY, drafter, plain, target
from targets.generating import greedy, ids

LENGTH = 60
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
METHODS: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix"},
    "suffix trees": {"method": "suffix", "tree": True},
    "ngram": {"method": "ngram"},
    "auto": {"method": "auto"},
    "auto with a model": {"method": "auto", "model": "drafter"},
    "staged": {"method": "staged", "model": "drafter", "lookup": {"method": "ngram"}},
    "a bandit": {"method": "ucb", "drafters": [{"method": "ngram"}, {"model": "drafter"}]},
}


def decoder(name: str, **more: Any) -> LLM:
    config = {"num_speculative_tokens": 12, **METHODS[name], **more.pop("config", {})}
    if "model" in config:
        config["model"] = drafter("llama")
    if "drafters" in config:
        config["drafters"] = [{"method": "ngram"}, {"model": drafter("llama")}]
    limits = {"max_num_seqs": 4, "max_model_len": CONTEXT, **more}
    return LLM(target("llama"), speculative_config=config, **limits)


def expected(count: int = LENGTH) -> list[list[int]]:
    return plain("llama", count, tuple(map(tuple, PROMPTS)))


def edited(text: Sequence[int]) -> list[int]:
    """The text with one token changed, one left out and three put in."""
    other = (text[20] + 1) % VOCABULARY
    return [*text[:20], other, *text[21:30], *text[31:40], 1, 2, 3, *text[40:]]


# -- where the text is in the prediction -----------------------------------------------------------


def test_a_text_that_comes_as_predicted_is_followed_token_by_token() -> None:
    made = Prediction([5, 6, 7, 5, 6, 8, 9])
    assert made.guess(9).tokens == [5, 6, 7, 5], "few before anything has come true"
    made.follow([5, 6])
    assert made.guess(9).tokens == [7, 5, 6, 8, 9]
    made.follow([7, 5, 6])
    assert made.guess(9).tokens == [8, 9]
    made.follow([8, 9])
    assert made.guess(9).tokens == []
    assert Prediction([]).guess(4).tokens == []


def test_after_another_token_the_place_is_found_again() -> None:
    made = Prediction([*range(10, 30), *range(10, 20)])
    made.follow([10, 11, 12, 40])  # in the place of 13
    assert made.guess(9).tokens == []
    made.follow([14])
    assert made.guess(9).tokens == [15, 16, 17, 18], f"{TRUST} for one token that agrees"
    made.follow([15, 16])
    assert made.guess(9).tokens == [*range(17, 26)]
    made.follow([50, 51, 17, 18])  # put in
    assert made.guess(9).tokens[:2] == [19, 20]
    made.follow([23, 24])  # four left out
    assert made.guess(9).tokens == [25, 26, 27, 28, 29, 10, 11, 12]


def test_of_places_that_agree_alike_the_next_one_is_taken() -> None:
    line = [7, 8, 9, 60]
    made = Prediction([*line, 1, *line, 2, *line, 3])
    made.follow([*line, 1, 50, 8, 9])  # the first token of the second line is another one
    assert made.guess(2).tokens == [60, 2]


def test_it_follows_from_the_text_alone() -> None:
    text, whole = [3, 1, 4, 1, 5, 9, 2, 6] * 6, Prediction([3, 1, 4, 2, 5, 9, 2, 6] * 5)
    for at in range(0, len(text), 3):
        whole.follow(text[at : at + 3])
        again = Prediction([3, 1, 4, 2, 5, 9, 2, 6] * 5)
        again.follow(text[: at + 3])
        assert again.guess(REACH) == whole.guess(REACH)


# -- texts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_no_text_changes(name: str) -> None:
    """Right ones, edited ones, wrong ones, too short ones, and rows without any."""
    llm, texts = decoder(name), expected()
    given = [texts[0], edited(texts[1]), texts[0][::-1], None]
    asked = [replace(greedy(LENGTH), prediction=one) for one in given]
    assert ids(llm.generate(PROMPTS, asked)) == texts
    assert ids(llm.generate(PROMPTS, asked[::-1])) == texts
    assert ids(llm.generate(PROMPTS[0], asked[0])) == texts[:1]


@pytest.mark.parametrize("name", ["suffix", "ngram", "auto", "auto with a model"])
def test_a_text_that_is_nearly_right_takes_few_passes(name: str) -> None:
    """Coupled, so that a sampled text, which does not go round in circles, is known beforehand."""
    llm = decoder(name, config={"verify": "coupled"})
    params = replace(SAMPLED, max_tokens=100)
    (plainly,) = llm.generate(PROMPTS[1], replace(params, speculative="off"))
    text = plainly.token_ids
    changed = [*text[:50], (text[50] + 1) % VOCABULARY, *text[51:]]
    (output,) = llm.generate(PROMPTS[1], replace(params, prediction=changed))
    metrics = output.metrics
    assert output.token_ids == text
    assert metrics.mean_acceptance_length > 6
    accepted, rejected = metrics.accepted_prediction_tokens, metrics.rejected_prediction_tokens
    assert accepted > 70
    assert 0 < rejected <= metrics.num_draft_tokens - accepted
    assert plainly.metrics.accepted_prediction_tokens == 0


@pytest.mark.parametrize("name", ["suffix", "ngram"])
def test_seeded_texts_follow_from_themselves(name: str) -> None:
    """Alone and in company, in another run, and after another text."""
    llm, cool = decoder(name), replace(SAMPLED, temperature=0.3)
    (first,) = llm.generate(PROMPTS[1], cool)
    asked = replace(cool, prediction=edited([*first.token_ids, *range(20)]))
    (alone,) = llm.generate(PROMPTS[1], asked)
    together = llm.generate(PROMPTS, [SAMPLED, asked, greedy(9), asked])
    (again,) = decoder(name, max_num_seqs=1).generate(PROMPTS[1], asked)
    assert alone.token_ids == together[1].token_ids == again.token_ids
    assert alone.metrics.accepted_prediction_tokens > 0


def test_of_a_text_that_was_put_aside_the_place_is_found_again() -> None:
    texts = expected()
    asked = [replace(greedy(LENGTH), prediction=edited(text)) for text in texts]
    llm = decoder(
        "suffix", max_batch_total_tokens=CONTEXT + 60, config={"num_speculative_tokens": 3}
    )
    requests = [llm.requests(*one)[0] for one in zip(PROMPTS, asked, strict=True)]
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert [one.output_ids for one in requests] == texts
    assert sum(one.preemptions for one in requests) > 0


# -- what cannot be honoured -----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_a_method_without_a_look_up_refuses_it(method: str) -> None:
    config = {"method": method}
    if method == "draft_model":
        config |= {"model": drafter("llama"), "num_speculative_tokens": 3}
    llm = LLM(target("llama"), speculative_config=config, max_model_len=CONTEXT)
    with pytest.raises(ParamsError, match=r"prediction .* use method 'auto', 'suffix' or 'ngram'"):
        llm.generate(PROMPTS[0], replace(greedy(4), prediction=[1, 2]))


@pytest.mark.parametrize(
    ("given", "why"),
    [([1, -1], "token ids"), (3, "list of token ids"), ([VOCABULARY], r"in \[0, 64\)")],
)
def test_what_is_no_text_is_refused(given: Any, why: str) -> None:
    llm = decoder("ngram")
    with pytest.raises(ParamsError, match=f"prediction .*{why}"):
        llm.generate(PROMPTS[0], SamplingParams(prediction=given))


def test_a_beam_search_refuses_it() -> None:
    with pytest.raises(ParamsError, match="nothing is drafted for beams"):
        BeamSearchParams(**{"beam_width": 2, "prediction": "a"})  # type: ignore[arg-type]


# -- real texts ------------------------------------------------------------------------------------


def test_a_text_of_the_bundled_pair() -> None:
    """Texts are given as such; with two words changed they take a sixth of the passes at most."""
    llm = LLM(
        speculative_config={"method": "suffix", "num_speculative_tokens": 16}, dtype="float64"
    )
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    prompt = "Once upon a time there was a big red dog. One day"
    (plainly,) = llm.generate(prompt, replace(params, speculative="off"))
    predicted = plainly.text.replace(" was ", " is ", 1).replace(" and", " or", 1)
    assert predicted != plainly.text
    (output,) = llm.generate(prompt, replace(params, prediction=predicted))
    assert output.token_ids == plainly.token_ids
    assert output.metrics.mean_acceptance_length > 6
    assert output.metrics.accepted_prediction_tokens > 100


MODEL = Path.home() / ".cache/outpace-models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.exists(), reason="needs the real model")
def test_editing_a_file_of_300_lines() -> None:
    words = [
        "area",
        "balance",
        "count",
        "delay",
        "energy",
        "force",
        "gain",
        "height",
        "index",
        "joint",
    ]
    source = "\n".join(
        f"def {words[n % 10]}_{n}(value: int) -> int:\n"
        f"    total = value * {n * 37 % 101}\n"
        f"    return total + {n % 7}\n"
        for n in range(75)
    )
    assert source.count("\n") >= 299
    after = "# after.py: the same file, with delay_3 renamed to pause\n"
    config = {"method": "suffix", "num_speculative_tokens": 16}
    llm = LLM(MODEL, speculative_config=config, max_model_len=8192, max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=600, prediction=source)
    (output,) = llm.generate(f"# before.py\n{source}\n\n{after}", params)
    assert len(output.token_ids) == 600
    assert output.metrics.mean_acceptance_length > 6
    assert output.metrics.accepted_prediction_tokens > 300
