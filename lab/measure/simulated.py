"""Compares simulated with measured acceptance lengths of trained heads, on the same text.

    python lab/measure/simulated.py TARGET PROMPTS.jsonl HEAD...

The target answers each prompt greedily. Chains of the head's first guesses are simulated in these
texts, as in the reports of `outpace train`, and then the texts are written once more with the head.
Counted are the same rounds: all whose draft the text goes on far enough after.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from outpace import LLM, SamplingParams
from outpace.draft.base import Round
from outpace.heads.base import Head
from outpace.heads.checkpoint import load_head
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.train.answers import prompts
from outpace.train.metrics import AcceptanceLength
from outpace.train.teacher import Teacher, loss_mask_of

Tokens = list[int]
ROOM = 1024
"""Tokens of a prompt and its answer, at most."""


def main() -> None:
    """Prints a row for each head."""
    options = _options()
    torch.set_num_threads(options.threads)
    target = load(options.target)
    asked = prompts([options.prompts], target.tokenizer, target.name, ROOM)[: options.count]
    asked = [prompt for prompt in asked if len(prompt) + options.tokens <= ROOM]
    answers = _written(target, {"method": "none"}, asked, options.tokens)[0]
    print(f"{len(asked)} texts of {options.tokens} tokens each\n")
    print("| head | simulated | measured | rounds |\n| --- | --- | --- | --- |")
    for folder in options.heads:
        head = load_head(folder)
        depths = head.config.depths
        simulated = _simulated(target, head, asked, answers)
        config = {"method": head.kind, "model": str(folder), "num_speculative_tokens": depths}
        texts, rounds = _written(target, {**config, "check": False}, asked, options.tokens)
        if texts != answers:
            raise SystemExit("the texts are not those of plain decoding: that must never happen")
        found = [length for length, left in rounds if left > depths]
        print(f"| {folder} | {simulated:.3f} | {sum(found) / len(found):.3f} | {len(found)} |")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", help="the model")
    parser.add_argument("prompts", type=Path, help="what it is asked")
    parser.add_argument("heads", type=Path, nargs="+", help="folders of trained heads")
    parser.add_argument("--count", type=int, default=25, help="of the prompts")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def _written(
    target: LoadedModel, config: dict[str, object], asked: Sequence[Tokens], count: int
) -> tuple[list[Tokens], list[tuple[int, int]]]:
    """The greedy answers, and of each round with a draft its length and how many tokens of the
    answer were still to come before it."""
    rounds: list[tuple[int, int]] = []

    def see(trace: Round) -> None:
        for row, decision in enumerate(trace.outcomes):
            if decision.drafted:
                left = len(asked[len(texts)]) + count - trace.rows.lengths[row]
                rounds.append((1 + len(decision.path), left))

    llm = LLM(target, speculative_config=config, max_num_seqs=1, max_model_len=ROOM)
    greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    texts: list[Tokens] = []
    with llm.engine.observing(see):
        for prompt in asked:
            texts.append(llm.generate([prompt], greedy)[0].outputs[0].token_ids)
    return texts, rounds


@torch.no_grad()
def _simulated(
    target: LoadedModel, head: Head, asked: Sequence[Tokens], answers: Sequence[Tokens]
) -> float:
    """The acceptance length in all answers, read one after the other."""
    teacher = Teacher(target, head.hidden_layers)
    recipe = head.recipe()(head.float(), teacher)
    hits, own, first = [], [], 0
    longest = max(map(len, asked)) + len(answers[0])
    for prompt, answer in zip(asked, answers, strict=True):
        # Causal attention: what is put after a text makes no difference to it.
        text = torch.tensor([[*prompt, *answer, *[0] * (longest - len(prompt) - len(answer))]])
        marks = recipe.compute_loss(teacher.read(text))
        hits.append(marks.hits)
        first = marks.first
        begin, end = len(prompt), len(prompt) + len(answer) - head.config.depths
        own.append(_between(longest, begin, end))
    found = torch.cat(hits)
    behind = loss_mask_of(torch.cat(own))[:, first + 1 : first + 1 + found.shape[1]]
    return AcceptanceLength().score(found, behind)


def _between(count: int, begin: int, end: int) -> Tensor:
    at = torch.arange(count)[None]
    return (begin <= at) & (at < end)


if __name__ == "__main__":
    main()
