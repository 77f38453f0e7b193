"""Each kind of blocks, and the layers that hold them: computed, copied, saved, counted."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from outpace import LLM
from outpace.errors import ConfigError, UnsupportedModel
from outpace.methods.models.noisy_copy import noisy_copy
from outpace.targets.cpu.native import native
from outpace.targets.cpu.native_layers.blocks import NativeBlockLinear
from outpace.targets.cpu.weights.blocks import (
    KINDS,
    BlockEmbedding,
    BlockLinear,
    block_bytes,
    dequantizes,
    in_blocks,
)
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.weights import pass_bytes, weight_bytes
from targets.gguf.files import tiny, write
from targets.gguf.test_families import IDS, dequantized

K = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}


@pytest.mark.parametrize("kind", [*KINDS, "F16", "BF16"])
def test_every_kind_is_read(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama", tiny("llama", **K), kind)
    loaded = load(path, dtype="float64")
    expected = dequantized(path, tiny("llama", **K)).double()
    with torch.no_grad():
        assert torch.allclose(loaded.model(IDS).logits, expected(IDS).logits, rtol=1e-9, atol=1e-9)
    assert set(block_bytes(loaded.model)) == ({kind} if kind in KINDS else set())
    assert loaded.packed == (kind in KINDS)


OTHERS = ("TQ1_0", "TQ2_0", "NVFP4")
"""Kinds of blocks that are dequantised when a file is read."""


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_are_dequantized_as_their_own_library_does(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not hasattr(gguf.GGMLQuantizationType, kind) or not dequantizes(kind):
        pytest.skip(f"the installed gguf does not dequantise {kind}")
    path = write(tmp_path / "model.gguf", "llama", tiny("llama", **K), kind)
    loaded = load(path, dtype="float64")
    expected = dequantized(path, tiny("llama", **K)).double()
    with torch.no_grad():
        logits = expected(IDS).logits
        assert torch.allclose(loaded.model(IDS).logits, logits, rtol=1e-9, atol=1e-9)
    assert logits.std() > 1e-3, "scales make no numbers of the blocks"
    assert not loaded.packed
    assert f"because outpace has no products of {kind}" in caplog.text


def test_blocks_of_both_sorts_share_a_file(tmp_path: Path) -> None:
    """Some matrices stay in blocks, and some are dequantised."""
    kinds = {"token_embd.weight": "Q8_0", "blk.0.ffn_down.weight": "Q6_K"}
    path = write(tmp_path / "model.gguf", "llama", tiny("llama", **K), "TQ2_0", kinds=kinds)
    loaded = load(path, dtype="float64")
    expected = dequantized(path, tiny("llama", **K)).double()
    with torch.no_grad():
        assert torch.allclose(loaded.model(IDS).logits, expected(IDS).logits, rtol=1e-9, atol=1e-9)
    assert loaded.packed
    assert set(block_bytes(loaded.model)) == {"Q8_0", "Q6_K"}
    config = {"method": "ngram", "num_speculative_tokens": 3}
    texts = [
        LLM(path, speculative_config=each).generate([[5, 6, 5, 6, 5]], {"temperature": 0})
        for each in (config, {"method": "none"})
    ]
    assert texts[0][0].token_ids == texts[1][0].token_ids


@pytest.mark.parametrize("kind", ["Q8_1", "F64"])
def test_kinds_that_the_library_does_not_dequantize_are_named_with_their_tensor(
    kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    chosen = gguf.GGMLQuantizationType[kind]
    size, nbytes = gguf.GGML_QUANT_SIZES[chosen]
    raw = torch.zeros(4, 256 // size * nbytes, dtype=torch.uint8).numpy()
    writer.add_tensor("token_embd.weight", raw, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    said = f"holds 'token_embd.weight' in numbers or blocks of kind {kind}, which the installed"
    with pytest.raises(UnsupportedModel, match=said):
        load(path)


# -- layers ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write(place, "llama", tiny("llama", tie_word_embeddings=True), "Q5_1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_is_that_of_the_dequantized_weight(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.targets.cpu.weights.blocks.CHUNK", 64 * 10)
    blocks, bias = in_blocks(torch.randn(37, 64), "Q4_0"), torch.randn(37, dtype=dtype)
    x = torch.randn(2, 3, 64, dtype=dtype)
    expected = torch.nn.functional.linear(x, blocks.dense().to(dtype), bias)
    assert torch.allclose(BlockLinear(blocks, bias)(x), expected, atol=1e-5)
    table = BlockEmbedding(blocks, dtype, scale=3.0)
    ids = torch.tensor([[5, 36], [0, 5]])
    assert torch.allclose(table(ids), blocks.dense()[ids].to(dtype) * 3)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_no_tokens_have_no_embeddings(kind: str) -> None:
    table = BlockEmbedding(in_blocks(torch.randn(10, 64), kind))
    assert table(torch.empty(2, 0, dtype=torch.long)).shape == (2, 0, 64)


def test_blocks_are_a_view_of_the_file(path: Path) -> None:
    """What is loaded takes the memory of the file, and a tied head none of its own."""
    model: Any = load(path, cpu_kernels="off").model  # ours lay weights out, and have copies
    assert model.lm_head.blocks is model.model.embed_tokens.blocks
    packed = sum(block_bytes(model).values())
    assert path.stat().st_size > weight_bytes(model) > packed > path.stat().st_size // 2
    table = model.model.embed_tokens.blocks.nbytes
    assert pass_bytes(model) == weight_bytes(model), "the head is read, the embedding is not"
    assert weight_bytes(model) < sum(m.packed_bytes for m in holders(model)) + table
    assert not any(isinstance(module, (nn.Linear, nn.Embedding)) for module in model.modules())


def holders(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "packed_bytes")]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_compute_the_same(how: str, path: Path) -> None:
    model: Any = load(path, cpu_kernels="off").model
    expected = model(IDS).logits
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    del model
    assert torch.equal(other(IDS).logits, expected)
    assert other.lm_head.blocks is other.model.embed_tokens.blocks


def test_a_saved_model_holds_the_dequantized_weights(path: Path, tmp_path: Path) -> None:
    model: Any = load(path, cpu_kernels="off").model
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.allclose(again(IDS).logits, model(IDS).logits, atol=1e-4)


def test_it_says_in_which_blocks_the_weights_are(path: Path) -> None:
    found = LLM(path, speculative_config={"model": str(path)}).describe()
    assert found.blocks == "Q5_1 100 %"
    assert found.drafter is not None
    assert (found.drafter.blocks, found.drafter.quantization) == ("Q5_1 100 %", None)
    assert "Q5_1 100 % in float32" in str(found)


# -- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"quantization": "int8"}, "are quantised already: leave quantization out"),
        ({"dtype": "bfloat16"}, "compute in float32 on a CPU, not in bfloat16: leave dtype out"),
        ({"dtype": torch.float16}, "not in float16: leave dtype out"),
        ({"cpu_kernels": "packed"}, "are in blocks: leave it at 'auto'"),
        ({"cpu_kernels": "blocked"}, "are in blocks: leave it at 'auto'"),
    ],
)
def test_options_that_blocks_do_not_have_are_refused_before_weights_are_read(
    options: dict[str, Any], reason: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.targets.hf.gguf.load.filled", lambda *_: pytest.fail("read"))
    with pytest.raises(ConfigError, match=reason):
        load(path, **options)


def test_without_blocks_it_is_a_model_like_others(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama", tiny("llama"), "BF16")
    loaded = load(path, dtype="bfloat16")
    assert (loaded.dtype, loaded.packed) == (torch.bfloat16, False)
    assert load(path, quantization="int8").quantization == "int8"


def test_a_noisy_copy_is_off(path: Path) -> None:
    """The draft model of the audit's dummy options differs from its target in blocks too."""
    model: Any = load(path).model
    with torch.no_grad():
        assert not torch.allclose(noisy_copy(model)(IDS).logits, model(IDS).logits, atol=1e-2)


@pytest.mark.skipif(native() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("arch", "multiplied"), [("llama", True), ("gemma3", True), ("mistral3", False)]
)
def test_blocks_are_multiplied_in_models_that_are_wholly_our_own(
    arch: str, multiplied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Elsewhere attention adds up in another order, and rounded inputs would change the text."""
    path = write(tmp_path / "model.gguf", arch, tiny(arch), "Q8_0")
    loaded = load(path)
    kinds = {type(module) for module in loaded.model.modules()}
    assert (NativeBlockLinear in kinds) == multiplied
    assert ("dequantised from blocks to float32" in caplog.text) != multiplied
    expected = load(path, dtype="float64").model(IDS).logits
    error = (loaded.model(IDS).logits - expected).abs().max() / expected.std()
    assert error < (0.1 if multiplied else 1e-3)
