"""Lexical units: tokens of a sure drafter are the text, and nothing else changes it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.draft.registry import find_drafter
from outpace.errors import ConfigError, IncompatibleRule
from outpace.targets.hf.loading.loaded import LoadedModel
from targets.families import CONTEXT, PROMPTS, plain, target
from targets.generating import greedy, ids

LENGTH = 12
NEVER, ALWAYS = 1.0, 1e-9
"""Thresholds that no distribution of the drafter reaches, and that all reach."""
SAMPLED = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True, seed=11)


@cache
def decoder(threshold: float, method: str = "pass", **more: Any) -> LLM:
    model = target("llama")
    options = find_drafter(method).dummy_options(LoadedModel(model, None, "llama"))
    verify = {"name": "lud", "threshold": threshold}
    config = {"method": method, "num_speculative_tokens": 3, "verify": verify, **options, **more}
    return LLM(model, speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)


def texts() -> list[list[int]]:
    return plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))


@pytest.mark.parametrize("method", ["pass", "eagle3", "draft_model", "draft_tree"])
def test_only_a_sure_drafter_changes_greedy_texts(method: str) -> None:
    """Chains and trees; greedy texts, too, since the target is not asked."""
    never = decoder(NEVER, method).generate(PROMPTS, greedy(LENGTH))
    assert ids(never) == texts()
    assert not any(output.metrics.num_accepted_tokens for output in never)
    always = decoder(ALWAYS, method).generate(PROMPTS, greedy(LENGTH))
    assert ids(always) != texts()


@pytest.mark.parametrize("params", [greedy(LENGTH), SAMPLED], ids=["greedy", "sampled"])
def test_the_first_branch_of_a_sure_draft_is_the_text(params: SamplingParams) -> None:
    llm = decoder(ALWAYS)
    rounds: list[tuple[int, int]] = []

    def see(trace: Any) -> None:
        rounds.extend((len(each.path), each.depth) for each in trace.outcomes)

    with llm.engine.observing(see):
        outputs = llm.generate(PROMPTS, params)
    assert all(accepted == depth for accepted, depth in rounds)
    assert all(2 * output.metrics.num_target_passes <= LENGTH for output in outputs)


def test_a_row_is_what_it_is_alone() -> None:
    params = [SAMPLED, greedy(LENGTH), SAMPLED, greedy(LENGTH)]
    llm = decoder(0.05)
    together = ids(llm.generate(PROMPTS, params))
    for row, (prompt, asked) in enumerate(zip(PROMPTS, params, strict=True)):
        assert ids(llm.generate([prompt], asked)) == [together[row]]


@pytest.mark.parametrize("method", ["ngram", "ctc"])
def test_a_drafter_that_is_never_sure_by_a_distribution_is_refused(method: str) -> None:
    with pytest.raises(IncompatibleRule, match="'lud' takes proposals that are sampled"):
        decoder(0.9, method)


@pytest.mark.parametrize("threshold", [0, 1.5, "sure"])
def test_bad_thresholds_are_refused(threshold: Any) -> None:
    with pytest.raises(ConfigError, match="threshold"):
        decoder(threshold)
