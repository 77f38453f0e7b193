"""Published Hydra heads: read as their makers' code computes them, and drafted with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaModel

from devices import DEVICE
from heads.published import drawn
from outpace import LLM
from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.checkpoint import find_head_kind, load_head, save_head
from outpace.inspection import inspect
from outpace.methods.heads.hydra import Hydra
from targets.families import build
from targets.generating import greedy, ids

SIZE, INNER, TOKENS, DEPTHS = 256, 48, 40, 3
PROMPTS = [[3, 4, 7, 11], [12], [19, 3, 0, 0, 5, 9, 2]]
PREFIX = "prefix_embeding_layer."
Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


def put(folder: Path, arch: str, blocks: int, change: Change = lambda about, weights: None) -> None:
    """A folder as the makers' training script leaves it."""
    dropout = arch == "prefix-mlp"
    shapes: dict[str, tuple[int, ...]] = {"input_embed_fn.weight": (TOKENS, SIZE)}
    for head in range(DEPTHS):
        for block in range(blocks):
            name = f"hydra_mlp.{head}.{2 * block + 1 if dropout else block}"
            wide = SIZE * (head + 2 if block == 0 else 1)
            shapes |= {f"{name}.linear.weight": (SIZE, wide), f"{name}.linear.bias": (SIZE,)}
            if block == 0:
                shapes[f"{name}.res_connection.weight"] = (SIZE, wide)
                shapes[f"{name}.res_connection.bias"] = (SIZE,)
        name = f"hydra_lm_head.{head}" + (".1" if dropout else "")
        shapes |= {f"{name}.weight": (TOKENS, SIZE), f"{name}.bias": (TOKENS,)}
    if dropout:
        shapes |= {
            f"{PREFIX}{name}": tuple(each.shape) for name, each in layer().state_dict().items()
        }
    weights = {name: each.float() / each.shape[-1] ** 0.5 for name, each in drawn(shapes).items()}
    if blocks > 2:  # one layer, again and again
        for name in [name for name in weights if f".{3 if dropout else 1}.linear" in name]:
            for block in range(2, blocks):
                own = f".{2 * block + 1 if dropout else block}.linear"
                weights[name.replace(f".{3 if dropout else 1}.linear", own)] = weights[name].clone()
    if dropout:
        weights[f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(64)
    about = {
        "hydra_num_heads": DEPTHS,
        "hydra_num_layers": blocks,
        "hydra_head_arch": arch,
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    }
    change(about, weights)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about))
    torch.save(weights, folder / "hydra_lm_head.pt")


