"""How much of a conversation fits the model's context: the oldest exchanges make room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outpace.cli.conversation.turns import Conversation
from outpace.errors import PromptError

if TYPE_CHECKING:
    from outpace.api import LLM


def room_for(answer: int, context: int) -> int:
    """Returns how many tokens are kept free for an answer of at most so many tokens.

    No more than a quarter of the context: a longer answer is cut off, rather than the conversation
    before it forgotten.
    """
    return max(1, min(answer, context // 4))


def fitted(llm: LLM, conversation: Conversation, question: str, answer: int) -> list[int]:
    """Returns the prompt's token ids, after forgetting as many exchanges as must make room.

    answer: the most tokens that the answer may have. Raises ``PromptError`` where the question
    alone is too long.
    """
    room = llm.max_model_len - room_for(answer, llm.max_model_len)
    while True:
        ids = llm.chat_ids(conversation.messages(question))
        if len(ids) <= room:
            return ids
        if not conversation.sent:
            raise PromptError(
                f"this question has {len(ids)} tokens, with the system message and the template, "
                f"and the context holds {llm.max_model_len}, of which {llm.max_model_len - room} "
                "are kept for the answer: shorten it."
            )
        conversation.forget_oldest()
