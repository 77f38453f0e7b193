"""Audits of a model whose own generation_config adds to a request's options, and of drafters that
draft nothing."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from outpace import LLM, SamplingParams
from outpace.audit.diff import audit_diff
from outpace.audit.model import AuditPlan, audit_model
from outpace.audit.report import findings
from targets.families import build, noised

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9]]


def engine(config: dict[str, Any], **own: Any) -> LLM:
    model = build("llama")
    model.generation_config.update(**own)
    if config["method"] == "draft_model":
        config = {**config, "model": noised(model, 0.05)}
    return LLM(model, speculative_config=config, max_num_seqs=4)


@pytest.mark.parametrize("own", [{"no_repeat_ngram_size": 2}, {"suppress_tokens": [3, 4, 11]}])
def test_what_the_models_own_config_adds_is_no_bug(own: dict[str, Any]) -> None:
    llm = engine({"method": "draft_model", "num_speculative_tokens": 3}, **own)
    report = audit_diff({"greedy": llm}, PROMPTS, SamplingParams(max_tokens=20))
    assert report.ok, report
    assert report.drafted["greedy"] > 0
    plan = AuditPlan(PROMPTS, samples=200, tokens=6, power=False)
    found = audit_model(llm, plan)
    assert found.ok, found
    assert found.drafted > found.accepted > 0


def test_an_audit_of_nothing_but_plain_decoding_fails_and_says_so() -> None:
    found = engine({"method": "ngram", "prompt_lookup_min": 60, "prompt_lookup_max": 60})
    plan = AuditPlan([[5, 6, 7]], samples=20, tokens=6, power=False)
    for report in (audit_diff({"greedy": found}, [[5, 6, 7]]), audit_model(found, plan)):
        assert not report.ok
        written = io.StringIO()
        Console(file=written, width=200).print(findings(report))
        assert "Nothing was drafted" in written.getvalue()
    plain = engine({"method": "none"})
    for report in (audit_diff({"greedy": plain}, [[5, 6, 7]]), audit_model(plain, plan)):
        assert report.ok
