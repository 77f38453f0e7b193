"""Published DSpark heads of every kind: read, drafted with and trained as their makers' code does,
and their conditional distributions drawn from exactly."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads.published import (
    DOMINO,
    DSPARK_CONFIG,
    OWN,
    RANK,
    SIZE,
    TOKENS,
    VOCABULARY,
    Change,
    Weights,
    domino,
    drawn,
    dspark,
    nothing,
    put,
)
from heads.reference import JoinedReference
from heads.runs import PROMPTS, Model, drafted, plain_texts, referred, target
from heads.variants import say
from outpace import LLM
from outpace.core.proposal import Proposal
from outpace.draft.base import Rows
from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.checkpoint import find_head_kind, load_head, save_head
from outpace.methods.heads.dflash import DFlash
from outpace.methods.heads.dspark import BlockStep, DSpark
from representatives import representatives
from targets.generating import greedy, ids


def flat(about: dict[str, Any], weights: Weights) -> None:
    """DeepSpec's, with copies of the target's embeddings and output matrix."""
    inside = about.pop("dflash_config")
    del inside["projector_type"], inside["attention_mode"]
    about |= {**inside, "architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
    weights |= drawn(
        {"embed_tokens.weight": (VOCABULARY, SIZE), "lm_head.weight": (VOCABULARY, SIZE)}
    )


def few(about: dict[str, Any], weights: Weights) -> None:
    about["draft_vocab_size"] = OWN
    weights |= drawn({"lm_head.weight": (OWN, SIZE), "embed_tokens.weight": (VOCABULARY, SIZE)})
    weights["markov_head.markov_w2.weight"] = weights["markov_head.markov_w2.weight"][:OWN].clone()
    weights["d2t"] = torch.tensor(TOKENS) - torch.arange(OWN)
    weights["t2d"] = torch.tensor([token in TOKENS for token in range(VOCABULARY)])


def bare(about: dict[str, Any], weights: Weights) -> None:
    """Its confidence does not see the token before."""
    about["dflash_config"]["confidence_head_with_markov"] = False
    weights["confidence_head.proj.weight"] = weights["confidence_head.proj.weight"][
        :, :SIZE
    ].clone()


def labelled(about: dict[str, Any], weights: Weights) -> None:
    """A copy under DFlash's name."""
    flat(about, weights)
    about["architectures"] = ["DFlashDraftModel"]


def masks_only(about: dict[str, Any], weights: Weights) -> None:
    """Qwen3.6's Domino, with all of its tokens joined."""
    about["dflash_config"] |= {"shift_label": False, "pure_draft_prefix_len": 0}


def put_head(name: str, folder: Path) -> None:
    kind, change = CHANGES[name]
    domino(folder, change) if kind == "domino" else dspark(folder, change, kind)


CHANGES: Mapping[str, tuple[str, Change]] = {
    "vanilla": ("vanilla", nothing),
    "gated": ("gated", nothing),
    "rnn": ("rnn", nothing),
    "flat": ("vanilla", flat),
    "few tokens": ("gated", few),
    "bare confidence": ("rnn", bare),
    "masks only": ("vanilla", say(sample_from_anchor=False)),
    "labelled DFlash": ("vanilla", labelled),
    "Domino": ("domino", nothing),
    "Domino, masks only": ("domino", masks_only),
}  # fmt: skip


def made(name: str, folder: Path) -> DSpark:
    put_head(name, folder)
    assert find_head_kind(folder) == "dspark"
    head = load_head(folder)
    assert isinstance(head, DSpark)
    return head


