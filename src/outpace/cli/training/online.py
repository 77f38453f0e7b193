"""``outpace train --online``: a drafter learns while it drafts for a stream of prompts."""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from rich.console import Console

from outpace.cli.flags.groups import ModelFlags
from outpace.cli.loading import load_llm
from outpace.cli.training.bar import counting
from outpace.cli.training.flags import DrafterFlags, OnlineFlags, RunFlags, TextFlags
from outpace.errors import ConfigError, PromptError

LATELY = 20
"""Answers over which acceptance is reported."""
KEPT = ("learning_rate",)
"""Flags of a run that mean something while a drafter is in service."""


def train_online(
    console: Console,
    method: str,
    model: ModelFlags,
    text: TextFlags,
    drafter: DrafterFlags,
    run: RunFlags,
    online: OnlineFlags,
) -> None:
    """Answers the prompts one after another, and keeps the drafter as it is in the end; Ctrl-C ends
    the stream."""
    from outpace.heads.registry import head_names

    _check(method, model, drafter, run, text)
    given = {"learner": online.learner, "learning_rate": run.learning_rate}
    how = {name: value for name, value in given.items() if value is not None}
    config: dict[str, Any] = {"method": method, "online": how}
    if drafter.start is not None:
        config["model"] = drafter.start
    if method in head_names():
        config["check"] = False  # what does not fit well yet is to learn
    llm, _ = load_llm(model.model, {"speculative_config": config, **model.arguments()}, {}, 1)
    if llm.tokenizer is None:
        raise PromptError(f"{llm.target.name} has no tokenizer, so no text can be read for it.")
    lengths: list[float] = []
    try:
        for length in _answered(console, llm, text):
            lengths.append(length)  # one by one: Ctrl-C loses none
    except KeyboardInterrupt:
        console.print("interrupted: what was learned so far is kept")
    except Exception:
        if lengths:
            llm.save_drafter(drafter.out)
            console.print(f"what was learned from {len(lengths):,} answers is kept", markup=False)
        raise
    llm.save_drafter(drafter.out)
    if len(lengths) >= 2 * LATELY:
        first, last = _mean(lengths[:LATELY]), _mean(lengths[-LATELY:])
        console.print(f"acceptance length {first:.2f} at first, {last:.2f} at last")
    use = f"use it: --method {method} --draft {shlex.quote(str(drafter.out))}"
    console.print(use, highlight=False, markup=False, soft_wrap=True)


def _answered(console: Console, llm: Any, text: TextFlags) -> Iterator[float]:
    """Yields the mean acceptance length of each answer."""
    from outpace.core.params import SamplingParams
    from outpace.train.answers import prompts

    asked = prompts(
        text.data or [], llm.tokenizer, llm.target.name, text.prompt_tokens, llm.max_model_len
    )
    wanted, lately = text.wanted(len(asked)), deque[float](maxlen=LATELY)
    with counting(console, "answering", wanted, 0) as report:
        for number in range(wanted):
            prompt = asked[number % len(asked)]
            room = llm.max_model_len - len(prompt)
            params = SamplingParams(
                temperature=text.temperature, max_tokens=min(text.answer_tokens, room)
            )
            metrics = llm.generate([prompt], params)[0].metrics
            lately.append(metrics.mean_acceptance_length)
            yield lately[-1]
            report(number + 1)
            if (number + 1) % LATELY == 0:
                console.print(f"answer {number + 1:,}: acceptance length {_mean(lately):.2f}")


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _check(
    method: str, model: ModelFlags, drafter: DrafterFlags, run: RunFlags, text: TextFlags
) -> None:
    """Raises ``ConfigError`` for flags that mean nothing here."""
    given = [one.name for one in fields(run) if getattr(run, one.name) is not None]
    other = [name for name in given if name not in KEPT]
    other += ["set"] if drafter.sizes else []
    other += ["loss"] if drafter.loss else []
    other += ["draft"] if drafter.draft else []
    other += ["drafter-quantization"] if drafter.drafter_quantization else []
    other += ["tokens"] if text.tokens else []
    if other:
        raise ConfigError(
            f"--{other[0]} is for training on text, and --online learns from answers: leave it out."
        )
    if drafter.start in ("pruned", "random") or (
        drafter.start is None and not (model.bundled and method == "draft_model")
    ):
        raise ConfigError("--online goes on from a drafter: name its folder with --start.")
