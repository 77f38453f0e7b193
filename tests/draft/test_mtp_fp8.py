"""Modules in FP8, as DeepSeek, Qwen and GLM publish them: what they draft is what the same numbers
in float64 draft, which `test_mtp_families` holds against the published formula."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft.mtp_checkpoints import whole, write
from outpace import LLM
from outpace.errors import ModelLoadError, UnsupportedModel
from outpace.methods.heads.mtp import load_mtp_module
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.loading.quantized import dequantized_fp8
from targets.families import CONTEXT, PROMPTS
from targets.generating import greedy, ids

PUBLISHED = re.compile(r".*\.(\w+_proj\w*|wq_b|wk|dense|query_key_value)\.weight")
"""Which weights are in FP8: those of linear layers, but for routers and what joins the state and
the embedding."""
BLOCK = 2
FAMILIES = ("deepseek_v3", "deepseek_v3-2", "deepseek_v32", "glm4_moe", "qwen3_next")
CODES = torch.float8_e4m3fn


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales of blocks, and the numbers that these are."""
    rows, columns = (size // BLOCK for size in weight.shape)
    blocks = weight.float().reshape(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    codes = (blocks / scale).to(CODES)
    numbers = codes.float() * scale
    return codes.view_as(weight), scale[:, 0, :, 0], numbers.view_as(weight)


def by_rows(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    codes = (weight.float() / scale).to(CODES)
    return codes, scale, codes.float() * scale


def folders(tmp_path: Path, family: str, rows: bool = False) -> tuple[Path, Path]:
    """A published folder, and one with the same numbers. rows: whether scales are of rows."""
    quantised, plain = (write(tmp_path / name, family, whole(family)) for name in ("fp8", "plain"))
    weights = load_file(plain / "model.safetensors")
    codes: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not PUBLISHED.fullmatch(name) or "eh_proj" in name or weight.dim() != 2:
            codes[name] = weight
            continue
        found, scale, numbers = by_rows(weight) if rows else in_blocks(weight)
        codes |= {name: found, f"{name}_scale{'' if rows else '_inv'}": scale.contiguous()}
        weights[name] = numbers.double()
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(codes, quantised / "model.safetensors", metadata={"format": "pt"})
    about = json.loads((quantised / "config.json").read_text())
    about["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": None if rows else [BLOCK, BLOCK],
    }
    (quantised / "config.json").write_text(json.dumps(about))
    return quantised, plain


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_module_has_the_numbers_of_its_codes(family: str, rows: bool, tmp_path: Path) -> None:
    quantised, plain = folders(tmp_path, family, rows)
    loaded = load(plain, dtype="float64")
    found, expected = (load_mtp_module(loaded, str(each)) for each in (quantised, plain))
    own = expected.state_dict()
    assert found.state_dict().keys() == own.keys()
    assert len(found.later) == len(expected.later) == (family == "deepseek_v3-2")
    for name, weight in found.state_dict().items():
        assert torch.equal(weight, own[name]), name


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_a_target_in_fp8_drafts_with_its_module(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("accelerate")
    quantised, plain = folders(tmp_path, family)
    limits: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": CONTEXT, "dtype": "float64"}
    config = {"method": "mtp", "num_speculative_tokens": 3}
    found, wide = (
        LLM(str(each), speculative_config=config, **limits).generate(PROMPTS, greedy(10))
        for each in (quantised, plain)
    )
    alone = LLM(str(quantised), speculative_config={"method": "none"}, **limits)
    assert ids(found) == ids(alone.generate(PROMPTS, greedy(10))) == ids(wide)
    drafted, kept = (
        [getattr(each.metrics, name) for each in found]
        for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    assert drafted == [each.metrics.num_draft_tokens for each in wide]
    assert kept == [each.metrics.num_accepted_tokens for each in wide]
    assert "are dequantised from fp8 to numbers" in caplog.text


def test_a_part_of_a_block_at_the_ends() -> None:
    """DeepSeek's ``kv_a_proj_with_mqa`` has four and a half blocks of rows."""
    codes = torch.randn(5, 7).to(CODES)
    scale = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    found = dequantized_fp8(codes, scale, [3, 3])
    for row in range(5):
        for column in range(7):
            wanted = codes[row, column].float() * scale[row // 3, column // 3]
            assert found[row, column] == wanted
    assert torch.equal(dequantized_fp8(codes, torch.tensor(0.5), None), codes.float() / 2)
    assert torch.equal(
        dequantized_fp8(codes[:4, :6], scale, None), dequantized_fp8(codes[:4, :6], scale, [2, 2])
    )


WEIGHT = "model.layers.2.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        ({f"{WEIGHT}_scale_inv": None}, UnsupportedModel, "is quantised .*o_proj.weight.*FP8 only"),
        (
            {f"{WEIGHT}_scale_inv": torch.ones(3, 3)},
            ModelLoadError,
            "scales .*o_proj.weight_scale_inv.* do not fit their weight",
        ),
        ({WEIGHT: torch.ones(32, 8, dtype=torch.int8)}, UnsupportedModel, "and in FP8 only"),
        (
            {"model.layers.2.self_attn.o_proj.weight_packed": torch.ones(2)},
            UnsupportedModel,
            "quantised .*weight_packed.* belongs to",
        ),
    ],
)
def test_codes_that_are_not_read_get_a_sentence(
    change: dict[str, Any], kind: type[Exception], reason: str, tmp_path: Path
) -> None:
    quantised, plain = folders(tmp_path, "deepseek_v3")
    weights = {**load_file(quantised / "model.safetensors"), **change}
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, quantised / "model.safetensors", metadata={"format": "pt"})
    loaded = load(plain, dtype="float64")
    with pytest.raises(kind, match=reason):
        load_mtp_module(loaded, str(quantised))


def test_a_file_that_is_cut_short_gets_a_sentence(tmp_path: Path) -> None:
    quantised, plain = folders(tmp_path, "deepseek_v3")
    loaded, file = load(plain, dtype="float64"), quantised / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match="damaged or cut short"):
        load_mtp_module(loaded, str(quantised))
