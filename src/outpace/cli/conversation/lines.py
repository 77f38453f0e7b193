"""The conversation of a pipe: one question a line, without a terminal's tricks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outpace.cli.conversation.commands import obey
from outpace.cli.conversation.session import Session

CONTINUED = "\\"
"""At the end of a line: the question goes on in the next."""


def questions(lines: Iterable[str]) -> Iterator[str]:
    """Yields the questions; a line that ends with a backslash goes on in the next."""
    held: list[str] = []
    for line in lines:
        text = line.rstrip("\r\n")
        held.append(text.removesuffix(CONTINUED))
        if not text.endswith(CONTINUED):
            yield "\n".join(held)
            held = []
    if held:
        yield "\n".join(held)


def talk(session: Session, lines: Iterable[str]) -> None:
    """Answers each question; ``OutpaceError`` ends it, and so does Ctrl-C, which at a terminal only
    stops an answer: here nobody is there to go on from what it has said."""
    for question in questions(lines):
        if not obey(session, question):
            return
        if session.stopped:
            raise KeyboardInterrupt
