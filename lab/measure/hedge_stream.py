"""Drafters that choose among others, on a stream of texts that switches its task.

    python lab/measure/hedge_stream.py --data DATA [--texts 12] [--tokens 64] [--temperature 0.8]

The bundled target goes on with prompts of one task, then of the next one, a text at a time. Every single
drafter writes the whole stream, and so do "hedge" and "ucb" over all of them; nothing is timed. For each
segment of the stream: tokens for each pass of the target, and for each nominal price of a round (1, and
what the drafter's passes read of weights, as a share of the target's). Of "hedge" the second
includes what it costs to ask drafters that did not draft.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outpace import LLM, SamplingParams
from outpace.bench.prompts import read_prompts
from outpace.llm import BUNDLED
from outpace.policy.lengths.adaptive import Constant

DRAFTED = 4
LONGEST = 1200
"""Characters of a prompt at most: the bundled models have 1,024 positions."""

STREAM = ("dialogue", "editing", "indomain", "fairytaleqa", "mbpp", "gsm8k", "dialogue", "indomain")
DRAFTERS: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model", "model": str(BUNDLED / "drafter")},
    "eagle3": {"method": "eagle3", "model": str(BUNDLED / "heads" / "eagle3")},
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "recycling": {"method": "recycling"},
}


@dataclass
class Segment:
    """What was written, and what it cost."""

    tokens: int = 0
    passes: int = 0
    price: float = 0.0
    rounds: dict[str, int] = field(default_factory=dict)

    @property
    def by_pass(self) -> float:
        return self.tokens / self.passes

    @property
    def by_price(self) -> float:
        return self.tokens / self.price


def stream(data: Path, texts: int) -> list[list[str]]:
    """The prompts of each segment; a task that comes again has new ones."""
    used: dict[str, int] = {}
    found = []
    for name in STREAM:
        fitting = [each.text for each in read_prompts(name, data) if len(each.text) <= LONGEST]
        begin = used.get(name, 0)
        used[name] = begin + texts
        found.append(fitting[begin : begin + texts])
    return found


def played(
    config: dict[str, Any], segments: list[list[str]], params: SamplingParams
) -> list[Segment]:
    """Writes the stream with one drafter, text by text."""
    random.seed(0)
    llm = LLM(speculative_config=config, max_num_seqs=1)
    llm.engine.controller = Constant(DRAFTED)
    drafter: Any = llm.engine.drafter
    children = (
        dict(zip(drafter.names, drafter.children, strict=True)) if "drafters" in config else {}
    )
    shares = {
        name: child.pass_bytes / llm.engine.target.pass_bytes for name, child in children.items()
    }
    own = drafter.pass_bytes / llm.engine.target.pass_bytes
    segment = Segment()
    spent = 0.0

    def count(trace: Any) -> None:
        nonlocal spent
        segment.passes += 1
        segment.tokens += trace.outcomes[0].emitted
        drafted = int(trace.proposal.counts[0])
        who = trace.proposal.methods[0] if drafted and trace.proposal.methods else ""
        segment.rounds[who] = segment.rounds.get(who, 0) + 1
        segment.price += 1 + drafted * (shares[who] if who else 0.0 if children else own)
        before, spent = spent, getattr(drafter, "spent", 0.0)
        segment.price += spent - before

    found = []
    with llm.engine.observing(count):
        for texts in segments:
            segment = Segment()
            for text in texts:
                llm.generate([text], params)
            found.append(segment)
    return found


def table(title: str, results: dict[str, list[Segment]], singles: list[str], figure: str) -> None:
    """Prints a figure of each way in each segment, and what the choosers reach of the best single drafter."""
    print(f"\n{title}\n")
    print("| | " + " | ".join(STREAM) + " | all |")
    print("|---|" + "---|" * (len(STREAM) + 1))
    values = {}
    for name, segments in results.items():
        whole = Segment(
            sum(each.tokens for each in segments),
            sum(each.passes for each in segments),
            sum(each.price for each in segments),
        )
        values[name] = [getattr(each, figure) for each in [*segments, whole]]
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in values[name]) + " |")
    best = [max(values[name][at] for name in singles) for at in range(len(STREAM) + 1)]
    for name in results:
        if name not in singles:
            shares = [value / top for value, top in zip(values[name], best, strict=True)]
            print(f"| {name} / best | " + " | ".join(f"{share:.2f}" for share in shares) + " |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=12, help="of each segment")
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--drafters", nargs="+", default=list(DRAFTERS), choices=list(DRAFTERS), metavar="NAME"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    segments = stream(options.data, options.texts)
    params = SamplingParams(
        temperature=options.temperature, max_tokens=options.tokens, ignore_eos=True
    )
    singles = {name: DRAFTERS[name] for name in options.drafters}
    ways = dict(singles)
    for method in ("hedge", "ucb"):
        ways[method] = {"method": method, "drafters": list(singles.values())}
    results = {}
    for name, config in ways.items():
        results[name] = played(config, segments, params)
        print(f"{name}: {[each.rounds for each in results[name]]}", flush=True)
    table("Tokens for each pass of the target:", results, list(singles), "by_pass")
    table("Tokens for each nominal price:", results, list(singles), "by_price")


if __name__ == "__main__":
    main()
