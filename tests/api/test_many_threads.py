"""Eight threads that call one `LLM` at once, a thousand times in all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from outpace import LLM, SamplingParams
from targets.families import target

THREADS, CALLS = 8, 1000


@pytest.mark.slow
def test_each_of_a_thousand_calls_gets_its_own_text() -> None:
    llm = LLM(
        target("llama"),
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
        max_num_seqs=4,
    )

    def call(number: int) -> list[int]:
        prompt = [1 + number % 50, 2 + number // 50, 3, 4][: 2 + number % 3]
        temperature = 0.0 if number % 2 else 0.9
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=6, ignore_eos=True)
        return llm.generate([prompt], params)[0].token_ids

    expected = [call(number) for number in range(CALLS)]
    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(call, range(CALLS))) == expected
    assert len(set(map(tuple, expected))) > CALLS // 4, "texts that differ, or nothing is shown"
