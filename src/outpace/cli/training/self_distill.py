"""The target writes the text that a drafter learns from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from outpace.cli.loading import ROWS
from outpace.cli.training.bar import counting
from outpace.cli.training.flags import TextFlags
from outpace.errors import ConfigError

if TYPE_CHECKING:
    from outpace.targets.hf.loading.loaded import Loaded
    from outpace.train.data import Written
    from outpace.train.ranks import Ranks

GIGABYTE = 10**9


def written(
    console: Console, target: Loaded, text: TextFlags, seed: int, out: Path, ranks: Ranks
) -> Iterator[Written]:
    """Has the target write what is still missing of its answers; returns them all. ranks: the first
    of them writes, and the others wait and read what it has written."""
    from outpace.core.params import SamplingParams
    from outpace.train.answers import FILE, Answers, AnswerSettings, fingerprint, prompts

    # What is wrong is said before anything is written, under settings that would be wrong as well.
    SamplingParams(temperature=text.temperature, max_tokens=text.answer_tokens)
    asked = prompts(
        text.data or [], target.tokenizer, target.name, text.prompt_tokens, target.max_length
    )
    settings = AnswerSettings(
        target=target.name,
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
        with counting(console, "writing answers", wanted, answers.count) as report:
            answers.extend(asked, wanted, _writer(target, text), report)
    if answers.count < wanted:
        console.print(f"{answers.count:,} answers fill the cache of {text.cache:g} GB")
    ranks.wait()
    return iter(answers)


def _check_whole(target: Loaded, ranks: Ranks) -> None:
    """Raises ``ConfigError`` on all ranks where none holds the whole target."""
    if ranks.count == 1:
        return
    from outpace.train.sharded import is_sharded

    if is_sharded(target):
        raise ConfigError(
            "with --self-distill one process writes the answers, and with --shard-target none has "
            "the whole target: have them written before, by the same command with --steps 1 and "
            "without --shard-target and torchrun (on a CPU if need be), or leave --self-distill "
            "out and give the target's answers with --data."
        )


def _writer(target: Loaded, text: TextFlags) -> Any:
    """Returns what writes answers with the target, many at once."""
    from outpace.api import LLM
    from outpace.core.params import SamplingParams

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
