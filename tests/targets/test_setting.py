"""A model whose owner changes how it attends or computes, after outpace has taken it over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from devices import on_device
from outpace import LLM
from outpace.errors import ConfigError

from .families import build
from .generating import greedy, ids

PROMPTS = [[5, 6, 7, 8], [1, 2]]


def narrowed(model: Any) -> None:
    model.config.sliding_window = 3


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attn_implementation": (
        lambda model: model.set_attn_implementation("eager"),
        lambda model: model.set_attn_implementation("sdpa"),
    ),
    "sliding_window": (
        narrowed,
        lambda model: setattr(model.config, "sliding_window", 6),
    ),
    "training": (lambda model: model.train(), lambda model: model.eval()),
    "dtype": (lambda model: model.float(), lambda model: model.double()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_is_refused_until_it_is_as_it_was(name: str) -> None:
    change, undo = CHANGES[name]
    model = build("mistral")
    llm = LLM(model, speculative_config={"method": "ngram"}, max_num_seqs=2)
    expected = ids(llm.generate(PROMPTS, greedy(16)))
    change(model)
    with pytest.raises(ConfigError, match=rf"the model's {name} was .* make a new LLM"):
        llm.generate(PROMPTS, greedy(16))
    undo(model)
    with torch.no_grad():
        for weight, own in zip(model.parameters(), build("mistral").parameters(), strict=True):
            weight.copy_(own)  # what float32 has rounded
    assert ids(llm.generate(PROMPTS, greedy(16))) == expected


def adapted(model: Any) -> None:
    """Wraps a linear layer, as adapters do."""
    block = model.model.layers[0].linear_attn
    block.out_proj = Adapted(block.out_proj)


class Adapted(torch.nn.Module):
    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, given: Any) -> Any:
        return self.base(given) + given.flip(-1)


def test_other_modules_than_those_that_keep_states_are_refused() -> None:
    model = build("qwen3_next")
    llm = LLM(model, speculative_config={"method": "ngram"})
    expected = ids(llm.generate(PROMPTS, greedy(8)))
    before = model.model.layers[0].linear_attn.out_proj
    adapted(model)
    with pytest.raises(ConfigError, match=r"modules of the model were exchanged .* a new LLM"):
        llm.generate(PROMPTS, greedy(8))
    model.model.layers[0].linear_attn.out_proj = before
    assert ids(llm.generate(PROMPTS, greedy(8))) == expected


def test_a_larger_vocabulary_is_refused() -> None:
    model = build("llama")
    llm = LLM(model)
    llm.generate(PROMPTS, greedy(2))
    model.resize_token_embeddings(80, mean_resizing=False)
    with pytest.raises(ConfigError, match=r"vocab_size was 64 .* is 80 now"):
        llm.generate(PROMPTS, greedy(2))


def test_autocast_is_a_part_of_the_setting() -> None:
    model = build("llama").float()
    llm = LLM(model, speculative_config={"method": "ngram"}, max_num_seqs=2)
    expected = ids(llm.generate(PROMPTS, greedy(8)))
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ConfigError, match=r"autocast was None .* torch.bfloat16 now"):
            llm.generate(PROMPTS, greedy(8))
        ids(LLM(model, speculative_config={"method": "ngram"}).generate(PROMPTS, greedy(8)))
    assert ids(llm.generate(PROMPTS, greedy(8))) == expected


@pytest.mark.parametrize("name", CHANGES)
def test_a_new_llm_takes_the_model_as_it_is_now(name: str) -> None:
    model = build("mistral")
    LLM(model).generate(PROMPTS, greedy(4))
    CHANGES[name][0](model)
    llm = LLM(model, speculative_config={"method": "ngram"}, max_num_seqs=2)
    for prompt, text in zip(PROMPTS, ids(llm.generate(PROMPTS, greedy(16))), strict=True):
        plain = model.generate(
            on_device([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0
        )
        assert plain[0, len(prompt) :].tolist() == text
