"""Weights in quantised blocks: exact integer sums, and the same bits in any company."""

from __future__ import annotations

import copy
import ctypes
import pickle
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from cpu import described
from outpace import LLM
from outpace.core.proposal import AuxTokens
from outpace.core.trees.tree import Tree
from outpace.targets.base import PromptInputs, ScoreInputs
from outpace.targets.cpu import native as building
from outpace.targets.cpu.kernels import speed_up
from outpace.targets.cpu.library.compiler import Compiler, find_compiler
from outpace.targets.cpu.native import Native, native
from outpace.targets.cpu.native_layers import passes
from outpace.targets.cpu.native_layers.blocks import (
    NativeBlockEmbedding,
    NativeBlockLinear,
    use_block_kernels,
)
from outpace.targets.cpu.native_layers.layer import use_native_layers
from outpace.targets.cpu.native_layers.linear import fuse_products, prepack_weights
from outpace.targets.cpu.native_layers.model import use_native_model
from outpace.targets.cpu.native_layers.product import WeightLayout
from outpace.targets.cpu.weights.blocks import KINDS, BlockEmbedding, BlockLinear, Blocks, in_blocks
from outpace.targets.hf.logits import VocabularySubset
from outpace.targets.hf.runner import Runner
from outpace.targets.hf.target import HFTarget
from outpace.targets.hf.weights import pass_bytes
from targets.gguf.files import tiny, write
from targets.gguf.words import VOCABULARY

FOUND = native()
pytestmark = pytest.mark.skipif(FOUND is None, reason="no C++ compiler here")

SCALES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "IQ1_M": (48, 50, 52, 54)},
}
"""Where a block of a kind holds its float16 numbers; those of all other kinds begin with one."""

MORE = {"IQ1": 2.3, "IQ2_XXS": 1.75, "IQ2": 1.56, "IQ3_XXS": 1.43, "IQ3": 1.27}
"""How much more memory than in the file kinds take whose numbers are named several at once."""

ROWS = 70


def library() -> Native:
    assert FOUND is not None
    return FOUND


