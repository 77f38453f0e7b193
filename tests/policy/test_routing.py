"""The choice among drafters, against simulated clocks and simulated texts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import pytest

from outpace.core.proposal import DraftingTerms
from outpace.core.stats import Seconds
from outpace.core.trees.tree_shape import ranks_if_verified
from outpace.draft.round import DrafterChoice, LookupDraft, Outcome
from outpace.engine.request import EngineRequest
from outpace.policy.auto import AutoController
from outpace.policy.base import cap_budgets
from outpace.policy.costs import BatchBucket, CostTable
from outpace.policy.estimator import Estimator
from outpace.policy.nominal import NominalCosts
from outpace.policy.shapes import DraftSizes

from .test_controller import request

MOST = 10


@dataclass(frozen=True)
class Task:
    """What a kind of text gives each drafter."""

    hits: float  # chance that the look-up finds anything
    copied: float  # chance of each token of what it found
    model: float  # chance of each token of the model
    draft: float = 0.1  # what a drafted token of the model costs
    slope: float = 0.02  # what a scored token costs
    reading: float = 0.0  # what a token costs that the model has not seen


COPYING = Task(hits=0.9, copied=0.95, model=0.6)
PROSE = Task(hits=0.1, copied=0.3, model=0.85)
NOTHING = Task(hits=0.2, copied=0.05, model=0.05, draft=0.3)
TASKS = {"copying": COPYING, "prose": PROSE, "nothing": NOTHING}


def routing(model: bool = True, skips_reproducible: bool = False) -> AutoController:
    chains, costs = DraftSizes.chains(MOST), NominalCosts(level=0.1, node=0.02)
    drafters = [Estimator("look-up", chains, NominalCosts(node=0.02), look_up=True)]
    if model:
        drafters.append(Estimator("model", chains, costs, skips_reproducible=skips_reproducible))
    return AutoController(drafters)


class Simulation:
    """Plays rounds of a pretended engine."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.seconds, self.tokens = 0.0, 0
        self.played: list[set[str]] = []
        self.read: dict[EngineRequest, int] = {}

    def play(
        self,
        rounds: int,
        rows: Sequence[EngineRequest],
        task: Task,
        choose: Callable[[Sequence[EngineRequest], list[list[int]]], list[tuple[str, int]]],
        record: Callable[[Sequence[EngineRequest], list[Outcome], Seconds], None] | None = None,
    ) -> Simulation:
        for _ in range(rounds):
            found, agreed = [], []
            for _ in rows:
                hit = self.random.random() < task.hits
                length = self.run(task.copied, MOST) if hit else 0
                found.append([2] * length + [3] * (MOST - length) if hit else [])
                agreed.append({"look-up": length, "model": self.run(task.model, MOST), "": 0})
            picks = choose(rows, found)
            outcomes, levels, width, unread = [], 0, 0, 0
            for row, (name, budget), known in zip(rows, picks, agreed, strict=True):
                accepted = min(budget, known[name])
                committed = max(known["look-up"], known["model"]) + 1
                text = [2] * known["look-up"] + [4] * (committed - known["look-up"])
                taken = row.extend(text[: accepted + 1] if name == "look-up" else
                                   self.as_model(text, accepted, known))  # fmt: skip
                if name == "model" and budget:
                    unread += row.length - taken - self.read.get(row, 0)
                    self.read[row] = row.length
                outcomes.append(Outcome(budget, budget, accepted, taken, method=name))
                width = max(width, budget)
                levels = max(levels, budget if name == "model" else 0)
            self.played.append({name for name, budget in picks if budget})
            drafting = levels * task.draft + unread * task.reading
            seconds = Seconds(drafting, 1 + task.slope * width, 0)
            self.seconds += seconds.total
            self.tokens += sum(outcome.emitted for outcome in outcomes)
            if record is not None:
                noise = self.random.uniform(0.97, 1.03)
                record(rows, outcomes, Seconds(seconds.draft * noise, seconds.score * noise, 0))
        return self

    @staticmethod
    def as_model(text: list[int], accepted: int, known: dict[str, int]) -> list[int]:
        """The committed tokens where the look-up's are 2 as far as it is right, 4 afterwards."""
        return [2 if place < known["look-up"] else 4 for place in range(accepted + 1)]

    def run(self, chance: float, most: int) -> int:
        length = 0
        while length < most and self.random.random() < chance:
            length += 1
        return length

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def as_finds(found: Sequence[Sequence[int]]) -> list[LookupDraft]:
    """A look-up's chains that say nothing of how sure it is."""
    return list(map(LookupDraft, found))


