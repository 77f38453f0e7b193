"""What may draft inside ``generate``: a head, a model that learns, one that brings code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.draft.registry import find_drafter
from outpace.heads.checkpoint import save_head
from outpace.hf import speculative
from outpace.targets.hf.loading.load import load_drafter
from outpace.targets.hf.loading.loaded import LoadedModel
from targets.families import noised, target

from .generating import FAMILY, generated


def test_auto_takes_a_trained_head_as_well(tmp_path: Path) -> None:
    head = find_drafter("medusa").dummy_options(LoadedModel(target(FAMILY), None, FAMILY))["model"]
    save_head(head, tmp_path)
    for model in (head, tmp_path):
        custom = speculative(model, check=False)
        assert torch.equal(generated(custom=custom), generated())
        assert "medusa" in custom._llm.engine.drafter.candidate_drafters  # type: ignore[union-attr]


def test_a_draft_model_in_a_folder_learns_online(tmp_path: Path) -> None:
    noised(target(FAMILY), 0.1).save_pretrained(tmp_path)
    learning = {"every": 1, "window": 16, "share": 1.0}
    custom = speculative(tmp_path, num_speculative_tokens=3, online=learning)
    for _ in range(3):
        assert torch.equal(generated(custom=custom), generated())
    assert custom._llm.engine.drafter.updates  # type: ignore[union-attr]


def test_a_draft_model_may_bring_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    noised(target(FAMILY), 0.1).save_pretrained(tmp_path)
    trusted: list[bool] = []

    def loading(*given: Any, **options: Any) -> LoadedModel:
        trusted.append(options["trust_remote_code"])
        return load_drafter(*given, **options)

    monkeypatch.setattr("outpace.methods.models.loading.load_drafter", loading)
    for trust in (True, False):
        custom = speculative(tmp_path, num_speculative_tokens=3, trust_remote_code=trust)
        assert torch.equal(generated(custom=custom), generated())
    assert trusted[0] is True
    assert trusted[-1] is False
