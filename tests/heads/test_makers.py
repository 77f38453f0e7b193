"""Published heads beside their makers' own code, where that can be imported: it is fetched and
never committed. What is read is proved by the references of the other tests anyway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.published import DOMINO, SIZE, VOCABULARY, domino, eagle3
from heads.runs import Model
from heads.test_hydra_format import Model as HydraModel
from heads.test_hydra_format import put
from heads.variants import YARN, both, latent, nested, say
from outpace.heads.base import TargetShape
from outpace.heads.checkpoint import check_fits_target, load_head
from outpace.heads.layers import AttentionContext
from outpace.methods.heads.dspark import BlockStep


@pytest.mark.filterwarnings("ignore")  # of entries that transformers calls otherwise since
def test_latent_attention_beside_torchspec(tmp_path: Path) -> None:
    """Its rotary positions are compiled, and computed in float32. The base of scaled ones is 10000
    there, whatever the configuration says; SGLang takes the configuration's."""
    theirs: Any = pytest.importorskip("torchspec.models.draft.deepseek_eagle")
    from safetensors.torch import load_file
    from transformers import DeepseekV3Config

    scaled = say(rope_scaling=YARN, max_position_embeddings=640, rope_theta=10000.0)
    eagle3(tmp_path, both(latent, nested(1, 5, 8), scaled))
    about = json.loads((tmp_path / "config.json").read_text())
    named = {name: each for name, each in about.items() if name not in ("head_dim", "model_type")}
    config = DeepseekV3Config(**named, pad_token_id=None)
    # The entries of transformers 4, which it was written for.
    config.rope_theta = about["rope_theta"]
    makers = theirs.Eagle3DeepseekV2ForCausalLM(config).double().eval()
    weights = load_file(tmp_path / "model.safetensors")
    makers.load_state_dict(weights, strict=False)
    head, model = load_head(tmp_path).double(), Model()
    check_fits_target(head, TargetShape(SIZE, VOCABULARY, 12), "the head")
    states, tokens = torch.randn(1, 9, 3 * SIZE, dtype=torch.float64), torch.arange(9)[None]
    at = torch.arange(9)
    mask = torch.where(at <= at[:, None], 0.0, -torch.inf).double()[None, None]
    with torch.no_grad():
        wanted, _, _ = makers.backbone(
            model.embed(tokens), makers.project_hidden_states(states), mask, at[None],
            use_cache=False,
        )  # fmt: skip
        wanted = makers.compute_logits(wanted)
    attending: Any = head
    attn_context = AttentionContext.causal(attending.begin(1), 9)
    found, _ = attending.step(attending.combine_hidden_states(states), tokens, attn_context, model)
    assert torch.allclose(attending.logits(found, model), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shifted", [True, False])
def test_domino_beside_specforge(shifted: bool, tmp_path: Path) -> None:
    """Their norms compute in float32."""
    theirs: Any = pytest.importorskip("specforge.modeling.draft.domino")
    from safetensors.torch import load_file
    from transformers import Qwen3Config

    domino(tmp_path, lambda about, weights: about["dflash_config"].update(shift_label=shifted))
    about = json.loads((tmp_path / "config.json").read_text())
    config = Qwen3Config(**{**about, "attn_implementation": "eager"})
    makers = theirs.DominoDraftModel(config).double().eval()
    makers.load_state_dict(load_file(tmp_path / "model.safetensors"))
    head: Any = load_head(tmp_path).double()
    model = Model()
    states, root = torch.randn(1, 5, 3 * SIZE, dtype=torch.float64), 11
    path = torch.tensor([[root, 3, 7, 19]])
    block = torch.tensor([[root, *[DOMINO["mask_token_id"]] * 3]])
    with torch.no_grad():
        said = makers(
            position_ids=torch.arange(9)[None], noise_embedding=model.embed(block),
            target_hidden=states,
        )  # fmt: skip
        wanted = makers.apply_logits_head(
            model.compute_logits(said)[:, None], prev_token_embeddings=model.embed(path)[:, None],
            hidden_states=said[:, None],
        )[0, 0]  # fmt: skip
    before, seen = head.entries(states, torch.arange(5)[None]), torch.ones(1, 1, 5).bool()
    given = torch.tensor([[root]]), torch.tensor([[5]])
    outputs = head.outputs(*given, before, seen, model)[:, 0]
    logits, memory = head.logits(outputs, model), head.memory(path[:, 0])
    for depth in range(head.config.depths):
        parts = logits[:, depth], outputs[:, depth], path[:, depth], memory
        found, memory = head.joined(BlockStep(depth, *parts), model)
        assert torch.allclose(found[0], wanted[depth + (not shifted)], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("arch", "blocks"), [("mlp", 2), ("prefix-mlp", 4)])
def test_hydra_beside_its_makers_code(arch: str, blocks: int, tmp_path: Path) -> None:
    heads: Any = pytest.importorskip("hydra.model.hydra_heads")
    from transformers import LlamaConfig

    put(tmp_path, arch, blocks)
    weights = torch.load(tmp_path / "hydra_lm_head.pt", weights_only=True)
    model = HydraModel()
    embed = torch.nn.Embedding.from_pretrained(model.embeddings)
    base = LlamaConfig(
        hidden_size=256, intermediate_size=48, vocab_size=40, num_attention_heads=2,
        num_key_value_heads=2, rms_norm_eps=1e-6,
        # As plain ones, which the code knows from the lack of an entry that there is always now.
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "type": "linear", "factor": 1},
    )  # fmt: skip
    kind = heads.HydraMLP if arch == "mlp" else heads.HydraPrefixMLP
    makers = kind(
        hydra_num_layers=blocks, hydra_num_heads=3, grounded_heads=True, input_embed_fn=embed,
        base_config=base,
    )  # fmt: skip
    makers.load_state_dict(weights, strict=False)
    makers.input_embed_fn = embed
    makers = makers.double().eval()
    states, tokens = torch.randn(1, 8, 256, dtype=torch.float64), torch.arange(8)[None]
    with torch.no_grad():
        wanted, _ = makers(states, tokens)
    head: Any = load_head(tmp_path).double()
    memory = head.begin_at(states)
    for depth in range(1, 4):
        fed = tokens.roll(-depth, 1)
        logits, memory = head.step(memory, fed, depth, model)
        assert torch.allclose(logits[:, :5], wanted[depth - 1][:, :5], rtol=0, atol=1e-4)
