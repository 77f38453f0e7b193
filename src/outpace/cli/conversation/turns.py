"""What was said: questions with their answers, and the system message before them."""

from __future__ import annotations

from dataclasses import dataclass, field

Message = dict[str, str]
"""``{"role": "user", "content": "a text"}``, as `outpace.chats` takes it."""


@dataclass(frozen=True)
class Exchange:
    """A question and its answer."""

    question: str
    answer: str
    stopped: bool = False
    """Whether the user stopped the answer before its end."""


@dataclass
class Conversation:
    """Exchanges, oldest first. What no longer fits the model's context is kept and not sent."""

    system: str | None = None
    exchanges: list[Exchange] = field(default_factory=list)
    forgotten: int = 0
    """How many of the oldest exchanges are no longer sent to the model."""

    def messages(self, question: str, forgotten: int | None = None) -> list[Message]:
        """Returns what the model is shown before it answers the question.

        forgotten: how many of the oldest exchanges are left out, where not as many as are.
        """
        found = [] if self.system is None else [_message("system", self.system)]
        for exchange in self.exchanges[self.forgotten if forgotten is None else forgotten :]:
            found.append(_message("user", exchange.question))
            found.append(_message("assistant", exchange.answer))
        return [*found, _message("user", question)]

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


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
