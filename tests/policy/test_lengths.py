"""Length policies by name: their arithmetic, their states, and that no text changes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outpace import LLM, SamplingParams
from outpace.audit.letters import LetterTokenizer, letter_model
from outpace.audit.model import AuditPlan, audit_model
from outpace.config import SpeculativeConfig
from outpace.core.logits_pipeline import RowOptions
from outpace.core.proposal import DraftingTerms
from outpace.draft.base import Round
from outpace.draft.round import Outcome
from outpace.engine.request import EngineRequest
from outpace.errors import ConfigError
from outpace.heads.classifiers import AcceptancePredictionConfig, AcceptancePredictionHead
from outpace.methods.models.noisy_copy import noisy_copy
from outpace.policy.lengths.base import LengthPolicy
from outpace.policy.lengths.registry import find_length, length_names, length_options
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.train.teacher import signature_of
from targets.families import CONTEXT, PROMPTS, drafter, plain, target
from targets.generating import greedy, ids

LENGTH = 16
PURE = {"temperature": 1.0, "seed": 5}


def request(**options: Any) -> EngineRequest:
    params = SamplingParams(**{"temperature": 0, **options}).resolve({})
    return EngineRequest(
        [1] * 8,
        RowOptions(params),
        seed=0,
        max_tokens=10_000,
        reproducible=params.seed is not None and not params.greedy,
    )


def policy(name: str, count: int | None = None, **options: Any) -> LengthPolicy:
    kind = find_length(name)
    return kind(kind.default_count if count is None else count, length_options(name, options))


def watched(of: LengthPolicy, row: EngineRequest, outcome: Outcome, most: int = 12) -> None:
    """Plays a round in which the chain of a row was watched, which might have ``most`` tokens."""
    begin = of.terms([row], DraftingTerms()).make_stopping_fn
    assert begin is not None
    begin([most])
    of.record([row], [outcome], None)


def play(of: LengthPolicy, rows: Sequence[EngineRequest], accepted: Sequence[int]) -> None:
    """Plays a round in which each row drafts its budget and accepts n of it."""
    outcomes = [
        Outcome(budget, budget, min(budget, taken), 1 + min(budget, taken))
        for budget, taken in zip(of.budgets(rows), accepted, strict=True)
    ]
    of.record(rows, outcomes, None)


def test_two_more_or_one_less() -> None:
    of, row = policy("heuristic"), request()
    seen = []
    for accepted in (9, 9, 0, 3, 99, 0):
        seen += of.budgets([row])
        play(of, [row], [accepted])
    assert seen == [5, 7, 9, 8, 7, 9]
    for _ in range(20):
        play(of, [row], [0])
    assert of.budgets([row]) == [1]


def test_a_schedule_goes_on_or_begins_anew_with_the_next_request() -> None:
    on, anew = policy("heuristic"), policy("heuristic_transient")
    for of in (on, anew):
        play(of, [request()], [9])
    assert on.budgets([request(), request(**PURE)]) == [7, 5]
    assert anew.budgets([request()]) == [5]


def test_an_empty_draft_and_the_end_of_a_text_change_nothing() -> None:
    of, row, ended = policy("heuristic"), request(), request()
    ended.abort()
    of.record([row, ended], [Outcome(0, 0, 0, 1), Outcome(5, 5, 0, 1)], None)
    assert of.budgets([row, ended]) == [5, 5]


def test_the_batch_grows_with_its_luckiest_row() -> None:
    of, rows = policy("batch"), [request(), request()]
    assert of.budgets(rows) == [7, 7]
    play(of, rows, [1, 7])
    assert of.budgets(rows) == [9, 9]
    play(of, rows, [1, 2])
    assert of.budgets(rows) == [8, 8]  # 9 - ceil(9 / 10)
    play(of, rows, [1, 2])
    assert of.budgets(rows) == [6, 6]  # and one more the second time
    play(of, rows, [1, 5])
    assert of.budgets(rows) == [5, 5]  # what some row accepted
    for _ in range(40):
        play(of, rows, [99, 0])
    assert of.budgets(rows) == [32, 32]


def test_the_first_draft_of_a_batch_is_as_long_as_it_was_asked_for() -> None:
    assert policy("batch", 40).budgets([request()]) == [40]
    assert policy("batch", 40).most == 40
    assert policy("batch", 7).most == 32
    assert policy("batch", 7, longest=4).budgets([request()]) == [4]


def test_a_seeded_row_goes_by_its_own_rounds() -> None:
    of, reproducible, other = policy("batch"), request(**PURE), request()
    play(of, [reproducible, other], [0, 7])
    assert of.budgets([reproducible, other]) == [6, 9]
    assert of.budgets([request(**PURE)]) == [7]


def test_the_threshold_of_draft_exit_moves_as_in_the_paper() -> None:
    of, row = policy("draft_exit"), request()
    assert of.threshold(row) == 0.6  # type: ignore[attr-defined]
    watched(of, row, Outcome(4, 4, 1, 2))  # a rate of .25: rise
    raised = 0.9 * 0.6 + 0.1 * 0.61
    assert of.threshold(row) == pytest.approx(raised)  # type: ignore[attr-defined]
    watched(of, row, Outcome(4, 4, 4, 5))  # .5 * .25 + .5: still below .9
    for _ in range(6):
        watched(of, row, Outcome(4, 4, 4, 5))
    before = of.threshold(row)  # type: ignore[attr-defined]
    watched(of, row, Outcome(4, 4, 4, 5))
    assert of.threshold(row) == pytest.approx(before - 0.001)  # type: ignore[attr-defined]
    watched(of, row, Outcome(12, 12, 12, 13))  # a full draft lowers nothing
    watched(of, row, Outcome(3, 3, 3, 4), most=3)  # nor does one that the text's end cut
    assert of.threshold(row) == pytest.approx(before - 0.001)  # type: ignore[attr-defined]


def test_a_length_that_chooses_and_no_drafts_exclude_each_other() -> None:
    for length in (name for name in length_names() if not find_length(name).can_stop_early):
        config = {"method": "ngram", "num_speculative_tokens": 0, "length": length}
        with pytest.raises(ConfigError, match="num_speculative_tokens=0 says that nothing is"):
            LLM(speculative_config=config)


def test_what_look_ups_draft_does_not_move_the_threshold_of_draft_exit() -> None:
    """Method auto lets a look-up draft in some rows, and the model in others."""
    of, rows = policy("draft_exit"), [request(), request()]
    begin = of.terms(rows, DraftingTerms()).make_stopping_fn
    assert begin is not None
    begin([0, 4])  # the model drafts for the second row
    of.record(rows[:1], [Outcome(4, 4, 0, 1)], None)
    assert of.threshold(rows[0]) == 0.6  # type: ignore[attr-defined]
    of.record(rows[1:], [Outcome(4, 4, 0, 1)], None)
    assert of.threshold(rows[0]) > 0.6  # type: ignore[attr-defined]
    of.terms(rows, DraftingTerms())  # a round in which the model is not asked
    before = of.threshold(rows[0])  # type: ignore[attr-defined]
    of.record(rows, [Outcome(4, 4, 0, 1)] * 2, None)
    assert of.threshold(rows[0]) == before  # type: ignore[attr-defined]


def test_a_chain_ends_behind_an_unlikely_token() -> None:
    of, rows = policy("confidence"), [request(), request()]
    begin = of.terms(rows, DraftingTerms()).make_stopping_fn
    distribution = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    assert begin is not None
    assert begin([4, 4])(distribution, torch.tensor([0, 1])).tolist() == [False, True]


def test_a_chain_ends_before_a_distribution_that_knows_little() -> None:
    of, rows = policy("entropy", threshold=1.0), [request(), request()]
    terms = of.terms(
        rows, DraftingTerms(continue_on_probs=lambda distribution: distribution[:, 0] < 0.8)
    )
    distribution = torch.tensor([[0.7, 0.2, 0.1], [0.34, 0.33, 0.33], [0.9, 0.1, 0.0]])
    assert terms.continue_on_probs is not None
    assert terms.continue_on_probs(distribution).tolist() == [True, False, False]


def test_a_chain_ends_where_a_rejection_is_likely() -> None:
    of, row = policy("risk"), request()
    distribution = torch.tensor([[0.55, 0.45]])
    ends = of.begin_round([row])([9])  # type: ignore[attr-defined]
    # Believed to be accepted with (1 + .55) / 2: 1 - .775 ** 4 is .64, and .72 with the fifth.
    answers = [bool(ends(distribution, torch.tensor([0]))) for _ in range(5)]
    assert answers == [False, False, False, False, True]
    of.record([row], [Outcome(5, 5, 0, 1)], None)
    known = of.calibration(row)  # type: ignore[attr-defined]
    assert (known.tested[5], known.accepted[5]) == (1, 0)
    ends = of.begin_round([row])([9])  # type: ignore[attr-defined]
    assert [bool(ends(distribution, torch.tensor([0]))) for _ in range(4)] == [
        False,
        False,
        False,
        True,
    ]


def test_one_drafters_chains_do_not_end_anothers() -> None:
    """In a round in which each of two rows has its own drafter."""
    of, rows = policy("risk"), [request(), request()]
    begin = of.begin_round(rows)  # type: ignore[attr-defined]
    likely, unlikely = torch.tensor([[0.95, 0.05]] * 2), torch.tensor([[0.05, 0.95]] * 2)
    first = begin([4, 0])
    assert first(unlikely, torch.tensor([0, 0])).tolist() == [False, False]
    assert first(unlikely, torch.tensor([0, 0])).tolist() == [True, True]
    second = begin([0, 4])
    assert second(likely, torch.tensor([0, 0])).tolist() == [False, False]
    of.record(rows, [Outcome(2, 2, 0, 1), Outcome(1, 1, 1, 2)], None)
    tested = [of.calibration(rows[0]).tested[place] for place in (0, 9)]  # type: ignore[attr-defined]
    assert tested == [1, 1]


def test_a_chain_ends_by_the_chances_of_a_stop_head() -> None:
    class Says(torch.nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states[:, 0].logit()

    of = find_length("stop_head")(20, SimpleNamespace(head=Says(), threshold=0.7))
    continue_on_hidden = of.terms([request()] * 2, DraftingTerms()).continue_on_hidden
    assert continue_on_hidden is not None
    chances = [[0.01, 0.01], [0.5, 0.9], [0.7, 0.9], [0.8, 0.3]]
    # The first ones are the root's. 1 - .5 * .7 is .65, and .72 with .8; 1 - .81 * .3 is .757.
    answers = [continue_on_hidden(torch.tensor(each)[:, None]).tolist() for each in chances]
    assert answers == [[True, True], [True, True], [True, True], [False, False]]


def decoder(length: Any, config: dict[str, Any] | None = None) -> LLM:
    given = {"method": "draft_model", "model": drafter("llama"), **(config or {})}
    given["length"] = length
    return LLM(target("llama"), speculative_config=given, max_num_seqs=4, max_model_len=CONTEXT)


LOWER = {"confidence": 0.05, "draft_exit": 0.05, "entropy": 4.0}
"""Thresholds that suit the flat distributions of random models."""


@cache
def stop_head() -> AcceptancePredictionHead:
    """One that says something else of each state."""
    torch.manual_seed(1)
    head = AcceptancePredictionHead(
        signature_of(LoadedModel(drafter("llama"), None, "small")), AcceptancePredictionConfig()
    )
    torch.nn.init.normal_(head.linear.weight, std=0.5)
    return head.eval().requires_grad_(False)


def named(name: str) -> Any:
    if name == "stop_head":
        return {"name": name, "head": stop_head()}
    return {"name": name, "threshold": LOWER[name]} if name in LOWER else name


@pytest.mark.parametrize("name", length_names())
def test_the_text_is_the_same_and_seeds_repeat_it(name: str) -> None:
    llm = decoder(named(name))
    drafted: list[int] = []

    def watch(trace: Round) -> None:
        drafted.extend(decision.drafted for decision in trace.outcomes)

    with llm.engine.observing(watch):
        texts = ids(llm.generate(PROMPTS, greedy(LENGTH)))
    assert texts == plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))
    assert len(set(drafted)) > (1 if name == "constant" else 2)
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=LENGTH, ignore_eos=True)
    alone = [ids(llm.generate([prompt], sampled))[0] for prompt in PROMPTS[:2]]
    assert ids(llm.generate(PROMPTS, sampled))[:2] == alone


@pytest.mark.parametrize("name", ["confidence", "draft_exit", "risk"])
def test_ending_behind_a_token_keeps_the_distribution(name: str) -> None:
    model = letter_model()
    config = {
        "model": noisy_copy(model, 1.0),
        "num_speculative_tokens": 4,
        "length": {"name": name, "threshold": 0.3 if name != "risk" else 0.5},
        "verify": "block",
    }
    llm = LLM(
        model,
        tokenizer=LetterTokenizer(),
        speculative_config=config,
        max_num_seqs=40,
        generation_config="none",
    )
    plan = AuditPlan([[1, 2, 3], [4]], samples=120, tokens=6, power=False)
    report = audit_model(llm, plan, SamplingParams(temperature=1.0))
    assert report.ok, report


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "ngram", "length": "confidence"}, "ends chains by the drafter's distributions"),
        ({"method": "none", "length": "heuristic"}, "nothing to choose"),
        ({"method": "ngram", "length": "heuristics"}, "did you mean 'heuristic'"),
        ({"method": "ngram", "length": {"name": "heuristic", "a": 1}}, "has no options"),
        ({"method": "ngram", "length": {"name": "batch", "mor": 1}}, "did you mean 'more'"),
        ({"method": "ngram", "length": {"name": "confidence", "threshold": 2}}, "in [0, 1]"),
        ({"method": "ngram", "length": 5}, "length must be"),
        ({"method": "ngram", "length": "stop_head"}, "needs 'head'"),
        ({"method": "ngram", "num_assistant_tokens": 3, "num_speculative_tokens": 3}, "same thing"),
        (
            {
                "method": "ngram",
                "num_assistant_tokens": 3,
                "assistant_confidence_threshold": 0.3,
                "length": "confidence",
            },
            "assistant_confidence_threshold and length are the same thing",
        ),
        (
            {
                "method": "ngram",
                "num_assistant_tokens_schedule": "heuristic",
                "assistant_confidence_threshold": 0.4,
            },
            "give one of the two",
        ),
    ],
)
def test_mistakes_are_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + words.replace("[", r"\[")):
        LLM(target("llama"), speculative_config=config)


def test_the_names_of_transformers_are_understood() -> None:
    config = SpeculativeConfig.from_dict(
        {"model": "small", "num_assistant_tokens": 9, "assistant_confidence_threshold": 0.3}
    )
    assert config.num_speculative_tokens == 9
    assert config.length == {"name": "confidence", "threshold": 0.3}
    config = SpeculativeConfig.from_dict(
        {"model": "small", "num_assistant_tokens_schedule": "heuristic_transient"}
    )
    assert config.length == "heuristic_transient"


def test_an_ending_policy_is_no_use_for_a_tree() -> None:
    with pytest.raises(ConfigError, match="no chains with distributions"):
        decoder("confidence", {"method": "draft_tree", "branching": [2, 1]})
    llm = decoder("heuristic", {"method": "draft_tree"})
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == plain(
        "llama", LENGTH, tuple(map(tuple, PROMPTS))
    )
