"""`audit model` is quiet on clean engines and says what it could have seen."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from tests.audit_engine.pairs import PROMPTS, gives_up_after, pair_llm

from outpace import SamplingParams
from outpace.audit.model import AuditPlan, audit_model
from outpace.audit.report import model_findings
from outpace.engine.verifier import Verifier
from outpace.errors import ConfigError, ParamsError
from outpace.verify.base import RuleNeeds
from outpace.verify.lossless.token import TokenRule
from representatives import representatives

SETUPS = {
    "chain": {},
    "block": {"verify": "block"},
    "match": {"verify": "match"},
    "coupled": {"verify": "coupled"},
    "tree": {"method": "draft_tree", "branching": [2, 2], "tokens": 6},
    "traversal": {"method": "draft_tree", "branching": [2, 2], "tokens": 6, "verify": "traversal"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "none": {"method": "none"},
    "windowed": {"family": "mistral"},
}
SAMPLING = SamplingParams(temperature=0.8, top_p=0.95, frequency_penalty=0.5)


FAST = ("chain", "block", "coupled", "tree")


@pytest.mark.parametrize("setup", representatives(SETUPS, FAST))
def test_a_clean_engine_raises_no_alarm(setup: str) -> None:
    plan = AuditPlan(PROMPTS, samples=24, power=False)
    report = audit_model(pair_llm(**SETUPS[setup]), plan, SAMPLING)
    assert report.ok, report


def test_texts_that_end_where_the_context_does_are_right() -> None:
    """The prompts leave different room, and some of the texts have all that they asked for."""
    llm = pair_llm(context=12)
    report = audit_model(llm, AuditPlan(PROMPTS, samples=24, tokens=8, power=False), SAMPLING)
    assert report.ok, report


class Cautious(TokenRule):
    """Ends chains where the drafter's distribution has no likely token."""

    name = "cautious"

    @property
    def needs(self) -> RuleNeeds:
        return RuleNeeds(continue_on_probs=lambda q: q.amax(-1) >= 0.4)


def test_ending_chains_by_the_next_distribution_alone_keeps_the_text_and_the_claims_true() -> None:
    llm = pair_llm()
    fixed = audit_model(llm, AuditPlan(PROMPTS, samples=96, power=False), SAMPLING)
    llm.engine.verifier = Verifier(Cautious())
    report = audit_model(llm, AuditPlan(PROMPTS, samples=96, power=False), SAMPLING)
    assert report.ok, report
    assert 50 < report.drafts.observations < fixed.drafts.observations


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["chain", "block", "tree", "ngram"])
def test_a_hundred_clean_runs_raise_no_alarm(setup: str) -> None:
    """One false alarm is expected in a thousand runs; 100 of these make 400."""
    llm = pair_llm(**SETUPS[setup])
    for seed in range(100):
        plan = AuditPlan(PROMPTS, samples=24, power=False, seed=seed * 1000)
        assert audit_model(llm, plan, SAMPLING).ok, seed


def test_a_lossy_rule_is_caught() -> None:
    lossy = pair_llm(verify={"name": "lenient", "lenience": 0.2})
    plan = AuditPlan(PROMPTS, samples=400, power=False)
    report = audit_model(lossy, plan, SamplingParams(temperature=1.0))
    assert report.text.alarm
    assert not report.drafts.alarm
    assert not report.lossless
    assert report.samples < 400


def test_more_samples_detect_smaller_deviations() -> None:
    few, many = (
        audit_model(
            pair_llm(), AuditPlan(PROMPTS, samples=samples), SamplingParams(temperature=1.0)
        )
        for samples in (16, 96)
    )
    assert few.ok
    assert many.ok
    assert many.detectable["sharper"] < 0.25
    assert (few.detectable["sharper"] or 1.0) > many.detectable["sharper"]


def test_greedy_sampling_is_refused() -> None:
    with pytest.raises(ParamsError, match="audit diff"):
        audit_model(pair_llm(), AuditPlan(PROMPTS), SamplingParams(temperature=0))


def test_a_run_without_a_token_proves_nothing() -> None:
    dead = SamplingParams(temperature=1.0, logits_processors=[gives_up_after(1)])
    report = audit_model(pair_llm(rows=2), AuditPlan([[1, 2, 3]], samples=8), dead)
    assert report.text.observations == 0
    assert not report.ok
    console = Console(width=200, file=StringIO())
    console.print(model_findings(report))
    assert "nothing was tested" in console.file.getvalue()
    assert "FAILED" in console.file.getvalue()


@pytest.mark.parametrize(
    "values",
    [{"prompts": []}, {"prompts": [[]]}, {"samples": 0}, {"tokens": 0}, {"alpha": 0.0}],
)
def test_a_plan_that_tests_nothing_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AuditPlan(**{"prompts": PROMPTS, **values})
