"""Records of JSON files that are texts and conversations, whatever their fields are called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from outpace.errors import PromptError
from outpace.files import ROLES, question
from outpace.inputs.chats import with_text

TEXTS = ("text", "content")
"""Names of a text by itself."""

QUESTIONS = ("prompt", "question", "instruction", "input")
ANSWERS = ("response", "completion", "answer", "output", "reference")
"""Names of a question and of its answer."""

CHATS = ("messages", "conversations", "conversation", "chat")
"""Names of a conversation, OpenAI's and ShareGPT's."""

FIELDS = "'text', 'messages', or 'prompt' and 'response'"
"""What a record needs, as errors say it."""


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Returns a context whose ``PromptError`` names the place in a file that it is about."""
    try:
        yield
    except PromptError as error:
        raise PromptError(f"{where}: {error}") from error


def named_text(record: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Returns the first of these names under which a record has a text that is not empty, else the
    first under which it has a text."""
    texts = [name for name in names if isinstance(record.get(name), str)]
    return next((name for name in texts if record[name]), texts[0] if texts else None)


def conversation(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Returns the messages of a record, a question and its answer too; None if it holds neither.
    Each has a "role" and a "content", which is a text, or nothing where a tool is called. Raises
    ``PromptError`` for an empty conversation, or what is no message."""
    for key in CHATS:
        if isinstance(record.get(key), list):
            if not record[key]:
                raise PromptError("the conversation is empty: give at least one message.")
            return [_message(each) for each in record[key]]
    asked, answer = named_text(record, QUESTIONS), named_text(record, ANSWERS)
    if asked is None or answer is None or not (record[asked] or record[answer]):
        return None
    turn = {"role": "user", "content": question(record, asked)}
    return [turn, {"role": "assistant", "content": record[answer]}]


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
