"""Times of a drafter by itself: every drafter is asked as the engine asks it."""

from __future__ import annotations

from typing import Any

import pytest

from outpace import LLM
from outpace.audit.letters import LetterTokenizer, letter_model
from outpace.bench.meter import Meter
from outpace.core.params import SamplingParams
from outpace.draft.registry import drafter_names, find_drafter

DRAFTING = [name for name in drafter_names() if name != "none"]


@pytest.fixture(scope="module")
def letters() -> Any:
    return letter_model()


def engine(letters: Any, method: str) -> LLM:
    plain = LLM(letters, tokenizer=LetterTokenizer(), generation_config="none")
    config = {"method": method, **find_drafter(method).dummy_options(plain.target)}
    return LLM(
        letters,
        tokenizer=LetterTokenizer(),
        speculative_config={**config, "num_speculative_tokens": 3},
        max_num_seqs=2,
        generation_config="none",
    )


@pytest.mark.parametrize("method", DRAFTING)
def test_every_drafter_drafts_for_the_meter(letters: Any, method: str) -> None:
    """States, distributions, auxiliary tokens and the target's own rows are there, as in the
    engine: a drafter that lacked them would draft nothing, in no time."""
    llm = engine(letters, method)
    meter = Meter(llm, batch=2, context=40, temperature=0.7)
    meter.sample(drafts=[3], scored=[1], repeats=2)
    assert meter.times.draft
    assert max(meter.times.draft) <= 3
    assert min(meter.times.draft.values()) > 0
    assert llm.engine.target.num_rows == 0
    done = llm.generate([[1, 2], [3]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    assert all(len(output.token_ids) == 4 for output in done)


def test_a_draft_counts_for_the_nodes_that_it_has(letters: Any) -> None:
    llm = engine(letters, "pass")  # whose dummy head drafts three tokens at most
    meter = Meter(llm, batch=1, context=40)
    meter.sample(drafts=[2, 16], scored=[1], repeats=1)
    assert set(meter.times.draft) == {2, 3}
    assert meter.times.deepest() <= 3
