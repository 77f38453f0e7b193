"""Text that the target writes itself, which is the best text to foresee it by.

Zhou et al. 2023, DistillSpec (arXiv 2310.08461), on data that the models write themselves; and all
published heads, whose training text is the target's own answers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outpace.core.unicode import check_unicode
from outpace.errors import ConfigError, ModelLoadError, PromptError
from outpace.files import question, replacing
from outpace.heads.folder import saving
from outpace.inputs.chats import rendered
from outpace.inputs.documents import (
    QUESTIONS,
    TEXTS,
    conversation,
    named_text,
    naming,
    plain_chat,
)
from outpace.inputs.prompts import ChatIds
from outpace.targets.hf.tokenizer import tokenized
from outpace.train.data import PromptAnswer, items

FILE = "answers.jsonl"
AT_ONCE = 256
"""Prompts that are handed over together; the engine keeps as many rows busy as it has."""

Write = Callable[[Sequence[Sequence[int]], Sequence[int]], Iterator[Sequence[int]]]
"""From prompts, as token ids, and a seed for each to the answers in the same order."""


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """What the answers depend on; they are gone on with under the same ones only."""

    target: str
    lora: str | None = None
    """Which adapter is in the target's weights: its `digest_of`."""
    quantization: str | None = None
    """How the target's weights were rounded when it was loaded."""
    temperature: float
    max_tokens: int
    """The longest answer."""
    seed: int
    prompts: str
    """Which ones: `fingerprint`."""


class Answers:
    """A file of answers that grows until there are enough, also over several runs.

    A line holds the tokens of a prompt and those of its answer. When the file has as many bytes as
    it may, no more are written.
    """

    def __init__(self, path: Path, settings: AnswerSettings, most_bytes: int) -> None:
        """Raises ``ConfigError`` for a file that was written under other settings."""
        self._path, self._settings, self._most_bytes = path, settings, most_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self.count = self._recover() if path.exists() else self._begin()

    @property
    def full(self) -> bool:
        """Whether the file may not grow any more."""
        return self._path.stat().st_size >= self._most_bytes

    def extend(
        self,
        prompts: Sequence[Sequence[int]],
        wanted: int,
        write: Write,
        report: Callable[[int], None],
    ) -> None:
        """Has answers written until there are ``wanted``; prompts come again with another seed.

        report: called with how many there are, after each.
        """
        while self.count < wanted and not self.full:
            numbers = range(self.count, min(wanted, self.count + AT_ONCE))
            asked = [prompts[number % len(prompts)] for number in numbers]
            answers = write(asked, [self._settings.seed + number for number in numbers])
            for prompt, answer in zip(asked, answers, strict=True):
                self._append(json.dumps([[*prompt], [*answer]]) + "\n")
                self.count += 1
                report(self.count)
                if self.full:
                    break

    def _append(self, line: str) -> None:
        with saving(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(line)

    def __iter__(self) -> Iterator[PromptAnswer]:
        """Yields the tokens of each prompt and its answer. Raises ``ModelLoadError`` for a line
        that was not written here."""
        with self._path.open(encoding="utf-8") as file:
            next(file)
            for number, line in enumerate(file, 2):
                yield self._written(line, number)

    def _written(self, line: str, number: int) -> PromptAnswer:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        match found:
            case [list(prompt), list(answer)]:
                return PromptAnswer(prompt, answer)
        raise ModelLoadError(
            f"{self._path}, line {number} holds no answer: delete that line, or the file to begin "
            "anew."
        )

    def _begin(self) -> int:
        with saving(self._path), replacing(self._path) as part:
            part.write_text(json.dumps(asdict(self._settings)) + "\n", encoding="utf-8")
        return 0

    def _recover(self) -> int:
        """Checks what an earlier run has left, and drops a line that it did not finish."""
        whole, lines = 0, 0
        try:
            with self._path.open("rb") as file:
                first = file.readline()
                before = json.loads(first)
                mine = asdict(self._settings)
                if not isinstance(before, dict) or not first.endswith(b"\n"):
                    raise ValueError("no settings")
                if not mine.keys() & before.keys():
                    raise ValueError("settings of something else")
                whole = len(first)
                for line in file:
                    if line.endswith(b"\n"):
                        whole, lines = whole + len(line), lines + 1
        except (OSError, ValueError) as error:
            raise ModelLoadError(
                f"{self._path} cannot be read, so that no answers can be added: delete it to begin "
                "anew."
            ) from error
        other = [name for name in mine if before.get(name) != mine[name]]
        if other and not lines:  # nothing is lost
            return self._begin()
        if other:
            raise ConfigError(
                f"{self._path} holds answers with another {' and '.join(other)}: name another "
                "folder, or delete it to begin anew."
            )
        os.truncate(self._path, whole)
        return lines


def fingerprint(prompts: Sequence[Sequence[int]]) -> str:
    """Returns a short text that other prompts, or the same in another order, do not have."""
    digest = hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode())
    return f"{len(prompts)} ({digest.hexdigest()[:16]})"


def prompts(
    paths: Sequence[Path], tokenizer: Any, name: str, length: int, most: int | None = None
) -> list[list[int]]:
    """Returns the prompts in files, as token ids.

    Of a conversation all up to the last answer, of a question without its answer all, of a text
    the first ``length`` tokens. Without files, the beginning of a text. name: the model's, for
    errors. most: tokens that a prompt and its answer may have; None: any number. Raises
    ``PromptError`` where there is none, or one that leaves no room for an answer.
    """
    if not paths:
        first = tokenizer.bos_token_id
        first = tokenizer.eos_token_id if first is None else first
        if first is None:
            raise PromptError(
                f"the tokenizer of {name} has no token that begins a text: give prompts with "
                "--data."
            )
        return [[first]]
    found = []
    for item in items(paths):
        with naming(item.where):
            found.append(_prompt(item.content, tokenizer, name, length))
            if most is not None and len(found[-1]) >= most:
                raise PromptError(
                    f"the prompt has {len(found[-1]):,} tokens, and {name} takes {most:,} with its "
                    "answer: shorten it, or leave it out."
                )
    if not any(found):
        raise PromptError(f"{', '.join(map(str, paths))}: no prompt in there.")
    return [prompt for prompt in found if prompt]


def _prompt(content: str | Mapping[str, Any], tokenizer: Any, name: str, length: int) -> list[int]:
    if isinstance(content, str):
        return _ids(tokenizer, content)[:length]
    messages = conversation(content)
    if messages is not None:
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise PromptError("this holds no prompt: the conversation begins with its answer.")
        if not getattr(tokenizer, "chat_template", None):
            return _ids(tokenizer, plain_chat(messages) + "\n\n")
        return ChatIds(_ids(tokenizer, rendered(tokenizer, name, messages), special=False))
    if (asked := named_text(content, QUESTIONS)) is not None:
        return _ids(tokenizer, question(content, asked))
    if (text := named_text(content, TEXTS)) is not None:
        return _ids(tokenizer, content[text])[:length]
    raise PromptError("this holds no prompt, and needs 'messages', 'prompt' or 'text'.")


def _ids(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    check_unicode("the prompt", text)
    return tokenized(tokenizer, text, add_special_tokens=special)
