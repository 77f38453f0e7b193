"""How much of a conversation fits the model's context: the oldest exchanges make room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outpace.cli.conversation.turns import Conversation
from outpace.errors import PromptError

if TYPE_CHECKING:
    from outpace.api import LLM


def room_for(answer: int, context: int) -> int:
    """Returns how many tokens are kept free for an answer of at most n tokens.

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
