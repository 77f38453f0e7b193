"""The engine with the controller that chooses for itself, and what it holds in memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outpace.core.params import SamplingParams
from outpace.core.stats import Seconds
from outpace.draft.round import Outcome
from outpace.engine.request import EngineRequest
from outpace.llm import LLM
from outpace.policy.auto import AutoController
from outpace.policy.lengths.adaptive import Constant

PROMPTS = [[5, 6, 7, 8, 9], [1], [2, 3] * 8, [11, 12, 13]]


def llama(layers: int, noise: float = 0.0) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
            parameter.add_(torch.randn_like(parameter) * noise)
    return model


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return llama(2)


CONFIGS = {
    "ngram": {"method": "ngram"},
    "draft_model": {"method": "draft_model", "model": llama(2, noise=0.03)},
    "draft_tree": {"method": "draft_tree", "model": llama(2, noise=0.03), "branching": [2, 2]},
    "grown tree": {"method": "draft_tree", "model": llama(2, noise=0.03)},
}


@pytest.mark.parametrize("method", CONFIGS)
def test_the_text_is_the_same_whatever_is_chosen(method: str, target: LlamaForCausalLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=24)
    expected = [output.token_ids for output in LLM(target).generate(PROMPTS, greedy)]
    llm = LLM(target, speculative_config=CONFIGS[method])
    assert isinstance(llm.engine.controller, AutoController)
    for _ in range(2):
        assert [output.token_ids for output in llm.generate(PROMPTS, greedy)] == expected


@pytest.mark.parametrize("method", CONFIGS)
def test_a_seed_gives_the_same_text_again(method: str, target: LlamaForCausalLM) -> None:
    sampled = SamplingParams(temperature=1, seed=3, max_tokens=30)
    llm = LLM(target, speculative_config=CONFIGS[method])
    together = [output.token_ids for output in llm.generate(PROMPTS, sampled)]
    assert [llm.generate([prompt], sampled)[0].token_ids for prompt in PROMPTS] == together


class Spy(Constant):
    """Keeps what it is told."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.recorded: list[tuple[list[Outcome], Seconds]] = []

    def record(
        self, requests: Sequence[EngineRequest], outcomes: Sequence[Outcome], seconds: Seconds
    ) -> None:
        self.recorded.append((list(outcomes), seconds))


def test_the_controller_records_every_round(target: LlamaForCausalLM) -> None:
    llm = LLM(target, speculative_config=CONFIGS["draft_model"])
    spy = llm.engine.controller = Spy(3)
    output = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=20))[0]
    assert len(spy.recorded) == output.metrics.num_target_passes
    assert sum(outcomes[0].emitted for outcomes, _ in spy.recorded) == 20
    assert sum(outcomes[0].accepted for outcomes, _ in spy.recorded) == (
        output.metrics.num_accepted_tokens
    )
    assert all(seconds.score > 0 and seconds.rest > 0 for _, seconds in spy.recorded)


def test_memory_is_all_there_is(target: LlamaForCausalLM) -> None:
    llm = LLM(target, speculative_config=CONFIGS["draft_model"], max_num_seqs=2)
    before = llm.memory
    assert before["target_weights"] == before["drafter_weights"] == llm.target.nbytes
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8))
    held = llm.memory
    assert held["target_cache"] == llm.engine.target.cache_bytes > 0
    assert held["drafter_cache"] > 0
    for _ in range(3):
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8))
    assert llm.memory == held
