"""Speculation inside the ``generate`` of T5, BART and Whisper: the same ids as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from outpace import hf
from outpace.errors import ConfigError, PromptError
from seq2seq.models import build, drafter, target

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [3, 4, 20, 1, 1, 1], [12, 13, 12, 13, 12, 1]])
MASK = (IDS != 1).long()
PAD = 1


def speculating(family: str, method: str, **options: Any) -> hf.Speculative:
    model = drafter(family) if method == "draft_model" else None
    return hf.speculative(model, method=method, num_speculative_tokens=3, **options)


def generated(family: str, custom: hf.Speculative | None, **options: Any) -> Any:
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, **options}
    return target(family).generate(IDS, attention_mask=MASK, custom_generate=custom, **asked)


ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "an end": {"eos_token_id": 9},
    "a beginning": {"forced_bos_token_id": 11, "forced_eos_token_id": 12},
    "no repetition of the source": {"encoder_no_repeat_ngram_size": 2},
    "a bias towards the source": {"encoder_repetition_penalty": 1.5},
    "two texts of each": {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
    "a dict": {"return_dict_in_generate": True},
}


def sequences(made: Any) -> Tensor:
    found: Tensor = made if isinstance(made, Tensor) else made.sequences
    return found


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_padded_batch_is_what_it_was(family: str, asked: str) -> None:
    options = ASKED[asked]
    expected = generated(family, None, **options)
    custom = speculating(family, "draft_model")
    found = generated(family, custom, **options)
    assert type(found) is type(expected)
    assert torch.equal(sequences(found), sequences(expected))
    assert sum(metrics.num_accepted_tokens for metrics in custom.metrics) > 0


# -- Whisper ---------------------------------------------------------------------------------------

START, END, ENGLISH, TRANSCRIBE, PREVIOUS, NO_TIMES = 50, 49, 51, 52, 48, 54
SPEECH: dict[str, Any] = {
    "decoder_start_token_id": START,
    "eos_token_id": END,
    "pad_token_id": END,
    "bos_token_id": END,
    "lang_to_id": {"<|en|>": ENGLISH},
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": 53},
    "is_multilingual": True,
    "no_timestamps_token_id": NO_TIMES,
    "max_initial_timestamp_index": 3,
    "prev_sot_token_id": PREVIOUS,
    "suppress_tokens": [7, 45],
    "begin_suppress_tokens": [6, END],
    "max_length": 40,
}
"""What a Whisper's generation_config says: as published ones, in a vocabulary of 64 tokens."""


@pytest.fixture(scope="module")
def whisper() -> Any:
    model = build("whisper")
    model.generation_config = GenerationConfig(**SPEECH)
    return model


def heard(frames: int, rows: int = 2) -> Tensor:
    numbers = torch.Generator().manual_seed(frames)
    return torch.randn(rows, 8, frames, generator=numbers).double()


SPOKEN: dict[str, tuple[int, dict[str, Any]]] = {
    "a language that is found out": (40, {}),
    "no timestamps": (40, {"language": "en", "task": "transcribe"}),
    "timestamps": (40, {"language": "en", "return_timestamps": True}),
    "a prompt": (40, {"language": "en", "prompt_ids": torch.tensor([PREVIOUS, 20, 21])}),
    "a long talk": (100, {"language": "en", "return_timestamps": True}),
    "a long talk that goes on": (
        100,
        {
            "language": "en",
            "return_timestamps": True,
            "condition_on_prev_tokens": True,
            "return_segments": True,
        },
    ),
}


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("spoken", SPOKEN)
def test_whisper_writes_what_it_wrote(whisper: Any, spoken: str, method: str) -> None:
    frames, options = SPOKEN[spoken]
    asked = {**options, "attention_mask": torch.ones(2, frames, dtype=torch.long)}
    asked["attention_mask"][1, frames - 17 :] = 0
    expected = whisper.generate(heard(frames), **asked)
    custom = speculating("whisper", method)
    found = whisper.generate(heard(frames), custom_generate=custom, **asked)
    if isinstance(expected, dict):
        assert repr(found["segments"]) == repr(expected["segments"])
        found, expected = found["sequences"], expected["sequences"]
    assert torch.equal(found, expected)


def test_what_whisper_cannot_have_is_refused_by_name(whisper: Any) -> None:
    for name, options in {
        "output_scores": {"logprob_threshold": -1.0},
        "WhisperNoSpeechDetection": {"logprob_threshold": None, "no_speech_threshold": 0.6},
    }.items():
        asked = {"language": "en", "return_timestamps": True, **options}
        custom = speculating("whisper", "ngram")
        with pytest.raises(ConfigError, match=name):
            whisper.generate(heard(100, rows=1), custom_generate=custom, **asked)


def test_padding_before_what_a_decoder_begins_with() -> None:
    begin = torch.tensor([[2, 5, 6], [1, 2, 5]])
    mask = (begin != 1).long()
    asked: dict[str, Any] = {"decoder_input_ids": begin, "decoder_attention_mask": mask}
    asked |= {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD}
    custom = speculating("bart", "ngram")
    with pytest.raises(ConfigError, match="counts the padding"):
        target("bart").generate(IDS[:2], custom_generate=custom, **asked)
    begin[begin == 2] = 0  # T5's own start, and distances do not change with padding before them
    expected = target("t5").generate(IDS[:2], **asked)
    custom = speculating("t5", "ngram")
    assert torch.equal(target("t5").generate(IDS[:2], custom_generate=custom, **asked), expected)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_what_is_encoded_may_come_as_a_tuple(family: str) -> None:
    """Where no tokens come with it, BART's generate lets its first token stand for the source."""
    model = target(family)
    encoded = model.get_encoder()(IDS, attention_mask=MASK)[0]
    asked: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 6, "do_sample": False}
    asked |= {"pad_token_id": PAD, "bos_token_id": 0}
    expected = model.generate(encoder_outputs=(encoded,), **asked)
    custom = speculating(family, "ngram")
    found = model.generate(encoder_outputs=(encoded,), custom_generate=custom, **asked)
    assert torch.equal(found, expected)


def test_a_source_of_padding_only_is_refused() -> None:
    mask = MASK.clone()
    mask[1] = 0
    custom = speculating("bart", "ngram")
    with pytest.raises(PromptError, match="row 1 of the sources"):
        target("bart").generate(
            IDS, attention_mask=mask, custom_generate=custom, max_new_tokens=4, pad_token_id=PAD
        )


def test_a_drafter_needs_more_than_what_another_encoder_made() -> None:
    model = target("bart")
    encoded = model.get_encoder()(IDS[:1])
    asked: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD}
    expected = model.generate(encoder_outputs=encoded, **asked)
    found = model.generate(
        encoder_outputs=encoded, custom_generate=speculating("bart", "ngram"), **asked
    )
    assert torch.equal(found, expected)
    custom = speculating("bart", "draft_model")
    with pytest.raises(ConfigError, match="encoder of its own"):
        model.generate(encoder_outputs=encoded, custom_generate=custom, **asked)
