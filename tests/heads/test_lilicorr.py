"""Published LiLiCorr heads: read and drafted with as their makers' code does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, silu

from heads.published import SIZE, VOCABULARY, Change, Weights, dflash, drawn, nothing
from heads.reference import BlockReference
from heads.runs import PROMPTS, Model, plain_texts, target, watch_drafts
from heads.test_dflash2 import GROUP, KERNEL
from heads.variants import drop, say
from outpace import LLM
from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.checkpoint import find_head_kind, load_head, save_head
from outpace.methods.heads.dflash2 import DFlash2
from outpace.methods.heads.dspark import BlockStep
from targets.generating import greedy, ids

WIDE, HEADS, TOP, FACTORS, SLOTS = 6, 2, 4, 5, 3
INSIDE = {
    "block_size": 4,
    "mask_token_id": 17,
    "target_layer_ids": [1, 5, 10],
    "lilicorr_enabled": True,
    "lilicorr_candidate_topk": TOP,
    "lilicorr_hidden_size": WIDE,
    "lilicorr_num_layers": 2,
    "lilicorr_num_heads": HEADS,
    "lilicorr_mlp_ratio": 2.5,
    "lilicorr_factor_dim": FACTORS,
    "lilicorr_vector_eps": 1e-6,
    "lilicorr_logit_scale": 8.0,
}


def shapes(size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the network's weights. size: its own width."""
    linear = {
        "pass_hidden_proj": (size, SIZE),
        "feature_mlp.1": (size, 5),
        "feature_mlp.3": (size, size),
        "context_proj": (size, SIZE),
        "factor_input_proj": (size, 3 * size),
        "out_head": (FACTORS, size),
        "in_head": (FACTORS, size),
        "anchor_out_head": (FACTORS, size),
    }
    if size != SIZE:
        linear["token_proj"] = (size, SIZE)
    found: dict[str, tuple[int, ...]] = {
        "feature_mlp.0.weight": (5,),
        "feature_mlp.0.bias": (5,),
        "slot_embedding": (1, 1, SLOTS, 1, size),
        "rank_embedding": (1, 1, 1, TOP, size),
        "relative_slot_bias": (HEADS, 2 * SLOTS + 1),
        "same_slot_bias": (HEADS,),
        "output_norm.weight": (size,),
        "anchor_norm.weight": (size,),
    }
    for layer in ("layers.0", "layers.1"):
        linear |= {
            f"{layer}.attn.out_proj": (size, size),
            f"{layer}.mlp.0": (int(2.5 * size), size),
            f"{layer}.mlp.2": (size, int(2.5 * size)),
        }
        found |= {
            f"{layer}.attn_norm.weight": (size,),
            f"{layer}.mlp_norm.weight": (size,),
            f"{layer}.attn.in_proj_weight": (3 * size, size),
            f"{layer}.attn.in_proj_bias": (3 * size,),
        }
    for name, shape in linear.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {f"lilicorr.{name}": shape for name, shape in found.items()}


def lilicorr(folder: Path, change: Change = nothing, size: int = WIDE) -> Weights:
    def joined(about: dict[str, Any], weights: Weights) -> None:
        about["dflash_config"] = {**INSIDE, "lilicorr_hidden_size": size if size != SIZE else 0}
        weights |= drawn(shapes(size))
        change(about, weights)

    return dflash(folder, joined)


