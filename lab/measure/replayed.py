"""What ways of drafting make of the same recorded texts, at the same prices.

``replayed.py record TARGET DRAFTER PROMPTS RECORDS [TOKENS]`` writes the target's greedy texts,
where the drafter agrees with them, and how sure it is of its tokens. PROMPTS: JSON lines, as
`short_prompts.py` writes them. RECORDS: JSON lines; a recording that was stopped goes on.

``replayed.py play RECORDS [SEEDS [file]]`` plays the texts again with "suffix", "draft_model" and
"auto", as their controllers and look-ups choose at pretended prices of three processors, and prints
how much faster than plain decoding each is, by task. Each seed plays them in another order; with
"file" all play them in the order of the file. A pretended clock has the noise that a machine with
neighbours has, but the same texts can be played at many seeds, in seconds: what two ways differ by
is seen here where a benchmark of an hour says nothing.

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
from outpace.draft.base import Find, Round, Rows
from outpace.draft.lookup.suffix import SuffixDrafter, SuffixOptions
from outpace.draft.models.chain import DraftModel
from outpace.draft.prefix_cache import TEXTS, TOKENS
from outpace.engine.request import Request
from outpace.policy.auto.acceptance import PRIOR, PRIOR_OF_LOOK_UPS
from outpace.policy.auto.controller import Auto
from outpace.policy.auto.ladder import Ladder
from outpace.policy.base import Outcome, affordable
from outpace.policy.routing import Routing
from outpace.targets.hf.prefixes import SavedText, SavedTexts

usage(__doc__, needed=2)


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


class Player:
    """One way of drafting, through many texts."""

    def __init__(self, drafters: list[str], machine: Machine, seed: int) -> None:
        known = {LOOK_UP: (SuffixDrafter, PRIOR_OF_LOOK_UPS), MODEL: (DraftModel, PRIOR)}
        autos = {
            name: Auto(Ladder.chains(kind.longest), prior=prior, stops=kind.ends_chains)
            for name, (kind, prior) in known.items()
            if name in drafters
        }
        self._drafters, self._machine, self._noise = drafters, machine, Noise(seed)
        self._controller = Routing(autos, [LOOK_UP]) if len(drafters) > 1 else autos[drafters[0]]
        self._look_up = SuffixDrafter(SuffixOptions())
        self._numbers = count()
        self._beginnings = SavedTexts(TEXTS, TOKENS)

    def play(self, record: dict) -> float:
        """Returns the tokens that it makes of a text in the time of a plain round."""
        answer = record["answer"]
        params = SamplingParams(temperature=0).resolve({})
        text = Request(
            record["prompt"], RowOptions(params), 0, record["most"], (answer[-1],) * record["ended"]
        )
        text.id = next(self._numbers)
        self._look_up.begin([text])
        pipeline, seeds = LogitsPipeline([RowOptions(params, ())], VOCABULARY), torch.zeros(1)
        took, read = 0.0, self._beginnings.find(record["prompt"][:-1])[0]
        model_read = False
        self._controller.begin(
            text, {name: read if name == MODEL else 0 for name in self._drafters}
        )
        while not text.finished:
            rows = Rows(
                History([text.prompt_ids], [text.output_ids]), pipeline, seeds, requests=[text]
            )
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
            self._look_up.observe(Round(rows, [], Proposal.empty(1), None, [outcome], told))
        self._look_up.end([text])
        if model_read:
            self._beginnings.add(text.token_ids[: min(read, TOKENS)], SavedText())
        return len(answer) / took

    def learn_from(self, other: "Player") -> None:
        """Goes on from what another one has learned, as if that had been kept in a file."""
        self._controller.restore(json.loads(json.dumps(other._controller.to_save())))

    def _draft(self, text: Request, rows: Rows, record: dict) -> tuple[str, list[int]]:
        """Who drafts in the coming round, and what."""
        plan = self._controller.plan([text], DraftingTerms())
        budgets = affordable([text], plan.budgets)
        found = Find()
        if LOOK_UP in self._drafters and any(budgets):
            proposal = self._look_up.propose(rows, budgets)
            found = Find(proposal.tokens[0, : proposal.counts[0]].tolist(), *proposal.sure)
        name, budget = self._drafters[0], budgets[0]
        for pick in self._controller.pick([text], {LOOK_UP: [found]}, budgets):
            name, budget = pick.name, pick.budget
        if name == LOOK_UP:
            return name, found.tokens[:budget]
        return name, self._by_model(text, record, budget, plan.terms) if budget else []

    @staticmethod
    def _by_model(text: Request, record: dict, budget: int, terms: DraftingTerms) -> list[int]:
        """What the model would draft, with -1 for tokens that are not the target's."""
        place, draft = len(text.output_ids), []
        ends = terms.ends_after([budget]) if terms.ends_after is not None else None
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


def play(records: str, seeds: str = "10", order: str = "shuffled") -> None:
    """Prints a table for each machine. order: "file" for that of the file."""
    listed = [json.loads(line) for line in Path(records).read_text().splitlines()]
    tasks = list(dict.fromkeys(record["task"] for record in listed))
    for named, machine in MACHINES.items():
        logs = {way: defaultdict(list) for way in WAYS}
        for seed in range(int(seeds)):
            texts = listed if order == "file" else ordered(listed, seed)
            for way, drafters in WAYS.items():
                player = Player(drafters, machine, seed)
                for record in texts:
                    speed = math.log(player.play(record))
                    logs[way][record["task"]].append(speed)
                    logs[way]["all"].append(speed)
        print(f"| {named} | " + " | ".join([*tasks, "all"]) + " |")
        print("|---" * (2 + len(tasks)) + "|")
        speeds = {way: {t: math.exp(fmean(logs[way][t])) for t in [*tasks, "all"]} for way in WAYS}
        for way in WAYS:
            print(f"| {way} | " + " | ".join(f"{x:.2f}" for x in speeds[way].values()) + " |")
        of_best = [
            speeds["auto"][t] / max(speeds[w][t] for w in WAYS if w != "auto")
            for t in [*tasks, "all"]
        ]
        print("| auto / best | " + " | ".join(f"{x:.2f}" for x in of_best) + " |\n", flush=True)


def kept(records: str, seeds: str = "4") -> None:
    """Prints, for each machine, what "auto" makes of texts over the best single drafter, without
    and with what it has learned from others."""
    listed = [json.loads(line) for line in Path(records).read_text().splitlines()]
    tasks = list(dict.fromkeys(record["task"] for record in listed))
    by_task = {task: [r for r in listed if r["task"] == task] for task in tasks}
    halves = [[r for rs in by_task.values() for r in rs[half::2]] for half in (0, 1)]
    for named, machine in MACHINES.items():
        ways = {**WAYS, "auto, kept": WAYS["auto"]}
        logs = {way: defaultdict(list) for way in ways}
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
        print(f"| {named} | " + " | ".join([*tasks, "all"]) + " |")
        print("|---" * (2 + len(tasks)) + "|")
        means = {way: {of: fmean(values) for of, values in logs[way].items()} for way in ways}
        for way in ("auto", "auto, kept"):
            of_best = [
                means[way][of] - max(means[w][of] for w in (LOOK_UP, MODEL))
                for of in [*tasks, "all"]
            ]
            print(f"| {way} | " + " | ".join(f"{math.exp(x):.2f}" for x in of_best) + " |")
        print(flush=True)


{"record": record, "play": play, "kept": kept}[sys.argv[1]](*sys.argv[2:])
