"""Published DFlash heads of every kind: read as their makers' code computes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads.published import (
    DFLASH_CONFIG,
    OWN,
    SIZE,
    TOKENS,
    VOCABULARY,
    Weights,
    dflash,
    drawn,
    put,
)
from heads.reference import BlockReference
from heads.runs import PROMPTS, Model, hidden_states, plain_texts, target
from heads.variants import say
from outpace import LLM
from outpace.core.proposal import Proposal
from outpace.draft.base import Rows
from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.base import TargetShape
from outpace.heads.checkpoint import load_head, save_head
from outpace.methods.heads.dflash import DFlash, DFlashConfig
from outpace.methods.heads.dflash_format import MASK_FILE
from targets.generating import greedy, ids

SLIDING = ["sliding_attention", "full_attention"]
INSIDE = {"mask_token_id": 17, "target_layer_ids": [1, 5, 10]}


def few(about: dict[str, Any], weights: Weights) -> None:
    about["draft_vocab_size"] = OWN
    weights |= drawn({"lm_head.weight": (OWN, SIZE), "embed_tokens.weight": (VOCABULARY, SIZE)})
    weights["d2t"] = torch.tensor(TOKENS) - torch.arange(OWN)
    weights["t2d"] = torch.tensor([token in TOKENS for token in range(VOCABULARY)])


def flat(about: dict[str, Any], weights: Weights) -> None:
    about |= about.pop("dflash_config")


BIASES = {
    f"layers.{layer}.self_attn.{name}_proj.bias": ({"q": 12, "o": SIZE}.get(name, 6),)
    for layer in range(2) for name in "qkvo"
}  # fmt: skip
Change = Callable[[dict[str, Any], Weights], object]
CHANGES: Mapping[str, Change] = {
    "full": say(dflash_config=INSIDE),
    "the last layer": say(dflash_config={**INSIDE, "target_layer_ids": [1, 5, 11]}),
    "flat": flat,
    "windows": say(
        dflash_config=INSIDE, layer_types=SLIDING, sliding_window=5, use_sliding_window=True
    ),
    "windows, whole blocks": say(
        dflash_config={**INSIDE, "causal": False}, layer_types=SLIDING, sliding_window=5,
        use_sliding_window=True,
    ),
    "windows everywhere": say(
        dflash_config={**INSIDE, "use_swa": True, "swa_window_size": 4}, use_sliding_window=False
    ),
    "causal": say(dflash_config=INSIDE, is_causal=True),
    "windows by type": say(
        dflash_config={**INSIDE, "use_swa": True, "swa_window_size": 4}, layer_types=SLIDING,
        sliding_window=9, use_sliding_window=True,
    ),
    "biases": lambda about, weights: (
        about.update(dflash_config=INSIDE, attention_bias=True),
        weights.update(drawn(BIASES)),
    ),
    "few tokens": few,
    "scaled": say(rope_scaling={"rope_type": "linear", "factor": 4.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_block_is_what_its_makers_code_computes(name: str, tmp_path: Path) -> None:
    dflash(tmp_path, CHANGES[name])
    head, model = load_head(tmp_path).double(), Model()
    assert isinstance(head, DFlash)
    states = torch.randn(1, 9, 3 * SIZE, dtype=torch.float64)
    roots, places = [4, 11, 0], [2, 6, 9]
    at = torch.arange(9)
    before = head.entries(states, at[None])
    visible = (at < torch.tensor(places)[:, None])[None]
    given = torch.tensor([roots]), torch.tensor([places])
    found = head.block(*given, before, visible, model)[0]
    for row, (root, place) in enumerate(zip(roots, places, strict=True)):
        reference = BlockReference(tmp_path, model.embeddings, model.output)
        expected = reference.block(states[0, :place], root, 4)
        assert torch.allclose(found[row], expected[:, head.d2t], rtol=0, atol=1e-10)


@pytest.mark.parametrize("copied", [False, True], ids=["the target's rows", "a copy of them"])
def test_embeddings_are_scaled_once(
    copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma multiplies its embeddings by itself; what the file says is of the rows as they are."""

    def change(about: dict[str, Any], weights: Weights) -> None:
        about["dflash_config"] = {**INSIDE, "input_embedding_scale": 3.0}
        if copied:
            weights["embed_tokens.weight"] = Model().embeddings.float()

    dflash(tmp_path, change)
    head, model = load_head(tmp_path).double(), Model()
    assert isinstance(head, DFlash)
    monkeypatch.setattr(Model, "embedding_scale", 5.0)
    monkeypatch.setattr(Model, "embed", lambda model, tokens: 5.0 * model.embeddings[tokens])
    found = head._embedded(torch.tensor([[4, 11]]), model)
    wanted = 3.0 * model.embeddings[torch.tensor([[[4, 17, 17, 17], [11, 17, 17, 17]]])]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_states_after_the_last_norm_have_no_word(tmp_path: Path) -> None:
    small = DFlash(TargetShape(SIZE, VOCABULARY, 2), DFlashConfig(own_mask=False, mask_token=3))
    assert small.hidden_layers == (1, -1)
    with pytest.raises(ConfigError, match="went through the target's last norm"):
        save_head(small, tmp_path, "dflash")


@pytest.mark.parametrize("name", CHANGES)
def test_every_kind_comes_back_bit_by_bit(name: str, tmp_path: Path) -> None:
    dflash(tmp_path / "public", CHANGES[name])
    first = load_head(tmp_path / "public")
    for form in ("outpace", "dflash", "speculators"):
        if (name, form) == ("causal", "speculators"):
            with pytest.raises(ConfigError, match="causal blocks in layers with windows only"):
                save_head(first, tmp_path / form, form)
            continue
        save_head(first, tmp_path / form, form)
        again = load_head(tmp_path / form)
        assert (again.config, again.hidden_layers) == (first.config, first.hidden_layers), form
        for weight, value in first.state_dict().items():
            assert torch.equal(again.state_dict()[weight], value), (form, weight)
    given, found = (
        load_file(tmp_path / part / "model.safetensors") for part in ("public", "dflash")
    )
    assert given.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in given.items())


