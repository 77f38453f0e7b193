"""What every drafter under every lossless rule has to do. A new one of either joins by itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pytest

from outpace import LLM, RequestOutput, SamplingParams
from outpace.draft.base import Round
from outpace.draft.registry import drafter_names, find_drafter
from outpace.engine.verifier import Verifier
from outpace.errors import IncompatibleRule
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.verify.registry import make_rule, rules
from targets.families import CONTEXT, PROMPTS, plain, target
from targets.generating import greedy, ids

LENGTH = 10
LOSSLESS = [name for name, rule in rules().items() if rule.lossless]
PAIRS = [(method, rule) for method in drafter_names() for rule in LOSSLESS]
DRAFTING = [name for name in drafter_names() if name != "none"]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True, seed=11)
PENALISED = SamplingParams(
    temperature=0.8, top_p=0.9, repetition_penalty=1.3, max_tokens=LENGTH, ignore_eos=True, seed=12
)
MIXED = [SAMPLED, greedy(LENGTH), PENALISED, SAMPLED]


@lru_cache(maxsize=1)
def decoder(method: str, rule: str, **options: Any) -> LLM:
    """An LLM with the drafter's own dummy options, or a skipped test where the rule says that it
    does not take what the drafter proposes. Whatever else goes wrong is a failure."""
    model, options = target("llama"), {"max_num_seqs": 4, "max_model_len": CONTEXT, **options}
    config = {
        "method": method,
        "num_speculative_tokens": 5,
        "verify": rule,
        **dummy_options(method),
    }
    try:
        return LLM(model, speculative_config=config, **options)
    except IncompatibleRule as refusal:
        pytest.skip(str(refusal))


@lru_cache(maxsize=1)
def dummy_options(method: str) -> Mapping[str, Any]:
    return find_drafter(method).dummy_options(LoadedModel(target("llama"), None, "llama"))


@pytest.mark.parametrize("method", drafter_names())
def test_the_default_rule_takes_the_dummy_options(method: str) -> None:
    rule = find_drafter(method).default_rule
    assert default(method).engine.verifier.rule.name == rule


def test_each_rule_takes_some_drafter_and_each_drafter_some_rule() -> None:
    taken = [(method, rule) for method, rule in PAIRS if _takes(method, rule)]
    assert {method for method, _ in taken} == set(drafter_names())
    assert {rule for _, rule in taken} == set(LOSSLESS)


def _takes(method: str, rule: str) -> bool:
    try:
        Verifier(make_rule(rule)).check(default(method).engine.drafter)
    except IncompatibleRule:
        return False
    return True


@pytest.mark.parametrize(("method", "rule"), PAIRS)
def test_every_drafter_keeps_the_contract_under_every_rule(method: str, rule: str) -> None:
    llm = decoder(method, rule)  # for all of it: making one takes longer than a check
    _greedy_text_is_that_of_generate(llm)
    together = llm.generate(PROMPTS, MIXED)
    for row in (0, 2):  # one of each way to sample
        alone = llm.generate([PROMPTS[row]], MIXED[row])
        assert ids(alone) == [together[row].token_ids], "a row is not what it is alone"
    for output in together:
        _counters_add_up(output)


def _greedy_text_is_that_of_generate(llm: LLM) -> None:
    expected = plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == expected


def _counters_add_up(output: RequestOutput) -> None:
    metrics = output.metrics
    assert metrics.num_emitted_tokens == len(output.token_ids) == LENGTH
    assert metrics.num_accepted_tokens <= metrics.num_draft_tokens
    assert metrics.num_emitted_tokens <= metrics.num_accepted_tokens + metrics.num_target_passes
    assert sum(metrics.accepted_per_position) == metrics.num_accepted_tokens


@pytest.mark.parametrize("method", DRAFTING)
def test_something_is_drafted_and_accepted(method: str) -> None:
    metrics = [output.metrics for output in default(method).generate(PROMPTS, greedy(24))]
    assert (
        0 < sum(m.num_accepted_tokens for m in metrics) < sum(m.num_draft_tokens for m in metrics)
    )


@pytest.mark.parametrize("method", DRAFTING)
def test_rows_write_while_others_still_read_their_prompts(method: str) -> None:
    """Then a drafter knows of more rows than the round has."""
    prompts = [[5, 6, 7], [2, 3] * 10, [11, 12] * 5, [1]]
    llm, waiting = default(method, max_num_batched_tokens=6), []

    def watch(trace: Round) -> None:
        waiting.append(len(llm.engine.running) - len(trace.requests))

    with llm.engine.observing(watch):
        texts = ids(llm.generate(prompts, greedy(LENGTH)))
    assert texts == plain("llama", LENGTH, tuple(map(tuple, prompts)))
    assert len(set(waiting)) > 2  # rows that read: some, fewer, none


def default(method: str, **options: Any) -> LLM:
    return decoder(method, find_drafter(method).default_rule, **options)
