"""A tiny model for the fuzz suite, as a user would have it: a folder with a tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GenerationConfig

from api.words import word_tokenizer
from outpace import LLM
from targets.families import build, target


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def llm() -> LLM:
    config = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    return LLM(
        target("llama"),
        tokenizer=word_tokenizer(),
        speculative_config=config,
        max_model_len=48,
        max_num_seqs=4,
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "model"
    model = build("llama")
    model.generation_config = GenerationConfig(do_sample=True, top_p=0.9, eos_token_id=3)
    model.save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return path
