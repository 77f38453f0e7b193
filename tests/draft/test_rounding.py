"""Heads whose weights are rounded to integers: smaller drafters, and the same texts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from devices import DEVICE, cpu_only
from outpace import LLM
from outpace.draft.registry import find_drafter
from outpace.errors import ConfigError
from outpace.heads.base import Head, TargetShape
from outpace.heads.checkpoint import save_head
from outpace.heads.registry import head_names
from outpace.methods.heads.base import TrainedDrafter
from outpace.methods.heads.eagle3 import Eagle3, Eagle3Config
from outpace.targets.cpu.native_layers.blocks import NativeBlockLinear
from outpace.targets.cpu.native_layers.linear import NativeLinear
from outpace.targets.cpu.weights.quantize import Int8Linear
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.weights import weight_bytes
from targets.families import CONTEXT, PROMPTS, target
from targets.generating import greedy, ids

LENGTH = 12
ROUNDED = (NativeLinear, Int8Linear, NativeBlockLinear)
"""In 8 bits with a compiler and without one, in 4 bits."""


@lru_cache
def narrow() -> Any:
    """The tiny target in the dtype that integers are for."""
    return copy.deepcopy(target("llama")).float()


@lru_cache
def expected() -> list[list[int]]:
    return ids(LLM(narrow(), max_model_len=CONTEXT).generate(PROMPTS, greedy(LENGTH)))


@lru_cache
def dummy_options(method: str) -> Mapping[str, Any]:
    return find_drafter(method).dummy_options(LoadedModel(narrow(), None, "llama"))


def decoder(target_model: Any, **config: Any) -> LLM:
    return LLM(
        target_model, speculative_config=config, max_num_seqs=len(PROMPTS), max_model_len=CONTEXT
    )


def drafter_of(llm: LLM) -> Any:
    found = llm.engine.drafter
    assert isinstance(found, TrainedDrafter)
    return found


def rounded_layers(head: nn.Module) -> list[nn.Module]:
    return [layer for layer in head.modules() if isinstance(layer, ROUNDED)]


@cpu_only("A head in float32 is rounded on a CPU only: a GPU computes with integers in 16 bits.")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("method", [name for name in head_names() if name != "pass"])
def test_each_rounded_head_changes_no_text(method: str, quantization: str) -> None:
    if quantization == "int4" and not _has_native():
        pytest.skip("4 bits need a C++ compiler")
    given = dummy_options(method)
    config = {"method": method, "num_speculative_tokens": 3, **given}
    whole, llm = decoder(narrow(), **config), decoder(narrow(), **config, quantization=quantization)
    drafter = drafter_of(llm)
    assert rounded_layers(drafter._head)
    assert drafter.weight_bytes < drafter_of(whole).weight_bytes
    assert drafter.pass_bytes <= drafter_of(whole).pass_bytes
    made = llm.generate(PROMPTS, greedy(LENGTH))
    assert ids(made) == expected()
    assert sum(one.metrics.num_draft_tokens for one in made)
    assert not rounded_layers(given["model"]), "what is handed over stays as it is"


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_large_heads_are_rounded_by_themselves(
    kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From folders, on a CPU, and unless the kernels that this is for are switched off."""
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=192,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    save_head(_head(TargetShape.of(config, "target")), tmp_path / "head")
    asked = {"method": "eagle3", "model": tmp_path / "head", "check": False}
    prompts = [[1, 2, 3, 4], [5, 6]]
    texts = []
    for quantization in ("auto", None):
        llm = LLM(
            tmp_path / "target",
            dtype="float32",
            device="cpu",
            speculative_config={**asked, "quantization": quantization},
            cpu_kernels=kernels,
            max_model_len=64,
        )
        head = drafter_of(llm)._head
        layers = rounded_layers(head)
        if quantization == "auto" and kernels == "auto" and _has_native():
            assert len(layers) == sum(type(one) is nn.Linear for one in _head().modules())
            assert 3.5 * weight_bytes(head) < weight_bytes(_head())
        else:
            assert not layers
        texts.append(ids(llm.generate(prompts, greedy(LENGTH))))
    assert texts[0] == texts[1]


def _head(shape: TargetShape | None = None) -> Head:
    torch.manual_seed(1)
    return Eagle3(shape or TargetShape(192, 8192, 2, "target"), Eagle3Config(depths=2)).eval()


def _has_native() -> bool:
    from outpace.targets.cpu.native import native

    return native() is not None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"quantization": "int3"},
            "quantization must be 'auto', 'int8', 'int4' or None, not 'int3'",
        ),
        ({"quantization": "int8", "online": {}}, "online and quantization exclude each other"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        decoder(narrow(), method="medusa", **dummy_options("medusa"), **options)


def test_a_head_without_linear_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="'pass' has no linear layers to round: leave quant"):
        decoder(narrow(), method="pass", quantization="int8", **dummy_options("pass"))


def test_other_dtypes_are_refused() -> None:
    given = find_drafter("medusa").dummy_options(LoadedModel(target("llama"), None, "llama"))
    computes = "on a CPU computes in float32" if DEVICE.type == "cpu" else "on a GPU computes in 16"
    with pytest.raises(ConfigError, match=f"{computes}.*, not in float64"):
        decoder(target("llama"), method="medusa", quantization="int8", **given)
