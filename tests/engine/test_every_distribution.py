"""Every drafter's sampled texts follow the target's distribution, by one seeded statistical test of
each.

Enumeration proves the rules; this tests that what a drafter says of its draws is true: that tokens
were drawn from the distribution it hands over, in the way that it names, with random numbers of
their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.audit.letters import LetterTokenizer, letter_model
from outpace.audit.model import AuditPlan, audit_model
from outpace.draft.registry import drafter_names, find_drafter
from outpace.errors import IncompatibleRule
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.verify.registry import rules
from representatives import representatives

LOSSLESS = [name for name, rule in rules().items() if rule.lossless]
PAIRS = [(method, rule) for method in drafter_names() if method != "none" for rule in LOSSLESS]
PLAN = AuditPlan([[1, 2, 3], [4], [5, 6, 5, 6]], samples=120, tokens=5, power=False)


@lru_cache(maxsize=1)
def model() -> Any:
    """The target of all tests: a model is probed when it is loaded for the first time."""
    return letter_model()


@lru_cache(maxsize=1)
def dummy_options(method: str) -> Mapping[str, Any]:
    return find_drafter(method).dummy_options(LoadedModel(model(), LetterTokenizer(), "letters"))


def at_each_change(method: str, rule: str) -> bool:
    """What a drafter says of its draws does not depend on the rule, but for what some rules ask of
    it: each drafter is tried under its own rule, and each rule with the drafters that draw."""
    drafting = method in ("draft_model", "draft_tree")
    return drafting or rule == find_drafter(method).default_rule


@pytest.mark.parametrize(("method", "rule"), representatives(PAIRS, at_each_change))
def test_sampled_texts_follow_the_distribution(method: str, rule: str) -> None:
    config = {
        "method": method,
        "num_speculative_tokens": 4,
        "verify": rule,
        **dummy_options(method),
    }
    try:
        llm = LLM(
            model(),
            tokenizer=LetterTokenizer(),
            speculative_config=config,
            max_num_seqs=40,
            generation_config="none",
        )
    except IncompatibleRule as refusal:
        pytest.skip(str(refusal))
    report = audit_model(llm, PLAN, SamplingParams(temperature=1.0))
    assert report.ok, report
    assert report.acceptance > 0.01
