"""What ways of drafting make of the same recorded texts, at the same prices.

``replayed.py record TARGET DRAFTER PROMPTS RECORDS [TOKENS]`` writes the target's greedy texts,
where the drafter agrees with them, and how sure it is of its tokens. PROMPTS: JSON lines, as
`short_prompts.py` writes them. RECORDS: JSON lines; a recording that was stopped goes on.

``replayed.py play RECORDS [SEEDS [ORDER [FILE [WAYS]]]]`` plays the texts again with "suffix",
"draft_model" and "auto", as their controllers and look-ups choose at pretended costs of several
processors, and prints how much faster than plain decoding each is, by task. Each seed plays them in
another order (ORDER "shuffled"); with "file" all play them in the order of the file, with "few" four
texts of 64 tokens at a time, before which nothing is known. A pretended clock has the noise that a
machine with neighbours has, but the same texts can be played at many seeds, in minutes: what two
ways differ by is seen here where a benchmark of an hour says nothing.

``replayed.py over OLD NEW [WAY]`` prints one FILE over another: two versions of outpace are
compared so, each with its own PYTHONPATH.

``replayed.py kept RECORDS [SEEDS]`` plays one half of the texts, of each task every second one, and
then the other half with another seed: by "auto" that knows nothing, and by "auto" that goes on from
what was learned of the first half, as the option "state" keeps it; each over the best single
drafter.
"""

import itertools
import json
import math
import random
import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean

import torch
from usage import usage

from outpace import LLM, SamplingParams
from outpace.core import request as requests
from outpace.core.logits_pipeline import History, LogitsPipeline, RowOptions
from outpace.core.proposal import DraftingTerms, Proposal
from outpace.core.stats import Seconds
from outpace.draft.prefix_cache import TEXTS, TOKENS
from outpace.draft.round import LookupDraft, Outcome, Round, Rows
from outpace.engine.request import EngineRequest
from outpace.methods.lookup.suffix import SuffixDrafter, SuffixOptions
from outpace.methods.models.draft_model import DraftModel
from outpace.policy.acceptance import PRIOR, PRIOR_OF_LOOK_UPS
from outpace.policy.auto import AutoController
from outpace.policy.base import Controller, cap_budgets
from outpace.policy.estimator import Estimator
from outpace.policy.shapes import DraftSizes
from outpace.targets.hf.prefixes import PrefixStore, SavedPrefix


def record(target: str, drafter: str, prompts: str, records: str, tokens: str = "96") -> None:
    """Writes a line for each prompt: its task, its tokens, those of the answer, and for each of
    these whether the drafter would have drafted it and how sure it would have been of its own."""
    config = {"method": "draft_model", "model": drafter}
    llm = LLM(target, speculative_config=config, max_num_seqs=1, max_model_len=1024)
    file = Path(records)
    done = (
        {json.loads(line)["id"] for line in file.read_text().splitlines()} if file.exists() else ()
    )
    params = SamplingParams(temperature=0, max_tokens=int(tokens), speculative="off")
    for line in Path(prompts).read_text().splitlines():
        asked = json.loads(line)
        if asked["id"] in done:
            continue
        output = llm.chat([{"role": "user", "content": asked["prompt"]}], params)
        prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        agreed, confidence = what_is_drafted(llm.engine.drafter, prompt, answer)
        entry = {
            "id": asked["id"],
            "task": asked["task"],
            "prompt": prompt,
            "answer": answer,
            "most": params.max_tokens,
            "ended": output.outputs[0].finish_reason == "stop",
            "agreed": agreed,
            "confidence": confidence,
        }
        with file.open("a") as lines:
            print(json.dumps(entry), file=lines, flush=True)


