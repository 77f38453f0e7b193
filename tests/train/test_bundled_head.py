"""The head that comes with the bundled target."""

from __future__ import annotations

import pytest

from outpace import LLM, SamplingParams
from outpace.errors import ConfigError
from outpace.llm import BUNDLED

TEXTS = ["Once upon a time there was a king who", "User: Hello.\nAssistant:"]
MOST_BYTES = 2_000_000


def test_the_bundled_head_drafts_without_any_further_option() -> None:
    asked = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    config = {"method": "eagle3", "num_speculative_tokens": 3}
    outputs = LLM(speculative_config=config, max_num_seqs=2).generate(TEXTS, asked)
    plain = LLM(speculative_config={"method": "none"}, max_num_seqs=2).generate(TEXTS, asked)
    assert [each.token_ids for each in outputs] == [each.token_ids for each in plain]
    accepted = sum(each.metrics.num_accepted_tokens for each in outputs)
    assert 1 + accepted / sum(each.metrics.num_target_passes for each in outputs) > 1.3


def test_the_bundled_heads_are_small() -> None:
    for head in (BUNDLED / "heads").iterdir():
        assert sum(file.stat().st_size for file in head.iterdir()) <= MOST_BYTES


def test_a_method_without_a_bundled_head_asks_for_one() -> None:
    with pytest.raises(ConfigError, match="needs 'model'"):
        LLM(speculative_config={"method": "hydra"})
