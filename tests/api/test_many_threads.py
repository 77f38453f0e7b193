"""Threads that call one `LLM`, or several over one and the same model, at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine.tokenizers_made import byte_level
from outpace import LLM, SamplingParams
from outpace.draft.registry import find_drafter
from outpace.errors import PromptTooLong
from outpace.targets.hf import tokenizer
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.tokenizer import tokenized
from targets.families import PROMPTS, build, plain, target
from targets.generating import greedy, ids

THREADS, CALLS = 8, 1000


def test_who_gives_a_long_text_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", vocab_size=len(byte_level()))
    llm = LLM(model, tokenizer=byte_level(), speculative_config={"method": "none"})
    text = "the little dog " * (tokenizer.LONG // 15 + 1)
    known = tokenized(llm.tokenizer, text, add_special_tokens=False)
    begun, going_on = threading.Event(), threading.Event()

    def slow(tokenizer: Any, given: str, *, add_special_tokens: bool) -> list[int]:
        if given == text:
            begun.set()
            assert going_on.wait(20)
        return tokenized(tokenizer, given, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "tokenized", slow)
    with ThreadPoolExecutor(2) as pool:
        found, refused = pool.submit(llm.token_ids, text), pool.submit(llm.prompt_ids, text)
        assert begun.wait(20)
        assert llm.token_ids("the dog") == tokenized(
            llm.tokenizer, "the dog", add_special_tokens=True
        )
        assert not found.done()
        assert not refused.done()
        going_on.set()
        assert found.result() == known
        with pytest.raises(PromptTooLong, match=f"has {len(known)} tokens"):
            refused.result()


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
    """Drafts leave out layers, columns join after one, positions are set in the modules."""
    model, length = target(family), 12
    options = find_drafter(method).dummy_options(LoadedModel(model, None, family))
    config = {"method": method, "num_speculative_tokens": 3, **options}
    engines = [LLM(model, speculative_config=config, max_num_seqs=2) for _ in range(2)]
    engines += [LLM(model, max_num_seqs=2)]
    expected = plain(family, length, tuple(map(tuple, PROMPTS)))

    def call(number: int) -> list[list[int]]:
        return ids(engines[number % 3].generate(PROMPTS, greedy(length)))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(call, range(9))) == [expected] * 9
