"""Trees of trained heads: given ones, and the nodes that a head finds most probable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from devices import DEVICE, on_device
from outpace import LLM, SamplingParams
from outpace.core.trees.tree_shape import TreeShape
from outpace.draft.dynamic import MAX_DYNAMIC_NODES
from outpace.draft.registry import drafters, find_drafter
from outpace.errors import ConfigError
from outpace.heads.layers import AttentionContext
from outpace.methods.heads.base import TrainedDrafter, TreeHeadOptions
from outpace.policy.auto import AutoController
from outpace.policy.lengths.adaptive import Constant
from outpace.targets.hf.loading.loaded import LoadedModel
from targets.families import CONTEXT, PROMPTS, plain, target
from targets.generating import greedy, ids

LENGTH = 14
GIVEN = {"branching": [2, 2, 1]}
DYNAMIC = {"branching": "dynamic", "top_k": 3, "depth": 3}
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=LENGTH, ignore_eos=True)
HEADS = {name: kind for name, kind in drafters().items() if issubclass(kind, TrainedDrafter)}
METHODS = [name for name, kind in HEADS.items() if issubclass(kind.Options, TreeHeadOptions)]
OTHERS = [name for name, kind in HEADS.items() if kind.trees and name not in METHODS]
"""Their trees are the controller's choice, or follow from their guesses."""


@lru_cache
def dummy_options(method: str) -> Mapping[str, Any]:
    return find_drafter(method).dummy_options(LoadedModel(target("llama"), None, "llama"))


def decoder(method: str, **more: Any) -> LLM:
    config = {"method": method, "num_speculative_tokens": 7, **dummy_options(method), **more}
    return LLM(target("llama"), speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)


@pytest.mark.parametrize("options", [GIVEN, DYNAMIC], ids=["given", "dynamic"])
@pytest.mark.parametrize("method", METHODS)
def test_trees_change_no_text(method: str, options: Mapping[str, Any]) -> None:
    check_trees(decoder(method, **options))


@pytest.mark.parametrize("method", OTHERS)
def test_trees_that_no_option_names_change_no_text(method: str) -> None:
    llm = decoder(method)
    llm.engine.controller = Constant(7, shape=TreeShape.branching(GIVEN["branching"]))
    check_trees(llm)


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("method", ["eagle3", "draft_tree", "recycling"])
def test_a_request_may_ask_for_more_than_is_usual(method: str, count: int) -> None:
    llm = decoder(method, num_speculative_tokens=count)
    params = replace(greedy(LENGTH), speculative=6)
    drafted = []
    with llm.engine.observing(lambda round: drafted.append(max(round.proposal.counts.tolist()))):
        assert ids(llm.generate(PROMPTS, params)) == plain(
            "llama", LENGTH, tuple(map(tuple, PROMPTS))
        )
    assert max(drafted) > 2


def check_trees(llm: LLM) -> None:
    """Trees of seven nodes are drafted, and the texts are those of plain decoding, or the same in
    any batch."""
    expected = plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))
    trees = []
    with llm.engine.observing(lambda trace: trees.append(trace.proposal)):
        assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == expected
        assert ids(llm.generate([PROMPTS[2]], greedy(LENGTH))) == [expected[2]]
    assert any(not each.tree.is_chain and int(each.counts.max()) == 7 for each in trees)
    together = ids(llm.generate(PROMPTS, [SAMPLED, greedy(LENGTH), SAMPLED, SAMPLED]))
    assert ids(llm.generate([PROMPTS[0]], SAMPLED))[0] == together[0]


def test_medusa_guesses_once_for_all_nodes_of_a_depth() -> None:
    llm = decoder("medusa", **GIVEN)
    head, seen = llm.engine.drafter.head, []  # type: ignore[attr-defined]
    for output in head.outputs:
        output.register_forward_hook(lambda module, given, found: seen.append(found.shape[1]))
    llm.generate(PROMPTS[0], greedy(LENGTH))
    assert len(seen) > 3
    assert set(seen) == {1}


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "s2d"])
def test_dynamic_trees_hold_the_most_probable_nodes(method: str) -> None:
    """Against all nodes of the first two levels, computed from the distribution of chains."""
    llm = decoder(method, branching="dynamic", top_k=64, depth=2, num_speculative_tokens=6)
    prompt, found = PROMPTS[0], []
    with llm.engine.observing(lambda trace: found.append(trace.proposal)):
        llm.generate([prompt], SAMPLED)
    drafted = next(each for each in found if int(each.counts[0]) == 6)
    paths: list[tuple[int, ...]] = [()]
    for node in range(6):
        parent = int(drafted.tree.parents[0, node])
        paths.append((*paths[parent], int(drafted.tokens[0, node])))
    worths = _worths(method, prompt)
    best = sorted(worths, key=lambda path: -worths[path])[:6]
    assert set(paths[1:]) == set(best)


def test_dynamic_trees_may_have_as_many_nodes_as_eagle_2s() -> None:
    llm = decoder("eagle", branching="dynamic", num_speculative_tokens="auto")
    assert isinstance(llm.engine.controller, AutoController)
    assert llm.engine.controller["eagle"].most == MAX_DYNAMIC_NODES == 60
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == plain(
        "llama", LENGTH, tuple(map(tuple, PROMPTS))
    )


def _worths(method: str, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """The head's probabilities of all paths of two tokens after a prompt, by plain steps."""
    from outpace.train.teacher import Teacher

    head = dummy_options(method)["model"]
    teacher = Teacher(LoadedModel(target("llama"), None, "llama"), head.hidden_layers)
    count = len(prompt) - 1  # the last token of a prompt is the first root
    states = teacher.read(on_device([prompt])).hidden_states[:, :-1]
    attn_context = AttentionContext.causal(head.begin(1), count)
    outputs, before = head.step(
        head.combine_hidden_states(states), on_device([prompt[1:]]), attn_context, teacher
    )
    first = (head.logits(outputs[:, -1], teacher)[0] / 0.9).softmax(-1)
    found = {}
    for token, chance in enumerate(first.tolist()):
        found[(token,)] = chance
        visible = torch.ones(1, 1, count + 1, dtype=torch.bool, device=DEVICE)
        attn_context = AttentionContext(on_device([[count]]), before, visible)
        below, _ = head.step(outputs[:, -1:], on_device([[token]]), attn_context, teacher)
        for child, q in enumerate((head.logits(below[0, 0], teacher) / 0.9).softmax(-1).tolist()):
            found[token, child] = chance * q
    return found


def test_options_that_contradict_each_other_are_refused() -> None:
    model = dummy_options("eagle")["model"]
    with pytest.raises(ConfigError, match="'top_k' is about dynamic trees"):
        TreeHeadOptions(model=model, top_k=3)
    with pytest.raises(ConfigError, match="depth must be at least 1, not 0"):
        TreeHeadOptions(model=model, branching="dynamic", depth=0)
    with pytest.raises(ConfigError, match="branching must be 'auto', 'dynamic' or list"):
        TreeHeadOptions(model=model, branching="wide")
    with pytest.raises(ConfigError, match="did you mean 'dynamic'"):
        TreeHeadOptions(model=model, branching="dynamc")
