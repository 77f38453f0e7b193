"""An engine that runs for long holds no more than one that has just begun."""

from __future__ import annotations

import gc

import pytest

from outpace import SamplingParams
from representatives import representatives
from targets.families import drafter
from targets.generating import decoder

BATCHES = 250
ROWS = 4
"""1,000 requests in all."""


@pytest.mark.parametrize(
    "method", representatives(["draft_model", "ngram", "draft_tree"], ["draft_tree"])
)
def test_nothing_grows_over_a_thousand_requests(method: str) -> None:
    more = {} if method == "ngram" else {"model": drafter("llama")}
    llm = decoder("llama", method, k="auto", rows=ROWS, **more)
    params = [SamplingParams(temperature=t, max_tokens=2, logprobs=1) for t in (0, 1, 0, 1)]

    def play(batches: int) -> int:
        for batch in range(batches):
            # Lengths change, so that whatever is kept by shape is kept for all of them.
            prompts = [[1 + row, 2, 3][: 1 + (batch + row) % 3] for row in range(ROWS)]
            llm.generate(prompts, params)
        gc.collect()
        return len(gc.get_objects())

    objects = play(8)
    held = llm.memory
    after = play(BATCHES)
    assert llm.memory == held
    assert after < objects + BATCHES, "less than one object for each four requests"
    assert not llm.engine.has_unfinished_requests
