"""Tiny random pairs on which an audit takes seconds: float64, so that rounding plays no part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from outpace import LLM
from outpace.audit.letters import LetterTokenizer, letter_model
from outpace.methods.models.noisy_copy import noisy_copy

PROMPTS = ([1, 2, 3, 4, 5], [6], [7, 8, 7, 8, 7, 8, 7], [2, 9, 4])


def pair_llm(
    method: str = "draft_model",
    verify: str | dict[str, Any] | None = None,
    tokens: int = 3,
    rows: int = 8,
    noise: float = 0.3,
    family: str = "llama",
    drafter_context: int | None = None,
    context: int | None = None,
    **options: Any,
) -> LLM:
    """drafter_context: the greatest length that the drafter takes; unset: the target's. context:
    the greatest length of a text with its prompt; unset: as long as the target takes."""
    target = letter_model(family)
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": tokens, **options}
    if method in ("draft_model", "draft_tree"):
        drafter = noisy_copy(target, noise)
        if drafter_context is not None:
            drafter.config.max_position_embeddings = drafter_context
        config["model"] = drafter
    if verify is not None:
        config["verify"] = verify
    return LLM(
        target,
        tokenizer=LetterTokenizer(),
        speculative_config=config,
        max_num_seqs=rows,
        max_model_len=context,
        generation_config="none",
    )


def gives_up_after(length: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a logits processor that forbids every token once a text, its prompt included, has
    this many."""

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.fill_(float("-inf")) if ids.shape[1] >= length else scores

    return processor
