"""What cannot be decoded speculatively is refused by name and with the reason, at load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from outpace.errors import UnsupportedModel
from outpace.targets.hf import support
from outpace.targets.hf.load import Loaded, load
from outpace.targets.hf.runner import Runner

from .families import BASE, build, target

SMALL = {name: value for name, value in BASE.items() if name not in ("num_key_value_heads",)}
RECURRENT = "recurrent state"
CONFIGS: dict[str, tuple[Any, str]] = {
    "mamba": (transformers.MambaConfig, RECURRENT),
    "mamba2": (transformers.Mamba2Config, RECURRENT),
    "falcon_mamba": (transformers.FalconMambaConfig, RECURRENT),
    "rwkv": (transformers.RwkvConfig, RECURRENT),
    "xlstm": (transformers.xLSTMConfig, RECURRENT),
    "recurrent_gemma": (transformers.RecurrentGemmaConfig, RECURRENT),
    "jamba": (transformers.JambaConfig, RECURRENT),
    "qwen3_next": (transformers.Qwen3NextConfig, RECURRENT),
    "lfm2": (
        lambda: transformers.Lfm2Config(layer_types=["conv", "full_attention"] * 16),
        RECURRENT,
    ),
    "bloom": (transformers.BloomConfig, "ALiBi"),
    "mpt": (transformers.MptConfig, "ALiBi"),
    "falcon": (lambda: transformers.FalconConfig(alibi=True), "ALiBi"),
    "t5": (transformers.T5Config, "encoder-decoder"),
    "bart": (transformers.BartConfig, "encoder-decoder"),
    "llama4_text": (transformers.Llama4TextConfig, "chunked_attention"),
    "gpt_neo": (transformers.GPTNeoConfig, "local attention"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_refused_by_name(name: str) -> None:
    config, reason = CONFIGS[name]
    with pytest.raises(UnsupportedModel, match=rf"'{name}'.*{reason}.*: use a"):
        support.check_config(config())


def test_a_class_with_a_state_is_refused_whatever_its_configuration_says() -> None:
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.BambaConfig(
            **{**SMALL, "num_key_value_heads": 2, "attn_layer_indices": [0, 1]},
            mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_expand=2,
        )
    )  # fmt: skip
    with pytest.raises(UnsupportedModel, match=RECURRENT):
        load(model)


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flex_attention"])
def test_attention_without_a_mask_is_refused_with_the_remedy(kernel: str) -> None:
    model = build("llama")
    model.config._attn_implementation_internal = kernel
    with pytest.raises(UnsupportedModel, match=rf"{kernel}.*attn_implementation='sdpa'"):
        support.check(model)


# -- models that ignore silently what they are given -----------------------------------------------


class Ignores(transformers.LlamaForCausalLM):
    """Drops one argument, as many a model file does."""

    dropped = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop(self.dropped, None)
        return super().forward(*args, **kwargs)


class IgnoresMask(Ignores):
    dropped = "attention_mask"


class IgnoresPositions(Ignores):
    dropped = "position_ids"


class IgnoresCache(Ignores):
    dropped = "past_key_values"


class Shifts(transformers.LlamaForCausalLM):
    """Positions of its own: the number of the column."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        kwargs["position_ids"] = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids=input_ids, **kwargs)


@pytest.mark.parametrize("kind", [IgnoresMask, IgnoresPositions, IgnoresCache, Shifts])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_probe_catches_a_model_that_ignores(kind: type, dtype: torch.dtype) -> None:
    if kind is IgnoresPositions and dtype is torch.bfloat16:
        pytest.skip("in a random model this is as small as rounding may be in a large one")
    model = kind(target("llama").config).to(dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6 if weight.dim() > 1 else 1)
    with pytest.raises(UnsupportedModel, match=rf"{kind.__name__} .*cannot be decoded"):
        load(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mixtral"])
def test_the_probe_accepts_narrower_types(family: str, dtype: torch.dtype) -> None:
    support.probe(build(family).to(dtype))


def test_a_model_that_fails_is_refused_with_its_own_words() -> None:
    class Fails(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            assert "past_key_values" not in kwargs, "no caches here"
            return super().forward(*args, **kwargs)

    with pytest.raises(UnsupportedModel, match=r"Fails .*AssertionError: no caches here"):
        load(Fails(target("llama").config))


# -- rotary angles that change with the length of the text -----------------------------------------


def test_longrope_is_decoded_only_as_far_as_its_first_angles_reach() -> None:
    """Its angles switch for the whole batch when the longest row passes the original length."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 24,
    }
    model = build(
        "phi3", rope_parameters=rope, original_max_position_embeddings=24, sliding_window=None
    )
    assert Loaded(model, None, "phi3").max_length == 24
    runner = Runner(model, rows=2, max_length=24)
    runner.admit(2)
    runner.prefill(0, [list(range(20)), [1, 2]])
    # The second row's draft is padding for the first, whose columns then reach beyond the end.
    logits = runner.forward(torch.tensor([[20, 0, 0, 0, 0, 0], [3, 4, 5, 6, 7, 8]]), keep=6).logits
    with torch.inference_mode():
        for row, (ids, column) in enumerate([(list(range(21)), 0), ([1, 2, 3, 4, 5, 6, 7, 8], 5)]):
            alone = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            assert torch.allclose(logits[row, column], alone, atol=1e-6)


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "linear", "llama3"])
def test_other_scaled_angles_do_not_change(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = 64
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = build("llama", rope_parameters=rope)
    support.probe(model)
    assert Loaded(model, None, "llama").max_length == 128
