"""Look-ahead decoding: the window, the n-grams that come of it, and the text as it must be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from devices import on_device
from outpace import LLM, SamplingParams
from outpace.errors import ConfigError
from outpace.methods.self_speculation.lookahead import LookaheadOptions
from outpace.verify.registry import rules
from targets.families import CONTEXT, PROMPTS, plain, target
from targets.generating import greedy, ids

LENGTH = 24
EXPECTED = plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))
SAMPLED = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True, seed=7)


def decoder(window: int = 4, ngram: int = 3, tried: int = 4, **more: Any) -> LLM:
    config = {
        "method": "lookahead",
        "max_window_size": window,
        "max_ngram_size": ngram,
        "max_verification_set_size": tried,
        "num_speculative_tokens": tried * (ngram - 1),
        **more,
    }
    return LLM(target("llama"), speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)


def rounds(llm: LLM, prompts: Any, params: Any) -> list[Any]:
    """Returns the traces of all rounds of a call."""
    found: list[Any] = []
    with llm.engine.observing(found.append):
        llm.generate(prompts, params)
    return found


@pytest.mark.parametrize("sizes", [(4, 3, 4), (1, 2, 1), (3, 5, 2), (7, 2, 3)])
@pytest.mark.parametrize("rule", ["match", "recursive", "traversal", "coupled"])
def test_greedy_texts_are_the_targets_own(sizes: tuple[int, int, int], rule: str) -> None:
    llm = decoder(*sizes, verify=rule)
    outputs = llm.generate(PROMPTS, greedy(LENGTH))
    assert ids(outputs) == EXPECTED
    assert ids(llm.generate(PROMPTS[2:3], greedy(LENGTH))) == EXPECTED[2:3]


def test_to_the_end_of_the_context() -> None:
    prompt = list(PROMPTS[0])
    length = CONTEXT - len(prompt)
    outputs = decoder(6, 4).generate([prompt, prompt[:2]], greedy(length))
    assert ids(outputs)[0] == plain("llama", length, (tuple(prompt),))[0]


def said(text: Sequence[int]) -> int:
    """The target's own next token, by a plain pass."""
    logits = target("llama")(input_ids=on_device([list(text)]), use_cache=False).logits
    return int(logits[0, -1].argmax())


@pytest.mark.parametrize(("width", "levels"), [(4, 2), (3, 3), (2, 1)])
def test_the_window_is_the_jacobi_iteration(width: int, levels: int) -> None:
    """Replays it: each token of the next top level is what the target says after its diagonal."""
    llm = decoder(width, levels + 1)
    text, before, checked, moves = list(PROMPTS[0]), None, 0, set()
    for trace in rounds(llm, [text], greedy(60)):
        if trace.proposal.aux_tokens is None:
            break
        window = trace.proposal.aux_tokens.tokens[0].view(levels, width).tolist()
        if before is not None:
            expected, moved = before
            kept = max(0, width + 1 - moved)
            assert [row[:kept] for row in window] == [row[width - kept :] for row in expected]
            checked += kept * levels
            moves.add(moved)
        tops = [
            said([*text, *window[0][: column + 1], *(row[column] for row in window[1:])])
            for column in range(width)
        ]
        emitted = trace.outcomes[0].tokens
        text += emitted
        before = [*window[1:], tops], len(emitted)
    assert checked > 20 * width
    assert len(moves) > 1, "some round should accept more than another"


def test_what_the_window_wrote_is_tried() -> None:
    """N-grams that never stood in the text are drafted, and some are right."""
    llm, text, foreign, right = decoder(6, 3), list(PROMPTS[1]), 0, 0
    for trace in rounds(llm, [PROMPTS[1]], greedy(90)):
        count = int(trace.proposal.counts[0])
        parents = trace.proposal.tree.parents[0, :count].tolist()
        tokens = [text[-1], *trace.proposal.tokens[0, :count].tolist()]
        pairs = set(itertools.pairwise(text))
        for node in range(1, count + 1):
            new = parents[node - 1] > 0 and (tokens[parents[node - 1]], tokens[node]) not in pairs
            foreign += new
            right += new and node in trace.outcomes[0].path
        text += trace.outcomes[0].tokens
    assert 0 < right < foreign


def test_seeded_rows_have_no_window_and_are_what_they_are_alone() -> None:
    llm, prompt = decoder(), [2, 3, 9] * 4
    alone = rounds(llm, [prompt], SAMPLED)
    assert all(trace.proposal.aux_tokens is None for trace in alone)
    text = ids(llm.generate([prompt], SAMPLED))
    mixed = [SAMPLED, greedy(LENGTH), replace(SAMPLED, seed=None), SAMPLED]
    together = ids(llm.generate([prompt, *PROMPTS[:3]], mixed))
    assert together[0] == text[0]
    assert together[1] == EXPECTED[0]
    assert any(int(trace.proposal.counts[0]) for trace in alone)


def test_a_row_that_wants_no_draft_does_not_move_its_window() -> None:
    llm = decoder()
    params = [greedy(LENGTH, speculative="off"), greedy(LENGTH)]
    assert ids(llm.generate(PROMPTS[:2], params)) == EXPECTED[:2]
    off = rounds(llm, PROMPTS[:2], params)
    assert all(int(trace.proposal.counts[0]) == 0 for trace in off if len(trace.requests) == 2)
    assert all(trace.proposal.aux_tokens is None for trace in rounds(llm, PROMPTS[:1], params[:1]))


def test_rules_that_cannot_verify_it_are_refused() -> None:
    for name, rule in rules().items():
        if rule.lossless and not rule.trees:
            with pytest.raises(ConfigError, match="chains only"):
                decoder(verify=name)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_window_size", 0), ("max_ngram_size", 1), ("max_verification_set_size", 0),
     ("max_window_size", 65), ("max_ngram_size", "3"), ("max_verification_set_size", True)],
)  # fmt: skip
def test_bad_options_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        LookaheadOptions(**{name: value})
    with pytest.raises(ConfigError, match="columns in every pass"):
        LookaheadOptions(max_window_size=64, max_ngram_size=9)
