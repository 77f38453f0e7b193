"""``outpace tune tree``: the best static tree for a model and its drafter."""

from __future__ import annotations

import json
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM
from outpace.cli.tune import tree
from outpace.core.trees.tree_shape import TreeShape
from outpace.errors import ConfigError
from outpace.tune.tree import TreeTrials, probe

Run = Callable[..., Any]


@pytest.fixture
def tune(run: Run, target: Path, tmp_path: Path) -> Run:
    """Looks for a tree of the tiny target, which drafts for itself unless something else is
    said."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w1 w2 w3"}\n{"prompt": "w7 w8"}\n')

    def invoke(*more: Any, draft: Path | None = target) -> Any:
        given = ("--model", target, "--prompts", prompts, "--out", tmp_path / "tree.json")
        drafting = () if draft is None else ("--draft", draft)
        return run("tune", "tree", *given, *drafting, "--max-tokens", 24, *more)

    return invoke


def test_what_is_found_is_taken_as_it_is(tune: Run, generate: Run, tmp_path: Path) -> None:
    made = tune("--nodes", 6, "--levels", 3)
    assert made.exit_code == 0, made.stderr
    file = tmp_path / "tree.json"
    config = json.loads(file.read_text())
    assert config["method"] == "draft_tree"
    shape = TreeShape.of_paths(config["branching"])
    assert 1 <= shape.size <= 6
    assert shape.height <= 3
    assert f"{file}: {shape.size} nodes on {shape.height} levels" in made.stdout
    flags = ("--temperature", 0, "--max-tokens", 12, "--ignore-eos", "--json")
    drafted = generate("w1 w2", "--speculative-config", file, *flags)
    assert drafted.exit_code == 0, drafted.stderr
    plain = generate("w1 w2", "--method", "none", *flags)
    assert json.loads(drafted.stdout)["token_ids"] == json.loads(plain.stdout)["token_ids"]


def test_options_of_the_drafter_are_kept(tune: Run, target: Path, tmp_path: Path) -> None:
    config = {"method": "draft_tree", "model": str(target), "with_replacement": True}
    words = ("--nodes", 4, "--levels", 2, "--temperature", 1, "--speculative-config")
    made = tune(*words, json.dumps(config), draft=None)
    assert made.exit_code == 0, made.stderr
    found = json.loads((tmp_path / "tree.json").read_text())
    assert {key: found[key] for key in config} == config


def test_what_has_no_open_tree_is_refused(tune: Run, target: Path, tmp_path: Path) -> None:
    chain = json.dumps({"method": "draft_model", "model": str(target)})
    several = json.dumps({"method": "auto", "model": str(target), "trees": True})
    given = json.dumps({"method": "draft_tree", "model": str(target), "branching": [2]})
    lost = ("--out", tmp_path / "nowhere" / "tree.json")
    for words, said in [
        (("--speculative-config", chain), "does not draft trees of any shape"),
        (("--speculative-config", several), "does not draft trees of any shape"),
        (("--speculative-config", given), "which is what is looked for"),
        (("--draft", target, "--speculative-config", chain), "exclude each other"),
        (("--draft", target, *lost), "there is no folder"),
    ]:
        refused = tune(*words, draft=None)
        assert refused.exit_code == 2
        assert said in " ".join(refused.stderr.split())
    assert not (tmp_path / "tree.json").exists()


def test_a_drafter_that_is_always_right_gets_a_chain(target: Path) -> None:
    """A model that drafts for itself: siblings of what is always accepted would be wasted."""
    llm = LLM(target, speculative_config={"method": "draft_tree", "model": str(target)})
    before = llm.engine.controller
    trials = TreeTrials(llm, ["w1 w2 w3", "w5"], tokens=48, temperature=0.0)
    shares = list(trials.play(nodes=6, levels=4))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert llm.engine.controller is before
    chances = trials.chances(4)
    assert min(first for first, *_ in chances) > 0.7
    found = trials.best(nodes=6, levels=4)
    assert found.shape.is_chain
    assert found.tokens_per_second == pytest.approx(found.of_chain)


def test_rounds_of_the_usual_first_tree_are_looked_at(target: Path) -> None:
    """It has more nodes than a text is given tokens."""
    defaults = signature(tree).parameters
    tokens, levels = defaults["max_tokens"].default, defaults["levels"].default
    assert probe(levels).size > tokens
    llm = LLM(target, speculative_config={"method": "draft_tree", "model": str(target)})
    trials = TreeTrials(llm, ["w1 w2 w3"], tokens, temperature=0.0)
    before = [first for first, *_ in trials.chances(levels)]
    next(trials.play(nodes=1, levels=levels))  # the first tree alone
    after = [first for first, *_ in trials.chances(levels)]
    assert all(new > old for old, new in zip(before, after, strict=True))
    assert not llm.engine.running


def test_a_context_without_room_for_the_first_tree_is_told(target: Path) -> None:
    config = {"method": "draft_tree", "model": str(target)}
    llm = LLM(target, speculative_config=config, max_model_len=40)
    before = llm.engine.controller
    trials = TreeTrials(llm, ["w1 w2 w3"], tokens=24, temperature=0.0)
    with pytest.raises(ConfigError, match="has drafted all 71 nodes"):
        next(trials.play(nodes=6, levels=8))
    assert llm.engine.controller is before


def test_a_drafter_of_chains_is_refused(target: Path) -> None:
    llm = LLM(target, speculative_config={"method": "draft_model", "model": str(target)})
    with pytest.raises(ConfigError, match="does not draft trees of any shape"):
        TreeTrials(llm, ["w1"], tokens=8, temperature=0.0)


def test_the_probe_shows_every_rank_and_goes_on_behind_each() -> None:
    shape = probe(levels=10)
    assert shape.height == 10
    assert {len(each) for each in shape.children if each} == {1, 4}
    assert TreeShape.of_paths(shape.paths).parents == shape.parents
