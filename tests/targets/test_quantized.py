"""Checkpoints that others have quantised: dequantised as their format says, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from outpace import LLM
from outpace.errors import UnsupportedModel
from outpace.targets.hf.loading.load import load
from targets.families import build

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])

Packed = tuple[dict[str, Tensor], Tensor]
"""What files hold of a weight, by the ends of their names, and the numbers that this stands for."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
        initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def quantised(folder: Path, pack: Callable[[Tensor], Packed], about: Any) -> dict[str, Tensor]:
    """Quantises the linear layers of a saved model in its files; returns the weights that these
    then stand for."""
    weights, expected = load_file(folder / "model.safetensors"), {}
    for name in list(weights):
        if "_proj.weight" not in name:
            continue
        parts, numbers = pack(weights.pop(name))
        expected[name] = numbers
        stem = name.removesuffix("weight")
        weights |= {f"{stem}{end}": part.contiguous() for end, part in parts.items()}
    expected |= {name: weight for name, weight in weights.items() if name.endswith("norm.weight")}
    expected |= {name: weights[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if about is not None:
        config["quantization_config"] = about
    (folder / "config.json").write_text(json.dumps(config))
    return expected


def in_fp8(weight: Tensor) -> Packed:
    """In float8, with a scale for each block of 64 by 64."""
    blocks = weight.view(weight.shape[0] // 64, 64, weight.shape[1] // 64, 64)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    numbers = (codes.float() * scale).view_as(weight)
    return {"weight": codes.view_as(weight), "weight_scale_inv": scale[:, 0, :, 0]}, numbers


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]}


def by_rows(dtype: torch.dtype, most: float) -> Callable[[Tensor], Packed]:
    """In 8 bits, with a scale for each row."""

    def pack(weight: Tensor) -> Packed:
        scale = weight.abs().amax(1, keepdim=True) / most
        codes = weight / scale
        codes = (codes if dtype.is_floating_point else codes.round()).to(dtype)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale

    return pack


def in_four_bits(weight: Tensor) -> Packed:
    """Eight codes of 4 bits in an int32, with a scale for each 32 inputs."""
    groups = weight.view(len(weight), -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 7
    codes = (groups / scale).round().clamp(-8, 7)
    numbers = (codes * scale).view_as(weight)
    unsigned = (codes.view(len(weight), -1, 8) + 8).long()
    packed = (unsigned << (4 * torch.arange(8))).sum(-1)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
    shape = torch.tensor(weight.shape)
    return {"weight_packed": packed, "weight_scale": scale[..., 0], "weight_shape": shape}, numbers


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    given = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": given, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "quantization_status": "compressed",
    }  # fmt: skip


def check_dequantized(folder: Path, expected: dict[str, Tensor]) -> None:
    loaded = load(folder, dtype="float64")
    plain = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder)).double()
    plain.load_state_dict(expected)
    with torch.no_grad():
        logits = plain.eval()(IDS).logits
        assert torch.allclose(loaded.model(IDS).logits, logits, rtol=1e-5, atol=1e-5)
    greedy = {"temperature": 0, "max_tokens": 24}
    texts = [
        LLM(folder, speculative_config=config).generate([[5, 6, 5, 6, 5]], greedy)[0].token_ids
        for config in ({"method": "none"}, {"method": "ngram", "num_speculative_tokens": 3})
    ]
    assert texts[0] == texts[1]


def test_fp8_is_dequantized_on_a_cpu(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("accelerate")
    expected = quantised(folder, in_fp8, FP8)
    check_dequantized(folder, expected)
    assert "are dequantised from fp8 to numbers" in caplog.text


@pytest.mark.parametrize(
    ("pack", "about"),
    [
        (
            by_rows(torch.float8_e4m3fn, 448.0),
            compressed("float-quantized", type="float", strategy="channel"),
        ),
        (by_rows(torch.int8, 127.0), compressed("int-quantized", strategy="channel")),
        (
            in_four_bits,
            compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
        ),
    ],
)
def test_compressed_tensors_are_dequantized_on_a_cpu(
    folder: Path, pack: Callable[[Tensor], Packed], about: dict[str, Any]
) -> None:
    pytest.importorskip("compressed_tensors")
    check_dequantized(folder, quantised(folder, pack, about))


def test_mxfp4_experts_are_dequantized_on_a_cpu(tmp_path: Path) -> None:
    """gpt-oss: pairs of codes of 4 bits, and a power of two for each 32 inputs."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    model: Any = build("gpt_oss", **sizes)
    model.float().save_pretrained(tmp_path / "model")
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = torch.tensor([*values, *(-each for each in values)])
    weights = load_file(tmp_path / "model" / "model.safetensors")
    expected = dict(weights)
    generator = torch.Generator().manual_seed(0)
    for name in [each for each in weights if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        shape = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape[:3], generator=generator, dtype=torch.uint8)
        codes = torch.stack([blocks & 15, blocks >> 4], -1).view(*shape[:3], 32).long()
        numbers = table[codes] * torch.exp2(scales.float() - 127)[..., None]
        expected[name] = numbers.view(experts, outputs, inputs).transpose(1, 2).contiguous()
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    model.load_state_dict(expected)
    loaded = load(tmp_path / "model", dtype="float64")
    with torch.no_grad():
        logits = model.double()(IDS % 60).logits
        assert torch.allclose(loaded.model(IDS % 60).logits, logits, rtol=1e-9, atol=1e-9)


# -- refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised with gptq, .* here .*optimum"),
        ({"quant_method": "awq", "bits": 4}, "quantised with awq, .* here .*gptqmodel"),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, "with bitsandbytes, .* here"),
        ({"quant_method": "hqq"}, "quantised with hqq, .* here .*HQQ"),
        ({"quant_method": "torchao", "quant_type": {}}, "quantised with torchao, .* here"),
        ({"quant_method": "modelopt"}, "with 'modelopt', which transformers .* does not know"),
        ({"bits": 4}, "quantised with .a method without a name., which"),
    ],
)
def test_what_is_not_read_here_is_refused_before_weights_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch, about: dict[str, Any], said: str
) -> None:
    quantised(folder, in_fp8, about)

    def read(*given: Any, **options: Any) -> Any:
        pytest.fail("weights were read")

    monkeypatch.setattr("outpace.targets.hf.loading.load.read_weights", read)
    with pytest.raises(UnsupportedModel, match=f"the weights in .*{said}.*before it was quantised"):
        load(folder)


@pytest.mark.parametrize("pack", [in_fp8, by_rows(torch.float8_e4m3fn, 448.0)])
def test_scales_that_nobody_would_read_are_noticed(
    folder: Path, pack: Callable[[Tensor], Packed]
) -> None:
    """As older files of ModelOpt: codes without their scales would be taken for the weights."""
    quantised(folder, pack, None)
    with pytest.raises(
        UnsupportedModel, match=r"weight_scale.*' belongs to one of them\), and its"
    ):
        load(folder)
