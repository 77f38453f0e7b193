"""Training text: documents from files, as blocks of tokens of equal length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.core.unicode import check_unicode
from outpace.errors import PromptError
from outpace.files import ROLES, Record, holds_records, question, read_text, records
from outpace.inputs.chats import end_of_turn, rendered, with_text
from outpace.targets.hf.tokenizer import tokenized

SEPARATOR = re.compile(r"(?:\r?\n)?^<\|endoftext\|>\r?$\n?", re.MULTILINE)
"""The line that stands between two documents of a text file, with the line breaks around it."""

PAIRS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "response"),
         ("instruction", "output"), ("question", "answer"), ("prompt", "reference"))  # fmt: skip
"""Names under which a record holds a question and its answer."""

TABLES = (".csv", ".tsv", ".parquet", ".arrow", ".xlsx")
"""How the names of files end whose rows would be taken for prose."""

CHATS = ("messages", "conversations", "conversation")


@dataclass(frozen=True)
class Document:
    """A text to learn from."""

    text: str
    special: bool = True
    """Whether the tokenizer puts its special tokens around it; a chat template has done so."""


def documents(paths: Sequence[Path], tokenizer: Any, name: str) -> Iterator[Document]:
    """Yields the documents of text and JSON files; name: the model's, for errors.

    A text file holds one document, or several with lines ``<|endoftext|>`` in between. A record of
    a JSON file (`outpace.files`) holds a "text", a conversation ("messages", or ShareGPT's
    "conversations"), or a question and its answer ("prompt" and "response", and the like); these
    two go through the chat template where the tokenizer has one. An answer without any text, which
    calls a tool, is left out. Raises ``PromptError`` for a file that cannot be read, or a record
    that holds none of these, or half of a surrogate pair, which no tokenizer reads.
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


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Returns a context whose ``PromptError`` names the place in a file that it is about."""
    try:
        yield
    except PromptError as error:
        raise PromptError(f"{where}: {error}") from error


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
class Written:
    """A text, and where the part begins that a target has written itself."""

    prompt: Sequence[int]
    answer: Sequence[int]


def cut_written(
    texts: Iterable[Written], end: int | None, size: int, limit: int | None = None
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
    text = entry.get("text")
    if not isinstance(text, str):
        raise PromptError(
            "this is no training text, and needs 'text', 'messages', or 'prompt' and 'response'."
        )
    return Document(text)


def conversation(entry: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Returns the messages of a JSON object, a question and its answer too; None if it holds
    neither. Each has a "role" and a "content", which is a text, or nothing where a tool is called.
    Raises ``PromptError`` for an empty conversation, or what is no message."""
    for key in CHATS:
        if isinstance(entry.get(key), list):
            if not entry[key]:
                raise PromptError("the conversation is empty: give at least one message.")
            return [_message(each) for each in entry[key]]
    for asked, answer in PAIRS:
        if isinstance(entry.get(asked), str) and isinstance(entry.get(answer), str):
            turn = {"role": "user", "content": question(entry, asked)}
            return [turn, {"role": "assistant", "content": entry[answer]}]
    return None


def _message(entry: Any) -> dict[str, Any]:
    """One message, OpenAI's, ShareGPT's, or a mere text."""
    if isinstance(entry, str):
        entry = {"role": "user", "content": entry}
    elif isinstance(entry, dict) and isinstance(entry.get("from"), str):
        role = ROLES.get(entry["from"], entry["from"])
        entry = {"role": role, "content": entry.get("value", "")}
    return with_text(entry)


def plain_chat(messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns a conversation as text, for a tokenizer without a chat template."""
    return "\n\n".join(filter(None, (message.get("content") for message in messages)))


def _chat(messages: list[dict[str, Any]], tokenizer: Any, name: str, end: str) -> Document:
    if not getattr(tokenizer, "chat_template", None):
        return Document(plain_chat(messages))
    if messages[-1]["role"] != "assistant":
        return Document(rendered(tokenizer, name, messages), special=False)
    answer = messages[-1].get("content")
    text = rendered(tokenizer, name, messages[:-1])
    return Document(f"{text}{answer}{end}" if answer else text, special=False)
