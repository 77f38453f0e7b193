"""Conversations in files: JSON with messages in OpenAI's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outpace.cli.conversation.turns import Conversation, Exchange
from outpace.errors import PromptError

_FORM = (
    'a conversation is {"messages": [{"role": "user", "content": "a text"}, ...]}: an optional '
    "system message, then a user's and an assistant's in turns"
)


def save(conversation: Conversation, file: Path, model: str) -> None:
    """Writes the whole conversation; ``PromptError`` if the file cannot be written."""
    record = {"model": model, "messages": _messages(conversation)}
    try:
        file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:  # the second: a name or a text that no file can have
        reason = getattr(error, "strerror", None) or str(error)
        raise PromptError(f"cannot write {str(file)!r}: {reason}.") from error


def load(file: Path) -> Conversation:
    """Returns the conversation of a file; ``PromptError`` for a file that holds none."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PromptError(f"cannot read {str(file)!r}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{str(file)!r} is not JSON ({error}); {_FORM}.") from error
    messages = record.get("messages") if isinstance(record, dict) else record
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise PromptError(f"{str(file)!r} holds no conversation: {_FORM}.")
    return _conversation(messages, file)


def file_of(name: str) -> Path:
    """Returns the file that a user names, in which ~ is a home folder; ``PromptError`` for the home
    of nobody."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise PromptError(f"{name!r} is in the home of a user who is not known here.") from error


def _messages(conversation: Conversation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if conversation.system is not None:
        found.append({"role": "system", "content": conversation.system})
    for exchange in conversation.exchanges:
        found.append({"role": "user", "content": exchange.question})
        mark = {"stopped": True} if exchange.stopped else {}
        found.append({"role": "assistant", "content": exchange.answer, **mark})
    return found


def _conversation(messages: list[dict[str, Any]], file: Path) -> Conversation:
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    said = messages if system is None else messages[1:]
    roles = [message["role"] for message in said]
    if roles != ["user", "assistant"] * (len(said) // 2):
        raise PromptError(f"the messages of {str(file)!r} are in another order: {_FORM}.")
    exchanges = [
        Exchange(question["content"], answer["content"], answer.get("stopped") is True)
        for question, answer in zip(said[::2], said[1::2], strict=True)
    ]
    return Conversation(system, exchanges)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(name), str) for name in ("role", "content")
    )
