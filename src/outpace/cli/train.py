"""``outpace train``: a drafter for one target, trained on given text or on the target's own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outpace.cli.grouped import grouped
from outpace.cli.groups import ModelFlags
from outpace.cli.loading import ROWS, starting, working
from outpace.cli.training_bar import counting, play
from outpace.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.targets.hf.load import Loaded
    from outpace.train.settings import TrainSettings

TEXT, DRAFTER, RUN = "Text", "Drafter", "Run"
GIGABYTE = 10**9


def _option(name: str, text: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel, metavar=metavar)


@dataclass(frozen=True, kw_only=True)
class TextFlags:
    """What is learned from."""

    data: Annotated[
        list[Path] | None,
        _option(
            "--data",
            "Training text: .txt, or .jsonl with texts, chats, or questions and answers. Several "
            "times for several files.",
            TEXT,
        ),
    ] = None
    tokens: Annotated[
        int | None, _option("--tokens", "Tokens of text to use at most. Unset: all.", TEXT)
    ] = None
    self_distill: Annotated[
        bool,
        _option(
            "--self-distill",
            "Learn from what the target itself writes behind the prompts in --data; without "
            "--data, from nothing.",
            TEXT,
        ),
    ] = False
    answers: Annotated[
        int | None,
        _option(
            "--answers", "Answers to write. Unset: one for each prompt; 1000 without any.", TEXT
        ),
    ] = None
    answer_tokens: Annotated[
        int, _option("--answer-tokens", "Tokens of the longest answer.", TEXT)
    ] = 256
    prompt_tokens: Annotated[
        int, _option("--prompt-tokens", "Tokens of a text that are its prompt.", TEXT)
    ] = 32
    temperature: Annotated[
        float, _option("--temperature", "Of the answers; 0 is greedy.", TEXT, "X")
    ] = 0.8
    cache: Annotated[
        float, _option("--cache", "Disk for answers, at most 5; then no more are written.", TEXT,
                       "GB"),
    ] = 5.0  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DrafterFlags:
    """What is trained."""

    out: Annotated[Path, _option("--out", "Folder for the drafter; a run in it goes on.", DRAFTER)]
    sizes: Annotated[
        list[str] | None,
        _option("--set", "A size of the drafter, such as depths=3.", DRAFTER, "NAME=N"),
    ] = None
    start: Annotated[
        str | None,
        _option(
            "--start",
            "Of draft_model: pruned (layers of the target), random, or a model's folder.",
            DRAFTER,
        ),
    ] = None
    loss: Annotated[
        str | None,
        _option(
            "--loss", "Of draft_model: forward_kl, reverse_kl, jsd, tv or lk (acceptance).", DRAFTER
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """How long and how fast it learns."""

    steps: Annotated[int, _option("--steps", "Steps in all.", RUN)] = 1000
    batch: Annotated[int, _option("--batch", "Blocks of text per step.", RUN)] = 4
    block: Annotated[int, _option("--block", "Tokens of a block.", RUN)] = 256
    learning_rate: Annotated[float, _option("--lr", "The highest learning rate.", RUN)] = 1e-3
    minutes: Annotated[
        float | None,
        _option("--minutes", "Stop after this time; the same command goes on later.", RUN),
    ] = None
    every: Annotated[int, _option("--every", "Steps between two reports.", RUN)] = 50
    seed: Annotated[
        int, _option("--seed", "Of weights, answers and the order of the text.", RUN)
    ] = 0


@grouped
def train(
    *,
    method: Annotated[
        str, typer.Argument(help="draft_model, or a head: medusa, hydra, mlp_speculator, eagle3.")
    ],
    model: ModelFlags,
    text: TextFlags,
    drafter: DrafterFlags,
    run: RunFlags,
) -> None:
    """Train a drafter for one target: a head over its hidden states, or a small model.

    Each report says how many tokens a pass of the target would bring with the drafter's guesses, on
    text that it does not learn from. Ctrl-C keeps what the last report wrote.

    `outpace train eagle3 -m big-model --data chats.jsonl --self-distill --out head`

    `outpace train draft_model -m big-model --data prose.txt --out small --set layers=2`
    """
    console = Console(stderr=True)
    with starting(console):
        from outpace.train.settings import TrainSettings
    given: dict[str, Any] = {"start": drafter.start, "loss": drafter.loss}
    named = {name: value for name, value in given.items() if value is not None}
    if named and method != "draft_model":
        raise ConfigError(f"--{next(iter(named))} is for draft_model; a head has none.")
    settings = TrainSettings(
        method=method,
        block=run.block,
        batch=run.batch,
        steps=run.steps,
        learning_rate=run.learning_rate,
        seed=run.seed,
        head=_sizes(drafter.sizes or []),
        **named,
    )
    _check(text)
    _train(console, model, text, settings, drafter.out, run)


def _train(
    console: Console,
    model: ModelFlags,
    text: TextFlags,
    settings: TrainSettings,
    out: Path,
    flags: RunFlags,
) -> None:
    with starting(console):
        from outpace.train.run import TrainingRun
        from outpace.train.students import check_sizes
    check_sizes(settings)
    target = _target(console, model)
    run = TrainingRun(target, _text(console, target, text, settings, out), settings, out)
    if run.step:
        console.print(f"going on from step {run.step:,} of {settings.steps:,}")
    reached = play(console, run, flags.every, flags.minutes)
    console.print(
        f"{reached.tokens:,} tokens in {reached.seconds / 60:.1f} minutes; simulated acceptance "
        f"length {reached.acceptance_length:.2f}, by depth "
        + " ".join(f"{share:.0%}" for share in reached.by_depth)
    )
    console.print(
        f"use it: --method {settings.method} --draft {out}", highlight=False, soft_wrap=True
    )


def _target(console: Console, model: ModelFlags) -> Loaded:
    with starting(console):
        from outpace.api import BUNDLED
        from outpace.errors import PromptError
        from outpace.targets.cpu.threads import use_threads
        from outpace.targets.hf.load import hide_progress_bars, load
    arguments = model.arguments()
    use_threads(arguments.pop("threads", None))
    name = BUNDLED / "target" if model.model is None else model.model
    local = model.model is None or os.path.exists(model.model)
    hide_progress_bars(downloads=local or not console.is_terminal)
    with working(console, f"loading {model.model or 'the bundled target'}") as report:
        target = load(name, progress=report, **arguments)
    if target.tokenizer is None:
        raise PromptError(f"{target.name} has no tokenizer, so no text can be read for it.")
    return target


def _text(
    console: Console, target: Loaded, text: TextFlags, settings: TrainSettings, out: Path
) -> Tensor:
    """Returns the blocks that are learned from."""
    from outpace.train.data import blocks, cut, documents

    if not text.self_distill:
        with working(console, "reading the text"):
            found = documents(text.data or [], target.tokenizer, target.name)
            return blocks(found, target.tokenizer, settings.block, text.tokens)
    written = _written(console, target, text, settings.seed, out)
    return cut(written, target.tokenizer.eos_token_id, settings.block, text.tokens)


def _written(
    console: Console, target: Loaded, text: TextFlags, seed: int, out: Path
) -> Iterator[Sequence[int]]:
    """Has the target write what is still missing of its answers; returns them all."""
    from outpace.train.answers import FILE, Answers, AnswerSettings, prompts

    asked = prompts(text.data or [], target.tokenizer, target.name, text.prompt_tokens)
    settings = AnswerSettings(
        target=target.name,
        temperature=text.temperature,
        max_tokens=text.answer_tokens,
        seed=seed,
        prompts=len(asked),
    )
    wanted = text.answers or (len(asked) if text.data else 1000)
    if wanted > len(asked) and not text.temperature:
        raise ConfigError(
            f"{wanted} answers to {len(asked)} prompts would be the same again and again at "
            "--temperature 0: ask for fewer, or give a temperature."
        )
    answers = Answers(out / FILE, settings, int(text.cache * GIGABYTE))
    if answers.count < wanted:
        with counting(console, "writing answers", wanted, answers.count) as report:
            answers.extend(asked, wanted, _writer(target, text), report)
    if answers.count < wanted:
        console.print(f"{answers.count:,} answers fill the cache of {text.cache:g} GB")
    return iter(answers)


def _writer(target: Loaded, text: TextFlags) -> Any:
    """Returns what writes answers with the target, many at once."""
    from outpace.api import LLM
    from outpace.core.params import SamplingParams

    model: Any = target  # loaded as it is to learn from
    llm = LLM(model, speculative_config={"method": "none"}, max_num_seqs=ROWS)

    def write(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Iterator[list[int]]:
        room = [llm.max_model_len - len(prompt) for prompt in prompts]
        params = [
            SamplingParams(
                temperature=text.temperature,
                max_tokens=max(1, min(text.answer_tokens, left)),
                seed=seed,
            )
            for seed, left in zip(seeds, room, strict=True)
        ]
        for output in llm.generate_each([list(prompt) for prompt in prompts], params):
            yield output.outputs[0].token_ids

    return write


def _check(text: TextFlags) -> None:
    """Raises ``ConfigError`` for flags that make no sense together."""
    if not (text.data or text.self_distill):
        raise ConfigError("there is nothing to learn from: add --data FILE, or --self-distill.")
    if text.answers is not None and not text.self_distill:
        raise ConfigError("--answers needs --self-distill, which writes them.")
    if not 0 < text.cache <= 5:
        raise ConfigError(f"--cache must be above 0 and at most 5 GB, not {text.cache:g}.")
    for name in ("answers", "answer_tokens", "prompt_tokens"):
        value = getattr(text, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}.")


def _sizes(given: Sequence[str]) -> Mapping[str, int | bool]:
    """Reads ``NAME=N``; true and false are numbers, too."""
    found: dict[str, int | bool] = {}
    for text in given:
        name, _, value = text.partition("=")
        if value in ("true", "false"):
            found[name] = value == "true"
        elif value.isdigit():
            found[name] = int(value)
        else:
            raise ConfigError(f"--set takes NAME=N, such as depths=3, not {text!r}.")
    return found
