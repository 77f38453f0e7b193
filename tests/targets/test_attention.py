"""Grouped queries: the same text without copies of the keys, wherever a model allows it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from outpace import LLM
from outpace.targets.hf import support, trials
from outpace.targets.hf.attention import NAME, grouped_attention, use_grouped
from outpace.targets.hf.loading.load import load
from representatives import representatives

from .families import CONTEXT, FAMILIES, drafter, target
from .generating import greedy, ids

PROMPTS = [[5, 9, 2, 41], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
STAY = {
    "gemma2", "gpt_oss", "falcon", "deepseek_v3", "deepseek_v32", "bart", "bloom", "falcon-alibi",
    "gpt_neo", "minimax_m3",
}  # fmt: skip
"""Families that keep their attention: they have one of their own, need the eager one, or have as
many heads of keys as of queries. All others here have two key heads for four query heads."""

SOME = ("llama", "qwen2-window", "gemma3", "cohere2", "llama4", "granite")
"""Some of the families that are switched: plain ones, with windows in all layers, in some,
in chunks, and with a scale of their own."""


@pytest.mark.parametrize("family", representatives(FAMILIES, {*STAY, *SOME}))
def test_the_text_is_the_same(family: str) -> None:
    model = copy.deepcopy(target(family))
    switched = use_grouped(model)
    assert switched == (family not in STAY)
    if not switched:
        assert model.config.get_text_config()._attn_implementation != NAME
        return
    plain = LLM(target(family), max_num_seqs=3, max_model_len=CONTEXT)
    support.check(model)
    trials.probe(model)
    config = {"model": drafter(family), "method": "draft_tree", "branching": [2, 1]}
    llm = LLM(model, speculative_config=config, max_num_seqs=3, max_model_len=CONTEXT)
    assert ids(llm.generate(PROMPTS, greedy(16))) == ids(plain.generate(PROMPTS, greedy(16)))


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("masked", [False, True])
def test_the_result_is_that_of_transformers(heads: int, masked: bool) -> None:
    torch.manual_seed(0)
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = heads // 2, True  # type: ignore[assignment]
    query = torch.randn(3, heads, 5, 16, dtype=torch.float64)
    key, value = torch.randn(2, 3, 2, 9, 16, dtype=torch.float64)
    mask = torch.rand(3, 1, 5, 9) > 0.3 if masked else None
    inputs = (module, query, key, value, mask)
    expected, _ = sdpa_attention_forward(*inputs, scaling=0.3)
    found, _ = grouped_attention(*inputs, scaling=0.3)
    assert found.shape == expected.shape == (3, 5, heads, 16)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_only_models_that_are_loaded_here_are_switched(tmp_path: Path) -> None:
    model = target("llama")
    model.save_pretrained(tmp_path)
    load(model)
    assert model.config._attn_implementation == "sdpa"
    assert load(tmp_path, dtype="float64").model.config._attn_implementation == NAME