def what_is_drafted(
    drafter: DraftModel, prompt: list[int], answer: list[int]
) -> tuple[list[bool], list[float]]:
    """Returns for each token of an answer whether the drafter would have drafted it after those
    before it, and the probability of the token that it would have drafted."""
    params = SamplingParams(temperature=0).resolve({})
    pipeline = LogitsPipeline([RowOptions(params, ())], drafter.loaded.vocabulary)
    request = requests.Request(prompt, RowOptions(params, ()), 0, len(answer))
    seeds = torch.zeros(1, dtype=torch.long)
    rows = Rows(History([prompt], [[]]), pipeline, seeds, requests=[request])
    drafter.begin([request])
    probs = drafter.probs_of(rows, torch.tensor([answer]))
    drafter.end([request])
    sure, best = probs[0].max(-1)
    pairs = zip(best.tolist(), answer, strict=True)
    return [a == b for a, b in pairs], [round(one, 4) for one in sure.tolist()]


# -- playing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """What a round costs, in plain rounds."""

    scored: dict[int, float]
    """A pass of the target, by its tokens."""
    drafted: float
    """A token drafted by the model."""
    read: float
    """A token that the model reads before its first draft, or with the last one."""
    first: float = 0.0
    """What the first token of a draft costs more than each further one."""

    def seconds(self, width: int, levels: int, unread: int) -> Seconds:
        """Returns what a round takes."""
        below = max(tokens for tokens in self.scored if tokens <= width + 1)
        above = min(tokens for tokens in self.scored if tokens >= width + 1)
        share = (width + 1 - below) / max(1, above - below)
        score = self.scored[below] + share * (self.scored[above] - self.scored[below])
        draft = levels * self.drafted + (levels > 0) * self.first + unread * self.read
        return Seconds(draft, score, 0.0)


MACHINES = {
    "Zen 5": Machine({1: 1, 2: 1.06, 4: 1.3, 8: 1.8, 17: 3.3}, drafted=0.375, read=0.06),
    "Zen 5, slow memory": Machine({1: 1, 2: 1.02, 4: 1.05, 8: 1.24, 17: 2.3}, 0.34, 0.047),
    "AVX2": Machine({1: 1, 2: 1.07, 4: 1.19, 8: 1.79, 17: 3.6}, drafted=0.35, read=0.04),
    "AMX": Machine({1: 1, 2: 1.07, 4: 1.27, 8: 1.46, 17: 2.3}, drafted=0.33, read=0.027),
    "AMX, slow memory": Machine(
        {1: 1, 2: 1.04, 3: 1.11, 4: 1.2, 6: 1.33, 9: 1.7, 17: 2.5}, drafted=0.46, read=0.03
    ),
    "AMX, slowest memory": Machine(
        {1: 1, 2: 1.07, 4: 1.28, 7: 1.42, 9: 1.6, 17: 2.4}, drafted=0.385, read=0.044, first=0.2
    ),
    # An AVX2 machine of two cores and fast memory, and there a target in 8 bits, of which the plain
    # pass takes as long again: its columns follow from 3.56 tokens a pass being predicted to bring
    # 1.77 times the speed; what reading costs is guessed.
    "AVX2, fast memory": Machine({1: 1, 2: 1.14, 4: 1.67, 8: 2.92, 17: 6.3}, 0.59, read=0.1),
    "AVX2, 8-bit target": Machine({1: 1, 2: 1.02, 4: 1.06, 8: 1.3, 17: 2.4}, 0.23, read=0.04),
}
MODEL, LOOK_UP = "draft_model", "suffix"
WAYS = {LOOK_UP: [LOOK_UP], MODEL: [MODEL], "auto": [LOOK_UP, MODEL]}
VOCABULARY = 200_000  # no token's number is greater


class Noise:
    """The factor by which rounds take longer or shorter than they should: it drifts, and now and
    then another process holds one up."""

    def __init__(self, seed: int) -> None:
        self._random, self._drift = random.Random(seed), 0.0

    def next(self) -> float:
        self._drift = 0.98 * self._drift + self._random.gauss(0, 0.01)
        held_up = self._random.uniform(1.3, 3) if self._random.random() < 0.03 else 1.0
        return held_up * math.exp(self._drift + self._random.gauss(0, 0.03))