def picked(
    of: AutoController, rows: Sequence[EngineRequest], found: Sequence[Sequence[int]]
) -> list[DrafterChoice]:
    """Who drafts in the coming round, and how much. found: by the look-up, in each row."""
    plan = of.plan(rows, DraftingTerms())
    budgets = cap_budgets(rows, plan.budgets)
    if not of._look_ups:  # it stands alone
        return [DrafterChoice("look-up", budget) for budget in budgets]
    return of.pick(rows, {"look-up": as_finds(found)}, budgets)


def automatic(
    of: AutoController,
) -> Callable[[Sequence[EngineRequest], list[list[int]]], list[tuple[str, int]]]:
    def choose(rows: Sequence[EngineRequest], found: list[list[int]]) -> list[tuple[str, int]]:
        picks = picked(of, rows, found)
        kept = [
            min(pick.budget, len(each)) if pick.name == "look-up" else pick.budget
            for pick, each in zip(picks, found, strict=True)
        ]
        pairs = zip(picks, kept, strict=True)
        return [(pick.name if count else "", count) for pick, count in pairs]

    return choose


def fixed(name: str, width: int) -> Callable[..., list[tuple[str, int]]]:
    def choose(rows: Sequence[EngineRequest], found: list[list[int]]) -> list[tuple[str, int]]:
        if name != "look-up":
            return [(name, width)] * len(rows)
        return [("look-up", width) if each else ("", 0) for each in found]

    return choose


def best_single(task: Task, rounds: int = 1500) -> float:
    """Tokens per second of the best drafter alone, at its best constant width."""
    singles = [("", 0), *((name, w) for name in ("look-up", "model") for w in range(1, MOST + 1))]
    speeds = [
        Simulation(seed=1).play(rounds, [request()], task, fixed(name, width)).speed
        for name, width in singles
    ]
    return max(speeds)


@pytest.mark.parametrize("name", TASKS)
def test_never_far_from_the_best_single_drafter(name: str) -> None:
    task, of = TASKS[name], routing()
    play = Simulation().play(1500, [request()], task, automatic(of), of.record)
    assert play.speed > 0.95 * best_single(task)


def texts(play: Simulation, count: int, prompt: int, task: Task, choose: Any, record: Any) -> float:
    """Plays short texts, one after another, and returns the tokens per second."""
    before = play.tokens, play.seconds
    for _ in range(count):
        row = request(tokens=96, prompt=prompt)
        while not row.finished:
            play.play(1, [row], task, choose, record)
    return (play.tokens - before[0]) / (play.seconds - before[1])


@pytest.mark.parametrize(("copied", "least"), [(0.9, 0.97), (0.5, 0.97), (0.1, 0.88)])
def test_a_model_does_not_read_a_text_of_which_look_ups_leave_it_little(
    copied: float, least: float
) -> None:
    short = Task(hits=0.3, copied=0.5, model=0.75, draft=0.3, reading=0.03)
    long = replace(short, hits=0.7, copied=copied)
    speeds = []
    for seed in range(4):
        of, play = routing(), Simulation(seed)
        texts(play, 20, 40, short, automatic(of), of.record)
        texts(play, 8, 400, long, automatic(of), of.record)
        speeds.append(texts(play, 20, 400, long, automatic(of), of.record))
    singles = [
        texts(Simulation(1), 20, 400, long, fixed(name, width), None)
        for name in ("look-up", "model")
        for width in range(1, MOST + 1)
    ]
    assert fmean(speeds) > least * max(singles)


@pytest.mark.parametrize("seed", range(4))
def test_a_text_that_is_copied_is_not_read_to_try_the_model(seed: int) -> None:
    """A trial may take its share of the rounds of a text. Copied tokens come in few rounds."""
    short = Task(hits=0.3, copied=0.5, model=0.75, draft=0.3, reading=0.03)
    copied = replace(short, hits=0.95, copied=0.9)
    of, play = routing(), Simulation(seed)
    texts(play, 20, 40, short, automatic(of), of.record)
    play.read.clear()
    for _ in range(20):
        row = request(tokens=300, prompt=200)
        while not row.finished:
            play.play(1, [row], copied, automatic(of), of.record)
    assert len(play.read) <= 1, "the first one may be, by what the model saved before"


