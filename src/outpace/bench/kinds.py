"""Prompts of three kinds, a few of each: what a short measurement goes by."""

from __future__ import annotations

from collections.abc import Mapping

from outpace.bench.builtin import BUILT_IN, CHATS
from outpace.bench.prompts import Prompt, read_prompts

EACH = 4
"""Prompts of a kind: with fewer, an interval over them says next to nothing."""

KINDS = ("code", "chat", "editing")
"""Code to write, questions to answer, and given text to repeat with changes."""

FURTHER: tuple[tuple[str, str, str], ...] = (
    (
        "code/3",
        "code",
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
        "    def push(self, item):\n",
    ),
    (
        "code/4",
        "code",
        "# Counts how often each word occurs in a text, without regard to case.\n"
        "def word_counts(text):\n",
    ),
    (
        "chat/3",
        "chat",
        "User: How do I get a coffee stain out of a cotton shirt?\nAssistant:",
    ),
    (
        "chat/4",
        "chat",
        "User: What is the difference between a lake and a pond?\nAssistant:",
    ),
    (
        "copy/3",
        "copy",
        "Original: The train to Lund leaves at ten. It stops in Eslov and arrives at noon. Seats "
        "cannot be booked.\nThe same text with Malmo in the place of Lund:",
    ),
    (
        "copy/4",
        "copy",
        "def area(width, height):\n    result = width * height\n    return result\n\n"
        "# The same function, with the name product in the place of result:\n",
    ),
)
"""Texts to continue, for models without a chat template, beside `BUILT_IN`."""

FURTHER_CHATS: tuple[tuple[str, str, str], ...] = (
    (
        "code/primes",
        "code",
        "Write a Python function that returns all prime numbers below n with the sieve of "
        "Eratosthenes.",
    ),
)
"""Questions for instruct models, beside `CHATS`."""


def prompts_of_kinds(chat: bool) -> Mapping[str, list[Prompt]]:
    """Returns the prompts of each of the `KINDS`, as many of each.

    chat: questions for a model with a chat template; else texts to continue.
    """
    if chat:
        asked = [Prompt(*entry) for entry in (*CHATS, *FURTHER_CHATS)]
        found = {"code": _of_task(asked, "code"), "chat": _of_task(asked, "text")}
        return {**found, "editing": _short_changes()}
    texts = [Prompt(*entry) for entry in (*BUILT_IN, *FURTHER)]
    named = zip(KINDS, ("code", "chat", "copy"), strict=True)
    return {kind: _of_task(texts, task) for kind, task in named}


def _of_task(prompts: list[Prompt], task: str) -> list[Prompt]:
    return [prompt for prompt in prompts if prompt.task == task][:EACH]


def _short_changes() -> list[Prompt]:
    """The shortest change of each sort in the set "editing": long prompts take long to read."""
    shortest: dict[str, Prompt] = {}
    for prompt in sorted(read_prompts("editing"), key=lambda each: len(each.text)):
        shortest.setdefault(prompt.task, prompt)
    return list(shortest.values())[:EACH]
