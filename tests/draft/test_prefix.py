"""Prefix layers: what they make of texts that grow, and heads that start from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outpace import LLM, SamplingParams
from outpace.heads.base import TargetShape
from outpace.heads.decoder import DecoderLayer
from outpace.heads.layers import AttentionContext, LayerConfig
from outpace.heads.registry import find_head
from outpace.methods.heads.head_kv_cache import MAX_UNCOMPUTED, PrefixLayerCache
from targets.families import CONTEXT, PROMPTS, VOCABULARY, target
from targets.generating import greedy, ids

SIZE = 16


def layer() -> DecoderLayer:
    torch.manual_seed(0)
    made = DecoderLayer(SIZE, LayerConfig()).double()
    return made.eval().requires_grad_(False)


def whole(made: DecoderLayer, text: torch.Tensor) -> torch.Tensor:
    """Returns what the layer makes of a text ``[T, H]`` that is read at once."""
    found: torch.Tensor = made(text[None], AttentionContext.causal(made.begin(1), len(text)))[0][0]
    return found


def test_a_text_that_grows_is_read_as_one_that_is_there_at_once() -> None:
    made, texts = layer(), torch.randn(3, 9, SIZE, dtype=torch.float64)
    wanted = [whole(made, text) for text in texts]
    reader = PrefixLayerCache(made, rows=3)
    for _ in texts:
        reader.admit()
    at = [0, 0, 0]
    for counts in ([4, 1, 2], [1, 3, 0], [2, 0, 5], [2, 5, 1]):
        for row, count in enumerate(counts):
            reader.add(row, texts[row, at[row] : at[row] + count])
            at[row] += count
        rows = [row for row in range(3) if reader.waiting(row)]
        for row, found in zip(rows, reader.latest(rows), strict=True):
            assert torch.allclose(found, wanted[row][at[row] - 1], atol=1e-12)
    assert at == [9, 9, 8]


def test_rows_are_forked_and_numbered_anew() -> None:
    made, text = layer(), torch.randn(7, SIZE, dtype=torch.float64)
    other, wanted = text.clone(), whole(made, text)
    other[4:] += 1
    reader = PrefixLayerCache(made, rows=3)
    reader.admit()
    reader.add(0, text[:4])
    reader.latest([0])
    reader.admit(0, 4)
    reader.add(0, other[4:])
    reader.latest([0])
    reader.add(1, text[4:])
    reader.retain([1])
    assert torch.allclose(reader.latest([0])[0], wanted[-1], atol=1e-12)
    assert reader.nbytes > 0


@pytest.mark.parametrize("method", ["hydra", "clover", "ctc"])
def test_a_head_with_a_prefix_layer_drafts_for_samples_of_a_prompt(method: str) -> None:
    """Samples of a prompt share what was read of it, and long prompts are read in pieces."""
    kind = find_head(method)
    torch.manual_seed(0)
    model: Any = target("llama")
    shape = TargetShape.of(model.config, "tiny")
    head = kind(shape, kind.Config(depths=3, prefix=True)).double()
    head.eval().requires_grad_(False)
    config = {"method": method, "model": head, "num_speculative_tokens": 3}
    prompts = [*PROMPTS[:2], [place % VOCABULARY for place in range(MAX_UNCOMPUTED + 9)]]
    plain = LLM(model, max_num_seqs=4, max_model_len=CONTEXT)
    llm = LLM(model, speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)
    assert ids(llm.generate(prompts, greedy(12))) == ids(plain.generate(prompts, greedy(12)))
    samples = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=8)
    once, again = (llm.generate(prompts, samples) for _ in range(2))
    for first, second in zip(once, again, strict=True):
        assert [one.token_ids for one in first.outputs] == [two.token_ids for two in second.outputs]
