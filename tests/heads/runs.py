"""Targets on which published heads are run."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.published import SIZE, VOCABULARY
from outpace import LLM
from targets.families import build
from targets.generating import greedy, ids


class Model:
    """The parts of a target that a head uses."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.embeddings = torch.randn(VOCABULARY, SIZE, dtype=torch.float64)
        self.output = torch.randn(VOCABULARY, SIZE, dtype=torch.float64)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embeddings[tokens]

    def head(self, states: Tensor) -> Tensor:
        return states @ self.output.T

    def bounded(self, logits: Tensor) -> Tensor:
        return logits


@cache
def target() -> Any:
    return build(
        "llama", vocab_size=VOCABULARY, hidden_size=SIZE, num_hidden_layers=12,
        num_attention_heads=2, num_key_value_heads=1, intermediate_size=16,
    )  # fmt: skip


def decoder(model: Any, folder: Path | None, **more: Any) -> LLM:
    config = {"method": "eagle3", "model": folder, "check": False, "num_speculative_tokens": 4}
    speculation = None if folder is None else {**config, **more}
    return LLM(model, speculative_config=speculation or {"method": "none"}, max_num_seqs=3)


PROMPTS = [[3, 4, 7, 11], [12], [19, 3, 0, 0, 5, 9, 2]]


@cache
def plain_texts() -> list[list[int]]:
    return ids(decoder(target(), None).generate(PROMPTS, greedy(8)))
