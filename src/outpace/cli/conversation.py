"""A conversation: what was said, its file, and how much of it fits the model's context."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.errors import PromptError
from outpace.files import replacing

if TYPE_CHECKING:
    from outpace.llm import LLM

Message = dict[str, Any]
"""``{"role": "user", "content": "a text"}``, as `outpace.inputs.chats` takes it."""


@dataclass(frozen=True)
class Exchange:
    """A question and its answer."""

    question: str
    answer: str
    stopped: bool = False
    """Whether the user stopped the answer before its end."""


@dataclass
class Conversation:
    """Exchanges, oldest first, and the system message before them. What no longer fits the model's
    context is kept and not sent."""

    system: str | None = None
    exchanges: list[Exchange] = field(default_factory=list)
    forgotten: int = 0
    """How many of the oldest exchanges are no longer sent to the model."""

    def messages(self, question: str, forgotten: int | None = None) -> list[Message]:
        """Returns what the model is shown before it answers the question.

        forgotten: how many of the oldest exchanges are left out, where not as many as are.
        """
        shown = self.exchanges[self.forgotten if forgotten is None else forgotten :]
        return [*_messages(self.system, shown), {"role": "user", "content": question}]

    def add(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)

    def undo(self) -> Exchange | None:
        """Removes the last exchange and returns it; None where nothing was said."""
        if not self.exchanges:
            return None
        last = self.exchanges.pop()
        self.forgotten = min(self.forgotten, len(self.exchanges))
        return last

    def reset(self) -> None:
        """Removes all exchanges; the system message stays."""
        self.exchanges.clear()
        self.forgotten = 0


def _messages(system: str | None, exchanges: list[Exchange], marked: bool = False) -> list[Message]:
    """marked: whether answers that were stopped say so."""
    found: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for one in exchanges:
        mark = {"stopped": True} if marked and one.stopped else {}
        found.append({"role": "user", "content": one.question})
        found.append({"role": "assistant", "content": one.answer, **mark})
    return found


# -- files: JSON with messages in OpenAI's format --------------------------------------------------

_FORM = (
    'a conversation is {"messages": [{"role": "user", "content": "a text"}, ...]}: an optional '
    "system message, then a user's and an assistant's in turns"
)


def save(conversation: Conversation, file: Path, model: str) -> None:
    """Writes the whole conversation; ``PromptError`` if the file cannot be written."""
    messages = _messages(conversation.system, conversation.exchanges, marked=True)
    record = {"model": model, "messages": messages}
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    try:
        with replacing(file) as part:
            part.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # the second: a name or a text that no file can have
        reason = getattr(error, "strerror", None) or str(error)
        raise PromptError(f"cannot write {str(file)!r}: {reason}.") from error


def load(file: Path) -> Conversation:
    """Returns the conversation of a file; ``PromptError`` for a file that holds none."""
    try:
        record = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise PromptError(f"cannot read {str(file)!r}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{str(file)!r} is not JSON ({error}); {_FORM}.") from error
    messages = record.get("messages") if isinstance(record, dict) else record
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise PromptError(f"{str(file)!r} holds no conversation: {_FORM}.")
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    said = messages if system is None else messages[1:]
    if [message["role"] for message in said] != ["user", "assistant"] * (len(said) // 2):
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


def file_of(name: str) -> Path:
    """Returns the file that a user names, in which ~ is a home folder; ``PromptError`` for the home
    of nobody."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise PromptError(f"{name!r} is in the home of a user who is not known here.") from error


# -- the context: the oldest exchanges make room ---------------------------------------------------


def room_for(answer: int, context: int) -> int:
    """Returns how many tokens are kept free for an answer of at most ``answer`` tokens.

    No more than a quarter of the context: a longer answer is cut off, rather than the conversation
    before it forgotten.
    """
    return max(1, min(answer, context // 4))


def fitted(llm: LLM, conversation: Conversation, question: str, answer: int) -> list[int]:
    """Returns the prompt's token ids, after forgetting as many exchanges as must make room.

    answer: the most tokens that the answer may have. Raises ``PromptError`` where the question
    alone is too long; then nothing is forgotten.
    """
    room = llm.max_model_len - room_for(answer, llm.max_model_len)

    def ids(forgotten: int) -> list[int]:
        return llm.chat_ids(conversation.messages(question, forgotten))

    found = ids(conversation.forgotten)
    if len(found) <= room:
        return found
    fewest, most = conversation.forgotten + 1, len(conversation.exchanges)
    found = ids(most)
    if len(found) > room:
        raise PromptError(
            f"this question has {len(found)} tokens, with the system message and the template, "
            f"and the context holds {llm.max_model_len}, of which {llm.max_model_len - room} "
            "are kept for the answer: shorten it."
        )
    # The more is forgotten, the shorter: halving finds the place in a long conversation soon.
    while fewest < most:
        middle = (fewest + most) // 2
        tried = ids(middle)
        if len(tried) <= room:
            found, most = tried, middle
        else:
            fewest = middle + 1
    conversation.forgotten = most
    return found
