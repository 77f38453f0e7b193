"""Dynamic trees: the best nodes by the drafter's own probabilities, and texts that stay exact."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from lab.options.walk import audit_options

from devices import on_device
from outpace import LLM, SamplingParams
from outpace.draft.registry import find_drafter
from outpace.errors import ConfigError, IncompatibleRule
from outpace.methods.models.tree import DraftTree
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.verify.registry import rules
from targets.families import CONTEXT, PROMPTS, plain, target
from targets.generating import greedy, ids

LENGTH = 14
LOSSLESS = [name for name, rule in rules().items() if rule.lossless]
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=LENGTH, ignore_eos=True)
COOL = replace(SAMPLED, temperature=0.3)
HOT = SamplingParams(temperature=2.5, seed=3, max_tokens=LENGTH, ignore_eos=True)


@lru_cache
def draft_model() -> Any:
    return find_drafter("draft_tree").dummy_options(LoadedModel(target("llama"), None, "llama"))[
        "model"
    ]


def decoder(**more: Any) -> LLM:
    config = {"method": "draft_tree", "branching": "dynamic", "model": draft_model()}
    config |= {"num_speculative_tokens": 7, **more}
    return LLM(target("llama"), speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)


def first_drafts(llm: LLM, prompts: list[list[int]], params: Any) -> list[Any]:
    """Returns what each row drafted first: by the path of every node, in the order of the nodes."""
    rounds: list[Any] = []
    with llm.engine.observing(lambda trace: rounds.append(trace.proposal)):
        llm.generate(prompts, params)
    proposal = next(each for each in rounds if int(each.counts.max()) > 0)
    found = []
    for row in range(len(prompts)):
        paths: list[tuple[int, ...]] = [()]
        for node in range(int(proposal.counts[row])):
            parent = int(proposal.tree.parents[row, node])
            paths.append((*paths[parent], int(proposal.tokens[row, node])))
        found.append(paths[1:])
    return found


def worth(prompt: list[int], temperature: float, depth: int, each: int) -> dict[Any, float]:
    """Returns the product of the draft model's probabilities on the path of every node of so many
    most probable tokens at each depth, by plain passes of the model."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    level: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        with torch.inference_mode():
            texts = on_device([[*prompt, *path] for path in level])
            probs = (draft_model().model(texts).logits[:, -1] / temperature).softmax(-1)
        below = []
        for path, q in zip(level, probs, strict=True):
            for token in q.topk(each).indices.tolist():
                found[(*path, token)] = found[path] * float(q[token])
                below.append((*path, token))
        level = below
    del found[()]
    return found


@pytest.mark.parametrize("params", [greedy(LENGTH), COOL, SAMPLED, HOT])
def test_the_best_nodes_of_all_are_drafted(params: SamplingParams) -> None:
    llm = decoder(num_speculative_tokens=8, top_k=8, depth=3)
    shapes = set()
    for prompt, drafted in zip(PROMPTS, first_drafts(llm, PROMPTS, params), strict=True):
        worths = worth(prompt, params.temperature or 1.0, depth=3, each=8)
        best = sorted(worths, key=worths.__getitem__, reverse=True)[:8]
        assert set(drafted) == set(best)
        assert [len(path) for path in drafted] == sorted(map(len, drafted))
        shapes.add(tuple(sorted(map(len, drafted))))
    if params is COOL:
        assert len(shapes) > 1, "trees of different texts should differ"


def test_only_the_best_nodes_of_a_level_are_expanded() -> None:
    (drafted,) = first_drafts(
        decoder(num_speculative_tokens=20, top_k=2, depth=3), PROMPTS[:1], HOT
    )
    worths = worth(PROMPTS[0], HOT.temperature or 1.0, depth=3, each=2)
    expanded: list[tuple[int, ...]] = [()]
    expected: set[tuple[int, ...]] = set()
    for _ in range(3):
        level = [path for path in worths if path[:-1] in expanded]
        expected.update(level)
        expanded = sorted(level, key=worths.__getitem__, reverse=True)[:2]
    assert set(drafted) == expected
    assert len(expected) == 2 + 4 + 4