def controller_of(drafters: list[str]) -> Controller:
    """Returns what chooses among these drafters, or how much the only one drafts."""
    known = {LOOK_UP: (SuffixDrafter, PRIOR_OF_LOOK_UPS), MODEL: (DraftModel, PRIOR)}
    estimators = [
        Estimator(
            name,
            DraftSizes.chains(kind.max_draft_tokens),
            prior=prior,
            look_up=name == LOOK_UP,
            can_stop_early=kind.capabilities.supports_early_stop,
        )
        for name, (kind, prior) in known.items()
        if name in drafters
    ]
    return AutoController(estimators)


Finds = dict[str, list[LookupDraft]]  # by text: what the look-up finds at each of its tokens


def finds_in(texts: list[dict]) -> Finds:
    """Returns what the look-up finds in texts that come in this order, whoever drafts."""
    look_up, found = SuffixDrafter(SuffixOptions()), {}
    for number, record in enumerate(texts):
        text, found[record["id"]] = asked_for(record, number), []
        look_up.begin([text])
        for token in record["answer"]:
            proposal = look_up.propose(rows_of(text), [look_up.max_draft_tokens])
            tokens = proposal.tokens[0, : proposal.counts[0]].tolist()
            found[record["id"]].append(LookupDraft(tokens, *proposal.confidence))
            text.output_ids.append(token)
        look_up.observe(Round(rows_of(text), [], Proposal.empty(1), None, [], None))
        look_up.end([text])
    return found


def asked_for(record: dict, number: int) -> EngineRequest:
    """Returns the request for a recorded text."""
    params, ends = SamplingParams(temperature=0).resolve({}), (record["answer"][-1],)
    text = EngineRequest(
        record["prompt"], RowOptions(params), 0, record["most"], ends * record["ended"]
    )
    text.id = number
    return text


def rows_of(text: EngineRequest) -> Rows:
    """Returns the batch of one text."""
    history = History([text.prompt_ids], [text.output_ids])
    return Rows(
        history, LogitsPipeline([text.options], VOCABULARY), torch.zeros(1), requests=[text]
    )


class Player:
    """One way of drafting, through many texts."""

    def __init__(
        self, drafters: list[str], machine: Machine, seed: int, finds: Finds | None = None
    ) -> None:
        """finds: what the look-up finds, if it is asked in every round."""
        self._finds = finds if len(drafters) > 1 else None
        self._drafters, self._machine, self._noise = drafters, machine, Noise(seed)
        self._controller = controller_of(drafters)
        self._look_up = SuffixDrafter(SuffixOptions())
        self._numbers = count()
        self._beginnings = PrefixStore(TEXTS, TOKENS)

    def play(self, record: dict) -> float:
        """Returns the tokens that it makes of a text in the time of a plain round."""
        answer, text = record["answer"], asked_for(record, next(self._numbers))
        self._look_up.begin([text])
        took, read = 0.0, self._beginnings.find(record["prompt"][:-1])[0]
        model_read = False
        known = {name: read if name == MODEL else 0 for name in self._drafters}
        self._controller.begin(text, known)
        while not text.finished:
            rows = rows_of(text) if self._finds is None else None
            name, draft = self._draft(text, rows, record)
            place = len(text.output_ids)
            pairs = zip(draft, answer[place:], strict=False)
            accepted = next((at for at, (a, b) in enumerate(pairs) if a != b), len(draft))
            emitted = text.extend(answer[place : place + accepted + 1])
            model = name == MODEL and draft
            model_read = model_read or bool(model)
            unread = text.length - emitted - read if model else 0
            read = text.length if model else read
            drafted = len(draft)
            levels = drafted if model else 0
            seconds = self._machine.seconds(drafted, levels, max(0, unread - 1))
            took += seconds.total
            noise = self._noise.next()
            told = Seconds(seconds.draft * noise, seconds.score * noise, 0.0)
            outcome = Outcome(drafted, drafted, accepted, emitted, method=name)
            self._controller.record([text], [outcome], told)
            if rows is not None:
                self._look_up.observe(Round(rows, [], Proposal.empty(1), None, [outcome], told))
        self._look_up.end([text])
        if model_read:
            self._beginnings.add(text.token_ids[: min(read, TOKENS)], SavedPrefix())
        return len(answer) / took

    def learn_from(self, other: "Player") -> None:
        """Goes on from what another one has learned, as if that had been kept in a file."""
        self._controller.from_dict(json.loads(json.dumps(other._controller.to_dict())))

    def _draft(self, text: EngineRequest, rows: Rows | None, record: dict) -> tuple[str, list[int]]:
        """Who drafts in the coming round, and what."""
        plan = self._controller.plan([text], DraftingTerms())
        budgets = cap_budgets([text], plan.budgets)
        found = LookupDraft()
        if self._finds is not None:
            seen = self._finds[record["id"]][len(text.output_ids)]
            found = LookupDraft(seen.tokens[: budgets[0]], seen.confidence[: budgets[0]])
        elif LOOK_UP in self._drafters and any(budgets):
            proposal = self._look_up.propose(rows, budgets)
            found = LookupDraft(
                proposal.tokens[0, : proposal.counts[0]].tolist(), *proposal.confidence
            )
        name, budget = self._drafters[0], budgets[0]
        if len(self._drafters) > 1:
            (pick,) = self._controller.pick([text], {LOOK_UP: [found]}, budgets)
            name, budget = pick.name, pick.budget
        if name == LOOK_UP:
            return name, found.tokens[:budget]
        return name, self._by_model(text, record, budget, plan.terms) if budget else []

    @staticmethod
    def _by_model(
        text: EngineRequest, record: dict, budget: int, terms: DraftingTerms
    ) -> list[int]:
        """What the model would draft, with -1 for tokens that are not the target's."""
        place, draft = len(text.output_ids), []
        ends = terms.make_stopping_fn([budget]) if terms.make_stopping_fn is not None else None
        for at in range(place, min(place + budget, len(record["answer"]))):
            draft.append(record["answer"][at] if record["agreed"][at] else -1)
            sure = record["confidence"][at]
            if ends is not None and ends(torch.tensor([[sure, 1 - sure]]), torch.tensor([0])):
                break
        return draft


