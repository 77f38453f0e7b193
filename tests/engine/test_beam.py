"""Beam search finds what transformers' ``generate(num_beams=...)`` finds, texts and scores."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from devices import on_device
from outpace import LLM, BeamSearchOutput, BeamSearchParams, SamplingParams
from outpace.engine.beams import BeamGroup
from outpace.errors import ParamsError, PromptError, UnknownOption
from seq2seq import models as seq2seq
from targets import vision_families
from targets.families import PROMPTS, RECURRENT, VOCABULARY, build, family_of, target

from .beams_of_generate import searched
from .texts import ids_of, text_decoder

LENGTH = 10
ENDS = [3, 7, 9, 13, 20, 32, 41, 50, 53]
"""So many that texts of the tiny models meet one of them every few tokens."""
EARLY: tuple[Any, ...] = (True, False, "never")
LEFT_BEHIND = frozenset({"minimax", "rwkv", "xlstm"})
"""In transformers 5.23 their states do not follow the beams."""
PENALTIES = (1.0, 0.0, -1.5, 2.0)
Texts = list[tuple[list[int], float]]


def over(model: Any, rows: int = 10) -> LLM:
    return LLM(model, max_num_seqs=rows)


def of(output: BeamSearchOutput) -> Texts:
    return [(text.token_ids, text.score) for text in output.sequences]


def same(found: Texts, wanted: Texts, tolerance: float = 1e-9) -> bool:
    scores = zip(found, wanted, strict=True)
    close = all(abs(mine[1] - theirs[1]) <= tolerance for mine, theirs in scores)
    return [text for text, _ in found] == [text for text, _ in wanted] and close


def generated(family: str, prompt: list[int], params: BeamSearchParams, **more: Any) -> Texts:
    return searched(
        target(family),
        on_device([prompt]),
        LENGTH,
        num_beams=params.beam_width,
        num_return_sequences=params.returned,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=ENDS,
        use_cache=family_of(family).cached and family not in LEFT_BEHIND,
        **more,
    )


def asked(width: int, penalty: float, early: Any, **more: Any) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=width,
        length_penalty=penalty,
        early_stopping=early,
        max_tokens=LENGTH,
        stop_token_ids=ENDS,
        **more,
    )


# -- the same as generate --------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", PENALTIES)
def test_every_way_to_search_finds_what_generate_finds(penalty: float) -> None:
    llm = over(target("llama"))
    ended = 0
    for width, early in itertools.product((2, 5), EARLY):
        params = asked(width, penalty, early)
        for prompt, output in zip(PROMPTS[:3], llm.beam_search(PROMPTS[:3], params), strict=True):
            assert same(of(output), generated("llama", prompt, params)), (width, early, prompt)
            ended += sum(text.finish_reason == "stop" for text in output.sequences)
    assert ended > 20, "some texts have to end before the others"


SOME = ["gpt2", "gemma3", "deepseek_v32", "mamba", "lfm3", "qwen3_next", "recurrent_gemma"]


@pytest.mark.parametrize(
    "family",
    [
        *SOME,
        *(pytest.param(name, marks=pytest.mark.slow) for name in RECURRENT if name not in SOME),
    ],
)
def test_every_kind_of_cache_is_forked(family: str) -> None:
    # Where a model computes its states in float32, other chunks of a text round otherwise.
    tolerance = 1e-6 if family in RECURRENT else 1e-9
    params, prompts = asked(3, 1.0, False), PROMPTS[:3]
    for prompt, output in zip(
        prompts, over(target(family)).beam_search(list(prompts), params), strict=True
    ):
        assert same(of(output), generated(family, prompt, params), tolerance)


@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("early", EARLY)
def test_encoder_decoders(family: str, early: Any) -> None:
    model = seq2seq.target(family)
    prompts = [list(prompt) for prompt in seq2seq.PROMPTS]
    outputs = over(model).beam_search(prompts, asked(4, 1.0, early))
    for prompt, output in zip(prompts, outputs, strict=True):
        wanted = searched(
            model,
            on_device([prompt]),
            LENGTH,
            num_beams=4,
            num_return_sequences=4,
            early_stopping=early,
            eos_token_id=ENDS,
        )
        assert same(of(output), wanted)


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_prompts_with_images(family: str) -> None:
    model, length = vision_families.target(family), 6
    prompts = [vision_families.with_image(family, one) for one in vision_families.PROMPTS[:2]]
    params = BeamSearchParams(beam_width=3, max_tokens=length, ignore_eos=True)
    for prompt, output in zip(prompts, over(model).beam_search(prompts, params), strict=True):
        rest = {name: value for name, value in prompt.items() if name != "input_ids"}
        wanted = searched(
            model,
            prompt["input_ids"],
            length,
            num_beams=3,
            num_return_sequences=3,
            eos_token_id=None,
            **rest,
        )
        assert same(of(output), wanted)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition_penalty": ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    "min_tokens": ({"min_tokens": 6}, {"min_new_tokens": 6}),
    "bad_words_ids": ({"bad_words_ids": [[3], [4, 5]]}, {"bad_words_ids": [[3], [4, 5]]}),
    "logit_bias": ({"logit_bias": {7: 2.0}}, {"sequence_bias": {(7,): 2.0}}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_log_probabilities_as_in_generate(name: str) -> None:
    ours, theirs = OPTIONS[name]
    params = asked(3, 1.0, False, **ours)
    for prompt, output in zip(
        PROMPTS, over(target("llama")).beam_search(list(PROMPTS), params), strict=True
    ):
        assert same(of(output), generated("llama", prompt, params, **theirs))


def test_the_models_own_generation_config_holds_where_nothing_is_asked() -> None:
    model = build("llama")
    model.generation_config.length_penalty = 2.0
    model.generation_config.no_repeat_ngram_size = 1
    params = BeamSearchParams(beam_width=3, max_tokens=LENGTH, stop_token_ids=ENDS)
    (output,) = over(model).beam_search(PROMPTS[0], params)
    explicit = asked(3, 2.0, False)
    assert same(of(output), generated("llama", PROMPTS[0], explicit, no_repeat_ngram_size=1))


def test_one_beam_is_greedy_decoding() -> None:
    llm = over(target("gpt2"))
    greedy = llm.generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=LENGTH))
    outputs = llm.beam_search(list(PROMPTS), {"beam_width": 1, "max_tokens": LENGTH})
    assert [of(output)[0][0] for output in outputs] == [one.token_ids for one in greedy]


# -- rows ------------------------------------------------------------------------------------------


def test_prompts_that_wait_for_rows_find_the_same_and_rows_are_never_more() -> None:
    params = asked(4, 1.0, True)
    wide, narrow = over(target("gemma3"), rows=16), over(target("gemma3"), rows=5)
    pairs = zip(
        wide.beam_search(list(PROMPTS), params),
        narrow.beam_search(list(PROMPTS), params),
        strict=True,
    )
    assert all(same(of(one), of(other)) for one, other in pairs)


def test_a_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, prompt = over(target("llama")), list(range(1, 31))
    columns: list[int] = []
    model = llm.target.model
    hook = model.register_forward_pre_hook(
        lambda module, args, named: columns.append(named["input_ids"].numel()), with_kwargs=True
    )
    try:
        llm.beam_search([prompt], asked(5, 1.0, "never", ignore_eos=True))
    finally:
        hook.remove()
    assert sum(columns) <= len(prompt) + 5 * (LENGTH - 1)


def test_a_search_and_requests_of_the_same_llm_do_not_meet() -> None:
    llm, params = over(target("qwen2-window")), asked(3, 1.0, False)
    alone = llm.beam_search(PROMPTS[0], params)
    stream = llm.stream(PROMPTS[2], SamplingParams(temperature=0, max_tokens=LENGTH))
    first = next(stream).token_ids
    assert llm.beam_search(PROMPTS[0], params) == alone
    written = [*first, *(token for chunk in stream for token in chunk.token_ids)]
    plain = llm.generate(PROMPTS[2], SamplingParams(temperature=0, max_tokens=LENGTH))
    assert written == plain[0].token_ids


def test_a_processor_that_calls_the_same_llm_is_told_so_and_not_left_waiting() -> None:
    llm = over(target("llama"))

    def nested(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        llm.generate([1], SamplingParams(max_tokens=1))
        return scores

    with pytest.raises(ParamsError, match="generate with another LLM"):
        llm.beam_search([1], {"beam_width": 2, "max_tokens": 2, "logits_processors": [nested]})
    assert llm.beam_search([1], {"beam_width": 2, "max_tokens": 2})


# -- what cannot be --------------------------------------------------------------------------------


def test_a_beam_that_may_not_go_on_leaves_the_others() -> None:
    def dead_end(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - torch.inf if 3 in ids[0, 1:] else scores

    params = BeamSearchParams(
        beam_width=2, max_tokens=4, allowed_token_ids=[2, 3], logits_processors=[dead_end]
    )
    (output,) = over(target("llama")).beam_search([1], params)
    assert sorted(text.token_ids for text in output.sequences) == [[2, 2, 2, 2], [2, 2, 2, 3]]


def test_a_prompt_that_cannot_go_on_ends_alone() -> None:
    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - torch.inf if ids[0, 0] == 1 else scores

    params = asked(2, 1.0, False, logits_processors=[fails])
    llm = over(target("llama"))
    broken, whole = llm.beam_search([[1], [5, 6, 7, 8, 9]], params)
    assert (broken.sequences, whole.error) == ([], None)
    assert broken.error is not None
    assert "forbid every token" in broken.error
    assert same(of(whole), generated("llama", [5, 6, 7, 8, 9], asked(2, 1.0, False)))
    with pytest.raises(ParamsError, match="forbid every token"):
        llm.beam_search([1], params)


def test_as_many_beams_go_on_wherever_stop_strings_end_others() -> None:
    """Nearly all of each step's likeliest continuations end."""
    llm = text_decoder("none", k=0)
    ends, others = "abcdefgh", "xyz"
    given: dict[str, Any] = {
        "beam_width": 3,
        "max_tokens": 6,
        "length_penalty": 2.0,
        "early_stopping": "never",
        "allowed_token_ids": ids_of(ends + others),
    }
    by_token, by_string = (
        llm.beam_search("go:", BeamSearchParams(**given, **stops))[0].sequences
        for stops in ({"stop_token_ids": ids_of(ends)}, {"stop": list(ends)})
    )
    assert max(len(text.token_ids) for text in by_token) > 2
    assert [text.score for text in by_string] == pytest.approx([text.score for text in by_token])


