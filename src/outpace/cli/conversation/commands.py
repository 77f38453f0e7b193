"""The commands of a conversation: ``/help``, ``/undo``, ..."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outpace.cli.conversation import files, settings
from outpace.cli.conversation.session import Session
from outpace.errors import ConfigError, PromptError, did_you_mean

ESCAPE = "//"
"""A question that begins with a slash is typed with two."""


@dataclass(frozen=True)
class Command:
    """One command. ``run`` is given the session and the text after the name."""

    argument: str
    """What follows the name in the help: "TEXT", "[TEXT]", or nothing."""
    help: str
    run: Callable[[Session, str], None]


def is_command(line: str) -> bool:
    """Whether a line is a command and no question."""
    return line.startswith("/") and not line.startswith(ESCAPE)


def obey(session: Session, line: str) -> bool:
    """Answers a question or carries out a command; returns whether the conversation goes on.

    Raises ``OutpaceError`` for what cannot be done, after which the conversation is as it was.
    """
    line = line.strip()
    if not is_command(line):
        if line:
            session.ask(line.removeprefix("/") if line.startswith(ESCAPE) else line)
        return True
    name, _, argument = line[1:].partition(" ")
    if name in QUIT:
        return False
    if name not in COMMANDS:
        known = [f"/{known}" for known in (*COMMANDS, *QUIT)]
        raise PromptError(
            f"there is no command /{name}{did_you_mean(f'/{name}', known)}; a question that begins "
            f"with a slash is typed with two."
        )
    command, argument = COMMANDS[name], argument.strip()
    if bool(argument) > bool(command.argument):
        raise PromptError(f"/{name} takes nothing after it, not {argument!r}.")
    if not argument and command.argument and not command.argument.startswith("["):
        raise PromptError(f"/{name} needs something after it: /{name} {command.argument}.")
    command.run(session, argument)
    return True


# -- the commands ----------------------------------------------------------------------------------


def _help(session: Session, argument: str) -> None:
    rows = [(f"/{name} {command.argument}", command.help) for name, command in COMMANDS.items()]
    rows.append(("/quit", "End the conversation, as Ctrl-D does."))
    width = max(len(left) for left, _ in rows)
    session.screen.notice("\n".join(f"{left:<{width}}  {right}" for left, right in rows))


def _reset(session: Session, argument: str) -> None:
    session.conversation.reset()
    session.used = 0
    session.screen.notice("the conversation begins anew; the system message stays")


def _system(session: Session, argument: str) -> None:
    talk = session.conversation
    if argument:
        talk.system = None if argument == "none" else argument
    now = "none" if talk.system is None else talk.system
    session.screen.notice(f"system message: {now}")


def _regenerate(session: Session, argument: str) -> None:
    talk = session.conversation
    if not talk.exchanges:
        raise PromptError("there is no answer to make again: ask something first.")
    resolved = session.llm.resolve(session.params)
    if resolved.greedy:
        session.screen.notice("greedy: the same answer will come (/set temperature 0.8)")
    elif resolved.seed is not None:
        session.screen.notice("the seed is fixed: the same answer will come (/set seed none)")
    before, forgotten = list(talk.exchanges), talk.forgotten
    last = talk.exchanges.pop()
    talk.forgotten = min(forgotten, len(talk.exchanges))
    try:
        session.ask(last.question)
    finally:
        if len(talk.exchanges) < len(before):  # there is no other answer
            talk.exchanges, talk.forgotten = before, forgotten
            session.unanswered = False  # the question was not typed now


def _undo(session: Session, argument: str) -> None:
    last = session.conversation.undo()
    if last is None:
        raise PromptError("there is nothing to take back: nothing was said yet.")
    session.screen.notice(f"taken back: {last.question}")


def _set(session: Session, argument: str) -> None:
    if argument:
        session.params = settings.changed(session.params, argument)
    session.screen.notice(settings.shown(session.llm.resolve(session.params)))


def _speculate(session: Session, argument: str) -> None:
    if argument:
        wanted = settings.speculative(argument)
        if wanted != "off" and session.llm.config.method == "none":
            raise ConfigError("nothing drafts here: start with --draft or --method to speculate.")
        session.params = dataclasses.replace(session.params, speculative=wanted)
    session.screen.notice(session.method)


def _stats(session: Session, argument: str) -> None:
    session.screen.notice(session.statistics)


def _save(session: Session, argument: str) -> None:
    file = files.file_of(argument)
    if os.path.exists(file) and file != session.file:
        raise PromptError(f"{argument!r} exists already: name another file, or remove it first.")
    files.save(session.conversation, file, session.llm.target.name)
    session.file = file
    session.screen.notice(f"saved {len(session.conversation.exchanges)} exchanges")


def _load(session: Session, argument: str) -> None:
    file = files.file_of(argument)
    session.conversation = files.load(file)
    session.file, session.used = file, 0
    session.screen.notice(f"loaded {len(session.conversation.exchanges)} exchanges")


QUIT = ("quit", "exit")
COMMANDS: Mapping[str, Command] = {
    "help": Command("", "Show this.", _help),
    "reset": Command("", "Forget what was said; keep the system message.", _reset),
    "system": Command("[TEXT]", "Show or set the system message; none removes it.", _system),
    "regenerate": Command("", "Answer the last question again.", _regenerate),
    "undo": Command("", "Take the last question and its answer back.", _undo),
    "set": Command("[NAME VALUE ...]", "Show or set options: /set temperature 0.7.", _set),
    "speculate": Command("[on|off|K]", "Show or set how many tokens are drafted.", _speculate),
    "stats": Command("", "What the answers cost so far.", _stats),
    "save": Command("FILE", "Write the conversation as JSON.", _save),
    "load": Command("FILE", "Go on with a saved conversation.", _load),
}
