"""``outpace chat`` through a pipe, at a terminal of its own, and with keys as they are typed."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from outpace import LLM, SamplingParams
from outpace.cli.chat_session import ANSWER_TOKENS, Session
from outpace.cli.chat_terminal import Pipe, Terminal, chat_at_terminal, history
from outpace.cli.printing import write
from outpace.errors import ConfigError
from targets.vision_processors import save_qwen

Run = Callable[..., Any]
SHORT = ("--max-tokens", 8, "--ignore-eos")


@pytest.fixture
def chat(run: Run, target: Path) -> Run:
    """Runs ``outpace chat`` with the tiny target and lines from a pipe."""

    def invoke(*arguments: Any, stdin: str) -> Any:
        return run("chat", "--model", target, *SHORT, *arguments, stdin=stdin.encode())

    return invoke


@pytest.fixture
def base(copy_of_target: Path) -> Path:
    """A model whose tokenizer has no chat template."""
    (copy_of_target / "chat_template.jinja").unlink()
    return copy_of_target


# -- a pipe ----------------------------------------------------------------------------------------


def test_only_answers_are_on_stdout(chat: Run, target: Path, drafter: Path) -> None:
    result = chat("--draft", drafter, stdin="w1 w2\n/stats\n\nw3\\\nw4\n/quit\nw5\n")
    assert result.exit_code == 0, result.stderr
    llm, params = LLM(target), SamplingParams(max_tokens=8, ignore_eos=True)
    first = llm.chat([{"role": "user", "content": "w1 w2"}], params).text
    messages = [("user", "w1 w2"), ("assistant", first), ("user", "w3\nw4")]
    second = llm.chat([{"role": r, "content": c} for r, c in messages], params).text
    assert result.stdout == f"{first}\n{second}\n"
    assert (
        len(re.findall(r"8 tokens in [\d.]+ s", result.stderr)) == 4
    )  # after each answer, and twice in /stats


def test_a_template_that_only_the_processor_has_will_do(run: Run, tmp_path: Path) -> None:
    """As of LLaVA: transformers gives that file to processors only."""
    save_qwen(tmp_path)
    template = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    result = run("chat", "--model", tmp_path, *SHORT, stdin=b"hi\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout


def test_a_mistake_in_a_pipe_ends_with_its_code(chat: Run) -> None:
    result = chat(stdin="/helf\nw1\n")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "did you mean '/help'" in result.stderr


def test_what_is_not_text_is_refused(run: Run, target: Path) -> None:
    result = run("chat", "-m", target, stdin=b"\xff\n")
    assert result.exit_code == 2
    assert "standard input is not UTF-8" in result.stderr


def test_a_conversation_goes_on_from_a_file(chat: Run, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    whole = chat("--system", "w9", stdin=f"w1\n/save {file}\nw2\n")
    assert whole.exit_code == 0, whole.stderr
    rest = chat("--load", file, stdin="w2\n")
    assert rest.stdout == whole.stdout.splitlines(keepends=True)[1]


def test_a_base_model_is_refused_with_what_to_do(run: Run, base: Path) -> None:
    result = run("chat", "-m", base, stdin=b"w1\n")
    assert result.exit_code == 2
    assert "has no chat template: give one with --chat-template FILE" in result.stderr
    assert "outpace generate" in result.stderr


def test_a_template_may_be_given(chat: Run, base: Path, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}")
    result = run("chat", "-m", base, "--chat-template", file, *SHORT, stdin=b"w1\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == chat(stdin="w1\n").stdout
    gone = run("chat", "-m", base, "--chat-template", tmp_path / "none", stdin=b"w1\n")
    assert gone.exit_code == 2
    assert "cannot read" in gone.stderr


def test_verbose_says_how_the_models_are_computed(chat: Run, target: Path) -> None:
    result = chat("--verbose", stdin="")
    assert (result.exit_code, result.stdout) == (0, "")
    assert str(target) in result.stderr
    assert "thread" in result.stderr


# -- keys ------------------------------------------------------------------------------------------


def typed(session: Session, keys: str, past: History | None = None) -> list[str]:
    """Types keys and then Ctrl-D; returns the questions that were asked."""
    with create_pipe_input() as given, create_app_session(input=given, output=DummyOutput()):
        given.send_text(keys + "\x04")
        chat_at_terminal(session, past or InMemoryHistory())
    return [exchange.question for exchange in session.conversation.exchanges]


@pytest.fixture
def session(target: Path) -> Session:
    return Session(LLM(target), SamplingParams(max_tokens=4, ignore_eos=True), Terminal())


def test_enter_asks_and_alt_enter_begins_a_line(session: Session) -> None:
    assert typed(session, "w1\x1b\rw2\rw3\\\rw4\r") == ["w1\nw2", "w3\nw4"]


def test_a_pasted_text_is_one_question(session: Session) -> None:
    assert typed(session, "\x1b[200~w1\nw2\n\x1b[201~w3\r") == ["w1\nw2\nw3"]


def test_ctrl_c_clears_the_line(session: Session) -> None:
    assert typed(session, "w1 w2\x03w3\r") == ["w3"]


def test_a_mistake_does_not_end_the_conversation(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(session, "/helf\rw1\r") == ["w1"]
    assert "did you mean '/help'" in capsys.readouterr().err


def test_answers_always_end_somewhere(session: Session) -> None:
    typed(session, "/set max_tokens 20\r")
    assert session.params.max_tokens == 20
    typed(session, "/set max_tokens none\r")
    assert session.params.max_tokens == ANSWER_TOKENS


def test_quitting_leaves_the_rest_unread(session: Session) -> None:
    assert typed(session, "w1\r/quit\rw2\r") == ["w1"]


def test_an_answer_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().piece("a\x1b[2Jb\x9b\r\n\tc")
    assert capsys.readouterr().out == "a\ufffd[2Jb\ufffd\ufffd\n\tc"
    Terminal().notice("a\x1b[2Jb")
    assert "a\ufffd[2Jb" in capsys.readouterr().out


def test_a_pipe_gets_what_was_said_and_nothing_less(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Pipe().piece("a\x1b[31mb")
    write("a\x1b[31mb")
    assert capsys.readouterr().out == "a\x1b[31mb" * 2
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write("a\x1b[31mb")
    assert capsys.readouterr().out == "a\ufffd[31mb"


# -- the history's file ----------------------------------------------------------------------------


def test_the_history_is_private_and_stays(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = tmp_path / "outpace" / "chat_history"
    file.parent.mkdir()
    file.touch(mode=0o644)
    typed(session, "w1 w2\r", history(kept=True))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "w1 w2" in file.read_text()
    assert list(history(kept=True).load_history_strings()) == ["w1 w2"]


def test_the_history_can_be_switched_off(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    typed(session, "w1\r", history(kept=False))
    assert list(tmp_path.iterdir()) == []


def test_a_user_without_a_home_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for an unknown user
    with pytest.raises(ConfigError, match="no home folder: add --no-history"):
        history(kept=True)


def test_a_history_that_cannot_be_kept_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "outpace").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="--no-history"):
        history(kept=True)


# -- a terminal ------------------------------------------------------------------------------------

SCRIPT = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that its Ctrl-C reaches this process
signal.signal(signal.SIGINT, signal.default_int_handler)
from outpace.cli.main import run
run()
"""


