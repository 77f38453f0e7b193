"""Keys and values in 8 bits: the target so quantised is decoded exactly, by every drafter, alone
and in company, and they take the bytes that they should."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from devices import on_device
from outpace import LLM, BeamSearchParams, SamplingParams
from outpace.draft.registry import drafter_names, find_drafter
from outpace.errors import ConfigError
from outpace.targets.base import KVCacheDtype
from outpace.targets.hf.kv_dtype import EIGHT_BITS
from outpace.targets.hf.loading.loaded import LoadedModel
from representatives import representatives
from targets.families import CONTEXT, FAMILIES, PROMPTS, RECURRENT, build, drafter, target
from targets.generating import greedy, ids

LENGTH = 12
KINDS: tuple[KVCacheDtype, ...] = ("int8", "fp8")
NO_KV_LAYER_TYPES = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
"""Families that keep states and nothing else."""
SOME_FAMILIES = ("gpt2", "gemma3", "mixtral", "gpt_oss", "deepseek_v32", "bloom", "lfm2",
                 "qwen3_next")  # fmt: skip
"""Added positions, windows in some layers, experts, sinks, latents with an index, a bias by
distance, and two that keep states as well."""
SOME_DRAFTERS = ("none", "draft_model", "draft_tree", "suffix", "lookahead", "early_exit", "medusa",
                 "eagle3", "dflash", "pass", "staged", "auto")  # fmt: skip
"""Chains and trees, columns that ride in the target's pass, parts of the target, heads that read
states or none, and drafters of several."""


# -- an implementation of its own, over transformers' cache ----------------------------------------


def rounded(states: Tensor, kind: str) -> Tensor:
    largest = states.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    if kind == "int8":
        return (states / largest * 127).round() / 127 * largest
    return (states / largest * 448).to(torch.float8_e4m3fn).to(states.dtype) / 448 * largest


def read(family: str, kind: str, prompt: Sequence[int], length: int) -> list[int]:
    """The greedy text after a prompt, by transformers alone."""

    class Layer(DynamicLayer):
        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = super().update(
                rounded(keys, kind), rounded(values, kind)
            )
            return found

    model, cache = target(family), DynamicCache()
    cache.layers = [Layer() for _ in range(model.config.num_hidden_layers)]
    fed, text = list(prompt), []
    with torch.inference_mode():
        for _ in range(length):
            logits = model(on_device([fed]), past_key_values=cache, use_cache=True).logits
            fed = [int(logits[0, -1].argmax())]
            text += fed
    return text


@lru_cache
def expected(family: str, kind: str, length: int = LENGTH) -> list[list[int]]:
    return [read(family, kind, prompt, length) for prompt in PROMPTS]


# -- texts -----------------------------------------------------------------------------------------


def decoder(family: str, kind: KVCacheDtype, method: str = "none", **options: Any) -> LLM:
    config = {"method": method, "num_speculative_tokens": 5}
    if method == "draft_model":
        config["model"] = drafter(family)
    elif method != "none":
        config |= find_drafter(method).dummy_options(LoadedModel(target(family), None, family))
    options = {"max_num_seqs": 4, "max_model_len": CONTEXT, **options}
    return LLM(target(family), speculative_config=config, kv_cache_dtype=kind, **options)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma3", "olmo2", "deepseek_v3"])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_a_model_with_rounded_keys_and_values(
    family: str, kind: KVCacheDtype
) -> None:
    llm = decoder(family, kind, "draft_model")
    outputs = llm.generate(PROMPTS, greedy(LENGTH))
    assert ids(outputs) == expected(family, kind)
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0
    for prompt, text in zip(PROMPTS, expected(family, kind), strict=True):
        assert ids(llm.generate([prompt], greedy(LENGTH))) == [text]


@pytest.mark.parametrize("method", representatives(drafter_names(), SOME_DRAFTERS))
def test_every_drafter_writes_them(method: str) -> None:
    """Chains and trees, in batches and alone, greedy and sampled."""
    llm = decoder("llama", "int8", method)
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == expected("llama", "int8")
    seeded = SamplingParams(temperature=0.9, max_tokens=LENGTH, ignore_eos=True, seed=3)
    together = ids(llm.generate(PROMPTS, seeded))
    assert ids(llm.generate([PROMPTS[2]], seeded)) == together[2:3]


@pytest.mark.parametrize(
    "family", representatives([*FAMILIES, *RECURRENT], {*SOME_FAMILIES, *NO_KV_LAYER_TYPES})
)
def test_every_family_is_decoded_exactly_or_refused(family: str) -> None:
    if family in NO_KV_LAYER_TYPES:
        with pytest.raises(ConfigError, match="instead of keys and values: leave kv_cache_dtype"):
            decoder(family, "int8")
        return
    plain = ids(decoder(family, "int8").generate(PROMPTS, greedy(LENGTH)))
    assert ids(decoder(family, "int8", "draft_model").generate(PROMPTS, greedy(LENGTH))) == plain


def test_they_differ_from_those_with_a_whole_cache() -> None:
    """Else the option would do nothing."""
    whole = ids(decoder("llama", "auto").generate(PROMPTS, greedy(40)))
    assert ids(decoder("llama", "fp8").generate(PROMPTS, greedy(40))) != whole


@pytest.mark.parametrize("method", ["draft_model", "draft_tree", "suffix"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_total_tokens": 100, "max_model_len": 40},
        {"enable_prefix_caching": True},
        {"max_num_batched_tokens": 3},
        {"batch_invariant": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_whatever_becomes_of_a_row(method: str, options: dict[str, Any]) -> None:
    """It is put aside and read again, goes on from a saved text, or is read in pieces."""
    if "batch_invariant" in options and method != "draft_model":
        pytest.skip("passes of one shape score chains only")
    llm = decoder("llama", "int8", method, **options)
    for _ in range(2):
        assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == expected("llama", "int8")
    longer = [*PROMPTS[2] * 2, 4]
    assert ids(llm.generate([longer], greedy(8))) == [read("llama", "int8", longer, 8)]


def test_samples_of_one_prompt_and_beams() -> None:
    plain, drafting = (decoder("llama", "int8", method) for method in ("none", "draft_tree"))
    several = SamplingParams(n=3, temperature=0.8, seed=4, max_tokens=LENGTH, ignore_eos=True)
    alone = SamplingParams(temperature=0.8, seed=4, max_tokens=LENGTH, ignore_eos=True)
    outputs = drafting.generate([PROMPTS[2]], several)[0].outputs
    assert len({tuple(output.token_ids) for output in outputs}) > 1
    first = drafting.generate([PROMPTS[2]], alone)[0].token_ids
    assert outputs[0].token_ids == first, "a fork is what the row itself would be"
    beams = BeamSearchParams(beam_width=3, max_tokens=LENGTH)
    found = [llm.beam_search([PROMPTS[2]], beams)[0] for llm in (plain, drafting)]
    assert [beam.token_ids for beam in found[0].sequences] == [
        beam.token_ids for beam in found[1].sequences
    ]


def test_a_draft_model_may_have_such_a_cache_too() -> None:
    config = {
        "method": "draft_model",
        "model": drafter("llama"),
        "num_speculative_tokens": 4,
        "kv_cache_dtype": "fp8",
    }
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)
    whole = LLM(
        target("llama"),
        speculative_config={**config, "kv_cache_dtype": "auto"},
        max_num_seqs=4,
        max_model_len=CONTEXT,
    )
    texts = [ids(each.generate(PROMPTS, greedy(LENGTH))) for each in (llm, whole)]
    assert texts[0] == texts[1]
    assert llm.memory["target_cache"] == whole.memory["target_cache"]
    # 8 numbers and a scale each, in float64: 16 bytes instead of 64.
    assert 4 * llm.memory["drafter_cache"] == whole.memory["drafter_cache"]


def test_what_there_is_not() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        decoder("llama", "int4")  # type: ignore[arg-type]


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float32, 68 / 256), (torch.bfloat16, 66 / 128)], ids=str
)
def test_they_take_a_quarter_or_half_of_the_memory(
    kind: KVCacheDtype, dtype: torch.dtype, share: float
) -> None:
    """The bytes of heads of 64 numbers, with a scale for each vector."""
    model = build("llama", head_dim=64).to(dtype)
    held = {}
    for each in ("auto", kind):
        llm = LLM(
            model,
            speculative_config={"method": "none"},
            kv_cache_dtype=each,
            max_num_seqs=2,
            max_model_len=CONTEXT,
            dtype=dtype,
        )
        llm.generate([PROMPTS[2]], greedy(4))
        held[each] = llm.memory["target_cache"]
        assert llm.describe().kv_cache_dtype == each
        assert (f"{kind} keys and values" in str(llm.describe())) == (each == kind)
    assert held[kind] == share * held["auto"]


# -- numbers ---------------------------------------------------------------------------------------

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "error"), [("int8", 0.5 / 127), ("fp8", 1 / 16)])
@given(numbers=st.lists(NUMBERS, min_size=1, max_size=9))
def test_a_rounded_vector_is_near(
    kind: KVCacheDtype, error: float, dtype: torch.dtype, numbers: list[float]
) -> None:
    """Within half a step of the largest number in int8, within a sixteenth of each in fp8."""
    bits = EIGHT_BITS[kind]
    assert bits is not None
    vector = torch.tensor(numbers).clamp(*(sign * 6e4 for sign in (-1, 1))).to(dtype)
    left, scales = bits.rounded(vector)
    assert left.dtype == torch.int8
    assert scales.shape == (1,)
    found, top = bits.dequantized(left, scales), vector.abs().max().double()
    assert found.dtype == dtype
    off, eps = (found.double() - vector.double()).abs(), torch.finfo(dtype).eps
    allowed = top if kind == "int8" else torch.maximum(vector.abs().double(), top / 448 * 2**-6)
    tiny = 448 * torch.finfo(dtype).smallest_normal  # below that a scale has few bits, or is 0
    assert bool((off <= (error + 2 * eps) * allowed + tiny).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_without_numbers(kind: KVCacheDtype) -> None:
    bits = EIGHT_BITS[kind]
    assert bits is not None
    zeros = bits.dequantized(*bits.rounded(torch.zeros(3, 4)))
    assert torch.equal(zeros, torch.zeros(3, 4))
    vectors = torch.tensor([[1.0, torch.nan], [torch.inf, 1.0], [-torch.inf, 0.0], [1.0, 2.0]])
    found = bits.dequantized(*bits.rounded(vectors))
    assert not found[:3].isfinite().any(), "a fault is not hidden, nor is it made a number"
    assert torch.allclose(found[3], vectors[3], rtol=0.07), "and stays with its own vector"
