"""Heads: their steps, and the folders that they are kept in."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.base import TargetShape, parse_config
from outpace.heads.checkpoint import check_fits_target, load_head, save_head
from outpace.heads.folder import CONFIG, WEIGHTS
from outpace.heads.layers import AttentionContext
from outpace.heads.registry import find_head, head_names
from outpace.methods.heads.blocks import BlockHead
from outpace.methods.heads.decoder_heads import DecoderHead
from outpace.methods.heads.eagle3 import Eagle3Config
from outpace.methods.heads.hydra import HydraConfig
from outpace.methods.heads.s2d import S2dConfig
from outpace.methods.heads.steps import StepHead

TARGET = TargetShape(hidden_size=8, vocab_size=20, layers=2, name="tiny")


class Parts:
    """The embeddings and the output matrix of a target that is not there."""

    table = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def compute_logits(self, states: Tensor) -> Tensor:
        return states @ self.table.to(states.dtype).T

    def apply_soft_cap(self, logits: Tensor) -> Tensor:
        return logits


STEPPING = [kind for kind in head_names() if issubclass(find_head(kind), StepHead)]
BLOCKS = [kind for kind in head_names() if issubclass(find_head(kind), BlockHead)]
ATTENDING = [kind for kind in head_names() if issubclass(find_head(kind), DecoderHead)]


def head(kind: str, **sizes: int) -> Any:
    torch.manual_seed(1)
    found = find_head(kind)
    made = found(TARGET, found.Config(depths=3, **sizes))
    for parameter in made.parameters():  # none of them zero, as some begin
        torch.nn.init.normal_(parameter, std=0.3)
    return made.eval().requires_grad_(False)


@pytest.mark.parametrize("kind", STEPPING)
def test_columns_do_not_see_each_other(kind: str) -> None:
    """The same step serves all places of a text and the nodes of a level."""
    made, parts = head(kind), Parts()
    states, path = torch.randn(2, 5, 8), torch.randint(20, (2, 5, 3))
    together, alone = states, states[:1, 2:3]
    for depth in range(1, 4):
        tokens = path[..., depth - 1]
        logits, together = made.step(together, tokens, depth, parts)
        one, alone = made.step(alone, tokens[:1, 2:3], depth, parts)
        assert logits.shape == (2, 5, 20)
        assert torch.allclose(logits[:1, 2:3], one, atol=1e-6)


@pytest.mark.parametrize("kind", ATTENDING)
def test_entries_are_the_same_one_at_a_time_and_all_at_once(kind: str) -> None:
    made, parts = head(kind).double(), Parts()
    features = made.combine_hidden_states(
        torch.randn(2, 5, 8 * len(made.hidden_layers), dtype=torch.float64)
    )
    tokens, at = torch.randint(20, (2, 5)), torch.arange(5).expand(2, -1)
    causal = torch.ones(2, 5, 5, dtype=torch.bool).tril()
    together, _ = made.step(features, tokens, AttentionContext.causal(made.begin(2), 5), parts)
    before = made.begin(2)
    for column in range(5):
        here = slice(column, column + 1)
        attn_context = AttentionContext(at[:, here], before, causal[:, here, : column + 1])
        alone, entry = made.step(features[:, here], tokens[:, here], attn_context, parts)
        before = before.then(entry)
        assert torch.allclose(alone, together[:, here], atol=1e-12)
    assert not torch.allclose(together[:, :1], together[:, 1:2], atol=1e-3)


def test_positions_turn_queries_and_keys_as_in_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    made = head("eagle3", heads=2, groups=1)
    config = LlamaConfig(
        hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        intermediate_size=24, attn_implementation="eager",
    )  # fmt: skip
    theirs = LlamaDecoderLayer(config, 0).self_attn
    ours = made.midlayer.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        theirs.get_parameter(f"{name}.weight").data = ours.get_parameter(f"{name}.weight")
    theirs.o_proj = ours.o_proj
    x, at = torch.randn(1, 6, 16), torch.arange(3, 9)[None]
    causal = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    found, _ = ours(x, AttentionContext(at, made.begin(1), causal))
    mask = torch.zeros(1, 1, 6, 6).masked_fill(~causal[:, None], float("-inf"))
    turn = LlamaRotaryEmbedding(config)(x, at)
    wanted, _ = theirs(x, position_embeddings=turn, attention_mask=mask)
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_see_their_own_text_and_no_other_block(kind: str) -> None:
    """Several blocks of a row at once, as in training, against each of them alone, as in a draft;
    entries that a block does not see make no difference."""
    made, parts = head(kind).double(), Parts()
    states = torch.randn(2, 6, 8 * len(made.hidden_layers), dtype=torch.float64)
    at = torch.arange(6).expand(2, -1)
    before = made.entries(states, at)
    roots, places = torch.randint(20, (2, 3)), torch.tensor([1, 4, 6]).expand(2, -1)
    visible = at[:, None] < places[..., None]
    together = made.block(roots, places, before, visible, parts)
    assert together.shape == (2, 3, 3, 20)
    for column, place in enumerate((1, 4, 6)):
        here = slice(column, column + 1)
        short = made.entries(states[:, :place], at[:, :place])
        seen = torch.ones(2, 1, place, dtype=torch.bool)
        alone = made.block(roots[:, here], places[:, here], short, seen, parts)
        assert torch.allclose(alone, together[:, here], atol=1e-12)
    assert not torch.allclose(together[:, 0], together[:, 1], atol=1e-3)


def test_a_dflash_block_is_what_transformers_makes_of_it() -> None:
    """Muse Glimmer's assistant is of the same build: the layers, and the text as their context."""
    family = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    made, parts = head("dflash", layers=2, heads=2, groups=1, head_dim=6, inner_size=24), Parts()
    config = family.MuseGlimmerAssistantConfig(
        hidden_size=8, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=6, rms_norm_eps=1e-6, target_layer_ids=[0, 1],
        layer_types=["full_attention"] * 2, block_size=4, mask_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager",
    )  # fmt: skip
    theirs = family.MuseGlimmerAssistantModel(config).eval()
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc.", "stack.": "layers."}
    weights = {name: value for name, value in made.state_dict().items() if "." in name}
    for old, new in names.items():
        weights = {
            new + name[len(old) :] if name.startswith(old) else name: value
            for name, value in weights.items()
        }
    theirs.load_state_dict(weights)
    states, root = torch.randn(1, 5, 16), torch.tensor([[7]])
    before = made.entries(states, torch.arange(5)[None])
    seen = torch.ones(1, 1, 5, dtype=torch.bool)
    found = made.block(root, torch.tensor([[5]]), before, seen, parts)
    block = torch.cat([parts.embed(root), made.mask.expand(1, 3, -1)], 1)
    wanted = theirs(
        noise_embeds=block, context_hidden_states=states, position_ids=torch.arange(9)[None],
        use_cache=False,
    ).last_hidden_state[:, 1:]  # fmt: skip
    assert torch.allclose(found[:, 0], parts.compute_logits(wanted), atol=1e-5)