@pytest.mark.parametrize("name", CHANGES)
def test_every_path_through_a_block_is_what_its_makers_code_computes(
    name: str, tmp_path: Path
) -> None:
    head, model = made(name, tmp_path).double(), Model()
    depths = 3 if "masks only" in name else 4
    assert (head.config.depths, head.block_size, head.hidden_layers) == (depths, 4, (2, 6, 11))
    states, root, place = torch.randn(1, 6, 3 * SIZE, dtype=torch.float64), 11, 6
    at = torch.arange(6)
    before, visible = head.entries(states, at[None]), torch.ones(1, 1, 6, dtype=torch.bool)
    outputs = head.outputs(torch.tensor([[root]]), torch.tensor([[place]]), before, visible, model)
    logits = head.logits(outputs, model)[0, 0]
    reference = JoinedReference(tmp_path, model.embeddings, model.output)
    reference.block(states[0], root, 4)
    for path in ([root, 3, 7, 19], [root, 7, 3, 0], [root, 0, 0, 1]):
        memory = head.memory(torch.tensor(root))
        for depth, token in enumerate(path[:depths]):
            here, said = torch.tensor(token), outputs[0, 0, depth]
            sure = head.confidence(said, here)
            found, memory = head.joined(BlockStep(depth, logits[depth], said, here, memory), model)
            expected, chance = reference.after(path[: depth + 1])
            assert torch.allclose(found, expected[head.d2t], rtol=0, atol=1e-10)
            assert (sure is None) == (chance is None)
            if sure is not None and chance is not None:
                assert torch.allclose(sure.sigmoid(), chance, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_against_deepspec(kind: str, tmp_path: Path) -> None:
    """The makers' own code writes the folder, and samples a block. Its norms compute in float32."""
    modeling: Any = pytest.importorskip("deepspec.modeling.dspark.qwen3.modeling")
    from transformers import Qwen3Config

    config = Qwen3Config(
        hidden_size=SIZE, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=6, vocab_size=VOCABULARY, rms_norm_eps=1e-6,
        layer_types=["full_attention"] * 2, tie_word_embeddings=False,
        attn_implementation="eager",
    )  # fmt: skip
    for name, value in {
        "num_target_layers": 12, "block_size": 4, "mask_token_id": 17, "num_anchors": 16,
        "target_layer_ids": [1, 5, 10], "enable_confidence_head": True, "markov_rank": RANK,
        "confidence_head_with_markov": True, "markov_head_type": kind,
    }.items():  # fmt: skip
        setattr(config, name, value)
    torch.manual_seed(0)
    theirs = modeling.Qwen3DSparkModel(config).double().eval()
    for parameter in theirs.parameters():
        parameter.data = torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path)
    head = load_head(tmp_path)
    assert isinstance(head, DSpark)
    states, root = torch.randn(1, 5, 3 * SIZE, dtype=torch.float64), torch.tensor([[11]])
    block = torch.tensor([[11, 17, 17, 17]])
    with torch.no_grad():
        said = theirs._forward_backbone(
            position_ids=torch.arange(9)[None], noise_embedding=theirs.embed_tokens(block),
            target_hidden_states=states,
        )  # fmt: skip
        tokens, wanted = theirs.sample_draft_tokens(
            theirs.compute_logits(said), first_prev_token_ids=root[0], hidden_states=said
        )
        previous = torch.cat([root, tokens[:, :-1]], 1)
        sure = theirs.predict_confidence_step(said, previous)
    before, seen = head.entries(states, torch.arange(5)[None]), torch.ones(1, 1, 5).bool()
    outputs = head.outputs(root, torch.tensor([[5]]), before, seen, Model())[:, 0]
    logits, memory = head.logits(outputs, Model()), head.memory(root[:, 0])
    for depth in range(4):
        here = outputs[:, depth], previous[:, depth]
        found, memory = head.joined(BlockStep(depth, logits[:, depth], *here, memory), Model())
        assert torch.allclose(found, wanted[:, depth], rtol=1e-5, atol=1e-5)
        confidence = head.confidence(*here)
        assert confidence is not None
        assert torch.allclose(confidence.float(), sure[:, depth], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CHANGES)
