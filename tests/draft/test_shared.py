"""What all drafters have to do that keep something from round to round, or from text to text."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.test_interruptions import Stops
from outpace import LLM, SamplingParams
from outpace.draft.registry import find_drafter
from outpace.targets.hf.loading.loaded import LoadedModel
from targets.families import CONTEXT, PROMPTS, plain, target
from targets.generating import greedy, ids

LENGTH = 10
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=LENGTH, ignore_eos=True)
MIXED = [SAMPLED, greedy(LENGTH), SAMPLED, greedy(LENGTH)]
METHODS = ["suffix", "consensus", "recycling", "retrieval", "lookahead"]
CHAINS = {"suffix": {"tree": False}, "consensus": {"tree": False}, "retrieval": {"tree": False}}


def decoder(method: str, **more: Any) -> LLM:
    options = find_drafter(method).dummy_options(LoadedModel(target("llama"), None, "llama"))
    config = {"method": method, "num_speculative_tokens": 5, **options, **more}
    return LLM(target("llama"), speculative_config=config, max_num_seqs=3, max_model_len=CONTEXT)


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_at_any_operation_costs_no_text(method: str) -> None:
    llm = decoder(method)
    expected = ids(llm.generate(PROMPTS, MIXED))
    # The first times take longer: less is remembered, and on a GPU passes are being recorded.
    operations, choose = min(_operations(llm) for _ in range(3)), random.Random(3)
    for _ in range(5):
        stop = Stops(choose.randrange(1, operations), KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt), stop:
            llm.generate(PROMPTS, MIXED)
        assert ids(llm.generate(PROMPTS, MIXED)) == expected


def _operations(llm: LLM) -> int:
    counting = Stops(0, KeyboardInterrupt)
    with counting:
        llm.generate(PROMPTS, MIXED)
    return -counting.left


@pytest.mark.parametrize("method", CHAINS)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_row_of_a_mixed_batch_drafts_chains_as_it_does_alone(method: str, rule: str) -> None:
    llm = decoder(method, verify=rule, **CHAINS[method])
    together = ids(llm.generate(PROMPTS, MIXED))
    assert [ids(llm.generate([PROMPTS[row]], MIXED[row]))[0] for row in range(4)] == together


@pytest.mark.parametrize("method", METHODS)
def test_the_controller_may_choose_how_much_is_drafted(method: str) -> None:
    llm = decoder(method, num_speculative_tokens="auto")
    expected = plain("llama", 40, tuple(map(tuple, PROMPTS)))
    assert ids(llm.generate(PROMPTS, greedy(40))) == expected


@pytest.mark.parametrize("method", METHODS)
def test_memory_of_texts_that_have_ended_is_given_back(method: str) -> None:
    llm = decoder(
        method, **({"suffix_decoding_max_cached_requests": 0} if method == "suffix" else {})
    )
    before = llm.memory["drafter_cache"]
    during: list[int] = []
    with llm.engine.observing(lambda trace: during.append(llm.memory["drafter_cache"])):
        llm.generate(PROMPTS, MIXED)
    assert (max(during) > before) == (method != "retrieval")  # which keeps nothing of a text
    assert llm.memory["drafter_cache"] == before