def test_what_a_row_drafts_does_not_depend_on_others() -> None:
    llm = decoder()
    together = first_drafts(llm, PROMPTS, HOT)
    assert together == [first_drafts(llm, [prompt], HOT)[0] for prompt in PROMPTS]
    wishes = [replace(HOT, speculative=budget) for budget in (1, 7, 3, 2)]
    cut = first_drafts(llm, PROMPTS, wishes)
    assert [len(paths) for paths in cut] == [1, 7, 3, 2]
    for part, whole in zip(cut, together, strict=True):
        assert set(part) <= set(whole)


@pytest.mark.parametrize("rule", LOSSLESS)
def test_texts_are_those_of_the_target(rule: str) -> None:
    if not rules()[rule].trees:
        with pytest.raises(IncompatibleRule, match="chains only"):
            decoder(verify=rule)
        return
    llm = decoder(verify=rule, top_k=3, depth=3)
    outputs = llm.generate(PROMPTS, greedy(LENGTH))
    assert ids(outputs) == plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))
    metrics = [output.metrics for output in outputs]
    assert (
        0 < sum(m.num_accepted_tokens for m in metrics) < sum(m.num_draft_tokens for m in metrics)
    )
    mixed = [SAMPLED, greedy(LENGTH), HOT, SAMPLED]
    together = ids(llm.generate(PROMPTS, mixed))
    assert together == [ids(llm.generate([PROMPTS[n]], mixed[n]))[0] for n in range(4)]


def test_coupled_rows_draft_what_the_noise_makes_likely() -> None:
    config = {"branching": "dynamic", "model": target("llama"), "verify": "coupled"}
    llm = LLM(
        target("llama"),
        speculative_config={"method": "draft_tree", "num_speculative_tokens": 12, **config},
        max_num_seqs=4,
        max_model_len=CONTEXT,
    )
    outputs = llm.generate(PROMPTS, SAMPLED)
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    passes = sum(output.metrics.num_target_passes for output in outputs)
    assert accepted > 1.5 * passes


@pytest.mark.slow
def test_the_gate_honours_or_refuses_every_option() -> None:
    report = audit_options(["draft_tree, dynamic"], ["recursive"])
    assert report.ok, [cell for cell in report.cells if cell.state == "BROKEN"] + report.missing
    assert report.worst < 1e-12
    assert report.accepted > 50


def test_auto_chooses_how_many_nodes() -> None:
    llm = decoder(num_speculative_tokens="auto")
    expected = plain("llama", 60, tuple(map(tuple, PROMPTS)))
    assert ids(llm.generate(PROMPTS, greedy(60))) == expected


def test_a_context_that_is_too_short_moves_along() -> None:
    """A deep tree leaves at least half of the draft model's context to the text."""
    llm = decoder(depth=100, top_k=2)
    outputs = llm.generate([[*PROMPTS[0]] * 12], greedy(LENGTH))
    (expected,) = decoder(num_speculative_tokens=0).generate([[*PROMPTS[0]] * 12], greedy(LENGTH))
    assert ids(outputs) == ids([expected])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"branching": "auto", "top_k": 3}, "'top_k' is about dynamic trees"),
        ({"branching": [2, 1], "depth": 3}, "'depth' is about dynamic trees"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"depth": 2.5}, "depth must be a whole number, not 2.5"),
        ({"with_replacement": True}, "siblings that are drawn"),
        ({"verify": "token"}, "chains"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decoder(**options)


def test_the_usual_rule_is_that_of_given_tokens() -> None:
    assert decoder().engine.verifier.rule.name == "match"
    drafter = decoder().engine.drafter
    assert isinstance(drafter, DraftTree)
    assert not drafter.capabilities.any_shape
