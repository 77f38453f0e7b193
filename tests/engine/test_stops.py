"""Where a text ends: the same place with drafts as without, and nothing counts after it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from outpace import LLM, RequestOutput, SamplingParams
from outpace.engine.request import StopStrings
from targets.generating import decoder, greedy

from .texts import END, ids_of, spelled, text_decoder

PROMPT = [5, 6, 7, 8, 9]
LENGTH = 24


def perfect(k: int = 8) -> LLM:
    """Drafts with the target itself: every run is accepted whole, so that ends fall inside one."""
    from targets.families import target

    return decoder("llama", "draft_model", k, model=target("llama"))


def one(llm: LLM, **options: Any) -> RequestOutput:
    settings = {"temperature": 0, "max_tokens": LENGTH, **options}
    return llm.generate([PROMPT], SamplingParams(**settings))[0]


FULL = one(decoder("llama", "none"), ignore_eos=True).token_ids
FIRST = {token: FULL.index(token) for token in FULL}


def check_counters(output: RequestOutput) -> None:
    metrics = output.metrics
    assert metrics.num_emitted_tokens == len(output.token_ids)
    assert metrics.num_accepted_tokens <= len(output.token_ids)
    assert metrics.num_emitted_tokens <= metrics.num_accepted_tokens + metrics.num_target_passes
    assert sum(metrics.accepted_per_position) == metrics.num_accepted_tokens


@pytest.mark.parametrize("token", sorted(FIRST))
def test_a_stop_token_at_any_place_of_a_run(token: int) -> None:
    output = one(perfect(), stop_token_ids=[token])
    assert output.token_ids == FULL[: FIRST[token] + 1]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", token)
    check_counters(output)


@pytest.mark.parametrize("length", range(1, 20))
def test_max_tokens_is_reached_exactly_and_nothing_more_is_drafted(length: int) -> None:
    output = one(perfect(), max_tokens=length)
    assert output.token_ids == FULL[:length]
    assert output.finish_reason == "length"
    assert output.metrics.num_draft_tokens <= length - 1
    check_counters(output)


def test_the_context_ends_a_text() -> None:
    from targets.families import target

    llm = LLM(
        target("llama"),
        speculative_config={"model": target("llama"), "num_speculative_tokens": 8},
        max_model_len=17,
    )
    output = llm.generate([PROMPT], greedy(1000))[0]
    assert output.token_ids == FULL[: 17 - len(PROMPT)]
    assert output.finish_reason == "length"


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_min_tokens_holds_back_the_end(method: str) -> None:
    stops = list(range(0, 64, 2))
    plain = one(decoder("llama", "none"), stop_token_ids=stops, min_tokens=9)
    assert len(plain.token_ids) >= 10
    assert not set(plain.token_ids[:9]) & set(stops)
    output = one(decoder("llama", method, 5), stop_token_ids=stops, min_tokens=9)
    assert output.token_ids == plain.token_ids


# -- end of sequence and strings, in text ----------------------------------------------------------


def written(text: str, method: str = "draft_model", k: int = 8, **options: Any) -> RequestOutput:
    """What comes out when the model wants to write this text."""
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 40, **options}
    params = SamplingParams(logits_processors=[spelled(text)], **settings)
    return text_decoder(method, k).generate("go:", params)[0]


def ends(place: int) -> Any:
    """A processor that makes the end of sequence come at this place."""
    start = len(ids_of("go:"))

    def end(history: Any, scores: Any) -> Any:
        scores = scores.clone()
        scores[:, END] = 1000.0 if history.shape[1] - start == place else -1000.0
        return scores

    return end


@pytest.mark.parametrize("method", ["none", "draft_model"])
@pytest.mark.parametrize("place", [0, 1, 6, 9, 13])
def test_an_end_of_sequence_is_kept_in_the_ids_and_not_in_the_text(method: str, place: int) -> None:
    both = [spelled("abcdefghijklmnopq"), ends(place)]
    llm = text_decoder(method, 8)
    params = SamplingParams(temperature=0, max_tokens=30, logits_processors=both)
    output = llm.generate("go:", params)[0]
    assert output.token_ids == [*ids_of("abcdefghijklmnopq"[:place]), END]
    assert output.text == "abcdefghijklmnopq"[:place]
    assert output.finish_reason == "stop"
    assert output.outputs[0].stop_reason is None
    check_counters(output)


def test_ignore_eos_goes_on() -> None:
    both = [spelled("abcdefghijklmnopq"), ends(3)]
    params = SamplingParams(temperature=0, max_tokens=12, logits_processors=both, ignore_eos=True)
    output = text_decoder().generate("go:", params)[0]
    assert output.token_ids == [*ids_of("abc"), END, *ids_of("efghijkl")]
    assert output.finish_reason == "length"


TEXT = "one two three four five six"


@pytest.mark.parametrize(
    ("method", "k"), [("none", 1), ("draft_model", 1), ("draft_model", 3), ("draft_model", 8)]
)
@pytest.mark.parametrize("stop", ["o t", "two", "e f", "six", "t", "one"])
def test_a_stop_string_is_cut_off_wherever_it_falls(method: str, k: int, stop: str) -> None:
    output = written(TEXT, method, k, stop=stop)
    end = TEXT.index(stop) + len(stop)
    assert output.text == TEXT[: TEXT.index(stop)]
    assert output.token_ids == ids_of(TEXT[:end]), "the ids end with the stop string"
    assert output.finish_reason == "stop"
    check_counters(output)


def test_the_first_of_several_stop_strings_counts() -> None:
    assert written(TEXT, stop=["five", "three", "wo th"]).text == "one t"


def test_a_stop_string_may_be_included() -> None:
    assert written(TEXT, stop="two", include_stop_str_in_output=True).text == "one two"


def test_a_stop_string_before_min_tokens_does_not_stop() -> None:
    assert written("ab ab ab", stop="ab", min_tokens=4).text == "ab ab "[:3]


def test_a_stop_string_with_several_bytes_per_character() -> None:
    assert written("né à côté", stop="à").text == "né "


def test_the_stop_string_of_the_prompt_does_not_count() -> None:
    assert written("abc:def", stop="go:", max_tokens=7).text == "abc:def"


def test_what_is_safe_to_show_beside_many_stop_strings() -> None:
    rng = random.Random(0)
    for _ in range(300):
        strings = tuple("".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(9))
        text = "".join(rng.choices("abc", k=12))
        safe = StopStrings(strings, include=False).safe(text)
        ends = [text[begin:] for begin in range(13 - max(map(len, strings)), 12)]
        held = [end for end in ends if any(string.startswith(end) for string in strings)]
        assert safe == 12 - len(max(held, key=len, default=""))
