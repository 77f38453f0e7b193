"""Today's tree does what was recorded: see the package's own words, and `record`, which renews."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from devices import cpu_only
from representatives import representatives

from .parts import (
    SURFACES,
    case_differences,
    laid_out_otherwise,
    recorded_cases,
    surface_differences,
)
from .texts import USUAL, Case

pytestmark = cpu_only("What is recorded was computed on a CPU.")

RULES = {
    **dict.fromkeys(("token", "match", "coupled", "block"), "draft_model"),
    **dict.fromkeys(("recursive", "kseq", "traversal", "canonical"), "draft_tree"),
}
"""For each lossless rule, the method with which it is tried at each change."""
KINDS = ("mistral/draft_model", "qwen3_next/draft_model", "t5/draft_model", "bundled/auto")
"""What is tried at each change of other models than the tiny Llama."""


def tried_at_each_change(name: str) -> bool:
    """Whether a case is: each method under its usual rule, each lossless rule, a few kinds of
    models."""
    case = Case.of(name)
    if case.target != "llama":
        return f"{case.target}/{case.method}" in KINDS and case.tokens == "5"
    if case.rule != USUAL:
        return RULES.get(case.rule) == case.method
    return case.tokens == "5"


def listed(differences: Iterable[str], part: str, only: str = "") -> str:
    """Returns what a failed test says: all differences, and how they are renewed on purpose."""
    command = f"python -m tests.frozen.record --what {part}{only and f' --only {only!r}'}"
    return "\n".join(["", *differences, f"If that is meant: {command}"])


@pytest.mark.parametrize("part", SURFACES)
def test_what_is_seen_is_what_was_recorded(part: str) -> None:
    reason = laid_out_otherwise(part)
    if reason is not None:
        pytest.skip(reason)
    found = list(surface_differences(part))
    assert not found, listed(found, part)


@pytest.mark.parametrize("name", representatives(recorded_cases(), tried_at_each_change))
def test_texts_are_those_that_were_recorded(name: str) -> None:
    found = list(case_differences(name))
    assert not found, listed(found, "texts", name)
