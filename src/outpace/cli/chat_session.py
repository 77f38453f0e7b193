"""A conversation that goes on: questions are answered, commands (``/help``, ``/undo``, ...) run."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from outpace.cli.conversation import Conversation, Exchange, file_of, fitted, load, save
from outpace.cli.flags.groups import SAMPLING, STOPPING
from outpace.cli.printing import cost, merged
from outpace.core.options import options_of
from outpace.core.params import SamplingParams
from outpace.core.stats import Metrics
from outpace.errors import ConfigError, ParamsError, PromptError, did_you_mean

if TYPE_CHECKING:
    from outpace.engine.request import EngineRequest
    from outpace.llm import LLM

ANSWER_TOKENS = 1024
"""Longest answer of a model that says nothing about it, where no flag does."""

READ_AT_ONCE = 128
"""Prompt tokens that are read between two looks at whether Ctrl-C was pressed: some seconds of a
large model on a slow machine."""


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


@dataclass(frozen=True)
class Answer:
    """What the model said."""

    text: str
    metrics: Metrics
    finish_reason: str | None
    """None if it was stopped before its end."""

    @property
    def stopped(self) -> bool:
        """Whether Ctrl-C ended it."""
        return self.finish_reason is None


@dataclass
class Session:
    """The model, the conversation so far, and how the next answer will be made."""

    llm: LLM
    params: SamplingParams
    screen: Screen
    conversation: Conversation = field(default_factory=Conversation)
    answers: list[Metrics] = field(default_factory=list)
    """What each answer cost, of those that were undone or regenerated too."""
    used: int = 0
    """Tokens of the context that the last question and its answer filled."""
    file: Path | None = None
    """Where the conversation was last saved or loaded."""
    stopped: bool = False
    """Whether the user stopped the last answer before its end."""
    unanswered: bool = False
    """Whether that was before its first word, so that the question was not kept."""
    wants_stop: Callable[[], bool] = lambda: False
    """Whether the user asks an answer to stop after its present round."""

    def __post_init__(self) -> None:
        self.set(self.params)

    def set(self, params: SamplingParams) -> None:
        """Takes these params for the answers to come, which end somewhere."""
        if params.max_tokens is None:
            own = {"max_new_tokens", "max_length"} & self.llm.input_processor.defaults.keys()
            params = params if own else dataclasses.replace(params, max_tokens=ANSWER_TOKENS)
        self.llm.resolve(params)
        self.params = params

    @property
    def last(self) -> Metrics:
        """What the last answer cost; zeros before the first."""
        return self.answers[-1] if self.answers else Metrics()

    def ask(self, question: str) -> None:
        """Answers a question and keeps both; ``OutpaceError`` where it cannot be asked."""
        self.stopped = self.unanswered = False
        forgotten = self.conversation.forgotten
        longest = self.llm.resolve(self.params).max_tokens or ANSWER_TOKENS
        ids = fitted(self.llm, self.conversation, question, longest)
        if self.conversation.forgotten > forgotten:
            count = self.conversation.forgotten
            self.screen.notice(
                f"the context holds {self.llm.max_model_len} tokens: the oldest "
                f"{'exchange is' if count == 1 else f'{count} exchanges are'} no longer shown to "
                "the model (/save keeps them, /reset begins anew)"
            )
        found = self._answer(ids)
        self.screen.end(cost(found.metrics))
        self.answers.append(found.metrics)
        self.stopped = found.stopped
        self.used = len(ids) + found.metrics.num_emitted_tokens
        self._keep(question, found)

    def _answer(self, prompt_ids: Sequence[int]) -> Answer:
        """Returns the answer, after each piece of it was shown.

        It ends early once ``wants_stop`` says so, between two rounds, after which the prompt and
        what was said are still cached; and at once where ``KeyboardInterrupt`` comes.
        """
        engine, screen = self.llm.engine, self.screen
        (request,) = self.llm.requests(prompt_ids, self.params, streaming=True, keep_cached=True)
        pieces: list[str] = []
        stopped = False
        try:
            engine.add(request)
            while not (request.finished or (stopped := self.wants_stop())):
                screen.working(self._reading(request))
                engine.step()
                piece = request.new_text()
                if piece:
                    screen.working("")
                    pieces.append(piece)
                    screen.piece(piece)
        except KeyboardInterrupt:
            stopped = True
        finally:
            screen.working("")
            engine.remove(request)
            engine.flush()
        if request.error is not None:
            raise request.error
        reason = None if stopped else request.finish_reason
        return Answer("".join(pieces), request.metrics, reason)

    def _reading(self, request: EngineRequest) -> str:
        """What to say while a long prompt is read; nothing once there is a token."""
        read, length = self.llm.engine.num_computed_tokens(request), len(request.prompt_ids)
        if request.output_ids or length <= READ_AT_ONCE:
            return ""
        return f"reading: {read} of {length} tokens" if read else f"reading {length} tokens"

    def _keep(self, question: str, found: Answer) -> None:
        if found.stopped and not found.text:
            self.unanswered = True
            self.screen.notice("stopped before the first word; the question is not kept")
            return
        self.conversation.add(Exchange(question, found.text, found.stopped))
        if found.stopped:
            self.screen.notice("stopped; what was said is kept (/undo takes it back)")
        elif found.finish_reason == "length":
            full = self.used >= self.llm.max_model_len
            more = ", where the context ends" if full else ": /set max_tokens N allows more"
            self.screen.notice(f"cut off at {found.metrics.num_emitted_tokens} tokens{more}")

    # -- what is shown of it -----------------------------------------------------------------------

    @property
    def method(self) -> str:
        """How the next answer will be drafted: "draft_model, K 5", or "plain"."""
        wanted = self.params.speculative
        if self.llm.config.method == "none" or wanted in ("off", 0):
            return "plain"
        count = self.llm.config.num_speculative_tokens if wanted is None else wanted
        return f"{self.llm.config.method}, K {count}"

    @property
    def status(self) -> str:
        """One line: the method, what the last answer cost, the options and the model.

        What matters most comes first, since a narrow terminal cuts the rest off.
        """
        from outpace.targets.describe import short_name

        resolved, last = self.llm.resolve(self.params), self.last
        parts = [self.method]
        if last.num_emitted_tokens:
            parts.append(f"{last.tokens_per_second:.1f} tokens/s")
        if last.acceptance_rate is not None:
            length = last.mean_acceptance_length
            parts.append(f"acceptance {last.acceptance_rate:.0%}, {length:.1f} tokens per pass")
        parts.append("greedy" if resolved.greedy else f"temperature {resolved.temperature:g}")
        parts.append(f"{self.used} of {self.llm.max_model_len} tokens")
        parts.append(Path(short_name(self.llm.target.name)).name)
        return " | ".join(parts)

    @property
    def statistics(self) -> str:
        """What the last answer and all of them together cost."""
        if not self.answers:
            return "nothing was answered yet"
        everything = merged(self.answers, sum(part.total_seconds for part in self.answers))
        return f"last answer: {cost(self.last)}\nall {len(self.answers)}: {cost(everything)}"


# -- the commands ----------------------------------------------------------------------------------

ESCAPE = "//"
"""A question that begins with a slash is typed with two."""


@dataclass(frozen=True)
class Command:
    """One command. ``run`` is given the session and the text after the name."""

    argument: str
    """What follows the name in the help: "TEXT", "[TEXT]", or nothing."""
    help: str
    run: Callable[[Session, str], None]


def run_command(session: Session, line: str) -> bool:
    """Answers a question or carries out a command; returns whether the conversation goes on.

    Raises ``OutpaceError`` for what cannot be done, after which the conversation is as it was.
    """
    line = line.strip()
    if not line.startswith("/") or line.startswith(ESCAPE):
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
        session.set(with_options(session.params, argument))
    resolved = session.llm.resolve(session.params)
    values = {name: getattr(resolved, name) for name in OPTIONS}
    shown = (f"{name} {'unset' if value is None else value}" for name, value in values.items())
    session.screen.notice("\n".join(shown))


def _speculate(session: Session, argument: str) -> None:
    if argument:
        wanted = _speculative(argument)
        if wanted != "off" and session.llm.config.method == "none":
            raise ConfigError("nothing drafts here: start with --draft or --method to speculate.")
        session.params = dataclasses.replace(session.params, speculative=wanted)
    session.screen.notice(session.method)


def _stats(session: Session, argument: str) -> None:
    session.screen.notice(session.statistics)


def _save(session: Session, argument: str) -> None:
    file = file_of(argument)
    if os.path.exists(file) and file != session.file:
        raise PromptError(f"{argument!r} exists already: name another file, or remove it first.")
    save(session.conversation, file, session.llm.target.name)
    session.file = file
    session.screen.notice(f"saved {len(session.conversation.exchanges)} exchanges")


def _load(session: Session, argument: str) -> None:
    file = file_of(argument)
    session.conversation = load(file)
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


# -- the options that ``/set`` and ``/speculate`` change -------------------------------------------

OPTIONS = (*(name for name in SAMPLING if name != "logit_bias"), "seed", *STOPPING[:3])
"""The options that ``/set`` changes."""

UNSET = ("none", "unset", "default")
"""Values that take an option back to what it is without a flag."""


def with_options(params: SamplingParams, text: str) -> SamplingParams:
    """Returns the params with the options of ``temperature 0.7 top_p 0.9`` (or ``name=value``).

    Raises ``ParamsError`` for an unknown name or a value that is none.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ParamsError(f"/set {text}: {str(error).lower()}.") from error
    words = [part for word in words for part in _name_and_value(word)]
    if len(words) % 2:
        raise ParamsError(f"/set needs a value for {words[-1]!r}: /set {words[-1]} VALUE.")
    pairs = zip(words[::2], words[1::2], strict=True)
    return dataclasses.replace(params, **{name: _value(name, value) for name, value in pairs})


def _name_and_value(word: str) -> list[str]:
    name, sign, value = word.partition("=")
    return [name, value] if sign and name in OPTIONS else [word]


def _value(name: str, text: str) -> Any:
    if name not in OPTIONS:
        raise ParamsError(f"/set does not know {name!r}{did_you_mean(name, OPTIONS)}.")
    option = next(one for one in options_of(SamplingParams) if one.name == name)
    if text in UNSET:
        return option.default
    if option.kind not in (int, float):
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise ParamsError(f"{name} takes a number, or {UNSET[0]}, not {text!r}.")


def _speculative(text: str) -> Any:
    """Returns what ``SamplingParams.speculative`` is for ``on``, ``off``, ``auto`` or a number."""
    known: Mapping[str, Any] = {"on": None, "off": "off", "auto": "auto"}
    if text in known:
        return known[text]
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise ParamsError(f"/speculate takes on, off, auto or a number of tokens, not {text!r}.")
