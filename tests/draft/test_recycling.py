"""Token recycling: what enters the matrix, what is drafted from it, and for whom."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from devices import on_device
from outpace import LLM, SamplingParams
from outpace.errors import ConfigError
from outpace.methods.lookup.datastore import Datastore
from outpace.methods.lookup.recycling import _Matrix
from outpace.verify.registry import rules
from targets.families import CONTEXT, PROMPTS, VOCABULARY, plain, target
from targets.generating import greedy, ids

LENGTH = 24
EXPECTED = plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))
SAMPLED = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True, seed=7)


def decoder(**more: Any) -> LLM:
    config = {"method": "recycling", "num_speculative_tokens": 6, **more}
    return LLM(target("llama"), speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)


def rounds(llm: LLM, prompts: Any, params: Any) -> list[Any]:
    """Returns the traces of all rounds of a call."""
    found: list[Any] = []
    with llm.engine.observing(found.append):
        llm.generate(prompts, params)
    return found


@pytest.mark.parametrize("branching", ["auto", [3, 2], [1, 1, 1], [6]])
@pytest.mark.parametrize("rule", ["match", "recursive", "traversal", "coupled"])
def test_greedy_texts_are_the_targets_own(branching: Any, rule: str) -> None:
    llm = decoder(branching=branching, verify=rule, num_speculative_tokens=9)
    for _ in range(2):
        outputs = llm.generate(PROMPTS, greedy(LENGTH))
        assert ids(outputs) == EXPECTED
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > LENGTH // 2
    assert ids(llm.generate(PROMPTS[2:3], greedy(LENGTH))) == EXPECTED[2:3]


def test_the_paper_greedy_tree_is_drafted_from_the_latest_distributions() -> None:
    """Replays the matrix from what plain passes of the model say."""
    llm = decoder(branching=[3, 2], num_speculative_tokens=9)
    known: dict[int, list[int]] = {}
    prompt = list(PROMPTS[0])
    for token, following in pairwise(prompt):
        known.setdefault(token, [following])
    checked = 0
    text = list(prompt)
    for trace in rounds(llm, [prompt], greedy(LENGTH)):
        proposal, count = trace.proposal, int(trace.proposal.counts[0])
        tokens = [text[-1], *proposal.tokens[0, :count].tolist()]
        parents = proposal.tree.parents[0, :count].tolist()
        expected = [
            known[tokens[parent]][parents[:node].count(parent)]
            for node, parent in enumerate(parents)
        ]
        assert tokens[1:] == expected
        checked += count
        path = trace.outcomes[0].path
        order = [n for n in range(count + 1) if n not in (0, *path)] + [0, *path]
        for node in order:
            leading = []
            at = node
            while at:
                leading.append(tokens[at])
                at = parents[at - 1]
            with torch.no_grad():
                whole = on_device([[*text, *reversed(leading)]])
                logits = target("llama")(input_ids=whole, use_cache=False).logits[0, -1]
            known[tokens[node]] = logits.topk(3).indices.tolist()
        text += trace.outcomes[0].tokens
    assert checked > LENGTH


def test_a_draft_ends_where_nothing_is_known() -> None:
    first = rounds(decoder(branching=[2, 2]), [[5, 6, 7, 8]], greedy(8))[0]
    assert int(first.proposal.counts[0]) == 0  # the last token was followed by nothing
    first = rounds(decoder(branching=[1, 1, 1]), [[5, 6, 7, 5]], greedy(8))[0]
    assert first.proposal.tokens[0].tolist() == [6, 7, 5]
    first = rounds(decoder(branching=[2, 1]), [[5, 6, 7, 5]], greedy(8))[0]
    assert int(first.proposal.counts[0]) == 1  # a prompt gives each token one successor


def test_requests_share_what_they_learned() -> None:
    llm = decoder()
    passes = [
        llm.generate([PROMPTS[1]], greedy(LENGTH))[0].metrics.num_target_passes for _ in range(3)
    ]
    assert passes[2] < passes[0]


@pytest.mark.parametrize("branching", ["auto", [2, 2]])
def test_other_texts_change_nothing_for_a_seeded_row(branching: Any) -> None:
    llm, prompt = decoder(branching=branching), [2, 3, 9] * 4

    def drafts() -> list[Any]:
        return [trace.proposal.tokens.tolist() for trace in rounds(llm, [prompt], SAMPLED)]

    before, text = drafts(), ids(llm.generate([prompt], SAMPLED))
    llm.generate(PROMPTS, greedy(LENGTH))
    llm.generate([prompt] * 4, replace(SAMPLED, seed=None))
    assert drafts() == before
    assert ids(llm.generate([prompt], SAMPLED)) == text
    assert any(row for tokens in before for row in tokens)


def test_tokens_that_a_distribution_excludes_are_no_successors() -> None:
    llm = decoder(branching=[4])
    params = SamplingParams(temperature=1.0, top_k=2, max_tokens=LENGTH, ignore_eos=True)
    counts = [int(t.proposal.counts[0]) for t in rounds(llm, [[5, 6, 7, 5, 6, 7]] * 3, params)]
    assert max(counts) == 2


def test_the_memory_is_the_matrix() -> None:
    llm = decoder(branching=[5, 2])
    assert llm.memory["drafter_cache"] == VOCABULARY * 5 * 4
    llm.generate([PROMPTS[0]], SAMPLED)
    assert llm.memory["drafter_cache"] == VOCABULARY * 5 * 4


def test_a_prompt_never_replaces_what_the_target_said() -> None:
    matrix = _Matrix(8, 2)
    matrix.put([3, 3], [[1, 2], [4, 5]])
    matrix.suggest([3, 6, 7])
    matrix.suggest([6, 1])
    assert [matrix.after(token) for token in (3, 6, 7)] == [[4, 5], [7], []]


def test_rules_for_chains_refuse_it() -> None:
    for name, rule in rules().items():
        if rule.lossless and not rule.trees:
            with pytest.raises(ConfigError, match="chains only"):
                decoder(verify=name)


@pytest.mark.parametrize("branching", ["wide", [], [0], 3, [100, 100]])
def test_bad_shapes_are_refused(branching: Any) -> None:
    with pytest.raises(ConfigError, match="branching"):
        decoder(branching=branching)


def test_its_trees_are_not_dynamic() -> None:
    with pytest.raises(ConfigError, match=r"'auto' or list .*, not 'dynamic' \(choose from auto\)"):
        decoder(branching="dynamic")


# -- datastores ------------------------------------------------------------------------------------

OTHERS = [[*prompt[-1:], *text] for prompt, text in zip(PROMPTS, EXPECTED, strict=True)] * 2


def test_a_datastore_fills_the_matrix_from_the_start() -> None:
    store = Datastore.of([[5, 6], [5, 6], [5, 7], [6, 8], [6, 8]], VOCABULARY).without_texts()
    llm = decoder(branching=[2, 1], datastore=store)
    for _ in range(2):
        first = rounds(llm, [[1, 2, 5]], greedy(8))[0]
        assert first.proposal.tokens[0].tolist() == [6, 7, 8]
        llm.forget_texts()


@pytest.mark.parametrize("branching", ["auto", [3, 2]])
def test_greedy_texts_stay_with_a_datastore(branching: Any) -> None:
    llm = decoder(branching=branching, datastore=Datastore.of(OTHERS, VOCABULARY))
    cold = decoder(branching=branching)
    outputs, without = (each.generate(PROMPTS, greedy(LENGTH)) for each in (llm, cold))
    assert ids(outputs) == ids(without) == EXPECTED
    passes = [sum(one.metrics.num_target_passes for one in each) for each in (outputs, without)]
    assert passes[0] < passes[1]


def test_a_seeded_row_drafts_from_its_text_and_the_datastore() -> None:
    store = Datastore.of([[5, 6], [5, 6], [3, 9], [3, 9]], VOCABULARY)
    llm, prompt = decoder(branching=[1, 1], datastore=store), [2, 3, 4, 5]

    def drafts() -> list[Any]:
        return [trace.proposal.tokens.tolist() for trace in rounds(llm, [prompt], SAMPLED)]

    before = drafts()
    assert before[0] == [[6]]
    llm.generate(PROMPTS, greedy(LENGTH))
    assert drafts() == before


def test_what_it_learned_is_saved_for_later(tmp_path: Path) -> None:
    first, folder = decoder(), tmp_path / "known"
    with pytest.raises(ConfigError, match="nothing to save"):
        first.save_drafter(folder)
    first.generate(PROMPTS, greedy(LENGTH))
    known = first.engine.drafter._matrix.known  # type: ignore[attr-defined]
    first.save_drafter(folder)
    later = decoder(datastore=folder)
    assert (later.engine.drafter._matrix.known == known).all()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="holds no texts"):
        LLM(target("llama"), speculative_config={"method": "retrieval", "datastore": folder})
