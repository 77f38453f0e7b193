"""Tiny random pairs on which an audit takes seconds: float64, so that rounding plays no part."""

from __future__ import annotations

from typing import Any

from outpace import LLM
from outpace.audit.letters import LetterTokenizer, letter_model, noised

PROMPTS = ([1, 2, 3, 4, 5], [6], [7, 8, 7, 8, 7, 8, 7], [2, 9, 4])


def pair_llm(
    method: str = "draft_model",
    verify: str | dict[str, Any] | None = None,
    tokens: int = 3,
    rows: int = 8,
    noise: float = 0.3,
    family: str = "llama",
    **options: Any,
) -> LLM:
    target = letter_model(family)
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": tokens, **options}
    if method in ("draft_model", "draft_tree"):
        config["model"] = noised(target, noise)
    if verify is not None:
        config["verify"] = verify
    return LLM(
        target,
        tokenizer=LetterTokenizer(),
        speculative_config=config,
        max_num_seqs=rows,
        generation_config="none",
    )
