"""Trains heads for the bundled target, on text that it writes itself, and measures them.

    python bundle/heads.py --out build/heads                        every head, some minutes each
    python bundle/heads.py --out build/heads --only eagle3 --ship   one of them, into the package

Nothing is needed but the package: the target goes on with the openings in ``openings.txt``. A run
that is stopped goes on when the same command is given again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from outpace import LLM, SamplingParams
from outpace.bench.builtin import BUILT_IN
from outpace.heads.checkpoint import load_head, save_head
from outpace.heads.registry import head_names
from outpace.llm import BUNDLED
from outpace.targets.hf.loading.load import load
from outpace.train.answers import FILE, Answers, AnswerSettings, fingerprint, prompts
from outpace.train.data import cut_answers
from outpace.train.metrics import Progress
from outpace.train.run import TrainingRun
from outpace.train.settings import TrainSettings

OPENINGS = Path(__file__).with_name("openings.txt")
SMALL = {"draft_vocab_size": 1280}
SIZES = {"eagle3": {"depths": 4, "groups": 1, "inner_size": 192}}
"""The sizes of heads that would not fit into two megabytes as they are."""
TEMPERATURE, LONGEST = 0.8, 320
NAME = "the bundled target"


def main() -> None:
    """Writes text, trains, measures and prints a table."""
    options = _options()
    torch.set_num_threads(options.threads)
    print(f"{'head':16} {'MB':>5} {'minutes':>7} {'steps':>6} {'simulated':>9} {'measured':>8}")
    for method in options.only or head_names():
        run = _run(method, options)
        reached = run.play(_told, every=25, stop=_clock(60 * options.minutes))
        folder = options.out / method
        measured = _measured(method, folder)
        size = sum(weight.numel() for weight in run.network.parameters()) * 2 / 1e6
        print(
            f"{method:16} {size:5.2f} {reached.seconds / 60:7.1f} {reached.step:6} "
            f"{run.best:9.2f} {measured:8.2f}",
            flush=True,
        )
        if options.ship:
            _ship(method, folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder for all that is written")
    parser.add_argument("--minutes", type=float, default=10, help="of training for each head")
    parser.add_argument("--answers", type=int, default=2400, help="texts to learn from")
    parser.add_argument("--steps", type=int, default=1500, help="by which the rate has fallen")
    parser.add_argument("--only", nargs="+", choices=head_names(), help="some heads")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ship", action="store_true", help="put the heads into the package")
    return parser.parse_args()


def _run(method: str, options: argparse.Namespace) -> TrainingRun:
    target = load(BUNDLED / "target")
    asked = prompts([OPENINGS], target.tokenizer, NAME, LONGEST)
    settings = AnswerSettings(
        target=NAME,
        temperature=TEMPERATURE,
        max_tokens=LONGEST,
        seed=0,
        prompts=fingerprint(asked),
    )
    answers = Answers(options.out / FILE, settings, 10**9)
    answers.extend(asked, options.answers, _write, lambda count: None)
    blocks, own = cut_answers(answers, target.tokenizer.eos_token_id, 256)
    return TrainingRun(
        target,
        blocks,
        TrainSettings(
            method=method,
            steps=options.steps,
            learning_rate=2e-3,
            head={**SMALL, **SIZES.get(method, {})},
        ),
        options.out / method,
        own=own,
    )


def _write(asked: Sequence[Sequence[int]], seeds: Sequence[int]) -> Iterator[list[int]]:
    llm = LLM(speculative_config={"method": "none"}, max_num_seqs=32)
    params = [
        SamplingParams(temperature=TEMPERATURE, max_tokens=LONGEST, seed=seed) for seed in seeds
    ]
    for output in llm.generate_each([list(prompt) for prompt in asked], params):
        yield output.outputs[0].token_ids


def _measured(method: str, folder: Path) -> float:
    """Tokens per pass of the target with chains of four, greedily, after the benchmark's prompts,
    which are none of the openings."""
    config = {"method": method, "model": folder, "num_speculative_tokens": 4, "check": False}
    llm = LLM(speculative_config=config)
    outputs = llm.generate(
        [text for *_, text in BUILT_IN], SamplingParams(temperature=0, max_tokens=64)
    )
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    return 1 + accepted / sum(output.metrics.num_target_passes for output in outputs)


def _ship(method: str, folder: Path) -> None:
    """Puts a head into the package, without the path of the target on this machine."""
    head = load_head(folder).to(torch.bfloat16)
    head.target = replace(head.target, name=NAME)
    save_head(head, BUNDLED / "heads" / method)


def _clock(seconds: float) -> Callable[[], bool]:
    """A function that says whether n seconds are over, from now on."""
    begin = time.monotonic()
    return lambda: time.monotonic() - begin > seconds


def _told(reached: Progress) -> None:
    """Reports nothing: the table does."""


if __name__ == "__main__":
    main()
