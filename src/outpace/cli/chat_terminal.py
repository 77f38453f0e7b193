"""A conversation at a terminal, with a line editor, history and a status line; or through a pipe,
one question a line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from outpace.cli.chat_session import COMMANDS, QUIT, Session, run_command
from outpace.cli.printing import for_command_line, harmless, write
from outpace.cli.signals import Interrupts, ctrl_c_ignored, typed_ahead_kept
from outpace.errors import ConfigError, OutpaceError

PROMPT = "> "
WELCOME = "Enter asks, Alt-Enter begins a new line, Ctrl-C stops an answer, Ctrl-D ends. /help"

CONTINUED = "\\"
"""At the end of a line: the question goes on in the next."""

CLEAR_LINE = "\r\x1b[2K"
"""Empties the line of a terminal that the cursor is in."""


class Terminal:
    """The `Screen` of a person: notices are dim, and control characters are replaced.

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
            typer.secho(f"{CLEAR_LINE}{harmless(text)}", dim=True, nl=False)


class Pipe:
    """The `Screen` of a program: the answers, each ended by a line break; notices go to standard
    error."""

    def piece(self, text: str) -> None:
        write(text)

    def end(self, cost: str) -> None:
        typer.echo()
        self.notice(cost)

    def notice(self, text: str) -> None:
        typer.echo(text, err=True)

    def working(self, text: str) -> None:
        pass  # a program does not wait at a screen


# -- a pipe ----------------------------------------------------------------------------------------


def chat_through_pipe(session: Session, lines: Iterable[str]) -> None:
    """Answers each question; ``OutpaceError`` ends it, and so does Ctrl-C, which at a terminal only
    stops an answer: here nobody is there to go on from what it has said."""
    for question in questions(lines):
        if not run_command(session, question):
            return
        if session.stopped:
            raise KeyboardInterrupt


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


# -- a terminal ------------------------------------------------------------------------------------


def chat_at_terminal(session: Session, history: History) -> None:
    """Answers what is typed until Ctrl-D or ``/quit``."""
    editor = line_editor(session, history)
    session.screen.notice(WELCOME)
    interrupts = Interrupts()
    session.wants_stop = interrupts.requested
    again = ""
    with ctrl_c_ignored():
        while True:
            try:
                line = editor.prompt(default=again)
            except KeyboardInterrupt:  # at the prompt it clears the line, as in a shell
                again = ""
                continue
            except EOFError:
                return
            if not _run_line(session, line, interrupts):
                return
            again = line if session.unanswered else ""
            session.unanswered = False


def _run_line(session: Session, line: str, interrupts: Interrupts) -> bool:
    """Does what a line says and reports a mistake; returns whether the conversation goes on."""
    try:
        with interrupts.listening(), typed_ahead_kept():
            return run_command(session, line)
    except OutpaceError as error:
        typer.secho(f"outpace: {for_command_line(str(error))}", fg="red", err=True)
    except KeyboardInterrupt:  # while nothing was being said
        pass
    return True


def line_editor(session: Session, history: History) -> PromptSession[str]:
    """Returns what reads the questions, with the session's status below."""
    words = [f"/{name}" for name in (*COMMANDS, *QUIT)]
    return PromptSession(
        PROMPT,
        history=history,
        multiline=True,
        key_bindings=_keys(),
        prompt_continuation=". ",
        completer=WordCompleter(words, sentence=True),
        complete_while_typing=False,
        bottom_toolbar=lambda: f" {session.status} ",
        enable_suspend=True,
    )


def _keys() -> Any:
    """Enter asks, where a multi-line editor would begin a new line; Alt-Enter begins one."""
    keys = KeyBindings()

    @keys.add("enter")
    def ask(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith(CONTINUED):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


# -- what was typed, for the arrow keys of the next conversation -----------------------------------


def history(kept: bool) -> History:
    """Returns what was typed before, in a file that only its owner can read.

    kept: False remembers nothing beyond this run. Raises ``ConfigError`` where the file cannot be
    written.
    """
    if not kept:
        return InMemoryHistory()
    file = state_folder() / "chat_history"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.chmod(file, 0o600)  # one that an earlier umask made readable
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(
            f"the history cannot be kept in {str(file)!r} ({error.strerror}): add --no-history, or "
            "set XDG_STATE_HOME to a folder of yours."
        ) from error
    return FileHistory(str(file))


def state_folder() -> Path:
    """Returns the folder of what programs remember between two runs, as the XDG rules name it.

    Raises ``ConfigError`` where it would be in a home folder, and there is none.
    """
    named = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(named):
        return Path(named) / "outpace"
    try:
        return Path.home() / ".local" / "state" / "outpace"
    except RuntimeError as error:  # a user who is not known here, as in some containers
        raise ConfigError(
            "the history cannot be kept, since there is no home folder: add --no-history, or set "
            "XDG_STATE_HOME to a folder of yours."
        ) from error
