"""Published DFlash 2 heads: read and drafted with as their makers' code does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from heads.published import SIZE, VOCABULARY, Change, Weights, dflash, drawn, nothing, put
from heads.reference import BlockReference
from heads.runs import PROMPTS, Model, plain_texts, target, watch_drafts
from heads.variants import say
from outpace import LLM
from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.checkpoint import find_head_kind, load_head, save_head
from outpace.methods.heads.dflash2 import DFlash2
from outpace.methods.heads.dspark import BlockStep
from targets.generating import greedy, ids

RANK, KERNEL, GROUP, TOP = 3, 2, 4, 5
INSIDE = {
    "block_size": 4,
    "conv_group_size": GROUP,
    "conv_kernel_size": KERNEL,
    "mask_token_id": 17,
    "selector_rank": RANK,
    "selector_top_k": TOP,
    "target_layer_ids": [1, 5, 10],
}


def dflash2(folder: Path, change: Change = nothing) -> Weights:
    def joined(about: dict[str, Any], weights: Weights) -> None:
        about |= {"architectures": ["DFlash2DraftModel"], "dflash_config": dict(INSIDE)}
        about |= {"is_causal": False, "layer_types": ["sliding_attention"] * 2}
        about |= {"sliding_window": 5, "use_sliding_window": True}
        del about["block_size"]
        shapes: dict[str, tuple[int, ...]] = {
            "candidate_selector.hidden_projection.weight": (RANK, SIZE),
            "candidate_selector.predecessor_codebook": (VOCABULARY, RANK),
            "candidate_selector.successor_codebook": (VOCABULARY, RANK),
        }
        for layer in (0, 1):
            for part in ("attention_conv", "mlp_conv"):
                name = f"layers.{layer}.{part}"
                shapes[f"{name}.base_kernel"] = (2, KERNEL, SIZE)
                shapes[f"{name}.kernel_projection.weight"] = (2 * KERNEL * SIZE // GROUP, SIZE)
        weights |= drawn(shapes)
        change(about, weights)

    return dflash(folder, joined)


class SelectorReference(BlockReference):
    """With the candidates of the block that was made last."""

    def after(self, path: Sequence[int]) -> Tensor:
        """Returns the logits ``[V]`` of the token after a path, the root its first token."""
        said = self.outputs[len(path)]
        logits, chosen = self.logits(said), self.about["selector_top_k"]
        projected = self.linear("candidate_selector.hidden_projection", said)
        before = self.weights["candidate_selector.predecessor_codebook"][path[-1]] * projected
        found = torch.full_like(logits, -torch.inf)
        for token in logits.topk(chosen).indices.tolist():
            fits = before @ self.weights["candidate_selector.successor_codebook"][token]
            found[token] = logits[token] + fits
        return found


def test_every_path_is_what_its_makers_code_computes(tmp_path: Path) -> None:
    dflash2(tmp_path)
    head, model = load_head(tmp_path).double(), Model()
    assert isinstance(head, DFlash2)
    assert (head.config.depths, head.block_size, head.hidden_layers) == (3, 4, (2, 6, 11))
    states, roots, places = torch.randn(1, 9, 3 * SIZE, dtype=torch.float64), [4, 11], [2, 9]
    at = torch.arange(9)
    before, visible = head.entries(states, at[None]), (at < torch.tensor(places)[:, None])[None]
    given = torch.tensor([roots]), torch.tensor([places])
    outputs = head.outputs(*given, before, visible, model)[0]
    logits = head.logits(outputs, model)
    for row, (root, place) in enumerate(zip(roots, places, strict=True)):
        reference = SelectorReference(tmp_path, model.embeddings, model.output)
        reference.block(states[0, :place], root, 4)
        for path in ([root, 3, 7], [root, 7, 3], [root, 0, 1]):
            for depth, token in enumerate(path):
                here, said = torch.tensor(token), outputs[row, depth]
                at = BlockStep(depth, logits[row, depth], said, here, head.memory(here))
                found, _ = head.joined(at, model)
                expected = reference.after(path[: depth + 1])
                assert torch.equal(found.isinf(), expected.isinf())
                known = ~expected.isinf()
                assert torch.allclose(found[known], expected[known], rtol=0, atol=1e-10)


@pytest.mark.parametrize("how", ["chain", "tree"])
def test_what_is_drafted_in_a_run(how: str, tmp_path: Path) -> None:
    """The nodes that its makers' code would draft; and the text is the target's."""
    dflash2(tmp_path)
    more: dict[str, Any] = {
        "chain": {"num_speculative_tokens": 3},
        "tree": {"branching": [2, 2, 1], "num_speculative_tokens": 10},
    }[how]
    model = target()
    config = {"method": "dflash2", "model": tmp_path, "check": False, **more}
    llm = LLM(model, speculative_config=config, max_num_seqs=3)
    checked = watch_drafts(llm, SelectorReference, tmp_path)
    assert ids(llm.generate(PROMPTS, greedy(8))) == plain_texts()
    assert len(checked) > 15


def test_it_comes_back_bit_by_bit(tmp_path: Path) -> None:
    dflash2(tmp_path / "public")
    assert find_head_kind(tmp_path / "public") == "dflash2"
    first = load_head(tmp_path / "public")
    save_head(first, tmp_path / "again", "dflash2")
    again = load_head(tmp_path / "again")
    assert (again.config, again.hidden_layers) == (first.config, first.hidden_layers)
    given, found = (
        load_file(tmp_path / part / "model.safetensors") for part in ("public", "again")
    )
    assert given.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in given.items())
    about = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {name: about["dflash_config"].get(name, about.get(name)) for name in INSIDE} == INSIDE
    for form in ("outpace", "dflash", "speculators"):
        with pytest.raises(ConfigError):
            save_head(first, tmp_path / form, form)


def test_a_folder_of_the_library(tmp_path: Path) -> None:
    """With the entries that vLLM translates from there."""
    weights = dflash2(tmp_path / "flat")
    layer = json.loads((tmp_path / "flat" / "config.json").read_text())
    for name in ("dflash_config", "num_target_layers", "architectures", "is_causal"):
        layer.pop(name, None)
    above = {name: each for name, each in INSIDE.items() if name != "target_layer_ids"}
    about = {
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "speculators_config": {
            "algorithm": "dflash2",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "a/model", "architectures": []},
        },
        "aux_hidden_state_layer_ids": [2, 6, 11],
        "sliding_window_non_causal": True,
        "transformer_layer_config": layer,
        **above,
    }
    put(tmp_path / "library", about, weights, "model.safetensors")
    head, first = (load_head(tmp_path / name) for name in ("library", "flat"))
    assert isinstance(head, DFlash2)
    assert head.config == first.config
    assert head.target.name == "a/model"
    for name, value in first.state_dict().items():
        assert torch.equal(head.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (say(dflash_config={**INSIDE, "conv_group_size": 3}), "groups of 3 do not divide"),
        (say(dflash_config={**INSIDE, "selector_top_k": 0}), "selector_top_k is 0"),
        (say(output_multiplier=2.0), "output_multiplier is 2.0"),
        (say(dflash_config={"mask_token_id": 17, "block_size": 4}), "it has no entry"),
        (
            lambda about, weights: weights.pop("candidate_selector.successor_codebook"),
            "not those .*successor_codebook",
        ),
    ],
)
def test_a_head_of_another_make_is_refused(change: Change, sentence: str, tmp_path: Path) -> None:
    dflash2(tmp_path, change)
    with pytest.raises(ModelLoadError, match=sentence):
        load_head(tmp_path)
