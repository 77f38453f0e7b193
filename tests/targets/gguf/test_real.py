"""Real files, where they are: the numbers of transformers, and the same text with a drafter."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outpace import LLM, SamplingParams
from outpace.targets.hf.gguf.architecture import config_of
from outpace.targets.hf.gguf.file import read_model
from outpace.targets.hf.loading.load import load
from targets.gguf.test_families import dequantized

FOLDER = Path(os.environ.get("OUTPACE_MODELS") or "~/.cache/outpace-models").expanduser()
SMALL = FOLDER / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
LARGE = FOLDER / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
OTHER = FOLDER / "gemma-3-270m-q4_k_m.gguf"
CHAT = [{"role": "user", "content": "Write a Python function that reverses a list."}]


def needs(*files: Path) -> Any:
    missing = [file.name for file in files if not file.exists()]
    return pytest.mark.skipif(bool(missing), reason=f"{FOLDER} lacks {', '.join(missing)}")


@pytest.mark.slow
@needs(SMALL)
def test_logits_of_a_real_file() -> None:
    loaded = load(SMALL, cpu_kernels="off")  # ours round activations
    ids = loaded.tokenizer("def fib(n):\n    return", return_tensors="pt").input_ids
    expected: Any = AutoModelForCausalLM.from_config(config_of(read_model(SMALL)))
    expected = dequantized(SMALL, expected)
    with torch.no_grad():
        assert torch.allclose(loaded.model(ids).logits, expected(ids).logits, atol=1e-3)


@pytest.mark.slow
@needs(SMALL, LARGE)
def test_a_drafter_changes_no_word_of_a_real_chat() -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    config = {"model": str(SMALL), "num_speculative_tokens": 4}
    llm = LLM(LARGE, speculative_config=config)
    drafted = llm.chat(CHAT, params)
    params = SamplingParams(temperature=0, max_tokens=20, speculative="off")
    assert llm.chat(CHAT, params).token_ids == drafted.token_ids
    assert drafted.outputs[0].metrics.num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", ["text", "intersection"])
@needs(LARGE, OTHER)
def test_a_drafter_with_another_tokenizer_changes_no_word(vocabulary: str) -> None:
    """Gemma, a base model with 262,144 tokens, for Qwen with 151,936 of other kinds."""
    config = {"method": "draft_model", "model": str(OTHER), "num_speculative_tokens": 4}
    llm = LLM(LARGE, speculative_config={**config, "vocabulary": vocabulary}, max_model_len=512)
    prompt, greedy = "The capital of France is", SamplingParams(temperature=0, max_tokens=48)
    (drafted,) = llm.generate(prompt, greedy)
    (plain,) = llm.generate(prompt, replace(greedy, speculative="off"))
    assert drafted.token_ids == plain.token_ids
    assert drafted.metrics.num_accepted_tokens > 0
    sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=24)
    first, second = (llm.generate(prompt, sampled)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert first.metrics.num_draft_tokens > 0


HEAD = Path(__file__).parents[3] / "bundle" / "heads" / "eagle3-qwen2.5-coder-1.5b"


@pytest.mark.slow
@needs(LARGE)
def test_the_head_of_the_repository_drafts_for_a_real_file() -> None:
    config = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 4}
    llm = LLM(LARGE, speculative_config=config)
    greedy = SamplingParams(temperature=0, max_tokens=64)
    drafted = llm.chat(CHAT, greedy)
    assert llm.chat(CHAT, replace(greedy, speculative="off")).token_ids == drafted.token_ids
    assert (
        drafted.outputs[0].metrics.num_emitted_tokens
        > 2 * drafted.outputs[0].metrics.num_target_passes
    )
