"""What the model's own generation_config asks for is honoured, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, WatermarkingConfig

from outpace import LLM, SamplingParams
from outpace.errors import ConfigError
from targets.families import build, drafter, target

PROMPT = [5, 6, 7, 5, 6]
NEW = 14
EVERY_THIRD = list(range(0, 64, 3))


def model_with(**options: Any) -> Any:
    """The shared target with a generation_config of its own."""
    model = copy.copy(target("llama"))
    model.generation_config = GenerationConfig(pad_token_id=0, **options)
    return model


def decoder(model: Any, **options: Any) -> LLM:
    config = {"model": drafter("llama"), "num_speculative_tokens": 4}
    return LLM(model, speculative_config=config, max_num_seqs=2, **options)


HONOURED: dict[str, dict[str, Any]] = {
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "suppress_tokens": {"suppress_tokens": [24, 55]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(32))},
    "sequence_bias": {"sequence_bias": [[[24], -9.0], [[24, 55], 4.0]]},
    "sequence_bias and a penalty": {"sequence_bias": [[[24], 3.0]], "repetition_penalty": 1.5},
    "forced_eos_token_id": {"forced_eos_token_id": 9},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 9.0},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1, "suppress_tokens": [24]},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (3, 1.5),
        "eos_token_id": 11,
    },
    "min_length": {"min_length": 15, "eos_token_id": EVERY_THIRD},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": EVERY_THIRD},
    "bad_words_ids": {"bad_words_ids": [[24], [5, 6]]},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True},
    "max_length": {"max_length": 11},
    "max_length beside max_new_tokens": {"max_length": 11},
    "min_length beside min_new_tokens": {
        "min_length": 15,
        "min_new_tokens": 0,
        "eos_token_id": EVERY_THIRD,
    },
    "eos_token_id": {"eos_token_id": [30, 31]},
}


def test_max_length_alone_is_the_only_bound_of_a_text() -> None:
    """Not also the length that texts have where nothing names one."""
    model = copy.copy(build("llama", max_position_embeddings=1024))
    model.generation_config = GenerationConfig(max_length=700)
    llm = LLM(model)
    (request,) = llm.requests(PROMPT)
    assert request.max_tokens == 700 - len(PROMPT)
    (long,) = llm.requests(PROMPT, SamplingParams(min_tokens=300))
    assert long.params.min_tokens == 300
    (short,) = llm.requests(PROMPT, SamplingParams(max_tokens=9))
    assert short.max_tokens == 9
    model.generation_config = GenerationConfig()
    assert LLM(model).requests(PROMPT)[0].max_tokens == 256


@pytest.mark.parametrize("name", HONOURED)
def test_an_option_of_the_config_acts_as_in_generate(name: str) -> None:
    options = {"max_new_tokens": NEW, **HONOURED[name]}
    if name == "max_length":
        del options["max_new_tokens"]
    model = model_with(do_sample=False, **options)
    expected = model.generate(torch.tensor([PROMPT]))[0, len(PROMPT) :].tolist()
    assert decoder(model).generate([PROMPT, [1]])[0].token_ids == expected
    assert (
        decoder(model, generation_config="none")
        .generate(PROMPT, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))[0]
        .token_ids
        == plain_text()
    )


def plain_text() -> list[int]:
    made = target("llama").generate(torch.tensor([PROMPT]), max_new_tokens=NEW, pad_token_id=0)
    return made[0, len(PROMPT) :].tolist()


def test_a_forced_first_token() -> None:
    model = model_with(
        forced_bos_token_id=8, begin_suppress_tokens=list(range(0, 64, 2)), max_new_tokens=4
    )
    expected = model.generate(torch.tensor([[3]]))[0, 1:].tolist()
    assert expected[0] == 8
    assert decoder(model).generate([3])[0].token_ids == expected


@pytest.mark.parametrize("name", ["sequence_bias and a penalty", "no_repeat_ngram_size"])
def test_options_of_the_config_do_not_depend_on_the_drafter(name: str) -> None:
    model = model_with(do_sample=True, max_new_tokens=NEW, **HONOURED[name])
    texts = []
    for config in ({"method": "none"}, {"method": "ngram"}, {"model": drafter("llama")}):
        llm = LLM(model, speculative_config={**config, "verify": "coupled"}, max_num_seqs=2)
        texts.append(llm.generate(PROMPT, SamplingParams(seed=4))[0].token_ids)
    assert texts[0] == texts[1] == texts[2]


REFUSED: dict[str, Any] = {
    "num_beams": 3,
    "penalty_alpha": 0.6,
    "guidance_scale": 1.5,
    "watermarking_config": WatermarkingConfig(),
    "epsilon_cutoff": 3e-4,
    "eta_cutoff": 3e-4,
    "top_h": 0.4,
    "token_healing": True,
    "num_return_sequences": 2,
    "max_time": 1.0,
    "dola_layers": "high",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_at_load_by_name_and_with_the_remedy(name: str) -> None:
    model = model_with()
    setattr(model.generation_config, name, REFUSED[name])
    with pytest.raises(ConfigError, match=rf"{name}=.*generation_config='none'"):
        LLM(model)
    assert LLM(model, generation_config="none").generate(PROMPT, SamplingParams(max_tokens=1))


@pytest.mark.parametrize("name", REFUSED)
def test_what_asks_for_nothing_is_not_refused(name: str) -> None:
    model = model_with()
    for value in (None, {"num_beams": 1, "guidance_scale": 1.0, "token_healing": False}.get(name)):
        setattr(model.generation_config, name, value)
        LLM(model)


def test_what_the_request_sets_wins() -> None:
    model = model_with(min_length=15, eos_token_id=EVERY_THIRD, max_length=9, stop_strings=["x"])
    llm = decoder(model)
    params = SamplingParams(temperature=0, max_tokens=NEW, min_tokens=0, stop=[], ignore_eos=True)
    assert llm.generate(PROMPT, params)[0].token_ids == plain_text()


def test_sampling_defaults_come_from_the_config() -> None:
    model = model_with(do_sample=True, temperature=0.7, top_k=5, top_p=0.8)
    resolved = LLM(model).resolve()
    assert (resolved.temperature, resolved.top_k, resolved.top_p) == (0.7, 5, 0.8)