@pytest.mark.parametrize("name", ["embedding", "mask_embedding", ""])
def test_masks_of_their_own_lie_beside_the_weights(name: str, tmp_path: Path) -> None:
    """As of MiMo V2.5: the token of the configuration is one that nothing was learned of."""
    dflash(tmp_path, say(dflash_config=INSIDE))
    mask = drawn({"mask": (1, SIZE)})["mask"]
    kept = {"mask_token_id": 17, name: mask} if name else mask
    torch.save(kept, tmp_path / MASK_FILE)
    head, model = load_head(tmp_path).double(), Model()
    assert isinstance(head, DFlash)
    assert head.config.own_mask
    states, root = torch.randn(1, 9, 3 * SIZE, dtype=torch.float64), torch.tensor([[4]])
    before = head.entries(states, torch.arange(9)[None])
    visible = torch.ones(1, 1, 9, dtype=torch.bool)
    found = head.block(root, torch.tensor([[9]]), before, visible, model)[0, 0]
    table = model.embeddings.clone()
    table[17] = mask[0]
    expected = BlockReference(tmp_path, table, model.output).block(states[0], 4, 4)
    assert torch.allclose(found, expected[:, head.d2t], rtol=0, atol=1e-10)
    torch.save({"other": torch.zeros(SIZE)}, tmp_path / MASK_FILE)
    with pytest.raises(ModelLoadError, match=f"{MASK_FILE} are damaged"):
        load_head(tmp_path)


@pytest.mark.parametrize(
    ("entries", "depths"),
    [
        ({}, 3),
        ({"query_zero_predicts_next": True}, 4),
        ({"dspark_bonus_anchor": True}, 3),
        ({"dspark_bonus_anchor": False}, 4),
        ({"dspark_bonus_anchor": False, "sample_from_anchor": False}, 3),
    ],
)
def test_which_place_guesses_first(
    entries: Mapping[str, bool], depths: int, tmp_path: Path
) -> None:
    dflash(tmp_path, say(dflash_config={**INSIDE, **entries}))
    head = load_head(tmp_path)
    assert (head.config.depths, head.config.sample_from_anchor) == (depths, depths == 4)


@pytest.mark.parametrize("non_causal", [False, True])
def test_a_folder_of_the_library(non_causal: bool, tmp_path: Path) -> None:
    """Its layers are numbers of hidden states."""
    weights = dflash(tmp_path / "flat", few)
    layer = {name: value for name, value in DFLASH_CONFIG.items() if name != "architectures"}
    for name in ("dflash_config", "block_size", "num_target_layers", "torch_dtype"):
        del layer[name]
    layer |= {"layer_types": SLIDING, "sliding_window": 5, "use_sliding_window": True}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 2}
    about = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": "a/model", "architectures": []},
        },
        "aux_hidden_state_layer_ids": [1, 6, 9],
        "block_size": 4,
        "mask_token_id": 17,
        "draft_vocab_size": OWN,
        "sample_from_anchor": False,
        "sliding_window_non_causal": non_causal,
        "transformer_layer_config": layer,
    }
    put(tmp_path, about, weights, "model.safetensors")
    head = load_head(tmp_path)
    assert isinstance(head, DFlash)
    assert (head.kind, head.hidden_layers, head.config.depths) == ("dflash", (1, 6, 9), 3)
    assert head.config.windows == [5, 0]
    assert head.config.causal == ([] if non_causal else [True, False])
    assert (head.target.name, head.d2t.tolist()) == ("a/model", TOKENS)
    save_head(head, tmp_path / "again", "speculators")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    for name in ("aux_hidden_state_layer_ids", "block_size", "mask_token_id", "draft_vocab_size",
                 "sliding_window_non_causal", "speculators_model_type"):  # fmt: skip
        assert again[name] == about[name]


@pytest.mark.parametrize("name", ["full", "windows", "windows everywhere", "few tokens"])
def test_what_is_drafted_in_a_run(name: str, tmp_path: Path) -> None:
    """The tokens that its makers' code would draft; and the text is the target's."""
    dflash(tmp_path, CHANGES[name])
    about = json.loads((tmp_path / "config.json").read_text())
    model = target()
    config = {"method": "dflash", "model": tmp_path, "check": False, "num_speculative_tokens": 3}
    llm = LLM(model, speculative_config=config, max_num_seqs=3)
    drafter: Any = llm.engine.drafter
    propose, checked = drafter.propose, 0
    reads = [at + 1 for at in about["dflash_config"]["target_layer_ids"]]

    def watched(rows: Rows, budgets: Sequence[int]) -> Proposal:
        nonlocal checked
        found: Proposal = propose(rows, budgets)
        for row in range(len(rows)):
            count, text = int(found.counts[row]), rows.since(row, 0)
            if not count:
                continue
            embeddings = model.get_input_embeddings().weight
            reference = BlockReference(tmp_path, embeddings, model.lm_head.weight)
            states = hidden_states(model, text)
            wanted = torch.cat([states[at][:-1] for at in reads], -1)
            logits = reference.block(wanted, text[-1], about["block_size"])
            assert found.tokens[row, :count].tolist() == logits.argmax(-1)[:count].tolist()
            checked += count
        return found

    drafter.propose = watched

    assert ids(llm.generate(PROMPTS, greedy(8))) == plain_texts()
    assert checked > 15