def test_every_kind_comes_back_bit_by_bit(name: str, tmp_path: Path) -> None:
    first = made(name, tmp_path / "public")
    forms = ["outpace", "dspark", "speculators"]
    if "Domino" in name:
        with pytest.raises(ConfigError, match="holds no Domino heads"):
            save_head(first, tmp_path / "other", forms.pop())
    for form in forms:
        save_head(first, tmp_path / form, form)
        again = load_head(tmp_path / form)
        assert (again.config, again.hidden_layers) == (first.config, first.hidden_layers), form
        for weight, value in first.state_dict().items():
            assert torch.equal(again.state_dict()[weight], value), (form, weight)
    given, found = (
        load_file(tmp_path / part / "model.safetensors") for part in ("public", "dspark")
    )
    assert given.keys() == found.keys()
    if name == "Domino":
        about = json.loads((tmp_path / "dspark" / "config.json").read_text())
        assert about["dflash_config"] == DOMINO
        assert about["architectures"] == ["DominoDraftModel"]
    if name == "vanilla":
        about = json.loads((tmp_path / "dspark" / "config.json").read_text())
        wanted = {**DSPARK_CONFIG["dflash_config"]}
        del wanted["attention_mode"], wanted["confidence_head_alpha"]
        assert about["dflash_config"] == wanted
        assert about["architectures"] == DSPARK_CONFIG["architectures"]


def test_a_head_that_joins_nothing_is_one_of_dflash(tmp_path: Path) -> None:
    """DeepSpec's DFlash heads of block 7: the same class, without the further parts."""

    def plain(about: dict[str, Any], weights: Weights) -> None:
        flat(about, weights)
        about |= {"markov_rank": 0, "enable_confidence_head": False}
        del about["markov_head_type"], about["confidence_head_with_markov"]
        for name in [name for name in weights if name.startswith(("markov", "confidence"))]:
            del weights[name]

    dspark(tmp_path / "public", plain)
    head = load_head(tmp_path / "public")
    assert type(head) is DFlash
    assert find_head_kind(tmp_path / "public") == "dflash"
    assert (head.config.depths, head.config.sample_from_anchor) == (4, True)
    for form in ("dflash", "speculators"):
        save_head(head, tmp_path / form, form)
        assert load_head(tmp_path / form).config == head.config


def test_a_folder_of_the_library(tmp_path: Path) -> None:
    weights = dspark(tmp_path / "flat", few)
    layer = {name: value for name, value in DSPARK_CONFIG.items() if name != "architectures"}
    for name in ("dflash_config", "block_size", "num_target_layers", "torch_dtype"):
        del layer[name]
    proposal: dict[str, Any] = {"proposal_type": "greedy", "speculative_tokens": 4}
    about: dict[str, Any] = {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_config": {
            "algorithm": "dspark",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": "a/model", "architectures": []},
        },
        "aux_hidden_state_layer_ids": [1, 6, 9],
        "block_size": 4,
        "mask_token_id": 17,
        "draft_vocab_size": OWN,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "transformer_layer_config": layer,
    }
    put(tmp_path, about, weights, "model.safetensors")
    head = load_head(tmp_path)
    assert isinstance(head, DSpark)
    assert (head.kind, head.hidden_layers, head.config.depths) == ("dspark", (1, 6, 9), 4)
    assert (head.target.name, head.d2t.tolist()) == ("a/model", TOKENS)
    for proposed, depths in ((4, 4), (3, 3), (2, 3)):  # files of before July 2026
        proposal["speculative_tokens"] = proposed
        about.pop("sample_from_anchor", None)
        put(tmp_path / "old", about, weights, "model.safetensors")
        old = load_head(tmp_path / "old")
        assert (old.config.depths, old.config.sample_from_anchor) == (depths, depths == 4)
    about["sample_from_anchor"] = True
    save_head(head, tmp_path / "again", "speculators")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    for name in about.keys() - {"architectures", "speculators_config", "transformer_layer_config"}:
        assert again[name] == about[name]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (say(architectures=["DeepseekV4DSparkModel"]), "architecture is .*DeepseekV4DSparkModel"),
        (say(architectures=["Qwen35DSparkModel"]), "architecture is .*Qwen35DSparkModel"),
        (say(markov_rank="5", dflash_config={"mask_token_id": 17}), "markov_rank is '5'"),
        (
            say(dflash_config={**DSPARK_CONFIG["dflash_config"], "markov_head_type": "fir"}),
            "markov_head_type is 'fir'",
        ),
        (
            say(dflash_config={**DSPARK_CONFIG["dflash_config"], "markov_rank": 0}),
            "confidence_head_with_markov needs a markov_rank",
        ),
        (
            lambda about, weights: weights.pop("markov_head.markov_w1.weight"),
            "not those .*markov_head.markov_w1",
        ),
    ],
)
def test_a_head_of_another_make_is_refused(change: Change, sentence: str, tmp_path: Path) -> None:
    dspark(tmp_path, change)
    with pytest.raises(ModelLoadError, match=sentence):
        load_head(tmp_path)


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {"method": "dspark", "model": folder, "check": False, **more}


