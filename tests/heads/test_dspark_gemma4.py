"""DeepSpec's heads for Gemma 4, whose layers are of its kind: read as their makers' code does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from heads.published import RANK, SIZE, VOCABULARY, Change, Weights, drawn, nothing, put
from heads.reference import JoinedReference
from heads.runs import PROMPTS, Model, plain_texts, target
from heads.variants import drop, say
from outpace import LLM
from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.checkpoint import find_head_kind, load_head, save_head
from outpace.methods.heads.dflash import DFlash
from outpace.methods.heads.dspark import BlockStep, DSpark
from targets.generating import greedy, ids

WIDE = 8
CONFIG = {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "target_model_type": "gemma4",
    "hidden_size": SIZE,
    "intermediate_size": 24,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 4,
    "global_head_dim": WIDE,
    "attention_bias": False,
    "attention_k_eq_v": True,
    "enable_moe_block": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "layer_types": ["full_attention"] * 2,
    "sliding_window": 1024,
    "tie_word_embeddings": False,
    "block_size": 4,
    "mask_token_id": 17,
    "num_anchors": 512,
    "num_target_layers": 12,
    "target_layer_ids": [1, 5, 10],
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip


def gemma4(folder: Path, change: Change = nothing) -> Weights:
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCABULARY, SIZE),
        "lm_head.weight": (VOCABULARY, SIZE),
        "fc.weight": (SIZE, 3 * SIZE),
        "hidden_norm.weight": (SIZE,),
        "norm.weight": (SIZE,),
        "markov_head.markov_w1.weight": (VOCABULARY, RANK),
        "markov_head.markov_w2.weight": (VOCABULARY, RANK),
        "confidence_head.proj.weight": (1, SIZE + RANK),
        "confidence_head.proj.bias": (1,),
    }
    for layer in ("layers.0.", "layers.1."):
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{layer}{norm}_layernorm.weight"] = (SIZE,)
        shapes |= {
            layer + "layer_scalar": (1,),
            layer + "self_attn.q_norm.weight": (WIDE,),
            layer + "self_attn.k_norm.weight": (WIDE,),
            layer + "self_attn.q_proj.weight": (2 * WIDE, SIZE),
            layer + "self_attn.k_proj.weight": (WIDE, SIZE),
            layer + "self_attn.o_proj.weight": (SIZE, 2 * WIDE),
            layer + "mlp.gate_proj.weight": (24, SIZE),
            layer + "mlp.up_proj.weight": (24, SIZE),
            layer + "mlp.down_proj.weight": (SIZE, 24),
        }
    about, weights = {**CONFIG}, drawn(shapes)
    change(about, weights)
    return put(folder, about, weights, "model.safetensors")


def own_values(about: dict[str, Any], weights: Weights) -> None:
    about["attention_k_eq_v"] = False
    for layer in ("layers.0.", "layers.1."):
        made = {f"{layer}self_attn.{name}_proj.weight": (2 * WIDE, SIZE) for name in "kv"}
        weights |= drawn(made)


def targets_embeddings(about: dict[str, Any], weights: Weights) -> None:
    drop("embed_tokens.weight", "lm_head.weight")(about, weights)


def plain(about: dict[str, Any], weights: Weights) -> None:
    """DeepSpec's DFlash heads: the same class without the further parts."""
    about |= {"markov_rank": 0, "enable_confidence_head": False}
    del about["markov_head_type"], about["confidence_head_with_markov"]
    for name in [name for name in weights if name.startswith(("markov", "confidence"))]:
        del weights[name]


KINDS = {"published": nothing, "own values": own_values, "the target's": targets_embeddings}


