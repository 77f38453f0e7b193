"""Suffix decoding: what it drafts, from whose texts, and that the text stays what it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.draft.lookup.suffix import SuffixDrafter, SuffixOptions
from outpace.errors import ConfigError
from outpace.verify.registry import rules
from targets.families import CONTEXT, PROMPTS, plain, target
from targets.generating import greedy, ids

LENGTH = 24
EXPECTED = plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))
SAMPLED = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True, seed=7)


def decoder(**more: Any) -> LLM:
    config = {"method": "suffix", "num_speculative_tokens": 6, **more}
    return LLM(target("llama"), speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)


def drafted(llm: LLM, prompt: list[int], params: SamplingParams) -> list[list[list[int]]]:
    """Returns what each round of one text drafted: tokens and parents."""
    found = []

    def note(trace: Any) -> None:
        count = int(trace.proposal.counts[0])
        tree = trace.proposal.tree.parents[0, :count].tolist()
        found.append([trace.proposal.tokens[0, :count].tolist(), tree])

    with llm.engine.observing(note):
        llm.generate([prompt], params)
    return found


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("rule", ["match", "token", "block", "recursive", "traversal", "coupled"])
def test_greedy_texts_are_the_targets_own(tree: bool, rule: str) -> None:
    if tree and not rules()[rule].trees:
        with pytest.raises(ConfigError, match="chains only"):
            decoder(tree=tree, verify=rule)
        return
    llm = decoder(tree=tree, verify=rule, suffix_decoding_max_spec_factor=3.0)
    for _ in range(2):  # the second time with what the first one left in the store
        outputs = llm.generate(PROMPTS, greedy(LENGTH))
        assert ids(outputs) == EXPECTED
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > LENGTH
    assert ids(llm.generate(PROMPTS[2:3], greedy(LENGTH))) == EXPECTED[2:3]


def test_a_finished_text_helps_the_next_one() -> None:
    llm, alone = decoder(), decoder(suffix_decoding_max_cached_requests=0)
    passes = []
    for one in (llm, alone):
        for _ in range(2):
            (output,) = one.generate([PROMPTS[0]], greedy(LENGTH))
            passes.append(output.metrics.num_target_passes)
    first, second, *without = passes
    assert second < first == without[0] == without[1]
    assert alone.engine.drafter.nbytes < llm.engine.drafter.nbytes


@pytest.mark.parametrize("tree", [False, True])
def test_other_texts_change_nothing_for_a_seeded_row(tree: bool) -> None:
    llm, prompt = decoder(tree=tree), [2, 3] * 6
    before = drafted(llm, prompt, SAMPLED)
    text = ids(llm.generate([prompt], SAMPLED))
    llm.generate(PROMPTS, greedy(LENGTH))
    llm.generate([prompt] * 4, replace(SAMPLED, seed=None))
    assert drafted(llm, prompt, SAMPLED) == before
    assert ids(llm.generate([prompt], SAMPLED)) == text
    assert any(tokens for tokens, _ in before)


def test_a_draft_is_as_long_as_its_match() -> None:
    pattern = [*range(10, 20), 9]
    for factor, longest in ((0.5, 3), (1.0, 6)):
        llm = decoder(suffix_decoding_max_spec_factor=factor, suffix_decoding_max_tree_depth=6,
                      num_speculative_tokens=12)  # fmt: skip
        first = drafted(llm, [*pattern, *pattern, *pattern[:8]], greedy(2))
        assert first[0][0] == [18]  # of two tokens the second one comes with the round
        first = drafted(llm, [*pattern, *pattern, *pattern[:8]], greedy(14))
        assert first[0][0] == [18, 19, 9, 10, 11, 12][:longest]


def test_a_tree_drafts_what_a_chain_leaves_out() -> None:
    prompt = [5, 6, 7, 30, 5, 6, 8, 31, 5, 6, 7, 32, 5, 6]
    more = {"suffix_decoding_max_spec_factor": 3.0, "suffix_decoding_max_cached_requests": 0}
    chain = drafted(decoder(**more), prompt, greedy(8))[0]
    tree = drafted(decoder(tree=True, **more), prompt, greedy(8))[0]
    assert chain[0][0] == tree[0][0] == 7
    assert [token for token, parent in zip(*tree, strict=True) if parent == 0] == [7, 8]


def test_rows_without_a_match_draft_nothing() -> None:
    assert drafted(decoder(), [1, 2, 3], greedy(8))[0] == [[], []]
    assert drafted(decoder(suffix_decoding_min_token_prob=1.0), [1, 2, 1, 3, 1], greedy(8))[0] == [
        [],
        [],
    ]


def test_the_store_is_bounded() -> None:
    llm = decoder(max_cached_tokens=60)
    for seed in range(8):
        llm.generate(PROMPTS, replace(SAMPLED, seed=seed))
    drafter = llm.engine.drafter
    assert isinstance(drafter, SuffixDrafter)
    assert 30 < drafter.past.tokens <= 60
    assert llm.memory["drafter_cache"] == drafter.nbytes > 0


def test_a_text_that_was_put_aside_is_in_the_store_once() -> None:
    config = {"method": "suffix", "num_speculative_tokens": 4}
    llm = LLM(
        target("llama"),
        speculative_config=config,
        max_num_seqs=4,
        max_model_len=CONTEXT,
        max_batch_total_tokens=300,
    )
    requests = [one for prompt in PROMPTS for one in llm.requests(prompt, greedy(90))]
    for request in requests:
        llm.engine.add(request)
    while llm.engine.busy:
        llm.engine.step()
    llm.engine.step()  # in which the last ones leave
    assert sum(request.preemptions for request in requests) > 1
    drafter = llm.engine.drafter
    assert isinstance(drafter, SuffixDrafter)
    kept = drafter.past.tokens - len(drafter.past)  # without what separates them
    written = sum(len(request.output_ids) for request in requests)
    assert 0.9 * written < kept <= written


def test_an_interrupted_text_is_no_finished_one() -> None:
    llm, rounds = decoder(), []

    def stop(trace: Any) -> None:
        rounds.append(trace)
        if len(rounds) == 3:
            raise KeyboardInterrupt

    with llm.engine.observing(stop), pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, greedy(LENGTH))
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == EXPECTED
    drafter = llm.engine.drafter
    assert isinstance(drafter, SuffixDrafter)
    assert len(drafter.past) == len(PROMPTS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix_decoding_max_tree_depth", 0),
        ("suffix_decoding_max_tree_depth", 65),
        ("suffix_decoding_max_cached_requests", -1),
        ("max_cached_tokens", 1.5),
        ("suffix_decoding_max_spec_factor", "much"),
        ("suffix_decoding_max_spec_factor", float("nan")),
        ("suffix_decoding_min_token_prob", 1.1),
        ("tree", "yes"),
    ],
)
def test_bad_options_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        SuffixOptions(**{name: value})  # type: ignore[arg-type]
