"""`audit diff` tells near-ties from bugs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from tests.audit_engine.mutations import Patch, neighbours_history, second_best
from tests.audit_engine.pairs import PROMPTS, gives_up_after, pair_llm

from outpace import LLM, SamplingParams
from outpace.audit.diff import Difference, DiffReport, Mode, audit_diff
from outpace.audit.letters import LETTERS, LetterTokenizer, letter_model
from outpace.audit.noise import Noise
from outpace.audit.plain import Choice, Ending, deviations
from outpace.audit.report import diff_findings
from outpace.core.logits_pipeline import RowFault
from outpace.engine import engine
from outpace.engine.request import EngineRequest
from outpace.errors import ConfigError

SETUPS = {
    "chain": {},
    "tree": {"method": "draft_tree", "branching": [2, 2], "tokens": 6},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "windowed": {"family": "mistral"},
}
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, frequency_penalty=0.3, top_p=0.9)


def diff_of(params: SamplingParams = PARAMS, **setup: object) -> DiffReport:
    engines: dict[Mode, LLM] = {
        "greedy": pair_llm(**setup),
        "coupled": pair_llm(**{**setup, "verify": "coupled"}),
    }
    return audit_diff(engines, PROMPTS, params)


def printed(report: DiffReport) -> str:
    console = Console(width=200, file=StringIO())
    console.print(diff_findings(report))
    return console.file.getvalue()


@pytest.mark.parametrize("setup", SETUPS)
def test_in_float64_there_is_no_difference(setup: str) -> None:
    report = diff_of(**SETUPS[setup])
    assert report.ok
    assert report.differences == []
    assert report.deviations == []
    assert report.tokens == {"greedy": 168, "coupled": 168}
    assert report.noise.tolerance < 1e-9


def test_a_wrong_token_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    emit = engine.emit

    def worse(played, outcomes, *rest):
        if played[0].params.speculative != "off":
            for one in outcomes:
                one.tokens = [*one.tokens[:-1], (one.tokens[-1] + 1) % 5]
        emit(played, outcomes, *rest)

    monkeypatch.setattr(engine, "emit", worse)
    report = diff_of()
    assert not report.ok
    found = report.differences[0]
    assert found.verdict.startswith("BUG: gap")
    assert found.plain != found.speculative
    assert found.speculative_text == "abcde"[found.speculative]


def test_a_tie_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens with the same logits: whichever is taken, the texts are equally right."""
    model, twin = letter_model(), len(LETTERS) - 1
    config = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    llm = LLM(model, tokenizer=LetterTokenizer(), speculative_config=config)
    prompts = [[i, j] for i in range(6) for j in range(2)]
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    texts = [output.token_ids for output in llm.generate(prompts, params)]
    common = Counter(token for text in texts for token in text if token < twin).most_common(1)[0][0]
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[common]
    emit = engine.emit

    def other(played, outcomes, *rest):
        if played[0].params.speculative != "off":
            for one in outcomes:
                if one.tokens[-1] == common:
                    one.tokens = [*one.tokens[:-1], twin]
        emit(played, outcomes, *rest)

    monkeypatch.setattr(engine, "emit", other)
    report = audit_diff({"greedy": llm}, prompts, params)
    assert report.differences
    assert all("near-tie" in found.verdict for found in report.differences)
    assert report.ok


@pytest.mark.parametrize("mutation", [second_best, neighbours_history])
def test_texts_that_are_wrong_in_the_same_way_are_found(
    mutation: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both texts agree: only the plain forward of a text tells."""
    llm = pair_llm(method="ngram", prompt_lookup_min=1)
    mutation(monkeypatch, llm)
    report = audit_diff({"greedy": llm}, PROMPTS, PARAMS)
    assert any(found.bug for found in report.deviations)
    assert not report.ok
    assert "one plain forward of the text chooses" in printed(report)


def test_a_text_that_ends_for_no_reason_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text is cut after five tokens, with speculation and without."""
    extend = EngineRequest.extend

    def cut(self, tokens, reported=()):
        self.max_tokens = min(self.max_tokens, 5)
        return extend(self, tokens, reported)

    monkeypatch.setattr(EngineRequest, "extend", cut)
    report = diff_of()
    assert report.differences == []
    assert {found.reason for found in report.deviations} == {"stops after 5 tokens for no reason"}


def test_an_error_needs_a_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(PARAMS, logits_processors=(gives_up_after(9),))
    assert diff_of(broken).ok
    best = Choice.best

    def never_stuck(self, logits, past):
        try:
            return best(self, logits, past)
        except RowFault:
            return 0

    monkeypatch.setattr(Choice, "best", never_stuck)
    reasons = {found.reason for found in diff_of(broken).deviations}
    assert any(reason.startswith("ends with an error where") for reason in reasons)


def test_a_text_that_ends_elsewhere_is_a_bug() -> None:
    found = Difference("greedy", 0, 3, plain=None, speculative=4, gap=float("inf"),
                       tolerance=1e-3, scoring=0.0)  # fmt: skip
    assert found.bug
    assert "goes on" in found.verdict


def test_a_text_that_goes_on_where_no_token_is_left_is_a_bug() -> None:
    llm = pair_llm(method="none")
    params = llm.resolve(
        SamplingParams(temperature=0, max_tokens=4, logits_processors=[gives_up_after(3)])
    )
    options, ids = llm.input_processor.row_options(params), llm.target.vocabulary
    written = llm.generate([1, 2], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    for coupled in (False, True):
        choice = Choice(coupled, [1, 2], options, ids, 1e-9)
        ending = Ending(params, (), ids, llm.tokenizer)
        *_, found = deviations(llm.engine.target, choice, ending, 0, written[0].outputs[0])
        assert found.bug
        assert (found.position, found.best) == (1, None)
        assert "goes on where its options leave no token" in found.verdict


def test_nothing_to_compare_is_no_proof() -> None:
    with pytest.raises(ConfigError, match="prompts of one token or more"):
        audit_diff({"greedy": pair_llm(method="none")}, [], PARAMS)


def test_it_says_where_little_was_drafted() -> None:
    """Without a number of its own an engine drafts what pays, which may be next to nothing."""
    noise = Noise(measured=0.0, tolerance=1.0, cap=1.0)
    counts = {"greedy": 100}
    for drafted, few in ((8, True), (90, False)):
        made = {"greedy": drafted}
        report = DiffReport("ngram", "match", True, noise, {"greedy": 5}, counts, drafted=made)
        console = Console(file=StringIO(), width=200)
        console.print(diff_findings(report))
        lines = console.file.getvalue()  # type: ignore[attr-defined]
        assert f"{drafted} tokens were drafted" in lines
        assert ("-k 4 tests more" in lines) == few
