"""A text that is asked for again after `forget_texts` is drafted as it was the first time."""

from __future__ import annotations

from typing import Any

import pytest

from outpace import LLM
from outpace.cli.compare import measure, plain_llm
from outpace.errors import ConfigError
from targets.families import CONTEXT, PROMPTS, drafter, target
from targets.generating import greedy

SUFFIX = {"method": "suffix"}
RECYCLING = {"method": "recycling", "branching": [2, 1]}
CONFIGS: list[dict[str, Any]] = [
    SUFFIX,
    RECYCLING,
    {"method": "auto"},
    {"method": "ensemble", "drafters": [SUFFIX, RECYCLING], "verify": "match"},
    {"method": "staged", "lookup": SUFFIX, "model": "drafter"},
]


def decoder(config: dict[str, Any]) -> LLM:
    config = {"num_speculative_tokens": 4, **config}
    if "model" in config:
        config["model"] = drafter("llama")
    return LLM(
        target("llama"),
        speculative_config=config,
        max_num_seqs=2,
        max_model_len=CONTEXT,
        compile=False,  # a pass that was recorded goes by the hook that counts a draft model's
    )


def passes(llm: LLM) -> int:
    """Returns the passes that one text takes, of the target and of a draft model."""
    found = 0

    def note(*_: Any) -> None:
        nonlocal found
        found += 1

    loaded = llm.engine.drafter.loaded
    hook = loaded.model.register_forward_pre_hook(note) if loaded is not None else None
    with llm.engine.observing(note):
        llm.generate(PROMPTS[0], greedy(24))
    if hook is not None:
        hook.remove()
    return found


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["method"])
def test_a_text_that_is_asked_for_again_is_drafted_as_the_first_time(config: Any) -> None:
    llm = decoder(config)
    first, again = passes(llm), passes(llm)
    assert again < first, "what was remembered helps"
    llm.forget_texts()
    assert passes(llm) == first


def test_compare_measures_a_text_that_is_not_known() -> None:
    llm = decoder(SUFFIX)
    alone = passes(llm)
    llm.forget_texts()
    found = measure(llm, plain_llm(llm, {}), [PROMPTS[0]], greedy(24), lambda line: None)
    assert {run.metrics.num_target_passes for run in found.speculative} == {alone}


def test_what_was_learned_online_cannot_be_forgotten() -> None:
    llm = decoder({"model": "drafter", "online": {}})
    with pytest.raises(ConfigError, match="cannot be taken back"):
        llm.forget_texts()