def ordered(records: list[dict], seed: int) -> list[dict]:
    """Returns the texts in a random order; with an odd seed all of one task come together, as in a
    benchmark, where what is learned of one task comes too soon or too late for the next."""
    order = random.Random(seed).sample(records, len(records))
    if not seed % 2:
        return order
    tasks = list(dict.fromkeys(record["task"] for record in order))
    return sorted(order, key=lambda record: tasks.index(record["task"]))


Logs = dict[str, dict[str, list[float]]]  # logarithms of speeds over plain decoding, way by task


def played(ways: dict, machine: Machine, orders: list[list[dict]], fresh: int = 0) -> Logs:
    """Returns what ways of drafting make of texts in some orders. fresh: texts after which nothing
    is known any more, 0 for all."""
    logs: Logs = {way: defaultdict(list) for way in ways}
    for (seed, texts), way in itertools.product(enumerate(orders), ways):
        for at, record in enumerate(texts):
            if not at % (fresh or len(texts)):
                finds = found_in(texts[at : at + (fresh or len(texts))])
                player = Player(ways[way], machine, seed, finds)
            speed = math.log(player.play(record))
            logs[way][record["task"]].append(speed)
            logs[way]["all"].append(speed)
    return logs


FOUND: dict[tuple[str, ...], Finds] = {}


def found_in(texts: list[dict]) -> Finds:
    """Returns `finds_in` these, which are the same for all machines."""
    key = tuple(f"{record['id']} {len(record['answer'])}" for record in texts)
    if key not in FOUND:
        FOUND[key] = finds_in(texts)
    return FOUND[key]


def table(named: str, speeds: dict[str, dict[str, float]]) -> None:
    """Prints the speed of each way, by task, and that of "auto" over the best single drafter."""
    tasks = list(speeds["auto"])
    print(f"| {named} | " + " | ".join(tasks) + " |")
    print("|---" * (1 + len(tasks)) + "|")
    for way, by_task in speeds.items():
        print(f"| {way} | " + " | ".join(f"{by_task[task]:.2f}" for task in tasks) + " |")
    singles = [by_task for way, by_task in speeds.items() if way != "auto"]
    if singles:
        of_best = [speeds["auto"][task] / max(each[task] for each in singles) for task in tasks]
        print("| auto / best | " + " | ".join(f"{x:.2f}" for x in of_best) + " |")
    print(flush=True)


