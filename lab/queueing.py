"""What an order of waiting requests is worth: a batch of rows, played without a model.

    python lab/queueing.py

A round gives each running text one token. So times are rounds, nothing depends on the machine, and
thousands of texts are played in a second. The script plays 4,000 texts of `TOPICS` on 8 rows, of at
most 1,024 tokens; "known" is the order "shortest" with the true lengths.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outpace.core.logits_pipeline import RowOptions
from outpace.core.params import SamplingParams
from outpace.engine.request import EngineRequest
from outpace.engine.scheduler import RequestQueue
from outpace.engine.scheduling_policies import FCFSPolicy, SchedulingPolicy, ShortestFirstPolicy

END = 0
"""The token that ends a text."""

TOPICS = ((8, 0.4), (20, 0.5), (60, 0.6), (200, 0.7))
"""Kinds of prompts: the median length of their texts, and the spread of its logarithm."""


@dataclass(frozen=True)
class Text:
    """A request that arrives in a round, and the length that its text will turn out to have."""

    request: EngineRequest
    arrives: int
    length: int


@dataclass(frozen=True)
class TextTimes:
    """When a text came, got a row, and ended, in rounds; and its length in tokens."""

    arrived: int
    joined: int
    ended: int
    length: int

    @property
    def latency(self) -> int:
        return self.ended - self.arrived

    @property
    def waited(self) -> int:
        return self.joined - self.arrived


def texts(count: int, load: float, rows: int, seed: int = 0, limit: int = 1024) -> list[Text]:
    """Returns texts of a few kinds, which arrive at random.

    A kind shows in some of a prompt's words, as it does where people ask for a summary or a story.
    load: the tokens that arrive per round, as a share of what ``rows`` rows can write.
    """
    draws = random.Random(seed)
    lengths, prompts = [], []
    for _ in range(count):
        kind = draws.randrange(len(TOPICS))
        median, spread = TOPICS[kind]
        drawn = int(median * draws.lognormvariate(0, spread))
        lengths.append(min(limit, max(1, drawn)))
        words = [draws.randrange(100, 2000) for _ in range(draws.randrange(5, 30))]
        prompts.append([1 + 10 * kind + draws.randrange(10) for _ in range(3)] + words)
    gap = sum(lengths) / count / (load * rows)
    found, at = [], 0.0
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        at += draws.expovariate(1 / gap)
        found.append(Text(_request(number, prompt, limit), int(at), length))
    return found


def _request(number: int, prompt: list[int], limit: int) -> EngineRequest:
    options = RowOptions(SamplingParams(max_tokens=limit).resolve({}))
    return EngineRequest(prompt, options, seed=0, max_tokens=limit, eos_ids=(END,), id=number)


def played(texts: Sequence[Text], policy: SchedulingPolicy, rows: int) -> list[TextTimes]:
    """Returns the times of the texts, in the order in which they end."""
    queue, coming = RequestQueue(policy), list(reversed(texts))
    running: list[tuple[Text, int]] = []  # with the round in which it got its row
    by_id = {text.request.id: text for text in texts}
    found: list[TextTimes] = []
    now = 0
    while coming or len(queue) or running:
        while coming and coming[-1].arrives <= now:
            queue.add(coming.pop().request)
        while len(running) < rows and (first := queue.first) is not None:
            queue.join(first)
            running.append((by_id[first.id], now))
        now += 1
        for text, _ in running:
            last = len(text.request.output_ids) + 1 == text.length
            text.request.extend([END if last else END + 1])
        policy.on_round_end([text.request for text, _ in running])
        ended = [one for one in running if one[0].request.finished]
        found += [TextTimes(text.arrives, joined, now, text.length) for text, joined in ended]
        running = [one for one in running if not one[0].request.finished]
    return found


class Known:
    """An estimator that is given the true lengths."""

    def __init__(self, coming: Sequence[Text]) -> None:
        self.lengths = {one.request.id: float(one.length) for one in coming}

    def predict(self, request: EngineRequest) -> float:
        return self.lengths[request.id]

    def learn(self, request: EngineRequest) -> None:
        pass


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    rows, count = 8, 4000
    print("load   order       mean  median   90 %   99 %   longest wait")
    for load in (0.7, 0.9, 1.0):
        for name in ("fcfs", "shortest", "known"):
            coming = texts(count, load, rows)
            orders = {"fcfs": FCFSPolicy, "shortest": ShortestFirstPolicy}
            order = ShortestFirstPolicy(Known(coming)) if name == "known" else orders[name]()
            found = played(coming, order, rows)
            latency = np.array([one.latency for one in found])
            low, high, top = np.percentile(latency, [50, 90, 99])
            longest = max(one.waited for one in found)
            print(
                f"{load:4.1f}   {name:9} {latency.mean():6.0f} {low:7.0f} {high:6.0f} {top:6.0f} "
                f"{longest:8}"
            )


if __name__ == "__main__":
    main()