def test_a_text_is_charged_for_the_trials_that_are_made() -> None:
    """A look-up may draft in a round in which the model's draft would be tried."""
    of, row = routing(), request(tokens=400, prompt=5)
    place = BatchBucket.of(1, row.length)
    for _ in range(3):
        of.costs.add(place, "", 0, Seconds(0, 1.0, 0))
        of.costs.add(place, "look-up", 1, Seconds(0, 1.1, 0))
        of.costs.add(place, "model", 1, Seconds(1.0, 1.0, 0))
        of.costs.add_prefill("model", seconds=0.2, tokens=10)
    text = of["model"].text(row)
    text.rounds = 10
    (pick,) = picked(of, [row], [[2] * 4])
    assert (pick.name, text.lost) == ("look-up", 0)
    (pick,) = picked(of, [row], [[]])
    assert (pick.name, pick.budget) == ("model", 1)
    assert text.lost > 0


def test_a_model_reads_a_text_with_nothing_to_look_up_behind_texts_that_were_copied() -> None:
    """What it saves is learned from this text, too, while it waits."""
    copied = Task(hits=0.9, copied=0.95, model=0.75, draft=0.3, reading=0.03)
    written = replace(copied, hits=0.1, copied=0.1)
    speeds, alone = [], []
    for seed in range(6):
        of, play = routing(), Simulation(seed)
        texts(play, 12, 60, written, automatic(of), of.record)
        texts(play, 6, 200, copied, automatic(of), of.record)
        speeds.append(texts(play, 1, 120, written, automatic(of), of.record))
        alone.append(texts(Simulation(seed), 1, 120, written, fixed("model", 3), None))
    assert fmean(speeds) > 0.93 * fmean(alone)


def test_what_is_learned_serves_a_later_run() -> None:
    """Short texts which the model has to read: what that costs is known from the first one on."""
    short = Task(hits=0.2, copied=0.3, model=0.6, draft=0.4, reading=0.1)
    cold, warm, earlier = [], [], routing()
    texts(Simulation(), 20, 60, short, automatic(earlier), earlier.record)
    kept = json.loads(json.dumps(earlier.to_dict()))
    for seed in range(8):
        for speeds in (cold, warm):
            of = routing()
            if speeds is warm:
                of.from_dict(kept)
                assert json.loads(json.dumps(of.to_dict())) == kept
            speeds.append(texts(Simulation(seed), 2, 60, short, automatic(of), of.record))
    assert fmean(warm) > 1.02 * fmean(cold)


def test_what_earlier_versions_kept_is_read() -> None:
    """They kept prompts' tokens, and when texts ended, too."""
    earlier, again = routing(), routing()
    texts(Simulation(), 3, 60, PROSE, automatic(earlier), earlier.record)
    kept = json.loads(json.dumps(earlier.to_dict()))
    again.from_dict({**kept, "texts": [[3, 5]], "ends": {"all": [3, 1, 90], "texts": [[20, True]]}})
    assert json.loads(json.dumps(again.to_dict())) == kept


def test_times_of_an_earlier_run_are_measured_in_this_ones_plain_rounds() -> None:
    earlier, costs, name = CostTable(), CostTable(), "model"
    place, far = BatchBucket.of(1, 100), BatchBucket.of(1, 5000)
    for width, seconds in ((0, 2.0), (1, 3.0), (4, 5.0)):
        earlier.add(place, name, width, Seconds(0.5 * width, seconds - 0.5 * width, 0.0))
    earlier.add_prefill(name, seconds=6.0, tokens=10)
    kept = json.loads(json.dumps(earlier.to_dict([name])))
    costs.from_dict(kept, [name])
    assert costs.curve(far, name, range(5)) is None, "nothing is known before a plain round"
    costs.add(far, name, 0, Seconds(0.0, 10.0, 0.0))
    curve = costs.curve(far, name, range(5))
    assert curve is not None
    assert [curve[width] for width in (0, 1, 4)] == pytest.approx([10.0, 15.0, 25.0])
    assert costs.prefill_seconds(name, 20, plain=10.0) == pytest.approx(60.0)
    assert costs.to_dict([name]) == kept, "no draft was measured since"
    costs.add(far, name, 1, Seconds(1.0, 11.0, 0.0))
    assert costs.curve(far, name, range(5))[1] == pytest.approx(12.0)  # type: ignore[index]


