"""Chains end after tokens that end the text, on a CPU: to see that of a GPU's tokens, each of them
would have to be waited for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.draft.base import Round

PROMPTS = ["Once upon a time", "Lily had a red ball."]
LENGTH = 6


@pytest.mark.parametrize(
    ("verify", "options"),
    [("token", {"temperature": 0}), ("coupled", {"temperature": 0.8})],
    ids=["greedy", "coupled"],
)
def test_nothing_is_drafted_behind_a_token_that_ends_the_text(
    verify: str, options: dict[str, Any]
) -> None:
    config = {"method": "draft_model", "num_speculative_tokens": LENGTH, "verify": verify}
    llm = LLM(speculative_config=config, max_num_seqs=2, device="cpu")
    free = [SamplingParams(**options, seed=n, max_tokens=60) for n in range(2)]
    whole = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, free)]
    drafts: list[list[list[int]]] = [[], []]  # of either text
    ended = gone_on = 0

    def look(trace: Round) -> None:
        tokens, counts = trace.proposal.tokens.tolist(), trace.proposal.counts.tolist()
        for request, row, count in zip(trace.requests, tokens, counts, strict=True):
            drafts[request.params.stop_token_ids == ()].append(row[:count])

    for place in range(12, 40, 3):
        last = whole[0][place]
        ending = SamplingParams(**options, seed=0, max_tokens=60, stop_token_ids=[last])
        drafts[:] = [], []
        with llm.engine.observing(look):
            outputs = llm.generate(PROMPTS, [ending, free[1]])
        texts = [output.outputs[0].token_ids for output in outputs]
        assert texts == [whole[0][: whole[0].index(last) + 1], whole[1]]
        assert not any(last in draft[:-1] for draft in drafts[0])
        ended += any(draft[-1:] == [last] and len(draft) < LENGTH for draft in drafts[0])
        gone_on += any(last in draft[:-1] for draft in drafts[1])
    assert ended
    assert gone_on, "in the other text it ends nothing"


def test_a_token_that_is_to_be_ignored_ends_no_chain() -> None:
    llm = LLM(speculative_config={"method": "draft_model", "num_speculative_tokens": LENGTH})
    rows: list[Sequence[Collection[int]]] = []
    with llm.engine.observing(lambda trace: rows.append(trace.rows.all_stop_token_ids)):
        for ignored in (True, False):
            params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=ignored)
            llm.generate("Once upon a time", params)
    assert rows == [[()], [llm.engine.drafter.loaded.eos_ids]]