class Gemma4Reference(JoinedReference):
    """Place by place."""

    def block(self, states: Tensor, root: int, block: int) -> Tensor:
        text = [self.norm("hidden_norm", self.linear("fc", one)) for one in states]
        scale = SIZE**0.5 if "embed_tokens.weight" in self.weights else 1.0
        tokens = [root, *[self.about["mask_token_id"]] * (block - 1)]
        xs = [self.embeddings[token] * scale for token in tokens]
        for number in range(self.layers):
            name = f"layers.{number}"
            read = [self.norm(f"{name}.input_layernorm", x) for x in xs]
            pairs = [self.pair(f"{name}.self_attn", x, at) for at, x in enumerate([*text, *read])]
            for at, x in enumerate(read):
                said = self.look(f"{name}.self_attn", x, len(text) + at, pairs)
                xs[at] = xs[at] + self.norm(f"{name}.post_attention_layernorm", said)
                inner = self.norm(f"{name}.pre_feedforward_layernorm", xs[at])
                gate = gelu(self.linear(f"{name}.mlp.gate_proj", inner), approximate="tanh")
                made = gate * self.linear(f"{name}.mlp.up_proj", inner)
                made = self.linear(f"{name}.mlp.down_proj", made)
                xs[at] = xs[at] + self.norm(f"{name}.post_feedforward_layernorm", made)
                xs[at] = xs[at] * self.weights[f"{name}.layer_scalar"]
        self.outputs = [self.norm("norm", x) for x in xs]
        return torch.stack([self.logits(x) for x in self.outputs])

    def pair(self, name: str, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        shared = self.about["attention_k_eq_v"]
        groups = self.about["num_global_key_value_heads" if shared else "num_key_value_heads"]
        keys = self.linear(f"{name}.k_proj", x).view(groups, -1)
        values = keys if shared else self.linear(f"{name}.v_proj", x).view(groups, -1)
        values = values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return self.partly_turned(self.norm(f"{name}.k_norm", keys), position), values

    def look(self, name: str, x: Tensor, position: int, pairs: Sequence[Any]) -> Tensor:
        queries = self.norm(f"{name}.q_norm", self.linear(f"{name}.q_proj", x).view(2, -1))
        queries = self.partly_turned(queries, position)
        found = []
        for head, query in enumerate(queries):
            group = head * len(pairs[0][0]) // 2
            weights = torch.stack([keys[group] @ query for keys, _ in pairs]).softmax(0)
            found.append(sum(w * v[group] for w, (_, v) in zip(weights, pairs, strict=True)))
        return self.linear(f"{name}.o_proj", torch.cat(found))

    def partly_turned(self, x: Tensor, position: int) -> Tensor:
        """Turns the first quarter of each half of a head."""
        half = WIDE // 2
        turning = half // 4
        angle = torch.zeros(half)
        angle[:turning] = position / 1e6 ** (torch.arange(0, 2 * turning, 2).float() / WIDE)
        cos, sin = angle.cos().double(), angle.sin().double()
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_path_is_what_its_makers_code_computes(kind: str, tmp_path: Path) -> None:
    gemma4(tmp_path, KINDS[kind])
    assert find_head_kind(tmp_path) == "dspark"
    head, model = load_head(tmp_path).double(), Model()
    assert isinstance(head, DSpark)
    states, root, place = torch.randn(1, 6, 3 * SIZE, dtype=torch.float64), 11, 6
    before, visible = head.entries(states, torch.arange(6)[None]), torch.ones(1, 1, 6).bool()
    outputs = head.outputs(torch.tensor([[root]]), torch.tensor([[place]]), before, visible, model)
    logits = head.logits(outputs, model)[0, 0]
    reference = Gemma4Reference(tmp_path, model.embeddings, model.output)
    reference.block(states[0], root, 4)
    for path in ([root, 3, 7, 19], [root, 0, 0, 1]):
        memory = head.memory(torch.tensor(root))
        for depth, token in enumerate(path):
            here, said = torch.tensor(token), outputs[0, 0, depth]
            found, memory = head.joined(BlockStep(depth, logits[depth], said, here, memory), model)
            expected, chance = reference.after(path[: depth + 1])
            assert torch.allclose(found, expected, rtol=0, atol=1e-10)
            sure = head.confidence(said, here)
            assert sure is not None
            assert chance is not None
            assert torch.allclose(sure.sigmoid(), chance, rtol=0, atol=1e-10)


class Rotary(torch.nn.Module):
    """Gemma 4's positions as transformers had them when DeepSpec was written."""

    def __init__(self, config: Any, layer_type: str) -> None:
        super().__init__()

    def forward(self, x: Tensor, positions: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
        turning = WIDE // 8
        steps = torch.zeros(WIDE // 2)
        steps[:turning] = 1 / 1e6 ** (torch.arange(0, 2 * turning, 2).float() / WIDE)
        angle = (positions[..., None] * steps).repeat(1, 1, 2)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def test_beside_deepspec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The makers' own class, whose norms compute in float32."""
    modeling: Any = pytest.importorskip("deepspec.modeling.dspark.gemma4.modeling")
    monkeypatch.setattr(modeling, "Gemma4TextRotaryEmbedding", Rotary)
    from safetensors.torch import load_file
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    gemma4(tmp_path)
    config = Gemma4TextConfig(**CONFIG)
    for name in ("num_global_key_value_heads", "global_head_dim", "num_key_value_heads"):
        setattr(config, name, CONFIG[name])  # of a version that keeps them by layer
    config._attn_implementation = "sdpa"
    makers = modeling.Gemma4DSparkModel(config).double().eval()
    makers.load_state_dict(
        {n: w.double() for n, w in load_file(tmp_path / "model.safetensors").items()}
    )
    head: Any = load_head(tmp_path).double()
    states, root = torch.randn(1, 5, 3 * SIZE, dtype=torch.float64), torch.tensor([[11]])
    block = torch.tensor([[11, 17, 17, 17]])
    with torch.no_grad():
        said = makers._forward_backbone(
            position_ids=torch.arange(9)[None], noise_embedding=makers.embed_tokens(block),
            target_hidden_states=states,
        )  # fmt: skip
    before, seen = head.entries(states, torch.arange(5)[None]), torch.ones(1, 1, 5).bool()
    found = head.outputs(root, torch.tensor([[5]]), before, seen, Model())[:, 0]
    assert torch.allclose(found, said, rtol=1e-4, atol=1e-4)


def test_it_drafts_and_the_text_is_the_targets(tmp_path: Path) -> None:
    gemma4(tmp_path)
    config = {"method": "dspark", "model": tmp_path, "check": False, "num_speculative_tokens": 3}
    llm = LLM(target(), speculative_config=config, max_num_seqs=3)
    found = llm.generate(PROMPTS, greedy(8))
    assert ids(found) == plain_texts()
    assert sum(each.metrics.num_draft_tokens for each in found) > 10


def test_it_comes_back_in_our_own_format(tmp_path: Path) -> None:
    gemma4(tmp_path / "public")
    first = load_head(tmp_path / "public")
    save_head(first, tmp_path / "own")
    again = load_head(tmp_path / "own")
    assert again.config == first.config
    for name, value in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    for form in ("dspark", "speculators"):
        with pytest.raises(ConfigError, match="layers of Qwen3's kind only"):
            save_head(first, tmp_path / form, form)
    gemma4(tmp_path / "plain", plain)
    assert type(load_head(tmp_path / "plain")) is DFlash


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (say(enable_moe_block=True), "enable_moe_block is True"),
        (say(hidden_activation="silu"), "hidden_activation is 'silu'"),
        (say(global_head_dim="8"), "does not describe a head"),
        (say(rope_parameters={"rope_type": "axial"}), "rope_type is 'axial'"),
        (drop("layers.1.layer_scalar"), "damaged, or not those .*layer_scalar"),
    ],
)
def test_a_head_of_another_make_is_refused(change: Change, sentence: str, tmp_path: Path) -> None:
    gemma4(tmp_path, change)
    with pytest.raises(ModelLoadError, match=sentence):
        load_head(tmp_path)