@pytest.mark.parametrize(
    ("name", "how"),
    representatives(
        itertools.product(
            ["vanilla", "rnn", "few tokens", "masks only", "Domino"],
            ["chain", "tree", "dynamic", "confidence"],
        ),
        lambda name, how: how == "chain" or name in ("rnn", "Domino"),
    ),
)
def test_what_is_drafted_in_a_run(name: str, how: str, tmp_path: Path) -> None:
    """The nodes that its makers' code would draft; and the text is the target's."""
    if (name, how) == ("Domino", "confidence"):
        pytest.skip("Domino has no confidence head")
    put_head(name, tmp_path)
    more: dict[str, Any] = {
        "chain": {"num_speculative_tokens": 3},
        "tree": {"branching": [2, 2, 1], "num_speculative_tokens": 10},
        "dynamic": {"branching": "dynamic", "top_k": 2, "depth": 3, "num_speculative_tokens": 6},
        "confidence": {"branching": [2, 2, 1], "num_speculative_tokens": 10, "confidence": 0.6},
    }[how]
    model = target()
    llm = LLM(model, speculative_config=settings(tmp_path, **more), max_num_seqs=3)
    drafter: Any = llm.engine.drafter
    propose, checked, ended = drafter.propose, 0, 0
    children = [2, 2, 1]

    def watched(rows: Rows, budgets: Sequence[int]) -> Proposal:
        nonlocal checked, ended
        found: Proposal = propose(rows, budgets)
        for row in range(len(rows)):
            text = rows.since(row, 0)
            if len(text) < 2 or not budgets[row]:
                continue
            reference = referred(JoinedReference, tmp_path, text)
            paths, under = drafted(found, row, text[-1])
            for node, tokens in under.items():
                depth = len(paths[node]) - 1
                if depth == 3:
                    continue
                logits, chance = reference.after(paths[node])
                if how == "confidence" and chance is not None and float(chance) < 0.6:
                    assert not tokens
                    ended += 1
                    continue
                if tokens:
                    best = logits.topk(len(tokens)).indices.tolist()
                    assert tokens == best
                if how == "confidence" and budgets[row] == 10:
                    assert len(tokens) == children[depth]
                checked += len(tokens)
        return found

    drafter.propose = watched

    assert ids(llm.generate(PROMPTS, greedy(8))) == plain_texts()
    assert checked > (5 if how == "confidence" else 15)
    assert bool(ended) == (how == "confidence")


def test_confidence_and_dynamic_trees_exclude_each_other(tmp_path: Path) -> None:
    dspark(tmp_path)
    both = settings(tmp_path, branching="dynamic", confidence=0.5)
    with pytest.raises(ConfigError, match="leave one of them out"):
        LLM(target(), speculative_config=both)

    def unsure(about: dict[str, Any], weights: Weights) -> None:
        inside = about["dflash_config"]
        inside["enable_confidence_head"] = False
        del weights["confidence_head.proj.weight"], weights["confidence_head.proj.bias"]

    dspark(tmp_path / "unsure", unsure)
    with pytest.raises(ConfigError, match="has no confidence head"):
        LLM(target(), speculative_config=settings(tmp_path / "unsure", confidence=0.5))
