"""What is told while an `LLM` is loaded: one course from 0 to 1, over all of its models."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils import logging

from outpace import LLM
from outpace.llm import BUNDLED

DRAFTER = str(BUNDLED / "drafter")

CONFIGS: list[dict[str, Any]] = [
    {"method": "none"},
    {"method": "suffix"},
    {"method": "draft_model", "model": DRAFTER},
    {"method": "ensemble", "drafters": [{"model": DRAFTER}, {"method": "ngram"}]},
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["method"])
def test_ready_is_told_when_all_models_are_loaded(
    config: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    steps: list[tuple[str, float]] = []
    LLM(speculative_config=config, progress=lambda *step: steps.append(step))
    shares = [share for _, share in steps]
    assert shares == sorted(shares)
    assert steps[0][1] == 0.0
    assert steps[-1] == ("ready", 1.0)
    assert all(share < 1.0 for share in shares[:-1])
    drafting = [step for step, _ in steps if step.startswith("draft model: ")]
    loads = "model" in str(config)
    assert bool(drafting) is ("drafter" in str(config).replace("drafters", "") and loads)
    assert "Loading weights" not in capfd.readouterr().err, "it is told by progress"


def test_without_progress_transformers_shows_one_bar(capfd: pytest.CaptureFixture[str]) -> None:
    logging.enable_progress_bar()  # a command that ran in this process may have hidden it
    LLM(speculative_config={"method": "draft_model", "model": DRAFTER})
    bars = [line for line in capfd.readouterr().err.split("\n") if "Loading weights" in line]
    assert len(bars) == 1
