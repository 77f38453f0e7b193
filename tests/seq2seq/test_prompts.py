"""What a prompt of an encoder-decoder may look like, from folders too, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationMixin, WhisperFeatureExtractor
from typer.testing import CliRunner

from engine.tokenizers_made import unigram
from outpace import LLM, SamplingParams
from outpace.cli.main import app
from outpace.errors import ConfigError, PromptError, UnsupportedModel
from outpace.inputs.prompts import Parts, parted
from outpace.serve.openai.calls import Reader
from outpace.serve.settings import Settings
from seq2seq.models import CONTEXT, PROMPTS, build, drafter, plain, target
from targets.families import target as decoder_only

GREEDY = SamplingParams(temperature=0, max_tokens=6)
TEXT, BEGINNING = "The little dog", "ran to"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A T5 with a tokenizer, as a folder in float32."""
    path = tmp_path_factory.mktemp("t5")
    tokenizer = unigram()
    build("t5", vocab_size=len(tokenizer), eos_token_id=1).float().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def from_folder(folder: Path) -> LLM:
    return LLM(folder, speculative_config={"method": "draft_model", "model": folder})


@pytest.fixture(scope="module")
def bart() -> LLM:
    return LLM(target("bart"))


@pytest.fixture(scope="module")
def whisper() -> LLM:
    return LLM(target("whisper"))


def test_a_text_goes_to_the_encoder(from_folder: LLM) -> None:
    (output,) = from_folder.generate(TEXT, GREEDY)
    ids = from_folder.tokenizer(TEXT).input_ids
    model: Any = from_folder.target.model
    expected = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0]
    assert [*output.prompt_token_ids, *output.token_ids] == expected.tolist()
    assert (output.prompt, output.encoder_prompt_token_ids) == (TEXT, ids)
    assert from_folder.prompt_ids(TEXT) == ids


def test_a_beginning_goes_to_the_decoder(from_folder: LLM) -> None:
    given = {"encoder_prompt": TEXT, "decoder_prompt": BEGINNING}
    (output,) = from_folder.generate(given, GREEDY)
    begin = from_folder.tokenizer(BEGINNING, add_special_tokens=False).input_ids
    assert output.prompt_token_ids == [0, *begin]
    ids = from_folder.tokenizer(TEXT).input_ids
    for other in (
        {"encoder_prompt": ids, "decoder_prompt": [0, *begin]},
        {"encoder_prompt": {"prompt_token_ids": ids}, "decoder_prompt": {"prompt": BEGINNING}},
        {"encoder_prompt": torch.tensor([ids]), "decoder_prompt": torch.tensor(begin)},
    ):
        assert from_folder.generate(other, GREEDY)[0].token_ids == output.token_ids


def test_the_command_line_writes_too(folder: Path, from_folder: LLM) -> None:
    words = ["generate", "--model", str(folder), TEXT, "--temperature", "0", "--max-tokens", "6"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert from_folder.generate(TEXT, GREEDY)[0].text in result.output


def test_quantised_and_by_other_kernels(folder: Path) -> None:
    for options in ({"quantization": "int8"}, {"cpu_kernels": "off"}):
        plainly = LLM(folder, **options).generate(TEXT, GREEDY)[0].token_ids
        config = {"method": "ngram", "prompt_lookup_min": 1}
        found = LLM(folder, speculative_config=config, **options).generate(TEXT, GREEDY)[0]
        assert found.token_ids == plainly


def test_tokens_of_numpy_are_tokens(bart: LLM) -> None:
    listed, arrays = (
        bart.generate({"encoder_prompt": kind([5, 6]), "decoder_prompt": kind([2, 7])}, GREEDY)[0]
        for kind in (list, np.array)
    )
    assert arrays.token_ids == listed.token_ids


def test_a_look_up_copies_from_the_source() -> None:
    # What the model writes stands in its source, so the second token is found there at once.
    model = target("bart")
    text = plain(model, 0)
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    llm = LLM(model, speculative_config=config)
    source = [2, *text]
    params = SamplingParams(temperature=0, max_tokens=5)
    (output,) = llm.generate({"encoder_prompt": source, "decoder_prompt": [2]}, params)
    assert output.metrics.num_draft_tokens >= 4
    assert output.metrics.drafted_per_position[0] > 0
    assert output.token_ids == LLM(model).generate({"encoder_prompt": source}, params)[0].token_ids


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "empty"),
        ({"decoder_prompt": [5]}, "no encoder_prompt"),
        ({"encoder_prompt": [5], "prompt": "a"}, "has no prompt"),
        ({"encoder_prompt": [99]}, "whole numbers"),
        ({"encoder_prompt": [5] * (CONTEXT + 1)}, "positions for 64"),
        ({"encoder_prompt": [5], "decoder_prompt": [6] * CONTEXT}, "context holds"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"audio": [0.0]}}, "no audio"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"image": 1}}, "'audio' alone"),
        ({"encoder_prompt": 5}, "a prompt is a text"),
    ],
)
def test_a_prompt_that_cannot_be_read(bart: LLM, given: Any, said: str) -> None:
    with pytest.raises(PromptError, match=said):
        bart.generate([given], GREEDY)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("a text", "without a tokenizer|give"),
        ({"prompt_token_ids": [2]}, "what it hears"),
        ({"encoder_prompt": [5], "multi_modal_data": {"audio": [0.0]}}, "no text"),
        ({"multi_modal_data": {"audio": "a.wav"}}, "audio is samples"),
        ({"multi_modal_data": {"audio": torch.zeros(8, 40)}}, "audio is samples"),
        ({"multi_modal_data": {"audio": torch.zeros(50, dtype=torch.complex64)}}, "not complex"),
        ({"multi_modal_data": {"audio": torch.full((50,), torch.nan)}}, "NaN or infinite"),
        ({"multi_modal_data": {"audio": torch.tensor([3, -500])}}, "divide samples of 16 bits"),
        ({"multi_modal_data": {"audio": torch.zeros(50)}}, "feature extractor"),
        ({"multi_modal_data": {"audio": {"input_features": torch.zeros(8, 9)}}}, r"\[8, 40\]"),
    ],
)
def test_audio_that_cannot_be_heard(whisper: LLM, given: Any, said: str) -> None:
    with pytest.raises(PromptError, match=said):
        whisper.generate([given], GREEDY)


