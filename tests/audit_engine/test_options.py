"""Every sampling option is honoured or refused, and an option without a proof is a failure."""

from __future__ import annotations

import dataclasses

import pytest
from lab.options.walk import VARIANTS, audit_options, cases, uncovered

from outpace import SamplingParams
from outpace.draft.registry import drafter_names


def test_every_field_of_sampling_params_has_a_case() -> None:
    assert uncovered() == set()
    assert {case.option for case in cases()} == {f.name for f in dataclasses.fields(SamplingParams)}


def test_a_tree_honours_every_option_or_is_refused() -> None:
    report = audit_options(["draft_tree"], ["token", "traversal"])
    assert report.ok, [cell for cell in report.cells if cell.state == "BROKEN"] + report.missing
    assert report.worst < 1e-12
    assert report.accepted > 100
    refused = {(one.rule, one.option) for one in report.cells if one.state == "refused"}
    assert refused == {*(("token", one.option) for one in cases()), ("traversal", "prediction")}


def test_the_coupled_text_is_that_of_plain_forwards() -> None:
    report = audit_options(["draft_tree"], ["coupled"], family="mistral")
    assert report.ok, [cell for cell in report.cells if cell.state == "BROKEN"]
    states = {cell.option: cell.state for cell in report.cells}
    assert states.pop("prediction") == "refused"  # no look-up is there to look into it
    assert set(states.values()) == {"honoured"}


@pytest.mark.slow
def test_processes_find_what_one_process_finds() -> None:
    told: list[tuple[str, int]] = []
    names, rule = ["ngram", "suffix"], ["match"]
    apart = audit_options(names, rule, workers=2, report=lambda *done: told.append(done))
    assert told == [("ngram", 2), ("suffix", 2)]
    assert apart == audit_options(names, rule)


@pytest.mark.slow  # `outpace audit options` does the same with the family of Llama
@pytest.mark.parametrize("drafter", [*drafter_names(), *VARIANTS])
def test_every_drafter_with_every_rule_and_a_sliding_window(drafter: str) -> None:
    report = audit_options([drafter], family="mistral")
    assert report.ok, [cell for cell in report.cells if cell.state == "BROKEN"] + report.missing
    assert {cell.state for cell in report.cells} <= {"honoured", "refused"}
