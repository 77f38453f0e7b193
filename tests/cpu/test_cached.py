"""Our own code over long texts and over keys and values of 8 bits: the numbers of torch, and the
same bits in any company and on any number of threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cpu.described import DESCRIBED, made
from cpu.test_blocks import compiled_for
from outpace import LLM
from outpace.core.trees.tree import Tree
from outpace.targets.base import KVCacheDtype
from outpace.targets.cpu.kernels import speed_up
from outpace.targets.cpu.native import native
from outpace.targets.cpu.native_layers.layer import use_native_layers
from outpace.targets.cpu.native_layers.model import use_native_model
from outpace.targets.hf.kv_dtype import EIGHT_BITS
from outpace.targets.hf.runner import Runner
from targets.generating import greedy, ids

pytestmark = pytest.mark.skipif(native() is None, reason="no C++ compiler here")

KINDS: tuple[KVCacheDtype, ...] = ("int8", "fp8")
LONG = 1300
"""Tokens of a text whose slots make three pieces."""


def played(family: str, **more: Any) -> Any:
    """A model that our own code computes."""
    model = made(family, **more)
    speed_up(model, "native", smallest=0)  # the head, too
    assert use_native_layers(model) == 2
    assert use_native_model(model)
    return model


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 101, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def begun(model: Any, kind: KVCacheDtype, rows: list[list[int]]) -> Runner:
    """Rows that have been read in passes of few tokens, whose bits are alike."""
    runner = Runner(model, len(rows), 4096, kv_cache_dtype=kind)
    runner.admit(len(rows))
    for number, row in enumerate(rows):
        for at in range(0, len(row), 60):
            piece = row[at : at + 60]
            runner.forward(torch.tensor([piece]), keep=1, first=number)
            runner.lengths[number] += len(piece)
    return runner


def scored(runner: Runner, draft: list[list[int]], tree: Tree | None = None) -> Tensor:
    return runner.forward(torch.tensor(draft), keep=len(draft[0]), tree=tree).logits


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3"])
@pytest.mark.parametrize("kind", ["auto", *KINDS])
@torch.inference_mode()
def test_a_long_text_keeps_its_bits(family: str, kind: KVCacheDtype, threads: None) -> None:
    """One column and eight, alone and with another row, as a chain and as a tree, on few threads
    and on more than there are heads."""
    model = played(family, max_position_embeddings=4096)
    text, draft = tokens(LONG), tokens(8, 1)
    torch.set_num_threads(1)
    expected = scored(begun(model, kind, [text]), [draft])[0]
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        runner = begun(model, kind, [tokens(70, 2), text])
        assert torch.equal(scored(runner, [tokens(8, 3), draft])[1], expected)
        assert torch.equal(_alone(runner, draft), expected)
        for token, logits in zip(draft, expected, strict=True):
            assert torch.equal(_alone(runner, [token])[0], logits)
            runner.lengths[1] += 1
    _tree_is_its_paths(model, kind, text)


def _alone(runner: Runner, draft: list[int]) -> Tensor:
    """Scores a draft of the second row without the first one."""
    return runner.forward(torch.tensor([draft]), keep=len(draft), first=1).logits[0]


def _tree_is_its_paths(model: Any, kind: KVCacheDtype, text: list[int]) -> None:
    """A branch lies apart until it is accepted, and next to it lie slots that it does not see."""
    tree, nodes = Tree.uniform([0, 0, 1, 2, 3], rows=1), [4, 8, 15, 16, 23, 42]
    runner, chain = begun(model, kind, [text]), begun(model, kind, [text])
    found = scored(runner, [nodes], tree)[0]
    for path in ([2, 4], [1, 3, 5]):
        alone = scored(chain, [[4, *(nodes[at] for at in path)]])[0]
        assert torch.equal(found[[0, *path]], alone)
    runner.advance_paths(1, [[1, 3, 5]])
    chain.advance([4])
    assert torch.equal(scored(chain, [[7]]), scored(runner, [[7]]))


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "gemma2", "deepseek_v2"])
@torch.inference_mode()
def test_a_long_text_has_the_numbers_of_torch(family: str, threads: None) -> None:
    """With all of it seen, with a window, and with scores that are bounded."""
    more: dict[str, Any] = {"max_position_embeddings": 4096}
    if "sliding_window" in DESCRIBED[family][1]:
        more["sliding_window"] = 700
    text, draft = tokens(LONG), tokens(8, 1)
    expected = scored(begun(made(family, **more), "auto", [text]), [draft])
    for count in (2, 3):
        torch.set_num_threads(count)
        found = scored(begun(played(family, **more), "auto", [text]), [draft])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [name for name in DESCRIBED if name != "lfm2-taps"])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_what_is_cached_is_what_torch_would_round(family: str, kind: KVCacheDtype) -> None:
    """Keys and values of the first layer with some, which depend on no others, to the last bit; and
    logits that are those of transformers' code over the same cache, but for numbers that were
    rounded the other way."""
    model, text, bits = played(family), tokens(40), EIGHT_BITS[kind]
    assert bits is not None
    whole, narrow = (begun(model, name, [text]) for name in ("auto", kind))
    first = next(at for at, layer in enumerate(whole.cache.layers) if layer.is_initialized)
    keys, values = whole.cache.layers[first].keys, whole.cache.layers[first].values
    layer = narrow.cache.layers[first]
    for states, numbers, scales in (
        (keys, layer.keys, layer.key_scales),
        (values, layer.values, layer.value_scales),
    ):
        expected, of_expected = bits.rounded(states[:, :40])
        assert torch.equal(numbers[:, :40], expected)
        assert torch.equal(scales[:, :40], of_expected)
    draft = [tokens(5, 1)]
    found = scored(narrow, draft)
    other = scored(begun(made(family), kind, [text]), draft)
    unrounded = scored(whole, draft)
    spread = unrounded.std()
    assert (found - other).square().mean().sqrt() < 0.01 * spread
    error = (found - unrounded).square().mean().sqrt() / spread
    assert 1e-5 < error < (0.1 if kind == "int8" else 0.3)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_what_is_no_number_stays_with_its_row(kind: KVCacheDtype) -> None:
    model = played("qwen2")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    runner = begun(model, kind, [[3, 1, 4], [3, 1, 4]])
    found = scored(runner, [[3, 7, 4], [3, 5, 4]])
    assert bool(found[0, 1:].isnan().all())
    assert bool(found[0, 0].isfinite().all())
    assert bool(found[1].isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_same_with_drafts_and_without(kind: KVCacheDtype) -> None:
    """In float32, token for token: no rounding depends on what else is in a pass."""
    model = played("llama", max_position_embeddings=2048)
    prompts = [[5, 6, 7, 8] * 8, tokens(50), [2, 3] * 6]
    texts = []
    for method in ("none", "suffix", "lookahead"):
        config = {"method": method, "num_speculative_tokens": 6}
        llm = LLM(model, speculative_config=config, kv_cache_dtype=kind, max_num_seqs=4)
        texts.append(ids(llm.generate(prompts, greedy(60))))
        texts.append([ids(llm.generate([prompt], greedy(60)))[0] for prompt in prompts])
    assert all(each == texts[0] for each in texts)


# -- other processors ------------------------------------------------------------------------------

CACHED = """
#include "kv_cache.h"
extern "C" void put_all(int kind, const float *x, long slots, long dim, void *numbers,
                        float *scales) {
  for (long slot = 0; slot < slots; slot++)
    store_vector({numbers, scales, kind, dim}, slot, x + slot * dim);
}
extern "C" void widen_all(int kind, long slots, long dim, void *numbers, float *scales, float *to) {
  for (int32_t slot = 0; slot < slots; slot++)
    dequantize_vectors({numbers, scales, kind, dim}, &slot, 1, to + slot * dim);
}
"""


FLAGS = [("-march=x86-64", "sse2"), ("-march=x86-64-v3", "avx2"), ("-march=x86-64-v4", "avx512bw")]


@pytest.fixture(scope="module", params=FLAGS, ids=lambda each: each[1])
def compiled(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled_for(*request.param, tmp_path_factory.mktemp("cached"), CACHED)


@pytest.mark.parametrize("kind", KINDS)
def test_all_processors_round_and_widen_alike(kind: KVCacheDtype, compiled: Any) -> None:
    library, bits = compiled, EIGHT_BITS[kind]
    assert bits is not None
    torch.manual_seed(0)
    x = torch.randn(400, 64) * torch.logspace(-45, 37, 400)[:, None]
    x[:2], x[2:20, 1:] = 0.0, 0.0
    x[20:300] = torch.exp2(torch.randint(-20, 9, (280, 64)).float()) * (1 + torch.randn(280, 64))
    numbers, scales, found = torch.zeros(400, 64, dtype=torch.int8), torch.zeros(400, 1), x * 0
    sizes = ctypes.c_long(400), ctypes.c_long(64)
    at = [ctypes.c_void_p(each.data_ptr()) for each in (x, numbers, scales, found)]
    library.put_all(bits.number, at[0], *sizes, at[1], at[2])
    library.widen_all(bits.number, *sizes, at[1], at[2], at[3])
    expected, of_expected = bits.rounded(x)
    assert torch.equal(scales, of_expected)
    assert torch.equal(numbers, expected)
    assert torch.equal(found, bits.dequantized(numbers, scales))
    codes = torch.arange(256).to(torch.int8).view(4, 64)  # each number that there is
    ones, wide = torch.ones(4, 1), torch.zeros(4, 64)
    at = [ctypes.c_void_p(each.data_ptr()) for each in (codes, ones, wide)]
    library.widen_all(bits.number, ctypes.c_long(4), ctypes.c_long(64), *at)
    real = bits.dequantized(codes, ones)
    is_number = ~real.isnan()
    assert torch.equal(wide[is_number], real[is_number])
