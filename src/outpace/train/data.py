"""Training text: documents from files, as blocks of tokens of equal length."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.chats import rendered
from outpace.errors import PromptError

SEPARATOR = "\n<|endoftext|>\n"
"""What stands between two documents of a text file."""

PAIRS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "response"),
         ("question", "answer"), ("prompt", "reference"))  # fmt: skip
"""Names under which a JSON line holds a question and its answer."""

CHATS = ("messages", "conversations", "conversation")


def documents(paths: Sequence[Path], tokenizer: Any, name: str) -> Iterator[str]:
    """Yields the documents of text and JSON-lines files; name: the model's, for errors.

    A text file holds one document, or several with lines ``<|endoftext|>`` in between. A JSON line
    holds a "text", a conversation ("messages", or ShareGPT's "conversations"), or a question and
    its answer ("prompt" and "response", and the like); these two go through the chat template
    where the tokenizer has one. Raises ``PromptError`` for a file that cannot be read.
    """
    for path in paths:
        text = _read(path)
        if path.suffix not in (".jsonl", ".ndjson"):
            yield from filter(None, text.split(SEPARATOR))
            continue
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield _document(path, number, line, tokenizer, name)


def blocks(texts: Iterable[str], tokenizer: Any, size: int, limit: int | None = None) -> Tensor:
    """Returns the documents' tokens, one after another, cut into blocks ``[N, size]``.

    limit: tokens to take at most. Raises ``PromptError`` where there is not a single block.
    """
    tokens: list[int] = []
    end = tokenizer.eos_token_id
    for text in texts:
        tokens += tokenizer(text, add_special_tokens=True)["input_ids"]
        tokens += [] if end is None else [end]
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


def frequent(tokens: Tensor, count: int, vocabulary: int) -> Tensor:
    """Returns the ``count`` tokens that a text has most often, ascending; unused ones fill up."""
    uses = torch.bincount(tokens.flatten(), minlength=vocabulary)[:vocabulary]
    return uses.argsort(descending=True, stable=True)[:count].sort().values


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptError(f"cannot read training file {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text: save it as UTF-8.") from error


def _document(path: Path, number: int, line: str, tokenizer: Any, name: str) -> str:
    try:
        entry = json.loads(line)
        text = _text_of(entry, tokenizer, name) if isinstance(entry, dict) else None
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{path}, line {number} is no JSON.") from error
    if text is None:
        raise PromptError(
            f"{path}, line {number} is no training text: it needs 'text', 'messages', or 'prompt' "
            "and 'response'."
        )
    return text


def _text_of(entry: dict[str, Any], tokenizer: Any, name: str) -> str | None:
    for key in CHATS:
        if isinstance(entry.get(key), list):
            return _chat([_message(each) for each in entry[key]], tokenizer, name)
    for asked, answer in PAIRS:
        if isinstance(entry.get(asked), str) and isinstance(entry.get(answer), str):
            question = "\n".join(filter(None, [entry[asked], str(entry.get("context") or "")]))
            turn = {"role": "user", "content": question}
            return _chat([turn, {"role": "assistant", "content": entry[answer]}], tokenizer, name)
    text = entry.get("text")
    return text if isinstance(text, str) else None


def _message(entry: Any) -> dict[str, Any]:
    """One message, OpenAI's or ShareGPT's."""
    if not isinstance(entry, dict):
        return {"role": "user", "content": str(entry)}
    if "from" in entry:
        roles = {"human": "user", "gpt": "assistant"}
        return {"role": roles.get(entry["from"], entry["from"]), "content": entry.get("value", "")}
    return entry


def _chat(messages: list[dict[str, Any]], tokenizer: Any, name: str) -> str:
    if not getattr(tokenizer, "chat_template", None):
        return "\n\n".join(str(message.get("content", "")) for message in messages)
    answered = messages[-1].get("role") == "assistant"
    if not answered:
        return rendered(tokenizer, name, messages)
    return rendered(tokenizer, name, messages[:-1]) + str(messages[-1].get("content", ""))