def convolved(about: dict[str, Any], weights: Weights) -> None:
    """With the layers of DFlash 2, all below ``model``."""
    about["dflash_config"] |= {"conv_kernel_size": KERNEL, "conv_group_size": GROUP}
    for layer in (0, 1):
        for part in ("attention_conv", "mlp_conv"):
            name = f"layers.{layer}.{part}"
            made = {
                f"{name}.base_kernel": (2, KERNEL, SIZE),
                f"{name}.kernel_projection.weight": (2 * KERNEL * SIZE // GROUP, SIZE),
            }
            weights |= drawn(made)
    for name in list(weights):
        weights[f"model.{name}"] = weights.pop(name)


KINDS = {
    "narrow": lambda folder: lilicorr(folder),
    "as wide as the block": lambda folder: lilicorr(folder, size=SIZE),
    "convolutions": lambda folder: lilicorr(folder, convolved),
    "scaled embeddings": lambda folder: lilicorr(folder, say(input_embedding_scale=2.5)),
}


class LatticeReference(BlockReference):
    """Candidate by candidate, in the block that was made last."""

    def block(self, states: Tensor, root: int, block: int) -> Tensor:
        scale = self.about.get("input_embedding_scale", 1.0)
        plain, self.embeddings = self.embeddings, self.embeddings * scale
        logits = super().block(states, root, block)
        self.embeddings = plain
        self.read(self.norm("hidden_norm", self.linear("fc", states[-1])), logits)
        return logits

    def read(self, anchor: Tensor, logits: Tensor) -> None:
        name, about = "lilicorr", self.about
        self.candidates: list[list[int]] = []
        xs = []
        for slot, own in enumerate(logits):
            best = own.log_softmax(-1).topk(TOP)
            self.candidates.append(best.indices.tolist())
            for rank, (token, score) in enumerate(zip(best.indices, best.values, strict=True)):
                x = self.embeddings[token]
                if f"{name}.token_proj.weight" in self.weights:
                    x = self.linear(f"{name}.token_proj", x)
                x = x + self.linear(f"{name}.pass_hidden_proj", self.outputs[1 + slot])
                said = torch.stack([score, score.exp(), score - best.values[0]])
                place = torch.tensor([rank / (TOP - 1), rank == 0], dtype=torch.float64)
                said = torch.cat([said, place])
                said = (said - said.mean()) / (said.var(unbiased=False) + 1e-5).sqrt()
                said = said * self.weights[f"{name}.feature_mlp.0.weight"]
                said = said + self.weights[f"{name}.feature_mlp.0.bias"]
                inner = silu(self.linear(f"{name}.feature_mlp.1", said))
                x = x + self.linear(f"{name}.feature_mlp.3", inner)
                x = x + self.weights[f"{name}.slot_embedding"][0, 0, slot, 0]
                xs.append(x + self.weights[f"{name}.rank_embedding"][0, 0, 0, rank])
        for layer in range(about["lilicorr_num_layers"]):
            xs = self.lattice_layer(f"{name}.layers.{layer}", xs)
        around = self.norm(f"{name}.anchor_norm", self.linear(f"{name}.context_proj", anchor))
        self.leaves, self.enters = [], []
        for x in xs:
            x = self.norm(f"{name}.output_norm", x)
            joined = torch.cat([x, around, x * around])
            made = silu(self.linear(f"{name}.factor_input_proj", joined))
            self.leaves.append(normalize(self.linear(f"{name}.out_head", made), dim=0, eps=1e-6))
            self.enters.append(normalize(self.linear(f"{name}.in_head", made), dim=0, eps=1e-6))
        self.first = normalize(self.linear(f"{name}.anchor_out_head", around), dim=0, eps=1e-6)

    def lattice_layer(self, name: str, xs: list[Tensor]) -> list[Tensor]:
        width = len(xs[0]) // HEADS
        parts = []
        for x in xs:
            read = self.weights[f"{name}.attn.in_proj_weight"] @ self.norm(f"{name}.attn_norm", x)
            parts.append((read + self.weights[f"{name}.attn.in_proj_bias"]).chunk(3))
        found = []
        for at, x in enumerate(xs):
            said = []
            for head in range(HEADS):
                part = slice(head * width, (head + 1) * width)
                scores = []
                for other in range(len(xs)):
                    apart = at // TOP - other // TOP
                    score = parts[at][0][part] @ parts[other][1][part] / width**0.5
                    score = score + self.weights["lilicorr.relative_slot_bias"][head, apart + SLOTS]
                    if apart == 0:
                        score = score + self.weights["lilicorr.same_slot_bias"][head]
                    scores.append(score)
                chances = torch.stack(scores).softmax(0)
                said.append(sum(c * p[2][part] for c, p in zip(chances, parts, strict=True)))
            x = x + self.linear(f"{name}.attn.out_proj", torch.cat(said))
            inner = silu(self.linear(f"{name}.mlp.0", self.norm(f"{name}.mlp_norm", x)))
            found.append(x + self.linear(f"{name}.mlp.2", inner))
        return found

    def after(self, path: Sequence[int]) -> Tensor:
        """Returns the logits ``[V]`` of the token after a path of candidates, the root its first
        token."""
        slot = len(path) - 1
        before = self.first
        if slot:
            before = self.leaves[TOP * (slot - 1) + self.candidates[slot - 1].index(path[-1])]
        found = torch.full((self.vocabulary,), -torch.inf, dtype=torch.float64)
        for rank, token in enumerate(self.candidates[slot]):
            found[token] = 8.0 * (before @ self.enters[TOP * slot + rank])
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_path_is_what_its_makers_code_computes(kind: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path)
    assert find_head_kind(tmp_path) == "dflash2"
    head, model = load_head(tmp_path).double(), Model()
    assert isinstance(head, DFlash2)
    assert head.lilicorr is not None
    states, roots, places = torch.randn(1, 9, 3 * SIZE, dtype=torch.float64), [4, 11], [2, 9]
    at = torch.arange(9)
    before, visible = head.entries(states, at[None]), (at < torch.tensor(places)[:, None])[None]
    given = torch.tensor([roots]), torch.tensor([places])
    outputs = head.outputs(*given, before, visible, model)[0]
    logits = head.logits(outputs, model)
    anchors = head.context(states[0, [place - 1 for place in places]])
    bias = head.lilicorr.attention_bias()
    lattice = head.lilicorr(logits, outputs, anchors, bias, model)
    for row, (root, place) in enumerate(zip(roots, places, strict=True)):
        reference = LatticeReference(tmp_path, model.embeddings, model.output)
        reference.block(states[0, :place], root, 4)
        for rank in range(TOP):
            path = [
                root,
                *(own[(rank + depth) % TOP] for depth, own in enumerate(reference.candidates[:2])),
            ]
            for depth, token in enumerate(path):
                tokens = torch.full((2, 1), token)
                nothing = lattice.memory(tokens)
                parts = logits[:, depth, None], outputs[:, depth, None], tokens, nothing
                found = lattice.joined(BlockStep(depth, *parts), model)[0][row, 0]
                expected = reference.after(path[: depth + 1])
                assert torch.equal(found.isinf(), expected.isinf())
                known = ~expected.isinf()
                assert torch.allclose(found[known], expected[known], rtol=0, atol=1e-10)


@pytest.mark.parametrize("how", ["chain", "tree"])
def test_what_is_drafted_in_a_run(how: str, tmp_path: Path) -> None:
    """The nodes that its makers' code would draft; and the text is the target's, also of samples of
    one prompt and with what is kept of earlier texts."""
    lilicorr(tmp_path)
    more: dict[str, Any] = {
        "chain": {"num_speculative_tokens": 3},
        "tree": {"branching": [2, 2, 1], "num_speculative_tokens": 10},
    }[how]
    model = target()
    config = {"method": "dflash2", "model": tmp_path, "check": False, **more}
    llm = LLM(model, speculative_config=config, max_num_seqs=3)
    checked = watch_drafts(llm, LatticeReference, tmp_path)
    assert ids(llm.generate(PROMPTS, greedy(8))) == plain_texts()
    assert len(checked) > 15
    longer = [[*prompt, *text] for prompt, text in zip(PROMPTS, plain_texts(), strict=True)]
    plain = LLM(model, speculative_config={"method": "none"}, max_num_seqs=3)
    asked = greedy(6, n=2)
    found = [each.token_ids for each in llm.generate(longer, asked)]
    assert found == [each.token_ids for each in plain.generate(longer, asked)]


def test_it_comes_back_bit_by_bit(tmp_path: Path) -> None:
    lilicorr(tmp_path / "public", convolved)
    first = load_head(tmp_path / "public")
    save_head(first, tmp_path / "again", "dflash2")
    again = load_head(tmp_path / "again")
    assert again.config == first.config
    for name, value in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    with pytest.raises(ConfigError):
        save_head(first, tmp_path / "other", "dflash")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (say(dflash_config={**INSIDE, "lilicorr_num_heads": 4}), "4 heads do not divide a width"),
        (say(dflash_config={**INSIDE, "lilicorr_factor_dim": 0}), "lilicorr_factor_dim is 0"),
        (say(dflash_config={**INSIDE, "lilicorr_mlp_ratio": "2"}), "lilicorr_mlp_ratio is '2'"),
        (say(dflash_config={**INSIDE, "lilicorr_logit_scale": None}), "logit_scale is None"),
        (say(sample_from_anchor=True), "first place is the one after the root's"),
        (drop("lilicorr.in_head.bias"), "damaged, or not those .*lilicorr.in_head.bias"),
        (
            lambda about, weights: weights.update(
                {"lm_head.weight": torch.zeros(6, SIZE), "d2t": torch.zeros(6, dtype=torch.long)}
            ),
            "it knows some only",
        ),
    ],
)
def test_a_head_of_another_make_is_refused(change: Change, sentence: str, tmp_path: Path) -> None:
    lilicorr(tmp_path, change)
    with pytest.raises(ModelLoadError, match=sentence):
        load_head(tmp_path)
    assert VOCABULARY > TOP