def test_better_than_each_single_one_where_rounds_differ() -> None:
    task, of = Task(hits=0.5, copied=0.9, model=0.85, draft=0.05), routing()
    play = Simulation().play(2000, [request()], task, automatic(of), of.record)
    assert play.speed > 1.05 * best_single(task)


def test_a_stream_that_switches_task_is_followed() -> None:
    of = routing()
    choose = automatic(of)
    Simulation().play(400, [request()], PROSE, choose, of.record)
    for task in (COPYING, PROSE, COPYING):
        row = request()
        play = Simulation(seed=3).play(800, [row], task, choose, of.record)
        assert play.speed > 0.93 * best_single(task)


def test_what_a_look_up_would_have_brought_is_learned_while_the_model_drafts() -> None:
    of, row = routing(), request()
    play = Simulation()
    # A look-up that is always right, in a text where it is never let play.
    task = Task(hits=1.0, copied=1.0, model=1.0)

    def model_only(rows: Sequence[EngineRequest], found: list[list[int]]) -> list[tuple[str, int]]:
        picked(of, rows, found)
        return [("model", 4)] * len(rows)

    play.play(60, [row], task, model_only, of.record)
    assert of["look-up"].tokens(row, 4) > 4.5
    assert ranks_if_verified([1, 2], [1, 2, 3]) == [(1, 0), (1, 0)]


def test_look_ups_alone_lose_nothing_where_they_find_nothing() -> None:
    of = routing(model=False)
    task = Task(hits=0.3, copied=0.02, model=0.0)
    play = Simulation().play(800, [request()], task, automatic(of), of.record)
    assert play.speed > 0.97
    of = routing(model=False)
    play = Simulation().play(500, [request()], COPYING, automatic(of), of.record)
    assert play.speed > 0.93 * best_single(COPYING)


def test_a_batch_may_be_drafted_for_by_both() -> None:
    of, rows = routing(), [request() for _ in range(4)]
    task = Task(hits=0.5, copied=0.97, model=0.8)
    play = Simulation().play(400, rows, task, automatic(of), of.record)
    assert {"look-up", "model"} in play.played
    singles = [fixed("model", width) for width in (3, 5, 7)]
    alone = max(Simulation().play(400, rows, task, each).speed for each in singles)
    assert play.speed > alone


def picks_of_a_seeded_row(company: int, skips: bool = False) -> list[tuple[str, int]]:
    """What is picked for the first row, whose look-ups and luck are the same in any company."""
    of, seen = routing(skips_reproducible=skips), []
    Simulation(seed=5).play(200, [request()], PROSE, automatic(of), of.record)
    rows = [request(temperature=1.0, seed=7), *(request() for _ in range(company))]
    same = [[2] * 6 if n % 3 else [] for n in range(60)]

    def watched(given: Sequence[EngineRequest], found: list[list[int]]) -> list[tuple[str, int]]:
        chosen = automatic(of)(given, [same.pop(0), *found[1:]])
        seen.append(chosen[0])
        return chosen

    task = Task(hits=1.0, copied=1.0, model=1.0)
    Simulation(seed=9 + company).play(50, rows, task, watched, of.record)
    return seen


def test_a_seeded_row_goes_by_its_own_history() -> None:
    alone, among = picks_of_a_seeded_row(0), picks_of_a_seeded_row(3)
    assert alone == among
    assert len({name for name, _ in alone}) > 1


def test_a_seeded_row_is_not_given_to_one_who_drafts_nothing_for_it() -> None:
    assert "model" in {name for name, _ in picks_of_a_seeded_row(1)}
    picked = {name for name, budget in picks_of_a_seeded_row(1, skips=True) if budget}
    assert picked == {"look-up"}


def test_wishes_bind() -> None:
    of = routing()
    rows = [request(speculative="off"), request(speculative=3), request(tokens=2)]
    picks = picked(of, rows, [[1, 2], [1, 2, 3, 4], []])
    assert [(pick.name, pick.budget) for pick in picks[:2]] == [("", 0), ("look-up", 3)]
    assert picks[2].budget <= 1
