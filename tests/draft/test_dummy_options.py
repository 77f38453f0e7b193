"""The drafters that stand for any of their kind: made for a target however its weights are held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outpace import LLM
from outpace.draft.registry import find_drafter
from outpace.methods.models.noisy_copy import noisy_copy
from outpace.targets.cpu.native import native
from outpace.targets.cpu.weights import quantize as quantising
from outpace.targets.cpu.weights.quantize import Int8Linear, int8_levels
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.logits import output_rows
from targets.families import CONTEXT, build
from targets.generating import greedy, ids

PROMPTS = [[5, 6, 7, 8], [9, 3]]


def loaded(folder: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A target of a kind that our own code computes, or not; in 8 or 4 bits."""
    family, quantization = form.split("-")
    if family == "torch":  # as without a compiler
        monkeypatch.setattr(quantising, "native", lambda: None)
    # For our own code sizes are multiples of a vector's.
    sizes = {"head_dim": 32, "intermediate_size": 64} if family == "llama" else {}
    small = build("llama" if family == "torch" else family, **sizes)
    small.float().save_pretrained(folder)
    return load(folder, dtype="float32", quantization=quantization)  # type: ignore[arg-type]


FORMS = [
    pytest.param(form, marks=pytest.mark.skipif(without, reason="these products are not there"))
    for form, without in {
        "llama-int8": native() is None,
        "llama-int4": native() is None,
        "gpt2-int8": native() is None,
        "cohere-int8": native() is None,
        "torch-int8": int8_levels() == 0,
    }.items()
]


@pytest.mark.parametrize("method", ["draft_model", "medusa", "eagle3", "ctc"])
@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_target_has_one(
    form: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = loaded(tmp_path, form, monkeypatch)
    if form == "torch-int8":
        assert any(isinstance(module, Int8Linear) for module in target.model.modules())
    expected = ids(LLM(target, max_model_len=CONTEXT).generate(PROMPTS, greedy(20)))
    config = {
        "method": method,
        "num_speculative_tokens": 3,
        **find_drafter(method).dummy_options(target),
    }
    llm = LLM(target, speculative_config=config, max_model_len=CONTEXT)
    outputs = llm.generate(PROMPTS, greedy(20))
    assert ids(outputs) == expected
    if method == "draft_model":
        drafted, accepted = (
            sum(getattr(output.metrics, name) for output in outputs)
            for name in ("num_draft_tokens", "num_accepted_tokens")
        )
        assert 0 < accepted < drafted, "some of what it drafts is accepted, and some is not"


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_heads_begin_with_the_rows_that_the_target_multiplies_by(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = loaded(tmp_path, form, monkeypatch)
    head = target.model.get_output_embeddings()
    tokens = torch.tensor([4, 9, 30])
    rows = output_rows(target.model, tokens)
    assert rows is not None
    states = torch.randn(5, rows.shape[1])
    expected = head(states)[:, tokens] * (target.config.logit_scale if "cohere" in form else 1)
    # Some of these products round their inputs to 8 bits.
    off = (states @ rows.T - expected).std()
    assert off < 0.02 * expected.std()


@torch.inference_mode()
def test_a_copy_is_off_by_a_part_of_the_weights_spread() -> None:
    model = build("llama")
    copied = noisy_copy(model)
    for (name, own), other in zip(model.named_parameters(), copied.parameters(), strict=True):
        off = float((other - own).std() / own.std().clamp(min=1e-12))
        assert (0.25 < off < 0.35) if own.dim() > 1 else torch.equal(own, other), name
