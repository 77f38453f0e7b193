"""Look-ups that take turns with a draft model or a trained head: the same texts, whoever drafts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.core.trees.tree_shape import TreeShape
from outpace.draft.base import Round
from outpace.draft.registry import drafter_names, drafters, find_drafter
from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.base import Head
from outpace.heads.checkpoint import save_head
from outpace.methods.choosers.base import CompositeDrafter
from outpace.policy.auto import AutoController
from outpace.policy.lengths.adaptive import Constant
from outpace.targets.hf.loading.loaded import LoadedModel
from representatives import representatives
from targets.families import CONTEXT, PROMPTS, plain, target
from targets.generating import greedy, ids

from .test_routes import NEAR, NGRAM

LENGTH = 40
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
CONFIGS = {
    "look-ups": {"lookups": [NGRAM, {"method": "suffix"}]},
    "a model": {"lookups": [NGRAM], **NEAR},
    "trees": {"lookups": [NGRAM], "trees": True, **NEAR},
    "fixed": {"lookups": [NGRAM], "num_speculative_tokens": 4, **NEAR},
}
LOOK_UPS = {"none", "ngram", "suffix", "recycling", "retrieval", "consensus"}
"""Drafters that run no model."""
SOME = {"draft_model", "draft_tree", "medusa", "eagle3", "dflash", "early_exit", "layer_skip"}


@lru_cache
def dummy_options(method: str) -> Mapping[str, Any]:
    return find_drafter(method).dummy_options(LoadedModel(target("llama"), None, "llama"))


def decoder(**config: Any) -> LLM:
    given = {"method": "auto", **config}
    return LLM(target("llama"), speculative_config=given, max_num_seqs=4, max_model_len=CONTEXT)


def check_texts(llm: LLM) -> None:
    """Greedy texts are those of plain decoding, seeded ones the same alone and in a batch."""
    expected = plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))
    for _ in range(2):
        assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == expected
    together = ids(llm.generate(PROMPTS, SAMPLED))
    assert [ids(llm.generate([prompt], SAMPLED))[0] for prompt in PROMPTS] == together


@pytest.mark.parametrize("name", CONFIGS)
def test_texts_are_the_same_whoever_is_chosen(name: str) -> None:
    check_texts(decoder(**CONFIGS[name]))


def why_not(method: str) -> str:
    """The reason for which a method cannot take turns with look-ups; "" for one that can."""
    kind = drafters()[method]
    if issubclass(kind, CompositeDrafter):
        return "stands for several drafters"
    if kind.capabilities.uses_aux_tokens:
        return "drafts inside the target's own pass"
    return "runs no model" if method in LOOK_UPS else ""


def tried_at_each_change(method: str, count: Any) -> bool:
    """What is refused, and of the others some of each kind: a smaller model and its trees, heads
    that read states, a head that drafts in blocks, parts of the target, one that learns."""
    return bool(why_not(method)) or method in SOME


@pytest.mark.parametrize(
    ("method", "count"),
    representatives(itertools.product(drafter_names(), ["auto", 4]), tried_at_each_change),
)
def test_any_drafter_with_a_model_takes_turns_with_look_ups(method: str, count: Any) -> None:
    config = {
        "lookups": [NGRAM],
        "drafter": {"method": method, **dummy_options(method)},
        "num_speculative_tokens": count,
    }
    if reason := why_not(method):
        with pytest.raises(ConfigError, match=reason):
            decoder(**config)
        return
    llm, drafted = decoder(**config), set()

    def see(trace: Round) -> None:
        drafted.update(outcome.method for outcome in trace.outcomes if outcome.drafted)

    with llm.engine.observing(see):
        check_texts(llm)
    assert drafted == {"ngram", method}


def test_a_tree_of_which_a_chain_is_left_is_learned_from() -> None:
    """Next to a model that draws its tokens a look-up's tree is cut to its eldest chain."""
    llm = decoder(lookups=[{"method": "recycling", "branching": [2, 2]}], **NEAR)
    params = replace(greedy(60), speculative=6)
    outputs = llm.generate(PROMPTS, params)
    assert max(len(output.metrics.accepted_per_position) for output in outputs) > 1
    assert ids(outputs) == plain("llama", 60, tuple(map(tuple, PROMPTS)))


def test_who_drafts_nothing_takes_no_turn() -> None:
    llm = decoder(lookups=[{"method": "none"}], **NEAR)
    assert llm.engine.drafter.name == "draft_model"
    check_texts(llm)
    llm = decoder(lookups=[{"method": "none"}, NGRAM])
    assert llm.engine.drafter.name == "ngram"
    check_texts(llm)


@pytest.mark.parametrize("branching", [[2, 2, 1], "dynamic"], ids=["given", "dynamic"])
def test_a_head_keeps_its_trees(branching: Any) -> None:
    head = {"method": "medusa", **dummy_options("medusa"), "branching": branching}
    llm, wide = decoder(lookups=[NGRAM], drafter=head, num_speculative_tokens=6), []
    with llm.engine.observing(lambda trace: wide.append(trace.proposal.tree.max_siblings)):
        check_texts(llm)
    assert max(wide) > 1


