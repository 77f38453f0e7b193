"""A run's texts in Spec-Bench's answer format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outpace.bench.schedule import Trial
from outpace.bench.specbench import Answer, accept_lengths
from outpace.bench.summary import Observed


def answers(seen: Observed, name: str, model: str, tokenizer: Any) -> list[Answer]:
    """Returns a contestant's answers, one per prompt, of its first repeat.

    The wall time of a text in a batch is that of the batch.
    """
    return [
        _answer(seen, trial, row, model, tokenizer)
        for trial in seen.of(name)
        if trial.repeat == 0
        for row in range(len(trial.outcome.texts))
    ]


def _answer(seen: Observed, trial: Trial, row: int, model: str, tokenizer: Any) -> Answer:
    prompt, text = seen.units[trial.job][row], trial.outcome.texts[row]
    metrics: Sequence[Any] = trial.outcome.metrics
    own = metrics[row] if metrics else None
    lengths = (
        accept_lengths(own.accepted_per_position, own.num_target_passes)
        if own is not None
        else (1,) * len(text)
    )
    return Answer(
        question_id=prompt.id,
        category=prompt.task,
        model_id=f"{model}/{trial.contestant}",
        text=tokenizer.decode(text, skip_special_tokens=True),
        new_tokens=len(text),
        wall_time=trial.seconds,
        decoding_steps=len(lengths),
        accept_lengths=lengths,
    )
