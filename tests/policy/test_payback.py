"""What a draft model has to read first is paid back, or it reads nothing: texts that join a batch
one by one, short answers, and models that draft nothing."""

from __future__ import annotations

import pytest
import torch

from outpace.core.account import Reason
from outpace.core.proposal import DraftingTerms
from outpace.core.stats import Seconds
from outpace.draft.round import LookupDraft, Outcome
from outpace.engine.request import EngineRequest
from outpace.policy.acceptance import Calibration, Confidences
from outpace.policy.auto import AutoController
from outpace.policy.base import cap_budgets
from outpace.policy.costs import BatchBucket, CostTable
from outpace.policy.estimator import Estimator
from outpace.policy.shapes import DraftSizes

from .test_controller import alone, request
from .test_routing import Simulation, Task, automatic, fixed, routing

MODEL = Task(hits=0.0, copied=0.0, model=0.6, draft=0.1, slope=0.02)


def stream(
    of: AutoController | None, task: Task, rows: int, prompt: int, answer: int, rounds: int
) -> float:
    """Returns the tokens per second of a batch that texts join one by one, and then whenever others
    end; without a controller nothing is drafted."""

    def joined(tokens: int) -> EngineRequest:
        row = request(1000, prompt=prompt)  # which may become much longer
        row.stop_when = lambda ids: len(ids) >= prompt + tokens
        return row

    play = Simulation()
    batch, before = [joined(answer)], (0, 0.0)
    for at in range(rounds):
        if of is None:
            play.play(1, batch, task, fixed("", 0))
        else:
            play.play(1, batch, task, automatic(of), of.record)
        batch = [joined(answer) if row.finished else row for row in batch]
        if len(batch) < rows and at % 4 == 3:
            batch.append(joined(answer))
        if at == rounds // 3:  # what was learned by then was paid for
            before = play.tokens, play.seconds
    return (play.tokens - before[0]) / (play.seconds - before[1])


@pytest.mark.parametrize(
    ("rows", "answer", "reading", "least"),
    [
        (1, 8, 7.0, 0.95),  # answers of a word or two
        (1, 96, 7.0, 1.2),  # repaid
        (16, 100, 4.0, 0.95),  # a server in steady state: all rows wait for each that joins
        (16, 100, 10.0, 0.95),
        (8, 100, 0.2, 1.3),  # repaid
    ],
)
def test_no_stream_of_texts_is_slower_than_plain(
    rows: int, answer: int, reading: float, least: float
) -> None:
    prompt = 200
    task = Task(**{**vars(MODEL), "reading": reading / prompt})
    rounds = 900
    plain = stream(None, task, rows, prompt, answer, rounds)
    assert stream(routing(), task, rows, prompt, answer, rounds) > least * plain


def test_a_text_that_may_end_at_once_is_not_read_at_once() -> None:
    task = Task(**{**vars(MODEL), "reading": 0.05})
    of = routing()
    Simulation().play(200, [request()], task, automatic(of), of.record)
    row, sizes = request(prompt=160), []  # eight plain rounds
    while len(row.output_ids) < 8:
        (chosen,) = automatic(of)([row], [[]])
        sizes.append(chosen[1])
        Simulation().play(1, [row], task, lambda *_, chosen=chosen: [chosen], of.record)
    assert sizes[:4] == [0] * 4
    assert max(sizes[4:]) > 0


def test_a_long_prompt_that_is_not_worth_reading_leaves_the_others_their_drafts() -> None:
    task = Task(**{**vars(MODEL), "reading": 0.05})
    of, rows = routing(), [request() for _ in range(4)]
    play = Simulation().play(200, rows, task, automatic(of), of.record)
    rows.append(request(prompt=30_000))
    picks: list[str] = []
    for _ in range(50):
        chosen = automatic(of)(rows, [[]] * 5)
        picks += [name for name, _ in chosen[:4]]
        assert chosen[4] == ("", 0)
        play.play(1, rows, task, lambda *_, chosen=chosen: chosen, of.record)
    assert picks.count("model") > 0.8 * len(picks)
    model, *_ = of.account(rows[4]).drafters
    assert (model.name, model.reason) == ("model", Reason.READING)
    assert model.reading is not None
    assert 1000 < model.reading < 2000, "thirty thousand tokens of a twentieth of a round each"


def test_a_model_that_drafts_nothing_is_not_asked_for_ever() -> None:
    """As where a rule ends its chains before their first token: its pass takes its time, and is no
    plain round."""
    of, row, asked = routing(), request(), []
    for _ in range(300):
        (pick,) = of.pick(
            [row], {"look-up": [LookupDraft([])]}, of.plan([row], DraftingTerms()).budgets
        )
        asked.append(pick.name == "model" and pick.budget > 0)
        outcome = Outcome(0, 0, 0, row.extend([2]), method="")
        of.record([row], [outcome], Seconds(0.5 * asked[-1], 1.0, 0))
    assert 0 < sum(asked) < 30
    assert of.costs.plain(BatchBucket.of(1, row.length)) == 1.0


def test_a_look_up_that_may_find_nothing_makes_no_draft_free() -> None:
    """A request with a number of its own, for which it finds nothing, beside one for which it finds
    what is never right."""
    of = alone(look_up=True, needs_no_prefill=True)
    rows, drafted = [request(speculative=10), request()], 0
    for _ in range(200):
        _, budget = cap_budgets(rows, of.plan(rows, DraftingTerms()).budgets)
        outcomes = [
            Outcome(0, 0, 0, rows[0].extend([2])),
            Outcome(budget, budget, 0, rows[1].extend([2])),
        ]
        of.record(rows, outcomes, Seconds(0, 1 + 0.2 * budget, 0))
        drafted += budget > 0
    assert drafted < 20


def test_what_drafting_takes_counts_where_there_is_hardly_anything_to_read() -> None:
    """A few tokens that others wrote are read with the draft: they are no reading."""
    of, row = Estimator("model", DraftSizes.chains(4)), request()
    of.costs = CostTable()
    bucket = BatchBucket.of(1, row.length)
    of.text(row).read = row.length - 3
    row.extend([2, 2])
    of.learn_times(bucket, [row], [Outcome(2, 2, 1, 2)], Seconds(0.5, 1.0, 0.0), begun=True)
    cost = of.costs.of(bucket, "model", 2)
    assert cost is not None
    assert (cost.draft, cost.total) == (0.5, 1.5)


def test_savings_of_a_text_that_was_aborted_at_once_are_no_savings() -> None:
    of = routing()
    of._texts.note(request(), "model", 0, 0.0)
    assert not of._texts.knows("model")


def test_what_a_row_teaches_does_not_depend_on_longer_chains() -> None:
    found = []
    for counts in ([4], [4, 9]):
        rows = [request() for _ in counts]
        seen = Confidences(rows)
        ends = seen.watch(counts, [Calibration().chances()] * len(rows), lambda safe: safe < 0)
        for _ in range(max(counts) - 1):
            ends(torch.full((len(rows), 2), 0.5), torch.zeros(len(rows), dtype=torch.long))
        found.append(seen.ranges(rows[0], 4))
    assert found[0] == found[1] == [5] * 3