def means(logs: Logs, tasks: list[str]) -> dict[str, dict[str, float]]:
    """Returns the mean speed of each way, by task."""
    return {
        way: {task: math.exp(fmean(by_task[task])) for task in tasks if task in by_task}
        for way, by_task in logs.items()
    }


def read(records: str) -> tuple[list[dict], list[str]]:
    """Returns the recorded texts, and the tasks with "all" at the end."""
    listed = [json.loads(line) for line in Path(records).read_text().splitlines()]
    return listed, [*dict.fromkeys(record["task"] for record in listed), "all"]


def play(records: str, seeds: str = "10", order: str = "shuffled", file: str = "", ways="") -> None:
    """Prints a table for each machine. order: "file" for that of the file, "few" for four texts of
    64 tokens at a time, before which nothing is known. file: where the figures are written."""
    (listed, tasks), found = read(records), {}
    if order == "few":
        listed = [shortened(record, 64) for record in listed]
    chosen = {way: WAYS[way] for way in ways.split(",")} if ways else WAYS
    for named, machine in MACHINES.items():
        numbers = range(int(seeds))
        orders = [listed if order == "file" else ordered(listed, seed) for seed in numbers]
        logs = played(chosen, machine, orders, fresh=4 if order == "few" else 0)
        found[named] = means(logs, tasks)
        if "auto" in chosen:
            table(named, found[named])
        if file:
            Path(file).write_text(json.dumps(found))


def shortened(record: dict, tokens: int) -> dict:
    """Returns a text that had to end after this many tokens."""
    if len(record["answer"]) <= tokens:
        return record
    return {**record, "answer": record["answer"][:tokens], "most": tokens, "ended": False}


def over(old: str, new: str, way: str = "auto") -> None:
    """Prints the figures of one file over those of another, as `play` writes them."""
    before, after = (json.loads(Path(file).read_text()) for file in (old, new))
    tasks = list(next(iter(after.values()))[way])
    print(f"| {way}, new over old | " + " | ".join(tasks) + " |")
    print("|---" * (1 + len(tasks)) + "|")
    for named in (named for named in after if named in before):
        ratios = [after[named][way][task] / before[named][way][task] for task in tasks]
        print(f"| {named} | " + " | ".join(f"{x:.3f}" for x in ratios) + " |")


def kept(records: str, seeds: str = "4") -> None:
    """Prints, for each machine, what "auto" makes of texts over the best single drafter, without
    and with what it has learned from others."""
    listed, tasks = read(records)
    by_task = {task: [r for r in listed if r["task"] == task] for task in tasks}
    halves = [[r for rs in by_task.values() for r in rs[half::2]] for half in (0, 1)]
    for named, machine in MACHINES.items():
        ways = {**WAYS, "auto, kept": WAYS["auto"]}
        logs: Logs = {way: defaultdict(list) for way in ways}
        for seed, half, way in itertools.product(range(int(seeds)), (0, 1), ways):
            player = Player(ways[way], machine, seed)
            if way == "auto, kept":
                before = Player(ways[way], machine, seed + 100)
                for record in ordered(halves[half], seed):
                    before.play(record)
                player.learn_from(before)
            for record in ordered(halves[1 - half], seed):
                speed = math.log(player.play(record))
                logs[way][record["task"]].append(speed)
                logs[way]["all"].append(speed)
        speeds = means(logs, tasks)
        print(f"| {named} | " + " | ".join(tasks) + " |")
        print("|---" * (1 + len(tasks)) + "|")
        for way in ("auto", "auto, kept"):
            best = [max(speeds[single][task] for single in (LOOK_UP, MODEL)) for task in tasks]
            of_best = [speeds[way][task] / fast for task, fast in zip(tasks, best, strict=True)]
            print(f"| {way} | " + " | ".join(f"{x:.2f}" for x in of_best) + " |")
        print(flush=True)


if __name__ == "__main__":
    usage(__doc__, needed=2)
    {"record": record, "play": play, "kept": kept, "over": over}[sys.argv[1]](*sys.argv[2:])