def random_blocks(kind: str, outputs: int, inputs: int, seed: int = 0) -> Blocks:
    """Any bytes, with scales of a decent size: every code and every small factor occurs."""
    chance = np.random.default_rng(seed)
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = chance.integers(0, 256, (outputs, inputs // size, nbytes), dtype=np.uint8)
    for at in SCALES.get(kind, (0,)):
        scales = chance.uniform(-1e-2, 1e-2, (*raw.shape[:2], 1)).astype(np.float16)
        raw[..., at : at + 2] = scales.view(np.uint8)
    if kind == "MXFP4":  # whose scales are powers of two
        raw[..., 0] = chance.integers(116, 124, raw.shape[:2])
    if kind == "IQ1_M":  # whose scale is in the highest bits of its last four numbers
        raw[..., 49::2] &= 0x0F
        raw[..., 51], raw[..., 55] = raw[..., 51] | 0x60, raw[..., 55] | 0x20
    return Blocks(kind, torch.from_numpy(raw.reshape(outputs, -1)))


def size_of(kind: str) -> int:
    """The inputs of a block."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]


def rounded(x: Tensor) -> Tensor:
    """Activations ``[R, K]`` as products see them, in float64."""
    blocks = x.view(len(x), -1, 32)
    highest = blocks.abs().amax(-1, keepdim=True)
    codes = torch.round(blocks * torch.where(highest > 0, 127 / highest, 0))
    return (codes.double() * (highest / 127).double()).view(x.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "blocks"), [(16, 1), (37, 3), (1, 2), (100, 9)])
@torch.inference_mode()
def test_products_are_exact_and_a_row_keeps_its_bits(kind: str, outputs: int, blocks: int) -> None:
    torch.manual_seed(0)
    weight = random_blocks(kind, outputs, size_of(kind) * blocks)
    bias = nn.Parameter(torch.randn(outputs)) if blocks > 1 else None
    layer = NativeBlockLinear(library(), weight, bias)
    x = torch.randn(ROWS, weight.inputs) * torch.logspace(-3, 3, ROWS)[:, None]
    x[3], x[5, 32:] = 0, 0
    alone = torch.cat([layer(row[None]) for row in x])
    dense = weight.dense().double()
    added = torch.zeros(outputs).double() if bias is None else bias.double()
    exact = rounded(x) @ dense.t() + added
    allowed = 2e-6 * (rounded(x).abs() @ dense.abs().t() + added.abs()) + 1e-12
    assert bool(((alone - exact).abs() <= allowed).all())
    # Half a step of each activation, and never more.
    steps = x.view(ROWS, -1, 32).abs().amax(-1) / 127 / 2
    off = (steps.double().repeat_interleave(32, 1) * 1.001) @ dense.abs().t() + allowed
    assert bool(((alone - (x.double() @ dense.t() + added)).abs() <= off).all())
    for rows in range(1, ROWS + 1):
        assert torch.equal(layer(x[:rows]), alone[:rows])
        assert torch.equal(layer(x[-rows:].flip(0)), alone[-rows:].flip(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x0F, 0xF0, 0x80, 0x7F])
@torch.inference_mode()
def test_the_largest_sums_do_not_overflow(kind: str, byte: int) -> None:
    """All codes at an end of their range, all activations at theirs: sums in 16 bits are exact."""
    size = size_of(kind)
    weight = random_blocks(kind, 16, 2 * size)
    raw = weight.raw.numpy().reshape(32, -1)
    scales = {at + i for at in SCALES.get(kind, (0,)) for i in (0, 1)}
    raw[:, [at for at in range(raw.shape[1]) if at not in scales]] = byte
    signs = torch.ones(6, weight.inputs)
    signs[1] = -1
    signs[2, ::2], signs[3, 1::2], signs[4, : size // 2] = -1, -1, -1
    signs[5] = torch.randn(weight.inputs).sign()
    layer, dense = NativeBlockLinear(library(), weight), weight.dense().double()
    allowed = 2e-6 * (signs.double().abs() @ dense.abs().t()) + 1e-12
    assert bool(((layer(signs) - signs.double() @ dense.t()).abs() <= allowed).all())


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_weights_are_dequantized_as_the_reference_does(kind: str) -> None:
    weight = random_blocks(kind, 40, 768)
    layer = NativeBlockLinear(library(), weight)
    assert torch.equal(layer.weight, weight.dense())
    assert torch.equal(library().dequantize_rows(weight), weight.dense())
    assert layer.state_dict().keys() == {"weight"}
    assert torch.equal(layer.state_dict()["weight"], weight.dense())
    # As close to the file as whole bytes for small factors allow, and a code for each number.
    more = next((more for name, more in MORE.items() if kind.startswith(name)), 1.05)
    assert layer.panels.nbytes <= more * random_blocks(kind, 48, 768).nbytes
    plain = BlockLinear(weight)
    assert pass_bytes(layer) == pass_bytes(plain) == weight.nbytes


@torch.inference_mode()
def test_inputs_that_do_not_fill_a_block() -> None:
    torch.manual_seed(0)
    weight = torch.randn(20, 50)
    padded = in_blocks(nn.functional.pad(weight, (0, 14)), "Q8_0")
    layer = NativeBlockLinear(library(), padded, inputs=50)
    x = torch.randn(5, 50)
    assert layer.weight.shape == (20, 50)
    torch.testing.assert_close(layer(x), x @ layer.weight.t(), rtol=0.02, atol=0.2)
    filled = NativeBlockLinear(library(), padded)
    assert torch.equal(layer(x), filled(nn.functional.pad(x, (0, 14))))


@torch.inference_mode()
def test_what_is_no_number_shows() -> None:
    layer = NativeBlockLinear(library(), random_blocks("Q4_0", 16, 64))
    x = torch.ones(3, 64)
    x[0, 40], x[2, 3] = float("nan"), float("inf")
    y = layer(x)
    assert bool(y[0].isnan().all())
    assert bool(y[1].isfinite().all())
    assert not bool(y[2].isfinite().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_embeddings_are_looked_up_in_their_blocks(dtype: torch.dtype) -> None:
    plain = BlockEmbedding(random_blocks("Q6_K", 50, 256), dtype)
    ours = NativeBlockEmbedding(library(), plain)
    ids = torch.tensor([[0, 49, 7], [7, 7, 1]])
    assert torch.equal(ours(ids), plain(ids))
    assert ours(ids).dtype == dtype
    assert torch.equal(plain(ids), plain.weight[ids])
    with pytest.raises(IndexError):
        ours(torch.tensor([50]))


@torch.inference_mode()
def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    layer = NativeBlockLinear(library(), random_blocks("Q4_K", 300, 1024))
    x, threads, found = torch.randn(9, 1024), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(layer(x))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# -- other processors ------------------------------------------------------------------------------

PRODUCT = """
#include "block_amx.h"
extern "C" void product(int kind, const float *x, long rows, long k, const uint8_t *panels,
                        long outputs, float *y, ActivationBlock *quantized) {
  quantize_activations(x, rows, k, 0, blocks_of(k), quantized);
  compute_panels({quantized, rows, blocks_of(k), panels, nullptr, outputs, y, BLOCK_FORMATS[kind]},
                 0, (outputs + BLOCK_PANEL - 1) / BLOCK_PANEL);
}
"""


def compiled_for(flags: str, needs: str, folder: Path, source: str = PRODUCT) -> Any:
    """A library with some of our functions, as another processor of the same family has them, or a
    skipped test where this one could not run it."""
    if platform.machine() != "x86_64":
        pytest.skip("for x86-64")
    found = find_compiler()
    if needs not in found.identity.decode(errors="replace"):
        pytest.skip(f"this processor lacks {needs}")
    kept = [word for word in found.command if not word.startswith(("-march", "-mcpu", "-O"))]
    sources = f"-I{building.SOURCE.parent}"
    compiler = Compiler((*kept, "-O0", sources, *flags.split()), found.version)
    (folder / "some.cpp").write_text(source)
    compiler.compile(folder / "some.cpp", folder / "some.so")
    return ctypes.CDLL(str(folder / "some.so"))


@pytest.mark.parametrize(
    ("flags", "needs", "same"),
    [
        ("-march=x86-64", "sse2", False),
        ("-march=x86-64-v3", "avx2", True),
        ("-march=x86-64-v3 -mavxvnni", "avx_vnni", True),
        ("-march=x86-64-v4", "avx512bw", True),
        ("-march=x86-64-v4 -mavx512vnni", "avx512_vnni", True),
        ("-march=x86-64-v4 -mavx512vnni -mamx-tile -mamx-int8", "amx_int8", True),
    ],
)
@torch.inference_mode()
def test_processors_agree(flags: str, needs: str, same: bool, tmp_path: Path) -> None:
    """To the last bit where they round a multiplication and addition once."""
    product = compiled_for(flags, needs, tmp_path).product
    rows = 40  # so many that AMX computes them, where there is AMX
    x, y = torch.randn(rows, 768), torch.empty(rows, 37)
    x[0] *= 1e30
    room = torch.empty(rows * 24 * 64, dtype=torch.uint8)
    assert room.data_ptr() % 64 == 0
    for number, kind in enumerate(KINDS):
        weight = random_blocks(kind, 37, 768)
        layer = NativeBlockLinear(library(), weight)
        product(
            number,
            *(ctypes.c_void_p(x.data_ptr()), ctypes.c_long(rows), ctypes.c_long(768)),
            *(ctypes.c_void_p(layer.panels.data_ptr()), ctypes.c_long(37)),
            *(ctypes.c_void_p(y.data_ptr()), ctypes.c_void_p(room.data_ptr())),
        )
        terms = rounded(x).abs() @ weight.dense().double().abs().t()
        assert bool(((layer(x) - y).abs() <= 2e-6 * terms).all())
        assert torch.equal(layer(x), y) or not same


# -- whole models ----------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = (
    *("llama", "qwen2", "gemma2", "gemma3", "phi3", "granite", "olmo2", "cohere", "glm4"),
    *("starcoder2", "stablelm-parallel", "deepseek_v2", "deepseek_v3"),
)
CYCLE = ("Q4_0", "Q8_0", "Q5_1", "Q4_1", "Q5_0")


def made(family: str) -> Any:
    """A model whose layers are in blocks of several kinds, as those of GGUF files are."""
    own = {name: described.DESCRIBED[family][1].get(name, SIZES[name]) for name in SIZES}
    model: Any = described.made(family, **own)
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                blocks = in_blocks(child.weight, CYCLE[count % len(CYCLE)])
                setattr(parent, name, BlockLinear(blocks, child.bias))
                count += 1
    table = model.model.embed_tokens
    scale = getattr(table, "scalar_embed_scale", 1.0)
    model.model.embed_tokens = BlockEmbedding(in_blocks(table.weight, "Q8_0"), scale=scale)
    return model


def played(family: str, whole: bool = True) -> Any:
    model = made(family)
    blocks = [module for module in model.modules() if hasattr(module, "blocks")]
    assert use_block_kernels(model) == len(blocks)
    fuse_products(model)
    assert use_native_layers(model) == 2
    if whole:
        assert use_native_model(model)
    return model


def unrounded(panels: bool) -> Any:
    """A model with float weights, in panels or in rows, that our own code computes."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 192})).eval()
    speed_up(model, "native", smallest=1)
    if panels:
        prepack_weights(model)
    assert model.lm_head.layout is (WeightLayout.PANELS if panels else WeightLayout.ROWS)
    fuse_products(model)
    assert use_native_layers(model) == 2
    assert use_native_model(model)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_models_give_the_numbers_of_dequantized_weights(family: str) -> None:
    runners = [Runner(which, rows=1, max_length=64) for which in (made(family), played(family))]
    tokens, found = torch.randint(0, 101, (1, 12)), []
    for runner in runners:
        runner.admit(1)
        found.append(runner.forward(tokens, keep=12).logits)
    off = (found[0] - found[1]).std() / found[0].std()
    assert 1e-4 < off < 0.05, "activations are rounded, and nothing else"


@torch.inference_mode()
def test_logits_of_the_first_tokens_have_the_same_bits() -> None:
    runner = Runner(played("llama"), rows=2, max_length=64)
    assert runner.supports_partial_logits
    tokens = torch.randint(0, 101, (2, 5))
    found = []
    some, all_ = VocabularySubset(40), VocabularySubset(1000)
    asked = ({}, {"subset": some}, {"subset": all_}, {"subset": some, "output_hidden_states": True})
    for options in asked:
        runner.admit(2)
        found.append(runner.forward(tokens, keep=3, **options).logits)
        runner.retain([])
    every, few, more, with_states = found
    assert few.shape[-1] < 101
    assert torch.equal(few[..., :40], every[..., :40])
    assert torch.equal(more, every)
    assert torch.equal(with_states, few)


@pytest.mark.parametrize("form", ["blocks", "rows", "panels"])
@pytest.mark.parametrize(("rows", "keep"), [(1, 1), (1, 3), (2, 1), (3, 2)])
@torch.inference_mode()
def test_logits_of_other_tokens_have_the_same_bits(form: str, rows: int, keep: int) -> None:
    model = played("llama") if form == "blocks" else unrounded(form == "panels")
    runner, others = Runner(model, rows=rows, max_length=64), (66, 67, 80, 100, 127)
    size = model.config.vocab_size
    tokens, found = torch.randint(0, 101, (rows, 5)), []
    others = tuple(token for token in others if token < size)
    for subset in (None, VocabularySubset(40, others), VocabularySubset(40, others[1:3])):
        runner.admit(rows)
        found.append(runner.forward(tokens, keep=keep, subset=subset).logits)
        runner.retain([])
    every, some, fewer = found
    assert some.shape == every.shape
    for tokens_said, logits in ((others, some), (others[1:3], fewer)):
        assert torch.equal(logits[..., :40], every[..., :40])
        assert torch.equal(logits[..., list(tokens_said)], every[..., list(tokens_said)])
        left = [token for token in range(64, size) if token not in tokens_said]
        assert bool((logits[..., left] == -torch.inf).all())


def test_a_drafter_of_usual_tokens_is_charged_for_what_it_reads(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.gguf", "llama", tiny("llama"), "Q8_0"))

    def charged(size: int | None) -> int:
        config = {"model": path, "draft_vocab_size": size, "num_speculative_tokens": 1}
        return LLM(path, speculative_config=config).engine.drafter.pass_bytes

    head = LLM(path).engine.target.runner.lm_head_bytes
    assert head > 0
    few = VOCABULARY // 4
    assert charged(None) - charged(few) == head * (VOCABULARY - few) // VOCABULARY


def same_bits_everywhere(model: nn.Module, tokens: int) -> None:
    """Asserts that a token has the same bits alone, in trees of three rows, and in prompts."""
    runner = Runner(model, rows=3, max_length=128)
    runner.admit(3)
    torch.manual_seed(1)
    text = torch.randint(0, tokens, (100,)).tolist()
    alone = []
    for length, token in enumerate(text):  # one row, one token at a time
        runner.lengths = [length]
        alone.append(runner.forward(torch.tensor([[token]]), keep=1).logits[0, 0])
    done = 0
    while done < len(text) - 8:  # three rows; the right path lies at the end of a tree
        nodes = [1, 2, *text[done + 1 : done + 4], 3]
        tokens = torch.tensor([[text[done], *nodes]] * 3)
        runner.lengths = [done] * 3
        tree = Tree.uniform([0, 1, 0, 3, 4, 4], rows=3)
        logits = runner.forward(tokens, keep=7, tree=tree).logits
        for node, at in ((0, 0), (3, 1), (4, 2), (5, 3)):
            for row in range(3):
                assert torch.equal(logits[row, node], alone[done + at])
        runner.lengths = [done] * 3
        runner.advance_paths(1, [[3, 4, 5]] * 3)
        done += 4
    for rows in (1, 3):  # and in a prompt, however long
        length = len(text) // rows
        runner.lengths = [0] * rows
        logits = runner.forward(torch.tensor([text[:length]] * rows), keep=length).logits
        assert torch.equal(logits, torch.stack(alone[:length]).expand(rows, -1, -1))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_token_has_the_same_bits_alone_and_among_drafts(family: str, whole: bool) -> None:
    same_bits_everywhere(played(family, whole), 101)


@pytest.mark.parametrize("whole", [False, True])
@torch.inference_mode()
def test_a_pass_of_many_rows_has_the_same_bits(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with more tokens than are computed at once, over ragged rows with a mask."""
    monkeypatch.setattr(passes, "MANY", 20)
    torch.manual_seed(2)
    model, texts = played("llama", whole), torch.randint(0, 101, (7, 12)).tolist()
    many = Runner(model, rows=7, max_length=64)
    many.admit(7)
    for row, text in enumerate(texts):
        many.prefill(row, [text[: row + 1]])
    last = torch.tensor([text[row + 1 : row + 5] for row, text in enumerate(texts)])
    found = many.forward(last, keep=3, output_hidden_states=True)
    for row, text in enumerate(texts):
        alone = Runner(model, rows=1, max_length=64)
        alone.admit(1)
        given = torch.tensor([text[: row + 5]])
        expected = alone.forward(given, keep=3, output_hidden_states=True)
        assert torch.equal(found.logits[row], expected.logits[0])
        for states, own in zip(found.hidden_states, expected.hidden_states, strict=True):
            assert torch.equal(states[row], own[0, -4:])


@pytest.mark.parametrize("whole", [False, True])
@torch.inference_mode()
def test_columns_that_join_on_the_way_change_no_bit(whole: bool) -> None:
    """Nor does it, later, that hidden states were once asked for."""
    torch.manual_seed(3)
    target = HFTarget(played("llama", whole), rows=1, max_length=64)
    text = torch.randint(0, 101, (12,)).tolist()
    target.admit(PromptInputs(text))
    plan = ScoreInputs([text], torch.tensor([[4, 5, 6]]), Tree.uniform([0, 1, 2], rows=1))
    alone = target.score(plan).logits
    parents, embedded = torch.tensor([[3, 4]]), torch.randn(1, 2, 256)
    made = AuxTokens(parents, entry_layer=1, made=lambda states: states[:, -2:])
    for aux_tokens in (
        made,
        *(AuxTokens(parents, embeddings=embedded, entry_layer=at) for at in (0, 1)),
    ):
        for layers in (frozenset[int](), frozenset({0, -1})):
            scores = target.score(replace(plan, aux_tokens=aux_tokens, layers=layers))
            assert torch.equal(scores.logits, alone)
            assert not torch.equal(scores.aux_logits[:, 0], scores.aux_logits[:, 1])
    assert torch.equal(target.score(plan).logits, alone)


@torch.inference_mode()
def test_copies_and_pickles_compute_the_same() -> None:
    model = played("qwen2")
    tokens = torch.randint(0, 101, (1, 9))

    def logits(which: Any) -> Tensor:
        runner = Runner(which, rows=1, max_length=64)
        runner.admit(1)
        found: Tensor = runner.forward(tokens, keep=9).logits
        return found

    expected = logits(model)
    again = copy.deepcopy(model)
    read = pickle.loads(pickle.dumps(model))
    del model
    for which in (again, read):
        assert torch.equal(logits(which), expected)
        assert isinstance(which.lm_head, NativeBlockLinear)


@torch.inference_mode()
def test_what_is_saved_are_the_dequantized_weights() -> None:
    plain, ours = made("llama"), played("llama")
    expected, found = plain.state_dict(), ours.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    LlamaForCausalLM(LlamaConfig(**SIZES)).load_state_dict(found)


def test_gradients_still_flow() -> None:
    layer = NativeBlockLinear(library(), random_blocks("Q4_K", 32, 256))
    x = torch.randn(2, 256, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(2, -1))


@torch.inference_mode()
def test_a_pass_that_hands_out_states_has_the_same_bits() -> None:
    runner = Runner(played("llama"), rows=1, max_length=64)
    runner.admit(1)
    tokens = torch.randint(0, 101, (1, 12), generator=torch.Generator().manual_seed(3))
    found = []
    for asked in ({}, {"output_hidden_states": True}, {}):
        runner.lengths = [0]
        found.append(runner.forward(tokens, keep=5, **asked).logits)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def drafts_change_no_word(path: Path, config: dict[str, Any]) -> None:
    """Asserts that a file's model writes with drafts what it writes without."""
    prompts, llm = [[5, 6, 7, 5, 6, 7, 5], [9, 9, 9]], LLM(path, speculative_config=config)
    params = {"temperature": 0, "max_tokens": 40}
    drafted, plain = (
        [out.token_ids for out in llm.generate(prompts, {**params, **more})]
        for more in ({}, {"speculative": "off"})
    )
    assert drafted == plain