def layer() -> LlamaModel:
    """transformers' Llama of one layer, as the makers' code has one."""
    config = LlamaConfig(
        hidden_size=SIZE, intermediate_size=INNER, num_hidden_layers=1, vocab_size=TOKENS,
        num_attention_heads=SIZE // 128, num_key_value_heads=SIZE // 128, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    return LlamaModel(config)


def expected(folder: Path, states: Tensor, path: list[int], embeddings: Tensor) -> list[Tensor]:
    """The logits after the root and each further token of a path. states: ``[T, H]``, those of the
    text before the root."""
    weights = {
        name: each.double() for name, each in torch.load(folder / "hydra_lm_head.pt").items()
    }
    state = states[-1]
    if any(name.startswith(PREFIX) for name in weights):
        over = layer().double()
        inside = {name.removeprefix(PREFIX): each for name, each in weights.items()}
        over.load_state_dict({name: inside[name] for name in over.state_dict()})
        with torch.no_grad():
            state = over(inputs_embeds=states[None]).last_hidden_state[0, -1]
    found = []
    for head in range(len(path)):
        x = torch.cat([state, *(embeddings[token] for token in path[: head + 1])])
        names = sorted(
            (
                name
                for name in weights
                if name.startswith(f"hydra_mlp.{head}.") and "linear.weight" in name
            ),
            key=lambda name: int(name.split(".")[2]),
        )
        for name in names:
            stem = name.removesuffix("linear.weight")
            more = silu(weights[name] @ x + weights[f"{stem}linear.bias"])
            if f"{stem}res_connection.weight" in weights:
                kept = weights[f"{stem}res_connection.weight"] @ x
                x = kept + weights[f"{stem}res_connection.bias"]
            x = x + more
        end = next(
            name
            for name in weights
            if name.startswith(f"hydra_lm_head.{head}") and "weight" in name
        )
        found.append(weights[end] @ x + weights[end.replace("weight", "bias")])
    return found


class Model:
    """The parts of a target that a head uses."""

    embeddings = torch.randn(
        TOKENS, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embeddings[tokens]


@pytest.mark.parametrize(("arch", "blocks"), [("mlp", 1), ("mlp", 3), ("prefix-mlp", 4)])
def test_every_path_is_what_its_makers_code_computes(
    arch: str, blocks: int, tmp_path: Path
) -> None:
    put(tmp_path, arch, blocks)
    assert find_head_kind(tmp_path) == "hydra"
    head = load_head(tmp_path).double()
    assert isinstance(head, Hydra)
    assert (head.config.depths, head.config.blocks, head.target.vocab_size) == (3, blocks, TOKENS)
    model, states = Model(), torch.randn(7, SIZE, dtype=torch.float64)
    for path in ([4, 11, 7], [0, 0, 39]):
        memory = head.begin_at(states[None])[:, -1:]
        for depth, wanted in enumerate(expected(tmp_path, states, path, model.embeddings), 1):
            token = torch.tensor([[path[depth - 1]]])
            logits, memory = head.step(memory, token, depth, model)  # type: ignore[arg-type]
            # transformers' norms compute in float32.
            near = 1e-5 if arch == "prefix-mlp" else 1e-10
            assert torch.allclose(logits[0, 0], wanted, rtol=0, atol=near)


@pytest.mark.parametrize("branching", [None, [2, 2, 1], "dynamic"])
def test_it_drafts_and_the_text_is_the_targets(branching: Any, tmp_path: Path) -> None:
    put(tmp_path, "prefix-mlp", 4)
    model = build(
        "llama", vocab_size=TOKENS, hidden_size=SIZE, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=16,
    ).to(DEVICE)  # fmt: skip
    plain = LLM(model, speculative_config={"method": "none"}, max_num_seqs=3)
    more = {} if branching is None else {"branching": branching}
    config = {"method": "hydra", "model": tmp_path, "check": False, "num_speculative_tokens": 3}
    llm = LLM(model, speculative_config={**config, **more}, max_num_seqs=3)
    found = llm.generate(PROMPTS, greedy(10))
    assert ids(found) == ids(plain.generate(PROMPTS, greedy(10)))
    assert sum(each.metrics.num_draft_tokens for each in found) > 10


def test_it_is_inspected_and_not_written(tmp_path: Path) -> None:
    put(tmp_path / "head", "mlp", 1)
    found = inspect(str(tmp_path / "head"))
    assert found.what == "a trained head of the kind 'hydra', in the format 'hydra'"
    assert found.facts["target"] == "lmsys/vicuna-7b-v1.3"
    with pytest.raises(ConfigError, match="'hydra' is read only"):
        save_head(load_head(tmp_path / "head"), tmp_path / "again", "hydra")
    save_head(load_head(tmp_path / "head"), tmp_path / "own")
    first, again = load_head(tmp_path / "head"), load_head(tmp_path / "own")
    for name, value in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda about, weights: about.update(hydra_head_arch="eagle-attn"), "is 'eagle-attn', and"),
        (lambda about, weights: about.update(grounded_heads=False), "grounded_heads is False"),
        (lambda about, weights: about.update(hidden_state_offset=1), "hidden_state_offset is 1"),
        (lambda about, weights: about.update(hydra_num_layers="2"), "kind 'hydra'"),
        (lambda about, weights: about.update(hydra_num_layers=2), "damaged, or not those"),
        (lambda about, weights: about.pop("hydra_num_layers"), "no entry 'hydra_num_layers'"),
        (lambda about, weights: weights.pop("hydra_lm_head.0.weight"), "no entry 'outputs.0.w"),
        (lambda about, weights: weights.pop("hydra_mlp.1.0.linear.bias"), "blocks.1.0.linear.bias"),
        (lambda about, weights: weights.update(odd=torch.ones(1)), "odd"),
    ],
)
def test_a_head_of_another_make_is_refused(change: Change, sentence: str, tmp_path: Path) -> None:
    put(tmp_path, "mlp", 1, change)
    with pytest.raises(ModelLoadError, match=sentence):
        load_head(tmp_path)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "mlp", 1)
    file = tmp_path / "hydra_lm_head.pt"
    file.write_bytes(file.read_bytes()[:-4000])
    with pytest.raises(ModelLoadError, match=r"hydra_lm_head\.pt are damaged"):
        load_head(tmp_path)
    file.unlink()
    with pytest.raises(ModelLoadError, match=r"has no hydra_lm_head\.pt or"):
        load_head(tmp_path)
