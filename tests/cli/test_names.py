"""Names that help and completion show without the registries, which import torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from outpace.cli.flags.names import LOSSLESS, LOSSY, METHODS, complete_method, complete_rule
from outpace.draft.registry import drafters
from outpace.verify.registry import rules
from processes import START_SECONDS

Run = Callable[..., Any]
SCRIPT = """
import sys
from outpace.cli.main import app
try:
    app()
finally:
    assert "torch" not in sys.modules
"""


def test_the_names_are_those_of_the_registries() -> None:
    assert set(METHODS) == set(drafters())
    lossless = {name: rule.lossless for name, rule in rules().items()}
    assert {**dict.fromkeys(LOSSLESS, True), **dict.fromkeys(LOSSY, False)} == lossless


def test_help_lists_every_name(run: Run) -> None:
    words = run("generate", "--help").stdout.replace("|", " ").replace("\u2502", " ").split()
    named = {word.strip(",.:;") for word in words}
    assert {*METHODS, *LOSSLESS, *LOSSY} <= named


def test_names_are_completed_from_their_first_letters() -> None:
    assert dict(complete_method("draft_t")) == {"draft_tree": METHODS["draft_tree"]}
    assert [name for name, _ in complete_rule("t")] == ["token", "traversal", "typical"]
    assert dict(complete_rule("typical"))["typical"].startswith("lossy: ")
    assert list(complete_rule("x")) == []


@pytest.mark.parametrize(
    ("words", "found"), [("generate --method n", ["ngram", "none"]), ("bench run --verify c", None)]
)
def test_the_shell_is_given_the_names_without_torch(words: str, found: list[str] | None) -> None:
    found = ["coupled", "canonical", "confidence", "cascade"] if found is None else found
    count = len(words.split())
    environment = {
        "_OUTPACE_COMPLETE": "complete_bash",
        "COMP_WORDS": f"outpace {words}",
        "COMP_CWORD": str(count),
    }
    script = f"import sys; sys.argv = ['outpace']\n{SCRIPT}"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert (done.stdout.split(), done.stderr) == (found, "")


def test_k_may_be_auto(generate: Run) -> None:
    flags = ("--method", "ngram", "-k", "auto", "--json", "--max-tokens", 3, "--temperature", 0)
    result = generate("w1 w2", *flags)
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["token_ids"]) <= 3
