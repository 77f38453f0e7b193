"""What ``outpace methods`` lists is what there is."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from outpace.cli.main import app
from outpace.draft.registry import drafter_names
from outpace.policy.lengths.registry import length_names
from outpace.verify.registry import rule_names


def listed(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["methods", *arguments])


def test_everything_is_listed() -> None:
    words = {line.split()[0] for line in listed().stdout.splitlines() if line.strip()}
    assert {*drafter_names(), *rule_names(), *length_names()} <= words


def test_the_options_of_one_with_their_defaults() -> None:
    shown = listed("ucb").stdout
    assert "exploration" in shown
    assert "0.1" in shown
    assert "Width of the confidence bounds" in shown
    assert "(needed)" in next(line for line in shown.splitlines() if "│ drafters " in line)


def test_a_name_of_two_things_shows_both() -> None:
    shown = listed("confidence").stdout
    assert shown.index("verify: ") < shown.index("length: ")
    assert "strict" in shown
    assert "threshold" in shown


def test_what_has_no_options_says_so() -> None:
    assert "It has no options." in listed("none").stdout


def test_an_unknown_name_is_refused_with_what_is_near() -> None:
    result = listed("bidl")
    assert result.exit_code == 2
    assert "did you mean 'bild'?" in result.stderr
