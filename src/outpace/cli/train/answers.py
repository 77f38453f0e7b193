"""The target's answers: written for a drafter to learn from (``--self-distill``), or given to a
stream of prompts while the drafter learns from each (``--online``)."""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from outpace.cli.flags.groups import ModelFlags
from outpace.cli.loading import ROWS, load_llm
from outpace.cli.printing import say
from outpace.cli.progress import counting
from outpace.cli.train.flags import DrafterFlags, OnlineFlags, RunFlags, TextFlags
from outpace.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from outpace.targets.hf.loading.loaded import LoadedModel
    from outpace.train.data import PromptAnswer
    from outpace.train.distributed import Ranks

GIGABYTE = 10**9

LATELY = 20
"""Answers over which acceptance is reported."""
KEPT = ("learning_rate",)
"""Flags of a run that mean something while a drafter is in service."""


# -- written to learn from -------------------------------------------------------------------------


def written(
    console: Console, target: LoadedModel, text: TextFlags, seed: int, out: Path, ranks: Ranks
) -> Iterator[PromptAnswer]:
    """Has the target write what is still missing of its answers; returns them all. ranks: the first
    of them writes, and the others wait and read what it has written."""
    from outpace.core.params import SamplingParams
    from outpace.targets.hf.loading.lora import digest_of
    from outpace.train.answers import FILE, Answers, AnswerSettings, fingerprint, prompts

    # What is wrong is said before anything is written, under settings that would be wrong as well.
    SamplingParams(temperature=text.temperature, max_tokens=text.answer_tokens)
    asked = prompts(
        text.data or [], target.tokenizer, target.name, text.prompt_tokens, target.max_length
    )
    settings = AnswerSettings(
        target=target.name,
        lora=None if target.lora is None else digest_of(target.lora),
        quantization=target.quantization,
        temperature=text.temperature,
        max_tokens=text.answer_tokens,
        seed=seed,
        prompts=fingerprint(asked),
    )
    wanted = text.wanted(len(asked))
    most_bytes = int(text.cache * GIGABYTE)
    answers = Answers(out / FILE, settings, most_bytes) if ranks.first else None
    missing = answers is not None and answers.count < wanted and not answers.full
    if ranks.any(missing):
        _check_whole(target, ranks)
    if answers is None:
        ranks.wait()
        return iter(Answers(out / FILE, settings, most_bytes))
    if answers.count < wanted:
        with counting(console, "writing answers") as steps:
            steps.expect(wanted, done=answers.count)
            writer = _writer(target, text)
            answers.extend(asked, wanted, writer, lambda count: steps.at(count, "writing"))
    if answers.count < wanted:
        console.print(f"{answers.count:,} answers fill the cache of {text.cache:g} GB")
    ranks.wait()
    return iter(answers)


def _check_whole(target: LoadedModel, ranks: Ranks) -> None:
    """Raises ``ConfigError`` on all ranks where none holds the whole target."""
    if ranks.count == 1:
        return
    from outpace.train.distributed import is_sharded

    if is_sharded(target):
        raise ConfigError(
            "with --self-distill one process writes the answers, and with --shard-target none has "
            "the whole target: have them written before, by the same command with --steps 1 and "
            "without --shard-target and torchrun (on a CPU if need be), or leave --self-distill "
            "out and give the target's answers with --data."
        )


def _writer(target: LoadedModel, text: TextFlags) -> Any:
    """Returns what writes answers with the target, many at once."""
    from outpace.core.params import SamplingParams
    from outpace.llm import LLM

    llm = LLM(target, speculative_config={"method": "none"}, max_num_seqs=ROWS)

    def write(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Iterator[list[int]]:
        room = [llm.max_model_len - len(prompt) for prompt in prompts]
        params = [
            SamplingParams(
                temperature=text.temperature,
                max_tokens=min(text.answer_tokens, left),
                seed=seed,
            )
            for seed, left in zip(seeds, room, strict=True)
        ]
        for output in llm.generate_each(prompts, params):
            yield output.outputs[0].token_ids

    return write


# -- in service ------------------------------------------------------------------------------------


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

    _check_online(method, model, drafter, run, text)
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
    say(console, f"use it: --method {method} --draft {shlex.quote(str(drafter.out))}")


def _check_online(
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


def _answered(console: Console, llm: Any, text: TextFlags) -> Iterator[float]:
    """Yields the mean acceptance length of each answer."""
    from outpace.core.params import SamplingParams
    from outpace.train.answers import prompts

    asked = prompts(
        text.data or [], llm.tokenizer, llm.target.name, text.prompt_tokens, llm.max_model_len
    )
    wanted, lately = text.wanted(len(asked)), deque[float](maxlen=LATELY)
    with counting(console, "answering") as steps:
        steps.expect(wanted)
        for number in range(wanted):
            prompt = asked[number % len(asked)]
            room = llm.max_model_len - len(prompt)
            params = SamplingParams(
                temperature=text.temperature, max_tokens=min(text.answer_tokens, room)
            )
            metrics = llm.generate([prompt], params)[0].metrics
            lately.append(metrics.mean_acceptance_length)
            yield lately[-1]
            steps.done("answering")
            if (number + 1) % LATELY == 0:
                steps.say(f"answer {number + 1:,}: acceptance length {_mean(lately):.2f}")


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
