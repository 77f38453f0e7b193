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
from outpace.targets.hf.loading.loaded import Loaded
from outpace.verify.registry import rules

LOSSLESS = [name for name, rule in rules().items() if rule.lossless]
PAIRS = [(method, rule) for method in drafter_names() if method != "none" for rule in LOSSLESS]
PLAN = AuditPlan([[1, 2, 3], [4], [5, 6, 5, 6]], samples=120, tokens=5, power=False)


@lru_cache(maxsize=1)
def specimen(method: str) -> Mapping[str, Any]:
    return find_drafter(method).specimen(Loaded(letter_model(), LetterTokenizer(), "letters"))


@pytest.mark.parametrize(("method", "rule"), PAIRS)
def test_sampled_texts_follow_the_distribution(method: str, rule: str) -> None:
    config = {"method": method, "num_speculative_tokens": 4, "verify": rule, **specimen(method)}
    try:
        llm = LLM(
            letter_model(),
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