SLOW = """
import time
from outpace.engine.engine import Engine
step = Engine.step
Engine.step = lambda engine: (time.sleep(0.4), step(engine))[1]
"""
"""Makes reading take long enough for somebody to press a key."""


class Person:
    """Types at a pseudo-terminal and reads what it shows."""

    def __init__(self, master: int) -> None:
        self._master = master
        self.seen = ""

    def types(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def reads(self, words: str, times: int = 1, seconds: float = 60) -> None:
        """Waits until the words appear, so many times, after what was read so far."""
        end, begin = time.monotonic() + seconds, len(self.seen)
        while self.seen.count(words, begin) < times:
            assert time.monotonic() < end, f"no {words!r} in {self.seen[begin:]!r}"
            if select.select([self._master], [], [], 1)[0]:
                new = os.read(self._master, 1 << 16).decode(errors="replace")
                self.seen += new
                if "\x1b[6n" in new:  # where is the cursor? A terminal answers that.
                    self.types("\x1b[5;1R")


@contextmanager
def at_a_terminal(
    folder: Path, *arguments: object, script: str = SCRIPT
) -> Iterator[tuple[Person, Any]]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    variables = {
        "TERM": "xterm",
        "XDG_STATE_HOME": str(folder),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", script, "chat", *map(str, arguments)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, **variables},
    )
    os.close(slave)
    try:
        yield Person(master), process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        os.close(master)


def test_ctrl_c_stops_the_answer_and_not_the_program(
    target: Path, drafter: Path, tmp_path: Path
) -> None:
    flags = ("-m", target, "--draft", drafter, "--max-tokens", 8000, "--ignore-eos")
    with at_a_terminal(tmp_path, *flags, "--temperature", 1) as (person, process):
        person.reads("of 8192 tokens")  # the status line: the editor is ready
        person.types("w1 w2\r")
        person.reads(" w", times=20)  # the answer streams: far from its 8,000 words
        person.types("\x03")
        person.reads("stopped; what was said is kept")
        person.reads("tokens per pass")  # the status line
        assert "tokens/s" in person.seen
        assert "auto, K auto" in person.seen
        person.types("/stats\r")
        person.reads("all 1: ")
        person.reads("of 8192 tokens")
        person.types("\x1b[A")
        person.reads("/stats")  # what was typed before
        person.types("\x03")
        person.reads("of 8192 tokens")
        person.types("\x04")
        assert process.wait(timeout=60) == 0
        assert "Traceback" not in person.seen
    assert "w1 w2" in (tmp_path / "outpace" / "chat_history").read_text()


def test_ctrl_c_while_a_prompt_is_read_loses_nothing_that_was_typed(
    target: Path, tmp_path: Path
) -> None:
    said, saved = tmp_path / "said.json", tmp_path / "saved.json"
    turns = [("user", "w1 " * 1500), ("assistant", "w2")]
    said.write_text(json.dumps([{"role": role, "content": text} for role, text in turns]))
    flags = ("-m", target, "--method", "none", "--load", said, *SHORT)
    with at_a_terminal(tmp_path, *flags, script=SLOW + SCRIPT) as (person, process):
        person.reads("of 8192 tokens")
        person.types("w3 w4\r")
        person.reads("of 1506 tokens")
        person.types(" w5\x03")  # more of the question, which a terminal would drop at Ctrl-C
        person.reads("of 8192 tokens")
        assert "the question is not kept" in person.seen
        stopped_at = int(person.seen.rpartition("reading: ")[2].split()[0])
        person.types("\r")
        person.reads("reading: ")
        person.reads(" of ")
        again = person.seen.rpartition("not kept")[2].partition("reading: ")[2]
        assert int(again.split()[0]) >= stopped_at > 0, "what was read stays"
        person.reads("of 8192 tokens")
        person.types(f"/save {saved}\r")
        person.reads("of 8192 tokens")
        person.types("\x04")
        assert process.wait(timeout=60) == 0
        assert "Traceback" not in person.seen
    messages = json.loads(saved.read_text())["messages"]
    assert messages[2]["content"] == "w3 w4 w5"
