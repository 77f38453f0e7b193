"""What ``outpace methods`` lists is what there is."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from outpace.cli.main import app
from outpace.core import lazy
from outpace.core.options import described
from outpace.draft.registry import GROUP, drafter_names, find_drafter
from outpace.errors import ConfigError
from outpace.policy.lengths.registry import find_length, length_names
from outpace.verify.registry import rule_names, rules


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


def test_a_default_that_is_made_anew_is_shown_as_it_is() -> None:
    assert '{"method": "ngram"}' in listed("staged").stdout


def test_all_options_say_what_they_do() -> None:
    kinds: list[Any] = [*rules().values()]
    kinds += [find_drafter(name).Options for name in drafter_names()]
    kinds += [find_length(name).Options for name in length_names()]
    assert not [(kind, one.name) for kind in kinds for one in described(kind) if not one.help]
    assert "The ratio p / q of a whole prefix" in listed("joint").stdout


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


def test_what_cannot_be_imported_is_refused_and_hides_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = EntryPoint("gone", "my_package_that_is_gone:GoneDrafter", GROUP)
    monkeypatch.setattr(lazy, "_entry_points", lambda group: (entry,) if group == GROUP else ())
    assert listed("suffix").exit_code == 0
    with pytest.raises(ConfigError, match=r"'gone' cannot be imported from my_package_that_is"):
        find_drafter("gone")
