"""``outpace chat``: a conversation with a model, at a terminal or through a pipe."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from outpace.cli.chat_session import READ_AT_ONCE, Screen, Session
from outpace.cli.chat_terminal import (
    Pipe,
    Terminal,
    chat_at_terminal,
    chat_through_pipe,
    history,
)
from outpace.cli.conversation import Conversation, load
from outpace.cli.flags import options as opt
from outpace.cli.flags.grouped import grouped
from outpace.cli.flags.groups import EngineFlags, Sampling, SpeculationFlags, Stopping
from outpace.cli.loading import ChatTemplate, load_llm
from outpace.files import decoded

NO_TEMPLATE = (
    "give one with --chat-template FILE, or continue texts with 'outpace generate', as suits a "
    "model that was not trained to chat"
)
"""What to do with a model that has no chat template."""


@dataclass(frozen=True, kw_only=True)
class TalkFlags:
    """How the conversation begins, and what is kept of it."""

    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="System message to begin with.", rich_help_panel=opt.PROMPTS
        ),
    ] = None
    load: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Go on with a saved conversation.", rich_help_panel=opt.PROMPTS
        ),
    ] = None
    chat_template: opt.ChatTemplate = None
    no_history: Annotated[
        bool,
        typer.Option(
            "--no-history",
            help="Do not keep what is typed for the arrow keys of the next conversation.",
            rich_help_panel=opt.OUTPUT,
        ),
    ] = False
    no_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--no-prefix-caching",
            help="Read the whole conversation again at every turn, and hold no copy of it.",
            rich_help_panel=opt.MODEL,
        ),
    ] = False
    verbose: opt.Verbose = False

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of ``LLM``."""
        caching = {"enable_prefix_caching": False} if self.no_prefix_caching else {}
        return {"max_num_batched_tokens": READ_AT_ONCE, **caching}


@grouped
def chat(
    *,
    talk: TalkFlags,
    engine: EngineFlags,
    speculation: SpeculationFlags,
    sampling: Sampling,
    stopping: Stopping,
) -> None:
    """Talk with a model. Enter asks, Ctrl-C stops an answer, Ctrl-D ends; /help shows the commands.

    Without a terminal each line of standard input is a question, and only the answers go to
    standard output.

    Examples:

    `outpace chat` (the bundled pair: stories for children, no knowledge)

    `outpace chat -m big-model --draft small-model --temperature 0.7`

    `echo "What is a B-tree?" | outpace chat -m big-model --method ngram`
    """
    arguments = {**engine.speculating(speculation), **talk.arguments()}
    options = {**sampling, **stopping}
    # Before seconds are spent on the model: what was said before, and whether it can be kept.
    begun = Conversation() if talk.load is None else load(talk.load)
    if talk.system is not None:
        begun.system = talk.system
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    typed = history(kept=not talk.no_history) if at_terminal else None

    template = ChatTemplate(talk.chat_template, NO_TEMPLATE)
    llm, params = load_llm(engine.model, arguments, options, 1, template, talk.verbose)
    screen: Screen = Pipe() if typed is None else Terminal()
    session = Session(llm, params, screen, begun, file=talk.load)
    if typed is None:
        lines = (decoded(line, "standard input") for line in sys.stdin.buffer)
        chat_through_pipe(session, lines)
    else:
        chat_at_terminal(session, typed)
