"""The conversation at a terminal: a line editor with history, completion and a status line."""

from __future__ import annotations

from typing import Any

import typer
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from outpace.cli.conversation.commands import COMMANDS, QUIT, obey
from outpace.cli.conversation.interrupts import Interrupts, ignored, typed_ahead_kept
from outpace.cli.conversation.lines import CONTINUED
from outpace.cli.conversation.session import Session
from outpace.cli.remedies import for_command_line
from outpace.errors import OutpaceError

PROMPT = "> "
WELCOME = "Enter asks, Alt-Enter begins a new line, Ctrl-C stops an answer, Ctrl-D ends. /help"


def talk(session: Session, history: History) -> None:
    """Answers what is typed until Ctrl-D or ``/quit``."""
    editor = line_editor(session, history)
    session.screen.notice(WELCOME)
    stops = Interrupts()
    session.wants_stop = stops.wanted
    again = ""
    with ignored():
        while True:
            try:
                line = editor.prompt(default=again)
            except KeyboardInterrupt:  # at the prompt it clears the line, as in a shell
                again = ""
                continue
            except EOFError:
                return
            if not _obeyed(session, line, stops):
                return
            again = line if session.unanswered else ""
            session.unanswered = False


def _obeyed(session: Session, line: str, stops: Interrupts) -> bool:
    """Does what a line says and tells a mistake; returns whether the conversation goes on."""
    try:
        with stops.heard(), typed_ahead_kept():
            return obey(session, line)
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
