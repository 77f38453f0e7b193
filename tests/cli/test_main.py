"""The executable itself: version, help, verbs."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import outpace
from outpace.cli import main
from outpace.errors import ConfigError
from processes import START_SECONDS

Run = Callable[..., Any]


def test_version(run: Run) -> None:
    result = run("--version")
    assert result.exit_code == 0
    version, kernels = result.stdout.splitlines()
    assert version == f"outpace {outpace.__version__}"
    assert kernels.startswith("CPU kernels: compiled ") or "none, because" in kernels


def test_python_runs_the_package() -> None:
    command = [sys.executable, "-m", "outpace", "--version"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=START_SECONDS
    )
    assert done.stdout.startswith(f"outpace {outpace.__version__}\n")


def test_help_lists_the_verbs(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert all(verb in result.stdout for verb in main.VERBS)
    assert "--install-completion" in result.stdout


def test_help_of_generate_has_examples_and_every_group(run: Run) -> None:
    result = run("generate", "-h")
    assert result.exit_code == 0
    for word in ("Examples", "--draft", "--top-p", "--stop", "--compare", "Speculation"):
        assert word in result.stdout


@pytest.mark.parametrize(
    "verb",
    ["", "generate", "bench", "bench run", "bench pair make", "audit distributions", "audit model"],
)
def test_flags_take_no_value_in_the_help(run: Run, verb: str) -> None:
    shown = run(*verb.split(), "--help").stdout
    assert "--help" in shown
    assert "<bool>" not in shown


def test_a_flag_with_a_value_is_a_usage_error(run: Run) -> None:
    result = run("generate", "w1", "--compare=true")
    assert result.exit_code == 2
    assert "--compare" in result.stderr


def test_a_text_without_quotes_is_told_of_them(run: Run) -> None:
    result = run("generate", "Once", "upon", "a", "time")
    assert result.exit_code == 2
    said = " ".join(result.stderr.replace("│", " ").split())
    assert "Unexpected 'upon a time': put quotes around a text of several words." in said


@pytest.mark.parametrize("arguments", ["['--version']", "['--help']", "['audit', '--help']"])
def test_help_does_not_load_torch(arguments: str) -> None:
    script = f"""
import sys
from outpace.cli.main import app
try:
    app({arguments})
except SystemExit as end:
    assert not end.code
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=START_SECONDS
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_verb_is_corrected(run: Run) -> None:
    result = run("generat")
    assert result.exit_code == 2
    assert "did you mean 'generate'?" in result.stderr


def test_every_verb_can_be_loaded() -> None:
    context = typer.Context(typer.main.get_command(main.app))
    group: Any = context.command
    for verb in main.VERBS:
        assert group.get_command(context, verb).name == verb


def test_a_verb_is_one_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = typer.Typer()

    @nested.command("distributions")
    def distribution() -> None:
        raise ConfigError("no distribution.")

    @nested.command("other")
    def other() -> None:
        """Another verb of the verb."""

    def hello(name: str = "you") -> None:
        typer.echo(f"hello {name}")

    module = SimpleNamespace(hello=hello, app=nested)
    monkeypatch.setattr(main, "import_module", lambda name: module)
    monkeypatch.setitem(main.VERBS, "hello", "somewhere:hello")
    monkeypatch.setitem(main.VERBS, "audit", "somewhere:app")
    runner = CliRunner()
    assert runner.invoke(main.app, ["hello", "--name", "me"]).stdout == "hello me\n"
    result = runner.invoke(main.app, ["audit", "distributions"])
    assert (result.exit_code, result.stderr) == (2, "outpace: no distribution.\n")


def test_a_file_that_cannot_be_written_ends_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = SimpleNamespace(save=lambda: (tmp_path / "no" / "file").write_text("x"))
    monkeypatch.setattr(main, "import_module", lambda name: module)
    monkeypatch.setitem(main.VERBS, "save", "somewhere:save")
    result = CliRunner().invoke(main.app, ["save"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"outpace: No such file or directory: '{tmp_path}/no/file'.\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_a_full_disk_ends_in_one_sentence(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def write() -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(main, "import_module", lambda name: SimpleNamespace(write=write))
    monkeypatch.setitem(main.VERBS, "write", "somewhere:write")
    result = CliRunner().invoke(main.app, ["write"])
    assert result.exit_code == 2
    said = f"outpace: the output cannot be written ({os.strerror(number)}).\n"
    assert result.stderr == said


def test_closed_streams_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(main, "app", lambda: typer.echo("nobody reads this"))
    main.run()
    with sys.stdout, sys.stderr:
        assert not sys.stdout.isatty()


def test_completion_scripts_are_offered(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = run("--show-completion", "bash")
    assert result.exit_code == 0
    assert "complete" in result.stdout
