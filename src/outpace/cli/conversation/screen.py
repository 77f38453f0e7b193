"""Where answers and notices are written: both to a terminal, or apart into a pipe."""

from __future__ import annotations

import sys
from typing import Protocol

import typer

_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Characters that could move the cursor or change the terminal, by which a model could deceive."""


class Screen(Protocol):
    """What a conversation writes to."""

    def piece(self, text: str) -> None:
        """Writes a piece of an answer at once."""

    def end(self, cost: str) -> None:
        """Ends an answer. cost: one line about it."""

    def notice(self, text: str) -> None:
        """Writes something about the conversation."""


class Terminal:
    """A person reads: notices are dim, and control characters in an answer are not obeyed.

    What an answer cost is in the status line.
    """

    def piece(self, text: str) -> None:
        typer.echo(text.translate(_CONTROLS), nl=False)
        sys.stdout.flush()

    def end(self, cost: str) -> None:
        typer.echo("\n")

    def notice(self, text: str) -> None:
        typer.secho(text, dim=True)


class Pipe:
    """A program reads: the answers, each ended by a line break; notices go to standard error."""

    def piece(self, text: str) -> None:
        typer.echo(text, nl=False)
        sys.stdout.flush()

    def end(self, cost: str) -> None:
        typer.echo()
        self.notice(cost)

    def notice(self, text: str) -> None:
        typer.echo(text, err=True)