def test_samples_become_features(tmp_path: Path) -> None:
    model = build("whisper", max_source_positions=50).float()
    model.save_pretrained(tmp_path)
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    extractor.save_pretrained(tmp_path)
    llm = LLM(tmp_path)
    samples = torch.randn(9000).numpy()
    heard = extractor(samples, sampling_rate=16000, return_tensors="pt").input_features
    begin = torch.tensor([[2, 7]])
    asked = {"decoder_input_ids": begin, "max_new_tokens": 6, "do_sample": False}
    expected = GenerationMixin.generate(model, heard, **asked)[0].tolist()
    derived = torch.tensor(samples, requires_grad=True)
    for audio in (samples, (samples, 16000), (derived, 16000.0)):
        given = {"prompt_token_ids": [2, 7], "multi_modal_data": {"audio": audio}}
        assert [2, 7, *llm.generate(given, GREEDY)[0].token_ids] == expected
    rates = [((samples, rate), "resample") for rate in (8000, 16000.9, "16 kHz", math.nan, [16])]
    for audio, said in (*rates, (torch.zeros(16001), "at once")):
        with pytest.raises(PromptError, match=said):
            llm.generate({"multi_modal_data": {"audio": audio}}, GREEDY)


def test_parts_as_vllm_names_them() -> None:
    audio = {"multi_modal_data": {"audio": "heard"}}
    expected = Parts(encoder=None, decoder="<|start|>", audio="heard")
    assert parted({"prompt": "<|start|>", **audio}, hears=True).audio == "heard"
    explicit = {"encoder_prompt": {"prompt": "", **audio}, "decoder_prompt": "<|start|>"}
    assert parted(explicit, hears=True) == expected
    with pytest.raises(PromptError, match="twice"):
        parted({**explicit, **audio}, hears=True)


def test_a_server_keeps_no_texts_that_cannot_be_gone_on_from(bart: LLM) -> None:
    """It keeps what is cached of all texts by default."""
    prompt = {"encoder_prompt": [5, 6], "decoder_prompt": [2]}
    params = SamplingParams(temperature=0, max_tokens=4)
    served = LLM(target("bart"), enable_prefix_caching="auto")
    assert served.generate([prompt], params)[0].token_ids == (
        bart.generate([prompt], params)[0].token_ids
    )


def test_a_servers_usage_counts_the_source(bart: LLM) -> None:
    reader = Reader(bart, Settings(model_name="a model"))
    call = reader.completion({"prompt": [5, 6, 7, 8], "max_tokens": 3})
    assert call.prompt_tokens == 4 + len(call.requests[0].prompt_ids)


def test_what_is_refused_by_name(bart: LLM) -> None:
    model = target("bart")
    for options, said in (
        ({"compile": True}, "compile"),
        ({"enable_prefix_caching": True}, "enable_prefix_caching"),
    ):
        with pytest.raises(ConfigError, match=said):
            LLM(model, **options)
    for config in ({"method": "layer_skip"}, {"method": "early_exit", "exit_layer": 1}):
        with pytest.raises(UnsupportedModel, match="encoder-decoder"):
            LLM(model, speculative_config=config)
    with pytest.raises(UnsupportedModel, match="one vocabulary"):
        LLM(build("marian", decoder_vocab_size=70, share_encoder_decoder_embeddings=False))
    with pytest.raises(PromptError, match="a prompt is a text"):
        LLM(decoder_only("llama")).generate({"encoder_prompt": [5], "decoder_prompt": [2]})


def test_a_decoder_only_drafter() -> None:
    config = {"method": "draft_model", "model": decoder_only("llama"), "num_speculative_tokens": 3}
    llm = LLM(target("bart"), speculative_config=config, max_model_len=CONTEXT)
    for row, prompt in enumerate(PROMPTS):
        assert llm.generate(prompt, GREEDY)[0].token_ids == plain(target("bart"), row, length=6)


def test_an_encoder_decoder_cannot_draft_for_a_decoder_only_model() -> None:
    config = {"method": "draft_model", "model": drafter("bart")}
    with pytest.raises(ConfigError, match="nothing for its encoder"):
        LLM(decoder_only("llama"), speculative_config=config)
