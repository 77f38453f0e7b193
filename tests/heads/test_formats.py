"""Published formats of heads. The files are made here, from the formats' public descriptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.published import (
    DFLASH_CONFIG,
    EAGLE3_CONFIG,
    FILES,
    LIBRARY,
    MAKERS,
    OWN,
    SIZE,
    TARGET,
    TOKENS,
    VOCABULARY,
    Change,
    Weights,
    dflash,
    domino,
    eagle,
    eagle3,
    medusa,
    mlp_speculator,
)
from heads.variants import both, drop, say
from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.base import TargetShape
from outpace.heads.checkpoint import check_fits_target, load_head, load_head_unchecked, save_head
from outpace.inspection import inspect
from outpace.methods.heads.dflash import DFlash, DFlashConfig
from outpace.methods.heads.eagle import Eagle, EagleConfig
from outpace.methods.heads.eagle3 import Eagle3, Eagle3Config
from outpace.methods.heads.hydra import Hydra, HydraConfig
from outpace.methods.heads.medusa import Medusa, MedusaConfig
from outpace.methods.heads.mlp_speculator import MlpSpeculator, MlpSpeculatorConfig
from outpace.methods.heads.speculators import DEFAULTS


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


@pytest.mark.parametrize("kind", LIBRARY)
def test_folders_of_the_library_come_back_bit_by_bit(kind: str, tmp_path: Path) -> None:
    given = LIBRARY[kind](tmp_path / "public")
    save_head(load_head(tmp_path / "public"), tmp_path / "own")
    head = load_head(tmp_path / "own")
    assert (head.kind, head.config.depths, head.target.name) == (kind, 3, "a/model")
    save_head(head, tmp_path / "again", "speculators")
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert set(found) == set(given)
    assert all(torch.equal(found[name], value) for name, value in given.items())
    about, again = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("public", "again")
    )
    for name in ("speculators_model_type", "draft_vocab_size", "norm_before_residual"):
        assert again.get(name) == about.get(name)
    layer, layer_again = (each["transformer_layer_config"] for each in (about, again))
    for name in ("hidden_size", "num_key_value_heads", "vocab_size", "rms_norm_eps"):
        assert layer_again[name] == layer[name]


def test_what_a_layer_of_the_library_leaves_out_is_the_default_of_transformers() -> None:
    from transformers import AutoConfig

    for kind, defaults in DEFAULTS.items():
        config = AutoConfig.for_model(kind)
        assert {name: getattr(config, name) for name in defaults} == defaults


def test_a_speculator_normalises_as_published_ones_do(tmp_path: Path) -> None:
    given = {name: value.float() for name, value in mlp_speculator(tmp_path).items()}
    head = load_head(tmp_path).float()

    def unit(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    state, token = torch.randn(1, 1, SIZE), torch.tensor([[5]])
    shares = 0.5 ** (0.5 / 3)
    x = unit(state) / 2**0.5 @ given["speculator.proj.0.weight"].T
    more = ((1 - shares**2) * 6 / 2) ** 0.5 / shares
    x = x + more * given["speculator.emb.0.weight"][token]
    x = given["speculator.ln.0.weight"] * unit(x) + given["speculator.ln.0.bias"]
    wanted = torch.nn.functional.gelu(x) @ given["speculator.head.0.weight"].T
    assert torch.allclose(head.step(state, token, 1, None)[0], wanted, atol=1e-5)


def test_copies_of_tied_weights_are_left_out(tmp_path: Path) -> None:
    def copied(about: dict[str, Any], weights: Weights) -> None:
        for name in ("emb", "head"):
            for at in (1, 2):
                weights[f"speculator.{name}.{at}.weight"] = weights[
                    f"speculator.{name}.0.weight"
                ].clone()

    mlp_speculator(tmp_path / "copies", copied)
    mlp_speculator(tmp_path / "once")
    copies, once = load_head(tmp_path / "copies"), load_head(tmp_path / "once")
    for name, value in once.state_dict().items():
        assert torch.equal(value, copies.state_dict()[name])


def test_a_configuration_says_the_same_again(tmp_path: Path) -> None:
    eagle3(
        tmp_path / "public",
        say(eagle_aux_hidden_state_layer_ids=[2, 5, 8]),
    )
    save_head(load_head(tmp_path / "public"), tmp_path / "again", "eagle3")
    about = json.loads((tmp_path / "again" / "config.json").read_text())
    wanted = {**EAGLE3_CONFIG, "eagle_aux_hidden_state_layer_ids": [2, 5, 8], "head_dim": 4}
    assert {name: about.get(name) for name in wanted} == wanted


def test_what_an_eagle3_head_is_made_of(tmp_path: Path) -> None:
    eagle3(tmp_path)
    head = load_head(tmp_path)
    assert isinstance(head, Eagle3)
    assert head.d2t.tolist() == TOKENS
    check_fits_target(head, TARGET, "the head")
    assert head.hidden_layers == (2, 6, 9)
    attention = head.midlayer.self_attn
    assert (attention.heads, attention.groups) == (2, 1)
    assert head.config.rope == {"rope_type": "default", "rope_theta": 500000.0}


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


def tied(about: dict[str, Any], weights: Weights) -> None:
    about["tie_word_embeddings"] = True  # copied from the target


@pytest.mark.parametrize("change", [biased, bare, normed, tied])
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
    assert (head.kind, head.config.depths, head.hidden_layers) == ("dflash", 3, (2, 6, 12))
    check_fits_target(head, TARGET, "the head")
    with pytest.raises(ConfigError, match="its layers is 12, and this target's is 13"):
        check_fits_target(head, TargetShape(SIZE, VOCABULARY, 13), "the head")
    save_head(head, tmp_path / "again", "dflash")
    about = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {name: about.get(name) for name in DFLASH_CONFIG} == DFLASH_CONFIG
    dflash(tmp_path / "old", say(dflash_config={"mask_token_id": 17, "block_size": 4}))
    with pytest.raises(ModelLoadError, match=r"size mismatch for fc\.weight"):
        load_head(tmp_path / "old")  # two layers of its own read two of the target's, if unsaid


@pytest.mark.parametrize("form", ["dflash", "speculators"])
def test_masks_of_their_own_have_no_place_in_public_folders(form: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"'{form}' .*--set own_mask=false"):
        save_head(DFlash(TARGET, DFlashConfig()), tmp_path, form)


def test_windows_of_several_widths_have_no_place_in_a_dflash_folder(tmp_path: Path) -> None:
    config = DFlashConfig(layers=2, own_mask=False, mask_token=1, windows=[4, 8])
    with pytest.raises(ConfigError, match=r"one window for all layers, and this head has \[4, 8\]"):
        save_head(DFlash(TARGET, config), tmp_path, "dflash")


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


def give(name: str, value: Tensor) -> Change:
    return lambda about, weights: weights.update({name: value})


@pytest.mark.parametrize(
    ("form", "change", "sentence"),
    [
        ("eagle3", drop("fc.weight"), "damaged, or not those .*fc.weight"),
        ("eagle3", give("fc.weight", torch.zeros(9, 3 * SIZE)), "size mismatch for fc.weight"),
        ("eagle3", give("fc_norm.bias", torch.zeros(SIZE)), "fc_norm.bias"),
        ("eagle3", give("norm.weight", torch.full((SIZE,), torch.inf)), "norm.weight holds .* not"),
        ("eagle3", say(rope_scaling={"type": "yarn"}), "type 'yarn' lack an entry .*factor"),
        ("eagle3", say(rope_parameters={"rope_type": "yarn"}), "type 'yarn' lack an entry"),
        ("eagle3", say(draft_vocab_size=7), "d2t has 6 entries, not 7"),
        ("eagle3", say(num_key_value_heads=3), "do not fit"),
        ("eagle3", say(hidden_size="8"), "does not describe a head of the kind .eagle3."),
        ("eagle3", say(hidden_size=-8), "does not describe a head of the kind .eagle3."),
        ("eagle3", say(rope_parameters=5), "does not describe a head of the kind .eagle3."),
        ("eagle3", say(architectures=5), "no trained head"),
        ("eagle3", say(vocab_size=None), "does not describe a head"),
        ("eagle3", give("d2t", torch.full((OWN,), VOCABULARY)), "does not lead to 6 of the 20"),
        ("eagle3", give("t2d", torch.ones(VOCABULARY, dtype=torch.bool)), "d2t and t2d disagree"),
        ("eagle", drop("fc.weight"), "damaged, or not those .*fc.weight"),
        ("eagle", give("fc.weight", torch.zeros(SIZE, SIZE)), "size mismatch for fc.weight"),
        ("eagle", say(rope_scaling={"type": "linear"}), "type 'linear' lack an entry .*factor"),
        ("eagle", say(rope_scaling={"type": "longrope"}), "rope_type is 'longrope', and only"),
        ("eagle", say(num_hidden_layers=2), "no trained head"),
        ("eagle", both(normed, tied), "tie_word_embeddings is True"),
        ("eagle", say(architectures=[["LlamaForCausalLM"]]), "no trained head"),
        ("eagle", say(num_key_value_heads=3), "do not fit"),
        ("dflash", drop("norm.weight"), "damaged, or not those .*norm.weight"),
        ("dflash", say(layer_types=["sliding_attention"] * 2), "and no sliding_window is used"),
        ("dflash", say(layer_types=["chunked_attention"] * 2), "'chunked_attention', and only"),
        ("dflash", say(use_sliding_window=True, layer_types=None), "and it has no layer_types"),
        ("dflash", give("lm_head.weight", torch.zeros(OWN, SIZE)), "scores 6 of 20 tokens, and"),
        ("dflash", say(projector_type="domino"), "'dspark' .it has no entry 'emb_dim'"),
        ("dflash", say(architectures=["DominoDraftModel"]), "no entry 'emb_dim'"),
        ("dflash", say(architectures=["JetSpecDraftModel"]), "architecture is .*JetSpecDraftModel"),
        ("dflash", say(input_embedding_scale=-1.0), "input_embedding_scale is -1.0"),
        ("dflash", say(output_multiplier=2.0), "output_multiplier is 2.0"),
        ("dflash", say(pure_draft_prefix_len=1), "pure_draft_prefix_len is 1"),
        ("dflash", say(target_hidden_size=16), "width is not its target's"),
        ("dflash", say(block_size=None), "no block_size"),
        ("dflash", say(dflash_config={"mask_token_id": 20}), "mask_token is 20 of 20 tokens"),
        ("dflash", say(dflash_config={"mask_token_id": 1}, num_target_layers=0), "it says neither"),
        ("dflash", say(dflash_config=5), "does not describe a head of the kind .dflash."),
        ("mlp_speculator", drop("speculator.ln.0.bias"), "damaged, or not those .*ln.0.bias"),
        ("mlp_speculator", say(n_predict="3"), "does not describe a head"),
        ("mlp_speculator", say(n_predict=0), "depths is 0"),
        ("mlp_speculator", lambda about, weights: about.pop("emb_dim"), "no entry 'emb_dim'"),
        ("mlp_speculator", give("speculator.head.1.weight", torch.zeros(1)), "weights are tied"),
        ("medusa", say(medusa_num_heads=4), r"3 whole heads of 1 block\(s\), not 4"),
        ("medusa", say(medusa_num_heads="two"), "no whole numbers"),
        ("medusa", drop("0.0.linear.bias"), "damaged, or not those .*blocks.0.0.linear.bias"),
        ("medusa", give("1.1.weight", torch.zeros(VOCABULARY, 9)), "size mismatch"),
        ("medusa", give("strange", torch.zeros(1)), "3 whole heads"),
        ("medusa", give("0.1.weight", torch.zeros(4)), "does not describe a head"),
    ],
)
def test_a_head_of_another_make_is_refused(
    form: str, change: Change, sentence: str, tmp_path: Path
) -> None:
    MAKERS[form](tmp_path, change)
    with pytest.raises(ModelLoadError, match=sentence):
        load_head(tmp_path)


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        ("eagle3", say(norm_before_fc=True), "input_norm.weight"),
        ("eagle3", say(speculators_model_type="mtp"), "which --method mtp reads with the target"),
        ("eagle3", say(speculators_model_type="dfly"), "its kind is 'dfly'"),
        ("eagle3", say(speculators_model_type=["eagle3"]), "its kind is"),
        ("eagle3", say(speculators_config={}), "does not describe a head of the kind 'eagle3'"),
        ("eagle3", say(transformer_layer_config={"model_type": "phi"}), "of the type 'phi'"),
        ("eagle", say(layernorms=True), "layernorms is True"),
        ("eagle", drop("transformer.mlp.up_proj.weight"), "damaged, or not those"),
    ],
)
def test_a_folder_of_the_library_of_another_make_is_refused(
    kind: str, change: Change, sentence: str, tmp_path: Path
) -> None:
    LIBRARY[kind](tmp_path, change)
    with pytest.raises(ModelLoadError, match=sentence):
        load_head(tmp_path)


@pytest.mark.parametrize("content", [b"hello", b"", b"PK\x03\x04", b"cos\nsystem\n(S'x'\ntR."])
def test_a_file_that_is_no_file_of_weights_is_refused(content: bytes, tmp_path: Path) -> None:
    medusa(tmp_path)
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    (tmp_path / "medusa_lm_head.pt").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"medusa_lm_head\.pt are damaged"):
        load_head(tmp_path)


@pytest.mark.parametrize("form", [*MAKERS, "domino", *(f"speculators {kind}" for kind in LIBRARY)])
def test_files_that_are_cut_short_get_a_sentence(form: str, tmp_path: Path) -> None:
    """Also from those who look at a folder without reading its weights."""
    makers = {f"speculators {kind}": make for kind, make in LIBRARY.items()}
    {**MAKERS, "domino": domino, **makers}[form](tmp_path)
    file, config = tmp_path / FILES.get(form, "model.safetensors"), tmp_path / "config.json"
    whole, about = file.read_bytes(), config.read_bytes()
    for length in (0, 7, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        for look in (load_head, load_head_unchecked):
            with pytest.raises(ModelLoadError, match=f"{file.name} are damaged, or not those"):
                look(tmp_path)
        with pytest.raises(ModelLoadError, match="damaged"):
            inspect(str(tmp_path))
    config.write_bytes(about[: len(about) // 2])
    with pytest.raises(ModelLoadError, match=r"cannot read .*config\.json"):
        load_head(tmp_path)


def test_a_missing_file_of_weights_is_said_to_be_missing(tmp_path: Path) -> None:
    mlp_speculator(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"^\S+ has no model\.safetensors or pytorch_model"):
        load_head(tmp_path)


def test_weights_may_be_in_several_files(tmp_path: Path) -> None:
    dflash(tmp_path / "one")
    dflash(tmp_path)
    weights, halves = load_file(tmp_path / "model.safetensors"), ("a.safetensors", "b.safetensors")
    (tmp_path / "model.safetensors").unlink()
    where = {name: halves[at % 2] for at, name in enumerate(weights)}
    for half in halves:
        part = {name: each for name, each in weights.items() if where[name] == half}
        save_file(part, tmp_path / half)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    expected = load_head(tmp_path / "one").state_dict()
    found = load_head(tmp_path).state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    (tmp_path / halves[1]).unlink()
    with pytest.raises(ModelLoadError, match=r"lacks 1 of 2 files with weights \(b\.safetensors"):
        load_head(tmp_path)
    index.write_text("{}")
    with pytest.raises(ModelLoadError, match=r"cannot read .*index\.json"):
        load_head(tmp_path)
    for other in ("../one/model.safetensors", str(tmp_path / "one" / "model.safetensors")):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, other)}))
        with pytest.raises(ModelLoadError, match="names a file outside of its folder"):
            load_head(tmp_path)


def test_quantized_weights_are_called_so(tmp_path: Path) -> None:
    def packed(about: dict[str, Any], weights: Weights) -> None:
        for name in [name for name in weights if "mlp" in name]:
            weights[f"{name}_packed"] = weights.pop(name).to(torch.int8)
            weights[f"{name}_scale"] = torch.ones(1)

    dflash(tmp_path, packed)
    with pytest.raises(
        ModelLoadError, match=r"are quantized \(.*_scale\), .*: copy one that is not"
    ):
        load_head(tmp_path)


def test_medusa_heads_without_blocks_come_back(tmp_path: Path) -> None:
    made = Medusa(TARGET, MedusaConfig(depths=2, blocks=0))
    save_head(made, tmp_path, "medusa")
    again = load_head(tmp_path)
    assert again.config == made.config
    for name, value in made.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    eagle3(tmp_path, say(eagle_aux_hidden_state_layer_ids=[2, 5, 80]))
    head = load_head(tmp_path)
    with pytest.raises(ConfigError, match="reads layer 80, and this target has 12"):
        check_fits_target(head, TARGET, "the head")
    with pytest.raises(ConfigError, match="its vocab_size is 20, and this target's is 21"):
        check_fits_target(head, TargetShape(SIZE, 21, 12), "the head")


def test_a_format_refuses_what_it_has_no_words_for(tmp_path: Path) -> None:
    hydra = Hydra(TARGET, HydraConfig())
    for form in (*MAKERS, "speculators"):
        with pytest.raises(ConfigError, match="holds no hydra heads"):
            save_head(hydra, tmp_path, form)
    with pytest.raises(ConfigError, match="--set centred=false"):
        save_head(MlpSpeculator(TARGET, MlpSpeculatorConfig()), tmp_path, "mlp_speculator")
    with pytest.raises(ConfigError, match="norms before and embeddings of their own"):
        save_head(Eagle(TARGET, EagleConfig(own_embedding=True)), tmp_path, "speculators")
    with pytest.raises(ConfigError, match="unknown format 'eagle9'"):
        save_head(Eagle3(TARGET, Eagle3Config()), tmp_path, "eagle9")
    assert not list(tmp_path.iterdir())
