"""Short ways to call ``generate`` with and without outpace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from devices import on_device
from outpace.hf import Speculative, speculative
from targets.families import drafter, target

FAMILY = "llama"
NEW = 16
PAD = 0
ONE = on_device([[5, 6, 7, 5, 6]])
RAGGED = torch.tensor(
    [[PAD] * 4 + [5, 6, 7], [1, 2, 3, 4, 5, 6, 7], [PAD] * 6 + [9], [PAD, PAD, 3, 3, 3, 3, 3]]
)
MASK = (RAGGED != PAD).long()
BATCHES = {"one": (ONE, torch.ones_like(ONE)), "ragged": (RAGGED, MASK)}
METHODS = ("none", "ngram", "draft_model")


def faster(method: str = "draft_model", k: Any = 4, **options: Any) -> Speculative:
    model = drafter(FAMILY) if method == "draft_model" else None
    return speculative(model, method=method, num_speculative_tokens=k, **options)


def generated(batch: str = "ragged", custom: Speculative | None = None, **options: Any) -> Any:
    ids, mask = BATCHES[batch]
    settings = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": PAD, **options}
    return target(FAMILY).generate(ids, attention_mask=mask, custom_generate=custom, **settings)


def ends_of(sequences: Tensor) -> int:
    """Some token in the middle of the first text, to stop at."""
    return int(sequences[0, -NEW // 2])


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.pieces.append(value)

    def end(self) -> None:
        self.ended += 1
