"""Greedy text equals that of transformers' own ``generate``, token for token, in every family."""

from __future__ import annotations

import itertools

import pytest
import torch

from outpace.targets.hf import runner
from representatives import representatives

from .families import CHUNK, FAMILIES, PROMPTS, WINDOW, build, plain, target
from .generating import METHODS, decoder, greedy, ids

LENGTH = 16
MANY = ("llama", "mistral", "gemma3")
"""One family without windows, one with windows everywhere, one with both types of layers."""
SOME_K = dict(zip(FAMILIES, itertools.cycle((3, 5, 8)), strict=False))


def reference(family: str, length: int = LENGTH) -> list[list[int]]:
    return plain(family, length, tuple(map(tuple, PROMPTS)))


@pytest.mark.parametrize(
    ("family", "method"),
    representatives(
        itertools.product(FAMILIES, METHODS),
        lambda family, method: method == "draft_model" or family in MANY,
    ),
)
def test_ragged_batches_and_single_rows_equal_generate(family: str, method: str) -> None:
    llm = decoder(family, method, SOME_K[family])
    outputs = llm.generate(PROMPTS, greedy(LENGTH))
    assert ids(outputs) == reference(family)
    longest = PROMPTS.index(max(PROMPTS, key=len))
    alone = llm.generate([PROMPTS[longest]], greedy(LENGTH))
    assert ids(alone) == [reference(family)[longest]]
    if method == "draft_model":
        drafted = sum(output.metrics.num_draft_tokens for output in outputs)
        accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
        assert 0 < accepted < drafted, "the drafter should be right some of the time, not always"


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("family", "method"), [*((family, "draft_model") for family in MANY), ("llama", "ngram")]
)
def test_short_and_long_drafts_equal_generate(family: str, method: str, k: int) -> None:
    assert ids(decoder(family, method, k).generate(PROMPTS, greedy(LENGTH))) == reference(family)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_of_it(family: str, method: str, k: int, rows: int) -> None:
    outputs = decoder(family, method, k, rows).generate(PROMPTS, greedy(40))
    assert ids(outputs) == reference(family, 40)


@pytest.mark.parametrize("family", [name for name, made in FAMILIES.items() if made.windowed])
def test_windows_are_exceeded(family: str) -> None:
    """With a window that is never full the same weights give other logits, so it does act here."""
    with torch.no_grad():
        tokens = torch.arange(2 * WINDOW)[None]
        wide = build(family, sliding_window=64)
        assert not torch.allclose(target(family)(tokens).logits[:, -1], wide(tokens).logits[:, -1])


@pytest.mark.parametrize(
    ("family", "span"),
    [
        ("llama4", "attention_chunk_size"),
        ("deepseek_v32", "index_topk"),
        ("minimax_m3", "index_topk_blocks"),
        ("gpt_neo", "window_size"),
    ],
)
def test_chunks_indexers_and_local_windows_hide_tokens(family: str, span: str) -> None:
    with torch.no_grad():
        tokens = torch.arange(3 * CHUNK)[None]
        wide = build(family, **{span: 64})
        assert not torch.allclose(target(family)(tokens).logits[:, -1], wide(tokens).logits[:, -1])


@pytest.mark.parametrize(
    ("family", "chunk"),
    representatives(
        itertools.product([*MANY, "gpt_oss", "llama4", "deepseek_v32"], [1, 4, 11]),
        lambda family, chunk: chunk == 4 or family == "gemma3",
    ),
)
def test_prompts_longer_than_a_prefill_chunk(
    family: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PREFILL_CHUNK", chunk)
    assert ids(decoder(family, "draft_model", 3).generate(PROMPTS, greedy(LENGTH))) == reference(
        family
    )
