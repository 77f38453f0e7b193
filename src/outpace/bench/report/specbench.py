"""Spec-Bench's answer files, written and read: ``new_tokens``, ``wall_time``, ``accept_lengths``.

Its question files are read by `prompts`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.errors import PromptError


@dataclass(frozen=True)
class Answer:
    """The answer to one question's first turn."""

    question_id: str
    category: str
    model_id: str
    text: str
    new_tokens: int
    wall_time: float
    decoding_steps: int
    accept_lengths: tuple[int, ...]
    """Tokens of each target pass, the bonus or correction included, in no particular order."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the line as Spec-Bench writes it."""
        return {
            "question_id": self.question_id,
            "category": self.category,
            "model_id": self.model_id,
            "choices": [
                {
                    "index": 0,
                    "turns": [self.text],
                    "decoding_steps": [self.decoding_steps],
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


def read_answers(path: Path) -> list[Answer]:
    """Returns the answers of a file that Spec-Bench or `write_answers` wrote.

    Counts and times are summed over an answer's turns and choices; the text is that of the first.
    Raises ``PromptError`` for another file.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        return [_answer(json.loads(line)) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise PromptError(f"{path} is no Spec-Bench answer file ({error}).") from error


def _answer(line: dict[str, Any]) -> Answer:
    choices = line["choices"]
    return Answer(
        question_id=str(line["question_id"]),
        category=str(line.get("category", "")),
        model_id=str(line.get("model_id", "")),
        text=choices[0]["turns"][0],
        new_tokens=sum(sum(choice["new_tokens"]) for choice in choices),
        wall_time=sum(sum(choice["wall_time"]) for choice in choices),
        decoding_steps=sum(sum(choice.get("decoding_steps", [])) for choice in choices),
        accept_lengths=tuple(n for choice in choices for n in choice.get("accept_lengths", [])),
    )