@pytest.mark.parametrize("rule", ["recursive", "coupled"])
def test_a_tree_that_gives_its_tokens_stays_whole(rule: str) -> None:
    """The controller takes a draft for the first nodes of the tree that it has asked for."""
    llm = decoder(lookups=[NGRAM], trees=True, verify=rule, **NEAR)
    shape, drafts = TreeShape((0, 0, 1, 2, 1)), []
    llm.engine.controller = Constant(5, shape=shape)

    def see(trace: Round) -> None:
        for row, one in enumerate(trace.outcomes):
            if one.method == "draft_tree" and one.drafted:
                parents = trace.proposal.tree.parents[row, : one.drafted].tolist()
                drafts.append(parents == list(shape.parents[: one.drafted]))

    with llm.engine.observing(see):
        check_texts(llm)
    assert drafts
    assert all(drafts)


def test_it_is_its_only_drafter() -> None:
    """With nobody to choose from, choosing would take time for nothing."""
    for name, config in (("suffix", {}), ("ngram", {"lookups": [NGRAM]})):
        engine = decoder(**config).engine
        assert engine.drafter.name == name
        assert isinstance(engine.controller, AutoController)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    head = dummy_options("medusa")["model"]
    assert isinstance(head, Head)
    save_head(head, tmp_path / "head")
    return str(tmp_path / "head")


def test_a_head_is_known_by_its_folder(folder: str) -> None:
    llm = LLM(target("llama"), speculative_config={"model": folder}, max_model_len=CONTEXT)
    assert llm.engine.drafter.name == "auto"
    assert list(llm.engine.drafter.candidate_drafters) == ["suffix", "medusa"]
    expected = plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == expected
    given = decoder(model=dummy_options("medusa")["model"]).engine.drafter
    assert list(given.candidate_drafters) == ["suffix", "medusa"]


def test_a_head_is_no_draft_model(folder: str) -> None:
    three = {"model": folder, "num_speculative_tokens": 3}
    llm = LLM(target("llama"), speculative_config=three, max_model_len=CONTEXT)
    assert llm.engine.drafter.name == "medusa"
    with pytest.raises(ConfigError, match=r"holds a trained head.*with the method 'medusa'"):
        LLM(target("llama"), speculative_config={"method": "draft_model", **three})


def test_a_damaged_configuration_is_not_a_heads(folder: str) -> None:
    (Path(folder) / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"cannot read the config\.json"):
        decoder(model=folder)


def test_a_head_that_learns_leaves_seeded_rows_to_look_ups() -> None:
    """It drafts nothing for them, and must not be chosen for that."""
    head = {"method": "medusa", **dummy_options("medusa"), "online": {"every": 64}}
    drafter = decoder(lookups=[NGRAM], drafter=head).engine.drafter
    candidate_drafters = drafter.candidate_drafters.items()
    assert {name: child.capabilities.skips_reproducible for name, child in candidate_drafters} == {
        "ngram": False,
        "medusa": True,
    }


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"dtype": "float32"}, "'dtype' is about a draft model or head: give 'model', too"),
        ({"trees": "no"}, "trees must be"),
        ({"trees": True}, "'trees' is about a draft model or head: give 'model', too"),
        ({"check": False, **NEAR}, "'check' is about a trained head, and 'model' is none"),
        ({"check": "no"}, "check must be"),
        ({"lookups": [NGRAM, NGRAM]}, "names one method twice"),
        ({"drafter": NGRAM, **NEAR}, "give one of the two"),
        ({"drafter": {"method": "draft_model", **NEAR}, "dtype": "float32"}, "inside 'drafter'"),
        ({"drafter": "medusa"}, "speculative_config"),
        ({"drafter": {"method": "draft_model", **NEAR, "verify": "token"}}, "'verify' cannot be"),
    ],
)
def test_mistakes_are_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decoder(**config)


def test_options_of_a_draft_model_are_refused_beside_a_head(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"'dtype' is about a draft model.*is a medusa head"):
        decoder(model=folder, dtype="float32")


@pytest.mark.parametrize(
    ("look_up", "reason"),
    [
        (NEAR, "lookups cannot be 'draft_model', which runs a model"),
        ({"method": "layer_skip", "layers": {"attention": [1]}}, "which runs a model"),
        (
            {"method": "lookahead"},
            "lookups cannot be 'lookahead', which drafts inside the target's",
        ),
        ({"method": "pass", **dummy_options("pass")}, "drafts inside the target's own pass"),
        ({"method": "ensemble", "drafters": [NGRAM, NEAR]}, "'ensemble', which runs a model"),
        ({"method": "ensemble", "drafters": [NGRAM, {"method": "lookahead"}]}, "own pass"),
    ],
)
def test_what_costs_a_pass_is_no_look_up(look_up: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        decoder(lookups=[NGRAM, look_up])
