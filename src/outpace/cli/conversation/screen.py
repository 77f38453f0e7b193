"""Where answers and notices are written: both to a terminal, or apart into a pipe."""

from __future__ import annotations

from typing import Protocol

import typer

from outpace.cli.texts import harmless, write

NEW_LINE = "\r\x1b[2K"
"""What a terminal obeys by emptying the line that it is in."""


class Screen(Protocol):
    """What a conversation writes to."""

    def piece(self, text: str) -> None:
        """Writes a piece of an answer at once."""

    def end(self, cost: str) -> None:
        """Ends an answer. cost: one line about it."""

    def notice(self, text: str) -> None:
        """Writes something about the conversation."""

    def working(self, text: str) -> None:
        """Shows what is being done until it is called again; "" for nothing."""


class Terminal:
    """A person reads: notices are dim, and no control characters are obeyed.

    What an answer cost is in the status line.
    """

    def __init__(self) -> None:
        self._working = ""

    def piece(self, text: str) -> None:
        write(harmless(text))

    def end(self, cost: str) -> None:
        typer.echo("\n")

    def notice(self, text: str) -> None:
        # A saved conversation, too, may hold what a model has written.
        typer.secho(harmless(text), dim=True)

    def working(self, text: str) -> None:
        if text != self._working:
            self._working = text
            typer.secho(f"{NEW_LINE}{harmless(text)}", dim=True, nl=False)


class Pipe:
    """A program reads: the answers, each ended by a line break; notices go to standard error."""

    def piece(self, text: str) -> None:
        write(text)

    def end(self, cost: str) -> None:
        typer.echo()
        self.notice(cost)

    def notice(self, text: str) -> None:
        typer.echo(text, err=True)

    def working(self, text: str) -> None:
        pass  # a program does not wait at a screen
