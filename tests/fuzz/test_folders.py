"""Folders of models whose files were changed: a text, or an error that tells what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fuzz.attack import JSON, answered, examples
from outpace import LLM, SamplingParams

CONFIG = [
    "architectures",
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "tie_word_embeddings",
    "use_cache",
    "vocab_size",
]
GENERATION = [
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "do_sample",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "num_beams",
    "pad_token_id",
    "remove_invalid_values",
    "repetition_penalty",
    "sequence_bias",
    "stop_strings",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "watermarking_config",
]
TOKENIZER = [
    "added_tokens",
    "decoder",
    "model",
    "normalizer",
    "padding",
    "post_processor",
    "pre_tokenizer",
    "truncation",
    "version",
]
TOKENIZER_CONFIG = [
    "add_bos_token",
    "chat_template",
    "eos_token",
    "extra_special_tokens",
    "model_max_length",
    "padding_side",
    "tokenizer_class",
    "unk_token",
]

Change = Callable[[bytes], bytes]


def replaced(entries: dict[str, Any]) -> Change:
    return lambda text: json.dumps({**json.loads(text), **entries}).encode()


def without(name: str) -> Change:
    return lambda text: json.dumps(
        {k: v for k, v in json.loads(text).items() if k != name}
    ).encode()


def damaged(share: float, garbage: bytes) -> Change:
    return lambda text: text[: int(share * len(text))] + garbage


def changes(names: list[str]) -> st.SearchStrategy[Change]:
    """Changes to a file of JSON: other values, missing ones, or damage to its bytes."""
    return st.one_of(
        st.dictionaries(st.sampled_from(names), JSON, min_size=1, max_size=2).map(replaced),
        st.sampled_from(names).map(without),
        st.builds(damaged, st.floats(0, 1), st.binary(max_size=4)),
        JSON.map(lambda value: lambda text: json.dumps(value).encode()),
    )


def attempt(folder: Path, name: str, change: Change) -> None:
    """Loads a copy with one file changed and generates with it."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "model"
        shutil.copytree(folder, copy, copy_function=os.link)
        (copy / name).unlink()
        (copy / name).write_bytes(change((folder / name).read_bytes()))
        params = SamplingParams(max_tokens=2, seed=1)
        answered(
            lambda: LLM(copy, dtype="float64", cpu_kernels="off").generate([[5, 6], "w7"], params)
        )


@examples(60)
@given(changes(CONFIG))
def test_a_changed_config(folder: Path, change: Change) -> None:
    attempt(folder, "config.json", change)


@examples(90)
@given(changes(GENERATION))
def test_a_changed_generation_config(folder: Path, change: Change) -> None:
    attempt(folder, "generation_config.json", change)


@examples(50)
@given(changes(TOKENIZER))
def test_a_changed_tokenizer(folder: Path, change: Change) -> None:
    attempt(folder, "tokenizer.json", change)


@examples(50)
@given(changes(TOKENIZER_CONFIG))
def test_a_changed_tokenizer_config(folder: Path, change: Change) -> None:
    attempt(folder, "tokenizer_config.json", change)


@examples(15)
@given(st.builds(damaged, st.floats(0, 1), st.binary(max_size=8)))
def test_damaged_weights(folder: Path, change: Change) -> None:
    attempt(folder, "model.safetensors", change)