SEEN = {"medusa": 0, "hydra": 2, "mlp_speculator": 2, "clover": 2, "lyanna": 2}


@pytest.mark.parametrize(("kind", "sees"), SEEN.items())
def test_which_tokens_a_guess_depends_on(kind: str, sees: int) -> None:
    made, parts = head(kind), Parts()
    changed = 0
    for place in range(2):
        logits = []
        for token in (3, 4):
            path = [7, 9]
            path[place] = token
            memory = torch.ones(1, 1, 8)
            for depth, each in enumerate(path, 1):
                found, memory = made.step(memory, torch.tensor([[each]]), depth, parts)
            logits.append(found)
        changed += not torch.equal(*logits)
    assert changed == sees


@pytest.mark.parametrize("kind", head_names())
def test_a_folder_gives_the_same_head_back(kind: str, tmp_path: Path) -> None:
    made = head(kind, draft_vocab_size=6)
    made.d2t.copy_(torch.tensor([0, 3, 5, 7, 11, 19]))
    save_head(made, tmp_path)
    again = load_head(tmp_path)
    assert (again.kind, again.config, again.target) == (made.kind, made.config, made.target)
    for name, value in made.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert not list(tmp_path.glob("*.part"))


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no folder"):
        load_head(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match="'outpace train' wrote"):
        load_head(tmp_path)
    save_head(head("medusa"), tmp_path)
    about = json.loads((tmp_path / CONFIG).read_text())
    for wrong, sentence in (
        ({**about, "outpace_head": "eagle9"}, "no trained head"),
        ({**about, "depths": "three"}, "depths is 'three'"),
        ({**about, "colour": 1}, "does not describe"),
        ({**about, "target": {}}, "does not describe"),
        ({**about, "depths": 4}, "not those that config.json describes"),
        ({**about, "depths": 0}, "depths is 0"),
        ({**about, "target": {**about["target"], "vocab_size": 5}}, "d2t does not lead to the 5"),
        ({**about, "target": {**about["target"], "vocab_size": None}}, "vocab_size is None"),
    ):
        (tmp_path / CONFIG).write_text(json.dumps(wrong))
        with pytest.raises(ModelLoadError, match=sentence):
            load_head(tmp_path)
    for text in ("{", "[" * 100_000):
        (tmp_path / CONFIG).write_text(text)
        with pytest.raises(ModelLoadError, match=r"cannot read .*config\.json"):
            load_head(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps(about))
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:200])
    with pytest.raises(ModelLoadError, match="damaged"):
        load_head(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ModelLoadError, match=r"has no model\.safetensors"):
        load_head(tmp_path)


def test_weights_that_no_head_has_are_refused(tmp_path: Path) -> None:
    save_head(head("medusa", draft_vocab_size=4), tmp_path)
    whole = load_file(tmp_path / WEIGHTS)
    name = "outputs.0.weight"
    for wrong, sentence in (
        ({"d2t": torch.tensor([0, 1, 2, 2])}, "d2t leads to the same token twice"),
        ({name: whole[name].to(torch.float8_e4m3fn)}, "is of the type float8_e4m3fn"),
        ({name: whole[name].to(torch.complex64)}, "is of the type complex64"),
    ):
        save_file({**whole, **wrong}, tmp_path / WEIGHTS)
        with pytest.raises(ModelLoadError, match=sentence):
            load_head(tmp_path)


def test_entries_of_other_types_are_refused_and_whole_numbers_are_floats_too() -> None:
    assert parse_config(S2dConfig, {"confidence": 1}) == S2dConfig(confidence=1.0)
    for name, value in (("rope", 5), ("depths", True), ("norm_eps", -1.0), ("norm_eps", math.nan)):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            parse_config(S2dConfig, {name: value})
    with pytest.raises(ValueError, match="reads is 3"):
        parse_config(Eagle3Config, {"reads": 3})
    with pytest.raises(ValueError, match="blocks is 0"):
        parse_config(HydraConfig, {"blocks": 0})


def test_a_head_of_another_target_is_refused_by_its_shape() -> None:
    other = TargetShape(hidden_size=8, vocab_size=21, layers=2, name="other")
    with pytest.raises(ConfigError, match=r"another model \(tiny\): its vocab_size is 20"):
        check_fits_target(head("medusa"), other, "the head")
