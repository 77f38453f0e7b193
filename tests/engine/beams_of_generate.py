"""Beam search as transformers' own ``generate`` does it, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import utils


class _InDouble:
    """torch, but that what is asked to be float32 is float64: ``generate`` would round scores."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_double() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "torch", _InDouble())
        yield


def searched(model: Any, ids: Tensor, length: int, **options: Any) -> list[tuple[list[int], float]]:
    """Returns the texts after ``ids`` [1, T], without what fills them up, and their scores."""
    with in_double():
        made = model.generate(
            ids,
            max_new_tokens=length,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,  # so that the indices of beams tell how long each text is
            pad_token_id=0,
            **options,
        )
    lengths = (made.beam_indices >= 0).sum(1).tolist()
    begin = 1 if model.config.is_encoder_decoder else ids.shape[1]
    return [
        (row[begin : begin + length].tolist(), float(score))
        for row, length, score in zip(made.sequences, lengths, made.sequences_scores, strict=True)
    ]
