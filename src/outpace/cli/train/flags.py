"""The flags of ``outpace train``, in groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from outpace.errors import ConfigError

TEXT, DRAFTER, RUN, PROCESSES, ONLINE = "Text", "Drafter", "Run", "Processes", "Online"

EVERY = 50
"""Steps between two reports, where --every does not say."""


OF_ANSWERS = ("answers", "answer_tokens", "prompt_tokens", "temperature")
"""What the target's own answers depend on."""


def _option(name: str, text: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel, metavar=metavar)


@dataclass(frozen=True, kw_only=True)
class TextFlags:
    """What is learned from."""

    data: Annotated[
        list[Path] | None,
        _option(
            "--data",
            "Training text: .txt, or .jsonl or .json with texts, chats, or questions and answers. "
            "Several times for several files.",
            TEXT,
        ),
    ] = None
    tasks: Annotated[
        list[str] | None,
        _option(
            "--for",
            "Instead of --data: the text of a task, or of a language. Once for each. A drafter is "
            "trained for every one, and a router that recognises the task of a prompt.",
            TEXT,
            "TASK=FILE",
        ),
    ] = None
    tokens: Annotated[
        int | None, _option("--tokens", "Tokens of text to use at most. Unset: all.", TEXT)
    ] = None
    self_distill: Annotated[
        bool,
        _option(
            "--self-distill",
            "Learn from what the target itself writes after the prompts in --data; without "
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
        float, _option("--temperature", "Temperature of the answers; 0: greedy.", TEXT, "X")
    ] = 0.8
    cache: Annotated[
        float,
        _option(
            "--cache",
            "Disk for answers, and as much for --hidden-states, at most 5; then no more are "
            "written.",
            TEXT,
            "GB",
        ),
    ] = 5.0
    hidden_states: Annotated[
        Path | None,
        _option(
            "--hidden-states",
            "Folder that keeps the target's hidden states: it reads each part of the text once, "
            "however long and however many drafters learn from it.",
            TEXT,
        ),
    ] = None

    def check(self, online: bool) -> None:
        """Raises ``ConfigError`` for flags that make no sense together."""
        if online and self.self_distill:
            raise ConfigError("--online learns from the target's own answers: drop --self-distill.")
        if online and self.hidden_states:
            raise ConfigError(
                "--hidden-states is for training on text: leave it out with --online."
            )
        if self.tasks and (self.data or online):
            other = "--data" if self.data else "--online"
            raise ConfigError(f"--for and {other} exclude each other: leave one of them out.")
        if not (self.data or self.tasks or self.self_distill or online):
            raise ConfigError("there is nothing to learn from: add --data FILE, or --self-distill.")
        for each in fields(self) if not (self.self_distill or online) else ():
            routed = self.tasks and each.name == "prompt_tokens"  # by the prompts of the tasks
            if each.name in OF_ANSWERS and getattr(self, each.name) != each.default and not routed:
                flag = f"--{each.name.replace('_', '-')}"
                raise ConfigError(f"{flag} needs --self-distill, which writes answers.")
        if not 0 < self.cache <= 5:
            raise ConfigError(f"--cache must be above 0 and at most 5 GB, not {self.cache:g}.")
        for name in ("answers", "answer_tokens", "prompt_tokens", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}.")

    def wanted(self, prompts: int) -> int:
        """Returns how many answers are written to that many prompts; ``ConfigError`` where some of
        them would be the same."""
        wanted = self.answers or (prompts if self.data else 1000)
        if wanted > prompts and not self.temperature:
            raise ConfigError(
                f"{wanted} answers to {prompts} prompts would be the same again and again at "
                "--temperature 0: ask for fewer, or give a temperature."
            )
        return wanted


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
            "The folder of a drafter that has learned before, such as on another text: this one "
            "begins as it. draft_model also takes pruned (layers of the target; unset) and random.",
            DRAFTER,
        ),
    ] = None
    draft: Annotated[
        str | None,
        _option(
            "--draft",
            "For judge and stop_head: the draft model whose tokens they learn to judge, its folder "
            "or hub name. Unset: the bundled one, for the bundled target.",
            DRAFTER,
        ),
    ] = None
    loss: Annotated[
        str | None,
        _option("--loss", "Loss of draft_model: forward_kl, reverse_kl, jsd, tv or lk.", DRAFTER),
    ] = None
    drafter_quantization: Annotated[
        str | None,
        _option(
            "--drafter-quantization",
            "int8 or int4: it learns with weights rounded so, to lose nothing when it drafts so.",
            DRAFTER,
        ),
    ] = None

    def head(self) -> Mapping[str, int | bool]:
        """Returns the sizes; true and false are numbers, too."""
        found: dict[str, int | bool] = {}
        for text in self.sizes or []:
            name, _, value = text.partition("=")
            if value in ("true", "false"):
                found[name] = value == "true"
            elif value.isascii() and value.isdigit():
                found[name] = int(value)
            else:
                raise ConfigError(f"--set takes NAME=N, such as depths=3, not {text!r}.")
        return found


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """How long and how fast it learns."""

    steps: Annotated[int | None, _option("--steps", "Steps in all. Unset: 1000.", RUN)] = None
    batch: Annotated[
        int | None,
        _option("--batch", "Blocks of text per step, of all processes together. Unset: 4.", RUN),
    ] = None
    block: Annotated[int | None, _option("--block", "Tokens of a block. Unset: 256.", RUN)] = None
    learning_rate: Annotated[
        float | None,
        _option("--lr", "The highest learning rate. Unset: 0.001; with --online 0.0001.", RUN),
    ] = None
    minutes: Annotated[
        float | None,
        _option("--minutes", "Stop after this time; the same command goes on later.", RUN),
    ] = None
    patience: Annotated[
        int | None,
        _option("--patience", "Stop after this many reports without a better figure.", RUN),
    ] = None
    every: Annotated[
        int | None, _option("--every", "Steps between two reports. Unset: 50.", RUN)
    ] = None
    precision: Annotated[
        str | None,
        _option(
            "--precision",
            "Precision of matrix products: float32, bfloat16, or auto (default): bfloat16 on a GPU "
            "with it.",
            RUN,
        ),
    ] = None
    seed: Annotated[
        int | None,
        _option("--seed", "Seed of weights, answers and text order. Unset: 0.", RUN),
    ] = None
    png: Annotated[
        Path | None,
        _option(
            "--png",
            "Image of the curves: the loss, and the figure on text that it does not learn from. "
            "Drawn anew at each report.",
            RUN,
            "FILE",
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Returns those of the flags that were given and are settings of the run. Raises
        ``ConfigError`` for the others that make no sense."""
        for name in ("patience", "every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name} must be at least 1, not {value}.")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"--minutes must be more than 0, not {self.minutes:g}.")
        names = ("steps", "batch", "block", "learning_rate", "precision", "seed")
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ProcessFlags:
    """How several processes share the work."""

    shard_target: Annotated[
        bool,
        _option(
            "--shard-target",
            "Split the target's layers over the processes that torchrun has started: for a target "
            "that a single GPU cannot hold.",
            PROCESSES,
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class OnlineFlags:
    """Learning in service."""

    online: Annotated[
        bool,
        _option(
            "--online",
            "Answer the prompts in --data one after another with the drafter in --start, which "
            "learns from each correction.",
            ONLINE,
        ),
    ] = False
    learner: Annotated[
        str | None, _option("--learner", "osd (unset), optimistic or ensemble.", ONLINE)
    ] = None
