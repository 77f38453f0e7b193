"""What a file says of positions reaches the model: windows, stretched and partial rotary angles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Olmo3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outpace.errors import ModelLoadError, UnsupportedModel
from outpace.targets.cpu.native_layers.layer import NativeLayer
from outpace.targets.hf.loading.load import load
from targets.gguf.files import tiny, write
from targets.gguf.test_families import IDS
from targets.gguf.tiny_families import YARN

THETA = 10000.0


def agree(path: Path, model: Any) -> bool:
    with torch.no_grad():
        found = load(path, dtype="float64").model(IDS).logits
        return torch.allclose(found, model.double()(IDS).logits, atol=1e-5)


def saying(arch: str, said: dict[str, Any], folder: Path) -> Path:
    """Writes the file of a tiny model that says other values of its architecture."""
    changes = {f"{arch}.{name}": value for name, value in said.items()}
    return write(folder / "model.gguf", arch, tiny(arch), changes=changes)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["linear", "yarn", "old"])
def test_stretched_positions(arch: str, kind: str, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}
    said: dict[str, Any] = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    if kind == "yarn":
        rope |= {"rope_type": "yarn", "original_max_position_embeddings": 32}
        said["rope.scaling.type"] = "yarn"
        said["rope.scaling.original_context_length"] = 32
    if kind == "old":
        said = {"rope.scale_linear": 4.0}
    model = tiny(arch, rope_parameters=rope)
    changes = {f"{arch}.{name}": value for name, value in said.items()}
    path = write(tmp_path / "model.gguf", arch, model, changes=changes)
    assert agree(path, model)
    assert not agree(path, tiny(arch)), "the stretching counts"


def test_gemma_stretches_its_full_layers_only(tmp_path: Path) -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": THETA},
    }
    model = tiny("gemma3", rope_parameters=rope, num_hidden_layers=6)
    said = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    assert agree(write(tmp_path / "model.gguf", "gemma3", model, changes=said), model)


def test_llama_3s_frequencies(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": THETA, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
    }  # fmt: skip
    model = tiny("llama", rope_parameters=rope)
    plain = THETA ** -(torch.arange(0, 16, 2) / 16)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    factors = (plain / stretched).numpy().astype(np.float32)
    assert factors.max() > 2
    tensors = {"rope_freqs.weight": factors}
    path = write(tmp_path / "model.gguf", "llama", model, tensors=tensors)
    assert agree(path, model)
    tensors = {"rope_freqs.weight": factors[:3]}
    with pytest.raises(ModelLoadError, match="of another number than its heads have frequencies"):
        load(write(tmp_path / "short.gguf", "llama", model, tensors=tensors))


def test_phi_3s_factors_for_long_texts(tmp_path: Path) -> None:
    size = 16 // 2
    long, short = np.linspace(1, 4, size), np.linspace(1, 2, size)
    rope = {
        "rope_type": "longrope", "rope_theta": THETA, "original_max_position_embeddings": 64,
        "long_factor": long.tolist(), "short_factor": short.tolist(), "attention_factor": 1.25,
    }  # fmt: skip
    model = tiny("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    said = {
        "phi3.rope.scaling.original_context_length": 64,
        "phi3.rope.scaling.attn_factor": 1.25,
    }
    tensors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    path = write(tmp_path / "model.gguf", "phi3", model, changes=said, tensors=tensors)
    assert agree(path, model)
    assert load(path).max_length == 64


def test_factors_of_a_file_that_does_not_say_where_long_texts_begin(tmp_path: Path) -> None:
    """As of MiniCPM 4: none is longer than all that the model reads."""
    long, short = np.linspace(1, 4, 8), np.linspace(1, 2, 8)
    whole = int(tiny("phi3").config.max_position_embeddings)
    rope = {
        "rope_type": "longrope", "rope_theta": THETA, "original_max_position_embeddings": whole,
        "long_factor": long.tolist(), "short_factor": short.tolist(),
    }  # fmt: skip
    model = tiny("phi3", rope_parameters=rope, original_max_position_embeddings=whole)
    said = {"phi3.rope.scaling.original_context_length": None}
    tensors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    path = write(tmp_path / "model.gguf", "phi3", model, changes=said, tensors=tensors)
    assert agree(path, model)
    assert load(path).max_length == whole


def test_a_gemma_3_without_a_window_has_none(tmp_path: Path) -> None:
    """llama.cpp's converter writes none where each layer sees all."""
    config = {"layer_types": ["full_attention"] * 3, "num_hidden_layers": 3}
    model = tiny("gemma3", **config)
    said = {"gemma3.attention.sliding_window": None}
    assert agree(write(tmp_path / "model.gguf", "gemma3", model, changes=said), model)


