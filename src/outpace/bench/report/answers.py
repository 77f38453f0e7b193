"""A run's texts in Spec-Bench's answer format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outpace.bench.report.specbench import Answer, accept_lengths
from outpace.bench.run.schedule import TimedRun
from outpace.bench.run.summary import SettingRuns
from outpace.core.text_decoder import TextDecoder


def answers(runs: SettingRuns, name: str, model: str, tokenizer: Any) -> list[Answer]:
    """Returns a contestant's answers to all prompts, from its first repeat of each job.

    The wall time of a text in a batch is the time of the whole batch.
    """
    decoder = TextDecoder(tokenizer)
    return [
        _answer(runs, run, row, model, decoder)
        for run in runs.of(name)
        if run.repeat == 0
        for row in range(len(run.made.texts))
    ]


def _answer(runs: SettingRuns, run: TimedRun, row: int, model: str, decoder: TextDecoder) -> Answer:
    prompt, text = runs.prompts[run.job][row], run.made.texts[row]
    metrics: Sequence[Any] = run.made.metrics
    own = metrics[row] if metrics else None
    lengths: tuple[int, ...] = ()  # another program does not tell the passes of its target
    if own is not None:
        lengths = accept_lengths(own.accepted_per_position, own.num_target_passes)
    return Answer(
        question_id=prompt.id,
        category=prompt.task,
        model_id=f"{model}/{run.contestant}",
        text=decoder.text(text),
        new_tokens=len(text),
        wall_time=run.seconds,
        decoding_steps=None if own is None else len(lengths),
        accept_lengths=lengths,
    )
