"""The processors of a ``generate`` call, taken apart by row and by what they say of the law."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation import logits_process as hf

from outpace.targets.hf.processors import of_row, split

VOCABULARY = 12
IDS = torch.tensor([[0, 0, 3, 4, 3], [1, 2, 3, 4, 5], [0, 6, 6, 7, 6]])
BUILT_FOR_A_BATCH: dict[str, Any] = {
    "repetition": hf.RepetitionPenaltyLogitsProcessor(
        2.0, prompt_ignore_length=torch.tensor([2, 0, 1])
    ),
    "encoder repetition": hf.EncoderRepetitionPenaltyLogitsProcessor(2.0, IDS),
    "encoder n-grams": hf.EncoderNoRepeatNGramLogitsProcessor(2, IDS),
    "allowed prefixes": hf.PrefixConstrainedLogitsProcessor(
        lambda row, ids: [row, int(ids[-1]), 8], num_beams=1
    ),
    "no repeats": hf.NoRepeatNGramLogitsProcessor(2),
    "minimum": hf.MinLengthLogitsProcessor(9, [3, 4]),
}


@pytest.mark.parametrize("name", BUILT_FOR_A_BATCH)
def test_a_row_alone_gets_what_it_gets_in_the_batch(name: str) -> None:
    processor = BUILT_FOR_A_BATCH[name]
    scores = torch.randn(3, VOCABULARY)
    together = processor(IDS, scores.clone())
    assert not torch.equal(together, scores)
    for row in range(3):
        alone = of_row(processor, row, 3)(IDS[row : row + 1], scores[row : row + 1].clone())
        assert torch.equal(alone[0], together[row])


def test_only_the_ordinary_end_of_the_list_becomes_options() -> None:
    bias = hf.SequenceBiasLogitsProcessor({(1,): 2.0})
    heat, top_k = hf.TemperatureLogitsWarper(0.5), hf.TopKLogitsWarper(7)
    top_p, odd = hf.TopPLogitsWarper(0.9), hf.TopPLogitsWarper(0.9, min_tokens_to_keep=2)
    assert split([bias, heat, top_k, top_p, hf.LogitNormalization()]) == (
        [bias],
        {"temperature": 0.5, "top_k": 7, "top_p": 0.9},
    )
    assert split([heat, top_k, bias]) == ([heat, top_k, bias], {})
    assert split([top_k, heat]) == ([top_k], {"temperature": 0.5})
    assert split([heat, odd]) == ([heat, odd], {})
    assert split([heat, hf.TopPLogitsWarper(0.5, filter_value=-1e4)])[1] == {}
