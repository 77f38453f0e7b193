"""Published formats of heads. The files are made here, from the formats' public descriptions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.base import TargetShape
from outpace.heads.checkpoint import fit, load_head, save_head
from outpace.heads.dflash import DFlash, DFlashConfig
from outpace.heads.eagle3 import Eagle3, Eagle3Config
from outpace.heads.hydra import Hydra, HydraConfig

SIZE, VOCABULARY, OWN = 8, 20, 6
TOKENS = [3, 4, 7, 11, 12, 19]
TARGET = TargetShape(hidden_size=SIZE, vocab_size=VOCABULARY, layers=12, name="tiny")
Weights = dict[str, Tensor]
Change = Callable[[dict[str, Any], Weights], object]

EAGLE3_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": SIZE,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": OWN,
    "torch_dtype": "bfloat16",
}


def drawn(shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    torch.manual_seed(0)
    return {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def eagle3(folder: Path, change: Change = lambda about, weights: None) -> Weights:
    about = dict(EAGLE3_CONFIG)
    layer, half = "midlayer.", SIZE // 2
    weights = drawn(
        {
            "fc.weight": (SIZE, 3 * SIZE),
            layer + "hidden_norm.weight": (SIZE,),
            layer + "input_layernorm.weight": (SIZE,),
            layer + "post_attention_layernorm.weight": (SIZE,),
            layer + "self_attn.q_proj.weight": (SIZE, 2 * SIZE),
            layer + "self_attn.k_proj.weight": (half, 2 * SIZE),
            layer + "self_attn.v_proj.weight": (half, 2 * SIZE),
            layer + "self_attn.o_proj.weight": (SIZE, SIZE),
            layer + "mlp.gate_proj.weight": (24, SIZE),
            layer + "mlp.up_proj.weight": (24, SIZE),
            layer + "mlp.down_proj.weight": (SIZE, 24),
            "norm.weight": (SIZE,),
            "lm_head.weight": (OWN, SIZE),
        }
    )
    weights["d2t"] = torch.tensor(TOKENS) - torch.arange(OWN)
    weights["t2d"] = torch.tensor([token in TOKENS for token in range(VOCABULARY)])
    change(about, weights)
    return put(folder, about, weights, "model.safetensors")


EAGLE_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bias": True,
    **{name: EAGLE3_CONFIG[name] for name in ("hidden_size", "intermediate_size", "vocab_size")},
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
}


def eagle(folder: Path, change: Change = lambda about, weights: None) -> Weights:
    about = dict(EAGLE_CONFIG)
    layer, half = "layers.0.", SIZE // 2
    weights = drawn(
        {
            "embed_tokens.weight": (VOCABULARY, SIZE),
            "fc.weight": (SIZE, 2 * SIZE),
            "fc.bias": (SIZE,),
            layer + "post_attention_layernorm.weight": (SIZE,),
            layer + "self_attn.q_proj.weight": (SIZE, SIZE),
            layer + "self_attn.k_proj.weight": (half, SIZE),
            layer + "self_attn.v_proj.weight": (half, SIZE),
            layer + "self_attn.o_proj.weight": (SIZE, SIZE),
            layer + "mlp.gate_proj.weight": (24, SIZE),
            layer + "mlp.up_proj.weight": (24, SIZE),
            layer + "mlp.down_proj.weight": (SIZE, 24),
        }
    )
    change(about, weights)
    return put(folder, about, weights, "model.safetensors")


DFLASH_CONFIG = {
    **{name: EAGLE_CONFIG[name] for name in ("hidden_size", "intermediate_size", "vocab_size")},
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "layer_types": ["full_attention"] * 2,
    "torch_dtype": "bfloat16",
    "block_size": 4,
    "num_target_layers": 12,
    "dflash_config": {"mask_token_id": 17, "target_layer_ids": [1, 5, 11]},
}


def dflash(folder: Path, change: Change = lambda about, weights: None) -> Weights:
    about = {**DFLASH_CONFIG, "dflash_config": dict(DFLASH_CONFIG["dflash_config"])}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (SIZE, 3 * SIZE),
        "hidden_norm.weight": (SIZE,),
        "norm.weight": (SIZE,),
    }
    for layer in ("layers.0.", "layers.1."):
        shapes |= {
            layer + "input_layernorm.weight": (SIZE,),
            layer + "post_attention_layernorm.weight": (SIZE,),
            layer + "self_attn.q_norm.weight": (6,),
            layer + "self_attn.k_norm.weight": (6,),
            layer + "self_attn.q_proj.weight": (12, SIZE),
            layer + "self_attn.k_proj.weight": (6, SIZE),
            layer + "self_attn.v_proj.weight": (6, SIZE),
            layer + "self_attn.o_proj.weight": (SIZE, 12),
            layer + "mlp.gate_proj.weight": (24, SIZE),
            layer + "mlp.up_proj.weight": (24, SIZE),
            layer + "mlp.down_proj.weight": (SIZE, 24),
        }
    weights = drawn(shapes)
    change(about, weights)
    return put(folder, about, weights, "model.safetensors")


def medusa(folder: Path, change: Change = lambda about, weights: None) -> Weights:
    about = {
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "base_model_name_or_path": "a/model",
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(3):  # one more than the configuration says, as in some published files
        shapes[f"{head}.0.linear.weight"] = (SIZE, SIZE)
        shapes[f"{head}.0.linear.bias"] = (SIZE,)
        shapes[f"{head}.1.weight"] = (VOCABULARY, SIZE)
    weights = drawn(shapes)
    change(about, weights)
    return put(folder, about, weights, "medusa_lm_head.safetensors")


def put(folder: Path, about: Mapping[str, Any], weights: Weights, file: str) -> Weights:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about))
    save_file(weights, folder / file)
    return weights


MAKERS = {"eagle": eagle, "eagle3": eagle3, "dflash": dflash, "medusa": medusa}
FILES = {name: "model.safetensors" for name in MAKERS} | {"medusa": "medusa_lm_head.safetensors"}


@pytest.mark.parametrize("form", MAKERS)
def test_weights_come_back_bit_by_bit_through_our_own_format(form: str, tmp_path: Path) -> None:
    given = MAKERS[form](tmp_path / "public")
    save_head(load_head(tmp_path / "public"), tmp_path / "own")
    save_head(load_head(tmp_path / "own"), tmp_path / "again", form)
    found = load_file(tmp_path / "again" / FILES[form])
    assert set(found) == set(given)
    for name, value in given.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def test_a_configuration_says_the_same_again(tmp_path: Path) -> None:
    eagle3(
        tmp_path / "public",
        say(eagle_aux_hidden_state_layer_ids=[1, 5, 8]),
    )
    save_head(load_head(tmp_path / "public"), tmp_path / "again", "eagle3")
    about = json.loads((tmp_path / "again" / "config.json").read_text())
    wanted = {**EAGLE3_CONFIG, "eagle_aux_hidden_state_layer_ids": [1, 5, 8], "head_dim": 4}
    assert {name: about.get(name) for name in wanted} == wanted


def test_what_an_eagle3_head_is_made_of(tmp_path: Path) -> None:
    eagle3(tmp_path)
    head = load_head(tmp_path)
    assert isinstance(head, Eagle3)
    assert head.d2t.tolist() == TOKENS
    fit(head, TARGET, "the head")
    assert head.layers == (2, 6, 9)
    attention = head.midlayer.self_attn
    assert (attention.heads, attention.groups, attention.base) == (2, 1, 500000.0)


def biased(about: dict[str, Any], weights: Weights) -> None:
    about["architectures"] = ["Qwen2ForCausalLM"]
    for name in ("q", "k", "v"):
        rows = len(weights[f"layers.0.self_attn.{name}_proj.weight"])
        weights[f"layers.0.self_attn.{name}_proj.bias"] = torch.ones(rows, dtype=torch.bfloat16)


def bare(about: dict[str, Any], weights: Weights) -> None:
    about["bias"] = False
    del weights["fc.bias"], weights["embed_tokens.weight"]


def normed(about: dict[str, Any], weights: Weights) -> None:
    weights["layers.0.input_layernorm.weight"] = torch.ones(SIZE, dtype=torch.bfloat16)
    weights["lm_head.weight"] = torch.zeros(VOCABULARY, SIZE, dtype=torch.bfloat16)


@pytest.mark.parametrize("change", [biased, bare, normed])
def test_the_weights_say_which_parts_an_eagle_head_has(change: Change, tmp_path: Path) -> None:
    given = eagle(tmp_path / "public", change)
    save_head(load_head(tmp_path / "public"), tmp_path / "again", "eagle")
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert set(found) == set(given)
    head = load_head(tmp_path / "again")
    assert (head.kind, head.config.depths) == ("eagle", 5)


def test_what_a_dflash_head_is_made_of(tmp_path: Path) -> None:
    dflash(tmp_path / "public")
    head = load_head(tmp_path / "public")
    assert (head.kind, head.config.depths, head.layers) == ("dflash", 3, (2, 6, 12))
    fit(head, TARGET, "the head")
    with pytest.raises(ConfigError, match="its layers is 12, and this target's is 13"):
        fit(head, TargetShape(SIZE, VOCABULARY, 13), "the head")
    save_head(head, tmp_path / "again", "dflash")
    about = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {name: about.get(name) for name in DFLASH_CONFIG} == DFLASH_CONFIG
    dflash(tmp_path / "old", say(dflash_config={"mask_token_id": 17, "block_size": 4}))
    with pytest.raises(ModelLoadError, match=r"size mismatch for fc\.weight"):
        load_head(tmp_path / "old")  # two layers of its own read two of the target's, if unsaid


def test_masks_of_their_own_have_no_place_in_a_dflash_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--set own_mask=false"):
        save_head(DFlash(TARGET, DFlashConfig()), tmp_path, "dflash")


def test_a_head_that_knows_all_tokens_has_no_maps(tmp_path: Path) -> None:
    def whole(about: dict[str, Any], weights: Weights) -> None:
        del about["draft_vocab_size"], weights["d2t"], weights["t2d"]
        weights["lm_head.weight"] = torch.zeros(VOCABULARY, SIZE, dtype=torch.bfloat16)

    given = eagle3(tmp_path / "public", whole)
    save_head(load_head(tmp_path / "public"), tmp_path / "again", "eagle3")
    assert set(load_file(tmp_path / "again" / "model.safetensors")) == set(given)


def test_medusa_heads_are_those_of_the_file(tmp_path: Path) -> None:
    given = medusa(tmp_path)
    head = load_head(tmp_path)
    assert (head.kind, head.config.depths, head.target.name) == ("medusa", 3, "a/model")
    torch.save(given, tmp_path / "medusa_lm_head.pt")
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    again = load_head(tmp_path)
    assert torch.equal(again.get_parameter("outputs.2.weight"), given["2.1.weight"])


def drop(name: str) -> Change:
    return lambda about, weights: weights.pop(name)


def say(**more: object) -> Change:
    return lambda about, weights: about.update(more)


def give(name: str, value: Tensor) -> Change:
    return lambda about, weights: weights.update({name: value})


@pytest.mark.parametrize(
    ("form", "change", "sentence"),
    [
        ("eagle3", drop("fc.weight"), "damaged, or not those .*fc.weight"),
        ("eagle3", give("fc.weight", torch.zeros(SIZE, SIZE)), "size mismatch for fc.weight"),
        ("eagle3", give("fc.bias", torch.zeros(SIZE)), "fc.bias"),
        ("eagle3", say(num_hidden_layers=2), "num_hidden_layers is 2, and only 1"),
        ("eagle3", say(rope_scaling={"type": "yarn"}), "rope_scaling is"),
        ("eagle3", say(rope_parameters={"rope_type": "yarn"}), "rope is"),
        ("eagle3", say(target_hidden_size=16), "width is not its target's"),
        ("eagle3", say(draft_vocab_size=7), "d2t has 6 entries, not 7"),
        ("eagle3", say(num_key_value_heads=3), "do not fit"),
        ("eagle3", say(hidden_size="8"), "does not describe a head of the kind .eagle3."),
        ("eagle3", give("d2t", torch.full((OWN,), VOCABULARY)), "does not lead to 6 of the 20"),
        ("eagle3", give("t2d", torch.ones(VOCABULARY, dtype=torch.bool)), "d2t and t2d disagree"),
        ("eagle", drop("fc.weight"), "damaged, or not those .*fc.weight"),
        ("eagle", give("fc.weight", torch.zeros(SIZE, SIZE)), "size mismatch for fc.weight"),
        ("eagle", say(rope_scaling={"type": "linear"}), "rope_scaling is"),
        ("eagle", say(num_hidden_layers=2), "no trained head"),
        ("eagle", say(num_key_value_heads=3), "do not fit"),
        ("dflash", drop("norm.weight"), "damaged, or not those .*norm.weight"),
        ("dflash", say(sliding_window=8, layer_types=["sliding_attention"] * 2), "'sliding_att"),
        ("dflash", say(block_size=None), "no block_size"),
        ("dflash", say(dflash_config={"mask_token_id": 20}), "mask_token is 20 of 20 tokens"),
        ("dflash", say(dflash_config={"mask_token_id": 1}, num_target_layers=0), "it says neither"),
        ("medusa", say(medusa_num_heads=4), r"3 whole heads of 1 block\(s\), not 4"),
        ("medusa", say(medusa_num_heads="two"), "no whole numbers"),
        ("medusa", drop("0.0.linear.bias"), "damaged, or not those .*blocks.0.0.linear.bias"),
        ("medusa", give("1.1.weight", torch.zeros(VOCABULARY, 9)), "size mismatch"),
        ("medusa", give("strange", torch.zeros(1)), "3 whole heads"),
    ],
)
def test_a_head_of_another_make_is_refused(
    form: str, change: Change, sentence: str, tmp_path: Path
) -> None:
    MAKERS[form](tmp_path, change)
    with pytest.raises(ModelLoadError, match=sentence):
        load_head(tmp_path)


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    eagle3(tmp_path, say(eagle_aux_hidden_state_layer_ids=[1, 5, 80]))
    head = load_head(tmp_path)
    with pytest.raises(ConfigError, match="reads layer 80, and this target has 12"):
        fit(head, TARGET, "the head")
    with pytest.raises(ConfigError, match="its vocab_size is 20, and this target's is 21"):
        fit(head, TargetShape(SIZE, 21, 12), "the head")


def test_a_format_refuses_what_it_has_no_words_for(tmp_path: Path) -> None:
    hydra = Hydra(TARGET, HydraConfig())
    for form in MAKERS:
        with pytest.raises(ConfigError, match="holds no hydra heads"):
            save_head(hydra, tmp_path, form)
    with pytest.raises(ConfigError, match="unknown format 'eagle9'"):
        save_head(Eagle3(TARGET, Eagle3Config()), tmp_path, "eagle9")
    assert not list(tmp_path.iterdir())
