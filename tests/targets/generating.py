"""Short ways to decode with any drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outpace import LLM, RequestOutput, SamplingParams

from .families import CONTEXT, drafter, target

METHODS = ("none", "ngram", "draft_model")


def speculation(method: str, k: int, family: str, **more: Any) -> dict[str, Any]:
    """Returns a speculative_config; a draft model is a noised copy of the family's target."""
    if method == "draft_model":
        more.setdefault("model", drafter(family))
    return {"method": method, "num_speculative_tokens": k, **more}


def decoder(family: str, method: str = "none", k: int = 4, rows: int = 4, **more: Any) -> LLM:
    """Returns an LLM over the family's shared target."""
    config = speculation(method, k, family, **more)
    return LLM(target(family), speculative_config=config, max_num_seqs=rows, max_model_len=CONTEXT)


def greedy(length: int, **options: Any) -> SamplingParams:
    """Returns greedy options without an end-of-sequence token."""
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, **options)


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Returns the first text of each output, as token ids."""
    return [output.token_ids for output in outputs]
