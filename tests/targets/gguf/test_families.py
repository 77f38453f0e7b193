"""Each family of GGUF files: the same logits as transformers with the same numbers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from outpace.errors import ModelLoadError, UnsupportedModel
from outpace.targets.hf.gguf.families import FAMILIES as READ
from outpace.targets.hf.loading.load import load
from representatives import representatives
from targets.gguf.files import rounded, tiny, write
from targets.gguf.tiny_families import FAMILIES

SOME = (
    "llama", "gpt2", "gemma3", "qwen3moe", "granite", "gptneox", "lfm2", "mamba", "qwen35", "bloom",
    "granitemoeshared", "gpt-oss", "glm4moe", "deepseek2", "deepseek2-lite", "deepseek2-v2",
    "granitehybrid", "granitehybrid_dense",
)  # fmt: skip
DECAYING = ("mamba", "falcon_mamba", "qwen35", "gemma4", "granitehybrid_dense")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 5, 6]])


def dequantized(path: Path, model: Any) -> Any:
    """Returns a model with the numbers that transformers reads from a file."""
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    missing, more = model.load_state_dict(read["tensors"], strict=False)
    assert not more
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def is_mixture(arch: str) -> bool:
    named = ("mixtral", "gpt-oss", "granitehybrid")
    return "moe" in arch or "deepseek" in arch or arch in named


def numbers_of(path: Path, arch: str, kind: str) -> Any:
    """Returns a tiny model with the numbers of a file, as transformers reads it, or, where we do it
    ourselves, as they are rounded."""
    if READ[FAMILIES[arch].arch or arch].layout is None:
        return dequantized(path, tiny(arch))
    return rounded(arch, tiny(arch), kind)


@pytest.mark.parametrize(
    ("arch", "kind"),
    representatives(
        itertools.product(FAMILIES, ["F32", "Q8_0"]),
        lambda arch, kind: kind == "F32" or arch in SOME,
    ),
)
def test_logits_are_those_of_the_numbers_in_the_file(arch: str, kind: str, tmp_path: Path) -> None:
    original = tiny(arch)
    path = write(tmp_path / "model.gguf", arch, original, kind)
    # The grouped kernels of the mixtures of experts know no float64. Decays are stored as powers;
    # Gemma 4 has factors in float32.
    dtype, off = (torch.float32, 1e-3) if is_mixture(arch) else (torch.float64, 1e-8)
    off = 1e-5 if arch in DECAYING else off
    loaded = load(path, dtype=dtype, cpu_kernels="off")
    expected = numbers_of(path, arch, kind).to(dtype)
    with torch.no_grad():
        logits = expected(IDS).logits
        assert torch.allclose(loaded.model(IDS).logits, logits, rtol=off, atol=off)
        if kind == "F32":  # and the numbers are those of the model that was written
            assert torch.allclose(original.to(dtype)(IDS).logits, logits, rtol=1e-3, atol=1e-4)
    assert loaded.packed == (kind == "Q8_0")


@pytest.mark.parametrize(
    ("value", "number", "error", "said"),
    [
        ("expert_gating_func", 4, UnsupportedModel, "weighs its experts in a way"),
        ("rope.scaling.yarn_log_multiplier", None, UnsupportedModel, "yarn_log_multiplier"),
        ("attention.kv_lora_rank", None, ModelLoadError, "attention.kv_lora_rank"),
    ],
)
def test_latents_that_are_not_read_are_refused(
    value: str, number: Any, error: type[Exception], said: str, tmp_path: Path
) -> None:
    changes = {f"deepseek2.{value}": number}
    path = write(tmp_path / "model.gguf", "deepseek2", tiny("deepseek2"), changes=changes)
    with pytest.raises(error, match=said):
        load(path)
