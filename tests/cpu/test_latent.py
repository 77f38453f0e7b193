"""Latent attention: products the other way round, with weights as they are held."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cpu.described import made
from cpu.test_blocks import compiled_for, library, random_blocks, same_bits_everywhere
from outpace.targets.cpu.native import native
from outpace.targets.cpu.native_layers.blocks import NativeBlockLinear
from outpace.targets.cpu.native_layers.latent import latent_of
from outpace.targets.cpu.native_layers.layer import use_native_layers
from outpace.targets.cpu.native_layers.model import NativeModel
from outpace.targets.cpu.weights.blocks import KINDS
from outpace.targets.cpu.weights.latents import BlockLatents
from outpace.targets.cpu.weights.narrow import to_int8
from outpace.targets.cpu.weights.weight import Weight, linear_struct, to_panels
from outpace.targets.hf.loading.load import load
from targets.gguf.files import tiny, write

pytestmark = pytest.mark.skipif(native() is None, reason="no C++ compiler here")

OUTPUTS, INPUTS, FIRST, COUNT, ROWS = 96, 512, 32, 48, 9

BACK = """
#include "transposed_products.h"
extern "C" int panel() { return LANES; }
extern "C" void product(const Linear *linear, long first, long count, const float *x, long rows,
                        long k, float *y, long stride) {
  multiply_transposed(slice_outputs(*linear, first, count, k), x, rows, k, y, stride);
}
"""
FLAGS = [
    ("-march=x86-64", "sse2"),
    ("-march=x86-64-v3", "avx2"),
    ("-march=x86-64-v4", "avx512bw"),
    ("-march=x86-64-v4 -mavx512vnni -mamx-tile -mamx-int8", "amx_int8"),
]


@pytest.fixture(scope="module", params=FLAGS, ids=lambda each: each[1])
def compiled(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled_for(*request.param, tmp_path_factory.mktemp("back"), BACK)


def weights(panel: int) -> dict[str, tuple[Weight, Tensor]]:
    """Each form of a weight, and its numbers."""
    torch.manual_seed(0)
    matrix = torch.randn(OUTPUTS, INPUTS)
    integers, scale = to_int8(matrix)
    found = {
        "float32": (Weight(matrix, None, None), matrix),
        "bfloat16": (Weight(matrix.bfloat16(), None, None), matrix.bfloat16()),
        "float16": (Weight(matrix.half(), None, None), matrix.half()),
        "int8": (Weight(integers, scale, None), integers * scale[:, None]),
        "panels": (Weight(to_panels(matrix, panel), None, None), matrix),
    }
    for kind in KINDS:
        blocks = random_blocks(kind, OUTPUTS, INPUTS)
        found[kind] = NativeBlockLinear(library(), blocks).as_weight(), blocks.dense()
    return found


@torch.inference_mode()
def test_products_the_other_way_round(compiled: Any) -> None:
    x = torch.randn(ROWS, COUNT)
    for form, (weight, numbers) in weights(compiled.panel()).items():
        some = numbers[FIRST : FIRST + COUNT].double()
        given = x if weight.scale is None else x * weight.scale[FIRST : FIRST + COUNT]

        def product(rows: Tensor, weight: Weight = weight) -> Tensor:
            y, held = torch.zeros(len(rows), INPUTS + 32), linear_struct(weight)
            compiled.product(
                ctypes.byref(held),
                *(ctypes.c_long(FIRST), ctypes.c_long(COUNT), ctypes.c_void_p(rows.data_ptr())),
                *(ctypes.c_long(len(rows)), ctypes.c_long(INPUTS)),
                *(ctypes.c_void_p(y.data_ptr()), ctypes.c_long(INPUTS + 32)),
            )
            assert not bool(y[:, INPUTS:].any())
            return y[:, :INPUTS]

        found, terms = product(given), x.double().abs() @ some.abs()
        assert bool(((found - x.double() @ some).abs() <= 2e-6 * terms).all()), form
        alone = torch.cat([product(row[None].contiguous()) for row in given])
        assert torch.equal(found, alone), form


@torch.inference_mode()
def test_attention_of_other_kinds_is_left_to_transformers() -> None:
    """With numbers of their own, other sizes, and where the cache holds no latents."""
    attention = made("deepseek_v3").model.layers[0].self_attn
    found = latent_of(attention)
    assert found is not None
    assert found.sizes == (64, 32, 16, 48, 4)
    assert (found.sizes.query, found.sizes.each) == (48, 4)
    assert latent_of(made("llama").model.layers[0].self_attn) is None
    assert use_native_layers(made("deepseek_v3", qk_nope_head_dim=20)) == 2  # in rows, any number
    assert use_native_layers(made("deepseek_v3", kv_lora_rank=18)) == 0
    assert use_native_layers(made("deepseek_v3", qk_rope_head_dim=80)) == 0
    indexed = made("deepseek_v3")
    for layer in indexed.model.layers:
        layer.self_attn.indexer = torch.nn.Linear(4, 4)
    assert use_native_layers(indexed) == 0


@torch.inference_mode()
def test_keys_in_numbers_and_values_in_blocks(tmp_path: Path) -> None:
    kinds = {f"blk.{layer}.attn_k_b.weight": "F16" for layer in range(2)}
    large = tiny("deepseek2", kv_lora_rank=256)  # enough for our own products
    path = write(tmp_path / "m.gguf", "deepseek2", large, "Q8_0", kinds=kinds)
    model: Any = load(path).model
    assert isinstance(model.forward, NativeModel)
    assert not [module for module in model.modules() if isinstance(module, BlockLatents)]
    same_bits_everywhere(model, 200)
