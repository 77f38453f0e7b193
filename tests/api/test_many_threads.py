"""Threads that call one `LLM`, or several over one and the same model, at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from outpace import LLM, SamplingParams
from outpace.draft.registry import find_drafter
from outpace.targets.hf.loading.loaded import Loaded
from targets.families import PROMPTS, plain, target
from targets.generating import greedy, ids

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


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """Threads take turns in the middle of a pass."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("busy_threads")
@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", "layer_skip"), ("llama", "hidden_transfer"), ("bloom", "ngram")],
)
def test_passes_that_change_a_model_do_not_meet_those_of_another_engine(
    family: str, method: str
) -> None:
    """Drafts leave out layers, columns join behind one, positions are told to the modules."""
    model, length = target(family), 12
    options = find_drafter(method).specimen(Loaded(model, None, family))
    config = {"method": method, "num_speculative_tokens": 3, **options}
    engines = [LLM(model, speculative_config=config, max_num_seqs=2) for _ in range(2)]
    engines += [LLM(model, max_num_seqs=2)]
    expected = plain(family, length, tuple(map(tuple, PROMPTS)))

    def call(number: int) -> list[list[int]]:
        return ids(engines[number % 3].generate(PROMPTS, greedy(length)))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(call, range(9))) == [expected] * 9
