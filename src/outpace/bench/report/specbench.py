"""Spec-Bench's answer files: ``new_tokens``, ``wall_time``, ``accept_lengths``.

Its question files are read by `prompts`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Answer:
    """The answer to one question's first turn."""

    question_id: str
    category: str
    model_id: str
    text: str
    new_tokens: int
    wall_time: float
    decoding_steps: int | None
    """Passes of the target; None where the program does not tell."""
    accept_lengths: tuple[int, ...]
    """Tokens of each target pass, the bonus or correction included, in no particular order.
    Empty where the program does not tell."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the line as Spec-Bench writes it."""
        steps = self.decoding_steps
        return {
            "question_id": self.question_id,
            "category": self.category,
            "model_id": self.model_id,
            "choices": [
                {
                    "index": 0,
                    "turns": [self.text],
                    "decoding_steps": [] if steps is None else [steps],
                    "new_tokens": [self.new_tokens],
                    "wall_time": [self.wall_time],
                    "accept_lengths": list(self.accept_lengths),
                }
            ],
        }


def accept_lengths(accepted: Sequence[int], passes: int) -> tuple[int, ...]:
    """Returns how many tokens each target pass gave, in ascending order.

    accepted: how many passes accepted a draft to depth 1 or deeper, to depth 2 or deeper, and so
    on. passes: all passes, also those that accepted nothing.

    >>> accept_lengths([2, 1], passes=3)
    (1, 2, 3)
    """
    reached = [passes, *accepted, 0]
    lengths: list[int] = []
    for depth in range(len(accepted) + 1):
        lengths += [depth + 1] * (reached[depth] - reached[depth + 1])
    return tuple(lengths)


def write_answers(path: Path, answers: Iterable[Answer]) -> None:
    """Writes one line per answer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(answer.as_dict(), ensure_ascii=False) for answer in answers]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