@pytest.mark.parametrize(
    ("arch", "name", "reason"),
    [
        ("llama", "rope_factors_long", "one of the two tables that stretch positions"),
        ("llama", "rope_factors_short", "one of the two tables that stretch positions"),
        ("gemma3", "rope_freqs", "Gemma3ForCausalLM has no place: use"),
    ],
)
def test_factors_that_would_have_no_effect_are_refused(
    arch: str, name: str, reason: str, tmp_path: Path
) -> None:
    tensors = {f"{name}.weight": np.full(8, 2.0)}
    path = write(tmp_path / "model.gguf", arch, tiny(arch), tensors=tensors)
    with pytest.raises((ModelLoadError, UnsupportedModel), match=reason):
        load(path)


@pytest.mark.parametrize("arch", ["stablelm", "nemotron"])
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_heads_that_are_turned_in_part(arch: str, share: float, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": share}
    model = tiny(arch, rope_parameters=rope)
    assert agree(write(tmp_path / "model.gguf", arch, model), model)


@pytest.mark.parametrize(
    ("arch", "said", "reason"),
    [
        ("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, "read here .'yarn"),
        ("llama", {"rope.scaling.type": "spiral", "rope.scaling.factor": 2.0}, "here .'spiral"),
        ("llama", {"rope.scaling.type": "longrope"}, "here .'longrope"),
        ("qwen3", {"attention.causal": False}, "reads texts both ways"),
        ("qwen2", {"rope.dimension_count": 8}, "turns 8 of the 16 numbers of a head"),
        ("llama", {"attention.value_length": 8}, "keys of 16 numbers and values of 8"),
        ("llama", {"attention.head_count": [4, 2]}, "another attention.head_count in each layer"),
        ("gemma4", {"expert_count": 4, "expert_used_count": 2}, "a Gemma 4 with experts"),
        ("lfm2moe", {"expert_gating_func": 1}, "weighs its experts in a way that"),
        ("llama", {"attention.scale": 0.5}, "its attention.scale is 0.5, which"),
        ("llama", {"logit_scale": 16.0}, "its logit_scale is 16, which"),
        ("falcon", {"attention.head_count_kv": 2}, "a Falcon with several key heads"),
        ("falcon", {"attention.head_count_kv": [2, 2]}, "a Falcon with several key heads"),
        ("granite", {"rope.scaling.finetuned": False}, "a Granite that does not turn its heads"),
        ("granitehybrid", {"rope.scaling.finetuned": True}, "as Bamba does"),
        ("glm4", {"rope.dimension_sections": [4, 4, 4, 0]}, "a GLM that sees images"),
    ],
)
def test_what_is_not_read_is_refused(
    arch: str, said: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        load(saying(arch, said, tmp_path))


LAYERS = ["sliding_attention", "full_attention", "full_attention"]


@pytest.mark.parametrize("arch", ["cohere2", "exaone4", "olmo2"])
@pytest.mark.parametrize("said", [[True, False, False], 2, None])
def test_which_layers_have_a_window(arch: str, said: Any, tmp_path: Path) -> None:
    types = LAYERS if isinstance(said, list) else [LAYERS[0], LAYERS[1], LAYERS[0]]
    types = types if said is not None else [LAYERS[0]] * 3  # each fourth sees all
    config = {"layer_types": types, "num_hidden_layers": 3, "sliding_window": 3}
    model = tiny(arch, **config) if arch != "olmo2" else olmo3(config)
    name = f"{arch}.attention.sliding_window"
    changes = {name: 3, f"{name}_pattern": said}
    path = write(tmp_path / "model.gguf", arch, model, changes=changes)
    assert agree(path, model)
    changes = {name: 30, f"{name}_pattern": said}
    assert not agree(write(tmp_path / "wide.gguf", arch, model, changes=changes), model)


def olmo3(config: dict[str, Any]) -> Any:
    """OLMo 3 is an OLMo 2 with windows, and llama.cpp calls it so."""
    base = tiny("olmo2").config.to_dict()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    more = {name: base[name] for name in (*kept, "num_key_value_heads", "max_position_embeddings")}
    torch.manual_seed(1)
    made: Any = AutoModelForCausalLM.from_config(Olmo3Config(**more, **config))
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2)
    return made.eval()


@pytest.mark.parametrize(
    ("arch", "said", "reason"),
    [
        ("exaone4", {"attention.sliding_window_pattern": [True]}, "says of 1 layers whether they"),
        ("exaone4", {"block_count": 1 << 31}, "says that it has 2147483648 layers, and holds 2"),
        ("smollm3", {"block_count": 1 << 31}, "says that it has 2147483648 layers, and holds 4"),
        ("gemma4", {"feed_forward_length": [96]}, "what the feed_forward_length of each layer"),
        ("gemma4", {"attention.key_length_swa": None}, "what its attention.key_length_swa is"),
        ("minicpm", {"residual_scale": None}, "does not say what its residual_scale is"),
        ("qwen35", {"ssm.group_count": None}, "does not say what its ssm.group_count is"),
        ("cohere2", {"logit_scale": None}, "does not say what its logit_scale is"),
    ],
)
def test_values_of_families_that_do_not_fit(
    arch: str, said: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        load(saying(arch, said, tmp_path))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_queries_that_grow_far_behind_a_trial_are_not_computed_by_us(
    kind: str, tmp_path: Path
) -> None:
    rope = {**YARN, "original_max_position_embeddings": 40}
    path = write(tmp_path / "model.gguf", "mistral3", tiny("mistral3", rope_parameters=rope), kind)
    loaded: Any = load(path)
    assert not any(isinstance(each.forward, NativeLayer) for each in loaded.model.model.layers)


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = tiny("qwen35")
    more = {
        "blk.2.nextn.eh_proj.weight": np.zeros((64, 128)),
        "blk.2.attn_norm.weight": np.ones(64),
    }
    changes = {
        "qwen35.block_count": 3,
        "qwen35.nextn_predict_layers": 1,
        "qwen35.attention.recurrent_layers": [True, False, False],
    }
    path = write(tmp_path / "model.gguf", "qwen35", model, changes=changes, tensors=more)
    assert agree(path, model)


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ({"yarn_beta_fast": 24.0, "yarn_beta_slow": 2.0}, True),
        ({"yarn_attn_factor": 1.1386294}, True),  # 0.1 * log(4) + 1: the usual one
        ({"yarn_attn_factor": 1.2}, False),
        ({"yarn_log_multiplier": 1.0}, False),
    ],
)
def test_options_of_yarn(said: dict[str, Any], read: bool, tmp_path: Path) -> None:
    betas = {name[5:]: value for name, value in said.items() if "beta" in name}
    rope = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, **betas}
    model = tiny("llama", rope_parameters={**rope, "original_max_position_embeddings": 32})
    told = {"type": "yarn", "factor": 4.0, "original_context_length": 32, **said}
    changes = {f"llama.rope.scaling.{name}": value for name, value in told.items()}
    path = write(tmp_path / "model.gguf", "llama", model, changes=changes)
    if read:
        assert agree(path, model)
        return
    with pytest.raises(UnsupportedModel, match=next(iter(said))):
        load(path)


