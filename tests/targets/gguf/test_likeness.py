"""How drafts are scored is tried on a small model of the same kind, once and exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from outpace.errors import UnsupportedModel
from outpace.targets.hf import trials
from outpace.targets.hf.gguf.building import small_config, tiny_model_of
from outpace.targets.hf.loading.load import load
from targets.gguf.files import tiny, write
from targets.gguf.tiny_families import FAMILIES


@pytest.mark.parametrize("arch", FAMILIES)
def test_it_is_small_and_of_the_same_kind(arch: str) -> None:
    model = tiny(arch, num_hidden_layers=12)
    config, small = model.config, small_config(model.config)
    assert type(small) is type(config)
    few = 4 if arch == "gemma4" else 2  # half of its layers take the keys of others
    assert small.num_hidden_layers == few < config.num_hidden_layers
    if hasattr(config, "num_attention_heads"):
        assert small.hidden_size // small.num_attention_heads == (
            config.hidden_size // config.num_attention_heads
        )
    types = getattr(config, "layer_types", None)
    assert types is None or set(small.layer_types) == set(types)
    large, less = config.to_dict(), small.to_dict()
    for name in ("rope_parameters", "sliding_window", "head_dim"):
        if name in large:
            assert less[name] == large[name]
    attention = "eager" if arch == "gemma2" else None
    before = torch.get_rng_state()
    trials.probe(tiny_model_of(config, torch.float32, attention))
    assert torch.equal(torch.get_rng_state(), before)


def test_heads_need_not_divide_the_hidden_size() -> None:
    """GLM 4.7 Flash has 20 heads and 2048 numbers."""
    config = tiny("deepseek2").config
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads = 408, 20, 20
    assert small_config(config).hidden_size == 32
    trials.probe(tiny_model_of(config, torch.float32, None))


def test_packed_models_are_tried_on_it_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "model.gguf", "llama", tiny("llama"), "Q8_0")
    tried: list[Any] = []
    monkeypatch.setattr(trials, "probe", lambda model, **_: tried.append(model))
    loaded = load(path, cpu_kernels="off")
    assert [model.config.vocab_size for model in tried] == [64]
    assert loaded.config.vocab_size != 64


def test_a_model_that_ignores_its_mask_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "model.gguf", "llama", tiny("llama"), "Q8_0")
    forward = modeling_llama.LlamaAttention.forward

    def blind(self: Any, *args: Any, attention_mask: Any = None, **more: Any) -> Any:
        return forward(self, *args, attention_mask=None, **more)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", blind)
    with pytest.raises(UnsupportedModel, match="ignores the attention mask"):
        load(path)


def test_weights_that_are_no_numbers_are_found(tmp_path: Path) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    path = write(tmp_path / "model.gguf", "llama", model, "Q8_0")
    with pytest.raises(UnsupportedModel, match="NaN or infinite logits"):
        load(path)
