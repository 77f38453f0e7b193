"""Training text: documents from files, as blocks of tokens of equal length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core.unicode import check_unicode
from outpace.errors import PromptError, reason_of
from outpace.files import Record, holds_records, read_text, records
from outpace.inputs.chats import by_the_system, end_of_turn, rendered
from outpace.inputs.documents import (
    FIELDS,
    TEXTS,
    conversation,
    named_text,
    naming,
    plain_chat,
)
from outpace.targets.hf.tokenizer import tokenized

SEPARATOR = re.compile(r"(?:\r?\n)?^<\|endoftext\|>\r?$\n?", re.MULTILINE)
"""The line that stands between two documents of a text file, with the line breaks around it."""

TABLES = (".csv", ".tsv", ".parquet", ".arrow", ".xlsx")
"""How the names of files end whose rows would be taken for prose."""


@dataclass(frozen=True)
class Document:
    """A text to learn from."""

    text: str
    special: bool = True
    """Whether the tokenizer puts its special tokens around it; a chat template has done so."""


def documents(paths: Sequence[Path], tokenizer: Any, name: str) -> Iterator[Document]:
    """Yields the documents of text and JSON files; name: the model's, for errors.

    A text file holds one document, or several with lines ``<|endoftext|>`` in between. A record of
    a JSON file (`outpace.files`) holds a text, a conversation, or a question and its answer, under
    one of several names (`outpace.inputs.documents`); the latter two go through the chat template
    where the tokenizer has one, the reasoning of the last answer too. An answer without any text,
    which calls a tool, is left out. Raises
    ``PromptError`` for a file that cannot be read, or a record that holds none of these, or half of
    a surrogate pair, which no tokenizer reads.
    """
    # A target ends its answers with this, which may be another token than the end of a text.
    found_end = end_of_turn(tokenizer, getattr(tokenizer, "chat_template", None))
    end = "" if found_end is None else found_end[1]
    for item in items(paths):
        if isinstance(item.content, str):
            yield Document(item.content)
        else:
            with naming(item.where):
                found = _document(item.content, tokenizer, name, end)
                check_unicode("the text", found.text)
            yield found


@dataclass(frozen=True)
class Item:
    """A document of a text file, or a record of a JSON file."""

    content: str | Mapping[str, Any]
    where: str


def items(paths: Sequence[Path]) -> Iterator[Item]:
    """Yields what the files hold; ``PromptError`` for one that cannot be read, or holds nothing."""
    for path in paths:
        if path.suffix.lower() in TABLES:
            raise PromptError(
                f"{path} is a table, which is not read: write its rows to a .jsonl file, each as "
                '{"text": ...} or {"prompt": ..., "response": ...}.'
            )
        count = 0
        for item in _items(path):
            count += 1
            yield item
        if not count:
            raise PromptError(f"{path} is empty: it holds no text.")


def _items(path: Path) -> Iterator[Item]:
    text = read_text(path, "training file")
    if holds_records(path):
        found = records(text.split("\n"), path)
        yield from (Item(_object(record), record.where) for record in found)
    elif text.strip():
        yield from (Item(part, str(path)) for part in SEPARATOR.split(text) if part)


def blocks(
    texts: Iterable[Document], tokenizer: Any, size: int, limit: int | None = None
) -> Tensor:
    """Returns the documents' tokens, one after another, cut into blocks ``[N, size]``.

    limit: tokens to take at most. Raises ``PromptError`` where there is not a single block.
    """
    listed = (tokenized(tokenizer, each.text, add_special_tokens=each.special) for each in texts)
    return cut(listed, tokenizer.eos_token_id, size, limit)


def cut(
    texts: Iterable[Sequence[int]], end: int | None, size: int, limit: int | None = None
) -> Tensor:
    """As `blocks`, of tokens. end: the token that is put after each text that lacks it."""
    tokens: list[int] = []
    for text in texts:
        tokens += text
        tokens += [] if end is None or (text and text[-1] == end) else [end]
        if limit is not None and len(tokens) >= limit:
            tokens = tokens[:limit]
            break
    count = len(tokens) // size
    if count == 0:
        raise PromptError(
            f"the training text has {len(tokens)} tokens, which is less than one block of {size}: "
            "give more files, or a smaller --block."
        )
    return torch.tensor(tokens[: count * size]).view(count, size)


@dataclass(frozen=True)
class PromptAnswer:
    """A prompt, and the answer that a target has written to it."""

    prompt: Sequence[int]
    answer: Sequence[int]


def cut_answers(
    texts: Iterable[PromptAnswer], end: int | None, size: int, limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """As `cut`, of texts that a target has written after prompts; returns also which tokens are
    its own, ``[N, size]`` bool. An ``end`` that is put after an answer counts as a part of it."""
    listed = list(texts)
    whole = [[*text.prompt, *text.answer] for text in listed]
    tokens = cut(whole, end, size, limit)
    own: list[bool] = []
    for text, both in zip(listed, whole, strict=True):
        added = end is not None and not (both and both[-1] == end)
        own += [False] * len(text.prompt) + [True] * (len(text.answer) + added)
    return tokens, torch.tensor(own[: tokens.numel()]).view_as(tokens)


def frequent(tokens: Tensor, count: int, vocabulary: int) -> Tensor:
    """Returns the ``count`` tokens that a text has most often, ascending; unused ones fill up."""
    uses = torch.bincount(tokens.flatten(), minlength=vocabulary)[:vocabulary]
    return uses.argsort(descending=True, stable=True)[:count].sort().values


def _object(record: Record) -> Mapping[str, Any]:
    if not isinstance(record.value, dict):
        raise PromptError(f"{record.where} is no training text: it is no JSON object.")
    return record.value


def _document(entry: Mapping[str, Any], tokenizer: Any, name: str, end: str) -> Document:
    messages = conversation(entry)
    if messages is not None:
        return _chat(messages, tokenizer, name, end)
    text = named_text(entry, TEXTS)
    if text is None:
        raise PromptError(f"this is no training text, and needs {FIELDS}.")
    return Document(entry[text])


def _chat(messages: list[dict[str, Any]], tokenizer: Any, name: str, end: str) -> Document:
    if not getattr(tokenizer, "chat_template", None):
        return Document(plain_chat(messages))
    if messages[-1]["role"] != "assistant":
        return Document(rendered(tokenizer, name, messages), special=False)
    answer = messages[-1].get("content")
    text = rendered(tokenizer, name, messages[:-1])
    reasoning = messages[-1].get("reasoning_content")
    if reasoning:
        written = _thought(messages, text, reasoning, tokenizer, end)
        return Document(f"{text}{written}{end}", special=False)
    return Document(f"{text}{answer}{end}" if answer else text, special=False)


def _thought(
    messages: list[dict[str, Any]], prompt: str, reasoning: str, tokenizer: Any, end: str
) -> str:
    """The last answer with its reasoning, as the model's template writes both after a prompt."""
    if "developer" not in str(tokenizer.chat_template):
        messages = [dict(by_the_system(message)) for message in messages]
    try:
        whole = str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        )
    except Exception as error:  # a template is a program of the model's, and raises what it likes
        raise PromptError(f"the chat template refuses this chat: {reason_of(error)}") from error
    if not whole.startswith(prompt) or str(reasoning).strip() not in whole[len(prompt) :]:
        raise PromptError(
            "the model's chat template leaves out the reasoning of an answer: put it into the "
            "answer's content, as the model writes it, or leave it out."
        )
    return whole[len(prompt) :].rstrip().removesuffix(end)