@pytest.mark.parametrize(
    "said",
    [{"attention.scale": 0.25}, {"attention.scale": 0.0}, {"logit_scale": 1.0}],  # 16 ** -0.5
)
def test_factors_that_change_nothing_are_taken(said: dict[str, Any], tmp_path: Path) -> None:
    model, changes = tiny("llama"), {f"llama.{name}": value for name, value in said.items()}
    assert agree(write(tmp_path / "model.gguf", "llama", model, changes=changes), model)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"block_count": 3}, "says that it has 3 layers, and holds 2"),
        ({"block_count": None}, "does not say what its block_count is"),
        ({"embedding_length": 32}, "has the shape .* calls for"),
        ({"attention.head_count": 5}, "no model that there can be .*number of attention heads"),
        ({"attention.head_count": 0}, "no model that there can be"),
        (
            {"attention.key_length": 1 << 31, "attention.value_length": 1 << 31},
            "has the shape .* calls for",
        ),
        ({"feed_forward_length": 64}, "has the shape .* calls for"),
        ({"attention.layer_norm_rms_epsilon": None}, "does not say what its .*epsilon is"),
        ({"embedding_length": "wide"}, "says that its embedding_length is 'wide', not a number"),
    ],
)
def test_values_that_do_not_fit(said: dict[str, Any], reason: str, tmp_path: Path) -> None:
    changes = {f"llama.{name}": value for name, value in said.items()}
    path = write(tmp_path / "model.gguf", "llama", tiny("llama"), changes=changes)
    with pytest.raises((ModelLoadError, UnsupportedModel), match=reason):
        load(path)