def test_the_last_step_looks_at_no_more_continuations(monkeypatch: pytest.MonkeyPatch) -> None:
    """There all of them end, whatever stop strings there are."""
    ended, looked_at = BeamGroup._ended, [0]

    def counted(self: BeamGroup, beam: Any) -> Any:
        looked_at[0] += 1
        return ended(self, beam)

    monkeypatch.setattr(BeamGroup, "_ended", counted)
    params = BeamSearchParams(beam_width=2, max_tokens=3, stop=["no such text"])
    text_decoder("none", k=0).beam_search("go:", params)
    assert looked_at[0] == 3 * 2 * 2


def test_there_may_be_fewer_texts_than_beams() -> None:
    params = BeamSearchParams(beam_width=5, max_tokens=1, allowed_token_ids=[2, 3])
    (output,) = over(target("llama")).beam_search([1], params)
    assert sorted(text.token_ids for text in output.sequences) == [[2], [3]]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"beam_width": 0}, "beam_width must be at least 1"),
        ({"beam_width": 3, "n": 4}, "raise beam_width"),
        ({"early_stopping": "always"}, "True, False or 'never'"),
        ({"length_penalty": "long"}, "length_penalty must be a finite number"),
        ({"temperature": 0.7}, "temperature must be 0"),
        ({"speculative": 4}, "beams are decoded plainly"),
        ({"seed": 1}, "ranks texts and draws none"),
        ({"logprobs": 1}, "cum_logprob"),
        ({"num_beams": 3}, "called beam_width"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ],
)
def test_what_a_search_cannot_honour_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ParamsError, match=sentence):
        BeamSearchParams(**options)


def test_other_mistakes() -> None:
    llm = over(target("llama"), rows=3)
    with pytest.raises(UnknownOption, match="did you mean 'beam_width'"):
        llm.beam_search([1], {"beam_with": 3})
    with pytest.raises(ParamsError, match="max_num_seqs=4"):
        llm.beam_search([1], {"beam_width": 4})
    with pytest.raises(ParamsError, match="BeamSearchParams or a dict"):
        llm.beam_search([1], SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="prompt 2 of 2"):
        llm.beam_search([[1], [VOCABULARY]], {"beam_width": 2})


def test_params_can_be_changed_one_by_one() -> None:
    narrow = dataclasses.replace(BeamSearchParams(), beam_width=2)
    assert (narrow.n, narrow.returned) == (None, 2)
    assert dataclasses.replace(narrow, n=1).returned == 1
    with pytest.raises(ParamsError, match="n=3 texts cannot come from beam_width=2"):
        dataclasses.replace(narrow, n=3)
